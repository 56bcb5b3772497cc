"""The paragraph for a paper: complete, and true when it is read back."""

from __future__ import annotations

import re

import pytest

import dpmf
from dpmf.accountants.monte_carlo import MonteCarlo


def mechanism(batching: object) -> dpmf.Mechanism:
    return dpmf.Mechanism(dpmf.strategies.dpsgd(), batching)  # type: ignore[arg-type]


FIXED = mechanism(dpmf.BallsInBins(2, 3))


def test_numbers_read_back_are_true() -> None:
    bound = dpmf.calibrate(FIXED, target_epsilon=1.2345678, target_delta=1e-5, accountant="gaussian")
    curve = dpmf.tradeoff(FIXED, noise_multiplier=bound.noise_multiplier, accountant="gaussian")
    text = str(dpmf.statement(FIXED, bound, curve))
    sigma = float(re.search(r"noise multiplier ([\d.]+) ", text).group(1))  # type: ignore[union-attr]
    epsilon, delta = map(float, re.search(r"\(([\d.]+), ([\de.-]+)\)-diff", text).groups())  # type: ignore[union-attr]
    assert dpmf.delta(FIXED, noise_multiplier=sigma, epsilon=epsilon, accountant="gaussian").delta <= delta == 1e-5
    assert sigma >= bound.noise_multiplier
    assert epsilon >= 1.2345678
    for word in ("DP-SGD", "6 iterations", "clipping norm 1", "added or removed", "'gaussian'", dpmf.__version__):
        assert word in text
    assert "keeps it over all 2 epochs (balls in bins)" in text
    rates = re.findall(r"([\d.]+) % at ([\d.]+) %", text)
    assert [float(alpha) for _, alpha in rates] == [0.1, 1, 10]
    for rate, alpha in rates:
        assert float(rate) / 100 >= curve.true_positive_rate(float(alpha) / 100)


@pytest.mark.parametrize(
    ("batching", "words"),
    [
        (dpmf.reshuffled(2, 4), "one of 4 batches uniformly and independently of the others, anew in every epoch"),
        (dpmf.BallsInBins(1, 4), "independently of the others (balls in bins, one epoch)."),
        (dpmf.BallsInBins(3, 1), "Each record takes part in every iteration."),
        (dpmf.BallsInBins(3, 4, rethrow_every=1, stride=4), "Each record takes part every 4 iterations."),
        (dpmf.BallsInBins(4, 4, rethrow_every=2, stride=2), "one of the 2 (of 4) batches of its group"),
        (dpmf.Poisson(2, 4), "in each iteration with probability 1/4, independently"),
        (dpmf.cyclic_poisson(2, 4, 2), "of its group (of 2 groups that take turns) with probability 2/4"),
    ],
)
def test_batchings(batching: object, words: str) -> None:
    composed = mechanism(batching)
    name = "best" if isinstance(batching, dpmf.Poisson) else "gaussian"
    bound = dpmf.epsilon(composed, noise_multiplier=3.0, delta=1e-4, accountant=name, direction="remove")
    text = str(dpmf.statement(composed, bound))
    assert words in text
    where = "the place of one record is left empty" if "group" in text or "every 4" in text else "is added or removed"
    assert f"{where} (for removing it only)" in text
    assert "noise multiplier 3 " in text


def test_what_is_refused() -> None:
    estimate = dpmf.epsilon(FIXED, noise_multiplier=1.0, delta=0.01, accountant=MonteCarlo(samples=100))
    with pytest.raises(ValueError, match="bound must be a guarantee, not an estimate"):
        dpmf.statement(FIXED, estimate)
    bound = dpmf.epsilon(FIXED, noise_multiplier=1.0, delta=0.01, accountant="gaussian")
    with pytest.raises(ValueError, match="mechanism must be"):
        dpmf.statement("dpsgd", bound)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tradeoff must be at the noise multiplier 1"):
        dpmf.statement(FIXED, bound, dpmf.tradeoff(FIXED, noise_multiplier=2.0, accountant="gaussian"))
