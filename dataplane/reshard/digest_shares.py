"""The digests of a model from the memory that it is trained in: the share of each rank, and the sum of all.

Every element is read by one of the ranks that hold it. A rank digests the boxes of its share in place, or, where it
holds them in another dtype than the served one, as they will be served. The sums of all ranks are the digest of each
tensor (box_digests.py), so no tensor is gathered. Only tensors with a box that is no whole number of words are
assembled, byte by byte; they are few and small. Elements that are no finite numbers are counted in the same pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import torch

from ..copy import (
    ITEM_SIZES,
    BoxTable,
    CopyEngine,
    CopyTable,
    Lanes,
    PackedBoxes,
    PreparedCopies,
    PreparedDigest,
    make_box_table,
    odd_boxes,
    pack_boxes,
    tensor_from_parts,
)
from ..digest import Words, masks_of, tensor_digest as integrity
from ..errors import ManifestError, Unsupported
from ..memory import bytes_of, sizes_of
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
    masks: Words
    """(all tensors,): those of their served dtypes (nonfinite.py)."""


@dataclass(frozen=True, eq=False)
class ShareSums:
    """What one rank found in its share."""

    lanes: Lanes
    """(2, tensors of the share) uint64."""
    odd: bytes
    """Its odd boxes."""
    nonfinite: dict[int, int] = field(default_factory=dict[int, int])
    """By tensor: elements that are NaN or infinite. Odd boxes are not counted yet."""


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
            passes=tuple(_pass(wide.take(rows)) for rows in batches(wide, pass_bytes)),
            odd=pack_boxes(odd, odd.storage, np.zeros(len(odd), np.int64)),
            masks=masks_of([spec.dtype for spec in self.chosen.tensors]),
        )

    def digests(self, found: Sequence[ShareSums]) -> tuple[bytes, dict[int, int]]:
        """The digest of every tensor, from what each rank found in its share; and `ShareSums.nonfinite` of all.

        Raises `ManifestError` when a rank gave sums of other tensors than its share has.
        """
        totals = np.zeros((2, len(self.chosen.tensors)), np.uint64)
        nonfinite: Counter[int] = Counter()
        for rank, each in enumerate(found):
            own = self._own.get(rank, _NONE)
            if each.lanes.shape != (2, len(own)):
                raise ManifestError(f"rank {rank} gave sums of {each.lanes.shape[-1]} tensors, {len(own)} fell to it")
            totals[:, own] += each.lanes
            nonfinite.update(each.nonfinite)
        digests = bytearray(integrity.finish_digests(totals, self._sizes))
        if len(self.odd):
            packs = [self._odd_of(rank) for rank in range(len(found))]
            odd = [each.odd for each in found]
            for index in self.odd.tolist():
                whole = torch.from_numpy(tensor_from_parts(packs, index, odd, "trainer rank"))  # pyright: ignore[reportUnknownMemberType]
                mask = masks_of([str(self.chosen.tensors[index].dtype)])  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
                digest, count = integrity.digest_and_count(whole, (0, len(whole)), mask)
                digests[16 * index : 16 * index + 16] = digest
                nonfinite[index] += int(count[0])
        return bytes(digests), {index: count for index, count in sorted(nonfinite.items()) if count}

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


def batches(shards: Shards, nbytes: int) -> list[Column]:
    """Rows of the shards, in their order, as many at a time as fill `nbytes`; a larger one has a batch of its own."""
    ends = np.cumsum(shards.boxes.sizes * ITEM_SIZES[served_dtypes(shards)])
    batch = (ends - 1) // nbytes
    return [np.flatnonzero(batch == number) for number in np.unique(batch).tolist()]


def _pass(shards: Shards) -> DigestPass:
    begin = np.zeros(len(shards), np.int64)
    cast = pack_boxes(shards, shards.storage, begin)
    lying = replace(cast.boxes, offset=begin)
    return DigestPass(cast.copies, make_box_table(lying, begin, cast.boxes.offset), cast.nbytes)


PASS_BYTES: Final = 256 * 1024 * 1024
"""Bytes of the buffer into which masters of another dtype are cast, a part at a time."""


@dataclass(frozen=True, eq=False)
class _Bound:
    copies: PreparedCopies
    digest: PreparedDigest


class ShareDigester:
    """One rank's share bound to its memory, which must not move."""

    def __init__(
        self, share: DigestShare, tensors: Sequence[torch.Tensor], device: torch.device, engine: CopyEngine
    ) -> None:
        """`tensors` are numbered as `storage` in shards."""
        regions = [bytes_of(tensor) for tensor in tensors]
        sizes = sizes_of(regions)
        self._tensors = share.tensors
        self._buffer = torch.empty(
            max((each.nbytes for each in share.passes), default=0), dtype=torch.uint8, device=device
        )
        self._odd = torch.empty(share.odd.nbytes, dtype=torch.uint8, device=device)
        buffers = sizes_of([self._buffer])
        share.in_place.check(sizes)
        share.odd.copies.check(sizes, sizes_of([self._odd]))
        self._in_place = engine.prepare_digest(share.in_place, regions, share.masks)
        self._pack_odd = engine.prepare_copies(share.odd.copies, regions, [self._odd])
        self._passes: list[_Bound] = []
        for each in share.passes:
            each.copies.check(sizes, buffers)
            each.boxes.check(buffers)
            copies = engine.prepare_copies(each.copies, regions, [self._buffer])
            self._passes.append(_Bound(copies, engine.prepare_digest(each.boxes, [self._buffer], share.masks)))

    def begin(self) -> None:
        """Start to read the memory, on the current stream. Asynchronous on a GPU.

        Writes on other streams must have ended.
        """
        self._in_place.launch()
        for each in self._passes:  # they share the buffer: the stream keeps them apart
            each.copies.launch()
            each.digest.launch()
        self._pack_odd.launch()

    def result(self) -> ShareSums:
        """What the last `begin` found. Blocks until it is there."""
        lanes, counts = self._in_place.lanes(), self._in_place.counts()
        for each in self._passes:
            lanes, counts = lanes + each.digest.lanes(), counts + each.digest.counts()
        found: Lanes = np.ascontiguousarray(lanes[:, self._tensors])
        odd: list[int] = np.flatnonzero(counts).tolist()
        return ShareSums(found, self._odd.cpu().numpy().tobytes(), {index: int(counts[index]) for index in odd})

    def run(self) -> ShareSums:
        """`begin` and `result`."""
        self.begin()
        return self.result()

    def close(self) -> None:
        """Release the memory."""
        for each in self._passes:
            each.copies.close()
            each.digest.close()
        self._passes = []
        self._pack_odd.close()
        self._in_place.close()
