"""Assembling a version into buckets on all ranks, and its digest table.

A model that fits the staging buffers is assembled once and stays there until the publication ends. A larger
one is assembled twice: for the digests, which the round needs first, and again to be sent. Both passes must read the
same weights; the second is compared bucket by bucket. Where all engines take the memory of the ranks itself, the ranks
export and digest it where it lies, and no bucket is assembled (`InPlaceExport`).

Where pipeline stages broadcast their own buckets, nothing is gathered across stages. The first rank of each stage is a
*source* (dataplane/tensors/manifest.py): it assembles the buckets of its stage in staging buffers of its own,
digests them, and broadcasts them to all engines; rank 0 is source 0. Rank 0 commands each step, a row of buckets at a
time of which every stage has one, so that stages work in parallel:

    ReadStage      every stage assembles its buckets once, for the digest table, which rank 0 puts together
    JoinBroadcast  sources join the group of an epoch
    RefillStage    a row is assembled again, to be sent, and compared with its digests
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, NamedTuple, Self, assert_never

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from weightbus.control.log import get_log
from weightbus.control.machine import TransferEnds, routing
from weightbus.control.protocol import (
    Endpoint,
    EngineInfo,
    ProcessLocation,
    ReceivingEngine,
    TrainerInfo,
    TransportKind,
)
from weightbus.dataplane.digest import (
    SHA256,
    EngineKind,
    SglangDigester,
    SglangDigestPlan,
    Words,
    masks_of,
    merge_live_digests,
    sglang_checksum,
    tensor_digest as integrity,
)
from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.memory import BucketBuffers
from weightbus.dataplane.tensors import BucketSpec, DigestTable, LiveDigests, Manifest, Sources, cut
from weightbus.dataplane.transports import Address, StagingBuffer, registry as transports
from weightbus.dataplane.transports.distributed import SourceRank

from ..checkpoints import Saving
from ..export import MemoryExport, location_of
from ..quantized import served_folder
from ..settings import TrainerSettings
from ..source import AssemblyFailed, PipelineSource, Source, SourceError, head_dim_of, unsent_of
from . import rank_commands as commands
from .rank_commands import (
    AssembleBucket,
    CommandedRanks,
    DigestExported,
    ExportMemory,
    JoinSends,
    PrepareExport,
    ReadStage,
    RefillStage,
)

_log = get_log(__name__)


class Stopwatch:
    """Seconds by phase, on this process's clock."""

    def __init__(self, **seconds: float) -> None:
        self._started = time.monotonic()
        self.seconds = seconds

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        """Add the time spent in the block to phase `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def total(self) -> float:
        """Seconds since the stopwatch was created."""
        return time.monotonic() - self._started


class WeightsDiffer(Exception):
    """The weights were not the same when they were read for the second time."""

    def __init__(self, tensors: Sequence[str]) -> None:
        self.tensors = tuple(tensors)
        shown = ", ".join(self.tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        super().__init__(
            f"{shown} changed between the digest and the transfer: do not step the optimizer while publish runs, or"
            " raise `slots` so that the model is staged whole"
        )


class BucketStaging:
    """Buckets and digest table of the running publication. Outlives publications; `begin` starts the next."""

    def __init__(  # noqa: PLR0917  made in one place
        self,
        source: Source,
        manifest: Manifest,
        pool: BucketBuffers,
        ranks: CommandedRanks,
        head_dim: int | None = None,
        in_place: InPlaceExport | None = None,
        pipeline: PipelineBroadcast | None = None,
    ) -> None:
        """`pipeline`: the first ranks of pipeline stages, which assemble and send buckets of their own."""
        self.manifest = manifest
        self.name = manifest.digest()
        self.blob = manifest.encode()
        self.in_place = in_place
        """The way to engines that need no buckets; None where memory is not exported."""
        self.ranks = ranks
        self._source, self._pool = source, pool
        self._plan = SglangDigestPlan(manifest, (), head_dim)
        self._pipeline = pipeline
        if pipeline is not None:
            pipeline.lend([each.memory for each in pool.buffers])
        self._by_stages = False
        """True if each pipeline stage assembled its own buckets."""
        self._table: DigestTable | None = None
        self.nonfinite: dict[int, int] = {}
        """By tensor: elements that are NaN or infinite, as digested in this publication. Of weights that the ranks sum
        while they quantize them, their scales are counted alone: a block with such an element has the scale NaN."""
        self._masks = masks_of([spec.dtype for spec in manifest.tensors])
        self._kinds: frozenset[EngineKind] = frozenset()
        """Kinds of engine whose expected digests are in the table."""
        self._filled = False
        """True if buckets were assembled in this publication."""
        self._saving: Saving | None = None

    def begin(self) -> None:
        """Begin a publication: buckets and digests of earlier ones no longer count."""
        self._table, self._filled, self._saving, self._by_stages, self.nonfinite = None, False, None, False, {}
        if self.in_place is not None:
            self.in_place.begin()

    @property
    def buffers(self) -> Sequence[StagingBuffer]:
        """Staging buffers: bucket `i` lies in ``buffers[i % len(buffers)]``."""
        return self._pool.buffers

    @property
    def whole(self) -> bool:
        """True if all buckets of the publication were assembled and are in the staging buffers at once."""
        stages = self._pipeline if self._by_stages else None
        most = len(self.manifest.buckets) if stages is None else stages.sources.largest_share
        return self._filled and most <= len(self.buffers)

    @property
    def known(self) -> DigestTable | None:
        """Digest table of the publication, once it is known."""
        return self._table

    @property
    def table(self) -> DigestTable:
        """Digest table of the publication. Raises `RuntimeError` before it is known."""
        if self._table is None:
            raise RuntimeError("no digests yet: digest first")
        return self._table

    def digest(
        self,
        version: int,
        engines: Mapping[str, EngineInfo],
        watch: Stopwatch,
        saving: Saving | None = None,
        routes: Mapping[str, TransportKind] | None = None,
    ) -> DigestTable:
        """Digest all tensors, and compute what `engines` must report. Collective. The weights are read once.

        `routes` are the transports that the coordinator chose; None where it sent none. If every engine takes the
        ranks' memory in place, the ranks digest it there and no bucket is assembled; such a table also serves engines
        that come later by another transport, unless they report digests. With `saving` buckets are assembled in any
        case, and given to it.
        """
        reading, others = (0, engines) if self.in_place is None else self.in_place.split(engines, routes)
        kinds = engine_kinds(others)
        if self._table is not None and kinds <= self._kinds:
            return self._table
        if self.in_place is not None and reading:
            with watch.phase("digest"):
                digests = self.in_place.export_and_digest(digests=not others and saving is None)
            if digests is not None:
                return self.take_digests(version, digests)
        self._kinds, self._saving, self.nonfinite = kinds, saving, {}
        if self._pipeline is not None and saving is None and _broadcast_alone(others, routes):
            return self._read_by_stages(self._pipeline, version, kinds, watch)
        self._by_stages = False
        return self._read(version, kinds, watch)

    def take_digests(self, version: int, digests: bytes) -> DigestTable:
        """Make the table of digests that the ranks computed in place."""
        self._kinds = frozenset()
        if self.in_place is not None:
            self.nonfinite = self.in_place.memory_export.nonfinite
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, digests)
        return self._table

    def adopt(self, table: DigestTable) -> None:
        """Replace the table, in a resync, by the committed one of the same tensors, made for other engines.

        Raises `ValueError` when it is of other tensors.
        """
        if (table.manifest, table.algorithm, table.tensors) != (self.name, self.table.algorithm, self.table.tensors):
            raise ValueError("the table is of other weights")
        self._table = table

    def sources(self, receivers: Sequence[ReceivingEngine]) -> Sources | None:
        """Which rank sends which bucket to `receivers`; None if rank 0 sends everything.

        Stages send the buckets that they assembled, unless a receiver needs all of them on rank 0, or works on the GPU
        of another rank, which NCCL does not allow in one group. From then on rank 0 sends, in this publication.
        """
        if self._pipeline is None or not self._by_stages:
            return None
        taking = [(each, transports.by_name(each.transport)) for each in receivers]
        if all(way.in_place or (way.divides and not each.shares) for each, way in taking):
            return self._pipeline.sources
        self._by_stages = self._filled = False
        return None

    def join_ranks(self, offers: Sequence[Endpoint], epoch: int, deadline_s: float, *, alone: bool) -> None:
        """Have the other ranks send their part of `offers`; `alone`: rank 0 has all buckets.

        Collective; returns at once.
        """
        for offer in offers:
            taken = transports.by_name(offer.transport)
            if taken.in_place and not taken.reads_memory and self.in_place is not None:
                self.in_place.join_sends(offer, epoch, deadline_s)
            elif taken.divides and not alone:
                self.ranks.tell(
                    commands.JoinBroadcast(
                        address=offer.address,
                        group=offer.group,
                        backend=offer.backend,
                        world_size=offer.world_size,
                        token=offer.token,
                        epoch=epoch,
                        deadline_s=deadline_s,
                        whole=self.whole,
                    )
                )

    def refill(self, buckets: range, watch: Stopwatch) -> None:
        """Assemble `buckets` again. Collective. Raises `WeightsDiffer` if a tensor has changed since the digests."""
        if self._saving is not None:
            self._saving.settle()
        if self._pipeline is not None and self._by_stages:
            self.ranks.tell(RefillStage(buckets.start, buckets.stop))
            differing = [*self._pipeline.refill(buckets.start, buckets.stop, watch)]
        else:
            differing = list[str]()
            for index in buckets:
                found = self._assemble(index, self.buffers[index % len(self.buffers)], watch)
                bucket = self.manifest.buckets[index]
                differing += differing_tensors(self.manifest, bucket, found, self.table.of_bucket(bucket))
        if differing:
            raise WeightsDiffer(differing)

    def _read_by_stages(
        self, pipeline: PipelineBroadcast, version: int, kinds: frozenset[EngineKind], watch: Stopwatch
    ) -> DigestTable:
        """As `_read`, but each pipeline stage assembles the buckets of its own layers."""
        self.ranks.tell(ReadStage(tuple(sorted(kinds))))
        digests, live, self.nonfinite = pipeline.read(kinds, watch)
        self._filled = self._by_stages = True
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, digests, live)
        return self._table

    def _read(self, version: int, kinds: frozenset[EngineKind], watch: Stopwatch) -> DigestTable:
        """Assemble every bucket, digest it, and have it saved."""
        saving = self._saving
        if saving is not None:
            saving.begin()
        self._plan = self._plan.of_kinds(kinds)
        live = SglangDigester(self._plan)
        digests: list[bytes] = []
        with ProgressBar(f"reading version {version}", self.manifest.nbytes) as bar:
            for index, bucket in enumerate(self.manifest.buckets):
                slot = self.buffers[index % len(self.buffers)]
                if saving is not None:
                    with watch.phase("save"):
                        saving.free(index - len(self.buffers))
                digests.append(self._assemble(index, slot, watch, self.nonfinite))
                if saving is not None:
                    saving.take(index, slot.memory)
                with watch.phase("digest"):
                    live.feed(index, slot.memory)
                bar.advance(bucket.nbytes)
        self._filled = True
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, b"".join(digests), live.result())
        return self._table

    def _assemble(
        self, index: int, slot: StagingBuffer, watch: Stopwatch, nonfinite: dict[int, int] | None = None
    ) -> bytes:
        """Assemble a bucket and return its digests; with `nonfinite`, add its elements that are not finite."""
        with watch.phase("assemble"):
            self.ranks.tell(AssembleBucket(index))
            self._source.assemble(self.manifest, index, slot.memory)
        return _digest(self.manifest, index, slot.memory, watch, self._masks, nonfinite)


def engine_kinds(engines: Mapping[str, EngineInfo]) -> frozenset[EngineKind]:
    """Kinds of the `engines` whose digests can be predicted."""
    return frozenset(
        (info.live_digest, info.tp)
        for info in engines.values()
        if info.live_digest in (SHA256, sglang_checksum.ALGORITHM) and info.pp == 1 and info.dp == 1
    )


def _broadcast_alone(others: Mapping[str, EngineInfo], routes: Mapping[str, TransportKind] | None) -> bool:
    """True if all engines that take buckets take them by broadcast: none needs them gathered on one rank."""
    if routes is None:
        return False
    ways = [transports.by_name(kind) for name in others if (kind := routes.get(name)) is not None]
    return bool(ways) and all(way.divides for way in ways)


class VersionLayout(NamedTuple):
    """Buckets of a version, and which ranks can send which of them."""

    manifest: Manifest
    pipeline: PipelineBroadcast | None
    """None if one rank sends everything."""
    places: tuple[ProcessLocation, ...] = ()
    """Locations of the ranks; exchanged only if several ranks may send."""

    @classmethod
    def of(cls, source: Source, settings: TrainerSettings) -> Self:
        """Cut buckets by pipeline stage if stages may broadcast them; the same on every rank. Collective."""
        tensors, unsent = source.tensors(), unsent_of(source, settings.left, served_folder(source, settings))
        divisible = any(transports.by_name(kind).divides for kind in settings.preferences())
        if isinstance(source, PipelineSource) and divisible:
            roots = source.roots()
            ranks = sorted(set(roots))
            if ranks[0] == 0 and len(ranks) > 1:
                owners = [ranks.index(root) for root in roots]
                manifest, sources = cut(
                    source.model, tensors, owners, settings.bucket_bytes, unsent.left, copies=unsent.copies
                )
                pipeline = PipelineBroadcast(source, manifest, sources, ranks, settings.slots, head_dim_of(source))
                found = source.collect(msgspec.msgpack.encode(location_of(source.rank, source.device)))
                places = tuple(msgspec.msgpack.decode(each, type=ProcessLocation) for each in found)
                return cls(manifest, pipeline, places)
        return cls(Manifest.of(source.model, tensors, settings.bucket_bytes, unsent.left, unsent.copies), None)


class _Found(msgspec.Struct, frozen=True):
    """Digests of the buckets of one source."""

    digests: dict[int, bytes] = {}
    """By bucket."""
    live: tuple[LiveDigests, ...] = ()
    nonfinite: dict[int, int] = {}
    """By tensor: elements that are NaN or infinite."""
    error: str = ""


_FOUND: Final = msgspec.msgpack.Decoder(_Found)


class PipelineBroadcast:
    """One rank's part. Calls are collective, but for `lend` and `close`."""

    def __init__(  # noqa: PLR0917  made in one place
        self,
        source: PipelineSource,
        manifest: Manifest,
        sources: Sources,
        ranks: Sequence[int],
        depth: int,
        head_dim: int | None = None,
    ) -> None:
        """`ranks` are the ranks of the `sources`, rank 0 first; `depth` is the number of staging buffers on each."""
        self.sources = sources
        self._source, self._manifest = source, manifest
        self._roots = tuple(ranks[number] for number in sources.of)
        number = list(ranks).index(source.rank) if source.rank in ranks else None
        self._own = sources.own(number) if number is not None else ()
        """Buckets of this rank."""
        self._depth = depth
        self._buffers: Sequence[torch.Tensor] = ()
        self._plan = SglangDigestPlan(manifest, (), head_dim)
        self._digests: dict[int, bytes] = {}
        self._masks = masks_of([spec.dtype for spec in manifest.tensors])
        self._source_rank = SourceRank(number, source.device) if number else None
        """Sends this rank's buckets; None on rank 0, and on ranks that are no source."""

    def lend(self, buffers: Sequence[torch.Tensor]) -> None:
        """Use rank 0's staging buffers for its buckets."""
        self._buffers = buffers

    def read(
        self, wanted: Collection[EngineKind], watch: Stopwatch
    ) -> tuple[bytes, tuple[LiveDigests, ...], dict[int, int]]:
        """Assemble and digest the buckets of every stage. Raises `SourceError` on every rank.

        Returns all digests, and how many elements are NaN or infinite, by tensor.
        """
        failure: Exception | None = None
        try:
            found = self._read(frozenset(wanted), watch)
        except Exception as error:  # noqa: BLE001  raised below, once the others know
            failure, found = error, _Found(error=f"rank {self._source.rank}: {type(error).__name__}: {error}")
        with watch.phase("assemble"):
            all_found = [_FOUND.decode(each) for each in self._source.collect(msgspec.msgpack.encode(found))]
        if failure is not None:
            raise failure
        errors = [each.error for each in all_found if each.error]
        if errors:
            raise AssemblyFailed("; ".join(errors))
        digests = {bucket: digest for each in all_found for bucket, digest in each.digests.items()}
        in_order = b"".join(digests[index] for index in range(len(digests)))
        nonfinite = {index: count for each in all_found for index, count in each.nonfinite.items()}
        return in_order, merge_live_digests([each.live for each in all_found]), dict(sorted(nonfinite.items()))

    def refill(self, first: int, last: int, watch: Stopwatch) -> Sequence[str]:
        """Assemble a row of buckets again. Returns this rank's tensors that differ from their digests.

        A source other than rank 0 sends the bucket, or reports the difference to rank 0 instead.
        """
        differing: list[str] = []
        for index in range(first, last):
            sender = self._source_rank if index in self._own else None
            if sender is not None:
                sender.wait_free(self.sources.place(index) + 1 - self._depth)
            found = self._gather(index, watch)
            if index not in self._own:
                continue
            odd = differing_tensors(self._manifest, self._manifest.buckets[index], found, self._digests[index])
            differing += odd
            if sender is not None and odd:
                sender.spoil(odd)
            elif sender is not None:
                sender.filled(self.sources.place(index) + 1)
        return differing

    def execute(self, command: commands.PipelineCommand) -> None:
        """Execute a command of rank 0, which makes the same calls. A failure ends the session on every rank."""
        try:
            match command:
                case commands.ReadStage():
                    self.read(command.wanted, Stopwatch())
                case commands.RefillStage():
                    self.refill(command.first, command.last, Stopwatch())
                case commands.JoinBroadcast():
                    self._join(command)
                case _:  # pragma: no cover
                    assert_never(command)
        except BaseException:
            if self._source_rank is not None:
                self._source_rank.stop()
            raise

    def _join(self, command: commands.JoinBroadcast) -> None:
        """Have this rank send its buckets, by a thread of its own."""
        if self._source_rank is None:
            return
        buckets = [self._memory(index)[: self._manifest.buckets[index].nbytes] for index in self._own]
        filled = len(buckets) if command.whole else 0
        address = Address(command.address, command.group, command.backend, command.world_size, command.token)
        self._source_rank.begin(address, command.epoch, self.sources, buckets, command.deadline_s, filled)

    def close(self) -> None:
        """Leave the group, and release the staging buffers."""
        if self._source_rank is not None:
            self._source_rank.close()
        self._buffers = ()

    def _memory(self, index: int) -> torch.Tensor:
        """The staging buffer of one of this rank's buckets."""
        if not self._buffers:
            nbytes = max(self._manifest.buckets[own].nbytes for own in self._own)
            count = min(self._depth, len(self._own))
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self._source.device) for _ in range(count)]
        return self._buffers[self.sources.place(index) % len(self._buffers)]

    def _read(self, wanted: frozenset[EngineKind], watch: Stopwatch) -> _Found:
        if self._source_rank is not None:
            self._source_rank.stop()  # an earlier session would send from the slots
        self._plan = self._plan.of_kinds(wanted if self._own else frozenset())
        live = SglangDigester(self._plan)
        self._digests, nonfinite = {}, dict[int, int]()
        for index in range(len(self._manifest.buckets)):
            found = self._gather(index, watch, nonfinite)
            if index in self._own:
                self._digests[index] = found
                with watch.phase("digest"):
                    live.feed(index, self._memory(index))
        return _Found(self._digests, live.result(partial=True), nonfinite)

    def _gather(self, index: int, watch: Stopwatch, nonfinite: dict[int, int] | None = None) -> bytes:
        """Take part in assembling a bucket; returns its digests if it is this rank's. `nonfinite` as for `_digest`."""
        memory = self._memory(index) if index in self._own else None
        with watch.phase("assemble"):
            self._source.assemble(self._manifest, index, memory, self._roots)
        return b"" if memory is None else _digest(self._manifest, index, memory, watch, self._masks, nonfinite)


def _digest(  # noqa: PLR0917  made in two places
    manifest: Manifest,
    index: int,
    memory: torch.Tensor,
    watch: Stopwatch,
    masks: Words,
    nonfinite: dict[int, int] | None,
) -> bytes:
    """Digests of the tensors of bucket `index`, which is in `memory`.

    `masks` are those of all tensors' dtypes. With `nonfinite`, tensors with elements that are NaN or infinite are
    counted there.
    """
    bucket = manifest.buckets[index]
    whole, offsets = memory[: bucket.nbytes], manifest.offsets_of(index)
    with watch.phase("digest"):
        if nonfinite is None:
            return integrity.digest_tensors(whole, offsets)
        digests, counts = integrity.digest_and_count(whole, offsets, masks[bucket.first : bucket.last])
        odd: list[int] = np.flatnonzero(counts).tolist()
        nonfinite.update({bucket.first + at: int(counts[at]) for at in odd})
        return digests


def differing_tensors(manifest: Manifest, bucket: BucketSpec, found: bytes, expected: bytes) -> list[str]:
    """Names of the tensors of a bucket whose digests differ."""
    if found == expected:
        return []
    size = integrity.DIGEST_BYTES
    return [
        tensor.name
        for at, tensor in enumerate(manifest.tensors[bucket.first : bucket.last])
        if found[at * size : (at + 1) * size] != expected[at * size : (at + 1) * size]
    ]


LONG_S: Final = 3.0
"""Seconds of work before the bar is shown."""


class ProgressBar:
    """Counts bytes; shows them after `LONG_S` if stderr is a terminal."""

    def __init__(self, what: str, total_bytes: int, console: Console | None = None) -> None:
        self._what, self._total = what, total_bytes
        self._console = console or Console(stderr=True)
        self._done = 0
        self._began = 0.0
        self._shown: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes done."""
        self._done += nbytes
        if self._shown is None and self._console.is_terminal and time.monotonic() - self._began > LONG_S:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            bar = Progress(*columns, console=self._console, transient=True)
            bar.start()
            self._shown = bar, bar.add_task(self._what, total=self._total)
        if self._shown is not None:
            bar, task = self._shown
            bar.update(task, completed=self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown[0].stop()


class InPlaceExport:
    """Rank 0's use of its `MemoryExport`: tells the other ranks to make the same calls. Outlives publications."""

    def __init__(self, memory_export: MemoryExport, ranks: CommandedRanks, trainer: TrainerInfo) -> None:
        self.memory_export = memory_export
        self._ranks = ranks
        self._trainer = trainer
        self._logged = ""
        """Reason of the last `digested_by_buckets` warning."""
        self._read = False
        """True if an engine took the memory in the last publication."""
        self._digested = False
        """True if the ranks digested it in the last publication."""
        self._prepared = False
        """True if the running publication was prepared, and not exported yet."""
        self.exported = False
        """True if the memory was exported in the running publication."""
        self.ready_flags = False
        """True if all engines wait for ready flags."""

    def begin(self) -> None:
        """Begin a publication: nothing is prepared for it, nor exported."""
        self._prepared = self.exported = False

    def prepare(self) -> None:
        """Prepare the export, and its digests, if the last publication needed them. Collective."""
        if self._read:
            self._ranks.tell(PrepareExport(self._digested, self.ready_flags))
            self.memory_export.prepare(digests=self._digested, ready_flags=self.ready_flags)
            self._prepared = True

    @property
    def digests_begun(self) -> bool:
        """True if the prepared version is being digested, so that the digests may be deferred."""
        return self._prepared and self._digested

    def split(
        self, engines: Mapping[str, EngineInfo], routes: Mapping[str, TransportKind] | None
    ) -> tuple[int, dict[str, EngineInfo]]:
        """The number of `engines` that take the ranks' memory itself, and the engines that take buckets.

        `routes` are the coordinator's choice; an engine without a route takes no part. None where the coordinator sent
        none: then routes are chosen here, by the engines' `Hello`.
        """
        chosen: Mapping[str, TransportKind | None] = (
            routes
            if routes is not None
            else {name: routing.choose(TransferEnds(self._trainer, info)).transport for name, info in engines.items()}
        )
        routed = {name: transports.by_name(kind) for name in engines if (kind := chosen.get(name)) is not None}
        reading = [name for name, each in routed.items() if each.in_place]
        others = {name: engines[name] for name, each in routed.items() if not each.in_place}
        self._read = bool(reading)
        return len(reading), others

    def export(self, *, digests: bool = False) -> None:
        """Make the memory readable as it is now; with `digests` the other ranks go on to `digests`. Collective."""
        prepared, self._prepared = self._prepared, False
        self._ranks.tell(ExportMemory(digests=digests, prepared=prepared, ready_flags=self.ready_flags))
        try:
            self.memory_export.export(prepared=prepared, ready_flags=self.ready_flags)
        except NotExportable as error:
            raise SourceError(
                f"the memory could be exported before, and now cannot: {error}; what engines read where it is must be "
                f"where it was when the agent connected: load offloaded parameters back before publishing"
            ) from error
        self.exported = True

    def export_and_digest(self, *, digests: bool) -> bytes | None:
        """Make the memory readable as it is now; return its digests if wanted and possible. Collective."""
        self.export(digests=digests)
        if not digests:
            self._digested = False
            return None
        return self._noted(self.memory_export.digests())

    def digests(self) -> bytes | None:
        """Digests of the memory that was exported before, if the layout allows them. Collective."""
        self._ranks.tell(DigestExported())
        return self._noted(self.memory_export.digests())

    def join_sends(self, offer: Endpoint, epoch: int, deadline_s: float) -> None:
        """Have all ranks send to the engines that connect to `offer`. Collective; returns at once."""
        self._ranks.tell(JoinSends(offer.address, offer.token, epoch, deadline_s))
        self.memory_export.join_sends(Address(offer.address, token=offer.token), epoch, deadline_s)

    def _noted(self, digests: bytes | None) -> bytes | None:
        self._digested = digests is not None
        if digests is None and self._logged != self.memory_export.undigestible:
            self._logged = self.memory_export.undigestible
            _log.warning("digested_by_buckets", reason=self._logged)
        return digests
