"""The noise C⁻¹Z, one row per iteration, in bounded memory.

| method | when | copies of the model kept | per step |
|---|---|---|---|
| back-substitution | C has bandwidth p | p − 1 past rows | p multiply-adds |
| convolution | C⁻¹ is Toeplitz of bandwidth p | p − 1 past normals | p multiply-adds |
| buffers | C is a BLT with d buffers | d | 2d multiply-adds |
| regeneration | anything else | none | row t draws its t + 1 normals again |

Rows have unit scale: multiply by noise multiplier × clipping norm before adding them to the sum of clipped gradients. C
is the strategy as given, which is what the noise multiplier was calibrated for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.errors import TrainingError
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.strategies.base import NormalizedToeplitz, Strategy, ToeplitzStrategy, block_rows
from dpmf.strategies.buffered import BufferedStrategy
from dpmf.strategies.inversion import covering_coef, covering_inverse
from dpmf.training import _backends
from dpmf.training._sources import SOURCES, make_source

FORMAT = 1
MAX_COPIES = 64
METHODS = ("back-substitution", "convolution", "buffers", "regeneration")

# What takes a piece of a row: (array, first element, the piece). The piece is overwritten later: use it at once.
Consumer = Callable[[int, int, Any], None]


@dataclass(frozen=True)
class Plan:
    """How the rows of C⁻¹Z are made.

    Attributes:
      method: one of `METHODS`.
      copies: how many arrays of the size of the model are kept between steps.
      weights: back-substitution: C[t, t−j] at [t, j], one row if Toeplitz; convolution: the same of C⁻¹;
        buffers: decay and weight; regeneration: C⁻¹.
      scale: what every row is multiplied by.
    """

    method: str
    copies: int
    weights: Array
    scale: float = 1.0

    def row(self, t: int) -> Array:
        return np.asarray(self.weights[0 if len(self.weights) == 1 else t])


def make_plan(strategy: Strategy, iterations: int, max_copies: int = MAX_COPIES) -> Plan:
    """The method that keeps the fewest copies of the model; regeneration if none keeps at most `max_copies`."""
    if isinstance(strategy, NormalizedToeplitz):
        # The base may have a better method than its multiple: buffers, say.
        plan = make_plan(strategy.base, iterations, max_copies)
        ratio = strategy.noising_coef(iterations)[0] / strategy.base.noising_coef(iterations)[0]
        return replace(plan, scale=plan.scale * float(ratio))
    candidates: list[Plan] = []
    if isinstance(strategy, BufferedStrategy):
        decay, scale = strategy.buffers(iterations)
        candidates.append(Plan("buffers", len(decay), np.stack((decay, scale))))
    p = strategy.bandwidth(iterations)
    if isinstance(strategy, ToeplitzStrategy):
        candidates.append(Plan("back-substitution", p - 1, strategy.strategy_coef(iterations)[None, :p]))
        noising = np.trim_zeros(strategy.noising_coef(iterations), "b")
        candidates.append(Plan("convolution", len(noising) - 1, noising[None, :]))
    elif p - 1 <= max_copies:
        bands = _bands(strategy, iterations, p)
        if np.any(bands[:, 0] == 0):
            raise ValueError(f"strategy must have an inverse to train with, {strategy.name} has a zero on its diagonal")
        candidates.append(Plan("back-substitution", p - 1, bands))
    fitting = [plan for plan in candidates if plan.copies <= max_copies]
    if fitting:
        plan = min(fitting, key=lambda plan: plan.copies)
        if plan.method == "convolution" and isinstance(strategy, ToeplitzStrategy):
            return replace(plan, weights=covering_coef(strategy, iterations)[None, :])
        return plan
    return Plan("regeneration", 0, covering_inverse(strategy, iterations))


def _bands(strategy: Strategy, iterations: int, p: int) -> Array:
    """C[t, t−j] at [t, j]; zero where t < j."""
    bands = np.zeros((iterations, p))
    for start, block in strategy.rows(iterations, block_rows(iterations)):
        for j in range(p):
            t = np.arange(max(start, j), start + len(block))
            bands[t, j] = block[t - start, t - j]
    return bands


def strategy_digest(strategy: Strategy, iterations: int) -> str:
    """Names the matrix C itself, whatever the strategy is called."""
    digest = hashlib.sha256(f"{iterations}:".encode())
    if isinstance(strategy, ToeplitzStrategy):
        digest.update(np.ascontiguousarray(strategy.strategy_coef(iterations), dtype="<f8").tobytes())
    else:
        for _, block in strategy.rows(iterations, block_rows(iterations)):
            digest.update(np.ascontiguousarray(block, dtype="<f8").tobytes())
    return digest.hexdigest()


class NoiseStream:
    """The rows of C⁻¹Z for arrays of given shapes, one iteration at a time, never more than N.

    Args:
      mechanism: whose strategy and number of iterations are used.
      shapes: the shapes of the arrays that need noise, e.g. those of the parameters.
      seed: an integer for experiments that are to be repeated; by default a secret from the operating system.
      source: "fast", or "secure" for a cryptographically secure generator (CPU only, several times slower).
      dtype: "float32" or "float64": what is drawn, kept and given out.
      backend: "numpy" or "torch"; with torch, `device` says where the noise is made.
      max_copies: strategies that would keep more copies of the model are streamed by regeneration.

    **Formal guarantees.** In exact arithmetic the rows given out are those of C⁻¹Z, Z of independent standard normals,
    C the strategy as given. In floating point each row has a relative error of order p·2⁻²⁴ (float32) or p·2⁻⁵³.
    A state that is restored gives the same bits as a stream that was not interrupted.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        shapes: Sequence[Sequence[int]],
        *,
        seed: int | bytes | None = None,
        source: str = "fast",
        dtype: str = "float32",
        backend: str = "numpy",
        device: Any = None,
        max_copies: int = MAX_COPIES,
    ):
        if not isinstance(mechanism, Mechanism):
            raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
        self.mechanism = mechanism
        self.iterations = mechanism.batching.iterations
        self.shapes = [tuple(validation.integer("shapes", n, at_least=0) for n in shape) for shape in shapes]
        self.dtype = validation.choice("dtype", dtype, ("float32", "float64"))
        limit = validation.integer("max_copies", max_copies, at_least=0)
        self.plan = make_plan(mechanism.strategy, self.iterations, limit)
        self._source = make_source(source, seed)
        self._backend = _backends.make(backend, self.dtype, device)
        self._digest: str | None = None
        self._step = 0
        self._broken = False
        self._kept: list[list[Any]] | None = None

    @property
    def _past(self) -> list[list[Any]]:
        """What is kept of each array; made when first needed, so that a stream that only counts takes no memory."""
        if self._kept is None:
            sizes = [math.prod(shape) for shape in self.shapes]
            self._kept = [[self._backend.zeros(size) for _ in range(self.plan.copies)] for size in sizes]
        return self._kept

    @property
    def step(self) -> int:
        """The iteration whose row comes next."""
        return self._step

    @property
    def state_bytes(self) -> int:
        """Memory kept between steps."""
        return sum(math.prod(shape) for shape in self.shapes) * self.plan.copies * np.dtype(self.dtype).itemsize

    def next(self) -> list[Any]:
        """The next row, as new arrays of the shapes given."""
        out = [self._backend.empty(math.prod(shape)) for shape in self.shapes]

        def take(array: int, start: int, piece: Any) -> None:
            out[array][start : start + len(piece)] = piece

        self.feed(take)
        return [row.reshape(shape) for row, shape in zip(out, self.shapes, strict=True)]

    def feed(self, take: Consumer) -> None:
        """Hand the next row over piece by piece, without an array of the model's size in between."""
        if self._broken:
            raise TrainingError("the noise of the last step was interrupted half-way: restore a saved state")
        if self._step >= self.iterations:
            raise TrainingError(
                f"all {self.iterations} iterations that were accounted for have been made: "
                "another step would not be covered by the guarantee"
            )
        self._broken = True
        for array, shape in enumerate(self.shapes):
            size = math.prod(shape)
            width = self._backend.chunk
            for chunk, start in enumerate(range(0, size, width)):
                stop = min(start + width, size)
                piece = self._piece(array, chunk, start, stop)
                if self.plan.scale != 1.0:
                    piece = self._backend.scaled(piece, self.plan.scale)
                take(array, start, piece)
        self._step += 1
        self._broken = False

    def skip(self) -> None:
        """Count a step without making its row: for the processes that add no noise in distributed training."""
        if self._step >= self.iterations:
            self.feed(lambda *_: None)  # refuses
        self._step += 1

    def _piece(self, array: int, chunk: int, start: int, stop: int) -> Any:
        t, backend, plan = self._step, self._backend, self.plan
        past = [kept[start:stop] for kept in self._past[array]]
        m = len(past)
        if plan.method == "regeneration":
            total = backend.scratch("total", stop - start)
            total[:] = 0.0
            for j, weight in enumerate(plan.weights[t, : t + 1]):
                if weight != 0.0:
                    z = self._draw(j, array, chunk, stop - start, "z")
                    backend.add(total, z, float(weight))
            return total
        if plan.method == "convolution":
            weights = plan.row(t)
            out = backend.scratch("total", stop - start)
            if m == 0:
                z = self._draw(t, array, chunk, stop - start, "z")
                backend.assign(out, z, float(weights[0]))
                return out
            backend.assign(out, past[t % m], float(weights[m]))
            # The oldest normals are not needed any more: the new ones take their place.
            self._source_into(past[t % m], t, array, chunk)
            for j in range(m):
                backend.add(out, past[(t - j) % m], float(weights[j]))
            return out
        z = self._draw(t, array, chunk, stop - start, "z")
        if plan.method == "buffers":
            decay, weight = plan.weights
            for kept, w in zip(past, weight, strict=True):
                backend.add(z, kept, -float(w))
            for kept, r in zip(past, decay, strict=True):
                backend.assign(kept, kept, float(r))
                backend.add(kept, z, 1.0)
            return z
        weights = plan.row(t)
        if m == 0:
            if weights[0] != 1.0:
                backend.assign(z, z, 1.0 / float(weights[0]))
            return z
        new = past[t % m]  # holds row t − m, which is used for the last time here
        backend.assign(new, new, -float(weights[m]) / float(weights[0]))
        for j in range(1, m):
            backend.add(new, past[(t - j) % m], -float(weights[j]) / float(weights[0]))
        backend.add(new, z, 1.0 / float(weights[0]))
        return new

    def _draw(self, t: int, array: int, chunk: int, size: int, name: str) -> Any:
        out = self._backend.scratch(name, size)
        self._source_into(out, t, array, chunk)
        return out

    def _source_into(self, out: Any, t: int, array: int, chunk: int) -> None:
        self._backend.normals(self._source, t, array, chunk, out)

    def strategy_digest(self) -> str:
        if self._digest is None:
            self._digest = strategy_digest(self.mechanism.strategy, self.iterations)
        return self._digest

    def state_dict(self) -> dict[str, Any]:
        """Plain values and arrays. Whoever has it can take the noise off again: keep it as secret as the data."""
        if self._broken:
            raise TrainingError("the noise of the last step was interrupted half-way: there is no state to save")
        return {
            "format": FORMAT,
            "strategy": self.strategy_digest(),
            "iterations": self.iterations,
            "method": self.plan.method,
            "copies": self.plan.copies,
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": self.dtype,
            "generator": self._backend.generator(self._source),
            "source": self._source.name,
            "key": self._source.key.hex(),
            "probe": self._source.probe(),
            "step": self._step,
            "past": [[self._backend.to_numpy(kept) for kept in arrays] for arrays in self._past],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step_only: bool = False) -> None:
        """Go on from a saved state; refuses, in one line, one that would not continue the same mechanism.

        With `step_only` the arrays are left alone (for processes that add no noise).
        """
        try:
            told = {name: state[name] for name in ("format", "strategy", "iterations", "method", "shapes", "dtype")}
            source, key, step, past = state["source"], bytes.fromhex(state["key"]), state["step"], state["past"]
            probe, generator = state["probe"], state["generator"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state must be one that state_dict() gave: {type(error).__name__} {error}") from None
        mine = {
            "format": FORMAT,
            "strategy": self.strategy_digest(),
            "iterations": self.iterations,
            "method": self.plan.method,
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": self.dtype,
        }
        for name, value in mine.items():
            if told[name] != value:
                what = "matrix C" if name == "strategy" else name
                raise ValueError(f"state must be of this mechanism and model, but its {what} is another")
        if source not in SOURCES:
            raise ValueError(f"state must have a source among {', '.join(SOURCES)}, got {source!r}")
        at = validation.integer("step", step, at_least=0, at_most=self.iterations)
        restored = SOURCES[source](key)
        if restored.probe() != probe or self._backend.generator(restored) != generator:
            raise ValueError("state must be continued with the generator that made it; this version or device differs")
        if not step_only:
            if [len(arrays) for arrays in past] != [self.plan.copies] * len(self.shapes) or any(
                np.shape(a) != (math.prod(shape),) or str(np.asarray(a).dtype) != self.dtype
                for arrays, shape in zip(past, self.shapes, strict=True) for a in arrays
            ):  # fmt: skip
                raise ValueError("state must hold the past of every parameter, this one does not")
            self._kept = [[self._backend.from_numpy(np.asarray(a)) for a in arrays] for arrays in past]
        self._source, self._step, self._broken = restored, at, False
