"""Digests of tensors from their boxes, in place: the same 16 bytes that tensor_digest.py gives for the packed tensor.

Algorithm ``mix64x2`` sums over the 64-bit words of a tensor's packed bytes, each mixed with its position. Every rank
adds the words of the boxes that it holds, and the sums of all ranks are the digest of the tensor. So no tensor is
packed to be digested, and a trainer's shards and an engine's fused parameters are compared without a common cut.

It works where every box begins and ends on a word along the tensor's last axis: four elements of bfloat16. Other boxes,
and those that hold a tensor in another dtype, are *odd*; they are packed one behind another and read back, and the
assembled tensor is digested.

A row is a box of one tensor (its *group*) in one region of memory::

    for i, j, k in grid[0] x grid[1] x grid[2]:
        words word_at + (i, j, k) . word_step + 0 .. words - 1
        of the elements at region[at + (i, j, k) . step + 0, item_step, 2 * item_step, ..]

`item_step` is the element size where the run is contiguous in memory, and another stride where it lies transposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from ..digest import tensor_digest as integrity
from ..errors import DigestMismatch, ManifestError
from ..tensors import (
    DTYPES,
    Column,
    Shards,
    Table,
    TensorSpec,
    packed_strides,
    served_dtypes,
    served_strides,
)
from .copy_table import (
    AXES,
    ITEM_SIZES,
    CopySide,
    CopyTable,
    Grids,
    check_no_overflow,
    collapse_axes,
    make_copy_table,
    run_span,
)

WORD_BYTES: Final = 8

Lanes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class BoxTable(Table):
    """Boxes to digest, as columns of int64."""

    groups: int
    """Number of tensors that are digested; `group` is below it."""
    group: Column
    """(rows,): the tensor that the box is a part of."""
    region: Column
    """(rows,): index of the memory region."""
    at: Column
    """(rows,): bytes from the beginning of the region to the first element."""
    item: Column
    """(rows,): bytes of an element: 1, 2, 4 or 8."""
    item_step: Column
    """(rows,): bytes from one element of a run to the next."""
    words: Column
    """(rows,): 64-bit words of a run."""
    word_at: Column
    """(rows,): index in the packed tensor of the first word."""
    grid: Column
    """(rows, AXES): runs along each axis."""
    step: Column
    """(rows, AXES): bytes in memory."""
    word_step: Column
    """(rows, AXES): words in the packed tensor."""

    KIND = "boxes"
    WIDE = (3, AXES)

    @property
    def nbytes(self) -> int:
        """Bytes that a digest reads."""
        return int((self.words * np.prod(self.grid, axis=1, dtype=np.int64)).sum()) * WORD_BYTES

    @classmethod
    def decode(cls, blob: bytes, **others: object) -> Self:
        """As `Table.decode`; `groups` travels beside the columns."""
        table = super().decode(blob, **others)
        if len(table) and (table.words.min() < 1 or not np.isin(table.item, (1, 2, 4, 8)).all()):
            raise ManifestError("a box to digest is empty, or of elements that no dtype has")
        return table

    def check(self, region_bytes: Column) -> None:
        """Raise `ManifestError` unless every row stays inside regions of these sizes, in bytes."""
        if not len(self):
            return
        grids = ((self.grid[:, axis], self.step[:, axis]) for axis in range(AXES))
        check_no_overflow((self.at,), (self.words, self.item_step, WORD_BYTES // self.item), *grids)
        first, last = run_span(self.at, self.grid, self.step)
        run = (self.words * (WORD_BYTES // self.item) - 1) * self.item_step
        first += np.minimum(run, 0)
        last += np.maximum(run, 0) + self.item
        known = (self.region >= 0) & (self.region < len(region_bytes))
        inside = known & (first >= 0) & (self.group >= 0) & (self.group < self.groups)
        if known.all():
            inside &= last <= region_bytes[self.region]
        if not inside.all():
            row = int(np.argmin(inside))
            raise ManifestError(f"digest row {row} reaches bytes {first[row]}..{last[row]} outside of its region")


def odd_boxes(shards: Shards) -> Column:
    """(odd,): rows of shards that are no whole words of the packed tensor, or do not hold its bytes.

    A shard that is cast or shifted holds other bytes than the tensor that is served.
    """
    grids, item = _grids(shards)
    words = _whole_words(shards, grids, item)
    same = (served_dtypes(shards) == shards.dtype) & (shards.shift == 0)
    return np.flatnonzero((np.bincount(grids.row[~words], minlength=len(shards)) > 0) | ~same)


def make_box_table(
    shards: Shards, region: Column, at: Column, group: Column | None = None, groups: int | None = None
) -> BoxTable:
    """The rows that digest `shards`, none of which may be odd.

    `region` and `at`, both (shards,), say in which memory each shard's local tensor begins, and at which byte. `group`,
    (shards,), and `groups` say which boxes share a sum: the shards of each tensor by default.
    """
    grids, item = _grids(shards)
    row = grids.row
    memory, packed = grids.steps
    per_word = WORD_BYTES // item
    first = np.sum(shards.boxes.start * served_strides(shards), axis=1)
    # A lone element or a run's last axis may have been joined away: then the run is one element long, and its step too.
    alone = grids.extent[:, 0] == 1
    return BoxTable(
        groups=len(shards.tensors) if groups is None else groups,
        group=(shards.boxes.space if group is None else group)[row],
        region=region[row],
        at=at[row] + (shards.offset[row] + grids.shift[0]) * item,
        item=item,
        item_step=np.where(alone, 1, memory[:, 0]) * item,
        words=grids.extent[:, 0] // per_word,
        word_at=(first[row] + grids.shift[1]) // per_word,
        grid=grids.extent[:, 1:],
        step=memory[:, 1:] * item[:, None],
        word_step=packed[:, 1:] // per_word[:, None],
    )


def _grids(shards: Shards) -> tuple[Grids, Column]:
    """The grids of all shards, steps in elements, in memory and in the packed tensor; and bytes of an element."""
    grids = collapse_axes(shards.boxes.extents, (shards.stride, served_strides(shards)), AXES + 1)
    return grids, ITEM_SIZES[shards.dtype[grids.row]]


def _whole_words(shards: Shards, grids: Grids, item: Column) -> npt.NDArray[np.bool_]:
    """(grids,): grids whose runs all begin and end on a word of the packed tensor."""
    packed = grids.steps[1]
    first = np.sum(shards.boxes.start * served_strides(shards), axis=1)[grids.row] + grids.shift[1]
    aligned = (packed[:, 1:] * item[:, None] % WORD_BYTES == 0).all(axis=1) & (first * item % WORD_BYTES == 0)
    packed_run = (packed[:, 0] == 1) | (item == WORD_BYTES)
    whole: npt.NDArray[np.bool_] = aligned & packed_run & (grids.extent[:, 0] * item % WORD_BYTES == 0)
    return whole


PACKED_ALIGNMENT: Final = 16
"""Bytes: packed boxes begin on a multiple."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class PackedBoxes:
    """Boxes in one buffer, in the dtypes in which their tensors are served."""

    copies: CopyTable
    """Copies of the boxes into the buffer, which is target region 0."""
    boxes: Shards
    """The boxes as they lie in the buffer. `offset` counts bytes: the buffer holds several dtypes."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One box of a tensor, as one process sent it."""

    source: str
    """The process, for messages."""
    cut: tuple[slice, ...]
    data: Bytes
    """(*shape of the box, bytes of an element)."""


def pack_boxes(shards: Shards, region: Column, begin: Column) -> PackedBoxes:
    """Pack every box behind the previous one. `region` and `begin`, (shards,), say where its local tensor begins."""
    served = served_dtypes(shards)
    nbytes = shards.boxes.sizes * ITEM_SIZES[served]
    room = -(-nbytes // PACKED_ALIGNMENT) * PACKED_ALIGNMENT
    places = np.cumsum(room) - room
    strides = packed_strides(shards.boxes.extents)
    here = CopySide(np.zeros(len(shards), np.int64), places, served, strides)
    copies = make_copy_table(shards.boxes.extents, CopySide.of(shards, region, begin), here)
    boxes = replace(shards, offset=places, dtype=served, stride=strides)
    return PackedBoxes(copies, boxes, int((places + nbytes).max()) if len(shards) else 0)


def unpack_boxes(boxes: Shards, index: int, buffer: bytes, source: str) -> Iterator[TensorPart]:
    """The parts of tensor `index` in a buffer that `source` packed as `boxes`."""
    item = int(ITEM_SIZES[DTYPES.index(boxes.tensors[index].dtype)])
    for row in np.flatnonzero(boxes.boxes.space == index).tolist():
        shard = boxes.at(row)
        cut = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
        data = np.frombuffer(buffer, np.uint8, shard.box.size * item, shard.view.offset)
        yield TensorPart(source, cut, data.reshape(*shard.box.shape, item))


@dataclass(frozen=True, eq=False)
class Assembly:
    """How tensors are assembled, one behind another, from the buffers that several processes packed.

    It depends on the layout alone and is computed once; then no tensor costs a call.
    """

    bounds: Column
    """(tensors + 1,): where each begins in the assembled bytes, and where the last one ends."""
    taken: tuple[Places, ...]
    """By process, (bytes,): the bytes of its buffer that are parts of the tensors; and their places, as many."""
    places: tuple[Places, ...]

    @classmethod
    def of(cls, packs: Sequence[Shards], indexes: Sequence[int]) -> Self:
        """The assembly of the tensors `indexes` from what each process packed as `packs`."""
        tensors = packs[0].tensors
        bounds = np.cumsum([0, *(tensors[index].nbytes for index in indexes)], dtype=np.int64)
        begins = dict(zip(indexes, bounds.tolist(), strict=False))
        taken: list[Places] = []
        places: list[Places] = []
        for pack in packs:
            rows = [row for row, index in enumerate(pack.boxes.space.tolist()) if index in begins]
            pairs = [_bytes_of(pack, row, begins[int(pack.boxes.space[row])]) for row in rows]
            taken.append(np.concatenate([np.zeros(0, np.int32), *(one for one, _ in pairs)]))
            places.append(np.concatenate([np.zeros(0, np.int32), *(other for _, other in pairs)]))
        return cls(bounds, tuple(taken), tuple(places))

    def run(self, buffers: Sequence[bytes]) -> Bytes | None:
        """The packed bytes of all tensors; None where two places differ in a byte that both hold."""
        whole = np.zeros(int(self.bounds[-1]), np.uint8)
        parts = [
            (places, np.frombuffer(buffer, np.uint8)[taken])
            for places, taken, buffer in zip(self.places, self.taken, buffers, strict=True)
        ]
        for places, part in parts:
            whole[places] = part
        return whole if all(np.array_equal(whole[places], part) for places, part in parts) else None

    def digests(self, buffers: Sequence[bytes]) -> bytes | None:
        """The digests of all tensors, 16 bytes each; None where `run` gives none."""
        whole = self.run(buffers)
        return None if whole is None else integrity.digest_tensors(_as_torch(whole), self.bounds.tolist())


def _as_torch(whole: Bytes) -> torch.Tensor:
    return torch.from_numpy(whole)  # pyright: ignore[reportUnknownMemberType]


def _bytes_of(pack: Shards, row: int, begin: int) -> tuple[Places, Places]:
    """Of one packed box: its bytes in the buffer, and their places where the tensor's bytes begin at `begin`."""
    shard, spec = pack.at(row), pack.tensors[int(pack.boxes.space[row])]
    item = spec.nbytes // max(1, prod(spec.shape))
    cut = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
    places = np.arange(begin, begin + spec.nbytes, dtype=np.int32).reshape(*spec.shape, item)[cut].reshape(-1)
    return np.arange(shard.view.offset, shard.view.offset + len(places), dtype=np.int32), places


def digest_from_parts(packs: Sequence[Shards], index: int, buffers: Sequence[bytes], source: str) -> bytes:
    """The digest of tensor `index` from the buffers that several processes packed; every place must agree.

    `source` names a process by its number, for messages. Raises `DigestMismatch`.
    """
    return digest_packed_tensor(tensor_from_parts(packs, index, buffers, source))


def tensor_from_parts(packs: Sequence[Shards], index: int, buffers: Sequence[bytes], source: str) -> Bytes:
    """The packed bytes of tensor `index`; otherwise as `digest_from_parts`."""
    parts: list[TensorPart] = []
    for number, (pack, buffer) in enumerate(zip(packs, buffers, strict=True)):
        parts.extend(unpack_boxes(pack, index, buffer, f"{source} {number}"))
    return assemble_tensor(packs[0].tensors[index], parts)


def assemble_tensor(spec: TensorSpec, parts: Sequence[TensorPart]) -> Bytes:
    """The packed bytes of a tensor. Raises `DigestMismatch` when two parts differ in an element that both hold."""
    item = int(ITEM_SIZES[DTYPES.index(spec.dtype)])
    whole = np.zeros((*spec.shape, item), np.uint8)
    for part in parts:
        whole[part.cut] = part.data
    for part in parts:
        if not np.array_equal(whole[part.cut], part.data):
            raise DigestMismatch(
                f"{spec.name}[{part.cut}] on {part.source}", "other bytes", "the bytes of another place"
            )
    return whole.reshape(-1)


def digest_packed_tensor(whole: Bytes) -> bytes:
    """The digest of one packed tensor, 16 bytes."""
    return integrity.digest_tensors(_as_torch(whole), (0, len(whole)))
