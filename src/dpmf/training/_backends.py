"""The operations on flat arrays that streaming noise needs: compiled ones on a CPU, those of torch on another device.

On a GPU with Triton `dpmf.training._gpu` takes the place of the latter.
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from dpmf import errors, validation
from dpmf.kernels import announce_compilation
from dpmf.kernels import noise as kernels
from dpmf.training._shards import Indices
from dpmf.training._sources import NOISE, Source

# Elements that are processed at once on a CPU. They stay in the processor's cache; the noise does not depend on it.
CHUNK = 1 << 16
# Elements that a GPU draws from one seed. Another number gives other noise and needs a new `noise.FORMAT`.
GPU_TILE = 1 << 22


class Backend(Protocol):
    """Flat arrays of one dtype, processed `chunk` elements at a time; what is kept has one row per copy."""

    chunk: int
    fused: bool  # False; `_gpu.TritonBackend`, where it is True, has `add_row` in place of most of what follows

    def kept(self, copies: int, size: int) -> Any: ...
    def empty(self, size: int) -> Any: ...
    def draw(self, source: Source, step: int, array: int, whole: int, runs: tuple[Indices, Indices]) -> Any: ...
    def combine(self, z: Any, kept: Any, start: int, step: int, weights: Any, keep_sum: bool) -> Any: ...
    def drain(self, z: Any, kept: Any, start: int, decay: Any, weights: Any) -> None: ...
    def add(self, out: Any, x: Any, weight: float) -> None: ...
    def scaled(self, x: Any, factor: float) -> Any: ...
    def handed_over(self, z: Any) -> Any: ...
    def generator(self, source: Source) -> str: ...
    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]: ...
    def from_numpy(self, x: np.ndarray[Any, Any]) -> Any: ...


class CpuBackend:
    """numpy arrays and compiled loops. torch sees the same memory."""

    fused = False

    def __init__(self, dtype: str, as_given: Callable[[Any], Any] = lambda x: x):
        self.chunk = CHUNK
        self._dtype = np.dtype(dtype)
        self._normals = np.empty(0, self._dtype)
        self.handed_over = as_given

    def kept(self, copies: int, size: int) -> Any:
        return np.zeros((copies, size), dtype=self._dtype)

    def empty(self, size: int) -> Any:
        return self.handed_over(np.empty(size, dtype=self._dtype))

    def draw(self, source: Source, step: int, array: int, whole: int, runs: tuple[Indices, Indices]) -> Any:
        if len(self._normals) == 0:
            announce_compilation(kernels.normals)
            self._normals = np.empty(self.chunk, self._dtype)
        out = self._normals[: runs[1].sum()]
        source.normals(NOISE, step, array, runs, out)
        return out

    def combine(self, z: Any, kept: Any, start: int, step: int, weights: Any, keep_sum: bool) -> Any:
        kernels.combine(z, kept, start, step, weights, keep_sum)
        return z

    def drain(self, z: Any, kept: Any, start: int, decay: Any, weights: Any) -> None:
        kernels.drain(z, kept, start, decay, weights)

    def add(self, out: Any, x: Any, weight: float) -> None:
        out += x * self._dtype.type(weight)

    def scaled(self, x: Any, factor: float) -> Any:
        x *= self._dtype.type(factor)
        return x

    def generator(self, source: Source) -> str:
        return f"ChaCha{source.rounds}"

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.array(x)

    def from_numpy(self, x: np.ndarray[Any, Any]) -> Any:
        return np.array(x, dtype=self._dtype)


class DeviceBackend:
    """torch on another device: the elements of every tile of an array come from torch's generator with its own seed."""

    chunk = 1 << 62
    fused = False

    def __init__(self, dtype: str, device: Any):
        import torch

        self._torch = torch
        self._dtype = getattr(torch, dtype)
        self._device = torch.device(device)
        self._generator = torch.Generator(device=self._device)

    def kept(self, copies: int, size: int) -> Any:
        return self._torch.zeros((copies, size), dtype=self._dtype, device=self._device)

    def empty(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._dtype, device=self._device)

    def draw(self, source: Source, step: int, array: int, whole: int, runs: tuple[Indices, Indices]) -> Any:
        if source.secure:
            raise errors.ArgumentError(
                "source", f"must be fast on {self._device} in {self._dtype}: the secure generator runs on a CPU, and "
                "in float32 on a GPU with Triton",
            )  # fmt: skip
        out = self.empty(int(runs[1].sum()))
        done, current, drawn = 0, -1, out
        for start, count in zip(*(r.tolist() for r in runs), strict=True):
            place, stop = start, start + count
            while place < stop:
                tile, skipped = divmod(place, GPU_TILE)
                width = min(GPU_TILE, whole - tile * GPU_TILE)
                taken = min(width - skipped, stop - place)
                if tile != current:
                    # A 63-bit seed per tile (torch takes no negative ones), from the 256-bit key and the place.
                    label = hashlib.sha256(source.key + struct.pack("<3Q", step, array, tile)).digest()
                    self._generator.manual_seed(int.from_bytes(label[:8], "little") >> 1)
                    drawn = out[done : done + width] if taken == width else self.empty(width)
                    drawn.normal_(generator=self._generator)
                    current = tile
                if taken < width:
                    out[done : done + taken] = drawn[skipped : skipped + taken]
                place, done = place + taken, done + taken
        return out

    def combine(self, z: Any, kept: Any, start: int, step: int, weights: Any, keep_sum: bool) -> Any:
        past = kept[:, start : start + len(z)]
        m = len(past)
        if m == 0:
            return z.mul_(float(weights[0]))
        oldest = past[step % m]  # it is used for the last time here, and what is new takes its place
        total = oldest.mul_(float(weights[m])) if keep_sum else oldest * float(weights[m])
        for j in range(1, m):
            total.add_(past[(step - j) % m], alpha=float(weights[j]))
        total.add_(z, alpha=float(weights[0]))
        if not keep_sum:
            oldest.copy_(z)
        return total

    def drain(self, z: Any, kept: Any, start: int, decay: Any, weights: Any) -> None:
        past = kept[:, start : start + len(z)]
        for row, weight in zip(past, weights, strict=True):
            z.add_(row, alpha=-float(weight))
        for row, rate in zip(past, decay, strict=True):
            row.mul_(float(rate)).add_(z)

    def add(self, out: Any, x: Any, weight: float) -> None:
        out.add_(x, alpha=weight)

    def scaled(self, x: Any, factor: float) -> Any:
        return x * factor  # x may be what is kept

    def handed_over(self, z: Any) -> Any:
        return z

    def generator(self, source: Source) -> str:
        return f"torch {self._device.type}, tiles of {GPU_TILE}"

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.array(x.detach().cpu().numpy())

    def from_numpy(self, x: np.ndarray[Any, Any]) -> Any:
        return self._torch.tensor(x, dtype=self._dtype, device=self._device)


def make(name: str, dtype: str, device: Any) -> Any:
    if validation.choice("backend", name, ("numpy", "torch")) == "numpy":
        if device is not None:
            raise validation.wrong("device", "given with backend torch only", device)
        return CpuBackend(dtype)
    try:
        import torch
    except ImportError:
        raise errors.missing_extra("torch", "torch", "backend torch") from None
    if device is None or torch.device(device).type == "cpu":
        return CpuBackend(dtype, torch.from_numpy)
    if torch.device(device).type == "cuda" and dtype == "float32" and importlib.util.find_spec("triton") is not None:
        from dpmf.training._gpu import TritonBackend

        return TritonBackend(device)
    return DeviceBackend(dtype, device)
