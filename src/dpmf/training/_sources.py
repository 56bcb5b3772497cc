"""The randomness of training: functions of a key and of (purpose, step, array, element), without any hidden state.

Any part of the noise can be computed again from the key alone. So a dense strategy can be streamed without storing past
noise, a resumed run adds the same bits as one that was never interrupted, and any number of processes that each draw a
part of it draw the same bits together.
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
from dpmf.kernels import noise as kernels
from dpmf.training._shards import Indices

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
    rounds: ClassVar[int]

    def __init__(self, key: bytes):
        self.key = key
        self._place: tuple[int, int, int] | None = None
        self._words = np.zeros(8, np.uint32)

    def normals(self, purpose: int, step: int, array: int, runs: tuple[Indices, Indices], out: FloatArray) -> None:
        """Fill `out` (float32 or float64, contiguous) with the standard normals of some elements of an array.

        Args:
          purpose, step, array: the place. Each has a key of its own, a hash of this source's key and the place.
          runs: the first element and the length of every run of elements.
          out: one number for every element.

        **Formal guarantees.** Numbers come from ChaCha with a 256-bit key. In double precision they are those of
        Box-Muller with two 53-bit uniforms, up to a relative error of about 10⁻¹⁵. In single precision the uniforms
        have 32 bits, and the relative error is at most 10⁻⁶. The one behind the radius has 64 bits where it is below
        2⁻¹⁶, and 96 where it is below 2⁻⁴⁸, so that tails are followed to 11.59 standard deviations. Were
        the missing bits drawn as well, so that the numbers were exactly normal, no number would move by more than
        3·10⁻⁶, except where the radius is below 10⁻⁴ (5·10⁻⁹ of all pairs), and there by less than 10⁻⁴.
        """
        if self._place != (purpose, step, array):
            self._words = self.words(purpose, step, array)
            self._place = purpose, step, array
        kernels.normals(self._words, self.rounds, *runs, out)

    def words(self, purpose: int, step: int, array: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The eight words of the key of a place."""
        label = b"dpmf noise" + self.key + struct.pack("<3Q", purpose, step, array)
        return np.frombuffer(hashlib.sha256(label).digest(), dtype="<u4").astype(np.uint32)

    @abstractmethod
    def integers(self, purpose: int, below: int, size: int, step: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Independent integers, uniform in 0..below−1."""

    def probe(self) -> str:
        """Return a digest of a few numbers, which shows whether libraries still draw the numbers of a checkpoint."""
        parts = []
        for dtype in (np.float32, np.float64):
            out = np.empty(64, dtype=dtype)
            self.normals(PROBE, 0, 0, (np.array([0]), np.array([64])), out)
            parts.append(out.tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


class Fast(Source):
    """Noise from ChaCha with 8 rounds; integers from numpy's SFC64, seeded by a hash of the key and the purpose.

    Published attacks on ChaCha stop short of 8 rounds, and none is practical. The margin is small, though: `Secure` has
    a large one.
    """

    name = "fast"
    secure = False
    rounds = 8

    def integers(self, purpose: int, below: int, size: int, step: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        # Words of fixed width, so that no two places are written the same way.
        place = [word for number in (purpose, step, 0, 0) for word in (number & 0xFFFFFFFF, number >> 32)]
        seed = np.random.SeedSequence(int.from_bytes(self.key, "little"), spawn_key=place)
        return np.random.Generator(np.random.SFC64(seed)).integers(0, below, size, dtype=np.int64)


class Secure(Source):
    """Noise from ChaCha20, as in TLS; integers from SHAKE-256 of the key and the purpose.

    Without the 256-bit key, the numbers cannot be told from random ones by any known attack.
    """

    name = "secure"
    secure = True
    rounds = 20

    def integers(self, purpose: int, below: int, size: int, step: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        # Words at or above the largest multiple of `below` would favour small integers, so they are rejected.
        limit = 2**64 - 2**64 % below
        found: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        have = attempt = 0
        while have < size:
            label = b"dpmf noise" + self.key + struct.pack("<5Q", purpose, attempt, step, 0, 0)
            words = np.frombuffer(hashlib.shake_256(label).digest(8 * (size - have)), dtype="<u8")
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
