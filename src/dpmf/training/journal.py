"""The journal of a run: which steps it has released, kept beside its checkpoints.

The noise of a step is a function of the run's secret key. Whoever goes on twice from one checkpoint adds the same noise
twice. If both continuations compute the same bits, the second one releases nothing new. If they differ, because the
learning rate was changed in between, say, then the difference of the two models shows gradients without any noise.

The journal makes this refusable. It is a text file that is only ever appended to:

    dpmf journal 1 <run> 100     the journal of a run, complete from step 100 on
    step 100 <digest>            the noisy gradient of step 100, with this digest, is about to be used
    saved 120                    a checkpoint was written after 120 steps
    resumed 120                  a process goes on after 120 steps; no other may do so any more
    again 100                    the same at the user's explicit wish, although later steps had been released

The line of a step is written before the model changes, so that nothing is released that the journal does not know. The
line of a checkpoint is written after the checkpoint: a kill between the two leaves a run that can be resumed from it.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from dpmf.errors import TrainingError

_HEADER = "dpmf journal 1"


class _Content(NamedTuple):
    """What a file says: the last point released, where the last process went on (−1: none did), digests by step, its
    size, and that of an unfinished last line."""

    last: int
    resumed: int
    digests: dict[int, str]
    size: int
    unfinished: int


class Journal:
    """What one run has released.

    Args:
      run: the name of the run; by default a new one.
      writes: whether this process writes the files. In distributed training, only rank 0 does.
    """

    def __init__(self, run: str | None = None, *, writes: bool = True):
        self.run = run or secrets.token_hex(8)
        self._writes = writes
        self._sizes: dict[Path, int] = {}  # of the files that this process writes
        self._digests: dict[int, str] = {}  # of steps that were made before and will be made again
        self._pending: tuple[Path, _Content, str] | None = None

    @property
    def files(self) -> list[Path]:
        """The files of this run's journal: one in every directory with a checkpoint."""
        return list(self._sizes)

    def begin(self, checkpoint: Path, step: int) -> None:
        """Make sure that there is a journal beside a checkpoint that is about to be written after `step` steps."""
        path = _beside(checkpoint, self.run)
        self._check_alone()
        if path in self._sizes or not self._writes:
            return
        if path.exists():
            raise TrainingError(
                f"{path} is a journal of this run that another process wrote: save into another directory, or remove "
                "it together with the checkpoints beside it"
            )
        self._sizes[path] = 0
        self._append(path, f"{_HEADER} {self.run} {step}", durable=True)

    def saved(self, step: int) -> None:
        """Record that a checkpoint was written after `step` steps."""
        self._append_to_all(f"saved {step}", durable=True)

    def release(self, step: int, digest: str) -> None:
        """Record that the noisy gradient of a step is about to be used.

        Args:
          step: the number of the step.
          digest: of the noisy gradient. If the journal has another one for this step, `TrainingError` is raised.
        """
        known = self._digests.get(step)
        if known is None:
            self._append_to_all(f"step {step} {digest}")
        elif known != digest:
            raise TrainingError(
                f"step {step} was made before from this checkpoint, with another result: the difference of both would "
                "show gradients without noise. Nothing of it was released now. Go on with the same code and settings "
                "as before; if nothing of the earlier steps was shown to anybody, load the checkpoint with "
                "allow_second_continuation=True"
            )
        else:
            self._check_alone()

    @classmethod
    def resume(cls, checkpoint: Path, run: str, step: int, *, allow: bool, writes: bool, once: bool = False) -> Journal:
        """The journal with which a run goes on from a checkpoint; call `resumed` once everything is loaded.

        Args:
          checkpoint: the file that is loaded.
          run: the name of the run, as the checkpoint has it.
          step: how many steps had been made when it was written.
          allow: whether the user has asked to go on although later steps were, or may have been, released.
          writes: whether this process writes the journal.
          once: whether the steps of this run are not written to the journal, so that nothing shows whether two
            continuations are the same.

        Returns:
          A journal that knows which steps will be made again, and with what results. Unless `allow` is set,
          `TrainingError` is raised if a later checkpoint was written, if the journal is missing, or, with `once`, if a
          process has gone on from this point before.
        """
        journal = cls(run, writes=writes)
        path = _beside(checkpoint, run)
        line = f"{'again' if allow else 'resumed'} {step}"
        try:
            found = _read(path, run)
        except FileNotFoundError:
            if not allow:
                raise TrainingError(
                    f"{checkpoint} must be loaded with {path.name} beside it, which says what was released since: move "
                    "both together; if nothing was, load it with allow_second_continuation=True"
                ) from None
            found = _Content(step, -1, {}, 0, 0)
            line = f"{_HEADER} {run} {step}\n{line}"
        if not allow:
            if step < found.last:
                raise TrainingError(
                    f"{checkpoint} was written after {step} steps, and this run has saved the model of step "
                    f"{found.last} since: both would have the same noise, and their difference none. Load the last "
                    "checkpoint; if nothing later was shown to anybody, set allow_second_continuation=True"
                )
            if once and step <= found.resumed:
                raise TrainingError(
                    f"{checkpoint} has been continued before, with the same noise, and compiled steps are not in the "
                    "journal: only one continuation may be shown. If nothing of the other one was or will be shown to "
                    "anybody, or all of it is computed again by the same code, set allow_second_continuation=True"
                )
            journal._digests = {t: digest for t, digest in found.digests.items() if t >= step}
        journal._pending = path, found, line
        return journal

    def resumed(self) -> None:
        """Take the run over: no other process or object can go on with it after this."""
        assert self._pending is not None
        (path, found, line), self._pending = self._pending, None
        if not self._writes:
            return
        if found.unfinished and path.stat().st_size == found.size + found.unfinished:
            os.truncate(path, found.size)
        self._sizes[path] = found.size
        self._append(path, line, durable=True)

    def _append_to_all(self, line: str, *, durable: bool = False) -> None:
        self._check_alone()
        for path in self._sizes:
            self._append(path, line, durable=durable)

    def _append(self, path: Path, line: str, *, durable: bool) -> None:
        """Append a line, whole or not at all; raise `TrainingError` if anybody else has written to the file."""
        content, size = line.encode() + b"\n", self._sizes[path]
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(descriptor, content) != len(content):
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, "the journal cannot be written, the disk is full", str(path))
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._sizes[path] = size + len(content)
        self._check_alone()  # another process may have written at the same moment: then both stop

    def _check_alone(self) -> None:
        for path, size in list(self._sizes.items()):
            try:
                if path.stat().st_size != size:
                    raise TrainingError(
                        f"another process, or another object in this one, has gone on with this run ({path} has lines "
                        "that this one did not write): only one may"
                    )
            except FileNotFoundError:
                del self._sizes[path]  # without it, the checkpoints beside it are refused anyway


def _beside(checkpoint: Path, run: str) -> Path:
    return checkpoint.absolute().parent / f"dpmf-run-{run}.journal"


def _read(path: Path, run: str) -> _Content:
    content = path.read_bytes()
    *lines, unfinished = content.split(b"\n")
    digests: dict[int, str] = {}
    try:
        words = [line.decode().split(" ") for line in lines]
        if " ".join(words[0][:-1]) != f"{_HEADER} {run}":
            raise ValueError
        last, resumed = int(words[0][-1]), -1  # nothing is known about the steps before
        for event, step, *digest in words[1:]:
            t = int(step)
            if event == "step":
                (digests[t],) = digest
            elif event == "saved":
                last = max(last, t)
            elif event == "again":
                last, resumed, digests = t, t, {s: value for s, value in digests.items() if s < t}
            elif event == "resumed":
                resumed = t
            else:
                raise ValueError
    except (ValueError, IndexError):
        raise ValueError(f"journal must be whole, {path} is damaged") from None
    return _Content(last, resumed, digests, len(content) - len(unfinished), len(unfinished))
