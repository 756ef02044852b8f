"""What is registered with NIXL is let go of when its epoch is over: registered memory is pinned, and can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.dataplane.errors import DataplaneError
from weightbus.dataplane.transports.interface import Peer
from weightbus.dataplane.transports.sends import nixl_group, sender as sends
from weightbus.dataplane.transports.sends.message_queues import SendQueue

from ...kit.fake_nixl import FakeNixl
from ...kit.toy_direct import WAIT_S, holds
from ...kit.toy_sends import SendingTrainer, SendsWorld
from ...kit.waiting import until


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    made = FakeNixl()
    monkeypatch.setattr(nixl_group, "_agent", made.agent)
    monkeypatch.setattr(sends, "pair_bytes_for", lambda *_: 256)
    return made


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def world(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nixl: FakeNixl
) -> Iterator[SendsWorld]:
    """Two ranks, and an engine; NIXL is one of this process."""
    del nixl
    made = SendsWorld(tmp_path / "r", request.param, monkeypatch)
    made.trainer.close()
    made.trainer = SendingTrainer(made.runtime, nixl=True)
    yield made
    made.close()


def test_an_epoch_that_is_over_leaves_nothing_registered(world: SendsWorld, nixl: FakeNixl) -> None:
    """In place and beside, on both sides, however many versions there were."""
    for seed in range(3):
        world.trainer.step(seed)
        before = nixl.ever
        world.round(stage=True)
        assert holds(world.server, world.trainer.values)
        assert nixl.ever == before + 2 + world.server.tp
        for rank in world.trainer.sending:
            rank.stop()
        assert not nixl.registered


def test_an_attempt_that_fails_leaves_nothing_registered(
    world: SendsWorld, nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot send ends it for all; whoever waits for its messages lets go of its memory too."""
    world.round(stage=True)
    with monkeypatch.context() as patched:
        patched.setattr(SendQueue, "send", lambda *_: 1 / 0)
        world.epoch += 1
        session = world.trainer.session(world.epoch)
        taken = world.receive(session, "e", world.offer(session), stage=True)
        world.trainer.sends.ready(WAIT_S)
        world.trainer.sends.finish(WAIT_S)
        assert isinstance(taken.exception(WAIT_S), DataplaneError)
    assert set(world.trainer.sends.failed) == {"e"}
    for rank in world.trainer.sending:
        rank.stop()
    until(lambda: not nixl.registered)  # threads that were called off end by themselves
    world.trainer.step(3)
    world.round(stage=True)
    assert holds(world.server, world.trainer.values)


def test_an_engine_that_does_not_come_leaves_nothing_registered(world: SendsWorld, nixl: FakeNixl) -> None:
    """The group that it was to be in is formed without it; one that cannot form lets go of what its ranks brought."""
    world.trainer.sends._form_s = 0.5
    real = nixl.agent

    def half(name: str) -> object:
        if name.endswith("-2"):
            until(lambda: nixl.ever)  # the ranks have brought theirs
            raise OSError("no such device")
        return real(name)

    nixl.agents.clear()
    nixl_group._agent = half
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    taken = world.receive(session, "e", world.offer(session, [Peer("e", world.server.tp)]))
    world.trainer.sends.ready(WAIT_S)
    world.trainer.sends.finish(WAIT_S)
    assert isinstance(taken.exception(WAIT_S), DataplaneError)
    for rank in world.trainer.sending:
        rank.stop()
    assert nixl.ever
    until(lambda: not nixl.registered, deadline_s=20)
