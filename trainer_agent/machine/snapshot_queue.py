"""Order in which snapshots are published, and which a new one waits for or replaces. Pure: no thread, tensor or clock.

A snapshot occupies one of a few buffers from the moment it is taken until its publication has ended. Publications run
one at a time, in the order in which their snapshots were taken.

    claim -> filled -> begin -> finish
         being written   waiting   publishing   free again

When no buffer is free, a new snapshot waits for one, or replaces the newest snapshot that has not begun.
"""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from weightbus.control.protocol import InvariantBroken


class Overlap(enum.StrEnum):
    """What happens to earlier snapshots that are not published yet when a new one is taken."""

    WAIT = "wait"
    """Every version is published; a new snapshot waits until a buffer is free."""
    SUPERSEDE = "supersede"
    """Waiting snapshots are dropped; a publication that has begun goes on to its end."""


class SnapshotMemory(enum.StrEnum):
    """Memory in which snapshots are kept on rank 0. Each takes as many bytes as one version."""

    HOST = "host"
    """Host memory, pinned where the weights are on a GPU; two buckets of GPU memory are borrowed while it is taken."""
    DEVICE = "device"
    """Memory of the device that holds the weights: fastest, if there is room."""


class SnapshotClaim(msgspec.Struct, frozen=True):
    """A buffer to write a snapshot into, and the versions that it replaces."""

    buffer: int
    superseded: tuple[int, ...] = ()


class SnapshotQueue:
    """Snapshots of one trainer. Not thread-safe: the owner holds a lock around each call."""

    def __init__(self, buffers: int, overlap: Overlap) -> None:
        self._overlap = overlap
        self._free = deque(range(buffers))
        self._buffers = buffers
        self._writing: int | None = None
        self._waiting: deque[tuple[int, int]] = deque()
        """(version, buffer) of each waiting snapshot, oldest first."""
        self._running: tuple[int, int] | None = None

    @property
    def idle(self) -> bool:
        """True if no publication runs and no snapshot waits."""
        return self._running is None and not self._waiting

    @property
    def pending(self) -> int:
        """Number of publications that have not ended."""
        return len(self._waiting) + (self._running is not None)

    def claim(self) -> SnapshotClaim | None:
        """Claim a buffer for the next snapshot. Returns None if none is free: retry when a publication has ended."""
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
        """Mark the claimed buffer as holding `version`, and append it to the queue."""
        self._waiting.append((version, self._claimed()))
        self._writing = None

    def discard(self) -> None:
        """Return the claimed buffer unused."""
        self._free.append(self._claimed())
        self._writing = None

    def begin(self) -> tuple[int, int] | None:
        """Start the next publication. Returns its version and buffer; None while one runs, or if none waits."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        return self._running

    def reuse(self, buffer: int) -> bool:
        """Publish again from an unchanged buffer. Returns False if the buffer is taken or the queue is not idle."""
        if not self.idle or buffer not in self._free:
            return False
        self._free.remove(buffer)
        self._running = (0, buffer)
        return True

    def finish(self) -> None:
        """Mark the running publication as ended; its buffer is free."""
        if self._running is None:
            raise InvariantBroken("a publication ended that did not begin")
        self._free.append(self._running[1])
        self._running = None

    def cancel_waiting(self) -> tuple[int, ...]:
        """Drop all waiting snapshots; returns their versions."""
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
