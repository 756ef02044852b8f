"""Schedules against an oracle that knows only what must arrive, and what a schedule promises besides."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy.copy_engine import TorchCopies, TorchCopyEngine
from weightbus.dataplane.copy.copy_table import ITEM_SIZES, CopyTable
from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.memory.export_map import ExportedTensor, ExportMap, Region
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.reshard.load_trace import LoadTarget, LoadTrace
from weightbus.dataplane.reshard.reshard_plan import PlanReader, ReshardPlan, make_plan
from weightbus.dataplane.reshard.send_schedule import (
    MIN_PAIR_BYTES,
    NOWHERE,
    STAGING_BYTES,
    STAGING_BYTES_ON_GPU,
    SendMessages,
    SendSchedule,
    make_send_schedule,
    pair_bytes_for,
)
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Column, Shard, Shards, ShardView, contiguous_strides
from weightbus.dataplane.transports.sends.message_queues import (
    UNDER_WAY,
    PeerPart,
    ReceiveQueue,
    SendQueue,
    beside_bytes,
)
from weightbus.dataplane.transports.sends.p2p_group import P2PChunk

from .test_reshard_plan import TENSORS, cut, exported, fill, joined, layouts, random_values, recording_of, sizes

SENT_TO = PlanReader(rank=0, host="elsewhere", device="cpu", sent_to=True)
PAIR_BYTES = st.sampled_from([64, 128, 512, 1 << 20])
PROMPT_S = 20.0
ALONE_BYTES = st.sampled_from([1, 16, 200, 1 << 20])


class Posting:
    """Messages of one post of a rank, which has to wait for them."""

    def __init__(self, board: Board, parcels: Sequence[tuple[P2PChunk, bool]]) -> None:
        self.board, self.parcels = board, parcels
        self.wanted = False
        self.left = len(parcels)

    def wait(self, deadline: Deadline) -> None:
        with self.board.news:
            self.wanted = True
            self.board.move()
            assert self.board.news.wait_for(lambda: not self.left, deadline.seconds), "ranks wait for each other"


class Board:
    """Stands for the groups of all ranks. A message moves as soon as it can, or as late as it may."""

    def __init__(self, *, eager: bool) -> None:
        self.news = threading.Condition()
        self._eager = eager
        self._posted: dict[tuple[int, int, bool], deque[tuple[Posting, P2PChunk]]] = {}

    def post(self, rank: int, parcels: Sequence[tuple[P2PChunk, bool]]) -> Posting:
        with self.news:
            posting = Posting(self, parcels)
            for parcel, sent in parcels:
                ends = (rank, parcel.peer) if sent else (parcel.peer, rank)
                self._posted.setdefault((*ends, sent), deque()).append((posting, parcel))
            self.move()
            return posting

    def move(self) -> None:
        """What can move, as far as a rank waits for it or for a later message."""
        for (source, target, sent), sends in self._posted.items():
            receives = self._posted.get((source, target, False), deque()) if sent else deque()
            while sends and receives and (self._eager or any(each.wanted for each, _ in (*sends, *receives))):
                (sender, given), (receiver, taken) = sends.popleft(), receives.popleft()
                assert given.memory.numel() == taken.memory.numel(), "both ends of a message are of one size"
                taken.memory.copy_(given.memory)
                sender.left -= 1
                receiver.left -= 1
        self.news.notify_all()


class Member:
    """What one rank has of its group."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def post(self, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]) -> Posting:
        return self._board.post(self._rank, [(each, True) for each in sends] + [(each, False) for each in receives])

    def lane(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def settle(self) -> None:
        pass


def deliver(boxes: Sequence[SendQueue | ReceiveQueue], *, eager: bool) -> None:
    """All ranks at a time, each as fast as it can."""
    board = Board(eager=eager)

    def carry(rank: int) -> None:
        box, member = boxes[rank], Member(board, rank)
        if isinstance(box, SendQueue):
            box.send(member, PROMPT_S)
        else:
            box.receive(member, PROMPT_S)

    with ThreadPoolExecutor(len(boxes)) as pool:
        for each in [pool.submit(carry, rank) for rank in range(len(boxes))]:
            each.result()


def outboxes(plans: list[ReshardPlan], made: list[SendSchedule], memories: list[torch.Tensor]) -> list[SendQueue]:
    """Of every rank, with what it sends to all workers, whose ranks follow the ranks'."""
    return [
        SendQueue(
            [
                PeerPart(len(memories) + at, *each.of_rank(rank, plan))
                for at, (plan, each) in enumerate(zip(plans, made, strict=True))
            ],
            [memory.view(torch.uint8)],
            TorchCopyEngine(),
        )
        for rank, memory in enumerate(memories)
    ]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_element_arrives_exactly_once(data: st.DataObject) -> None:
    """Any cut of the trainer against those of two workers, in place and beside, however small the chunks."""
    trainer = data.draw(layouts(TENSORS, 3, data.draw(st.integers(1, 3))))
    workers = [data.draw(layouts(TENSORS[:3], 1))[0] for _ in range(2)]
    pair_bytes, alone_bytes = data.draw(PAIR_BYTES), data.draw(ALONE_BYTES)
    beside = data.draw(st.booleans())
    values = random_values()
    memories = fill(trainer, values)
    plans = [
        make_plan(joined(trainer), exported(trainer), recording_of(each, sizes([each])[0], loaded=(3,)), SENT_TO)
        for each in workers
    ]
    made = [make_send_schedule(plan, 1, pair_bytes, alone_bytes) for plan in plans]
    targets = [torch.zeros(sizes([each])[0], dtype=torch.bfloat16) for each in workers]
    buffers = [torch.zeros(plan.staging_bytes, dtype=torch.uint8) for plan in plans]

    out = outboxes(plans, made, memories)
    ins = [
        ReceiveQueue(
            each.messages,
            each.unpack,
            [target.view(torch.uint8), buffer],
            TorchCopyEngine(),
            target.device,
            beside=beside,
        )
        for each, target, buffer in zip(made, targets, buffers, strict=True)
    ]  # fmt: skip
    deliver([*out, *ins], eager=data.draw(st.booleans()))
    if beside:
        assert not any(bool(target.any()) for target in targets)
    for box in ins:
        box.swap()

    for engine, target, buffer, each in zip(workers, targets, buffers, made, strict=True):
        expected = torch.zeros_like(target)
        for shard in engine:
            expected.as_strided(shard.box.shape, shard.view.strides, shard.view.offset).copy_(cut(values, shard))
        assert torch.equal(target, expected)
        assert torch.equal(buffer[: TENSORS[3].nbytes].view(torch.bfloat16).view(2, 6, 8), values["d"])
        straight = each.messages.nbytes[each.messages.target != NOWHERE].sum()
        assert straight + each.unpack.target_bytes.sum() == sum(spec.nbytes for spec in TENSORS)
    chunks = [np.bincount(each.messages.rank * 10_000 + each.messages.chunk, each.messages.nbytes) for each in made]
    assert max(float(chunk.max()) for chunk in chunks) <= pair_bytes
    assert all(box.staging_bytes <= UNDER_WAY * pair_bytes * len(workers) for box in out)
    assert beside or all(box.staging_bytes <= UNDER_WAY * pair_bytes * len(memories) for box in ins)
    assert (
        all(box.staging_bytes == beside_bytes(each.messages) for box, each in zip(ins, made, strict=True)) or not beside
    )


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_next_version_needs_no_new_tables(data: st.DataObject) -> None:
    """What is taken beside has its memory for one version only, and what was made for it follows to the next place."""
    trainer = data.draw(layouts(TENSORS, 3, data.draw(st.integers(1, 3))))
    worker = data.draw(layouts(TENSORS[:3], 1))[0]
    memories = fill(trainer, random_values())
    trace = recording_of(worker, sizes([worker])[0], loaded=(3,))
    plan = make_plan(joined(trainer), exported(trainer), trace, SENT_TO)
    made = make_send_schedule(plan, 1, data.draw(PAIR_BYTES), data.draw(ALONE_BYTES))
    target = torch.zeros(sizes([worker])[0], dtype=torch.bfloat16)
    buffer = torch.zeros(plan.staging_bytes, dtype=torch.uint8)
    engine = CountingEngine()
    inbox = ReceiveQueue(
        made.messages, made.unpack, [target.view(torch.uint8), buffer], engine, target.device, beside=True
    )  # fmt: skip
    bound, kept = engine.bound, []

    for version in range(3):
        for memory in memories:
            memory.random_(-100, 100, generator=torch.Generator().manual_seed(version))
        expected, expected_buffer = torch.zeros_like(target), torch.zeros_like(buffer)
        inbox.attach()
        (arena,) = inbox.memory
        deliver([*outboxes([plan], [made], memories), inbox], eager=True)
        inbox.swap()
        inbox.detach()
        assert inbox.memory == ()
        kept.append(arena)  # so that the next one lies elsewhere
        again = ReceiveQueue(
            made.messages, made.unpack, [expected.view(torch.uint8), expected_buffer], TorchCopyEngine(), target.device,
            beside=False,
        )  # fmt: skip
        deliver([*outboxes([plan], [made], memories), again], eager=True)
        assert torch.equal(target, expected)
        assert torch.equal(buffer, expected_buffer)

    assert len({arena.data_ptr() for arena in kept}) == len(kept) or not inbox.staging_bytes
    assert engine.bound == bound


class CountingEngine(TorchCopyEngine):
    """Knows how often a table was bound."""

    bound = 0

    def prepare_copies(
        self, table: CopyTable, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> TorchCopies:
        """As always."""
        self.bound += 1
        return super().prepare_copies(table, sources, targets)

    def prepare_parts(
        self, table: CopyTable, parts: Column, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> dict[int, TorchCopies]:
        """As always."""
        self.bound += 1
        return super().prepare_parts(table, parts, sources, targets)


def model(count: int, dtype: str = "bfloat16", stored: str = "bfloat16") -> tuple[Shards, list[ExportMap], LoadTrace]:
    """`count` matrices of 64 KB that lie whole in one rank and in one worker."""
    tensors = tuple(TensorSpec(f"t{index}", "bfloat16", (128, 256)) for index in range(count))
    boxes = [Box.whole(spec.shape) for spec in tensors]
    strides = contiguous_strides((128, 256))
    shards = [
        Shard(spec.name, box, dtype, ShardView(index, 0, strides))
        for index, (spec, box) in enumerate(zip(tensors, boxes, strict=True))
    ]
    wanted = [Shard(shard.tensor, shard.box, stored, shard.view) for shard in shards]
    targets = tuple(LoadTarget(spec.name, stored, (128, 256), strides, parameter=True) for spec in tensors)
    item = {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]
    export = ExportMap(
        0, "here", (Region(128 * 256 * item, "cpu"),) * count, tuple(ExportedTensor(at, 0) for at in range(count))
    )
    return Shards.of(tensors, shards), [export], LoadTrace(0, targets, Shards.of(tensors, wanted))


class Asked:
    """An exchange that notes what is done in it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def post(self, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]) -> Asked:
        assert not sends
        assert receives
        self.done.append("post")
        return self

    def wait(self, deadline: Deadline) -> None:
        deadline.check("it")
        self.done.append("wait")

    def lane(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def settle(self) -> None:
        self.done.append("settle")


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "in place"])
def test_what_has_room_of_its_own_is_asked_for_at_once(*, beside: bool) -> None:
    """A thread beside a busy scheduler needs the interpreter as seldom as can be; a chunk's room is used again."""
    shards, exports, trace = model(8)
    made = make_send_schedule(make_plan(shards, exports, trace, SENT_TO), 8, 128 * 256 * 2)
    chunks = made.messages.chunks
    assert chunks > 2 * UNDER_WAY
    targets = [torch.zeros(128 * 256 * 2, dtype=torch.uint8) for _ in range(8)]
    box = ReceiveQueue(made.messages, made.unpack, targets, TorchCopyEngine(), torch.device("cpu"), beside=beside)
    asked = Asked()
    box.receive(asked, PROMPT_S)
    assert asked.done.index("wait") == (chunks if beside else UNDER_WAY)
    assert sorted(asked.done) == ["post"] * chunks + ["settle"] + ["wait"] * chunks


def test_what_lies_in_one_piece_is_never_copied() -> None:
    """Out of the trainer's storage into the engine's parameter: no packing, no unpacking, no staging."""
    shards, exports, trace = model(8)
    plan = make_plan(shards, exports, trace, SENT_TO)

    made = make_send_schedule(plan, 8, pair_bytes_for(1))

    assert len(made.pack) == len(made.unpack) == 0
    assert made.messages.nbytes.tolist() == [128 * 256 * 2] * 8
    assert made.messages.chunks == 1


@pytest.mark.parametrize(("held", "stored"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_cast_travels_in_the_narrower_dtype(held: str, stored: str) -> None:
    """Masters in float32 are cast before they are sent, parameters in float32 after."""
    shards, exports, trace = model(2, held, stored)

    made = make_send_schedule(make_plan(shards, exports, trace, SENT_TO), 2, pair_bytes_for(1))

    assert made.messages.nbytes.sum() == 2 * 128 * 256 * 2


@pytest.mark.parametrize(("held", "stored"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_cast_is_not_straight_however_large(held: str, stored: str) -> None:
    """What travels is not what one of the ends stores: that one packs it, or unpacks it."""
    shards, exports, trace = model(2, held, stored)

    made = make_send_schedule(make_plan(shards, exports, trace, SENT_TO), 2, pair_bytes_for(1), 1)

    packed, unpacked = (2, 0) if held == "float32" else (0, 2)
    assert (len(made.pack), len(made.unpack)) == (packed, unpacked)
    assert (made.messages.source == NOWHERE).tolist() == [packed > 0] * 2
    assert (made.messages.target == NOWHERE).tolist() == [unpacked > 0] * 2


def test_of_two_dtypes_as_narrow_the_engine_s_travels() -> None:
    """It is cast once, by the rank, and received where it is stored: an engine that is paused has the least to do."""
    shards, exports, trace = model(2, "float16", "bfloat16")

    made = make_send_schedule(make_plan(shards, exports, trace, SENT_TO), 2, pair_bytes_for(1), 1)

    assert (len(made.pack), len(made.unpack)) == (2, 0)
    assert (made.messages.target != NOWHERE).all()


@pytest.mark.parametrize(("device", "most"), [("cpu", STAGING_BYTES), ("cuda", STAGING_BYTES_ON_GPU)])
def test_what_a_pair_may_move_fits_for_all_pairs_of_a_rank(device: str, most: int) -> None:
    """It changes at powers of two only, and in the largest groups there is a least."""
    for ranks in range(1, 66):
        pair_bytes = pair_bytes_for(ranks, device)
        assert most // 2 < pair_bytes * ranks <= most
    assert pair_bytes_for(1, device) == most
    assert pair_bytes_for(5, device) == pair_bytes_for(8, device) == 2 * pair_bytes_for(9, device)
    assert pair_bytes_for(1 << 20, device) == MIN_PAIR_BYTES


def test_turns_of_every_rank_begin_with_the_first() -> None:
    """And follow one another: two ranks of eight matrices each, several of them in a chunk."""
    shards, exports, trace = model(16)
    halves = Shards.join([shards.take(np.arange(rank, 16, 2)) for rank in range(2)])
    halves = replace(halves, rank=np.repeat(np.arange(2), 8))
    maps = [ExportMap(rank, "here", exports[0].regions, exports[0].places) for rank in range(2)]

    messages = make_send_schedule(make_plan(halves, maps, trace, SENT_TO), 16, 4 * 128 * 256 * 2).messages

    for rank in range(2):
        assert messages.chunk[messages.rank == rank].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("held", ["bfloat16", "float32"], ids=["as it lies", "packed"])
def test_a_rank_finds_what_it_sends_in_its_own_regions(held: str) -> None:
    """Of its own matrices each is in another one; the plan counts those of all ranks."""
    shards, exports, trace = model(16, held)
    halves = Shards.join([shards.take(np.arange(rank, 16, 2)) for rank in range(2)])
    halves = replace(halves, rank=np.repeat(np.arange(2), 8))
    maps = [ExportMap(rank, "here", exports[0].regions, exports[0].places) for rank in range(2)]
    plan = make_plan(halves, maps, trace, SENT_TO)

    made = make_send_schedule(plan, 16, pair_bytes_for(2), 1)

    for rank in range(2):
        messages, pack = made.of_rank(rank, plan)
        numbers = list(range(rank, 16, 2))
        assert messages.source.tolist() == (numbers if held == "bfloat16" else [NOWHERE] * 8)
        assert pack.source.tolist() == (numbers if held == "float32" else [])
        assert messages.target.tolist() == numbers
        assert pack.target.tolist() == (list(range(8)) if held == "float32" else [])


def test_small_rows_share_a_message() -> None:
    """A thousand norms are one message and not a thousand."""
    tensors = tuple(TensorSpec(f"n{index}", "bfloat16", (64,)) for index in range(1000))
    shards = [
        Shard(spec.name, Box.whole((64,)), "bfloat16", ShardView(0, 100 * at, (1,))) for at, spec in enumerate(tensors)
    ]
    wanted = [Shard(spec.name, Box.whole((64,)), "bfloat16", ShardView(at, 0, (1,))) for at, spec in enumerate(tensors)]
    targets = tuple(LoadTarget(spec.name, "bfloat16", (64,), (1,), parameter=True) for spec in tensors)
    trace = LoadTrace(0, targets, Shards.of(tensors, wanted))
    export = ExportMap(0, "here", (Region(200 * 1000, "cpu"),), (ExportedTensor(0, 0),))

    made = make_send_schedule(make_plan(Shards.of(tensors, shards), [export], trace, SENT_TO), 1000, pair_bytes_for(1))

    assert len(made.messages) == 1
    assert made.messages.nbytes.sum() == 1000 * 128


def test_replicas_share_the_sending() -> None:
    """Four equal replicas, sixteen tensors: each sends a quarter."""
    shards, exports, trace = model(16)
    replicas = Shards.join([replace(shards, rank=np.full(len(shards), rank)) for rank in range(4)])
    maps = [ExportMap(rank, "here", exports[0].regions, exports[0].places) for rank in range(4)]

    made = make_send_schedule(make_plan(replicas, maps, trace, SENT_TO), 16, pair_bytes_for(4))

    assert np.bincount(made.messages.rank, made.messages.nbytes).tolist() == [4 * 65536] * 4


def test_both_sides_make_the_same_schedule() -> None:
    """Equal plans, equal digest; another bound of a chunk, another digest."""
    shards, exports, trace = model(8)
    plan = make_plan(shards, exports, trace, SENT_TO)
    again = make_plan(shards, exports, LoadTrace.decode(trace.encode(), shards.tensors), SENT_TO)

    assert make_send_schedule(plan, 8, 1 << 20).digest() == make_send_schedule(again, 8, 1 << 20).digest()
    assert make_send_schedule(plan, 8, 1 << 16).digest() != make_send_schedule(plan, 8, 1 << 20).digest()
    assert (
        replace(make_send_schedule(plan, 8, 1 << 20), plan="another").digest()
        != make_send_schedule(plan, 8, 1 << 20).digest()
    )


def test_other_hosts_send_and_are_not_read() -> None:
    """With the same trainer a worker that is sent to has a plan, one that reads has none."""
    shards, exports, trace = model(1)

    assert len(make_plan(shards, exports, trace, SENT_TO).copies) == 1
    with pytest.raises(ManifestError):
        make_plan(shards, exports, trace, PlanReader(0, "elsewhere", "cpu"))


def test_a_message_outside_of_its_region_is_refused() -> None:
    """Nothing is sent from, or received into, memory outside of the regions."""
    shards, exports, trace = model(2)
    made = make_send_schedule(make_plan(shards, exports, trace, SENT_TO), 2, 1 << 20)
    messages = SendMessages.decode(made.messages.encode())

    messages.check(np.array([65536, 65536]), sending=True)
    with pytest.raises(ManifestError, match="message 1"):
        messages.check(np.array([65536, 65535]), sending=False)
    with pytest.raises(ManifestError, match="message 1"):
        messages.check(np.array([65536]), sending=True)
    with pytest.raises(ManifestError, match="not a table"):
        SendMessages.decode(b"x" * 55)


@pytest.mark.parametrize("sending", [True, False])
def test_a_message_before_its_region_is_refused(*, sending: bool) -> None:
    """A byte that there is not would be counted from the end."""
    shards, exports, trace = model(2)
    made = make_send_schedule(make_plan(shards, exports, trace, SENT_TO), 2, 1 << 20).messages
    moved = np.array([0, NOWHERE])
    before = replace(made, source_at=moved) if sending else replace(made, target_at=moved)
    with pytest.raises(ManifestError, match="message 1 reaches out of its region"):
        SendMessages.decode(before.encode()).check(np.array([65536, 65536]), sending=sending)


def test_a_message_of_no_turn_is_refused() -> None:
    """No rank would ever reach such a chunk, and its peer would wait for ever."""
    shards, exports, trace = model(2)
    made = make_send_schedule(make_plan(shards, exports, trace, SENT_TO), 2, 1 << 20).messages
    odds = {"chunk": [0, -1], "nbytes": [65536, 0], "source": [0, NOWHERE - 1], "target": [0, NOWHERE - 1]}
    for column, numbers in odds.items():
        odd = replace(made, **{column: np.array(numbers)})
        with pytest.raises(ManifestError, match="empty, or of a chunk that there is not"):
            SendMessages.decode(odd.encode())


@pytest.mark.parametrize("pair_bytes", [64, 200, 1 << 20])
def test_rows_of_all_dtypes_begin_where_their_items_may(pair_bytes: int) -> None:
    """Behind an odd number of bytes, too, on the wire and in staging: a GPU reads no bfloat16 from an odd address."""
    dtypes = ("float8_e4m3fn", "bfloat16", "float8_e4m3fn", "float32", "bfloat16", "float64")
    tensors = tuple(TensorSpec(f"{dtype}.{at}", dtype, (at + 3, 5)) for at, dtype in enumerate(dtypes))
    columns = [(spec, Box((0, 1), (spec.shape[0], 4)), ShardView(at, 1, (5, 1))) for at, spec in enumerate(tensors)]
    shards = Shards.of(tensors, [Shard(spec.name, Box.whole(spec.shape), spec.dtype, ShardView(at, 0, (5, 1)))
                                 for at, spec in enumerate(tensors)])  # fmt: skip
    wanted = Shards.of(tensors, [Shard(spec.name, box, spec.dtype, view) for spec, box, view in columns])
    targets = tuple(LoadTarget(spec.name, spec.dtype, spec.shape, (5, 1), parameter=True) for spec in tensors)
    regions = tuple(Region(spec.nbytes, "cpu") for spec in tensors)
    export = ExportMap(0, "here", regions, tuple(ExportedTensor(at, 0) for at in range(len(tensors))))
    plan = make_plan(shards, [export], LoadTrace(0, targets, wanted), SENT_TO)

    made = make_send_schedule(plan, len(tensors), pair_bytes)

    assert len({int(each) for each in made.pack.target_dtype}) == len(set(dtypes))
    staged = made.messages.nbytes > 0
    for by_chunk in (True, False):
        places, _ = made.messages.places(staged, by_chunk=by_chunk)
        begins = places[made.pack.target] + made.pack.target_at
        assert not (begins % ITEM_SIZES[made.pack.target_dtype]).any()
        begins = places[made.unpack.source] + made.unpack.source_at
        assert not (begins % ITEM_SIZES[made.unpack.source_dtype]).any()


def test_large_plans_are_scheduled_in_seconds() -> None:
    """Columns, not rows: 100,000 rows in a few seconds of one core."""
    shards, exports, trace = model(4)
    plan = make_plan(shards, exports, trace, SENT_TO)
    rows = np.arange(100_000) % 4
    copies = plan.copies.take(rows)

    made = make_send_schedule(replace(plan, copies=copies), 4, 1 << 26)

    assert len(made.messages) == 100_000
