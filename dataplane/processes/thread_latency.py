"""Low thread latency in a process whose main thread rarely releases the interpreter (GIL switch interval, timer slack).

An idle scheduler polls for requests, and releases the GIL for a microsecond in each loop. A waiting thread is woken
each time and comes too late each time; its wait for the switch interval, after which Python forces a release, begins
anew with every loop. On an idle server that took up to 0.5 s for each call of a thread of ours, and seconds for a
version. An interval shorter than one loop serves the waiting thread.

Linux adds up to 50 µs to every timed wait of a thread, its timer slack, which is longer than such a loop. A thread that
needs low latency sets it to 1 ns.
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
"""Seconds.

Of 1 to 100 µs, 5 to 20 were best: SGLang 0.5.17, two H200s, 31 GB in 0.2 to 0.3 s; 2 to 4 s with Python's 5 ms.
"""
_PR_SET_TIMERSLACK: Final = 29
_lock = threading.Lock()
_usual: list[float] = []
"""The interval before the first user of `low_latency_threads`, once for each current user."""


def without_timer_slack() -> None:
    """Set this thread's timer slack to 1 ns, for good. Without effect where the kernel does not allow it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@contextmanager
def low_latency_threads() -> Generator[None]:
    """Meanwhile any thread of this process gets the interpreter within `INTERVAL_S` of Python code of another one.

    Running threads lose the time of the woken ones, which mostly wait for devices and sockets. The last context to end
    restores the interval, unless other code has set another one.
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
