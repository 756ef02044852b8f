"""The trainer's side of one publication, from the request to its end. Pure: events and the time in, effects out.

driver.py owns the connection to the coordinator, the staging buffers, the senders and the other ranks. It carries the
effects out in order and answers each with an event. This machine decides, and knows nothing of tensors.

    ACQUIRING  --LeaseObtained-->  DIGESTING  --DigestsReady-->  ANNOUNCING  --RoundAccepted-->  WAITING
    WAITING    --SendRequested-->  SENDING  --DeliveryEnded-->  WAITING  --RoundDoneReceived-->  DONE
    WAITING    --RoundDoneReceived, too few engines-->  GATHERING  --EnginesCounted-->  ACQUIRING
    WAITING, SENDING  --a request was not answered, or the coordinator is back-->  ANNOUNCING
    ANNOUNCING  --the coordinator lost the round, and an attempt is left-->  ACQUIRING

Any state ends in DONE with a `PublicationResult`; a round that passes its deadline is abandoned through ABANDONING.

Deferred digests: where every engine can wait for the digest table, the first attempt goes from ACQUIRING to ANNOUNCING
at once. `DigestsReady` then comes in any later state before `DeliveryEnded`, and the delivery report carries the table.
No other message does, so the report is repeated until the coordinator acknowledges it. If deferred digests become
unavailable, or their table is refused for good, the round is abandoned, and a new round begins with its table first.
That attempt does not count against the limit of attempts: without deferred digests it would not have been needed.

Messages of older epochs and of other versions change nothing. A restarted coordinator that forgot the round is asked
once more with the same request key; only its refusal loses the round.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple, Self, assert_never

import msgspec

from weightbus.control.machine import ChannelView
from weightbus.control.protocol import (
    EngineReport,
    HeldVersion,
    IllegalMove,
    InvariantBroken,
    Outcome,
    ReceivingEngine,
    RefusalCode,
)
from weightbus.control.terminal_text import terminal_safe

from . import events as ev
from .events import Effects, EndReason
from .findings import NonFinite, ReplicasCompared


class PublicationState(enum.Enum):
    """State of a publication. Each member says what is true while in it."""

    ACQUIRING = "acquiring"
    """The lease is requested, or will be requested again at `_retry_at`. Nothing was assembled for this attempt."""
    DIGESTING = "digesting"
    """The lease is held; all ranks assemble and rank 0 digests. Engines serve."""
    ANNOUNCING = "announcing"
    """The digest table is known or deferred; the coordinator is asked to start the round, or to repeat its state."""
    WAITING = "waiting"
    """The coordinator drives the round; nothing is being sent."""
    SENDING = "sending"
    """Senders are open under `epoch`."""
    ABANDONING = "abandoning"
    """The round was abandoned by the trainer; its end is awaited, so that the report says how engines ended."""
    GATHERING = "gathering"
    """The round ended before any engine paused, and too few engines could take the version: more are waited for."""
    DONE = "done"
    """`result` says how the publication ended. No further effects follow."""


class PublicationResult(msgspec.Struct, frozen=True):
    """How a publication ended; all ranks of the trainer receive the same value."""

    ending: EndReason
    reason: str = ""
    code: RefusalCode | None = None


class PublishLimits(msgspec.Struct, frozen=True):
    """Deadlines of a publication in seconds, and its number of attempts."""

    acquire_s: float = 300.0
    round_s: float = 1800.0
    abandon_s: float = 30.0
    attempts: int = 3
    """Maximum number of rounds begun when the coordinator loses them."""
    retry_s: float = 0.5
    """Seconds before a request is retried, unless the coordinator named a delay."""
    engines_s: float = 600.0
    """Longest wait for engines, over all attempts of a publication."""
    min_engines: int = 0
    """`Policy.min_engines`. 0: only engines that start are waited for, if no other could take the version."""
    count_s: float = 1.0
    """Seconds between two looks which engines are there."""


_HIDDEN_COMMIT: Final = PublicationResult(EndReason.COMMITTED, "committed before the coordinator was heard of again")

_BROKEN_OFF: Final = "the trainer did not hear whether its offer was taken, and broke the transfer off"

_OTHER_WEIGHTS: Final = PublicationResult(
    EndReason.REFUSED,
    "these are not the weights that are committed: publish them as a new version",
    RefusalCode.NOT_ALLOWED,
)

_TRANSIENT: Final = frozenset(
    {RefusalCode.LEASE_HELD, RefusalCode.SHUTTING_DOWN, RefusalCode.READ_ONLY, RefusalCode.UNKNOWN_AGENT}
)
"""Refusal codes that pass: a retry may succeed."""

_IN_ROUND: Final = frozenset(
    {PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING, PublicationState.ABANDONING}
)

_AWAITING_ANSWER: Final = frozenset(
    {
        PublicationState.ACQUIRING,
        PublicationState.ANNOUNCING,
        PublicationState.WAITING,
        PublicationState.SENDING,
        PublicationState.GATHERING,
    }
)

EXPECTED: Final[dict[type[ev.Event], frozenset[PublicationState]]] = {
    ev.PublishRequested: frozenset({PublicationState.ACQUIRING}),
    ev.LeaseObtained: frozenset({PublicationState.ACQUIRING}),
    ev.DigestsReady: frozenset({PublicationState.DIGESTING}) | _IN_ROUND,
    ev.DigestsUnavailable: _IN_ROUND,
    ev.RoundAccepted: frozenset({PublicationState.ANNOUNCING}),
    ev.DeliveryEnded: frozenset({PublicationState.SENDING}),
    ev.EnginesCounted: frozenset({PublicationState.GATHERING}),
    ev.RequestDenied: _AWAITING_ANSWER - {PublicationState.GATHERING},
    ev.RequestTimedOut: _AWAITING_ANSWER,
}
"""States in which an answer of the driver is expected. Events that are not listed may come in any state."""


class Publication:
    """State machine of one version's publication, as seen from the trainer."""

    def __init__(self, version: int, limits: PublishLimits, *, catch_up: bool = False) -> None:
        """`catch_up`: `version` is committed already, and is delivered to engines that lack it."""
        self.version = version
        self.limits = limits
        self._catch_up = catch_up
        self.state = PublicationState.ACQUIRING
        self.epoch = 0
        """Epoch of the lease or, within a round, of the last `SendRequested`."""
        self.lease = 0
        """Epoch of the granted lease, under which the round is announced."""
        self.attempt = 0
        self.table = ""
        self.digests_deferred = False
        """True if the round is announced without its digest table, which may be known by now."""
        self._uncounted_attempts = 0
        """Number of attempts that do not count against the limit."""
        self._unheard_abandon: ev.AbandonRound | None = None
        """The previous attempt's `AbandonRound`; repeated if it was not received, because the channel stays locked
        until then."""
        self._latest_send_epoch = 0
        """Highest epoch of a `SendRequested` that was acted on; the coordinator repeats it until it receives an offer.
        """
        self._timeout_reason = ""
        """Why the last request was not answered; empty when it was."""
        self._receivers: tuple[ReceivingEngine, ...] = ()
        """Receivers of the last `SendRequested` that was acted on."""
        self._pending_report: ev.ReportDelivery | None = None
        """The delivery report that the coordinator has not acknowledged."""
        self.result: PublicationResult | None = None
        self.ended: ev.RoundDoneReceived | None = None
        self._gathering: PublicationResult | None = None
        """How the last round ended for which too few engines may have been there."""
        self._gather_until: float | None = None
        """Time at which no more engines are waited for; set once."""
        self._lacked = False
        """True if too few engines were there at the last count."""
        self._missing: dict[str, str] = {}
        """Engines that were not there at the last count, with reasons."""
        self._committed: HeldVersion | None = None
        self._retry_at: float | None = None
        self._give_up_at: float | None = None

    @property
    def deadline(self) -> float | None:
        """Time at which the next `Tick` is due; None when no deadline runs."""
        times = [at for at in (self._retry_at, self._give_up_at) if at is not None]
        return min(times, default=None)

    def check(self) -> None:
        """Raise `InvariantBroken` when fields contradict each other."""
        if (self.state is PublicationState.DONE) != (self.result is not None):
            raise InvariantBroken(f"publication of {self.version} is {self.state.value} with result {self.result}")
        tabled = bool(self.table) or self.digests_deferred
        if self.state in _IN_ROUND and (self.lease < 1 or self.epoch < self.lease or not tabled):
            raise InvariantBroken(
                f"{self.state.value} with lease {self.lease}, epoch {self.epoch}, table {self.table!r}"
            )
        if self._pending_report is not None and self._pending_report.table != (
            self.table if self.digests_deferred else ""
        ):
            raise InvariantBroken(f"a report names table {self._pending_report.table!r}, expected {self.table!r}")
        if (
            self.state is not PublicationState.DONE
            and self.attempt
            and self._give_up_at is None
            and self.state is not PublicationState.DIGESTING
        ):
            raise InvariantBroken(f"{self.state.value} without a deadline")

    def handle(self, event: ev.AnyEvent, now: float) -> Effects:  # noqa: C901, PLR0911, PLR0912  one case for each event
        """Take one event; return the effects. Raises `IllegalMove`, changing nothing, for an unexpected answer."""
        self._require(event)
        if self.state is PublicationState.DONE:
            return ()
        match event:
            case ev.PublishRequested():
                return self._acquire(now)
            case ev.LeaseObtained():
                return self._lease_obtained(event, now)
            case ev.RequestDenied():
                return self._request_denied(event, now)
            case ev.RequestTimedOut():
                self._timeout_reason = event.reason
                return self._retry_later(self.limits.retry_s, now)
            case ev.DigestsReady():
                return self._digests_ready(event, now)
            case ev.DigestsUnavailable():  # the same version again, with its digest table first
                abandoning = self.state is PublicationState.ABANDONING
                return () if abandoning else self._replace_round(event.reason, now)
            case ev.AttemptFailed():
                return self._attempt_failed(event)
            case ev.RoundAccepted():
                self._move(PublicationState.WAITING, give_up_at=self._give_up_at)
                return (self._pending_report,) if self._pending_report is not None else ()
            case ev.SendRequested():
                return self._start_delivery(event)
            case ev.EnginesWithdrawn():
                sending = self.state is PublicationState.SENDING and event.epoch == self.epoch
                return (ev.DropReceivers(event.engines),) if sending else ()
            case ev.DeliveryEnded():
                self._move(PublicationState.WAITING, give_up_at=self._give_up_at)
                self._pending_report = ev.ReportDelivery(
                    event.epoch, event.failed, event.spared, self.table if self.digests_deferred else ""
                )
                return (self._pending_report,)
            case ev.ReportAcknowledged():
                self._pending_report = None
                return ()
            case ev.RoundDoneReceived():
                return self._round_ended(event, now)
            case ev.EnginesCounted():
                return self._engines_counted(event, now)
            case ev.Reconnected():
                return self._reconnected(event)
            case ev.Tick():
                return self._tick(now)
            case _:  # pragma: no cover
                assert_never(event)

    def _require(self, event: ev.AnyEvent) -> None:
        """Raise `IllegalMove` unless `event` is expected. Deferred digests come once, before a delivery ends."""
        allowed = EXPECTED.get(type(event))
        late = (
            isinstance(event, ev.DigestsReady | ev.DigestsUnavailable) and self.state is not PublicationState.DIGESTING
        )
        in_turn = not late or (self.digests_deferred and not self.table)
        if isinstance(event, ev.DeliveryEnded):
            in_turn = bool(self.table)
        if not in_turn or (allowed is not None and self.state not in allowed):
            raise IllegalMove("publication", f"{self.state.value}, table {self.table!r}", type(event).__name__)

    def _acquire(self, now: float) -> Effects:
        self.attempt += 1
        self._pending_report, self.digests_deferred = None, False
        self._move(PublicationState.ACQUIRING, give_up_at=now + self.limits.acquire_s)
        return (ev.RequestLease(),)

    def _lease_obtained(self, event: ev.LeaseObtained, now: float) -> Effects:
        self.epoch = self.lease = event.epoch
        self._committed = event.committed or self._committed
        self._unheard_abandon = None
        self.digests_deferred = event.may_defer_digests and self.attempt == 1 and not self._catch_up
        if self.digests_deferred:
            self._uncounted_attempts = 1
            return self._announce(now)
        self._move(PublicationState.DIGESTING)
        return (ev.AssembleBuckets(),)

    def _digests_ready(self, event: ev.DigestsReady, now: float) -> Effects:
        self.table = event.table
        if self.state is not PublicationState.DIGESTING:
            if self._pending_report is not None:
                self._pending_report = msgspec.structs.replace(self._pending_report, table=event.table)
            return ()
        if self._catch_up and not self._is_committed():
            return (*self._finish(_OTHER_WEIGHTS), ev.ReleaseLease(self.lease))
        return self._announce(now)

    def _announce(self, now: float) -> Effects:
        self._move(PublicationState.ANNOUNCING, give_up_at=now + self.limits.round_s)
        return (ev.AnnounceRound(self.lease, self.digests_deferred),)

    def _replace_round(self, reason: str, now: float) -> Effects:
        """Abandon the round and begin another one."""
        stop, self._unheard_abandon = self._stop_delivery(), ev.AbandonRound(self.epoch, reason)
        return (*stop, self._unheard_abandon, *self._begin_again(reason, now))

    def _start_delivery(self, event: ev.SendRequested) -> Effects:
        """Deliver everything to the named receivers, under the epoch. A retry is handled as a first request is."""
        stale = event.version != self.version or event.epoch < self.lease or event.epoch <= self._latest_send_epoch
        if stale or self.state not in (PublicationState.ANNOUNCING, PublicationState.WAITING, PublicationState.SENDING):
            return ()
        stop = self._stop_delivery()
        self.epoch = self._latest_send_epoch = event.epoch
        self._receivers, self._pending_report = event.receivers, None
        self._move(PublicationState.SENDING, give_up_at=self._give_up_at)
        return (*stop, ev.StartDelivery(event.epoch, event.receivers, event.deadline_s))

    def _request_denied(self, event: ev.RequestDenied, now: float) -> Effects:
        self._timeout_reason = ""
        if self._committed_here():
            return (*self._stop_delivery(), *self._finish(_HIDDEN_COMMIT))
        carried_table = self._table_unreported and event.code is not RefusalCode.STALE_EPOCH
        passes = event.retry_after_s > 0 or event.code is RefusalCode.UNKNOWN_BLOB
        if event.code in _TRANSIENT or (carried_table and passes):
            return self._retry_later(event.retry_after_s or self.limits.retry_s, now)
        if carried_table:
            return self._replace_round(event.reason, now)
        if self.state in (PublicationState.WAITING, PublicationState.SENDING):
            # An offer or a report came too late. Announcing it again tells its state.
            self._pending_report = None
            return self._ask_again()
        return self._request_failed(event, now)

    def _request_failed(self, event: ev.RequestDenied, now: float) -> Effects:
        """Handle a refusal without a lease, or without a round under it."""
        if (
            self.state is PublicationState.ACQUIRING
            and event.code is RefusalCode.NOT_ALLOWED
            and self._unheard_abandon is not None
        ):
            return (*self._retry_later(self.limits.retry_s, now), self._unheard_abandon)
        if (
            event.code in (RefusalCode.STALE_EPOCH, RefusalCode.NOT_ALLOWED, RefusalCode.UNKNOWN_BLOB)
            and self.state is PublicationState.ANNOUNCING
        ):
            return self._begin_again(event.reason, now)
        taken = event.code is RefusalCode.CHANNEL_TAKEN
        ending = EndReason.CHANNEL_TAKEN if taken else EndReason.REFUSED
        return self._finish(PublicationResult(ending, event.reason, event.code))

    @property
    def _table_unreported(self) -> bool:
        """True if the refused request was the only one that carries the digest table."""
        return (
            self.state is PublicationState.WAITING
            and self._pending_report is not None
            and bool(self._pending_report.table)
        )

    def _begin_again(self, reason: str, now: float) -> Effects:
        if self.attempt >= self.limits.attempts + self._uncounted_attempts:
            return self._finish(PublicationResult(EndReason.ABORTED, f"after {self.attempt} attempts: {reason}"))
        return self._acquire(now)

    def _retry_later(self, wait_s: float, now: float) -> Effects:
        """Repeat the last request after `wait_s`; stop a running delivery first, and report it later.

        The offer may have been received and only its answer lost: then engines are paused for it, and the coordinator
        waits for a report. If the offer was not received the report is refused, and the coordinator requests the
        delivery again.
        """
        stop = self._stop_delivery()
        if self.state is PublicationState.SENDING:
            failed: dict[str, str] = dict.fromkeys((each.engine for each in self._receivers), _BROKEN_OFF)
            table = self.table if self.digests_deferred else ""
            self._pending_report = ev.ReportDelivery(self.epoch, failed, table=table)
            if self.digests_deferred and not self.table:
                stop = (*stop, ev.AwaitDigests())
        if self.state in (PublicationState.WAITING, PublicationState.SENDING):
            self._move(PublicationState.ANNOUNCING, give_up_at=self._give_up_at)
            self._latest_send_epoch = 0  # request or answer may be lost: a repeated request is acted on again
        self._retry_at = now + wait_s
        return stop

    def _ask_again(self) -> Effects:
        stop = self._stop_delivery()
        self._move(PublicationState.ANNOUNCING, give_up_at=self._give_up_at)
        self._latest_send_epoch = 0
        return (*stop, ev.AnnounceRound(self.lease, self.digests_deferred))

    def _reconnected(self, event: ev.Reconnected) -> Effects:
        self._committed = event.committed
        if self.state not in (PublicationState.WAITING, PublicationState.SENDING, PublicationState.ANNOUNCING):
            return ()
        if self._committed_here() and event.restarted:  # otherwise the round may still have engines to serve
            stop = self._stop_delivery()
            return (*stop, *self._finish(_HIDDEN_COMMIT))
        if self.state is PublicationState.WAITING or (self.state is PublicationState.SENDING and event.restarted):
            return self._ask_again()
        # Announcing already asks. A transfer that only lost sight of the coordinator goes on.
        return ()

    def _committed_here(self) -> bool:
        """True if this publication committed the version, as far as is known."""
        return not self._catch_up and self._is_committed()

    def _is_committed(self) -> bool:
        held = self._committed
        return held is not None and bool(self.table) and (held.version, held.table) == (self.version, self.table)

    def _round_ended(self, event: ev.RoundDoneReceived, now: float) -> Effects:
        if self.state not in _IN_ROUND or event.version != self.version or event.epoch != self.lease:
            return ()
        stop = self._stop_delivery()
        self.ended = event
        ending = EndReason.COMMITTED if event.outcome is Outcome.COMMITTED else EndReason.ABORTED
        result = PublicationResult(ending, event.reason)
        paused = any(each.seconds.get("paused") or "pause" in each.seconds for each in event.engines)
        abandoned = self.state is PublicationState.ABANDONING
        if ending is EndReason.COMMITTED or paused or abandoned or self._catch_up:
            return (*stop, *self._finish(result))
        if self._gather_until is None:
            self._gather_until = now + self.limits.engines_s
        self._gathering = result
        self._move(PublicationState.GATHERING, give_up_at=self._gather_until)
        return (*stop, ev.CountEngines())

    def _engines_counted(self, event: ev.EnginesCounted, now: float) -> Effects:
        """Begin again once enough engines are there; end as the round did if they were not what it lacked."""
        needed = self.limits.min_engines or min(1, len(event.usable) + len(event.missing))
        lacking = event.known and len(event.usable) < needed and (self.limits.min_engines > 0 or event.starting)
        waited, self._lacked, self._missing = self._lacked, lacking, event.missing
        if lacking:
            self._retry_at = now + self.limits.count_s
            return ()
        if not waited or len(event.usable) < needed or not event.known:
            return self._finish(self._gathering or PublicationResult(EndReason.ABORTED))
        self._uncounted_attempts += 1
        return self._acquire(now)

    def _attempt_failed(self, event: ev.AttemptFailed) -> Effects:
        result = PublicationResult(event.ending, event.reason)
        match self.state:
            case PublicationState.ACQUIRING:
                return self._finish(result)
            case PublicationState.DIGESTING:
                return (*self._finish(result), ev.ReleaseLease(self.lease))
            case PublicationState.SENDING:
                return (ev.StopDelivery(), *self._finish(result), ev.AbandonRound(self.epoch, event.reason))
            case _:
                return (*self._finish(result), ev.AbandonRound(self.epoch, event.reason))

    def _tick(self, now: float) -> Effects:
        if self._give_up_at is not None and now >= self._give_up_at:
            return self._deadline_passed(now)
        if self._retry_at is None or now < self._retry_at:
            return ()
        self._retry_at = None
        if self.state is PublicationState.GATHERING:
            return (ev.CountEngines(),)
        return (
            (ev.RequestLease(),)
            if self.state is PublicationState.ACQUIRING
            else (ev.AnnounceRound(self.lease, self.digests_deferred),)
        )

    def _deadline_passed(self, now: float) -> Effects:
        match self.state:
            case PublicationState.ACQUIRING if self._timeout_reason:
                return self._finish(PublicationResult(EndReason.COORDINATOR_LOST, self._timeout_reason))
            case PublicationState.ACQUIRING:
                reason = f"the channel's lease was not to be had for {self.limits.acquire_s:g} s"
                return self._finish(PublicationResult(EndReason.LEASE_BUSY, reason, RefusalCode.LEASE_HELD))
            case PublicationState.GATHERING:
                why = "; ".join(f"{name}: {reason}" for name, reason in self._missing.items())
                found = self._gathering.reason if self._gathering else ""
                reason = f"{found}; waited {self.limits.engines_s:g} s for engines ({why or 'no other has joined'})"
                reason = f"{reason}; `weightbus status` shows what keeps each of them"
                return self._finish(PublicationResult(EndReason.ABORTED, reason))
            case PublicationState.ABANDONING:
                reason = f"the round was given up, and its end was not heard of for {self.limits.abandon_s:g} s"
                return self._finish(PublicationResult(EndReason.COORDINATOR_LOST, reason))
            case _:
                stop = self._stop_delivery()
                reason = f"the round took more than {self.limits.round_s:g} s"
                self._move(PublicationState.ABANDONING, give_up_at=now + self.limits.abandon_s)
                return (*stop, ev.AbandonRound(self.epoch, reason))

    def _stop_delivery(self) -> Effects:
        return (ev.StopDelivery(),) if self.state is PublicationState.SENDING else ()

    def _move(self, state: PublicationState, *, give_up_at: float | None = None) -> None:
        self.state, self._retry_at, self._give_up_at = state, None, give_up_at

    def _finish(self, result: PublicationResult) -> Effects:
        self._move(PublicationState.DONE)
        self.result = result
        return ()


def count_engines(channel: ChannelView | None) -> ev.EnginesCounted:
    """The engines of `channel` that could take a version now, and the others with their reasons."""
    engines = channel.engines if channel else {}
    missing = {name: each.reason or each.state for name, each in engines.items() if not each.usable}
    starting = any(each.starting and not each.usable for each in engines.values())
    return ev.EnginesCounted(tuple(name for name, each in engines.items() if each.usable), missing, starting)


PHASES: Final = (
    "replicas",
    "snapshot",
    "make",
    "acquire",
    "assemble",
    "digest",
    "announce",
    "prepare",
    "offer",
    "pause",
    "transfer",
    "verify",
    "commit",
    "resume",
    "save",
    "total",
)
"""Keys of `PublishReport.seconds`, in the order of the round. A phase that was not reached is absent.

The trainer's clock measures ``replicas`` to ``announce``, ``save``, ``send`` and ``total``; the coordinator's the
others. ``replicas``: comparing replicas on all ranks, ahead of ``total``. ``snapshot``: the training loop was blocked
to copy the weights. ``make``: launching the preparation of what engines read of quantized weights and the digests of
memory that engines read in place; a GPU works on both afterwards, and ``digest`` is the time spent waiting for them
after ``acquire``, while a CPU has done both when ``make`` ends. With deferred digests ``digest`` overlaps ``prepare``
and ``transfer``. ``save``: waiting for checkpoint files. ``send``: the trainer's half of ``transfer``.
"""


NO_ENGINE: Final = (
    "committed, but no engine is there: start `weightbus engine-agent --channel {}` beside each server, and wait with"
    " agent.wait_for_engines(n) or min_engines; see `weightbus status`"
)
LINE_ENGINES: Final = 4
"""Engines that did not take the version, of which `PublishReport.line` tells the reasons."""


class Mode(enum.StrEnum):
    """Memory from which a version is published."""

    LIVE = "live"
    """The parameters: they must not change until `publish` returns, when engines have them."""
    SNAPSHOT = "snapshot"
    """A copy: `publish` returns when the copy is taken, and the round runs in the background."""


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """One publication, after it has ended."""

    channel: str
    version: int
    epoch: int
    outcome: Outcome
    reason: str = ""
    mode: Mode = Mode.LIVE
    attempts: int = 1
    """Number of rounds begun; more than one if the coordinator restarted meanwhile."""
    tensors: int = 0
    buckets: int = 0
    bytes: int = 0
    """Bytes of one copy of the version. The bytes that each engine received are in its own report."""
    seconds: dict[str, float] = {}
    engines: tuple[EngineReport, ...] = ()
    manifest: str = ""
    table: str = ""
    """Digest of the digest table: identifies the bits of the version."""
    saved: str = ""
    """Folder of the version's checkpoint if one was kept, else empty."""
    save_error: str = ""
    """Why no checkpoint was kept although one was due. The publication is not affected."""
    nonfinite: NonFinite = NonFinite()
    """Elements that are NaN or infinite, as the weights were digested."""
    replicas: ReplicasCompared | None = None
    """What the comparison of replicas found; None if this publication was not due for one."""

    @property
    def committed(self) -> bool:
        """True if the version is durable and at least the required engines serve it."""
        return self.outcome is Outcome.COMMITTED

    def engines_by(self, outcome: Outcome) -> tuple[str, ...]:
        """Names of the engines with that outcome."""
        return tuple(engine.engine for engine in self.engines if engine.outcome is outcome)

    def line(self) -> str:
        """The report as one line for a training log."""
        serving = len(self.engines_by(Outcome.COMMITTED))
        others = [
            f"{each.engine} {each.outcome.value}{f': {each.reason}' if each.reason else ''}"
            for each in self.engines
            if each.outcome is not Outcome.COMMITTED
        ]
        told = "; ".join(others[:LINE_ENGINES]) + (
            f"; and {len(others) - LINE_ENGINES} more" if len(others) > LINE_ENGINES else ""
        )
        phases = " ".join(f"{phase}={self.seconds[phase]:.3f}s" for phase in PHASES if phase in self.seconds)
        size = f"{self.bytes / 1e6:.1f} MB in {self.buckets} buckets"
        how = " from a snapshot" if self.mode is Mode.SNAPSHOT else ""
        nobody = NO_ENGINE.format(self.channel) if self.committed and not self.engines and self.epoch else ""
        why = f" ({self.reason or nobody})" if self.reason or nobody else ""
        kept = f", saved {self.saved}" if self.saved else f", not saved: {self.save_error}" if self.save_error else ""
        ending = f"{self.outcome.value}{how}{why}"
        odd = str(self.nonfinite) if self.nonfinite.elements else ""
        unequal = str(self.replicas) if self.replicas and self.replicas.differing else ""
        found = "".join(f", {each}" for each in (odd, unequal) if each and each not in self.reason)
        return terminal_safe(
            f"version {self.version} {ending}: {size}, {serving}/{len(self.engines)} engines"
            f"{f' ({told})' if told else ''}, {phases}{kept}{found}"
        )


class PublicationEnd(NamedTuple):
    """How a publication ended: what the training loop receives."""

    result: PublicationResult
    report: PublishReport
    cause: BaseException | None
    """The exception behind the result where it was raised on this rank."""

    @classmethod
    def without_round(
        cls,
        channel: str,
        version: int,
        mode: Mode,
        result: PublicationResult,
        cause: BaseException | None = None,
        *,
        replicas: ReplicasCompared | None = None,
    ) -> Self:
        """The end of a version for which no round was begun."""
        outcome = Outcome.COMMITTED if result.ending is EndReason.COMMITTED else Outcome.ABORTED
        report = PublishReport(
            channel=channel,
            version=version,
            epoch=0,
            outcome=outcome,
            reason=result.reason,
            mode=mode,
            replicas=replicas,
        )
        return cls(result, report, cause)
