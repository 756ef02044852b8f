"""The manifest of a version says what it leaves and which copies follow, whatever source the tensors come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

from weightbus.dataplane.tensors import Copy, Left, LeftReason
from weightbus.trainer_agent.checkpoints import CheckpointSource, open_checkpoint
from weightbus.trainer_agent.publish.bucket_staging import VersionLayout
from weightbus.trainer_agent.quantized import as_served
from weightbus.trainer_agent.settings import TrainerSettings
from weightbus.trainer_agent.source import Source
from weightbus.trainer_agent.sources.exported import ExportedSource, FullTensorSource
from weightbus.trainer_agent.sources.hf_module import FSDPSource, HFModuleSource

from ...kit import quantizing
from ...kit.flat_module import FlatModule

TRAINED: Final = {
    "model.embed_tokens.weight": (64, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (64, 16),
}
PREDICTION: Final = "model.layers.1."
COPIES: Final = {
    f"{PREDICTION}embed_tokens.weight": "model.embed_tokens.weight",
    f"{PREDICTION}shared_head.head.weight": "lm_head.weight",
}
CONFIG: Final[dict[str, Any]] = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 1, "vocab_size": 64}


def served(folder: Path, *, quantized: bool) -> Path:
    """A released checkpoint: the trained tensors, and a prediction layer with copies of two of them."""
    folder.mkdir()
    plain = {name: torch.randn(shape).bfloat16() for name, shape in TRAINED.items()}
    plain |= {copy: plain[of].clone() for copy, of in COPIES.items()}
    plain |= {f"{PREDICTION}eh_proj.weight": torch.randn(16, 32).bfloat16()}
    config = CONFIG | quantizing.config(16) if quantized else CONFIG
    kept = {name: plain.pop(name) for name in tuple(plain) if "embed" in name or "head" in name or "eh_proj" in name}
    save_file((quantizing.whole(plain, config) if quantized else plain) | kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def source_of(kind: str, folder: Path) -> Source:
    """A trainer of the same model without its prediction layer, with values of its own."""
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in TRAINED.items()}
    if kind == "files":
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        return CheckpointSource(open_checkpoint(folder, "", None, dcp=False), torch.device("cpu"))
    if kind == "exported":
        return ExportedSource(lambda: iter(tensors.items()), model="Glm4MoeForCausalLM")
    module = FlatModule(tensors)
    if kind == "module":
        return HFModuleSource(module, model="Glm4MoeForCausalLM")
    made = FSDPSource if kind == "fsdp" else FullTensorSource
    return made(fully_shard(module), model="Glm4MoeForCausalLM")


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("kind", ["module", "files", "exported", "fsdp", "gathered"])
@pytest.mark.usefixtures("group")
def test_a_prediction_layer_stays_and_its_copies_follow(tmp_path: Path, kind: str, *, quantized: bool) -> None:
    """By the served folder alone, for modules, exporters and files that are watched, quantized or not (N64)."""
    folder = served(tmp_path / "served", quantized=quantized)
    settings = TrainerSettings(channel="c", hf_config_dir=folder)
    source = as_served(source_of(kind, tmp_path / "trained"), settings)
    manifest = VersionLayout.of(source, settings).manifest
    assert manifest.left == (Left(PREDICTION),)
    assert manifest.copies == tuple(Copy(name, of) for name, of in sorted(COPIES.items()))
    dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
    assert dtypes["lm_head.weight"] == "bfloat16"
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == ("float8_e4m3fn" if quantized else "bfloat16")
    assert not dtypes.keys() & COPIES.keys()


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "fp8"])
@pytest.mark.usefixtures("group")
def test_frozen_parameters_are_left_beside_the_prediction_layer(tmp_path: Path, *, quantized: bool) -> None:
    """Sharded, on request: a copy of the frozen embedding is left with it, that of the output layer follows (N64)."""
    folder = served(tmp_path / "served", quantized=quantized)
    settings = TrainerSettings(channel="c", hf_config_dir=folder)
    module = FlatModule({name: torch.randn(shape).bfloat16() for name, shape in TRAINED.items()}).requires_grad_(True)
    module.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    source = as_served(FSDPSource(fully_shard(module), model="Glm4MoeForCausalLM", trainable_only=True), settings)
    manifest = VersionLayout.of(source, settings).manifest
    assert {each.name: each.reason for each in manifest.left} == {
        "model.embed_tokens.": LeftReason.FROZEN,
        PREDICTION: LeftReason.NOT_TRAINED,
    }
    assert manifest.copies == (Copy(f"{PREDICTION}shared_head.head.weight", "lm_head.weight"),)
