"""Factors that clip gradients: in exact arithmetic what is added of a record is never longer than the clipping norm."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from dpmf.training._clipping import clip_factors  # noqa: E402


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
