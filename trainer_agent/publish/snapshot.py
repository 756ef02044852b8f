"""Snapshots: copies of all buckets of one version on rank 0, and their publications.

A snapshot is taken on the training loop's own thread, because assembling is collective: on another thread its
collectives would meet the training step's, in a different order on every rank. Afterwards the publishing thread reads
the snapshot's buffer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import torch

from weightbus.control.log import get_log
from weightbus.control.machine import LENT, ChannelView, parse
from weightbus.control.protocol import WeightbusError
from weightbus.dataplane.tensors import Manifest, TensorSpec

from ..machine import EndReason, Mode, PublicationEnd, PublicationResult, PublishReport, SnapshotMemory
from ..source import Source
from .bucket_staging import BucketStaging, StagingPool
from .driver import PublicationDriver
from .publisher_context import PublisherContext
from .rank_commands import CommandedRanks


class SnapshotBuffer:
    """Memory of one snapshot, allocated when it is first taken and kept until `close`."""

    def __init__(self, manifest: Manifest, device: torch.device, memory: SnapshotMemory) -> None:
        self._manifest = manifest
        self._device = device
        self._memory = memory
        self._buckets: list[torch.Tensor] = []
        self._taken: torch.cuda.Event | None = None

    def take(self, assemble: Callable[[int, torch.Tensor], None]) -> None:
        """Assemble every bucket into the buffer, one after another. On a GPU this only enqueues work."""
        if not self._buckets:
            self._buckets = [self._empty(bucket.nbytes) for bucket in self._manifest.buckets]
        direct = self._device.type != "cuda" or self._memory is SnapshotMemory.DEVICE
        scratch = [] if direct else self._scratch()
        for index, kept in enumerate(self._buckets):
            if direct:
                assemble(index, kept)
                continue
            staged = scratch[index % len(scratch)][: kept.numel()]
            assemble(index, staged)
            kept.copy_(staged, non_blocking=True)
        if self._device.type == "cuda":
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._taken.record()

    def wait(self) -> None:
        """Block until the snapshot is complete. Called by the thread that reads it."""
        if self._taken is not None:
            self._taken.synchronize()

    def read(self, index: int, out: torch.Tensor) -> None:
        """Copy bucket `index` into the first bytes of `out`."""
        kept = self._buckets[index]
        out[: kept.numel()].copy_(kept, non_blocking=True)

    def close(self) -> None:
        """Free the memory."""
        self._buckets = []

    def _empty(self, nbytes: int) -> torch.Tensor:
        if self._memory is SnapshotMemory.DEVICE:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _scratch(self) -> list[torch.Tensor]:
        count = min(2, len(self._manifest.buckets))
        return [
            torch.empty(self._manifest.largest_bucket, dtype=torch.uint8, device=self._device) for _ in range(count)
        ]


class SnapshotSource:
    """A `Source` of one process over a snapshot: no other rank takes part, no parameter is read."""

    def __init__(self, source: Source, store: SnapshotBuffer) -> None:
        self._source = source
        self._snapshot_buffer = store

    @property
    def model(self) -> str:
        """Architecture of the model."""
        return self._source.model

    @property
    def root(self) -> bool:
        """True: it is the only rank."""
        return True

    @property
    def device(self) -> torch.device:
        """Device on which buckets are wanted."""
        return self._source.device

    def tensors(self) -> Sequence[TensorSpec]:
        """Tensors of the snapshot."""
        return self._source.tensors()

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Copy a bucket of the snapshot."""
        del manifest
        if out is None:
            raise ValueError("the root gives a buffer")
        self._snapshot_buffer.read(index, out)

    def agree(self, blob: bytes | None) -> bytes:
        """Return `blob`: the other ranks train."""
        if blob is None:
            raise ValueError("the root gives what is agreed")
        return blob


_log = get_log(__name__)


class SnapshotTimes(NamedTuple):
    """Seconds for which a training loop was blocked for a snapshot."""

    snapshot: float
    stood: float


class SnapshotPublisher:
    """Publishes snapshots with rank 0's connection, senders and staging buffers, from sources of their own.

    Implements `background_publisher.EngineResyncs`, too.
    """

    def __init__(
        self, context: PublisherContext, pool: StagingPool, source: Source, times: dict[int, SnapshotTimes]
    ) -> None:
        settings, staging = context.settings, context.staging
        self.buffers = [
            SnapshotBuffer(staging.manifest, source.device, settings.snapshot_memory) for _ in range(settings.snapshots)
        ]
        self.poll_s = settings.catch_up_s
        self._context, self._times = context, times
        self._warned: set[str] = set()
        """Errors that were logged while looking for engines that are behind."""
        self._contexts: list[PublisherContext] = []
        for store in self.buffers:
            stored = SnapshotSource(source, store)
            ranks = CommandedRanks(stored)
            own = BucketStaging(stored, staging.manifest, pool, ranks, staging.head_dim)
            self._contexts.append(msgspec.structs.replace(context, ranks=ranks, staging=own, mode=Mode.SNAPSHOT))

    def publish(self, version: int, buffer: int) -> PublicationEnd:
        """Publish a new version from `buffer`."""
        took = self._times.pop(version)
        result, report, cause = self._run(
            PublicationDriver(self._context_of(buffer), version, stood_s=took.stood), buffer
        )
        report = msgspec.structs.replace(report, seconds={"snapshot": took.snapshot, **report.seconds})
        log_publication_end(result, report)
        return PublicationEnd(result, report, cause)

    def behind(self, version: int) -> bool:
        """True if an engine is present without `version`, and no lease is held to deliver another one."""
        settings = self._context.settings
        try:
            known = parse(self._context.bus.status(settings.request_timeout_s)).channels.get(settings.channel)
        except WeightbusError as error:
            self._warn_once(str(error))
            return False
        return known is not None and known.lease is None and bool(engines_behind(known, version))

    def bring(self, version: int, buffer: int) -> None:
        """Deliver the version to the engines that lack it. The log says how that ended."""
        result, report, _ = self._run(PublicationDriver(self._context_of(buffer), version, catch_up=True), buffer)
        log_publication_end(result, report)

    def _warn_once(self, error: str) -> None:
        """Log each error once: the next look is a moment later, and the error may stay."""
        if error not in self._warned and len(self._warned) < _REASONS:
            self._warned.add(error)
            _log.warning("not_looked_for_latecomers", error=error, advice=_ADVICE)

    def _context_of(self, buffer: int) -> PublisherContext:
        own = self._contexts[buffer]
        own.boot = self._context.boot
        return own

    def _run(self, drive: PublicationDriver, buffer: int) -> PublicationEnd:
        try:
            result = drive.run()
        except Exception as error:  # noqa: BLE001  it is logged there, and is what the handle raises
            result = drive.fail(error)
        self._context.boot = self._contexts[buffer].boot
        return PublicationEnd(result, drive.report(result), drive.cause)


def engines_behind(channel: ChannelView | None, version: int) -> tuple[str, ...]:
    """Engines of `channel` that are present and could take its committed version, if that is `version`.

    An engine that has released its memory receives the next version.
    """
    if channel is None or channel.committed is None or channel.committed.version != version:
        return ()
    return tuple(
        name
        for name, engine in channel.engines.items()
        if engine.state not in _NOT_BROUGHT and engine.version != version
    )


def log_publication_end(result: PublicationResult, report: PublishReport) -> None:
    """Log one line for each publication."""
    _log.log(
        _LEVELS.get(result.ending, _ERROR),
        "publication_over",
        channel=report.channel,
        version=report.version,
        mode=report.mode.value,
        ending=result.ending.value,
        reason=result.reason,
        seconds=round(report.seconds.get("total", 0.0), 3),
    )


_REASONS: Final = 64
"""Maximum number of different errors that are logged: some contain numbers that change."""
_ADVICE: Final = (
    "engines that come later are not brought this version meanwhile: see whether `weightbus status` answers here, and"
    " whether the coordinator is of the same release"
)
_NOT_BROUGHT: Final = frozenset({"lost", LENT})
_INFO: Final = 20
_WARNING: Final = 30
_ERROR: Final = 40
_LEVELS: Final = {EndReason.COMMITTED: _INFO, EndReason.ABORTED: _WARNING, EndReason.LEASE_BUSY: _WARNING}
