"""The one form in which copies are carried out: a table of strided boxes. Pure data; copy_engine.py carries it out.

A row copies a grid of runs. A *run* is `run` elements that lie one after another on both sides; the grid has up to
three axes, and a step along one of them moves by so many bytes at the source and at the target::

    for i, j, k in grid[0] x grid[1] x grid[2]:
        target[target_at + (i, j, k) . target_step] = source[source_at + (i, j, k) . source_step]     (`run` elements)

A whole tensor is one run; a column slice a grid of rows; a transposed matrix a grid of single elements; the experts of
a layer, stacked in the engine and apart in the trainer's buffer, one grid. `source_dtype` and `target_dtype` differ
where a value is cast on its way, as torch's `copy_` does it.

Places are byte offsets into *regions*, which both sides number alike: at the source the allocations that trainers
export (export_map.py), at the target the trace's targets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from ..errors import ManifestError
from ..tensors import DTYPES, ITEM_BYTES, Column, is_identity

AXES: Final = 3
"""Axes of a grid, besides the run itself."""

ITEM_SIZES: Final[Column] = np.array([ITEM_BYTES[dtype] for dtype in DTYPES], np.int64)
"""Bytes of an element by its dtype's number."""


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Rows as columns; every column is int64."""

    source: Column
    """(rows,): which source region."""
    target: Column
    """(rows,): which target region."""
    source_at: Column
    """(rows,): bytes from the beginning of the source region to the first element."""
    target_at: Column
    """(rows,)."""
    source_dtype: Column
    """(rows,): index into `DTYPES`."""
    target_dtype: Column
    """(rows,)."""
    run: Column
    """(rows,): elements of a run."""
    grid: Column
    """(rows, AXES): runs along each axis; 1 where an axis is not used. Axis 0 is the slowest at the target."""
    source_step: Column
    """(rows, AXES): bytes; 0 where an axis is not used."""
    target_step: Column
    """(rows, AXES)."""

    def __len__(self) -> int:
        return len(self.source)

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
        """(rows,) 0 or 1: rows that convert."""
        different: Column = (self.source_dtype != self.target_dtype).astype(np.int64)
        return different

    def take(self, rows: Column) -> CopyTable:
        """The rows named, in their order."""
        if is_identity(rows, len(self)):
            return self
        return CopyTable(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def empty(cls) -> CopyTable:
        """No rows."""
        flat, wide = np.empty(0, np.int64), np.empty((0, AXES), np.int64)
        return cls(flat, flat, flat, flat, flat, flat, flat, wide, wide, wide)

    def numbers(self) -> Column:
        """(rows, 7 + 3 * AXES): all columns side by side, in the order of the fields."""
        flat = (
            self.source,
            self.target,
            self.source_at,
            self.target_at,
            self.source_dtype,
            self.target_dtype,
            self.run,
        )
        return np.column_stack((*flat, self.grid, self.source_step, self.target_step))

    @classmethod
    def of_numbers(cls, numbers: Column) -> CopyTable:
        """The table that `numbers` gave."""
        wide = [numbers[:, 7 + AXES * part : 7 + AXES * (part + 1)] for part in range(3)]
        return cls(*(numbers[:, column] for column in range(7)), *wide)

    def encode(self) -> bytes:
        """What travels: the same bytes for the same rows, on every machine."""
        return self.numbers().astype("<i8").tobytes()

    @classmethod
    def decode(cls, blob: bytes) -> CopyTable:
        """Read what `encode` wrote. Raises `ManifestError` on anything else; `check` says whether it fits memory."""
        width = 7 + 3 * AXES
        if len(blob) % (8 * width):
            raise ManifestError(f"not a table of copies: {len(blob)} bytes, expected a multiple of {8 * width}")
        return cls.of_numbers(np.frombuffer(blob, "<i8").astype(np.int64).reshape(-1, width))

    def digest(self) -> str:
        """SHA-256, hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    def check(self, source_bytes: Column, target_bytes: Column) -> None:
        """Raise `ManifestError` unless every row stays inside of regions of these sizes. No kernel asks again."""
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
            reach = (self.grid - 1) * step
            first = at + np.minimum(reach, 0).sum(axis=1)
            last = at + np.maximum(reach, 0).sum(axis=1) + self.run * ITEM_SIZES[dtype]
            known = (region >= 0) & (region < len(sizes))
            inside = known & (first >= 0) & (last <= sizes[np.where(known, region, 0)] if len(sizes) else False)
            if not inside.all():
                row = int(np.argmin(inside))
                raise ManifestError(
                    f"copy {row} reaches bytes {first[row]}..{last[row]} of {side} region {region[row]}, which has "
                    f"{sizes[region[row]] if known[row] else 'no such number'}: plan again with the current layout"
                )


def check_no_overflow(*products: tuple[Column, ...]) -> None:
    """Raise `ManifestError` when the sum of these products may leave 64 bits: a sum that wrapped looks harmless."""
    far = np.zeros(len(products[0][0]))
    for product in products:
        far += np.prod([np.abs(factor.astype(np.float64)) for factor in product], axis=0)
    if far.max() >= _ENDLESS:
        raise ManifestError(f"row {far.argmax()} of a table reaches further than any memory: no plan made it")


_ENDLESS: Final = 2.0**60
"""Bytes. Above what memory there is, and far enough below 2**63 for what is added to it afterwards."""
