"""`python -m bench.leash PARENT_PID COMMAND...`: run a command that ends when its parent does, however that came."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie(parent: int) -> None:
    """End this process when its parent, or the parent's thread that began it, does; at once if that is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent may have died before the leash was on.
        if os.getppid() != parent:
            sys.exit("its parent is gone")


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    tie(parent)
    os.execv(command[0], command)  # noqa: S606 - the command is the bench's own


if __name__ == "__main__":
    main()
