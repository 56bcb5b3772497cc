"""The operations on flat arrays that streaming noise needs, with numpy and with torch on a CPU or a GPU."""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Protocol

import numpy as np

from dpmf import errors, validation
from dpmf.training._sources import NOISE, Source

# Chunks that stay in the processor's cache make the multiply-adds nearly free, compared with drawing the normals. Each
# chunk has a seed of its own, so another size gives other noise from the same key and needs a new `noise.FORMAT`.
CHUNK = 1 << 16


class Backend(Protocol):
    """Flat arrays of one dtype, processed `chunk` elements at a time."""

    chunk: int

    def zeros(self, size: int) -> Any: ...
    def empty(self, size: int) -> Any: ...
    def scratch(self, name: str, size: int) -> Any: ...
    def assign(self, out: Any, x: Any, weight: float) -> None: ...
    def add(self, out: Any, x: Any, weight: float) -> None: ...
    def scaled(self, x: Any, weight: float) -> Any: ...
    def normals(self, source: Source, step: int, array: int, chunk: int, out: Any) -> None: ...
    def generator(self, source: Source) -> str: ...
    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]: ...
    def from_numpy(self, x: np.ndarray[Any, Any]) -> Any: ...


class NumpyBackend:
    chunk = CHUNK

    def __init__(self, dtype: str):
        self._dtype = np.dtype(dtype)
        self._scratch: dict[str, np.ndarray[Any, Any]] = {}

    def zeros(self, size: int) -> Any:
        return np.zeros(size, dtype=self._dtype)

    def empty(self, size: int) -> Any:
        return np.empty(size, dtype=self._dtype)

    def scratch(self, name: str, size: int) -> Any:
        if name not in self._scratch:
            self._scratch[name] = np.empty(CHUNK, dtype=self._dtype)
        return self._scratch[name][:size]

    def assign(self, out: Any, x: Any, weight: float) -> None:
        np.multiply(x, self._dtype.type(weight), out=out)

    def add(self, out: Any, x: Any, weight: float) -> None:
        product = self.scratch("product", len(out))
        np.multiply(x, self._dtype.type(weight), out=product)
        out += product

    def scaled(self, x: Any, weight: float) -> Any:
        out = self.scratch("scaled", len(x))
        self.assign(out, x, weight)
        return out

    def normals(self, source: Source, step: int, array: int, chunk: int, out: Any) -> None:
        source.normals(NOISE, step, array, chunk, out)

    def generator(self, source: Source) -> str:
        return source.name

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.array(x)

    def from_numpy(self, x: np.ndarray[Any, Any]) -> Any:
        return np.array(x, dtype=self._dtype)


class TorchBackend:
    """The torch backend: on a CPU numpy draws its normals, so that both backends agree; on a GPU torch does."""

    def __init__(self, dtype: str, device: Any):
        import torch

        self._torch = torch
        self._dtype = getattr(torch, dtype)
        self._device = torch.device("cpu" if device is None else device)
        self._on_cpu = self._device.type == "cpu"
        self.chunk = CHUNK if self._on_cpu else 1 << 62
        self._scratch: dict[str, Any] = {}
        self._generator = None if self._on_cpu else torch.Generator(device=self._device)

    def zeros(self, size: int) -> Any:
        return self._torch.zeros(size, dtype=self._dtype, device=self._device)

    def empty(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._dtype, device=self._device)

    def scratch(self, name: str, size: int) -> Any:
        if not self._on_cpu:  # torch's caching allocator is fast, so no large array is kept
            return self.empty(size)
        if name not in self._scratch:
            self._scratch[name] = self.empty(CHUNK)
        return self._scratch[name][:size]

    def assign(self, out: Any, x: Any, weight: float) -> None:
        self._torch.mul(x, weight, out=out)

    def add(self, out: Any, x: Any, weight: float) -> None:
        out.add_(x, alpha=weight)

    def scaled(self, x: Any, weight: float) -> Any:
        return x * weight

    def normals(self, source: Source, step: int, array: int, chunk: int, out: Any) -> None:
        if self._on_cpu:
            source.normals(NOISE, step, array, chunk, out.numpy())
            return
        if source.secure:
            raise errors.ArgumentError("source", "must be fast on a GPU: the secure generator runs on the CPU")
        assert self._generator is not None
        # A 63-bit seed per draw (torch takes no negative ones), from the 256-bit key and the place.
        label = hashlib.sha256(source.key + struct.pack("<3Q", step, array, chunk)).digest()
        self._generator.manual_seed(int.from_bytes(label[:8], "little") >> 1)
        out.normal_(generator=self._generator)

    def generator(self, source: Source) -> str:
        return source.name if self._on_cpu else f"torch {self._device.type}"

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.array(x.detach().cpu().numpy())

    def from_numpy(self, x: np.ndarray[Any, Any]) -> Any:
        return self._torch.tensor(x, dtype=self._dtype, device=self._device)


def make(name: str, dtype: str, device: Any) -> Backend:
    if validation.choice("backend", name, ("numpy", "torch")) == "numpy":
        if device is not None:
            raise validation.wrong("device", "given with backend torch only", device)
        return NumpyBackend(dtype)
    try:
        return TorchBackend(dtype, device)
    except ImportError:
        raise errors.missing_extra("torch", "torch", "backend torch") from None
