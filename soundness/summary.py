"""The summary of every part as JSON, and the tables of docs/soundness.md made from it."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpmf.files import write_atomically
from evidence.say import with_block
from soundness import provenance

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "data" / "soundness.json"
PAGE = ROOT / "docs" / "soundness.md"
PARTS = {"campaign": "against the truth", "fuzz": "hostile input", "faults": "kills"}
REGIMES = (("δ ≥ 10⁻²", 1e-2), ("10⁻⁶ ≤ δ < 10⁻²", 1e-6), ("10⁻¹⁴ ≤ δ < 10⁻⁶", 1e-14))


def regime(low: float) -> str | None:
    return next((name for name, least in REGIMES if low >= least), None)


def summarise(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts, violations and looseness of the problems checked."""
    cases, methods, families, sizes = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    parts = Counter[str]()
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    ways: dict[str, Counter[str]] = defaultdict(Counter)
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    violations: list[Any] = []
    problems = 0
    truths: set[tuple[int, str, str, str]] = set()
    for row in rows:
        problems += 1
        violations += [{"index": row["index"], **v} for v in row["violations"]]
        parts[row["part"]] += len(row["findings"])
        families[row["family"]] += len(row["findings"])
        sizes[row["size"]] += len(row["findings"])
        for accountant, kind, direction, low, method, loose in row["findings"]:
            cases[accountant] += 1
            kinds[accountant][kind] += 1
            ways[accountant][direction] += 1
            methods[method] += 1
            truths.add((row["index"], direction, low, method))
            where = regime(float(low))
            if loose is not None and where is not None:
                ratios[accountant][where].append(float(loose))
    return {
        "cases": sum(cases.values()),
        "problems": problems,
        "truths": len(truths),
        "violations": violations,
        "by_accountant": dict(sorted(cases.items())),
        "by_question": {name: dict(sorted(count.items())) for name, count in sorted(kinds.items())},
        "by_direction": {name: dict(sorted(count.items())) for name, count in sorted(ways.items())},
        "by_part": dict(sorted(parts.items())),
        "by_truth": dict(sorted(methods.items())),
        "by_family": dict(sorted(families.items())),
        "by_size": dict(sorted(sizes.items())),
        "looseness": {
            name: {where: _spread(found[where]) for where, _ in REGIMES if found[where]}
            for name, found in sorted(ratios.items())
        },
    }


def _spread(values: list[float]) -> dict[str, Any]:
    array = np.array(values)
    return {
        "cases": len(values),
        "median": _number(float(np.median(array))),
        "ninth_decile": _number(float(np.quantile(array, 0.9, method="higher"))),
        "worst": _number(float(array.max())),
    }


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def load() -> dict[str, Any]:
    """What has been measured; empty before the first run."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def measured_with(harness: Iterable[str]) -> dict[str, Any]:
    """The code of now, to be recorded beside what was measured with it."""
    return {"code": dict(provenance.present()), "harness": provenance.harness(*harness)}


def store(part: str, value: Mapping[str, Any]) -> None:
    """Put one part (campaign, fuzz, faults) into the data and make the page anew."""
    write(load() | {part: value})


def write(data: Mapping[str, Any]) -> None:
    DATA.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomically(DATA, text.encode())
    if PAGE.exists():  # made from what will be read again, in its order
        write_atomically(PAGE, filled(PAGE.read_text(encoding="utf-8"), json.loads(text)).encode())


def filled(page: str, data: Mapping[str, Any]) -> str:
    """The page with every generated block made from the data."""
    for name, block in blocks(data).items():
        page = with_block(page, name, block)
    return page


def blocks(data: Mapping[str, Any]) -> dict[str, str]:
    made = {"code": _code(data)}
    if campaign := data.get("campaign"):
        made["campaign"] = _campaign(campaign)
        made["looseness"] = _looseness(campaign)
        made["coverage"] = _coverage(campaign)
    if fuzz := data.get("fuzz"):
        made["fuzz"] = _fuzz(fuzz)
    if faults := data.get("faults"):
        made["faults"] = _faults(faults)
    return made


def _code(data: Mapping[str, Any]) -> str:
    """The code each part was measured with, and whether that was the same for all."""
    unknown = {"version": "not recorded", "accounting": "not recorded", "package": "not recorded"}
    parts = {title: data[part].get("code", unknown) for part, title in PARTS.items() if part in data}
    rows = [(title, code["version"], code["accounting"], code["package"]) for title, code in parts.items()]
    table = _table(["part", "dpmf", "accounting code", "whole package"], rows)
    packages = {code["package"] for code in parts.values()}
    if unknown["package"] in packages:
        said = (
            "A part that did not record its code is of a run in which the few inputs that showed a fault were run "
            "again after the fix."
        )
    elif len(packages) == 1:
        said = "All parts were measured with the same code."
    elif len({code["accounting"] for code in parts.values()}) == 1:
        said = "All parts were measured with the same accounting code; other parts of the package differ."
    else:
        said = "The parts were measured with different accounting code."
    return f"{table}\n\n{said}"


def _table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def _campaign(c: Mapping[str, Any]) -> str:
    return (
        f"{c['cases']:,} cases about {c['problems']:,} random mechanisms (seed {c['seed']}): "
        f"**{len(c['violations'])} violations**."
    )


def _shown(value: float | None) -> str:
    return "∞" if value is None else f"{value:.3g}"


def _looseness(c: Mapping[str, Any]) -> str:
    rows = [
        (name, where, s["cases"], _shown(s["median"]), _shown(s["ninth_decile"]), _shown(s["worst"]))
        for name, found in c["looseness"].items()
        for where, _ in REGIMES
        if (s := found.get(where))
    ]
    return _table(["accountant", "true δ", "cases", "median", "9th decile", "worst"], rows)


def _coverage(c: Mapping[str, Any]) -> str:
    parts = []
    for title, key in (
        ("part", "by_part"),
        ("truth from", "by_truth"),
        ("strategy or batching", "by_family"),
        ("size", "by_size"),
    ):
        if key in c:  # runs of before there were parts have none
            parts.append(_table([title, "cases"], ((name, f"{count:,}") for name, count in c[key].items())))
    ways = c.get("by_direction", {})
    asked = [
        (name, f"{count:,}", *(f"{ways[name].get(way, 0):,}" if ways else "" for way in ("remove", "add")))
        for name, count in c["by_accountant"].items()
    ]
    parts.append(_table(["of", "cases", "remove", "add"], asked))
    return "\n\n".join(parts)


def _fuzz(f: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{r['cases']:,}", f"{r['refused']:,}", f"{r['answered']:,}", r["faults"])
        for name, r in f["targets"].items()
    ]
    total = sum(r["cases"] for r in f["targets"].values())
    wrong = sum(r["faults"] for r in f["targets"].values())
    line = f"{total:,} hostile inputs (seed {f['seed']}): **{wrong} faults**."
    return line + "\n\n" + _table(["input", "cases", "refused in one line", "answered", "faults"], rows)


def _faults(f: Mapping[str, Any]) -> str:
    rows = [(name, r["kills"], r["finished"], r["lost"], r["corrupt"]) for name, r in f["runs"].items()]
    return _table(["killed", "times", "too late", "lost or computed twice", "corrupt files read"], rows)
