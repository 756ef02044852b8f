"""A family without a table goes through Megatron-Bridge by itself, or is refused with what to install.

Megatron-Bridge itself is a stand-in here; tests/kit/bridge_ranks.py has the real one.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.source import LayoutMismatch, PipelineSource, UnsupportedModel
from weightbus.trainer_agent.sources.megatron.bridge_mode import BridgedSource
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

from ....kit.exporting import tensors_in

NEW = {"architectures": ["NewForCausalLM"], "model_type": "llama"}


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A world of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class AutoBridge:
    """What Megatron-Bridge's class does with a family that it knows."""

    made_of: object = None

    @classmethod
    def from_hf_pretrained(cls, path: str) -> "AutoBridge":
        cls.made_of = path
        return cls()

    @classmethod
    def from_hf_config(cls, config: Any) -> "AutoBridge":
        cls.made_of = config.architectures
        return cls()

    def export_hf_weights(self, model: Any, *, cpu: bool, show_progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
        assert (cpu, show_progress) == (False, False)
        yield "model.new.weight", model[0].weight
        yield "model.new.scale", model[0].bias.float()


class AutoConfig:
    """What transformers' class does with the content of a config."""

    @staticmethod
    def for_model(model_type: str, **rest: object) -> SimpleNamespace:
        assert model_type == "llama"
        return SimpleNamespace(**rest)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> type[AutoBridge]:
    """Megatron-Bridge, as far as it is asked."""
    module = ModuleType("megatron.bridge")
    module.AutoBridge, module.__version__ = AutoBridge, "9.8.7"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    transformers = ModuleType("transformers")
    transformers.AutoConfig = AutoConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    return AutoBridge


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2, dtype=torch.bfloat16)


def test_a_family_without_a_table_is_converted_by_megatron_bridge(bridge: type[AutoBridge]) -> None:
    """Whole tensors, each in the dtype that the trainer keeps; said once, with family, package and version."""
    model = linear()
    with structlog.testing.capture_logs() as logs:
        source = MegatronSource(model, hf_config=NEW)
    assert isinstance(source, BridgedSource)
    assert not isinstance(source, PipelineSource)  # no rank has a part that it could send alone
    assert bridge.made_of == ["NewForCausalLM"]
    assert (source.model, source.served) == ("NewForCausalLM", NEW)
    manifest = Manifest.of("NewForCausalLM", source.tensors())
    with structlog.testing.capture_logs() as later:
        for _ in range(2):
            out = torch.zeros(manifest.buckets[0].nbytes, dtype=torch.uint8)
            source.assemble(manifest, 0, out)
    found = tensors_in(manifest, 0, out)
    assert torch.equal(found["model.new.weight"], model.weight)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "model.new.weight": torch.bfloat16,
        "model.new.scale": torch.float32,
    }
    assert [{key: line[key] for key in ("event", "family", "converted_by", "version")} for line in logs] == [
        {"event": "bridge_mode", "family": "NewForCausalLM", "converted_by": "megatron-bridge", "version": "9.8.7"}
    ]
    assert not later
    source.close()


def test_the_files_of_a_checkpoint_are_given_to_it_where_they_are(bridge: type[AutoBridge], tmp_path: Path) -> None:
    """It orders and groups tensors by them. `served` is the folder, from which quantized engines are known."""
    (tmp_path / "config.json").write_text(json.dumps(NEW))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    source = MegatronSource([linear()], hf_config=tmp_path / "config.json")
    assert bridge.made_of == str(tmp_path)
    assert source.served == tmp_path
    source.close()


def test_without_megatron_bridge_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And two ways that need none."""
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(UnsupportedModel, match=r"'NewForCausalLM'.*pip install megatron-bridge.*FSDPSource.*Exported"):
        MegatronSource(linear(), hf_config=NEW)


def test_a_family_that_it_does_not_know_either_is_refused(
    bridge: type[AutoBridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its reason, on one line, and its version."""

    def refuse(_config: object) -> None:
        raise ValueError("\nModel architecture\nnot supported")

    monkeypatch.setattr(bridge, "from_hf_config", refuse)
    with pytest.raises(
        UnsupportedModel, match=r"Megatron-Bridge 9\.8\.7 does not .*\(Model architecture not supported\)"
    ):
        MegatronSource(linear(), hf_config=NEW)


def test_a_family_with_a_table_does_not_ask_it(bridge: type[AutoBridge]) -> None:
    """Nor does a config that names no family: both are the business of the tables' own checks."""
    bridge.made_of = "not asked"
    for config in ({"architectures": ["LlamaForCausalLM"]}, {}, "/nowhere/config.json"):
        with pytest.raises((LayoutMismatch, UnsupportedModel)):
            MegatronSource(linear(), hf_config=config)  # type: ignore[arg-type]
    assert bridge.made_of == "not asked"
