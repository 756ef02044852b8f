"""Low latency of threads in a process that serves a model: GIL switch interval, timer slack, garbage collector.

An idle scheduler polls for requests, and releases the GIL for a microsecond in each loop. A waiting thread is woken
each time and comes too late each time; its wait for the switch interval, after which Python forces a release, begins
anew with every loop. On an idle server that took up to 0.5 s for each call of a thread of ours, and seconds for a
version. An interval shorter than one loop serves the waiting thread.

Linux adds up to 50 µs to every timed wait of a thread, its timer slack, which is longer than such a loop. A thread that
needs low latency sets it to 1 ns.

A process that serves a model has millions of objects, and a garbage collection takes it half a second or more, in which
every thread waits. The objects of one exchange, such as the names of ten thousand tensors, are enough to start one. So
the collector is paused while a server takes a version, in the server and in its sidecar.
"""

from __future__ import annotations

import ctypes
import gc
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
_collected: list[bool] = []
"""Whether the collector was on before the first user of `gc_paused`, once for each current user."""


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


@contextmanager
def gc_paused() -> Generator[None]:
    """Pause the cyclic collector; reference counting goes on. Contexts may overlap: the last one ends the pause."""
    with _lock:
        _collected.append(_collected[0] if _collected else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _collected.pop() and not _collected:
                gc.enable()
