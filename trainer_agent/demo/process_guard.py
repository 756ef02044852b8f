"""Ends what the demo started when the demo is killed in a way that leaves it no time to: SIGKILL, or the memory killer.

    demo ---- start ----> leash --- becomes ---> coordinator, server, sidecar, rank ---> workers
      |                     |
      '-------- pipe -------'-------> guard

The guard reads the pipe. A leash writes its process group into it before it becomes the program; the demo writes
`DONE` once everything was ended in order. When the pipe ends without that, the demo was killed, and the guard
kills the groups. A leash also asks the kernel to kill it with the demo, in case the guard is gone too.

Both run as files, without this package: a start costs 20 ms, and nothing of the project has to work for them to.
"""

import contextlib
import ctypes
import os
import signal
import sys

DONE = b"done\n"
_PR_SET_PDEATHSIG = 1


def guard(pipe: int) -> None:
    """Read `pipe` to its end; kill every group that was named, unless the last word was `DONE`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(pipe, "rb") as lines:
        said = lines.readlines()
    if not said or said[-1] == DONE:
        return
    for line in said:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(int(line), signal.SIGKILL)


def leash(pipe: int, demo: int, argv: list[str]) -> None:
    """Become `argv`, in a process group that the guard knows. Must be the leader of its group."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != demo:
        return  # it was killed before the kernel was asked
    os.write(pipe, b"%d\n" % os.getpid())
    os.close(pipe)  # held open, it would hide the demo's end from the guard
    os.execvp(argv[0], argv)  # noqa: S606 - the demo's own programs


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["guard", pipe]:
            guard(int(pipe))
        case ["leash", pipe, demo, *argv]:
            leash(int(pipe), int(demo), argv)
        case _:
            sys.exit("usage: process_guard.py guard PIPE | leash PIPE PARENT COMMAND...")
