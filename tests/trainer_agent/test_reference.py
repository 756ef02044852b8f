"""The public names: one page documents them all, its examples run, and importing them costs no torch."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import weightbus
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.publish.agent import RankZero, TrainerAgent
from weightbus.trainer_agent.publish.bucket_staging import BucketStaging
from weightbus.trainer_agent.publish.driver import PublisherContext
from weightbus.trainer_agent.publish.rank_commands import CommandedRanks
from weightbus.trainer_agent.rollouts.fleet import Fleet
from weightbus.trainer_agent.settings import TrainerSettings
from weightbus.trainer_agent.source import Source
from weightbus.trainer_agent.sources.hf_module import HFModuleSource
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

from ..kit.fake_bus import FakeCoordinator
from ..kit.fake_sender import FakeSender

PAGE = Path(__file__).parents[2] / "trainer_agent" / "REFERENCE.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_page_names_exactly_the_public_names() -> None:
    """Each is a row of a table; a name that comes to the front door comes to the page."""
    rows = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert sorted(rows) == sorted(set(rows))
    assert set(rows) == set(dir(weightbus))


def test_every_name_is_there() -> None:
    """And where a name is asked for that is not public, the error says so."""
    for name in dir(weightbus):
        assert getattr(weightbus, name).__module__.startswith("weightbus."), name
    with pytest.raises(AttributeError, match="no attribute 'Assembler'"):
        getattr(weightbus, "Assembler")  # noqa: B009


def test_importing_weightbus_imports_no_torch() -> None:
    """Nor do lineage, settings and errors, which rollout workers use."""
    script = (
        "import sys, weightbus\n"
        "weightbus.Lineage, weightbus.Staleness, weightbus.PublishFailed, weightbus.SourceError, weightbus.Outcome\n"
        "weightbus.Fleet, weightbus.Rollout, weightbus.NoEngineReady\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class Module(nn.Module):
    """Two parameters, of a class whose name is its architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)


class Bridge:
    """Stands for Megatron-Bridge's AutoBridge."""

    def export_hf_weights(self, model: Any, *, cpu: bool, show_progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
        del cpu, show_progress
        yield from model[0].state_dict().items()


class ConnectedInMemory(TrainerAgent):
    """An agent beside a coordinator and engines in memory. Arguments are checked as the real one checks them."""

    @classmethod
    def connect(cls, source: Source, **given: Any) -> ConnectedInMemory:  # type: ignore[override]
        inspect.signature(TrainerAgent.connect).bind(source, **given)
        plain = {key: value for key, value in given.items() if key not in ("settings", "progress")}
        settings = given.get("settings") or TrainerSettings(**plain)
        settings = msgspec.structs.replace(settings, max_lag=None)  # engines in memory report no version
        coordinator, ranks = FakeCoordinator(), CommandedRanks(source)
        manifest = Manifest.of(source.model, source.tensors(), settings.bucket_bytes)
        pool = BucketBuffers("cpu", 2, manifest.largest_bucket, "test")
        sender = FakeSender()
        context = PublisherContext(
            settings=settings,
            bus=coordinator,
            staging=BucketStaging(source, manifest, pool, ranks),
            make_sender=lambda _: sender,
            senders={},
            boot=coordinator.boot,
            progress=given.get("progress"),
        )
        return cls(source, settings, manifest, RankZero(context, pool, source))


def megatron(model_chunks: nn.Module, **given: Any) -> Source:
    """Stands for `MegatronSource`, which needs Megatron-core; its arguments are checked."""
    inspect.signature(MegatronSource).bind(model_chunks, **given)
    return HFModuleSource(model_chunks)


def fleet(channel: str, **given: Any) -> MagicMock:
    """Stands for a `Fleet`, which needs servers; the arguments are checked, and those of the methods."""
    inspect.signature(Fleet).bind(channel, **given)
    return MagicMock(**{"__enter__.return_value": create_autospec(Fleet, instance=True)})


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the examples take for given: a module, its training, a world of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    monkeypatch.setattr(weightbus, "TrainerAgent", ConnectedInMemory, raising=False)
    monkeypatch.setattr(weightbus, "MegatronSource", megatron, raising=False)
    monkeypatch.setattr(weightbus, "Fleet", fleet, raising=False)
    module = Module()
    train: Callable[[nn.Module], None] = lambda module: module.head.weight.data.add_(1.0)  # noqa: E731
    (tmp_path / "config.json").write_text('{"architectures": ["Module"]}')
    yield {
        "module": module,
        "model_chunks": module,
        "source": HFModuleSource(module),
        "bridge": Bridge(),
        "train": train,
        "steps": 2,
        "folder": tmp_path,
    }
    dist.destroy_process_group()


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str, names: dict[str, Any]) -> None:
    """Against a coordinator and engines in memory."""
    if "bridge" in example:
        names["model_chunks"] = [names["module"]]
    exec(compile(example, str(PAGE), "exec"), names)
