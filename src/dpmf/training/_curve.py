"""ε after so many steps, without waiting for it twice: kept in memory and on disk, computed ahead in the background.

The curve is exact: every value is the bound of the accountant for the steps asked about. What is computed ahead are the
steps that are likely to be asked about next. That work is done by another process, so that training does not wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import dpmf
from dpmf import api
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.errors import ArgumentError
from dpmf.files import write_atomically
from dpmf.mechanism import Mechanism
from dpmf.results import PrivacyBound
from dpmf.strategies.cache import directory
from dpmf.training._schedule import description
from dpmf.training.noise import strategy_digest

SLOW = 2.0  # seconds. After a question that took longer, the next ones are answered in the background.


class Question(NamedTuple):
    """What ε a mechanism has at a noise multiplier and a δ, according to an accountant."""

    mechanism: Mechanism
    sigma: float
    delta: float
    accountant: api.AnyAccountant

    def compute(self) -> float:
        """The bound of the accountant."""
        answer = api.epsilon(
            self.mechanism, noise_multiplier=self.sigma, delta=self.delta, accountant=self.accountant
        )  # fmt: skip
        if not isinstance(answer, PrivacyBound):
            raise ArgumentError("accountant", f"must be one that proves its bound, {answer.accountant} estimates it")
        return answer.epsilon

    def digest(self) -> str:
        """What tells this question, and the code that answers it, apart from all others."""
        batching = self.mechanism.batching
        parts = (
            strategy_digest(self.mechanism.strategy, batching.iterations),
            sorted((name, repr(value)) for name, value in description(batching).items()),
            self.sigma.hex(),
            self.delta.hex(),
            repr(self.accountant),
            _code(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """A digest of dpmf's own files: a bound that was computed by other code is not used again."""
    root = Path(dpmf.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def _file(digest: str) -> Path:
    return directory() / f"epsilon-{digest}.json"


def _stored(digest: str) -> float | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(_file(digest).read_text())
        value = float(told["epsilon"])
        if told["question"] == digest and value >= 0 and not math.isnan(value):
            return value
    return None


def _answer(question: Question, digest: str) -> float:
    """Compute an answer and put it into the cache, if that can be written."""
    value = question.compute()
    if math.isfinite(value):
        with contextlib.suppress(OSError):
            _file(digest).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(_file(digest), json.dumps({"question": digest, "epsilon": value}).encode())
    return value


class Curve:
    """Answers questions about one run."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self._ahead: list[str] = []  # what the process in the background will answer, in this order
        self._news = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None

    def __reduce__(self) -> Any:
        return Curve, ()

    def ask(self, question: Question, following: Callable[[], Iterable[Question]]) -> float:
        """The answer to a question.

        Args:
          question: the question.
          following: returns what is likely to be asked next. It is called if the answer takes long to compute.
        """
        if isinstance(question.accountant, PreparedAccountant):
            return question.compute()
        digest = question.digest()
        with self._news:
            while digest not in self._known and self._ahead[:1] == [digest]:
                self._news.wait()
        if digest not in self._known:
            began = time.monotonic()
            stored = _stored(digest)
            self._known[digest] = _answer(question, digest) if stored is None else stored
            if time.monotonic() - began > SLOW:
                self.ahead(following())
        return self._known[digest]

    def known(self, question: Question) -> float:
        """The answer, if it need not be computed, and otherwise infinity."""
        if isinstance(question.accountant, PreparedAccountant):
            return math.inf
        digest = question.digest()
        found = self._known[digest] if digest in self._known else _stored(digest)
        return math.inf if found is None else found

    def ahead(self, questions: Iterable[Question]) -> None:
        """Begin to answer questions in the background, unless another process of this run does so already."""
        if self._ahead:
            return
        todo = {question.digest(): question for question in questions}
        todo = {d: q for d, q in todo.items() if d not in self._known and _stored(d) is None}
        try:
            work = pickle.dumps(todo)
        except (pickle.PicklingError, TypeError, AttributeError):  # a strategy of the user's own
            return
        if not todo:
            return
        command = [sys.executable, "-m", "dpmf.training._curve"]
        path = os.pathsep.join([str(Path(dpmf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        )
        self._ahead = list(todo)
        weakref.finalize(self, self._process.kill)  # also when this process ends
        threading.Thread(target=self._listen, args=(self._process, work), daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes], work: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(work)
            process.stdin.close()
            for line in process.stdout:
                digest, value = line.split()
                with self._news:
                    self._known[digest.decode()] = float(value)
                    self._ahead.remove(digest.decode())
                    self._news.notify_all()
        process.wait()
        with self._news:
            self._ahead.clear()
            self._news.notify_all()


def main() -> None:
    """Answer the questions that another process has written to stdin, with what the processor has to spare."""
    with contextlib.suppress(OSError):
        os.nice(10)
    for digest, question in pickle.load(sys.stdin.buffer).items():  # from the process that started this one
        value = _answer(question, digest)
        print(digest, repr(value), flush=True)


if __name__ == "__main__":
    from dpmf.training import _curve

    _curve.main()
