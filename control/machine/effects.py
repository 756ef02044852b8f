"""What goes into the coordinator's machine, and what comes out: events, journal records, observations and effects.

The driver owns sockets, disk and clock, reports as events what they did, and carries effects out in the order in which
they were returned. That order is part of the contract: an effect that depends on a record is returned only after the
driver has answered `Persisted` for it. So a power cut cannot make a message untrue that was sent before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NewType

import msgspec

from ..protocol import (
    AgentId,
    Channel,
    Digest,
    Epoch,
    Outcome,
    RefusalCode,
    Request,
    RequestId,
    Role,
    RoundDone,
    ToAgent,
    ToCoordinator,
    Version,
)
from .states import RoundState

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


# -- records: what survives a restart -------------------------------------------------------------------------------


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record"):
    """Root of the journal records. Writing a record twice has the effect of writing it once."""


class EpochTaken(JournalRecord, frozen=True, tag="EpochTaken"):
    """`epoch` is granted to `holder`; every lower one is refused from now on."""

    channel: Channel
    epoch: Epoch
    holder: AgentId
    version: Version
    in_round: bool = msgspec.field(default=False, name="redrive")
    """True for the epoch of a retry or a later wave of a running round; otherwise the epoch begins a lease."""
    rollback: bool = False
    """True if the channel may go back to a lower version under this lease."""
    run: str = ""
    """The run to which the channel belongs from now on; empty: no change."""


class EpochRaised(JournalRecord, frozen=True, tag="EpochRaised"):
    """The channel's epoch is raised to `epoch`, far above one that an engine has seen and the journal did not know."""

    channel: Channel
    epoch: Epoch
    engine: AgentId
    """The engine that reported it."""


class Committed(JournalRecord, frozen=True, tag="Committed"):
    """`version` is committed: once this is durable, the channel makes it current (`Channel.make_current`)."""

    channel: Channel
    epoch: Epoch
    version: Version
    manifest: Digest
    table: Digest
    request: RequestId
    """Key of the `Publish`: if repeated, it is answered as committed from now on."""
    announced: Epoch
    """Epoch of that `Publish`; `epoch` is higher after a retry."""
    question: str
    """Digest of that `Publish` (`reply_cache.question`)."""
    engines: tuple[AgentId, ...]
    """Engines that hold the version, verified."""
    rollback: bool = False
    """True if the trainer asked to go back to this version, or to take it again."""


class RoundClosed(JournalRecord, frozen=True, tag="RoundClosed"):
    """How a round ended: the reply to a repeated `Publish` from now on. Replaces the reply of its `Committed`."""

    request: RequestId
    done: RoundDone
    question: str
    """Digest of the `Publish` (`reply_cache.question`)."""


class ChannelForgotten(JournalRecord, frozen=True, tag="ChannelForgotten"):
    """All of `channel` is forgotten, by an operator's command while no coordinator ran."""

    channel: Channel


class Probe(JournalRecord, frozen=True, tag="Probe"):
    """An empty record that shows whether the journal takes writes again."""


AnyRecord = EpochTaken | EpochRaised | Committed | RoundClosed | ChannelForgotten | Probe

# -- observations: what happened, for logs and metrics --------------------------------------------------------------


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the reports to logs and metrics. Carries no secrets and changes nothing.

    The tag is the name of the log line: part of the interface, so it does not depend on the class name.
    """


class AgentJoined(Observation, frozen=True, tag="agent_joined"):
    """An agent said `Hello` on a new connection or in a new incarnation."""

    agent: AgentId
    role: Role
    channel: Channel
    incarnation: str
    returning: bool
    """True if the incarnation was known and only its connection is new."""


class AgentLeft(Observation, frozen=True, tag="agent_left"):
    """An agent said `Bye`, fell silent or was replaced."""

    agent: AgentId
    role: Role
    channel: Channel
    reason: str


class LeaseGranted(Observation, frozen=True, tag="lease_granted"):
    """A trainer was granted the lease."""

    channel: Channel
    holder: AgentId
    epoch: Epoch
    version: Version


class LeaseEnded(Observation, frozen=True, tag="lease_ended"):
    """The channel is free again."""

    channel: Channel
    holder: AgentId
    epoch: Epoch
    reason: str


class EngineAhead(Observation, frozen=True, tag="engine_ahead"):
    """An engine has seen a higher epoch than the journal knew: an older or a new journal is in use."""

    channel: Channel
    engine: AgentId
    known: Epoch
    """Highest epoch before."""
    epoch: Epoch
    """Highest epoch now."""


class StateEntered(Observation, frozen=True, tag="state_entered"):
    """A round entered `state` after `seconds` in `left`."""

    channel: Channel
    version: Version
    epoch: Epoch
    left: RoundState
    state: RoundState
    seconds: float


class EngineFailed(Observation, frozen=True, tag="engine_failed"):
    """An engine failed in its round."""

    channel: Channel
    engine: AgentId
    version: Version
    epoch: Epoch
    step: str
    reason: str


class TransferRetried(Observation, frozen=True, tag="redriven"):
    """These engines are sent the version again under a new epoch."""

    channel: Channel
    version: Version
    epoch: Epoch
    engines: tuple[AgentId, ...]


class RoundEnded(Observation, frozen=True, tag="round_ended"):
    """A round is over; `done` is the trainer's report."""

    channel: Channel
    outcome: Outcome
    done: RoundDone
    stood_s: float = 0.0
    """`Publish.stood_s`."""
    nonfinite: int = 0
    """`Sent.nonfinite`."""
    differing: int = 0
    """`Sent.differing`."""


class ReadinessChanged(Observation, frozen=True, tag="readiness_changed"):
    """An engine entered or left the ready list."""

    channel: Channel
    engine: AgentId
    ready: bool
    reason: str


class RoundReadiness(Observation, frozen=True, tag="round_readiness"):
    """Engines entered or left the ready list as part of their round, perhaps thousands at once."""

    channel: Channel
    engines: tuple[AgentId, ...]
    ready: bool


class Refusal(Observation, frozen=True, tag="refusal"):
    """A message changed nothing."""

    agent: str
    message: str
    code: RefusalCode
    reason: str


class JournalChanged(Observation, frozen=True, tag="journal_changed"):
    """The journal stopped or began to take writes."""

    writable: bool
    reason: str


AnyObservation = (
    AgentJoined
    | AgentLeft
    | LeaseGranted
    | LeaseEnded
    | EngineAhead
    | StateEntered
    | EngineFailed
    | TransferRetried
    | RoundEnded
    | ReadinessChanged
    | RoundReadiness
    | Refusal
    | JournalChanged
)


# -- effects --------------------------------------------------------------------------------------------------------


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the infrequent effects."""


class Persist(Effect, frozen=True):
    """Make `record` durable, then say `Persisted(token)`, or `PersistFailed(token)`."""

    token: Token
    record: AnyRecord


class SendTo(msgspec.Struct, frozen=True):
    """Send to one connection. If it is gone, the driver reports `ConnectionLost` and goes on."""

    peer: Peer
    message: ToAgent
    blob: bytes | None = None


class SendToAll(msgspec.Struct, frozen=True):
    """Send the same to many connections, one after the other."""

    peers: tuple[Peer, ...]
    message: ToAgent


class Acknowledge(msgspec.Struct, frozen=True):
    """Send an `Ack` for each request, unless the next command to its agent implies it (session.py)."""

    requests: list[tuple[Peer, Request]]
    """Connection and request, in the order of arrival."""


class Evict(Effect, frozen=True):
    """Forget the connection: its later messages are answered as those of an unknown agent."""

    peer: Peer
    reason: str


class Observe(msgspec.Struct, frozen=True):
    """Report an observation to logs and metrics."""

    what: AnyObservation


AnyEffect = Persist | SendTo | SendToAll | Acknowledge | Evict | Observe
