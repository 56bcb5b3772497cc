"""Streaming noise on a GPU with Triton: one kernel draws the normals, correlates them and adds them to the gradient.

Normals come from the same ChaCha and the same transform as on a CPU (`dpmf.kernels.gpu_noise`), keyed in the same way.
A checkpoint holds a digest of what this device draws, so that another kind of device goes on with it only if it draws
the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dpmf.kernels import gpu_noise as kernels
from dpmf.kernels.noise import LANES, REACH, SINGLE_TILE
from dpmf.strategies.streaming import Plan
from dpmf.training._shards import Shard
from dpmf.training._sources import NOISE, Source

# Keys are copied to the device for this many steps at once, a multiple of every number of steps that a launch may have.
_KEYS = 48
_PROBED = 471 * SINGLE_TILE  # the first of 1024 normals, one of which has its radius from 64 bits
_ALONE = Plan("back-substitution", 0, np.ones((1, 1)))


def rows_at_once(plan: Plan) -> int:
    """The number of steps whose rows are computed together, which is limited by what is kept anyway."""
    return max(1, min(kernels.MAX_AHEAD, plan.copies)) if plan.method == "back-substitution" else 1


class TritonBackend:
    """A GPU, in single precision."""

    fused, reach = True, REACH

    def __init__(self, device: Any):
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._keys: dict[tuple[bytes, int, int, int], Any] = {}
        self._runs: dict[Shard, tuple[Any, ...]] = {}
        self._constant: dict[bytes, Any] = {}
        self._generators: dict[int, str] = {}

    def kept(self, copies: int, size: int) -> Any:
        return self._torch.zeros((copies, size), dtype=self._torch.float32, device=self._device)

    def empty(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.float32, device=self._device)

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.array(x.detach().cpu().numpy())

    def from_numpy(self, x: np.ndarray[Any, Any]) -> Any:
        return self._torch.tensor(x, dtype=self._torch.float32, device=self._device)

    def can_add_to(self, target: Any) -> bool:
        """Whether `add_row` takes this tensor; for others the row is made first."""
        same = target.device.type == self._device.type and self._device.index in (None, target.device.index)
        return same and target.dtype == self._torch.float32 and target.is_contiguous()

    def add_row(
        self, target: Any, factor: float, source: Source, plan: Plan, weights: Callable[[int], Any], first: int,
        place: int, array: int, shard: Shard, kept: Any,
    ) -> None:  # fmt: skip
        """Add `factor` times a row of the noise, unscaled, to the elements of a shard, a flat tensor in float32.

        Args:
          weights: the factors of a row, as `combine` in `dpmf.kernels.noise` takes them, by its place.
          first: the row with which the noise began that this one is made from.
          place: how many rows after that this one is.
          kept: what is kept of this array. Rows must be asked for one after the other.
        """
        if plan.method == "regeneration":
            row = plan.weights[place, : place + 1]
            for j in np.flatnonzero(row):
                self._launch(target, factor, source, _ALONE, row[j : j + 1], first, int(j), array, shard, kept)
        elif plan.method == "buffers":
            self._launch(target, factor, source, plan, plan.weights, first, place, array, shard, kept)
        elif place % (ahead := rows_at_once(plan)):  # computed with an earlier row
            target.add_(kept[place % plan.copies], alpha=factor)
        else:
            together = np.pad([weights(place + i) for i in range(ahead)], ((0, 0), (0, ahead - 1)))
            self._launch(target, factor, source, plan, together, first, place, array, shard, kept)

    def _launch(
        self, target: Any, factor: float, source: Source, plan: Plan, weights: Any, first: int, place: int, array: int,
        shard: Shard, kept: Any,
    ) -> None:  # fmt: skip
        if shard.size == 0:
            return
        starts, counts, before, tiles, programs = self._runs_of(shard)
        cuda = self._device.type == "cuda"
        with self._torch.cuda.device(self._device) if cuda else contextlib.nullcontext():
            kernels.add_noise[(programs,)](
                target, kept, starts, counts, before, self._key(source, first, place, array), self._on_device(weights),
                float(factor), place % plan.copies if plan.copies else 0, shard.size, tiles,
                METHOD=plan.method, COPIES=plan.copies, AHEAD=rows_at_once(plan), ROUNDS=source.rounds,
                PROGRAM=kernels.WIDTH, num_warps=kernels.WIDTH // 32, enable_fp_fusion=False,
            )  # fmt: skip

    def _runs_of(self, shard: Shard) -> tuple[Any, ...]:
        """The runs of a shard on the device, programs for each, and programs in all."""
        if shard not in self._runs:
            starts, counts = shard.runs(0, shard.size)
            at_once = SINGLE_TILE * (kernels.WIDTH // LANES)
            tiles = int(np.max(-(-(starts % SINGLE_TILE + counts) // at_once)))
            before = np.cumsum(counts) - counts
            numbers = (
                self._torch.tensor(n, dtype=self._torch.int64, device=self._device) for n in (starts, counts, before)
            )
            self._runs[shard] = (*numbers, tiles, tiles * len(starts))
        return self._runs[shard]

    def _key(self, source: Source, first: int, place: int, array: int) -> Any:
        """The words of the keys from row first + place on, on the device."""
        block = source.key, array, first, place // _KEYS
        if block not in self._keys:
            begin = first + place // _KEYS * _KEYS
            words = np.stack([source.words(NOISE, row, array) for row in range(begin, begin + _KEYS)])
            self._keys[block] = self._torch.tensor(words.view(np.int32), device=self._device)
        return self._keys[block][place % _KEYS :]

    def _on_device(self, numbers: Any) -> Any:
        """Weights on the device. The last few are kept: for a Toeplitz matrix all steps have the same ones."""
        single = np.ascontiguousarray(numbers, dtype=np.float32)
        label = single.tobytes()
        if label not in self._constant:
            if len(self._constant) > 64:
                self._constant.clear()
            self._constant[label] = self._torch.tensor(single, device=self._device)
        return self._constant[label]

    def generator(self, source: Source) -> str:
        if source.rounds not in self._generators:
            drawn, shard = self.kept(1, SINGLE_TILE)[0], Shard((1 << 62,), (_PROBED,), (SINGLE_TILE,))
            self._launch(drawn, 1.0, type(source)(bytes(32)), _ALONE, np.ones(1), 0, 0, 0, shard, drawn)
            digest = hashlib.sha256(self.to_numpy(drawn).tobytes()).hexdigest()[:16]
            self._generators[source.rounds] = (
                f"ChaCha{source.rounds} by Triton, {kernels.MAX_AHEAD} rows at once, {digest}"
            )
        return self._generators[source.rounds]
