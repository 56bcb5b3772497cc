"""Cyclic Poisson sampling against jax-privacy's own accounting of banded matrix factorisation."""

from __future__ import annotations

import pytest

import dpmf
from dpmf.batching import Poisson
from dpmf.strategies import bsr, dpsgd

try:  # the newest release
    import jax_privacy.experimental.accounting as events
except ImportError:  # its development head
    events = pytest.importorskip("jax_privacy.accounting")
pld = pytest.importorskip("dp_accounting.pld.pld_privacy_accountant")


@pytest.mark.parametrize(
    ("strategy", "period", "epsilon"), [(dpsgd(), 1, 1.0), (bsr(4).normalized(), 4, 4.0)], ids=["poisson", "cyclic"]
)
def test_noise_multipliers_agree_to_a_thousandth(strategy, period, epsilon):
    """jax-privacy's strategies have columns of norm one; the probability is that of a record within its group."""
    mechanism = dpmf.Mechanism(strategy, Poisson(10, 96, period))
    ours = dpmf.calibrate(mechanism, target_epsilon=epsilon, target_delta=1e-5).noise_multiplier

    def theirs(sigma):
        event = events.amplified_bandmf_event(sigma, 960, num_bands=period, sampling_prob=period / 96)
        return pld.PLDAccountant().compose(event).get_epsilon(1e-5)

    assert theirs(1.001 * ours) <= epsilon <= theirs(0.999 * ours)
