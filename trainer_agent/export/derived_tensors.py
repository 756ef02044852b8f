"""Copies, in served form, of the few shards that are not served as they are trained: norms kept around zero.

A reader copies bytes. A shard to which a number is added before it is served is kept with the number added in a derived
tensor of its rank, which is refreshed before every publication and exported like the other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from weightbus.dataplane.copy import ITEM_SIZES
from weightbus.dataplane.tensors import DTYPES, Shards, packed_strides, served_dtypes


class DerivedTensors:
    """Derived tensors of one rank. `shards` are all of its shards, none of them shifted."""

    def __init__(self, shards: Shards, storages: int, device: torch.device) -> None:
        """`storages` is the number of local tensors; derived tensors are numbered after them."""
        rows = np.flatnonzero(shards.shift != 0)
        self._shifted = shards.take(rows)
        self.tensors: list[torch.Tensor] = []
        """One for each dtype in which shifted shards are served."""
        served = served_dtypes(self._shifted)
        storage, dtype, offset, stride = (
            each.copy() for each in (shards.storage, shards.dtype, shards.offset, shards.stride)
        )
        kinds: list[int] = np.unique(served).tolist()
        for kind in kinds:
            here = rows[served == kind]
            sizes = -(-shards.boxes.sizes[here] * ITEM_SIZES[kind] // 16) * 16 // ITEM_SIZES[kind]
            storage[here], dtype[here] = storages + len(self.tensors), kind
            offset[here] = np.cumsum(sizes) - sizes
            stride[here] = packed_strides(shards.boxes.extents[here])
            self.tensors.append(torch.zeros(int(sizes.sum()), dtype=getattr(torch, DTYPES[kind]), device=device))
        self.shards = replace(
            shards, storage=storage, dtype=dtype, offset=offset, stride=stride, shift=np.zeros_like(shards.shift)
        )
        self._mirrored = self.shards.take(rows)
        self._storages = storages

    @torch.no_grad()
    def refresh(self, storages: Sequence[torch.Tensor]) -> None:
        """Copy the current values of the shifted shards, with their shifts added."""
        for row in range(len(self._shifted)):
            shard, copy = self._shifted.at(row), self._mirrored.at(row)
            source, target = storages[shard.view.storage], self.tensors[copy.view.storage - self._storages]
            trained = source.as_strided(
                shard.box.shape, shard.view.strides, source.storage_offset() + shard.view.offset
            )
            target.as_strided(copy.box.shape, copy.view.strides, copy.view.offset).copy_(trained + shard.shift)
