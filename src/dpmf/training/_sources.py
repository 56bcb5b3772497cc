"""The randomness of training: functions of a key and of (purpose, step, array, chunk), without any hidden state.

Any part of the noise can be computed again from the key alone. So a dense strategy can be streamed without storing past
noise, and a resumed run adds the same bits as one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from dpmf import validation
from dpmf.errors import ArgumentError

KEY_BYTES = 32
NOISE, ALLOCATION, PROBE, GROUPS = 1, 2, 3, 4
FloatArray = np.ndarray[Any, np.dtype[Any]]


def new_key(seed: int | bytes | None) -> bytes:
    """Return a secret key from the operating system, or the key that belongs to a seed, for repeatable experiments."""
    if seed is None:
        return secrets.token_bytes(KEY_BYTES)
    if isinstance(seed, bytes):
        if len(seed) != KEY_BYTES:
            raise ArgumentError("seed", f"must be an integer or {KEY_BYTES} bytes, got {len(seed)} bytes")
        return seed
    number = validation.integer("seed", seed, at_least=0)
    return hashlib.sha256(b"dpmf training seed %d" % number).digest()


class Source(ABC):
    """Standard normals and integers as a function of a key and of where they are used."""

    name: ClassVar[str]
    secure: ClassVar[bool]

    def __init__(self, key: bytes):
        self.key = key

    @abstractmethod
    def normals(self, purpose: int, step: int, array: int, chunk: int, out: FloatArray) -> None:
        """Fill `out` (float32 or float64, contiguous) with independent standard normals."""

    @abstractmethod
    def integers(self, purpose: int, below: int, size: int, step: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Independent integers, uniform in 0..below−1."""

    def probe(self) -> str:
        """Return a digest of a few numbers, which shows whether libraries still draw the numbers of a checkpoint."""
        parts = []
        for dtype in (np.float32, np.float64):
            out = np.empty(64, dtype=dtype)
            self.normals(PROBE, 0, 0, 0, out)
            parts.append(out.tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


class Fast(Source):
    """numpy's SFC64, seeded anew for every place by a hash of the key and the place.

    Fast and statistically sound, but not made to resist an attacker who sees much of its output.
    """

    name = "fast"
    secure = False

    def _generator(self, purpose: int, step: int, array: int, chunk: int) -> np.random.Generator:
        # Words of fixed width, so that no two places are written the same way.
        place = [word for number in (purpose, step, array, chunk) for word in (number & 0xFFFFFFFF, number >> 32)]
        seed = np.random.SeedSequence(int.from_bytes(self.key, "little"), spawn_key=place)
        return np.random.Generator(np.random.SFC64(seed))

    def normals(self, purpose: int, step: int, array: int, chunk: int, out: FloatArray) -> None:
        self._generator(purpose, step, array, chunk).standard_normal(dtype=out.dtype.type, out=out)

    def integers(self, purpose: int, below: int, size: int, step: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._generator(purpose, step, 0, 0).integers(0, below, size, dtype=np.int64)


class Secure(Source):
    """SHAKE-256 of the key and the place, turned into normals by Box-Muller: cryptographically secure, and slower.

    Without the 256-bit key, the numbers cannot be told from random ones by any known attack. Each pair of normals comes
    from two 53-bit uniforms, so that no value is beyond 8.7 standard deviations (the mass there is 4·10⁻¹⁸).
    """

    name = "secure"
    secure = True
    _BLOCK = 1 << 15  # normals per hash

    def _words(self, label: bytes, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        digest = hashlib.shake_256(b"dpmf noise" + self.key + label).digest(8 * count)
        return np.frombuffer(digest, dtype="<u8")

    def normals(self, purpose: int, step: int, array: int, chunk: int, out: FloatArray) -> None:
        flat = out.reshape(-1)
        for block, start in enumerate(range(0, flat.size, self._BLOCK)):
            part = flat[start : start + self._BLOCK]
            pairs = (part.size + 1) // 2
            label = struct.pack("<5Q", purpose, step, array, chunk, block)
            uniform = ((self._words(label, 2 * pairs) >> np.uint64(11)) + 0.5) * 2.0**-53
            radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
            angle = (2.0 * np.pi) * uniform[pairs:]
            part[:pairs] = radius * np.cos(angle)
            part[pairs:] = (radius * np.sin(angle))[: part.size - pairs]

    def integers(self, purpose: int, below: int, size: int, step: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        # Words at or above the largest multiple of `below` would favour small integers, so they are rejected.
        limit = 2**64 - 2**64 % below
        found: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        have = attempt = 0
        while have < size:
            words = self._words(struct.pack("<5Q", purpose, attempt, step, 0, 0), size - have)
            if limit < 2**64:
                words = words[words < np.uint64(limit)]
            found.append((words % np.uint64(below)).astype(np.int64))
            have += len(found[-1])
            attempt += 1
        return np.concatenate(found)


SOURCES: dict[str, type[Source]] = {source.name: source for source in (Fast, Secure)}


def make_source(source: str, seed: int | bytes | None) -> Source:
    """Return the source of this name, with the key of a seed, or with a fresh secret key if the seed is None."""
    return SOURCES[validation.choice("source", source, tuple(SOURCES))](new_key(seed))
