"""Connections that one thread reads and writes as far as they go: whoever stands still keeps nobody else waiting.

What somebody says comes in parts, and is given on when a message is whole; what it is told waits for room, in a queue
of its own. Whoever stands still in the middle of either is lost after `PACKET_S`, alone. What it did while nobody
pumped counts: a leader that plans for seconds, or was stopped, is away itself.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from ..errors import DataplaneError, PeerLost, TransferFailed
from .frames import Frames

PACKET_S: Final = 10.0
"""For a peer that stands still in the middle of what it says or is told, and for the first words of one that comes."""
MOST_UNREAD: Final = 32
"""Parts of messages that wait for room: whoever asks on and reads nothing is lost before they fill the memory."""
_CLOSED: Final = (ValueError, LookupError, RuntimeError, OSError)
"""What a selector or a queue raises that another thread closes meanwhile."""


class PooledConnection:
    """Somebody that is connected, or is to be."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Empty for somebody who has not said yet who it is."""
        self.frames: Frames | None = None
        self.unread: deque[memoryview] = deque()
        """What it is told and has no room for yet."""
        self.moved_at = 0.0
        """When it last had room; or it came."""
        self.heard_at = 0.0
        """When anything of what it says last came."""


class Watched(Protocol):
    """What selectors take."""

    def fileno(self) -> int:
        """Of what is looked at."""
        ...


L = TypeVar("L", bound=PooledConnection)


class ConnectionPool(Generic[L]):
    """Of one session. Used from one thread; `end` from any, and then `let_go` and `close`."""

    def __init__(self, heard: Callable[[L, bytes], None], lost: Callable[[L, str], None]) -> None:
        """`heard` is given every message, `lost` whoever has to be let go of, with the reason; it does that.

        A `DataplaneError` of `heard` is such a reason.
        """
        self._heard, self._lost = heard, lost
        self._taken: dict[L, None] = {}
        self._ended = threading.Event()
        self._selector = selectors.DefaultSelector()

    def watch(self, what: Watched | int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever there is something to read."""
        self._selector.register(what, selectors.EVENT_READ, ready)

    def take(self, line: L, frames: Frames) -> None:
        """It is connected. Raises `TransferFailed` when this is closed; the connection is, too, then."""
        line.frames, line.moved_at = frames, time.monotonic()
        line.unread = deque()
        self._taken[line] = None
        try:
            self._selector.register(frames, selectors.EVENT_READ, line)
        except _CLOSED as error:
            self.let_go(line)
            raise TransferFailed("the sender was closed") from error

    def hand_over(self, guest: L, line: L) -> None:
        """The guest has said that it is `line`, whose the connection is from now on."""
        line.frames, line.unread, line.moved_at = guest.frames, guest.unread, time.monotonic()
        guest.frames, guest.unread = None, deque()
        self._taken.pop(guest, None)
        self._taken[line] = None
        if line.frames is not None:
            self._selector.modify(line.frames, _wanted(line), line)

    def tell(self, line: L, message: bytes) -> None:
        """At once as far as it has room, and as it reads. Nobody, if it is gone already.

        Raises `PeerLost`, also for one that has `MOST_UNREAD` to read; `TransferFailed` when this is closed meanwhile.
        """
        frames = line.frames
        if frames is None:
            return
        if len(line.unread) >= MOST_UNREAD:
            raise PeerLost("it goes on to ask, and does not read what it is told")
        if not line.unread:
            line.moved_at = time.monotonic()
        line.unread.extend(frames.wrapped(message))
        try:
            self._push(line)
        except _CLOSED as error:
            if not self._ended.is_set():
                raise
            raise TransferFailed("the sender was closed") from error

    def let_go(self, line: L, last: bytes = b"") -> None:
        """Hang up. `last` is said before, if there is room for it and nothing else is half said."""
        frames, line.frames = line.frames, None
        self._taken.pop(line, None)
        if frames is None:
            return
        if last and not line.unread:
            with contextlib.suppress(DataplaneError):  # it is gone, nothing to tell
                for part in frames.wrapped(last):
                    if frames.push(part):
                        break
        line.unread = deque()
        with contextlib.suppress(*_CLOSED):
            self._selector.unregister(frames)
        frames.close()

    def pump(self, timeout_s: float) -> None:
        """Everything that can be read and written within that time, or at the end of it; not all that there is.

        Raises `TransferFailed` when this is closed meanwhile.
        """
        if self._ended.is_set():
            raise TransferFailed("the sender was closed")
        try:
            self._lose_the_late()
            for key, events in self._selector.select(timeout_s):
                if not isinstance(key.data, PooledConnection):
                    key.data()
                    continue
                line: L = key.data  # type: ignore[assignment]  # those that were taken
                if events & selectors.EVENT_WRITE:
                    self._guarded(line, self._push)
                if events & selectors.EVENT_READ:
                    self._guarded(line, self._pull)
        except _CLOSED as error:
            if not self._ended.is_set():
                raise
            self.close()  # of what came meanwhile
            raise TransferFailed("the sender was closed") from error

    def silent(self, line: L, seconds: float) -> bool:
        """For so long it has said nothing, and read nothing of what it is told; nor is there anything to pull."""
        if time.monotonic() - max(line.heard_at, line.moved_at) <= seconds:
            return False
        frames = line.frames
        try:
            return frames is None or not frames.waiting()
        except _CLOSED:  # by another thread: `pump` says it
            return False

    @property
    def ended(self) -> bool:
        """Nobody is heard of any more."""
        return self._ended.is_set()

    def end(self) -> None:
        """Whoever pumps finds out by this. From now on connections are let go of, and nothing else."""
        self._ended.set()

    def close(self) -> None:
        """Hang up on everybody who was not let go of. Whoever pumps finds out by this, too."""
        self.end()
        self._selector.close()
        for line in tuple(self._taken):
            self.let_go(line)

    def _guarded(self, line: L, go_on: Callable[[L], None]) -> None:
        try:
            go_on(line)
        except DataplaneError as error:
            if self._ended.is_set():
                raise TransferFailed("the sender was closed") from error
            self._lost(line, str(error))

    def _pull(self, line: L) -> None:
        """Take what it has said; raises `DataplaneError`."""
        frames = line.frames
        if frames is None:  # let go of by an earlier event of the same batch
            return
        line.heard_at = time.monotonic()
        found = frames.pull()
        if found is not None:
            self._heard(line, found)

    def _push(self, line: L) -> None:
        """Tell it what it has room for now. Raises `PeerLost`."""
        frames = line.frames
        if frames is None:
            return
        unread = line.unread  # another thread that lets go of it puts an empty one there
        while unread:
            left = frames.push(unread[0])
            if len(left) < len(unread[0]):
                line.moved_at = time.monotonic()
            if left:
                unread[0] = left
                break
            unread.popleft()
        if self._selector.get_key(frames).events != _wanted(line):
            self._selector.modify(frames, _wanted(line), line)

    def _lose_the_late(self) -> None:
        for line in tuple(self._taken):
            if line.unread and _late(line):
                self._guarded(line, self._push)  # there may be room since nobody looked
                if line.unread and _late(line):
                    self._lost(line, f"it has read nothing for {PACKET_S:.1f} s of what it was told")
            elif line.frames is not None and line.frames.halfway and self.silent(line, PACKET_S):
                self._lost(line, f"it has stood still for {PACKET_S:.1f} s in the middle of what it said")
            elif not line.name and _late(line) and (line.heard_at or self.silent(line, PACKET_S)):
                self._lost(line, f"it has not said within {PACKET_S:.1f} s who it is")


def _late(line: PooledConnection) -> bool:
    """With what it has to read, or to say first."""
    return time.monotonic() - line.moved_at > PACKET_S


def _wanted(line: PooledConnection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unread else 0)
