"""How large the turns of `sends` may be, by how it went: they shrink where less at a time may do, and grow back.

Less may do where a member had no memory for what it moves, or the link did not carry a turn in its time. Both may have
been for once: a peer that was stopped looks like a slow link. So after some versions larger turns are tried again. What
is tried costs a version one attempt when it fails, and schedules that are cut anew in any case; so it is rare, and
rarer the more often it failed.
"""

from __future__ import annotations

from typing import Final

from ...reshard import MIN_PAIR_BYTES

LESS: Final = 8
"""By how much turns shrink, and grow: every try costs a version one attempt."""
FIRST: Final = 8
"""Versions that have to go through before larger turns are tried. Twice as many after each that failed."""
MOST: Final = 1024
"""Of them, however often it failed."""


class ChunkLimit:
    """Of a sender's turns. Policy alone; used from one thread."""

    def __init__(self, first: int = FIRST) -> None:
        self.parts = 1
        """Into how many a turn is cut that was as large as a group of that size may have it."""
        self._first = self._needed = first
        self._good = 0
        """Versions that went through since it moved."""
        self._version = -1
        """The last one of them."""
        self._on_trial = False
        """It has grown, and not as many versions went through since as are needed."""

    def under(self, most: int) -> int:
        """Bytes that a pair may move in a turn where it could be `most`: not less than `MIN_PAIR_BYTES` of them."""
        return min(most, max(most // self.parts, MIN_PAIR_BYTES))

    def lower(self, tried: int, most: int) -> None:
        """Turns of `tried` bytes were too much, in a group in which they could be `most`."""
        self.parts = LESS * max(most // tried, 1)
        if self._on_trial:
            self._needed = min(2 * self._needed, MOST)
        self._good, self._on_trial = 0, False

    def worked(self, version: int) -> None:
        """Everything of `version` has moved in a group. One version counts once, in however many groups it moves."""
        if version == self._version:
            return
        self._version = version
        self._good += 1
        if self._good < self._needed:
            return
        self._good = 0
        self._on_trial = self.parts > 1
        self.parts = max(self.parts // LESS, 1)
        if not self._on_trial:  # what was tried last is all there is
            self._needed = self._first
