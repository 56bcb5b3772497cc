"""The figures of the paper, as values. `catalogue()` is a coarser grid that takes minutes, `catalogue(full=True)` the
paper's own (hours).

Each panel also has what the paper does not: dpmf's own tight accountant, and the certified lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from dpmf_experiments.spec import AccountantSpec, Cell, FigureSpec, Line, MechanismSpec, Panel, accountant

DELTA = 1e-5
TEMPERATURES = ("inf", 0.1, 10**-0.5, 1.0, 10**0.5, 10.0)


@dataclass(frozen=True)
class Grid:
    """How fine a run is."""

    epsilons: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    epsilons_additional: tuple[float, ...] = (0.25, 1.0, 4.0)
    samples: int = 100_000
    samples_large: int = 20_000  # where b = 1000
    whp_points: tuple[float, ...] = (0.5, 4.0)
    whp_multiples: tuple[float, ...] = (1.25, 3.0)
    runtime_deltas: tuple[float, ...] = (1e-3, 1e-4, 1e-5, 3e-6)
    runtime_iterations: tuple[int, ...] = (200, 400, 800, 1600)
    runtime_batches: tuple[int, ...] = (50, 100, 200)
    runtime_batches_iterations: int = 800
    runtime_bandwidths: tuple[int, ...] = (1, 2, 3, 4, 5)
    runtime_orders: tuple[int, ...] = (4, 8, 16)
    runtime_budget: float = 1e10
    peer_orders: tuple[int, ...] = (5, 10, 20, 30, 40)
    own_orders: tuple[int, ...] = (5, 10, 20, 40, 100, 200, 500)
    temperature_steps: tuple[int, ...] = (2, 5)
    histogram_samples: int = 100_000


COARSE = Grid()
_FINE = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
FULL = Grid(
    epsilons=_FINE,
    epsilons_additional=_FINE,
    samples=400_000,
    samples_large=400_000,
    whp_points=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    whp_multiples=(1.25, 2.0, 10.0, 100.0),
    runtime_deltas=(1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8),
    runtime_iterations=(200, 400, 800, 1600, 3200, 6400, 12_800),
    runtime_batches=(25, 50, 100, 200, 400),
    runtime_batches_iterations=12_800,
    runtime_bandwidths=(1, 2, 3, 4, 5, 6, 8),
    runtime_orders=(4, 8, 16, 32),
    runtime_budget=1e12,
    temperature_steps=(2, 5, 11, 21),
    own_orders=(5, 10, 20, 30, 40, 50, 100, 200, 500, 1000),
    peer_orders=(5, 10, 20, 30, 40, 50, 60),
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


def epsilons_of(mechanism: MechanismSpec, grid: Grid) -> tuple[float, ...]:
    """Where σ is computed for a mechanism."""
    return grid.epsilons_additional if mechanism in ADDITIONAL else grid.epsilons


def tight(mechanism: MechanismSpec) -> AccountantSpec:
    """dpmf's own tight accountant for the mechanism."""
    return accountant("lattice" if mechanism.strategy == "dpsgd" else "chain")


def sampler(mechanism: MechanismSpec, grid: Grid) -> AccountantSpec:
    return accountant("monte-carlo", samples=grid.samples if mechanism.batches < 1000 else grid.samples_large)


def sigma_cell(mechanism: MechanismSpec, which: AccountantSpec, epsilon: float, direction: str = "both") -> Cell:
    return Cell.of(
        "sigma", mechanism=mechanism, accountant=which, epsilon=epsilon, delta=DELTA, direction=direction
    )  # fmt: skip


def lower_cell(mechanism: MechanismSpec, epsilon: float) -> Cell:
    return Cell.of("sigma-lower", mechanism=mechanism, epsilon=epsilon, delta=DELTA)


def _line(
    label: str, look: str, mechanism: MechanismSpec, which: AccountantSpec, grid: Grid, direction: str = "both"
) -> Line:
    cells = tuple(sigma_cell(mechanism, which, e, direction) for e in epsilons_of(mechanism, grid))
    return Line(label, look, cells, epsilons_of(mechanism, grid), "sigma")


def _tight_line(mechanism: MechanismSpec, grid: Grid) -> Line:
    which = tight(mechanism)
    return _line(f"{which.name} (dpmf)", "tight", mechanism, which, grid)


def _sampled_line(mechanism: MechanismSpec, grid: Grid) -> Line:
    return _line("Monte Carlo (estimate)", "monte-carlo", mechanism, sampler(mechanism, grid), grid)


def _lower_line(mechanism: MechanismSpec, grid: Grid) -> Line:
    cells = tuple(lower_cell(mechanism, e) for e in epsilons_of(mechanism, grid))
    return Line("certified lower bound", "lower", cells, epsilons_of(mechanism, grid), "sigma")


def _reference(mechanism: MechanismSpec, grid: Grid) -> tuple[Line, ...]:
    """What every panel of σ against ε has beside its own lines."""
    return _sampled_line(mechanism, grid), _tight_line(mechanism, grid), _lower_line(mechanism, grid)


def _sigma_panel(mechanism: MechanismSpec, lines: Sequence[Line], grid: Grid, title: str = "") -> Panel:
    ticks = tuple(e for e in epsilons_of(mechanism, grid) if e in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16))
    return Panel(title or mechanism.title, tuple(lines), x_ticks=ticks)


# --- σ against ε -----------------------------------------------------------------------------------------------------


def accountants_panel(mechanism: MechanismSpec, grid: Grid) -> Panel:
    lines = (
        _line("Rényi, the paper's orders", "renyi-paper", mechanism, PAPER_RENYI, grid),
        _line("Rényi (dpmf)", "renyi", mechanism, RENYI, grid),
        _line("conditional composition", "conditional", mechanism, CONDITIONAL, grid),
        *_reference(mechanism, grid),
    )
    return _sigma_panel(mechanism, lines, grid)


def main(grid: Grid) -> FigureSpec:
    panels = tuple(accountants_panel(mechanism, grid) for mechanism in MAIN)
    return FigureSpec("fig-main", "Accountants for DP-SGD and BSR, δ = 10⁻⁵", "Figure 2", panels, (2, 3))


def additional(grid: Grid) -> FigureSpec:
    panels = tuple(accountants_panel(mechanism, grid) for mechanism in ADDITIONAL)
    title = "Accountants for BISR, BLT, BandMF and BandInvMF, δ = 10⁻⁵"
    return FigureSpec("fig-additional", title, "appendix, additional matrix mechanisms", panels, (2, 3))


def directions(grid: Grid) -> FigureSpec:
    panels = []
    for mechanism in MAIN:
        lines = [
            _line(f"Rényi, the paper's orders, {way}", f"paper-{way}", mechanism, PAPER_RENYI, grid, way)
            for way in ("remove", "add")
        ]
        lines += [_line(f"Rényi (dpmf), {way}", f"own-{way}", mechanism, RENYI, grid, way) for way in ("remove", "add")]
        panels.append(_sigma_panel(mechanism, (*lines, _tight_line(mechanism, grid)), grid))
    title = "Rényi: the remove and the add direction, δ = 10⁻⁵"
    return FigureSpec("fig-directions", title, "appendix, remove and add direction", tuple(panels), (2, 3))


# --- Monte Carlo with a limit that holds with high probability -------------------------------------------------------

# About the true σ at δ = 10⁻⁵ (remove) for the ε of `Grid.whp_points`: only where to look, the answer is ε(σ).
_NEAR = {
    DPSGD_100: {0.25: 1.53, 0.5: 1.075, 1.0: 0.874, 2.0: 0.718, 4.0: 0.567, 8.0: 0.415},
    DPSGD_1000: {0.25: 0.757, 0.5: 0.693, 1.0: 0.637, 2.0: 0.569, 4.0: 0.479, 8.0: 0.372},
    DPSGD_EPOCHS: {0.25: 4.83, 0.5: 3.40, 1.0: 2.76, 2.0: 2.27, 4.0: 1.79, 8.0: 1.31},
    BSR_4: {0.25: 2.97, 0.5: 1.70, 1.0: 1.17, 2.0: 0.905, 4.0: 0.697, 8.0: 0.506},
    BSR_64: {0.25: 9.0, 0.5: 5.2, 1.0: 2.91, 2.0: 1.85, 4.0: 1.28, 8.0: 0.88},
    BSR_EPOCHS: {0.25: 9.4, 0.5: 5.4, 1.0: 3.70, 2.0: 2.86, 4.0: 2.20, 8.0: 1.60},
}


def minimum_samples(delta: float, failure_probability: float) -> int:
    """s_min of the paper: the fewest samples that can show δ at all."""
    from dpmf.accountants.monte_carlo import minimum_samples as least

    return least(delta, failure_probability)


def limits(grid: Grid) -> FigureSpec:
    least = minimum_samples(DELTA, DELTA)
    panels = []
    for mechanism in MAIN:
        # Samples are what takes time: the coarse grid has limits for two of the mechanisms only.
        multiples = grid.whp_multiples
        if grid is COARSE and mechanism not in (DPSGD_100, BSR_4):
            multiples = ()
        lines = []
        for number, multiple in enumerate(multiples, start=1):
            which = accountant(
                "monte-carlo", samples=int(multiple * least), importance=False, failure_probability=DELTA
            )
            cells = tuple(
                Cell.of(
                    "epsilon", mechanism=mechanism, accountant=which, sigma=_NEAR[mechanism][e], delta=DELTA,
                    direction="remove",
                )
                for e in grid.whp_points
            )  # fmt: skip
            lines.append(Line(f"limit, {multiple:g}·s_min samples", f"limit-{number}", cells, "epsilon", "sigma"))
        panels.append(_sigma_panel(mechanism, (*lines, *_reference(mechanism, grid)), grid))
    title = "Monte Carlo: limits that fail with probability 10⁻⁵ (remove), δ = 10⁻⁵"
    return FigureSpec("fig-limits", title, "appendix, Monte Carlo high-probability bounds", tuple(panels), (2, 3))


# --- the DP-SGD accountants of others --------------------------------------------------------------------------------

_PEER_SIGMAS = {DPSGD_100: (0.5, 0.72, 1.0, 1.5), DPSGD_1000: (0.57, 0.75)}


def _peer_panel(mechanism: MechanismSpec, which: AccountantSpec, label: str, grid: Grid) -> Panel:
    cells = tuple(
        Cell.of("epsilon", mechanism=mechanism, accountant=which, sigma=s, delta=DELTA, direction="both")
        for s in _PEER_SIGMAS[mechanism]
    )
    lines = (
        Line(label, "peer", cells, "epsilon", "sigma"),
        _line("Rényi, the paper's orders", "renyi-paper", mechanism, PAPER_RENYI, grid),
        _line("conditional composition", "conditional", mechanism, CONDITIONAL, grid),
        *_reference(mechanism, grid),
    )
    return _sigma_panel(mechanism, lines, grid)


def feldman_2025(grid: Grid) -> FigureSpec:
    peer = accountant("random-allocation")
    panels = tuple(_peer_panel(m, peer, "Feldman & Shenfeld 2025", grid) for m in (DPSGD_100, DPSGD_1000))
    title = "DP-SGD: beside Feldman & Shenfeld 2025 (random-allocation), δ = 10⁻⁵"
    return FigureSpec("fig-feldman-2025", title, "appendix, comparison to Feldman & Shenfeld (2025)", panels, (1, 2))


def feldman_2026(grid: Grid) -> FigureSpec:
    peer = accountant("pld-accounting", loss_discretization=0.1)  # as in the paper
    panels = tuple(_peer_panel(m, peer, "Feldman & Shenfeld 2026", grid) for m in (DPSGD_100, DPSGD_1000))
    title = "DP-SGD: beside Feldman & Shenfeld 2026 (PLD-accounting), δ = 10⁻⁵"
    return FigureSpec("fig-feldman-2026", title, "appendix, comparison to Feldman & Shenfeld (2026)", panels, (1, 2))


def feldman_runtime(grid: Grid) -> FigureSpec:
    panels = []
    for mechanism in (DPSGD_100, DPSGD_1000):
        own = tuple(Cell.of("renyi-seconds", mechanism=mechanism, order=a, sigma=1.1) for a in grid.own_orders)
        peer = tuple(Cell.of("peer-renyi-seconds", mechanism=mechanism, order=a, sigma=1.1) for a in grid.peer_orders)
        lines = (
            Line("random-allocation, order α alone", "peer", peer, tuple(map(float, grid.peer_orders)), "seconds"),
            Line("dpmf, all orders up to α", "renyi", own, tuple(map(float, grid.own_orders)), "seconds"),
        )
        panels.append(Panel(mechanism.title, lines, "Rényi order α", "seconds of one core"))
    title = "Rényi divergence of DP-SGD: seconds against the order"
    return FigureSpec("fig-feldman-runtime", title, "appendix, Rényi accountant runtime", tuple(panels), (1, 2))


# --- the Gram matrix, and what cutting its band costs ----------------------------------------------------------------


def grams(grid: Grid) -> FigureSpec:
    mechanisms = (
        MechanismSpec("bandmf", 10, 300, 64),
        MechanismSpec("bsr", 10, 300, 64),
        MechanismSpec("bisr", 10, 300, 64),
        MechanismSpec("bandinvmf", 10, 300, 4),
    )
    panels = tuple(
        Panel(
            f"{m.title.split(',')[0]}, p = {m.bandwidth}",
            (Line("", "image", (Cell.of("gram", mechanism=m),), (0.0,), "image"),),
            "batch j", "batch i", "", "image",
        )
        for m in mechanisms
    )  # fmt: skip
    return FigureSpec("fig-gram", "Gram matrices, N = 3000, k = 10", "Figure 1", panels, (1, 4))


def divergence_cell(mechanism: MechanismSpec, order: int, sigma: float, band: int | None) -> Cell:
    return Cell.of("divergence", mechanism=mechanism, order=order, sigma=sigma, bandwidth=band)


_BANDS = (1, 2, 4, 8, 16, 32, 64, 128)


def truncation(grid: Grid) -> FigureSpec:
    panels = []
    # The third is ours: at the paper's σ = 1 and k = 10 the diagonal is all that counts.
    for epochs, batches, order, sigma in ((1, 1000, 2, 0.5), (10, 100, 3, 1.0), (10, 100, 3, 5.0)):
        lines = []
        for strategy, p in (("bsr", 4), ("bsr", 16), ("bsr", 64), ("bisr", 4), ("bisr", 64)):
            mechanism = MechanismSpec(strategy, epochs, batches, p)
            kept = tuple(band for band in _BANDS if band <= batches // 2 + 14)
            cells = tuple(divergence_cell(mechanism, order, sigma, band) for band in kept)
            exact = divergence_cell(mechanism, order, sigma, None)
            x = tuple(map(float, kept))
            lines.append(Line(f"{strategy.upper()}, p = {p}", f"{strategy}-{p}", cells, x, "divergence", exact))
        title = f"N = 1000, k = {epochs}, α = {order}, σ = {sigma:g}"
        panels.append(Panel(title, tuple(lines), "bandwidth kept", "R_α truncated / exact", x_ticks=x))
    title = "What truncating the Gram matrix costs the Rényi divergence (remove)"
    return FigureSpec("fig-truncation", title, "appendix, effect of bandwidth truncation", tuple(panels), (1, 3))


# --- runtime ---------------------------------------------------------------------------------------------------------


def seconds_cell(mechanism: MechanismSpec, which: AccountantSpec) -> Cell:
    """One evaluation at the paper's σ = 10, ε = 8 (remove)."""
    return Cell.of("seconds", mechanism=mechanism, accountant=which, sigma=10.0, epsilon=8.0)


AM_GM = accountant("conditional", family="am-gm")
CHAIN = accountant("chain")


def _runtime_renyi(mechanism: MechanismSpec, order: int = 8) -> AccountantSpec:
    return accountant("renyi", bandwidth=mechanism.bandwidth or 1, max_order=order, work_budget=1e15)


def _runtime_sampler(delta: float) -> AccountantSpec:
    return accountant("monte-carlo", samples=minimum_samples(delta, 0.01), importance=False)


def _runtime_lines(mechanisms: Sequence[MechanismSpec], xs: Sequence[float], grid: Grid) -> tuple[Line, ...]:
    x = tuple(map(float, xs))

    def line(label: str, look: str, which: Callable[[MechanismSpec], AccountantSpec], field: str = "first") -> Line:
        return Line(label, look, tuple(seconds_cell(m, which(m)) for m in mechanisms), x, field)

    return (
        line("Rényi, α = 8", "renyi", _runtime_renyi),
        line("conditional, first σ", "conditional", lambda _: AM_GM),
        line("conditional, next σ", "conditional-next", lambda _: AM_GM, "next"),
        line("Monte Carlo, δ = 10⁻⁵", "sampled", lambda _: _runtime_sampler(1e-5)),
        line("chain (dpmf)", "tight", lambda _: CHAIN),
    )


def runtime(grid: Grid) -> FigureSpec:
    base = BSR_EPOCHS
    label = "seconds of one core"
    by_delta = tuple(
        Line(text, look, tuple(seconds_cell(base, which(d)) for d in grid.runtime_deltas), grid.runtime_deltas, "first")
        for text, look, which in (
            ("Rényi, α = 8", "renyi", lambda _: _runtime_renyi(base)),
            ("conditional, first σ", "conditional", lambda _: AM_GM),
            ("Monte Carlo, s_min(δ) samples", "sampled", _runtime_sampler),
            ("chain (dpmf)", "tight", lambda _: CHAIN),
        )
    )
    by_iterations = [MechanismSpec("bsr", n // 100, 100, 4) for n in grid.runtime_iterations]
    total = grid.runtime_batches_iterations
    by_batches = [MechanismSpec("bsr", total // b, b, 4) for b in grid.runtime_batches]
    by_bandwidth = []
    for order in grid.runtime_orders:
        bands = [p for p in grid.runtime_bandwidths if float(order) ** (2 * p - 1) * 100 / 50 <= grid.runtime_budget]
        cells = tuple(seconds_cell(m, _runtime_renyi(m, order)) for m in _bandwidths(bands))
        by_bandwidth.append(Line(f"Rényi, α = {order}", f"order-{order}", cells, tuple(map(float, bands)), "first"))
    panels = (
        Panel(f"δ varies ({base.title})", by_delta, "δ", label),
        Panel(
            "N varies (BSR, b = 100, p = 4)",
            _runtime_lines(by_iterations, grid.runtime_iterations, grid),
            "iterations N",
            label,
            x_ticks=tuple(map(float, grid.runtime_iterations)),
        ),
        Panel(
            f"b varies (BSR, N = {total}, p = 4)",
            _runtime_lines(by_batches, grid.runtime_batches, grid),
            "batches per epoch b",
            label,
            x_ticks=tuple(map(float, grid.runtime_batches)),
        ),
        Panel("p varies (BSR, N = 1000, b = 100)", tuple(by_bandwidth), "bandwidth p", label, log="y"),
    )
    title = "Seconds for one evaluation (σ = 10, ε = 8, remove)"
    return FigureSpec("fig-runtime", title, "appendix, empirical runtime", panels, (2, 2))


def _bandwidths(bands: Sequence[int]) -> list[MechanismSpec]:
    return [MechanismSpec("bsr", 10, 100, p) for p in bands]


# --- the tail bounds of conditional composition ----------------------------------------------------------------------

_FAMILIES = (
    ("option 1 (geometric mean)", "option-1", 1, ("inf",)),
    ("options 1 and 2", "option-2", 2, TEMPERATURES),
    ("options 1 and 3", "option-3", 3, TEMPERATURES),
)


def families(grid: Grid) -> FigureSpec:
    panels = []
    for strategy in ("bsr", "bisr"):
        for sigma in (2.0, 5.0):
            mechanism = MechanismSpec(strategy, 4, 100, 4)
            lines = tuple(
                Line(
                    label, look,
                    (
                        Cell.of(
                            "hazard", mechanism=mechanism, sigma=sigma, bad_event=1e-5, option=option,
                            temperatures=list(temperatures),
                        ),
                    ),
                    "steps", "hazards",
                )
                for label, look, option, temperatures in _FAMILIES
            )  # fmt: skip
            panels.append(
                Panel(f"{mechanism.title}, σ = {sigma:g}", lines, "step", "bound on the reverse hazard", log="")
            )
    title = "Reverse hazard of the largest component by variational family, δ_E = 10⁻⁵ (remove)"
    return FigureSpec("fig-families", title, "appendix, variational families", tuple(panels), (2, 2))


def temperature_grid(steps: int) -> tuple[str | float, ...]:
    """{∞} ∪ logspace(−2, 2, steps)."""
    return ("inf", *(float(f"{10 ** (-2 + 4 * i / (steps - 1)):.6g}") for i in range(steps)))


_ABLATION = (
    ("bsr", 2.0, (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0)),
    ("bsr", 4.0, (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)),
    ("bisr", 2.0, (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0)),
    ("bisr", 4.0, (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)),
)


def profile_cell(mechanism: MechanismSpec, which: AccountantSpec, sigma: float, epsilons: Sequence[float]) -> Cell:
    return Cell.of(
        "profile", mechanism=mechanism, accountant=which, sigma=sigma, epsilons=list(epsilons), direction="remove"
    )


def temperatures(grid: Grid) -> FigureSpec:
    above, below = [], []
    for strategy, sigma, epsilons in _ABLATION:
        mechanism = MechanismSpec(strategy, 4, 25, 4)
        plain = profile_cell(mechanism, accountant("conditional", option=3, temperatures=("inf",)), sigma, epsilons)
        lines = [Line("T = {∞}", "option-1", (plain,), "epsilons", "deltas")]
        for steps, look in zip(grid.temperature_steps, ("option-2", "option-3", "order-4", "order-8"), strict=False):
            which = accountant("conditional", option=3, temperatures=temperature_grid(steps))
            cell = profile_cell(mechanism, which, sigma, epsilons)
            lines.append(Line(f"and {steps} temperatures", look, (cell,), "epsilons", "deltas"))
        own = Line("chain (dpmf)", "tight", (profile_cell(mechanism, CHAIN, sigma, epsilons),), "epsilons", "deltas")
        title = f"{mechanism.title}, σ = {sigma:g}"
        above.append(Panel(title, (*lines, own), "ε", "δ (remove)", log="y", y_range=(1e-7, 2.0)))
        below.append(
            Panel(title, tuple(replace(line, over=plain) for line in lines), "ε", "δ / δ with T = {∞}", log="")
        )
    title = "Conditional composition: how many temperatures"
    return FigureSpec("fig-temperatures", title, "appendix, ablation over temperatures", (*above, *below), (2, 4))


def histograms(grid: Grid) -> FigureSpec:
    mechanism = MechanismSpec("dpsgd", 4, 100)
    panels = []
    for step in (100, 200, 300, 101, 201, 301):
        cell = Cell.of(
            "ternary-loss", mechanism=mechanism, sigma=5.0, step=step, samples=grid.histogram_samples, seed=0,
            low=-1.5, high=1.5, bins=60,
        )  # fmt: skip
        panels.append(
            Panel(
                f"step {step}",
                (Line("", "histogram", (cell,), "edges", "density"),),
                "ternary privacy loss",
                "density",
                "",
                "histogram",
            )
        )
    title = "Ternary privacy loss at the ends of epochs: DP-SGD, k = 4, b = 100, σ = 5 (remove)"
    return FigureSpec(
        "fig-histograms", title, "appendix, jumps of the reverse hazard", tuple(panels), (2, 3), share_y=True
    )


_MAKERS: tuple[Callable[[Grid], FigureSpec], ...] = (
    grams, main, additional, limits, runtime, truncation, directions, feldman_2025, feldman_2026, feldman_runtime,
    families, temperatures, histograms,
)  # fmt: skip


@cache
def catalogue(full: bool = False) -> dict[str, FigureSpec]:
    """All figures by name, in the paper's order."""
    made = [make(FULL if full else COARSE) for make in _MAKERS]
    return {figure.name: figure for figure in made}
