"""Pairs of strided boxes become rows of a copy table, and rows that follow one another become one. By column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..tensors import Column, Shards, collapse_axes, lexsort_rows, pad_axes
from .copy_table import AXES, ITEM_SIZES, CopyTable


@dataclass(frozen=True, eq=False)
class CopySide:
    """One side of copies: where each box begins, and how it lies."""

    region: Column
    """(copies,)."""
    at: Column
    """(copies,): bytes from the beginning of the region to the box's first element."""
    dtype: Column
    """(copies,)."""
    stride: Column
    """(copies, axes): elements."""

    @classmethod
    def of(cls, shards: Shards, region: Column, begin: Column) -> CopySide:
        """The boxes of `shards`; `region` and `begin`, (shards,), say where each one's local tensor begins."""
        return cls(region, begin + shards.offset * ITEM_SIZES[shards.dtype], shards.dtype, shards.stride)


def make_copy_table(extent: Column, source: CopySide, target: CopySide) -> CopyTable:
    """Rows that copy boxes of `extent`, (copies, axes), each from its place at the source to that at the target."""
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
    """Fewer rows that copy the same: rows of one form at equal distances become one row with an axis more.

    Experts that are stacked in the engine, groups of heads, the layers of one buffer. What follows without a gap on
    both sides becomes one run.
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
