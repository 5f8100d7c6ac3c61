"""Runs a program that must not outlive its parent: `python tether.py PARENT_PID PROGRAM ARGUMENT...`.

The kernel's parent-death signal survives exec, so the program needs no part in this and keeps its process id. Linux
only; elsewhere the program just runs. Run by path with `-I -S`: it needs nothing but the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Arm the signal, then become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the parent died before this started")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
