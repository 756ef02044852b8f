"""A transport without a wire: keeps what each engine was sent, reading it as late as the contract allows."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from weightbus.dataplane.errors import PeerLost, TransferFailed
from weightbus.dataplane.transports.interface import JOIN_S, Address, Peer, StagingBuffer, Tabled, TransferSession


class FakeSender:
    """Satisfies `Sender`. A slot is read in `reclaim` or `finish`, so that a slot reused too early shows."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.spared: frozenset[str] = frozenset()
        self.taken: dict[tuple[int, str], list[bytes]] = {}
        """(epoch, engine) -> buckets in order."""
        self.calls: list[str] = []
        self.lose: dict[tuple[int, int], str] = {}
        """(epoch, bucket) -> the engine that dies there."""
        self.refusal = ""
        """Why `offer` raises; empty when it does not."""
        self.block = threading.Event()
        """While `blocking` is set, `ready` waits for this, or for `close`."""
        self.blocking = False
        self._session: TransferSession | None = None
        self._peers: list[Peer] = []
        self._held: dict[int, StagingBuffer] = {}

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        self.calls.append(f"offer {session.epoch}")
        self._session, self._peers, self._held = session, list(peers), {}
        self.failed = {}
        if self.refusal:
            raise TransferFailed(self.refusal)
        for peer in peers:
            self.taken[session.epoch, peer.engine] = []
        return Address(f"/fake/{session.epoch}")

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        del join_s  # who comes is the test's business
        self.calls.append("ready")
        if self.blocking and not self.block.wait(deadline_s):
            raise PeerLost("nobody came")

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        assert deadline_s > 0
        assert self._session is not None
        self.calls.append(f"send {index}")
        lost = self.lose.get((self._session.epoch, index))
        if lost is not None:
            self.failed[lost] = f"died at bucket {index}"
        if len(self.failed) == len(self._peers):
            raise TransferFailed("no receiver is left")
        self._held[index] = slot

    def reclaim(self, index: int, deadline_s: float) -> None:
        assert deadline_s > 0
        self.calls.append(f"reclaim {index}")
        self._read(index)

    def finish(self, deadline_s: float) -> None:
        assert deadline_s > 0
        self.calls.append("finish")
        for index in sorted(self._held):
            self._read(index)

    def withdraw(self, engine: str, reason: str) -> None:
        self.calls.append(f"withdraw {engine}")
        self.failed[engine] = reason

    def close(self) -> None:
        self.calls.append("close")
        self.block.set()

    def _read(self, index: int) -> None:
        slot = self._held.pop(index, None)
        if slot is None or self._session is None:
            return
        nbytes = self._session.manifest.buckets[index].nbytes
        for peer in self._peers:
            if peer.engine not in self.failed:
                self.taken[self._session.epoch, peer.engine].append(slot.memory[:nbytes].numpy().tobytes())


class FakeTablingSender(FakeSender):
    """Satisfies `Tabling`, too. Where the table follows, `finish` waits for it, as receivers would."""

    def __init__(self) -> None:
        super().__init__()
        self.gave: dict[int, list[Tabled]] = {}
        """By epoch: what receivers were given."""
        self.lose_at_finish: dict[int, str] = {}
        """Epoch -> the engine that dies when it has everything."""
        self._came = threading.Event()

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        self._came.clear()
        if session.table is not None:
            self._came.set()
        return super().offer(session, peers)

    def tabled(self, tabled: Tabled) -> None:
        assert self._session is not None
        if self._session.table is not None or self.gave.get(self._session.epoch):
            raise TransferFailed("no table is to follow, or it came before")
        self.calls.append("tabled")
        self.gave.setdefault(self._session.epoch, []).append(tabled)
        self._came.set()

    def finish(self, deadline_s: float) -> None:
        if not self._came.wait(deadline_s):
            raise TransferFailed("the table did not come")
        if self._session is not None and (lost := self.lose_at_finish.get(self._session.epoch)):
            self.failed[lost] = "died"
        super().finish(deadline_s)
