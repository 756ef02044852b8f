"""Boxes of many axes as grids of a few: axes of one element vanish, axes that continue each other are joined.

Rows are independent of one another, and all work is by column. Axis 0 of the result is the innermost, along which
neighbors are closest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .boxes import Column, pad_axes


@dataclass(frozen=True, eq=False)
class Grids:
    """Grids, innermost axis first. `steps` has one column block for each side that was given."""

    row: Column
    """(grids,): the box that each was made from. A box of more than `axes` axes becomes several grids."""
    extent: Column
    """(grids, axes): 1 where an axis is not used."""
    steps: tuple[Column, ...]
    """Each (grids, axes), 0 where an axis is not used."""
    shift: tuple[Column, ...]
    """Each (grids,): distance of the grid from its box's first element."""


def collapse_axes(extent: Column, steps: Sequence[Column], axes: int) -> Grids:
    """The grids of boxes with these extents (rows, any axes; the last one innermost) and steps on every side.

    Two axes are joined where a step of the outer one spans the whole inner one, on all sides.
    """
    rows, width = extent.shape
    joined = np.ones((rows, max(width, 1)), np.int64)
    moved = [np.zeros((rows, max(width, 1)), np.int64) for _ in steps]
    depth = np.zeros(rows, np.int64)
    for axis in range(width - 1, -1, -1):
        used = np.flatnonzero(extent[:, axis] > 1)
        top = np.maximum(depth[used] - 1, 0)
        continues = depth[used] > 0
        for side, step in zip(moved, steps, strict=True):
            continues &= step[used, axis] == side[used, top] * joined[used, top]
        inner, outer = used[continues], used[~continues]
        joined[inner, depth[inner] - 1] *= extent[inner, axis]
        joined[outer, depth[outer]] = extent[outer, axis]
        for side, step in zip(moved, steps, strict=True):
            side[outer, depth[outer]] = step[outer, axis]
        depth[outer] += 1
    return _unroll(joined, moved, axes)


def _unroll(extent: Column, steps: Sequence[Column], axes: int) -> Grids:
    """One grid for each index along axes beyond the first `axes`. No known layout has any."""
    rows = np.arange(len(extent))
    shift = [np.zeros(len(extent), np.int64) for _ in steps]
    for axis in range(axes, extent.shape[1]):
        count = extent[rows, axis]
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        rows = np.repeat(rows, count)
        shift = [np.repeat(side, count) + within * step[rows, axis] for side, step in zip(shift, steps, strict=True)]
    kept, *moved = (
        pad_axes(each[rows, :axes], axes, fill) for each, fill in ((extent, 1), *((step, 0) for step in steps))
    )
    return Grids(rows, kept, tuple(moved), tuple(shift))
