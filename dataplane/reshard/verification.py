"""Verification that the workers of one engine hold a version: what each digests, and what the sums must be. Pure.

The digest table has one digest for each whole tensor; workers hold boxes, some of them in several places. All boxes of
all workers are cut along each other's borders into *atoms*. Every place that holds an atom must give the same sums, and
the sums of a tensor's atoms, each counted once, must be the tensor's digest: then every place is right.

Boxes that are no whole words (box_digests.py), or that hold the tensor in another dtype, are read back and assembled;
they are few and small, or the engine is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Final

import numpy as np

from ..copy import (
    Assembly,
    BoxTable,
    CopyTable,
    Lanes,
    digest_from_parts,
    make_box_table,
    odd_boxes,
    pack_boxes,
)
from ..digest import tensor_digest as integrity
from ..errors import DigestMismatch, NotTraceable, TransferFailed
from ..tensors import (
    DTYPES,
    Box,
    Boxes,
    Column,
    DigestTable,
    Shards,
    TensorSpec,
    find_overlap,
    intersect,
    served_dtypes,
    volumes,
)
from .load_trace import LoadTrace, NotCopiedCause, StagedTensor
from .reshard_plan import staging_layout

MOST_ODD_BYTES: Final = 64 * 1024 * 1024
"""Bytes of odd boxes that are read back in each round. Beyond, another transport is faster."""

_WIDER: Final = {
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float64"),
    ("float16", "float64"),
    ("float32", "float64"),
}
_RANGES: Final = {"float16": 0, "bfloat16": 1, "float32": 1, "float64": 2}
"""By dtype, its largest value: a cast to a smaller one makes infinities."""


@dataclass(frozen=True, eq=False)
class RankVerification:
    """The digest report of one worker: what it digests, and how its sums are read."""

    table: BoxTable
    """A group for each place that holds an atom (instance)."""
    atom: Column
    """(instances,): the atom of each instance."""
    odd: CopyTable
    """Copies of the odd boxes into one buffer, in the served dtype."""
    odd_shards: Shards
    """The boxes in that buffer, packed one after another; `offset` counts bytes."""
    odd_bytes: int


@dataclass(frozen=True, eq=False)
class Verification:
    """The verification of all workers of one engine."""

    tensors: tuple[TensorSpec, ...]
    atoms: Boxes
    ranks: tuple[RankVerification, ...]
    odd: tuple[int, ...]
    """Tensors that are assembled from the boxes read back."""

    def renumbered(self, tensors: Sequence[TensorSpec], places: Column) -> Verification:
        """The same with the tensors in the order of `tensors`; `places`, (tensors,), is the new index of each."""
        return replace(
            self,
            tensors=tuple(tensors),
            atoms=replace(self.atoms, space=places[self.atoms.space]),
            ranks=tuple(replace(rank, odd_shards=rank.odd_shards.renumbered(tensors, places)) for rank in self.ranks),
            odd=tuple(sorted(places[list(self.odd)].tolist())),
        )

    @cached_property
    def _reading(self) -> _Reading:
        return _reading(self)

    @cached_property
    def _groups(self) -> tuple[Column, Column]:
        """(verified,): the tensors that atoms are of; (atoms,): which of them each atom is a part of."""
        proven, group = np.unique(self.atoms.space, return_inverse=True)
        return proven, group

    @cached_property
    def _sizes(self) -> Column:
        """(verified,): bytes."""
        indexes: list[int] = self._groups[0].tolist()
        return np.array([self.tensors[index].nbytes for index in indexes], np.int64)

    def verify(self, table: DigestTable, lanes: Sequence[Lanes], odd: Sequence[bytes]) -> None:
        """Raise `DigestMismatch` unless the workers' sums and odd bytes agree with the digest table, in every place.

        A server may be paused meanwhile: values that depend on the layout alone are computed once.
        """
        reading = self._reading
        for number, (rank, each) in enumerate(zip(self.ranks, lanes, strict=True)):
            if each.shape != (2, len(rank.atom)):
                raise ValueError(f"worker {number} reported {each.shape} sums, expected 2 for {len(rank.atom)} boxes")
        sums = np.concatenate(lanes, axis=1)
        agreed = np.array_equal(sums[:, reading.again], sums[:, reading.before])
        totals = np.take(sums, reading.by_tensor, axis=1)  # a fancy index takes six times as long
        if 0 < len(reading.begins) < totals.shape[1]:
            totals = np.add.reduceat(totals, reading.begins, axis=1)
        digests = integrity.finish_digests(totals, self._sizes)
        if not agreed or digests != reading.of(table.tensors):
            self._explain(table, lanes)
        if self.odd:
            self._verify_odd(table, odd)

    @cached_property
    def _assembly(self) -> Assembly:
        return Assembly.of([rank.odd_shards for rank in self.ranks], self.odd)

    def _verify_odd(self, table: DigestTable, odd: Sequence[bytes]) -> None:
        expected = np.frombuffer(table.tensors, np.uint8).reshape(-1, integrity.DIGEST_BYTES)[list(self.odd)]
        if self._assembly.digests(odd) == expected.tobytes():
            return
        packs = [rank.odd_shards for rank in self.ranks]
        for index in self.odd:
            self._compare(table, index, digest_from_parts(packs, index, odd, "worker"))
        raise AssertionError("odd boxes that are not what they must be, and no tensor that is wrong")

    def _explain(self, table: DigestTable, lanes: Sequence[Lanes]) -> None:
        """Raise for the first box that differs between workers, or the first tensor that differs from the table."""
        found = np.zeros((2, len(self.atoms)), np.uint64)
        for rank, sums in zip(self.ranks, lanes, strict=True):
            found[:, rank.atom] = sums
        for number, (rank, sums) in enumerate(zip(self.ranks, lanes, strict=True)):
            differs = np.flatnonzero((found[:, rank.atom] != sums).any(axis=0))
            if len(differs):
                self._disagree(number, int(rank.atom[differs[0]]), found, sums[:, differs[0]])
        proven, group = self._groups
        totals = np.zeros((2, len(proven)), np.uint64)
        for lane in (0, 1):
            np.add.at(totals[lane], group, found[lane])
        digests = np.frombuffer(integrity.finish_digests(totals, self._sizes), np.uint8).reshape(
            -1, integrity.DIGEST_BYTES
        )
        expected = np.frombuffer(table.tensors, np.uint8).reshape(-1, integrity.DIGEST_BYTES)[proven]
        wrong = np.flatnonzero((digests != expected).any(axis=1))
        if len(wrong):
            self._compare(table, int(proven[wrong[0]]), digests[wrong[0]].tobytes())
        raise AssertionError("sums that are not what they must be, and no tensor that is wrong")

    def _disagree(self, rank: int, atom: int, found: Lanes, sums: Lanes) -> None:
        box = self.atoms.at(atom)
        name = self.tensors[int(self.atoms.space[atom])].name
        raise DigestMismatch(
            f"{name}[{box.start}..{box.stop}] on worker {rank}", sums.tobytes().hex(), found[:, atom].tobytes().hex()
        )

    def _compare(self, table: DigestTable, index: int, found: bytes) -> None:
        expected = table.tensors[16 * index : 16 * index + 16]
        if found != expected:
            raise DigestMismatch(self.tensors[index].name, found.hex(), expected.hex())


@dataclass(frozen=True, eq=False)
class _Reading:
    """How the sums of all workers, concatenated, are read."""

    again: Column
    """Instances of an atom that has an earlier instance; and that one, at the same position of `before`."""
    before: Column
    by_tensor: Column
    """(atoms,): one instance of each atom, grouped by tensor, in the order of the tensors."""
    begins: Column
    """(verified,): where each tensor begins there."""
    proven: Column | None
    """(verified,): the tensors; None: all of the manifest."""

    def of(self, digests: bytes) -> bytes:
        """The digests of the verified tensors."""
        if self.proven is None:
            return digests
        return np.frombuffer(digests, np.uint8).reshape(-1, integrity.DIGEST_BYTES)[self.proven].tobytes()


def _reading(proof: Verification) -> _Reading:
    atom = np.concatenate([rank.atom for rank in proof.ranks])
    first = np.full(len(proof.atoms), len(atom), np.int64)
    np.minimum.at(first, atom, np.arange(len(atom)))
    again = np.flatnonzero(first[atom] != np.arange(len(atom)))
    order = np.argsort(proof.atoms.space, kind="stable")
    proven, begins = np.unique(proof.atoms.space[order], return_index=True)
    everything = len(proven) == len(proof.tensors)
    return _Reading(again, first[atom[again]], first[order], begins, None if everything else proven)


def verifiable_trace(trace: LoadTrace) -> LoadTrace:
    """The trace, with tensors whose cast loses bits staged for the engine's loader.

    The stored value does not show the lost bits; the staged tensor does. See `check_ranges`.
    """
    copies = trace.copies
    served, stored = served_dtypes(copies), copies.dtype
    cast = np.flatnonzero(served != stored)
    rows: list[int] = cast.tolist()
    pairs = zip(rows, served[cast].tolist(), stored[cast].tolist(), strict=True)
    casts: set[tuple[int, str, str]] = {
        (int(copies.boxes.space[row]), DTYPES[one], DTYPES[other]) for row, one, other in pairs
    }
    lossy = [each for each in sorted(casts, key=_narrowest_first) if each[1:] not in _WIDER]
    if not lossy:
        return trace
    loaded = {each.tensor: each for each in trace.loaded}
    for index, one, other in lossy:
        detail = f"a cast that loses bits, from {one} to {other}"
        loaded.setdefault(index, StagedTensor(index, NotCopiedCause.COMPUTED, detail, held=other))
    kept = np.flatnonzero(~np.isin(copies.boxes.space, [index for index, _, _ in lossy]))
    return replace(trace, copies=copies.take(kept), loaded=tuple(loaded[index] for index in sorted(loaded)))


def _narrowest_first(cast: tuple[int, str, str]) -> tuple[int, int]:
    index, _, held = cast
    return index, _RANGES.get(held, -1)


def check_ranges(trace: LoadTrace) -> None:
    """Raise `TransferFailed` for a tensor whose values the engine may not have: large ones would become infinite.

    Of a version that is rounded the staged tensors are proven, and rounding them is the engine's own; of one that
    overflows nothing tells what the engine would serve.
    """
    for each in trace.loaded:
        spec = trace.tensors[each.tensor]
        if _RANGES.get(each.held, 2) < _RANGES.get(spec.dtype, 2):
            raise TransferFailed(
                f"{spec.name!r} would be cast from {spec.dtype} to {each.held} in the engine, where large values become"
                f" infinite: serve it in {each.held} (dtype= of the trainer's source), or launch the engine in"
                f" {spec.dtype}"
            )


def make_verification(traces: Sequence[LoadTrace]) -> Verification:
    """The verification of workers with these traces, in the order of their ranks. Raises `NotTraceable`."""
    tensors = traces[0].tensors
    held = [_held(trace) for trace in traces]
    odd = np.unique(np.concatenate([each.boxes.space[odd_boxes(each)] for each, _, _ in held]))
    even = [np.flatnonzero(~np.isin(each.boxes.space, odd)) for each, _, _ in held]
    atoms = _atoms([each.boxes.take(rows) for (each, _, _), rows in zip(held, even, strict=True)])
    _complete(tensors, atoms, odd, [each.boxes for each, _, _ in held])
    ranks = tuple(
        _rank_proof(each, region, begin, rows, atoms, np.flatnonzero(np.isin(each.boxes.space, odd)))
        for (each, region, begin), rows in zip(held, even, strict=True)
    )
    if max(rank.odd_bytes for rank in ranks) > MOST_ODD_BYTES:
        first: list[int] = odd[:3].tolist()
        names = ", ".join(tensors[index].name for index in first)
        raise NotTraceable(
            f"{max(rank.odd_bytes for rank in ranks)} bytes of {len(odd)} tensors ({names} ..) lie in boxes that are "
            "no multiple of 8 bytes and cannot be digested in place: let this engine take the local transport"
        )
    return Verification(tensors, atoms, ranks, tuple(odd.tolist()))


def _held(trace: LoadTrace) -> tuple[Shards, Column, Column]:
    """All boxes of served tensors that a worker holds: its copies, and whole staged tensors behind its targets."""
    staging, _ = staging_layout(trace.tensors, trace.staged)
    shards = Shards.join((trace.copies, replace(staging, storage=np.zeros(len(staging), np.int64))))
    region = np.concatenate([trace.copies.storage, np.full(len(staging), len(trace.targets))])
    begin = np.concatenate([np.zeros(len(trace.copies), np.int64), staging.storage])
    return shards, region, begin


def _atoms(boxes: Sequence[Boxes]) -> Boxes:
    """Disjoint boxes of which each of `boxes` is a union."""
    axes = max(each.start.shape[1] for each in boxes)
    rows = [np.concatenate([each.space[:, None], each.start, each.stop], axis=1) for each in boxes]
    distinct = np.unique(np.concatenate(rows), axis=0)
    apart = Boxes(distinct[:, 0], distinct[:, 1 : 1 + axes], distinct[:, 1 + axes :])
    if not len(apart) or find_overlap(apart) is None:
        return apart
    one, other, _ = intersect(apart, apart)
    mixed = np.unique(apart.space[one[one != other]])
    kept = apart.take(np.flatnonzero(~np.isin(apart.space, mixed)))
    cells = [cell for space in mixed.tolist() for cell in _cells(apart.take(np.flatnonzero(apart.space == space)))]
    return Boxes(
        np.concatenate([kept.space, np.array([space for space, _, _ in cells], np.int64)]),
        np.concatenate([kept.start, np.array([start for _, start, _ in cells], np.int64).reshape(-1, axes)]),
        np.concatenate([kept.stop, np.array([stop for _, _, stop in cells], np.int64).reshape(-1, axes)]),
    )


def _cells(boxes: Boxes) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The cells of the grid drawn by the borders of these boxes of one tensor, where any box holds them."""
    borders = [
        np.unique(np.concatenate([boxes.start[:, axis], boxes.stop[:, axis]])).tolist()
        for axis in range(boxes.start.shape[1])
    ]
    found: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for place in product(*(range(len(each) - 1) for each in borders)):
        start = tuple(each[at] for each, at in zip(borders, place, strict=True))
        stop = tuple(each[at + 1] for each, at in zip(borders, place, strict=True))
        if bool(((boxes.start <= start) & (boxes.stop >= stop)).all(axis=1).any()):
            found.append((int(boxes.space[0]), start, stop))
    return found


def _complete(tensors: Sequence[TensorSpec], atoms: Boxes, odd: Column, held: Sequence[Boxes]) -> None:
    """Raise `NotTraceable` for a tensor that the workers hold only partly: its digest is that of the whole."""
    found = volumes(atoms, len(tensors))
    parts: Mapping[int, list[Box]] = defaultdict(list)
    for boxes in held:
        for row in np.flatnonzero(np.isin(boxes.space, odd)).tolist():
            parts[int(boxes.space[row])].append(boxes.at(row))
    for index in odd.tolist():
        rest = [Box(part.start, part.stop) for part in parts[index][:1]]
        for part in parts[index][1:]:
            shards = [part]
            for known in rest:
                shards = [each for one in shards for each in one.subtract(known)]
            rest.extend(shards)
        found[index] = sum(part.size for part in rest)
    for index in np.flatnonzero(found).tolist():
        spec = tensors[index]
        if found[index] != prod(spec.shape):
            raise NotTraceable(
                f"the engine keeps {found[index]} of {prod(spec.shape)} elements of {spec.name!r}, which cannot be "
                "compared with the digest of the whole tensor: let this engine take the local transport"
            )


def _rank_proof(  # noqa: PLR0917 - everything that is known of one worker
    shards: Shards, region: Column, begin: Column, even: Column, atoms: Boxes, odd: Column
) -> RankVerification:
    rows, which, common = intersect(shards.boxes.take(even), atoms)
    instances = shards.within(common, even[rows])
    table = make_box_table(instances, region[even[rows]], begin[even[rows]], np.arange(len(rows)), len(rows))
    read = pack_boxes(shards.take(odd), region[odd], begin[odd])
    return RankVerification(table, which, read.copies, read.boxes, read.nbytes)
