"""SIGKILL at random moments: what was finished is there afterwards, nothing is computed twice, nothing corrupt is read.

`python -m soundness faults` kills a calibration with its disk cache, a figure run and a training run a hundred times
each, restarts every one of them, and puts the counts into docs/data/soundness.json and docs/soundness.md. It goes on
where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from soundness import provenance, summary
from soundness.journal import PLACE, Journal, Row
from soundness.progress import shown

KILLS = 100
HARNESS = ("soundness/faults.py", "soundness/warm.py", "evidence")
_UNITS = 4
_ATTEMPTS = 30


def _note(path: Path, line: str) -> None:
    """Append a line in one write: it is there whole or not at all."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode() + b"\n")
    finally:
        os.close(handle)


def _notes(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# --- a calibration with its disk cache -------------------------------------------------------------------------------


def calibrate(place: Path) -> None:
    """A few strategies that are optimised, cached and calibrated; every optimisation is noted when it begins."""
    import dpmf
    from dpmf import store
    from dpmf.accountants import Gaussian

    os.environ["DPMF_CACHE_DIR"] = str(place / "cache")
    store.forget()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    say = store._say
    store._say = lambda text: (_note(place / "begun", text) if "optimising" in text else None, say(text))[1]  # type: ignore[func-returns-value]
    found = {}
    for batches in range(3, 3 + _UNITS):
        mechanism = dpmf.Mechanism(dpmf.strategies.bandinvmf(2), dpmf.BallsInBins(2, batches))
        answer = dpmf.calibrate(mechanism, target_epsilon=1.0, target_delta=1e-5, accountant=Gaussian())
        found[str(batches)] = answer.noise_multiplier.hex()
    _note(place / "answers", json.dumps(found, sort_keys=True))


def calibrations_kept(place: Path) -> int:
    return len(list((place / "cache").glob("*.json")))


# --- a figure run ----------------------------------------------------------------------------------------------------


def draw_figures(place: Path) -> None:
    """A few cells of the figures; every computation is noted when it begins."""
    from evidence import backends, engine
    from evidence.spec import Cell, MechanismSpec
    from evidence.store import Store

    def noted(cells: list[Cell], jobs: int) -> Iterator[Any]:
        for cell in cells:
            _note(place / "begun", cell.name)
            yield backends.compute(cell)

    backends.on_cores = noted  # in this process, which is the one that is killed
    spec = MechanismSpec("bsr", 2, 10, 2)
    cells = [Cell.of("divergence", mechanism=spec, order=2, sigma=float(s), bandwidth=1) for s in range(1, 1 + _UNITS)]
    with Store.open(place / "figures.sqlite", create=True) as store:
        engine.run(store, cells, jobs=1)
        found = {str(cell.parameters["sigma"]): record.result for cell, record in store.results(cells).items()}
    _note(place / "answers", json.dumps(found, sort_keys=True))


def cells_kept(place: Path) -> int:
    from evidence.store import Store

    if not (place / "figures.sqlite").exists():
        return 0
    try:
        with Store.open(place / "figures.sqlite") as store:
            return sum(1 for _ in store)
    except ValueError:  # killed before the table was made
        return 0


# --- a training run --------------------------------------------------------------------------------------------------


def train(place: Path) -> None:
    """A private run with Opacus and a checkpoint after every step; each noisy gradient is noted by its digest."""
    import torch

    import dpmf
    from dpmf.training import make_private

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 40)
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(5, _UNITS))
    records = torch.utils.data.TensorDataset(torch.randn(50, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = make_private(model, optimizer, records, mechanism, noise_multiplier=1.0, max_grad_norm=1.0, seed=3)
    file = place / "state.ckpt"
    if file.exists():
        run.load(file)

    def digest() -> str:
        gradients = [p.grad.numpy().tobytes() for p in model.parameters()]
        return hashlib.sha256(b"".join(gradients)).hexdigest()

    while run.steps_left:
        for (x,) in run.data_loader:
            step = run.steps_made
            run.optimizer.zero_grad()
            run.model(x).square().mean().backward()
            run.optimizer.step()
            _note(place / "begun", f"{step} {digest()}")
            run.save(file)
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    _note(place / "answers", json.dumps({"weights": weights.hexdigest()}))


def steps_kept(place: Path) -> int:
    from dpmf.training import checkpoint

    file = place / "state.ckpt"
    return int(checkpoint.load(file)["noise"]["step"]) if file.exists() else 0


# --- killing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What runs, in how many units, and how many of them are on disk."""

    run: Callable[[Path], None]
    kept: Callable[[Path], int]
    units: int
    needs: str


JOBS: dict[str, Job] = {
    "a calibration with its disk cache": Job(calibrate, calibrations_kept, _UNITS, "dpmf"),
    "a figure run": Job(draw_figures, cells_kept, _UNITS, "evidence"),
    "a training run with checkpoints": Job(train, steps_kept, 5 * _UNITS, "opacus"),
}


def available(job: Job) -> bool:
    return importlib.util.find_spec(job.needs) is not None


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["soundness.faults", "soundness.warm"])
    return context


def _start(job: Job, place: Path) -> Any:
    process = _context().Process(target=job.run, args=(place,))
    process.start()
    return process


def _to_the_end(job: Job, place: Path) -> None:
    process = _start(job, place)
    process.join(300)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"{job.run.__name__} ended with {process.exitcode}")


class Bench:
    """A job that is killed again and again, each time in a place of its own, beside two runs that were left alone."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._job, self._directory = name, JOBS[name], directory
        alone, second = directory / "alone", directory / "second"
        alone.mkdir()
        _to_the_end(self._job, alone)
        began = time.monotonic()
        second.mkdir()
        _to_the_end(self._job, second)
        self._whole = time.monotonic() - began  # how long it takes; the first also started the server
        self._expected, self._order = _notes(alone / "answers"), _notes(alone / "begun")

    def kill(self, number: int, seed: int) -> dict[str, Any]:
        """Kill it at a random moment while it runs, restart it, compare.

        Where it has finished by then, that was no kill: it is counted, compared all the same, and another is made.
        """
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode()), number])
        counts: dict[str, Any] = {"kills": 0, "finished": 0, "lost": 0, "corrupt": 0, "problems": []}
        for attempt in range(_ATTEMPTS):
            place = self._directory / f"{number} {attempt}"
            place.mkdir()
            process = _start(self._job, place)
            process.join(float(rng.uniform(0, self._whole)))
            process.kill()
            process.join()
            killed = process.exitcode == -signal.SIGKILL and not _notes(place / "answers")
            counts["kills" if killed else "finished"] += 1
            _compare(self._job, place, self._expected, self._order, counts, f"kill {number}")
            shutil.rmtree(place)
            if killed:
                return counts
        raise RuntimeError(f"{self.name} always finishes before it is killed")


def kill_and_resume(name: str, kills: int, seed: int) -> dict[str, Any]:
    """Kill the job so many times, restart it each time, and compare with a run left alone."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(name, Path(directory))
        return total(bench.kill(number, seed) for number in range(kills))


def total(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {"kills": 0, "finished": 0, "lost": 0, "corrupt": 0, "problems": []}
    for one in counts:
        sums = {key: sums[key] + one[key] for key in sums}
    return sums


def _compare(job: Job, place: Path, expected: list[str], order: list[str], counts: dict[str, Any], where: str) -> None:
    """Restart after a kill; what was on disk must not be computed again, and the answers must be the same bits."""
    try:
        kept = job.kept(place)
    except Exception as error:  # a file that cannot be read although nobody but the job wrote it
        counts["corrupt"] += 1
        counts["problems"].append(f"{where}: {error}")
        return
    first = len(_notes(place / "begun"))
    _to_the_end(job, place)
    again = _notes(place / "begun")[first:]
    if _notes(place / "answers")[-1:] != expected:
        counts["corrupt"] += 1
        counts["problems"].append(f"{where}: other answers than the run left alone")
    # A unit in flight may be begun twice, a finished one may not; and noise is the same each time it is drawn.
    if len(again) != job.units - kept or again != order[kept:] or kept > first or first > kept + 1:
        counts["lost"] += 1
        counts["problems"].append(f"{where}: {kept} kept, {first} begun before, {len(again)} after")


# --- the whole of it -------------------------------------------------------------------------------------------------


def header(seed: int) -> dict[str, Any]:
    code = {"package": provenance.present()["package"], "harness": provenance.harness(*HARNESS)}
    return {"part": "faults", "format": 1, "seed": seed, **code}


def kills_of(journal: Journal, name: str, kills: int, seed: int) -> Iterator[Row]:
    """The kills of a job, in order; those in the journal are not made again."""
    with tempfile.TemporaryDirectory() as directory:
        bench: Bench | None = None
        for number in range(kills):
            index = f"{name}, {number}"
            if index not in journal.rows:
                bench = bench or Bench(name, Path(directory))
                journal.add({"index": index, "job": name, **bench.kill(number, seed)})
            yield journal.rows[index]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m soundness faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS, help="of each job; fewer than the default are not recorded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", choices=list(JOBS), help="only this one; not recorded")
    parser.add_argument("--journal", type=Path, default=PLACE / "faults.jsonl")
    parser.add_argument("--restart", action="store_true", help="forget what the journal holds")
    parser.add_argument("--no-docs", action="store_true", help="print the counts, leave the docs alone")
    options = parser.parse_args(arguments)
    if options.kills < 1:
        parser.error("--kills must be at least 1")
    names = [name for name, job in JOBS.items() if options.job in (None, name) and available(job)]
    try:
        journal = Journal(options.journal, header(options.seed), options.restart)
    except ValueError as error:
        parser.error(str(error))
    rows: list[Row] = []
    try:
        with shown("faults", options.kills * len(names), "kills", "problems") as tell:
            for name in names:
                for row in kills_of(journal, name, options.kills, options.seed):
                    rows.append(row)
                    tell(len(rows), len(row["problems"]))
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on after {len(journal.rows)} kills", file=sys.stderr)
        return 130
    finally:
        journal.close()
    runs = {name: total(row for row in rows if row["job"] == name) for name in names}
    found = {**summary.measured_with(HARNESS), "seed": options.seed, "runs": runs}
    print(summary.blocks({"faults": found})["faults"])
    problems = [f"{name}: {problem}" for name, run in runs.items() for problem in run["problems"]]
    print("\n".join(problems))
    if not options.no_docs and options.kills >= KILLS and len(names) == len(JOBS):
        summary.store("faults", found)
    return 1 if problems else 0
