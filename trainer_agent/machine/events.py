"""Events that a publication takes, effects that it asks for, and the reasons for which it ends.

Plain values. publication.py decides which effects follow which event; driver.py carries the effects out.
"""

from __future__ import annotations

import enum

import msgspec

from weightbus.control.protocol import EngineReport, HeldVersion, Outcome, ReceivingEngine, RefusalCode


class EndReason(enum.StrEnum):
    """How a publication ended, by what the caller can do about it."""

    COMMITTED = "committed"
    """The version is durable, and at least the required engines serve it."""
    ABORTED = "aborted"
    """The round was aborted; engines serve what they served. The version may be published again."""
    REFUSED = "refused"
    """The coordinator does not allow the version; a retry does not help."""
    NOT_TRUSTED = "not_trusted"
    """The coordinator does not trust this trainer's key any more. Whether the version was committed is unknown here."""
    CHANNEL_TAKEN = "channel_taken"
    """The channel belongs to another run."""
    LEASE_BUSY = "lease_busy"
    """Another trainer held the channel until the deadline."""
    COORDINATOR_LOST = "coordinator_lost"
    """The coordinator did not answer. Whether the version was committed is unknown here."""
    SOURCE_FAILED = "source_failed"
    """The weights could not be read; the round was abandoned."""
    WEIGHTS_CHANGED = "weights_changed"
    """The weights changed while they were read; the round was abandoned. The source is intact."""
    NOT_FINITE = "not_finite"
    """Elements of the weights are NaN or infinite, and the settings refuse such versions; no engine heard of it."""
    REPLICAS_DIFFER = "replicas_differ"
    """Ranks hold different replicas of a parameter, and the settings refuse that; no round was begun."""
    SUPERSEDED = "superseded"
    """A newer snapshot took this one's place before its round began."""
    INTERNAL = "internal"
    """A step failed with an unexpected exception; the round was abandoned."""


# -- events ------------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True):
    """Base class of events."""


class PublishRequested(Event, frozen=True):
    """The caller asked for the version to be published."""


class LeaseObtained(Event, frozen=True):
    """The coordinator granted the lease under `epoch`."""

    epoch: int
    committed: HeldVersion | None = None
    may_defer_digests: bool = False
    """True if every engine can wait for the digest table, so that the round may be announced before the table is known.
    """


class RequestDenied(Event, frozen=True):
    """The coordinator refused the last request."""

    code: RefusalCode
    reason: str
    retry_after_s: float = 0.0


class RequestTimedOut(Event, frozen=True):
    """The last request was not answered in time."""

    reason: str


class DigestsReady(Event, frozen=True):
    """The weights are digested; `table` is the digest of the digest table.

    Deferred digests become ready once for all attempts, in any state of the round.
    """

    table: str


class DigestsUnavailable(Event, frozen=True):
    """Deferred digests cannot be computed in place any more. The round begins anew, with digests of buckets."""

    reason: str


class AttemptFailed(Event, frozen=True):
    """A step on the trainer's side failed for good."""

    ending: EndReason
    reason: str


class RoundAccepted(Event, frozen=True):
    """The coordinator runs the round, or confirms again that it does."""


class SendRequested(Event, frozen=True):
    """The coordinator asks for the buckets to be delivered to `receivers` under `epoch`."""

    epoch: int
    version: int
    receivers: tuple[ReceivingEngine, ...]
    deadline_s: float


class EnginesWithdrawn(Event, frozen=True):
    """The coordinator excluded `engines` from the transfer of `epoch`. Values are reasons."""

    epoch: int
    engines: dict[str, str]


class DeliveryEnded(Event, frozen=True):
    """All senders of `epoch` have ended. `failed` names the engines that did not receive everything.

    `spared` are those of them to which nothing was sent because another engine failed first.
    """

    epoch: int
    failed: dict[str, str]
    spared: tuple[str, ...] = ()


class ReportAcknowledged(Event, frozen=True):
    """The coordinator has acknowledged the delivery report of `epoch`."""

    epoch: int


class RoundDoneReceived(Event, frozen=True):
    """The coordinator reports the end of a round."""

    epoch: int
    version: int
    outcome: Outcome
    reason: str
    engines: tuple[EngineReport, ...]
    seconds: dict[str, float]


class EnginesCounted(Event, frozen=True):
    """Engines of the channel: those that could take a version now, and the others with their reasons."""

    usable: tuple[str, ...]
    missing: dict[str, str]
    starting: bool = False
    """True if a server of `missing` has held no version since its launch: it may come yet."""
    known: bool = True
    """False if the coordinator's answer did not tell."""


class Reconnected(Event, frozen=True):
    """The session with the coordinator was established anew after a restart or a lost connection."""

    committed: HeldVersion | None
    restarted: bool
    """True if the coordinator runs in another process generation: it may have forgotten the round."""


class Tick(Event, frozen=True):
    """The machine's deadline has passed."""


AnyEvent = (
    PublishRequested
    | LeaseObtained
    | RequestDenied
    | RequestTimedOut
    | DigestsReady
    | DigestsUnavailable
    | AttemptFailed
    | RoundAccepted
    | SendRequested
    | EnginesWithdrawn
    | DeliveryEnded
    | ReportAcknowledged
    | RoundDoneReceived
    | EnginesCounted
    | Reconnected
    | Tick
)


# -- effects -----------------------------------------------------------------------------------------------------------


class Effect(msgspec.Struct, frozen=True):
    """Base class of effects."""


class RequestLease(Effect, frozen=True):
    """Request the lease. Answered by `LeaseObtained`, `RequestDenied` or `RequestTimedOut`."""


class AssembleBuckets(Effect, frozen=True):
    """Assemble and digest the weights on all ranks. Answered by `DigestsReady` or `AttemptFailed`."""


class AnnounceRound(Effect, frozen=True):
    """Upload the blobs that the coordinator lacks and request the round of `epoch`. A retry is the same request.

    Answered by `RoundAccepted`, `RequestDenied`, `RequestTimedOut` or `AttemptFailed`.
    """

    epoch: int
    digests_deferred: bool = False
    """True if the round is announced without its digest table: `DigestsReady` or `DigestsUnavailable` precedes
    `DeliveryEnded`."""


class StartDelivery(Effect, frozen=True):
    """Open the senders, offer them to the coordinator and deliver all buckets.

    Answered by `RequestDenied` or `RequestTimedOut` when the offer is not taken, otherwise by `DeliveryEnded` or
    `AttemptFailed`.
    """

    epoch: int
    receivers: tuple[ReceivingEngine, ...]
    deadline_s: float


class DropReceivers(Effect, frozen=True):
    """Stop waiting for `engines`. Not answered. Engines that have received everything are not affected."""

    engines: dict[str, str]


class StopDelivery(Effect, frozen=True):
    """Close the senders at once."""


class AwaitDigests(Effect, frozen=True):
    """Wait for deferred digests without a delivery.

    Answered by `DigestsReady`, `DigestsUnavailable` or `AttemptFailed`.
    """


class ReportDelivery(Effect, frozen=True):
    """Report to the coordinator that the transfer of `epoch` has ended on the trainer's side.

    Answered by `ReportAcknowledged`, `RequestDenied` or `RequestTimedOut`.
    """

    epoch: int
    failed: dict[str, str]
    spared: tuple[str, ...] = ()
    table: str = ""
    """Digest of the digest table, which is uploaded with the report; empty where the announcement already named it."""


class AbandonRound(Effect, frozen=True):
    """Tell the coordinator that the round of `epoch` cannot go on. Not answered."""

    epoch: int
    reason: str


class CountEngines(Effect, frozen=True):
    """Ask the coordinator which engines could take a version. Answered by `EnginesCounted` or `RequestTimedOut`."""


class ReleaseLease(Effect, frozen=True):
    """Release the lease of `epoch` unused. Not answered."""

    epoch: int


AnyEffect = (
    RequestLease
    | AssembleBuckets
    | AnnounceRound
    | StartDelivery
    | DropReceivers
    | StopDelivery
    | AwaitDigests
    | ReportDelivery
    | AbandonRound
    | CountEngines
    | ReleaseLease
)
Effects = tuple[AnyEffect, ...]
