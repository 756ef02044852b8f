"""A bus without sockets: one coordinator and any number of links in one process, for tests.

Messages pass through the codec, so only messages fit for the wire are delivered. A test can cut links and lose
messages; nothing else is ever lost.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from weightbus.control.bus.interface import Rejected, SendOutcome
from weightbus.control.machine.effects import MessageReceived, Peer
from weightbus.control.protocol import codec
from weightbus.control.protocol.errors import ProtocolError
from weightbus.control.protocol.messages import Message, ToAgent, ToCoordinator


class MemoryBus:
    """The coordinator's side; `link` makes an agent's side."""

    def __init__(self) -> None:
        self.lose: Callable[[Message], bool] = lambda _message: False
        """Returns True for messages to lose, in either direction."""
        self._changed = threading.Condition()
        self._receive_queue: deque[tuple[Peer, codec.Frames]] = deque()
        self._links: dict[Peer, MemoryLink] = {}
        self._names = itertools.count(1)
        self._woken = False
        self._closed = False
        self.closed = 0
        """Number of connections that have ended; set by tests."""

    def link(self) -> MemoryLink:
        """An agent's side, not connected yet."""
        return MemoryLink(self)

    def poll(self, timeout_s: float, gather_s: float = 0.0) -> Sequence[MessageReceived | Rejected]:
        """Return messages as soon as there are any, or nothing after `timeout_s` or `wake`."""
        del gather_s
        with self._changed:
            self._changed.wait_for(lambda: self._receive_queue or self._woken, timeout_s)
            self._woken = False
            taken = list(self._receive_queue)
            self._receive_queue.clear()
        return [_read(peer, frames) for peer, frames in taken]

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> SendOutcome:
        """Send without blocking."""
        frames = codec.TO_AGENT.encode(message, blob)
        with self._changed:
            link = self._links.get(peer)
        if link is None:
            return SendOutcome.GONE
        if not self.lose(message):
            link.take(peer, frames)
        return SendOutcome.SENT

    def send_to_all(self, peers: Sequence[Peer], message: ToAgent) -> Sequence[Peer]:
        """Send to one after the other."""
        return [peer for peer in peers if self.send(peer, message) is SendOutcome.GONE]

    def forget(self, peer: Peer) -> None:
        """Nothing is ever queued here."""

    def wake(self) -> None:
        """End the running `poll`, or the next one."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Every link is cut, and new ones lead nowhere."""
        self._closed = True
        self.cut()

    def cut(self) -> None:
        """Break every connection, as a restart would. What was under way is lost."""
        with self._changed:
            self._links.clear()
            self._receive_queue.clear()

    def inject(self, link: MemoryLink, frames: codec.Frames) -> None:
        """Put raw frames on the wire of `link`, for tests of what cannot be decoded."""
        if link.peer is not None:
            self._accept(link.peer, frames)

    def connect(self, link: MemoryLink) -> Peer:
        """Called by links."""
        peer = Peer(next(self._names).to_bytes(5, "big"))
        with self._changed:
            if not self._closed:
                self._links[peer] = link
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Called by links."""
        with self._changed:
            self._links.pop(peer, None)

    def carry(self, peer: Peer, message: ToCoordinator, blob: bytes | None) -> bool:
        """Called by links."""
        frames = codec.TO_COORDINATOR.encode(message, blob)
        if self.lose(message):
            return True
        return self._accept(peer, frames)

    def _accept(self, peer: Peer, frames: codec.Frames) -> bool:
        with self._changed:
            if peer not in self._links:
                return False
            self._receive_queue.append((peer, frames))
            self._changed.notify_all()
        return True


class MemoryLink:
    """An agent's side. Implements `interface.AgentLink`."""

    def __init__(self, bus: MemoryBus) -> None:
        self.peer: Peer | None = None
        self._bus = bus
        self._changed = threading.Condition()
        self._receive_queue: deque[codec.Frames] = deque()
        self._woken = False

    def open(self, endpoint_index: int = 0) -> None:
        """Connect anew, dropping the connection there was. There is one place only."""
        del endpoint_index
        self.close()
        self.peer = self._bus.connect(self)

    def poll(self, timeout_s: float) -> Sequence[tuple[ToAgent, bytes | None] | ProtocolError]:
        """Return messages as soon as there are any, or nothing after `timeout_s` or `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._receive_queue or self._woken, timeout_s)
            self._woken = False
            taken = list(self._receive_queue)
            self._receive_queue.clear()
        return [_read_answer(frames) for frames in taken]

    def send(self, message: ToCoordinator, blob: bytes | None = None) -> bool:
        """Send without blocking; False if not connected."""
        return self.peer is not None and self._bus.carry(self.peer, message, blob)

    def wake(self) -> None:
        """End the running `poll`, or the next one."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the connection."""
        if self.peer is not None:
            self._bus.disconnect(self.peer)
            self.peer = None
        with self._changed:
            self._receive_queue.clear()

    def take(self, peer: Peer, frames: codec.Frames) -> None:
        """Called by the bus. What arrives for a connection that was dropped is dropped too."""
        with self._changed:
            if peer == self.peer:
                self._receive_queue.append(frames)
                self._changed.notify_all()


def _read(peer: Peer, frames: codec.Frames) -> MessageReceived | Rejected:
    try:
        message, blob = codec.TO_COORDINATOR.decode(frames)
    except ProtocolError as error:
        return Rejected(peer, error)
    return MessageReceived(peer, message, blob)


def _read_answer(frames: codec.Frames) -> tuple[ToAgent, bytes | None] | ProtocolError:
    try:
        return codec.TO_AGENT.decode(frames)
    except ProtocolError as error:
        return error
