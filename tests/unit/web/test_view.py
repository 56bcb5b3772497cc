"""The view behind the page and the report, and the lines that reproduce it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dpmf
from dpmf import cli
from dpmf import lower_bounds as lower
from dpmf.report import new_figure
from dpmf.web import pictures, recipe
from dpmf.web.request import Request
from dpmf.web.view import View, views

pytestmark = pytest.mark.usefixtures("coarse_lower_bounds")


def last_view(request: Request, **options: object) -> View:
    *_, last = views(request.mechanism(), request, **options)
    return last


def test_a_view_has_the_numbers_of_the_api() -> None:
    request = Request("coefficients", 2, 10, 2.0, 1e-5, coefficients=(1.0, 0.5))
    mechanism = request.mechanism()
    view = last_view(request, accountants=("gaussian", "renyi", "lattice"))
    for row in view.rows[:2]:
        again = dpmf.calibrate(mechanism, target_epsilon=2.0, target_delta=1e-5, accountant=row.accountant)
        assert row.noise_multiplier == again.noise_multiplier
        curve = dpmf.profile(
            mechanism, noise_multiplier=view.curve_noise, epsilons=view.epsilons, accountant=row.accountant
        )
        assert view.curves[row.accountant] == pytest.approx(tuple(curve.deltas), rel=1e-9)
    assert view.rows[2].noise_multiplier is None
    assert "uncorrelated" in view.rows[2].problem
    assert view.best.accountant == "renyi"
    assert view.curve_noise == view.best.noise_multiplier
    assert view.lower == lower.lower_noise_multiplier(mechanism, 2.0, 1e-5)
    assert view.lower < view.best.noise_multiplier
    for i, epsilon in enumerate(view.epsilons):
        assert view.lower_curve[i] == lower.lower_delta(mechanism, view.curve_noise, epsilon)
        assert view.lower_curve[i] <= min(curve[i] for curve in view.curves.values())
    np.testing.assert_array_equal(view.gram, mechanism.gram)
    assert view.complete
    assert View.from_dict(json.loads(json.dumps(view.to_dict()))) == view


def test_views_grow_and_say_what_is_next() -> None:
    request = Request("dpsgd", 1, 10, 2.0, 1e-5, noise_multiplier=2.0)
    grown = list(views(request.mechanism(), request, accountants=("gaussian", "lattice")))
    assert [v.done for v in grown] == sorted(v.done for v in grown)
    assert all(v.doing and not v.complete and v.done < v.steps for v in grown[:-1])
    assert grown[-1].complete
    assert grown[-1].done == grown[-1].steps
    assert grown[-1].curve_noise == 2.0


def test_drawings_come_after_the_first_number_and_the_gram_matrix_is_drawn_once(monkeypatch) -> None:
    request = Request("bsr", 1, 5, 2.0, 1e-5, bandwidth=2)
    grown = list(views(request.mechanism(), request, accountants=("gaussian", "renyi")))
    made = []
    monkeypatch.setattr(pictures, "new_figure", lambda panels: made.append(panels) or new_figure(panels))
    shown = list(pictures.illustrated(grown))
    first = next(i for i, (view, _) in enumerate(shown) if view.best is not None)
    assert all(drawings == {} for _, drawings in shown[: first + 1])
    assert shown[first + 1][0] is shown[first][0]
    assert shown[first + 1][1] == pictures.drawn(shown[first][0])
    assert [view for i, (view, _) in enumerate(shown) if i != first] == grown
    assert shown[-1][1].keys() == {"curves", "gram"}
    with_curves = sum("curves" in drawings for _, drawings in shown)
    assert len(made) <= with_curves + 1


def test_accountants_that_do_not_apply_have_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmf.web.view.compared", lambda mechanism: ["gaussian", "lattice"])
    request = Request("bsr", 1, 4, 2.0, 1e-5, bandwidth=2)
    assert [row.accountant for row in last_view(request).rows] == ["gaussian"]
    asked_for = last_view(request, accountants=("gaussian", "lattice"))
    assert [bool(row.problem) for row in asked_for.rows] == [False, True]


def test_what_any_attack_can_achieve_is_shown() -> None:
    """One batch: the Gaussian mechanism, whose μ is √k/σ."""
    request = Request("dpsgd", 4, 1, 2.0, 1e-5, noise_multiplier=2.0)
    view = last_view(request, accountants=("gaussian",), with_attacks=True)
    assert float(dict(view.attacks)["μ (Gaussian DP, up to 1e-09)"]) == pytest.approx(1.0, rel=2e-3)
    assert view.tradeoff["remove"][0] >= 1 - 1e-6
    assert list(view.tradeoff["remove"]) == sorted(view.tradeoff["remove"], reverse=True)
    assert View.from_dict(json.loads(json.dumps(view.to_dict()))) == view


def test_a_calibration_that_ran_out_of_time_says_so() -> None:
    request = Request("bsr", 1, 4, 2.0, 1e-5, bandwidth=2)
    view = last_view(request, accountants=("renyi", "chain"), time_budget=1e-9)
    closed = dpmf.calibrate(request.mechanism(), target_epsilon=2.0, target_delta=1e-5, accountant="gaussian")
    for row in view.rows:
        assert row.noise_multiplier <= closed.noise_multiplier * 1.001
        assert "time ran out" in row.note
    assert all(row.note == "" for row in last_view(request, accountants=("gaussian",), time_budget=60.0).rows)


def test_a_large_gram_matrix_is_shown_by_blocks() -> None:
    request = Request("bsr", 1, 300, 2.0, 1e-5, bandwidth=8)
    mechanism = request.mechanism()
    view = next(v for v in views(mechanism, request) if v.gram)
    assert np.shape(view.gram) == (128, 128)
    assert view.batches == 300
    assert np.max(view.gram) == mechanism.gram.max()
    assert np.min(view.gram) == 0


@pytest.mark.parametrize(
    "request_",
    [
        Request("coefficients", 2, 6, 2.0, 1e-5, coefficients=(1.0, 0.25), max_order=16),
        Request(
            "power", 1, 12, 2.0, 1e-5, bandwidth=3, decay=0.9, exponent=0.5, direction="remove", noise_multiplier=3.0
        ),
    ],
    ids=["coefficients", "power"],
)
def test_the_lines_given_reproduce_the_view(request_: Request, tmp_path: Path, monkeypatch, capsys) -> None:
    names = ("gaussian", "renyi")
    view = last_view(request_, accountants=names)
    exec(compile(recipe.python(request_, names, view.curve_noise), "recipe", "exec"), {})
    printed = capsys.readouterr().out
    for row in view.rows:
        assert str(row.noise_multiplier) in printed
    assert str(view.lower) in printed
    *before, compare, _ = recipe.shell(request_, names).splitlines()  # test_document.py runs the last line, the report
    subprocess.run(["bash", "-c", "\n".join(before)], check=True, cwd=tmp_path, timeout=60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*shlex.split(compare), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    cells = {c["accountant"]: c["noise_multiplier"] for c in json.loads(capsys.readouterr().out)["cells"]}
    assert cells == {row.accountant: row.noise_multiplier for row in view.rows}


def test_the_noise_in_the_model_is_shown_beside_independent_noise() -> None:
    request = Request("bsr", 2, 10, 2.0, 1e-5, bandwidth=2)
    *_, last = views(request.mechanism(), request, ["gaussian"])
    found = {name: (error, relative) for name, error, relative in last.errors}
    assert set(found) == {"prefix sums", "damped sums, memory 100"}
    direct = dpmf.error(request.mechanism(), last.best.noise_multiplier, dpmf.workloads.prefix()).root_mean_square
    assert found["prefix sums"][0] == direct
    assert all(relative > 0 for _, relative in found.values())
    assert View.from_dict(last.to_dict()) == last
