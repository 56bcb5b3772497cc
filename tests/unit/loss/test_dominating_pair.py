"""Pairs made from points of a profile: their masses."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from dpmf.loss.dominating_pair import dominating_pair
from dpmf.loss.gaussian import gaussian_delta


@pytest.mark.parametrize("seed", range(100))
def test_masses_add_up_to_at_least_one_and_hardly_more(seed: int) -> None:
    """A profile is 1 at e^ε = 0, so that of a pair that is above it has at least the mass 1."""
    rng = np.random.default_rng(seed)
    mu, interval = 10 ** rng.uniform(-3, 0.6), 2.0 ** rng.integers(-12, -2)
    profiles = []
    for most in rng.choice([0.01, 1.0, 8.0], 2):
        far = 2 + int(most * mu * (mu + 1) / interval)
        places = {0, *rng.integers(1, far, 2, endpoint=True).tolist(), *rng.integers(1, far + 1, 20).tolist()}
        profiles.append({place: gaussian_delta(mu, interval * place) for place in places})
    pair = dominating_pair(interval, *profiles)
    for masses, rest in ((pair.upper, pair.upper_only), (pair.lower, pair.lower_only)):
        assert 1 <= sum(map(Fraction, masses.tolist())) + Fraction(rest) <= 1 + Fraction(1e-14)
