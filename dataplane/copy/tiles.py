"""Tables of strided boxes become tiles: the work of one thread block each.

A tile is a rectangle of *vectors*, 1 to 16 bytes that one load and one store move: `rows` runs of `width` vectors, each
side with its own stride, at most `TILE_VECTORS` vectors, so that a block keeps all of them in flight. Rows whose places
or strides are no multiple of 16 bytes get smaller vectors.

The host decides by row how rows are cut. There are a hundred times as many tiles: the GPU that reads them writes them
(copy_triton.py), because a core takes longer for them than NVLink for the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch

from ..tensors import Column
from .box_digests import WORD_BYTES, BoxTable
from .copy_table import AXES, ITEM_SIZES, CopyTable

TILE_VECTORS: Final = 2048
"""32 KB of 16-byte vectors: 256 threads with 8 loads in flight each."""
TILE_WORDS: Final = 4 * TILE_VECTORS
"""64 KB to digest: a block adds up its threads' sums only once for all of it."""
VECTORS: Final = (16, 8, 4, 2, 1)
"""Bytes. A thread moves a vector with a single instruction."""
SOURCE: Final = 0
"""The column of copies that holds addresses of sources."""


class Tiles(NamedTuple):
    """Tiles of one vector size, as the kernels of copy_triton.py read them."""

    vector: int
    """Bytes of a vector of copies. Of digests, of an element: 8 where words lie whole in memory, 16 where pairs do."""
    table: torch.Tensor
    """(tiles, columns) int64 on the device. The last two are ``rows << 32 | width`` and the `reciprocal` of width."""


def reciprocal(width: torch.Tensor) -> torch.Tensor:
    """(tiles,): m such that ``n * m >> 32`` is ``n // width`` for every n below `TILE_WORDS`, by one multiplication.

    m = ceil(2^32 / width) is too large by less than one, so that n * m errs by less than n < 2^32 / width. A width of
    one would need 33 bits and is given as 0: there the quotient is n itself.
    """
    found = torch.div((1 << 32) + width - 1, width, rounding_mode="floor")
    return torch.where(width > 1, found, 0)


def staged_tiles(
    table: CopyTable, stages: Column, source_base: Column, target_base: Column, device: torch.device
) -> dict[int, list[Tiles]]:
    """The tiles of a table without casts, by stage, one entry for each vector size.

    Bases are the addresses of the regions. `stages`, (rows,), ascend: tiles of a stage are a slice of one tensor.
    Columns: addresses of the first bytes of source and target; bytes from one run to the next, of both; and the shape.
    """
    found: dict[int, list[Tiles]] = defaultdict(list)
    for size, rows, cut, written in _copies(table, source_base, target_base, device):
        of = stages[rows]
        heads = np.flatnonzero(np.diff(of, prepend=of[0] - 1))
        begins = np.concatenate([[0], cut.ends[heads[1:] - 1], cut.ends[-1:]]).tolist()
        for stage, begin, end in zip(of[heads].tolist(), begins, begins[1:], strict=False):
            found[stage].append(Tiles(size, written[begin:end]))
    return found


def _copies(
    table: CopyTable, source_base: Column, target_base: Column, device: torch.device
) -> Iterator[tuple[int, Column, _Cut, torch.Tensor]]:
    """For each size of vectors: the rows that are moved by such, how they are cut, and their tiles."""
    source = source_base[table.source] + table.source_at
    target = target_base[table.target] + table.target_at
    nbytes = table.run * ITEM_SIZES[table.target_dtype]
    vector = _vector(source, target, nbytes, *table.source_step.T, *table.target_step.T)
    for size in VECTORS:
        rows = np.flatnonzero(vector == size)
        if not len(rows):
            continue
        cut = _cut(nbytes[rows] // size, table.grid[rows], TILE_VECTORS)
        places = [
            _Place(source[rows], table.source_step[rows], size),
            _Place(target[rows], table.target_step[rows], size),
            _Place(cut.along(table.source_step[rows])),
            _Place(cut.along(table.target_step[rows])),
        ]
        yield size, rows, cut, _written(cut, places, device)


def word_tiles(table: BoxTable, base: Column, device: torch.device) -> list[Tiles]:
    """The tiles of a table of boxes; `base` holds the addresses of the regions. One for each size of elements.

    Columns: address of the first element; bytes from one run to the next, and from one element of it; index in the
    packed tensor of the first word, and words there from one run to the next; the group; and the shape.
    """
    address = base[table.region] + table.at
    vector = np.where(table.item_step == table.item, _vector(address, *table.step.T), 1)
    paired = (vector >= 2 * WORD_BYTES) & (table.words % 2 == 0)
    item = np.where(paired, 2 * WORD_BYTES, np.where(vector >= WORD_BYTES, WORD_BYTES, table.item))
    found: list[Tiles] = []
    for size in (2 * WORD_BYTES, WORD_BYTES, 4, 2, 1):
        # Elements of 8 bytes that lie apart are words too, each at a step of its own.
        rows = np.flatnonzero(item == size)
        if not len(rows):
            continue
        words = max(size // WORD_BYTES, 1)
        item_step = np.where(size > table.item[rows], size, table.item_step[rows])
        cut = _cut(table.words[rows] // words, table.grid[rows], TILE_WORDS // words)
        places = [
            _Place(address[rows], table.step[rows], item_step * max(WORD_BYTES // size, 1)),
            _Place(cut.along(table.step[rows])),
            _Place(item_step),
            _Place(table.word_at[rows], table.word_step[rows], words),
            _Place(cut.along(table.word_step[rows])),
            _Place(table.group[rows]),
        ]
        found.append(Tiles(size, _written(cut, places, device)))
    return found


class _Place(NamedTuple):
    """Where tiles of each row lie in one sense, or what all of a row have in common."""

    base: Column
    """(rows,): at the row's first vector."""
    step: Column | int = 0
    """(rows, AXES): from one run to the next, along each axis."""
    unit: Column | int = 0
    """(rows,): from one vector of a run to the next."""


@dataclass(frozen=True, eq=False)
class _Cut:
    """How each row of a table is cut into tiles: runs that follow one another along its longest axis share one."""

    axis: Column
    """(rows,): that axis."""
    extent: Column
    """(rows,): runs along it."""
    together: Column
    """(rows,): how many of them share a tile."""
    width: Column
    """(rows,): vectors of a run."""
    most: int
    """Vectors of a tile. Longer runs are cut."""
    blocks: Column
    """(rows, AXES + 1): tiles along each axis of the grid, and along a run."""

    @cached_property
    def ends(self) -> Column:
        """(rows,): how many tiles there are of the rows up to each."""
        found: Column = np.cumsum(self.blocks.prod(axis=1))
        return found

    def along(self, step: Column) -> Column:
        """(rows,): the step from one run of a tile to the next."""
        return np.take_along_axis(step, self.axis[:, None], axis=1)[:, 0]

    def form(self, place: _Place) -> Column:
        """(rows, 1 + AXES + 1): `place` of a tile by its numbers, and one more before them, that is always 1."""
        found = np.zeros((len(self.axis), 1 + AXES + 1), np.int64)
        found[:, 0] = place.base
        found[:, 1:-1] = place.step
        rows = np.arange(len(found))
        found[rows, 1 + self.axis] *= self.together
        found[:, -1] = self.most * place.unit
        return found


def _cut(width: Column, grid: Column, most: int) -> _Cut:
    """Cut grids of runs, `width` vectors each, into tiles of `most`."""
    axis: Column = np.argmax(grid, axis=1)
    extent = np.take_along_axis(grid, axis[:, None], axis=1)[:, 0]
    together = np.minimum(np.maximum(most // width, 1), extent)
    blocks = np.concatenate([grid, -(-width // most)[:, None]], axis=1)
    np.put_along_axis(blocks, axis[:, None], -(-extent // together)[:, None], axis=1)
    return _Cut(axis, extent, together, width, most, blocks)


def _written(cut: _Cut, places: Sequence[_Place], device: torch.device) -> torch.Tensor:
    """(tiles, places + 2): each of `places` of every tile, and its shape."""
    none = np.zeros(len(cut.axis), np.int64)
    steps = np.zeros((len(none), AXES), np.int64)
    steps[np.arange(len(none)), cut.axis] = 1
    runs, vectors = _Place(none, steps), _Place(none, 0, 1)  # of its row that lie before the tile
    ends = cut.ends
    begins = np.concatenate([[0], ends[:-1]])
    head = np.stack([ends, begins, cut.together, cut.extent, cut.width], axis=1)
    forms = [cut.form(each) for each in (*places, runs, vectors)]
    records = _on(device, np.concatenate([head, cut.blocks, *forms], axis=1))
    table = torch.empty((int(ends[-1]), len(places) + 2), dtype=torch.int64, device=device)
    if device.type == "cuda":
        from .copy_triton import write  # noqa: PLC0415  triton is not there without a GPU

        write(table, records, cut.most)
        torch.cuda.current_stream(device).synchronize()  # it may be read on any stream
    else:
        write_by_torch(table, records, cut.most)
    return table


def write_by_torch(table: torch.Tensor, records: torch.Tensor, most: int) -> None:
    """Fill `table`, (tiles, places + 2), from the `records` of rows, as copy_triton.py does.

    A record has where the row's tiles end and begin in the table, runs that share a tile, runs along that axis and
    vectors of a run; the tiles along each axis and along a run; and the form (`_Cut.form`) of each place, and of how
    many runs and vectors of the row lie before a tile.
    """
    tile = torch.arange(len(table), device=table.device)
    row = records[torch.searchsorted(records[:, 0].contiguous(), tile, right=True)]
    _, first, together, extent, width = row[:, :5].unbind(1)
    number, numbers = tile - first, [torch.ones_like(tile)]
    for along in row[:, 5 : 6 + AXES].flip(1).unbind(1):
        numbers.insert(1, number % along)
        number = torch.div(number, along, rounding_mode="floor")
    forms = row[:, 6 + AXES :].reshape(len(row), -1, len(numbers))
    table[:] = (forms * torch.stack(numbers, 1)[:, None]).sum(2)
    rows, wide = torch.minimum(together, extent - table[:, -2]), (width - table[:, -1]).clamp(max=most)
    table[:, -2], table[:, -1] = rows << 32 | wide, reciprocal(wide)


def _on(device: torch.device, column: Column) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(column)).to(device)  # pyright: ignore[reportUnknownMemberType]


def _vector(*places: Column) -> Column:
    """(rows,): the largest vector of which all of these are multiples. Steps that are not used are 0."""
    bits = np.bitwise_or.reduce(np.stack(places))
    found: Column = np.minimum(np.where(bits == 0, VECTORS[0], bits & -bits), VECTORS[0])
    return found
