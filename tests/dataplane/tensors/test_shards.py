"""Shards and their cover against a naive oracle: every element of every tensor, with every place where it lies."""

import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.errors import CoverageError, ManifestError
from weightbus.dataplane.tensors import coverage as cover, shards as boxes_module
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import (
    Box,
    Boxes,
    Shard,
    Shards,
    ShardView,
    contiguous_strides,
    find_overlap,
    intersect,
    lexsort_rows,
    subtract_all,
    volumes,
    whole_tensor_shard,
)

FEW = settings(max_examples=40, deadline=None)
Place = tuple[int, int, int]
"""Holder, storage, element in it."""

SPECS = (
    TensorSpec("matrix", "bfloat16", (5, 4)),
    TensorSpec("vector", "float32", (6,)),
    TensorSpec("cube", "bfloat16", (2, 3, 2)),
)


def places(shards: Shards) -> dict[tuple[str, tuple[int, ...]], list[Place]]:
    """Where each element lies, by walking through all of them."""
    found: dict[tuple[str, tuple[int, ...]], list[Place]] = defaultdict(list)
    for row in range(len(shards)):
        shard = shards.at(row)
        for index in product(*(range(*bounds) for bounds in zip(shard.box.start, shard.box.stop, strict=True))):
            steps = (i - start for i, start in zip(index, shard.box.start, strict=True))
            at = shard.view.offset + sum(step * stride for step, stride in zip(steps, shard.view.strides, strict=True))
            found[shard.tensor, index].append((int(shards.rank[row]), shard.view.storage, at))
    return found


@st.composite
def cuts(draw: st.DrawFn, box: Box) -> list[Box]:
    """A box, cut into disjoint ones."""
    axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
    if not axes or draw(st.integers(0, 2)) == 0:
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(box.start[axis] + 1, box.stop[axis] - 1))
    left = Box(box.start, (*box.stop[:axis], at, *box.stop[axis + 1 :]))
    right = Box((*box.start[:axis], at, *box.start[axis + 1 :]), box.stop)
    return [*draw(cuts(left)), *draw(cuts(right))]


@st.composite
def model(draw: st.DrawFn, most: int = 3) -> Shards:
    """Every tensor by up to `most` ranks, each with a cut of its own; some views are transposed."""
    parts = []
    for rank in range(draw(st.integers(1, most))):
        rows: list[Shard] = []
        for number, spec in enumerate(SPECS):
            transposed = draw(st.booleans())
            strides = contiguous_strides(spec.shape)
            if transposed:
                strides = tuple(reversed(contiguous_strides(tuple(reversed(spec.shape)))))
            for box in draw(cuts(Box.whole(spec.shape))):
                offset = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
                rows.append(Shard(spec.name, box, spec.dtype, ShardView(number, offset, strides)))
        parts.append(Shards.of(SPECS, draw(st.permutations(rows)), rank))
    return Shards.join(parts)


@FEW
@given(model())
def test_rows_come_back_as_they_went_in(shards: Shards) -> None:
    """A table built from its own rows is the same table, and so is one that has traveled."""
    again = Shards.join(
        [
            Shards.of(SPECS, [shards.of_rank(h).at(i) for i in range(len(shards.of_rank(h)))], h)
            for h in sorted(set(shards.rank.tolist()))
        ]
    )
    assert places(again) == places(shards)
    assert np.array_equal(Shards.decode([shards.encode()], SPECS).numbers(), shards.numbers())


@FEW
@given(model())
def test_merging_moves_nothing(shards: Shards) -> None:
    """Merged shards hold the same elements in the same places, and never in more shards."""
    merged = cover.merge_adjacent(shards)
    assert len(merged) <= len(shards)
    assert {key: sorted(value) for key, value in places(merged).items()} == {
        key: sorted(value) for key, value in places(shards).items()
    }


@FEW
@given(st.data())
def test_a_tensor_that_was_cut_along_one_axis_merges_into_one_piece(data: st.DataObject) -> None:
    """Neighbors that are neighbors in memory become one; the order in which they are given does not matter."""
    spec = SPECS[0]
    at = sorted({0, 5, *data.draw(st.lists(st.integers(1, 4)))})
    rows = [Shard(spec.name, Box((a, 0), (b, 4)), "bfloat16", ShardView(0, 7 + a * 4, (4, 1))) for a, b in pairwise(at)]
    merged = cover.merge_adjacent(Shards.of(SPECS, data.draw(st.permutations(rows))))
    assert [merged.at(0)] == [Shard(spec.name, Box.whole(spec.shape), "bfloat16", ShardView(0, 7, (4, 1)))]
    assert len(merged) == 1


@FEW
@given(model())
def test_every_element_is_read_once_and_from_the_lowest_holder(shards: Shards) -> None:
    """Of replicas, in whatever cuts, one is left for each element, from the lowest rank; and that is a proof."""
    chosen = cover.drop_replicas(shards)
    cover.check_exact_cover(chosen)
    everywhere = places(shards)
    for element, found in places(chosen).items():
        assert found == [min(everywhere[element])]


@FEW
@given(model(most=1), st.data())
def test_a_part_that_is_missing_is_named(shards: Shards, data: st.DataObject) -> None:
    """Without any one of the shards of a single rank the proof fails, and names that shard's tensor."""
    lost = data.draw(st.integers(0, len(shards) - 1))
    with pytest.raises(CoverageError) as failure:
        cover.check_exact_cover(shards.take(np.delete(np.arange(len(shards)), lost)))
    assert failure.value.tensor == shards.at(lost).tensor


@FEW
@given(model(most=1), st.data())
def test_a_part_that_is_there_twice_is_named(shards: Shards, data: st.DataObject) -> None:
    """An overlap is no proof either, even where the number of elements is right."""
    twice = data.draw(st.integers(0, len(shards) - 1))
    with pytest.raises(CoverageError) as failure:
        cover.check_exact_cover(shards.take(np.append(np.arange(len(shards)), twice)))
    assert failure.value.tensor == shards.at(twice).tensor


@FEW
@given(model(), st.randoms())
def test_the_digest_is_of_the_description_and_not_of_its_order(shards: Shards, random: Random) -> None:
    """Any order of shards, and of tensors, has the same digest; any other shard has another."""
    order = list(range(len(shards)))
    random.shuffle(order)
    shuffled = shards.take(np.array(order))
    assert shuffled.digest() == shards.digest()
    assert shards.take(np.arange(1, len(shards))).digest() != shards.digest()
    backwards = tuple(reversed(SPECS))
    rows = [shards.of_rank(0).at(i) for i in range(len(shards.of_rank(0)))]
    assert Shards.of(backwards, rows).digest() == Shards.of(SPECS, rows).digest()


def test_the_digest_is_the_same_on_every_machine() -> None:
    """It is pinned: ranks of different hosts compare it, and plans are kept under it."""
    shards = Shards.of(SPECS, [whole_tensor_shard(spec, spec.dtype, number) for number, spec in enumerate(SPECS)])
    assert shards.digest() == "ad8ef6036d697ae47eca34318ddbba1e4fd68e924fb782c316a4ae863b71f5d3"


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        (Shard("stranger", Box((0,), (1,)), "bfloat16", ShardView(0, 0, (1,))), "not served"),
        (Shard("matrix", Box((0, 0), (6, 4)), "bfloat16", ShardView(0, 0, (4, 1))), "outside"),
        (Shard("matrix", Box((1, 0), (1, 4)), "bfloat16", ShardView(0, 0, (4, 1))), "empty"),
        (Shard("matrix", Box((0, 0), (1, 4)), "bfloat16", ShardView(0, 0, (1,))), "outside"),
    ],
)
def test_what_is_no_part_of_its_tensor_is_refused(shard: Shard, why: str) -> None:
    """A shard that names no tensor, or lies outside of its own, is an error and not a smaller shard."""
    with pytest.raises(ManifestError, match=why):
        Shards.of(SPECS, [shard])


def test_what_arrives_is_checked() -> None:
    """Bytes that are no table, a table of other tensors, and a box outside of its tensor are refused."""
    shards = Shards.of(SPECS, [whole_tensor_shard(SPECS[0], "bfloat16", 0)])
    with pytest.raises(ManifestError, match="not a table"):
        Shards.decode([b"\xc1"], SPECS)
    with pytest.raises(ManifestError, match="other tensors"):
        Shards.decode([shards.encode()], SPECS[:2])
    wire = msgspec.msgpack.decode(shards.encode())
    numbers = np.frombuffer(wire["numbers"], "<i8").copy()
    numbers[9] = 100
    with pytest.raises(ManifestError, match="outside"):
        Shards.decode([msgspec.msgpack.encode(wire | {"numbers": numbers.tobytes()})], SPECS)
    with pytest.raises(ManifestError, match="bytes for"):
        Shards.decode([msgspec.msgpack.encode(wire | {"numbers": numbers.tobytes()[1:]})], SPECS)


@FEW
@given(model())
def test_a_part_of_a_piece_is_where_the_piece_says(shards: Shards) -> None:
    """Cutting a shard moves its offset by its strides."""
    boxes = shards.boxes.take(np.arange(len(shards)))
    last = type(boxes)(boxes.space, boxes.stop - 1, boxes.stop)
    corners = places(shards.within(last, np.arange(len(shards))))
    everywhere = places(shards)
    assert corners
    for element, found in corners.items():
        assert set(found) <= set(everywhere[element])


@given(st.data())
def test_rows_ascend_as_they_would_column_by_column(data: st.DataObject) -> None:
    """However far apart the numbers of a column are, and whether or not they differ."""
    least = st.sampled_from([0, -3, 1 << 40, -(1 << 63), (1 << 63) - 4])
    kinds = [(data.draw(least), data.draw(st.sampled_from([1, 2, 4]))) for _ in range(data.draw(st.integers(1, 5)))]
    wide = st.sampled_from([-(1 << 63), 0, (1 << 63) - 1])
    rows = data.draw(st.lists(st.tuples(*(st.integers(a, a + n - 1) | wide for a, n in kinds)), max_size=12))
    table = np.array(rows, np.int64).reshape(len(rows), len(kinds))
    assert lexsort_rows(table).tolist() == sorted(range(len(rows)), key=lambda row: rows[row])


def test_pieces_of_fewer_axes_than_their_tensors_are_refused() -> None:
    """They would say nothing of where on the others they are."""
    flat = Shards.of(
        [TensorSpec("a", "float32", (4,))], [whole_tensor_shard(TensorSpec("a", "float32", (4,)), "float32", 0)]
    )
    with pytest.raises(ManifestError, match="1 axes"):
        replace(flat, tensors=(TensorSpec("a", "float32", (4, 2)),)).check()


def test_a_model_of_20000_tensors_on_64_ranks_takes_seconds() -> None:
    """A million shards are joined, chosen, proven, merged and named by columns: no loop in Python could keep up."""
    count, ranks = 20_000, 64
    specs = tuple(TensorSpec(f"t{i}", "bfloat16", (64, 128)) for i in range(count))
    one = Shards.of(
        specs, [Shard(s.name, Box((0, 0), (1, 128)), s.dtype, ShardView(i, 0, (128, 1))) for i, s in enumerate(specs)]
    )
    parts = []
    for rank in range(ranks):
        step = np.array([rank, 0])
        boxes = type(one.boxes)(one.boxes.space, one.boxes.start + step, one.boxes.stop + step)
        parts.append(Shards(specs, boxes, one.rank + rank, one.storage, one.dtype, one.offset, one.stride, one.shift))
    began = time.process_time()
    shards = cover.drop_replicas(Shards.join(parts))
    cover.check_exact_cover(shards)
    assert len(cover.merge_adjacent(shards)) == count * ranks
    assert time.process_time() - began < 90, "about 7 s on a slow core of its own; a loop takes minutes"


# Boxes against sets of indexes, element by element.


AXES = 2


@st.composite
def box(draw: st.DrawFn, extent: int = 6) -> Box:
    """Any box that is not empty, within `extent` on every axis."""
    starts = [draw(st.integers(0, extent - 1)) for _ in range(AXES)]
    return Box(tuple(starts), tuple(draw(st.integers(start + 1, extent)) for start in starts))


def elements(of: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in zip(of.start, of.stop, strict=True))))


def columns(of: list[tuple[int, Box]]) -> Boxes:
    return Boxes(
        np.array([space for space, _ in of], np.int64),
        np.array([each.start for _, each in of], np.int64).reshape(len(of), AXES),
        np.array([each.stop for _, each in of], np.int64).reshape(len(of), AXES),
    )


ANYWHERE = st.lists(st.tuples(st.integers(0, 2), box()), max_size=12)


@given(box(), box())
def test_two_boxes_meet_in_their_common_elements(a: Box, b: Box) -> None:
    """The intersection holds exactly what both hold, and is None when that is nothing."""
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)


@given(box(), st.lists(box(), max_size=4))
def test_what_is_left_is_disjoint_and_complete(a: Box, taken: list[Box]) -> None:
    """Subtraction leaves disjoint boxes, together exactly the elements that were not taken."""
    rest = subtract_all(a, taken)
    held = [element for part in rest for element in elements(part)]
    assert len(held) == len(set(held))
    assert set(held) == elements(a) - set().union(*map(elements, taken))


@given(ANYWHERE, ANYWHERE)
def test_all_pairs_are_found_and_no_others(a: list[tuple[int, Box]], b: list[tuple[int, Box]]) -> None:
    """The sweep over columns finds what comparing each with each finds, in order, with what both hold."""
    rows, others, common = intersect(columns(a), columns(b))
    expected = [
        (i, j, meet)
        for i, (space, one) in enumerate(a)
        for j, (other_space, other) in enumerate(b)
        if space == other_space and (meet := one.intersect(other)) is not None
    ]
    found = [(int(i), int(j), common.at(at)) for at, (i, j) in enumerate(zip(rows, others, strict=True))]
    assert found == expected


@given(ANYWHERE)
def test_pairs_are_the_same_however_few_are_compared_at_once(several: list[tuple[int, Box]]) -> None:
    """The bound on memory changes nothing in the answer."""
    rows, others, _ = intersect(columns(several), columns(several))
    usual = boxes_module._PAIRS_AT_ONCE
    boxes_module._PAIRS_AT_ONCE = 1  # type: ignore[misc]
    try:
        again, also, _ = intersect(columns(several), columns(several))
    finally:
        boxes_module._PAIRS_AT_ONCE = usual  # type: ignore[misc]
    assert (rows.tolist(), others.tolist()) == (again.tolist(), also.tolist())


@given(ANYWHERE)
def test_double_holding_is_noticed(several: list[tuple[int, Box]]) -> None:
    """Two rows are named exactly when an element is in two boxes of one space, and they are such rows."""
    held = [(space, element) for space, each in several for element in elements(each)]
    found = find_overlap(columns(several))
    assert (found is not None) == (len(held) != len(set(held)))
    if found is not None:
        (space, one), (other_space, other) = (several[row] for row in found)
        assert space == other_space
        assert elements(one) & elements(other)


@given(ANYWHERE)
def test_volumes_count_elements(several: list[tuple[int, Box]]) -> None:
    """A space's volume is the number of elements of its boxes."""
    expected = [sum(len(elements(each)) for space, each in several if space == wanted) for wanted in range(3)]
    assert volumes(columns(several), 3).tolist() == expected


def test_boxes_of_fewer_axes_are_compared_with_boxes_of_more() -> None:
    """A vector among matrices has extent 1 on the second axis."""
    vector = Boxes(np.array([0]), np.array([[2]]), np.array([[5]]))
    matrix = columns([(0, Box((0, 0), (3, 1)))])
    _, _, common = intersect(vector, matrix)
    assert common.at(0) == Box((2, 0), (3, 1))
