"""A copy of all buckets of one version on the root rank, so that training may go on while it is published.

It is taken on the training loop's own thread, because assembling is collective: on a thread of its own its collectives
would meet the training step's, in another order on every rank. What is left to the background reads this memory alone.
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
        """Have every bucket assembled, one after another, and keep it. On a GPU this only enqueues."""
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
        """Return when all of it is there. For the thread that reads it."""
        if self._taken is not None:
            self._taken.synchronize()

    def read(self, index: int, out: torch.Tensor) -> None:
        """Copy bucket `index` into the first bytes of `out`."""
        kept = self._buckets[index]
        out[: kept.numel()].copy_(kept, non_blocking=True)

    def close(self) -> None:
        """Give the memory back."""
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
    """A `Source` of one process over a snapshot: no rank takes part, no parameter is read."""

    def __init__(self, source: Source, store: SnapshotBuffer) -> None:
        self._source = source
        self._store = store

    @property
    def model(self) -> str:
        """Architecture of the snapshot."""
        return self._source.model

    @property
    def root(self) -> bool:
        """There is nobody else."""
        return True

    @property
    def device(self) -> torch.device:
        """Where buckets are wanted."""
        return self._source.device

    def tensors(self) -> Sequence[TensorSpec]:
        """What the snapshot consists of."""
        return self._source.tensors()

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Copy a bucket of the snapshot."""
        del manifest
        if out is None:
            raise ValueError("the root gives a buffer")
        self._store.read(index, out)

    def agree(self, blob: bytes | None) -> bytes:
        """Return `blob`: the other ranks train."""
        if blob is None:
            raise ValueError("the root gives what is agreed")
        return blob


_log = get_log(__name__)


class SnapshotTimes(NamedTuple):
    """What a training loop gave for a snapshot, in seconds."""

    snapshot: float
    stood: float


class SnapshotPublisher:
    """Driven with the leader's bus, senders and slots, and weights of their own.

    Implements `background.Latecomers`, too.
    """

    def __init__(
        self, context: PublisherContext, pool: StagingPool, source: Source, times: dict[int, SnapshotTimes]
    ) -> None:
        settings, staging = context.settings, context.staging
        self.stores = [
            SnapshotBuffer(staging.manifest, source.device, settings.snapshot_memory) for _ in range(settings.snapshots)
        ]
        self.look_s = settings.catch_up_s
        self._context, self._times = context, times
        self._warned: set[str] = set()
        """Why engines that are behind were not looked for, as far as that was said."""
        self._contexts: list[PublisherContext] = []
        for store in self.stores:
            stored = SnapshotSource(source, store)
            ranks = CommandedRanks(stored)
            own = BucketStaging(stored, staging.manifest, pool, ranks, staging.head_dim)
            self._contexts.append(msgspec.structs.replace(context, ranks=ranks, staging=own, mode=Mode.SNAPSHOT))

    def publish(self, version: int, buffer: int) -> PublicationEnd:
        """Drive it to its end."""
        took = self._times.pop(version)
        result, report, cause = self._run(PublicationDriver(self._own(buffer), version, stood_s=took.stood), buffer)
        report = msgspec.structs.replace(report, seconds={"snapshot": took.snapshot, **report.seconds})
        log_publication_end(result, report)
        return PublicationEnd(result, report, cause)

    def behind(self, version: int) -> bool:
        """Whether an engine is here without it, and nobody is about to bring it anything."""
        settings = self._context.settings
        try:
            known = parse(self._context.bus.status(settings.request_timeout_s)).channels.get(settings.channel)
        except WeightbusError as error:
            self._warn(str(error))
            return False
        return known is not None and known.lease is None and bool(engines_behind(known, version))

    def bring(self, version: int, buffer: int) -> None:
        """Drive it to those who lack it. How that ended is in the log."""
        result, report, _ = self._run(PublicationDriver(self._own(buffer), version, catch_up=True), buffer)
        log_publication_end(result, report)

    def _warn(self, error: str) -> None:
        """Once for each reason: it is looked again in a moment, and the reason may stay."""
        if error not in self._warned and len(self._warned) < _REASONS:
            self._warned.add(error)
            _log.warning("not_looked_for_latecomers", error=error, advice=_ADVICE)

    def _own(self, buffer: int) -> PublisherContext:
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
    """The engines of `channel` that are here and could take its committed version, if that is `version`.

    Who has given its memory back is brought the next one.
    """
    if channel is None or channel.committed is None or channel.committed.version != version:
        return ()
    return tuple(
        name
        for name, engine in channel.engines.items()
        if engine.state not in _NOT_BROUGHT and engine.version != version
    )


def log_publication_end(result: PublicationResult, report: PublishReport) -> None:
    """One line for each publication."""
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
"""Of so many is warned at most: some name what changes."""
_ADVICE: Final = (
    "engines that come later are not brought this version meanwhile: see whether `weightbus status` answers here, and"
    " whether the coordinator is of the same release"
)
_NOT_BROUGHT: Final = frozenset({"lost", LENT})
_INFO: Final = 20
_WARNING: Final = 30
_ERROR: Final = 40
_LEVELS: Final = {EndReason.COMMITTED: _INFO, EndReason.ABORTED: _WARNING, EndReason.LEASE_BUSY: _WARNING}
