"""Servers that speculate: the served model and its draft models take one version, within one call of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from weightbus.dataplane.errors import DataplaneError, DigestMismatch, PeerLost
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.transports.plan_exchange import Prerecording
from weightbus.engine_agent.worker import loader as worker_loader
from weightbus.engine_agent.worker.load_tracer import NamedTensors

from ...kit.toy_direct import SPECS, WAIT_S, ToyShard, World, holds

NEXT = TensorSpec("next", "bfloat16", (8, 8))


class Served(ToyShard):
    """Asks nothing of the prediction layer."""

    def load_weights(self, weights: NamedTensors) -> None:
        """As models with a prediction layer in their checkpoint do it."""
        super().load_weights((name, tensor) for name, tensor in weights if name != NEXT.name)


class Draft(ToyShard):
    """Asks for the prediction layer, and for the norm that it shares with the served model."""

    def __init__(self, rank: int, tp: int) -> None:
        torch.nn.Module.__init__(self)
        self.rank, self.tp = rank, tp
        self.next = torch.nn.Parameter(torch.zeros(8 // tp, 8, dtype=torch.bfloat16), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: NamedTensors) -> None:
        """Rows of the layer, all of the norm."""
        for name, tensor in weights:
            if name == NEXT.name:
                rows = tensor.shape[0] // self.tp
                self.next.data.copy_(tensor.narrow(0, rows * self.rank, rows))
            elif name == "norm":
                self.norm.data.copy_(tensor)


@pytest.fixture(params=[(1, 1), (2, 1), (2, 2)], ids=["tp1", "tp2", "tp2-two-drafts"])
def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    tp, drafts = request.param
    made = World(tmp_path / "r", tp, monkeypatch, (*SPECS, NEXT), Served, (Draft,) * drafts)
    yield made
    made.close()


def test_a_round_brings_every_model_the_version(world: World) -> None:
    """In one call of the server; the second round neither records nor plans."""
    assert world.round().checked
    assert holds(world.server, world.trainer.values)
    world.trainer.step(1)

    world.round()

    assert world.server.calls == 2
    assert "plan" not in world.receiver.seconds
    assert holds(world.server, world.trainer.values)


@pytest.mark.parametrize("tensor", [NEXT.name, "norm", "up"])
def test_what_any_model_lacks_is_noticed(world: World, tensor: str) -> None:
    """A layer that only the draft model holds, one that both do, and one of the served model alone."""
    session = world.trainer.session(1)
    for shard in world.trainer.shards:
        shard[tensor].view(torch.uint8).reshape(-1)[5] ^= 4

    with pytest.raises(DigestMismatch, match=tensor):
        world.round(session)

    assert world.receiver.touched


def test_a_later_model_that_fails_leaves_the_engine_touched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers wrote nothing, but those of the model before it did."""
    replay = worker_loader.WorkerState.execute_plan

    def refuse(
        state: worker_loader.WorkerState, message: worker_loader.wire.ExecutePlan, called_off: Callable[[], bool]
    ) -> worker_loader.wire.PlanExecuted:
        if any(state is worker_loader._states.get(model) for model in world.server.models):
            raise PeerLost("out of memory")
        return replay(state, message, called_off)

    monkeypatch.setattr(worker_loader.WorkerState, "execute_plan", refuse)

    with pytest.raises(DataplaneError, match="out of memory"):
        world.round()

    assert world.receiver.touched


def test_a_server_that_skips_its_draft_model_is_not_waited_for(world: World) -> None:
    """Whatever a server calls the loader for is served; one that says it speculates may have no model for it."""
    world.server.draft_models = [[] for _ in world.server.models]

    assert world.round().checked


@pytest.mark.parametrize("drafts", [True, False])
def test_a_recording_tells_what_no_model_keeps(world: World, *, drafts: bool) -> None:
    """A prediction layer without its draft model: nothing of it can change, and nothing has to be proven (N64)."""
    if not drafts:
        world.server.draft_models = [[] for _ in world.server.models]
    made = Prerecording(world.runtime)
    made.record((*SPECS, NEXT), "e", world.server, WAIT_S)  # type: ignore[arg-type]
    assert made.used == {spec.name for spec in ((*SPECS, NEXT) if drafts else SPECS)}
