"""Snapshots: copies of all buckets of one version on rank 0, and the thread that publishes them behind training.

A snapshot is taken on the training loop's own thread, because assembling is collective: on another thread its
collectives would meet the training step's, in a different order on every rank. Afterwards the publishing thread reads
the snapshot's buffer alone, with no collective and no parameter, and drives the publications in order, one at a time.
Both threads share one lock.

With `max_lag` training waits for engines:

    lag = the version that training goes on from - the oldest version that a request may be answered with

The coordinator keeps engines that are too far behind the committed version off its ready list (`Policy.max_lag`). The
trainer does the other half: a snapshot's `publish` returns when training from it would not exceed `max_lag`.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Final, NamedTuple

import msgspec
import torch

from weightbus.control.log import get_log
from weightbus.control.machine import LENT, STARTING, ChannelView
from weightbus.control.protocol import (
    CoordinatorUnreachable,
    InvariantBroken,
    Malformed,
    RequestRefused,
    WeightbusError,
)
from weightbus.dataplane.memory import BucketBuffers
from weightbus.dataplane.tensors import Manifest

from ..machine import EndReason, Mode, PublicationEnd, PublicationResult, ReplicasCompared
from ..settings import Overlap, SnapshotMemory
from ..source import Source, head_dim_of
from .bucket_staging import BucketStaging
from .driver import PublicationDriver, PublisherContext
from .rank_commands import CommandedRanks, KeepWaiting

_log = get_log(__name__)

_SILENT: Final = frozenset({"lost", STARTING, "dirty", "pending", LENT, "quarantined"})
"""States of engines, as the status names them, in which an engine answers no request."""
_NOT_BROUGHT: Final = frozenset({"lost", STARTING, LENT})
"""States in which an engine does not take a committed version."""
_REASONS: Final = 64
"""Maximum number of different errors that are logged: some contain numbers that change."""
_ADVICE: Final = (
    "engines that come later are not brought this version meanwhile: see whether `weightbus status` answers here, and"
    " whether the coordinator is of the same release"
)


class _Pending(NamedTuple):
    """A publication that has not ended."""

    end: Future[PublicationEnd]
    snapshot_s: float
    """Seconds for which training was blocked to copy the weights."""
    stood_s: float
    """Seconds for which it was blocked for engines, or for a buffer."""
    replicas: ReplicasCompared | None = None
    """What the comparison of replicas found; None if there was none."""


class BackgroundPublisher:
    """Snapshots of rank 0, and the thread that publishes them with rank 0's connection, senders and staging buffers.

    Methods are called by the training loop's thread. The last committed snapshot is kept until its buffer is needed:
    engines that register later receive it.
    """

    def __init__(self, context: PublisherContext, pool: BucketBuffers, source: Source) -> None:
        settings, manifest = context.settings, context.staging.manifest
        self._context = context
        self._device = source.device
        self._buffers = [
            SnapshotBuffer(manifest, source.device, settings.snapshot_memory) for _ in range(settings.snapshots)
        ]
        sources = [SnapshotSource(source, each) for each in self._buffers]
        self._stagings = [
            BucketStaging(each, manifest, pool, CommandedRanks(each), head_dim_of(source)) for each in sources
        ]
        """For each buffer."""
        self._last_committed: tuple[int, int] | None = None
        """The version that was committed last, and its buffer, until the buffer is claimed."""
        self._changed = threading.Condition()
        self._queue = SnapshotQueue(settings.snapshots, settings.overlap)
        self._pending: dict[int, _Pending] = {}
        self._ended = 0
        """Number of publications that have ended."""
        self._closing = False
        self._warned: set[str] = set()
        """Errors that were logged while looking for engines that are behind."""
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Number of publications that have not ended."""
        with self._changed:
            return self._queue.pending

    def is_pending(self, version: int) -> bool:
        """True if a publication of this version has not ended."""
        with self._changed:
            return version in self._pending

    def idle(self, timeout_s: float) -> bool:
        """Wait until no publication runs; False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queue.idle, timeout_s)

    def claim(self, timeout_s: float) -> SnapshotClaim | None:
        """Claim a buffer for the next snapshot; None if none became free in time. Superseded versions end here."""
        with self._changed:
            claim = self._queue.claim()
            if claim is None:
                self._changed.wait(timeout_s)
                claim = self._queue.claim()
            if claim and self._last_committed and self._last_committed[1] == claim.buffer:
                self._last_committed = None
            for version in claim.superseded if claim else ():
                self._drop(version, EndReason.SUPERSEDED, "a newer snapshot took its place before its round began")
            return claim

    def take(self, claim: SnapshotClaim, assemble: Callable[[int, torch.Tensor], None]) -> None:
        """Copy the weights into the claimed buffer; see `SnapshotBuffer.take`."""
        self._buffers[claim.buffer].take(assemble)

    def enqueue(
        self,
        version: int,
        *,
        snapshot_s: float = 0.0,
        stood_s: float = 0.0,
        replicas: ReplicasCompared | None = None,
    ) -> Future[PublicationEnd]:
        """Publish `version`, which the claimed buffer holds. The future never raises. The rest as in `_Pending`."""
        future: Future[PublicationEnd] = Future()
        with self._changed:
            self._queue.filled(version)
            self._pending[version] = _Pending(future, snapshot_s, stood_s, replicas)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weightbus-snapshots", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def discard(self) -> None:
        """Return the claimed buffer unused."""
        with self._changed:
            self._queue.discard()
            self._changed.notify_all()

    def wait_until_allowed(self, version: int, ranks: CommandedRanks) -> str:
        """Block until training may go on from `version` by `max_lag`; returns why if it may not. Collective."""
        settings = self._context.settings
        if settings.max_lag is None:
            return ""
        deadline = time.monotonic() + settings.lag_timeout_s
        while True:
            with self._changed:  # before the status, which then includes versions of publications that have ended
                ended, coming = self._ended, self._queue.pending > 0
            serving, silence = self._serving(settings.max_lag)
            expired = time.monotonic() >= deadline
            match lag_decision(version, serving, settings.max_lag, coming=coming, expired=expired):
                case LagDecision.GO:
                    return ""
                case LagDecision.TOO_FAR:
                    waited = f"after {settings.lag_timeout_s:.0f} s (lag_timeout_s)"
                    why = silence or (waited if expired else "and nothing is coming")
                    ahead = f"{_lag_found(version, serving)}, max_lag is {settings.max_lag}, {why}"
                    _log.error("too_far_ahead", channel=settings.channel, reason=ahead)
                    return ahead
                case LagDecision.WAIT:
                    ranks.tell(KeepWaiting())
                    left = max(0.0, deadline - time.monotonic())
                    with self._changed:
                        self._changed.wait_for(lambda: self._ended > ended, min(settings.beat_s, left))  # noqa: B023  called at once

    def close(self, patience_s: float) -> None:
        """Drop snapshots that have not begun, wait for the running publication, free the buffers."""
        with self._changed:
            self._closing = True
            for version in self._queue.cancel_waiting():
                self._drop(version, EndReason.ABORTED, "the agent was closed before its round began")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                _log.warning("snapshot_abandoned", channel=self._context.settings.channel, patience_s=patience_s)
                return
        for store in self._buffers:
            store.close()

    def _drop(self, version: int, ending: EndReason, reason: str) -> None:
        channel = self._context.settings.channel
        end = PublicationEnd.without_round(channel, version, Mode.SNAPSHOT, PublicationResult(ending, reason))
        self._pending.pop(version).end.set_result(end)
        _log.info("snapshot_dropped", channel=channel, version=version, reason=reason)

    def _serving(self, max_lag: int) -> tuple[int | None, str]:
        """The oldest version served; None and the reason if the coordinator does not say."""
        try:
            return oldest_served(self._context.channel_status(), max_lag), ""
        except (CoordinatorUnreachable, RequestRefused, Malformed) as error:
            return None, str(error)

    # -- the publishing thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._on_own_stream():
            while True:
                with self._changed:
                    poll_s = self._context.settings.catch_up_s if self._last_committed else 0.0
                    self._changed.wait_for(lambda: not self._queue.idle or self._closing, poll_s or None)
                    begun, kept = self._queue.begin(), self._last_committed
                    if begun is None and self._closing:
                        return
                if begun is not None:
                    self._publish_next(*begun)
                elif kept is not None:
                    self._resync(*kept)

    def _publish_next(self, version: int, buffer: int) -> None:
        self._buffers[buffer].wait()
        with self._changed:
            pending = self._pending[version]
        staging = self._stagings[buffer]
        drive = PublicationDriver(
            self._context, version, staging, stood_s=pending.stood_s, snapshot_s=pending.snapshot_s
        )
        drive.compared(pending.replicas)
        end = self._drive(drive)
        with self._changed:
            self._queue.finish()
            self._last_committed = (version, buffer) if end.result.ending is EndReason.COMMITTED else None
            self._ended += 1
            del self._pending[version]
            pending.end.set_result(end)
            self._changed.notify_all()

    def _resync(self, version: int, buffer: int) -> None:
        """Deliver a kept version to engines that registered after it was committed. The log says how that ended."""
        if not self._behind(version):
            return
        with self._changed:
            if self._closing or self._last_committed != (version, buffer) or not self._queue.reuse(buffer):
                return
        self._drive(PublicationDriver(self._context, version, self._stagings[buffer], catch_up=True))
        with self._changed:
            self._queue.finish()
            self._changed.notify_all()

    def _drive(self, drive: PublicationDriver) -> PublicationEnd:
        try:
            result = drive.run()
        except Exception as error:  # noqa: BLE001  it is logged there, and is what the handle raises
            result = drive.fail(error)
        return drive.end(result)

    def _behind(self, version: int) -> bool:
        """True if an engine is present without `version`, and no lease is held to deliver another one."""
        try:
            known = self._context.channel_status()
        except WeightbusError as error:
            # Logged once each: the next look is a moment later, and the error may stay.
            if str(error) not in self._warned and len(self._warned) < _REASONS:
                self._warned.add(str(error))
                _log.warning("not_looked_for_latecomers", error=str(error), advice=_ADVICE)
            return False
        return known is not None and known.lease is None and bool(engines_behind(known, version))

    @contextlib.contextmanager
    def _on_own_stream(self) -> Generator[None]:
        """Use an own CUDA stream, so that copies do not wait behind the kernels of the next training step."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]  # as torch leaves it
            yield


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


class LagDecision(enum.Enum):
    """What a training loop does now."""

    GO = "go"
    """Train on."""
    WAIT = "wait"
    """Wait: a publication runs that may bring engines closer."""
    TOO_FAR = "too far"
    """Stop: no publication runs that would help, or not in time."""


def _lag_found(version: int, serving: int | None) -> str:
    """How far `version` is ahead of the oldest version that is served; None if the coordinator did not answer."""
    if serving is None:
        return f"what engines serve is not known, version {version} would be trained from"
    return f"version {version} is {version - serving} ahead of what engines serve ({serving})"


def oldest_served(channel: ChannelView | None, max_lag: int) -> int:
    """The oldest version that a request may be answered with; 0 stands for the weights of a launch.

    An engine in a round counts with the version it had: it may be left out, and go on with that. Engines that are lost
    or quarantined, or more than `max_lag` behind the committed version, receive no requests before they have the next
    one.
    """
    if channel is None or channel.committed is None:
        return 0
    committed = channel.committed.version
    versions = (each.version for each in channel.engines.values() if each.state not in _SILENT)
    return min((committed, *(each for each in versions if each is not None and 0 <= committed - each <= max_lag)))


def lag_decision(version: int, serving: int | None, max_lag: int, *, coming: bool, expired: bool) -> LagDecision:
    """Whether to train from `version`; `serving` is the oldest version served, None if that is unknown.

    `coming`: a publication has not ended. `expired`: no time is left to wait.
    """
    if serving is not None and version - serving <= max_lag:
        return LagDecision.GO
    if expired or (serving is not None and not coming):
        return LagDecision.TOO_FAR
    return LagDecision.WAIT


class SnapshotClaim(msgspec.Struct, frozen=True):
    """A buffer to write a snapshot into, and the versions that it replaces."""

    buffer: int
    superseded: tuple[int, ...] = ()


class SnapshotQueue:
    """Order in which snapshots are published. Pure, and not thread-safe: the owner holds a lock around each call.

    A snapshot occupies one of a few buffers from the moment it is taken until its publication has ended:

        claim -> filled -> begin -> finish
             being written   waiting   publishing   free again

    When no buffer is free, a new snapshot waits for one, or replaces the newest snapshot that has not begun.
    """

    def __init__(self, buffers: int, overlap: Overlap) -> None:
        self._overlap = overlap
        self._free = deque(range(buffers))
        self._buffers = buffers
        self._writing: int | None = None
        self._waiting: deque[tuple[int, int]] = deque()
        """(version, buffer) of each waiting snapshot, oldest first."""
        self._running: tuple[int, int] | None = None

    @property
    def idle(self) -> bool:
        """True if no publication runs and no snapshot waits."""
        return self._running is None and not self._waiting

    @property
    def pending(self) -> int:
        """Number of publications that have not ended."""
        return len(self._waiting) + (self._running is not None)

    def claim(self) -> SnapshotClaim | None:
        """Claim a buffer for the next snapshot. Returns None if none is free: retry when a publication has ended."""
        if self._writing is not None:
            raise InvariantBroken("a snapshot is taken while another one is: publish from one thread")
        superseded: tuple[int, ...] = ()
        if self._overlap is Overlap.SUPERSEDE:
            superseded = tuple(version for version, _ in self._waiting)
            self._free.extend(buffer for _, buffer in self._waiting)
            self._waiting.clear()
        if not self._free:
            return None
        self._writing = self._free.popleft()
        return SnapshotClaim(self._writing, superseded)

    def filled(self, version: int) -> None:
        """Mark the claimed buffer as holding `version`, and append it to the queue."""
        self._waiting.append((version, self._claimed()))
        self._writing = None

    def discard(self) -> None:
        """Return the claimed buffer unused."""
        self._free.append(self._claimed())
        self._writing = None

    def begin(self) -> tuple[int, int] | None:
        """Start the next publication. Returns its version and buffer; None while one runs, or if none waits."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        return self._running

    def reuse(self, buffer: int) -> bool:
        """Publish again from an unchanged buffer. Returns False if the buffer is taken or the queue is not idle."""
        if not self.idle or buffer not in self._free:
            return False
        self._free.remove(buffer)
        self._running = (0, buffer)
        return True

    def finish(self) -> None:
        """Mark the running publication as ended; its buffer is free."""
        if self._running is None:
            raise InvariantBroken("a publication ended that did not begin")
        self._free.append(self._running[1])
        self._running = None

    def cancel_waiting(self) -> tuple[int, ...]:
        """Drop all waiting snapshots; returns their versions."""
        dropped = tuple(version for version, _ in self._waiting)
        self._free.extend(buffer for _, buffer in self._waiting)
        self._waiting.clear()
        return dropped

    def check(self) -> None:
        """Raise `InvariantBroken` unless every buffer is in exactly one place."""
        places = [*self._free, *(buffer for _, buffer in self._waiting)]
        places += [self._writing] if self._writing is not None else []
        places += [self._running[1]] if self._running is not None else []
        if sorted(places) != list(range(self._buffers)):
            raise InvariantBroken(f"the {self._buffers} buffers are at {places}")

    def _claimed(self) -> int:
        if self._writing is None:
            raise InvariantBroken("no buffer was claimed")
        return self._writing


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
        on_gpu, on_device = self._device.type == "cuda", self._memory is SnapshotMemory.DEVICE
        direct, sizes = not on_gpu or on_device, [bucket.nbytes for bucket in self._manifest.buckets]
        if not self._buckets:
            where = self._device if on_device else None
            self._buckets = [
                torch.empty(size, dtype=torch.uint8, device=where, pin_memory=not direct) for size in sizes
            ]
        scratch = [] if direct else [torch.empty(max(sizes), dtype=torch.uint8, device=self._device) for _ in sizes[:2]]
        for index, kept in enumerate(self._buckets):
            if direct:
                assemble(index, kept)
                continue
            staged = scratch[index % len(scratch)][: kept.numel()]
            assemble(index, staged)
            kept.copy_(staged, non_blocking=True)
        if on_gpu:
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


class SnapshotSource:
    """A `Source` of one process over a snapshot: no other rank takes part, no parameter is read."""

    root = True

    def __init__(self, source: Source, store: SnapshotBuffer) -> None:
        self.model, self.device, self.tensors = source.model, source.device, source.tensors
        self._snapshot_buffer = store

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
