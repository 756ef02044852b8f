"""The digests of a model from the memory that it is trained in: the share of each rank, and the sum of all. Pure.

Every element is read by one of the ranks that hold it. A rank digests the boxes of its share in place, or, where it
holds them in another dtype than the served one, as they will be served. The sums of all ranks are the digest of each
tensor (box_digests.py), so no tensor is gathered. Only tensors with a box that is no whole number of words are
assembled, byte by byte; they are few and small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from ..copy import (
    ITEM_SIZES,
    BoxTable,
    CopyTable,
    Lanes,
    PackedBoxes,
    assemble_tensor,
    digest_packed_tensor,
    make_box_table,
    odd_boxes,
    pack_boxes,
    unpack_boxes,
)
from ..digest import tensor_digest as integrity
from ..errors import ManifestError, Unsupported
from ..quantize import fully_summed_tensors
from ..tensors import Column, Shards, check_exact_cover, choose_replicas, packed_strides, served_dtypes

MOST_ODD_BYTES: Final = 64 * 1024 * 1024
"""Bytes of odd boxes that ranks may send each other in a round. Beyond, assembling buckets is no slower."""


_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class DigestPass:
    """Boxes that are cast into a buffer, and digested there."""

    copies: CopyTable
    boxes: BoxTable
    nbytes: int


@dataclass(frozen=True, eq=False)
class DigestShare:
    """The share of one rank. Regions are its local tensors, by `storage`; those of passes are the buffer."""

    tensors: Column
    """The tensors of which it gives sums, ascending."""
    in_place: BoxTable
    passes: tuple[DigestPass, ...]
    odd: PackedBoxes


@dataclass(frozen=True, eq=False)
class DigestDivision:
    """The shares of all ranks. Every rank computes it from the same shards."""

    chosen: Shards
    odd: Column
    """(odd,): tensors that are assembled."""

    def known(self, rank: int, summed: Shards) -> Column:
        """The tensors whose share `rank` need not read: it has just summed all of it while quantizing.

        `summed` are disjoint shards of that rank, of the same tensors.
        """
        return np.setdiff1d(fully_summed_tensors(self.chosen.of_rank(rank), summed), self.odd)

    def share(self, rank: int, pass_bytes: int, known: Column = _NONE) -> DigestShare:
        """The share of `rank`, which casts about `pass_bytes` at a time, and does not read its part of `known`."""
        mine = self.chosen.of_rank(rank)
        apart = np.isin(mine.boxes.space, self.odd)
        cast = ~apart & (mine.dtype != served_dtypes(mine))
        even = mine.take(np.flatnonzero(~apart & ~cast & ~np.isin(mine.boxes.space, known)))
        wide = mine.take(np.flatnonzero(cast))
        odd = mine.take(np.flatnonzero(apart))
        return DigestShare(
            tensors=np.unique(mine.boxes.space[~apart]),
            in_place=make_box_table(even, even.storage, np.zeros(len(even), np.int64)),
            passes=tuple(_pass(part) for part in _batches(wide, pass_bytes)),
            odd=pack_boxes(odd, odd.storage, np.zeros(len(odd), np.int64)),
        )

    def digests(self, lanes: Sequence[Lanes], odd: Sequence[bytes]) -> bytes:
        """The digest of every tensor, from each rank's sums of its `DigestShare.tensors` and its odd bytes.

        Raises `ManifestError` when a rank gave sums of other tensors than its share has.
        """
        totals = np.zeros((2, len(self.chosen.tensors)), np.uint64)
        for rank, sums in enumerate(lanes):
            own = self._own.get(rank, _NONE)
            if sums.shape != (2, len(own)):
                raise ManifestError(f"rank {rank} gave sums of {sums.shape[-1]} tensors, {len(own)} fell to it")
            totals[:, own] += sums
        found = bytearray(integrity.finish_digests(totals, self._sizes))
        if len(self.odd):
            packs = [self._odd_of(rank) for rank in range(len(odd))]
            for index in self.odd.tolist():
                found[16 * index : 16 * index + 16] = self._put_together(index, packs, odd)
        return bytes(found)

    @cached_property
    def _sizes(self) -> Column:
        """(tensors,): bytes."""
        return np.array([spec.nbytes for spec in self.chosen.tensors], np.int64)

    @cached_property
    def _own(self) -> dict[int, Column]:
        """By rank: the tensors of which it gives sums."""
        even = ~np.isin(self.chosen.boxes.space, self.odd)
        ranks: list[int] = np.unique(self.chosen.rank).tolist()
        return {rank: np.unique(self.chosen.boxes.space[even & (self.chosen.rank == rank)]) for rank in ranks}

    def _put_together(self, index: int, packs: Sequence[Shards], odd: Sequence[bytes]) -> bytes:
        parts = [
            part
            for rank, (pack, blob) in enumerate(zip(packs, odd, strict=True))
            for part in unpack_boxes(pack, index, blob, f"trainer rank {rank}")
        ]
        return digest_packed_tensor(assemble_tensor(self.chosen.tensors[index], parts))

    def _odd_of(self, rank: int) -> Shards:
        mine = self.chosen.of_rank(rank)
        mine = mine.take(np.flatnonzero(np.isin(mine.boxes.space, self.odd)))
        return pack_boxes(mine, mine.storage, np.zeros(len(mine), np.int64)).boxes


def divide_digest_work(shards: Shards) -> DigestDivision:
    """Divide the digests of `shards`, of all ranks, replicas included and without shifts, among the ranks.

    Raises `CoverageError` unless they make up every tensor, and `Unsupported` when too much of the model lies in boxes
    that are no whole words.
    """
    chosen = choose_replicas(shards)
    check_exact_cover(chosen)
    served = served_dtypes(chosen)
    alike = served == chosen.dtype
    strides = np.where(alike[:, None], chosen.stride, packed_strides(chosen.boxes.extents))
    as_read = replace(chosen, dtype=served, stride=strides)
    odd = np.unique(chosen.boxes.space[odd_boxes(as_read)])
    indexes: list[int] = odd.tolist()
    nbytes = sum(chosen.tensors[index].nbytes for index in indexes)
    if nbytes > MOST_ODD_BYTES:
        raise Unsupported(
            f"{nbytes} bytes of {len(odd)} tensors ({chosen.tensors[indexes[0]].name} ..) lie in boxes that are no"
            " multiple of 8 bytes, and cannot be digested where they lie"
        )
    return DigestDivision(chosen, odd)


def _batches(shards: Shards, nbytes: int) -> list[Shards]:
    """The shards, in their order, as many at a time as fill `nbytes`; a larger one has a batch of its own."""
    ends = np.cumsum(shards.boxes.sizes * ITEM_SIZES[served_dtypes(shards)])
    batch = (ends - 1) // nbytes
    return [shards.take(np.flatnonzero(batch == number)) for number in np.unique(batch).tolist()]


def _pass(shards: Shards) -> DigestPass:
    begin = np.zeros(len(shards), np.int64)
    cast = pack_boxes(shards, shards.storage, begin)
    lying = replace(cast.boxes, offset=begin)
    return DigestPass(cast.copies, make_box_table(lying, begin, cast.boxes.offset), cast.nbytes)
