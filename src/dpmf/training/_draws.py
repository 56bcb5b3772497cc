"""What the model draws in its forward pass, and what loading draws, from the secret key of the run.

Dropout, augmentation and the like must not draw from generators whose state others know, as after
`torch.manual_seed(0)`: the draws of a batch come one after the other, so that one record more shifts those of all
others. Here they are functions of the key and of the part of a batch that they are for (docs/theory/randomness.md).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_TWISTER = slice(24, 24 + 8 * 624)  # the words of the generator in the state of torch's generator on a CPU


def _states(device: torch.device) -> tuple[Any, ...]:
    """The states of the generators that models and data sets use: torch's, Python's and numpy's."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()  # noqa: NPY002 - what data sets use


def _restore(device: torch.device, states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
    random.setstate(states[2])
    np.random.set_state(states[3])  # noqa: NPY002


def _seed(device: torch.device, secret: bytes) -> None:
    """Begin streams that are functions of a secret.

    Torch's seed would not do on a CPU: only 32 of its bits are used, few enough to try all. So the whole state of the
    Mersenne twister is drawn. On a GPU all 63 bits are used.
    """
    drawn = hashlib.shake_256(secret).digest(2 * 4 * 624 + 40)
    words = np.frombuffer(drawn[40:], dtype="<u4").reshape(2, 624)
    state = torch.Generator().manual_seed(0).get_state()
    state[_TWISTER] = torch.from_numpy(words[0].astype("<i8").view(np.uint8))
    torch.set_rng_state(state)
    np.random.set_state(("MT19937", words[1], 624, 0, 0.0))  # noqa: NPY002
    random.seed(int.from_bytes(drawn[8:40], "little"))
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(int.from_bytes(drawn[:8], "little") >> 1)


class Draws:
    """The generators of one purpose, exchanged for those of the run while a block is active.

    Args:
      key: the secret key of the run; a checkpoint that is loaded brings another one.
      purpose: tells the draws of the model from those of loading.
      device: where the model is.

    **Formal guarantees.** After `restart`, the first block begins from a seed that is a hash of key, purpose and place,
    and every later one goes on where the last one stopped. The draws therefore have the same distribution whichever
    records there are, are independent of bins and noise (up to the quality of the generators), and have the same bits
    in a resumed run. At the end of a block, after an exception too, the user's generators are what they were.
    """

    def __init__(self, key: bytes, purpose: str, device: Any = "cpu"):
        self.key = key
        self._purpose, self._device = f"dpmf draws of {purpose}".encode(), torch.device(device)
        self._place: tuple[int, ...] | None = None
        self._own: tuple[Any, ...] | None = None
        self._active = False

    def __reduce__(self) -> Any:
        return _Usual, ()

    def restart(self, *place: int) -> None:
        """Begin the draws of a part of a batch.

        Args:
          place: what tells it from all other parts of the run: its step and its first record.
        """
        self._place, self._own = place, None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let everything in a block draw from here; without effect inside another block, and before any `restart`."""
        if self._active or self._place is None:
            yield
            return
        users, self._active = _states(self._device), True
        try:
            if self._own is None:
                _seed(self._device, self._purpose + self.key + repr(self._place).encode())
            else:
                _restore(self._device, self._own)
            yield
        finally:
            self._own, self._active = _states(self._device), False
            _restore(self._device, users)

    def forward(self, inner: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The forward pass of a model; in training, as a block."""
        module = getattr(inner, "__self__", None)
        if not (torch.is_grad_enabled() and getattr(module, "training", False)):
            return inner(*arguments, **keywords)
        with self.active():
            return inner(*arguments, **keywords)


class _Usual:
    """Stands for `Draws` in a copied or pickled model, which draws as models do."""

    def forward(self, inner: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return inner(*arguments, **keywords)
