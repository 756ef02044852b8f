"""Workers that say, when they are asked, that they are on one GPU: NCCL would refuse the group, and end it for all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from weightbus.dataplane.errors import DataplaneError
from weightbus.dataplane.memory.cuda_memory import NCCL_HOSTID, nccl_gpu_id, nccl_gpu_id_here
from weightbus.dataplane.transports.interface import Peer, Receipt
from weightbus.dataplane.transports.sends import group_transfer as standing, rank_sender as rank_sends
from weightbus.dataplane.transports.sends.receiver import SendsReceiver
from weightbus.engine_agent.worker import loader as worker_loader, worker_state

from ...kit.toy_direct import WAIT_S, Server, holds
from ...kit.toy_sends import SendsWorld, formed_groups
from ...kit.waiting import until

MEMBERS = 3
"""Of a group: the trainer's ranks, and a worker."""

real = worker_state.WorkerState.__init__


class Crowd:
    """A world with a second engine, ``f``; what GPU workers say that they are on is by the engine."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = SendsWorld(tmp_path / "r", 1, monkeypatch)
        self.monkeypatch = monkeypatch
        self.server, self.receiver = Server(1, monkeypatch), SendsReceiver(tmp_path / "r")

    def on(self, **gpus: str) -> None:
        """Where the next workers are, by engine. A worker says so once in its life."""
        worker_loader.forget()
        servers = {"e": self.world.server, "f": self.server}
        places = {servers[name].models[0]: gpu for name, gpu in gpus.items()}

        def say(self: worker_state.WorkerState, model: torch.nn.Module) -> None:
            real(self, model)
            self._device_name = places[model]  # type: ignore[index]

        self.monkeypatch.setattr(worker_state.WorkerState, "__init__", say)

    def round(self, *engines: str, version: int = 0) -> dict[str, Future[Receipt]]:
        """One attempt with these, of `version` or of a new one; how it ended for each."""
        world = self.world
        world.epoch += 1
        world.trainer.step(version or world.epoch)
        session = msgspec.structs.replace(world.trainer.session(version or world.epoch), epoch=world.epoch)
        address = world.offer(session, [Peer(name, 1) for name in engines])
        taken: dict[str, Future[Receipt]] = {}
        for name in engines:
            if name == "e":
                taken[name] = world.receive(session, "e", address)
            else:
                taken[name] = world.pool.submit(
                    self.receiver.receive,
                    session,
                    address,
                    "f",
                    0,
                    self.server,
                    WAIT_S,  # type: ignore[arg-type]
                )
        world.trainer.sends.ready(WAIT_S)
        world.trainer.sends.finish(WAIT_S)
        for each in taken.values():
            each.exception(WAIT_S)
        return taken


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of groups, once for each member that joined one."""
    return formed_groups(monkeypatch)


@pytest.fixture
def crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    made = Crowd(tmp_path, monkeypatch)
    yield made
    made.receiver.shutdown()
    made.world.close()


def test_the_second_worker_of_a_gpu_is_left_out_before_the_group_forms(crowd: Crowd) -> None:
    """The first engine takes the version in that attempt; the other, which was well, in one of its own after it."""
    crowd.on(e="gpu-0", f="gpu-0")
    taken = crowd.round("e", "f")
    sends = crowd.world.trainer.sends
    assert taken["e"].exception() is None
    assert holds(crowd.world.server, crowd.world.trainer.values)
    assert isinstance(taken["f"].exception(), DataplaneError)
    assert not crowd.receiver.touched
    assert set(sends.failed) == sends.spared == {"f"}, "it is not at fault, and is driven again for nothing"
    assert "a worker of f and a worker of e are on GPU gpu-0" in sends.failed["f"]
    assert "give each a GPU of its own" in sends.failed["f"]
    assert crowd.round("f")["f"].exception() is None
    assert holds(crowd.server, crowd.world.trainer.values)


def turns(crowd: Crowd, version: int, *engines: str) -> None:
    """All of them, one after the other."""
    for name in engines:
        assert crowd.round(name, version=version)[name].exception() is None


def test_an_engine_that_takes_turns_has_a_group_of_its_own_that_stays(crowd: Crowd, formed: list[str]) -> None:
    """Version after version over the same two, until one of the engines is not there for two of them."""
    crowd.on(e="gpu-0", f="gpu-0")
    for version in (1, 2, 3):
        turns(crowd, version, "e", "f")
        assert len(set(formed)) == 2
    turns(crowd, 4, "f", "e")
    assert (len(formed), len(set(formed))) == (2 * MEMBERS, 2)
    assert holds(crowd.world.server, crowd.world.trainer.values)
    assert holds(crowd.server, crowd.world.trainer.values)
    caches = [rank._session.kept.groups for rank in crowd.world.trainer.sending]
    for version, groups in ((5, 2), (6, 1)):
        turns(crowd, version, "e")
        until(lambda: {len(each.names) for each in caches} == {groups}, f"{groups} groups to stay", WAIT_S)  # noqa: B023
    turns(crowd, 7, "e", "f")
    assert len(set(formed)) == 3


def test_an_engine_that_is_spared_costs_no_engine_a_group(crowd: Crowd, formed: list[str]) -> None:
    """Where agents cannot say their GPUs, every version begins with both; the first one's group stays nevertheless."""
    crowd.on(e="gpu-0", f="gpu-0")
    for version in (1, 2, 3):
        assert crowd.round("e", "f", version=version)["e"].exception() is None
        assert crowd.world.trainer.sends.spared == {"f"}
        turns(crowd, version, "f")
        assert len(set(formed)) == 2


@pytest.mark.parametrize("what", ["it begins anew", "it lost the group after all"])
def test_an_engine_that_needs_a_new_group_costs_the_others_in_turn_nothing(
    crowd: Crowd, formed: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Theirs is another one, which stays."""
    crowd.on(e="gpu-0", f="gpu-0")
    turns(crowd, 1, "e", "f")
    if what == "it begins anew":
        crowd.receiver.shutdown()
        crowd.receiver = SendsReceiver(crowd.world.runtime)
    else:
        take, lost = standing.GroupCache.take, formed[-1]
        ranks = [rank._session.kept.groups for rank in crowd.world.trainer.sending]

        def lose(self: standing.GroupCache, *which: Any) -> Any:
            if lost in self.names and self not in ranks:
                self.discard()
            return take(self, *which)

        monkeypatch.setattr(standing.GroupCache, "take", lose)
        assert crowd.round("f", version=2)["f"].exception() is not None
    turns(crowd, 2, "f", "e")
    turns(crowd, 3, "e", "f")
    assert (len(formed), len(set(formed))) == (3 * MEMBERS, 3)
    assert holds(crowd.server, crowd.world.trainer.values)


def test_workers_on_gpus_of_their_own_are_in_one_group(crowd: Crowd) -> None:
    """And of hosts without GPUs."""
    for e, f in (("gpu-0", "gpu-1"), ("cpu", "cpu")):
        crowd.on(e=e, f=f)
        taken = crowd.round("e", "f")
        assert [each.exception() for each in taken.values()] == [None, None]
        assert not crowd.world.trainer.sends.failed


def test_a_worker_on_a_rank_s_gpu_is_at_fault(crowd: Crowd) -> None:
    """It would be again: it pays for its next attempt, and the others go on without it."""
    crowd.on(e="gpu-1", f="gpu-0")
    turn = itertools.count()
    crowd.monkeypatch.setattr(rank_sends, "nccl_gpu_id_here", lambda _gpu: "gpu-0" if next(turn) == 0 else "gpu-2")
    taken = crowd.round("e", "f")
    sends = crowd.world.trainer.sends
    assert taken["e"].exception() is None
    assert set(sends.failed) == {"f"}
    assert not sends.spared
    assert re.search("a worker of f and rank . of the trainer are on GPU gpu-0", sends.failed["f"])


def test_members_that_nccl_takes_for_several_hosts_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By NCCL's own variable, which stands in for hosts that nobody has; the processor is nobody's seat."""
    assert (nccl_gpu_id("gpu-0", ""), nccl_gpu_id("cpu", "one")) == ("gpu-0", "")
    monkeypatch.setenv(NCCL_HOSTID, "one")
    assert nccl_gpu_id_here("gpu-0") == nccl_gpu_id("gpu-0", "one") != nccl_gpu_id("gpu-0", "two")
