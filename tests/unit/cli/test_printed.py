"""What people read is a guarantee: printed upper bounds are not below the bound, lower bounds not above it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from paths import DOCS, ROOT
from scipy.stats import norm

import dpmf
from dpmf import report, verification
from dpmf.results import PrivacyProfile
from dpmf.web.pictures import drawn
from dpmf.web.request import Request
from dpmf.web.view import Row, View

# Lower bounds are beside what is asked for here.
pytestmark = pytest.mark.usefixtures("coarse_lower_bounds")

SMALL = ["--strategy", "bsr", "--bandwidth", "2", "--epochs", "2", "--batches-per-epoch", "5"]
NUMBER = r"[\d.]+(?:e[-+]\d+)?"


def cells(text: str) -> dict[str, str]:
    """The rows of a table without a header, by their first column."""
    return {row[0].strip(): row[1].strip() for row in re.findall(r"│([^│]+)│([^│]+)│", text)}


def test_the_printed_delta_of_the_gaussian_mechanism_is_not_below_the_truth() -> None:
    """This printed 0.0961455, and the truth is larger."""
    question = ("delta", "--strategy", "dpsgd", "--epochs", "1", "--batches-per-epoch", "1")
    table = cells(run(*question, "--noise-multiplier", "1.1", "--epsilon", "1").stdout)
    truth = norm.cdf(0.5 / 1.1 - 1.1) - np.e * norm.cdf(-0.5 / 1.1 - 1.1)
    assert truth == pytest.approx(0.09614553598, rel=1e-9)
    assert truth <= float(table["δ"]) < truth + 2e-7
    assert float(table["lower bound"]) <= truth
    assert f"(1, {table['δ']})-DP" in table["guarantee"]
    assert table["noise multiplier"] == "1.1"


@pytest.mark.parametrize(
    ("question", "field", "row"),
    [
        (("calibrate", "--epsilon", "1.2345678", "--delta", "1.2345678e-05"), "noise_multiplier", "noise multiplier"),
        (("epsilon", "--noise-multiplier", "2.3456789", "--delta", "1.2345678e-05"), "epsilon", "ε"),
        (("delta", "--noise-multiplier", "2.3456789", "--epsilon", "1.2345678"), "delta", "δ"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_answers(question: tuple[str, ...], field: str, row: str) -> None:
    command = [question[0], *SMALL, *question[1:], "--accountant", "renyi"]
    found = json.loads(run(*command, "--json").stdout)
    table = cells(run(*command).stdout)
    assert found[field] <= float(table[row]) <= found[field] * (1 + 1e-5)
    assert found["lower"] * (1 - 1e-5) <= float(table["lower bound"]) <= found["lower"]
    for given in question[2::2]:  # what was given is shown in full
        assert any(given in cell for cell in table.values())
    epsilon, delta = map(float, re.search(rf"\(({NUMBER}), ({NUMBER})\)-DP", table["guarantee"]).groups())
    assert epsilon >= found["epsilon"]
    assert delta >= found["delta"]
    for one_way, how in found["details"].items():
        (printed,) = [cell for name, cell in table.items() if name.endswith(f", {one_way}")]
        assert float(printed.split()[0]) >= how["value"]


def test_comparisons() -> None:
    command = ["compare", *SMALL, "--delta", "1e-5", "--epsilon", "1.25,4", "--accountant", "renyi,gaussian"]
    found = json.loads(run(*command, "--json").stdout)
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in run(*command).stdout.splitlines() if "│" in line]
    printed = {(name, float(r[0])): float(r[k]) for r in rows[:2] for k, name in ((1, "renyi"), (2, "gaussian"))}
    for cell in found["cells"]:
        sigma = printed[cell["accountant"], cell["epsilon"]]
        assert cell["noise_multiplier"] <= sigma <= cell["noise_multiplier"] * (1 + 1e-4)


@pytest.fixture(scope="module")
def mechanism() -> dpmf.Mechanism:
    return dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(2, 5))


def test_results_in_one_line(mechanism: dpmf.Mechanism) -> None:
    options = {"accountant": "renyi", "with_lower": True}
    sigma = 2.3456789012345
    answers = (
        dpmf.calibrate(mechanism, target_epsilon=1.0, target_delta=1e-5, **options),
        dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=1e-5, **options),
        dpmf.delta(mechanism, noise_multiplier=sigma, epsilon=1.0, **options),
        dpmf.calibrate(mechanism, target_epsilon=1.0, target_delta=1e-3, accountant="monte-carlo"),
    )
    form = rf"\(({NUMBER}), ({NUMBER})\)-DP at noise multiplier ({NUMBER})(?:, lower bound ({NUMBER}))?"
    for found in answers:
        epsilon, delta, noise, lower = re.search(form, str(found)).groups()
        assert found.epsilon <= float(epsilon)
        assert found.delta <= float(delta)
        assert found.noise_multiplier <= float(noise)
        assert (lower is None) == (found.lower is None)
        assert lower is None or found.lower * (1 - 1e-5) <= float(lower) <= found.lower
    assert all(str(sigma) in str(found) for found in answers[1:3])


def test_profiles(mechanism: dpmf.Mechanism) -> None:
    found = dpmf.profile(mechanism, noise_multiplier=2.0, epsilons=[0.5, 1.0], accountant="renyi", with_lower=True)
    lines = re.findall(rf"δ\(({NUMBER})\) ≤ ({NUMBER}), lower bound ({NUMBER})", str(found))
    assert repr(found) == str(found)
    assert [float(line[0]) for line in lines] == [0.5, 1.0]
    for (_, above, below), delta, lower in zip(lines, found.deltas, found.lower, strict=True):
        assert delta <= float(above)
        assert float(below) <= lower
    sampled = PrivacyProfile(
        noise_multiplier=2.0, epsilons=np.array([1.0]), deltas=np.array([0.1]), by_direction={}, direction="both",
        accountant="monte-carlo", kind="estimate",
    )  # fmt: skip
    assert "δ(1) ≈ 0.1" in str(sampled)


def test_verification(mechanism: dpmf.Mechanism) -> None:
    found = verification.verify(mechanism, epsilon=1.0, delta=1e-3, accountants=["renyi", "gaussian"], samples=1000)
    page = found.to_markdown()
    assert f"| noise multiplier | {found.noise_multiplier!r} (calibrated)" in page
    for bound in found.bounds:
        printed = re.findall(rf"\| {bound.accountant} \(upper bound\) \| ({NUMBER})", page)
        assert any(bound.delta <= float(text) <= bound.delta * (1 + 1e-4) for text in printed)
    for lower in found.lower.values():
        printed = re.findall(rf"\| lower bound \| ({NUMBER})", page)
        assert any(lower * (1 - 1e-4) <= float(text) <= lower for text in printed)


def test_curves_say_at_which_noise_multiplier_they_are() -> None:
    view = View("m", 1.0, 1e-5, "both", (Row("renyi", 1.23456789),), curves={}, curve_noise=1.23456789, batches=1)
    assert "σ = 1.23457" in drawn(view)["curves"]
    chosen = View("m", 1.0, 1e-5, "both", (Row("renyi", 3.0),), curves={}, curve_noise=1.23456789, batches=1)
    assert "σ = 1.23456789" in drawn(chosen)["curves"]


def test_files_hold_full_doubles(tmp_path: Path) -> None:
    request = Request("dpsgd", 1, 5, 1.0, 1e-5)
    found = dpmf.profile(request.mechanism(), noise_multiplier=1.0, epsilons=[0.3])
    path = tmp_path / "p.csv"
    question = ("--strategy", "dpsgd", "--epochs", "1", "--batches-per-epoch", "5", "--noise-multiplier", "1")
    assert run("profile", *question, "--epsilon", "0.3", "--output", str(path)).returncode == 0
    assert float(path.read_text().splitlines()[1].split(",")[1]) == found.deltas[0]


def test_no_page_or_example_rounds_a_guarantee_to_the_nearest_number() -> None:
    """Half of the numbers that Python's own formats print are below the bound."""
    files = [*DOCS.rglob("*.md"), *(ROOT / "examples").glob("*.py"), ROOT / "README.md"]
    rounded = r"\{[^{}]*(?<!\[)\b(?:get_epsilon|epsilon|noise_multiplier|sigma|delta)\b[^{}]*:\.\d+[efg]\}"
    assert len(files) > 30
    for file in files:
        assert not re.search(rounded, file.read_text()), file


def test_a_comparison_of_many_accountants_cuts_no_number_short(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"accountant-{i}" for i in range(9)]
    cells = tuple(report.Cell(name, e, 1.2345678 * e, 0.1, "bound", None) for name in names for e in (1.0, 8.0))
    for few in (names[:2], names):
        report.print_comparison(report.Comparison("m", 1e-5, "both", (1.0, 8.0), tuple(few), cells, True))
        shown = capsys.readouterr().out
        assert "…" not in shown
        assert shown.count("1.2346") == shown.count("9.8766") == len(few)
        assert all(name in shown for name in few)
