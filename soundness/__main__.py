"""`python -m soundness`: the campaign, resumable; writes the summary into docs/soundness.md and docs/data.

`python -m soundness fuzz | faults | extremes` run the other parts, `python -m soundness page` makes the
page anew from the data and says which parts were measured with other code than there is now.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from soundness import campaign, parts, summary
from soundness.journal import PLACE, Journal, cores
from soundness.progress import shown

PARTS = ("fuzz", "faults", "extremes", "page")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in PARTS:
        part = importlib.import_module(f"soundness.{sys.argv[1]}")
        return int(part.main(sys.argv[2:]))
    parser = argparse.ArgumentParser(prog="python -m soundness", description=__doc__)
    parser.add_argument("--cases", type=positive, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=positive, default=cores())
    parser.add_argument("--journal", type=Path, default=PLACE / "campaign.jsonl")
    parser.add_argument("--restart", action="store_true", help="forget what the journal holds")
    parser.add_argument("--problem", type=int, help="check one problem only, and print every answer")
    parser.add_argument("--only", choices=parts.PARTS, help="draw all problems from this part; not recorded")
    parser.add_argument("--no-docs", action="store_true", help="print the summary, leave the docs alone")
    options = parser.parse_args()
    if options.problem is not None:
        return show(options.seed, options.problem, options.only)
    try:
        journal = Journal(options.journal, campaign.header(options.seed, part=options.only), options.restart)
    except ValueError as error:
        parser.error(str(error))
    rows = []
    try:
        with shown("soundness", options.cases, "cases", "violations") as tell:
            for done, row in campaign.run(journal, options.seed, options.cases, options.jobs, part=options.only):
                rows.append(row)
                tell(done, len(row["violations"]))
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on after {len(journal.rows)} problems", file=sys.stderr)
        return 130
    finally:
        journal.close()
    found = {**summary.measured_with(campaign.HARNESS), "seed": options.seed, **summary.summarise(rows)}
    print(summary.blocks({"campaign": found})["campaign"])
    print(summary.blocks({"campaign": found})["looseness"])
    if not options.no_docs and options.only is None:
        summary.store("campaign", found)
    for violation in found["violations"]:
        print(violation)
    return 1 if found["violations"] else 0


def show(seed: int, index: int, part: str | None) -> int:
    problem, findings = parts.check(seed, index, part=part)
    print(f"{problem.family}, {problem.size}: {problem.mechanism.name}, σ = {problem.noise_multiplier!r}")
    for f in findings:
        verdict = "ok" if f.sound else "VIOLATION"
        print(f"{verdict:9} {f.accountant:12} {f.kind:13} {f.direction:6} at {f.at:.6g}: {f.claim!r}, truth {f.truth}")
    return 0 if all(f.sound for f in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
