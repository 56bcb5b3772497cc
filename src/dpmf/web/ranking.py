"""What the first tab of the page shows: designs ranked by error, with DP-SGD as the baseline, found step by step.

DP-SGD is certified at once and is a first answer. The search of `dpmf.design` then refines it in rounds: each goes
on where the one before stopped, because finished work is kept on disk.
"""

from __future__ import annotations

import queue
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpmf import progress
from dpmf.batching import batches_from_size
from dpmf.designs import Design, Option, design
from dpmf.formatting import given, upper
from dpmf.web.request import DELTAS, EPSILONS, MOST_BATCHES, MOST_EPOCHS, MOST_ITERATIONS, number, optional
from dpmf.workloads import Workload, damped, prefix

MOST_RECORDS = 10**9
MEMORIES = (1.0, 1e6)
MOST_COPIES = 1000
ROUNDS = (10.0, 40.0, 90.0)  # seconds of each round of the search
_FIRST_SECONDS = 30.0  # the time that DP-SGD with one batching may take


@dataclass(frozen=True)
class DesignRequest:
    """The size of a run, the target, and what the model does with noise.

    Attributes:
      memory: iterations after which the model forgets a step; None for prefix sums.
      copies: how many copies of the model the noise may keep; None for any number.
    """

    dataset_size: int
    batch_size: int
    epochs: int
    epsilon: float
    delta: float
    memory: float | None = None
    copies: int | None = None

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches that the sizes stand for."""
        return batches_from_size(self.dataset_size, self.batch_size)

    @property
    def workload(self) -> Workload:
        """How noise adds up in the model."""
        return prefix() if self.memory is None else damped(self.memory)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        return {"kind": "design", **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DesignRequest:
        """Read what `to_dict` wrote."""
        return cls(**{name: value for name, value in values.items() if name != "kind"})

    def shell(self) -> str:
        """The command line that searches for the same, without a limit on the number of batches."""
        words = ["dpmf", "design", "--dataset-size", str(self.dataset_size), "--batch-size", str(self.batch_size)]
        words += ["--epochs", str(self.epochs), "--epsilon", repr(self.epsilon), "--delta", repr(self.delta)]
        if self.memory is not None:
            words += ["--workload", "damped", "--memory", repr(self.memory)]
        if self.copies is not None:
            words += ["--copies", str(self.copies)]
        return shlex.join(words)


def parse_design(fields: Mapping[str, str]) -> tuple[DesignRequest | None, dict[str, str]]:
    """Check what was typed into the first tab.

    Args:
      fields: the text of each field, by name.

    Returns:
      The request and no messages, or None and a message for each field that is wrong.
    """
    problems: dict[str, str] = {}
    values: dict[str, Any] = {}
    readers = {
        "dataset_size": number(1, MOST_RECORDS, whole=True),
        "batch_size": number(1, MOST_RECORDS, whole=True),
        "epochs": number(1, MOST_EPOCHS, whole=True),
        "epsilon": number(*EPSILONS),
        "delta": number(*DELTAS),
        "memory": optional(number(*MEMORIES)),
        "copies": optional(number(0, MOST_COPIES, whole=True)),
    }
    for name, read in readers.items():
        try:
            values[name] = read(name, str(fields.get(name, "")).strip())
        except ValueError as error:
            problems[name] = str(error)
    if problems:
        return None, problems
    request = DesignRequest(**values)
    if request.batch_size > request.dataset_size:
        return None, {"batch_size": f"batch_size must be at most the dataset size, got {request.batch_size}"}
    batches = request.batches_per_epoch
    if batches > MOST_BATCHES:
        least = -(-request.dataset_size // MOST_BATCHES)
        return None, {
            "batch_size": f"batch_size must be at least {least} on this page, which has at most {MOST_BATCHES} batches"
        }
    if batches * request.epochs > MOST_ITERATIONS:
        return None, {"epochs": f"epochs × batches must be at most {MOST_ITERATIONS} on this page"}
    return request, {}


@dataclass(frozen=True)
class RankedRow:
    """One mechanism of the table.

    Attributes:
      strategy, needs: its strategy, and what training has to do for it, in words.
      error: that of the noise in the model, at clipping norm 1.
      relative: the error relative to that of the baseline.
      noise_multiplier: σ.
      certified: whether σ is guaranteed; otherwise it is a sampled estimate, and not to be used.
      copies: how many copies of the model the noise keeps.
      baseline: whether this is DP-SGD with its best batching.
    """

    strategy: str
    needs: str
    error: float
    relative: float
    noise_multiplier: float
    certified: bool
    copies: int
    baseline: bool


@dataclass(frozen=True)
class Ranking:
    """What is known so far: guaranteed mechanisms first, least error first. Empty before the first answer.

    Attributes:
      code: the lines of Python that train with the first row.
      finished: whether every mechanism that could still win has a guaranteed noise multiplier.
      done, steps, doing: progress.
      complete: whether nothing more will be computed.
    """

    rows: tuple[RankedRow, ...] = ()
    code: str = ""
    finished: bool = False
    done: int = 0
    steps: int = 1
    doing: str = ""
    complete: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ranking:
        """Read what `to_dict` wrote."""
        return cls(**{**values, "rows": tuple(RankedRow(**row) for row in values["rows"])})


def rankings(request: DesignRequest, rounds: Sequence[float] = ROUNDS) -> Iterator[Ranking]:
    """Find better and better rankings; the last one is complete.

    Args:
      request: the run and the target.
      rounds: seconds of each round of the search, after DP-SGD.

    **Formal guarantees.** The noise multipliers of certified rows are those of `dpmf.design`.
    """
    steps: list[tuple[str, dict[str, Any]]] = [
        (f"DP-SGD, {words}", {"batchings": [name], "bandwidths": [1], "time_budget": _FIRST_SECONDS})
        for name, words in (("fixed", "fixed bins"), ("poisson", "Poisson sampling"), ("reshuffled", "new bins"))
        if name != "reshuffled" or request.epochs > 1
    ]
    steps += [("searching", {"time_budget": seconds, "copies": request.copies}) for seconds in rounds]
    known: dict[str, Option] = {}
    ranking = Ranking(steps=len(steps))
    last: Design | None = None
    for place, (words, options) in enumerate(steps):
        ranking = replace(ranking, done=place, doing=words)
        yield ranking
        for found in _followed(request, options):
            if isinstance(found, str):
                yield replace(ranking, doing=f"{words}: {found}")
                continue
            last = found
            for option in (found.best, *found.others):
                _keep(known, option)
            ranking = _ranked(ranking, known, found)
        if last is not None and words == "searching" and last.complete:
            break
    yield replace(ranking, done=len(steps), doing="", complete=True)


def _followed(request: DesignRequest, options: dict[str, Any]) -> Iterator[str | Design]:
    """Run one search in a thread and yield what it says of itself, then the design; nothing where there is none."""
    said: queue.Queue[str | Design | BaseException | None] = queue.Queue()

    def tell(words: str) -> None:
        if " mechanisms" in words:  # the search's own words; accountants say more than there is room for
            said.put(words)

    def search() -> None:
        run: dict[str, Any] = {"epochs": request.epochs, "batches_per_epoch": request.batches_per_epoch}
        target: dict[str, Any] = {"target_epsilon": request.epsilon, "target_delta": request.delta}
        try:
            with progress.listening(tell):
                said.put(design(**run, **target, workload=request.workload, **options))
        except ValueError:  # no mechanism of this kind can be certified, or there was no time for it
            pass
        except BaseException as error:
            said.put(error)
        said.put(None)

    threading.Thread(target=search, daemon=True).start()
    shown = 0.0
    while (found := said.get()) is not None:
        if isinstance(found, BaseException):
            raise found
        if not isinstance(found, str) or time.monotonic() - shown > 0.5:
            shown = time.monotonic()
            yield found


def _keep(known: dict[str, Option], option: Option) -> None:
    """Keep the better of two answers for the same mechanism: a guarantee, and the smaller one of two."""
    name = option.mechanism.name
    before = known.get(name)
    if before is None or (option.certified, -option.noise_multiplier) > (before.certified, -before.noise_multiplier):
        known[name] = option


def _ranked(ranking: Ranking, known: Mapping[str, Option], found: Design) -> Ranking:
    options = sorted(known.values(), key=lambda option: (not option.certified, option.error))
    usual = next((o for o in options if o.certified and o.mechanism.strategy.name == "DP-SGD"), None)
    reference = options[0].error if usual is None else usual.error
    rows = tuple(
        RankedRow(
            strategy=option.mechanism.strategy.name,
            needs=option.needs,
            error=option.error,
            relative=option.error / reference,
            noise_multiplier=option.noise_multiplier,
            certified=option.certified,
            copies=option.copies,
            baseline=option is usual,
        )
        for option in options
    )
    return replace(ranking, rows=rows, code=replace(found, best=options[0]).code(), finished=found.complete)


def memory_in_words(copies: int, parameters: int | None) -> str:
    """What the noise keeps in memory: copies of the model, in bytes where the number of parameters is known."""
    words = "nothing" if copies == 0 else "1 copy" if copies == 1 else f"{copies} copies"
    if copies == 0 or parameters is None:
        return words
    return f"{words}, {upper(4 * copies * parameters / 2**20, 3)} MiB"


def in_words(request: DesignRequest) -> str:
    """The run and the guarantee, in one line."""
    batches = request.batches_per_epoch
    epochs = "1 epoch" if request.epochs == 1 else f"{request.epochs} epochs"
    return (
        f"{request.dataset_size:,} records, {epochs} of {batches:,} batches: "
        f"{request.epochs * batches:,} iterations. Guarantee: ({given(request.epsilon)}, {given(request.delta)})-DP, "
        "where the place of one record is left empty."  # the number of batches comes from that of records
    )
