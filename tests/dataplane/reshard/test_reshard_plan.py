"""Plans against an oracle that moves one element at a time, and what a plan promises besides."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy.box_digests import make_box_table, odd_boxes
from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.errors import CoverageError, ManifestError
from weightbus.dataplane.memory.export_map import ExportedTensor, ExportMap, Region
from weightbus.dataplane.reshard.load_trace import LoadTarget, LoadTrace, NotCopiedCause, StagedTensor
from weightbus.dataplane.reshard.reshard_plan import PlanReader, ReshardPlan, make_plan
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView, contiguous_strides

READER = PlanReader(rank=0, host="here", device="cpu")


def cuts(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """A tensor cut into equal parts along each axis."""
    sizes = [extent // count for extent, count in zip(shape, parts, strict=True)]
    return [
        Box(
            tuple(index * size for index, size in zip(at, sizes, strict=True)),
            tuple((index + 1) * size for index, size in zip(at, sizes, strict=True)),
        )
        for at in product(*(range(count) for count in parts))
    ]


@st.composite
def layouts(draw: st.DrawFn, tensors: tuple[TensorSpec, ...], ranks: int, replicas: int = 1) -> list[list[Shard]]:
    """Every tensor cut somehow, its parts given to ranks, at random places of their memories, some transposed."""
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    ends = [0] * ranks
    for spec in tensors:
        parts = tuple(
            draw(st.sampled_from([count for count in (1, 2, 3) if extent % count == 0])) for extent in spec.shape
        )
        for box in cuts(spec.shape, parts):
            for rank in draw(st.permutations(range(ranks)))[:replicas]:
                strides = contiguous_strides(box.shape)
                if len(box.shape) == 2 and draw(st.booleans()):
                    strides = (1, box.shape[0])
                ends[rank] += draw(st.integers(0, 1)) * 8
                shards[rank].append(Shard(spec.name, box, spec.dtype, ShardView(0, ends[rank], strides)))
                ends[rank] += box.size
    return shards


TENSORS = (
    TensorSpec("a", "bfloat16", (12, 16)),
    TensorSpec("b", "bfloat16", (6, 8)),
    TensorSpec("c", "bfloat16", (24,)),
    TensorSpec("d", "bfloat16", (2, 6, 8)),
)


def sizes(shards: list[list[Shard]]) -> list[int]:
    return [max((p.view.offset + p.box.size for p in mine), default=1) for mine in shards]


def exported(shards: list[list[Shard]], hosts: list[str] | None = None) -> list[ExportMap]:
    """One region and one local tensor for each rank, 64 bytes into the region."""
    return [
        ExportMap(rank, hosts[rank] if hosts else "here", (Region(64 + 2 * nbytes, "cpu"),), (ExportedTensor(0, 64),))
        for rank, nbytes in enumerate(sizes(shards))
    ]


def joined(shards: list[list[Shard]]) -> Shards:
    return Shards.join([Shards.of(TENSORS, mine, rank) for rank, mine in enumerate(shards)])


def recording_of(shards: list[Shard], size: int, loaded: tuple[int, ...] = ()) -> LoadTrace:
    target = LoadTarget("flat", "bfloat16", (size,), (1,), parameter=True)
    causes = tuple(StagedTensor(index, NotCopiedCause.COMPUTED) for index in loaded)
    return LoadTrace(0, (target,), Shards.of(TENSORS, shards), loaded=causes)


def fill(shards: list[list[Shard]], values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The ranks' memories, element by element."""
    memories = [torch.zeros(32 + size, dtype=torch.bfloat16) for size in sizes(shards)]
    for memory, mine in zip(memories, shards, strict=True):
        for shard in mine:
            view = memory.as_strided(shard.box.shape, shard.view.strides, 32 + shard.view.offset)
            view.copy_(cut(values, shard))
    return memories


def cut(values: dict[str, torch.Tensor], shard: Shard) -> torch.Tensor:
    return values[shard.tensor][tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))]


def random_values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {spec.name: torch.randn(spec.shape).to(torch.bfloat16) for spec in TENSORS}


def carry_out(plan: ReshardPlan, memories: list[torch.Tensor], target: torch.Tensor, buffer: torch.Tensor) -> None:
    sources = [memories[source.rank].view(torch.uint8) for source in plan.sources]
    source_bytes = np.array([len(source) for source in sources], np.int64)
    plan.copies.check(source_bytes, np.array([target.numel() * 2]))
    plan.staging.check(source_bytes, np.array([buffer.numel()]))
    TorchCopyEngine().prepare_copies(plan.copies, sources, [target.view(torch.uint8)]).run()
    TorchCopyEngine().prepare_copies(plan.staging, sources, [buffer]).run()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_element_arrives_where_it_was_recorded(data: st.DataObject) -> None:
    """Any cut of the trainer against any cut of the engine: each element, and nothing beside them."""
    trainer = data.draw(layouts(TENSORS, 3, data.draw(st.integers(1, 3))))
    (engine,) = data.draw(layouts(TENSORS[:3], 1))
    size = sizes([engine])[0]
    values = random_values()

    plan = make_plan(joined(trainer), exported(trainer), recording_of(engine, size, loaded=(3,)), READER)
    target, buffer = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(plan.staging_bytes, dtype=torch.uint8)
    carry_out(plan, fill(trainer, values), target, buffer)

    expected = torch.zeros(size, dtype=torch.bfloat16)
    for shard in engine:
        expected.as_strided(shard.box.shape, shard.view.strides, shard.view.offset).copy_(cut(values, shard))
    assert torch.equal(target, expected)
    assert torch.equal(buffer[: TENSORS[3].nbytes].view(torch.bfloat16).view(2, 6, 8), values["d"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_digests_of_boxes_are_digests_of_tensors(data: st.DataObject) -> None:
    """Whichever ranks hold the parts, the sums of their words are the digest of the packed tensor."""
    trainer = data.draw(layouts(TENSORS, 3))
    values = random_values()
    memories = fill(trainer, values)
    shards = joined(trainer)
    odd = odd_boxes(shards)
    even = np.setdiff1d(np.arange(len(shards)), odd)
    whole = np.setdiff1d(np.arange(len(TENSORS)), shards.boxes.space[odd])

    table = make_box_table(shards.take(even), shards.rank[even], np.full(len(even), 64))
    table.check(np.array([memory.numel() * 2 for memory in memories]))
    lanes = TorchCopyEngine().prepare_digest(table, [memory.view(torch.uint8) for memory in memories]).run()

    found = integrity.finish_digests(lanes, np.array([spec.nbytes for spec in TENSORS]))
    for index in whole.tolist():
        packed = values[TENSORS[index].name].reshape(-1).view(torch.uint8)
        expected = integrity.digest_tensors(packed, (0, TENSORS[index].nbytes))
        assert found[16 * index : 16 * index + 16] == expected


def column_slices(count: int) -> tuple[list[list[Shard]], list[Shard]]:
    """`count` experts apart in the trainer, stacked in the engine."""
    tensors = [Shard(f"e{n}", Box((0, 0), (4, 8)), "bfloat16", ShardView(0, 64 * n, (8, 1))) for n in range(count)]
    return [tensors], [replace_view(shard, ShardView(0, 32 * at, (8, 1))) for at, shard in enumerate(tensors)]


def replace_view(shard: Shard, view: ShardView) -> Shard:
    return Shard(shard.tensor, shard.box, shard.dtype, view)


def test_neighbors_become_one_row() -> None:
    """128 experts that lie at equal distances are one row of the table, not 128."""
    trainer, engine = column_slices(128)
    tensors = tuple(TensorSpec(f"e{n}", "bfloat16", (4, 8)) for n in range(128))
    shards = Shards.of(tensors, trainer[0])
    target = LoadTarget("w", "bfloat16", (128 * 32,), (1,), parameter=True)
    trace = LoadTrace(0, (target,), Shards.of(tensors, engine))
    export = ExportMap(0, "here", (Region(128 * 128, "cpu"),), (ExportedTensor(0, 0),))

    plan = make_plan(shards, [export], trace, READER)

    assert len(plan.copies) == 1
    assert plan.copies.grid.tolist() == [[1, 1, 128]]
    assert plan.copies.run.tolist() == [32]


def two_replicas() -> tuple[list[list[Shard]], list[Shard]]:
    mine = [Shard(spec.name, Box.whole(spec.shape), "bfloat16", ShardView(0, 1000 * at, contiguous_strides(spec.shape)))
            for at, spec in enumerate(TENSORS)]  # fmt: skip
    return [mine, mine], mine


def test_near_replicas_come_first_and_equal_ones_take_turns() -> None:
    """A replica on another host is not read; two on this one share the work."""
    replicas, engine = two_replicas()
    trace = recording_of(engine, 4000)

    far = make_plan(joined(replicas), exported(replicas, ["there", "here"]), trace, READER)
    both = make_plan(joined(replicas), exported(replicas), trace, READER)

    assert {source.rank for source in far.sources} == {1}
    assert {source.rank for source in both.sources} == {0, 1}


def test_workers_begin_with_different_replicas() -> None:
    """What the first one reads of one rank, the second one reads of the other: neither serves all at a time."""
    replicas, engine = two_replicas()
    trace = recording_of(engine, 4000)

    def givers(rank: int) -> dict[int, int]:
        plan = make_plan(joined(replicas), exported(replicas), trace, msgspec.structs.replace(READER, rank=rank))
        sources: list[int] = plan.copies.source.tolist()
        return dict(zip(plan.copies.target_at.tolist(), (plan.sources[each].rank for each in sources), strict=True))

    first, second = givers(0), givers(1)

    assert first.keys() == second.keys()
    assert all(first[at] != second[at] for at in first)


def test_a_gpu_prefers_its_own_memory_to_its_neighbors() -> None:
    """Same GPU, then a peer; a GPU that it cannot read is as far as another host."""
    replicas, engine = two_replicas()
    exports = [
        ExportMap(each.rank, each.host, (Region(each.regions[0].nbytes, f"GPU-{each.rank}"),), each.places)
        for each in exported(replicas)
    ]
    trace = recording_of(engine, 4000)

    own = make_plan(joined(replicas), exports, trace, PlanReader(0, "here", "GPU-1", ("GPU-0",)))
    peer = make_plan(joined(replicas[:1]), exports[:1], trace, PlanReader(0, "here", "GPU-1", ("GPU-0",)))

    assert {source.rank for source in own.sources} == {1}
    assert {source.rank for source in peer.sources} == {0}
    with pytest.raises(CoverageError, match="can read"):
        make_plan(joined(replicas[:1]), exports[:1], trace, PlanReader(0, "here", "GPU-1"))


def test_both_sides_make_the_same_plan() -> None:
    """Equal inputs, equal digest; another place of one tensor, another digest."""
    replicas, engine = two_replicas()
    trace = recording_of(engine, 4000)
    exports = exported(replicas)
    again = LoadTrace.decode(trace.encode(), TENSORS)
    moved = [replace_place(each) for each in exports]

    plan = make_plan(joined(replicas), exports, trace, READER)

    assert (
        make_plan(joined(replicas), [ExportMap.decode(e.encode()) for e in exports], again, READER).digest()
        == plan.digest()
    )
    assert make_plan(joined(replicas), moved, trace, READER).digest() != plan.digest()
    assert CopyTable.decode(plan.copies.encode()).encode() == plan.copies.encode()


def test_every_part_of_a_plan_is_in_its_digest() -> None:
    """What both sides agree to is all that a worker does: what is copied, what is staged, and from where."""
    replicas, engine = two_replicas()
    plan = make_plan(joined(replicas), exported(replicas), recording_of(engine[1:], 4000, loaded=(0,)), READER)
    none = np.zeros(0, np.int64)

    others = [
        replace(plan, reader=msgspec.structs.replace(READER, rank=1)),
        replace(plan, trace="0" * 64),
        replace(plan, sources=plan.sources[:1]),
        replace(plan, copies=plan.copies.take(none)),
        replace(plan, staging=plan.staging.take(none)),
        replace(plan, staged=()),
    ]

    assert len({plan.digest(), *(other.digest() for other in others)}) == 1 + len(others)


def replace_place(export: ExportMap) -> ExportMap:
    return ExportMap(export.rank, export.host, export.regions, (ExportedTensor(0, 32),))


def test_a_hole_is_named() -> None:
    """No plan leaves an element out."""
    replicas, engine = two_replicas()
    holes = [[shard for shard in mine if shard.tensor != "b"] for mine in replicas]

    with pytest.raises(CoverageError, match="'b'"):
        make_plan(joined(holes), exported(replicas), recording_of(engine, 4000), READER)


def test_what_is_served_with_something_added_is_not_copied_as_it_lies() -> None:
    """A norm that a trainer keeps around zero must be mirrored before it is exposed: bytes cannot be added to."""
    replicas, engine = two_replicas()
    shifted = [[msgspec.structs.replace(shard, shift=int(shard.tensor == "c")) for shard in mine] for mine in replicas]

    with pytest.raises(ManifestError, match="'c' is held as bfloat16 with shift 1"):
        make_plan(joined(shifted), exported(replicas), recording_of(engine, 4000), READER)


def test_a_row_outside_of_its_region_is_refused() -> None:
    """Kernels do not check: tables are, before they are bound."""
    replicas, engine = two_replicas()
    plan = make_plan(joined(replicas), exported(replicas), recording_of(engine, 4000), READER)

    with pytest.raises(ManifestError, match="target region 0"):
        plan.copies.check(np.array([10**6, 10**6]), np.array([100]))
    with pytest.raises(ManifestError, match="source region"):
        replace(plan.copies, source_at=plan.copies.source_at - 10**6).check(np.array([10**6] * 2), np.array([10**6]))


def test_large_models_are_planned_in_seconds() -> None:
    """4,000 tensors on 64 ranks, cut by columns: 256,000 shards, one engine worker of two."""
    count, ranks = 4_000, 64
    tensors = tuple(TensorSpec(f"t{index}", "bfloat16", (64, 128)) for index in range(count))
    space = np.repeat(np.arange(count), ranks)
    rank = np.tile(np.arange(ranks), count)
    start = np.stack([np.zeros(count * ranks, np.int64), rank * 2], axis=1)
    stop = start + np.array([64, 2])
    stride = np.tile(np.array([2, 1]), (count * ranks, 1))
    zeros = np.zeros(count * ranks, np.int64)
    base = Shards.of(tensors, [])
    dtype = np.full(count * ranks, 5)
    shards = replace(
        base, boxes=replace(base.boxes, space=space, start=start, stop=stop), rank=rank, storage=zeros, dtype=dtype,
        offset=space * 128, stride=stride, shift=zeros,
    )  # fmt: skip
    exports = [ExportMap(rank, "here", (Region(count * 256, "cpu"),), (ExportedTensor(0, 0),)) for rank in range(ranks)]
    wanted = [
        Shard(spec.name, Box((0, 0), (32, 128)), "bfloat16", ShardView(0, 4096 * at, (128, 1)))
        for at, spec in enumerate(tensors)
    ]
    target = LoadTarget("w", "bfloat16", (count * 4096,), (1,), parameter=True)
    trace = LoadTrace(0, (target,), Shards.of(tensors, wanted))

    began = time.process_time()
    plan = make_plan(shards, exports, trace, READER)
    seconds = time.process_time() - began

    assert int(plan.copies.elements.sum()) == count * 4096
    assert len(plan.copies) == ranks
    assert seconds < 60
