"""Hostile input, a slice of `python -m soundness fuzz`; and that its judge sees what it is there to see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg

from dpmf import strategies
from dpmf.integrations import jax_privacy
from dpmf.strategies import inversion
from soundness import fuzz, hostile_cli, judge, printed, summary

SEED = 1  # not the one of the committed run
# Most answers have a lower bound beside them. How close it comes is not asked here.
pytestmark = pytest.mark.usefixtures("coarse_lower_bounds")


@pytest.mark.parametrize(
    ("target", "count"),
    [
        ("command lines", 150),
        ("matrix and coefficient files", 300),
        ("strategy caches", 60),
        ("Python arguments", 250),
        ("figure databases", 40),
        ("training checkpoints", 60),
        ("training loops", 40),
        ("dp_accounting events", 60),
        ("printed numbers", 24),
        ("jax-privacy objects", 20),
    ],
)
def test_no_fault_in_a_slice(target: str, count: int) -> None:
    counts, faults = fuzz.run(target, count, SEED)
    assert faults == []
    assert counts["cases"] == count
    # Something of each was refused, or answered rightly where most inputs are good: the inputs reach the code.
    assert counts["refused"] > count // 3 or target in ("strategy caches", "jax-privacy objects", "printed numbers")
    assert counts["answered"] > 0 or target == "training checkpoints"


def seen(target: str, count: int, words: str) -> bool:
    """Whether one of so many inputs shows such a fault; those after it are not tried."""
    return any(words in text for first in range(0, count, 4) for text in fuzz.run(target, 4, SEED, first)[1])


@pytest.mark.parametrize("careless", ["a step on any batch", "a second continuation"])
def test_a_training_loop_that_is_not_refused_is_seen(careless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    from dpmf.training import journal
    from dpmf.training.step import Step

    if careless == "a step on any batch":
        monkeypatch.setattr(Step, "problem", lambda self, gradients, last=False: None)
        monkeypatch.setattr(Step, "complete", True)
        expected = "not a step of the mechanism"
    else:
        monkeypatch.setattr(journal.Journal, "release", lambda self, step, digest: None)
        expected = "released twice, differently"
    assert seen("training loops", 40, expected)


def test_a_bridge_that_drops_small_entries_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bridge once did to a C⁻¹ in single precision: entries below N·eps of the largest were set to zero."""
    honest = inversion.inverse_matrix

    def careless(noising: np.ndarray) -> inversion.Inverse:
        values = honest(noising).values
        values[np.abs(values) <= len(values) * np.finfo(np.float32).eps * np.abs(values).max()] = 0
        return inversion.Inverse(values, np.zeros_like(values))

    def careless_series(column: np.ndarray) -> inversion.Inverse:
        found = careless(np.tril(scipy.linalg.toeplitz(column)))
        return inversion.Inverse(found.values[:, 0], found.error[:, 0])

    monkeypatch.setattr(jax_privacy, "inverse_matrix", careless)
    monkeypatch.setattr(jax_privacy, "inverse_series", careless_series)
    assert seen("jax-privacy objects", 20, "is claimed")


def test_every_target_has_a_slice_here() -> None:
    assert {"command lines", "figure databases", "training checkpoints", "dp_accounting events"} <= set(fuzz.TARGETS)
    assert sum(count for _, count in fuzz.TARGETS.values()) >= 10_000


def test_the_committed_run_found_nothing() -> None:
    found = summary.load()["fuzz"]["targets"]
    assert sum(one["cases"] for one in found.values()) >= 10_000
    assert all(one["faults"] == 0 for one in found.values())
    assert all(one["cases"] == one["answered"] + one["refused"] for one in found.values())


# --- the judge -----------------------------------------------------------------------------------------------------


def _raise(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (lambda: 1, "answered"),
        (lambda: _raise(ValueError("x must be 1, got 2")), "refused"),
        (lambda: _raise(ValueError("two\nlines")), "fault"),
        (lambda: _raise(ValueError("")), "fault"),
        (lambda: _raise(KeyError("x")), "fault"),
        (lambda: _raise(SystemExit(1)), "fault"),
        (lambda: _raise(RecursionError()), "fault"),
    ],
)
def test_verdicts(call, verdict: str) -> None:
    assert judge.judged(call, (), lambda answer: None).verdict == verdict


def test_a_wrong_answer_is_a_fault() -> None:
    assert judge.judged(lambda: -1, (), lambda answer: "negative").text == "negative"


def test_a_stray_file_is_a_fault(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    assert judge.judged(lambda: (inside / "x").write_text("1"), (inside,), lambda a: None).verdict == "answered"
    for write in (
        lambda: (outside / "x").write_text("1"),
        lambda: (outside / "d").mkdir(),
        lambda: os.replace(inside / "x", outside / "y"),
        lambda: (outside / "y").unlink(),
    ):
        assert "wrote" in judge.judged(write, (inside,), lambda a: None).text


def test_a_hang_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "HANG_SECONDS", 1)

    def forever() -> None:
        while True:
            pass

    assert "no answer" in judge.judged(forever, (), lambda answer: None).text


def test_what_is_accepted_wrongly_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "delta", "--strategy", "dpsgd", "--epochs", "1", "--batches-per-epoch", "2", "--noise-multiplier", "1",
        "--epsilon", "1", "--accountant", "gaussian", "--json",
    ]  # fmt: skip
    assert hostile_cli.run_command(arguments, False, False, tmp_path, None).verdict == "answered"
    assert hostile_cli.run_command(arguments, True, False, tmp_path, None).verdict == "fault"
    assert hostile_cli.run_command([*arguments, "--epochs", "x"], True, False, tmp_path, None).verdict == "refused"


# --- memory, code and files ----------------------------------------------------------------------------------------


def test_nothing_in_a_npy_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from soundness.hostile_files import _Bomb

    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "c.npy", np.array([_Bomb(), 1.0], dtype=object), allow_pickle=True)
    for read in (strategies.matrix, strategies.coefficients):
        with pytest.raises(ValueError, match="pickled Python objects"):
            read(tmp_path / "c.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["c.npy"]


@pytest.mark.parametrize("shape", ["(99999999, 99999999)", "(9999999999999,)"])
def test_a_header_that_promises_too_much_costs_no_memory(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(117) + "\n"
    path = tmp_path / "c.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + b"\0" * 64)
    for read in (strategies.matrix, strategies.coefficients):
        with pytest.raises(ValueError, match=r"complete \.npy file|must be"):
            read(path)


HUGE = [
    ["--strategy", "dpsgd", "--epochs", "3000000000", "--batches-per-epoch", "1"],
    ["--strategy", "bsr", "--bandwidth", "2", "--epochs", "1", "--batches-per-epoch", "90000000"],
    ["--strategy", "bsr", "--bandwidth", "3000000000", "--epochs", "1", "--batches-per-epoch", "3000000000"],
]


@pytest.mark.parametrize("mechanism", HUGE, ids=lambda words: " ".join(words))
def test_sizes_are_refused_with_little_memory(mechanism: list[str]) -> None:
    """In a process that may have 3 GB of addresses; the machine's own memory never decides."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30)); "
        "from dpmf.cli import main; sys.argv[0] = 'dpmf'; main()"
    )
    options = ["--noise-multiplier", "1", "--epsilon", "1", "--accountant", "renyi"]
    done = subprocess.run(
        [sys.executable, "-c", program, "delta", *mechanism, *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert "must be " in done.stderr


@pytest.mark.parametrize(
    ("text", "value", "up", "fine"),
    [
        ("0.0961456", 0.09614553598, True, True),
        ("0.0961455", 0.09614553598, True, False),
        ("0.0961455", 0.09614553598, False, True),
        ("0.0961456", 0.09614553598, False, False),
        ("0.1", 0.09614553598, True, False),
        ("inf", None, True, True),
        ("1", None, True, False),
        ("5e-324", 5e-324, True, True),
    ],
)
def test_a_number_printed_on_the_wrong_side_is_a_fault(text: str, value: float | None, up: bool, fine: bool) -> None:
    assert (printed.wrong(text, value, up) is None) is fine


def test_rounding_to_nearest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the printed numbers were before: the area sees it in a few dozen questions."""
    from dpmf import report

    monkeypatch.setattr(report, "upper", lambda value, digits=6: f"{value:.{digits}g}")
    assert seen("printed numbers", 12, "is on the wrong side of")
