"""What may happen to the coordinator: the only things that `Coordinator.handle` takes.

Whoever drives the machine owns sockets, disk and clock, and tells it here what they did.
"""

from __future__ import annotations

from typing import NewType

import msgspec

from .messages import ToCoordinator

Peer = NewType("Peer", bytes)
"""One connection, by the id that the ROUTER gave it. A reconnected agent has a new one."""

Token = NewType("Token", int)
"""Ties a `Persist` effect to the event that says how it went."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the events."""


class MessageReceived(Event, frozen=True):
    """A decoded message came in."""

    peer: Peer
    message: ToCoordinator
    blob: bytes | None = None
    principal: str = ""
    """The agent that the connection's key belongs to, where keys are used: `Hello` may name no other."""


class PeerLost(Event, frozen=True):
    """A connection is gone, or takes no more messages. Its agent may come back on another one."""

    peer: Peer


class Tick(Event, frozen=True):
    """The time that `Coordinator.next_deadline` named has come. Early or repeated ticks do no harm."""


class Persisted(Event, frozen=True):
    """The record of `token` is on disk and survives a power cut."""

    token: Token


class PersistFailed(Event, frozen=True):
    """The record of `token` could not be written."""

    token: Token
    reason: str


class StopRequested(Event, frozen=True):
    """Grant nothing more and bring running rounds to an end; `Coordinator.stopped` says when that is so."""


AnyEvent = MessageReceived | PeerLost | Tick | Persisted | PersistFailed | StopRequested
