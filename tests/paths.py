"""Where the repository's files are, wherever a test file stands."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
TRUE_SIGMA = TESTS / "data" / "true_sigma.json"  # noise multipliers known independently of this package
