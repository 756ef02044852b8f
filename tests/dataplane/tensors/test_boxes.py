"""Boxes against sets of indexes, element by element."""

from itertools import product

import numpy as np
from hypothesis import given, strategies as st

from weightbus.dataplane.tensors import shards as boxes_module
from weightbus.dataplane.tensors.shards import Box, Boxes, find_overlap, intersect, subtract_all, volumes

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
