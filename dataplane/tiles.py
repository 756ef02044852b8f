"""Tables of strided boxes become tiles: work for one block of a GPU's threads each. Pure, by column.

A tile is a rectangle of *vectors*, 1 to 16 bytes that are moved by one load and one store: `rows` runs of `width`
vectors, both sides at their own stride. At most `TILE_VECTORS` vectors, so that a block keeps all of them in flight at
once. Rows whose places or strides are no multiple of 16 bytes get smaller vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .boxes import Column
from .copy_table import AXES, ITEM_SIZES, CopyTable
from .digest_table import WORD_BYTES, BoxTable

TILE_VECTORS: Final = 2048
"""32 KB of 16-byte vectors: 256 threads with 8 loads in flight each."""
TILE_WORDS: Final = 4 * TILE_VECTORS
"""64 KB to digest: a block adds up its threads' sums only once for all of it."""
VECTORS: Final = (16, 8, 4, 2, 1)
"""Bytes. A thread moves one with a single instruction."""
SOURCE: Final = 0
"""The column of `CopyTiles.packed` that holds addresses of sources."""


@dataclass(frozen=True, eq=False)
class CopyTiles:
    """Tiles of one vector size. All columns int64."""

    vector: int
    """Bytes."""
    source: Column
    """(tiles,): address of the first byte."""
    target: Column
    source_step: Column
    """(tiles,): bytes from one row to the next."""
    target_step: Column
    rows: Column
    width: Column
    """(tiles,): vectors in a row."""

    def __len__(self) -> int:
        return len(self.source)

    def packed(self) -> Column:
        """(tiles, 6): what the kernel reads."""
        shape = self.rows << 32 | self.width
        columns = (self.source, self.target, self.source_step, self.target_step, shape, reciprocal(self.width))
        return np.ascontiguousarray(np.stack(columns, axis=1))


@dataclass(frozen=True, eq=False)
class WordTiles:
    """Tiles of 64-bit words to digest, `rows` runs of `width` words each. All columns int64."""

    item: int
    """Bytes of an element; 8 where words lie whole and aligned in memory, 16 where pairs of them do."""
    address: Column
    """(tiles,): of the first element."""
    step: Column
    """(tiles,): bytes from one row to the next."""
    item_step: Column
    """(tiles,): bytes from one element of a row to the next."""
    word_at: Column
    """(tiles,): index in the packed tensor of the first word."""
    word_step: Column
    """(tiles,): words of the packed tensor from one row to the next."""
    group: Column
    rows: Column
    width: Column
    """(tiles,): words in a row; pairs where `item` is 16."""

    def __len__(self) -> int:
        return len(self.address)

    def packed(self) -> Column:
        """(tiles, 8): what the kernel reads."""
        shape = self.rows << 32 | self.width
        columns = (
            self.address, self.step, self.item_step, self.word_at, self.word_step, self.group, shape,
            reciprocal(self.width),
        )  # fmt: skip
        return np.ascontiguousarray(np.stack(columns, axis=1))


def reciprocal(width: Column) -> Column:
    """(tiles,): m such that ``n * m >> 32`` is ``n // width`` for every n below `TILE_WORDS`, by one multiplication.

    m = ceil(2^32 / width) is too large by less than one, so that n * m errs by less than n < 2^32 / width. A width of
    one would need 33 bits and is given as 0: there the quotient is n itself.
    """
    found: Column = np.where(width > 1, -((-1 << 32) // np.maximum(width, 2)), 0)
    return found


def copy_tiles(table: CopyTable, source_base: Column, target_base: Column) -> list[CopyTiles]:
    """The tiles of a table without casts; bases are the addresses of the regions. A list for each vector size."""
    source = source_base[table.source] + table.source_at
    target = target_base[table.target] + table.target_at
    nbytes = table.run * ITEM_SIZES[table.target_dtype]
    vector = _vector(source, target, nbytes, *table.source_step.T, *table.target_step.T)
    found: list[CopyTiles] = []
    for size in VECTORS:
        rows = np.flatnonzero(vector == size)
        if not len(rows):
            continue
        cut = _cut(nbytes[rows] // size, table.grid[rows], np.full(len(rows), size, np.int64), TILE_VECTORS)
        row = rows[cut.row]
        found.append(
            CopyTiles(
                size,
                source[row] + cut.place(table.source_step[row]),
                target[row] + cut.place(table.target_step[row]),
                cut.along(table.source_step[row]),
                cut.along(table.target_step[row]),
                cut.rows,
                cut.width,
            )
        )
    return found


def word_tiles(table: BoxTable, base: Column) -> list[WordTiles]:
    """The tiles of a table of boxes; `base` holds the addresses of the regions. A list for each element size."""
    address = base[table.region] + table.at
    vector = np.where(table.item_step == table.item, _vector(address, *table.step.T), 1)
    paired = (vector >= 2 * WORD_BYTES) & (table.words % 2 == 0)
    item = np.where(paired, 2 * WORD_BYTES, np.where(vector >= WORD_BYTES, WORD_BYTES, table.item))
    found: list[WordTiles] = []
    for size in (2 * WORD_BYTES, WORD_BYTES, 4, 2, 1):
        # Elements of 8 bytes that lie apart are words too, each at a step of its own.
        rows = np.flatnonzero(item == size)
        if not len(rows):
            continue
        words = max(size // WORD_BYTES, 1)
        item_step = np.where(size > table.item[rows], size, table.item_step[rows])
        reach = item_step * max(WORD_BYTES // size, 1)
        cut = _cut(table.words[rows] // words, table.grid[rows], reach, TILE_WORDS // words)
        row = rows[cut.row]
        word_step = table.word_step[row]
        found.append(
            WordTiles(
                size,
                address[row] + cut.place(table.step[row]),
                cut.along(table.step[row]),
                item_step[cut.row],
                table.word_at[row] + (cut.index * word_step).sum(axis=1) + cut.column * words,
                cut.along(word_step),
                table.group[row],
                cut.rows,
                cut.width,
            )
        )
    return found


@dataclass(frozen=True, eq=False)
class _Cut:
    """Tiles of rows of a table: which row, where in its grid, and which part of its runs."""

    row: Column
    index: Column
    """(tiles, AXES): place in the grid of the tile's first run."""
    column: Column
    """(tiles,): vectors of the run before the tile's first."""
    shift: Column
    """(tiles,): bytes of them."""
    axis: Column
    """(tiles,): the axis along which the tile's runs follow one another."""
    rows: Column
    width: Column

    def place(self, step: Column) -> Column:
        """(tiles,): bytes from the row's first element to the tile's."""
        found: Column = (self.index * step).sum(axis=1) + self.shift
        return found

    def along(self, step: Column) -> Column:
        """(tiles,): the step from one run to the next."""
        return np.take_along_axis(step, self.axis[:, None], axis=1)[:, 0]


def _cut(width: Column, grid: Column, vector: Column, most: int) -> _Cut:
    """Cut grids of runs, `width` vectors each, into tiles of `most`. `vector`: bytes from one to the next."""
    # Runs that follow one another along the longest axis share a tile, as many as fit; long runs are cut.
    axis: Column = np.argmax(grid, axis=1)
    extent = np.take_along_axis(grid, axis[:, None], axis=1)[:, 0]
    together = np.minimum(np.maximum(most // width, 1), extent)
    parts = -(-width // most)
    blocks = grid.copy()
    np.put_along_axis(blocks, axis[:, None], -(-extent // together)[:, None], axis=1)
    count: Column = blocks.prod(axis=1, dtype=np.int64) * parts
    row = np.repeat(np.arange(len(width)), count)
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    number, part = np.divmod(number, parts[row])
    index = np.empty((len(row), AXES), np.int64)
    for each in range(AXES - 1, -1, -1):
        number, index[:, each] = np.divmod(number, blocks[row, each])
    first = np.take_along_axis(index, axis[row, None], axis=1)[:, 0] * together[row]
    np.put_along_axis(index, axis[row, None], first[:, None], axis=1)
    column = part * most
    return _Cut(
        row=row,
        index=index,
        column=column,
        shift=column * vector[row],
        axis=axis[row],
        rows=np.minimum(together[row], extent[row] - first),
        width=np.minimum(width[row] - column, most),
    )


def _vector(*places: Column) -> Column:
    """(rows,): the largest vector of which all of these are multiples. Steps that are not used are 0."""
    bits = np.bitwise_or.reduce(np.stack(places))
    found: Column = np.minimum(np.where(bits == 0, VECTORS[0], bits & -bits), VECTORS[0])
    return found
