"""Which rows of a table the copy engines of a GPU carry out, and as which copies of theirs. Pure, by column.

A copy engine moves a rectangle of bytes with one command: so many lines of one width, at a pitch of their own on either
side. That is fast where lines are long. Two GPUs that read from each other at the same time are faster with it than
with a kernel, whose requests take room on the way of the other's bytes; on one GPU the kernel is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from .boxes import Column
from .copy_table import AXES, ITEM_SIZES, CopyTable

LEAST_RUN: Final = 64 * 1024
"""Bytes. Shorter runs are the kernel's: an engine takes lines of a rectangle one after another."""
LEAST_NODE: Final = 256 * 1024
"""Bytes of a rectangle. Beginning one takes an engine about a microsecond."""
MOST_NODE: Final = 32 * 1024 * 1024
"""Bytes. Larger ones are cut, so that branches can be of one length."""
MOST_PITCH: Final = 2**31 - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far."""


@dataclass(frozen=True, eq=False)
class CopyNodes:
    """Rectangles of bytes. All columns are (nodes,) int64."""

    source: Column
    """Address of the first byte."""
    target: Column
    source_pitch: Column
    """Bytes from one line to the next; at least `width`."""
    target_pitch: Column
    width: Column
    """Bytes of a line."""
    height: Column
    """Lines."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def nbytes(self) -> Column:
        """(nodes,)."""
        found: Column = self.width * self.height
        return found

    def take(self, nodes: Column) -> CopyNodes:
        """The nodes named, in their order."""
        return CopyNodes(*(getattr(self, field.name)[nodes] for field in fields(self)))


def for_copy_engines(table: CopyTable, remote: Column, least_run: int = LEAST_RUN) -> Column:
    """(rows,) bool: rows without casts that read from a peer (`remote`: (regions,) 0 or 1) in runs worth it."""
    run = table.run * ITEM_SIZES[table.target_dtype]
    together = run * np.where(_stacks(table, run), table.grid[:, AXES - 1], 1)
    worth: Column = (run >= least_run) & (together >= LEAST_NODE) & (table.casts == 0)
    return worth & (remote[table.source] != 0) if len(remote) else worth & False


def copy_nodes(table: CopyTable, source_base: Column, target_base: Column) -> CopyNodes:
    """The rectangles of a table without casts; bases are the addresses of the regions.

    The innermost axis of a grid becomes the lines of a rectangle where both sides ascend by a pitch that fits; along
    all others rectangles stand side by side.
    """
    run = table.run * ITEM_SIZES[table.target_dtype]
    stacked = _stacks(table, run)
    inner = AXES - 1
    height = np.where(stacked, table.grid[:, inner], 1)
    outer = table.grid.copy()
    outer[stacked, inner] = 1
    count: Column = outer.prod(axis=1, dtype=np.int64)
    row = np.repeat(np.arange(len(table)), count)
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    index = np.empty((len(row), AXES), np.int64)
    for axis in range(inner, -1, -1):
        number, index[:, axis] = np.divmod(number, outer[row, axis])
    return _cut(
        CopyNodes(
            source=(source_base[table.source] + table.source_at)[row] + (index * table.source_step[row]).sum(axis=1),
            target=(target_base[table.target] + table.target_at)[row] + (index * table.target_step[row]).sum(axis=1),
            source_pitch=np.where(stacked, table.source_step[:, inner], run)[row],
            target_pitch=np.where(stacked, table.target_step[:, inner], run)[row],
            width=run[row],
            height=height[row],
        )
    )


def branches_of(nodes: CopyNodes, count: int) -> Column:
    """(nodes,): which of `count` branches each belongs to: one after another, with about as many bytes each."""
    done = np.cumsum(nodes.nbytes) - nodes.nbytes
    total = max(int(nodes.nbytes.sum()), 1)
    found: Column = done * count // total
    return found


def _stacks(table: CopyTable, run: Column) -> Column:
    """(rows,) bool: the innermost axis can be the lines of a rectangle."""
    found: Column = table.grid[:, AXES - 1] > 1
    for step in (table.source_step[:, AXES - 1], table.target_step[:, AXES - 1]):
        found = found & (step >= run) & (step <= MOST_PITCH)
    return found


def _cut(nodes: CopyNodes) -> CopyNodes:
    """Parts of at most `MOST_NODE`: fewer lines of wide rectangles, or parts of a single line."""
    lines = np.where(nodes.height > 1, np.maximum(MOST_NODE // nodes.width, 1), 1)
    reach = np.where(nodes.height > 1, nodes.width, MOST_NODE)
    parts = np.where(nodes.height > 1, -(-nodes.height // lines), -(-nodes.width // reach))
    node = np.repeat(np.arange(len(nodes)), parts)
    part = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    whole = nodes.take(node)
    flat = whole.height == 1
    first = np.where(flat, 0, part * lines[node])
    begin = np.where(flat, part * reach[node], 0)
    width = np.minimum(whole.width - begin, reach[node])
    return CopyNodes(
        source=whole.source + begin + first * whole.source_pitch,
        target=whole.target + begin + first * whole.target_pitch,
        source_pitch=np.where(flat, width, whole.source_pitch),
        target_pitch=np.where(flat, width, whole.target_pitch),
        width=width,
        height=np.where(flat, 1, np.minimum(lines[node], whole.height - first)),
    )
