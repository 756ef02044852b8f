"""Drives one publication on rank 0: carries the effects of machine/publication.py out, and feeds back what happened.

Runs on the caller's thread; senders run in threads of their own (delivery.py). Every wait is short enough to send
`KeepWaiting` to the other ranks in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Final, assert_never

import msgspec

from weightbus.control import protocol as m
from weightbus.control.bus import BusClient
from weightbus.control.log import get_log
from weightbus.control.machine import ChannelView, parse
from weightbus.control.protocol import (
    AgentId,
    Channel,
    ClientClosed,
    CoordinatorUnreachable,
    Digest,
    Epoch,
    NotTrusted,
    ReceivingEngine,
    RequestId,
    RequestRefused,
    TransportKind,
    Version,
    WeightbusError,
)
from weightbus.control.security import CurveFiles, read_secret_key, sign_digest_table, sign_endpoint, sign_publication
from weightbus.dataplane.errors import DataplaneError, DeadlineExceeded
from weightbus.dataplane.tensors import DigestTable
from weightbus.dataplane.transports import (
    Dividing,
    Peer,
    Sender,
    Tabled,
    Tabling,
    TransferSession,
    registry as transports,
)
from weightbus.dataplane.transports.disk import Notes, saved_version

from ..checkpoints import Archive, Saving
from ..export import MemoryExport
from ..machine import (
    NO_ENGINE,
    EndReason,
    Mode,
    NonFinite,
    OnNonFinite,
    PublicationEnd,
    PublicationResult,
    PublishReport,
    ReplicasCompared,
    count_engines,
    events as ev,
    publication,
)
from ..settings import TrainerSettings
from ..source import SourceError
from .bucket_staging import BucketStaging, Stopwatch, WeightsDiffer
from .delivery import Delivery
from .rank_commands import KeepWaiting

_log = get_log(__name__)

_POLL_S: Final = 0.05
"""Longest delay in seconds of a coordinator message while a delivery runs. Progress of the delivery wakes the driver.
"""
_BEST_EFFORT_S: Final = 2.0
"""Seconds to wait for the answer to an abandoned round or a released lease; without it the lease expires by itself."""
_TEXT: Final = 2048
"""Maximum characters of free text in messages."""
SETTLE_S: Final = 30.0
"""Seconds for a device to finish what was begun for a version: milliseconds, unless the device is stuck."""
_CANNOT_WAIT: Final = "the digest table follows in this round, and {} cannot wait for it: a later version will do"
_NO_SNAPSHOT: Final = (
    "transport {} gives the weights that are being trained, and not a snapshot of them: publish with mode='live', or"
    " leave it out of the trainer's setting transport"
)
_LEVELS: Final = {
    EndReason.COMMITTED: logging.INFO,
    EndReason.ABORTED: logging.WARNING,
    EndReason.LEASE_BUSY: logging.WARNING,
}


class _NotFinite(Exception):
    """Elements are NaN or infinite, and such versions are refused."""


class Progress(msgspec.Struct, frozen=True):
    """Progress of a publication, for display."""

    version: int
    state: str
    buckets_sent: int
    buckets: int


class PublicationSigner:
    """Signs the messages of this trainer with its secret key, which is neither shown nor logged."""

    def __init__(self, settings: TrainerSettings, curve: CurveFiles) -> None:
        self._name, self._channel = AgentId(settings.name), Channel(settings.channel)
        self._secret = read_secret_key(curve.secret)

    def publication(self, message: m.Publish, previous: m.HeldVersion | None) -> m.Publish:
        """Sign `message`, which follows the committed version `previous`."""
        return sign_publication(message, self._name, self._secret, previous)

    def table(self, message: m.Publish, table: Digest) -> bytes:
        """Sign `table` as the digest table of `message`, which deferred it."""
        return sign_digest_table(message, table, self._secret).encode("ascii")

    def offer(self, offer: m.Endpoint, epoch: Epoch) -> m.Endpoint:
        """Sign `offer` for one epoch."""
        return sign_endpoint(offer, self._channel, epoch, self._secret)


class PublisherContext(msgspec.Struct):
    """State that outlives a publication and serves each of them."""

    settings: TrainerSettings
    bus: BusClient
    staging: BucketStaging
    make_sender: Callable[[m.TransportKind], Sender]
    senders: MutableMapping[m.TransportKind, Sender]
    boot: int
    """Process generation of the coordinator, as of its last `Welcome`."""
    progress: Callable[[Progress], None] | None = None
    signer: PublicationSigner | None = None
    """None if no keys are used."""
    archive: Archive | None = None
    """Keeps versions as files; None if none are kept."""
    limits: publication.PublishLimits = publication.PublishLimits()
    """Of `settings`, as `policy`."""
    policy: m.Policy = m.Policy()
    run: str = ""
    """The run that is named to the coordinator; emptied for a coordinator that does not know runs."""
    takeover: bool = False
    """True until the first lease is granted, if the channel is to be taken from another run."""

    def __post_init__(self) -> None:
        self.run, self.takeover = self.settings.run_name(), self.settings.takeover
        self.limits, self.policy = self.settings.limits(), self.settings.policy()

    def channel_status(self) -> ChannelView | None:
        """The coordinator's status of the channel; None if it does not know the channel."""
        document = self.bus.status(self.settings.request_timeout_s)
        return parse(document).channels.get(self.settings.channel)


class PublicationDriver:
    """Drives one publication on rank 0."""

    def __init__(
        self,
        context: PublisherContext,
        version: int,
        staging: BucketStaging | None = None,
        *,
        rollback: bool = False,
        catch_up: bool = False,
        stood_s: float = 0.0,
        snapshot_s: float | None = None,
    ) -> None:
        """`staging` is of a snapshot; the context's is of live weights.

        `stood_s` and `snapshot_s`: seconds for which training was blocked, for engines and to copy the weights.
        """
        self.version = version
        self._rollback, self._catch_up = rollback, catch_up
        self._stood_s = stood_s
        self.machine = publication.Publication(version, context.limits, catch_up=catch_up)
        self.cause: BaseException | None = None
        self._context, self._staging = context, staging or context.staging
        self._mode = Mode.LIVE if staging is None else Mode.SNAPSHOT
        self._replicas: ReplicasCompared | None = None
        self._warned_of_numbers = False
        self._watch = Stopwatch() if snapshot_s is None else Stopwatch(snapshot=snapshot_s)
        self._digests_pending = False
        """True if the memory is exported and its deferred digests were not collected."""
        self._table_upload: threading.Thread | None = None
        self._keep_alive_at = time.monotonic()
        self._engines: dict[str, m.EngineInfo] = {}
        self._routes: Mapping[str, m.TransportKind] | None = None
        self._committed: m.HeldVersion | None = None
        self._publish_keys: dict[int, RequestId] = {}
        self._delivery: Delivery | None = None
        self._silent = False
        self._waits_for_engines = False
        """True once engines that are not there were named in the log."""
        self._saving: Saving | None = None
        self._announced: m.Publish | None = None
        self._saved = self._save_error = ""
        self._log = _log.bind(channel=context.settings.channel, version=version)
        self._staging.begin()

    def compared(self, replicas: ReplicasCompared | None) -> None:
        """Note what the comparison of replicas found, for report and metrics; None if there was none."""
        self._replicas = replicas
        if replicas is not None:
            self._watch.seconds["replicas"] = replicas.seconds

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> PublicationResult:
        """Run until the machine is done. Effects are carried out in order, each before the next event is taken."""
        effects: deque[ev.AnyEffect] = deque(self._handle(self._attempt(self._prepare_ahead) or ev.PublishRequested()))
        while effects or self.machine.result is None:
            event = self._attempt(partial(self._perform, effects.popleft())) if effects else self._read(self._wait)
            if event is not None:
                effects.extend(self._handle(event))
        return self._settle(self.machine.result)

    def fail(self, error: BaseException) -> PublicationResult:
        """Abandon the round, as far as possible, after a step raised an unexpected exception."""
        ending = EndReason.SOURCE_FAILED if isinstance(error, SourceError) else EndReason.INTERNAL
        self.cause = error
        self._log.error("publication_failed", state=self.machine.state.value, exc_info=error)
        for effect in self._handle(ev.AttemptFailed(ending, f"{type(error).__name__}: {error}")):
            self._perform(effect)
        self._stop_delivery()
        return self._settle(self.machine.result or PublicationResult(ending, str(error)))

    def _settle(self, result: PublicationResult) -> PublicationResult:
        """End all reading of the weights: they may be stepped afterwards. Keep or discard the version's files."""
        if self._digests_pending:
            try:
                self._collect_digests()
            except Exception as error:  # noqa: BLE001  the next publication finds what is wrong
                self._log.warning("digests_not_settled", error=f"{type(error).__name__}: {error}")
        in_place = self._staging.in_place
        result = settle_device(result, None if in_place is None else in_place.memory_export)
        saving, self._saving = self._saving, None
        if saving is not None and result.ending is EndReason.COMMITTED:
            with self._watch.phase("save"):
                self._saved, self._save_error = self._keep_files(saving)
        elif saving is not None:
            saving.discard()
        return result

    def _attempt(self, step: Callable[[], ev.AnyEvent | None]) -> ev.AnyEvent | None:
        """Do a step; the refusal or timeout of its request becomes an event, and so does a failure of the source."""
        try:
            return self._read(step)
        except NotTrusted as refused:
            return self._untrusted(refused)
        except RequestRefused as refused:
            self._log.debug("refused", code=refused.code.value, reason=refused.reason)
            return ev.RequestDenied(refused.code, refused.reason, refused.retry_after_s)
        except CoordinatorUnreachable as silence:
            if (untrusted := self._context.bus.untrusted) is not None:  # a new connection is refused without a word
                return self._untrusted(untrusted)
            if not self._silent:
                self._log.warning("coordinator_silent", error=str(silence))
            self._silent = True
            return ev.RequestTimedOut(str(silence))

    def _read(self, step: Callable[[], ev.AnyEvent | None]) -> ev.AnyEvent | None:
        """Do a step; a failure of the source becomes an event. A session that has ended ends the publication."""
        try:
            return step()
        except (SourceError, WeightsDiffer) as error:
            self.cause = error
            differ = isinstance(error, WeightsDiffer)
            return ev.AttemptFailed(EndReason.WEIGHTS_CHANGED if differ else EndReason.SOURCE_FAILED, str(error))
        except _NotFinite as found:
            return ev.AttemptFailed(EndReason.NOT_FINITE, str(found))

    def _untrusted(self, refused: NotTrusted) -> ev.AttemptFailed:
        self.cause = refused
        return ev.AttemptFailed(EndReason.NOT_TRUSTED, str(refused))

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
        if (refused := self._context.bus.untrusted) is not None:
            return self._untrusted(refused)
        if deadline is not None and now >= deadline:
            return ev.Tick()
        if now >= self._keep_alive_at:
            self._staging.ranks.tell(KeepWaiting())
            self._keep_alive_at = now + self._context.settings.beat_s
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
                raise WeightsDiffer(delivery.differing)
            return ev.DeliveryEnded(delivery.epoch, delivery.failed, delivery.spared)
        row = delivery.wanted()
        if row is None:
            delivery.wait(_POLL_S)
            return None
        self._staging.refill(row, self._watch)
        delivery.filled(row.stop)
        self._show(row.stop)
        return None

    def _event(self, message: m.ToAgent | None) -> ev.AnyEvent | None:
        """The event that a message of the coordinator stands for; None for a message of no concern to the machine."""
        match message:
            case m.Send():
                return ev.SendRequested(message.epoch, message.version, message.receivers, message.deadline_s)
            case m.Withdraw():
                return ev.EnginesWithdrawn(message.epoch, message.engines)
            case m.RoundDone():
                return ev.RoundDoneReceived(
                    message.epoch, message.version, message.outcome, message.reason, message.engines, message.seconds
                )
            case m.Welcome():
                restarted, self._context.boot = message.boot != self._context.boot, message.boot
                self._log.warning("coordinator_back", restarted=restarted, boot=message.boot)
                return ev.Reconnected(message.committed, restarted)
            case m.Refused():  # told once, and perhaps before this publication: what holds now is asked
                refusal = self._context.bus.refusal
                return self._untrusted(refusal[0]) if refusal and isinstance(refusal[0], NotTrusted) else None
            case _:
                return None

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, effect: ev.AnyEffect) -> ev.AnyEvent | None:  # noqa: C901, PLR0911, PLR0912  one line for each effect
        match effect:
            case ev.RequestLease():
                return self._acquire()
            case ev.AssembleBuckets():
                return self._assemble()
            case ev.AnnounceRound():
                return self._announce(effect)
            case ev.StartDelivery():
                return self._deliver(effect)
            case ev.AwaitDigests():
                return self._await_digests()
            case ev.ReportDelivery():
                return self._report_delivery(effect)
            case ev.CountEngines():
                return self._count_engines()
            case ev.DropReceivers():
                if self._delivery is not None:
                    self._delivery.withdraw(effect.engines)
            case ev.StopDelivery():
                self._stop_delivery()
            case ev.AbandonRound():
                self._log.warning("giving_up", epoch=effect.epoch, reason=effect.reason)
                epoch, reason = Epoch(effect.epoch), effect.reason[:_TEXT]
                self._send_best_effort(
                    m.Abandon(request=self._key(), channel=self._channel, epoch=epoch, reason=reason)
                )
            case ev.ReleaseLease():
                self._send_best_effort(m.Release(request=self._key(), channel=self._channel, epoch=Epoch(effect.epoch)))
            case _:  # pragma: no cover
                assert_never(effect)
        return None

    def _acquire(self) -> ev.AnyEvent:
        with self._watch.phase("acquire"):
            of = self._context
            message = m.Acquire(
                request=self._key(),
                channel=self._channel,
                version=Version(self.version),
                rollback=self._rollback,
                run=of.run,
                takeover=of.takeover,
            )
            asked_at = time.monotonic()
            try:
                answer = self._request(message)
            except CoordinatorUnreachable:
                if message.run and (of.bus.unread_at or 0.0) >= asked_at:
                    self._log.warning("runs_not_known", reason="an older coordinator: no run is named to it")
                    of.run, of.takeover = "", False
                raise
        if not isinstance(answer, m.Granted):
            return ev.AttemptFailed(EndReason.INTERNAL, f"the coordinator answered Acquire with {answer.kind}")
        of.takeover = False  # once: a later run that takes the channel is not undone by this one's next version
        self._engines, self._committed = answer.engines, answer.committed
        self._routes = answer.routes or None
        if self._staging.in_place is not None:
            self._staging.in_place.ready_flags = answer.may_defer_digests
        self._log.info("lease_granted", epoch=answer.epoch, engines=len(answer.engines))
        return ev.LeaseObtained(answer.epoch, answer.committed, self._may_defer_digests(answer))

    def _count_engines(self) -> ev.AnyEvent:
        try:
            counted = count_engines(self._context.channel_status())
        except (RequestRefused, m.Malformed) as error:
            self._log.info("engines_not_counted", reason=str(error))
            return ev.EnginesCounted((), {}, known=False)
        if not self._waits_for_engines and counted.missing:
            self._log.warning("waiting_for_engines", there=counted.usable, missing=counted.missing)
        self._waits_for_engines = True
        return counted

    def _prepare_ahead(self) -> None:
        """Begin to compute what engines read while the lease is requested."""
        if self._staging.in_place is not None:
            with self._watch.phase("make"):
                self._staging.in_place.prepare()

    def _assemble(self) -> ev.AnyEvent:
        staging = self._staging
        if self._saving is None and self._context.archive is not None and not self._catch_up:
            self._saving = self._context.archive.saving(self.version, staging.manifest)
        self._collect_digests()
        table = staging.digest(self.version, self._engines, self._watch, self._saving, self._routes)
        if self._catch_up and self._committed is not None and self._committed.table != table.digest():
            table = self._adopt_committed_table(table, self._committed)
        return self._digests_ready(table)

    def _digests_ready(self, table: DigestTable) -> ev.DigestsReady:
        manifest = self._staging.manifest
        seconds = {name: round(self._watch.seconds.get(name, 0.0), 3) for name in ("assemble", "digest")}
        self._log.info("digested", bytes=manifest.nbytes, buckets=len(manifest.buckets), **seconds)
        self._judge_numbers()
        return ev.DigestsReady(table.digest())

    def _judge_numbers(self) -> None:
        """Warn of elements that are NaN or infinite, once for a version. Raises `_NotFinite` if they are refused.

        A resync is not judged: its version is committed.
        """
        found = self._nonfinite
        if not found.elements or self._catch_up:
            return
        if not self._warned_of_numbers:
            self._warned_of_numbers = True
            first = {each.name: each.elements for each in found.first}
            self._log.warning("weights_not_finite", elements=found.elements, tensors=found.tensors, first=first)
        if self._context.settings.nonfinite is OnNonFinite.REFUSE:
            raise _NotFinite(f"{found}; nonfinite = refuse")

    @property
    def _nonfinite(self) -> NonFinite:
        """What the digests of this version found so far."""
        tensors = self._staging.manifest.tensors
        return NonFinite.of({tensors[index].name: count for index, count in self._staging.nonfinite.items()})

    def _await_digests(self) -> ev.DigestsReady | ev.DigestsUnavailable:
        """Wait for deferred digests; send the table to the receivers and to the coordinator."""
        table = self._collect_digests()
        if table is None:
            return ev.DigestsUnavailable(
                "the ranks cannot digest what they expose any more: the table has to be made of buckets"
            )
        self._send_table_to_receivers(table)
        self._upload_table(table)
        return self._digests_ready(table)

    def _may_defer_digests(self, granted: m.Granted) -> bool:
        """True if the version may be announced without its table, while the devices of all ranks still digest.

        They digest while the coordinator prepares engines and, where engines copy out of other devices, while they
        copy. Together with ready flags that saves 28 ms of a round of 61 GB of FP8 weights.
        The coordinator must allow it. Excluded are a version that may be committed already, which only its table tells;
        one that is kept as files, which are made of buckets; the first one that goes by this sender; and every one
        where the digests decide whether engines may hear of it (`nonfinite = refuse`).
        """
        of, in_place = self._context, self._staging.in_place
        newer = granted.committed is None or self.version > granted.committed.version
        able = isinstance(of.senders.get(TransportKind.DIRECT), Tabling)
        kept = of.archive is not None and of.archive.keeps(self.version)
        live = self._mode is Mode.LIVE and not self._catch_up
        judged = of.settings.nonfinite is OnNonFinite.REFUSE
        wanted = granted.may_defer_digests and of.settings.open_tables and live and not judged
        begun = self._staging.known is None and in_place is not None and in_place.digests_begun
        return wanted and newer and able and not kept and begun

    def _collect_digests(self) -> DigestTable | None:
        """Wait for deferred digests. Returns the table; None if digests are not available in place. Collective."""
        staging = self._staging
        if self._digests_pending and staging.in_place is not None:
            self._digests_pending = False
            with self._watch.phase("digest"):
                digests = staging.in_place.digests()
            if digests is not None:
                staging.take_digests(self.version, digests)
        return staging.known

    def _upload_table(self, table: DigestTable) -> None:
        """Upload `table` to the coordinator, in a thread.

        The delivery report, on which a commit waits, finds it there. If the upload fails, the report uploads it.
        """
        bus, deadline_s = self._context.bus, 6 * self._context.settings.request_timeout_s

        def put() -> None:
            try:
                bus.put_blob(table.encode(), deadline_s, table.digest())
            except WeightbusError as error:
                _log.debug("table_not_given", error=str(error))

        self._table_upload = threading.Thread(target=put, name="weightbus-table", daemon=True)
        self._table_upload.start()

    def _send_table_to_receivers(self, table: DigestTable) -> None:
        if self._delivery is not None and self._announced is not None:
            signer = self._context.signer
            signature = signer.table(self._announced, Digest(table.digest())) if signer else b""
            self._delivery.send_digest_table(Tabled(table, signature))

    def _adopt_committed_table(self, ours: DigestTable, held: m.HeldVersion) -> DigestTable:
        """The committed table if it is of these weights: it differs from ours if it was made for other engines."""
        staging = self._staging
        try:
            blob = self._context.bus.get_blob(held.table, deadline_s=6 * self._context.settings.request_timeout_s)
            staging.adopt(DigestTable.decode(blob, staging.manifest))
        except (RequestRefused, CoordinatorUnreachable, DataplaneError, ValueError) as error:
            self._log.info("other_weights", committed=held.table[:12], ours=ours.digest()[:12], error=str(error))
            return ours
        return staging.table

    def _announce(self, effect: ev.AnnounceRound) -> ev.AnyEvent:
        staging = self._staging
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
                policy=self._context.policy,
                mode=self._mode.value,
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
            self._request(message, blobs)
        self._log.info("announced", epoch=effect.epoch, manifest=manifest[:12], table=table[:12])
        self._export_before_digests()  # engines prepare meanwhile
        return ev.RoundAccepted()

    def _export_before_digests(self) -> None:
        """Export what engines read while its digests are deferred, once.

        Called for the announcement and for a delivery: the answer to the announcement may get lost.
        """
        staging = self._staging
        open_table = self.machine.digests_deferred and not self.machine.table and staging.known is None
        if open_table and not self._digests_pending and staging.in_place is not None:
            with self._watch.phase("digest"):
                staging.in_place.export()
            self._digests_pending = True

    def _deliver(self, effect: ev.StartDelivery) -> ev.AnyEvent | None:
        """Open the senders and offer them to the coordinator; from then on `_wait` watches the delivery."""
        of, staging = self._context, self._staging
        self._export_before_digests()
        peers, unable = self._peers(effect)
        self._export_to_latecomers(peers)
        if self.machine.digests_deferred:
            unable |= remove_unable(peers, of.senders)
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
        if isinstance(digested, ev.DigestsUnavailable):
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

    def _export_to_latecomers(self, peers: Iterable[m.TransportKind]) -> None:
        """Export what the first engines to read the memory came too late for: the version was digested without them.

        Without that they would be sent what was computed from the weights of an earlier publication, and refuse it.
        """
        in_place = self._staging.in_place
        if in_place is not None and not in_place.exported and any(transports.by_name(kind).in_place for kind in peers):
            with self._watch.phase("digest"):
                in_place.export()

    def _peers(self, effect: ev.StartDelivery) -> tuple[dict[m.TransportKind, list[Peer]], dict[str, str]]:
        """Receivers by transport, and reasons by engine that gets nothing; makes the senders that are missing.

        Of a transport that is not built in the coordinator cannot know that no snapshot travels by it.
        """
        of = self._context
        peers: dict[m.TransportKind, list[Peer]] = {}
        unable: dict[str, str] = {}
        for receiver in effect.receivers:
            if self._mode is Mode.SNAPSHOT and transports.by_name(receiver.transport).in_place:
                unable[receiver.engine] = _NO_SNAPSHOT.format(receiver.transport.value)
            else:
                peers.setdefault(receiver.transport, []).append(Peer(receiver.engine, receiver.tp))
        for kind in peers:
            if kind not in of.senders:
                of.senders[kind] = of.make_sender(kind)
        return peers, unable

    def _digests_before_offer(self, effect: ev.StartDelivery) -> ev.DigestsReady | ev.DigestsUnavailable | None:
        """Send the digest table to the receivers of a new delivery, if it is known or has to be known by now."""
        staging = self._staging
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
        epoch, table = Epoch(effect.epoch), Digest(effect.table)
        sent = m.Sent(
            request=self._key(),
            channel=self._channel,
            epoch=epoch,
            failed=failed,
            table=table,
            spared=tuple(AgentId(engine) for engine in effect.spared),
            nonfinite=0 if self._catch_up else sum(self._staging.nonfinite.values()),
            differing=0 if self._replicas is None else self._replicas.differing,
        )
        if table and self._table_upload is not None:
            self._table_upload.join(self._context.settings.request_timeout_s)
        self._request(sent, {table: self._staging.table.encode()} if table else None)
        return ev.ReportAcknowledged(effect.epoch)

    def _send_best_effort(self, message: m.Release | m.Abandon) -> None:
        try:
            self._context.bus.request(message, deadline_s=_BEST_EFFORT_S)
        except (RequestRefused, CoordinatorUnreachable, ClientClosed) as error:
            # The lease runs out by itself; this only makes it quicker.
            self._log.debug("best_effort_unanswered", message=message.kind, error=str(error))

    def _keep_files(self, saving: Saving) -> tuple[str, str]:
        """Keep the version's files. Returns their folder, and why there is none."""
        staging = self._staging
        notes = Notes(
            channel=self._context.settings.channel,
            epoch=self.machine.epoch,
            version=self.version,
            manifest=staging.name,
            table=staging.table.digest(),
        )
        beside = {
            saved_version.MANIFEST: staging.blob,
            saved_version.TABLE: staging.table.encode(),
            saved_version.PUBLICATION: msgspec.json.encode(self._announced),
        }
        return saving.finish(self.version, notes, beside)

    def end(self, result: PublicationResult) -> PublicationEnd:
        """How the publication ended, with a report as far as it came. Logs one line."""
        ended, manifest = self.machine.ended, self._staging.manifest
        theirs = {name: each for name, each in ended.seconds.items() if name != "total"} if ended else {}
        report = PublishReport(
            channel=self._context.settings.channel,
            version=self.version,
            epoch=self.machine.epoch,
            outcome=m.Outcome.COMMITTED if result.ending is EndReason.COMMITTED else m.Outcome.ABORTED,
            reason=result.reason,
            mode=self._mode,
            attempts=max(1, self.machine.attempt),
            tensors=len(manifest.tensors),
            buckets=len(manifest.buckets),
            bytes=manifest.nbytes,
            seconds={**self._watch.seconds, **theirs, "total": self._watch.total()},
            engines=ended.engines if ended else (),
            manifest=self._staging.name,
            table=self.machine.table,
            saved=self._saved,
            save_error=self._save_error,
            nonfinite=self._nonfinite,
            replicas=self._replicas,
        )
        end = PublicationEnd(result, report, self.cause)
        log_publication_end(end)
        if report.committed and ended is not None and not ended.engines and not self._catch_up:
            self._log.warning("published_to_no_engine", reason=NO_ENGINE.format(report.channel))
        return end

    @property
    def _channel(self) -> Channel:
        return Channel(self._context.settings.channel)

    def _key(self) -> RequestId:
        return self._context.bus.new_request()

    def _request(self, message: m.ToCoordinator, blobs: Mapping[Digest, bytes] | None = None) -> m.ToAgent:
        timeout_s = self._context.settings.request_timeout_s
        if blobs:
            answer = self._context.bus.request_with(message, blobs, timeout_s, 6 * timeout_s)
        else:
            answer = self._context.bus.request(message, deadline_s=timeout_s)
        self._silent = False
        return answer

    def _show(self, buckets_sent: int = 0) -> None:
        if self._context.progress is not None:
            buckets = len(self._staging.manifest.buckets)
            self._context.progress(Progress(self.version, self.machine.state.value, buckets_sent, buckets))


def _bounded(failed: Mapping[str, str]) -> dict[str, str]:
    """Reasons, cut to the length that messages allow."""
    return {engine: reason[:_TEXT] for engine, reason in failed.items()}


def remove_unable(peers: dict[TransportKind, list[Peer]], senders: Mapping[TransportKind, Sender]) -> dict[str, str]:
    """Remove from `peers` the engines that cannot wait for a table; returns the reason for each."""
    kinds = [kind for kind in peers if not isinstance(senders[kind], Tabling)]
    return {peer.engine: _CANNOT_WAIT.format(kind.value) for kind in kinds for peer in peers.pop(kind)}


def needed_before_offer(staging: BucketStaging, receivers: Sequence[ReceivingEngine]) -> bool:
    """True if the digests are awaited before the offer: a copy on the same device would wait for them there."""
    return any(each.shares for each in receivers) or staging.buffers[0].memory.device.type == "cpu"


def settle_device(result: PublicationResult, memory_export: MemoryExport | None) -> PublicationResult:
    """`result`, once this rank's device reads no weights any more; they may be stepped then.

    If the device does not finish in time the source has failed; a version that is committed stays committed.
    """
    try:
        if memory_export is not None:
            memory_export.settle(SETTLE_S)
    except RuntimeError as error:  # torch's: the device has failed, and reads nothing any more
        _log.warning("device_failed", error=str(error))
    except DeadlineExceeded as error:
        _log.exception("device_not_settled", ending=result.ending.value)
        if result.ending is not EndReason.COMMITTED:
            reason = f"{error}, and may still read the weights ({result.reason})"
            return PublicationResult(EndReason.SOURCE_FAILED, reason)
    return result


def log_publication_end(end: PublicationEnd) -> None:
    """Log one line for a publication."""
    result, report, _ = end
    _log.log(
        _LEVELS.get(result.ending, logging.ERROR),
        "publication_over",
        channel=report.channel,
        version=report.version,
        mode=report.mode.value,
        ending=result.ending.value,
        reason=result.reason,
        seconds=round(report.seconds.get("total", 0.0), 3),
    )
