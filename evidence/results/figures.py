"""The figures of the paper, as values. `catalogue()` has coarser grids than the paper, `catalogue(full=True)` its own.

Each panel also has what the paper does not: dpmf's own tight accountant, and the certified lower bound, wherever what
the panel shows exists for them (Gram matrices, Rényi divergences, hazards and sampled losses do not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from evidence.results.settings import (
    ADDITIONAL,
    AM_GM,
    BSR_EPOCHS,
    CHAIN,
    COARSE,
    CONDITIONAL,
    DELTA,
    DPSGD_100,
    DPSGD_1000,
    FULL,
    LATTICE,
    MAIN,
    NEAR,
    PAPER_RENYI,
    RENYI,
    TEMPERATURES,
    Grid,
    busy_seconds_cell,
    divergence_cell,
    lower_cell,
    minimum_samples,
    profile_cell,
    sampler,
    seconds_cell,
    sigma_cell,
    tight,
)  # fmt: skip
from evidence.spec import AccountantSpec, Cell, FigureSpec, Line, MechanismSpec, Panel, accountant


def _line(
    label: str, look: str, mechanism: MechanismSpec, which: AccountantSpec, grid: Grid, direction: str = "both"
) -> Line:
    cells = tuple(sigma_cell(mechanism, which, e, direction) for e in grid.epsilons)
    return Line(label, look, cells, grid.epsilons, "sigma")


def _tight_line(mechanism: MechanismSpec, grid: Grid) -> Line:
    which = tight(mechanism)
    return _line(f"{which.name} (dpmf)", "tight", mechanism, which, grid)


def _tight_lines(mechanism: MechanismSpec, grid: Grid) -> list[Line]:
    """One for each direction."""
    which = tight(mechanism)
    return [
        _line(f"{which.name} (dpmf), {way}", f"tight-{way}", mechanism, which, grid, way) for way in ("remove", "add")
    ]


def _sampled_line(mechanism: MechanismSpec, grid: Grid) -> Line:
    return _line("Monte Carlo (estimate)", "monte-carlo", mechanism, sampler(mechanism, grid), grid)


def _lower_line(mechanism: MechanismSpec, grid: Grid) -> Line:
    cells = tuple(lower_cell(mechanism, e) for e in grid.epsilons)
    return Line("certified lower bound", "lower", cells, grid.epsilons, "sigma")


def _reference(mechanism: MechanismSpec, grid: Grid) -> tuple[Line, ...]:
    """What every panel of σ against ε has beside its own lines."""
    return _sampled_line(mechanism, grid), _tight_line(mechanism, grid), _lower_line(mechanism, grid)


def _sigma_panel(mechanism: MechanismSpec, lines: Sequence[Line], grid: Grid) -> Panel:
    ticks = tuple(e for e in grid.epsilons if e in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16))
    return Panel(mechanism.title, tuple(lines), x_ticks=ticks)


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
        lines += _tight_lines(mechanism, grid)
        panels.append(_sigma_panel(mechanism, (*lines, _lower_line(mechanism, grid)), grid))
    title = "Rényi: the remove and the add direction, δ = 10⁻⁵"
    return FigureSpec("fig-directions", title, "appendix, remove and add direction", tuple(panels), (2, 3))


# --- Monte Carlo with a limit that holds with high probability -------------------------------------------------------


def whp(mechanism: MechanismSpec, grid: Grid) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Multiples of s_min, and ε near which σ is chosen: fewer where a sample is expensive."""
    large = mechanism.batches >= 1000
    return (
        grid.whp_multiples_large if large else grid.whp_multiples,
        grid.whp_points_large if large else grid.whp_points,
    )


def limits(grid: Grid) -> FigureSpec:
    least = minimum_samples(DELTA, DELTA)
    panels = []
    for mechanism in MAIN:
        multiples, points = whp(mechanism, grid)
        lines = []
        for number, multiple in enumerate(multiples, start=1):
            which = accountant(
                "monte-carlo", samples=int(multiple * least), importance=False, failure_probability=DELTA
            )
            cells = tuple(
                Cell.of(
                    "epsilon", mechanism=mechanism, accountant=which, sigma=NEAR[mechanism][e], delta=DELTA,
                    direction="remove",
                )
                for e in points
            )  # fmt: skip
            lines.append(Line(f"limit, {multiple:g}·s_min samples", f"limit-{number}", cells, "epsilon", "sigma"))
        panels.append(_sigma_panel(mechanism, (*lines, *_reference(mechanism, grid)), grid))
    title = "Monte Carlo: limits that fail with probability 10⁻⁵ (remove), δ = 10⁻⁵"
    return FigureSpec("fig-limits", title, "appendix, Monte Carlo high-probability bounds", tuple(panels), (2, 3))


# --- the DP-SGD accountants of others --------------------------------------------------------------------------------

_PEER_SIGMAS = {
    DPSGD_100: (0.45, 0.5, 0.6, 0.72, 1.0, 1.5),
    DPSGD_1000: (0.45, 0.5, 0.57, 0.65, 0.75, 0.8),
}


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
        whole = Cell.of("seconds", mechanism=mechanism, accountant=LATTICE, sigma=1.1, epsilon=1.0)
        ends = float(grid.own_orders[0]), float(grid.own_orders[-1])
        lines = (
            Line("random-allocation, order α alone", "peer", peer, tuple(map(float, grid.peer_orders)), "seconds"),
            Line("dpmf, all orders up to α", "renyi", own, tuple(map(float, grid.own_orders)), "seconds"),
            Line("lattice (dpmf), one δ(ε): no orders", "tight", (whole,) * 2, ends, "first"),
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


def _runtime_renyi(mechanism: MechanismSpec, order: int = 8) -> AccountantSpec:
    return accountant("renyi", bandwidth=mechanism.bandwidth or 1, max_order=order, work_budget=1e15)


def _runtime_sampler(delta: float) -> AccountantSpec:
    return accountant("monte-carlo", samples=minimum_samples(delta, 0.01), importance=False)


def _chain_lines(mechanisms: Sequence[MechanismSpec], x: tuple[float, ...]) -> tuple[Line, Line]:
    """At the paper's σ and ε, where its δ is so small that it is done early, and where it has to work."""
    return (
        Line("chain (dpmf)", "tight", tuple(seconds_cell(m, CHAIN) for m in mechanisms), x, "first"),
        Line(
            "chain (dpmf), ε = 1, σ = 1.2·sensitivity", "tight-busy",
            tuple(busy_seconds_cell(m, CHAIN) for m in mechanisms), x, "first",
        ),
    )  # fmt: skip


def _runtime_lines(mechanisms: Sequence[MechanismSpec], x: tuple[float, ...]) -> tuple[Line, ...]:
    def line(label: str, look: str, which: Callable[[MechanismSpec], AccountantSpec], field: str = "first") -> Line:
        return Line(label, look, tuple(seconds_cell(m, which(m)) for m in mechanisms), x, field)

    return (
        line("Rényi, α = 8", "renyi", _runtime_renyi),
        line("conditional, first σ", "conditional", lambda _: AM_GM),
        line("conditional, next σ", "conditional-next", lambda _: AM_GM, "next"),
        line("Monte Carlo, s_min samples", "sampled", lambda _: _runtime_sampler(DELTA)),
        *_chain_lines(mechanisms, x),
    )


def runtime(grid: Grid) -> FigureSpec:
    base = BSR_EPOCHS
    label = "seconds of one core"
    deltas = grid.runtime_deltas
    by_delta = (
        *(line for line in _runtime_lines([base] * len(deltas), deltas) if line.look != "sampled"),
        Line(
            "Monte Carlo, s_min samples", "sampled",
            tuple(seconds_cell(base, _runtime_sampler(d)) for d in deltas), deltas, "first",
        ),
    )  # fmt: skip
    by_iterations = [MechanismSpec("bsr", n // 100, 100, 4) for n in grid.runtime_iterations]
    total = grid.runtime_batches_iterations
    by_batches = [MechanismSpec("bsr", total // b, b, 4) for b in grid.runtime_batches]
    by_bandwidth = []
    for order in grid.runtime_orders:
        bands = [p for p in grid.runtime_bandwidths if float(order) ** (2 * p - 1) * 100 / 50 <= grid.runtime_work]
        cells = tuple(seconds_cell(m, _runtime_renyi(m, order)) for m in _bandwidths(bands))
        by_bandwidth.append(Line(f"Rényi, α = {order}", f"order-{order}", cells, tuple(map(float, bands)), "first"))
    iterations, batches, bandwidths = (
        tuple(map(float, x)) for x in (grid.runtime_iterations, grid.runtime_batches, grid.runtime_bandwidths)
    )
    panels = (
        Panel(f"δ varies ({base.title})", by_delta, "δ", label),
        Panel(
            "N varies (BSR, b = 100, p = 4)",
            _runtime_lines(by_iterations, iterations),
            "iterations N",
            label,
            x_ticks=iterations[::2],
        ),
        Panel(
            f"b varies (BSR, N = {total}, p = 4)",
            _runtime_lines(by_batches, batches),
            "batches per epoch b",
            label,
            x_ticks=batches,
        ),
        Panel(
            "p varies (BSR, N = 1000, b = 100)",
            (*by_bandwidth, *_chain_lines(_bandwidths(grid.runtime_bandwidths), bandwidths)),
            "bandwidth p",
            label,
            log="y",
            x_ticks=bandwidths,
        ),
    )
    title = "Seconds for one evaluation (σ = 10, ε = 8, δ = 10⁻⁵, remove)"
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


def temperatures(grid: Grid) -> FigureSpec:
    above, below = [], []
    for strategy, sigma, epsilons in _ABLATION:
        mechanism = MechanismSpec(strategy, 4, 25, 4)
        plain = profile_cell(mechanism, accountant("conditional", option=3, temperatures=("inf",)), sigma, epsilons)
        lines = [Line("T = {∞}", "option-1", (plain,), "epsilons", "deltas")]
        for number, steps in enumerate(grid.temperature_steps, start=1):
            which = accountant("conditional", option=3, temperatures=temperature_grid(steps))
            cell = profile_cell(mechanism, which, sigma, epsilons)
            lines.append(Line(f"and {steps} temperatures", f"temperatures-{number}", (cell,), "epsilons", "deltas"))
        # Its δ is below what is drawn from there on.
        near = [e / 4 for e in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20) if e <= 40 / sigma]
        least = Cell.of("profile-lower", mechanism=mechanism, sigma=sigma, epsilons=near, direction="remove")
        own = (
            Line("chain (dpmf)", "tight", (profile_cell(mechanism, CHAIN, sigma, near),), "epsilons", "deltas"),
            Line("certified lower bound", "lower", (least,), "epsilons", "deltas"),
        )
        title = f"{mechanism.title}, σ = {sigma:g}"
        above.append(Panel(title, (*lines, *own), "ε", "δ (remove)", log="y", y_range=(1e-7, 2.0)))
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
