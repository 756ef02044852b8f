"""Connections that one thread reads and writes as far as they go: whoever stands still keeps nobody else waiting.

What somebody says comes in parts, and is given on when a message is whole; what it is told waits for room, in a queue
of its own. Whoever stands still in the middle of either is lost after `STALL_S`, alone. What it did while nobody
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

STALL_S: Final = 10.0
"""For a peer that stands still in the middle of what it says or is told, and for the first words of one that comes."""
MAX_UNSENT: Final = 32
"""Parts of messages that wait for room: whoever asks on and reads nothing is lost before they fill the memory."""
_CLOSED: Final = (ValueError, LookupError, RuntimeError, OSError)
"""What a selector or a queue raises that another thread closes meanwhile."""


class PooledConnection:
    """Somebody that is connected, or is to be."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Empty for somebody who has not said yet who it is."""
        self.frames: Frames | None = None
        self.unsent: deque[memoryview] = deque()
        """What it is told and has no room for yet."""
        self.progress_at = 0.0
        """When it last had room; or it came."""
        self.received_at = 0.0
        """When anything of what it says last came."""


class Watched(Protocol):
    """What selectors take."""

    def fileno(self) -> int:
        """Of what is looked at."""
        ...


L = TypeVar("L", bound=PooledConnection)


class ConnectionPool(Generic[L]):
    """Of one session. Used from one thread; `end` from any, and then `drop` and `close`."""

    def __init__(self, on_message: Callable[[L, bytes], None], on_lost: Callable[[L, str], None]) -> None:
        """`heard` is given every message, `lost` whoever has to be let go of, with the reason; it does that.

        A `DataplaneError` of `heard` is such a reason.
        """
        self._on_message, self._on_lost = on_message, on_lost
        self._connections: dict[L, None] = {}
        self._ended = threading.Event()
        self._selector = selectors.DefaultSelector()

    def watch(self, what: Watched | int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever there is something to read."""
        self._selector.register(what, selectors.EVENT_READ, ready)

    def add(self, connection: L, frames: Frames) -> None:
        """It is connected. Raises `TransferFailed` when this is closed; the connection is, too, then."""
        connection.frames, connection.progress_at = frames, time.monotonic()
        connection.unsent = deque()
        self._connections[connection] = None
        try:
            self._selector.register(frames, selectors.EVENT_READ, connection)
        except _CLOSED as error:
            self.drop(connection)
            raise TransferFailed("the sender was closed") from error

    def identify(self, guest: L, connection: L) -> None:
        """The guest has said that it is `connection`, whose the connection is from now on."""
        connection.frames, connection.unsent, connection.progress_at = guest.frames, guest.unsent, time.monotonic()
        guest.frames, guest.unsent = None, deque()
        self._connections.pop(guest, None)
        self._connections[connection] = None
        if connection.frames is not None:
            self._selector.modify(connection.frames, _wanted(connection), connection)

    def send(self, connection: L, message: bytes) -> None:
        """At once as far as it has room, and as it reads. Nobody, if it is gone already.

        Raises `PeerLost`, also for one that has `MAX_UNSENT` to read; `TransferFailed` when this is closed meanwhile.
        """
        frames = connection.frames
        if frames is None:
            return
        if len(connection.unsent) >= MAX_UNSENT:
            raise PeerLost("it goes on to ask, and does not read what it is told")
        if not connection.unsent:
            connection.progress_at = time.monotonic()
        connection.unsent.extend(frames.framed(message))
        try:
            self._push(connection)
        except _CLOSED as error:
            if not self._ended.is_set():
                raise
            raise TransferFailed("the sender was closed") from error

    def drop(self, connection: L, last: bytes = b"") -> None:
        """Hang up. `last` is said before, if there is room for it and nothing else is half said."""
        frames, connection.frames = connection.frames, None
        self._connections.pop(connection, None)
        if frames is None:
            return
        if last and not connection.unsent:
            with contextlib.suppress(DataplaneError):  # it is gone, nothing to tell
                for part in frames.framed(last):
                    if frames.push(part):
                        break
        connection.unsent = deque()
        with contextlib.suppress(*_CLOSED):
            self._selector.unregister(frames)
        frames.close()

    def poll(self, timeout_s: float) -> None:
        """Everything that can be read and written within that time, or at the end of it; not all that there is.

        Raises `TransferFailed` when this is closed meanwhile.
        """
        if self._ended.is_set():
            raise TransferFailed("the sender was closed")
        try:
            self._drop_stalled()
            for key, events in self._selector.select(timeout_s):
                if not isinstance(key.data, PooledConnection):
                    key.data()
                    continue
                connection: L = key.data  # type: ignore[assignment]  # those that were taken
                if events & selectors.EVENT_WRITE:
                    self._guarded(connection, self._push)
                if events & selectors.EVENT_READ:
                    self._guarded(connection, self._pull)
        except _CLOSED as error:
            if not self._ended.is_set():
                raise
            self.close()  # of what came meanwhile
            raise TransferFailed("the sender was closed") from error

    def silent_for(self, connection: L, seconds: float) -> bool:
        """For so long it has said nothing, and read nothing of what it is told; nor is there anything to pull."""
        if time.monotonic() - max(connection.received_at, connection.progress_at) <= seconds:
            return False
        frames = connection.frames
        try:
            return frames is None or not frames.readable()
        except _CLOSED:  # by another thread: `poll` says it
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
        for connection in tuple(self._connections):
            self.drop(connection)

    def _guarded(self, connection: L, go_on: Callable[[L], None]) -> None:
        try:
            go_on(connection)
        except DataplaneError as error:
            if self._ended.is_set():
                raise TransferFailed("the sender was closed") from error
            self._on_lost(connection, str(error))

    def _pull(self, connection: L) -> None:
        """Take what it has said; raises `DataplaneError`."""
        frames = connection.frames
        if frames is None:  # let go of by an earlier event of the same batch
            return
        connection.received_at = time.monotonic()
        found = frames.pull()
        if found is not None:
            self._on_message(connection, found)

    def _push(self, connection: L) -> None:
        """Tell it what it has room for now. Raises `PeerLost`."""
        frames = connection.frames
        if frames is None:
            return
        unsent = connection.unsent  # another thread that lets go of it puts an empty one there
        while unsent:
            left = frames.push(unsent[0])
            if len(left) < len(unsent[0]):
                connection.progress_at = time.monotonic()
            if left:
                unsent[0] = left
                break
            unsent.popleft()
        if self._selector.get_key(frames).events != _wanted(connection):
            self._selector.modify(frames, _wanted(connection), connection)

    def _drop_stalled(self) -> None:
        for connection in tuple(self._connections):
            if connection.unsent and _stalled(connection):
                self._guarded(connection, self._push)  # there may be room since nobody looked
                if connection.unsent and _stalled(connection):
                    self._on_lost(connection, f"it has read nothing for {STALL_S:.1f} s of what it was told")
            elif (
                connection.frames is not None and connection.frames.mid_message and self.silent_for(connection, STALL_S)
            ):
                self._on_lost(connection, f"it has stood still for {STALL_S:.1f} s in the middle of what it said")
            elif (
                not connection.name
                and _stalled(connection)
                and (connection.received_at or self.silent_for(connection, STALL_S))
            ):
                self._on_lost(connection, f"it has not said within {STALL_S:.1f} s who it is")


def _stalled(connection: PooledConnection) -> bool:
    """With what it has to read, or to say first."""
    return time.monotonic() - connection.progress_at > STALL_S


def _wanted(connection: PooledConnection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
