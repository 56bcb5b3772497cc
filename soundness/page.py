"""`python -m soundness page`: docs/soundness.md made anew from docs/data/soundness.json."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from soundness import provenance, summary


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m soundness page", description=__doc__).parse_args(arguments)
    data = summary.load()
    summary.write(data)
    print(f"wrote {summary.PAGE.name} from {summary.DATA.name}")
    for part in summary.PARTS:
        print(f"{part}: {_standing(data.get(part))}")
    return 0


def _standing(found: dict | None) -> str:
    if found is None:
        return "not measured yet"
    if "code" not in found:
        return "measured with code that was not recorded"
    now = provenance.present()
    if found["code"]["package"] == now["package"]:
        return "measured with the code there is now"
    same = "the same" if found["code"]["accounting"] == now["accounting"] else "other"
    return f"measured with another package, {same} accounting code"
