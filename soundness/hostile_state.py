"""Hostile databases of figures, training checkpoints and dp_accounting events."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from soundness.hostile_objects import strange_value
from soundness.judge import Outcome, fault, judged

Rng = np.random.Generator


def _mangled(rng: Rng, content: bytes) -> bytes:
    kind = int(rng.integers(5))
    if kind == 0:
        return content[: int(rng.integers(len(content)))]
    if kind == 1:
        return rng.bytes(int(rng.integers(0, 5000)))
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 40))):
        # Half of the damage goes to the head, where what the file is stands.
        end = 200 if rng.random() < 0.5 else len(data)
        data[int(rng.integers(min(end, len(data))))] = int(rng.integers(256))
    return bytes(data)


def database(rng: Rng, index: int, directory: Path) -> Outcome:
    """A damaged database, or one of another program: read, or refused in one line, never more records than it had."""
    from evidence.spec import Cell, MechanismSpec
    from evidence.store import Record, Store

    path = directory / "figures.sqlite"
    for old in directory.glob("figures.sqlite*"):
        old.unlink()
    if rng.random() < 0.2:
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE secrets (x)")
        other.close()
    else:
        cell = Cell.of("divergence", mechanism=MechanismSpec("bsr", 2, 10, 2), order=2, sigma=1.0, bandwidth=1)
        with Store.open(path, create=True) as store:
            store.save(Record(cell, "0+x", {"divergence": 1.0}, None, 0.1))
        content = _mangled(rng, path.read_bytes())
        for old in directory.glob("figures.sqlite*"):
            old.unlink()
        path.write_bytes(content)

    def read() -> list[Any]:
        with Store.open(path) as store:
            return list(store)

    def accept(answer: Any) -> str | None:
        return None if len(answer) <= 1 else f"{len(answer)} records out of one"

    return judged(read, tuple(directory / f"figures.sqlite{end}" for end in ("", "-wal", "-shm", "-journal")), accept)


def checkpoint_file(rng: Rng, index: int, directory: Path) -> Outcome:
    """A damaged checkpoint: what is read is what was saved, bit for bit, or it is refused."""
    from dpmf.training import checkpoint

    path = directory / "state.ckpt"
    weights = rng.random(int(rng.integers(0, 40)))
    state = {"step": int(rng.integers(100)), "weights": weights, "deep": [{"a": (1.5, None)}]}
    checkpoint.save(path, state)
    content = path.read_bytes()
    path.write_bytes(_mangled(rng, content) if rng.random() < 0.95 else content)

    def accept(answer: Any) -> str | None:
        same = answer["step"] == state["step"] and np.array_equal(answer["weights"], weights)
        return None if same and answer["deep"] == state["deep"] else "a damaged checkpoint was read as good"

    return judged(lambda: checkpoint.load(path), (), accept)


def event(rng: Rng, index: int, directory: Path) -> Outcome:
    """An event of dp_accounting with one or two attributes that make no sense."""
    import dpmf
    from dpmf import strategies
    from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent

    good: dict[str, Any] = {
        "strategy": strategies.bsr(2), "epochs": 2, "batches_per_epoch": 3, "noise_multiplier": 2.0, "iterations": 6,
    }  # fmt: skip
    batchings = [dpmf.reshuffled(2, 3), dpmf.BallsInBins(2, 3, stride=3), dpmf.batching.Poisson(2, 3, 3)]
    if rng.random() < 0.5:
        good |= {"batching": batchings[int(rng.integers(3))], "iterations": None}
    spoilt = {str(rng.choice(list(good))): strange_value(rng) for _ in range(int(rng.integers(0, 3)))}

    def accept(answer: Any) -> str | None:
        sound = (
            isinstance(answer.epochs, int)
            and isinstance(answer.batches_per_epoch, int)
            and answer.epochs >= 1
            and answer.batches_per_epoch >= 1
            and 0 <= answer.noise_multiplier < float("inf")
        )
        return None if sound else f"accepted {answer}"

    found = judged(lambda: BallsInBinsMatrixDpEvent(**good | spoilt), (), accept)
    return fault(f"{list(spoilt)}: {found.text}") if found.verdict == "fault" else found
