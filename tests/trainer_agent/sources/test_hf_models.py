"""Modules of transformers against what transformers itself saves of them: from memory and from torch DCP folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightbus.engine_agent.engines.sglang import cpu_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

KIT = Path(__file__).parents[2] / "kit"
SHIM = Path(cpu_server.__file__).with_name("cpu_shim")
MODELS = (
    "llama",
    "qwen3 tied",
    "qwen3 moe",
    "mixtral",
    "deepseek v3",
    "glm4 moe",
    "minimax m2",
    "qwen3 next",
    "llama 4",
    "nemotron h",
    "olmo",
    "qwen2 moe",
    "deepseek v3.2",
    "qwen3.5",
    "qwen3.5 with vision",
    "qwen3.5 moe",
    "gpt oss",
)
REFUSALS = {
    "another width": "bad: 'model.model.layers.0.mlp.gate_proj.weight' has shape (32, 16), its config gives (48, 16)",
    "another depth": "bad: the model of its config has 30 tensors",
    "fewer layers": "bad: 'model.model.layers.1.input_layernorm.weight', 'model.model.layers.1.mlp.down_proj.weight'",
    "no heads": "bad: transformers cannot build the model of its config: ",
    "unknown": "bad: transformers cannot build the model of its config",
    "a file that is still written": "unfinished: __0_0.distcp is not there or shorter than",
    "metadata that is none": "bad: torch cannot read it: UnpicklingError",
    "no metadata": "unfinished: there is no .metadata, which is written last",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process with transformers found."""
    out = tmp_path_factory.mktemp("hf")
    paths = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, str(KIT / "hf_modules.py"), str(out)]
    done = subprocess.run(argv, env=environment, timeout=200, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "told.json").read_text())


@pytest.mark.parametrize("model", MODELS)
def test_what_is_served_is_what_transformers_saves(told: dict[str, Any], model: str) -> None:
    """Every name, every bit: experts one by one under the checkpoint's names, tied tensors once, buffers too."""
    assert told[model]["differs"] == []
    assert told[model]["differs in bfloat16"] == []
    assert told[model]["model"].endswith(("ForCausalLM", "ForConditionalGeneration"))


@pytest.mark.parametrize("model", ["deepseek v3", "glm4 moe", "minimax m2"])
def test_routing_biases_stay_in_float32(told: dict[str, Any], model: str) -> None:
    """Whatever the parameters are served in: they are buffers, and too fine for bfloat16."""
    assert told[model]["kept"]
    assert all(name.endswith("e_score_correction_bias") for name in told[model]["kept"])


@pytest.mark.parametrize("model", ["llama", "qwen3 tied", "qwen3 moe", "deepseek v3"])
def test_a_dcp_checkpoint_is_the_same_model(told: dict[str, Any], model: str) -> None:
    """Saved below a prefix, beside an optimizer, by names in memory."""
    assert told[model]["differs from dcp"] == []


@pytest.mark.parametrize("what", REFUSALS)
def test_half_and_foreign_dcp_checkpoints_are_told_apart(told: dict[str, Any], what: str) -> None:
    """What may still come is unfinished, what contradicts the config is bad."""
    assert told["refusals"][what].startswith(REFUSALS[what])
