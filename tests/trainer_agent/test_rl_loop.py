"""The loop of trainer_agent/RL_LOOP.md, run with a coordinator and engines in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weightbus
from weightbus.control.protocol import messages as m

from ..kit.fake_bus import FakeCoordinator
from . import test_reference
from .test_reference import ConnectedInMemory, Module

PAGE = Path(__file__).parents[2] / "trainer_agent" / "RL_LOOP.md"
LOOP, BACK = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


class Coordinator(FakeCoordinator):
    """Aborts the rounds of some versions. Its committed versions outlive an agent."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[int] = set()
        self.published: list[int] = []

    def _sent(self, message: m.Sent) -> None:
        assert self._round is not None
        if self._round.version in self.failing:
            self.finish(self._round, m.Outcome.ABORTED, "engines were taken away")
            return
        self.published.append(self._round.version)
        super()._sent(message)


class World:
    """What the loop takes for given: a checkpoint, servers that answer, training."""

    def __init__(self, checkpoint: Path, coordinator: Coordinator) -> None:
        self.checkpoint = checkpoint
        self.coordinator = coordinator
        self.learned: list[list[tuple[list[int], tuple[bool, ...]]]] = []
        self.module = Module()

    def names(self, steps: int) -> dict[str, Any]:
        given = {"restore": self.restore, "save": self.save, "generate": self.generate, "train": self.train}
        return {**given, "module": self.module, "steps": steps}

    def restore(self, module: Module) -> int:
        if not self.checkpoint.exists():
            return 0
        saved = torch.load(self.checkpoint)
        module.load_state_dict(saved["model"])
        return int(saved["version"])

    def save(self, module: Module, version: int) -> None:
        torch.save({"model": module.state_dict(), "version": version}, self.checkpoint)

    def generate(self, step: int) -> list[dict[str, Any]]:
        """A response of what is served, one that three versions wrote, and one of the server's launch."""
        del step
        now = self.coordinator.committed
        assert now is not None
        mixed = [
            {"version": str(now.version - 2), "start": 0, "end": 1},
            {"version": str(now.version), "start": 1, "end": 2},
        ]
        return [
            {
                "output_ids": [1, 2],
                "meta_info": {"weight_versions": [{"version": str(now.version), "start": 0, "end": 2}]},
            },
            {"output_ids": [3, 4], "meta_info": {"weight_versions": mixed}},
            {"output_ids": [5], "meta_info": {"weight_versions": [{"version": "default", "start": 0, "end": 1}]}},
        ]

    def train(self, module: Module, batch: list[tuple[list[int], tuple[bool, ...]]]) -> None:
        self.learned.append(batch)
        module.head.weight.data.add_(1.0)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    coordinator = Coordinator()

    class Connected(ConnectedInMemory):
        @property
        def committed(self) -> int | None:
            return coordinator.committed.version if coordinator.committed else None

    monkeypatch.setattr(test_reference, "FakeCoordinator", lambda: coordinator)
    monkeypatch.setattr(weightbus, "TrainerAgent", Connected, raising=False)
    yield World(tmp_path / "checkpoint.pt", coordinator)
    dist.destroy_process_group()


def run(world: World, steps: int) -> dict[str, Any]:
    names = world.names(steps)
    exec(compile(LOOP, str(PAGE), "exec"), names)
    return names


def test_each_step_is_published_and_learns_from_fresh_tokens(world: World) -> None:
    """Tokens of the version in training and the one before count; older ones are masked, those of a launch dropped."""
    run(world, 3)
    assert world.coordinator.published == [1, 2, 3, 4]
    assert world.learned[-1] == [([1, 2], (True, True)), ([3, 4], (False, True))]


def test_a_round_that_fails_does_not_end_the_loop(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The next step publishes what it left out, while responses age; those of two versions before are dropped."""
    world.coordinator.failing = {2, 3}
    run(world, 4)
    assert world.coordinator.published == [1, 4, 5]
    assert "version 2 was not published (aborted)" in capsys.readouterr().out
    assert [len(batch) for batch in world.learned] == [2, 2, 0, 2]


def test_a_trainer_starts_again_from_its_checkpoint(world: World) -> None:
    """With the weights of the checkpoint, and a version above the committed one."""
    run(world, 2)
    weights = world.module.head.weight.detach().clone()
    world.module = Module()
    run(world, 1)
    assert world.coordinator.published == [1, 2, 3, 4, 5]
    assert torch.equal(world.module.head.weight, weights + 1.0)


def test_a_channel_goes_back_to_a_number(world: World) -> None:
    """Where the trainer says so."""
    run(world, 2)
    source = weightbus.HFModuleSource(world.module)
    agent = weightbus.TrainerAgent.connect(source, channel="policy")
    exec(compile(BACK, str(PAGE), "exec"), {"agent": agent, "version": 2})
    assert agent.committed == 2
    last = world.coordinator.said(m.Publish)[-1]
    assert isinstance(last, m.Publish)
    assert last.rollback
    agent.close()
