"""Following elements through memories, against numpy, which moves them for real."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from weightbus.engine_agent.worker.memory_origins import Move, Scattered, SourceWindow, boxes_of, compose

Numbers = npt.NDArray[np.int64]


def window(view: Numbers, memory: Numbers) -> SourceWindow:
    """Where a numpy view lies in its flat memory."""
    offset = (view.__array_interface__["data"][0] - memory.__array_interface__["data"][0]) // 8
    return SourceWindow(offset, tuple(stride // 8 for stride in view.strides))


def positions(shape: tuple[int, ...], at: SourceWindow) -> Numbers:
    """Where each element of a window is."""
    if not shape:
        return np.array([at.offset])
    grid = np.indices(shape).reshape(len(shape), -1)
    return at.offset + np.array(at.strides, np.int64) @ grid


@st.composite
def viewed(draw: st.DrawFn, memory: Numbers) -> Numbers:  # noqa: C901 - one case for each kind of view
    """A view of a memory, as loaders make them: shaped, cut, transposed, split and joined."""
    view = memory.reshape(draw(st.sampled_from([(24, 8), (4, 6, 8), (2, 12, 8), (192,), (8, 24), (3, 8, 8)])))
    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.integers(0, view.ndim - 1))
        match draw(st.sampled_from(["narrow", "swap", "split", "join", "step", "select"])):
            case "narrow":
                start = draw(st.integers(0, view.shape[axis] - 1))
                stop = draw(st.integers(start + 1, view.shape[axis]))
                view = view[(slice(None),) * axis + (slice(start, stop),)]
            case "swap":
                view = np.swapaxes(view, axis, draw(st.integers(0, view.ndim - 1)))
            case "split":
                parts = draw(st.sampled_from([2, 3, 4]))
                if view.shape[axis] % parts == 0:
                    shape = (*view.shape[:axis], parts, view.shape[axis] // parts, *view.shape[axis + 1 :])
                    view = np.lib.stride_tricks.as_strided(
                        view,
                        shape,
                        (*view.strides[:axis], view.strides[axis] * shape[axis + 1], *view.strides[axis:]),
                    )
            case "join":
                if axis and view.strides[axis - 1] == view.strides[axis] * view.shape[axis]:
                    shape = (*view.shape[: axis - 1], view.shape[axis - 1] * view.shape[axis], *view.shape[axis + 1 :])
                    view = np.lib.stride_tricks.as_strided(
                        view, shape, (*view.strides[: axis - 1], *view.strides[axis:])
                    )
            case "step":
                view = view[(slice(None),) * axis + (slice(None, None, 2),)]
            case "select":
                if view.ndim > 1:
                    view = view[(slice(None),) * axis + (view.shape[axis] // 2,)]
    return view


MEMORY = np.arange(192)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_view_as_boxes_is_the_view(data: st.DataObject) -> None:
    """The boxes of a tensor that a view falls into hold each of its elements once, at the place it had."""
    view = data.draw(viewed(MEMORY))
    shape = data.draw(st.sampled_from([(24, 8), (4, 6, 8), (192,), (2, 96), (3, 8, 8)]))
    here = window(view, MEMORY)
    packed = SourceWindow(1000, tuple(stride // 8 for stride in np.empty(view.shape, np.int64).strides))
    whole = MEMORY.reshape(shape)
    strides = tuple(stride // 8 for stride in whole.strides)
    try:
        boxes = list(boxes_of(Move(view.shape, here, packed), shape, strides))
    except Scattered:
        return

    found: dict[int, int] = {}
    for box, there in boxes:
        cut = whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        for value, place in zip(cut.reshape(-1).tolist(), positions(cut.shape, there).tolist(), strict=True):
            assert place not in found
            found[place] = value
    assert found == {1000 + index: value for index, value in enumerate(view.reshape(-1).tolist())}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_moves_compose_as_numpy_copies(data: st.DataObject) -> None:
    """What was written over and over, and read through another view, comes from where numpy finds it."""
    middle = np.full(192, -1)
    writes: list[Move] = []
    for number in range(data.draw(st.integers(1, 3))):
        target = data.draw(viewed(middle))
        source = np.arange(target.size).reshape(target.shape) + 10_000 * (number + 1)
        packed = SourceWindow(10_000 * (number + 1), tuple(stride // 8 for stride in source.strides))
        writes.append(Move(target.shape, window(target, middle), packed))
        target[...] = source
    view = data.draw(viewed(middle))
    outer = SourceWindow(0, tuple(stride // 8 for stride in np.empty(view.shape, np.int64).strides))
    try:
        found, missing = compose(Move(view.shape, outer, window(view, middle)), writes)
    except Scattered:
        return

    seen = np.full(view.size, -2)
    for move, number in found:
        there = positions(move.shape, move.there)
        assert ((there // 10_000) == number + 1).all()
        places = positions(move.shape, move.here)
        assert (seen[places] == -2).all()
        seen[places] = there
    for move in missing:
        places = positions(move.shape, move.here)
        assert (seen[places] == -2).all()
        seen[places] = -1
    assert seen.tolist() == view.reshape(-1).tolist()


def test_the_usual_views_are_never_scattered() -> None:
    """The chains that loaders are made of compose: cut, joined, re-laid out, read by heads."""
    middle = np.zeros((32, 64), np.int64)
    write = Move((16, 64), SourceWindow(16 * 64, (64, 1)), SourceWindow(0, (64, 1)))
    heads = middle.reshape(4, 8, 64)[:, 4:, :].transpose(0, 2, 1)

    found, missing = compose(Move(heads.shape, SourceWindow(0, (256, 4, 1)), window(heads, middle)), [write])

    assert sum(move.size for move, _ in found) == sum(move.size for move in missing) == 2 * 4 * 64


def test_strides_that_do_not_divide_are_refused() -> None:
    """Six by ten, read as ten by six, is no set of boxes that this arithmetic finds: it says so."""
    read = Move((10, 6), SourceWindow(0, (6, 1)), SourceWindow(0, (6, 1)))
    write = Move((6, 10), SourceWindow(0, (10, 1)), SourceWindow(0, (10, 1)))

    with pytest.raises(Scattered):
        compose(read, [write])
