"""Exact sums beside Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from dpmf.kernels.sums import add_truncated


@pytest.mark.parametrize(("rows", "width"), [(0, 3), (1, 1), (16, 4096), (37, 5000), (5, 9000)])
@pytest.mark.parametrize("exact", [1, 16])
def test_sums_of_truncated_products(rows: int, width: int, exact: int) -> None:
    rng = np.random.default_rng(rows + width)
    values = rng.normal(size=(rows, width)).astype(np.float32)
    values[:, :1] = 0.0
    largest = 2.0**24 / exact / max(np.abs(values).max(initial=1), 1)
    factors = rng.uniform(-largest, largest, rows).astype(np.float32)
    total = rng.integers(-(2**40), 2**40, width).astype(np.float64)
    expected = [int(start) for start in total]
    for row, factor in zip(values, factors, strict=True):
        for i, product in enumerate((row * factor).tolist()):  # rounded to single precision
            expected[i] += int(product)  # towards zero
    add_truncated(values, factors, exact, total)
    assert total.tolist() == expected
