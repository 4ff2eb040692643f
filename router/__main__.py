"""The command `warmroute`, also as `python -m router`."""

import sys


def run() -> int:
    """Ctrl-C ends it quietly, also while it is still being loaded."""
    try:
        from router.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
