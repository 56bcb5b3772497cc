"""Innovation variances in classes: rounded down, by little on average, to few values."""

from __future__ import annotations

import numpy as np
import pytest

from dpmf.accountants.chain._step_classes import step_classes

RNG = np.random.default_rng(5)
VARIANCES = {
    "one": np.array([0.3]),
    "equal": np.full(50, 0.01),
    "two": np.repeat([0.01, 0.5], 20),
    "slowly changing": np.geomspace(0.01, 0.011, 400),
    "any": RNG.uniform(1e-3, 1.0, 300),
    "far apart": 10.0 ** RNG.uniform(-7, 0, 200),
}


@pytest.mark.parametrize("name", VARIANCES)
@pytest.mark.parametrize("spacing", [0.01, 0.5])
def test_variances_are_rounded_down_by_little(name, spacing):
    variances = VARIANCES[name]
    smooth = RNG.uniform(0.0, 2.0, len(variances))
    values, kinds = step_classes(variances, smooth, spacing)
    rounded = values[kinds]
    assert np.all(rounded < variances)
    weights = smooth / variances
    assert weights @ np.log(variances / rounded) <= (4 * 1.2e-3 + 1e-9) * weights.sum()
    assert len(values) <= max(64, 0.6 * len(np.unique(np.floor(np.log2(variances) * 256))))
    # The correlation, computed with rounding errors, is not below that of the step.
    given = np.sqrt(1 - variances)
    assert np.all(np.sqrt(1 - rounded) >= given)


def test_equal_steps_share_a_class():
    assert len(step_classes(VARIANCES["equal"], np.ones(50), 0.025)[0]) == 1
    assert len(step_classes(VARIANCES["two"], np.ones(40), 0.025)[0]) == 2
