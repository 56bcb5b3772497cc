"""``python -m dpmf.cli``."""

from dpmf.cli import main

main()
