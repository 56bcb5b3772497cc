"""The two directions, Monte Carlo's samples, and the accountants of others."""

from __future__ import annotations

from typing import Any

from dpmf.report import LOOKS as STYLES
from dpmf.report import new_figure
from evidence.accountants.claim import DELTA, EPSILONS, LATTICE, LOOKS, RENYI, Claim, Found, calibrated
from evidence.pictures import axis, plot
from evidence.say import bound, number, power, short, table
from evidence.spec import Cell, MechanismSpec, accountant


def _direction_cells() -> dict[str, Cell]:
    target = MechanismSpec("dpsgd", 1, 1000)
    return {
        f"{a.name} {way}, ε={e:g}": calibrated(target, a, e, way)
        for a in (RENYI, LATTICE)
        for way in ("remove", "add")
        for e in EPSILONS
    }


DIRECTION_COLUMNS = ("renyi remove", "renyi add", "lattice remove", "lattice add")


def _direction_finding(found: Found) -> str:
    def add_decides(a: str) -> str:
        at = [
            f"{e:g}" for e in EPSILONS if found[f"{a} add, ε={e:g}"]["sigma"] > found[f"{a} remove, ε={e:g}"]["sigma"]
        ]
        return f"at ε = {', '.join(at)}" if at else "at no ε shown"

    return (
        f"DP-SGD, one epoch of 1000 batches: the add direction has the larger σ by Rényi {add_decides('renyi')}. By "
        f"the lattice, which is close to the truth, it has {add_decides('lattice')}."
    )


def _direction_table(found: Found) -> str:
    rows = [[f"{e:g}", *(bound(found[f"{c}, ε={e:g}"]["sigma"]) for c in DIRECTION_COLUMNS)] for e in EPSILONS]
    return table(["ε", *(f"{c} σ" for c in DIRECTION_COLUMNS)], rows)


def _direction_draw(found: Found) -> Any:
    figure, axes = new_figure(2)
    for ax, a in zip(axes, ("renyi", "lattice"), strict=True):
        for look, way in zip((STYLES[0], STYLES[1]), ("remove", "add"), strict=True):
            plot(ax, EPSILONS, [found[f"{a} {way}, ε={e:g}"]["sigma"] for e in EPSILONS], way, look)
        axis(ax, "x", EPSILONS, "ε")
        axis(ax, "y", (0.2, 0.5, 1, 2), "noise multiplier σ at δ = 10⁻⁵")
        ax.set_ylim(0.15, 2.2)
        ax.set_title(f"{a}, DP-SGD, one epoch of 1000 batches", fontsize="medium")
    axes[0].legend(frameon=False)
    return figure


directions = Claim(
    "directions", _direction_cells(), _direction_finding, _direction_table, _direction_draw,
    "σ of the remove and of the add direction, for renyi and for lattice",
)  # fmt: skip


SAMPLES = (1_000, 10_000, 100_000, 1_000_000)
SAMPLED_SIGMA, SAMPLED_EPSILON, FAILURE = 2.97, 0.25, 1e-3
PROPOSALS = {"importance": True, "plain": False}


def _sampling_cells() -> dict[str, Cell]:
    target = MechanismSpec("bsr", 1, 100, 4)
    return {
        f"{way}, {proposal}, {n}": Cell.of(
            "estimate",
            mechanism=target,
            accountant=accountant("monte-carlo", samples=n, importance=flag, failure_probability=FAILURE),
            sigma=SAMPLED_SIGMA,
            epsilon=SAMPLED_EPSILON,
            direction=way,
        )
        for way in ("remove", "add")
        for proposal, flag in PROPOSALS.items()
        for n in SAMPLES
    }


def _bound_ratio(found: Found, way: str, proposal: str, n: int) -> float:
    """The upper limit over the best estimate there is."""
    return float(found[f"{way}, {proposal}, {n}"]["delta"] / found[f"{way}, importance, {SAMPLES[-1]}"]["estimate"])


def _relative_error(found: Found, proposal: str, n: int) -> float | None:
    cell = found[f"remove, {proposal}, {n}"]
    return cell["standard_error"] / cell["estimate"] if cell["estimate"] > 0 else None


def _percent(value: float | None) -> str:
    return "no hit" if value is None else f"{100 * value:.2g} %"


def _sampling_finding(found: Found) -> str:
    n, most = 100_000, SAMPLES[-1]
    limits = {(p, m): f"{_bound_ratio(found, 'remove', p, m):.1f}" for p in PROPOSALS for m in (n, most)}
    truth = found[f"remove, importance, {most}"]["estimate"]
    return (
        f"BSR(p=4), one epoch of 100 batches, σ = {SAMPLED_SIGMA:g}, ε = {SAMPLED_EPSILON:g}, where δ is about "
        f"{1e6 * truth:.1f}·10⁻⁶. With {n:,} samples the standard error of the estimate (remove) is "
        f"{_percent(_relative_error(found, 'importance', n))} with importance sampling and "
        f"{_percent(_relative_error(found, 'plain', n))} without. The limit that fails with probability "
        f"{FAILURE:g} is much further away: {limits['plain', n]} times δ without importance sampling, "
        f"{limits['importance', n]} times with it; at {most:,} samples {limits['plain', most]} and "
        f"{limits['importance', most]} times."
    )


def _sampling_table(found: Found) -> str:
    head = ["samples", *(f"standard error, remove, {p}" for p in PROPOSALS)]
    head += [f"limit / δ, {way}, {p}" for way in ("remove", "add") for p in PROPOSALS]
    rows = []
    for n in SAMPLES:
        errors = [_percent(_relative_error(found, p, n)) for p in PROPOSALS]
        limits = [number(_bound_ratio(found, way, p, n), 1) for way in ("remove", "add") for p in PROPOSALS]
        rows.append([f"{n:,}", *errors, *limits])
    return table(head, rows)


def _sampling_draw(found: Found) -> Any:
    figure, (left, right) = new_figure(2)
    for look, p in zip((STYLES[0], STYLES[1]), PROPOSALS, strict=True):
        errors = [_relative_error(found, p, n) for n in SAMPLES]
        plot(left, SAMPLES, [None if e is None else 100 * e for e in errors], f"remove, {p}", look)
    looks = iter((STYLES[0], STYLES[1], STYLES[2], STYLES[6]))
    for way in ("remove", "add"):
        for p in PROPOSALS:
            plot(right, SAMPLES, [_bound_ratio(found, way, p, n) for n in SAMPLES], f"{way}, {p}", next(looks))
    names = [power(n) for n in SAMPLES]
    axis(left, "x", SAMPLES, "samples", names=names)
    axis(right, "x", SAMPLES, "samples", names=names)
    axis(left, "y", (0.5, 1, 2, 5, 10, 20, 50), "standard error of the estimate, % of δ")
    axis(right, "y", (1, 10, 100, 1000), f"limit that fails with probability {FAILURE:g}, over δ")
    right.axhline(1.0, color="0.4", linewidth=0.8)
    left.legend(frameon=False)
    right.legend(frameon=False)
    title = f"BSR(p=4), one epoch of 100 batches, σ = {SAMPLED_SIGMA:g}, ε = {SAMPLED_EPSILON:g}"
    figure.suptitle(title, fontsize="medium")
    return figure


sampling = Claim(
    "sampling", _sampling_cells(), _sampling_finding, _sampling_table, _sampling_draw,
    "standard error and high-probability limit of Monte Carlo against the number of samples",
)  # fmt: skip


SIGMAS = (0.5, 0.7, 1.0, 1.4, 2.0)
PEERS = ("lattice", "renyi", "pld-accounting", "random-allocation")


def _baseline_cells() -> dict[str, Cell]:
    target = MechanismSpec("dpsgd", 1, 100)
    return {
        f"{a}, σ={s:g}": Cell.of("epsilon", mechanism=target, accountant=accountant(a), sigma=s, delta=DELTA)
        for a in PEERS
        for s in SIGMAS
    }


def _baseline_finding(found: Found) -> str:
    def excess(a: str) -> list[float]:
        return [100 * (found[f"{a}, σ={s:g}"]["epsilon"] / found[f"lattice, σ={s:g}"]["epsilon"] - 1) for s in SIGMAS]

    def took(a: str) -> float:
        return float(sum(found[f"{a}, σ={s:g}"]["seconds"] for s in SIGMAS) / len(SIGMAS))

    peer, older = excess("pld-accounting"), excess("random-allocation")
    return (
        "DP-SGD, one epoch of 100 batches, ε at δ = 10⁻⁵. Above the lattice's ε is pld-accounting's by "
        f"{min(peer):.2f} to {max(peer):.1f} %, random-allocation's by {min(older):.0f} to {max(older):.0f} %. An "
        f"answer took the lattice {took('lattice'):.1f} s on average, pld-accounting {took('pld-accounting'):.0f} s "
        f"and random-allocation {took('random-allocation'):.0f} s."
    )


def _baseline_table(found: Found) -> str:
    head = ["σ", *(f"{a} ε" for a in PEERS), *(f"{a} s" for a in PEERS)]
    rows = []
    for s in SIGMAS:
        row = [found[f"{a}, σ={s:g}"] for a in PEERS]
        rows.append([f"{s:g}", *(bound(c["epsilon"], 5) for c in row), *(short(c["seconds"]) for c in row)])
    return table(head, rows)


def _baseline_draw(found: Found) -> Any:
    figure, (left, right) = new_figure(2)
    for a in PEERS:
        row = [found[f"{a}, σ={s:g}"] for s in SIGMAS]
        if a != "lattice":
            truths = [found[f"lattice, σ={s:g}"]["epsilon"] for s in SIGMAS]
            ratios = [c["epsilon"] / t for c, t in zip(row, truths, strict=True)]
            plot(left, SIGMAS, ratios, a, LOOKS[a])
        plot(right, SIGMAS, [c["seconds"] for c in row], a, LOOKS[a])
    for ax in (left, right):
        axis(ax, "x", SIGMAS, "noise multiplier σ")
    left.axhline(1.0, color="0.4", linewidth=0.8)
    left.set_ylabel("ε / ε of lattice, at δ = 10⁻⁵")
    figure.suptitle("DP-SGD, one epoch of 100 batches", fontsize="medium")
    seconds = (0.001, 0.01, 0.1, 1, 10, 100)
    axis(right, "y", seconds, "seconds for one ε (both directions)")
    right.set_ylim(0.0005, 100)
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.14), labelspacing=0.3)
    return figure


baselines = Claim(
    "baselines", _baseline_cells(), _baseline_finding, _baseline_table, _baseline_draw,
    "ε of the DP-SGD baselines over the lattice's, and the seconds each takes",
)  # fmt: skip
