"""What all pages are made with: tables, numbers in words, blocks between marks, and which code made a page."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from evidence.store import Record


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table, numbers to the right."""
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def short(seconds: float) -> str:
    """Seconds with as many digits as mean something."""
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


def power(value: float) -> str:
    """A round number as people write it: 3·10⁹."""
    mantissa, exponent = f"{value:.0e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
    return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"


def with_block(page: str, name: str, block: str) -> str:
    """The page with the text between ``<!-- name -->`` and ``<!-- end -->`` replaced."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    return pattern.sub(lambda marks: f"{marks[1]}{block}\n{marks[2]}", page)


def made_by(records: Sequence[Record], command: str, wanted: int) -> str:
    """The paragraph and the table that say which command and which code the numbers of a page are from."""
    made: dict[str, Counter[str]] = {}
    for record in records:
        by = record.cell.parameters.get("accountant", {})
        members = "+".join(sorted({m["name"] for m in by.get("members", [by])})) if isinstance(by, dict) and by else ""
        made.setdefault(f"{record.cell.quantity}{' by ' + members if members else ''}", Counter())[record.code] += 1
    rows = [
        f"| {what} | {sum(codes.values())} | {', '.join(f'`{code}`' for code in sorted(codes))} |"
        for what, codes in sorted(made.items())
    ]
    machines = ", ".join(sorted({r.result["machine"] for r in records if r.result and "machine" in r.result}))
    measured = f"Seconds were measured on: {machines}. " if machines else ""
    gaps = f" of {wanted}" if len(records) < wanted else ""
    return (
        f"`{command}`: {len(records)}{gaps} cells, {minutes(records)} minutes of computing in all, digest of the "
        f"results `{digest(records)}`. {measured}A cell's code is the version of dpmf and a hash of the modules that "
        "its number depends on. A cell with another code than the one there is now is stale: `python -m evidence "
        "status` counts them, and the next run computes them again.\n\n"
        "| what | cells | code |\n|---|---|---|\n" + "\n".join(rows)
    )


def minutes(records: Iterable[Record]) -> str:
    return f"{sum(float(f'{record.seconds:.3g}') for record in records) / 60:.0f}"


def digest(records: Iterable[Record]) -> str:
    """Sixteen hexadecimal digits of cells, code and results, whatever their order."""
    lines = sorted(json.dumps([r.cell.quantity, r.cell.text, r.code, r.result], sort_keys=True) for r in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
