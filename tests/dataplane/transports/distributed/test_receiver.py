"""What the engine's side of the distributed transport says of itself to the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.transports.interface import Address, Peer, Receipt, Sender, StallDetector

from ....kit.waiting import until
from ...loopback import CHANNEL, Places, make_manifest, make_session, send_all, wanted
from ...transport_contract import PATIENCE_S, PROMPT_S, Engine


def launched_again(engine: Engine) -> None:
    engine.server.launch_again()


def stood_still(engine: Engine) -> None:
    """After its last call of the server, and before it had said that it needs the groups no longer."""
    watch_groups = engine.server.watch_groups

    def stands(groups: Sequence[str], *, used: bool) -> bool:
        if not used:
            engine.server.stood_still = True
            engine.server.watch_groups = watch_groups  # type: ignore[method-assign]
        return watch_groups(groups, used=used)

    engine.server.watch_groups = stands  # type: ignore[method-assign]


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("how", [launched_again, stood_still])
def test_an_engine_in_no_group_any_more_costs_no_round(
    tmp_path: Path, engines: int, how: Callable[[Engine], None]
) -> None:
    """Whatever its sidecar knew of it before: all of them meet anew, before any byte moves."""
    places, manifest = Places(tmp_path), make_manifest(2)
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, manifest.largest_bucket, "again")
    fleet = [Engine(f"e{number}", places.receiver("distributed")) for number in range(engines)]
    peers = [Peer(engine.name, 1) for engine in fleet]

    def run(epoch: int) -> None:
        session = make_session(epoch, 10 + epoch, manifest)
        address = sender.offer(session, peers)
        for number, engine in enumerate(fleet):
            engine.start(session, address, 1 + number)
        with contextlib.suppress(TransferFailed):
            sender.ready(PATIENCE_S)
            send_all(sender, session, pool, PATIENCE_S)
        sender.close()
        assert [engine.join() for engine in fleet] == [Receipt(manifest.nbytes, 2, checked=False)] * engines
        assert sender.failed == {}
        assert all(engine.server.weights == [wanted(manifest, session.version)] for engine in fleet)

    run(1)
    run(2)
    assert [engine.server.joins for engine in fleet] == [1] * engines
    how(fleet[0])
    for epoch in (3, 4, 5):
        run(epoch)
    assert [engine.server.joins for engine in fleet] == [2] * engines
    for engine in fleet:
        engine.receiver.shutdown()
    pool.close()


def test_a_session_is_called_off_while_its_server_leaves_old_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take a server that stands still as long as the whole version may."""
    places, manifest = Places(tmp_path), make_manifest(2)
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, manifest.largest_bucket, "leaving")
    one, two = (Engine(name, places.receiver("distributed")) for name in ("one", "two"))
    leaves, goes_on = threading.Event(), threading.Event()

    def stands(_group: str, _deadline_s: float) -> None:
        leaves.set()
        goes_on.wait(PATIENCE_S)

    for epoch, engines in ((1, (one, two)), (2, (one,))):
        session = make_session(epoch, 10 + epoch, manifest)
        address = sender.offer(session, [Peer(engine.name, 1) for engine in engines])
        for rank, engine in enumerate(engines, 1):
            engine.start(session, address, rank)
        if epoch == 1:
            sender.ready(PATIENCE_S)
            send_all(sender, session, pool, PATIENCE_S)
            sender.close()
            assert all(isinstance(engine.join(), Receipt) for engine in engines)
            monkeypatch.setattr(one.server, "leave_group", stands)
    meet = threading.Thread(target=lambda: suppressed(lambda: sender.ready(PATIENCE_S)))
    meet.start()
    assert leaves.wait(PATIENCE_S)
    one.receiver.close()
    assert "called off" in str(one.join())
    assert one.seconds < PROMPT_S
    goes_on.set()
    meet.join(PATIENCE_S)
    sender.close()
    for engine in (one, two):
        engine.receiver.shutdown()
    pool.close()


def suppressed(call: Callable[[], None]) -> None:
    with contextlib.suppress(TransferFailed):
        call()


@pytest.mark.parametrize(("before", "after"), [("cpu", ""), ("", "cpu")], ids=["to joining", "to handing on"])
def test_membership_does_not_change_while_the_server_has_not_returned(tmp_path: Path, before: str, after: str) -> None:
    """It may read the agent's memory, which would be let go of, or would be asked for two things at once."""
    places, manifest = Places(tmp_path), make_manifest(2)
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, manifest.largest_bucket, "switch")
    inside, goes_on = threading.Event(), threading.Event()

    def stand(_index: int) -> None:
        inside.set()
        goes_on.wait(PATIENCE_S)

    engine = Engine("e0", places.receiver("distributed"), on_load=stand)
    engine.server.opens = before
    receiver = engine.receiver
    assert isinstance(receiver, StallDetector)

    def call_off() -> None:
        assert inside.wait(PROMPT_S)
        receiver.close()

    calling = threading.Thread(target=call_off)
    calling.start()
    assert isinstance(run(sender, engine, pool, 1), TransferFailed)
    calling.join()
    asked = engine.server.joins, engine.server.loads

    engine.server.opens = after
    session = make_session(2, 12, manifest)
    engine.start(session, sender.offer(session, [Peer("e0", 1)]), 1, deadline_s=5.0)
    assert "has not returned" in str(engine.join())
    sender.close()
    with pytest.raises(TransferFailed, match="has not returned"):
        receiver.require_moving()
    assert (engine.server.joins, engine.server.loads) == asked

    goes_on.set()
    until(lambda: moves(receiver), "the server to return", PROMPT_S)
    assert isinstance(run(sender, engine, pool, 3), Receipt)
    assert engine.server.weights == [wanted(manifest, 13)]
    receiver.shutdown()
    pool.close()


def moves(receiver: StallDetector) -> bool:
    with contextlib.suppress(TransferFailed):
        receiver.require_moving()
        return True
    return False


def run(sender: Sender, engine: Engine, pool: BucketBuffers, epoch: int) -> object:
    """One session of one engine: how it ended."""
    session = make_session(epoch, 10 + epoch, make_manifest(2))
    engine.start(session, sender.offer(session, [Peer(engine.name, 1)]), 1)
    with contextlib.suppress(TransferFailed):
        sender.ready(PATIENCE_S)
        send_all(sender, session, pool, PATIENCE_S)
    sender.close()
    return engine.join()


def test_a_server_whose_join_is_called_off_is_asked_to_leave(tmp_path: Path) -> None:
    """That ends its join: else it waits there for members that do not come, and answers nothing meanwhile."""
    places = Places(tmp_path)
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, make_manifest(2).largest_bucket, "joins")
    engine = Engine("e0", places.receiver("distributed"))
    joins, leaves = threading.Event(), threading.Event()

    def join(_address: Address, _rank_offset: int, _deadline_s: float) -> None:
        joins.set()
        leaves.wait(PATIENCE_S)
        raise TransferFailed("the group was left while it formed")

    engine.server.join_group = join  # type: ignore[method-assign]
    engine.server.leave_group = lambda _group, _deadline_s: leaves.set()  # type: ignore[method-assign]

    def call_off() -> None:
        assert joins.wait(PROMPT_S)
        engine.receiver.close()

    calling = threading.Thread(target=call_off)
    calling.start()
    assert isinstance(run(sender, engine, pool, 1), TransferFailed)
    calling.join()
    left = leaves.is_set()
    leaves.set()
    assert left
    engine.receiver.shutdown()
    pool.close()


def test_a_server_that_is_told_from_another_though_it_is_the_same_leaves_its_groups(tmp_path: Path) -> None:
    """One that gave its memory back is another server, and in the groups that it was in."""
    places, manifest = Places(tmp_path), make_manifest(2)
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, manifest.largest_bucket, "lent")
    engine = Engine("e0", places.receiver("distributed"))
    for epoch in (1, 2):
        session = make_session(epoch, 10 + epoch, manifest)
        engine.start(session, sender.offer(session, [Peer("e0", 1)]), 1)
        sender.ready(PATIENCE_S)
        send_all(sender, session, pool, PATIENCE_S)
        sender.close()
        assert isinstance(engine.join(), Receipt)
        engine.server.launch = "the same with its memory back"
    assert list(engine.server._groups) == [f"weightbus-{CHANNEL}-2"]
    engine.receiver.shutdown()
    pool.close()
