"""A table of strided copies: the one form in which copies are planned, sent and executed. Pure data, by column.

A row copies a grid of runs. A *run* is `run` elements that are contiguous on both sides; the grid has up to three axes,
each with a step in bytes at the source and at the target::

    for i, j, k in grid[0] x grid[1] x grid[2]:
        target[target_at + (i, j, k) . target_step] = source[source_at + (i, j, k) . source_step]     (`run` elements)

A whole tensor is one run; a column slice a grid of rows; a transposed matrix a grid of single elements; the experts of
a layer, stacked in the engine and apart in the trainer's buffer, one grid. `source_dtype` and `target_dtype` differ
where a value is cast, as torch's `copy_` does it.

Places are byte offsets into *regions*, which both sides number alike: at the source the allocations that trainers
export (export_map.py), at the target the load trace's targets. `make_copy_table` builds rows from pairs of boxes,
`merge_copy_rows` joins rows that continue each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import ManifestError
from ..tensors import DTYPES, ITEM_BYTES, Column, Shards, Table, lexsort_rows, pad_axes


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


AXES: Final = 3
"""Axes of a grid, besides the run itself."""

ITEM_SIZES: Final[Column] = np.array([ITEM_BYTES[dtype] for dtype in DTYPES], np.int64)
"""Bytes of an element by its dtype's number."""


@dataclass(frozen=True, eq=False)
class CopyTable(Table):
    """Copies as columns of int64."""

    source: Column
    """(rows,): index of the source region."""
    target: Column
    """(rows,): index of the target region."""
    source_at: Column
    """(rows,): bytes from the beginning of the source region to the first element."""
    target_at: Column
    """(rows,): bytes from the beginning of the target region to the first element."""
    source_dtype: Column
    """(rows,): index into `DTYPES`."""
    target_dtype: Column
    """(rows,): index into `DTYPES`."""
    run: Column
    """(rows,): elements of a run."""
    grid: Column
    """(rows, AXES): runs along each axis; 1 where an axis is not used. Axis 0 is the slowest at the target."""
    source_step: Column
    """(rows, AXES): bytes; 0 where an axis is not used."""
    target_step: Column
    """(rows, AXES): bytes; 0 where an axis is not used."""

    KIND = "copies"
    WIDE = (3, AXES)

    @property
    def elements(self) -> Column:
        """(rows,): elements that each row copies."""
        found = self.run.copy()
        for axis in range(AXES):
            found *= self.grid[:, axis]
        return found

    @property
    def target_bytes(self) -> Column:
        """(rows,): bytes that each row writes."""
        return self.elements * ITEM_SIZES[self.target_dtype]

    @property
    def casts(self) -> Column:
        """(rows,) 0 or 1: rows that convert the dtype."""
        different: Column = (self.source_dtype != self.target_dtype).astype(np.int64)
        return different

    @classmethod
    def empty(cls) -> CopyTable:
        """A table without rows."""
        flat, wide = np.empty(0, np.int64), np.empty((0, AXES), np.int64)
        return cls(flat, flat, flat, flat, flat, flat, flat, wide, wide, wide)

    def check(self, source_bytes: Column, target_bytes: Column) -> None:
        """Raise `ManifestError` unless every row stays inside regions of these sizes, in bytes.

        Kernels check nothing.
        """
        dtypes = np.stack([self.source_dtype, self.target_dtype])
        if len(self) == 0:
            return
        if dtypes.min() < 0 or dtypes.max() >= len(DTYPES) or self.run.min() < 1 or self.grid.min() < 1:
            raise ManifestError("a copy is empty or of a dtype that cannot travel")
        sides = (
            ("source", self.source, self.source_at, self.source_step, self.source_dtype, source_bytes),
            ("target", self.target, self.target_at, self.target_step, self.target_dtype, target_bytes),
        )
        for side, region, at, step, dtype, sizes in sides:
            grids = ((self.grid[:, axis], step[:, axis]) for axis in range(AXES))
            check_no_overflow((at,), (self.run, ITEM_SIZES[dtype]), *grids)
            first, last = run_span(at, self.grid, step)
            last += self.run * ITEM_SIZES[dtype]
            known = (region >= 0) & (region < len(sizes))
            inside = known & (first >= 0) & (last <= sizes[np.where(known, region, 0)] if len(sizes) else False)
            if not inside.all():
                row = int(np.argmin(inside))
                raise ManifestError(
                    f"copy {row} reaches bytes {first[row]}..{last[row]} of {side} region {region[row]}, which has "
                    f"{sizes[region[row]] if known[row] else 'no such number'}: plan again with the current layout"
                )


def run_span(at: Column, grid: Column, step: Column) -> tuple[Column, Column]:
    """(rows,), (rows,): where the first and the last of the runs of a grid begin, which begins at `at`."""
    reach = (grid - 1) * step
    return at + np.minimum(reach, 0).sum(axis=1), at + np.maximum(reach, 0).sum(axis=1)


def check_no_overflow(*products: tuple[Column, ...]) -> None:
    """Raise `ManifestError` when the sum of these products may leave 64 bits: a sum that wrapped looks harmless."""
    far = np.zeros(len(products[0][0]))
    for product in products:
        far += np.prod([np.abs(factor.astype(np.float64)) for factor in product], axis=0)
    if far.max() >= _ENDLESS:
        raise ManifestError(f"row {far.argmax()} of a table reaches further than any memory: no plan made it")


_ENDLESS: Final = 2.0**60
"""Bytes. Above what memory there is, and far enough below 2**63 for what is added to it afterwards."""


@dataclass(frozen=True, eq=False)
class CopySide:
    """One side of copies: where each box begins, and its strides."""

    region: Column
    """(copies,): index of the region."""
    at: Column
    """(copies,): bytes from the beginning of the region to the box's first element."""
    dtype: Column
    """(copies,): index into `DTYPES`."""
    stride: Column
    """(copies, axes): elements."""

    @classmethod
    def of(cls, shards: Shards, region: Column, begin: Column) -> CopySide:
        """The boxes of `shards`; `region` and `begin`, (shards,), say where each one's local tensor begins."""
        return cls(region, begin + shards.offset * ITEM_SIZES[shards.dtype], shards.dtype, shards.stride)


def make_copy_table(extent: Column, source: CopySide, target: CopySide) -> CopyTable:
    """Rows that copy boxes of `extent`, (copies, axes), from their places at the source to those at the target."""
    # Axes in the order in which they lie at the target, so that those can be joined that a transposed tensor swaps.
    distance = np.where(extent > 1, -target.stride, np.iinfo(np.int64).min)
    sorted_by = _ascending(distance, (extent, source.stride, target.stride))
    runs = collapse_axes(sorted_by[0], sorted_by[1:], AXES + 1)
    together = (runs.steps[0][:, 0] == 1) & (runs.steps[1][:, 0] == 1)
    apart = np.setdiff1d(np.unique(runs.row[~together]), [], assume_unique=True)
    lone = collapse_axes(sorted_by[0][apart], [each[apart] for each in sorted_by[1:]], AXES)
    kept = np.flatnonzero(~np.isin(runs.row, apart))
    row = np.concatenate([runs.row[kept], apart[lone.row]])
    # Innermost first, and the run is the innermost axis or one element.
    grid = np.concatenate([runs.extent[kept, 1:], lone.extent])
    steps = [np.concatenate([runs.steps[side][kept, 1:], lone.steps[side]])[:, ::-1] for side in (0, 1)]
    shift = [np.concatenate([runs.shift[side][kept], lone.shift[side]]) for side in (0, 1)]
    items = [ITEM_SIZES[side.dtype[row]] for side in (source, target)]
    return CopyTable(
        source=source.region[row],
        target=target.region[row],
        source_at=source.at[row] + shift[0] * items[0],
        target_at=target.at[row] + shift[1] * items[1],
        source_dtype=source.dtype[row],
        target_dtype=target.dtype[row],
        run=np.concatenate([runs.extent[kept, 0], np.ones(len(lone.row), np.int64)]),
        grid=grid[:, ::-1],
        source_step=steps[0] * items[0][:, None],
        target_step=steps[1] * items[1][:, None],
    )


def merge_copy_rows(table: CopyTable) -> CopyTable:
    """The same copies in fewer rows: rows of one shape at equal distances become one row with an axis more.

    These are experts that are stacked in the engine, groups of heads, the layers of one buffer. Neighbors without a gap
    on both sides become one run.
    """
    before = -1
    while len(table) != before:
        before = len(table)
        table = _lengthened(_folded(table))
    return table


def _folded(table: CopyTable) -> CopyTable:
    """Join rows that are equal but for their places, where those ascend in equal steps and an axis is free."""
    if len(table) < 2:
        return table
    flat = (table.source, table.target, table.source_dtype, table.target_dtype, table.run)
    wide = (table.grid, table.source_step, table.target_step)
    columns = (*flat, *(each[:, axis] for each in wide for axis in range(AXES)))
    varying = [column for column in columns if (column != column[0]).any()]
    order = lexsort_rows(np.column_stack((*varying, table.target_at, table.source_at)))
    table = table.take(order)
    step = np.diff(np.column_stack((table.source_at, table.target_at)), axis=0)
    same_form = table.grid[1:, 0] == 1
    for column in varying:
        same_form &= column[order[1:]] == column[order[:-1]]
    joins = same_form & (step > 0).all(axis=1)
    # Row i + 2 goes on where the step to row i + 1 was: a row that begins a series has no step before it.
    joins[1:] &= ~joins[:-1] | (step[1:] == step[:-1]).all(axis=1)
    heads = np.flatnonzero(np.concatenate([[True], ~joins]))
    count = np.diff(np.append(heads, len(table)))
    merged = table.take(heads)
    rows = np.flatnonzero(count > 1)
    if not len(rows):
        return table
    free = _free_axis(merged.grid[rows])
    grid, source_step, target_step = merged.grid.copy(), merged.source_step.copy(), merged.target_step.copy()
    grid[rows, free] = count[rows]
    source_step[rows, free] = step[heads[rows], 0]
    target_step[rows, free] = step[heads[rows], 1]
    return replace(merged, grid=grid, source_step=source_step, target_step=target_step)


def _free_axis(grid: Column) -> Column:
    """(rows,): the innermost of the unused outer axes."""
    used = grid > 1
    first: Column = np.argmax(used, axis=1)
    first[~used.any(axis=1)] = grid.shape[1]
    return first - 1


def _lengthened(table: CopyTable) -> CopyTable:
    """Make the innermost axis a part of the run where its steps leave no gap on either side."""
    if not len(table):
        return table
    inner = AXES - 1
    bytes_of = [ITEM_SIZES[dtype] * table.run for dtype in (table.source_dtype, table.target_dtype)]
    follows = (table.grid[:, inner] > 1) & (table.source_step[:, inner] == bytes_of[0])
    rows = np.flatnonzero(follows & (table.target_step[:, inner] == bytes_of[1]))
    run, grid = table.run.copy(), table.grid.copy()
    run[rows] *= grid[rows, inner]
    grid[rows, inner] = 1
    steps: list[Column] = []
    for each in (table.source_step, table.target_step):
        step = each.copy()
        step[rows, inner] = 0
        steps.append(step)
    # Unused axes belong on the outside.
    grid, source_step, target_step = _ascending(grid > 1, (grid, *steps))
    return replace(table, run=run, grid=grid, source_step=source_step, target_step=target_step)


def _ascending(by: Column | npt.NDArray[np.bool_], columns: Sequence[Column]) -> list[Column]:
    """`columns`, each (rows, axes), with the axes of every row in the order in which `by`, (rows, axes), ascends.

    Most rows have them in that order, and are left alone.
    """
    disordered = np.zeros(len(by), bool)
    for axis in range(1, by.shape[1]):
        disordered |= by[:, axis] < by[:, axis - 1]
    rows = np.flatnonzero(disordered)
    if not len(rows):
        return [pad_axes(each, by.shape[1], 0) for each in columns]  # of no rows they may be narrower
    order = np.argsort(by[rows], axis=1, kind="stable")
    found = [each.copy() for each in columns]
    for column in found:
        column[rows] = np.take_along_axis(column[rows], order, axis=1)
    return found
