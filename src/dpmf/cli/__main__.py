"""``python -m dpmf.cli``."""

from dpmf.cli import main

if __name__ == "__main__":
    main()
