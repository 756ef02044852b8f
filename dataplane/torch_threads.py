"""Threads that wait inside of torch. The interpreter waits for them a little when it ends.

A daemon thread that comes back from C++ into an interpreter that is ending is ended on the spot, in the middle of
pybind11's frames, which the C++ runtime takes for an error: "terminate called without an active exception", and a
program that did everything right ends with SIGABRT. Threads that are not daemons would keep a program for as long as a
peer that died keeps torch.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from .promptness import without_slack

PATIENCE_S: Final = 10.0
"""For all of them together; NCCL's abort and a wait of gloo's that was broken off take less."""

_started: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def start(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that runs `target`."""

    def run() -> None:
        without_slack()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def _wait_for_all() -> None:
    until = time.monotonic() + PATIENCE_S
    for thread in tuple(_started):
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_all)
