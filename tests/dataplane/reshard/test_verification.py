"""Sums of all workers against the digest table: whatever is wrong in any place of any worker is found, and named."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy.box_digests import pack_boxes
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.errors import DigestMismatch, TransferFailed
from weightbus.dataplane.reshard.load_trace import LoadTarget, LoadTrace
from weightbus.dataplane.reshard.verification import RankVerification, Verification, check_ranges, verifiable_trace
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Boxes, Shard, Shards, ShardView

TENSORS = tuple(TensorSpec(f"t{number}", "bfloat16", (8, 8)) for number in range(6))


class Held:
    """Workers that hold atoms of some tensors, in any order, each atom one of them or several, or one several times."""

    def __init__(self, draw: st.DrawFn) -> None:
        atoms = draw(st.lists(st.sampled_from(draw(st.sampled_from([(0, 1, 2, 3, 4, 5), (1, 3, 4)]))), max_size=12))
        workers = draw(st.integers(1, 3))
        self.space = np.array(atoms, np.int64)
        held: list[list[int]] = [[] for _ in range(workers)]
        for atom in range(len(atoms)):
            for worker in draw(st.lists(st.integers(0, workers - 1), min_size=1, max_size=3)):
                held[worker].append(atom)
        ranks = [np.array(draw(st.permutations(each)), np.int64) for each in held]
        rng = np.random.default_rng(draw(st.integers(0, 100)))
        sums = rng.integers(0, 2**64, (2, len(atoms)), np.uint64)
        self.lanes = [sums[:, rank] for rank in ranks]
        corner = np.zeros((len(atoms), 2), np.int64)
        nothing = Shards.of(TENSORS, [])
        parts = tuple(RankVerification(cast("Any", None), rank, cast("Any", None), nothing, 0) for rank in ranks)
        self.proof = Verification(TENSORS, Boxes(self.space, corner, corner), parts, ())
        totals = np.zeros((2, len(TENSORS)), np.uint64)
        for lane in (0, 1):
            np.add.at(totals[lane], self.space, sums[lane])
        self.digests = integrity.finish_digests(totals, np.array([spec.nbytes for spec in TENSORS]))

    def check(self, digests: bytes | None = None) -> None:
        table = SimpleNamespace(tensors=self.digests if digests is None else digests)
        self.proof.verify(cast("Any", table), self.lanes, [b""] * len(self.lanes))


@st.composite
def helds(draw: st.DrawFn) -> Held:
    return Held(draw)


@given(helds(), st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_is_wrong_is_named(held: Held, data: st.DataObject) -> None:
    """One bit, in either lane, of any place that any worker holds; also where another worker has the same box right."""
    held.check()
    full = [worker for worker, lanes in enumerate(held.lanes) if lanes.shape[1]]
    if not full:
        return
    worker = data.draw(st.sampled_from(full))
    place = data.draw(st.integers(0, held.lanes[worker].shape[1] - 1))
    held.lanes[worker][data.draw(st.integers(0, 1)), place] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    name = TENSORS[int(held.space[held.proof.ranks[worker].atom[place]])].name
    with pytest.raises(DigestMismatch, match=name):
        held.check()


@given(helds(), st.integers(0, 16 * len(TENSORS) - 1))
@settings(max_examples=100, deadline=None)
def test_another_version_is_named_and_what_is_not_held_does_not_matter(held: Held, byte: int) -> None:
    """A digest of the table is another one."""
    digests = bytearray(held.digests)
    digests[byte] ^= 1
    if byte // 16 not in held.space:
        return held.check(bytes(digests))
    with pytest.raises(DigestMismatch, match=f"t{byte // 16}'"):
        held.check(bytes(digests))
    return None


@given(helds(), st.permutations(range(len(TENSORS))), st.data())
@settings(max_examples=100, deadline=None)
def test_the_order_of_tensors_does_not_matter(held: Held, order: list[int], data: st.DataObject) -> None:
    """A proof of the same tensors in another order accepts and refuses the same."""
    places = np.argsort(np.array(order))
    held.proof = held.proof.renumbered([TENSORS[index] for index in order], places)
    digests = np.frombuffer(held.digests, np.uint8).reshape(len(TENSORS), 16)[order].tobytes()
    held.check(digests)
    if not len(held.space):
        return
    wrong = data.draw(st.sampled_from(sorted(set(held.space.tolist()))))
    spoilt = bytearray(digests)
    spoilt[16 * order.index(wrong)] ^= 1
    with pytest.raises(DigestMismatch, match=f"t{wrong}'"):
        held.check(bytes(spoilt))


@given(helds())
@settings(max_examples=50, deadline=None)
def test_sums_of_other_boxes_are_refused(held: Held) -> None:
    """A worker that reports one box too many."""
    held.lanes[-1] = np.concatenate([held.lanes[-1], np.zeros((2, 1), np.uint64)], axis=1)
    with pytest.raises(ValueError, match="reported"):
        held.check()


def traced(served: str, stored: str) -> LoadTrace:
    """A trace of one tensor that an engine holds in another dtype."""
    spec, box = TensorSpec("gate.weight", served, (2, 4)), Box.whole((2, 4))
    target = LoadTarget("gate", stored, (2, 4), (4, 1), parameter=True)
    copies = Shards.of([spec], [Shard(spec.name, box, stored, ShardView(0, 0, (4, 1)))], rank=0)
    return LoadTrace(rank=0, targets=(target,), copies=copies)


@pytest.mark.parametrize(
    ("served", "stored", "staged", "beyond"),
    [
        ("bfloat16", "bfloat16", False, False),
        ("bfloat16", "float32", False, False),
        ("float32", "bfloat16", True, False),
        ("float16", "bfloat16", True, False),
        ("bfloat16", "float16", True, True),
        ("float32", "float16", True, True),
        ("float64", "float32", True, True),
    ],
)
def test_a_cast_that_may_overflow_is_refused(served: str, stored: str, staged: bool, beyond: bool) -> None:
    """A cast that rounds is staged and proven before it; one that makes infinities is not taken."""
    trace = verifiable_trace(traced(served, stored))
    assert traced(served, stored).held_dtypes == {"gate.weight": {stored}}
    assert [(each.tensor, each.held) for each in trace.loaded] == ([(0, stored)] if staged else [])
    trace = LoadTrace.decode(trace.encode(), trace.tensors)  # as the peer has it
    if not beyond:
        return check_ranges(trace)
    with pytest.raises(TransferFailed, match=rf"'gate.weight' would be cast from {served} to {stored} .*in {served}"):
        check_ranges(trace)
    return None


def test_a_tensor_that_is_held_twice_is_refused_for_its_narrower_dtype() -> None:
    """A worker may hold a tensor in two dtypes, as an embedding and a head: either may make infinities."""
    spec, box = TensorSpec("gate.weight", "float32", (2, 4)), Box.whole((2, 4))
    targets = [LoadTarget(dtype, dtype, (2, 4), (4, 1), parameter=True) for dtype in ("bfloat16", "float16")]
    shards = [Shard(spec.name, box, each.dtype, ShardView(at, 0, (4, 1))) for at, each in enumerate(targets)]
    trace = verifiable_trace(LoadTrace(0, tuple(targets), Shards.of([spec], shards, rank=0)))
    with pytest.raises(TransferFailed, match="from float32 to float16"):
        check_ranges(trace)


ODD = (TensorSpec("a", "float32", (3,)), TensorSpec("b", "bfloat16", (4, 3)), TensorSpec("c", "float32", (2, 3, 1)))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_wrong_in_boxes_that_are_no_whole_words_is_named(data: st.DataObject) -> None:
    """Any byte of any worker, where rows lie with one of them or with several, in any order, beside other tensors'."""
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    values = [rng.integers(0, 256, (*spec.shape, spec.nbytes // math.prod(spec.shape)), np.uint8) for spec in ODD]
    workers = data.draw(st.integers(1, 3))
    odd = data.draw(st.sampled_from([(0, 1, 2), (0, 2), (1,)]))
    ranks, buffers = [], []
    for worker in range(workers):
        held = [(index, row) for index, spec in enumerate(ODD) for row in range(spec.shape[0])]
        held = [each for each in held if worker == each[1] % workers or data.draw(st.booleans())]
        boxes = []
        for index, row in data.draw(st.permutations(held)):
            start, stop = (row, *(0 for _ in ODD[index].shape[1:])), (row + 1, *ODD[index].shape[1:])
            view = ShardView(0, 0, tuple(0 for _ in start))
            boxes.append((index, row, Shard(ODD[index].name, Box(start, stop), ODD[index].dtype, view)))
        shards = Shards.of(ODD, [each for _, _, each in boxes])
        packed = pack_boxes(shards, np.zeros(len(boxes), np.int64), np.zeros(len(boxes), np.int64))
        buffer = bytearray(packed.nbytes)
        for at, (index, row, _) in zip(packed.boxes.offset.tolist(), boxes, strict=True):
            content = values[index][row].tobytes()
            buffer[at : at + len(content)] = content
        places = np.zeros(0, np.int64)
        ranks.append(RankVerification(cast("Any", None), places, cast("Any", None), packed.boxes, packed.nbytes))
        buffers.append(buffer)
    nothing = np.zeros((0, 3), np.int64)
    proof = Verification(ODD, Boxes(np.zeros(0, np.int64), nothing, nothing), tuple(ranks), odd)
    table = SimpleNamespace(
        tensors=b"".join(
            integrity.digest_tensors(torch.from_numpy(each.reshape(-1).copy()), (0, each.size)) for each in values
        )
    )
    lanes = [np.zeros((2, 0), np.uint64)] * workers

    def verify() -> None:
        proof.verify(cast("Any", table), lanes, [bytes(each) for each in buffers])

    verify()
    worker = data.draw(st.integers(0, workers - 1))
    rows = [row for row, index in enumerate(ranks[worker].odd_shards.boxes.space.tolist()) if index in odd]
    if rows:
        row = data.draw(st.sampled_from(rows))
        shard = ranks[worker].odd_shards.at(row)
        buffers[worker][shard.view.offset + data.draw(st.integers(0, shard.box.size * 2 - 1))] ^= 1
        with pytest.raises(DigestMismatch, match=shard.tensor):
            verify()
