"""Hands a document, such as the status, from the loop, which alone may look at the machine, to other threads.

With thousands of engines it is work, so it is written when somebody asks, and never for nobody. Who asks after
something happened sees that it did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

View = TypeVar("View")
PATIENCE_S: Final = 5.0
"""How long a reader waits for the loop before it takes the last one there was."""
REST: Final = 10.0
"""Times as long as it took to write one, the loop does other things before it writes the next: a tenth of its time."""


class LoopSnapshot(Generic[View]):
    """One writer, the loop; any number of readers."""

    def __init__(self, write: Callable[[float], View], clock: Callable[[], float] = time.monotonic) -> None:
        """`write` makes the document of a moment; it is called on the loop's thread only."""
        self._write = write
        self._clock = clock
        self._changed = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._open = False
        self._rest_until = clock()
        self._view = write(clock())

    # -- readers -------------------------------------------------------------------------------------------------------

    def read(self, wake: Callable[[], None]) -> View:
        """The document as of now; `wake` makes the loop look. Not to be called on the loop's thread while it runs."""
        with self._changed:
            if self._open:
                self._asked += 1
                mine = self._asked
                wake()
                self._changed.wait_for(lambda: self._answered >= mine or not self._open, PATIENCE_S)
            return self._view

    # -- the loop ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The loop runs: readers wait for it from now on."""
        with self._changed:
            self._open = True

    def close(self) -> None:
        """The loop is over: what it wrote last stands."""
        with self._changed:
            self._lay_out()
            self._open = False

    def serve(self) -> None:
        """Write it if somebody waits for it, unless it was written a moment ago."""
        if self._asked != self._answered and self._clock() >= self._rest_until:
            with self._changed:
                self._lay_out()

    def due(self) -> float | None:
        """When `serve` has something to do."""
        return self._rest_until if self._asked != self._answered else None

    def _lay_out(self) -> None:
        began = self._clock()
        self._view = self._write(began)
        ended = self._clock()
        self._rest_until = ended + REST * (ended - began)
        self._answered = self._asked
        self._changed.notify_all()
