"""Real Megatron-core ranks over gloo: what they export is what transformers computes the same logits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weightbus.engine_agent.engines.sglang import cpu_server

from ....kit.megatron_cases import CASES, CONTENTS

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

KIT = Path(__file__).parents[3] / "kit"
SHIM = Path(cpu_server.__file__).with_name("cpu_shim")
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
    "nothing on rank 1": ("RanksDisagree", "'NoneType' object"),
    "replaced on rank 1, assembled": ("RanksDisagree", "'decoder.layers.1.input_layernorm.weight' ((64,)"),
    "replaced on rank 1, exposed": ("RanksDisagree", "build the source again after replacing parameters"),
    "a model without values": ("UnknownParameter", "it has no values yet: build the source after"),
    "experts": ("LayoutMismatch", "num_moe_experts=2"),
    "one norm twice on rank 1": ("RanksDisagree", "linear_qkv.layer_norm_weight' would be served as"),
    "tied with an output of its own": ("LayoutMismatch", "the trained model has two tensors: make them one parameter"),
}


def launch(world: int, out: Path) -> None:
    """Run one world of ranks to its end, then transformers on what it exported."""
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
    paths = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH", "")]))
    judge = [sys.executable, str(KIT / "hf_logits.py"), str(out)]
    done = subprocess.run(
        judge,
        env=environment | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        timeout=RANKS_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


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


@pytest.fixture
def folder(request: pytest.FixtureRequest, case: str) -> Path:
    """Where the files of `case` are."""
    found = request.getfixturevalue("two_ranks" if CASES[case].world == 2 else "four_ranks")
    assert isinstance(found, Path)
    return found


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_trainers_logits(case: str, folder: Path) -> None:
    """Exported tensors load as a checkpoint, none missing or unknown, and give the logits of the Megatron ranks."""
    verdict: dict[str, Any] = json.loads((folder / "oracle.json").read_text())[case]
    tolerance = 1e-5 if CASES[case].dtype is None else 0.05
    assert verdict["loading"] == {}
    assert verdict["difference"] < tolerance * verdict["scale"]


@pytest.mark.parametrize("content", CONTENTS)
def test_every_layout_exports_the_same_bits(content: str, two_ranks: Path, four_ranks: Path) -> None:
    """The layout of the ranks, the wrapping of the model and the size of the buckets leave no trace in the bytes."""
    cases = [name for name, case in CASES.items() if case.content == content and case.dtype is None]
    exports = {
        name: load_file((two_ranks if CASES[name].world == 2 else four_ranks) / f"{name}.safetensors") for name in cases
    }
    first = exports[cases[0]]
    for name, tensors in exports.items():
        assert tensors.keys() == first.keys(), name
        odd = [key for key, tensor in tensors.items() if not torch.equal(tensor, first[key])]
        assert not odd, name


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
    """A source over a part of the world asks nothing of the other ranks, and can be closed and built again."""
    told = [json.loads((four_ranks / f"rank{rank}.json").read_text())["two models"] for rank in range(4)]
    assert told == ["[True, True]", "[]", "[True, True]", "[]"]


def test_a_lost_peer_ends_the_assembly(two_ranks: Path) -> None:
    """When a rank dies in the middle of a version, the root is told within seconds instead of waiting for ever."""
    told = json.loads((two_ranks / "rank0.json").read_text())
    assert told["lost peer"].startswith("AssemblyFailed")
    assert float(told["lost peer seconds"]) < 30
