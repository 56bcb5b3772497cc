"""`verify`: agreement is reported, a contradiction is found, the page has what a paper needs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import dpmf
from dpmf.accountants import ACCOUNTANTS, Gaussian
from dpmf.accountants.protocol import Evaluation, PreparedAccountant
from dpmf.accountants.registry import suitable
from dpmf.verification import CheckedBound, Sampled, contradictions, verify

SMALL = ["--strategy", "bsr", "--bandwidth", "2", "--epochs", "2", "--batches-per-epoch", "4"]
QUICK = ["--accountant", "gaussian,renyi", "--samples", "20000"]


@pytest.fixture(scope="module")
def mechanism() -> dpmf.Mechanism:
    return dpmf.Mechanism(dpmf.strategies.bsr(bandwidth=2), dpmf.BallsInBins(epochs=2, batches_per_epoch=4))


def test_every_accountant_says_what_it_rests_on() -> None:
    for name, cls in ACCOUNTANTS.items():
        assert cls.rests_on.strip(), name
        assert "\n" not in cls.rests_on
        assert "|" not in cls.rests_on


def test_by_default_all_deterministic_accountants_are_asked(mechanism: dpmf.Mechanism) -> None:
    names = {a.name for a in suitable(mechanism, "bound")}
    assert {"gaussian", "renyi", "conditional", "chain"} <= names
    assert not names & {"best", "auto", "monte-carlo", "lattice"}
    uncorrelated = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 4))
    assert "lattice" in {a.name for a in suitable(uncorrelated, "bound")}


def test_the_numbers_agree(mechanism: dpmf.Mechanism) -> None:
    found = verify(mechanism, epsilon=1.0, delta=1e-3, samples=50_000)
    assert found.calibrated
    assert found.certified
    assert found.consistent
    assert found.delta <= 1e-3
    for way in ("remove", "add"):
        uppers = [b.delta for b in found.bounds if b.direction == way]
        assert len(uppers) >= 4
        (seen,) = [s for s in found.sampled if s.direction == way]
        assert found.lower[way] <= seen.high
        assert seen.low <= min(uppers)
        assert 0 < seen.low < seen.estimate < seen.high
    page = found.to_markdown()
    for part in (
        "Certified",
        "BSR(p=2)",
        found.gram_digest[:32],
        "Kahane",
        "Thm 3.1",
        "seed 0",
        f"dpmf {dpmf.__version__}",
    ):
        assert part in page
    assert len(page.splitlines()) <= 60  # one page
    json.dumps(found.to_dict(), allow_nan=False)


def test_too_little_noise_is_not_certified(mechanism: dpmf.Mechanism) -> None:
    found = verify(
        mechanism, epsilon=1.0, delta=1e-9, noise_multiplier=1.0, accountants=["gaussian", "renyi"], samples=1000
    )
    assert not found.certified
    assert found.consistent
    assert "Not certified" in found.to_markdown()


@dataclass(frozen=True)
class Wishful(Gaussian):
    """An accountant that reports a tenth of the truth."""

    name = "wishful"

    def prepare(self, mechanism: dpmf.Mechanism) -> PreparedAccountant:
        honest = super().prepare(mechanism)

        class Prepared(PreparedAccountant):
            name = "wishful"

            def delta(self, noise_multiplier, epsilon, direction, target_delta=None):
                return Evaluation(0.1 * honest.delta(noise_multiplier, epsilon, direction).value)

        prepared = Prepared()
        prepared.mechanism = mechanism
        return prepared


@pytest.mark.parametrize("b", [1, 4])
def test_an_accountant_that_under_reports_is_found(b: int) -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, b))
    found = verify(
        mechanism, epsilon=0.3, delta=0.5, noise_multiplier=0.5, accountants=["gaussian", Wishful()], samples=20_000
    )
    assert not found.consistent
    assert all(line.startswith("wishful") for line in found.contradictions)
    assert "CONTRADICTION" in found.to_markdown()


@pytest.mark.parametrize(
    ("upper", "below", "interval", "words"),
    [
        (0.2, 0.1, (0.12, 0.18), []),
        (0.2, 0.21, (0.12, 0.3), ["below the certified lower bound"]),
        (0.2, 0.1, (0.21, 0.3), ["below the sampled interval"]),
        (0.2, 0.19, (0.12, 0.18), ["above the sampled interval"]),
        (float("nan"), 0.1, (0.12, 0.18), ["no probability"]),
        (1.5, 0.1, (0.12, 0.18), ["no probability"]),
    ],
)
def test_contradictions(upper: float, below: float, interval: tuple[float, float], words: list[str]) -> None:
    found = contradictions(
        [CheckedBound("a", "add", upper, "", 0.0)], {"add": below}, [Sampled("add", 0.15, 0.01, *interval, 100, 0)]
    )
    assert len(found) == len(words)
    for line, word in zip(found, words, strict=True):
        assert word in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accountants": ["renyi"]}, "accountants must be at least two"),
        ({"accountants": ["renyi", "monte-carlo"]}, "accountants must be deterministic"),
        ({"accountants": ["renyi", "nonsense"]}, "accountant must be one of"),
        ({"direction": "sideways"}, "direction must be one of"),
        ({"delta": 0.0}, "delta must be strictly between 0 and 1"),
        ({"epsilon": -1.0}, "epsilon must be non-negative"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be positive"),
        ({"samples": 0}, "samples must be at least 1"),
    ],
)
def test_bad_arguments(mechanism: dpmf.Mechanism, options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"epsilon": 1.0, "delta": 1e-5, "accountants": ["gaussian", "renyi"], "samples": 100}
    with pytest.raises(ValueError, match=message):
        verify(mechanism, **arguments | options)  # type: ignore[arg-type]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dpmf.cli", "verify", *SMALL, *QUICK, *arguments],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_command(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    enough = run("--epsilon", "1", "--delta", "1e-3", "--noise-multiplier", "9", "-o", str(page))
    assert enough.returncode == 0, enough.stderr
    assert page.read_text().startswith("# Verification of BSR(p=2), k=2, b=4\n\n**Certified**")
    assert "## What any attack can achieve" in page.read_text()
    assert list(tmp_path.iterdir()) == [page]
    little = run("--epsilon", "1", "--delta", "1e-3", "--noise-multiplier", "1", "--json")
    assert little.returncode == 1
    assert little.stderr == ""
    assert json.loads(little.stdout)["certified"] is False
    assert json.loads(little.stdout)["tradeoff"]["mu"] > 0
    wrong = run("--epsilon", "1", "--delta", "1e-3", "-o", str(tmp_path / "page.docx"))
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
