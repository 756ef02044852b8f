"""What a look at the meeting costs the leader, by calls of its store; and that it still finds who has failed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import Store

from weightbus.dataplane.errors import DataplaneError, PeerLost
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.processes.connections import Deadline, new_token
from weightbus.dataplane.processes.process_groups import connect_store, join_store, serve_store
from weightbus.dataplane.transports.distributed import (
    broadcast_group,
    rendezvous_keys as meeting_module,
    sender as distributed,
)
from weightbus.dataplane.transports.distributed.broadcast_group import Stalled
from weightbus.dataplane.transports.distributed.rendezvous_keys import Rendezvous, RendezvousKeys, holding
from weightbus.dataplane.transports.distributed.sender import DistributedSender
from weightbus.dataplane.transports.interface import Address, Peer

from ...loopback import make_manifest, make_session, send_all

BUCKETS = 20
DEADLINE_S = 60.0
NOTICED_S = 5.0
"""Far below every deadline of a transfer, and enough for a machine that has other things to do."""
MANY = 300


class Counting:
    """A store, and how often each of its methods was called."""

    def __init__(self, store: Store) -> None:
        self.calls = Counter[str]()
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> object:
            self.calls[name] += 1
            return getattr(self._store, name)(*arguments)

        return call


class Group:
    """In the place of the group of all: a bucket is taken when `broadcast` says so."""

    name = "g"
    hung_up = False

    def __init__(self) -> None:
        self.broadcast: Callable[[torch.Tensor, Deadline], None] = lambda *_: time.sleep(0.002)

    def use(self, used: bool) -> None:
        """No connection is closed."""

    def abort(self) -> None:
        """Nothing is left."""


class Fleet:
    """A leader whose group is `Group`, and engines of which there is nothing but their words."""

    def __init__(self, engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = [f"engine-{number}" for number in range(engines)]
        self.group = Group()
        self.leader = DistributedSender("127.0.0.1", "c", torch.device("cpu"))
        self.pool = BucketBuffers("cpu", 2, make_manifest(BUCKETS).largest_bucket, "cost")
        self.session = make_session(1, 7, make_manifest(BUCKETS))
        self.counted: list[Counting] = []

        def join(server: Any) -> Any:
            self.counted.append(Counting(join_store(server)))
            return self.counted[-1]

        def form(sender: DistributedSender, *_: object) -> None:
            sender._group = self.group  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
            sender._groups, sender._members = ("g",), sender._peers

        monkeypatch.setattr(distributed, "join_store", join)
        monkeypatch.setattr(DistributedSender, "_form", form)
        monkeypatch.setattr(DistributedSender, "_apart", False)
        self.address: Address = self.leader.offer(self.session, [Peer(name, 1) for name in self.names])
        assert self.leader._store is not None
        self._words = Rendezvous(join_store(self.leader._store), 1, self.address.token)
        """Engines speak under the same token."""
        self.say("came", holding((), by_sidecar=True))
        self.say("joined", "")

    @property
    def calls(self) -> int:
        """Of the leader's, so far."""
        return sum(sum(each.calls.values()) for each in self.counted)

    def say(self, step: str, word: str, *, but: str = "") -> None:
        """All engines do, but one."""
        for name in self.names:
            if name != but:
                self.one_says(name, step, word)

    def one_says(self, name: str, step: str, word: str) -> None:
        self._words.announce(f"{step}/{name}", word)

    def begin(self) -> None:
        """Until the groups stand, and a bucket is on its way that nobody takes."""
        self.leader.ready(DEADLINE_S)
        assert self.leader._behind is not None
        self.released = threading.Event()
        self.group.broadcast = lambda *_: cast("None", self.released.wait(DEADLINE_S))
        self.leader.send(0, self.pool.buffers[0], DEADLINE_S)

    def reclaim(self) -> float:
        """How long until it was known that the bucket is not taken, seconds."""
        began = time.monotonic()
        self.leader.reclaim(0, DEADLINE_S)
        return time.monotonic() - began

    def close(self) -> None:
        if hasattr(self, "released"):
            self.released.set()
        self.leader.close()
        self.pool.close()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    fleet = Fleet(MANY, monkeypatch)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("said", [0, 1, 1_000], ids=["nobody", "one", "all"])
def test_what_all_said_takes_as_many_calls_however_many_they_are(said: int) -> None:
    """And is what each of them said: an engine more costs bytes, and no round trip."""
    taken = set[int]()
    for engines in (2, 50, 400):
        store, token = serve_store("127.0.0.1"), new_token()
        counting, names = Counting(join_store(store)), [f"e{number}" for number in range(engines)]
        meeting = Rendezvous(cast("Store", counting), 1, token, names)
        words = {name: f"word of {name}" for name in names[:said]}
        for name, word in words.items():
            meeting.announce(f"at/{name}", word)
        counting.calls.clear()
        assert meeting.heard_from("at", names) == words
        taken.add(sum(counting.calls.values()))
        assert {name: meeting.heard("at", name) for name in names[:5]} == {name: words.get(name) for name in names[:5]}
    assert len(taken) == 1
    assert taken.pop() <= 2


@pytest.mark.parametrize("engines", [2, 40, MANY])
def test_a_bucket_costs_the_leader_no_call_for_each_engine(engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it calls while buckets go follows from the time that they take, though every engine has news with each."""
    fleet = Fleet(engines, monkeypatch)
    fleet.leader.ready(DEADLINE_S)
    coming, noted = iter(range(BUCKETS)), list[tuple[float, int]]()

    def broadcast(*_: object) -> None:
        fleet.say("at", str(next(coming)))
        noted.append((time.monotonic(), fleet.calls))

    fleet.group.broadcast = broadcast
    fleet.say("done", "")
    began, before = time.monotonic(), fleet.calls
    send_all(fleet.leader, fleet.session, fleet.pool, DEADLINE_S)
    assert fleet.leader.failed == {}
    assert len(noted) == BUCKETS
    took, calls = noted[-1][0] - began, noted[-1][1] - before
    assert calls <= 20 + 100 * took
    fleet.close()


def test_one_of_many_that_fails_is_named_at_once(fleet: Fleet) -> None:
    """By its own word, in the middle of a bucket that nobody takes."""
    fleet.begin()
    threading.Timer(0.2, partial(fleet.one_says, "engine-17", "failed", "out of memory")).start()
    assert fleet.reclaim() < NOTICED_S
    assert fleet.leader.failed["engine-17"] == "out of memory"
    assert fleet.leader.failed.keys() == set(fleet.names)
    assert all("engine-17 gave up" in fleet.leader.failed[name] for name in fleet.names if name != "engine-17")


def test_one_that_fails_when_it_has_everything_ends_nothing(fleet: Fleet) -> None:
    """It holds the version: the others go on."""
    fleet.begin()
    fleet.one_says("engine-17", "done", "")
    fleet.one_says("engine-17", "failed", "late")
    threading.Timer(0.5, fleet.released.set).start()
    fleet.reclaim()
    assert fleet.leader.failed == {}


def test_one_of_many_that_is_withdrawn_ends_the_wait(fleet: Fleet) -> None:
    """The coordinator says so of an engine that is gone and says nothing."""
    fleet.begin()
    threading.Timer(0.2, fleet.leader.withdraw, ("engine-17", "its lease ran out")).start()
    assert fleet.reclaim() < NOTICED_S
    assert fleet.leader.failed["engine-17"] == "its lease ran out"


def test_one_of_many_that_keeps_the_others_from_a_bucket_is_named(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone, `STILL_S` after the others have come and a little."""
    monkeypatch.setattr(broadcast_group, "STILL_S", 0.5)
    named, fail_all = list[tuple[int, ...]](), fleet.leader._fail_all

    def noting(error: DataplaneError) -> None:
        if isinstance(error, Stalled):
            named.append(error.members)
        fail_all(error)

    fleet.leader._fail_all = noting  # type: ignore[method-assign]
    fleet.begin()
    fleet.say("at", "0", but="engine-17")
    assert fleet.reclaim() < 0.5 + NOTICED_S
    assert "to come to bucket 0" in fleet.leader.failed["engine-17"]
    assert named == [(17,)]


@pytest.mark.parametrize("word", ["x", "", "0" * 64 + "x"])
def test_a_stranger_among_many_is_named(fleet: Fleet, word: str) -> None:
    """Whatever it writes, at whatever step: the engine in whose name it wrote has failed."""
    fleet.begin()
    assert fleet.leader._store is not None
    join_store(fleet.leader._store).set("weightbus/1/at/engine-17", word)
    assert fleet.reclaim() < NOTICED_S
    assert "stranger" in fleet.leader.failed["engine-17"]


def test_a_stranger_that_deletes_holds_no_engine(fleet: Fleet) -> None:
    """What is not there is waited for by a store: the leader would stand as long, and hear of no failure."""
    fleet.begin()
    assert fleet.leader._store is not None
    stranger = join_store(fleet.leader._store)
    for step in ("failed", "at"):
        for number in (3, 17, 40):
            stranger.delete_key(f"weightbus/1/{step}/engine-{number}")
    fleet.one_says("engine-40", "failed", "out of memory")
    assert fleet.reclaim() < NOTICED_S
    assert fleet.leader.failed["engine-40"] == "out of memory"
    with pytest.raises(PeerLost, match="out of memory"):
        fleet.leader._check_receivers()


def test_a_receiver_that_waits_leaves_the_store_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it takes buckets it asks for one thing, which is whether they are over, and now and then for the epoch.

    The store is one thread of the leader's process: hundreds that ask it five things keep the leader's looks waiting.
    """
    counted: list[Counting] = []

    def reach(*arguments: Any) -> Any:
        counted.append(Counting(connect_store(*arguments)))
        return counted[-1]

    monkeypatch.setattr(meeting_module, "connect_store", reach)
    store, token = serve_store("127.0.0.1"), new_token()
    meeting = Rendezvous(join_store(store), 1, token, ["e0"])
    attendance = RendezvousKeys(f"tcp://127.0.0.1:{store.port}", 1, "e0", token)
    attendance.begin()
    meeting.announce("group", "g")
    attendance.group(Deadline(DEADLINE_S))
    before, began = sum(counted[0].calls.values()), time.monotonic()
    with pytest.raises(PeerLost, match="enough"):
        threading.Timer(1.0, meeting.announce, ("over", "enough")).start()
        while True:
            attendance.check()
            time.sleep(0.01)
    calls, took = sum(counted[0].calls.values()) - before, time.monotonic() - began
    assert calls <= 10 + 70 * took
    attendance.close()


def test_what_was_said_first_is_not_lost() -> None:
    """Places are there before anybody hears of the epoch: one that is made after a word would take it away."""

    class Late:
        """A client whose words arrive when an answer is asked for, or never: torch's may lie in a socket as long."""

        def __init__(self, store: Store) -> None:
            self._store = store
            self._said: list[Callable[[], None]] = []

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*arguments: object) -> object:
                method = partial(getattr(self._store, name), *arguments)
                if name in {"set", "multi_set"}:
                    return self._said.append(method)
                for said in self._said:
                    said()
                self._said.clear()
                return method()

            return call

    store, token = serve_store("127.0.0.1"), new_token()
    meeting = Rendezvous(cast("Store", Late(join_store(store))), 1, token, ["e0", "e1"])
    Rendezvous(join_store(store), 1, token).announce("came/e1", "x")
    assert meeting.heard_from("came", ["e0", "e1"]) == {"e1": "x"}
