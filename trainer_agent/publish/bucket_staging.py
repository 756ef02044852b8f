"""The collective half of a publication: buckets into slots, and their digests. Leader's side.

A model whose buckets all fit the pool is assembled once and stays in its slots until the publication ends. A larger one
is assembled twice: once for the digests, which must be known before the round, and once more to be sent. Both passes
must read the same weights, and the second one is compared bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from weightbus.control.log import get_log
from weightbus.control.machine import TransferEnds, routing
from weightbus.control.protocol import Endpoint, EngineInfo, ReceivingEngine, TrainerInfo, TransportKind
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.tensors import DigestTable, Manifest
from weightbus.dataplane.transports import Address, Slot, Sources, registry as transports

from ..checkpoints import Saving
from ..export import MemoryExport
from ..machine import Stopwatch
from ..source import Source, SourceError
from . import rank_commands as commands
from .expected_sglang_digests import EngineKind, SglangDigester, SglangDigestPlan, engine_kinds
from .pipeline_broadcast import PipelineBroadcast, broadcast_command, differing_tensors
from .progress_bar import ProgressBar

_log = get_log(__name__)


class StagingPool(Protocol):
    """What is asked of dataplane's `BucketBuffers`."""

    @property
    def buffers(self) -> Sequence[Slot]:
        """The buffers."""
        ...

    def close(self) -> None:
        """Give them back."""
        ...


class InPlaceExport:
    """The way without buckets: engines get what the ranks expose or send, and the ranks digest it where it lies."""

    def __init__(self, memory_export: MemoryExport, trainer: TrainerInfo) -> None:
        self.memory_export = memory_export
        self._trainer = trainer
        self._said = ""
        self._wanted = False
        """By some engine, in the last publication."""
        self._digested = False
        """By the ranks, in the last publication."""
        self._prepared = False
        self.parts = False
        """Whoever reads the memory may be told of parts that are still made: it knows how to wait for them."""

    def begin(self) -> None:
        """A new publication: nothing was made for it yet."""
        self._prepared = False

    def make(self, ranks: commands.CommandedRanks) -> None:
        """Begin with what takes a while, where it can be begun and was wanted the last time. Collective."""
        if self._wanted:
            ranks.tell(commands.PrepareExport(self._digested, self.parts))
            self.memory_export.prepare(digests=self._digested, ready_flags=self.parts)
            self._prepared = True

    def sort(
        self, engines: Mapping[str, EngineInfo], routes: Mapping[str, TransportKind] | None
    ) -> tuple[int, dict[str, EngineInfo]]:
        """How many of `engines` will have the ranks' memory itself, and those that take buckets.

        `routes` are the coordinator's choice. An engine without one takes no part; null where none were told: then it
        is made here, of what `Hello` says.
        """
        kinds = self._kinds(engines, routes)
        routed = {name: transports.by_name(kind) for name in engines if (kind := kinds.get(name)) is not None}
        reading = [name for name, each in routed.items() if each.in_place]
        others = {name: engines[name] for name, each in routed.items() if not each.in_place}
        self._wanted = bool(reading)
        return len(reading), others

    @property
    def may_leave_open(self) -> bool:
        """Whether the digests have begun already, so that they may be waited for later."""
        return self._prepared and self._digested

    def _kinds(
        self, engines: Mapping[str, EngineInfo], routes: Mapping[str, TransportKind] | None
    ) -> Mapping[str, TransportKind | None]:
        if routes is not None:
            return routes
        return {name: routing.choose(TransferEnds(self._trainer, info)).transport for name, info in engines.items()}

    def settle(self, deadline_s: float) -> None:
        """Wait for what `make` began on this rank, where nobody has. Raises `DeadlineExceeded`, RuntimeError."""
        self.memory_export.settle(deadline_s)

    def join(self, ranks: commands.CommandedRanks, offer: Endpoint, epoch: int, deadline_s: float) -> None:
        """Have every rank send to whoever comes to `offer`. Collective; returns at once."""
        ranks.tell(commands.JoinSends(offer.address, offer.token, epoch, deadline_s))
        self.memory_export.join_sends(Address(offer.address, token=offer.token), epoch, deadline_s)

    def digests(self, ranks: commands.CommandedRanks, *, wanted: bool) -> bytes | None:
        """Expose the memory as it is now, and digest it if that is `wanted` and possible. Collective."""
        self.expose(ranks, digests=wanted)
        return self._found(self.memory_export.digests() if wanted else None, wanted=wanted)

    def digests_later(self, ranks: commands.CommandedRanks) -> bytes | None:
        """Those of what was exposed before, if that is possible after all. Collective."""
        ranks.tell(commands.DigestExported())
        return self._found(self.memory_export.digests(), wanted=True)

    def expose(self, ranks: commands.CommandedRanks, *, digests: bool = False) -> None:
        """Make the memory readable as it is now; with `digests` the other ranks go on to those. Collective."""
        made, self._prepared = self._prepared, False
        ranks.tell(commands.ExportMemory(digests=digests, prepared=made, ready_flags=self.parts))
        try:
            self.memory_export.export(prepared=made, ready_flags=self.parts)
        except NotExportable as error:
            raise SourceError(
                f"the memory could be exported before, and now cannot: {error}; what engines read where it is must be "
                f"where it was when the agent connected: load offloaded parameters back before publishing"
            ) from error

    def _found(self, found: bytes | None, *, wanted: bool) -> bytes | None:
        self._digested = found is not None
        if wanted and found is None and self._said != self.memory_export.undigestible:
            self._said = self.memory_export.undigestible
            _log.warning("digested_by_buckets", reason=self._said)
        return found


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
    """Assembles the buckets of one manifest on all ranks, into the slots of one pool."""

    def __init__(  # noqa: PLR0917  made in one place
        self,
        source: Source,
        manifest: Manifest,
        pool: StagingPool,
        ranks: commands.CommandedRanks,
        head_dim: int | None = None,
        in_place: InPlaceExport | None = None,
        stages: PipelineBroadcast | None = None,
    ) -> None:
        """`stages`: the ranks that can read and send buckets of their own, this one among them."""
        self.manifest = manifest
        self.name = manifest.digest()
        self.blob = manifest.encode()
        self._source, self._pool, self._ranks = source, pool, ranks
        self._plan = SglangDigestPlan(manifest, (), head_dim)
        self.head_dim = head_dim
        self._in_place = in_place
        self._stages = stages
        if stages is not None:
            stages.lend(pool.buffers)
        self._staged = False
        """What was read last was read by every stage for itself."""
        self._table: DigestTable | None = None
        self._open = False
        """The digests of the publication that runs have begun, and are not waited for yet."""
        self._filled = False
        self._saving: Saving | None = None
        self._wanted: frozenset[EngineKind] = frozenset()

    def have_sent(self, offers: Sequence[Endpoint], epoch: int, deadline_s: float, *, alone: bool) -> None:
        """Have the other ranks take part in what they send, too; `alone`: all buckets are the leader's.

        Collective; returns at once.
        """
        for offer in offers:
            taken = transports.by_name(offer.transport)
            if taken.in_place and not taken.reads_memory and self._in_place is not None:
                self._in_place.join(self._ranks, offer, epoch, deadline_s)
            elif taken.divides and not alone:
                self._ranks.tell(broadcast_command(offer, epoch, deadline_s, whole=self.whole))

    @property
    def buffers(self) -> Sequence[Slot]:
        """Where the buckets go: bucket `i` into slot ``i % len(slots)``."""
        return self._pool.buffers

    @property
    def whole(self) -> bool:
        """All buckets of the publication that runs are there: they were assembled, and fit the slots at once."""
        most = self._stages.sources.largest_share if self._stages and self._staged else len(self.manifest.buckets)
        return self._filled and most <= len(self.buffers)

    def sources(self, receivers: Sequence[ReceivingEngine]) -> Sources | None:
        """Who sends what to `receivers`; null: the leader everything.

        Stages send what they have read themselves, unless somebody needs all of it on the leader, or works on the GPU
        of another rank, which NCCL does not take into one group with it. Then they do not any more in this publication.
        """
        if self._stages is None or not self._staged:
            return None
        taking = [(each, transports.by_name(each.transport)) for each in receivers]
        if all(way.in_place or (way.divides and not each.shares) for each, way in taking):
            return self._stages.sources
        self._staged = self._filled = False
        return None

    @property
    def open(self) -> bool:
        """The table of the publication that runs was left open, and not asked for since."""
        return self._open

    @property
    def known(self) -> DigestTable | None:
        """The digests of the publication that runs, once there are any."""
        return self._table

    @property
    def table(self) -> DigestTable:
        """The digests of the publication that runs. Raises `RuntimeError` before `digest`."""
        if self._table is None:
            raise RuntimeError("no digests yet: digest first")
        return self._table

    def begin(self) -> None:
        """A new publication: what was read for an earlier one no longer counts."""
        self._table, self._filled, self._saving, self._open = None, False, None, False
        self._staged = False
        if self._in_place is not None:
            self._in_place.begin()

    def granted(self, *, awaited: bool) -> None:
        """The lease is held: whether all engines know how to wait for what follows, as parts that are still made do."""
        if self._in_place is not None:
            self._in_place.parts = awaited

    def make(self, watch: Stopwatch) -> None:
        """Begin with what engines will read, before it is known that a round may begin. Collective."""
        if self._in_place is not None:
            with watch.phase("make"):
                self._in_place.make(self._ranks)

    def settle(self, deadline_s: float) -> None:
        """Wait for what `make` began on this rank, where nobody has. Raises `DeadlineExceeded`, RuntimeError."""
        if self._in_place is not None:
            self._in_place.settle(deadline_s)

    @property
    def may_leave_open(self) -> bool:
        """Whether the version can be announced before its table is known: `leave_open`, later `close_table`."""
        return self._table is None and self._in_place is not None and self._in_place.may_leave_open

    def leave_open(self, watch: Stopwatch) -> None:
        """Expose what engines read, and do not wait for its digests. Once for a publication. Collective."""
        if self._in_place is not None and self._table is None and not self._open:
            with watch.phase("digest"):
                self._in_place.expose(self._ranks)
            self._open = True

    def close_table(self, version: int, watch: Stopwatch) -> DigestTable | None:
        """Wait for the digests that were left open. None where there are none: then `digest` makes them. Collective."""
        if self._open and self._in_place is not None:
            self._open = False
            with watch.phase("digest"):
                digests = self._in_place.digests_later(self._ranks)
            if digests is not None:
                self._wanted = frozenset[EngineKind]()
                self._table = DigestTable(self.name, version, integrity.ALGORITHM, digests)
        return self._table

    def digest(
        self,
        version: int,
        engines: Mapping[str, EngineInfo],
        watch: Stopwatch,
        saving: Saving | None = None,
        routes: Mapping[str, TransportKind] | None = None,
    ) -> DigestTable:
        """The digests of every tensor, and of what `engines` can report. Collective. Nothing is read a second time.

        `routes` say by what the coordinator lets each engine have it; null where it did not tell.
        Where every engine reads the ranks' memory, the ranks digest it themselves, and no bucket is assembled. A table
        that was made so serves engines that come later, by another transport, too: unless they can report digests.
        With `saving` buckets are assembled in any case, and given to it.
        """
        self.close_table(version, watch)
        reading, others = (0, engines) if self._in_place is None else self._in_place.sort(engines, routes)
        wanted = engine_kinds(others)
        if self._table is not None and wanted <= self._wanted:
            return self._table
        if self._in_place is not None and reading:
            with watch.phase("digest"):
                digests = self._in_place.digests(self._ranks, wanted=not others and saving is None)
            if digests is not None:
                self._wanted = frozenset[EngineKind]()
                self._table = DigestTable(self.name, version, integrity.ALGORITHM, digests)
                return self._table
        self._wanted = wanted
        self._saving = saving
        if self._stages is not None and saving is None and _broadcast_alone(others, routes):
            return self._read_staged(self._stages, version, wanted, watch)
        self._staged = False
        return self._read(version, wanted, watch)

    def _read_staged(
        self, stages: PipelineBroadcast, version: int, wanted: frozenset[EngineKind], watch: Stopwatch
    ) -> DigestTable:
        """As `_read`, every stage what it holds."""
        self._ranks.tell(commands.ReadStage(tuple(sorted(wanted))))
        found = stages.read(wanted, watch)
        self._filled = self._staged = True
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, found.tensors, found.live)
        return self._table

    def adopt(self, table: DigestTable) -> None:
        """Of a catch-up: the committed table of the same tensors, which was made for other engines.

        Raises `ValueError` when it is not of the same tensors.
        """
        if (table.manifest, table.algorithm, table.tensors) != (self.name, self.table.algorithm, self.table.tensors):
            raise ValueError("the table is of other weights")
        self._table = table

    def _read(self, version: int, wanted: frozenset[EngineKind], watch: Stopwatch) -> DigestTable:
        """Assemble every bucket, digest it, and have it saved."""
        saving = self._saving
        if saving is not None:
            saving.begin()
        if self._plan.wanted != wanted:
            self._plan = SglangDigestPlan(self.manifest, wanted, self.head_dim)
        live = SglangDigester(self._plan)
        digests: list[bytes] = []
        with ProgressBar(f"reading version {version}", self.manifest.nbytes) as bar:
            for index, bucket in enumerate(self.manifest.buckets):
                slot = self.buffers[index % len(self.buffers)]
                if saving is not None:
                    with watch.phase("save"):
                        saving.free(index - len(self.buffers))
                digests.append(self._gather(index, slot, watch))
                if saving is not None:
                    saving.take(index, slot.memory)
                with watch.phase("digest"):
                    live.feed(index, slot.memory)
                bar.advance(bucket.nbytes)
        self._filled = True
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, b"".join(digests), live.result())
        return self._table

    def refill(self, buckets: range, watch: Stopwatch) -> None:
        """Read `buckets` once more into their slots. Collective. Raises `WeightsDiffer` if one is another."""
        if self._saving is not None:
            self._saving.settle()
        if self._stages is not None and self._staged:
            self._ranks.tell(commands.RefillStage(buckets.start, buckets.stop))
            odd = [*self._stages.refill(buckets.start, buckets.stop, watch)]
        else:
            odd = list[str]()
            for index in buckets:
                found, bucket = (
                    self._gather(index, self.buffers[index % len(self.buffers)], watch),
                    self.manifest.buckets[index],
                )
                odd += differing_tensors(self.manifest, bucket, found, self.table.of_bucket(bucket))
        if odd:
            raise WeightsDiffer(odd)

    def _gather(self, index: int, slot: Slot, watch: Stopwatch) -> bytes:
        with watch.phase("assemble"):
            self._ranks.tell(commands.AssembleBucket(index))
            self._source.assemble(self.manifest, index, slot.memory)
        with watch.phase("digest"):
            memory = slot.memory[: self.manifest.buckets[index].nbytes]
            return integrity.digest_tensors(memory, self.manifest.offsets_of(index))


def _broadcast_alone(others: Mapping[str, EngineInfo], routes: Mapping[str, TransportKind] | None) -> bool:
    """Whether all who take buckets take them by broadcast: nobody needs them gathered on one rank."""
    if routes is None:
        return False
    ways = [transports.by_name(kind) for name in others if (kind := routes.get(name)) is not None]
    return bool(ways) and all(way.divides for way in ways)
