"""Users as the unit of privacy: which records belong to whom."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.errors import ArgumentError

IndexArray = np.ndarray[Any, np.dtype[np.int64]]


class Units:
    """The users of a data set, numbered in the order in which their first records appear.

    Args:
      ids: for every record the user it belongs to: integers, strings or other values that can be compared for equality.
      records: the number of records.

    Attributes:
      of: for every record the number of its user.
      digest: of `of`, for checkpoints.
    """

    def __init__(self, ids: Any, records: int):
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise validation.wrong("unit", "a sequence with the user of every record", ids)
        given = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if not isinstance(given, list) or len(given) != records:
            found = len(given) if isinstance(given, list) else 1
            raise ArgumentError("unit", f"must have one user for each of the {records} records, got {found}")
        numbers: dict[Any, int] = {}
        of = np.empty(records, dtype=np.int64)
        for record, user in enumerate(given):
            if user is None or user != user or user == "":  # NaN is not equal to itself
                raise ArgumentError("unit", f"must name a user for every record, record {record} has {user!r}")
            try:
                of[record] = numbers.setdefault(user, len(numbers))
            except TypeError:
                raise validation.wrong("unit", f"a sequence of plain values, record {record} has", user) from None
        self.of = of
        self._order = np.argsort(of, kind="stable")
        self._starts = np.append(0, np.cumsum(np.bincount(of, minlength=len(numbers))))
        self.digest = hashlib.sha256(of.astype("<u8").tobytes()).hexdigest()[:32]

    def __len__(self) -> int:
        """The number of users."""
        return len(self._starts) - 1

    @property
    def sizes(self) -> IndexArray:
        """How many records every user has."""
        return np.diff(self._starts)

    @property
    def table(self) -> IndexArray:
        """The records of every user in a row, filled up with −1, and a last row for nobody."""
        found = np.full((len(self) + 1, int(self.sizes.max())), -1, dtype=np.int64)
        place = np.arange(len(self.of)) - self._starts[self.of[self._order]]
        found[self.of[self._order], place] = self._order
        return found

    def of_rows(self, rows: IndexArray) -> IndexArray:
        """The users of the rows of a batch. A row −1 that only fills it up counts as a user of its own, below 0."""
        return np.where(rows < 0, -1 - np.arange(len(rows)), self.of[rows])

    def records_of(self, users: IndexArray) -> IndexArray:
        """All records of some users, user by user."""
        parts = [self._order[self._starts[user] : self._starts[user + 1]] for user in users]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
