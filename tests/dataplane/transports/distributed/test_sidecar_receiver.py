"""What an agent does that takes part in broadcasts in its server's place, beyond what every transport promises."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.dataplane.transports.distributed import (
    broadcast_group,
    receiver as handing_receiver,
    rendezvous_keys as meeting,
    sender as distributed,
)
from weightbus.dataplane.transports.distributed.broadcast_group import BroadcastGroup
from weightbus.dataplane.transports.distributed.receiver import DistributedReceiver, SidecarReceiver
from weightbus.dataplane.transports.distributed.sender import DistributedSender
from weightbus.dataplane.transports.interface import Peer, Receipt, Sender, SharedBucket

from ....kit.waiting import until
from ...loopback import CHANNEL, Places, make_manifest, make_session, send_all, wanted
from ...transport_contract import PATIENCE_S, PROMPT_S, Engine

BUCKETS = 6
KIND = "handed-distributed"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Of one test."""
    return Places(tmp_path)


@pytest.fixture
def make(places: Places) -> Iterator[Callable[..., Engine]]:
    """Engines by name, whose agents take part themselves."""
    made: list[Engine] = []

    def engine(name: str, on_load: Callable[[int], None] = lambda _: None) -> Engine:
        made.append(Engine(name, places.receiver(KIND), server=places.server(KIND, 1, on_load)))
        return made[-1]

    yield engine
    for each in made:
        each.receiver.shutdown()


@pytest.fixture
def pool() -> Iterator[BucketBuffers]:
    """Two slots of a sender."""
    pool = BucketBuffers("cpu", 2, make_manifest(BUCKETS).largest_bucket, CHANNEL)
    yield pool
    pool.close()


def run(sender: Sender, engines: Sequence[Engine], pool: BucketBuffers, epoch: int) -> list[object]:
    """One session: how it ended for each engine."""
    session = make_session(epoch, 10 + epoch, make_manifest(BUCKETS))
    address = sender.offer(session, [Peer(engine.name, 1) for engine in engines])
    for rank, engine in enumerate(engines, 1):
        engine.start(session, address, rank)
    with contextlib.suppress(TransferFailed):
        sender.ready(PATIENCE_S)
        send_all(sender, session, pool, PATIENCE_S)
    sender.close()
    return [engine.join() for engine in engines]


@pytest.mark.parametrize("stuck_at", [0, 3])
def test_a_server_that_stands_still_is_named_though_all_share_a_group(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers, monkeypatch: pytest.MonkeyPatch, stuck_at: int
) -> None:
    """As over NCCL, where every bucket goes from rank to rank: the other engine takes the version in the next session.

    The server that stands still is asked for nothing more, and its agent's memory is not written, until it returned.
    """
    monkeypatch.setattr(broadcast_group, "STILL_S", 1.0)
    monkeypatch.setattr(DistributedSender, "_apart", False)
    goes_on = threading.Event()

    def stand(index: int) -> None:
        if index == stuck_at:
            goes_on.wait(PATIENCE_S)

    sender, lives, stuck = places.sender(KIND), make("lives"), make("stuck", stand)
    ended = run(sender, (stuck, lives), pool, 1)
    assert isinstance(ended[0], TransferFailed)
    assert isinstance(ended[1], Receipt | TransferFailed), "gloo may have brought it everything"
    assert "stands still" in sender.failed["stuck"]
    assert max(lives.seconds, stuck.seconds) < PROMPT_S
    assert isinstance(run(sender, (lives,), pool, 2)[0], Receipt)
    assert lives.server.weights == [wanted(make_manifest(BUCKETS), 12)]

    loads = stuck.server.loads
    assert "has not returned" in str(run(sender, (stuck,), pool, 3)[0])
    assert stuck.server.loads == loads
    goes_on.set()
    until(lambda: not _stands(stuck), "the server to return", PROMPT_S)
    assert stuck.server.loads == loads + 1, "what waited to be asked of it is not asked any more"
    for result in run(sender, (stuck, lives), pool, 4):
        assert isinstance(result, Receipt)
    assert stuck.server.weights == lives.server.weights == [wanted(make_manifest(BUCKETS), 14)]


def _stands(engine: Engine) -> bool:
    assert isinstance(engine.receiver, DistributedReceiver)
    try:
        engine.receiver.require_moving()
    except TransferFailed:
        return True
    return False


def test_groups_on_a_gpu_that_the_server_left_are_left(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was launched again on another one: there they would wait for bytes that nobody sends."""
    held: list[tuple[str, ...]] = []

    def holding(groups: tuple[str, ...], *, by_sidecar: bool = False) -> str:
        held.append(groups)
        return meeting.holding(groups, by_sidecar=by_sidecar)

    monkeypatch.setattr(handing_receiver, "holding", holding)
    monkeypatch.setattr(handing_receiver.GpuRoom, "why_not", lambda *_: "")
    monkeypatch.setattr(handing_receiver, "gpu_named", lambda _: torch.device("cpu"))
    sender, engine = places.sender(KIND), make("e")
    for epoch in (1, 2):
        assert isinstance(run(sender, (engine,), pool, epoch)[0], Receipt)
    engine.server.opens = "GPU-b"
    for epoch in (3, 4):
        assert isinstance(run(sender, (engine,), pool, epoch)[0], Receipt)
    assert [len(groups) for groups in held] == [0, 1, 0, 1]


def test_a_broadcast_that_does_not_return_has_its_memory_for_itself(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL nobody can take it back from it. What comes next is compared and loaded where nobody writes late."""
    held, used, released = list[torch.Tensor](), list[int](), threading.Event()
    broadcast = BroadcastGroup.broadcast

    def sometimes(group: BroadcastGroup, memory: torch.Tensor, deadline: Deadline) -> None:
        if group.rank and not held:
            held.append(memory)
            assert released.wait(PATIENCE_S)
            return
        if group.rank:
            used.append(memory.data_ptr())
        broadcast(group, memory, deadline)

    monkeypatch.setattr(BroadcastGroup, "broadcast", sometimes)
    sender, engine = places.sender(KIND), make("e")

    def call_off() -> None:
        until(lambda: bool(held), "it to be in a broadcast", PROMPT_S)
        engine.receiver.close()

    calling = threading.Thread(target=call_off)
    calling.start()
    assert isinstance(run(sender, (engine,), pool, 1)[0], TransferFailed)
    calling.join()
    assert isinstance(run(sender, (engine,), pool, 2)[0], Receipt)
    assert len(used) == BUCKETS
    assert held[0].data_ptr() not in used
    held[0].fill_(255)
    released.set()
    assert engine.server.weights == [wanted(make_manifest(BUCKETS), 12)]
    used.clear()
    assert isinstance(run(sender, (engine,), pool, 3)[0], Receipt)


def test_a_group_that_forms_too_late_is_left(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forgotten: its connections and threads would be there as long as the sidecar."""
    forms, goes_on, broken = threading.Event(), threading.Event(), threading.Event()
    form = SidecarReceiver._form

    class Late:
        def abort(self) -> None:
            broken.set()

    def late(*_: object, **__: object) -> Late:
        forms.set()
        assert goes_on.wait(PATIENCE_S)
        return Late()

    monkeypatch.setattr(SidecarReceiver, "_form", late)
    sender, engine = places.sender(KIND), make("e")

    def call_off() -> None:
        assert forms.wait(PROMPT_S)
        engine.receiver.close()

    calling = threading.Thread(target=call_off)
    calling.start()
    assert isinstance(run(sender, (engine,), pool, 1)[0], TransferFailed)
    calling.join()
    goes_on.set()
    assert broken.wait(PROMPT_S)
    monkeypatch.setattr(SidecarReceiver, "_form", form)
    assert isinstance(run(sender, (engine,), pool, 2)[0], Receipt)


def test_an_engine_whose_session_changed_nothing_is_not_said_to_be_touched(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers
) -> None:
    """Whatever the one before it did: it would be quarantined for weights that are whole."""
    sender, engine = places.sender(KIND), make("e")
    assert isinstance(run(sender, (engine,), pool, 1)[0], Receipt)
    assert engine.receiver.touched
    session = make_session(2, 12, make_manifest(BUCKETS))
    engine.start(session, sender.offer(session, [Peer(engine.name, 1)]), 1)
    sender.close()
    assert isinstance(engine.join(), TransferFailed)
    assert not engine.receiver.touched
    assert engine.server.weights == [wanted(make_manifest(BUCKETS), 11)]


def test_the_server_has_what_is_left_of_the_session_for_a_load(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers
) -> None:
    """And not a moment more: a call to it without a deadline would hold its engine for ever."""
    sender, engine = places.sender(KIND), make("e")
    load, given = engine.server.load_shared, list[float]()

    def noting(bucket: SharedBucket, deadline_s: float) -> None:
        given.append(deadline_s)
        load(bucket, deadline_s)

    engine.server.load_shared = noting  # type: ignore[method-assign]
    assert isinstance(run(sender, (engine,), pool, 1)[0], Receipt)
    assert len(given) == BUCKETS
    assert given[0] < PATIENCE_S
    assert all(0 < later < earlier for earlier, later in itertools.pairwise(given))


def test_servers_join_where_their_workers_could_open_nothing(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers
) -> None:
    """Beside an agent that takes part itself, in the same session; and the agent says why."""
    sender, hands, joins = places.sender(KIND), make("hands"), make("joins")
    joins.server.opens = ""
    for epoch in (1, 2):
        results = run(sender, (joins, hands), pool, epoch)
        assert [isinstance(each, Receipt) and each.checked for each in results] == [False, True]
    assert (joins.server.joins, hands.server.joins) == (1, 0)
    assert isinstance(joins.receiver, DistributedReceiver)
    assert isinstance(hands.receiver, DistributedReceiver)
    assert "workers could open" in joins.receiver.remark
    assert not hands.receiver.remark

    joins.server.opens = "cpu"
    assert all(isinstance(each, Receipt) and each.checked for each in run(sender, (joins, hands), pool, 3))
    assert not joins.server._groups, "it left them"


def test_an_engine_that_was_told_not_to_lets_the_server_join(places: Places, pool: BucketBuffers) -> None:
    """Nothing is wrong then, and nothing said."""
    receiver = DistributedReceiver(places.root / "run", hands_on=False)
    engine = Engine("e", receiver, server=places.server(KIND))
    assert isinstance(run(places.sender(KIND), (engine,), pool, 1)[0], Receipt)
    assert engine.server.joins == 1
    assert not receiver.remark
    receiver.shutdown()


def test_an_older_trainer_gets_the_servers_from_then_on(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the agent's word for a group that it does not know, and names one for workers."""
    monkeypatch.setattr(distributed, "BY_SIDECAR", "a word of no agent")
    sender, engine = places.sender(KIND), make("e")
    assert "older" in str(run(sender, (engine,), pool, 1)[0])
    assert not engine.receiver.touched
    assert isinstance(run(sender, (engine,), pool, 2)[0], Receipt)
    assert engine.server.joins == 1


@pytest.mark.parametrize("upgraded", [True, False])
def test_a_trainer_that_starts_again_is_met_anew(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers, monkeypatch: pytest.MonkeyPatch, upgraded: bool
) -> None:
    """It may be a newer one: it costs one attempt to find that it is not, and no more, however often others fail."""
    monkeypatch.setattr(distributed, "BY_SIDECAR", "a word of no agent")
    sender, engine = places.sender(KIND), make("e")
    assert "older" in str(run(sender, (engine,), pool, 1)[0])
    for epoch in (2, 3):
        assert isinstance(run(sender, (engine,), pool, epoch)[0], Receipt)
    if upgraded:
        monkeypatch.undo()
    sender = places.sender(KIND)
    ended = [run(sender, (engine,), pool, epoch)[0] for epoch in (4, 5, 6)]
    assert isinstance(engine.receiver, DistributedReceiver)
    if upgraded:
        assert all(isinstance(each, Receipt) and each.checked for each in ended)
        assert engine.server.joins == 1
        assert not engine.receiver.remark
    else:
        assert "older" in str(ended[0])
        assert [isinstance(each, Receipt) for each in ended] == [False, True, True]
        assert engine.server.joins == 2


def test_memory_stays_where_a_server_was_told_to_look(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that ends lets a call that is on its way arrive: a worker that finds nothing there ends its server."""
    monkeypatch.setattr(handing_receiver, "_RETURN_S", 0.1)
    looks, goes_on, sender = threading.Event(), threading.Event(), places.sender(KIND)

    def look(index: int) -> None:
        if index == 2:
            looks.set()
            assert goes_on.wait(PROMPT_S)
            time.sleep(0.5)

    engine = make("e", look)

    def call_off() -> None:
        assert looks.wait(PROMPT_S)
        engine.receiver.close()

    calling = threading.Thread(target=call_off)
    calling.start()
    assert isinstance(run(sender, (engine,), pool, 1)[0], TransferFailed)
    calling.join()
    monkeypatch.setattr(handing_receiver, "_RETURN_S", PROMPT_S)
    goes_on.set()
    engine.receiver.shutdown()
    assert isinstance(engine.receiver, DistributedReceiver)
    assert engine.receiver._sidecar_member._loads.asked[2].exception() is None


def test_a_version_that_is_larger_gets_larger_memory(places: Places, make: Callable[..., Engine]) -> None:
    """What is there is kept while it is large enough."""
    sender, engine = places.sender(KIND), make("e")
    for epoch, buckets in ((1, 6), (2, 1), (3, 3)):
        manifest = make_manifest(6)
        size = manifest.largest_bucket * 6 // buckets
        pool = BucketBuffers("cpu", 2, size, CHANNEL)
        session = make_session(epoch, 20 + epoch, _repacked(buckets))
        engine.start(session, sender.offer(session, [Peer("e", 1)]), 1)
        sender.ready(PATIENCE_S)
        send_all(sender, session, pool, PATIENCE_S)
        sender.close()
        assert isinstance(engine.join(), Receipt)
        assert engine.server.weights == [wanted(session.manifest, session.version)]
        pool.close()


def _repacked(buckets: int) -> Manifest:
    plain = make_manifest(6)
    return Manifest.of("LoopbackModel", plain.tensors, bucket_bytes=plain.largest_bucket * 6 // buckets)


def test_a_gpu_that_had_less_room_than_it_said_is_not_asked_again(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That costs one version. From then on the server's workers take part, in every one."""

    def full(*_: object) -> BucketBuffers:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setattr(handing_receiver, "gpu_named", lambda _: torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 39, 1 << 40))
    monkeypatch.setattr(handing_receiver, "BucketBuffers", full)
    sender, engine = places.sender(KIND), make("e")
    engine.server.opens = "GPU-1"
    assert "could not be made" in str(run(sender, (engine,), pool, 1)[0])
    for epoch in (2, 3, 4):
        assert isinstance(run(sender, (engine,), pool, epoch)[0], Receipt)
        assert isinstance(engine.receiver, DistributedReceiver)
        assert "could not be made" in engine.receiver.remark
    assert engine.server.weights == [wanted(make_manifest(BUCKETS), 14)]


def test_a_slow_server_reads_what_it_was_told_to(
    places: Places, make: Callable[..., Engine], pool: BucketBuffers
) -> None:
    """No bucket takes the place of one that is being loaded; one is received meanwhile."""
    sender, engine = places.sender(KIND), make("slow", lambda _: time.sleep(0.15))
    assert isinstance(run(sender, (engine,), pool, 1)[0], Receipt)
    assert engine.server.weights == [wanted(make_manifest(BUCKETS), 11)]
