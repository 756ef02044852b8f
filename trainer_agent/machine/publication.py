"""What happens to one version from the wish to publish it to its end. Pure: events and the time in, effects out.

The driver (agent.py) owns the bus, the staging memory, the senders and the other ranks; it carries the effects out in
order and answers each with an event. This module decides, and knows nothing of tensors.

    ACQUIRING -LeaseGranted-> DIGESTING -Digested-> ANNOUNCING -Accepted-> WAITING <-SendAsked / Delivered-> SENDING
        ^                                             |   ^                   |                                |
        |   the round was lost with the coordinator   |   |   heard of the coordinator again, or not at all    |
        +------------ and an attempt is left ---------+   +-------------------+--------------------------------+

Any state ends in DONE with a `RoundResult`; on its own deadline a round is given up through ABANDONING.

Where every engine can wait for the digest table, the first attempt goes from ACQUIRING to ANNOUNCING at once, with an
open table. Then `Digested` comes in any later state, before `Delivered`, and the table is said with the report. Nobody
else can say it, so that report is repeated until it is taken. A round whose table does not come after all
(`Undigested`), or is refused for good, is given up, and begun anew with the table first. The open attempt is not
counted: without it there would have been as many.

What the coordinator says of an older epoch, or of another version, changes nothing. A coordinator that forgot the
round (it was restarted) is asked once more with the same request key; only when it refuses is the round lost.
"""

from __future__ import annotations

import enum
from typing import Final, assert_never

import msgspec

from weightbus.control.protocol import HeldVersion, IllegalMove, InvariantBroken, Outcome, ReceivingEngine, RefusalCode

from .events import (
    AbandonLease,
    Accepted,
    Announce,
    AnyEvent,
    AskLease,
    AssembleBuckets,
    AttemptFailed,
    CloseTable,
    DeliverBuckets,
    Delivered,
    Digested,
    DropReceivers,
    Effects,
    EndReason,
    Event,
    GotLease,
    Noted,
    PublishAsked,
    Reconnected,
    ReleaseLease,
    ReportSent,
    RequestRefusal,
    RoundEnded,
    SendAsked,
    StopDelivery,
    Tick,
    Undigested,
    Unreachable,
    Withdrawn,
)


class PublicationState(enum.Enum):
    """Where a publication stands. Each member says what is true while in it."""

    ACQUIRING = "acquiring"
    """The lease is asked for, or will be asked for again at `due`. Nothing was assembled for this attempt."""
    DIGESTING = "digesting"
    """The lease is held; every rank assembles and the root digests. Engines serve."""
    ANNOUNCING = "announcing"
    """The digest table is known, or left open; the coordinator is asked to start the round, or to repeat how it stands
    with it."""
    WAITING = "waiting"
    """The coordinator drives the round; nothing is being sent."""
    SENDING = "sending"
    """Senders are open under `epoch`."""
    ABANDONING = "abandoning"
    """The round was given up here; its end is awaited so that the report is true."""
    DONE = "done"
    """`verdict` says how it ended. Nothing more happens."""


class RoundResult(msgspec.Struct, frozen=True):
    """The end of a publication: what every rank of the trainer learns."""

    ending: EndReason
    reason: str = ""
    code: RefusalCode | None = None


class PublishLimits(msgspec.Struct, frozen=True):
    """How long the publication waits, and how often it begins again."""

    acquire_s: float = 300.0
    round_s: float = 1800.0
    abandon_s: float = 30.0
    attempts: int = 3
    """Rounds that are begun before giving up when the coordinator loses them."""
    retry_s: float = 0.5
    """Pause before a question is asked again, unless the coordinator named one."""


_HIDDEN_COMMIT: Final = RoundResult(EndReason.COMMITTED, "committed before the coordinator was heard of again")

_BROKEN_OFF: Final = "the trainer did not hear whether its offer was taken, and broke the transfer off"

_OTHER_WEIGHTS: Final = RoundResult(
    EndReason.REFUSED,
    "these are not the weights that are committed: publish them as a new version",
    RefusalCode.NOT_ALLOWED,
)

_LATER: Final = frozenset(
    {RefusalCode.LEASE_HELD, RefusalCode.SHUTTING_DOWN, RefusalCode.READ_ONLY, RefusalCode.UNKNOWN_AGENT}
)
"""Refusals that pass: the same question may be answered differently later."""

_IN_ROUND: Final = frozenset(
    {PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING, PublicationState.ABANDONING}
)

_TABLE_FOLLOWS: Final = frozenset(
    {PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING, PublicationState.ABANDONING}
)
"""Where an open table may become known."""

_ASKING: Final = frozenset(
    {PublicationState.ACQUIRING, PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING}
)

EXPECTED: Final[dict[type[Event], frozenset[PublicationState]]] = {
    PublishAsked: frozenset({PublicationState.ACQUIRING}),
    GotLease: frozenset({PublicationState.ACQUIRING}),
    Digested: frozenset({PublicationState.DIGESTING}) | _TABLE_FOLLOWS,
    Undigested: _TABLE_FOLLOWS,
    Accepted: frozenset({PublicationState.ANNOUNCING}),
    Delivered: frozenset({PublicationState.SENDING}),
    RequestRefusal: _ASKING,
    Unreachable: _ASKING,
}
"""Answers of our own driver, and the only states that can have asked for them. All else may come at any time."""


class Publication:
    """One version's way to the engines, seen from the trainer."""

    def __init__(self, version: int, limits: PublishLimits, *, catch_up: bool = False) -> None:
        """`catch_up`: `version` is committed already, and brought to engines that are behind."""
        self.version = version
        self.limits = limits
        self._catch_up = catch_up
        self.state = PublicationState.ACQUIRING
        self.epoch = 0
        """Of our lease or, in a round, of the last `SendAsked`."""
        self.lease = 0
        """The epoch that was granted: what the round is announced under."""
        self.attempt = 0
        self.table = ""
        self.open = False
        """The round is announced without its table, which may be known by now."""
        self._free = 0
        """Attempts that do not count."""
        self._given_up: AbandonLease | None = None
        """Of the attempt before, to be said again if it was not heard: the channel is not free before that."""
        self._asked = 0
        """Highest epoch of a `SendAsked` that was taken up; the coordinator repeats it until it hears of an offer."""
        self._silence = ""
        """Why the last question was not answered; empty when it was."""
        self._receivers: tuple[ReceivingEngine, ...] = ()
        """Of the last `SendAsked` that was taken up."""
        self._unsaid: ReportSent | None = None
        """A report that the coordinator has not confirmed."""
        self.verdict: RoundResult | None = None
        self.ended: RoundEnded | None = None
        self._committed: HeldVersion | None = None
        self._due: float | None = None
        self._give_up_at: float | None = None

    @property
    def deadline(self) -> float | None:
        """When `Tick` should come at the latest; None when nothing waits for time."""
        times = [at for at in (self._due, self._give_up_at) if at is not None]
        return min(times, default=None)

    def check(self) -> None:
        """Raise `InvariantBroken` when fields contradict each other."""
        if (self.state is PublicationState.DONE) != (self.verdict is not None):
            raise InvariantBroken(f"publication of {self.version} is {self.state.value} with verdict {self.verdict}")
        tabled = bool(self.table) or self.open
        if self.state in _IN_ROUND and (self.lease < 1 or self.epoch < self.lease or not tabled):
            raise InvariantBroken(
                f"{self.state.value} with lease {self.lease}, epoch {self.epoch}, table {self.table!r}"
            )
        if self._unsaid is not None and self._unsaid.table != (self.table if self.open else ""):
            raise InvariantBroken(f"a report names table {self._unsaid.table!r}, expected {self.table!r}")
        if (
            self.state is not PublicationState.DONE
            and self.attempt
            and self._give_up_at is None
            and self.state is not PublicationState.DIGESTING
        ):
            raise InvariantBroken(f"{self.state.value} without a deadline")

    def handle(self, event: AnyEvent, now: float) -> Effects:  # noqa: C901, PLR0911  one line for each event
        """Take one event. Raises `IllegalMove`, changing nothing, on an answer to what was not asked."""
        self._require(event)
        if self.state is PublicationState.DONE:
            return ()
        match event:
            case PublishAsked() | GotLease() | Digested() | Accepted() | Delivered() | Noted():
                return self._went_well(event, now)
            case RequestRefusal():
                return self._refused(event, now)
            case Unreachable():
                self._silence = event.reason
                return self._later(self.limits.retry_s, now)
            case Undigested():
                return self._undigested(event, now)
            case AttemptFailed():
                return self._broken(event)
            case SendAsked():
                return self._send(event)
            case Withdrawn():
                sending = self.state is PublicationState.SENDING and event.epoch == self.epoch
                return (DropReceivers(event.engines),) if sending else ()
            case RoundEnded():
                return self._ended(event)
            case Reconnected():
                return self._reconnected(event)
            case Tick():
                return self._tick(now)
            case _:  # pragma: no cover
                assert_never(event)

    def _require(self, event: AnyEvent) -> None:
        """Raise `IllegalMove` unless it was asked for. An open table comes once, and before the end of a delivery."""
        allowed = EXPECTED.get(type(event))
        late = isinstance(event, Digested | Undigested) and self.state is not PublicationState.DIGESTING
        in_turn = not late or (self.open and not self.table)
        if isinstance(event, Delivered):
            in_turn = bool(self.table)
        if not in_turn or (allowed is not None and self.state not in allowed):
            raise IllegalMove("publication", f"{self.state.value}, table {self.table!r}", type(event).__name__)

    def _went_well(
        self, event: PublishAsked | GotLease | Digested | Accepted | Delivered | Noted, now: float
    ) -> Effects:
        """The straight way."""
        match event:
            case PublishAsked():
                return self._acquire(now)
            case GotLease():
                return self._granted(event, now)
            case Digested():
                return self._digested(event, now)
            case Accepted():
                self._move(PublicationState.WAITING, give_up_at=self._give_up_at)
                return (self._unsaid,) if self._unsaid is not None else ()
            case Delivered():
                self._move(PublicationState.WAITING, give_up_at=self._give_up_at)
                self._unsaid = ReportSent(event.epoch, event.failed, event.spared, self.table if self.open else "")
                return (self._unsaid,)
            case Noted():
                self._unsaid = None
                return ()
            case _:  # pragma: no cover
                assert_never(event)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _acquire(self, now: float) -> Effects:
        self.attempt += 1
        self._unsaid, self.open = None, False
        self._move(PublicationState.ACQUIRING, give_up_at=now + self.limits.acquire_s)
        return (AskLease(),)

    def _granted(self, event: GotLease, now: float) -> Effects:
        self.epoch = self.lease = event.epoch
        self._committed = event.committed or self._committed
        self._given_up = None
        self.open = event.open and self.attempt == 1 and not self._catch_up
        if self.open:
            self._free = 1
            return self._announce(now)
        self._move(PublicationState.DIGESTING)
        return (AssembleBuckets(),)

    def _digested(self, event: Digested, now: float) -> Effects:
        self.table = event.table
        if self.state is not PublicationState.DIGESTING:
            if self._unsaid is not None:
                self._unsaid = msgspec.structs.replace(self._unsaid, table=event.table)
            return ()
        if self._catch_up and not self._is_committed():
            return (*self._finish(_OTHER_WEIGHTS), ReleaseLease(self.lease))
        return self._announce(now)

    def _announce(self, now: float) -> Effects:
        self._move(PublicationState.ANNOUNCING, give_up_at=now + self.limits.round_s)
        return (Announce(self.lease, self.open),)

    def _undigested(self, event: Undigested, now: float) -> Effects:
        """The same version, with its table first."""
        return () if self.state is PublicationState.ABANDONING else self._instead(event.reason, now)

    def _instead(self, reason: str, now: float) -> Effects:
        """Give the round up for another one."""
        stop, self._given_up = self._stop(), AbandonLease(self.epoch, reason)
        return (*stop, self._given_up, *self._begin_again(reason, now))

    def _send(self, event: SendAsked) -> Effects:
        """A first `Send` and a re-drive are the same: everything, to those named, under its epoch."""
        stale = event.version != self.version or event.epoch < self.lease or event.epoch <= self._asked
        if stale or self.state not in (PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING):
            return ()
        stop = self._stop()
        self.epoch = self._asked = event.epoch
        self._receivers, self._unsaid = event.receivers, None
        self._move(PublicationState.SENDING, give_up_at=self._give_up_at)
        return (*stop, DeliverBuckets(event.epoch, event.receivers, event.deadline_s))

    def _refused(self, event: RequestRefusal, now: float) -> Effects:
        self._silence = ""
        if self._committed_here():
            return (*self._stop(), *self._finish(_HIDDEN_COMMIT))
        said = self._table_unsaid and event.code is not RefusalCode.STALE_EPOCH
        passes = event.retry_after_s > 0 or event.code is RefusalCode.UNKNOWN_BLOB
        if event.code in _LATER or (said and passes):
            return self._later(event.retry_after_s or self.limits.retry_s, now)
        if said:
            return self._instead(event.reason, now)
        if self.state in (PublicationState.WAITING, PublicationState.SENDING):
            # An offer or a report came too late. How the round stands is learned by announcing it once more.
            self._unsaid = None
            return self._ask_again()
        return self._not_begun(event, now)

    def _not_begun(self, event: RequestRefusal, now: float) -> Effects:
        """There is no lease, or no round under it."""
        if (
            self.state is PublicationState.ACQUIRING
            and event.code is RefusalCode.NOT_ALLOWED
            and self._given_up is not None
        ):
            return (*self._later(self.limits.retry_s, now), self._given_up)
        if (
            event.code in (RefusalCode.STALE_EPOCH, RefusalCode.NOT_ALLOWED, RefusalCode.UNKNOWN_BLOB)
            and self.state is PublicationState.ANNOUNCING
        ):
            return self._begin_again(event.reason, now)
        return self._finish(RoundResult(EndReason.REFUSED, event.reason, event.code))

    @property
    def _table_unsaid(self) -> bool:
        """What was refused is the only word on the table."""
        return self.state is PublicationState.WAITING and self._unsaid is not None and bool(self._unsaid.table)

    def _begin_again(self, reason: str, now: float) -> Effects:
        if self.attempt >= self.limits.attempts + self._free:
            return self._finish(RoundResult(EndReason.ABORTED, f"after {self.attempt} attempts: {reason}"))
        return self._acquire(now)

    def _later(self, wait_s: float, now: float) -> Effects:
        """Ask the same question again after `wait_s`; while sending, stop first, and say so once somebody listens.

        The offer may have been heard, and only its answer lost: then engines stand still for it, and the coordinator
        waits for a report. Where it was not heard the report is refused, and the offer asked for again.
        """
        stop = self._stop()
        if self.state is PublicationState.SENDING:
            failed: dict[str, str] = dict.fromkeys((each.engine for each in self._receivers), _BROKEN_OFF)
            self._unsaid = ReportSent(self.epoch, failed, table=self.table if self.open else "")
            if self.open and not self.table:
                stop = (*stop, CloseTable())
        if self.state in (PublicationState.WAITING, PublicationState.SENDING):
            self._move(PublicationState.ANNOUNCING, give_up_at=self._give_up_at)
            self._asked = 0  # what was asked may have got lost on either way: it is taken up again
        self._due = now + wait_s
        return stop

    def _ask_again(self) -> Effects:
        stop = self._stop()
        self._move(PublicationState.ANNOUNCING, give_up_at=self._give_up_at)
        self._asked = 0
        return (*stop, Announce(self.lease, self.open))

    def _reconnected(self, event: Reconnected) -> Effects:
        self._committed = event.committed
        if self.state not in (PublicationState.WAITING, PublicationState.SENDING, PublicationState.ANNOUNCING):
            return ()
        if self._committed_here() and event.restarted:  # otherwise the round may still have engines to serve
            stop = self._stop()
            return (*stop, *self._finish(_HIDDEN_COMMIT))
        if self.state is PublicationState.WAITING or (self.state is PublicationState.SENDING and event.restarted):
            return self._ask_again()
        # Announcing already asks. A transfer that only lost sight of the coordinator goes on.
        return ()

    def _committed_here(self) -> bool:
        """The version was committed by this publication, as far as is known."""
        return not self._catch_up and self._is_committed()

    def _is_committed(self) -> bool:
        held = self._committed
        return held is not None and bool(self.table) and (held.version, held.table) == (self.version, self.table)

    def _ended(self, event: RoundEnded) -> Effects:
        if self.state not in _IN_ROUND or event.version != self.version or event.epoch != self.lease:
            return ()
        stop = self._stop()
        self.ended = event
        ending = EndReason.COMMITTED if event.outcome is Outcome.COMMITTED else EndReason.ABORTED
        return (*stop, *self._finish(RoundResult(ending, event.reason)))

    def _broken(self, event: AttemptFailed) -> Effects:
        verdict = RoundResult(event.ending, event.reason)
        match self.state:
            case PublicationState.ACQUIRING:
                return self._finish(verdict)
            case PublicationState.DIGESTING:
                return (*self._finish(verdict), ReleaseLease(self.lease))
            case PublicationState.SENDING:
                return (StopDelivery(), *self._finish(verdict), AbandonLease(self.epoch, event.reason))
            case _:
                return (*self._finish(verdict), AbandonLease(self.epoch, event.reason))

    def _tick(self, now: float) -> Effects:
        if self._give_up_at is not None and now >= self._give_up_at:
            return self._out_of_time(now)
        if self._due is None or now < self._due:
            return ()
        self._due = None
        return (AskLease(),) if self.state is PublicationState.ACQUIRING else (Announce(self.lease, self.open),)

    def _out_of_time(self, now: float) -> Effects:
        match self.state:
            case PublicationState.ACQUIRING if self._silence:
                return self._finish(RoundResult(EndReason.COORDINATOR_LOST, self._silence))
            case PublicationState.ACQUIRING:
                reason = f"the channel's lease was not to be had for {self.limits.acquire_s:g} s"
                return self._finish(RoundResult(EndReason.LEASE_BUSY, reason, RefusalCode.LEASE_HELD))
            case PublicationState.ABANDONING:
                reason = f"the round was given up, and its end was not heard of for {self.limits.abandon_s:g} s"
                return self._finish(RoundResult(EndReason.COORDINATOR_LOST, reason))
            case _:
                stop = self._stop()
                reason = f"the round took more than {self.limits.round_s:g} s"
                self._move(PublicationState.ABANDONING, give_up_at=now + self.limits.abandon_s)
                return (*stop, AbandonLease(self.epoch, reason))

    def _stop(self) -> Effects:
        return (StopDelivery(),) if self.state is PublicationState.SENDING else ()

    def _move(self, state: PublicationState, *, give_up_at: float | None = None) -> None:
        self.state, self._due, self._give_up_at = state, None, give_up_at

    def _finish(self, verdict: RoundResult) -> Effects:
        self._move(PublicationState.DONE)
        self.verdict = verdict
        return ()
