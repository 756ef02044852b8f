"""What may change between two versions, or while one is taken beside: nothing is put into place that is not whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.transports import plan_exchange
from weightbus.dataplane.transports.interface import Address, TransferSession
from weightbus.dataplane.transports.plan_exchange import Attempt, GiveLayout
from weightbus.engine_agent.worker import loader as worker_loader
from weightbus.engine_agent.worker.model_tensors import ModelTensors
from weightbus.engine_agent.worker.receive_thread import ReceiveThread

from ...kit.toy_direct import WAIT_S, holds
from ...kit.toy_sends import SendsWorld
from ...kit.waiting import until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    """Two ranks, and an engine of two workers that takes versions beside what it serves."""
    made = SendsWorld(tmp_path / "r", 2, monkeypatch)
    for seed in (1, 2):
        made.trainer.step(seed)
        made.round(stage=True)
    assert made.receiver.mode == "beside"
    yield made
    made.close()


def stage(world: SendsWorld) -> tuple[TransferSession, Address]:
    """A version that the workers have taken, and not put into place."""
    world.epoch += 1
    world.trainer.step(world.epoch + 10)
    session = world.trainer.session(world.epoch)
    address = world.offer(session)
    taken = world.pool.submit(world.receiver.stage, session, address, "e", WAIT_S)
    world.trainer.sends.ready(WAIT_S)
    assert taken.result(WAIT_S)
    return session, address


def takers() -> list[ReceiveThread]:
    """Those of all workers."""
    return [state._receive_thread for state in worker_loader._states.values() if state._receive_thread is not None]


def held(world: SendsWorld) -> list[torch.Tensor]:
    """What the server serves."""
    return [tensor.clone() for model in world.server.models for tensor in ModelTensors(model).tensors]


def test_a_trainer_whose_layout_is_new_has_the_server_stand_still_once(world: SendsWorld) -> None:
    """What was planned is of where its tensors lay before: it is planned anew, with the server at rest."""
    for shard in world.trainer.shards:
        shard["up"] = torch.empty_like(shard["up"].t().contiguous()).t()
    for seed, mode in ((3, "paused: the trainer's layout is new"), (4, "beside")):
        world.trainer.step(seed)
        world.round(stage=True)
        assert world.receiver.mode == mode
        assert holds(world.server, world.trainer.values)


def test_a_version_is_not_put_into_tensors_that_it_was_not_taken_for(world: SendsWorld) -> None:
    """They were replaced meanwhile: the server goes on with what it has, which is whole, and takes the version anew."""
    session, address = stage(world)
    world.server.models[1].up.data = world.server.models[1].up.data.clone()
    before = held(world)
    with pytest.raises(TransferFailed, match="tensors were replaced while it took the version: take it again"):
        world.receiver.receive(session, address, "e", 0, world.server, WAIT_S)  # type: ignore[arg-type]
    world.trainer.sends.finish(WAIT_S)
    assert "were replaced" in world.trainer.sends.failed["e"]
    assert not world.receiver.touched
    assert all(torch.equal(one, other) for one, other in zip(before, held(world), strict=True))
    world.round()
    assert holds(world.server, world.trainer.values)


def test_a_version_that_was_taken_asks_for_no_layout(world: SendsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one was heard in a round that failed before its plans were agreed to: what was taken needs none."""
    exchange = world.receiver._exchange
    assert exchange.layout is not None
    exchange.layout = replace(exchange.layout, digest="of a round that failed")
    session, address = stage(world)
    monkeypatch.setattr(plan_exchange, "read_layout", lambda attempt: pytest.fail(f"asked for {attempt.layout}"))
    said: list[object] = []
    say = Attempt.say
    monkeypatch.setattr(Attempt, "say", lambda attempt, message: (said.append(message), say(attempt, message))[1])
    taken = world.pool.submit(world.receiver.receive, session, address, "e", 0, world.server, WAIT_S)  # type: ignore[arg-type]
    world.trainer.sends.finish(WAIT_S)
    assert taken.result(WAIT_S).checked
    assert not any(isinstance(each, GiveLayout) for each in said)
    assert holds(world.server, world.trainer.values)


def test_a_version_whose_session_is_over_can_not_be_put_into_place(world: SendsWorld) -> None:
    """Its engine's sidecar has let go of it: every worker is told so."""
    stage(world)
    before = held(world)
    world.receiver.close()
    until(lambda: not any(each._taken for each in takers()), "the workers to forget it", WAIT_S)
    for each in takers():
        with pytest.raises(TransferFailed, match="nothing was taken"):
            each.swap()
    assert all(torch.equal(one, other) for one, other in zip(before, held(world), strict=True))
    world.trainer.sends.close()
    world.round(stage=True)
    assert world.receiver.mode == "beside"
    assert holds(world.server, world.trainer.values)
