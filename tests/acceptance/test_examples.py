"""The demo runs, prints its tables and draws its picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import paths

DEMO = paths.ROOT / "examples" / "demo.py"


def test_demo(tmp_path: Path) -> None:
    # One ε of the four, and a tenth of the batches: the others take the same path. On a busy machine the processes of
    # the search take seconds to start.
    command = [sys.executable, str(DEMO), str(tmp_path), "8", "--batches-per-epoch", "10", "--seconds", "15"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("noise multiplier for") == 3
    assert "Least error for (8, 1e-05)-DP" in done.stdout
    for picture in ("noise-multipliers.png", "errors.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
