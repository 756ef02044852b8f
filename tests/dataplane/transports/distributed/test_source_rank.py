"""Several sources and several engines: what one of them does to the others. Gloo; NCCL shares the code."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from weightbus.dataplane.errors import PeerLost, TransferFailed, Unsupported
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.processes import process_groups as rendezvous
from weightbus.dataplane.processes.connections import new_token
from weightbus.dataplane.processes.process_groups import join_store, serve_store
from weightbus.dataplane.tensors.manifest import Sources, TensorSpec
from weightbus.dataplane.transports.distributed import broadcast_group, source_rank
from weightbus.dataplane.transports.distributed.broadcast_group import GroupSettings
from weightbus.dataplane.transports.distributed.rendezvous_keys import Rendezvous, source_name
from weightbus.dataplane.transports.distributed.sender import DistributedSender
from weightbus.dataplane.transports.distributed.source_rank import SourceRank
from weightbus.dataplane.transports.interface import Address, Peer, Receipt, TransferSession

from ....kit.waiting import has_ipv6, until
from ...loopback import CHANNEL, Places, make_bytes, make_manifest, make_session, send_all, wanted
from ...transport_contract import PROMPT_S, Engine, Halves

CPU = torch.device("cpu")
NO_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
BROADCASTS = ("weightbus-broadcast", "weightbus-source")
"""How threads that may be in one are called."""
BUCKETS = 6
TWO = Sources((0, 1, 0, 1, 0, 1))
PEERS = [Peer("one", 1), Peer("two", 2)]


@pytest.fixture(scope="module")
def halves() -> Iterator[Halves]:
    """The process that forks halves of transfers."""
    yield from Halves.serve()


class Stand:
    """A leader and two engines of one and two workers; the other source is the test's."""

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        self.places = Places(root, host)
        self.manifest = make_manifest(BUCKETS)
        self.leader = DistributedSender(host, CHANNEL, CPU)
        self.pool = BucketBuffers("cpu", 2, self.manifest.largest_bucket, "stand")
        self.engines = [Engine(peer.engine, self.places.receiver("distributed"), tp=peer.tp) for peer in PEERS]
        self.joined: dict[str, list[str]] = {engine.name: [] for engine in self.engines}
        for engine in self.engines:
            self._note_joins(engine)

    def offer(self, epoch: int, version: int) -> tuple[TransferSession, Address]:
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

    def serve(self, session: TransferSession, deadline_s: float) -> None:
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


def joined_in(epoch: int) -> dict[str, list[str]]:
    """The groups that engines join in `epoch`, each its own with either source, in the sources' order."""
    both = f"weightbus-{CHANNEL}-{epoch}", f"weightbus-{CHANNEL}-{epoch}-source1"
    return {name: [f"{group}-at{first}" for group in both] for name, first in (("one", 1), ("two", 2))}


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
    assert stand.joined == joined_in(1)
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
    assert {engine: names[2:] for engine, names in stand.joined.items()} == joined_in(2)


def test_a_source_that_stands_still_costs_the_deadline(stand: Stand, halves: Halves) -> None:
    """Neither the engines nor the leader wait for it beyond that."""
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

    monkeypatch.setattr(source_rank, "process_group_backend", refuse)
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
    until(
        lambda: not any(each.name.startswith(BROADCASTS) for each in threading.enumerate()),
        "broadcasts to end",
        deadline_s=PROMPT_S,
    )


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
        stand.pool.buffers[index % 2].memory[: bucket.numel()] = bucket
        stand.leader.send(index, stand.pool.buffers[index % 2], 60.0)
        stand.leader.reclaim(index, 60.0)
    until(lambda: len(inside) == 2, "both servers to wait for the other source", deadline_s=PROMPT_S)
    stand.leader.withdraw("one", "its agent is gone")
    stand.leader.finish(60.0)
    assert stand.leader.failed["one"] == "its agent is gone"
    until(lambda: not inside, "the servers to go on", deadline_s=PROMPT_S)
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)
    assert session.epoch == 1


@pytest.mark.parametrize("forms", [True, False], ids=["a bucket", "its group"])
def test_an_engine_that_stands_still_is_named_by_the_other_source(
    stand: Stand, other: SourceRank, monkeypatch: pytest.MonkeyPatch, *, forms: bool
) -> None:
    """The rank that sees it first does not lead; the leader fails that engine for it, and not both for the source."""
    monkeypatch.setattr(broadcast_group, "STILL_S", 0.5)
    monkeypatch.setattr(broadcast_group, "STILL_FORMING_S", 0.5)
    server, goes_on = stand.engines[1].server, threading.Event()
    load, join = server.load_broadcast, server.join_group

    def stands_in_load(group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        if "source1" in group:
            goes_on.wait(PROMPT_S)
        load(group, tensors, deadline_s)

    def stands_in_join(address: Address, rank_offset: int, deadline_s: float) -> None:
        if "source1" in address.group:
            goes_on.wait(PROMPT_S)
            raise TransferFailed("there is no such group any more")
        join(address, rank_offset, deadline_s)

    if forms:
        server.load_broadcast = stands_in_load  # type: ignore[method-assign]
    else:
        server.join_group = stands_in_join  # type: ignore[method-assign]
    session, address = stand.offer(1, 7)
    other.begin(address, 1, TWO, stand.own(7), 60.0, filled=3)
    began = time.monotonic()
    stand.serve(session, 60.0)
    assert time.monotonic() - began < PROMPT_S
    assert stand.leader.failed["two"].startswith("to take a bucket" if forms else "its group to form")
    assert "this engine had not" in stand.leader.failed["two"]
    assert not stand.leader.failed["one"].startswith("source/1")
    assert stand.leader.spared == (frozenset() if forms else {"one"})
    goes_on.set()
    assert all(isinstance(engine.join(), TransferFailed) for engine in stand.engines)


def test_groups_that_do_not_form_hold_no_engine(stand: Stand, other: SourceRank) -> None:
    """A server that ends between its first and its second group: the other, and the source, wait for it no longer."""
    join = stand.engines[0].server.join_group

    def once(address: Address, rank_offset: int, deadline_s: float) -> None:
        if "source1" in address.group:
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


class Leader:
    """As much of one as a source hears: a store, and the words of one epoch after the other."""

    def __init__(self) -> None:
        self.store = serve_store("127.0.0.1")
        self.rendezvous: Rendezvous | None = None

    def begin(self, epoch: int) -> Address:
        """What was said before is forgotten."""
        if self.rendezvous is not None:
            self.rendezvous.clear()
        token = new_token()
        self.rendezvous = Rendezvous(join_store(self.store), epoch, token, sources=[source_name(1)])
        return Address(f"tcp://127.0.0.1:{self.store.port}", "g", "gloo", 2, token)

    def await_source(self) -> Rendezvous:
        """Until it has come to this epoch."""
        rendezvous = self.rendezvous
        assert rendezvous is not None
        until(lambda: rendezvous.heard("came", source_name(1)) is not None, "the source to come", deadline_s=PROMPT_S)
        return rendezvous


def test_a_rank_that_goes_on_waits_for_no_other(other: SourceRank) -> None:
    """Not for a leader that says nothing more, which its last session would have heard until the deadline."""
    leader = Leader()
    for epoch in (1, 2):
        other.begin(leader.begin(epoch), epoch, Sources((0, 1)), [torch.zeros(8)], 600.0, filled=1)
        leader.await_source()
    began = time.monotonic()
    other.stop()
    assert time.monotonic() - began < source_rank._END_S / 2
    assert other.failure == "this rank has gone on"


def test_an_end_that_was_said_and_deleted_is_heard(other: SourceRank) -> None:
    """The leader begins its next epoch between two looks: a source finds that one, and ends what it was in."""
    leader = Leader()
    for epoch in range(1, 9):
        other.begin(leader.begin(epoch), epoch, Sources((0, 1)), [torch.zeros(8)], 600.0)
        leader.await_source().announce("over", "an engine did not come")
        leader.begin(epoch + 1)
        began = time.monotonic()
        other.wait_free(1)
        assert time.monotonic() - began < PROMPT_S
        assert other.failure in {
            "the sender gave up: an engine did not come",
            f"the peer speaks of epoch {epoch + 1}, this session is of epoch {epoch}",
        }


@pytest.mark.parametrize("how", ["stuck", "fails to leave"])
def test_a_session_that_does_not_end_as_it_should_holds_no_rank(
    other: SourceRank, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A rank that trains waits for its slots until the session's time is over, whatever its thread does then."""
    released = threading.Event()

    def stuck(_device: torch.device) -> str:
        if how == "stuck":
            released.wait(2 * PROMPT_S)
        raise TransferFailed("it fails in the end")

    def fail(_session: object) -> None:
        raise ValueError("torch has changed")

    monkeypatch.setattr(source_rank, "_END_S", 0.1)
    monkeypatch.setattr(source_rank, "process_group_backend", stuck)
    if how != "stuck":
        monkeypatch.setattr(source_rank.SourceSession, "_break_off", fail)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)  # it is said there
    leader = Leader()
    other.begin(leader.begin(1), 1, Sources((0, 1)), [torch.zeros(8)], 0.5 if how == "stuck" else 600.0, filled=1)
    waiting = threading.Thread(target=other.wait_free, args=(1,), daemon=True)
    waiting.start()
    waiting.join(PROMPT_S)
    held = waiting.is_alive()
    released.set()
    assert not held


def test_a_group_that_forms_when_its_session_is_over_is_left(
    other: SourceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no owner: its connections would be there as long as the rank."""
    forms, goes_on, broken = threading.Event(), threading.Event(), threading.Event()

    class Late:
        def abort(self) -> None:
            broken.set()

    def late(*_: object, **__: object) -> Late:
        forms.set()
        assert goes_on.wait(2 * PROMPT_S)
        return Late()

    monkeypatch.setattr(source_rank.BroadcastGroup, "form", late)
    leader = Leader()
    other.begin(leader.begin(1), 1, Sources((0, 1)), [torch.zeros(8)], 600.0, filled=1)
    said = leader.await_source()
    said.announce("group", GroupSettings(("g", "g-source1"), (0, 1)).encode())
    assert forms.wait(PROMPT_S)
    said.announce("over", "an engine did not come")
    other.wait_free(1)
    goes_on.set()
    assert broken.wait(PROMPT_S)


class Formed:
    """A group over which everything is taken at once."""

    name = "g-source1"

    def __init__(self) -> None:
        self.hung_up = False
        self.used = list[bool]()

    def use(self, used: bool) -> None:
        self.used.append(used)

    def broadcast(self, *_: object) -> None:
        """It is there."""

    def abort(self) -> None:
        """Nothing is left."""


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> Formed:
    """The group that the source has with whoever it is."""
    group = Formed()
    monkeypatch.setattr(source_rank.BroadcastGroup, "form", lambda *_, **__: group)
    return group


def serve_alone(leader: Leader, other: SourceRank, epoch: int) -> str | None:
    """A session of the other source that ends well; what it said that it holds."""
    other.begin(leader.begin(epoch), epoch, Sources((0, 1)), [torch.zeros(8)], 60.0, filled=1)
    said = leader.await_source()
    said.announce("group", GroupSettings(("g", Formed.name), (0, 1)).encode())
    until(lambda: "weightbus-source-rank" not in names(), "its session to end", deadline_s=PROMPT_S)
    assert other.failure == ""
    return said.heard("came", source_name(1))


def test_a_source_that_was_hung_up_offers_its_group_no_more(other: SourceRank, formed: Formed) -> None:
    """Its connections have ended: all would come to their first bucket, and lose the attempt."""
    leader = Leader()
    assert serve_alone(leader, other, 1) == ""
    assert serve_alone(leader, other, 2) == Formed.name
    formed.hung_up = True
    assert serve_alone(leader, other, 3) == ""


def test_no_engine_hangs_up_for_a_source_between_two_versions(other: SourceRank, formed: Formed) -> None:
    """No server waits for it then, and it may stand as long as it likes: in a debugger, say."""
    leader = Leader()
    for epoch in (1, 2):
        serve_alone(leader, other, epoch)
        assert formed.used == [True, False] * epoch


def test_a_session_that_is_stuck_touches_nothing_of_the_next(
    stand: Stand, other: SourceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after a while; what it does when it goes on at last is its own end."""
    stuck, released, armed = threading.Event(), threading.Event(), threading.Event()
    plain = source_rank.process_group_backend

    def backend_for(device: torch.device) -> str:
        if armed.is_set() and not stuck.is_set():
            stuck.set()
            released.wait(60.0)
        return plain(device)

    monkeypatch.setattr(source_rank, "_END_S", 0.1)
    monkeypatch.setattr(source_rank, "process_group_backend", backend_for)
    serve(stand, other, 1)
    armed.set()
    other.begin(Leader().begin(2), 2, TWO, stand.own(2), 60.0, filled=3)
    assert stuck.wait(PROMPT_S)
    session, address = stand.offer(3, 5)
    other.begin(address, 3, TWO, stand.own(5), 60.0, filled=2)
    serving = threading.Thread(target=stand.serve, args=(session, 60.0))
    serving.start()
    other.wait_free(2)
    released.set()
    until(lambda: names().count("weightbus-source-rank") == 1, "the old session to end", deadline_s=PROMPT_S)
    other.filled(3)
    other.wait_free(3)
    serving.join()
    stand.check(5)
    assert other.failure == ""
    serve(stand, other, 4)
    assert [len(joined) for joined in stand.joined.values()] == [4, 4]


def serve(stand: Stand, other: SourceRank, epoch: int) -> None:
    """One version, and it is there."""
    session, address = stand.offer(epoch, epoch + 4)
    other.begin(address, epoch, TWO, stand.own(epoch + 4), 60.0, filled=3)
    stand.serve(session, 60.0)
    stand.check(epoch + 4)


def names() -> list[str]:
    """Of the threads that there are."""
    return [each.name for each in threading.enumerate()]


def test_a_store_that_goes_while_a_group_forms_holds_no_engine(
    other: SourceRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the session, and not the process when it ends: torch would look for that store for ten minutes."""
    leader = Leader()
    address = leader.begin(1)

    def too_late(*arguments: Any) -> Any:
        leader.rendezvous = None
        del leader.store
        until(
            lambda: other._session is None or other._session._rendezvous._error is not None,
            "the store to end",
            deadline_s=PROMPT_S,
        )
        return rendezvous.connect_store(*arguments)

    monkeypatch.setattr(source_rank, "connect_store", too_late)
    other.begin(address, 1, Sources((0, 1)), [torch.zeros(8)], 600.0, filled=1)
    leader.await_source().announce("group", GroupSettings(("g", "g-source1"), (0, 1)).encode())
    began = time.monotonic()
    other.wait_free(1)
    until(lambda: "weightbus-source" not in names(), "nobody to look for it", deadline_s=PROMPT_S)
    assert time.monotonic() - began < PROMPT_S
    assert other.failure


@pytest.mark.parametrize("who", ["the source", "the leader"])
def test_an_engine_that_begins_anew_is_in_new_groups(stand: Stand, other: SourceRank, who: str) -> None:
    """All of them are: one that was lost is not waited for in the others."""
    serve(stand, other, 1)
    again = other
    if who == "the source":
        other.close()
        again = SourceRank(1, CPU)
    else:
        stand.leader = DistributedSender("127.0.0.1", CHANNEL, CPU)
    serve(stand, again, 2)
    assert {engine: names[2:] for engine, names in stand.joined.items()} == joined_in(2)
    again.close()


def test_epochs_leave_nothing_in_the_store(stand: Stand, other: SourceRank) -> None:
    """What engines and sources said is deleted when the next epoch begins, whatever it was."""
    counts: list[int] = []
    for epoch in (1, 2, 3):
        serve(stand, other, epoch)
        other.stop()
        assert stand.leader._store is not None
        counts.append(stand.leader._store.num_keys())
    assert counts[2] == counts[1]


def test_why_a_source_breaks_off_counts_more_than_what_engines_say_of_it(tmp_path: Path) -> None:
    """They say it after the source has, and may be asked before it: here everything is said between two questions."""
    sender = Places(tmp_path).sender("distributed")
    assert isinstance(sender, DistributedSender)
    sender.divide(TWO)
    sender.offer(make_session(1, 11, make_manifest(BUCKETS)), PEERS)
    rendezvous, said = sender._rendezvous, list[str]()
    assert rendezvous is not None
    heard_from = rendezvous.heard_from

    def late(step: str, members: Iterable[str]) -> dict[str, str]:
        if step == "failed" and not said:
            said.append(step)
            rendezvous.announce(f"differs/{source_name(1)}", "w")
            rendezvous.announce(f"failed/{source_name(1)}", "the weights changed")
            rendezvous.announce("failed/one", "connection closed by peer")
        return heard_from(step, members)

    rendezvous.heard_from = late  # type: ignore[method-assign]
    with pytest.raises(PeerLost, match="the weights changed"):
        sender._check_receivers()
    assert sender.differing == ("w",)
    sender.close()
    assert all("the weights changed" in reason for reason in sender.failed.values())
    assert sender.failed.keys() == {"one", "two"}
