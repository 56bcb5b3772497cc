"""A training run killed at many moments releases the same bits as one that was left alone."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import dpmf
from dpmf.training import BatchSampler, NoiseStream, checkpoint, sharding

MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(4), dpmf.BallsInBins(4, 25))


def _train(path: Path, log: Path) -> None:
    """A run that saves after every step and writes down what it released; goes on from where its file says."""
    noise = NoiseStream(MECHANISM, [(500,)], seed=1)
    sampler = BatchSampler(100, MECHANISM, seed=1)
    model = np.zeros(500, dtype=np.float32)
    if path.exists():
        state = checkpoint.load(path)
        noise.load_state_dict(state["noise"])
        sampler.load_state_dict(state["sampler"])
        model = state["model"]
    for batch in sampler.batches():
        step = noise.step
        (row,) = noise.next()
        model = model + row
        model[batch] += 1.0
        released = hashlib.sha256(row.tobytes() + model.tobytes()).hexdigest()
        with log.open("a") as file:
            file.write(f"{step} {released}\n")
        checkpoint.save(path, {"noise": noise.state_dict(), "sampler": sampler.state_dict(), "model": model})


# JAX, which other tests may have imported here, warns of any fork; what runs after this one does not use it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_killed_at_forty_moments_a_run_releases_the_same_bits(tmp_path: Path) -> None:
    _train(tmp_path / "whole", tmp_path / "whole.log")
    expected = dict(line.split() for line in (tmp_path / "whole.log").read_text().splitlines())
    assert len(expected) == 100
    rng = random.Random(1)
    path, log = tmp_path / "killed", tmp_path / "killed.log"
    kills = 0
    while kills < 40:
        child = os.fork()
        if child == 0:
            try:
                _train(path, log)
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += 1
        if not os.WIFSIGNALED(status):  # it had come to its end: begin again
            path.unlink()
    _train(path, log)
    lines = [line.split() for line in log.read_text().splitlines()]
    # A step made twice released the same bits twice, which releases nothing new.
    assert all(expected[step] == released for step, released in lines)
    assert {step for step, _ in lines} == set(expected)
    model, whole = checkpoint.load(path)["model"], checkpoint.load(tmp_path / "whole")["model"]
    assert model.dtype == whole.dtype
    assert np.array_equal(model, whole)


def _train_shards(path: Path, log: Path, world: int, until: int = 100) -> None:
    """The noise of several ranks, one after the other, with a sharded checkpoint after every step."""
    ranks = [
        NoiseStream(MECHANISM, [(500,)], seed=1, shards=sharding.even_shares([(500,)], r, world)) for r in range(world)
    ]
    if path.exists():
        state = checkpoint.load(path)["noise"]
        for noise in ranks:
            noise.prepared(sharding.states(path, state))()
    while ranks[0].step < until:
        step = ranks[0].step
        row = np.concatenate([noise.next()[0] for noise in ranks])
        with log.open("a") as file:
            file.write(f"{step} {hashlib.sha256(row.tobytes()).hexdigest()}\n")
        for rank, noise in enumerate(ranks):
            named = sharding.write_part(path, noise, rank, world)
        checkpoint.save(path, {"noise": named})
        sharding.remove_old_parts(path, named["parts"])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_ranks_killed_while_they_save_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """Two and four ranks go on with what the others left, and none of them ever finds half of a checkpoint."""
    noise = NoiseStream(MECHANISM, [(500,)], seed=1)
    expected = {str(step): hashlib.sha256(noise.next()[0].tobytes()).hexdigest() for step in range(100)}
    rng = random.Random(2)
    path, log = tmp_path / "killed", tmp_path / "killed.log"
    for kill in range(30):
        child = os.fork()
        if child == 0:
            try:
                _train_shards(path, log, 2 + 2 * (kill % 2), until=99)  # the last step is left to four ranks
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    _train_shards(path, log, 4)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert all(expected[step] == released for step, released in lines)
    assert {step for step, _ in lines} == set(expected)
    assert len(list(tmp_path.glob("*.part"))) == 4
