"""What a training loop holds: connect once, publish after every step, close at the end.

    agent = TrainerAgent.connect(source, channel="policy")          # on every rank
    ...
    report = agent.publish(version)                                  # on every rank, between two optimizer steps
    handle = agent.publish(version, mode="snapshot")                 # or: go on training as soon as it is copied

Every call is collective over the ranks of the source. Rank 0 speaks with the coordinator, owns the staging buffers and
sends; the other ranks execute its commands. Results and errors are the same on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, overload

import torch

from weightbus.control.bus import BusClient, BusSettings
from weightbus.control.cli import load_settings
from weightbus.control.log import get_log
from weightbus.control.machine import PastStatus
from weightbus.control.protocol import (
    MAX_VERSION,
    AgentId,
    Channel,
    ConfigurationError,
    CoordinatorUnreachable,
    Hello,
    Incarnation,
    Malformed,
    RequestId,
    RequestRefused,
    Role,
    TrainerInfo,
    TransportKind,
    WeightbusError,
    Welcome,
)
from weightbus.control.security import (
    agent_key_files,
)
from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.memory import BucketBuffers
from weightbus.dataplane.processes import default_runtime_dir, host_identity
from weightbus.dataplane.tensors import Manifest
from weightbus.dataplane.transports import Address, SenderContext, Transport, registry as transports

from ..checkpoints import Archive, ArchivePolicy, check_configs
from ..export import Exportable, MemoryExport, location_of, topology_of
from ..machine import (
    AgentClosed,
    ConnectFailed,
    EndReason,
    EnginesMissing,
    Mode,
    PublicationEnd,
    PublicationResult,
    PublishHandle,
    PublishReport,
    ReplicasCompared,
    TooFarAhead,
    count_engines,
    failure_of,
)
from ..quantized import as_served, served_folder
from ..settings import SECTION, SendsOver, TrainerSettings
from ..source import Source, SourceError, head_dim_of
from . import rank_commands as commands
from .background_publisher import (
    BackgroundPublisher,
    SnapshotClaim,
    engines_behind,
)
from .bucket_staging import BucketStaging, InPlaceExport, PipelineBroadcast, Stopwatch, VersionLayout
from .driver import (
    Progress,
    PublicationDriver,
    PublicationSigner,
    PublisherContext,
    log_publication_end,
    settle_device,
)
from .rank_commands import (
    AssembleBucket,
    CommandedRanks,
    EnginesAwaited,
    ExportMemory,
    Finish,
    KeepWaiting,
    SnapshotTaken,
    unexpected_command,
)
from .replica_check import ReplicaCheck

_COUNT_S: Final = 0.5
"""Seconds between two looks which engines are there."""
_log = get_log(__name__)


class TrainerAgent:
    """Publishes the weights of one source on one channel. Made by `connect`; a context manager."""

    def __init__(  # noqa: PLR0917  made in two places
        self,
        source: Source,
        settings: TrainerSettings,
        manifest: Manifest,
        rank_zero: RankZero | None,
        memory_export: MemoryExport | None = None,
        pipeline: PipelineBroadcast | None = None,
        replicas: ReplicaCheck | None = None,
    ) -> None:
        self.settings = settings
        self.manifest = manifest
        """Tensors and buckets of every version."""
        self._source = source
        self._rank_zero = rank_zero
        self._memory_export = memory_export
        self._pipeline = pipeline
        self._replicas = replicas
        self._ranks = CommandedRanks(source)
        self._unusable = ""

    @classmethod
    def connect(
        cls,
        source: Source,
        *,
        channel: str | None = None,
        name: str | None = None,
        coordinator: str | None = None,
        transport: Sequence[str] | str | None = None,
        bucket_bytes: int | None = None,
        settings: TrainerSettings | None = None,
        file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        progress: Callable[[Progress], None] | None = None,
        **more: object,
    ) -> Self:
        """Describe the weights, connect to the coordinator and allocate the staging buffers. Collective.

        Every field of `TrainerSettings` may be given by name, the rarer ones through `more`; a field that is not given
        comes from the environment (``WEIGHTBUS_TRAINER_...``), then `file`, then the default. `settings` replaces all
        of them. Give equal arguments on every rank. If the checkpoint that engines serve is quantized (by `served`,
        `hf_config_dir` or the source's own config), weights are quantized on their way. `progress` is called on rank 0,
        from inside `publish` or from the thread that publishes snapshots.

        Raises:
            ConfigurationError: the arguments or settings cannot work.
            SourceError: the weights cannot be described.
            ConnectFailed: rank 0 could not be started; the message says why, on every rank.
        """
        if settings is None:
            kinds = (transport,) if isinstance(transport, str) else transport
            given: dict[str, object] = {
                "channel": channel,
                "name": name,
                "coordinator": coordinator,
                "transport": None if kinds is None else [str(TransportKind(kind)) for kind in kinds],
                "bucket_bytes": bucket_bytes,
                **{key: str(value) if isinstance(value, Path) else value for key, value in more.items()},
            }
            environment = os.environ if environ is None else environ
            loaded = load_settings(TrainerSettings, SECTION, file=file, environ=environment, flags=given)
            settings = loaded.value
        replicas = ReplicaCheck(source, settings)
        source = as_served(source, settings)
        layout = VersionLayout.of(source, settings)
        rank_zero, memory_export = _start_rank(source, settings, layout, progress, replicas)
        return cls(source, settings, layout.manifest, rank_zero, memory_export, layout.pipeline, replicas)

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that speaks for the group."""
        return self._rank_zero is not None

    @property
    def committed(self) -> int | None:
        """The channel's committed version, as of the coordinator's last message; None for none, and on other ranks."""
        return self._rank_zero.committed if self._rank_zero else None

    def history(self) -> tuple[PastStatus, ...]:
        """Versions committed in the channel, oldest first, as far as the coordinator remembers. Rank 0 only."""
        if self._rank_zero is None:
            raise AgentClosed("only the leading rank of an open agent can ask the coordinator")
        return self._rank_zero.history()

    @overload
    def publish(self, version: int, mode: Literal["live"] = "live", *, rollback: bool = False) -> PublishReport: ...

    @overload
    def publish(self, version: int, mode: Literal["snapshot"]) -> PublishHandle: ...

    def publish(
        self, version: int, mode: Literal["live", "snapshot"] = "live", *, rollback: bool = False
    ) -> PublishReport | PublishHandle:
        """Publish the weights, as they are now, to every engine of the channel as `version`. Collective.

        `version` must be above the committed one, unless `rollback` says that the channel is to go back: a trainer that
        resumed from an older checkpoint is refused otherwise, and goes back live. ``live`` reads the parameters while
        engines load them: do not change them before this returns. ``snapshot`` copies them and returns; the copy is
        published in the background, after earlier snapshots, as the settings `snapshots` and `overlap` say. With
        `max_lag` it returns when training may go on: no engine that takes requests is further behind `version` than
        that. Live versions wait for all snapshots.

        Raises:
            PublishFailed: the version was not committed, or could not be copied; its `report` tells what happened.
            TooFarAhead: engines did not come closer than `max_lag`; the snapshot is published all the same.
            ValueError: `version` is not a version, or the arguments contradict each other. No message was sent.
        """
        _check_version(version)
        if self._unusable:
            raise AgentClosed(f"this agent {self._unusable}: connect a new one")
        if Mode(mode) is Mode.LIVE:
            led = self._rank_zero.publish(version, rollback=rollback) if self._rank_zero else self._receive_end(version)
            return self._conclude(led)
        if rollback:
            raise ValueError("a channel goes back live: publish with mode = live")
        taken, future = (
            self._rank_zero.snapshot(version) if self._rank_zero else (self._follow_rank_zero(version), None)
        )
        if not isinstance(taken, commands.SnapshotTaken):
            self._conclude(taken)
            raise unexpected_command(commands.Finish(taken.result, taken.report), "to fail, or to take a snapshot")
        over = future.done if future else None
        handle = PublishHandle(version, lambda: self._await_end(version, future), over, taken.stood_s)
        if taken.ahead:
            raise TooFarAhead(taken.ahead, handle)
        return handle

    def catch_up(self, version: int) -> PublishReport:
        """Deliver `version`, which is committed, to engines that registered since, and to no others. Collective.

        The parameters must be those of `version`, and are refused otherwise: call this between the publication and the
        next step. Engines that hold the version are not affected, and if no engine lacks it, no weights are read.
        Snapshots need no call: the last one is kept and delivered automatically. Raises a `PublishFailed` as `publish`
        does; the version stays committed in any case.
        """
        _check_version(version)
        if self._unusable:
            raise AgentClosed(f"this agent {self._unusable}: connect a new one")
        return self._conclude(self._rank_zero.catch_up(version) if self._rank_zero else self._receive_end(version))

    def wait_for_engines(self, n: int, timeout_s: float = 600.0) -> tuple[str, ...]:
        """Wait until `n` engines of the channel could take a version; returns their names. Collective.

        Such an engine has joined and its server answers; it need not hold the committed version. Raises
        `EnginesMissing` after `timeout_s`, which names the engines that are there, and why others are not ready.
        """
        if self._unusable:
            raise AgentClosed(f"this agent {self._unusable}: connect a new one")
        if self._rank_zero:
            found = self._rank_zero.wait_for_engines(n, timeout_s)
        else:
            while not isinstance(command := self._ranks.hear(), EnginesAwaited):
                if not isinstance(command, KeepWaiting):
                    raise unexpected_command(command, "to wait for engines")
            found = command
        if len(found.there) < n:
            raise EnginesMissing(n, timeout_s, found.there, found.missing, found.problem)
        return found.there

    def close(self) -> None:
        """Leave the channel and free the staging buffers. Not collective; may be called twice."""
        self._unusable = self._unusable or "was closed"
        rank_zero, self._rank_zero = self._rank_zero, None
        memory_export, self._memory_export = self._memory_export, None
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
        if rank_zero is not None:
            rank_zero.close()
        if memory_export is not None:
            memory_export.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _conclude(self, end: PublicationEnd) -> PublishReport:
        """Return the report, or raise the error that the result stands for."""
        if end.result.ending is EndReason.COMMITTED:
            return end.report
        if end.result.ending is EndReason.SOURCE_FAILED:
            self._unusable = f"lost its source ({end.result.reason})"
        raise failure_of(end)

    def _await_end(self, version: int, future: Future[PublicationEnd] | None) -> PublishReport:
        """Wait for the end of a snapshot's publication. Collective."""
        if self._unusable:
            raise AgentClosed(f"this agent {self._unusable} before the publication of version {version} was waited for")
        if self._rank_zero and future:
            return self._conclude(self._rank_zero.follow(version, future))
        return self._conclude(self._receive_end(version))

    def _receive_end(self, version: int) -> PublicationEnd:
        end = self._follow_rank_zero(version)
        if isinstance(end, commands.SnapshotTaken):
            return self._failed_alone(version, unexpected_command(end, "the end of its publication"))
        return end

    def _follow_rank_zero(self, version: int) -> PublicationEnd | commands.SnapshotTaken:  # noqa: C901, PLR0912  one line for each command
        """Execute rank 0's commands until the publication has ended, or a snapshot is taken and training may go on."""
        cause: BaseException | None = None
        while True:
            try:
                command = self._ranks.hear()
                match command:
                    case commands.KeepWaiting():
                        pass
                    case commands.Finish() if command.report.version == version:
                        result = settle_device(command.result, self._memory_export)
                        return PublicationEnd(result, command.report, cause)
                    case commands.RefillStage() | commands.JoinBroadcast() if cause is not None:
                        pass  # rank 0 has learned, or will learn, that this source failed
                    case _ if cause is not None:
                        # Rank 0 did not notice that this rank failed; its collective will run out of time.
                        return self._failed_alone(version, cause)
                    case commands.CompareReplicas() if self._replicas is not None:
                        self._replicas.compare()
                    case commands.AssembleBucket():
                        self._source.assemble(self.manifest, command.index, None)
                    case commands.PrepareExport() if self._memory_export is not None:
                        self._memory_export.prepare(digests=command.digests, ready_flags=command.ready_flags)
                    case commands.ExportMemory() if self._memory_export is not None:
                        self._memory_export.export(prepared=command.prepared, ready_flags=command.ready_flags)
                        if command.digests:
                            self._memory_export.digests()
                    case commands.DigestExported() if self._memory_export is not None:
                        self._memory_export.digests()
                    case commands.JoinSends() if self._memory_export is not None:
                        self._memory_export.join_sends(
                            Address(command.address, token=command.token), command.epoch, command.deadline_s
                        )
                    case commands.ReadStage() | commands.RefillStage() | commands.JoinBroadcast() if (
                        self._pipeline is not None
                    ):
                        self._pipeline.execute(command)
                    case commands.SnapshotTaken() if command.version == version:
                        return command
                    case _:
                        unexpected = unexpected_command(command, f"a command for version {version}")
                        return self._failed_alone(version, unexpected)
            except Exception as error:  # noqa: BLE001  logged, and raised in the end as this rank's cause
                if cause is not None:
                    return self._failed_alone(version, cause)
                # Rank 0's collective failed too, or will: it may still be able to report how the publication ended.
                _log.exception("rank_failed", version=version)
                cause = error

    def _failed_alone(self, version: int, cause: BaseException) -> PublicationEnd:
        """The end as this rank sees it, when rank 0 cannot be heard any more."""
        result = PublicationResult(EndReason.SOURCE_FAILED, f"{cause}")
        return PublicationEnd.without_round(self.settings.channel, version, Mode.LIVE, result, cause)


def _check_version(version: object) -> None:
    """Raise `ValueError`, on every rank alike, before a publication begins."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
        raise ValueError(f"version = {version!r}: a whole number from 0 to 2**53 is expected, the training step, say")


def _start_rank(
    source: Source,
    settings: TrainerSettings,
    layout: VersionLayout,
    progress: Callable[[Progress], None] | None,
    replicas: ReplicaCheck,
) -> tuple[RankZero | None, MemoryExport | None]:
    """Start rank 0, or the memory export of another rank. Raises `ConnectFailed` on every rank."""
    ranks = CommandedRanks(source)
    if not source.root:
        return None, _await_rank_zero(ranks, memory_export_of(source, settings, layout.manifest))
    try:
        rank_zero = start_rank_zero(source, settings, layout, progress, replicas)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        try:
            ranks.tell(commands.RankZeroFailed(reason))
        except SourceError as broken:
            _log.warning("ranks_not_told", error=str(broken))
        if isinstance(error, Exception):
            raise ConnectFailed(reason) from error
        raise
    ranks.tell(commands.RankZeroReady())
    return rank_zero, None


def _await_rank_zero(ranks: CommandedRanks, memory_export: MemoryExport | None) -> MemoryExport | None:
    """Execute rank 0's commands until it has started. Returns None if the ranks' memory cannot be exported."""
    while True:
        match ranks.hear():
            case commands.RankZeroReady():
                return memory_export
            case commands.ExportMemory() if memory_export is not None:
                try:
                    memory_export.export()
                except NotExportable:  # rank 0 learned the same, logs it, and goes on without
                    memory_export.close()
                    memory_export = None
            case commands.RankZeroFailed(reason):
                if memory_export is not None:
                    memory_export.close()
                raise ConnectFailed(reason)
            case command:
                raise unexpected_command(command, "rank 0 to have started")


# -- rank 0: state that outlives publications, and the end of each on every rank


class RankZero:
    """Publishes version after version. Not thread-safe."""

    def __init__(
        self,
        context: PublisherContext,
        pool: BucketBuffers,
        source: Source,
        memory_export: MemoryExport | None = None,
        replicas: ReplicaCheck | None = None,
    ) -> None:
        self._context = context
        self._ranks = context.staging.ranks
        self._pool = pool
        self._source = source
        self._memory_export = memory_export
        self._replicas = replicas
        self._background = BackgroundPublisher(context, pool, source)
        if doubt := context.settings.doubt():
            _log.warning("settings_doubted", channel=context.settings.channel, reason=doubt)
        self._stood_s = 0.0
        """Seconds for which training was blocked since the last snapshot was enqueued."""

    @property
    def committed(self) -> int | None:
        """The channel's committed version, as of the coordinator's last message."""
        return self._context.bus.committed

    def history(self) -> tuple[PastStatus, ...]:
        """Versions committed in the channel, oldest first, as far as the coordinator remembers."""
        known = self._context.channel_status()
        return known.history if known else ()

    def wait_for_engines(self, n: int, timeout_s: float) -> EnginesAwaited:
        """Wait until `n` engines could take a version, at most `timeout_s`, and tell every rank what was found."""
        settings, until = self._context.settings, time.monotonic() + timeout_s
        beat_at = time.monotonic() + settings.beat_s
        found = EnginesAwaited((), {})
        try:
            while True:
                try:
                    counted = count_engines(self._context.channel_status())
                    found = EnginesAwaited(counted.usable, counted.missing)
                except (RequestRefused, CoordinatorUnreachable, Malformed) as error:
                    found = EnginesAwaited((), {}, str(error))
                now = time.monotonic()
                if len(found.there) >= n or now >= until:
                    return found
                if now >= beat_at:
                    self._ranks.tell(KeepWaiting())
                    beat_at = now + settings.beat_s
                time.sleep(min(_COUNT_S, until - now))
        finally:
            self._ranks.tell(found)

    def catch_up(self, version: int) -> PublicationEnd:
        """Deliver the committed `version` to the engines that lack it, and tell every rank how that ended."""
        try:
            if engines_behind(self._context.channel_status(), version):
                return self.publish(version, catch_up=True)
        except WeightbusError as error:
            return self._tell(self._failed(version, error, Mode.LIVE))
        result = PublicationResult(EndReason.COMMITTED, "no engine is behind")
        return self._tell(PublicationEnd.without_round(self._context.settings.channel, version, Mode.LIVE, result))

    def publish(self, version: int, *, rollback: bool = False, catch_up: bool = False) -> PublicationEnd:
        """Publish `version` and tell every rank how that ended. Raises only what is no `Exception`, afterwards."""
        drive = PublicationDriver(self._context, version, rollback=rollback, catch_up=catch_up)
        try:
            self._wait_for_snapshots()
            found = None if catch_up else self._compare_replicas()
            if refused := self._judge_replicas(found, version, Mode.LIVE):
                return self._tell(refused)
            drive.compared(found)
            result = drive.run()
        except BaseException as error:
            # The other ranks wait for a command, whatever happened here.
            result = drive.fail(error)
            if not isinstance(error, Exception):
                self._tell(drive.end(result))
                raise
        return self._tell(drive.end(result))

    def snapshot(self, version: int) -> tuple[SnapshotTaken, Future[PublicationEnd]] | tuple[PublicationEnd, None]:
        """Copy the weights and tell every rank to go on. The future of the publication's end never raises.

        If the snapshot could not be taken its end is returned, and every rank told. With `max_lag` blocks until
        training may go on, or until it is known that it may not.
        """
        watch = Stopwatch()
        claimed = False
        try:
            with watch.phase("claim"):
                claim = self._claim(version)
            claimed = True
            found = self._compare_replicas()
            if refused := self._judge_replicas(found, version, Mode.SNAPSHOT):
                self._background.discard()
                return self._tell(refused), None
            with watch.phase("snapshot"):
                self._background.take(claim, self._assemble)
        except BaseException as error:
            if claimed:
                self._background.discard()
            end = self._failed(version, error)
            log_publication_end(end)
            self._tell(end)
            if not isinstance(error, Exception):
                raise
            return end, None
        stood_s = self._stood_s + watch.seconds["claim"]
        future = self._background.enqueue(
            version, snapshot_s=watch.seconds["snapshot"], stood_s=stood_s, replicas=found
        )
        with watch.phase("hold"):
            ahead = self._background.wait_until_allowed(version, self._ranks)
        self._stood_s = watch.seconds["hold"]
        taken = SnapshotTaken(version, watch.seconds["claim"] + self._stood_s, ahead)
        self._ranks.tell(taken)
        _log.info("snapshot_taken", channel=self._context.settings.channel, version=version, **watch.seconds)
        return taken, future

    def follow(self, version: int, future: Future[PublicationEnd]) -> PublicationEnd:
        """Wait for a snapshot's publication and tell every rank how it ended."""
        deadline = time.monotonic() + self._longest_wait_s()
        while not future.done():
            if time.monotonic() >= deadline:  # it has deadlines of its own, so this is an error of ours
                error = TimeoutError(
                    f"the publication of version {version} did not end in {self._longest_wait_s():.0f} s"
                )
                return self._tell(self._failed(version, error))
            futures.wait([future], self._context.settings.beat_s)
            self._ranks.tell(KeepWaiting())
        return self._tell(future.result())

    def close(self) -> None:
        """Close senders, buffers and the connection to the coordinator; each of them even if another fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._context.bus.close)
            stack.callback(self._pool.close)
            if self._memory_export is not None:
                stack.callback(self._memory_export.close)
            for each in self._context.senders.values():
                stack.callback(each.close)
            stack.callback(lambda: self._background.close(self._longest_wait_s()))

    def _assemble(self, index: int, out: torch.Tensor) -> None:
        self._ranks.tell(AssembleBucket(index))
        self._source.assemble(self._context.staging.manifest, index, out)

    def _compare_replicas(self) -> ReplicasCompared | None:
        """What all ranks find, if this publication is due for a comparison. Collective."""
        due = self._replicas is not None and self._replicas.due()
        return self._replicas.command() if self._replicas is not None and due else None

    def _judge_replicas(self, found: ReplicasCompared | None, version: int, mode: Mode) -> PublicationEnd | None:
        """The end of a version whose replicas differ and must not; None if it may be published."""
        reason = self._replicas.refusal(found, version) if self._replicas is not None else ""
        if not reason:
            return None
        result = PublicationResult(EndReason.REPLICAS_DIFFER, reason)
        end = PublicationEnd.without_round(self._context.settings.channel, version, mode, result, replicas=found)
        log_publication_end(end)
        return end

    def _claim(self, version: int) -> SnapshotClaim:
        if all(transports.by_name(kind).in_place for kind in self._context.settings.transports()):
            raise ConfigurationError(
                "transport = direct and sends give the weights that are being trained, and not a snapshot of them:"
                ' publish with mode="live", or allow local, distributed or disk too'
            )
        if self._background.is_pending(version):
            raise ValueError(f"version {version} is being published already: publish a higher one, or wait for it")
        deadline = time.monotonic() + self._longest_wait_s()
        while (claim := self._background.claim(self._context.settings.beat_s)) is None:
            self._keep_waiting_until(deadline)
        return claim

    def _wait_for_snapshots(self) -> None:
        deadline = time.monotonic() + self._longest_wait_s()
        while not self._background.idle(self._context.settings.beat_s):
            self._keep_waiting_until(deadline)

    def _keep_waiting_until(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"earlier snapshots were not published in {self._longest_wait_s():.0f} s")
        self._ranks.tell(KeepWaiting())

    def _longest_wait_s(self) -> float:
        """Upper bound in seconds of all pending publications, by their own deadlines."""
        limits = self._context.limits
        return (
            self._background.pending
            * (limits.attempts * (limits.acquire_s + limits.round_s) + limits.abandon_s + 2 * limits.engines_s)
            + 1.0
        )

    def _failed(self, version: int, error: BaseException, mode: Mode = Mode.SNAPSHOT) -> PublicationEnd:
        """The end of a version for which no round could be begun."""
        ending = EndReason.SOURCE_FAILED if isinstance(error, SourceError) else EndReason.INTERNAL
        result = PublicationResult(ending, f"{type(error).__name__}: {error}")
        return PublicationEnd.without_round(self._context.settings.channel, version, mode, result, error)

    def _tell(self, end: PublicationEnd) -> PublicationEnd:
        """Tell every rank the end, and return it."""
        try:
            self._ranks.tell(Finish(end.result, end.report))
        except SourceError as error:
            # The group is broken: every rank notices by itself, at the latest after the source's timeout.
            _log.warning("ranks_not_told", version=end.report.version, error=str(error))
        return end


def start_rank_zero(
    source: Source,
    settings: TrainerSettings,
    layout: VersionLayout,
    progress: Callable[[Progress], None] | None = None,
    replicas: ReplicaCheck | None = None,
) -> RankZero:
    """Connect to the coordinator and allocate the staging buffers. Rank 0 only."""
    manifest = layout.manifest
    check_configs(settings.served, settings.hf_config_dir)
    archive = _archive(source, settings)
    memory_export, refusals = _first_export(memory_export_of(source, settings, manifest), source, settings)
    refusals |= _missing(settings, source.device.type)
    kinds = tuple(kind for kind in settings.transports() if kind not in refusals)
    if not kinds:
        raise ConfigurationError(
            f"transport = {', '.join(settings.transport)} is all that is allowed, and this trainer's memory cannot be"
            " given in place (the log says why): allow local too"
        )
    sender_context = _sender_context(settings, str(source.device), memory_export)
    buckets = len(manifest.buckets)
    pool = BucketBuffers(
        source.device, min(settings.slots, buckets), manifest.largest_bucket, f"{settings.channel}-{settings.name}"
    )
    with contextlib.ExitStack() as undo:
        undo.callback(pool.close)
        if memory_export is not None:
            undo.callback(memory_export.close)
        curve = agent_key_files(settings.keys, settings.name, insecure_loopback=settings.insecure_loopback)
        topology = topology_of(
            settings,
            kinds,
            memory_export.places if memory_export else layout.places or (location_of(0, source.device),),
            runtime_dir=settings.runtime_dir or default_runtime_dir(),
            refusals=refusals,
        )
        bus = BusClient(
            BusSettings(endpoint=settings.coordinator, curve=curve),
            _hello_maker(source, settings, kinds),
            topology=lambda: topology,
        )
        undo.callback(bus.close)
        ranks = CommandedRanks(source)
        context = PublisherContext(
            settings=settings,
            bus=bus,
            staging=BucketStaging(
                source,
                manifest,
                pool,
                ranks,
                head_dim_of(source),
                None if memory_export is None else InPlaceExport(memory_export, ranks, _trainer_info(source, kinds)),
                layout.pipeline,
            ),
            make_sender=lambda kind: transports.by_name(kind).sender(sender_context),
            senders={},
            boot=_join(bus, settings).boot,
            progress=progress,
            signer=PublicationSigner(settings, curve) if curve else None,
            archive=archive,
        )
        undo.pop_all()
    return RankZero(context, pool, source, memory_export, replicas)


def _join(bus: BusClient, settings: TrainerSettings) -> Welcome:
    """Join the coordinator. One that refuses this key is not waited for longer than one of its answers is."""
    first_s = min(settings.request_timeout_s, settings.connect_timeout_s)
    try:
        return bus.start(first_s)
    except CoordinatorUnreachable:
        left_s = settings.connect_timeout_s - first_s
        if left_s <= 0 or bus.untrusted:
            raise
        return bus.start(left_s)


def _archive(source: Source, settings: TrainerSettings) -> Archive | None:
    """The archive that keeps versions as files; None if none was asked for."""
    if not settings.save_every or settings.save_dir is None:
        return None
    policy = ArchivePolicy(settings.save_every, settings.keep_last, settings.keep_every)
    return Archive(settings.save_dir, settings.channel, policy, served_folder(source, settings))


def memory_export_of(source: Source, settings: TrainerSettings, manifest: Manifest) -> MemoryExport | None:
    """This rank's memory export; None if no transport needs one or the source has none. The same on every rank."""
    in_place = _in_place(settings.preferences()).values()
    read, sent = (any(each.reads_memory is wanted for each in in_place) for wanted in (True, False))
    if not (read or sent) or not isinstance(source, Exportable):
        return None
    folder = settings.runtime_dir or default_runtime_dir()
    return MemoryExport(source, manifest, folder, settings.channel, read=read, sent=sent)


def _first_export(
    memory_export: MemoryExport | None, source: Source, settings: TrainerSettings
) -> tuple[MemoryExport | None, dict[TransportKind, str]]:
    """Export once, at the start: memory that cannot be exported is published through buckets, by the next transport.

    Returns also the transports that are not possible because of that, with reasons. They are logged as warnings only if
    the settings name these transports.
    """
    wanted = _in_place(settings.preferences())
    level = logging.WARNING if _in_place(settings.transport) else logging.INFO
    if memory_export is None:
        reason = without_places(type(source))
        if wanted:
            _log.log(level, "not_in_place", reason=reason)
        return None, dict.fromkeys(wanted, reason)
    CommandedRanks(source).tell(ExportMemory(digests=False))
    try:
        memory_export.export()
    except NotExportable as error:
        _log.log(level, "not_in_place", reason=str(error))
        memory_export.close()
        return None, dict.fromkeys(wanted, str(error))
    reading = [kind for kind, each in wanted.items() if each.reads_memory] if memory_export.unreadable else []
    if reading:
        _log.log(level, "not_direct", reason=memory_export.unreadable)
    return memory_export, dict.fromkeys(reading, memory_export.unreadable)


def without_places(kind: type) -> str:
    """Reason why a source of this kind cannot have its memory read or sent: it is no `Exportable`."""
    return f"{kind.__name__} does not say where its tensors lie"


def _in_place(kinds: Iterable[TransportKind]) -> dict[TransportKind, Transport]:
    """The transports of `kinds` that transfer the ranks' memory itself."""
    return {kind: each for kind in kinds if (each := transports.by_name(kind)).in_place}


def _missing(settings: TrainerSettings, device: str) -> dict[TransportKind, str]:
    """The transports that this trainer cannot send by whatever its memory is, with reasons, which are logged."""
    context = _sender_context(settings, device, None)
    found = {kind: reason for kind in settings.preferences() if (reason := transports.by_name(kind).missing(context))}
    for kind, reason in found.items():
        _log.warning("transport_missing", transport=kind.value, reason=reason)
    return found


def _hello_maker(source: Source, settings: TrainerSettings, kinds: tuple[TransportKind, ...]) -> Callable[[], Hello]:
    incarnation = Incarnation(os.urandom(8).hex())
    trainer = _trainer_info(source, kinds)
    greetings = itertools.count(1)

    def hello() -> Hello:
        return Hello(
            request=RequestId(f"{incarnation}-hello-{next(greetings)}"),
            agent=AgentId(settings.name),
            role=Role.TRAINER,
            channel=Channel(settings.channel),
            incarnation=incarnation,
            trainer=trainer,
        )

    return hello


def _trainer_info(source: Source, kinds: tuple[TransportKind, ...]) -> TrainerInfo:
    return TrainerInfo(host=host_identity(), device=source.device.type, ranks=0, transports=kinds)


def _sender_context(settings: TrainerSettings, device: str, memory_export: MemoryExport | None) -> SenderContext:
    return SenderContext(
        channel=settings.channel,
        runtime_dir=settings.runtime_dir,
        device=device,
        host=settings.host,
        checkpoint_dir=settings.checkpoint_dir,
        hf_config_dir=settings.hf_config_dir,
        expose=None if memory_export is None else lambda: memory_export.current,
        describe=None if memory_export is None else memory_export.described,
        nixl=settings.sends_over is SendsOver.NIXL,
        keep_groups_s=settings.keep_groups_s,
    )
