"""``python -m evidence``."""

from evidence.cli import main

if __name__ == "__main__":
    main()
