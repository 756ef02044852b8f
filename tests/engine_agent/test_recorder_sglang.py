"""SGLang's own model classes, recorded at single ranks of several layouts, without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from weightbus.engine_agent import cpu_server

pytestmark = pytest.mark.real

KIT = Path(__file__).parents[1] / "kit" / "sglang_models.py"
CASES = (
    "llama-tied:tp2:ep1:rank0",
    "llama:tp1:ep1:rank0",
    "qwen2:tp2:ep1:rank1",
    "qwen3:tp1:ep1:rank0",
    "qwen3:tp2:ep1:rank1",
    "qwen3-moe:tp2:ep1:rank1",
    "qwen3-moe:tp2:ep2:rank1",
    "glm4-moe:tp2:ep1:rank0",
    "deepseek-v3:tp1:ep1:rank0",
    "deepseek-v3:tp2:ep1:rank1",
)


@pytest.fixture(scope="module")
def found() -> Mapping[str, dict[str, object]]:
    """All cases, by one process: importing SGLang takes longer than all of them."""
    environment = cpu_server.environment(os.environ, 1, [0])
    done = subprocess.run(
        [sys.executable, KIT, *CASES], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert len(reports) == len(CASES), done.stderr[-4000:]
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
    """Nothing is left as it was, and the only constants are the rows that pad the vocabulary."""
    report = found[case]

    assert report["unwritten"] == []
    assert set(report["constants"]) <= {"model.embed_tokens.weight", "lm_head.weight"}  # type: ignore[call-overload]


def test_an_expert_parallel_rank_asks_for_its_experts_only(found: Mapping[str, dict[str, object]]) -> None:
    """The other rank's are named as unread."""
    unread = found["qwen3-moe:tp2:ep2:rank1"]["unread"]

    assert isinstance(unread, list)
    assert len(unread) == 2 * 4 * 3
    assert all(f".experts.{expert}." in name for name in unread for expert in [int(name.split(".")[5])] if expert < 4)


def test_derived_weights_of_latent_attention_are_copies(found: Mapping[str, dict[str, object]]) -> None:
    """The two halves of kv_b_proj, laid out anew by a post-load step, and the fused projection of a joined tensor."""
    targets = found["deepseek-v3:tp2:ep1:rank1"]["targets"]

    assert isinstance(targets, list)
    assert "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight" in targets
    assert {"model.layers.0.self_attn.w_kc", "model.layers.0.self_attn.w_vc"} <= set(targets)
