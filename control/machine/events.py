"""What may happen to the coordinator: the only things that `Coordinator.handle` takes.

Whoever drives the machine owns sockets, disk and clock, and tells it here what they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NewType

import msgspec

from ..protocol import AgentId, Channel, Role, ToAgent, ToCoordinator

Peer = NewType("Peer", bytes)
"""One connection, by the id that the ROUTER gave it. A reconnected agent has a new one."""

Token = NewType("Token", int)
"""Ties a `Persist` effect to the event that says how it went."""


ANY_CHANNEL: Final = Channel("*")
"""Among a principal's channels: all of them."""


class Principal(msgspec.Struct, frozen=True):
    """Whom a connection's key belongs to, and what the allow-list trusts that agent with."""

    name: AgentId
    role: Role
    channels: tuple[Channel, ...]

    def covers(self, channel: Channel) -> bool:
        """Whether it may act in `channel`."""
        return ANY_CHANNEL in self.channels or channel in self.channels


class MessageReceived(msgspec.Struct, frozen=True):
    """A decoded message came in. Made by the bus, thousands in a second, and taken as it is."""

    peer: Peer
    message: ToCoordinator
    blob: bytes | None = None
    principal: Principal | None = None
    """Whom the connection's key belongs to, as of now; null where no keys are used."""


class Burst(msgspec.Struct, frozen=True):
    """Messages that came in together, in order.

    The same as one after the other, but what is only noted of them, and asked of nobody, is noted once.
    """

    messages: Sequence[MessageReceived]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the other events."""


class ConnectionLost(Event, frozen=True):
    """A connection is gone, or takes no more messages. Its agent may come back on another one."""

    peer: Peer


class Unsent(Event, frozen=True):
    """`message` is none that could travel: it reached none of `peers`, and never will."""

    peers: tuple[Peer, ...]
    message: ToAgent
    reason: str


class TrustLost(Event, frozen=True):
    """The allow-list does not trust `agent` any more, or not with the same."""

    agent: AgentId
    reason: str


class Tick(Event, frozen=True):
    """The time that `Coordinator.next_deadline` named has come. Early or repeated ticks do no harm."""


class Persisted(Event, frozen=True):
    """The record of `token` is on disk and survives a power cut."""

    token: Token


class PersistFailed(Event, frozen=True):
    """The record of `token` could not be written."""

    token: Token
    reason: str
    again: bool = True
    """Whether it may be written later; else the journal is well, and does not take this one."""


class StopRequested(Event, frozen=True):
    """Grant nothing more and bring running rounds to an end; `Coordinator.stopped` says when that is so."""


AnyEvent = (
    MessageReceived | Burst | ConnectionLost | Unsent | TrustLost | Tick | Persisted | PersistFailed | StopRequested
)
