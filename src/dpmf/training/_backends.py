"""The operations on flat arrays that streaming noise needs: compiled loops on a CPU, which also serves other devices.

On a GPU with Triton `dpmf.training._gpu` takes their place, for noise in float32.
"""

from __future__ import annotations

import importlib.util
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


class Backend(Protocol):
    """Flat arrays of one dtype, processed `chunk` elements at a time; what is kept has one row per copy."""

    chunk: int
    reach: float  # how many standard deviations the largest normal has
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
    """numpy arrays and compiled loops. torch sees the same memory, or is handed copies on another device."""

    fused, reach = False, kernels.REACH

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
    # What torch draws on other devices has tails that end where nobody has documented. The CPU draws for them.
    return CpuBackend(dtype, lambda x: torch.tensor(x, device=device))
