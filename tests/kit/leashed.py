"""Programs that end with whoever started them, also when that is killed: the kernel kills them then.

Runs as a file, so that a start costs little: ``python leashed.py PARENT COMMAND...`` becomes the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def leashed(argv: list[str]) -> list[str]:
    """The command for `argv` on a leash. To be started by a thread that lives as long as this process."""
    return [sys.executable, "-S", __file__, str(os.getpid()), *argv]


if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(parent):  # else it was killed before the kernel was asked
        os.execvp(command[0], command)
