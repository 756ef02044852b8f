"""SGLang's own model classes, recorded at single ranks of several layouts, without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from weightbus.engine_agent.engines.sglang import cpu_server

pytestmark = pytest.mark.real

KIT = Path(__file__).parents[3] / "kit" / "sglang_models.py"
MOVED = [[0, 5, 2, 3, 4, 1, 6, 7, 5, 5], [7, 6, 5, 4, 3, 2, 1, 0, 0, 7]]
"""As in the kit: which expert lies in each place."""
DRAFT = "deepseek-v3-draft:tp2:ep1:rank1"
GEMMA = "gemma:tp2:ep1:rank1"
GPT_OSS = "gpt-oss:tp2:ep1:rank1"
CASES = (
    "llama-tied:tp2:ep1:rank0",
    "llama:tp1:ep1:rank0",
    "qwen2:tp2:ep1:rank1",
    "qwen3:tp1:ep1:rank0",
    "qwen3:tp2:ep1:rank1",
    "qwen3-moe:tp2:ep1:rank1",
    "qwen3-moe:tp2:ep2:rank1",
    "qwen3-moe-fp8:tp2:ep1:rank1",
    "qwen3-moe-moved:tp2:ep2:rank1",
    "glm4-moe:tp2:ep1:rank0",
    "deepseek-v3:tp1:ep1:rank0",
    "deepseek-v3:tp2:ep1:rank1",
    DRAFT,
)


@pytest.fixture(scope="module")
def found() -> Mapping[str, dict[str, object]]:
    """All cases, by one process: importing SGLang takes longer than all of them."""
    paths = [os.environ.get("WEIGHTBUS_SGLANG_OVERLAY", ""), os.environ.get("PYTHONPATH", "")]
    overlaid = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment = cpu_server.environment(overlaid, 1, [0])
    cases = (*CASES, GEMMA, GPT_OSS)
    done = subprocess.run(
        [sys.executable, KIT, *cases], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert len(reports) == len(cases), done.stderr[-4000:]
    return {str(report["case"]): report for report in reports}


@pytest.mark.parametrize("case", CASES)
def test_a_replay_gives_what_the_loader_gives(found: Mapping[str, dict[str, object]], case: str) -> None:
    """Bit for bit in every tensor of the model, from copies alone; recording changes nothing."""
    report = found[case]

    assert report.get("error") is None
    assert report["untouched"] is True
    assert report["differs"] == []
    assert report["loaded"] == {}
    assert report["dropped"] == []
    assert report["rewritten"] == []
    assert report["decoded"] is True


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_covered(found: Mapping[str, dict[str, object]], case: str) -> None:
    """Nothing is left as it was, and the only constants are the rows that pad the vocabulary.

    A draft model has two parameters of its own that SGLang gives it from the served model, in the same memory.
    """
    report = found[case]

    shared = ["model.embed_tokens.weight(0, 0)", "lm_head.weight(0, 0)"] if case == DRAFT else []
    assert report["unwritten"] == shared
    assert set(report["constants"]) <= {"model.embed_tokens.weight", "lm_head.weight"}  # type: ignore[call-overload]


def test_an_expert_parallel_rank_asks_for_its_experts_only(found: Mapping[str, dict[str, object]]) -> None:
    """The other rank's are named as unread."""
    unread = found["qwen3-moe:tp2:ep2:rank1"]["unread"]

    assert isinstance(unread, list)
    assert len(unread) == 2 * 4 * 3
    assert all(f".experts.{expert}." in name for name in unread for expert in [int(name.split(".")[5])] if expert < 4)


def test_scales_of_quantized_weights_are_copied_like_weights(found: Mapping[str, dict[str, object]]) -> None:
    """FP8 in blocks of 128 x 128, gate and up fused and experts stacked: no computation, scales included."""
    report = found["qwen3-moe-fp8:tp2:ep1:rank1"]
    targets = report["targets"]

    assert isinstance(targets, list)
    assert "model.layers.1.mlp.experts.w13_weight_scale_inv" in targets
    assert "model.layers.1.self_attn.qkv_proj.weight_scale_inv" in targets


def test_experts_are_recorded_where_they_lie(found: Mapping[str, dict[str, object]]) -> None:
    """Places 5 to 9 of two layers: experts that were moved there, and one that lies in three of them."""
    report = found["qwen3-moe-moved:tp2:ep2:rank1"]

    read = {(layer, expert) for layer, row in enumerate(MOVED) for expert in row[5:]}
    assert isinstance(report["unread"], list)
    unread = {(int(name.split(".")[2]), int(name.split(".")[5])) for name in report["unread"]}
    assert unread == {(layer, expert) for layer in range(2) for expert in range(8)} - read
    assert report["differs"] == []


def test_a_draft_model_takes_the_prediction_layer_of_the_same_checkpoint(
    found: Mapping[str, dict[str, object]],
) -> None:
    """Its loader asks for that layer alone, and keeps it by copies; the served model's asks for all the others."""
    draft, served = found[DRAFT], found["deepseek-v3:tp2:ep1:rank1"]

    assert isinstance(draft["unread"], list)
    assert isinstance(served["unread"], list)
    assert not any(name.startswith("model.layers.2.self_attn") for name in draft["unread"])
    assert all(name.startswith("model.layers.2.") for name in served["unread"])
    assert len(served["unread"]) > 20


def test_derived_weights_of_latent_attention_are_copies(found: Mapping[str, dict[str, object]]) -> None:
    """The two halves of kv_b_proj, laid out anew by a post-load step, and the fused projection of a joined tensor."""
    targets = found["deepseek-v3:tp2:ep1:rank1"]["targets"]

    assert isinstance(targets, list)
    assert "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight" in targets
    assert {"model.layers.0.self_attn.w_kc", "model.layers.0.self_attn.w_vc"} <= set(targets)


def test_norms_that_a_loader_adds_to_go_through_it(found: Mapping[str, dict[str, object]]) -> None:
    """Gemma's loader changes them where they were given to it: they are no copies, and everything else is."""
    report = found[GEMMA]

    assert report.get("error") is None
    assert report["differs"] == []
    assert isinstance(report["loaded"], dict)
    assert set(report["loaded"]) == {
        "model.norm.weight",
        *(f"model.layers.{at}.{name}_layernorm.weight" for at in (0, 1) for name in ("input", "post_attention")),
    }


def test_a_bias_that_one_rank_adds_is_zero_on_the_others(found: Mapping[str, dict[str, object]]) -> None:
    """gpt-oss's loader zeroes it there; experts in one tensor, transposed, are copies like all others."""
    report = found[GPT_OSS]

    assert report.get("error") is None
    assert report["differs"] == []
    assert report["loaded"] == {}
    assert report["dropped"] == [f"model.layers.{at}.mlp.experts.down_proj_bias" for at in (0, 1)]
    assert isinstance(report["constants"], list)
    assert {f"model.layers.{at}.mlp.experts.w2_weight_bias" for at in (0, 1)} <= set(report["constants"])
