"""A memory for the last few results: accountants come back to the same σ, and what they make for one may be large."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """What was made for each key, of which those used last are kept. Threads wait for what another one makes."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._known: OrderedDict[K, V] = OrderedDict()
        self._lock = RLock()

    def __reduce__(self) -> tuple[type[Recent[K, V]], tuple[int]]:
        """A copy, or what is sent to another process, begins with nothing: a lock cannot be sent."""
        return type(self), (self._kept,)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """What is known for a key, or what is now made for it; nothing is kept where that raises."""
        with self._lock:
            if key not in self._known:
                self._known[key] = make()
                if len(self._known) > self._kept:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]
