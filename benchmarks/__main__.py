"""Run all benchmarks, or those named: `python -m benchmarks [renyi] [conditional] ...`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_") and p.stem != "peers")


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"benchmarks: unknown {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
