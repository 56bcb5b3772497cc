"""σ against ε, the shape that most claims have, and against the number of epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpmf.report import new_figure
from evidence.accountants.claim import (
    BEST,
    CONDITIONAL,
    EPSILONS,
    LATTICE,
    LOOKS,
    RENYI,
    SAMPLER,
    Claim,
    Found,
    calibrated,
    more,
    ratio,
    times,
)  # fmt: skip
from evidence.pictures import axis, plot
from evidence.say import number, table
from evidence.spec import AccountantSpec, Cell, MechanismSpec


def curve(
    name: str,
    target: MechanismSpec,
    title: str,
    accountants: Mapping[str, AccountantSpec],
    truth: str,
    finding: Callable[[Callable[[str, float], float]], str],
    caption: str,
    ticks: Sequence[float],
    ratios: Sequence[float],
    show_winner: bool = False,
) -> Claim:
    """σ of several accountants over ε, and beside it how many times the σ of `truth` each asks for."""

    def key(label: str, epsilon: float) -> str:
        return f"{label}, ε={epsilon:g}"

    cells = {key(a, e): calibrated(target, options, e) for a, options in accountants.items() for e in EPSILONS}

    def tabulated(found: Found) -> str:
        others = [a for a in accountants if a != truth]
        head = ["ε", *(f"{a} σ" for a in accountants), *(f"{a} / {truth}" for a in others)]
        rows = []
        for e in EPSILONS:
            sigmas = {a: found[key(a, e)]["sigma"] for a in accountants}
            row = [f"{e:g}", *(number(s) for s in sigmas.values())]
            row += [number(ratio(sigmas[a], sigmas[truth]), 2) for a in others]
            rows.append([*row, found[key("best", e)]["accountant"]] if show_winner else row)
        return table([*head, "best is"] if show_winner else head, rows)

    def draw(found: Found) -> Any:
        figure, (left, right) = new_figure(2)
        for a in accountants:
            sigmas = [found[key(a, e)]["sigma"] for e in EPSILONS]
            # `best` lies on top of others: a ring around their markers.
            ring = (
                {"markersize": 10, "markerfacecolor": "none", "linestyle": "none", "marker": "o"} if a == "best" else {}
            )
            label = f"{a} (estimate)" if a == "monte-carlo" else a
            plot(left, EPSILONS, sigmas, label, LOOKS[a], **ring)
            if a != truth:
                truths = [found[key(truth, e)]["sigma"] for e in EPSILONS]
                plot(right, EPSILONS, [ratio(s, t) for s, t in zip(sigmas, truths, strict=True)], a, LOOKS[a], **ring)
        axis(left, "x", EPSILONS, "ε")
        axis(right, "x", EPSILONS, "ε")
        axis(left, "y", ticks, "noise multiplier σ at δ = 10⁻⁵")
        axis(right, "y", ratios, f"σ / σ of {truth}", log=False)
        right.axhline(1.0, color="0.4", linewidth=0.8)
        left.legend(frameon=False)
        figure.suptitle(title, fontsize="medium")
        return figure

    def said(found: Found) -> str:
        return finding(lambda a, e: found[key(a, e)]["sigma"])

    return Claim(name, cells, said, tabulated, draw, caption)


small_epsilon = curve(
    "small-epsilon",
    MechanismSpec("bsr", 1, 100, 4),
    "BSR(p=4), one epoch of 100 batches",
    {"renyi": RENYI, "conditional": CONDITIONAL, "monte-carlo": SAMPLER},
    "monte-carlo",
    lambda s: (
        f"BSR(p=4), one epoch of 100 batches: Rényi asks for {more(s('renyi', 8), s('monte-carlo', 8))} more noise "
        f"than the truth at ε = 8, for {more(s('renyi', 1), s('monte-carlo', 1))} more at ε = 1 and for "
        f"{more(s('renyi', 0.25), s('monte-carlo', 0.25))} more at ε = 0.25. Conditional composition asks for "
        f"{times(s('conditional', 0.25), s('monte-carlo', 0.25))} the true noise at ε = 0.25 and for "
        f"{times(s('conditional', 8), s('monte-carlo', 8))} at ε = 8."
    ),
    "σ against ε of renyi, conditional and monte-carlo for BSR(p=4), and their ratios",
    (0.5, 1, 2, 5),
    (1, 1.5, 2, 2.5, 3, 3.5),
)

uncorrelated = curve(
    "uncorrelated",
    MechanismSpec("dpsgd", 1, 1000),
    "DP-SGD, one epoch of 1000 batches",
    {"renyi": RENYI, "conditional": CONDITIONAL, "lattice": LATTICE},
    "lattice",
    lambda s: (
        "DP-SGD, one epoch of 1000 batches: conditional composition asks for "
        f"{more(s('conditional', 0.25), s('lattice', 0.25))} more noise than the lattice at ε = 0.25, Rényi for "
        f"{more(s('renyi', 0.25), s('lattice', 0.25))} more. At ε = 8 it is the other way round: "
        f"{more(s('conditional', 8), s('lattice', 8))} and {more(s('renyi', 8), s('lattice', 8))}."
    ),
    "σ against ε of renyi, conditional and lattice for DP-SGD, and their ratios",
    (0.4, 0.6, 0.8, 1, 1.6),
    (1, 1.25, 1.5, 1.75, 2),
)

long_memory = curve(
    "best",
    MechanismSpec("bisr", 1, 100, 4),
    "BISR(p=4), one epoch of 100 batches",
    {"renyi": RENYI, "conditional": CONDITIONAL, "best": BEST, "monte-carlo": SAMPLER},
    "monte-carlo",
    lambda s: (
        "BISR(p=4), one epoch of 100 batches, ε = 0.25: Rényi asks for "
        f"{times(s('renyi', 0.25), s('monte-carlo', 0.25))} the true noise, conditional composition for "
        f"{times(s('conditional', 0.25), s('monte-carlo', 0.25))}, `best` for "
        f"{more(s('best', 0.25), s('monte-carlo', 0.25))} more than the truth. At ε = 1 `best` asks for "
        f"{more(s('best', 1), s('monte-carlo', 1))} more, at ε = 8 for {more(s('best', 8), s('monte-carlo', 8))} more."
    ),
    "σ against ε of renyi, conditional, best and monte-carlo for BISR(p=4)",
    (0.5, 1, 2, 5, 10),
    (1, 1.5, 2, 2.5, 3, 3.5),
    show_winner=True,
)


# --- epochs ----------------------------------------------------------------------------------------------------------

EPOCHS = (1, 2, 4, 10)


def _epoch_lines() -> dict[str, tuple[MechanismSpec, dict[str, AccountantSpec]]]:
    """By title: the mechanism with one epoch, and its accountants, the one that tells the truth last."""
    both: dict[str, AccountantSpec] = {"renyi": RENYI, "conditional": CONDITIONAL}
    return {
        "DP-SGD": (MechanismSpec("dpsgd", 1, 100), {**both, "lattice": LATTICE}),
        "BSR(p=4)": (MechanismSpec("bsr", 1, 100, 4), {**both, "monte-carlo": SAMPLER}),
    }


def _epoch_cells() -> dict[str, Cell]:
    return {
        f"{title}, k={k}, {a}": calibrated(replace(mechanism, epochs=k), options, 1.0)
        for title, (mechanism, accountants) in _epoch_lines().items()
        for k in EPOCHS
        for a, options in accountants.items()
    }


def _epoch_ratio(found: Found, title: str, k: int, accountant: str) -> float:
    truth = "lattice" if title == "DP-SGD" else "monte-carlo"
    return float(found[f"{title}, k={k}, {accountant}"]["sigma"] / found[f"{title}, k={k}, {truth}"]["sigma"])


def _epoch_finding(found: Found) -> str:
    def said(title: str, k: int) -> str:
        return f"{_epoch_ratio(found, title, k, 'conditional'):.2f}"

    return (
        "At ε = 1 and 100 batches an epoch, conditional composition asks for "
        f"{said('DP-SGD', 1)} times the true noise of DP-SGD with one epoch and for {said('DP-SGD', 10)} times with "
        f"ten; of BSR(p=4) for {said('BSR(p=4)', 1)} and {said('BSR(p=4)', 10)} times. Rényi's factor stays at "
        f"{_epoch_ratio(found, 'DP-SGD', 10, 'renyi'):.2f} and {_epoch_ratio(found, 'BSR(p=4)', 10, 'renyi'):.2f}."
    )


def _epoch_table(found: Found) -> str:
    head, columns = ["epochs"], []
    for title, (_, accountants) in _epoch_lines().items():
        head += [f"{title} {a} σ" for a in accountants] + [f"{title} conditional / {list(accountants)[-1]}"]
        columns.append((title, list(accountants)))
    rows = []
    for k in EPOCHS:
        row = [str(k)]
        for title, names in columns:
            row += [number(found[f"{title}, k={k}, {a}"]["sigma"]) for a in names]
            row.append(number(_epoch_ratio(found, title, k, "conditional"), 2))
        rows.append(row)
    return table(head, rows)


def _epoch_draw(found: Found) -> Any:
    figure, axes = new_figure(2)
    for ax, title in zip(axes, _epoch_lines(), strict=True):
        for a in ("renyi", "conditional"):
            plot(ax, EPOCHS, [_epoch_ratio(found, title, k, a) for k in EPOCHS], a, LOOKS[a])
        axis(ax, "x", EPOCHS, "epochs")
        axis(ax, "y", (1, 1.5, 2, 2.5, 3), f"σ / σ of {'lattice' if title == 'DP-SGD' else 'monte-carlo'}", log=False)
        ax.set_ylim(0.9, 3.2)
        ax.axhline(1.0, color="0.4", linewidth=0.8)
        ax.set_title(f"{title}, 100 batches an epoch, ε = 1", fontsize="medium")
    axes[0].legend(frameon=False)
    return figure


epochs = Claim(
    "epochs", _epoch_cells(), _epoch_finding, _epoch_table, _epoch_draw,
    "noise asked for over the true noise, against the number of epochs",
)  # fmt: skip
