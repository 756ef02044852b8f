"""The events that `Coordinator.handle` takes.

The driver owns sockets, disk and clock, and reports here what they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NewType

import msgspec

from ..protocol import AgentId, Channel, Role, ToAgent, ToCoordinator

Peer = NewType("Peer", bytes)
"""One connection, by the id that the ROUTER gave it. A reconnected agent has a new one."""

Token = NewType("Token", int)
"""Ties a `Persist` effect to the event with its result."""


ANY_CHANNEL: Final = Channel("*")
"""Among a principal's channels, stands for all channels."""


class Principal(msgspec.Struct, frozen=True):
    """The owner of a connection's key by the allow-list: an agent's name, its role and its channels."""

    name: AgentId
    role: Role
    channels: tuple[Channel, ...]

    def covers(self, channel: Channel) -> bool:
        """Whether the principal may act in `channel`."""
        return ANY_CHANNEL in self.channels or channel in self.channels


class MessageReceived(msgspec.Struct, frozen=True):
    """A decoded message arrived. The bus makes thousands of these in a second."""

    peer: Peer
    message: ToCoordinator
    blob: bytes | None = None
    principal: Principal | None = None
    """Present owner of the connection's key; None without keys."""


class Burst(msgspec.Struct, frozen=True):
    """Messages that arrived together, in order.

    The result is that of one event for each, but each channel is flushed once, after the last one.
    """

    messages: Sequence[MessageReceived]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the other events."""


class ConnectionLost(Event, frozen=True):
    """A connection is gone, or takes no more messages. Its agent may return on another one."""

    peer: Peer


class Unsent(Event, frozen=True):
    """`message` cannot be encoded for the wire: it will reach none of `peers`."""

    peers: tuple[Peer, ...]
    message: ToAgent
    reason: str


class TrustLost(Event, frozen=True):
    """The allow-list has dropped `agent`, or changed its role or channels."""

    agent: AgentId
    reason: str


class Tick(Event, frozen=True):
    """The time of `Coordinator.next_deadline` has come. Early or repeated ticks have no effect."""


class Persisted(Event, frozen=True):
    """The record of `token` is on disk and survives a power cut."""

    token: Token


class PersistFailed(Event, frozen=True):
    """The record of `token` could not be written."""

    token: Token
    reason: str
    again: bool = True
    """True if a later try may succeed; False if the journal is well and rejects this record."""


class StopRequested(Event, frozen=True):
    """Grant no more leases and end the running rounds; `Coordinator.stopped` is True once that is done."""


AnyEvent = (
    MessageReceived | Burst | ConnectionLost | Unsent | TrustLost | Tick | Persisted | PersistFailed | StopRequested
)
