"""Pipeline stages that broadcast their own buckets: nothing is gathered across stages.

The first rank of each stage is a *source* (dataplane/transports/broadcast_order.py). It assembles the buckets of its
stage in staging buffers of its own, digests them, and broadcasts them to all engines; rank 0 is source 0. Rank 0
commands each step, a row of buckets at a time of which every stage has one, so that stages work in parallel:

    ReadStage      every stage assembles its buckets once, for the digest table, which rank 0 puts together
    JoinBroadcast  sources join the group of an epoch
    RefillStage    a row is assembled again, to be sent, and compared with its digests
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Self, assert_never

import msgspec
import torch

from weightbus.control.protocol import Endpoint, ProcessLocation
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.tensors import BucketSpec, LiveDigests, Manifest
from weightbus.dataplane.transports import Address, Slot, Sources, cut, registry as transports
from weightbus.dataplane.transports.distributed import SourceRank

from ..export import location_of
from ..machine import Stopwatch
from ..settings import TrainerSettings
from ..source import AssemblyFailed, PipelineSource, Source, head_dim_of
from . import rank_commands as commands
from .expected_sglang_digests import EngineKind, SglangDigester, SglangDigestPlan, merge_live_digests


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
        tensors = source.tensors()
        if isinstance(source, PipelineSource) and any(
            transports.by_name(kind).divides for kind in settings.preferences()
        ):
            roots = source.roots()
            ranks = sorted(set(roots))
            if ranks[0] == 0 and len(ranks) > 1:
                owners = [ranks.index(root) for root in roots]
                manifest, sources = cut(source.model, tensors, owners, settings.bucket_bytes)
                pipeline = PipelineBroadcast(source, manifest, sources, ranks, settings.slots, head_dim_of(source))
                places = source.collect(msgspec.msgpack.encode(location_of(source.rank, source.device)))
                return cls(
                    manifest, pipeline, tuple(msgspec.msgpack.decode(each, type=ProcessLocation) for each in places)
                )
        return cls(Manifest.of(source.model, tensors, settings.bucket_bytes), None)


class _Memory(msgspec.Struct, frozen=True):
    """Staging buffer of a source other than rank 0; no other process opens it."""

    memory: torch.Tensor
    exported: bytes = b""


class _Found(msgspec.Struct, frozen=True):
    """Digests of the buckets of one source."""

    digests: dict[int, bytes] = {}
    """By bucket."""
    live: tuple[LiveDigests, ...] = ()
    error: str = ""


class StageDigests(NamedTuple):
    """Digests of all sources together."""

    tensors: bytes
    """Digests in the manifest's order."""
    live: tuple[LiveDigests, ...]


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
        self._source_number = list(ranks).index(source.rank) if source.rank in ranks else None
        self._context_of = sources.own(self._source_number) if self._source_number is not None else ()
        self._depth = depth
        self._buffers: Sequence[Slot] = ()
        self._plan = SglangDigestPlan(manifest, (), head_dim)
        self._head_dim = head_dim
        self._digests: dict[int, bytes] = {}
        self._source_rank = SourceRank(self._source_number, source.device) if self._source_number else None

    def lend(self, buffers: Sequence[Slot]) -> None:
        """Use rank 0's staging buffers for its buckets."""
        self._buffers = buffers

    def read(self, wanted: Collection[EngineKind], watch: Stopwatch) -> StageDigests:
        """Assemble and digest the buckets of every stage. Raises `SourceError` on every rank if one cannot."""
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
        return StageDigests(
            b"".join(digests[index] for index in range(len(digests))),
            merge_live_digests([each.live for each in all_found]),
        )

    def refill(self, first: int, last: int, watch: Stopwatch) -> Sequence[str]:
        """Assemble a row of buckets again. Returns this rank's tensors that differ from their digests.

        A source other than rank 0 sends the bucket, or reports the difference to rank 0 instead.
        """
        differing_tensors: list[str] = []
        for index in range(first, last):
            mine = self._is_mine(index)
            if mine and self._source_rank is not None:
                self._source_rank.wait_free(self.sources.place(index) + 1 - self._depth)
            found = self._gather(index, watch)
            if not mine:
                continue
            odd = self._odd(index, found)
            differing_tensors += odd
            if self._source_rank is not None and odd:
                self._source_rank.spoil(odd)
            elif self._source_rank is not None:
                self._source_rank.filled(self.sources.place(index) + 1)
        return differing_tensors

    def broadcast(self, address: Address, epoch: int, deadline_s: float, *, whole: bool) -> None:
        """Have this rank send its buckets in `epoch`, by a thread of its own; `whole`: all are assembled."""
        if self._source_rank is None:
            return
        buckets = [self._memory(index)[: self._manifest.buckets[index].nbytes] for index in self._context_of]
        filled = len(buckets) if whole else 0
        self._source_rank.begin(address, epoch, self.sources, buckets, deadline_s, filled)

    def execute(self, command: commands.PipelineCommand) -> None:
        """Execute a command of rank 0, which makes the same calls. A failure ends the session on every rank."""
        try:
            self._execute(command, Stopwatch())
        except BaseException:
            if self._source_rank is not None:
                self._source_rank.stop()
            raise

    def _execute(self, command: commands.PipelineCommand, watch: Stopwatch) -> None:
        match command:
            case commands.ReadStage():
                self.read(command.wanted, watch)
            case commands.RefillStage():
                self.refill(command.first, command.last, watch)
            case commands.JoinBroadcast():
                address = Address(
                    command.address, command.group, command.backend, world_size=command.world_size, token=command.token
                )
                self.broadcast(address, command.epoch, command.deadline_s, whole=command.whole)
            case _:  # pragma: no cover
                assert_never(command)

    def close(self) -> None:
        """Leave the group, and release the staging buffers."""
        if self._source_rank is not None:
            self._source_rank.close()
        self._buffers = ()

    # -- this rank -----------------------------------------------------------------------------------------------------

    def _is_mine(self, index: int) -> bool:
        return self._source_number is not None and self.sources.of[index] == self._source_number

    def _memory(self, index: int) -> torch.Tensor:
        """The staging buffer of one of this rank's buckets."""
        if not self._buffers:
            nbytes = max(self._manifest.buckets[own].nbytes for own in self._context_of)
            device = self._source.device
            count = min(self._depth, len(self._context_of))
            self._buffers = [_Memory(torch.empty(nbytes, dtype=torch.uint8, device=device)) for _ in range(count)]
        return self._buffers[self.sources.place(index) % len(self._buffers)].memory

    def _read(self, wanted: frozenset[EngineKind], watch: Stopwatch) -> _Found:
        if self._source_rank is not None:
            self._source_rank.stop()  # an earlier session would send from the slots
        if self._plan.wanted != wanted:
            self._plan = SglangDigestPlan(
                self._manifest, wanted if self._source_number is not None else (), self._head_dim
            )
        live = SglangDigester(self._plan)
        self._digests = {}
        for index in range(len(self._manifest.buckets)):
            found = self._gather(index, watch)
            if self._is_mine(index):
                self._digests[index] = found
                with watch.phase("digest"):
                    live.feed(index, self._memory(index))
        return _Found(self._digests, live.result(partial=True))

    def _gather(self, index: int, watch: Stopwatch) -> bytes:
        """Take part in assembling a bucket; returns its digests if it is this rank's."""
        memory = self._memory(index) if self._is_mine(index) else None
        with watch.phase("assemble"):
            self._source.assemble(self._manifest, index, memory, self._roots)
        if memory is None:
            return b""
        with watch.phase("digest"):
            nbytes = self._manifest.buckets[index].nbytes
            return integrity.digest_tensors(memory[:nbytes], self._manifest.offsets_of(index))

    def _odd(self, index: int, found: bytes) -> list[str]:
        return differing_tensors(self._manifest, self._manifest.buckets[index], found, self._digests[index])


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


def broadcast_command(offer: Endpoint, epoch: int, deadline_s: float, *, whole: bool) -> commands.JoinBroadcast:
    """The command that tells the other sources of an offer."""
    return commands.JoinBroadcast(
        address=offer.address,
        group=offer.group,
        backend=offer.backend,
        world_size=offer.world_size,
        token=offer.token,
        epoch=epoch,
        deadline_s=deadline_s,
        whole=whole,
    )


_FOUND: Final = msgspec.msgpack.Decoder(_Found)
