"""A member's part of the schedules, chunk by chunk: a rank packs and sends, a worker receives and unpacks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import torch

from ...copy import AXES, CopyEngine, CopyTable, DeviceFence, PreparedCopies
from ...errors import TransferFailed
from ...memory import sizes_of
from ...processes import Deadline
from ...reshard import NOWHERE, SendMessages
from ...tensors import DTYPES, Column
from .nixl_group import NixlGroup
from .p2p_group import P2PChunk, P2PGroup, Posted

UNDER_WAY: Final = 2
"""Turns of a rank that move at a time: one is packed or unpacked while the other one is on the wire."""


QueuePair: TypeAlias = P2PGroup | NixlGroup
"""A group in which messages move."""


@dataclass(frozen=True, eq=False)
class PeerPart:
    """What one engine worker is sent: `SendSchedule.of_holder`."""

    peer: int
    """The worker's rank in the group."""
    messages: SendMessages
    pack: CopyTable


class SendQueue:
    """Bound to memory. Used from one thread; the memory is read during `send` and at no other time."""

    def __init__(self, parts: Sequence[PeerPart], regions: Sequence[torch.Tensor], engine: CopyEngine) -> None:
        """Raises `ManifestError` for what reaches out of its region."""
        everything, pack, peer = _joined(parts)
        everything.check(sizes_of(regions), sending=True)
        at, self.staging_bytes = everything.places(everything.source == NOWHERE, by_chunk=True)
        at, self.staging_bytes = shared_out(at, self.staging_bytes, everything)
        device = regions[0].device if len(regions) else torch.device("cpu")
        self._staging = torch.empty(self.staging_bytes, dtype=torch.uint8, device=device)
        self._vacated = DeviceFence(device)
        """As `ReceiveQueue._vacated`."""
        placed = replace(pack, target=np.zeros_like(pack.target), target_at=pack.target_at + at[pack.target])
        placed.check(sizes_of(regions), np.array([self.staging_bytes]))
        self.memory = (self._staging, *regions)
        """All that messages may lie in."""
        packs = engine.prepare_parts(placed, everything.chunk[pack.target], regions, [self._staging])
        self.nbytes = int(everything.nbytes.sum())
        """Of all messages."""
        self._packs: list[PreparedCopies | None] = [packs.get(turn) for turn in range(everything.chunks)]
        self._sends: list[list[P2PChunk]] = [[] for _ in self._packs]
        begins = np.where(everything.source == NOWHERE, at, everything.source_at)
        columns = (everything.chunk, everything.source, begins, everything.nbytes, peer)
        messages: list[list[int]] = np.stack(columns, axis=1).tolist()
        for turn, source, begin, nbytes, to in messages:
            memory = self._staging if source == NOWHERE else regions[source]
            self._sends[turn].append(P2PChunk(memory[begin : begin + nbytes], to))

    def send(self, group: QueuePair, turn_s: float) -> None:
        """All turns; each has `turn_s`. Raises `TransferFailed`."""
        self._vacated.wait(Deadline(turn_s))
        under_way: deque[Posted] = deque()
        for pack, sends in zip(self._packs, self._sends, strict=True):
            if len(under_way) == UNDER_WAY:
                under_way.popleft().wait(Deadline(turn_s))
            if pack is not None:
                with group.lane():
                    pack.launch()
            under_way.append(group.post(sends, ()))
        for posted in under_way:
            posted.wait(Deadline(turn_s))

    def close(self) -> None:
        """Let go of the memory."""
        for pack in self._packs:
            if pack is not None:
                pack.close()
        self._packs, self._sends, self.memory = [], [], ()


def shared_out(at: Column, nbytes: int, messages: SendMessages) -> tuple[Column, int]:
    """Places in staging where turns that move at a time have parts of their own; and how much there is then."""
    parts = min(UNDER_WAY, messages.chunks)
    return at + messages.chunk % UNDER_WAY * nbytes, nbytes * parts


def _joined(parts: Sequence[PeerPart]) -> tuple[SendMessages, CopyTable, Column]:
    """All messages and rows, and the peer of each message."""
    before = np.cumsum([0, *(len(each.messages) for each in parts)])
    packs = [
        replace(each.pack, target=each.pack.target + first).numbers()
        for each, first in zip(parts, before.tolist(), strict=False)
    ]
    messages = np.concatenate([SendMessages.decode(b"").numbers(), *(each.messages.numbers() for each in parts)])
    peer = np.concatenate([np.full(len(each.messages), each.peer) for each in parts] or [np.empty(0, np.int64)])
    joined = CopyTable.of_numbers(np.concatenate([CopyTable.empty().numbers(), *packs]))
    return SendMessages(*(messages[:, column] for column in range(messages.shape[1]))), joined, peer


_BYTES: Final = DTYPES.index("uint8")


class ReceiveQueue:
    """Bound to memory. `receive` is called on the thread of the transfer, `swap` on the scheduler's.

    In place, messages go straight into the parameters where they lie there in one piece, and the rest through a buffer
    of one turn: the server must stand still. *Beside* them, everything goes into a buffer as large as the worker's
    share, while the server generates; `swap` then copies it into place, as fast as memory is read. That buffer is let
    go of between versions (`detach`), and what was made for it is kept: tables of 30 GB take longer than its copy.
    """

    def __init__(
        self,
        messages: SendMessages,
        unpack: CopyTable,
        targets: Sequence[torch.Tensor],
        engine: CopyEngine,
        device: torch.device,
        *,
        beside: bool,
    ) -> None:
        """Attached. `holder` of a message is its sender's rank in the group.

        Raises `ManifestError`, and `torch.OutOfMemoryError` where there is no room beside the parameters.
        """
        messages.check(sizes_of(targets), sending=False)
        self.beside = beside
        staged = np.ones(len(messages), bool) if beside else messages.target == NOWHERE
        at, self.staging_bytes = messages.places(staged, by_chunk=not beside)
        if not beside:
            at, self.staging_bytes = shared_out(at, self.staging_bytes, messages)
        self._device = device
        self._targets = targets
        self._staging: torch.Tensor | None = torch.empty(self.staging_bytes, dtype=torch.uint8, device=device)
        self._vacated = DeviceFence(device)
        """Behind what may still read or write that memory: torch gives away what its own stream has yet to work on."""
        placed = replace(unpack, source=np.zeros_like(unpack.source), source_at=unpack.source_at + at[unpack.source])
        self._swap: PreparedCopies | None = None
        self._unpacks: list[PreparedCopies | None] = [None] * messages.chunks
        if beside:
            placed = _both(placed, _straight(messages, at))
        placed.check(np.array([self.staging_bytes]), sizes_of(targets))
        if beside:
            self._swap = engine.prepare_copies(placed, [self._staging], targets)
        else:
            parts = engine.prepare_parts(placed, messages.chunk[unpack.source], [self._staging], targets)
            self._unpacks = [parts.get(turn) for turn in range(messages.chunks)]
        self.nbytes = int(messages.nbytes.sum())
        """Of all messages."""
        columns = (messages.chunk, messages.rank, messages.nbytes, messages.target, messages.target_at, at, staged)
        places: list[list[int]] = np.stack(columns, axis=1).tolist()
        self._places: list[list[list[int]]] = [[] for _ in self._unpacks]
        """By turn."""
        for turn, *place in places:
            self._places[turn].append(place)
        self._kept = None if beside else [self._receives(self._staging, each) for each in self._places]
        """What is received where it stays. Views of a buffer are made as they are posted: a thousand take some ms."""

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """All that messages may lie in."""
        staging = () if self._staging is None else (self._staging,)
        return staging if self.beside else (*staging, *self._targets)

    def attach(self) -> None:
        """Take memory for what is received, unless it is there. Raises `torch.OutOfMemoryError`."""
        if self._staging is not None:
            return
        staging = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self._device)
        if self._swap is not None:
            self._swap.move_source(staging)
        self._vacated = DeviceFence(self._device)
        self._staging = staging  # last: it is whole, or not attached

    def detach(self) -> None:
        """Let go of memory that is taken beside the parameters, and keep what was made for it."""
        if self.beside:
            self._staging = None
            if self._swap is not None:
                self._swap.move_source(None)

    def receive(self, group: QueuePair, turn_s: float) -> None:
        """All turns; each has `turn_s`. Raises `TransferFailed`.

        What goes beside the parameters has room of its own, so all of it is asked for at once.
        """
        staging, places = (
            self._staging,
            self._places,
        )  # these: a thread that is stuck here touches nothing of a later session
        if staging is None:
            raise TransferFailed("there is no memory for what is received: it was let go of")
        limit = len(places) if self.beside else UNDER_WAY
        if not self.beside and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a paused server may still compute its last batch
        self._vacated.wait(Deadline(turn_s))  # messages arrive on another stream than memory is given away on
        under_way: deque[tuple[Posted, PreparedCopies | None]] = deque()
        for turn, unpack in enumerate(self._unpacks):
            if len(under_way) == limit:
                self._arrived(group, *under_way.popleft(), turn_s)
            receives = self._kept[turn] if self._kept is not None else self._receives(staging, places[turn])
            under_way.append((group.post((), receives), unpack))
        while under_way:
            self._arrived(group, *under_way.popleft(), turn_s)
        group.settle()

    @staticmethod
    def _arrived(group: QueuePair, posted: Posted, unpack: PreparedCopies | None, turn_s: float) -> None:
        posted.wait(Deadline(turn_s))
        if unpack is not None:
            with group.lane():
                unpack.launch()

    def swap(self) -> None:
        """Put what was taken beside the parameters into them."""
        if self._swap is not None:
            self._swap.run()

    def close(self) -> None:
        """Let go of the memory."""
        for each in (self._swap, *self._unpacks):
            if each is not None:
                each.close()
        self._swap, self._unpacks, self._places, self._kept = None, [], [], None
        self._staging = None

    def _receives(self, staging: torch.Tensor, places: Sequence[Sequence[int]]) -> list[P2PChunk]:
        """What is received in a turn. They keep the memory that they lie in."""
        found: list[P2PChunk] = []
        for holder, nbytes, target, target_at, begin, aside in places:
            region, first = (staging, begin) if aside else (self._targets[target], target_at)
            found.append(P2PChunk(region[first : first + nbytes], holder))
        return found


def beside_bytes(messages: SendMessages) -> int:
    """What taking all of them beside the parameters needs."""
    return messages.places(np.ones(len(messages), bool), by_chunk=False)[1]


def _straight(messages: SendMessages, at: Column) -> CopyTable:
    """Rows that copy whole messages out of the buffer."""
    rows = np.flatnonzero(messages.target != NOWHERE)
    none = np.zeros(len(rows), np.int64)
    ones, steps = np.ones((len(rows), AXES), np.int64), np.zeros((len(rows), AXES), np.int64)
    kind = np.full(len(rows), _BYTES)
    return CopyTable(
        none, messages.target[rows], at[rows], messages.target_at[rows], kind, kind, messages.nbytes[rows], ones, steps,
        steps,
    )  # fmt: skip


def _both(one: CopyTable, other: CopyTable) -> CopyTable:
    return CopyTable.of_numbers(np.concatenate([one.numbers(), other.numbers()]))
