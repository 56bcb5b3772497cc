"""Draws of the privacy loss for the Monte Carlo accountant, with importance weights.

Everything lives in b dimensions. With S = G/σ², u ~ N(0, S) under Q and a_i = exp(u_i − S_ii/2), the density of P with
respect to Q is A = mean(a). A proposal is Q tilted by powers of the a_i, by the average ū and by the length of u:

    q_{t,c,d} = Q · mean(a^t) · exp(c·ū − d·|u|²/2) / Z_{t,c,d}        (t = 0 wherever d > 0)

It is a mixture of Gaussians, N(t·S_i + c·S·1/b, S) with weights proportional to exp(t(t−1)S_ii/2 + t·c·(S·1)_i/b) for
d = 0, so it is easy to draw from; its density needs nothing but u, so rank-deficient Gram matrices are no special case.
P is (1, 0, 0), Q is (0, 0, 0). Raising t sends one component far out (how large losses come about), raising c lifts all
of them a little (how small ones do). For the add direction c < 0 lowers them all, and d > 0 keeps the largest from
spoiling it.

A proposal j with share α_j of the samples enters the balance heuristic (deterministic mixture) of Veach and Guibas
(1995): each sample has the weight target/Σ_j α_j q_j, whichever proposal it came from.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpmf.accountants.protocol import DIRECTIONS, Direction
from dpmf.errors import missing_extra
from dpmf.numerics import Array

BACKENDS = ("numpy", "torch")
_SERIES = 1e-5  # a standard deviation of u at which log mean(a) is lost in rounding, but two cumulants are enough
_NEVER_RARE = 1e4  # an S_ii (the loss is S_ii/2 ± √S_ii) at which only ε in the thousands are rarely exceeded


@dataclass(frozen=True)
class _Tuning:
    """From which distributions is sampled, and how many at a time. Any values give unbiased estimates.

    Attributes:
      spacing: of the ladders, in standard deviations: up to 7 of them, no tail is further than 1 from a rung.
      remove_rungs: powers of the a_i and tilts of their average, in rungs, for "remove".
      add_rungs: tilts of the average, in rungs, for "add".
      target_share: the share of the samples that are drawn from the target itself: it bounds every weight.
      chunk_bytes: size of one array, a handful of which are alive at a time.
      device_chunk_bytes: the same on a GPU: enough to keep it busy.
      least_rows: a matrix product with fewer rows is bound by reading the factor.
    """

    spacing: float = 2.0
    remove_rungs: tuple[tuple[int, int], ...] = (
        (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0)
    )  # fmt: skip
    add_rungs: tuple[int, ...] = (1, 2, 3)
    target_share: float = 0.5
    chunk_bytes: int = 8 * 2**20
    device_chunk_bytes: int = 32 * 2**20
    least_rows: int = 256


_TUNING = _Tuning()
LARGEST_WEIGHT = 1 / _TUNING.target_share


class Proposal(NamedTuple):
    """q_{t,c,d} with t = 1 + rung·step (0 where rung is None), c = tilt, d = curvature, and log Z.

    `cumulative` are the summed weights of the mixture's components, empty where there is only one.
    """

    rung: int | None
    tilt: float
    curvature: float
    log_z: float
    cumulative: Array


@dataclass(frozen=True)
class Plan:
    """How the samples for one σ and direction are drawn: the proposals, the target first, and how many from each."""

    direction: Direction
    scale: float
    step: float
    proposals: tuple[Proposal, ...]
    counts: tuple[int, ...]

    @property
    def samples(self) -> int:
        return sum(self.counts)


class Draws(NamedTuple):
    """`drawn` samples of one stratum; those that contribute to no δ(ε), ε ≥ 0, are left out of the arrays."""

    stratum: int
    drawn: int
    loss: Array
    weight: Array


class Backend:
    """Arrays and random numbers by numpy or PyTorch. The kernel is written in what the two have in common."""

    def __init__(self, name: str, device: str | None) -> None:
        self.name = name
        self.xp: Any = np
        self.chunk_bytes = _TUNING.chunk_bytes
        if name == "numpy":
            return
        try:
            torch = self.xp = importlib.import_module("torch")
        except ImportError:
            purpose = "the PyTorch backend of the Monte Carlo accountant"
            raise missing_extra("torch", "torch", purpose) from None
        try:
            self.device = torch.device("cpu" if device is None else device)
            torch.zeros(1, dtype=torch.float64, device=self.device)
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"device must be one PyTorch can use, got {device!r} ({reason})") from None
        if self.device.type != "cpu":
            self.chunk_bytes = _TUNING.device_chunk_bytes

    def array(self, values: Array) -> Any:
        return values if self.name == "numpy" else self.xp.as_tensor(values, device=self.device)

    def to_numpy(self, values: Any) -> Array:
        out: Array = values if self.name == "numpy" else values.cpu().numpy()
        return out

    def random(self, seed: np.random.SeedSequence, rows: int, columns: int) -> tuple[Any, Any]:
        """Uniforms of shape (rows,) and normals of shape (rows, columns)."""
        if self.name == "numpy":
            rng = np.random.Generator(np.random.SFC64(seed))
            return rng.random(rows), rng.standard_normal((rows, columns))
        generator = self.xp.Generator(device=self.device)
        generator.manual_seed(int(seed.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        options = {"generator": generator, "dtype": self.xp.float64, "device": self.device}
        return self.xp.rand(rows, **options), self.xp.randn(rows, columns, **options)


class LossSampler:
    """Draws losses and weights for one Gram matrix; what does not depend on σ is computed once, here."""

    def __init__(self, gram: Array, backend: Backend) -> None:
        self.backend = backend
        self.b = len(gram)
        self.largest = math.sqrt(float(gram.max())) or 1.0
        unit = gram / self.largest / self.largest  # entries at most 1: whatever C's scale, nothing overflows below
        self.diagonal: Array = np.diagonal(unit).copy()
        self.row_means: Array = unit.mean(axis=1)
        # In the eigenbasis a curvature d·|u|²/2 merely rescales the normals. Null directions are left out.
        values, vectors = np.linalg.eigh(unit)
        kept = values > self.b * np.finfo(float).eps * values[-1]
        self.values: Array = values[kept]
        self.projection: Array = vectors[:, kept].mean(axis=0)  # of 1/b
        self._roots = backend.array(np.sqrt(self.values)[:, None] * vectors[:, kept].T)
        self._unit = backend.array(unit)
        self.rows = max(_TUNING.least_rows, backend.chunk_bytes // (8 * self.b))

    def plan(self, noise_multiplier: float, direction: Direction, samples: int, importance: bool) -> Plan:
        """The target, and with `importance` a ladder of tilts by 2, 4 and 6 standard deviations."""
        # Beyond these limits δ is 0 or 1 in double precision for every ε in 0..10⁶; within, nothing overflows.
        scale = min(max(noise_multiplier / self.largest, 1e-100), 1e100)
        single = math.sqrt(float(self.diagonal.max())) / scale  # the standard deviation of the largest u_i
        common = math.sqrt(float(self.row_means.mean())) / scale  # of ū
        step = _TUNING.spacing / single if single else 0.0
        unit = _TUNING.spacing / common if common else 0.0
        # (rung, tilt, curvature)
        shapes: list[tuple[int | None, float, float]] = [(0 if direction == "remove" else None, 0.0, 0.0)]
        if importance and single**2 < _NEVER_RARE:
            if direction == "remove":
                shapes += [(i, j * unit, 0.0) for i, j in _TUNING.remove_rungs]
            else:
                shapes += [(None, -j * unit, 0.0) for j in _TUNING.add_rungs]
                # exp(−θA) to second order about its mode, which lies near u = −d·S·1.
                for j in _TUNING.add_rungs:
                    shapes.append((None, -j * unit * (1 + j * _TUNING.spacing * common), j * unit / self.b))
        # A ladder of more rungs than its share of the samples is cut short: the target alone is unbiased already.
        ladder_samples = int(max(1 - _TUNING.target_share, 0.0) * samples)
        shapes = shapes[: 1 + ladder_samples]
        rungs = len(shapes) - 1
        counts = [ladder_samples // rungs + (j < ladder_samples % rungs) for j in range(rungs)]
        proposals = tuple(self._proposal(scale, step, *shape) for shape in shapes)
        return Plan(direction, scale, step, proposals, (samples - sum(counts), *counts))

    def _proposal(self, scale: float, step: float, rung: int | None, tilt: float, curvature: float) -> Proposal:
        inverse = scale**-2
        damping = 1.0 + (curvature * inverse) * self.values
        variance = float(self.projection**2 @ (self.values / damping)) * inverse  # of ū under the curvature
        log_z = 0.5 * tilt * variance * tilt - 0.5 * float(np.log(damping).sum())
        if rung is None:
            return Proposal(None, tilt, curvature, log_z, np.empty(0))
        t = 1.0 + rung * step
        terms = (0.5 * t * (t - 1.0) * inverse) * self.diagonal + (t * tilt * inverse) * self.row_means
        total = float(np.logaddexp.reduce(terms))
        cumulative = np.cumsum(np.exp(terms - total))
        cumulative[-1] = 1.0
        return Proposal(rung, tilt, curvature, log_z + total - math.log(self.b), cumulative)

    def weight_bound(self, plan: Plan, epsilon: float) -> float:
        """A number that no weight of a sample with loss ≥ ε exceeds; at most 2 (1 without a ladder).

        **Formal guarantees.** The weight is 1/Σ_j α_j (q_j/target), so lower bounds on the ratios q_j/target over the
        event loss ≥ ε are all it takes. The target's own ratio is 1. Of the others these are bounded by more than 0:
        remove, q_{t,0,0}: mean(a^t) ≥ A^t (power means, t ≥ 1), so q/P = mean(a^t)/(A·Z) ≥ e^{(t−1)ε}/Z where A ≥ e^ε;
        add, q_{0,c,0} with c < 0: A ≥ exp(ū − tr S/2b) (Jensen), so A ≤ e^{−ε} implies ū ≤ tr S/2b − ε and
        q/Q = e^{cū}/Z ≥ exp(−c(ε − tr S/2b))/Z.
        """
        centre = 0.5 * float(self.diagonal.mean()) * plan.scale**-2
        logs = []
        for q, count in zip(plan.proposals, plan.counts, strict=True):
            if q.rung is not None and q.tilt == 0.0:
                logs.append(math.log(count) + q.rung * plan.step * epsilon - q.log_z)
            elif q.rung is None and q.curvature == 0.0:
                logs.append(math.log(count) - q.tilt * (epsilon - centre) - q.log_z)
        # Upwards by far more than the rounding of the sums above, and by an underflow.
        return math.exp(math.log(plan.samples) - float(np.logaddexp.reduce(logs))) * (1 + 1e-9) + 1e-300

    def draw(self, plan: Plan, seed: int) -> Iterator[Draws]:
        """All samples of the plan in chunks of bounded size, each with a random stream of its own.

        The streams depend on nothing but `seed`, the direction and the numbers of samples, so two σ share them.
        """
        for stratum, count in enumerate(plan.counts):
            for number, start in enumerate(range(0, count, self.rows)):
                rows = min(self.rows, count - start)
                key = (DIRECTIONS.index(plan.direction), stratum, number)
                loss, weight = self._chunk(plan, stratum, rows, np.random.SeedSequence(seed, spawn_key=key))
                kept = (loss > 0) & (weight > 0)
                yield Draws(stratum, rows, loss[kept], weight[kept])

    def _chunk(self, plan: Plan, stratum: int, rows: int, stream: np.random.SeedSequence) -> tuple[Array, Array]:
        """Losses and weights of `rows` samples of one proposal."""
        xp, array = self.backend.xp, self.backend.array
        inverse = plan.scale**-2
        proposal = plan.proposals[stratum]
        uniforms, normals = self.backend.random(stream, rows, len(self.values))

        damping = 1.0 + (proposal.curvature * inverse) * self.values
        normals *= array(1.0 / (plan.scale * np.sqrt(damping)))
        normals += array((proposal.tilt * inverse) * np.sqrt(self.values) * self.projection / damping)
        u = normals @ self._roots
        if proposal.rung is not None:
            shift = self._unit[xp.searchsorted(array(proposal.cumulative), uniforms)]
            shift *= (1.0 + proposal.rung * plan.step) * inverse
            u += shift
        average = u.mean(1)
        squares: Any = (u * u).sum(1) if any(q.curvature for q in plan.proposals) else 0.0

        # log mean(a^t) for every power in use. With the row's maximum taken out each sum lies between 1 and b.
        log_a = u
        log_a -= array((0.5 * inverse) * self.diagonal)
        top = xp.amax(log_a, 1)
        log_a -= top[:, None]
        highest = max(q.rung or 0 for q in plan.proposals)
        powers = xp.exp(log_a)
        ratio = xp.exp(log_a * plan.step) if highest else None
        log_means = []
        for rung in range(highest + 1):
            if rung:
                powers *= ratio
            log_means.append(xp.log(powers.mean(1)) + (1.0 + rung * plan.step) * top)
        if plan.step > _TUNING.spacing / _SERIES:
            centre = log_a.mean(1)
            log_a -= centre[:, None]
            log_means[0] = top + centre + 0.5 * (log_a * log_a).mean(1)

        # The log density of the mixture of proposals with respect to Q.
        mixture: Any = None
        for q, count in zip(plan.proposals, plan.counts, strict=True):
            term = q.tilt * average + (math.log(count / plan.samples) - q.log_z)
            if q.rung is not None:
                term += log_means[q.rung]
            if q.curvature:
                term -= (0.5 * q.curvature) * squares
            mixture = term if mixture is None else xp.logaddexp(mixture, term)

        loss = log_means[0]
        if plan.direction == "remove":
            weight = xp.exp(loss - mixture)
        else:
            weight, loss = xp.exp(-mixture), -loss
        return self.backend.to_numpy(loss), self.backend.to_numpy(weight)
