"""Strategies from arrays and files, and the message for every bad one."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpmf import strategies
from dpmf.batching import BallsInBins
from dpmf.errors import ArgumentError
from dpmf.mechanism import Mechanism
from dpmf.strategies import base, explicit

positive = st.floats(1e-3, 1e3)
non_negative = st.one_of(st.just(0.0), st.floats(0, 1e3, allow_subnormal=False))


@given(first=positive, rest=st.lists(non_negative, max_size=8), n=st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_any_coefficients_invert(first: float, rest: list[float], n: int) -> None:
    strategy = strategies.coefficients([first, *[x * first / 1e3 for x in rest]])
    c, d = strategy.matrix(n), strategy.inverse(n)
    np.testing.assert_allclose(c @ d, np.eye(n), atol=1e-11 * np.abs(c).max() * np.abs(d).max())


@given(numbers=st.lists(non_negative, min_size=0, max_size=6), first=positive)
@settings(deadline=None, max_examples=30)
def test_coefficients_survive_every_file_format(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], first: float
) -> None:
    directory = tmp_path_factory.mktemp("files")
    values = [first, *numbers]
    np.save(directory / "c.npy", values)
    (directory / "c.csv").write_text(", ".join(map(repr, values)))
    (directory / "c.txt").write_text("# C\n\n" + "\n".join(map(repr, values)) + "\n")
    for name in ("c.npy", "c.csv", "c.txt"):
        strategy = strategies.coefficients(directory / name)
        assert strategy == strategies.coefficients(values)
        assert strategy.name == strategies.coefficients(values).name[:-1] + f", {name})"


@pytest.mark.parametrize("dtype", ["f8", ">f8", "f4", "f2", "i4", "u1", "longdouble"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("mapped", [False, True])
def test_matrix_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, order: Any, mapped: bool) -> None:
    if mapped:
        monkeypatch.setattr(explicit, "_MAPPED_ABOVE", 0)
    monkeypatch.setattr(base, "_BLOCK_BYTES", 8 * 5 * 2)  # two rows at a time
    entries = np.tril(np.arange(25).reshape(5, 5)).astype(dtype, order=order)
    path = tmp_path / "c.npy"
    np.save(path, entries)
    strategy = strategies.matrix(str(path))
    assert strategy == strategies.matrix(entries)
    assert strategy.name == "Matrix(5×5, c.npy)"
    assert isinstance(strategy.data, bytes) != mapped
    for twin in (strategy, pickle.loads(pickle.dumps(strategy))):
        assert twin.matrix(5).dtype == np.float64
        np.testing.assert_array_equal(twin.matrix(5), entries)
        for _, block in twin.rows(5, 2):
            assert block.dtype == np.float64
    assert strategy.bandwidth(5) == 5


def test_csv_matrix(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("\ufeff1,0\r\n0.5, 2,\r\n", encoding="utf-8")
    assert strategies.matrix(path) == strategies.matrix([[1, 0], [0.5, 2]])
    np.savetxt(path, [[1, 0], [0.5, 2]], delimiter=",", header="saved by numpy")
    assert strategies.matrix(path) == strategies.matrix([[1, 0], [0.5, 2]])


def test_a_mapped_file_that_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explicit, "_MAPPED_ABOVE", 0)
    path = tmp_path / "c.npy"
    np.save(path, np.eye(3))
    strategy = strategies.matrix(path)
    np.save(path, np.ones((3, 3)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match="file must not change while it is in use"):
        strategy.matrix(3)
    path.unlink()
    with pytest.raises(ValueError, match="file must not change while it is in use"):
        strategy.bandwidth(3)


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def _npy(array: object) -> Callable[[Path], object]:
    return lambda path: np.save(path, array, allow_pickle=True)


def _truncated(path: Path) -> None:
    np.save(path, np.eye(50))
    path.write_bytes(path.read_bytes()[:-8])


def _zip(path: Path) -> None:
    with path.open("wb") as stream:
        np.savez(stream, np.eye(3))


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps([1, 2]))


BAD_FILES: list[tuple[str, str, Callable[[Path], object], str]] = [
    ("coefficients", "a.csv", lambda path: None, "file must exist, got .*a.csv"),
    ("coefficients", "a.csv", Path.mkdir, "file must be a file, got the directory .*a.csv"),
    ("coefficients", "a.dat", _text("1"), "file must end in .npy, .csv, .txt, got a.dat"),
    ("coefficients", "a.fifo", os.mkfifo, "file must be a regular file, got .*a.fifo"),
    ("coefficients", "a.csv", _text(""), "file must not be empty, got a.csv"),
    ("coefficients", "a.csv", _text("\n # nothing\n"), "file must not be empty, got a.csv"),
    ("coefficients", "a.npy", _text(""), "file must not be empty, got a.npy"),
    ("coefficients", "a.csv", _text("1\n0.5,x"), "numbers separated by commas or blanks, got 'x' in line 2 of a.csv"),
    ("coefficients", "a.csv", _text("1,,2"), "got '' in line 1 of a.csv"),
    ("coefficients", "a.csv", _text("1 1_0"), "got '1_0' in line 1"),
    ("coefficients", "a.txt", _text("y" * 99), r"got 'y{37}\.\.\.' in line 1"),
    ("coefficients", "a.csv", lambda path: path.write_bytes(b"\xff\xfe1\0"), "file must be text, got a.csv"),
    ("coefficients", "a.csv", _text("1, nan"), r"coefficients must be finite, got nan at \[1\] in a.csv"),
    ("coefficients", "a.csv", _text("1, 1e999"), r"coefficients must be finite, got inf at \[1\] in a.csv"),
    ("coefficients", "a.csv", _text("1, -2"), r"coefficients must be non-negative, got -2 at \[1\] in a.csv"),
    ("coefficients", "a.csv", _text("0, 1"), "coefficients must start with a positive number, got 0 in a.csv"),
    (
        "coefficients",
        "a.npy",
        _npy(np.eye(2)),
        r"coefficients must be one-dimensional and not empty, got shape \(2, 2\)",
    ),
    ("coefficients", "a.npy", _npy(np.zeros(0)), r"one-dimensional and not empty, got shape \(0,\) in a.npy"),
    ("coefficients", "a.npy", _npy(np.array(1.0)), r"one-dimensional and not empty, got shape \(\) in a.npy"),
    ("matrix", "a.txt", _text("1"), "file must end in .npy, .csv, got a.txt"),
    ("matrix", "a.npy", _npy(np.array([{}, None])), "file must hold real numbers, got pickled Python objects in a.npy"),
    ("matrix", "a.npy", _npy(np.eye(2) * 1j), "file must hold real numbers, got dtype complex128 in a.npy"),
    ("matrix", "a.npy", _npy(np.array([["a"]])), "file must hold real numbers, got dtype <U1 in a.npy"),
    ("matrix", "a.npy", _npy(np.eye(2, dtype=bool)), "file must hold real numbers, got dtype bool in a.npy"),
    ("matrix", "a.npy", _truncated, "file must be a complete .npy file, got a.npy"),
    ("matrix", "a.npy", _zip, "file must be in NumPy's .npy format, got a.npy"),
    ("matrix", "a.npy", _pickle, "file must be in NumPy's .npy format, got a.npy"),
    ("matrix", "a.npy", lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\x03\x00{{{"), "a complete .npy file"),
    ("matrix", "a.npy", _npy(np.ones((2, 3))), "matrix must be square and not empty, got 2 × 3 in a.npy"),
    ("matrix", "a.npy", _npy(np.ones(3)), r"matrix must be square and not empty, got shape \(3,\) in a.npy"),
    ("matrix", "a.npy", _npy(np.ones((0, 0))), "matrix must be square and not empty, got 0 × 0|complete .npy"),
    ("matrix", "a.npy", _npy([[1, 2], [0, 1]]), r"matrix must be lower-triangular, got 2 at \[0, 1\] in a.npy"),
    ("matrix", "a.npy", _npy(np.diag([1, -1])), r"matrix must be non-negative, got -1 at \[1, 1\] in a.npy"),
    ("matrix", "a.npy", _npy(np.diag([1, np.nan])), r"matrix must be finite, got nan at \[1, 1\] in a.npy"),
    ("matrix", "a.npy", _npy(np.zeros((2, 2))), "matrix must have an entry that is not zero, got 2 × 2 zeros in a.npy"),
    ("matrix", "a.csv", _text("1,0\n1\n"), "as many numbers in each line, got 1 in line 2 of a.csv after 2"),
    ("matrix", "a.csv", _text("1,0\n1,1\n1,1\n"), "matrix must be square, got more than 2 rows of 2 in a.csv"),
    ("matrix", "a.csv", _text("1,0\n"), "matrix must be square and not empty, got 1 × 2 in a.csv"),
    ("matrix", "a.csv", _text(",".join("1" * 30000)), "file must be .npy for a matrix with 30000 columns"),
]


@pytest.mark.parametrize(("kind", "name", "make", "message"), BAD_FILES)
def test_bad_files(tmp_path: Path, kind: str, name: str, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / name)
    with pytest.raises(ValueError, match=message) as caught:
        getattr(strategies, kind)(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is ArgumentError
    assert caught.value.argument in ("file", kind)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: strategies.coefficients(""), "file must be the path of a file"),
        (lambda: strategies.coefficients("a\0.csv"), "file must be the path of a file"),
        (lambda: strategies.coefficients("x" * 5000 + ".csv"), "file must be readable|file must exist"),
        (lambda: strategies.coefficients(None), "coefficients must be an array of real numbers .* got dtype object"),
        (lambda: strategies.coefficients([]), r"not empty, got shape \(0,\)"),
        (lambda: strategies.coefficients(1.0), r"one-dimensional and not empty, got shape \(\)"),
        (lambda: strategies.coefficients(["1", "2"]), "real numbers or the path of a file, got dtype <U1"),
        (lambda: strategies.coefficients([1, 2j]), "got dtype complex128"),
        (lambda: strategies.coefficients([True]), "got dtype bool"),
        (lambda: strategies.coefficients([[1, 2], [3]]), "got no array, or rows of unequal length"),
        (lambda: strategies.coefficients([1, float("inf")]), r"coefficients must be finite, got inf at \[1\]$"),
        (lambda: strategies.coefficients([1, 1, -1e-9]), r"coefficients must be non-negative, got -1e-09 at \[2\]$"),
        (lambda: strategies.coefficients([0.0]), "coefficients must start with a positive number, got 0$"),
        (lambda: strategies.matrix([[1, 0], [0, np.inf]]), r"matrix must be finite, got inf at \[1, 1\]$"),
        (lambda: strategies.matrix(np.eye(2) * 1j), "matrix must be an array of real numbers .* got dtype complex128"),
        (lambda: strategies.matrix(np.broadcast_to(0.0, (10**5, 10**5))), "matrix must be at most 23170 × 23170"),
        (lambda: strategies.bsr(0), "bandwidth must be at least 1, got 0"),
        (lambda: strategies.bisr(2.0), "bandwidth must be an integer, got 2.0"),
        (lambda: strategies.bandmf(True), "bandwidth must be an integer, got True"),
        (lambda: strategies.bandmf(2, iterations=0), "iterations must be at least 1, got 0"),
        (lambda: strategies.bandinvmf(-1), "bandwidth must be at least 1, got -1"),
        (lambda: strategies.bandinvmf(2, "rms"), "error must be one of max, mean, got 'rms'"),
        (lambda: strategies.bandinvmf(2, min_sep=0), "min_sep must be at least 1, got 0"),
        (lambda: strategies.bandinvmf(2, max_participations=2), "min_sep must be given with max_participations > 1"),
        (lambda: strategies.blt(0), "buffers must be at least 1, got 0"),
        (lambda: strategies.blt(16), "buffers must be at most 15, got 16"),
        (lambda: strategies.blt(2, "rms"), "error must be one of max, mean, got 'rms'"),
    ],
)
def test_bad_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_bad_entries_are_found_in_later_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_BLOCK_BYTES", 1)
    entries = np.eye(6)
    entries[4, 5] = 7
    with pytest.raises(ValueError, match=r"lower-triangular, got 7 at \[4, 5\]"):
        strategies.matrix(entries)
    entries[4, 5], entries[5, 1] = 0, -7
    with pytest.raises(ValueError, match=r"non-negative, got -7 at \[5, 1\]"):
        strategies.matrix(entries)


def test_matrix_of_the_wrong_size() -> None:
    message = "matrix must be N × N with N = iterations = 1000 (epochs × batches), got 999 × 999"
    with pytest.raises(ValueError, match=re.escape(message)):
        Mechanism(strategies.matrix(np.eye(999)), BallsInBins(10, 100))
