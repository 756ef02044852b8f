"""Carries out a trainer rank's part of the schedules: packs what does not lie in one piece, and sends turn by turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch

from ...copy import CopyEngine, CopyTable, DeviceFence, PreparedCopies
from ...memory import sizes_of
from ...processes import Deadline
from ...reshard import NOWHERE, SendMessages
from ...tensors import Column
from .p2p_group import P2PChunk, Posted

UNDER_WAY: Final = 2
"""Turns of a rank that move at a time: one is packed or unpacked while the other one is on the wire."""


class QueuePair(Protocol):
    """What is asked of `P2PGroup`."""

    def post(self, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]) -> Posted:
        """Begin to move all of these."""
        ...

    def lane(self) -> AbstractContextManager[None]:
        """Where copies are launched, in front of what is posted next."""
        ...

    def settle(self) -> None:
        """Wait for what was launched in the lane."""
        ...


@dataclass(frozen=True, eq=False)
class Mail:
    """What one engine worker is sent: `SendSchedule.of_holder`."""

    peer: int
    """The worker's rank in the group."""
    messages: SendMessages
    pack: CopyTable


class SendQueue:
    """Bound to memory. Used from one thread; the memory is read during `send` and at no other time."""

    def __init__(self, mail: Sequence[Mail], regions: Sequence[torch.Tensor], engine: CopyEngine) -> None:
        """Raises `ManifestError` for what reaches out of its region."""
        everything, pack, peer = _joined(mail)
        everything.check(sizes_of(regions), sending=True)
        at, self.staging_bytes = everything.places(everything.source == NOWHERE, by_chunk=True)
        at, self.staging_bytes = shared_out(at, self.staging_bytes, everything)
        device = regions[0].device if len(regions) else torch.device("cpu")
        self._staging = torch.empty(self.staging_bytes, dtype=torch.uint8, device=device)
        self._vacated = DeviceFence(device)
        """As an inbox's."""
        placed = replace(pack, target=np.zeros_like(pack.target), target_at=pack.target_at + at[pack.target])
        placed.check(sizes_of(regions), np.array([self.staging_bytes]))
        self.memory = (self._staging, *regions)
        """All that messages may lie in."""
        parts = engine.prepare_parts(placed, everything.chunk[pack.target], regions, [self._staging])
        self.nbytes = int(everything.nbytes.sum())
        """Of all messages."""
        self._packs: list[PreparedCopies | None] = [parts.get(turn) for turn in range(everything.chunks)]
        self._sends: list[list[P2PChunk]] = []
        for turn in range(everything.chunks):
            self._sends.append(
                [
                    P2PChunk(_view(self._staging if source == NOWHERE else regions[source], begin, nbytes), to)
                    for source, begin, nbytes, to in _ends(everything, everything.source, at, turn, peer)
                ]
            )

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


def _joined(mail: Sequence[Mail]) -> tuple[SendMessages, CopyTable, Column]:
    """All messages and rows, and the peer of each message."""
    before = np.cumsum([0, *(len(each.messages) for each in mail)])
    packs = [
        replace(each.pack, target=each.pack.target + first).numbers()
        for each, first in zip(mail, before.tolist(), strict=False)
    ]
    messages = np.concatenate([SendMessages.decode(b"").numbers(), *(each.messages.numbers() for each in mail)])
    peer = np.concatenate([np.full(len(each.messages), each.peer) for each in mail] or [np.empty(0, np.int64)])
    joined = CopyTable.of_numbers(np.concatenate([CopyTable.empty().numbers(), *packs]))
    return SendMessages(*(messages[:, column] for column in range(messages.shape[1]))), joined, peer


def _ends(
    messages: SendMessages, region: Column, staged_at: Column, turn: int, peer: Column
) -> list[tuple[int, int, int, int]]:
    """(region, byte, bytes, peer) of the messages of a turn, in their order."""
    rows = np.flatnonzero(messages.chunk == turn)
    begin = np.where(region == NOWHERE, staged_at, messages.source_at)
    table: list[tuple[int, int, int, int]] = list(
        zip(
            region[rows].tolist(),
            begin[rows].tolist(),
            messages.nbytes[rows].tolist(),
            peer[rows].tolist(),
            strict=True,
        )
    )
    return table


def _view(region: torch.Tensor, begin: int, nbytes: int) -> torch.Tensor:
    return region[begin : begin + nbytes]
