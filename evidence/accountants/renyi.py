"""What the options of the Rényi accountant are worth: the bandwidth kept, and the work budget."""

from __future__ import annotations

from typing import Any

from dpmf.report import LOOKS as STYLES
from dpmf.report import new_figure
from evidence.accountants.claim import SAMPLER, Claim, Found, calibrated, ratio
from evidence.pictures import axis, plot
from evidence.say import number, power, short, table
from evidence.spec import Cell, MechanismSpec, accountant

WIDTHS = (1, 2, 4, 8, 16, 32)
TRUNCATION_EPSILONS = (2.0, 8.0)


def _truncation_targets() -> dict[str, MechanismSpec]:
    return {
        "BISR(p=4), 10 epochs": MechanismSpec("bisr", 10, 100, 4),
        "BSR(p=64), 1 epoch": MechanismSpec("bsr", 1, 100, 64),
    }


TRUNCATION_TITLES = ("BISR(p=4), 10 epochs", "BSR(p=64), 1 epoch")


def _truncation_cells() -> dict[str, Cell]:
    cells = {}
    for title, target in _truncation_targets().items():
        for e in TRUNCATION_EPSILONS:
            for p in WIDTHS:
                cells[f"{title}, ε={e:g}, p={p}"] = calibrated(
                    target, accountant("renyi", bandwidth=p, work_budget=1e9), e
                )
            cells[f"{title}, ε={e:g}, monte-carlo"] = calibrated(target, SAMPLER, e)
    return cells


def _truncation(found: Found, title: str, e: float, p: int) -> float | None:
    return ratio(found[f"{title}, ε={e:g}, p={p}"]["sigma"], found[f"{title}, ε={e:g}, monte-carlo"]["sigma"])


def _truncation_finding(found: Found) -> str:
    parts = []
    for title in TRUNCATION_TITLES:
        for e in TRUNCATION_EPSILONS:
            best = min((r, p) for p in WIDTHS if (r := _truncation(found, title, e, p)) is not None)
            first = _truncation(found, title, e, 1)
            parts.append(f"{title}, ε = {e:g}: from {number(first, 2)} at p = 1 to {best[0]:.2f} at p = {best[1]}")
    return "σ over the true σ, with 100 batches an epoch and a budget of 10⁹. " + "; ".join(parts) + "."


def _truncation_table(found: Found) -> str:
    columns = [(title, e) for title in TRUNCATION_TITLES for e in TRUNCATION_EPSILONS]
    head = ["bandwidth kept", *(f"{title}, ε = {e:g}" for title, e in columns)]
    rows = [[str(p), *(number(found[f"{t}, ε={e:g}, p={p}"]["sigma"]) for t, e in columns)] for p in WIDTHS]
    rows.append(["monte-carlo", *(number(found[f"{t}, ε={e:g}, monte-carlo"]["sigma"]) for t, e in columns)])
    return table(head, rows)


def _truncation_draw(found: Found) -> Any:
    figure, axes = new_figure(2)
    for ax, title in zip(axes, TRUNCATION_TITLES, strict=True):
        for look, e in zip(STYLES, TRUNCATION_EPSILONS, strict=False):
            plot(ax, WIDTHS, [_truncation(found, title, e, p) for p in WIDTHS], f"ε = {e:g}", look)
        axis(ax, "x", WIDTHS, "bandwidth kept")
        ax.axhline(1.0, color="0.4", linewidth=0.8)
        ax.set_ylim(bottom=0.95)
        ax.set_ylabel("σ of renyi / σ of monte-carlo")
        ax.set_title(title, fontsize="medium")
    axes[0].legend(frameon=False)
    return figure


truncation = Claim(
    "truncation", _truncation_cells(), _truncation_finding, _truncation_table, _truncation_draw,
    "Rényi's noise over the true noise, against the bandwidth kept",
)  # fmt: skip


BUDGETS = (1e5, 1e6, 1e7, 1e8, 1e9, 3e9)
BUDGET_EPSILONS = (0.5, 1.0, 2.0, 8.0)


def _budget_cells() -> dict[str, Cell]:
    target = MechanismSpec("bsr", 10, 100, 4)
    return {
        f"ε={e:g}, work={w:g}": calibrated(target, accountant("renyi", work_budget=w), e)
        for e in BUDGET_EPSILONS
        for w in BUDGETS
    }


def _budget_finding(found: Found) -> str:
    def excess(e: float, w: float) -> float:
        return float(found[f"ε={e:g}, work={w:g}"]["sigma"] / found[f"ε={e:g}, work={BUDGETS[-1]:g}"]["sigma"])

    return (
        "BSR(p=4), ten epochs of 100 batches. Against the default budget of 3·10⁹, a budget of 10⁶ costs a factor "
        f"{excess(8, 1e6):.2f} in σ at ε = 8, {excess(2, 1e6):.2f} at ε = 2, {excess(1, 1e6):.2f} at ε = 1 and "
        f"{excess(0.5, 1e6):.2f} at ε = 0.5. A budget of 10⁸ costs no more than a factor "
        f"{max(excess(e, 1e8) for e in BUDGET_EPSILONS):.3f} at any of these."
    )


def _budget_table(found: Found) -> str:
    head = ["work budget", *(f"σ at ε = {e:g}" for e in BUDGET_EPSILONS), "seconds, all four"]
    rows = []
    for w in BUDGETS:
        row = [found[f"ε={e:g}, work={w:g}"] for e in BUDGET_EPSILONS]
        rows.append([power(w), *(number(c["sigma"]) for c in row), short(sum(c.get("seconds", 0.0) for c in row))])
    return table(head, rows)


def _budget_draw(found: Found) -> Any:
    figure, (ax,) = new_figure(1)
    for look, e in zip(STYLES, BUDGET_EPSILONS, strict=False):
        plot(ax, BUDGETS, [found[f"ε={e:g}, work={w:g}"]["sigma"] for w in BUDGETS], f"ε = {e:g}", look)
    axis(ax, "x", BUDGETS[:-1], "work budget", names=[power(w) for w in BUDGETS[:-1]])
    axis(ax, "y", (2, 5, 10, 20, 50), "noise multiplier σ at δ = 10⁻⁵")
    ax.set_title("renyi, BSR(p=4), ten epochs of 100 batches", fontsize="medium")
    ax.legend(frameon=False)
    return figure


budget = Claim(
    "work-budget", _budget_cells(), _budget_finding, _budget_table, _budget_draw, "Rényi's σ against the work budget"
)  # fmt: skip
