"""Virtual time: what happens next, in an order that the seed alone decides, and a hash of all that happened.

Nothing here reads a clock, iterates over a set or hashes a string: the same seed takes the same steps in any process.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from typing import Final

MOST_STEPS: Final = 60_000
"""Steps in `STEPS_WITHIN_S` of virtual time, three times as many as the busiest run takes: with more it repeats itself
while hardly any time passes. In the time after, it may take as many again, however long it is."""
STEPS_WITHIN_S: Final = 60.0


class Loop:
    """The queue of everything that will happen."""

    def __init__(self, *, telling: bool = False) -> None:
        self.now = 0.0
        self.steps = 0
        self.endless = False
        """There were more than `MOST_STEPS`."""
        self._counted_from, self._counted = 0.0, 0
        self.halted = False
        """End the run: an invariant is broken, or it would never end."""
        self.telling = telling
        """Keep the lines of the story, for a reader or for their hash."""
        self.story: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do `what` at `when`; what was asked for first comes first."""
        heapq.heappush(self._queue, (max(self.now, when), next(self._numbers), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do `what` in so many seconds."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), what))

    def run(self, until: float) -> None:
        """Let everything up to `until` happen, or stop as soon as it is `halted`."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until and not self.halted:
            self.now, _, what = pop(queue)
            self.steps += 1
            self._counted += 1
            what()
            if self.now - self._counted_from > STEPS_WITHIN_S:
                self._counted_from, self._counted = self.now, 0
            if self._counted >= MOST_STEPS:
                self.halted = self.endless = True
        if not self.halted:
            self.now = max(self.now, until)

    def note(self, source: str, what: str, about: object = None) -> None:
        """A line of the story; all lines make up the trace. `about`: a message, written out for a reader only."""
        if self.telling:
            told = what if about is None else f"{what} {brief(about)}"
            self.story.append(f"{self.now:9.3f} {source:<12} {told}")

    @property
    def trace(self) -> str:
        """Hash of every line so far; empty if lines are not kept."""
        return hashlib.blake2b("\n".join(self.story).encode(), digest_size=8).hexdigest() if self.telling else ""


_TOLD = ("epoch", "version", "code", "outcome", "step", "health", "boot", "failed", "reason")
_TOLD_OF: dict[type, tuple[str, ...]] = {}
"""Which of them a message has, by its type."""


def brief(message: object) -> str:
    """One line about a message."""
    kind = type(message)
    told = _TOLD_OF.get(kind)
    if told is None:
        told = _TOLD_OF[kind] = tuple(name for name in _TOLD if hasattr(message, name))
    words = [kind.__name__]
    for name in told:
        value = getattr(message, name)
        if value not in (None, "", {}):  # a dict has no hash
            words.append(f"{name}={value}")
    return " ".join(words)
