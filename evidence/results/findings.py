"""What the figures show, in numbers: two lines for each, and the paper's claims with a verdict computed from the data.

Every number here is filled in from results. The words around them were written knowing a first run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator

from evidence.results import settings as f
from evidence.results.figures import catalogue, whp
from evidence.spec import AccountantSpec, Cell, Line, MechanismSpec

AGREES, PARTLY, DIFFERS = "agrees", "in part", "does not agree"


@dataclass(frozen=True)
class Numbers:
    """The results, by what they are about."""

    results: Mapping[Cell, Mapping[str, Any]]
    grid: f.Grid

    def sigma(self, mechanism: MechanismSpec, which: AccountantSpec, epsilon: float, direction: str = "both") -> float:
        """∞ where the accountant cannot meet the target."""
        value = self.results[f.sigma_cell(mechanism, which, epsilon, direction)]["sigma"]
        return math.inf if value is None else float(value)

    def truth(self, mechanism: MechanismSpec, epsilon: float) -> float:
        """The lattice where it applies (0.1 %), else the Monte Carlo estimate (about half a percent)."""
        exact = mechanism.strategy == "dpsgd"
        return self.sigma(mechanism, f.tight(mechanism) if exact else f.sampler(mechanism, self.grid), epsilon)

    def _curve(self, mechanism: MechanismSpec) -> tuple[np.ndarray, np.ndarray]:
        epsilons = self.grid.epsilons
        return np.log(epsilons), np.log([self.truth(mechanism, e) for e in epsilons])

    def true_sigma_between(self, mechanism: MechanismSpec, epsilon: float) -> float:
        """The true σ between the grid's ε, by monotone cubics of log σ over log ε."""
        return float(np.exp(PchipInterpolator(*self._curve(mechanism))(np.log(epsilon))))

    def true_epsilon_between(self, mechanism: MechanismSpec, sigma: float) -> float:
        """Its inverse; a little beyond the grid's ends it goes on as it was."""
        e, s = self._curve(mechanism)
        return float(np.exp(PchipInterpolator(s[::-1], e[::-1])(np.log(sigma))))

    def ratio(self, mechanism: MechanismSpec, which: AccountantSpec, epsilon: float) -> float:
        """σ over the true σ."""
        return self.sigma(mechanism, which, epsilon) / self.truth(mechanism, epsilon)

    def seconds(self, mechanism: MechanismSpec, which: AccountantSpec, field: str = "first") -> float:
        return float(self.results[f.seconds_cell(mechanism, which)][field])

    def panel(self, figure: str, title: str) -> dict[str, Line]:
        spec = catalogue(self.grid is f.FULL)[figure]
        exact = [panel for panel in spec.panels if panel.title == title]
        [found] = exact or [panel for panel in spec.panels if panel.title.startswith(title)]
        return {line.label: line for line in found.lines}

    def points(self, line: Line) -> list[tuple[float, float]]:
        """All of them: conclusions are not drawn from a part."""
        if missing := [cell for cell in line.all_cells() if cell not in self.results]:
            raise LookupError(missing[0].name)
        return line.points(self.results)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of a power law through the points: least squares of log y on log x."""
    x, y = np.log([p[0] for p in points]), np.log([p[1] for p in points])
    return float(np.polyfit(x, y, 1)[0])


def times(value: float) -> str:
    return "no σ at all" if math.isinf(value) else f"{value:.2f} times"


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} %"


def _short(mechanism: MechanismSpec) -> str:
    band = f"(p={mechanism.bandwidth})" if mechanism.bandwidth else ""
    epochs = f", k={mechanism.epochs}" if mechanism.epochs > 1 else ""
    size = f", N={mechanism.epochs * mechanism.batches}" if mechanism.batches > 100 else ""
    return f"{mechanism.title.split(',')[0]}{band}{size}{epochs}"


def _worst(n: Numbers, which: Callable[[MechanismSpec], AccountantSpec], mechanisms: Sequence[MechanismSpec]) -> str:
    """The largest factor over the true σ, and where."""
    value, mechanism, e = max(
        (n.ratio(m, which(m), e), m.slug, e) for m in mechanisms for e in n.grid.epsilons
    )  # fmt: skip
    at = next(m for m in mechanisms if m.slug == mechanism)
    return f"{percent(value)} ({_short(at)}, ε = {e:g})"


def _accountants(n: Numbers, mechanisms: Sequence[MechanismSpec]) -> str:
    small, large = 0.25, 4.0
    paper = [n.ratio(m, f.PAPER_RENYI, large) for m in mechanisms]
    conditional = [n.ratio(m, f.CONDITIONAL, small) for m in mechanisms]
    worst = _worst(n, f.tight, mechanisms)
    return (
        f"At ε = {large:g} Rényi with the paper's orders asks for {min(paper):.2f} to {max(paper):.2f} times the true "
        f"noise, at ε = {small:g} conditional composition for {min(conditional):.2f} to {max(conditional):.2f} times. "
        f"dpmf's own accountants (lattice for DP-SGD, chain for the rest) are at most {worst} above the truth."
    )


def main(n: Numbers) -> str:
    return _accountants(n, f.MAIN)


def additional(n: Numbers) -> str:
    return _accountants(n, f.ADDITIONAL)


def grams(n: Numbers) -> str:
    cells = [panel.lines[0].cells[0] for panel in catalogue(n.grid is f.FULL)["fig-gram"].panels]
    banded, inverse = cells[:2], cells[2:]
    empty = [n.results[c]["zeros"] for c in banded]
    far = [n.results[c]["by_distance"]["64"] for c in inverse]
    return (
        f"Banded strategies have a cyclically banded Gram matrix: {100 * min(empty):.0f} % of its entries are zero, "
        "and the corners are not. Strategies with a banded inverse have no zeros: at cyclic distance 64 an entry of "
        f"BISR (p = 64) is still {100 * far[0]:.1f} % of the largest, of BandInvMF (p = 4) {100 * far[1]:.1f} %."
    )


def limit_excess(n: Numbers, which: int) -> list[float]:
    """ε of the limit with the first (0), second, ... or last (−1) number of samples over the true ε at the same σ."""
    found = []
    for m in f.MAIN:
        label = f"limit, {whp(m, n.grid)[0][which]:g}·s_min samples"
        points = n.points(n.panel("fig-limits", m.title)[label])
        found += [x / n.true_epsilon_between(m, y) for x, y in points]
    return found


def limits(n: Numbers) -> str:
    first, last = limit_excess(n, 0), limit_excess(n, -1)
    most, large = n.grid.whp_multiples[-1], n.grid.whp_multiples_large[-1]
    where = f" ({large:g}·s_min where b = 1000)" if large != most else ""
    return (
        f"s_min is {f.minimum_samples(f.DELTA, f.DELTA):,} samples. With {n.grid.whp_multiples[0]:g}·s_min the limit "
        f"on ε is {np.median(first):.2f} times the true ε (median over σ and all six mechanisms), with {most:g}·s_min"
        f"{where} {np.median(last):.2f} times. dpmf's bounds hold surely."
    )


def add_above(n: Numbers, which: Callable[[MechanismSpec], AccountantSpec]) -> list[tuple[MechanismSpec, float]]:
    """Where the add direction needs more noise than the remove direction, by more than the calibration's tolerance."""
    return [
        (m, e) for m in f.MAIN for e in n.grid.epsilons
        if n.sigma(m, which(m), e, "add") > 1.002 * n.sigma(m, which(m), e, "remove")
    ]  # fmt: skip


def directions(n: Numbers) -> str:
    cells = len(f.MAIN) * len(n.grid.epsilons)
    binding, exact = add_above(n, lambda _: f.RENYI), add_above(n, f.tight)
    where = ", ".join(dict.fromkeys(_short(m) for m, _ in binding)) or "nowhere"
    span = f" (ε ≤ {max(e for _, e in binding):g})" if binding else ""
    return (
        f"With orders as far as they help, the add bound needs more noise than the remove bound in {len(binding)} of "
        f"{cells} cells: {where}{span}. That bound is a closed form that is not tight: by the tight accountants add is "
        f"above remove in {len(exact)} of {cells}."
    )


def _peer_ratios(n: Numbers, figure: str, label: str, mechanism: MechanismSpec) -> list[tuple[float, float]]:
    """(ε, σ over the true σ at that ε) of a peer, where ε is inside the grid."""
    points = n.points(n.panel(figure, mechanism.title)[label])
    inside = [(x, y) for x, y in points if n.grid.epsilons[0] <= x <= n.grid.epsilons[-1]]
    return [(x, y / n.true_sigma_between(mechanism, x)) for x, y in inside]


def _peer(n: Numbers, figure: str, label: str) -> str:
    parts = []
    for mechanism in (f.DPSGD_100, f.DPSGD_1000):
        found = [r for _, r in _peer_ratios(n, figure, label, mechanism)]
        parts.append(f"{min(found):.2f} to {max(found):.2f} times the true σ at N = {mechanism.batches}")
    return f"{label}: {', '.join(parts)} (true σ between grid points by interpolation, good to about half a percent). "


def feldman_2025(n: Numbers) -> str:
    paper = [n.ratio(m, f.PAPER_RENYI, 1.0) for m in (f.DPSGD_100, f.DPSGD_1000)]
    return (
        _peer(n, "fig-feldman-2025", "Feldman & Shenfeld 2025")
        + f"The paper's Rényi bound asks for {paper[0]:.2f} and {paper[1]:.2f} times at ε = 1; dpmf's lattice is the "
        f"truth to the line's width (certified lower bound within {percent(max(_lower_gap(n)))} of it)."
    )


def _lower_gap(n: Numbers) -> list[float]:
    return [
        n.sigma(m, f.tight(m), e) / n.results[f.lower_cell(m, e)]["sigma"]
        for m in (f.DPSGD_100, f.DPSGD_1000)
        for e in n.grid.epsilons
    ]


def feldman_2026(n: Numbers) -> str:
    took = {
        m.batches: [
            n.results[c]["seconds"] for c in n.panel("fig-feldman-2026", m.title)["Feldman & Shenfeld 2026"].cells
        ]
        for m in (f.DPSGD_100, f.DPSGD_1000)
    }
    own = [n.results[f.sigma_cell(f.DPSGD_1000, f.tight(f.DPSGD_1000), e)]["seconds"] for e in n.grid.epsilons]
    return (
        _peer(n, "fig-feldman-2026", "Feldman & Shenfeld 2026")
        + f"It takes {min(took[100]):.1f} to {max(took[100]):.1f} s for one ε at N = 100 and {min(took[1000]):.1f} to "
        f"{max(took[1000]):.1f} s at N = 1000; the lattice calibrates a σ in {max(own):.2f} s at most."
    )


def _doublings(n: Numbers, mechanism: MechanismSpec) -> tuple[float, float, float, int]:
    """Growth per step of the order in the peer's last two points, our exponent, and both at the largest common α."""
    lines = n.panel("fig-feldman-runtime", mechanism.title)
    peer = n.points(lines["random-allocation, order α alone"])
    own = n.points(lines["dpmf, all orders up to α"])
    (a, low), (b, high) = peer[-2], peer[-1]
    common = int(max(x for x, _ in peer if x in dict(own)))
    return math.log2(high / low) / (b - a), slope(own[-4:]), dict(peer)[common] / dict(own)[common], common


def feldman_runtime(n: Numbers) -> str:
    growth, exponent, advantage, order = _doublings(n, f.DPSGD_1000)
    same = max(
        abs(n.results[own]["divergence"] / n.results[peer]["divergence"] - 1)
        for m in (f.DPSGD_100, f.DPSGD_1000)
        for a in n.grid.peer_orders
        if (own := Cell.of("renyi-seconds", mechanism=m, order=a, sigma=1.1)) in n.results
        and (peer := Cell.of("peer-renyi-seconds", mechanism=m, order=a, sigma=1.1)) in n.results
    )
    return (
        f"At N = 1000 the time of random-allocation doubles every {1 / growth:.1f} orders, that of dpmf grows as "
        f"α^{exponent:.1f}. At α = {order} dpmf computes all orders up to α in {1 / advantage:.2g} of the time the "
        f"other takes for one; the divergences are the same to {same:.0e}."
    )


def _exponents(n: Numbers, title: str) -> dict[str, float]:
    return {
        label: slope(points)
        for label, line in n.panel("fig-runtime", title).items()
        if len(points := n.points(line)[-3:]) > 2
    }


def runtime(n: Numbers) -> str:
    by_delta = _exponents(n, "δ varies")
    by_n, by_b = _exponents(n, "N varies"), _exponents(n, "b varies")
    sampled = next(v for k, v in by_delta.items() if k.startswith("Monte Carlo"))
    chain = "chain (dpmf), ε = 1, σ = 1.2·sensitivity"
    return (
        f"Exponents over the last three points: Monte Carlo in δ {sampled:.2f}; in N and b conditional composition "
        f"{by_n['conditional, first σ']:.1f} and {by_b['conditional, first σ']:.1f}, Rényi {by_n['Rényi, α = 8']:.1f} "
        f"and {by_b['Rényi, α = 8']:.1f}, the chain where it has to work {by_n[chain]:.1f} and {by_b[chain]:.1f}. At "
        "the paper's σ and ε it sees early that δ is next to nothing. Seconds are of one core, compiled, at one σ."
    )


def _truncated(n: Numbers, title: str) -> dict[str, dict[float, float]]:
    return {label: dict(n.points(line)) for label, line in n.panel("fig-truncation", title).items()}


def truncation(n: Numbers) -> str:
    one, many = _truncated(n, "N = 1000, k = 1,"), _truncated(n, "N = 1000, k = 10, α = 3, σ = 1")
    most = max(value for points in many.values() for value in points.values())
    return (
        f"One epoch, keeping two of BSR(p = 4)'s four bands costs a factor {one['BSR, p = 4'][2]:.1f}, keeping 16 of "
        f"BSR(p = 64)'s {one['BSR, p = 64'][16]:.2f}, of BISR(p = 4)'s {one['BISR, p = 4'][16]:.2f}. With ten epochs "
        f"and the paper's σ = 1 nothing costs more than a factor {most:.4f}, because the diagonal is all that counts; "
        "the third panel shows σ = 5."
    )


def families(n: Numbers) -> str:
    parts = []
    for strategy in ("BSR", "BISR"):
        for sigma in (2, 5):
            lines = n.panel("fig-families", f"{strategy}, N = 400, k = 4, p = 4, σ = {sigma}")
            last = {label: n.points(line)[-1][1] for label, line in lines.items()}
            gains = [
                percent(last["option 1 (geometric mean)"] / last[k]) for k in ("options 1 and 2", "options 1 and 3")
            ]
            parts.append(f"{strategy}, σ = {sigma}: {gains[0]} and {gains[1]}")
    return (
        "The bound jumps at every epoch. In the last step option 1 alone is above options 1 and 2, and above options 1 "
        f"and 3, by: {'; '.join(parts)}."
    )


def _gains(n: Numbers) -> dict[str, tuple[float, float]]:
    """By panel: the least δ over δ with T = {∞}, with few and with many temperatures."""
    found = {}
    spec = catalogue(n.grid is f.FULL)["fig-temperatures"]
    for panel in spec.panels[4:]:
        ratios = [min(y for _, y in n.points(line)) for line in panel.lines[1:]]
        found[panel.title] = (ratios[0], ratios[-1])
    return found


def temperatures(n: Numbers) -> str:
    gains = _gains(n)
    few, many = n.grid.temperature_steps[0], n.grid.temperature_steps[-1]
    best = min(gains, key=lambda title: gains[title][1])
    return (
        f"Most is gained for {best}: δ falls to {gains[best][0]:.2f} of that of T = {{∞}} with {few} temperatures, to "
        f"{gains[best][1]:.2f} with {many}; over all panels {many} temperatures reach "
        f"{min(g[1] for g in gains.values()):.2f} to {max(g[1] for g in gains.values()):.2f}. The chain's δ lies "
        "orders of magnitude below all of them."
    )


def histograms(n: Numbers) -> str:
    spread = {
        panel.title: n.results[panel.lines[0].cells[0]]["deviation"]
        for panel in catalogue(n.grid is f.FULL)["fig-histograms"].panels
    }
    steps = ", ".join(
        f"{spread[f'step {s}']:.2f} to {spread[f'step {s + 1}']:.2f} (step {s} to {s + 1})" for s in (100, 200, 300)
    )
    return (
        f"The standard deviation of the loss goes from {steps}. Within the second epoch it goes from "
        f"{spread['step 101']:.2f} to {spread['step 200']:.2f}: the jumps are where an epoch begins."
    )


FINDINGS: dict[str, Callable[[Numbers], str]] = {
    "fig-gram": grams,
    "fig-main": main,
    "fig-additional": additional,
    "fig-limits": limits,
    "fig-runtime": runtime,
    "fig-truncation": truncation,
    "fig-directions": directions,
    "fig-feldman-2025": feldman_2025,
    "fig-feldman-2026": feldman_2026,
    "fig-feldman-runtime": feldman_runtime,
    "fig-families": families,
    "fig-temperatures": temperatures,
    "fig-histograms": histograms,
}
