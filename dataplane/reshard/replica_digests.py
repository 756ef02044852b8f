"""Comparison of the replicas of a model: the parts that several ranks hold must be the same bytes on all of them.

Norms are replicated over tensor parallelism, everything over data parallelism, dense layers over expert parallelism. A
round reads each element from one of its ranks (digest_shares.py), so replicas that an optimizer has let drift apart are
served as that one rank has them, and no digest of what is served can tell.

A *unit* is a box of one tensor that at least two ranks hold. Units are cut along the borders of all boxes only where
boxes of two ranks overlap in part, which few layouts have. Each rank digests its memory of each of its units in place,
as it is kept, and sends one table of 16 bytes for each. Units that are no whole words, or that ranks keep in
different dtypes, are packed first, the latter as they are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ..copy import ITEM_SIZES, PACKED_ALIGNMENT, CopyEngine, make_box_table, odd_boxes, pack_boxes
from ..digest import DIGEST_BYTES, tensor_digest as integrity
from ..memory import bytes_of, sizes_of
from ..tensors import DTYPES, Column, Shards, factorize, intersect
from .digest_shares import PASS_BYTES, batches

SHOWN: Final = 8
"""Differing tensors that are told by name."""
_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class DifferingTensor:
    """A tensor whose replicas are not equal."""

    index: int
    """Of the tensor, in `ReplicaUnits.shards`."""
    ranks: tuple[tuple[int, ...], ...]
    """Ranks that hold the first unequal part of it: those that agree side by side, the first rank's before others."""


@dataclass(frozen=True, eq=False)
class ReplicaUnits:
    """The units of all ranks. Every rank computes them from the same shards."""

    shards: Shards
    """A row for each unit and each rank that holds it, by unit and rank. Tensors are in the dtype that is digested."""
    unit: Column
    """(rows,): number of the unit."""
    packed: npt.NDArray[np.bool_]
    """(rows,): the unit is packed before it is digested."""

    def of_rank(self, rank: int) -> ReplicaUnits:
        """The rows of one rank."""
        rows = np.flatnonzero(self.shards.rank == rank)
        return ReplicaUnits(self.shards.take(rows), self.unit[rows], self.packed[rows])

    def differing(self, tables: Sequence[bytes]) -> tuple[int, tuple[DifferingTensor, ...]]:
        """How many tensors have replicas that differ, and the first few, from the digests of each rank's units.

        Raises `ValueError` for a table of another length than its rank has units.
        """
        values = np.zeros((len(self.unit), 2), np.uint64)
        for rank, table in enumerate(tables):
            mine = np.flatnonzero(self.shards.rank == rank)
            if len(table) != DIGEST_BYTES * len(mine):
                raise ValueError(f"rank {rank} gave {len(table)} bytes of digests, it has {len(mine)} units")
            values[mine] = np.frombuffer(table, "<u8").reshape(-1, 2)
        heads = np.flatnonzero(np.diff(self.unit, prepend=-1))
        ends = np.append(heads[1:], len(self.unit))
        odd = np.unique(self.unit[(values != values[np.repeat(heads, ends - heads)]).any(axis=1)])
        spaces, first = np.unique(self.shards.boxes.space[heads[odd]], return_index=True)
        shown = zip(
            spaces[:SHOWN].tolist(), heads[odd[first[:SHOWN]]].tolist(), ends[odd[first[:SHOWN]]].tolist(), strict=True
        )
        return len(spaces), tuple(
            DifferingTensor(space, self._sides(values, range(begin, end))) for space, begin, end in shown
        )

    def _sides(self, values: npt.NDArray[np.uint64], rows: range) -> tuple[tuple[int, ...], ...]:
        sides: dict[bytes, list[int]] = {}
        for row in rows:
            sides.setdefault(values[row].tobytes(), []).append(int(self.shards.rank[row]))
        return tuple(tuple(ranks) for ranks in sides.values())


def find_replicas(shards: Shards) -> ReplicaUnits:
    """The units of `shards`, of all ranks, replicas included."""
    units, unit = _units(shards)
    dtypes, mixed = _digested_dtypes(units)
    specs = zip(units.tensors, dtypes.tolist(), strict=True)
    tensors = tuple(
        spec if DTYPES[dtype] == spec.dtype else msgspec.structs.replace(spec, dtype=DTYPES[dtype])
        for spec, dtype in specs
    )
    # Every rank adds the same number to an element before it is served: what is kept may be compared.
    as_kept = replace(units, tensors=tensors, shift=np.zeros_like(units.shift))
    odd = np.zeros(int(unit.max(initial=-1)) + 1, bool)
    odd[unit[odd_boxes(as_kept)]] = True
    odd[unit[mixed[as_kept.boxes.space]]] = True
    return ReplicaUnits(as_kept, unit, odd[unit])


def _units(shards: Shards) -> tuple[Shards, Column]:
    """A row for each unit and rank, and the unit of each row."""
    box = np.column_stack((shards.boxes.space, shards.boxes.start, shards.boxes.stop))
    _, alike = np.unique(box, axis=0, return_inverse=True)
    number, firsts = factorize(alike.reshape(-1))
    parts = [(shards, number)]
    distinct = shards.boxes.take(firsts)
    one, other, common = intersect(distinct, distinct)
    partly = np.flatnonzero(one < other)
    if len(partly):
        # The common part of two boxes, from every rank that holds either.
        order = np.argsort(number, kind="stable")
        count = np.bincount(number)
        begin = np.cumsum(count) - count
        for extra, (a, b, at) in enumerate(
            zip(one[partly].tolist(), other[partly].tolist(), partly.tolist(), strict=True)
        ):
            holders = np.concatenate([order[begin[each] : begin[each] + count[each]] for each in (a, b)])
            cut = common.take(np.full(len(holders), at))
            parts.append((shards.within(cut, holders), np.full(len(holders), len(firsts) + extra)))
    every = Shards.join([part for part, _ in parts])
    unit: Column = np.concatenate([each for _, each in parts])
    order = np.lexsort((every.rank, unit))
    every, unit = every.take(order), unit[order]
    # A rank that holds a box twice, as tied weights, gives it once.
    once = np.ones(len(unit), bool)
    once[1:] = (unit[1:] != unit[:-1]) | (every.rank[1:] != every.rank[:-1])
    every, unit = every.take(np.flatnonzero(once)), unit[once]
    several = np.flatnonzero(np.bincount(unit)[unit] > 1) if len(unit) else _NONE
    number = np.unique(unit[several], return_inverse=True)[1].reshape(-1)
    return every.take(several), number.astype(np.int64)


def _digested_dtypes(units: Shards) -> tuple[Column, npt.NDArray[np.bool_]]:
    """(tensors,): the dtype in which each is digested, by number; and whether ranks keep it in different ones."""
    count = len(units.tensors)
    served = np.array([DTYPES.index(spec.dtype) for spec in units.tensors], np.int64)
    low, high = np.full(count, len(DTYPES)), np.full(count, -1)
    np.minimum.at(low, units.boxes.space, units.dtype)
    np.maximum.at(high, units.boxes.space, units.dtype)
    mixed = (high >= 0) & (low != high)
    return np.where((high >= 0) & ~mixed, high, served), mixed


def digest_replicas(
    mine: ReplicaUnits, tensors: Sequence[torch.Tensor], device: torch.device, engine: CopyEngine
) -> bytes:
    """Digests of one rank's units, in their order. `tensors` are numbered as `storage` in shards, on `device`."""
    found = np.zeros((len(mine.unit), 2), "<u8")
    if not len(found):
        return b""
    regions = [bytes_of(tensor) for tensor in tensors]
    sizes = sizes_of(regions)
    plain, packed = np.flatnonzero(~mine.packed), np.flatnonzero(mine.packed)
    if len(plain):
        shards = mine.shards.take(plain)
        zeros = np.zeros(len(plain), np.int64)
        table = make_box_table(shards, shards.storage, zeros, np.arange(len(plain)), len(plain))
        table.check(sizes)
        digest = engine.prepare_digest(table, regions)
        nbytes = shards.boxes.sizes * ITEM_SIZES[shards.dtype]
        found[plain] = np.frombuffer(integrity.finish_digests(digest.run(), nbytes), "<u8").reshape(-1, 2)
        digest.close()
    for rows in batches(mine.shards.take(packed), PASS_BYTES):
        shards = mine.shards.take(packed[rows])
        zeros = np.zeros(len(rows), np.int64)
        pack = pack_boxes(shards, shards.storage, zeros)
        buffer = torch.zeros(-(-pack.nbytes // PACKED_ALIGNMENT) * PACKED_ALIGNMENT, dtype=torch.uint8, device=device)
        pack.copies.check(sizes, sizes_of([buffer]))
        copies = engine.prepare_copies(pack.copies, regions, [buffer])
        copies.run()
        # What pads a box is zero and counts: the same on every rank that packs it.
        bounds = [*pack.boxes.offset.tolist(), len(buffer)]
        found[packed[rows]] = np.frombuffer(integrity.digest_tensors(buffer, bounds), "<u8").reshape(-1, 2)
        copies.close()
    return found.tobytes()
