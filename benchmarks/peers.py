"""Peers whose dependencies conflict with ours run in virtual environments of their own, made on first use."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# random-allocation caps numpy below what we use, and does not declare its need of pandas.
REQUIREMENTS = {"random-allocation": ["random-allocation", "pandas"]}


def run(peer: str, program: str, argument: Any) -> Any:
    """What `program` prints as JSON, given `argument` as JSON, in the peer's own environment."""
    home = ROOT / f".venv-{peer}"
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        print(f"installing {peer} into {home.name} ...", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer]], check=True)
        (home / ".ready").touch()
    done = subprocess.run([python, "-c", program, json.dumps(argument)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
