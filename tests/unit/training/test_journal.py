"""The journal of a run: one checkpoint has one continuation, kills lose nothing, and every refusal says what to do."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_runs import N, linear, private, step, train, weights, with_workers

import dpmf
from dpmf.errors import TrainingError
from dpmf.training import BatchSampler, NoiseStream, PrivateTraining, checkpoint
from dpmf.training.journal import Journal

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")

# JAX, if another test has imported it, warns of any fork. The children here use numpy only.
FORKS = pytest.mark.filterwarnings("ignore:os.fork")


def saved_at(path: Path, steps: int = 4, **options: Any) -> PrivateTraining:
    run = private(**options)
    train(run, steps)
    run.save(path)
    return run


def journal_of(directory: Path) -> Path:
    (found,) = directory.glob("*.journal")
    return found


# One checkpoint, two continuations.


def test_the_difference_of_two_continuations_would_have_no_noise(tmp_path: Path) -> None:
    """What is refused: without the journal, both runs add the same noise to different gradients."""
    run = saved_at(tmp_path / "c", model=linear(), noise_multiplier=100.0)
    other = private(model=linear(), noise_multiplier=100.0)
    other.load(tmp_path / "c", allow_second_continuation=True)
    shutil.rmtree(tmp_path)  # nobody looks any more
    tmp_path.mkdir()
    with torch.no_grad():
        for p in other.model.parameters():
            p += 0.01
    before = weights(run), weights(other)
    train(run, 1)
    train(other, 1)
    moved, other_moved = weights(run) - before[0], weights(other) - before[1]
    assert np.abs(moved).max() > 100 * np.abs(moved - other_moved).max()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_continuation_that_differs_is_refused(workers: int, tmp_path: Path) -> None:
    run = saved_at(tmp_path / "c")
    train(run, 6)
    second = private(rate=0.2, **with_workers(workers))
    second.load(tmp_path / "c")
    second.optimizer.param_groups[0]["lr"] = 0.2  # loading has restored the old one
    train(second, 1)  # the same weights, batch and noise: the same noisy gradient as before
    before = weights(second)
    with pytest.raises(TrainingError, match="step 5 was made before from this checkpoint, with another result"):
        train(second, 1)
    assert np.array_equal(weights(second), before)


def test_the_same_continuation_releases_nothing_new(tmp_path: Path) -> None:
    """A run that is killed after its last checkpoint goes on from there without any flag."""
    run = saved_at(tmp_path / "c")
    train(run, 6)
    reached = weights(run)
    again = private(seed=1)
    again.load(tmp_path / "c")
    train(again, 6)
    assert np.array_equal(weights(again), reached)
    train(again, N - 10)
    assert again.steps_left == 0


def test_the_run_that_was_resumed_elsewhere_must_stop(tmp_path: Path) -> None:
    run = saved_at(tmp_path / "c")
    again = private()
    again.load(tmp_path / "c")
    with pytest.raises(TrainingError, match="another process, or another object in this one"):
        train(run, 1)
    with pytest.raises(TrainingError, match="another process"):
        run.save(tmp_path / "c")
    train(again, 2)
    again.save(tmp_path / "c")
    third = private()
    third.load(tmp_path / "c")
    assert third.steps_made == 6


def test_a_checkpoint_older_than_the_last_is_refused(tmp_path: Path) -> None:
    run = saved_at(tmp_path / "4")
    train(run, 3)
    run.save(tmp_path / "7")
    again = private()
    before = weights(again)
    with pytest.raises(TrainingError, match="written after 4 steps, and this run has saved the model of step 7 since"):
        again.load(tmp_path / "4")
    assert np.array_equal(weights(again), before)
    assert again.steps_made == 0
    again.load(tmp_path / "7")
    assert again.steps_made == 7


def test_the_flag_allows_it_and_is_written_down(tmp_path: Path) -> None:
    run = saved_at(tmp_path / "4")
    train(run, 3)
    run.save(tmp_path / "7")
    again = private()
    again.load(tmp_path / "4", allow_second_continuation=True)
    again.optimizer.param_groups[0]["lr"] = 0.3
    train(again, 5)
    again.save(tmp_path / "9")
    lines = journal_of(tmp_path).read_text().splitlines()
    assert lines[0].startswith(f"dpmf journal 1 {run.journal.run} 4")
    assert "again 4" in lines
    assert [line for line in lines if line.startswith("saved")] == ["saved 4", "saved 7", "saved 9"]
    third = private()
    with pytest.raises(TrainingError, match="saved the model of step 9 since"):
        third.load(tmp_path / "7")
    with pytest.raises(ValueError, match="allow_second_continuation must be True or False"):
        third.load(tmp_path / "9", allow_second_continuation=1)
    third.load(tmp_path / "9")
    train(third, N - 9)


def test_a_checkpoint_without_its_journal_is_refused(tmp_path: Path) -> None:
    saved_at(tmp_path / "c")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(tmp_path / "c", elsewhere / "c")
    again = private()
    with pytest.raises(TrainingError, match=r"must be loaded with dpmf-run-\w+\.journal beside it"):
        again.load(elsewhere / "c")
    again.load(elsewhere / "c", allow_second_continuation=True)
    train(again, 2)
    assert journal_of(elsewhere).read_text().splitlines()[1] == "again 4"
    # From now on there is a journal here, too.
    other = private()
    other.load(elsewhere / "c")
    with torch.no_grad():
        next(iter(other.model.parameters())).add_(1)
    with pytest.raises(TrainingError, match="step 4 was made before"):
        train(other, 2)


def test_a_run_saved_in_several_directories(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    run = saved_at(first / "c")
    train(run, 2)
    run.save(second / "c")
    train(run, 2)
    with pytest.raises(TrainingError, match="saved the model of step 6 since"):
        private().load(first / "c")
    again = private()
    again.load(second / "c")
    with pytest.raises(TrainingError, match="a journal of this run that another process wrote"):
        again.save(first / "c")
    train(again, 2)
    assert np.array_equal(weights(again), weights(run))


def test_a_journal_that_was_removed(tmp_path: Path) -> None:
    run = saved_at(tmp_path / "c")
    journal_of(tmp_path).unlink()
    train(run, 2)  # the checkpoint beside it is refused now, whatever happens
    with pytest.raises(TrainingError, match="beside it"):
        private().load(tmp_path / "c")
    run.save(tmp_path / "d")
    with pytest.raises(TrainingError, match="saved the model of step 6 since"):
        private().load(tmp_path / "c")
    private().load(tmp_path / "d")


def test_a_new_run_may_use_the_name_of_an_old_checkpoint(tmp_path: Path) -> None:
    saved_at(tmp_path / "c")
    saved_at(tmp_path / "c", steps=2)
    again = private()
    again.load(tmp_path / "c")
    assert again.steps_made == 2
    assert len(list(tmp_path.glob("*.journal"))) == 2


def test_the_journal_is_for_its_owner_and_says_nothing_secret(tmp_path: Path) -> None:
    run = saved_at(tmp_path / "c")
    train(run, 2)
    journal = journal_of(tmp_path)
    assert run.journal.files == [journal]
    assert journal.stat().st_mode & 0o777 == 0o600
    line = r"dpmf journal 1 [0-9a-f]{16} 4|saved 4|step \d [0-9a-f]{16}"
    assert all(re.fullmatch(line, text) for text in journal.read_text().splitlines())
    assert run.noise._source.key.hex() not in journal.read_text()


# Damage, full disks and kills.


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("journal 1", "journal 2"),
        lambda text: text.replace("saved 4", "saved four"),
        lambda text: text.replace("saved 4", "sold 4"),
        lambda text: text.replace("step 4 ", "step 4 x "),
        lambda text: "\n" + text,
        lambda text: "",
        lambda text: "\x00" * len(text) + "\n",
    ],
)
def test_a_damaged_journal_is_one_message(damage: Callable[[str], str], tmp_path: Path) -> None:
    run = saved_at(tmp_path / "c")
    train(run, 2)
    journal = journal_of(tmp_path)
    journal.write_text(damage(journal.read_text()))
    with pytest.raises(ValueError, match="journal must be whole") as caught:
        private().load(tmp_path / "c")
    assert "\n" not in str(caught.value)


def test_a_line_that_was_not_finished_is_ignored(tmp_path: Path) -> None:
    """After a power cut. The step of that line was never used: the line comes first."""
    run = saved_at(tmp_path / "c")
    train(run, 2)
    journal = journal_of(tmp_path)
    whole = journal.read_text()
    journal.write_text(whole[:-9])
    again = private()
    again.load(tmp_path / "c")
    train(again, 3)
    lines = journal.read_text().splitlines()
    assert lines[:-3] == whole.splitlines()[:-1]
    assert lines[-3] == "resumed 4"
    assert [line.split()[:2] for line in lines[-2:]] == [["step", "5"], ["step", "6"]]


def test_a_full_disk_releases_nothing(tmp_path: Path) -> None:
    run = saved_at(tmp_path / "c")
    before = weights(run)
    journal = journal_of(tmp_path)
    text = journal.read_text()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    batch = next(iter(run.data_loader))
    try:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(text) + 5, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="journal cannot be written") as caught:
            step(run, batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.ENOSPC
    assert np.array_equal(weights(run), before)
    assert journal.read_text() == text
    again = private()
    again.load(tmp_path / "c")
    train(again, N - 4)


MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(4), dpmf.BallsInBins(4, 25))


class Plain:
    """A run with numpy only, which starts quickly."""

    def __init__(self, slope: float = 0.1) -> None:
        self.slope = slope
        self.noise = NoiseStream(MECHANISM, [(500,)], seed=1)
        self.sampler = BatchSampler(100, MECHANISM, seed=1)
        self.journal = Journal()
        self.model = np.zeros(500, dtype=np.float32)

    def save(self, path: Path) -> None:
        step = self.noise.step
        self.journal.begin(path, step)
        self.sampler.seek(step)
        state = {"noise": self.noise.state_dict(), "sampler": self.sampler.state_dict(), "model": self.model}
        checkpoint.save(path, {"run": self.journal.run, **state})
        self.journal.saved(step)

    def load(self, path: Path) -> None:
        state = checkpoint.load(path)
        journal = Journal.resume(path, state["run"], state["noise"]["step"], allow=False, writes=True)
        journal.resumed()
        self.noise.load_state_dict(state["noise"])
        self.sampler.load_state_dict(state["sampler"])
        self.journal, self.model = journal, state["model"]

    def train(self, path: Path, log: Path, every: int) -> None:
        while (t := self.noise.step) < self.noise.steps:
            gradient = self.noise.next()[0] - self.slope * self.model
            gradient[self.sampler.batch(t)] += 1.0
            digest = hashlib.sha256(gradient.tobytes()).hexdigest()[:16]
            self.journal.release(t, digest)
            with log.open("a") as file:
                file.write(f"{t} {digest}\n")
            self.model = self.model + gradient
            if self.noise.step % every == 0:
                self.save(path)


def live(path: Path, log: Path, slope: float = 0.1, every: int = 3) -> None:
    run = Plain(slope)
    if path.exists():
        run.load(path)
    run.train(path, log, every)


@FORKS
def test_killed_at_forty_moments(tmp_path: Path) -> None:
    """Every kill is followed by a run that goes on by itself, and every step releases the same bits each time."""
    (tmp_path / "whole").mkdir()
    live(tmp_path / "whole" / "c", tmp_path / "whole.log")
    expected = dict(line.split() for line in (tmp_path / "whole.log").read_text().splitlines())
    rng = random.Random(1)
    place, log = tmp_path / "killed", tmp_path / "killed.log"
    place.mkdir()
    for _ in range(40):
        child = os.fork()
        if child == 0:
            try:
                live(place / "c", log)
            except BaseException as error:
                (tmp_path / "failed").write_text(repr(error))
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert not (tmp_path / "failed").exists(), (tmp_path / "failed").read_text()
        if not os.WIFSIGNALED(status):  # it had come to its end: begin again
            shutil.rmtree(place)
            place.mkdir()
    live(place / "c", log)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert all(expected[t] == digest for t, digest in lines)
    assert {t for t, _ in lines} == set(expected)


@FORKS
def test_another_program_is_refused_at_the_first_step_that_differs(tmp_path: Path) -> None:
    path, log = tmp_path / "c", tmp_path / "log"
    child = os.fork()
    if child == 0:
        try:
            release = Journal.release

            def dies_at_sixty(self: Journal, step: int, digest: str) -> None:
                release(self, step, digest)
                if step == 60:
                    os._exit(0)

            Journal.release = dies_at_sixty  # type: ignore[method-assign]
            live(path, log, every=40)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # The checkpoint of step 40 is there, and steps 40 to 60 were released after it.
    with pytest.raises(TrainingError, match="step 40 was made before from this checkpoint, with another result"):
        live(path, log, slope=0.2)


@FORKS
def test_two_processes_at_once(tmp_path: Path) -> None:
    """Two processes that go on from one checkpoint at the same time: at most one of them gets through."""
    path = tmp_path / "c"
    first = Plain()
    first.noise.next()
    first.save(path)
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                run = Plain(slope=0.1 * number)
                run.load(path)
                run.train(tmp_path / f"own-{number}", tmp_path / f"log-{number}", every=1000)
                os._exit(0)
            except BaseException:
                os._exit(1)
        children.append(child)
    finished = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children]
    assert sum(finished) <= 1
    made = [line.split()[1] for line in journal_of(tmp_path).read_text().splitlines() if line.startswith("step")]
    assert len(made) == len(set(made)) or sum(finished) == 0
