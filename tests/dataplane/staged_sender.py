"""A trainer of several stages as one `Sender`: the leader, and the other sources beside it in the same process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightbus.dataplane.tensors.manifest import Sources
from weightbus.dataplane.transports.distributed.sender import DistributedSender
from weightbus.dataplane.transports.distributed.source_rank import SourceRank
from weightbus.dataplane.transports.interface import JOIN_S, Address, Peer, StagingBuffer, TransferSession

STAGES = 3
SLOTS = 2
SESSION_S = 60.0
CPU = torch.device("cpu")


class StagedSender:
    """Buckets are given to the sources in turn; those of others are copied into memory of theirs."""

    def __init__(self, host: str, channel: str) -> None:
        self.leader = DistributedSender(host, channel, CPU)
        self.ranks = {number: SourceRank(number, CPU) for number in range(1, STAGES)}
        self.sources = Sources.one(1)
        self._memory: dict[int, torch.Tensor] = {}

    @property
    def failed(self) -> dict[str, str]:
        return self.leader.failed

    @property
    def spared(self) -> frozenset[str]:
        return self.leader.spared

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        buckets = session.manifest.buckets
        self.sources = Sources(tuple(index % STAGES for index in range(len(buckets))))
        self.leader.divide(self.sources)
        address = self.leader.offer(session, peers)
        self._memory = {}
        for number, rank in self.ranks.items():
            slots = [torch.empty(session.manifest.largest_bucket, dtype=torch.uint8) for _ in range(SLOTS)]
            for index in self.sources.own(number):
                self._memory[index] = slots[self.sources.place(index) % SLOTS][: buckets[index].nbytes]
            own = [self._memory[index] for index in self.sources.own(number)]
            rank.begin(address, session.epoch, self.sources, own, SESSION_S)
        return address

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        self.leader.ready(deadline_s, join_s)

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        self.leader.send(index, slot, deadline_s)
        number = self.sources.of[index]
        if number:
            place = self.sources.place(index)
            self.ranks[number].wait_free(place + 1 - SLOTS)
            self._memory[index].copy_(slot.memory[: self._memory[index].numel()])
            self.ranks[number].filled(place + 1)

    def reclaim(self, index: int, deadline_s: float) -> None:
        self.leader.reclaim(index, deadline_s)

    def finish(self, deadline_s: float) -> None:
        self.leader.finish(deadline_s)

    def withdraw(self, engine: str, reason: str) -> None:
        self.leader.withdraw(engine, reason)

    def close(self) -> None:
        self.leader.close()
