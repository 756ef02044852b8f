"""Which snapshot is published when, and what a new one waits for or replaces. Pure: no thread, no tensor, no clock.

A snapshot lies in one of a few buffers from the moment it is taken until its publication ended. One is published at a
time, in the order in which they were taken; rounds never interleave.

    claim -> filled -> begin -> over
         (the buffer is being written) (it waits) (it is published) (it is free again)

When all buffers are taken, a new snapshot waits for one, or takes the place of the newest that has not begun.
"""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from weightbus.control.protocol import InvariantBroken


class Overlap(enum.StrEnum):
    """What a snapshot does that finds earlier ones not published yet."""

    WAIT = "wait"
    """Every version is published; taking a snapshot waits until a buffer is free."""
    SUPERSEDE = "supersede"
    """Those that have not begun are dropped; what has begun is carried to its end."""


class SnapshotMemory(enum.StrEnum):
    """Where snapshots lie. Each takes as many bytes as one version, on the root rank."""

    HOST = "host"
    """Pinned where the weights are on a GPU; two buckets of GPU memory are borrowed while it is taken."""
    DEVICE = "device"
    """Beside the weights: the fastest, if there is room."""


class SnapshotClaim(msgspec.Struct, frozen=True):
    """A buffer to write a snapshot into, and the versions that it replaces."""

    buffer: int
    superseded: tuple[int, ...] = ()


class SnapshotQueue:
    """The snapshots of one trainer. Calls may come from several threads; the owner holds a lock around them."""

    def __init__(self, buffers: int, overlap: Overlap) -> None:
        self._overlap = overlap
        self._free = deque(range(buffers))
        self._buffers = buffers
        self._writing: int | None = None
        self._waiting: deque[tuple[int, int]] = deque()
        """Version and buffer, the oldest first."""
        self._running: tuple[int, int] | None = None

    @property
    def idle(self) -> bool:
        """Nothing is being published, and nothing waits for it."""
        return self._running is None and not self._waiting

    @property
    def ahead(self) -> int:
        """Publications that have not ended."""
        return len(self._waiting) + (self._running is not None)

    def claim(self) -> SnapshotClaim | None:
        """Where the next snapshot may be written; None: ask again when a publication is over."""
        if self._writing is not None:
            raise InvariantBroken("a snapshot is taken while another one is: publish from one thread")
        superseded: tuple[int, ...] = ()
        if self._overlap is Overlap.SUPERSEDE:
            superseded = tuple(version for version, _ in self._waiting)
            self._free.extend(buffer for _, buffer in self._waiting)
            self._waiting.clear()
        if not self._free:
            return None
        self._writing = self._free.popleft()
        return SnapshotClaim(self._writing, superseded)

    def filled(self, version: int) -> None:
        """The claimed buffer holds `version`: it is next in line."""
        self._waiting.append((version, self._claimed()))
        self._writing = None

    def discard(self) -> None:
        """The claimed buffer could not be filled."""
        self._free.append(self._claimed())
        self._writing = None

    def begin(self) -> tuple[int, int] | None:
        """The version to publish now and its buffer; None while one runs, or when none waits."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        return self._running

    def again(self, buffer: int) -> bool:
        """Publish once more from a buffer that was not written since; False while that cannot be."""
        if not self.idle or buffer not in self._free:
            return False
        self._free.remove(buffer)
        self._running = (0, buffer)
        return True

    def over(self) -> None:
        """The publication that ran came to its end."""
        if self._running is None:
            raise InvariantBroken("a publication ended that did not begin")
        self._free.append(self._running[1])
        self._running = None

    def drop(self) -> tuple[int, ...]:
        """Give up what has not begun; returns its versions."""
        dropped = tuple(version for version, _ in self._waiting)
        self._free.extend(buffer for _, buffer in self._waiting)
        self._waiting.clear()
        return dropped

    def check(self) -> None:
        """Raise `InvariantBroken` unless every buffer is in exactly one place."""
        places = [*self._free, *(buffer for _, buffer in self._waiting)]
        places += [self._writing] if self._writing is not None else []
        places += [self._running[1]] if self._running is not None else []
        if sorted(places) != list(range(self._buffers)):
            raise InvariantBroken(f"the {self._buffers} buffers are at {places}")

    def _claimed(self) -> int:
        if self._writing is None:
            raise InvariantBroken("no buffer was claimed")
        return self._writing
