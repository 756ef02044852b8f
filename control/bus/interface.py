"""The interface of a bus to the coordinator's loop and an agent's client. sockets.py implements it over ZeroMQ.

A bus loses messages when connections break, and reports it where it can; it never duplicates or reorders the messages
of one connection. A sender that needs more repeats its request until it is answered.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from ..machine import MessageReceived, Peer, Principal, Refusal
from ..protocol import AgentId, ProtocolError, RefusalCode, Refused, RequestId, ToAgent, ToCoordinator, WrongProtocol


class SendOutcome(enum.Enum):
    """The fate of a message to an agent."""

    SENT = "sent"
    """Handed to the connection. The message may still be lost with it."""
    QUEUED = "queued"
    """The peer is slow; kept in order, within bounds."""
    GONE = "gone"
    """The connection is gone, or was slow for too long; its queue is dropped."""


class Rejected(msgspec.Struct, frozen=True):
    """Bytes arrived that are no message for this side. They may be answered, not trusted.

    After `WrongProtocol` any answer will do: its header has the protocol number of this side.
    """

    peer: Peer
    error: ProtocolError
    principal: Principal | None = None


class TrustRevoked(msgspec.Struct, frozen=True):
    """An agent was dropped from the allow-list, or its role or channels there changed."""

    agent: AgentId
    reason: str


class ConnectionRejected(msgspec.Struct, frozen=True):
    """A connection ended in its handshake: its key is not trusted, or it took too long."""

    reason: str


class Throttled(msgspec.Struct, frozen=True):
    """An agent sends too many messages: some are dropped unread, or all. Reported once for each of the two."""

    agent: AgentId
    reason: str


Incoming = MessageReceived | Rejected | TrustRevoked | ConnectionRejected | Throttled


class CoordinatorBus(Protocol):
    """The coordinator's side. One thread owns it; only `wake` may be called from another, or from a signal handler."""

    def poll(self, timeout_s: float, gather_s: float = 0.0) -> Sequence[Incoming]:
        """Return messages as soon as there are any, or nothing after `timeout_s` or `wake`.

        `gather_s` is a hint to wait that long first, so that one call returns many.
        """
        ...

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> SendOutcome:
        """Send without blocking."""
        ...

    def send_to_all(self, peers: Sequence[Peer], message: ToAgent) -> Sequence[Peer]:
        """Send to each of `peers` without blocking. Returns the peers with `SendOutcome.GONE`."""
        ...

    @property
    def closed(self) -> int:
        """Number of connections that have ended. Sending shows which."""
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

    def open(self, endpoint_index: int = 0) -> None:
        """Drop the connection and begin a new one, to the endpoint of that index. Does not block."""
        ...

    def poll(self, timeout_s: float) -> Sequence[tuple[ToAgent, bytes | None] | ProtocolError]:
        """Return messages as soon as there are any, or nothing after `timeout_s` or `wake`."""
        ...

    def send(self, message: ToCoordinator, blob: bytes | None = None) -> bool:
        """Send without blocking; False if not connected, or if too many messages are under way."""
        ...

    def wake(self) -> None:
        """End the running `poll`, or the next one."""
        ...

    def close(self) -> None:
        """Drop the connection, after a moment for the last message to leave."""
        ...


REJECTED_KEY: Final = RequestId("rejected")
"""`Refused.request` in the reply to bytes that are no message."""
UNTRUSTED_KEY: Final = RequestId("untrusted")
"""`Refused.request` in the reply to any message of a connection whose key is not trusted."""


class UntrustedKey(ProtocolError):
    """A message on a connection whose key the allow-list does not have, or not any more."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        super().__init__(f"the key of this connection ({fingerprint}) is not trusted here")


def reply_to_rejected(item: Rejected) -> Refused:
    """The reply to a sender of bytes that are no message."""
    key = UNTRUSTED_KEY if isinstance(item.error, UntrustedKey) else REJECTED_KEY
    return Refused(request=key, code=_code(item), reason=str(item.error))


def refusal_observation(item: Rejected | Throttled | ConnectionRejected) -> Refusal:
    """The observation, for logs and metrics, of a rejected message or connection."""
    match item:
        case Rejected():
            agent = item.principal.name if item.principal else "?"
            return Refusal(agent=agent, message="?", code=_code(item), reason=str(item.error))
        case Throttled():
            return Refusal(agent=item.agent, message="?", code=RefusalCode.NOT_ALLOWED, reason=item.reason)
        case ConnectionRejected():
            return Refusal(agent="?", message="?", code=RefusalCode.NOT_ALLOWED, reason=item.reason)


def _code(item: Rejected) -> RefusalCode:
    return RefusalCode.PROTOCOL_MISMATCH if isinstance(item.error, WrongProtocol) else RefusalCode.NOT_ALLOWED
