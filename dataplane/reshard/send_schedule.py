"""The send schedule: a plan as messages, what each trainer rank sends to one engine worker in which chunk.

Pure, by column.

A message is a run of bytes on the wire. It is sent straight out of the trainer's storage where the rows of the plan are
contiguous there, and received straight into the engine's parameter where they are contiguous there; other rows are
packed by the sender or unpacked by the receiver, in staging memory of a bounded size. Small rows share a message.

Messages are grouped into *chunks*. In one chunk a pair of ranks moves at most `pair_bytes`, all pairs at a time; a rank
begins its next chunk when it has finished this one. So staging is bounded and no wait is circular: a rank in the
earliest chunk waits only for ranks that have reached it or will.

Both sides make the schedule from the plan that they agreed to, and compare its digest before a byte moves.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

import numpy as np

from ..copy import AXES, ITEM_SIZES, CopyTable
from ..errors import ManifestError
from ..tensors import Column, Table
from .reshard_plan import ReshardPlan

STAGING_BYTES: Final = 256 * 1024 * 1024
"""Bytes that all pairs of one rank may stage in a chunk, unless the group is so large that `MIN_PAIR_BYTES` is more.

Two chunks move at a time.
"""
STAGING_BYTES_ON_GPU: Final = 2 * 1024 * 1024 * 1024
"""On a GPU every chunk has a fixed cost on top of its bytes: half as many are faster (tests/gpu/wire.py)."""
MIN_PAIR_BYTES: Final = 1024 * 1024
ALONE_BYTES: Final = 64 * 1024
"""A row of so many bytes is a message of its own if it is contiguous on either side: a copy would cost more."""
ALONE_BYTES_ON_GPU: Final = 16 * 1024 * 1024
"""On a GPU a copy costs little, and a message of NCCL's several microseconds."""
NOWHERE: Final = -1
"""The region of a message's end that is packed, or unpacked."""
_ALIGNMENT: Final = 16


def pair_bytes_for(ranks: int, device: str = "cpu") -> int:
    """Bytes that one pair may move in a chunk, where the larger side of the group has up to `ranks` ranks on `device`.

    Equal for all numbers up to the next power of two: a member more should not change the others' schedules.
    """
    most = STAGING_BYTES_ON_GPU if device == "cuda" else STAGING_BYTES
    return max(most >> (max(ranks, 1) - 1).bit_length(), MIN_PAIR_BYTES)


def alone_bytes_for(device: str) -> int:
    """Bytes from which on a contiguous row is a message of its own on `device`."""
    return ALONE_BYTES_ON_GPU if device == "cuda" else ALONE_BYTES


@dataclass(frozen=True, eq=False)
class SendMessages(Table):
    """Messages as columns, each int64 of (messages,)."""

    rank: Column
    """The trainer rank that sends it."""
    chunk: Column
    """Ascends for each rank."""
    nbytes: Column
    source: Column
    """The region that it is sent from, or `NOWHERE`: the sender packs it."""
    source_at: Column
    """Byte of the region."""
    target: Column
    """The region that it is received into, or `NOWHERE`: the receiver unpacks it."""
    target_at: Column

    KIND = "messages"

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return int(self.chunk.max()) + 1 if len(self) else 0

    @property
    def ranks(self) -> frozenset[int]:
        """The trainer ranks that send any."""
        return frozenset(np.unique(self.rank).tolist())

    @classmethod
    def decode(cls, blob: bytes, **others: object) -> Self:
        """As `Table.decode`, checked."""
        found = super().decode(blob, **others)
        if len(found) and (found.numbers().min() < NOWHERE or found.nbytes.min() < 1 or found.chunk.min() < 0):
            raise ManifestError("a message is empty, or of a chunk that there is not")
        return found

    def check(self, regions: Column, *, sending: bool) -> None:
        """Raise `ManifestError` unless every unpacked end lies inside one of regions of these sizes, in bytes."""
        region, at = (self.source, self.source_at) if sending else (self.target, self.target_at)
        straight = np.flatnonzero(region != NOWHERE)
        known = region[straight] < len(regions)
        sizes = regions[np.where(known, region[straight], 0)] if len(regions) else np.zeros(len(straight), np.int64)
        inside = known & (at[straight] >= 0) & (at[straight] <= sizes - self.nbytes[straight])
        if not inside.all():
            raise ManifestError(f"message {straight[np.argmin(inside)]} reaches out of its region: plan again")

    def places(self, staged: Column, *, by_chunk: bool) -> tuple[Column, int]:
        """(messages,), and bytes: where each of `staged` (bool) lies in staging memory, and the size that this takes.

        `by_chunk`: every chunk begins at the beginning of the staging memory again.
        """
        room = np.where(staged, _aligned(self.nbytes), 0)
        order = np.argsort(self.chunk, kind="stable")
        ends = np.cumsum(room[order])
        begin = ends - room[order]
        if by_chunk:
            first = np.searchsorted(self.chunk[order], self.chunk[order], side="left")
            begin = begin - begin[first]
        at = np.empty_like(begin)
        at[order] = begin
        return at, int((at + room).max()) if len(self) else 0


@dataclass(frozen=True, eq=False)
class SendSchedule:
    """The messages to one worker from all trainer ranks. Sources are numbered as in its plan."""

    plan: str
    """Digest of that plan."""
    messages: SendMessages
    pack: CopyTable
    """Copies of the sender: `target` numbers messages, `target_at` is a byte of the message."""
    unpack: CopyTable
    """Copies of the receiver: `source` numbers messages. Target regions are the trace's, then the plan's buffer."""

    def digest(self) -> str:
        """SHA-256, hexadecimal. Compared in every round, and computed once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        parts = (self.plan.encode(), self.messages.encode(), self.pack.encode(), self.unpack.encode())
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def of_rank(self, rank: int, plan: ReshardPlan) -> tuple[SendMessages, CopyTable]:
        """The messages of one trainer rank and their packing, sources numbered as its own regions."""
        region = np.array([source.region for source in plan.sources], np.int64)
        rows = np.flatnonzero(self.messages.rank == rank)
        mine = self.messages.take(rows)
        number = np.full(len(self.messages), NOWHERE, np.int64)
        number[rows] = np.arange(len(rows))
        pack = self.pack.take(np.flatnonzero(number[self.pack.target] != NOWHERE))
        straight = mine.source != NOWHERE
        at_home = np.where(straight, region[np.where(straight, mine.source, 0)] if len(region) else 0, NOWHERE)
        return replace(mine, source=at_home), replace(pack, source=region[pack.source], target=number[pack.target])


def make_send_schedule(
    plan: ReshardPlan, targets: int, pair_bytes: int, alone_bytes: int = ALONE_BYTES
) -> SendSchedule:
    """The messages of a plan, for a trace of `targets` targets. The plan's buffer is target number `targets`."""
    to_buffer = replace(plan.staging, target=plan.staging.target + targets)
    rank = np.array([source.rank for source in plan.sources], np.int64)
    rows = _cut(_both(plan.copies, to_buffer), max(pair_bytes // 4, _ALIGNMENT))
    rows = rows.take(np.argsort(rank[rows.source], kind="stable"))
    wire = _wire_dtype(rows)
    nbytes = rows.elements * ITEM_SIZES[wire]
    from_source = _dense(rows, rows.source_step, rows.source_dtype) & (rows.source_dtype == wire)
    to_target = _dense(rows, rows.target_step, rows.target_dtype) & (rows.target_dtype == wire)
    alone = (nbytes >= alone_bytes) & (from_source | to_target)
    message, at = _grouped(rank[rows.source], _aligned(nbytes), alone, max(pair_bytes // 4, _ALIGNMENT))
    count = int(message.max()) + 1 if len(message) else 0
    first = np.searchsorted(message, np.arange(count))
    size = np.zeros(count, np.int64)
    np.maximum.at(size, message, at + nbytes)
    sent, taken = alone & from_source, alone & to_target
    sender = rank[rows.source[first]]
    messages = SendMessages(
        rank=sender,
        chunk=_chunks(sender, _aligned(size), max(pair_bytes // 2, _ALIGNMENT)),
        nbytes=size,
        source=np.where(sent[first], rows.source[first], NOWHERE),
        source_at=np.where(sent[first], rows.source_at[first], 0),
        target=np.where(taken[first], rows.target[first], NOWHERE),
        target_at=np.where(taken[first], rows.target_at[first], 0),
    )
    step = _wire_step(rows, wire)
    pack = replace(rows, target=message, target_at=at, target_dtype=wire, target_step=step)
    unpack = replace(rows, source=message, source_at=at, source_dtype=wire, source_step=step)
    return SendSchedule(plan.digest(), messages, pack.take(np.flatnonzero(~sent)), unpack.take(np.flatnonzero(~taken)))


def _aligned(nbytes: Column) -> Column:
    found: Column = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return found


def _both(one: CopyTable, other: CopyTable) -> CopyTable:
    return CopyTable.of_numbers(np.concatenate([one.numbers(), other.numbers()]))


def _wire_dtype(rows: CopyTable) -> Column:
    """(rows,): the narrower of both, so that a cast costs no bytes on the way; of equal ones the engine's."""
    narrower = ITEM_SIZES[rows.source_dtype] < ITEM_SIZES[rows.target_dtype]
    found: Column = np.where(narrower, rows.source_dtype, rows.target_dtype)
    return found


def _wire_step(rows: CopyTable, dtype: Column) -> Column:
    """(rows, AXES): steps of a grid whose runs are packed."""
    step = np.zeros_like(rows.grid)
    reach = rows.run * ITEM_SIZES[dtype]
    for axis in range(AXES - 1, -1, -1):
        step[:, axis] = np.where(rows.grid[:, axis] > 1, reach, 0)
        reach = reach * rows.grid[:, axis]
    return step


def _dense(rows: CopyTable, step: Column, dtype: Column) -> Column:
    """(rows,) bool: the runs are contiguous in memory, in the order of the grid."""
    used = rows.grid > 1
    found: Column = (~used | (step == _wire_step(rows, dtype))).all(axis=1)
    return found


def _cut(rows: CopyTable, most: int) -> CopyTable:
    """Cut rows of more than `most` bytes along their outermost axis, then along the next, and last along the run."""
    while True:
        item = np.maximum(ITEM_SIZES[rows.source_dtype], ITEM_SIZES[rows.target_dtype])
        nbytes = rows.elements * item
        long = nbytes > most
        if not long.any():
            return rows
        axis: Column = np.argmax(rows.grid > 1, axis=1)
        gridded = np.take_along_axis(rows.grid, axis[:, None], axis=1)[:, 0]
        on_grid = gridded > 1
        extent = np.where(on_grid, gridded, rows.run)
        # A multiple of the alignment, so that the parts of an aligned run are aligned.
        whole = np.maximum(most // _ALIGNMENT * _ALIGNMENT // item, 1)
        per = np.where(long, np.where(on_grid, np.maximum(most * extent // nbytes, 1), whole), extent)
        count = -(-extent // per)
        row = np.repeat(np.arange(len(rows)), count)
        part = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        begin = part * per[row]
        length = np.minimum(per[row], extent[row] - begin)
        rows, axis, on_grid = rows.take(row), axis[row], on_grid[row]
        grid, run = rows.grid.copy(), np.where(on_grid, rows.run, length)
        here = np.flatnonzero(on_grid)
        grid[here, axis[here]] = length[here]
        places: list[Column] = []
        for at, step, dtype in (
            (rows.source_at, rows.source_step, rows.source_dtype),
            (rows.target_at, rows.target_step, rows.target_dtype),
        ):
            along = np.take_along_axis(step, axis[:, None], axis=1)[:, 0]
            places.append(at + begin * np.where(on_grid, along, ITEM_SIZES[dtype]))
        single = grid == 1
        rows = replace(
            rows, grid=grid, run=run, source_at=places[0], target_at=places[1],
            source_step=np.where(single, 0, rows.source_step), target_step=np.where(single, 0, rows.target_step),
        )  # fmt: skip


def _grouped(rank: Column, room: Column, alone: Column, most: int) -> tuple[Column, Column]:
    """(rows,), (rows,): the message of each row, numbered in the order of the rows, and its place in it.

    Rows of up to `most` bytes that follow one another share a message of up to twice as many.
    """
    if not len(room):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ends = np.cumsum(room)
    begins = ends - room
    block = np.ones(len(room), bool)  # rows that begin a message whatever its size
    block[1:] = (rank[1:] != rank[:-1]) | alone[1:] | alone[:-1]
    heads = np.flatnonzero(block)
    start = begins[heads][np.cumsum(block) - 1]
    share = (begins - start) // most
    new = block.copy()
    new[1:] |= share[1:] != share[:-1]
    message = np.cumsum(new) - 1
    return message, begins - begins[np.flatnonzero(new)][message]


def _chunks(rank: Column, room: Column, most: int) -> Column:
    """(messages,): messages of one rank, up to `most` bytes each, fill chunks of up to twice as many in order."""
    ends = np.cumsum(room)
    begins = ends - room
    first = np.searchsorted(rank, rank, side="left")
    found: Column = (begins - begins[first]) // most
    return found
