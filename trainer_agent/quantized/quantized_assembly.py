"""Executes what quantization_plan.py divided: one rank's part of a bucket, or all of it in memory that stays.

QuantizedAssembly      bucket by bucket: results travel to the root as gather messages, the arena is reused
ResidentQuantization   all of this rank's results at once, in an arena of its own, for engines that copy themselves
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from weightbus.dataplane.copy import Lanes
from weightbus.dataplane.memory import READY_FLAG_BYTES, ArenaParts, addresses_of
from weightbus.dataplane.quantize import DigestSums, PreparedTasks, QuantizeTask, prepare_tasks
from weightbus.dataplane.tensors import DTYPES as DTYPE_NAMES, ITEM_BYTES, Shards

from ..assembly import (
    DTYPES,
    Assembler,
    BucketPlan,
    GatherExchange,
    MemoryAccess,
    StridedCopy,
    Uploads,
    UploadSpans,
    is_pinned,
    plan,
    upload_spans_of,
)
from ..export import Exportable
from ..source import Source
from .quantization_plan import QuantizedWeight, QuantizeJob, RankWork, WeightDivision, WeightPlace

SHARES: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the arena at which parts end. A device quantizes about three times as fast as a peer copies: after one part
is copied the next is complete, and readers wait for the first part only."""
_ALIGNMENT: Final = 16
_ELSEWHERE: Final = -1
"""Rank of all but the root, where only the root has work."""


@runtime_checkable
class LocatedSource(Protocol):
    """A source that knows the places of all shards, on every rank."""

    @property
    def rank(self) -> int:
        """Rank of this process in the source's group."""
        ...

    @property
    def shards(self) -> Shards:
        """Shards that hold every element of every tensor once, the same on every rank.

        `storage` is an index into `memory`.
        """
        ...

    @property
    def exchange(self) -> GatherExchange | None:
        """How gather messages travel between the ranks that `shards` names; None if none do."""
        ...

    def memory(self) -> Sequence[torch.Tensor]:
        """This rank's own tensors as they are now. Collective."""
        ...


@runtime_checkable
class ReadableSource(Source, LocatedSource, Exportable, Protocol):
    """A source with located shards, in memory that engines can read."""


class _Bound(NamedTuple):
    """Jobs of one bucket, bound to memory."""

    at: tuple[int, ...]
    """Addresses of all of that memory."""
    tasks: tuple[PreparedTasks, ...]
    """By the ready parts in which they are done."""


class QuantizedAssembly:
    """Executes one rank's work for one manifest: quantizes its part of a bucket, and sends it to the root."""

    def __init__(
        self,
        division: WeightDivision,
        source: Source,
        located: LocatedSource | None,
        work: RankWork | None = None,
        memory_access: MemoryAccess = MemoryAccess(),  # noqa: B008  immutable
    ) -> None:
        """`work` overrides the work that `division` gives this rank. `memory_access` differs in tests only."""
        self._source = source
        self._memory_access = memory_access
        self._uploads: Uploads | None = None
        self._located = located
        self._weights = division.weights
        rank = located.rank if located else (0 if source.root else _ELSEWHERE)
        self._work = work or division.work(rank)
        raws = [each.raws for each in self._work.buckets]
        self._later = [frozenset(itertools.chain.from_iterable(raws[index + 1 :])) for index in range(len(raws))]
        """By bucket: gathered weights that later buckets need."""
        self._rank, self._roots, self._raw_roots = rank, division.roots, division.raw_roots
        self._traveling: tuple[BucketPlan, ...] = ()
        if located is not None and work is None:
            self._traveling = plan(division.manifest, division.traveling(), rank=rank, roots=self._roots)
        self._gather_plan: tuple[BucketPlan, ...] = ()
        if division.raw is not None and (raw_shards := division.raw_shards()) is not None:
            self._gather_plan = plan(division.raw, raw_shards, rank=rank, roots=self._raw_roots)
        self._flags: ArenaReadyFlags | None = None
        self.round = 0
        """Value of the ready flags."""
        self._storages: list[torch.Tensor] | None = None
        self._places: list[int] = []
        """Addresses of the storages: a parameter stays the same object when other memory is put under it."""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._lanes = torch.empty((0, 2), dtype=torch.int64)
        """Checksums that jobs accumulate."""
        self._assembler: Assembler | None = None
        self._gatherer: Assembler | None = None
        self._gathered: dict[int, torch.Tensor | None] = {}
        self._bound: dict[int, _Bound] = {}
        self._constants: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def run(self, index: int, out: torch.Tensor | None) -> None:
        """Take part in bucket `index`."""
        if index == 0 or (self._located is not None and self._storages is None):
            self._begin()
        self._take_memory()
        work = self._work.buckets[index]
        self._quantize(index, out)
        if out is not None:
            for copy in work.copies:
                number, at = copy.raw
                _view(out, copy.target).copy_(_typed(self._raw(number), at, copy.target))
            for shape in work.shapes:
                _view(out, shape.target).copy_(self._numbers(shape.numbers))
        if self._assembler is not None:
            self._assembler.run(index, out, self._source.device)
        self._release(index)

    def _begin(self) -> None:
        """Begin a pass: the source's tensors may have been moved."""
        self._gathered = {}
        if self._located is None:
            return
        storages = self._located.memory()[: self._work.base]
        self._storages = list(storages)
        places = addresses_of(storages)
        if places == self._places:
            return
        self._places = places
        self._bound = {}
        self._assembler = None
        far = self._memory_access.to_upload(storages, self._source.device)
        wanted = [_upload_spans(each.jobs, far) for each in self._work.buckets]
        self._uploads = Uploads(wanted, storages, self._source.device, self._memory_access)

    def _quantize(self, index: int, out: torch.Tensor | None) -> None:
        """Gather weights, and run this rank's jobs: bound once for as long as all memory stays where it is."""
        work = self._work.buckets[index]
        for number in work.raws:
            if number not in self._gathered:
                self._gathered[number] = self._gather(number)
        if not work.jobs:
            return
        gathered = [memory for number in work.raws if (memory := self._gathered[number]) is not None]
        view = self._uploads.take(index) if self._uploads is not None else None
        near: dict[int, torch.Tensor] = {}
        """Uploaded weights, by number of the job; other jobs read theirs where they lie."""
        for number, job in enumerate(work.jobs if view is not None else ()):
            place = _place(job)
            if view is not None and place is not None and (weights := view(place)) is not None:
                near[number] = weights
        uploaded = (each.untyped_storage().data_ptr() for each in [*near.values()][:1])
        at = (*(each.data_ptr() for each in (self._arena, *gathered, *(() if out is None else (out,)))), *uploaded)
        bound = self._bound.get(index)
        if bound is None or bound.at != at or (self._weights_on_host and len(near) < len(work.jobs)):
            tasks = [self._task(job, out, near.get(number)) for number, job in enumerate(work.jobs)]
            cuts = () if self._flags is None or index else self._flags.job_cuts
            parts = itertools.pairwise((0, *cuts, len(tasks)))
            bound = self._bound[index] = _Bound(
                at, tuple(prepare_tasks(tasks[a:b], self._source.device) for a, b in parts)
            )
        for part, each in enumerate(bound.tasks):
            each.run()
            if self._flags is not None and part < len(bound.tasks) - 1:
                self._flags.set(self._arena, part, self.round)
        if near and self._uploads is not None:
            self._uploads.used(index)

    def _take_memory(self) -> None:
        """Allocate the arena, and bind the assemblers that read from it and from the source's tensors."""
        if self._arena.numel() < self._work.arena_bytes:
            self._arena = torch.empty(self._work.arena_bytes, dtype=torch.uint8, device=self._source.device)
            self._assembler = None
        if self._located is None or self._assembler is not None:
            return
        assert self._storages is not None
        views = [_whole_items(self._arena, name) for name in DTYPE_NAMES]
        exchange = self._located.exchange
        self._assembler = Assembler(self._traveling, [*self._storages, *views], self._rank, self._roots, exchange)
        self._gatherer = Assembler(self._gather_plan, self._storages, self._rank, self._raw_roots, exchange)

    def _task(self, job: QuantizeJob, out: torch.Tensor | None, near: torch.Tensor | None) -> QuantizeTask:
        weight = self._weights[job.weight]
        assert out is not None or all(each.arena for each in job.targets), "only the root writes into a bucket"
        outs = tuple(_view(self._arena if each.arena or out is None else out, each) for each in job.targets)
        source = self._source_of(job, weight) if near is None else near
        sums = None if job.sums is None else DigestSums(self._lanes, job.sums[0], *job.sums[1])
        return QuantizeTask(weight.scheme, source, DTYPES[weight.spec.dtype], outs, sums)

    def _source_of(self, job: QuantizeJob, weight: QuantizedWeight) -> torch.Tensor:
        if job.held is None:
            number, at = job.raw
            nbytes = weight.spec.nbytes
            return self._raw(number)[at : at + nbytes].view(DTYPES[weight.spec.dtype]).view(weight.spec.shape)
        assert self._storages is not None
        storage, view = self._storages[job.held.view.storage], job.held.view
        part = storage.as_strided(job.shape, view.strides, storage.storage_offset() + view.offset)
        return part.to(self._source.device, non_blocking=is_pinned(part))

    def _numbers(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """The numbers as a tensor on the device of the buckets; models have few different shapes."""
        if numbers not in self._constants:
            self._constants[numbers] = torch.tensor(numbers, device=self._source.device)
        return self._constants[numbers]

    @property
    def _weights_on_host(self) -> bool:
        """True if parameters are in host memory and buckets are not: uploads of another pass are stale then."""
        return any(self._memory_access.is_elsewhere(each, self._source.device) for each in (self._storages or ())[:1])

    def _gather(self, number: int) -> torch.Tensor | None:
        """A raw bucket in memory of its root; None on the other ranks, which send their parts of it."""
        raw = self._work.raw
        assert raw is not None, "nothing is gathered, and something was asked for"
        memory: torch.Tensor | None = None
        if self._rank == self._raw_roots[number]:
            memory = torch.empty(raw.buckets[number].nbytes, dtype=torch.uint8, device=self._source.device)
        if self._located is None:
            self._source.assemble(raw, number, memory)
        else:
            assert self._gatherer is not None
            self._gatherer.run(number, memory, self._source.device)
        return memory

    def _raw(self, number: int) -> torch.Tensor:
        memory = self._gathered[number]
        assert memory is not None, "only the root has what was gathered"
        return memory

    def _release_raw(self, index: int) -> None:
        """Free raw buckets that no later bucket needs."""
        self._gathered = {number: raw for number, raw in self._gathered.items() if number in self._later[index]}

    def _release(self, index: int) -> None:
        """Free what no later bucket needs; after the last bucket free everything."""
        self._release_raw(index)
        if index in self._bound and any(each.keeps for each in self._bound[index].tasks):
            del self._bound[index]
        if index == len(self._work.buckets) - 1:
            self._gathered = {}
            if self._uploads is not None:
                self._uploads.settle()
            if self._weights_on_host and self._source.device.type == "cuda":
                torch.cuda.current_stream(self._source.device).synchronize()  # pinned parameters may be stepped now
            self._arena = torch.empty(0, dtype=torch.uint8)
            self._assembler = self._gatherer = None


class ResidentQuantization(QuantizedAssembly):
    """All that one rank quantizes, in an arena that stays where it is, so that engines can read it.

    Engines may read a part of the arena once its ready flag shows the number of the round (`ArenaReadyFlags`). A
    publication ends before the next one is prepared.
    """

    def __init__(self, division: WeightDivision, source: ReadableSource) -> None:
        """`division` is of the source's shards."""
        held = source.local_shards(source.tensors())
        base = int(held.storage.max()) + 1 if len(held) else 0
        resident_work = division.resident_work(source.rank, base)
        flags = ArenaReadyFlags(resident_work.work)
        work = msgspec.structs.replace(resident_work.work, arena_bytes=flags.arena_bytes)
        super().__init__(division, source, source, work)
        self._flags = self._ready = flags
        self.round = secrets.randbits(48)
        """Grows with every `prepare`. Random at first: memory may hold flags of another trainer."""
        quantized = {weight.spec.name for weight in division.weights}
        plain = [row for row in range(len(held)) if held.tensors[int(held.boxes.space[row])].name not in quantized]
        shards = [*(held.at(row) for row in plain), *resident_work.results]
        self.shards = Shards.of(division.manifest.tensors, shards, source.rank)
        """Of the served tensors, in what `memory` gives."""
        self.summed = Shards.of(division.manifest.tensors, resident_work.summed, source.rank)
        """Shards of `shards` whose checksums are accumulated."""
        self.sums_of = resident_work.sums
        """Tensors of `sums`, in order."""

    @torch.no_grad()
    def prepare(self) -> None:
        """Quantize everything as it is now. Collective. On a GPU the work has only begun, in stream order.

        Tensors that are not quantized are complete, and no ready flag shows this round yet: both are read before a flag
        is.
        """
        self._begin()
        if self._arena.numel() < self._work.arena_bytes:
            self._take_memory()
            for work in self._work.buckets:  # shapes once for an arena: they are the same in every version
                for shape in work.shapes:
                    _view(self._arena, shape.target).copy_(self._numbers(shape.numbers))
        self._take_memory()
        self.round += 1
        self._ready.clear(self._arena)
        _wait_for(self._source.device)  # a training step may write on any stream, and `_begin` has what it left done
        if len(self._lanes) < len(self.sums_of):
            self._lanes = torch.zeros((len(self.sums_of), 2), dtype=torch.int64, device=self._source.device)
        for index in range(len(self._work.buckets)):
            self._quantize(index, None)
            self._release_raw(index)
        if self._ready.parts:
            self._ready.set(self._arena, len(self._ready.parts) - 1, self.round)

    @property
    def parts(self) -> ArenaParts | None:
        """Parts and ready flags of the arena in `memory`; None if nothing is quantized."""
        storages = self.shards.storage[self.shards.storage >= self._work.base]
        return self._ready.in_memory(int(storages.min())) if len(storages) else None

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """The source's own tensors, and the arena once for each dtype, as of the last `prepare`."""
        return [*(self._storages or ()), *(_whole_items(self._arena, name) for name in DTYPE_NAMES)]

    def sums(self) -> Lanes:
        """(2, tensors of `sums_of`) uint64: checksums that `prepare` accumulated. Blocks until it has ended."""
        return np.ascontiguousarray(self._lanes.cpu().numpy().view(np.uint64).T)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _whole_items(memory: torch.Tensor, dtype: str) -> torch.Tensor:
    return memory[: memory.numel() // ITEM_BYTES[dtype] * ITEM_BYTES[dtype]].view(DTYPES[dtype])


def _view(memory: torch.Tensor, place: WeightPlace) -> torch.Tensor:
    typed = _whole_items(memory, place.dtype)
    begin = typed.storage_offset() + place.offset // ITEM_BYTES[place.dtype]
    return typed.as_strided(place.shape, place.strides, begin)


def _typed(memory: torch.Tensor, at: int, place: WeightPlace) -> torch.Tensor:
    """The gathered tensor, of the dtype and shape of its destination."""
    count = prod(place.shape) * ITEM_BYTES[place.dtype]
    return memory[at : at + count].view(DTYPES[place.dtype]).view(place.shape)


class ReadyPart(NamedTuple):
    """A part of the arena with one flag."""

    jobs: int
    """Number of the first bucket's jobs that precede the flag; for the last part, all work precedes it."""
    end: int
    """Bytes of the arena that are complete when the flag is set, from its beginning."""


class ArenaReadyFlags:
    """Parts and flags of one rank's arena: readers begin with memory that the rank still quantizes.

    A rank quantizes into its arena from the beginning on, part by part. Its device sets the flag of a part, which lies
    behind all data in the arena, to the number of the round once the part is complete; before it writes anything it
    clears all flags. Readers wait for the first part only. Together with deferred digests (publish/driver.py) that
    saves 28 ms of a round of 61 GB of FP8 weights.
    """

    def __init__(self, work: RankWork) -> None:
        self.parts = ready_parts_of(work)
        self.offset = -(-work.arena_bytes // _ALIGNMENT) * _ALIGNMENT
        """Byte of the arena at which the flags begin, behind all data."""
        self.arena_bytes = self.offset + len(self.parts) * READY_FLAG_BYTES if self.parts else work.arena_bytes
        """Bytes of the arena with its flags."""

    @property
    def job_cuts(self) -> tuple[int, ...]:
        """Jobs of the first bucket behind which a flag is set; the last flag is set behind all work."""
        return tuple(part.jobs for part in self.parts[:-1])

    def in_memory(self, storage: int) -> ArenaParts | None:
        """Parts and flags as readers are told of them; `storage` is the number of the arena. None without parts."""
        return ArenaParts(storage, tuple(part.end for part in self.parts), self.offset) if self.parts else None

    def of(self, arena: torch.Tensor) -> torch.Tensor:
        """(parts,) int64: the flags in `arena`."""
        return arena[self.offset :].view(torch.int64) if self.parts else arena[:0].view(torch.int64)

    def clear(self, arena: torch.Tensor) -> None:
        """Clear all flags, in stream order."""
        self.of(arena).zero_()

    def set(self, arena: torch.Tensor, part: int, value: int) -> None:
        """Set the flag of `part`, in stream order behind the part's writes."""
        self.of(arena)[part].fill_(value)


def ready_parts_of(work: RankWork) -> tuple[ReadyPart, ...]:
    """Parts of an arena that stays in memory; empty if nothing is quantized.

    Jobs that need no other rank come first, and lie in the arena in their order. Gathered weights and data that is
    written once lie behind them, in the last part. Jobs of one weight, whose checksums are cleared together, are in one
    part.
    """
    if not work.arena_bytes:
        return ()
    jobs = work.buckets[0].jobs
    own = next((at for at, job in enumerate(jobs) if job.held is None), len(jobs))
    found: list[ReadyPart] = []
    left = [share * work.arena_bytes for share in SHARES]
    end = 0
    for at, job in enumerate(jobs[:own]):
        end = max(end, _end(job))
        if left and end >= left[0] and (at + 1 == len(jobs) or jobs[at + 1].weight != job.weight):
            found.append(ReadyPart(at + 1, end))
            left = [each for each in left if each > end]
    if found and found[-1].end >= work.arena_bytes:
        found.pop()
    return (*found, ReadyPart(len(jobs), work.arena_bytes))


def _end(job: QuantizeJob) -> int:
    ends = (place.offset + prod(place.shape) * ITEM_BYTES[place.dtype] for place in job.targets if place.arena)
    return max(ends, default=0)


def _upload_spans(jobs: Sequence[QuantizeJob], far: dict[int, int]) -> UploadSpans | None:
    places = [place for job in jobs if (place := _place(job)) and place.storage in far]
    return upload_spans_of(places, far) if places else None


def _place(job: QuantizeJob) -> StridedCopy | None:
    """Where a job reads; None if it reads a gathered weight."""
    if job.held is None:
        return None
    view = job.held.view
    return StridedCopy(
        storage=view.storage,
        dtype=job.held.dtype,
        shape=job.shape,
        offset=view.offset,
        strides=view.strides,
        contribution_offset=0,
        bucket_offset=0,
        bucket_strides=(),
    )
