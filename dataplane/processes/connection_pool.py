"""Connections of one session, read and written by one thread without blocking, so that a stalled peer delays no other.

A message is handed on when all of its bytes have arrived; outgoing bytes wait in a queue of their own for room in the
socket. A peer that stalls in the middle of either is dropped after `STALL_S`. Bytes that arrived while the pool was not
polled count: rank 0 plans for seconds, or may have been stopped itself.
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
"""Seconds for a peer that stalls in the middle of a message, or does not read, and for the first message of a new one.
"""
MAX_UNSENT: Final = 32
"""Parts of messages in a peer's queue. A peer that asks on and does not read is dropped before they fill the memory."""
_CLOSED: Final = (ValueError, LookupError, RuntimeError, OSError)
"""Exceptions of a selector or a queue that another thread closes meanwhile."""


class PooledConnection:
    """A peer that is connected, or is expected to connect."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Empty until the peer has said its name."""
        self.frames: Frames | None = None
        self.unsent: deque[memoryview] = deque()
        """Bytes that wait for room in the socket."""
        self.progress_at = 0.0
        """Monotonic time at which the socket last took bytes; or the peer connected."""
        self.received_at = 0.0
        """Monotonic time at which the last bytes of the peer came."""


class Watched(Protocol):
    """An object with a descriptor, as selectors take it."""

    def fileno(self) -> int:
        """The descriptor."""
        ...


L = TypeVar("L", bound=PooledConnection)


class ConnectionPool(Generic[L]):
    """The connections of one session. Used from one thread.

    `end` from any, after which `drop` and `close` may be too.
    """

    def __init__(self, on_message: Callable[[L, bytes], None], on_lost: Callable[[L, str], None]) -> None:
        """`on_message` gets every message, `on_lost` a peer that has to be dropped and the reason. It calls `drop`.

        A `DataplaneError` of `on_message` is such a reason.
        """
        self._on_message, self._on_lost = on_message, on_lost
        self._connections: dict[L, None] = {}
        self._ended = threading.Event()
        self._selector = selectors.DefaultSelector()

    def watch(self, what: Watched | int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever `what` is readable."""
        self._selector.register(what, selectors.EVENT_READ, ready)

    def add(self, connection: L, frames: Frames) -> None:
        """Serve a peer over established `frames`.

        Raises `TransferFailed`, and closes `frames`, when the pool is closed.
        """
        connection.frames, connection.progress_at = frames, time.monotonic()
        connection.unsent = deque()
        self._connections[connection] = None
        try:
            self._selector.register(frames, selectors.EVENT_READ, connection)
        except _CLOSED as error:
            self.drop(connection)
            raise TransferFailed("the sender was closed") from error

    def identify(self, guest: L, connection: L) -> None:
        """Move the connection of `guest`, whose name was unknown, to the peer that it has said to be."""
        connection.frames, connection.unsent, connection.progress_at = guest.frames, guest.unsent, time.monotonic()
        guest.frames, guest.unsent = None, deque()
        self._connections.pop(guest, None)
        self._connections[connection] = None
        if connection.frames is not None:
            self._selector.modify(connection.frames, _wanted(connection), connection)

    def send(self, connection: L, message: bytes) -> None:
        """Queue `message` and send what the socket takes now. Does nothing for a dropped peer.

        Raises `PeerLost` for a failed connection or a queue of `MAX_UNSENT` parts, `TransferFailed` when the pool is
        closed.
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
        """Close a peer's connection.

        `last` is sent before, if the socket takes it and no other message is half sent.
        """
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
        """Read and write what is ready within `timeout_s` seconds, a block for each connection, and drop stalled peers.

        Raises `TransferFailed` when the pool is closed meanwhile.
        """
        if self._ended.is_set():
            raise TransferFailed("the sender was closed")
        try:
            self._drop_stalled()
            for key, events in self._selector.select(timeout_s):
                if not isinstance(key.data, PooledConnection):
                    key.data()
                    continue
                connection: L = key.data  # type: ignore[assignment]  # registered by `add`
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
        """True when for `seconds` the peer has sent nothing and read nothing, and no bytes of it wait in the socket."""
        if time.monotonic() - max(connection.received_at, connection.progress_at) <= seconds:
            return False
        frames = connection.frames
        try:
            return frames is None or not frames.readable()
        except _CLOSED:  # by another thread: `poll` says it
            return False

    @property
    def ended(self) -> bool:
        """True once `end` was called; no message is delivered any more."""
        return self._ended.is_set()

    def end(self) -> None:
        """Make `poll` and `send` raise `TransferFailed`, from any thread. Only `drop` and `close` may follow."""
        self._ended.set()

    def close(self) -> None:
        """`end`, and close every connection that was not dropped."""
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
        """Read a block; deliver the message if it is complete. Raises `DataplaneError`."""
        frames = connection.frames
        if frames is None:  # let go of by an earlier event of the same batch
            return
        connection.received_at = time.monotonic()
        found = frames.pull()
        if found is not None:
            self._on_message(connection, found)

    def _push(self, connection: L) -> None:
        """Send what the socket takes now. Raises `PeerLost`."""
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
                self._guarded(connection, self._push)  # there may be room since the last poll
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
    """True when no outgoing byte, or no first message, has made progress for `STALL_S`."""
    return time.monotonic() - connection.progress_at > STALL_S


def _wanted(connection: PooledConnection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
