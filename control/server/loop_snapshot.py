"""A document of the machine, such as the status, written on the loop's thread and read on others.

Only the loop may look at the machine. With thousands of engines a document takes work, so it is written on demand, and
never for no reader. A reader that asks after an event sees that event in the document.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

View = TypeVar("View")
READ_S: Final = 5.0
"""Seconds for which a reader waits for the loop; then it gets the last document."""
REST: Final = 10.0
"""Pause between two documents, as a multiple of the time that writing took: at most a tenth of the loop's time."""


class LoopSnapshot(Generic[View]):
    """One writer, the loop; any number of readers."""

    def __init__(self, write: Callable[[float], View], clock: Callable[[], float] = time.monotonic) -> None:
        """`write` makes the document of a moment; it is called on the loop's thread only."""
        self._write = write
        self._clock = clock
        self._changed = threading.Condition()
        self._requested = 0
        self._written = 0
        """Number of the last request that the document answers."""
        self._open = False
        self._rest_until = clock()
        self._view = write(clock())

    # -- readers -------------------------------------------------------------------------------------------------------

    def read(self, wake: Callable[[], None]) -> View:
        """The document as of now; `wake` wakes the loop. Blocks; not for the loop's thread while the loop runs."""
        with self._changed:
            if self._open:
                self._requested += 1
                mine = self._requested
                wake()
                self._changed.wait_for(lambda: self._written >= mine or not self._open, READ_S)
            return self._view

    # -- the loop ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to serve: readers wait for the loop from now on."""
        with self._changed:
            self._open = True

    def close(self) -> None:
        """Write the document for the last time; readers wait no longer."""
        with self._changed:
            self._write_view()
            self._open = False

    def serve(self) -> None:
        """Write the document if a reader waits, unless it was written a moment ago."""
        if self._requested != self._written and self._clock() >= self._rest_until:
            with self._changed:
                self._write_view()

    def due(self) -> float | None:
        """Time at which `serve` has work; None without a reader."""
        return self._rest_until if self._requested != self._written else None

    def _write_view(self) -> None:
        began = self._clock()
        self._view = self._write(began)
        ended = self._clock()
        self._rest_until = ended + REST * (ended - began)
        self._written = self._requested
        self._changed.notify_all()
