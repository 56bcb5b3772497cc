"""What the figures are about: mechanisms, accountants and grids, and the cells made of them.

`COARSE` takes about half an hour on two cores. `FULL` has the paper's ε and its numbers of samples, and takes hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evidence.spec import AccountantSpec, Cell, MechanismSpec, accountant

DELTA = 1e-5
TEMPERATURES = ("inf", 0.1, 10**-0.5, 1.0, 10**0.5, 10.0)


@dataclass(frozen=True)
class Grid:
    """How fine a run is."""

    epsilons: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    samples: int = 100_000
    samples_large: int = 20_000  # where b = 1000: a sample takes some twenty times as long
    whp_points: tuple[float, ...] = (0.5, 1.0, 4.0)
    whp_multiples: tuple[float, ...] = (1.25, 3.0, 10.0)
    whp_points_large: tuple[float, ...] = (0.5, 4.0)  # where b = 1000
    whp_multiples_large: tuple[float, ...] = (1.25, 3.0)
    runtime_deltas: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    runtime_iterations: tuple[int, ...] = (200, 400, 800, 1600, 3200, 6400, 12_800)
    runtime_batches: tuple[int, ...] = (25, 50, 100, 200, 400)
    runtime_batches_iterations: int = 12_800
    runtime_bandwidths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    runtime_orders: tuple[int, ...] = (4, 8, 16, 32)
    runtime_work: float = 1e12  # of a Rényi evaluation, in its own units: about half a minute
    peer_orders: tuple[int, ...] = (5, 10, 20, 30, 40, 50, 60)
    own_orders: tuple[int, ...] = (5, 10, 20, 30, 40, 50, 60, 100, 200, 500, 1000)
    temperature_steps: tuple[int, ...] = (2, 5, 11, 21)
    histogram_samples: int = 100_000


COARSE = Grid()
FULL = Grid(
    epsilons=(0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0),
    samples=400_000,
    samples_large=400_000,
    whp_points=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    whp_multiples=(1.25, 2.0, 10.0, 100.0),
    whp_points_large=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    whp_multiples_large=(1.25, 2.0, 10.0, 100.0),
    runtime_deltas=(1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8),
)

DPSGD_100 = MechanismSpec("dpsgd", 1, 100)
DPSGD_1000 = MechanismSpec("dpsgd", 1, 1000)
DPSGD_EPOCHS = MechanismSpec("dpsgd", 10, 100)
BSR_4 = MechanismSpec("bsr", 1, 100, 4)
BSR_64 = MechanismSpec("bsr", 1, 100, 64)
BSR_EPOCHS = MechanismSpec("bsr", 10, 100, 4)
BISR_4 = MechanismSpec("bisr", 1, 100, 4)
BISR_64 = MechanismSpec("bisr", 1, 100, 64)
BISR_EPOCHS = MechanismSpec("bisr", 10, 100, 4)
BLT = MechanismSpec("blt", 1, 100)
BANDMF = MechanismSpec("bandmf", 1, 100, 64)
BANDINVMF = MechanismSpec("bandinvmf", 1, 100, 4)

MAIN = (DPSGD_100, DPSGD_1000, DPSGD_EPOCHS, BSR_4, BSR_64, BSR_EPOCHS)
ADDITIONAL = (BISR_4, BISR_64, BISR_EPOCHS, BLT, BANDMF, BANDINVMF)

# The paper's (p, α): {2} × ..25 and {4} × ..7 as printed. It lists {2} twice; that one of them should be p = 1, which
# is exact for DP-SGD, is the only reading under which DP-SGD is not worse off than in the paper's text.
PAPER_RENYI = AccountantSpec(
    "best",
    members=(
        accountant("renyi", bandwidth=1, max_order=25),
        accountant("renyi", bandwidth=2, max_order=25),
        accountant("renyi", bandwidth=4, max_order=7),
    ),
)
RENYI = accountant("renyi", work_budget=3e8)  # a tenth of the default: a fraction of a percent looser, quick enough
CONDITIONAL = accountant("conditional")
AM_GM = accountant("conditional", family="am-gm")
CHAIN = accountant("chain")
LATTICE = accountant("lattice")


def tight(mechanism: MechanismSpec) -> AccountantSpec:
    """dpmf's own tight accountant for the mechanism."""
    return LATTICE if mechanism.strategy == "dpsgd" else CHAIN


def sampler(mechanism: MechanismSpec, grid: Grid) -> AccountantSpec:
    return accountant("monte-carlo", samples=grid.samples if mechanism.batches < 1000 else grid.samples_large)


def minimum_samples(delta: float, failure_probability: float) -> int:
    """s_min of the paper: the fewest samples that can show δ at all."""
    from dpmf.accountants.monte_carlo import minimum_samples as least

    return least(delta, failure_probability)


# --- cells -----------------------------------------------------------------------------------------------------------


def sigma_cell(mechanism: MechanismSpec, which: AccountantSpec, epsilon: float, direction: str = "both") -> Cell:
    return Cell.of(
        "sigma", mechanism=mechanism, accountant=which, epsilon=epsilon, delta=DELTA, direction=direction
    )  # fmt: skip


def lower_cell(mechanism: MechanismSpec, epsilon: float) -> Cell:
    return Cell.of("sigma-lower", mechanism=mechanism, epsilon=epsilon, delta=DELTA)


def profile_cell(mechanism: MechanismSpec, which: AccountantSpec, sigma: float, epsilons: Sequence[float]) -> Cell:
    return Cell.of(
        "profile", mechanism=mechanism, accountant=which, sigma=sigma, epsilons=list(epsilons), direction="remove"
    )


def divergence_cell(mechanism: MechanismSpec, order: int, sigma: float, band: int | None) -> Cell:
    return Cell.of("divergence", mechanism=mechanism, order=order, sigma=sigma, bandwidth=band)


def seconds_cell(mechanism: MechanismSpec, which: AccountantSpec) -> Cell:
    """One evaluation at the paper's σ = 10, ε = 8 (remove)."""
    return Cell.of("seconds", mechanism=mechanism, accountant=which, sigma=10.0, epsilon=8.0)


def busy_seconds_cell(mechanism: MechanismSpec, which: AccountantSpec) -> Cell:
    """One evaluation where δ is neither 0 nor 1, which takes an accountant longer that notices such ends early."""
    return Cell.of("seconds", mechanism=mechanism, accountant=which, sigma=1.2, epsilon=1.0, unit="sensitivity")


# About the true σ at δ = 10⁻⁵ (remove) for the ε of `Grid.whp_points`: only where to look, the answer is ε(σ).
NEAR = {
    DPSGD_100: {0.25: 1.53, 0.5: 1.075, 1.0: 0.874, 2.0: 0.718, 4.0: 0.567, 8.0: 0.415},
    DPSGD_1000: {0.25: 0.823, 0.5: 0.719, 1.0: 0.637, 2.0: 0.557, 4.0: 0.467, 8.0: 0.364},
    DPSGD_EPOCHS: {0.25: 4.83, 0.5: 3.40, 1.0: 2.76, 2.0: 2.27, 4.0: 1.79, 8.0: 1.31},
    BSR_4: {0.25: 2.97, 0.5: 1.70, 1.0: 1.17, 2.0: 0.905, 4.0: 0.697, 8.0: 0.506},
    BSR_64: {0.25: 10.0, 0.5: 5.35, 1.0: 2.91, 2.0: 1.64, 4.0: 0.97, 8.0: 0.64},
    BSR_EPOCHS: {0.25: 9.4, 0.5: 5.4, 1.0: 3.70, 2.0: 2.86, 4.0: 2.20, 8.0: 1.60},
}
