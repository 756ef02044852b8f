"""Parameters in pinned host memory: what is uploaded, when, and that nothing is read too early or written too late.

The contract of a lane is checked by one that copies nothing before it is waited for; on a GPU by test_offloaded.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.trainer_agent.assembly.assembler import (
    Assembler,
    HostUploadStream,
    MemoryAccess,
    UploadSpan,
    UploadSpans,
    UploadStream,
    copy_each,
    upload_spans_of,
)
from weightbus.trainer_agent.assembly.gather_plan import plan

from .test_assembler import CPU, SHAPES, Post, World, cut


class LateUploads:
    """Copies at the last moment that is allowed, and objects to whoever does not wait."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        """Bytes of each cargo."""
        self.places: list[int] = []
        """... and the address where it begins."""
        self.pending: dict[int, tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {}
        self.reading: set[int] = set()
        self.settled = True
        """Nothing that was begun can read the parameters any more, whatever the order of the device."""

    def copy(self, buffer: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        assert buffer not in self.reading, "the buffer is being read"
        for target in targets:
            target.view(torch.uint8).fill_(0xA5)  # whoever reads it now reads nonsense
        self.pending[buffer] = targets, sources
        self.settled = False
        self.begun.append(sum(target.nbytes for target in targets))
        self.places.append(targets[0].data_ptr())

    def arrived(self, buffer: int) -> None:
        copy_each(*self.pending.pop(buffer))
        self.reading.add(buffer)

    def used(self, buffer: int) -> None:
        self.reading.discard(buffer)

    def settle(self) -> None:
        for buffer in tuple(self.pending):
            copy_each(*self.pending.pop(buffer))
        self.settled = True


def far(upload_stream: UploadStream, storages: set[int] | None = None) -> MemoryAccess:
    """As if parameters lay in pinned host memory, and buckets did not; `storages` by the address of their memory."""

    def away(tensor: torch.Tensor, _device: torch.device) -> bool:
        return storages is None or tensor.data_ptr() in storages

    return MemoryAccess(
        is_elsewhere=away, is_pinned=lambda tensor: away(tensor, CPU), upload_stream=lambda _device: upload_stream
    )


@settings(deadline=None, max_examples=80)
@given(st.data(), st.sampled_from(["float32", "bfloat16"]), st.integers(1, 1200), st.sampled_from([1, 40, 1 << 20]))
def test_uploaded_pieces_give_the_same_bytes(
    data: st.DataObject, dtype: str, bucket_bytes: int, zero_copy_bytes: int
) -> None:
    """However tensors are cut and cast, whatever of them is on the device already, on every rank."""
    world = World(dtype, data.draw(st.sampled_from(["float32", "bfloat16"])))
    for name, shape in SHAPES.items():
        for box in cut(Box.whole(shape), data):
            rank = data.draw(st.integers(0, 2))
            world.give(rank, name, box, shared=data.draw(st.booleans()))
    if 0 not in world.rows:
        world.rows[0] = []
    manifest = Manifest.of("M", world.tensors, bucket_bytes)
    plans = {rank: plan(manifest, world.shards(), rank=rank, zero_copy_bytes=zero_copy_bytes) for rank in world.rows}
    memory = {each.data_ptr() for storages in world.storages.values() for each in storages}
    away = memory if data.draw(st.booleans()) else data.draw(st.sets(st.sampled_from(sorted(memory))))
    streams: list[LateUploads] = []

    def upload_stream(_device: torch.device) -> UploadStream:
        streams.append(LateUploads())
        return streams[-1]

    world.check(manifest, plans, far(HostUploadStream(), away)._replace(upload_stream=upload_stream))
    assert not any(each.pending or each.reading for each in streams), "somebody still reads a buffer"
    assert all(each.settled for each in streams), "the device may still read the parameters"


def offloaded(count: int = 5) -> tuple[Manifest, list[torch.Tensor], Shards]:
    """Tensors of one bucket each, trained in float32 around zero and served around one."""
    specs = tuple(TensorSpec(f"t{index}", "bfloat16", (64, 8)) for index in range(count))
    storages = [torch.full((64, 8), index - 1.0) for index in range(count)]
    rows = [
        Shard(spec.name, Box.whole(spec.shape), "float32", ShardView(at, 0, (8, 1)), shift=1)
        for at, spec in enumerate(specs)
    ]
    return Manifest.of("M", specs, 1024), storages, Shards.of(specs, rows)


def contents(assembler: Assembler, index: int) -> float:
    out = torch.zeros(1024, dtype=torch.uint8)
    assembler.run(index, out, CPU)
    values = out.view(torch.bfloat16).unique()
    assert len(values) == 1
    return float(values)


def test_the_next_bucket_is_on_its_way_while_one_is_used() -> None:
    """One ahead and no further: two buffers. What travels is float32, as it lies; what arrives is bfloat16."""
    manifest, storages, shards = offloaded()
    upload_stream = LateUploads()
    assembler = Assembler(plan(manifest, shards, rank=0), storages, 0, None, None, far(upload_stream))
    for index in range(5):
        assert contents(assembler, index) == index
        assert upload_stream.begun == [2048] * min(index + 2, 5)
    assert len(set(upload_stream.places)) == 2
    assert all(one != other for one, other in pairwise(upload_stream.places)), (
        "it has to wait until the one before was read"
    )


def test_when_the_last_bucket_is_there_parameters_are_not_read() -> None:
    """Training goes on then."""
    manifest, storages, shards = offloaded()
    upload_stream = LateUploads()
    assembler = Assembler(plan(manifest, shards, rank=0), storages, 0, None, None, far(upload_stream))
    for index in range(4):
        contents(assembler, index)
    assert upload_stream.pending
    assert not upload_stream.settled
    contents(assembler, 4)
    assert upload_stream.settled


@pytest.mark.parametrize("stopped_after", [0, 1, 3])
def test_what_was_uploaded_for_a_pass_that_was_given_up_is_not_used(stopped_after: int) -> None:
    """The weights have changed since: every pass begins anew."""
    manifest, storages, shards = offloaded()
    assembler = Assembler(plan(manifest, shards, rank=0), storages, 0, None, None, far(LateUploads()))
    for buffer in range(3):
        last = 4 if buffer == 2 else stopped_after
        for index in range(last + 1):
            assert contents(assembler, index) == index + 10 * buffer
        for storage in storages:
            storage.add_(10)


def test_parameters_that_come_back_are_not_uploaded() -> None:
    """Where they are is asked for every pass: trainers offload between phases."""
    manifest, storages, shards = offloaded()
    upload_stream = LateUploads()
    there = {storage.data_ptr() for storage in storages}
    assembler = Assembler(plan(manifest, shards, rank=0), storages, 0, None, None, far(upload_stream, there))
    for _ in range(2):
        assert [contents(assembler, index) for index in range(5)] == [0, 1, 2, 3, 4]
    assert len(upload_stream.begun) == 10
    away = [storage.data for storage in storages]  # kept, so that nothing else comes to lie there
    for storage, was in zip(storages, away, strict=True):
        storage.data = was.clone()  # as a trainer does that loads them back
    assert [contents(assembler, index) for index in range(5)] == [0, 1, 2, 3, 4]
    assert len(upload_stream.begun) == 10


def test_another_rank_sends_what_it_uploaded() -> None:
    """Its messages are packed on the device, with its next one on the way."""
    world = World("bfloat16")
    for index, (name, shape) in enumerate(SHAPES.items()):
        world.give(index % 2, name, Box.whole(shape))
    manifest = Manifest.of("M", world.tensors, 100)
    plans = {rank: plan(manifest, world.shards(), rank=rank, zero_copy_bytes=1) for rank in (0, 1)}
    upload_stream = LateUploads()
    letters: dict[int, list[torch.Tensor]] = defaultdict(list)
    assemblers = {
        rank: Assembler(plans[rank], world.storages[rank], rank, None, Post(rank, letters), memory_access)
        for rank, memory_access in ((0, MemoryAccess()), (1, far(upload_stream)))
    }
    world.run(manifest, assemblers, letters)
    assert len(upload_stream.begun) == 3


def test_a_run_that_would_be_mostly_waste_is_packed_on_the_host() -> None:
    """A column of a wide parameter is not worth uploading all of it; the groups of a fused one are."""
    spec = TensorSpec("w", "float32", (64, 4))
    manifest = Manifest.of("M", [spec], 1 << 20)
    wide = Shards.of([spec], [Shard("w", Box.whole(spec.shape), "float32", ShardView(0, 8, (32, 1)))])
    ((contribution,),) = ([bucket[0]] for bucket in plan(manifest, wide, rank=0))
    places = [place for message in contribution.messages for place in message.placements]
    assert upload_spans_of(places, {0: 4}) is None
    assert upload_spans_of(places, {}) == UploadSpans({}, 0)
    close = Shards.of([spec], [Shard("w", Box.whole(spec.shape), "float32", ShardView(0, 8, (5, 1)))])
    (bucket,) = plan(manifest, close, rank=0)
    places = [place for message in bucket[0].messages for place in message.placements]
    assert upload_spans_of(places, {0: 4}) == UploadSpans({0: UploadSpan(0, 8, 63 * 5 + 4, 0)}, 1280)
