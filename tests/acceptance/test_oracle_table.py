"""What is known about δ(ε), against every tight accountant, in both directions: one table for each oracle.

Random small mechanisms against quadrature are in test_soundness.py and in the campaign (acceptance/test_campaign.py).
"""

from __future__ import annotations

import itertools
import json
import math
from functools import cache
from typing import Any

import numpy as np
import oracles
import paths
import pytest

from dpmf import BallsInBins, Mechanism, strategies
from dpmf.accountants import Accountant, Best, Cascade, Chain, Lattice, Renyi
from dpmf.accountants.protocol import DIRECTIONS, PreparedAccountant
from dpmf.lower_bounds import lower_delta

QUICK = Renyi(work_budget=1e5)
TIGHT: list[Accountant] = [Lattice(), Chain(), Cascade(), Best(renyi=QUICK)]
accountants = pytest.mark.parametrize("accountant", TIGHT, ids=lambda a: a.name)
directions = pytest.mark.parametrize("direction", DIRECTIONS)


def dpsgd(b: int, epochs: int = 1) -> Mechanism:
    return Mechanism(strategies.dpsgd(), BallsInBins(epochs, b))


# --- DP-SGD, by PLD-accounting -------------------------------------------------------------------------------------

# b, epochs, σ, the peer's discretisation (its time grows with the square of 1/that, and it widens with log b).
PEER_CELLS = [
    (2, 1, 1.0, 0.025),
    (10, 4, 1.5, 0.025),
    (100, 1, 1.0, 0.025),
    (100, 10, 4.0, 0.025),
    (1000, 1, 0.6, 0.08),
]
PEER_EPSILONS = (0.05, 0.2, 0.5, 1.0, 2.0)


@cache
def peer(b: int, epochs: int, sigma: float, step: float, direction: str) -> tuple[tuple[float, float], ...]:
    """PLD-accounting's lower and upper bounds on δ(ε), for each ε: k epochs of the same bins are one at σ/√k."""
    pld = pytest.importorskip("PLD_accounting")
    config = pld.AllocationSchemeConfig(loss_discretization=step, convolution_method=pld.ConvolutionMethod.GEOM)
    bounds = []
    for kind in (pld.BoundType.IS_DOMINATED, pld.BoundType.DOMINATES):
        law = pld.gaussian_allocation_directional_pld(
            params=pld.PrivacyParams(sigma=sigma / math.sqrt(epochs), num_steps=b),
            config=config,
            direction=pld.Direction[direction.upper()],
            bound_type=kind,
        )
        losses = law.x_array
        bounds.append([float(law.prob_arr @ -np.expm1(np.minimum(e - losses, 0.0)) + law.p_max) for e in PEER_EPSILONS])
    return tuple(zip(*bounds, strict=True))


@directions
@pytest.mark.parametrize(("b", "epochs", "sigma", "step"), PEER_CELLS)
def test_between_the_bounds_of_pld_accounting(b: int, epochs: int, sigma: float, step: float, direction: str) -> None:
    """Each side's lower bound is below the other's upper bound, and ours lie within the (coarser) peer's."""
    mechanism = dpsgd(b, epochs)
    lattice = Lattice().prepare(mechanism)
    compared = 0
    for epsilon, (low, high) in zip(PEER_EPSILONS, peer(b, epochs, sigma, step, direction), strict=True):
        upper = lattice.delta(sigma, epsilon, direction).value
        lower = lower_delta(mechanism, sigma, epsilon, direction)
        assert low <= upper
        assert lower <= high
        if upper > 1e-11:  # the peer cuts tails of 10⁻¹² off
            assert low <= lower <= upper <= high
            assert upper <= 1.06 * lower
            compared += 1
    assert compared >= 2


@directions
@pytest.mark.parametrize("accountant", [Chain(), Cascade(), Best()], ids=lambda a: a.name)
@pytest.mark.parametrize("cell", PEER_CELLS[1:4], ids=str)
def test_accountants_of_correlated_noise_on_uncorrelated(cell: Any, accountant: Accountant, direction: str) -> None:
    """Never below the peer's lower bound; the chain not far above its upper one. The cascade bounds add loosely."""
    b, epochs, sigma, _ = cell
    prepared = accountant.prepare(dpsgd(b, epochs))
    factor = {"chain": 1.25, "best": 1.0, "cascade": 4.0 if direction == "remove" else math.inf}[accountant.name]
    for epsilon, (low, high) in zip(PEER_EPSILONS, peer(*cell, direction), strict=True):
        found = prepared.delta(sigma, epsilon, direction).value
        assert low <= found
        if found > 1e-11:
            assert found <= factor * high


# --- one batch: the Gaussian mechanism -----------------------------------------------------------------------------


@accountants
@directions
def test_one_batch_is_the_gaussian_mechanism(accountant: Accountant, direction: str) -> None:
    for epochs, sigma in ((1, 0.1), (1, 1.0), (3, 7.0), (2, 300.0)):
        prepared = accountant.prepare(dpsgd(1, epochs))
        for epsilon in (0.0, 0.01, 0.5, 2.0, 10.0):
            exact = oracles.gaussian_delta(epochs / sigma**2, epsilon)
            found = prepared.delta(sigma, epsilon, direction).value
            lower = lower_delta(prepared.mechanism, sigma, epsilon, direction)
            slack = 1e-9 * exact + 1e-15
            assert lower - slack <= exact <= found + slack
            assert found - slack <= exact * (1 + 1e-9)


# --- two and three batches: quadrature -----------------------------------------------------------------------------

# Uncorrelated, correlated, nearly one, very unequal, one that never matters; the Gram matrices of their columns.
SMALL = {
    "two": np.array([[1.0, 0.0], [0.0, 1.0]]),
    "two correlated": np.array([[0.8, 0.0], [0.6, 1.0]]),
    "two alike": np.array([[0.1, 0.0], [1.0, 1.0]]),
    "three": np.diag([1.0, 0.7, 0.4]),
    "three in a chain": np.array([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]),
    "three in a ring": np.array([[1.0, 0.0, 0.0], [0.4, 1.0, 0.0], [0.4, 0.4, 0.9]]),
    "three unequal": np.array([[1.5, 0.0, 0.0], [0.3, 0.5, 0.0], [0.0, 0.1, 0.1]]),
    "three, one empty": np.array([[1.0, 0.0, 0.0], [0.7, 0.0, 0.0], [0.0, 0.0, 1.0]]),
}


POINTS = ((0.8, 0.3), (1.2, 1.0), (3.0, 0.1))  # σ and ε


def quadrature(gram: np.ndarray, sigma: float, epsilon: float, direction: str) -> float:
    """The exact δ(ε), once for all accountants."""
    return _quadrature(gram.tobytes(), len(gram), sigma, epsilon, direction)


@cache
def _quadrature(gram: bytes, b: int, sigma: float, epsilon: float, direction: str) -> float:
    return oracles.delta(np.frombuffer(gram).reshape(b, b) / sigma**2, epsilon, direction)


@accountants
@directions
@pytest.mark.parametrize("name", SMALL)
def test_quadrature(accountant: Accountant, name: str, direction: str) -> None:
    entries = SMALL[name]
    mechanism = Mechanism(strategies.matrix(entries), BallsInBins(1, len(entries)))
    gram = oracles.gram(entries, len(entries))
    if isinstance(accountant, Lattice) and np.count_nonzero(gram) > np.count_nonzero(np.diag(gram)):
        with pytest.raises(ValueError, match="uncorrelated"):
            accountant.prepare(mechanism)
        return
    prepared = accountant.prepare(mechanism)
    for sigma, epsilon in POINTS:
        exact = quadrature(gram, sigma, epsilon, direction)
        assert prepared.delta(sigma, epsilon, direction).value >= exact * (1 - 1e-7)


@directions
@pytest.mark.parametrize("name", SMALL)
def test_quadrature_from_below(name: str, direction: str) -> None:
    gram = oracles.gram(SMALL[name], len(SMALL[name]))
    for sigma, epsilon in POINTS[:2]:
        assert lower_delta(gram, sigma, epsilon, direction) <= quadrature(gram, sigma, epsilon, direction) * (1 + 1e-7)


# --- the noise multipliers found by sampling -----------------------------------------------------------------------

TRUTH = json.loads(paths.TRUE_SIGMA.read_text())
BUILDERS = {
    "dpsgd N=100 k=1": lambda: dpsgd(100),
    "bsr4 N=100 k=1": lambda: Mechanism(strategies.bsr(4), BallsInBins(1, 100)),
    "bsr4 N=1000 k=10": lambda: Mechanism(strategies.bsr(4), BallsInBins(10, 100)),
    "bisr4 N=1000 k=10": lambda: Mechanism(strategies.bisr(4), BallsInBins(10, 100)),
    "bsr64 N=100 k=1": lambda: Mechanism(strategies.bsr(64), BallsInBins(1, 100)),
    "bisr64 N=100 k=1": lambda: Mechanism(strategies.bisr(64), BallsInBins(1, 100)),
}
# The chain in coarse steps: it is about soundness here, at a fraction of the time.
REFERENCE_ACCOUNTANTS: dict[str, Accountant] = {"chain": Chain(discretisation_loss=0.1), "cascade": Cascade()}


@cache
def prepared_for(name: str, accountant: str) -> PreparedAccountant:
    return REFERENCE_ACCOUNTANTS[accountant].prepare(BUILDERS[name]())


@pytest.mark.parametrize(
    ("name", "accountant"),
    [pair for pair in itertools.product(BUILDERS, REFERENCE_ACCOUNTANTS) if pair != ("bsr64 N=100 k=1", "chain")],
)
def test_reference_noise_multipliers(name: str, accountant: str) -> None:
    """At σ_true no accountant, no member of one, is below δ by more than four standard errors of the sampling."""
    cells = [cell for cell in TRUTH if cell["mechanism"] == name][::3]
    assert cells
    for cell, direction in itertools.product(cells, DIRECTIONS):
        if f"sigma_{direction}" not in cell:
            continue
        sigma, epsilon, delta = cell[f"sigma_{direction}"], cell["epsilon"], cell["delta"]
        least = delta * (1 - 4 * cell[f"rel_se_delta_{direction}"])
        for member in prepared_for(name, accountant).bounds():
            assert member.delta(sigma, epsilon, direction, delta).value >= least, (cell, direction)


# --- entrywise larger Gram matrices --------------------------------------------------------------------------------

PAIRS = {
    "diagonal": (np.diag([1.0, 0.8, 0.5]), np.diag([1.0, 0.9, 0.8])),
    "off the diagonal": (np.diag([1.0, 1.0, 1.0]), np.array([[1.0, 0, 0], [0.3, 1.0, 0], [0.1, 0.3, 1.0]])),
    "everywhere": (SMALL["three in a ring"], 1.1 * SMALL["three in a ring"]),
}


@directions
@pytest.mark.parametrize("name", PAIRS)
def test_the_truth_grows_with_the_gram_matrix(name: str, direction: str) -> None:
    """Kahane's inequality, by quadrature."""
    small, large = (oracles.gram(entries, 3) for entries in PAIRS[name])
    assert np.all(large >= small)
    for sigma, epsilon in POINTS[::2]:
        assert quadrature(small, sigma, epsilon, direction) < quadrature(large, sigma, epsilon, direction)


@accountants
@directions
@pytest.mark.parametrize("name", PAIRS)
def test_bounds_grow_with_the_gram_matrix(accountant: Accountant, name: str, direction: str) -> None:
    """A bound at the larger matrix is one at the smaller: it is above that truth. Bounds grow up to their own grids."""
    if isinstance(accountant, Lattice) and name != "diagonal":
        pytest.skip("correlated noise")
    small, large = (Mechanism(strategies.matrix(entries), BallsInBins(1, 3)) for entries in PAIRS[name])
    for sigma, epsilon in POINTS[::2]:
        values = [accountant.prepare(m).delta(sigma, epsilon, direction).value for m in (small, large)]
        assert values[1] >= values[0] * 0.97
        assert values[1] >= quadrature(small.gram, sigma, epsilon, direction)


# --- refinement ----------------------------------------------------------------------------------------------------


@directions
@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [
        (Lattice, dpsgd(3)),
        (Lattice, dpsgd(60)),
        (Chain, Mechanism(strategies.bisr(2), BallsInBins(1, 3))),
        (Chain, Mechanism(strategies.bsr(4), BallsInBins(3, 12))),
        (Cascade, Mechanism(strategies.bisr(2), BallsInBins(1, 3))),
        (Cascade, Mechanism(strategies.bsr(4), BallsInBins(3, 12))),
    ],
    ids=str,
)
def test_refinement_decreases(kind: Any, mechanism: Mechanism, direction: str) -> None:
    """Halving the spacings (a fourth of the loss) lowers the bound, by less each time, and never below the truth."""
    sigma, epsilon = 0.5 * mechanism.sensitivity, 0.5
    losses = (0.08, 0.02, 0.005)
    values = [
        kind(discretisation_loss=loss).prepare(mechanism).delta(sigma, epsilon, direction).value for loss in losses
    ]
    assert all(fine <= coarse * 1.002 for coarse, fine in itertools.pairwise(values))
    assert values[1] - values[2] <= 0.7 * (values[0] - values[1]) + 2e-3 * values[2]
    below = (
        quadrature(mechanism.gram, sigma, epsilon, direction)
        if len(mechanism.gram) <= 3
        else lower_delta(mechanism, sigma, epsilon, direction)
    )
    assert values[2] >= below
