"""A group of sends serves round after round while nobody comes or goes; whatever happened to a member, none hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightbus.dataplane.errors import DataplaneError, DigestMismatch, TransferFailed
from weightbus.dataplane.transports import plan_exchange
from weightbus.dataplane.transports.interface import Peer
from weightbus.dataplane.transports.sends import group_transfer as standing, rank_sender as rank_sends, sender as sends
from weightbus.dataplane.transports.sends.rank_sender import RankSender
from weightbus.dataplane.transports.sends.receiver import SendsReceiver
from weightbus.engine_agent.worker import loader as worker_loader

from ...kit.toy_direct import WAIT_S, Server, holds
from ...kit.toy_sends import SendingTrainer, SendsWorld, formed_groups
from ...kit.waiting import until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    """Two ranks, and one engine of two workers."""
    made = SendsWorld(tmp_path / "r", 2, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of groups, once for each member that joined one."""
    return formed_groups(monkeypatch)


def a_round(world: SendsWorld) -> None:
    """One version, which must be served afterwards."""
    world.trainer.step(world.epoch + 10)
    world.round(stage=True)
    assert holds(world.server, world.trainer.values)


MEMBERS = 4


def test_rounds_of_the_same_members_form_one_group(world: SendsWorld, formed: list[str]) -> None:
    """In place and beside, while the engine is the only one, and until it need not be kept."""
    for _ in range(4):
        a_round(world)
    assert world.receiver.mode == "beside"
    assert (len(formed), len(set(formed))) == (MEMBERS, 1)
    world.trainer.sends._keep_s = 0.0
    for groups in (1, 2, 3):  # the one that was kept is used once more
        a_round(world)
        assert (len(formed), len(set(formed))) == (groups * MEMBERS, groups)


def test_an_engine_that_has_a_group_needs_no_store(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """None begins to form for it that nobody would use."""
    stores: list[str] = []
    serve = sends.serve_store
    monkeypatch.setattr(sends, "serve_store", lambda host: (stores.append(host), serve(host))[1])
    for _ in range(3):
        a_round(world)
    assert len(stores) == 1


def test_a_version_that_is_not_proven_leaves_no_group(world: SendsWorld, formed: list[str]) -> None:
    """Everything had moved, and what arrived was not the version: whatever spoilt it may be in the group."""
    a_round(world)
    a_round(world)
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    world.trainer.shards[0]["up"].view(torch.uint8)[1, 3].bitwise_xor_(4)
    taken = world.receive(session, "e", world.offer(session), stage=True)
    world.trainer.sends.ready(WAIT_S)
    world.trainer.sends.finish(WAIT_S)
    assert isinstance(taken.exception(WAIT_S), DigestMismatch)
    assert world.trainer.sends._stood.names == ()
    a_round(world)
    assert (len(formed), len(set(formed))) == (2 * MEMBERS, 2)


@pytest.mark.parametrize("what", ["a rank", "a sidecar", "the workers", "the leader", "the schedule"])
def test_an_engine_that_begins_anew_is_in_a_new_group(
    world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It died between two rounds: the next one does not wait for it in the old group."""
    a_round(world)
    a_round(world)
    match what:
        case "a rank":
            world.trainer.sending[1].close()
            world.trainer.sending[1] = RankSender("c", 1)
        case "a sidecar":
            world.receiver.shutdown()
            world.receiver = SendsReceiver(world.runtime)
        case "the workers":
            worker_loader.forget()
        case "the leader":
            world.trainer.close()
            world.trainer = SendingTrainer(world.runtime)
        case _:
            monkeypatch.setattr(sends, "pair_bytes_for", lambda *_: 256)
    a_round(world)
    assert (len(formed), len(set(formed))) == (2 * MEMBERS, 2)
    assert formed[-1].endswith("-early") or what not in ("a sidecar", "the workers")
    a_round(world)
    assert len(formed) == 2 * MEMBERS


def test_an_engine_that_comes_and_goes_has_no_engine_stand_still(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The others' schedules stay what they are: they take the version beside, and are told no plan anew."""
    others = {name: (Server(1, monkeypatch), SendsReceiver(world.runtime)) for name in ("v", "w")}
    for _, sidecar in others.values():
        request.addfinalizer(sidecar.shutdown)
    agreed: list[int] = []

    def with_(*names: str) -> str:
        world.epoch += 1
        world.trainer.step(world.epoch)
        session = world.trainer.session(world.epoch)
        address = world.offer(session, [Peer("e", 2), *(Peer(name, 1) for name in names)])
        taken = [world.receive(session, "e", address, stage=True)]
        taken += [world.pool.submit(others[name][1].receive, session, address, name, 0, others[name][0], WAIT_S)  # type: ignore[arg-type]
                  for name in names]  # fmt: skip
        world.trainer.sends.ready(WAIT_S)
        world.trainer.sends.finish(WAIT_S)
        for each in taken:
            each.result(WAIT_S)
        agreed.append(len(world.trainer.sends._plans.digests))
        return world.receiver.mode

    with_("v")
    assert [with_("v"), with_("v", "w"), with_("w", "v"), with_(), with_("w")] == ["beside"] * 5
    assert agreed == [3, 3, 3, 3, 3, 3], "w plans as v does, and is agreed with already"
    assert holds(world.server, world.trainer.values)
    assert holds(others["w"][0], world.trainer.values)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_server_launched_again_with_other_workers_is_served_by_the_same_sidecar(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Threads of workers that are no more take no part, however many there were."""
    a_round(world)
    a_round(world)
    worker_loader.forget()
    world.server = Server(workers, monkeypatch)
    for _ in range(3):
        a_round(world)
    assert world.receiver.mode == "beside"


@pytest.mark.parametrize("who", ["a rank", "a worker"])
def test_an_engine_that_lost_the_group_after_all_costs_one_attempt(
    world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """It said that it has it, and has it no more: everybody hears of it at once, and the next attempt forms another."""
    a_round(world)
    a_round(world)
    take, left = standing.GroupCache.take, [1]

    def lose(self: standing.GroupCache, *which: Any) -> Any:
        if left[0] and self in ([world.trainer.sending[1]._session.kept.groups] if who == "a rank" else takers()):
            left[0] -= 1
            self.discard()
        return take(self, *which)

    def takers() -> list[standing.GroupCache]:
        states = worker_loader._states.values()
        return [state._receive_thread._groups for state in states if state._receive_thread is not None][:1]

    monkeypatch.setattr(standing.GroupCache, "take", lose)
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    taken = world.receive(session, "e", world.offer(session), stage=True)
    began = time.monotonic()
    world.trainer.sends.ready(WAIT_S)
    world.trainer.sends.finish(WAIT_S)
    assert set(world.trainer.sends.failed) == {"e"}
    assert isinstance(taken.exception(WAIT_S), DataplaneError)
    assert time.monotonic() - began < WAIT_S / 2
    assert not world.receiver.touched
    a_round(world)
    a_round(world)
    assert (len(formed), len(set(formed))) == (2 * MEMBERS, 2)


def test_a_rank_that_is_stuck_touches_nothing_of_its_next_epoch(
    world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after a while; what it does when it goes on at last is its own end."""
    stuck, released, parts_of = threading.Event(), threading.Event(), RankSender._parts_of

    def slow(*arguments: Any) -> Any:
        if threading.current_thread() is rank._session.thread and not stuck.is_set():
            stuck.set()
            released.wait(WAIT_S)
        return parts_of(*arguments)

    rank = world.trainer.sending[1]
    monkeypatch.setattr(rank_sends, "_END_S", 0.1)
    monkeypatch.setattr(RankSender, "_parts_of", slow)
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    taken = world.receive(session, "e", world.offer(session))
    world.trainer.sends.ready(WAIT_S)
    assert stuck.wait(WAIT_S)
    old = rank._session.thread
    world.trainer.sends.close()
    assert isinstance(taken.exception(WAIT_S), DataplaneError)
    a_round(world)
    groups = len(set(formed))
    released.set()
    assert old is not None
    old.join(WAIT_S)
    assert rank.failure == ""
    a_round(world)
    assert rank.failure == ""
    assert len(set(formed)) == groups


def test_a_joiner_that_does_not_come_costs_the_fleet_no_group(world: SendsWorld, formed: list[str]) -> None:
    """What begins to form for it alone is not used: the next version goes over the group of the last one."""
    a_round(world)
    a_round(world)
    world.epoch += 1
    address = world.trainer.sends.offer(world.trainer.session(world.epoch), [Peer("joiner", 2)])
    world.trainer.summon(address, world.epoch)
    with pytest.raises(TransferFailed, match="joiner did not come"):
        world.trainer.sends.ready(WAIT_S, 1.0)
    world.trainer.sends.close()
    a_round(world)
    assert (len(formed), len(set(formed))) == (MEMBERS, 1)


def test_an_engine_that_is_never_there_costs_the_others_no_group(world: SendsWorld, formed: list[str]) -> None:
    """It is invited to every version, and was never in the group."""
    for _ in range(3):
        world.epoch += 1
        world.trainer.step(world.epoch)
        session = world.trainer.session(world.epoch)
        taken = world.receive(session, "e", world.offer(session, [Peer("e", 2), Peer("dead", 1)]), stage=True)
        world.trainer.sends.ready(WAIT_S, 1.0)
        world.trainer.sends.finish(WAIT_S)
        taken.result(WAIT_S)
        assert set(world.trainer.sends.failed) == {"dead"}
    assert (len(formed), len(set(formed))) == (MEMBERS, 1)


@pytest.mark.parametrize("how", ["comes", "dies while it prepares"])
def test_a_joiner_that_comes_has_a_group_with_the_ranks(
    world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, how: str
) -> None:
    """Its own, which begins to form early. If that comes to nothing, the fleet's is there still."""
    a_round(world)
    a_round(world)
    server, sidecar = Server(1, monkeypatch), SendsReceiver(world.runtime)
    request.addfinalizer(sidecar.shutdown)
    if how != "comes":

        def fail(*_: object) -> object:
            until(lambda: len(formed) == MEMBERS + 3, "the group to form", WAIT_S)
            raise TransferFailed("no plan")

        plan = plan_exchange.make_plan
        monkeypatch.setattr(plan_exchange, "make_plan", fail)
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    address = world.trainer.sends.offer(session, [Peer("joiner", 1)])
    world.trainer.summon(address, world.epoch)
    taken = world.pool.submit(sidecar.receive, session, address, "joiner", 0, server, WAIT_S)  # type: ignore[arg-type]
    if how == "comes":
        world.trainer.sends.ready(WAIT_S)
        world.trainer.sends.finish(WAIT_S)
        taken.result(WAIT_S)
        assert world.trainer.sends.failed == {}
        assert holds(server, world.trainer.values)
        assert formed[-1].endswith("-early")
        return
    with pytest.raises(TransferFailed, match="no plan"):
        world.trainer.sends.ready(WAIT_S)
    world.trainer.sends.close()
    assert isinstance(taken.exception(WAIT_S), DataplaneError)
    monkeypatch.setattr(plan_exchange, "make_plan", plan)
    a_round(world)
    assert len(set(formed)) == 2
