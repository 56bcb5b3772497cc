"""SIGKILL at random moments: what was finished is there afterwards, nothing is computed twice, nothing corrupt is read.

`python -m soundness faults` kills a calibration with its disk cache, a figure run and a training run a hundred times
each, restarts every one of them, and puts the counts into docs/soundness.md.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from soundness import summary

_UNITS = 4


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
    """Six strategies that are optimised, cached and calibrated; every optimisation is noted when it begins."""
    import dpmf
    from dpmf.accountants import Gaussian
    from dpmf.strategies import cache

    os.environ["DPMF_CACHE_DIR"] = str(place / "cache")
    cache.forget()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    say = cache._say
    cache._say = lambda text: (_note(place / "begun", text) if "optimising" in text else None, say(text))[1]  # type: ignore[func-returns-value]
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
    """Six cells of the figures; every computation is noted when it begins."""
    from dpmf_experiments import backends, engine
    from dpmf_experiments.spec import Cell, MechanismSpec
    from dpmf_experiments.store import Store

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
    from dpmf_experiments.store import Store

    if not (place / "figures.sqlite").exists():
        return 0
    try:
        with Store.open(place / "figures.sqlite") as store:
            return sum(1 for _ in store)
    except ValueError:  # killed before the table was made
        return 0


# --- a training run --------------------------------------------------------------------------------------------------


def train(place: Path) -> None:
    """Noise for a small model, with a checkpoint after every step; each row of noise is noted by its digest."""
    import dpmf
    from dpmf.training import NoiseStream, checkpoint

    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(5, _UNITS))
    stream = NoiseStream(mechanism, [(40, 30), (30,)], seed=3)
    file = place / "state.ckpt"
    weights = np.zeros(1230)
    if file.exists():
        state = checkpoint.load(file)
        stream.load_state_dict(state["noise"])
        weights = state["weights"]
    while stream.step < mechanism.allocation.iterations:
        step = stream.step
        rows = np.concatenate([np.asarray(row).ravel() for row in stream.next()])
        _note(place / "begun", f"{step} {hashlib.sha256(rows.tobytes()).hexdigest()}")
        weights = weights + rows
        checkpoint.save(file, {"noise": stream.state_dict(), "weights": weights})
    _note(place / "answers", json.dumps({"weights": hashlib.sha256(weights.tobytes()).hexdigest()}))


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
    "a figure run": Job(draw_figures, cells_kept, _UNITS, "dpmf_experiments"),
    "a training run with checkpoints": Job(train, steps_kept, 5 * _UNITS, "dpmf.training"),
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


def kill_and_resume(name: str, kills: int, seed: int, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Kill the job so many times, each in a place of its own, restart it, and compare with a run left alone."""
    job = JOBS[name]
    rng = np.random.default_rng(seed)
    counts: dict[str, Any] = {"kills": 0, "finished": 0, "lost": 0, "corrupt": 0, "problems": []}
    with tempfile.TemporaryDirectory() as directory:
        alone = Path(directory) / "alone"
        alone.mkdir()
        _to_the_end(job, alone)
        began = time.monotonic()
        second = Path(directory) / "second"
        second.mkdir()
        _to_the_end(job, second)
        whole = time.monotonic() - began
        expected, order = _notes(alone / "answers"), _notes(alone / "begun")
        for number in range(kills):
            place = Path(directory) / str(number)
            place.mkdir()
            process = _start(job, place)
            process.join(float(rng.uniform(0, whole)))
            process.kill()
            process.join()
            counts["kills"] += 1
            counts["finished"] += bool(_notes(place / "answers"))
            _compare(job, place, expected, order, counts, f"kill {number}")
            tick()
    return counts


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m soundness faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", choices=list(JOBS))
    parser.add_argument("--no-docs", action="store_true")
    options = parser.parse_args(arguments)
    from rich.console import Console
    from rich.progress import Progress

    runs = summary.load().get("faults", {}).get("runs", {})
    bad: list[str] = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        for name, job in JOBS.items():
            if options.job not in (None, name) or not available(job):
                continue
            task = bar.add_task(name, total=options.kills)
            found = kill_and_resume(name, options.kills, options.seed, lambda task=task: bar.advance(task))
            bad += found.pop("problems")
            runs[name] = found
            print(name, found, flush=True)
    print("\n".join(bad))
    if not options.no_docs:
        summary.store("faults", {"seed": options.seed, "runs": runs})
    return 1 if bad else 0
