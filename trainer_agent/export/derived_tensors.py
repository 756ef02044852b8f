"""Copies, in served form, of the few pieces that are not served as they are trained: norms that are kept around zero.

A reader copies bytes. What a trainer adds to before it is served has to lie somewhere with it added: in one tensor of
this rank, refreshed before every publication, and exported like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from weightbus.dataplane.copy import ITEM_SIZES
from weightbus.dataplane.tensors import DTYPES, Shards, packed_strides, served_dtypes


class DerivedTensors:
    """The shifted pieces of one rank. `pieces` are all of its pieces, and none of them is shifted."""

    def __init__(self, pieces: Shards, storages: int, device: torch.device) -> None:
        """`storages` is how many local tensors there are; what is mirrored becomes those after them."""
        rows = np.flatnonzero(pieces.shift != 0)
        self._shifted = pieces.take(rows)
        self.tensors: list[torch.Tensor] = []
        """One for each dtype that shifted pieces are served in."""
        served = served_dtypes(self._shifted)
        storage, dtype, offset, stride = (
            each.copy() for each in (pieces.storage, pieces.dtype, pieces.offset, pieces.stride)
        )
        kinds: list[int] = np.unique(served).tolist()
        for kind in kinds:
            here = rows[served == kind]
            sizes = -(-pieces.boxes.sizes[here] * ITEM_SIZES[kind] // 16) * 16 // ITEM_SIZES[kind]
            storage[here], dtype[here] = storages + len(self.tensors), kind
            offset[here] = np.cumsum(sizes) - sizes
            stride[here] = packed_strides(pieces.boxes.extents[here])
            self.tensors.append(torch.zeros(int(sizes.sum()), dtype=getattr(torch, DTYPES[kind]), device=device))
        self.pieces = replace(
            pieces, storage=storage, dtype=dtype, offset=offset, stride=stride, shift=np.zeros_like(pieces.shift)
        )
        self._mirrored = self.pieces.take(rows)
        self._storages = storages

    @torch.no_grad()
    def refresh(self, storages: Sequence[torch.Tensor]) -> None:
        """Copy what the pieces hold now, with their shifts added as they are when buckets are assembled."""
        for row in range(len(self._shifted)):
            piece, copy = self._shifted.at(row), self._mirrored.at(row)
            source, target = storages[piece.view.storage], self.tensors[copy.view.storage - self._storages]
            trained = source.as_strided(
                piece.box.shape, piece.view.strides, source.storage_offset() + piece.view.offset
            )
            target.as_strided(copy.box.shape, copy.view.strides, copy.view.offset).copy_(trained + piece.shift)
