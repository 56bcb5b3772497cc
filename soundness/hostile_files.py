"""Hostile files: matrices, coefficients, caches."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from soundness.judge import Outcome, judged

Rng = np.random.Generator


class _Bomb:
    """Unpickling this would write a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pickle-was-executed",)


def _npy(array: object, **header: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array), allow_pickle=True)
    content = stream.getvalue()
    for old, new in header.items():
        content = content.replace(old.encode(), str(new).encode())
    return content


def _hostile_bytes(rng: Rng, suffix: str, base: np.ndarray) -> bytes:
    """A file that is good, or was."""
    if suffix != ".npy":
        rows = [base] if base.ndim == 1 else list(base)
        text = "\n".join(",".join(repr(float(x)) for x in row) for row in rows)
        junk = [
            "nan",
            "1e999",
            "-1",
            "x",
            ",,",
            "\x00",
            "1_0",
            "\n\n",
            "#",
            '"1"',
            "=1+1",
            "\u00bd",
            "1;2",
            "é",
            "inf",
            "\t",
        ]
        for _ in range(int(rng.integers(0, 4))):
            place = int(rng.integers(len(text) + 1))
            text = text[:place] + str(rng.choice(junk)) + text[place + int(rng.integers(0, 3)) :]
        content = text.encode("utf-8", "surrogatepass")
    else:
        kind = int(rng.integers(9))
        made: object = base
        if kind == 0:
            made = np.array([_Bomb(), 1.0], dtype=object)
        elif kind == 1:
            made = base.astype(rng.choice(["c16", "?", "S8", "U4", "M8[s]", "f2", "i4", "u8", ">f8"]))
        elif kind == 2:
            made = base.copy()
            made.flat[int(rng.integers(base.size))] = rng.choice([np.nan, np.inf, -1.0, -0.0, 1e308, 5e-324])  # type: ignore[attr-defined]
        elif kind == 3:
            made = np.zeros(tuple(rng.integers(0, 4, int(rng.integers(0, 4)))))
        elif kind == 4:
            made = np.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")])
        content = _npy(made)
        if kind == 5:
            shape = str(
                rng.choice(["(99999999999,)", "(999999,999999)", "(-1,)", "(4,4,)", "()", "(1e9,)", "__import__('os')"])
            )
            content = content.replace(str(base.shape).encode(), shape.encode().ljust(len(str(base.shape)))[:200], 1)
        if kind == 6:
            content = content.replace(b"'descr'", rng.choice([b"'descX'", b"0000000", b"'\\x00\\x00\\x00\\x00'"]))
    if rng.random() < 0.35:
        data = bytearray(content)
        for _ in range(int(rng.integers(1, 6))):
            if data:
                data[int(rng.integers(len(data)))] = int(rng.integers(256))
        content = bytes(data)
    if rng.random() < 0.2:
        content = content[: int(rng.integers(len(content) + 1))]
    return content


def strategy_file(rng: Rng, index: int, directory: Path) -> Outcome:
    """A matrix or a file of coefficients; what is accepted must be what an independent reader finds in it."""
    from dpmf import strategies

    matrix = rng.random() < 0.5
    n = int(rng.integers(1, 6))
    base = np.tril(rng.random((n, n))) + 0.1 * np.eye(n) if matrix else rng.random(n) + 0.1
    suffix = str(rng.choice([".npy", ".csv"] if matrix else [".npy", ".csv", ".txt"]))
    path = directory / f"c{suffix}"
    path.write_bytes(_hostile_bytes(rng, suffix, base))

    def accept(answer: Any) -> str | None:
        if (directory / "pickle-was-executed").exists() or Path("pickle-was-executed").exists():
            return "a pickle was executed"
        entries = answer.matrix(answer.size) if matrix else answer.values
        if not np.all(np.isfinite(entries)) or np.any(entries < 0) or not np.any(entries > 0):
            return f"accepted {entries}"
        if matrix and (entries.shape[0] != entries.shape[1] or np.any(np.triu(entries, 1))):
            return "accepted a matrix that is not lower-triangular"
        if not matrix and not entries[0] > 0:
            return "accepted coefficients that start with 0"
        read = np.load(path, allow_pickle=False) if suffix == ".npy" else _read_text(path)
        same = np.array_equal(np.asarray(read, dtype=np.float64).ravel(), np.asarray(entries).ravel())
        return None if same else "read something else than is in the file"

    return judged(lambda: (strategies.matrix if matrix else strategies.coefficients)(path), (), accept)


def _read_text(path: Path) -> list[float]:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    kept = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    return [float(word) for line in kept for word in line.replace(",", " ").split()]


def cache_file(rng: Rng, index: int, directory: Path) -> Outcome:
    """A damaged file of the store: what comes back holds, whatever the file says, and is on disk afterwards."""
    from dpmf import store

    truth = rng.random(int(rng.integers(1, 30)))
    computed: list[int] = []

    def compute() -> dict[str, np.ndarray]:
        computed.append(index)
        return {"coefficients": truth.copy()}

    def holds(values: dict[str, np.ndarray]) -> bool:
        return np.array_equal(values["coefficients"], truth)

    def remember() -> dict[str, np.ndarray]:
        store.forget()
        with contextlib.redirect_stderr(io.StringIO()):
            return store.remember("fuzz", {"n": index}, "fuzz", compute, holds)

    before = os.environ.get("DPMF_CACHE_DIR")
    os.environ["DPMF_CACHE_DIR"] = str(directory / "cache")
    try:
        remember()
        (file,) = (directory / "cache").glob("fuzz-*.json")
        file.write_bytes(_damaged(rng, file.read_bytes()))

        def accept(answer: Any) -> str | None:
            if not holds(answer):
                return "a damaged file was read as good"
            computed.clear()
            remember()
            return "the file was not written anew" if computed else None

        return judged(remember, (directory / "cache",), accept)
    finally:
        store.forget()
        for old in (directory / "cache").glob("*"):
            old.unlink()
        if before is None:
            del os.environ["DPMF_CACHE_DIR"]
        else:
            os.environ["DPMF_CACHE_DIR"] = before


def _damaged(rng: Rng, content: bytes) -> bytes:
    kind = int(rng.integers(7))
    if kind == 0:
        return content[: int(rng.integers(len(content)))]
    if kind == 1:
        data = bytearray(content)
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        return bytes(data)
    if kind == 2:
        return rng.bytes(int(rng.integers(0, 2000)))
    if kind == 3:  # a plausible change of one number
        record = json.loads(content)
        numbers = record["hint"]["coefficients"]
        numbers[int(rng.integers(len(numbers)))] = float(rng.random()).hex()
        return json.dumps(record).encode()
    if kind == 4:
        return b"[" * 100_000
    if kind == 5:
        record = json.loads(content)
        record[str(rng.choice(["question", "hint"]))] = [None, {}, [], 3, "x", {"coefficients": None}][
            int(rng.integers(6))
        ]
        return json.dumps(record).encode()
    return b""
