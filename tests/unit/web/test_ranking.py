"""Designs ranked by error for the first tab of the page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import dpmf
from dpmf.designs import design
from dpmf.web import ranking
from dpmf.web.ranking import DesignRequest, Ranking, memory_in_words, parse_design, rankings

GOOD = {"dataset_size": "40", "batch_size": "10", "epochs": "2", "epsilon": "4", "delta": "1e-5", "memory": "100"}


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("dataset_size", "many", "a whole number from 1"),
        ("batch_size", "41", "at most the dataset size"),
        ("dataset_size", "1000000", "at least 500 on this page"),
        ("epochs", "0", "from 1 to 1000"),
        ("epsilon", "nan", "from 0.01 to 50"),
        ("delta", "1", "from 1e-15 to 0.5"),
        ("memory", "0", "from 1 to 1e+06"),
        ("copies", "-1", "from 0 to 1000"),
    ],
)
def test_whatever_is_wrong_is_said_at_a_field(field: str, text: str, words: str) -> None:
    request, problems = parse_design({**GOOD, field: text})
    assert request is None
    ((_, said),) = problems.items()
    assert words in said
    assert "\n" not in said


def test_the_run_is_bounded() -> None:
    assert "at most" in parse_design({**GOOD, "dataset_size": "20000", "epochs": "1000"})[1]["epochs"]


def test_dp_sgd_comes_first_and_is_the_baseline(cache_dir) -> None:
    request, problems = parse_design(GOOD)
    assert problems == {}
    assert request == DesignRequest(40, 10, 2, 4.0, 1e-5, memory=100.0)
    assert DesignRequest.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    grown = list(rankings(request, rounds=()))
    assert [r.done for r in grown] == sorted(r.done for r in grown)
    assert grown[0].rows == ()
    first = next(r for r in grown if r.rows)  # DP-SGD with one batching is shown before the next one is asked
    assert len(first.rows) == 1
    assert not first.complete
    last = grown[-1]
    assert last.complete
    assert all(row.certified and row.strategy == "DP-SGD" for row in last.rows)
    assert len(last.rows) == 3
    assert [row.error for row in last.rows] == sorted(row.error for row in last.rows)
    assert [row.baseline for row in last.rows] == [True, False, False]
    assert last.rows[0].relative == 1.0
    again = design(epochs=2, batches_per_epoch=4, target_epsilon=4.0, target_delta=1e-5, batchings=["fixed"],
                   bandwidths=[1], workload=dpmf.workloads.damped(100.0), time_budget=30.0)  # fmt: skip
    assert again.best.noise_multiplier in [row.noise_multiplier for row in last.rows]
    assert "make_private(" in last.code
    assert Ranking.from_dict(json.loads(json.dumps(last.to_dict()))) == last


def test_a_guarantee_is_not_replaced_by_an_estimate_or_a_worse_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = design(epochs=1, batches_per_epoch=4, target_epsilon=4.0, target_delta=1e-5, bandwidths=[1],
                   batchings=["fixed"])  # fmt: skip
    sigma = found.best.noise_multiplier
    answers = iter([
        replace(found, best=replace(found.best, noise_multiplier=sigma, certified=True), complete=False),
        replace(found, best=replace(found.best, noise_multiplier=sigma / 2, certified=False), complete=False),
        replace(found, best=replace(found.best, noise_multiplier=2 * sigma, certified=True), complete=True),
    ])  # fmt: skip
    monkeypatch.setattr(ranking, "_followed", lambda request, options: iter([next(answers)]))
    *_, last = rankings(DesignRequest(40, 10, 1, 4.0, 1e-5), rounds=(1.0,))
    assert [row.noise_multiplier for row in last.rows] == [sigma]
    assert last.finished


def test_a_kind_that_cannot_be_certified_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise dpmf.CalibrationError("no mechanism got a guaranteed noise multiplier in the time given")

    monkeypatch.setattr(ranking, "design", refuse)
    *_, last = rankings(DesignRequest(40, 10, 1, 4.0, 1e-5), rounds=(1.0,))
    assert last.complete
    assert last.rows == ()


def test_memory_is_said_in_copies_and_bytes() -> None:
    assert memory_in_words(0, 10**6) == "nothing"
    assert memory_in_words(1, None) == "1 copy"
    assert memory_in_words(4, 2**20) == "4 copies, 16 MiB"
