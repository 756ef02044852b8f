"""Threads that get the interpreter when they want it, in a process whose main thread never lets go of it for long.

A scheduler without requests looks for some all the time, and gives up the interpreter for a microsecond at each look. A
thread that waits for it is woken each time and comes too late each time; its wait for the switch interval, after which
Python takes the interpreter from its holder, begins anew with every look. On an idle server that took up to 0.5 s for
each call of a thread of ours, and seconds for a version. Where the interval is shorter than the way from one look to
the next, the waiting thread is served.

Linux adds up to 50 µs to whatever a thread waits for, its *slack*, which is longer than that way again. A thread that
is to be prompt asks for none.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from math import isclose
from typing import Final

INTERVAL_S: Final = 1e-5
"""Of 1 to 100 µs, 5 to 20 were best: SGLang 0.5.17, two H200s, 31 GB in 0.2 to 0.3 s; 2 to 4 s with Python's 5 ms."""
_PR_SET_TIMERSLACK: Final = 29
_lock = threading.Lock()
_usual: list[float] = []
"""The interval that was found, once for everybody who is prompt now."""


def without_timer_slack() -> None:
    """This thread is woken when its time has come, from now on. Where that cannot be had it is woken later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@contextmanager
def low_latency_threads() -> Generator[None]:
    """Meanwhile any thread of this process gets the interpreter within `INTERVAL_S` of Python code of another one.

    Those that run lose what the others use, which wait for devices and sockets most of the time. The interval that was
    found is put back by the last one that leaves, unless somebody else has set another one.
    """
    with _lock:
        _usual.append(_usual[0] if _usual else sys.getswitchinterval())
        sys.setswitchinterval(INTERVAL_S)
    try:
        yield
    finally:
        with _lock:
            usual = _usual.pop()
            if not _usual and isclose(sys.getswitchinterval(), INTERVAL_S):  # it is kept in whole µs
                sys.setswitchinterval(usual)
