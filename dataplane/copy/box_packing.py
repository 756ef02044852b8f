"""Boxes that cannot be digested in place: packed one behind another, and assembled to whole tensors elsewhere.

These are boxes that are no whole words of their tensor, or hold it in another dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ..digest import tensor_digest as integrity
from ..errors import DigestMismatch
from ..tensors import DTYPES, Column, Shards, TensorSpec, packed_strides, served_dtypes
from .copy_table import ITEM_SIZES, CopySide, CopyTable, make_copy_table

_ALIGNMENT: Final = 16

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
    room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
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
    memory = torch.from_numpy(whole)  # pyright: ignore[reportUnknownMemberType]
    return integrity.digest_tensors(memory, (0, len(whole)))
