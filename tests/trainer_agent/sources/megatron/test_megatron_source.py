"""Real Megatron-core ranks over gloo: models that cannot be served, and models that change under their source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

KIT = Path(__file__).parents[3] / "kit"
RANKS_S = 240
REFUSALS = {
    "another ffn": ("LayoutMismatch", "ffn_hidden_size=96, the Hugging Face config gives 128"),
    "another vocabulary": ("LayoutMismatch", "'embedding.word_embeddings.weight'"),
    "a vocabulary cut short": ("LayoutMismatch", "vocab_size=100, which leaves 156 rows as padding"),
    "layers exchanged on rank 1": ("RanksDisagree", "decoder.layers.1 has layer_number=3, 5 is expected"),
    "a layer's number changed on rank 1": ("RanksDisagree", "has layer_number=1, its self_attention has 3"),
    "stages exchanged": ("RanksDisagree", "rank 0, at place 0 of the pipeline with its chunk 0, holds layers 3 to 4"),
    "tied": ("LayoutMismatch", "tie_word_embeddings=True"),
    "another family": ("UnsupportedModel", "GPT2LMHeadModel"),
    "different configs": ("RanksDisagree", "rank 1 has dtype='bfloat16' (rank 0: 'float32')"),
    "one stage missing": ("RanksDisagree", "rank 1 cannot serve its part: UnsupportedModel"),
    "a buffer on rank 1": ("RanksDisagree", "'decoder.counts' (3,) (a persistent buffer)"),
    "an adapter on rank 1": ("RanksDisagree", "'decoder.layers.3.mlp.adapter.weight' (4, 4)"),
    "a quantized norm on rank 1": ("RanksDisagree", "its scale would be lost"),
    "a parameter kept in FP8 on rank 1": ("RanksDisagree", "Float8Tensor, quantized, and its memory is no weight"),
    "nothing on rank 1": ("RanksDisagree", "'NoneType' object"),
    "replaced on rank 1, assembled": ("RanksDisagree", "'decoder.layers.1.input_layernorm.weight' ((64,)"),
    "replaced on rank 1, exposed": ("RanksDisagree", "build the source again after replacing parameters"),
    "a model without values": ("UnknownParameter", "it has no values yet: build the source after"),
    "experts": ("LayoutMismatch", "num_moe_experts=2"),
    "one norm twice on rank 1": ("RanksDisagree", "linear_qkv.layer_norm_weight' would be served as"),
    "tied with an output of its own": ("LayoutMismatch", "the trained model has two tensors: make them one parameter"),
}


def launch(world: int, out: Path) -> None:
    """Run one world of ranks to its end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(world):
        command = [
            sys.executable,
            str(KIT / "megatron_ranks.py"),
            str(rank),
            str(world),
            str(out / "rendezvous"),
            str(out),
        ]
        log = (out / f"rank{rank}.log").open("w")
        ranks.append((subprocess.Popen(command, stdout=log, stderr=log, env=environment), log))
    try:
        for rank, (process, _) in enumerate(ranks):
            code = process.wait(timeout=RANKS_S)
            assert code == 0, (out / f"rank{rank}.log").read_text()[-4000:]
    finally:
        for process, log in ranks:
            process.kill()
            process.wait()
            log.close()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a world of two ranks left behind."""
    out = tmp_path_factory.mktemp("two")
    launch(2, out)
    return out


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a world of four ranks left behind."""
    out = tmp_path_factory.mktemp("four")
    launch(4, out)
    return out


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_served_is_refused_on_every_rank(what: str, two_ranks: Path) -> None:
    """A model that one rank cannot map is refused on all ranks at construction, naming the cause, and nobody hangs."""
    kind, part = REFUSALS[what]
    told = [json.loads((two_ranks / f"rank{rank}.json").read_text())[what] for rank in range(2)]
    assert told[0].startswith(kind)
    assert part in told[0]
    assert all(
        each.split(":")[0] in {kind, "UnknownParameter", "UnsupportedModel", "LayoutMismatch", "SourceError"}
        for each in told
    )


def test_a_trainer_that_pads_its_vocabulary_further_says_so(two_ranks: Path) -> None:
    """What is refused without that is then cut off as padding."""
    for rank in range(2):
        assert json.loads((two_ranks / f"rank{rank}.json").read_text())["padded to 256"] == "(100, 64)"


def test_parameters_that_lag_behind_the_optimizer_are_gathered_first(two_ranks: Path) -> None:
    """With overlapped parameter gathers a replica's parameters are half old after a step; the export is all new."""
    for rank in range(2):
        told = json.loads((two_ranks / f"rank{rank}.json").read_text())
        assert int(told["lagged"]) > 0, "nothing lagged behind: the test proves nothing"
        assert told["late gather"] == "equal"


def test_sources_of_two_models_live_beside_each_other(four_ranks: Path) -> None:
    """A source over a part of the world asks nothing of the other ranks, and can be closed and built again.

    Its bytes are the same whether the model is wrapped, and through buckets of any size.
    """
    told = [json.loads((four_ranks / f"rank{rank}.json").read_text())["two models"] for rank in range(4)]
    assert told == ["[True, True, True]", "[]", "[True, True, True]", "[]"]


def test_a_lost_peer_ends_the_assembly(two_ranks: Path) -> None:
    """When a rank dies in the middle of a version, the root is told within seconds instead of waiting for ever."""
    told = json.loads((two_ranks / "rank0.json").read_text())
    assert told["lost peer"].startswith("AssemblyFailed")
    assert float(told["lost peer seconds"]) < 30
