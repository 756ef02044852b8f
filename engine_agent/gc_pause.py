"""Python's garbage collector is paused while a server takes a version, in the server and in its sidecar.

A process that serves a model has millions of objects, and a collection takes it half a second or more. The objects of
one exchange, such as the names of ten thousand tensors, are enough to start a collection, and then every thread of the
process waits for it, with the server and the round. A sidecar has fewer objects, and few rounds without a collection.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_paused = 0
_was_on = False


@contextmanager
def gc_paused() -> Generator[None]:
    """Pause the cyclic collector; reference counting goes on. Contexts may overlap: the last one ends the pause."""
    global _paused, _was_on  # noqa: PLW0603 - there is one collector
    with _lock:
        if not _paused:
            _was_on = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _lock:
            _paused -= 1
            if not _paused and _was_on:
                gc.enable()
