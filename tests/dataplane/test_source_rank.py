"""Several sources and several engines: what one of them does to the others. Gloo; NCCL shares the code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from weightbus.dataplane import source_rank
from weightbus.dataplane.distributed import DistributedSender
from weightbus.dataplane.errors import TransferFailed, Unsupported
from weightbus.dataplane.manifest import TensorSpec
from weightbus.dataplane.source_rank import SourceRank
from weightbus.dataplane.sources import Sources
from weightbus.dataplane.staging import BucketPool
from weightbus.dataplane.transport import Address, Peer, Receipt, Session

from ..kit.waiting import has_ipv6
from .loopback import CHANNEL, Places, make_bytes, make_manifest, make_session, send_all, wanted
from .transport_contract import PROMPT_S, Engine, Halves

CPU = torch.device("cpu")
NO_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
BROADCASTS = ("weightbus-broadcast", "weightbus-source")
"""How threads that may be in one are called."""
BUCKETS = 6
TWO = Sources((0, 1, 0, 1, 0, 1))
PEERS = [Peer("one", 1), Peer("two", 2)]


def until(what: str, done: Callable[[], bool]) -> None:
    """Well before any deadline."""
    end = time.monotonic() + PROMPT_S
    while not done():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def halves() -> Iterator[Halves]:
    """The process that forks halves of transfers."""
    halves = Halves()
    yield halves
    halves.close()


class Stand:
    """A leader and two engines of one and two workers; the other source is the test's."""

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        self.places = Places(root, host)
        self.manifest = make_manifest(BUCKETS)
        self.leader = DistributedSender(host, CHANNEL, CPU)
        self.pool = BucketPool("cpu", 2, self.manifest.largest_bucket, "stand")
        self.engines = [Engine(peer.engine, self.places.receiver("distributed"), tp=peer.tp) for peer in PEERS]
        self.joined: dict[str, list[str]] = {engine.name: [] for engine in self.engines}
        for engine in self.engines:
            self._note_joins(engine)

    def offer(self, epoch: int, version: int) -> tuple[Session, Address]:
        """Begin a session of two sources, and have the engines come to it."""
        session = make_session(epoch, version, self.manifest)
        self.leader.divide(TWO)
        address = self.leader.offer(session, PEERS)
        for engine, first in zip(self.engines, (1, 2), strict=True):
            engine.start(session, address, first)
        return session, address

    def own(self, version: int) -> list[torch.Tensor]:
        """The buckets of the other source."""
        buckets = make_bytes(self.manifest, version)
        return [buckets[index] for index in TWO.own(1)]

    def serve(self, session: Session, deadline_s: float) -> None:
        """Until the session ends, whichever way."""
        try:
            self.leader.ready(deadline_s)
            send_all(self.leader, session, self.pool, deadline_s)
        except TransferFailed:
            assert set(self.leader.failed) == {"one", "two"}
        self.leader.close()

    def check(self, version: int) -> None:
        """All workers hold all bytes."""
        assert self.leader.failed == {}
        for engine in self.engines:
            assert engine.join() == Receipt(self.manifest.nbytes, BUCKETS, checked=False)
            assert engine.server.weights == [wanted(self.manifest, version)] * engine.server.tp

    def close(self) -> None:
        self.leader.close()
        self.pool.close()

    def _note_joins(self, engine: Engine) -> None:
        join, names = engine.server.join_group, self.joined[engine.name]

        def noting(address: Address, rank_offset: int, deadline_s: float) -> None:
            names.append(address.group)
            join(address, rank_offset, deadline_s)

        engine.server.join_group = noting  # type: ignore[method-assign]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path)
    yield stand
    stand.close()


@pytest.fixture
def other() -> Iterator[SourceRank]:
    """The source that does not lead."""
    rank = SourceRank(1, CPU)
    yield rank
    rank.close()


def job(stand: Stand, address: Address, epoch: int, version: int, **more: Any) -> dict[str, Any]:
    """The other source in a process of its own; `at` is the bucket of its own before which it stumbles."""
    return {
        "half": "source", "kind": "distributed", "root": str(stand.places.root), "epoch": epoch, "version": version,
        "buckets": BUCKETS, "number": 1, "of": list(TWO.of), "address": msgspec.to_builtins(address),
        "deadline_s": 60.0, **more,
    }  # fmt: skip


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=NO_IPV6)])
def test_each_source_sends_its_own_and_all_join_in_one_order(tmp_path: Path, other: SourceRank, host: str) -> None:
    """Unlike engines hold what both sources sent; groups are kept, and joined in the order that the sender names."""
    stand = Stand(tmp_path, host)
    for epoch, version in ((1, 5), (2, 6)):
        session, address = stand.offer(epoch, version)
        other.begin(address, epoch, TWO, stand.own(version), 60.0, filled=3)
        stand.serve(session, 60.0)
        stand.check(version)
        assert other.failure == ""
    names = [f"weightbus-{CHANNEL}-1", f"weightbus-{CHANNEL}-1-source1"]
    assert stand.joined == {"one": names, "two": names}
    stand.close()


@pytest.mark.parametrize("at", [1, 2])
def test_a_source_that_dies_ends_the_session_for_all(stand: Stand, other: SourceRank, halves: Halves, at: int) -> None:
    """Killed while all wait for its bucket: all end at once, and the next epoch has groups of its own."""
    session, address = stand.offer(1, 7)
    halves.start(**job(stand, address, 1, 7, at=at, how="die"))
    began = time.monotonic()
    stand.serve(session, 60.0)
    assert time.monotonic() - began < PROMPT_S
    for engine in stand.engines:
        assert isinstance(engine.join(), TransferFailed)
        assert engine.receiver.touched
        assert engine.seconds < PROMPT_S
    session, address = stand.offer(2, 8)
    other.begin(address, 2, TWO, stand.own(8), 60.0, filled=3)
    stand.serve(session, 60.0)
    stand.check(8)
    assert [names[2:] for names in stand.joined.values()] == [
        [f"weightbus-{CHANNEL}-2", f"weightbus-{CHANNEL}-2-source1"]
    ] * 2


def test_a_source_that_stands_still_costs_the_deadline(stand: Stand, halves: Halves) -> None:
    """Nobody waits for it beyond that, the engines as little as the leader."""
    session, address = stand.offer(1, 7)
    halves.start(**job(stand, address, 1, 7, at=1, how="stop"))
    began = time.monotonic()
    stand.serve(session, 5.0)
    assert time.monotonic() - began < PROMPT_S
    assert set(stand.leader.failed) == {"one", "two"}
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)


def test_a_source_that_does_not_come_is_named(stand: Stand) -> None:
    """Its rank went on without it: engines are let go of as soon as for one of them that does not come."""
    session, _ = stand.offer(1, 7)
    with pytest.raises(TransferFailed, match="source/1 to come"):
        stand.leader.ready(60.0, 1.0)
    assert set(stand.leader.failed) == {"one", "two"}
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)
    assert session.epoch == 1


def test_a_source_that_cannot_take_part_says_why(
    stand: Stand, other: SourceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and engines are not waited for until a deadline: its settings would make NCCL hang, for example."""

    def refuse(_device: torch.device) -> str:
        raise Unsupported("NCCL_CUMEM_ENABLE is None")

    monkeypatch.setattr(source_rank, "backend_for", refuse)
    _, address = stand.offer(1, 7)
    other.begin(address, 1, TWO, stand.own(7), 60.0, filled=3)
    with pytest.raises(TransferFailed, match="source/1 gave up: NCCL_CUMEM_ENABLE"):
        stand.leader.ready(60.0, 60.0)
    assert "NCCL_CUMEM_ENABLE" in stand.leader.failed["two"]
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)
    assert not any(engine.receiver.touched for engine in stand.engines)


def test_a_source_whose_weights_changed_says_which(stand: Stand, other: SourceRank) -> None:
    """Nothing of that bucket is sent, the session ends for all, and the leader knows the tensors."""
    session, address = stand.offer(1, 7)
    other.begin(address, 1, TWO, stand.own(7), 60.0)
    other.filled(1)
    other.spoil(["b1.bool.0", "b1.int8.2"])
    began = time.monotonic()
    stand.serve(session, 60.0)
    assert time.monotonic() - began < PROMPT_S
    assert stand.leader.differing == ("b1.bool.0", "b1.int8.2")
    assert "source/1 gave up: the weights changed" in stand.leader.failed["one"]
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)
    assert all(engine.server.loads <= 5 for engine in stand.engines)


@pytest.mark.parametrize("filled", [0, 3])
def test_an_engine_that_fails_ends_it_for_the_other_source(stand: Stand, other: SourceRank, filled: int) -> None:
    """It hears it from the leader, its rank may write its slots again, and no thread is left in a broadcast."""

    def refuse(_index: int) -> None:
        raise TransferFailed("the server said 400")

    stand.engines[0].server._on_load = refuse
    stand.engines[0].server.leave_group = lambda _group, _deadline_s: None  # type: ignore[method-assign]  # it stays
    session, address = stand.offer(1, 7)
    other.begin(address, 1, TWO, stand.own(7), 60.0, filled=filled)
    began = time.monotonic()
    stand.serve(session, 60.0)
    other.wait_free(3)
    assert time.monotonic() - began < PROMPT_S
    assert "the server said 400" in stand.leader.failed["one"]
    assert other.failure
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)
    until("broadcasts to end", lambda: not any(each.name.startswith(BROADCASTS) for each in threading.enumerate()))


def test_servers_that_wait_in_a_broadcast_are_freed_by_their_source(stand: Stand, other: SourceRank) -> None:
    """A worker of SGLang hears nothing while it waits: that its source closes the group is what it notices."""
    inside: list[int] = []

    def watch(engine: Engine) -> None:
        load = engine.server.load_broadcast

        def watched(group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
            inside.append(1)
            try:
                load(group, tensors, deadline_s)
            finally:
                inside.pop()

        engine.server.load_broadcast = watched  # type: ignore[method-assign]
        engine.server.leave_group = lambda _group, _deadline_s: None  # type: ignore[method-assign]

    for engine in stand.engines:
        watch(engine)
    session, address = stand.offer(1, 7)
    other.begin(address, 1, TWO, stand.own(7), 60.0, filled=1)
    stand.leader.ready(60.0)
    for index, bucket in enumerate(make_bytes(stand.manifest, 7)[:3]):
        stand.pool.slots[index % 2].memory[: bucket.numel()] = bucket
        stand.leader.send(index, stand.pool.slots[index % 2], 60.0)
        stand.leader.reclaim(index, 60.0)
    until("both servers to wait for the other source", lambda: len(inside) == 2)
    stand.leader.withdraw("one", "its agent is gone")
    stand.leader.finish(60.0)
    assert stand.leader.failed["one"] == "its agent is gone"
    until("the servers to go on", lambda: not inside)
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)
    assert session.epoch == 1


def test_groups_that_do_not_form_hold_nobody(stand: Stand, other: SourceRank) -> None:
    """A server that ends between its first and its second group: the other, and the source, wait for it no longer."""
    join = stand.engines[0].server.join_group

    def once(address: Address, rank_offset: int, deadline_s: float) -> None:
        if address.group.endswith("source1"):
            raise TransferFailed("died while it joined")
        join(address, rank_offset, deadline_s)

    stand.engines[0].server.join_group = once  # type: ignore[method-assign]
    session, address = stand.offer(1, 7)
    other.begin(address, 1, TWO, stand.own(7), 60.0, filled=3)
    began = time.monotonic()
    stand.serve(session, 60.0)
    other.wait_free(3)
    assert stand.leader.spared == {"two"}
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)
    assert not any(engine.receiver.touched for engine in stand.engines)
    assert time.monotonic() - began < PROMPT_S
    other.close()
