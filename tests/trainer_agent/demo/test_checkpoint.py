"""The policy before training is one checkpoint for both sides."""

import json
from pathlib import Path

import pytest
import torch

from weightbus.trainer_agent.demo import toy_task as task
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors


def test_a_seed_names_the_bits(tmp_path: Path) -> None:
    """Engines and ranks that read the same seed hold the same weights."""
    first = task.read_checkpoint(task.write_checkpoint(tmp_path / "a", 1))
    again = task.read_checkpoint(task.write_checkpoint(tmp_path / "b", 1))
    other = task.read_checkpoint(task.write_checkpoint(tmp_path / "c", 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("shape", [task.TINY, task.TINY_EXPERTS])
def test_it_is_complete_and_bfloat16(shape: task.ModelShape, tmp_path: Path) -> None:
    """Every tensor that the config implies, as the family's table has it, is there, in the dtype that is served."""
    weights = task.read_checkpoint(task.write_checkpoint(tmp_path, 1, shape))
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    model = HFModel.parse(json.loads((tmp_path / "config.json").read_text()))
    assert found == {spec.name: spec.shape for spec in hf_tensors(model, "bfloat16")}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_the_config_describes_the_tensors(tmp_path: Path) -> None:
    """What a server builds from config.json has the shapes of the file beside it."""
    task.write_checkpoint(tmp_path, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    rows, columns = task.read_checkpoint(tmp_path)["model.layers.0.self_attn.q_proj.weight"].shape
    assert rows == config["num_attention_heads"] * config["head_dim"]
    assert columns == config["hidden_size"]
    assert config["architectures"] == ["Qwen3ForCausalLM"]
