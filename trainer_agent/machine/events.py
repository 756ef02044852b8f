"""What can happen to a publication (events), how it can end, and what its driver is asked to do (effects).

Plain values. publication.py decides which effects follow which event; driver.py carries them out.
"""

from __future__ import annotations

import enum

import msgspec

from weightbus.control.protocol import EngineReport, HeldVersion, Outcome, ReceivingEngine, RefusalCode


class EndReason(enum.StrEnum):
    """How a publication ended, by what the caller can do about it."""

    COMMITTED = "committed"
    """The version is durable and at least the required engines serve it."""
    ABORTED = "aborted"
    """The round was called off; engines serve what they served. The version may be published again."""
    REFUSED = "refused"
    """The coordinator does not allow it; asking again does not help."""
    LEASE_BUSY = "lease_busy"
    """Another trainer held the channel until the deadline."""
    COORDINATOR_LOST = "coordinator_lost"
    """No answer. Whether the version was committed is not known here."""
    SOURCE_FAILED = "source_failed"
    """The weights could not be read; the round was given up."""
    WEIGHTS_CHANGED = "weights_changed"
    """They were stepped while they were read; the round was given up. The source is well."""
    SUPERSEDED = "superseded"
    """A newer snapshot took its place before its round began."""
    INTERNAL = "internal"
    """A step failed in a way that nobody foresaw; the round was given up."""


# -- events ------------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True):
    """Root of what can happen."""


class PublishAsked(Event, frozen=True):
    """A caller wants the version published."""


class GotLease(Event, frozen=True):
    """The lease is ours under `epoch`."""

    epoch: int
    committed: HeldVersion | None = None
    open: bool = False
    """Every engine can wait for the digest table: the version may be announced before it is known."""


class RequestRefusal(Event, frozen=True):
    """The last question was answered with no."""

    code: RefusalCode
    reason: str
    retry_after_s: float = 0.0


class Unreachable(Event, frozen=True):
    """The last question was not answered in time."""

    reason: str


class Digested(Event, frozen=True):
    """Everything was digested; `table` names the digest table. Of an open one, once for all attempts, at any time."""

    table: str


class Undigested(Event, frozen=True):
    """The table that was left open will not come: only buckets can be digested. The round has to begin anew."""

    reason: str


class AttemptFailed(Event, frozen=True):
    """A step on this side failed for good."""

    ending: EndReason
    reason: str


class Accepted(Event, frozen=True):
    """The coordinator runs the round, or repeats that it does."""


class SendAsked(Event, frozen=True):
    """The coordinator wants `receivers` served under `epoch`."""

    epoch: int
    version: int
    receivers: tuple[ReceivingEngine, ...]
    deadline_s: float


class Withdrawn(Event, frozen=True):
    """The coordinator knows that `engines` are out of the transfer of `epoch`, and why."""

    epoch: int
    engines: dict[str, str]


class Delivered(Event, frozen=True):
    """Every sender of `epoch` is through; `failed` names the engines that did not get everything.

    `spared` are those of them that were only kept from it by others, before anything was sent to them.
    """

    epoch: int
    failed: dict[str, str]
    spared: tuple[str, ...] = ()


class Noted(Event, frozen=True):
    """The coordinator has taken the report of `epoch`."""

    epoch: int


class RoundEnded(Event, frozen=True):
    """The coordinator says that a round is over."""

    epoch: int
    version: int
    outcome: Outcome
    reason: str
    engines: tuple[EngineReport, ...]
    seconds: dict[str, float]


class Reconnected(Event, frozen=True):
    """The coordinator was greeted anew: it, or the connection, was gone for a while."""

    committed: HeldVersion | None
    restarted: bool
    """It is another life of the coordinator: it may have forgotten the round."""


class Tick(Event, frozen=True):
    """Time passed."""


AnyEvent = (
    PublishAsked
    | GotLease
    | RequestRefusal
    | Unreachable
    | Digested
    | Undigested
    | AttemptFailed
    | Accepted
    | SendAsked
    | Withdrawn
    | Delivered
    | Noted
    | RoundEnded
    | Reconnected
    | Tick
)


# -- effects -----------------------------------------------------------------------------------------------------------


class Effect(msgspec.Struct, frozen=True):
    """Root of what the driver is asked to do."""


class AskLease(Effect, frozen=True):
    """Ask for the lease. Answered by LeaseGranted, Refusal or Unreachable."""


class AssembleBuckets(Effect, frozen=True):
    """Assemble and digest on all ranks. Answered by Digested or Broken."""


class Announce(Effect, frozen=True):
    """Put what the coordinator lacks and ask for the round of `epoch`; asked again, it is the same request.

    Answered by Accepted, Refusal, Unreachable or Broken.
    """

    epoch: int
    open: bool = False
    """Without a table, which follows: `Digested` or `Undigested` has to come before `Delivered`."""


class DeliverBuckets(Effect, frozen=True):
    """Open the senders, offer them and send everything.

    Answered by Refusal or Unreachable when the offer is not taken, else at last by Delivered or Broken.
    """

    epoch: int
    receivers: tuple[ReceivingEngine, ...]
    deadline_s: float


class DropReceivers(Effect, frozen=True):
    """Do not wait for `engines` any longer. Not answered; changes nothing for those who have everything."""

    engines: dict[str, str]


class StopDelivery(Effect, frozen=True):
    """Close the senders, whatever they are doing."""


class CloseTable(Effect, frozen=True):
    """Wait for the table that was left open, though nobody is sent to. Answered by Digested, Undigested or Broken."""


class ReportSent(Effect, frozen=True):
    """Tell the coordinator that the transfer of `epoch` is over on this side.

    Answered by Noted, Refusal or Unreachable.
    """

    epoch: int
    failed: dict[str, str]
    spared: tuple[str, ...] = ()
    table: str = ""
    """Names the digest table, and is to be put, where the version was announced without."""


class AbandonLease(Effect, frozen=True):
    """Tell the coordinator that the round of `epoch` cannot go on. Not answered."""

    epoch: int
    reason: str


class ReleaseLease(Effect, frozen=True):
    """Release the lease of `epoch` unused. Not answered."""

    epoch: int


AnyEffect = (
    AskLease
    | AssembleBuckets
    | Announce
    | DeliverBuckets
    | DropReceivers
    | StopDelivery
    | CloseTable
    | ReportSent
    | AbandonLease
    | ReleaseLease
)
Effects = tuple[AnyEffect, ...]
