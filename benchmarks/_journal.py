"""Answers that take minutes, kept as they come: a run that was stopped asks only for what is missing.

One line of JSON for each answer, in a file that git ignores. A line cut off by a kill is dropped. An answer is found
again by its question and by who gave it: a peer of a version, or our own code by its fingerprint. So a peer's answers,
which do not depend on our code, outlive changes of it, and ours do not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import peers

PLACE = peers.ROOT / "benchmarks-output"

Answer = dict[str, Any]


class Journal:
    """Answers by question and by who gave them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers: dict[str, Answer] = {}
        if path.exists():
            text = path.read_bytes()
            for line in text[: text.rfind(b"\n") + 1].splitlines():
                row = json.loads(line)
                self._answers[_key(row["question"], row["by"])] = row["answer"]

    def find(self, question: Mapping[str, Any], by: str) -> Answer | None:
        return self._answers.get(_key(question, by))

    def learn(self, question: Mapping[str, Any], by: str, answer: Answer) -> None:
        """Know an answer that is kept elsewhere."""
        self._answers[_key(question, by)] = answer

    def add(self, question: Mapping[str, Any], by: str, answer: Answer) -> None:
        """Keep an answer, on disk when this returns; a later one to the same question takes its place."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = json.dumps({"question": dict(question), "by": by, "answer": answer}, ensure_ascii=False) + "\n"
        with self.path.open("a+b") as file:
            end = file.tell()
            file.seek(max(end - 1, 0))
            if end and file.read(1) != b"\n":  # a kill cut the last line off
                text = self.path.read_bytes()
                file.truncate(text.rfind(b"\n") + 1)
            file.write(row.encode())
            file.flush()
            os.fsync(file.fileno())
        self.learn(question, by, answer)


def _key(question: Mapping[str, Any], by: str) -> str:
    return json.dumps([dict(question), by], sort_keys=True)
