"""What a training loop holds: connect once, publish after every step, close at the end.

    agent = TrainerAgent.connect(source, channel="policy")          # on every rank
    ...
    report = agent.publish(version)                                  # on every rank, between two optimizer steps
    handle = agent.publish(version, mode="snapshot")                 # or: go on training as soon as it is copied

Every call is collective over the ranks of the source. Rank 0 speaks with the coordinator, owns the staging buffers and
sends; the other ranks execute its commands. Results and errors are the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, overload

from weightbus.control.cli import load_settings
from weightbus.control.log import get_log
from weightbus.control.machine import PastStatus
from weightbus.control.protocol import MAX_VERSION, TransportKind
from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.tensors import Manifest
from weightbus.dataplane.transports import Address

from ..export import MemoryExport
from ..machine import (
    AgentClosed,
    ConnectFailed,
    EndReason,
    Mode,
    PublicationEnd,
    PublicationResult,
    PublishHandle,
    PublishReport,
    TooFarAhead,
    failure_of,
)
from ..quantized import as_served
from ..settings import SECTION, TrainerSettings
from ..source import Source, SourceError
from . import rank_commands as commands
from .bucket_staging import PipelineBroadcast, VersionLayout
from .driver import Progress, settle_device
from .rank_commands import CommandedRanks, unexpected_command
from .rank_zero import RankZero, memory_export_of, start_rank_zero

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
    ) -> None:
        self.settings = settings
        self.manifest = manifest
        """Tensors and buckets of every version."""
        self._source = source
        self._rank_zero = rank_zero
        self._memory_export = memory_export
        self._pipeline = pipeline
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
        source = as_served(source, settings)
        layout = VersionLayout.of(source, settings)
        return cls(source, settings, layout.manifest, *_start_rank(source, settings, layout, progress), layout.pipeline)

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
) -> tuple[RankZero | None, MemoryExport | None]:
    """Start rank 0, or the memory export of another rank. Raises `ConnectFailed` on every rank."""
    ranks = CommandedRanks(source)
    if not source.root:
        return None, _await_rank_zero(ranks, memory_export_of(source, settings, layout.manifest))
    try:
        rank_zero = start_rank_zero(source, settings, layout, progress)
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
