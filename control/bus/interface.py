"""What the coordinator's loop and an agent's client need of a bus. router.py does it with ZeroMQ, in_memory.py without.

A bus loses messages when connections break, and says so where it can; it never doubles or reorders those of one
connection. Whoever needs more repeats its request until it is answered.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..machine import MessageReceived, Peer, Principal
from ..protocol import AgentId, ProtocolError, ToAgent, ToCoordinator


class Delivery(enum.Enum):
    """What became of a message to an agent."""

    SENT = "sent"
    """Given to the connection. It may still be lost with it."""
    QUEUED = "queued"
    """The peer is slow; kept in order, within bounds."""
    GONE = "gone"
    """The connection is no more, or has been slow for too long. Nothing of its queue is kept."""


class Rejected(msgspec.Struct, frozen=True):
    """Something came in that is not a message for this side. It may be answered, not trusted.

    For `WrongProtocol` any answer will do: its header tells the peer which number is spoken here.
    """

    peer: Peer
    error: ProtocolError
    principal: Principal | None = None


class Distrusted(msgspec.Struct, frozen=True):
    """An agent was taken off the allow-list, or is trusted with something else from now on."""

    agent: AgentId
    reason: str


class TurnedAway(msgspec.Struct, frozen=True):
    """A connection ended before anything could be said on it: nobody's key, or no handshake in time."""

    reason: str


class Throttled(msgspec.Struct, frozen=True):
    """An agent says too much: from now on some of it is dropped unread, or all. Told once for each."""

    agent: AgentId
    reason: str


Incoming = MessageReceived | Rejected | Distrusted | TurnedAway | Throttled


class CoordinatorBus(Protocol):
    """The coordinator's side. One thread owns it; only `wake` may be called from another, or from a signal handler."""

    def poll(self, timeout_s: float, gather_s: float = 0.0) -> Sequence[Incoming]:
        """What came in, at once if anything did; nothing after `timeout_s` or `wake`.

        With `gather_s` it looks only after so long, so that one look finds much. A hint: it need not be taken.
        """
        ...

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> Delivery:
        """Send without ever waiting."""
        ...

    def send_to_all(self, peers: Sequence[Peer], message: ToAgent) -> Sequence[Peer]:
        """Send to one after the other, without ever waiting. Returns those whose `Delivery` was `GONE`."""
        ...

    @property
    def closed(self) -> int:
        """How many connections have ended so far. Whose they were is found out by sending."""
        ...

    def forget(self, peer: Peer) -> None:
        """Drop what is queued for `peer`."""
        ...

    def wake(self) -> None:
        """End the running `poll`, or the next one."""
        ...

    def close(self) -> None:
        """Release the sockets; within a second."""
        ...


class AgentLink(Protocol):
    """An agent's side: one connection at a time. One thread owns it; only `wake` may be called from another."""

    def open(self, place: int = 0) -> None:
        """Connect anew, to the endpoint of that number, dropping the connection there was. Does not wait for it."""
        ...

    def poll(self, timeout_s: float) -> Sequence[tuple[ToAgent, bytes | None] | ProtocolError]:
        """What came in, at once if anything did; nothing after `timeout_s` or `wake`."""
        ...

    def send(self, message: ToCoordinator, blob: bytes | None = None) -> bool:
        """Send without waiting; False when it cannot go now (not connected, or too much is under way)."""
        ...

    def wake(self) -> None:
        """End the running `poll`, or the next one."""
        ...

    def close(self) -> None:
        """Drop the connection; what was sent just before gets a moment to leave."""
        ...
