"""Run all benchmarks, or those named: `python -m benchmarks [beside] [growth] ...`; `--help` says what there is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_") and p.stem != "peers")


def main(names: list[str]) -> None:
    if {"-h", "--help"} & set(names):
        print("python -m benchmarks [NAME]...: all of them if none is named; `beside` and `growth` write the page\n")
        for name in NAMES:
            document = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
            print(f"  {name:18} {document.splitlines()[0]}")
        return
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"benchmarks: unknown {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        sys.exit(2)
    try:
        for name in names or NAMES:
            importlib.import_module(f"benchmarks.{name}").main()
    except KeyboardInterrupt:
        kept = "what `batchings` was answered is kept; all others are measured in one run, and begin anew"
        print(f"benchmarks: interrupted; {kept}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
