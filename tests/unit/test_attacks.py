"""The trade-off curve against closed forms, sampled attacks and brute force."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import knobs
import numpy as np
import pytest
from scipy.stats import norm

import dpmf
from dpmf import attacks, cli
from dpmf.accountants.renyi import Renyi

ALPHAS = (1e-6, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999)


def gaussian_mechanism(epochs: int) -> dpmf.Mechanism:
    return dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(epochs, 1))


SUBSAMPLED = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(2, 5))


# --- closed forms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "sigma"), [(1, 1.0), (10, 2.0), (4, 0.5), (100, 1e4)])
@pytest.mark.parametrize("direction", ["both", "remove", "add"])
def test_one_bin_is_the_gaussian_mechanism(epochs: int, sigma: float, direction: str) -> None:
    found = dpmf.tradeoff(gaussian_mechanism(epochs), noise_multiplier=sigma, direction=direction)
    mu = math.sqrt(epochs) / sigma
    assert mu * (1 - 1e-6) <= found.mu <= mu * (1 + 1e-12)
    assert max(attacks._gaussian(lines, found.slack) for lines in found.lines.values()) <= 1.005 * mu
    for alpha in ALPHAS:
        exact = norm.cdf(norm.ppf(alpha) + mu)
        assert exact <= found.true_positive_rate(alpha) <= exact + 0.002 * mu * norm.pdf(norm.ppf(alpha) + mu) + 1e-9
        assert found.type_two_error(alpha) <= 1 - exact
    exact = {
        delta: dpmf.epsilon(gaussian_mechanism(epochs), noise_multiplier=sigma, delta=delta) for delta in (1e-5, 1e-8)
    }
    for delta, bound in exact.items():
        assert bound.epsilon * (1 - 2e-4) <= found.epsilon(delta) <= 1.004 * bound.epsilon
        assert found.epsilons[delta] == found.epsilon(delta)


def test_rates_at_the_ends() -> None:
    found = dpmf.tradeoff(gaussian_mechanism(1), noise_multiplier=1.0)
    assert 0 < found.true_positive_rate(0.0) <= 1e-9
    assert found.true_positive_rate(1.0) == 1
    assert found.epsilon(1e-16) == math.inf  # no point reaches that far
    nothing = dpmf.tradeoff(gaussian_mechanism(1), noise_multiplier=1e-3)
    assert nothing.true_positive_rate(0.001) == 1
    assert nothing.mu == nothing.largest_mu


def test_without_slack_only_the_mechanism_without_amplification_is_gaussian() -> None:
    found = dpmf.tradeoff(SUBSAMPLED, noise_multiplier=2.0, accountant="lattice", slack=0.0)
    assert found.mu == found.largest_mu == pytest.approx(math.sqrt(2) / 2)
    assert dpmf.tradeoff(SUBSAMPLED, noise_multiplier=2.0, accountant="lattice").mu < 0.9 * found.mu


def test_renyi_divergences_of_a_gaussian_mechanism() -> None:
    found = dpmf.tradeoff(gaussian_mechanism(4), noise_multiplier=3.0, renyi=True)
    assert found.renyi == pytest.approx({order: order * 4 / 9 / 2 for order in attacks.ORDERS})
    rethrown = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.reshuffled(2, 4))
    assert dpmf.tradeoff(rethrown, noise_multiplier=2.0, renyi=True).renyi == {}


def test_the_renyi_curve_is_that_of_the_dynamic_program() -> None:
    orders = (2, 3, 5)
    curve = Renyi().curve(SUBSAMPLED, 1.0, orders, "remove")
    divergences = Renyi().divergences(SUBSAMPLED, 1.0, 5)
    assert curve == pytest.approx({order: min(divergences[order - 2], order) for order in orders})
    # E_Q (P/Q)² for a mixture of five Gaussians whose means are orthogonal and have the squared norm 2
    assert curve[2] == pytest.approx(math.log((4 + math.exp(2)) / 5))
    few = Renyi(max_order=3).curve(SUBSAMPLED, 1.0, orders, "remove")
    assert few[5] >= curve[5]


# --- attacks -----------------------------------------------------------------------------------------------------


def sampled_losses(mechanism: dpmf.Mechanism, sigma: float, samples: int, member: bool) -> np.ndarray:
    """log P/Q at outputs of the mechanism with or without the record, by plain sampling in b dimensions."""
    rng = np.random.default_rng(7 + member)
    gram = mechanism.gram / sigma**2
    noise = rng.multivariate_normal(np.zeros(len(gram)), gram, size=samples, method="eigh")
    if member:
        noise += gram[rng.integers(len(gram), size=samples)]
    return np.log(np.mean(np.exp(noise - np.diagonal(gram) / 2), axis=1))


@pytest.mark.parametrize(
    ("mechanism", "accountant"),
    [(SUBSAMPLED, "lattice"), (dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(2, 4)), "chain")],
)
def test_no_sampled_attack_crosses_the_curve(mechanism: dpmf.Mechanism, accountant: str) -> None:
    """The likelihood-ratio test is the best attack there is: it stays below the curve, and comes close to it."""
    sigma, samples = 1.2, 200_000
    present, absent = (sampled_losses(mechanism, sigma, samples, member) for member in (True, False))
    found = dpmf.tradeoff(mechanism, noise_multiplier=sigma, accountant=accountant)
    closest = math.inf
    for threshold in np.quantile(absent, [0.02, 0.2, 0.5, 0.8, 0.95, 0.99, 0.999]):
        for way, null, other in (("remove", absent, present), ("add", -present, -absent)):
            at = threshold if way == "remove" else -threshold
            alpha, rate = float(np.mean(null > at)), float(np.mean(other > at))
            error = 5 * math.sqrt(1 / samples)
            curve = found.lines[way]
            allowed = curve.least(min(1.0, alpha + error * math.sqrt(alpha)))
            assert rate <= allowed + error * math.sqrt(min(rate, 1 - rate)) + 1e-9
            assert found.true_positive_rate(alpha) >= curve.least(alpha)
            closest = min(closest, curve.least(alpha) / max(rate, 1e-9))
    assert closest < 1.02


@pytest.mark.parametrize("slack", [0.0, 1e-9, 1e-3])
def test_mu_holds_between_the_corners(slack: float) -> None:
    """On a dense grid the curve stays below the Gaussian one, and a smaller μ would not do."""
    found = dpmf.tradeoff(SUBSAMPLED, noise_multiplier=1.0, accountant="lattice", slack=slack)
    alphas = np.concatenate((np.geomspace(1e-12, 0.5, 3000), 1 - np.geomspace(1e-12, 0.5, 1000)))
    rates = np.array([found.true_positive_rate(float(alpha)) for alpha in alphas])
    if slack:
        assert np.all(rates <= norm.cdf(norm.ppf(alphas) + found.mu) + slack + 1e-14)
        assert np.any(rates > norm.cdf(norm.ppf(alphas) + 0.99 * found.mu) + slack)


def test_corners_bound_the_least_of_random_lines() -> None:
    rng = np.random.default_rng(1)
    for count in (1, 2, 5, 40):
        slopes = np.append(np.sort(rng.exponential(3.0, count))[::-1], 0.0)
        lines = attacks.Lines(slopes, np.append(rng.uniform(0, 1, count), 1.0))
        alphas, rates = lines.corners()
        assert alphas[0] == 0
        assert alphas[-1] == 1
        assert np.all(np.diff(alphas) >= 0)
        for alpha in rng.uniform(0, 1, 200):
            least = min(1.0, float(np.min(lines.intercepts + slopes * alpha)))
            assert least <= np.interp(alpha, alphas, rates) * (1 + 1e-14)
            assert np.interp(alpha, alphas, rates) == pytest.approx(least)


def test_curves_hold_for_other_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for change, tuning in knobs.perturbed(attacks._TUNING):
        monkeypatch.setattr(attacks, "_TUNING", tuning)
        found = dpmf.tradeoff(gaussian_mechanism(1), noise_multiplier=1.0)
        for alpha in ALPHAS:
            assert found.true_positive_rate(alpha) >= norm.cdf(norm.ppf(alpha) + 1), change
        assert found.mu >= 1 - 1e-6, change


# --- other batchings, calibration --------------------------------------------------------------------------------


def test_batchings_that_are_composed() -> None:
    sigma = 2.0
    for batching in (dpmf.reshuffled(2, 4), dpmf.Poisson(2, 4)):
        mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), batching)
        name = "best" if isinstance(batching, dpmf.Poisson) else "lattice"
        found = dpmf.tradeoff(mechanism, noise_multiplier=sigma, accountant=name)
        bound = dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=1e-5, accountant=name)
        assert found.epsilon(1e-5) == pytest.approx(bound.epsilon, rel=0.01)
        assert 0.01 < found.true_positive_rate(0.01) < 0.2


def test_calibration_to_mu_and_to_an_attack() -> None:
    mechanism = gaussian_mechanism(4)
    found = dpmf.calibrate_to_mu(mechanism, target_mu=2.0)
    assert found.mu <= 2.0
    assert 1.0 * (1 - 1e-6) <= found.noise_multiplier <= 1.003
    rate = float(norm.cdf(norm.ppf(0.01) + 2.0))
    found = dpmf.calibrate_to_attack(mechanism, true_positive_rate=rate, false_positive_rate=0.01)
    assert found.true_positive_rate(0.01) <= rate
    assert 1.0 <= found.noise_multiplier <= 1.005
    amplified = dpmf.calibrate_to_attack(
        SUBSAMPLED, true_positive_rate=0.02, false_positive_rate=0.007, accountant="lattice", relative_tolerance=0.01
    )
    assert amplified.attacks[0.007] <= 0.02
    less = dpmf.tradeoff(SUBSAMPLED, noise_multiplier=0.97 * amplified.noise_multiplier, accountant="lattice")
    assert less.true_positive_rate(0.007) > 0.02


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda: dpmf.tradeoff("dpsgd", noise_multiplier=1.0), "mechanism must be a dpmf.Mechanism"),
        (lambda: dpmf.tradeoff(SUBSAMPLED, noise_multiplier=0.0), "noise_multiplier must be positive"),
        (lambda: dpmf.tradeoff(SUBSAMPLED, noise_multiplier=1.0, slack=-1.0), "slack must be non-negative"),
        (lambda: dpmf.tradeoff(SUBSAMPLED, noise_multiplier=1.0, direction="up"), "direction must be one of"),
        (lambda: dpmf.tradeoff(SUBSAMPLED, noise_multiplier=1.0, accountant="monte-carlo"), "accountant must be"),
        (lambda: dpmf.calibrate_to_mu(SUBSAMPLED, target_mu=-1.0), "target_mu must be positive"),
        (
            lambda: dpmf.calibrate_to_attack(SUBSAMPLED, true_positive_rate=0.1, false_positive_rate=0.2),
            "true_positive_rate must exceed",
        ),
    ],
)  # fmt: skip
def test_bad_arguments(ask: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ask()  # type: ignore[operator]


# --- the command line --------------------------------------------------------------------------------------------

WORDS = ["tradeoff", "--strategy", "dpsgd", "--epochs", "4", "--batches-per-epoch", "1"]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dpmf", *WORDS, *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    status, out, _ = run(monkeypatch, capsys, "--mu", "2", "--output", str(path))
    assert status == 0
    assert "2-Gaussian differentially private up to 1e-09" in out
    assert path.read_text().startswith("direction,false_positive_rate,true_positive_rate\nremove,0.0,")
    status, out, _ = run(
        monkeypatch, capsys, "--true-positive-rate", "0.3", "--false-positive-rate", "0.02", "--json",
        "--tuning-runs", "5", "--tuning-shape", "1",
    )  # fmt: skip
    answer = json.loads(out)
    assert status == 0
    assert answer["true_positive_rates"]["0.02"] <= 0.3
    assert "proved upper bound" in answer["statement"]
    assert answer["tuned"]["base_epsilon"] < answer["tuned"]["epsilon"]
    assert answer["tuned"]["shape"] == "geometric"
    for name in ("curve.json", "curve.svg"):
        assert run(monkeypatch, capsys, "--epsilon", "2", "--delta", "1e-6", "-o", str(tmp_path / name))[0] == 0
        assert (tmp_path / name).stat().st_size > 100
    for words, complaint in (
        ([], "--noise-multiplier must be given, or one target"),
        (["--mu", "1", "--noise-multiplier", "1"], "or one target"),
        (["--true-positive-rate", "0.5"], "or one target"),
        (["--epsilon", "1"], "--delta must be given with --epsilon"),
        (["--mu", "-1"], "--mu must be positive"),
    ):
        status, out, err = run(monkeypatch, capsys, *words)
        assert (status, out) == (2, "")
        assert complaint in err
        assert err.count("\n") == 1
