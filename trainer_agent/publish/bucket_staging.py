"""Assembling a version into buckets on all ranks, and its digest table. Rank 0's side.

A model that fits the staging buffers is assembled once and stays there until the publication ends. A larger
one is assembled twice: for the digests, which the round needs first, and again to be sent. Both passes must read the
same weights; the second is compared bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from weightbus.control.protocol import Endpoint, EngineInfo, ReceivingEngine, TransportKind
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.tensors import DigestTable, Manifest
from weightbus.dataplane.transports import Slot, Sources, registry as transports

from ..checkpoints import Saving
from ..machine import Stopwatch
from ..source import Source
from .expected_sglang_digests import EngineKind, SglangDigester, SglangDigestPlan, engine_kinds
from .in_place_export import InPlaceExport
from .pipeline_broadcast import PipelineBroadcast, broadcast_command, differing_tensors
from .progress_bar import ProgressBar
from .rank_commands import AssembleBucket, CommandedRanks, ReadStage, RefillStage


class StagingPool(Protocol):
    """What is asked of dataplane's `BucketBuffers`."""

    @property
    def buffers(self) -> Sequence[Slot]:
        """The buffers."""
        ...

    def close(self) -> None:
        """Give them back."""
        ...


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
        pool: StagingPool,
        ranks: CommandedRanks,
        head_dim: int | None = None,
        in_place: InPlaceExport | None = None,
        pipeline: PipelineBroadcast | None = None,
    ) -> None:
        """`pipeline`: the first ranks of pipeline stages, which assemble and send buckets of their own."""
        self.manifest = manifest
        self.name = manifest.digest()
        self.blob = manifest.encode()
        self.head_dim = head_dim
        self.in_place = in_place
        """The way to engines that need no buckets; None where memory is not exported."""
        self._source, self._pool, self._ranks = source, pool, ranks
        self._plan = SglangDigestPlan(manifest, (), head_dim)
        self._pipeline = pipeline
        if pipeline is not None:
            pipeline.lend(pool.buffers)
        self._by_stages = False
        """True if each pipeline stage assembled its own buckets."""
        self._table: DigestTable | None = None
        self._kinds: frozenset[EngineKind] = frozenset()
        """Kinds of engine whose expected digests are in the table."""
        self._filled = False
        """True if buckets were assembled in this publication."""
        self._saving: Saving | None = None

    def begin(self) -> None:
        """Begin a publication: buckets and digests of earlier ones no longer count."""
        self._table, self._filled, self._saving, self._by_stages = None, False, None, False
        if self.in_place is not None:
            self.in_place.begin()

    @property
    def buffers(self) -> Sequence[Slot]:
        """Staging buffers: bucket `i` lies in ``buffers[i % len(buffers)]``."""
        return self._pool.buffers

    @property
    def whole(self) -> bool:
        """True if all buckets of the publication were assembled and are in the staging buffers at once."""
        by_stages = self._pipeline is not None and self._by_stages
        most = self._pipeline.sources.largest_share if self._pipeline and by_stages else len(self.manifest.buckets)
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

    def prepare(self, watch: Stopwatch) -> None:
        """Begin to compute what engines read in place, before it is known that a round may begin. Collective."""
        if self.in_place is not None:
            with watch.phase("make"):
                self.in_place.prepare()

    def settle(self, deadline_s: float) -> None:
        """Block until the work that `prepare` began on this rank has ended. Raises `DeadlineExceeded`, RuntimeError."""
        if self.in_place is not None:
            self.in_place.settle(deadline_s)

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
        self._kinds, self._saving = kinds, saving
        if self._pipeline is not None and saving is None and _broadcast_alone(others, routes):
            return self._read_by_stages(self._pipeline, version, kinds, watch)
        self._by_stages = False
        return self._read(version, kinds, watch)

    def take_digests(self, version: int, digests: bytes) -> DigestTable:
        """Make the table of digests that the ranks computed in place."""
        self._kinds = frozenset()
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, digests)
        return self._table

    def adopt(self, table: DigestTable) -> None:
        """Replace the table, in a catch-up, by the committed one of the same tensors, made for other engines.

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
                self._ranks.tell(broadcast_command(offer, epoch, deadline_s, whole=self.whole))

    def refill(self, buckets: range, watch: Stopwatch) -> None:
        """Assemble `buckets` again. Collective. Raises `WeightsDiffer` if a tensor has changed since the digests."""
        if self._saving is not None:
            self._saving.settle()
        if self._pipeline is not None and self._by_stages:
            self._ranks.tell(RefillStage(buckets.start, buckets.stop))
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
        self._ranks.tell(ReadStage(tuple(sorted(kinds))))
        found = pipeline.read(kinds, watch)
        self._filled = self._by_stages = True
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, found.tensors, found.live)
        return self._table

    def _read(self, version: int, kinds: frozenset[EngineKind], watch: Stopwatch) -> DigestTable:
        """Assemble every bucket, digest it, and have it saved."""
        saving = self._saving
        if saving is not None:
            saving.begin()
        if self._plan.wanted != kinds:
            self._plan = SglangDigestPlan(self.manifest, kinds, self.head_dim)
        live = SglangDigester(self._plan)
        digests: list[bytes] = []
        with ProgressBar(f"reading version {version}", self.manifest.nbytes) as bar:
            for index, bucket in enumerate(self.manifest.buckets):
                slot = self.buffers[index % len(self.buffers)]
                if saving is not None:
                    with watch.phase("save"):
                        saving.free(index - len(self.buffers))
                digests.append(self._assemble(index, slot, watch))
                if saving is not None:
                    saving.take(index, slot.memory)
                with watch.phase("digest"):
                    live.feed(index, slot.memory)
                bar.advance(bucket.nbytes)
        self._filled = True
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, b"".join(digests), live.result())
        return self._table

    def _assemble(self, index: int, slot: Slot, watch: Stopwatch) -> bytes:
        """Assemble a bucket and return its digests."""
        with watch.phase("assemble"):
            self._ranks.tell(AssembleBucket(index))
            self._source.assemble(self.manifest, index, slot.memory)
        with watch.phase("digest"):
            memory = slot.memory[: self.manifest.buckets[index].nbytes]
            return integrity.digest_tensors(memory, self.manifest.offsets_of(index))


def _broadcast_alone(others: Mapping[str, EngineInfo], routes: Mapping[str, TransportKind] | None) -> bool:
    """True if all engines that take buckets take them by broadcast: none needs them gathered on one rank."""
    if routes is None:
        return False
    ways = [transports.by_name(kind) for name in others if (kind := routes.get(name)) is not None]
    return bool(ways) and all(way.divides for way in ways)
