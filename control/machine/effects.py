"""What the coordinator asks of the world, and what it wants written down.

Effects are carried out in the order in which they were returned, and that order is part of the contract: nothing that
depends on a record is in a tuple before the driver has answered `Persisted` for it. So no message leaves that a power
cut could make untrue.
"""

from __future__ import annotations

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
    Version,
)
from .events import Peer, Token
from .states import RoundState

# -- records: what survives a restart -------------------------------------------------------------------------------


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="record"):
    """Root of what is made durable. Writing the same record twice is the same as writing it once."""


class EpochTaken(JournalRecord, frozen=True, tag="EpochTaken"):
    """`epoch` belongs to `holder` from now on; every lower one is refused for ever."""

    channel: Channel
    epoch: Epoch
    holder: AgentId
    version: Version
    redrive: bool = False
    """The epoch re-drives engines of a running round; otherwise it begins a lease."""
    rollback: bool = False
    """Under this lease the channel may go back to a lower version."""


class EpochRaised(JournalRecord, frozen=True, tag="EpochRaised"):
    """An engine has seen an epoch that this journal did not know of: `epoch`, and the next one, are far above it."""

    channel: Channel
    epoch: Epoch
    engine: AgentId
    """Who said so."""


class Committed(JournalRecord, frozen=True, tag="Committed"):
    """`version` is what the channel serves from now on."""

    channel: Channel
    epoch: Epoch
    version: Version
    manifest: Digest
    table: Digest
    request: RequestId
    """The `Publish` that asked for it: asked again, it is answered as committed from now on, whatever comes later."""
    announced: Epoch
    """The epoch of that `Publish`: `epoch` is higher where engines were driven again."""
    question: str
    """Of that `Publish` (`answers.question`)."""
    engines: tuple[AgentId, ...]
    """Who holds it, verified."""
    rollback: bool = False
    """The trainer asked for it although the channel had this version, or a higher one, already."""


class RoundClosed(JournalRecord, frozen=True, tag="RoundClosed"):
    """How a round ended: the answer that the same `Publish` gets from now on. Replaces that of its `Committed`."""

    request: RequestId
    done: RoundDone
    question: str
    """Of the `Publish` (`answers.question`)."""


class ChannelForgotten(JournalRecord, frozen=True, tag="ChannelForgotten"):
    """Nothing is known of `channel` any more: somebody in charge said so, while no coordinator ran."""

    channel: Channel


class Probe(JournalRecord, frozen=True, tag="Probe"):
    """Nothing new; shows whether the journal takes writes again."""


AnyRecord = EpochTaken | EpochRaised | Committed | RoundClosed | ChannelForgotten | Probe

# -- observations: what happened, for logs and metrics --------------------------------------------------------------


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Root of what is told to logs and metrics. Carries no secrets and changes nothing."""

    @property
    def event(self) -> str:
        """Name of the log line: part of the interface, and so independent of the class name."""
        return str(self.__struct_config__.tag)


class AgentJoined(Observation, frozen=True, tag="agent_joined"):
    """An agent said `Hello` on a new connection or in a new incarnation."""

    agent: AgentId
    role: Role
    channel: Channel
    incarnation: str
    returning: bool
    """The incarnation was known: only its connection is new."""


class AgentLeft(Observation, frozen=True, tag="agent_left"):
    """An agent said `Bye`, fell silent or was replaced."""

    agent: AgentId
    role: Role
    channel: Channel
    reason: str


class LeaseGranted(Observation, frozen=True, tag="lease_granted"):
    """A trainer may publish."""

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
    """An engine has seen a higher epoch than the journal knew: an older journal was restored, or one begun anew."""

    channel: Channel
    engine: AgentId
    known: Epoch
    """The highest until then."""
    epoch: Epoch
    """... and now."""


class StateEntered(Observation, frozen=True, tag="state_entered"):
    """A round went on to `state`; it spent `seconds` in `left`."""

    channel: Channel
    version: Version
    epoch: Epoch
    left: RoundState
    state: RoundState
    seconds: float


class EngineFailed(Observation, frozen=True, tag="engine_failed"):
    """An engine did not keep up with its round."""

    channel: Channel
    engine: AgentId
    version: Version
    epoch: Epoch
    step: str
    reason: str


class TransferRetried(Observation, frozen=True, tag="redriven"):
    """These engines are sent everything again under a new epoch."""

    channel: Channel
    version: Version
    epoch: Epoch
    engines: tuple[AgentId, ...]


class RoundEnded(Observation, frozen=True, tag="round_ended"):
    """A round is over; `done` is what the trainer is told."""

    channel: Channel
    outcome: Outcome
    done: RoundDone
    stood_s: float = 0.0
    """As the trainer said in `Publish`."""


class ReadinessChanged(Observation, frozen=True, tag="readiness_changed"):
    """An engine entered or left the ready list."""

    channel: Channel
    engine: AgentId
    ready: bool
    reason: str


class RoundReadiness(Observation, frozen=True, tag="round_readiness"):
    """Engines entered or left the ready list as a part of their round: thousands at once; its end tells more."""

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
    """Root of the seldom effects."""


class Persist(Effect, frozen=True):
    """Make `record` durable, then say `Persisted(token)`, or `PersistFailed(token)`."""

    token: Token
    record: AnyRecord


class SendTo(msgspec.Struct, frozen=True):
    """Send to one connection. If it is gone, say `PeerLost` and go on."""

    peer: Peer
    message: ToAgent
    blob: bytes | None = None


class SendToAll(msgspec.Struct, frozen=True):
    """Send the same to many connections, one after the other."""

    peers: tuple[Peer, ...]
    message: ToAgent


class Acknowledge(msgspec.Struct, frozen=True):
    """Say `Ack` for each of these, unless what its agent is told next says the same (ack_batching.py)."""

    requests: list[tuple[Peer, Request]]
    """By whom, and what, in the order in which they came."""


class Evict(Effect, frozen=True):
    """Forget the connection: what still arrives from it is answered as from a stranger."""

    peer: Peer
    reason: str


class Observe(msgspec.Struct, frozen=True):
    """For logs and metrics."""

    what: AnyObservation


AnyEffect = Persist | SendTo | SendToAll | Acknowledge | Evict | Observe
