"""`python -m bench.leash PARENT_PID COMMAND...`: run a command that ends when its parent does, however that came."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent may have died before the leash was on.
        if os.getppid() != parent:
            sys.exit(f"{command[0]}: its parent is gone")
    os.execv(command[0], command)  # noqa: S606 - the command is the bench's own


if __name__ == "__main__":
    main()
