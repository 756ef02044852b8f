"""A group of one engine forms while the engine still prepares; whatever becomes of that, nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightbus.dataplane.errors import DataplaneError, PeerLost, TransferFailed
from weightbus.dataplane.transports import plan_exchange
from weightbus.dataplane.transports.interface import Peer
from weightbus.dataplane.transports.sends import group_transfer as standing
from weightbus.dataplane.transports.sends.p2p_group import P2PGroup
from weightbus.dataplane.transports.sends.receiver import SendsReceiver
from weightbus.engine_agent.worker import loader as worker_loader, receive_thread as taker

from ...kit.toy_direct import WAIT_S, Server, holds
from ...kit.toy_sends import SendsWorld, formed_groups
from ...kit.waiting import until

MEMBERS = 4


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    """Two ranks, and one engine of two workers."""
    made = SendsWorld(tmp_path / "r", 2, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of groups, once for each member that has joined one."""
    return formed_groups(monkeypatch)


def attempt(world: SendsWorld) -> Exception | None:
    """One that is to fail; why it did, for the engine."""
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    taken = world.receive(session, "e", world.offer(session))
    try:
        world.trainer.sends.ready(WAIT_S)
        world.trainer.sends.finish(WAIT_S)
    except TransferFailed:
        pass
    finally:
        world.trainer.sends.close()
    error = taken.exception(WAIT_S)
    assert error is None or isinstance(error, DataplaneError)
    return error


def test_it_forms_while_the_engine_plans(world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All have joined before there is a plan; the version goes over that group, and so do those that follow."""
    plan, waited = plan_exchange.make_plan, []

    def planned(*arguments: Any) -> Any:
        waited.append(until(lambda: len(formed) >= MEMBERS, "the group to form", WAIT_S))
        return plan(*arguments)

    monkeypatch.setattr(plan_exchange, "make_plan", planned)
    world.round()
    assert waited
    assert holds(world.server, world.trainer.values)
    for seed in (1, 2):
        world.trainer.step(seed)
        world.round(stage=True)
        assert holds(world.server, world.trainer.values)
    assert (len(formed), len(set(formed))) == (MEMBERS, 1)
    assert formed[0].endswith("-early")


@pytest.mark.parametrize("what", ["its engine cannot prepare", "a worker cannot reach its sidecar"])
def test_an_attempt_that_fails_leaves_no_engine_in_it(
    world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A communicator would stay in the server: what has formed is let go of, and the next attempt has its own group."""
    dropped: list[object] = []
    drop = P2PGroup.drop
    monkeypatch.setattr(P2PGroup, "drop", lambda group: (dropped.append(group), drop(group))[1])
    with monkeypatch.context() as patched:

        def fail(*_: object) -> object:
            until(lambda: len(formed) >= MEMBERS, "the group to form", WAIT_S)
            raise PeerLost(what)

        if what == "its engine cannot prepare":
            patched.setattr(plan_exchange, "make_plan", fail)
        else:
            patched.setattr(taker, "Frames", SimpleNamespace(connect=fail))
        assert what in str(attempt(world))
    for rank in world.trainer.sending:
        rank.stop()
    until(lambda: len(dropped) >= MEMBERS, "everybody to let go of it", WAIT_S)
    assert not world.receiver.touched
    world.round()
    assert holds(world.server, world.trainer.values)
    assert (len(formed), len(set(formed))) == (2 * MEMBERS, 2)


def test_a_rank_that_cannot_join_ends_the_attempt(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would have later: everybody hears of it, and the next attempt is whole."""
    world.trainer.sends._form_s = 2.0
    with monkeypatch.context() as patched:
        take = standing.GroupCache.take

        def lost(self: standing.GroupCache, *which: Any) -> Any:
            if self is world.trainer.sending[1]._session.kept.groups:
                self.call_off()
            return take(self, *which)

        patched.setattr(standing.GroupCache, "take", lost)
        began = time.monotonic()
        assert attempt(world) is not None
        assert time.monotonic() - began < WAIT_S / 2
    world.trainer.sends._form_s = WAIT_S
    world.round()
    assert holds(world.server, world.trainer.values)


def test_a_rank_that_does_not_come_leaves_the_workers_with_nothing(world: SendsWorld) -> None:
    """They wait for it no longer than their engine does, and keep nothing of a group that it was to be in."""
    world.trainer.sends._form_s = 2.0
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    address = world.trainer.sends.offer(session, [Peer("e", 2)])
    world.trainer.summon(address, world.epoch, ranks=(0,))
    taken = world.receive(session, "e", address)
    with pytest.raises(TransferFailed, match=r"ranks \[1\] of the trainer did not come"):
        world.trainer.sends.ready(WAIT_S, 3.0)
    world.trainer.sends.close()
    assert isinstance(taken.exception(WAIT_S), DataplaneError)
    takers = [state._receive_thread for state in worker_loader._states.values() if state._receive_thread is not None]
    assert len(takers) == world.server.tp
    until(lambda: not any(taker._groups._forming for taker in takers), "workers to let go of it", WAIT_S)
    world.trainer.sends._form_s = WAIT_S
    world.round()
    assert holds(world.server, world.trainer.values)


def test_several_engines_wait_until_all_are_prepared(
    world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One that fails before costs the others nothing: there is no group yet."""
    other, sidecar = Server(1, monkeypatch), SendsReceiver(world.runtime)
    request.addfinalizer(sidecar.shutdown)
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    address = world.offer(session, [Peer("e", 2), Peer("v", 1)])
    ours = world.receive(session, "e", address)
    theirs = world.pool.submit(sidecar.receive, session, address, "v", 0, other, WAIT_S)  # type: ignore[arg-type]
    world.trainer.sends.ready(WAIT_S)
    world.trainer.sends.finish(WAIT_S)
    ours.result(WAIT_S)
    theirs.result(WAIT_S)
    assert len(set(formed)) == 1
    assert not formed[0].endswith("-early")


def test_a_rank_that_comes_late_finds_a_group_that_forms(world: SendsWorld, formed: list[str]) -> None:
    """The workers have waited for it in vain by then, in the one that they began to join: that one is not used."""
    world.trainer.sends._form_s = 2.0
    session = world.trainer.session(1)
    address = world.trainer.sends.offer(session, [Peer("e", world.server.tp)])
    taken = world.receive(session, "e", address)
    threading.Timer(4.0, world.trainer.summon, (address, session.epoch)).start()
    world.trainer.sends.ready(WAIT_S)
    world.trainer.sends.finish(WAIT_S)
    assert taken.result(WAIT_S).checked
    assert holds(world.server, world.trainer.values)
    assert not any(name.endswith("-early") for name in formed)
