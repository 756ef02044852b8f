"""Real FSDP2 ranks over gloo: what they export is, bit for bit, what the module was before it was sharded."""

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
RANKS_S = 200
CASES = {
    2: ("llama", "tied", "odd", "experts"),
    4: (
        "odd experts",
        "hybrid",
        "over tensor parallel",
        "over fused tensor parallel",
        "expert parallel",
        "odd over tensor parallel",
    ),
}
REFUSALS = {
    "an adapter on rank 1": ("RanksDisagree", "'lm_head.lora_A.weight' is part of an adapter"),
    "an adapter on rank 1, gathered whole": ("RanksDisagree", "'lm_head.lora_A.weight' is part of an adapter"),
    "another dtype on rank 1": ("RanksDisagree", "it holds 'model.embed_tokens.weight' in bfloat16 (64, 16)"),
    "another width on rank 1": ("RanksDisagree", "rank 1 was built differently from rank 0: it holds 'model.layers.0."),
    "experts of one rank that nothing tells apart": ("UnsupportedModel", "holds 2 experts of the config's 4"),
    "different parts on meshes apart": ("RanksDisagree", "hold different values of 'weight' (4, 4), part 0 of 1"),
    "sharded, as a single module": ("LayoutMismatch", "build an FSDPSource, on every rank"),
    "a part that is not sharded and not equal": ("RanksDisagree", "model.norm.weight (not sharded)="),
    "tied in the config alone": ("LayoutMismatch", "call tie_weights() before it is sharded"),
    "no module on rank 1": ("SourceError", "(AttributeError: 'NoneType' object has no attribute"),
    "replaced on rank 1, assembled": ("LayoutMismatch", "build the source again after replacing parameters"),
    "replaced on rank 1, exposed": ("LayoutMismatch", "build the source again after replacing parameters"),
    "a sum that was not made": ("UnknownParameter", "only replicated and sharded parameters are read"),
}

Told = list[dict[str, Any]]
"""What every rank wrote."""


def launch(program: str, world: int, out: Path) -> Told:
    """Run one world of ranks to its end."""
    paths = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            command = [sys.executable, str(KIT / program), str(rank), str(world), str(out / "rendezvous"), str(out)]
            with (out / f"rank{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        for rank, process in enumerate(ranks):
            assert process.wait(RANKS_S) == 0, (out / f"rank{rank}.log").read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Told]:
    """Both worlds, one after the other."""
    return {world: launch("fsdp_ranks.py", world, tmp_path_factory.mktemp(f"world{world}")) for world in CASES}


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_what_is_exported_is_the_module_bit_for_bit(told: dict[int, Told], world: int, case: str) -> None:
    """By the checkpoint's names, cast to bfloat16, whatever the mesh; after a step, what `full_tensor()` gives."""
    root = told[world][0][case]
    assert root["tensors"] > 20
    assert root["differs"] == []
    assert root["differs from full_tensor"] == []
    assert root["differs quantized"] == [], "quantized shard by shard, it is another model"
    assert root["quantized"] >= 14
    assert root["wrongly exposed"] == [], "read and digested where it lies, it is another model"
    assert root["wrongly exposed quantized"] == [], "quantized into memory that is read, it is another model"
    assert root["unchanged"] == [], "the optimizer's step is not in what was exported after it"
    assert not root["model"].startswith("FSDP")
    assert root["heads"] in {6, 8}
    if "experts" in case or case in {"hybrid", "over fused tensor parallel"}:
        assert root["model"] == "Qwen3MoeForCausalLM"


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_no_rank_needs_more_than_a_bucket(told: dict[int, Told], world: int, case: str) -> None:
    """Beside the bucket itself: no parameter is gathered whole."""
    for rank in told[world]:
        largest, extra = rank[case]["extra"]
        assert extra <= largest + 16 * world


def test_experts_of_expert_parallel_ranks_are_complete_or_refused(told: dict[int, Told]) -> None:
    """By the axis of the mesh's root and the config's number; never one rank's alone. Replicas are served."""
    assert all(
        "use FSDPSource, which assembles all experts" in rank["expert parallel"]["gathered whole"] for rank in told[4]
    )
    assert all("replicas on meshes apart" not in rank["refusals"] for rank in told[2])


def test_the_cases_are_as_uneven_as_they_claim(told: dict[int, Told]) -> None:
    """With three experts on four ranks, one rank holds none: empty shards are exercised."""
    assert any(rank["odd experts"]["empty shards"] for rank in told[4])


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_served_is_refused_on_every_rank(told: dict[int, Told], what: str) -> None:
    """By its own error where it is, and with the rank that has it on the others."""
    kind, words = REFUSALS[what]
    for rank in told[2]:
        found = rank["refusals"][what]
        assert words in found
        assert found.startswith((kind, "UnsupportedModel", "RanksDisagree"))
