"""Python's garbage collector rests while a server is asked to take a version, in the server and in its sidecar.

A process that serves a model has millions of objects, and looking at all of them takes it half a second or more. What
an exchange makes, the names of ten thousand tensors for instance, is enough to set that off, and then every thread of
the process waits for it, with the server and the round. A sidecar has fewer objects, and few rounds without such.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_resting = 0
_was_on = False


@contextmanager
def resting() -> Generator[None]:
    """Nothing is collected meanwhile but by counting references. Several may overlap; the last one ends it."""
    global _resting, _was_on  # noqa: PLW0603 - there is one collector
    with _lock:
        if not _resting:
            _was_on = gc.isenabled()
            gc.disable()
        _resting += 1
    try:
        yield
    finally:
        with _lock:
            _resting -= 1
            if not _resting and _was_on:
                gc.enable()
