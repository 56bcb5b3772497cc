"""Clipping and exact sums: what is added of a record is never longer than the clip, and no addition rounds.

All of that is checked in rational arithmetic, or bit by bit.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.run import Run

torch = pytest.importorskip("torch")
from dpmf.training._clipping import ExactSum, clip_factors  # noqa: E402

MECHANISM = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 4))
SHAPES = [(1,), (255,), (16, 16), (257,), (3, 1000), ()]


def exact_square(values: np.ndarray) -> Fraction:
    """The squared norm, without any rounding."""
    return sum((Fraction(float(v)) ** 2 for v in values.ravel()), Fraction(0))


def gradients(kind: str, records: int, width: int, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.normal(size=(records, width))
    if kind == "spread":
        return drawn * np.exp(rng.uniform(-30, 30, (records, 1)))
    if kind == "uneven":
        return drawn * np.exp(rng.uniform(-20, 20, (records, width)))
    if kind == "equal":  # every addition rounds the same way
        return np.full((records, width), rng.uniform(0.5, 1, (records, 1)))
    return drawn * 1e-25  # squares underflow


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["spread", "uneven", "equal", "tiny"])
@pytest.mark.parametrize("clip", [1e-24, 0.37, 1.0, 1e4])
def test_what_is_added_is_never_longer_than_the_clipping_norm(kind: str, clip: float, dtype: str) -> None:
    rng = np.random.default_rng(7)
    shapes = [(1,), (255,), (16, 16), (257,), (3, 1000)]
    samples = [gradients(kind, 6, int(np.prod(shape)), rng).astype(dtype).reshape(6, *shape) for shape in shapes]
    factors = clip_factors([torch.from_numpy(one) for one in samples], clip)
    used = factors.to(getattr(torch, dtype)).double().numpy()
    assert used.max() <= 1.0
    for record, factor in enumerate(used):
        square = sum(exact_square(one[record]) for one in samples)
        added = Fraction(float(factor)) ** 2 * square
        assert added <= Fraction(clip) ** 2
        # Nothing is lost: what is shorter than the norm stays, and the rest has nearly the norm.
        if float(square) ** 0.5 > clip and float(square) > 1e-30:
            assert float(added) ** 0.5 > clip * (1 - 2.0**-15)
        elif float(square) ** 0.5 < clip * (1 - 2.0**-14) and float(square) > 1e-30:
            assert factor == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_records_without_a_norm_count_as_zero(value: float) -> None:
    samples = torch.ones(3, 300)
    samples[1, 299] = value
    factors = clip_factors([torch.ones(3, 2), samples], 0.5)
    assert factors[1] == 0
    assert (factors[[0, 2]] > 0).all()


def test_scalars_and_empty_batches() -> None:
    assert clip_factors([torch.tensor([0.0, 3.0]), torch.zeros(2, 0)], 1.5).tolist() == pytest.approx(
        [1, 0.5], rel=2e-5
    )
    assert clip_factors([torch.zeros(0), torch.zeros(0, 300)], 1.0).shape == (0,)


# Sums.


def exact_sum(samples: list[np.ndarray], *, clip: float = 0.37, dtype: str = "float32", **options: Any) -> ExactSum:
    kind = getattr(torch, dtype)
    given = [torch.from_numpy(np.array(one)).to(kind) for one in samples]
    run = Run(MECHANISM, options.pop("noise_multiplier", 1.0), clip, divisor=8.0, **options)
    total = ExactSum(run, [torch.zeros(one.shape[1:], dtype=kind) for one in given])
    total.add(given)
    return total


def drawn(kind: str, records: int, seed: int = 7) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [gradients(kind, records, math.prod(shape), rng).reshape(records, *shape) for shape in SHAPES]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["spread", "uneven", "equal"])
@pytest.mark.parametrize("clip", [0.37, 1.0, 3e5])
def test_one_contribution_is_integers_and_no_longer_than_the_clip(kind: str, clip: float, dtype: str) -> None:
    for record in range(6):
        one = exact_sum([sample[record : record + 1] for sample in drawn(kind, 6)], clip=clip, dtype=dtype)
        units = np.concatenate([total.numpy() for total in one.totals])
        assert (units == np.trunc(units)).all()
        assert exact_square(units) * Fraction(one.grid) ** 2 <= Fraction(clip) ** 2
        assert math.frexp(one.grid)[0] == 0.5  # a power of two


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("records", [0, 1, 15, 16, 17, 70])
def test_sums_have_the_same_bits_in_any_order_and_any_parts(records: int, wide: bool) -> None:
    samples = drawn("spread", records)
    if wide:  # one that is added up a few records at a time
        samples.append(np.random.default_rng(1).normal(size=(records, 1 << 16)))
    whole = exact_sum(samples)
    order = np.random.default_rng(2).permutation(records)
    other = exact_sum([sample[order] for sample in samples])
    parts = exact_sum([sample[:0] for sample in samples])
    alone = [np.zeros(len(total)) for total in parts.totals]
    for first in range(0, records, 7):
        parts.add([torch.from_numpy(np.array(sample[first : first + 7], dtype=np.float32)) for sample in samples])
    for record in range(records):
        single = exact_sum([sample[record : record + 1] for sample in samples])
        for sum_, total in zip(alone, single.totals, strict=True):
            sum_ += total.numpy()  # integers of at most 2²⁰ each
    for a, b, c, d in zip(whole.totals, other.totals, parts.totals, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert np.array_equal(a.numpy(), d)


def test_records_that_are_not_finite_count_as_zero_in_sums() -> None:
    samples = drawn("spread", 5)
    rest = exact_sum([np.delete(sample, 3, axis=0) for sample in samples])
    samples[4][3, 2, 7] = np.nan
    spoilt = exact_sum(samples)
    assert spoilt.lost
    assert not rest.lost
    assert all(torch.equal(a, b) for a, b in zip(spoilt.totals, rest.totals, strict=True))


@pytest.mark.parametrize("noise_multiplier", [1e-3, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("expected", [8, 5_000, 10**6])
def test_the_grid_changes_little_beside_the_noise(expected: int, noise_multiplier: float) -> None:
    run = Run(MECHANISM, noise_multiplier, 0.37, divisor=float(expected))
    total = ExactSum(run, [torch.zeros(3)])
    assert expected * total.grid <= 0.01 * noise_multiplier * 0.37
    samples = torch.randn(40, 3)
    total.add([samples])
    factors = clip_factors([samples], 0.37)
    error = (total.totals[0] * total.grid - (factors[:, None] * samples.double()).sum(dim=0)).abs().max()
    assert error <= 40 * total.grid * (1 + 1e-6) + 40 * 0.37 * 2.0**-24
