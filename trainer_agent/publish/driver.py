"""Drives one publication on rank 0: carries the effects of machine/publication.py out, and feeds back what happened.

Runs on the caller's thread; senders run in threads of their own (delivery.py). Every wait is short enough to send
`KeepWaiting` to the other ranks in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, assert_never

import msgspec

from weightbus.control import protocol as m
from weightbus.control.log import get_log
from weightbus.control.protocol import (
    AgentId,
    Channel,
    ClientClosed,
    CoordinatorUnreachable,
    Digest,
    Epoch,
    RequestId,
    RequestRefused,
    Version,
)
from weightbus.dataplane.errors import DataplaneError, Unsupported
from weightbus.dataplane.tensors import DigestTable
from weightbus.dataplane.transports import Dividing, Peer, Tabled, TransferSession, registry as transports
from weightbus.dataplane.transports.disk import Notes, saved_version

from ..checkpoints import Saving
from ..machine import Mode, PublishReport, Stopwatch, events as ev, publication
from ..source import SourceError
from .bucket_staging import WeightsDiffer
from .deferred_digests import DeferredDigests, needed_before_offer, remove_unable
from .delivery import Delivery
from .publisher_context import Progress, PublisherContext
from .rank_commands import KeepWaiting

_log = get_log(__name__)

_POLL_S: Final = 0.05
"""Longest delay in seconds of a coordinator message while a delivery runs. Progress of the delivery wakes the driver.
"""
_BEST_EFFORT_S: Final = 2.0
"""Seconds to wait for the answer to an abandoned round or a released lease; without it the lease expires by itself."""
_TEXT: Final = 2048
"""Maximum characters of free text in messages."""


class PublicationDriver:
    """Drives one publication on rank 0."""

    def __init__(
        self,
        context: PublisherContext,
        version: int,
        *,
        rollback: bool = False,
        catch_up: bool = False,
        stood_s: float = 0.0,
    ) -> None:
        self.version = version
        self._rollback, self._catch_up = rollback, catch_up
        self._stood_s = stood_s
        self.machine = publication.Publication(version, context.settings.limits(), catch_up=catch_up)
        self.cause: BaseException | None = None
        self._context = context
        self._watch = Stopwatch()
        self._deferred = DeferredDigests(context, version, self._watch)
        self._keep_alive_at = time.monotonic()
        self._engines: dict[str, m.EngineInfo] = {}
        self._routes: Mapping[str, m.TransportKind] | None = None
        self._committed: m.HeldVersion | None = None
        self._publish_keys: dict[int, RequestId] = {}
        self._delivery: Delivery | None = None
        self._silent = False
        self._saving: Saving | None = None
        self._announced: m.Publish | None = None
        self._saved = self._save_error = ""
        self._log = _log.bind(channel=context.settings.channel, version=version)
        context.staging.begin()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> publication.PublicationResult:
        """Run until the machine is done. Effects are carried out in order, each before the next event is taken."""
        effects: deque[ev.AnyEffect] = deque(self._handle(self._prepare_ahead() or ev.PublishRequested()))
        while effects or self.machine.result is None:
            event = self._perform(effects.popleft()) if effects else self._wait()
            if event is not None:
                effects.extend(self._handle(event))
        result = self._deferred.settle(self.machine.result)
        self._conclude_saving(result)
        return result

    def fail(self, error: BaseException) -> publication.PublicationResult:
        """Abandon the round, as far as possible, after a step raised an unexpected exception."""
        ending = ev.EndReason.SOURCE_FAILED if isinstance(error, SourceError) else ev.EndReason.INTERNAL
        self.cause = error
        self._log.error("publication_failed", state=self.machine.state.value, exc_info=error)
        for effect in self._handle(ev.AttemptFailed(ending, f"{type(error).__name__}: {error}")):
            self._perform(effect)
        self._stop_delivery()
        result = self.machine.result or publication.PublicationResult(ending, str(error))
        result = self._deferred.settle(result)
        self._conclude_saving(result)
        return result

    def _handle(self, event: ev.AnyEvent) -> ev.Effects:
        before = self.machine.state
        effects = self.machine.handle(event, time.monotonic())
        if self.machine.state is not before:
            self._log.debug("publication_state", state=self.machine.state.value, epoch=self.machine.epoch)
            self._show()
        return effects

    def _wait(self) -> ev.AnyEvent | None:
        """The next event; None after a short while, so that the caller looks again."""
        now = time.monotonic()
        deadline = self.machine.deadline
        if deadline is not None and now >= deadline:
            return ev.Tick()
        self._keep_ranks_waiting(now)
        if self._delivery is None:
            until = min(self._keep_alive_at, deadline if deadline is not None else self._keep_alive_at)
            return self._event(self._context.bus.next(max(0.0, until - now)))
        if self.machine.digests_deferred and not self.machine.table:
            return self._await_digests()
        return self._event(self._context.bus.next(0.0)) or self._watch_delivery(self._delivery)

    def _watch_delivery(self, delivery: Delivery) -> ev.AnyEvent | None:
        if delivery.over:
            self._delivery = None
            self._log.info("sent", epoch=delivery.epoch, failed=len(delivery.failed))
            if delivery.differing:
                return self._source_failed(WeightsDiffer(delivery.differing))
            return ev.DeliveryEnded(delivery.epoch, delivery.failed, delivery.spared)
        row = delivery.wanted()
        if row is None:
            delivery.wait(_POLL_S)
            return None
        try:
            self._context.staging.refill(row, self._watch)
        except (WeightsDiffer, SourceError) as error:
            return self._source_failed(error)
        delivery.filled(row.stop)
        self._show(row.stop)
        return None

    def _keep_ranks_waiting(self, now: float) -> None:
        if now >= self._keep_alive_at:
            self._context.ranks.tell(KeepWaiting())
            self._keep_alive_at = now + self._context.settings.beat_s

    def _event(self, message: m.ToAgent | None) -> ev.AnyEvent | None:
        """The event that a message of the coordinator stands for; None for a message of no concern to the machine."""
        match message:
            case m.Send():
                return ev.SendRequested(message.epoch, message.version, message.receivers, message.deadline_s)
            case m.Withdraw():
                return ev.EnginesWithdrawn(message.epoch, message.engines)
            case m.RoundDone():
                return ev.RoundEnded(
                    message.epoch, message.version, message.outcome, message.reason, message.engines, message.seconds
                )
            case m.Welcome():
                restarted, self._context.boot = message.boot != self._context.boot, message.boot
                self._log.warning("coordinator_back", restarted=restarted, boot=message.boot)
                return ev.Reconnected(message.committed, restarted)
            case _:
                return None

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, effect: ev.AnyEffect) -> ev.AnyEvent | None:  # noqa: C901, PLR0911  one line for each effect
        match effect:
            case ev.RequestLease():
                return self._ask(self._acquire)
            case ev.AssembleBuckets():
                return self._assemble()
            case ev.AnnounceRound():
                return self._ask(lambda: self._announce(effect))
            case ev.StartDelivery():
                return self._ask(lambda: self._deliver(effect))
            case ev.AwaitDigests():
                return self._await_digests()
            case ev.ReportDelivery():
                return self._ask(lambda: self._report_delivery(effect))
            case ev.DropReceivers():
                if self._delivery is not None:
                    self._delivery.withdraw(effect.engines)
            case ev.StopDelivery():
                self._stop_delivery()
            case ev.AbandonRound():
                self._abandon(effect)
            case ev.ReleaseLease():
                self._send_best_effort(m.Release(request=self._key(), channel=self._channel, epoch=Epoch(effect.epoch)))
            case _:  # pragma: no cover
                assert_never(effect)
        return None

    def _ask(self, step: Callable[[], ev.AnyEvent | None]) -> ev.AnyEvent | None:
        """Do a step that sends a request; a refusal or a timeout becomes an event."""
        try:
            event = step()
        except RequestRefused as refused:
            self._log.debug("refused", code=refused.code.value, reason=refused.reason)
            return ev.RequestDenied(refused.code, refused.reason, refused.retry_after_s)
        except CoordinatorUnreachable as silence:
            if not self._silent:
                self._log.warning("coordinator_silent", error=str(silence))
            self._silent = True
            return ev.RequestTimedOut(str(silence))
        self._silent = False
        return event

    def _acquire(self) -> ev.AnyEvent:
        with self._watch.phase("acquire"):
            message = m.Acquire(
                request=self._key(), channel=self._channel, version=Version(self.version), rollback=self._rollback
            )
            answer = self._request(message)
        if not isinstance(answer, m.Granted):
            return ev.AttemptFailed(ev.EndReason.INTERNAL, f"the coordinator answered Acquire with {answer.kind}")
        self._engines, self._committed = answer.engines, answer.committed
        self._routes = answer.routes or None
        if self._context.staging.in_place is not None:
            self._context.staging.in_place.ready_flags = answer.may_defer_digests
        self._log.info("lease_granted", epoch=answer.epoch, engines=len(answer.engines))
        may_defer = not self._catch_up and self._deferred.allowed(answer)
        return ev.LeaseObtained(answer.epoch, answer.committed, may_defer)

    def _prepare_ahead(self) -> ev.AnyEvent | None:
        """Begin to compute what engines read while the lease is requested. Returns the failure if there is one."""
        try:
            self._context.staging.prepare(self._watch)
        except SourceError as error:
            return self._source_failed(error)
        return None

    def _assemble(self) -> ev.AnyEvent:
        staging = self._context.staging
        if self._saving is None and self._context.archive is not None and not self._catch_up:
            self._saving = self._context.archive.saving(self.version, staging.manifest)
        try:
            self._deferred.collect()
            table = staging.digest(self.version, self._engines, self._watch, self._saving, self._routes)
        except SourceError as error:
            return self._source_failed(error)
        if self._catch_up and self._committed is not None and self._committed.table != table.digest():
            table = self._adopt_committed_table(table, self._committed)
        return self._digests_ready(table)

    def _digests_ready(self, table: DigestTable) -> ev.DigestsReady:
        manifest = self._context.staging.manifest
        seconds = {name: round(self._watch.seconds.get(name, 0.0), 3) for name in ("assemble", "digest")}
        self._log.info("digested", bytes=manifest.nbytes, buckets=len(manifest.buckets), **seconds)
        return ev.DigestsReady(table.digest())

    def _await_digests(self) -> ev.AnyEvent:
        """Wait for deferred digests; send the table to the receivers and to the coordinator."""
        try:
            table = self._deferred.collect()
        except SourceError as error:
            return self._source_failed(error)
        if table is None:
            return ev.DigestsUnavailable(
                "the ranks cannot digest what they expose any more: the table has to be made of buckets"
            )
        self._send_table_to_receivers(table)
        self._deferred.upload(table)
        return self._digests_ready(table)

    def _send_table_to_receivers(self, table: DigestTable) -> None:
        if self._delivery is not None and self._announced is not None:
            signer = self._context.signer
            signature = signer.table(self._announced, Digest(table.digest())) if signer else b""
            self._delivery.send_digest_table(Tabled(table, signature))

    def _adopt_committed_table(self, ours: DigestTable, held: m.HeldVersion) -> DigestTable:
        """The committed table if it is of these weights: it differs from ours if it was made for other engines."""
        staging = self._context.staging
        try:
            blob = self._context.bus.get_blob(held.table, deadline_s=6 * self._context.settings.request_timeout_s)
            staging.adopt(DigestTable.decode(blob, staging.manifest))
        except (RequestRefused, CoordinatorUnreachable, DataplaneError, ValueError) as error:
            self._log.info("other_weights", committed=held.table[:12], ours=ours.digest()[:12], error=str(error))
            return ours
        return staging.table

    def _announce(self, effect: ev.AnnounceRound) -> ev.AnyEvent:
        staging, timeout_s = self._context.staging, self._context.settings.request_timeout_s
        with self._watch.phase("announce"):
            manifest = Digest(staging.name)
            table = Digest("") if effect.digests_deferred else Digest(staging.table.digest())
            message = m.Publish(
                request=self._publish_keys.setdefault(effect.epoch, self._key()),
                channel=self._channel,
                epoch=Epoch(effect.epoch),
                version=Version(self.version),
                manifest=manifest,
                table=table,
                bytes=staging.manifest.nbytes,
                buckets=len(staging.manifest.buckets),
                policy=self._context.settings.policy(),
                mode=self._context.mode.value,
                rollback=self._rollback,
                catch_up=self._catch_up,
                stood_s=self._stood_s,
            )
            if self._context.signer:
                message = self._context.signer.publication(message, self._committed)
            self._announced = message
            blobs = {manifest: staging.blob}
            if not effect.digests_deferred:
                blobs[table] = staging.table.encode()
            self._context.bus.request_with(message, blobs, timeout_s, 6 * timeout_s)
        self._log.info("announced", epoch=effect.epoch, manifest=manifest[:12], table=table[:12])
        return (
            self._export_before_digests() if effect.digests_deferred else None
        ) or ev.RoundAccepted()  # engines prepare meanwhile

    def _export_before_digests(self) -> ev.AnyEvent | None:
        """Export what engines read while its digests are deferred. Returns the failure if there is one.

        Called for the announcement and for a delivery: the answer to the announcement may get lost.
        """
        if self.machine.digests_deferred and not self.machine.table:
            try:
                self._deferred.export()
            except SourceError as error:
                return self._source_failed(error)
        return None

    def _deliver(self, effect: ev.StartDelivery) -> ev.AnyEvent | None:
        """Open the senders and offer them to the coordinator; from then on `_wait` watches the delivery."""
        of, staging = self._context, self._context.staging
        if failed_early := self._export_before_digests():
            return failed_early
        peers = self._peers(effect)
        unable = remove_unable(peers, of.senders) if self.machine.digests_deferred else {}
        table = None if self.machine.digests_deferred else staging.table
        session = TransferSession(of.settings.channel, effect.epoch, self.version, staging.manifest, table)
        sources = staging.sources(effect.receivers)
        for kind in peers:
            if isinstance(sender := of.senders[kind], Dividing):
                sender.divide(sources)
        deadline_s = effect.deadline_s
        self._delivery = delivery = Delivery(session, of.senders, peers, staging.buffers, deadline_s, sources)
        staging.join_ranks(offers := delivery.open(), effect.epoch, deadline_s, alone=sources is None)
        if staging.whole:
            delivery.filled(len(staging.manifest.buckets))
        self._log.info("sending", epoch=effect.epoch, receivers={kind.value: len(each) for kind, each in peers.items()})
        digested = self._digests_before_offer(effect) if self.machine.digests_deferred else None
        if isinstance(digested, ev.AttemptFailed | ev.DigestsUnavailable):
            return digested
        epoch, failed = Epoch(effect.epoch), _bounded({**delivery.unopened, **unable})
        if of.signer:
            offers = tuple(of.signer.offer(offer, epoch) for offer in offers)
        if failed:
            self._log.warning("engines_not_offered", epoch=effect.epoch, failed=failed)
        offered = m.Offered(request=self._key(), channel=self._channel, epoch=epoch, offers=offers, failed=failed)
        try:
            self._request(offered)
        finally:
            delivery.offers_received()  # an answer may be lost where the offer was not
        return digested if not self.machine.table else None

    def _peers(self, effect: ev.StartDelivery) -> dict[m.TransportKind, list[Peer]]:
        """Receivers by transport; makes the senders that are missing."""
        of = self._context
        peers: dict[m.TransportKind, list[Peer]] = {}
        for receiver in effect.receivers:
            peers.setdefault(receiver.transport, []).append(Peer(receiver.engine, receiver.tp))
        if of.mode is Mode.SNAPSHOT and any(transports.by_name(kind).in_place for kind in peers):
            raise Unsupported("a snapshot was asked for out of memory that is trained on: upgrade the coordinator")
        for kind in peers:
            if kind not in of.senders:
                of.senders[kind] = of.make_sender(kind)
        return peers

    def _digests_before_offer(self, effect: ev.StartDelivery) -> ev.AnyEvent | None:
        """Send the digest table to the receivers of a new delivery, if it is known or has to be known by now."""
        staging = self._context.staging
        if staging.known is not None:
            self._send_table_to_receivers(staging.known)
        elif needed_before_offer(staging, effect.receivers):
            return self._await_digests()
        return None

    def _stop_delivery(self) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return
        for kind in delivery.stop():
            # Its thread is stuck inside: it keeps the old sender, the next delivery gets a new one.
            self._log.warning("sender_stuck", transport=kind.value, epoch=delivery.epoch)
            self._context.senders.pop(kind, None)

    def _report_delivery(self, effect: ev.ReportDelivery) -> ev.AnyEvent:
        failed = _bounded(effect.failed)
        if failed:
            self._log.warning("engines_not_served", epoch=effect.epoch, failed=failed)
        spared = tuple(AgentId(engine) for engine in effect.spared)
        table = Digest(effect.table)
        message = m.Sent(
            request=self._key(),
            channel=self._channel,
            epoch=Epoch(effect.epoch),
            failed=failed,
            table=table,
            spared=spared,
        )
        if table:
            timeout_s = self._context.settings.request_timeout_s
            self._deferred.await_upload(timeout_s)
            self._context.bus.request_with(
                message, {table: self._context.staging.table.encode()}, timeout_s, 6 * timeout_s
            )
        else:
            self._request(message)
        return ev.ReportAcknowledged(effect.epoch)

    def _abandon(self, effect: ev.AbandonRound) -> None:
        self._log.warning("giving_up", epoch=effect.epoch, reason=effect.reason)
        reason = effect.reason[:_TEXT]
        self._send_best_effort(
            m.Abandon(request=self._key(), channel=self._channel, epoch=Epoch(effect.epoch), reason=reason)
        )

    def _send_best_effort(self, message: m.Release | m.Abandon) -> None:
        try:
            self._context.bus.request(message, deadline_s=_BEST_EFFORT_S)
        except (RequestRefused, CoordinatorUnreachable, ClientClosed) as error:
            # The lease runs out by itself; this only makes it quicker.
            self._log.debug("best_effort_unanswered", message=message.kind, error=str(error))

    def _conclude_saving(self, result: publication.PublicationResult) -> None:
        """Keep the version's files if it was committed, otherwise discard them."""
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        if result.ending is not ev.EndReason.COMMITTED:
            return saving.discard()
        staging = self._context.staging
        notes = Notes(
            channel=self._context.settings.channel,
            epoch=self.machine.epoch,
            version=self.version,
            manifest=staging.name,
            table=staging.table.digest(),
        )
        with self._watch.phase("save"):
            beside = {
                saved_version.MANIFEST: staging.blob,
                saved_version.TABLE: staging.table.encode(),
                saved_version.PUBLICATION: msgspec.json.encode(self._announced),
            }
            self._saved, self._save_error = saving.finish(self.version, notes, beside)
        return None

    # -- the report ----------------------------------------------------------------------------------------------------

    def report(self, result: publication.PublicationResult) -> PublishReport:
        """Report of the publication as far as it came."""
        ended, manifest = self.machine.ended, self._context.staging.manifest
        theirs = {name: each for name, each in ended.seconds.items() if name != "total"} if ended else {}
        return PublishReport(
            channel=self._context.settings.channel,
            version=self.version,
            epoch=self.machine.epoch,
            outcome=m.Outcome.COMMITTED if result.ending is ev.EndReason.COMMITTED else m.Outcome.ABORTED,
            reason=result.reason,
            mode=self._context.mode,
            attempts=max(1, self.machine.attempt),
            tensors=len(manifest.tensors),
            buckets=len(manifest.buckets),
            bytes=manifest.nbytes,
            seconds={**self._watch.seconds, **theirs, "total": self._watch.total()},
            engines=ended.engines if ended else (),
            manifest=self._context.staging.name,
            table=self.machine.table,
            saved=self._saved,
            save_error=self._save_error,
        )

    # -- small things --------------------------------------------------------------------------------------------------

    @property
    def _channel(self) -> Channel:
        return Channel(self._context.settings.channel)

    def _key(self) -> RequestId:
        return self._context.bus.new_request()

    def _request(self, message: m.ToCoordinator) -> m.ToAgent:
        return self._context.bus.request(message, deadline_s=self._context.settings.request_timeout_s)

    def _source_failed(self, error: SourceError | WeightsDiffer) -> ev.AttemptFailed:
        self.cause, differ = error, isinstance(error, WeightsDiffer)
        return ev.AttemptFailed(ev.EndReason.WEIGHTS_CHANGED if differ else ev.EndReason.SOURCE_FAILED, str(error))

    def _show(self, buckets_sent: int = 0) -> None:
        if self._context.progress is not None:
            buckets = len(self._context.staging.manifest.buckets)
            self._context.progress(Progress(self.version, self.machine.state.value, buckets_sent, buckets))


def _bounded(failed: Mapping[str, str]) -> dict[str, str]:
    """Reasons, cut to the length that messages allow."""
    return {engine: reason[:_TEXT] for engine, reason in failed.items()}
