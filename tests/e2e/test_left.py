"""Versions that leave a part of the served checkpoint, on real SGLang servers: what is sent and what is left is served.

The oracle is transformers, with a checkpoint of which one layer is that of the launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightbus.dataplane.transports.disk.checkpoint_files import LEFT as LEFT_SHARD
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.demo.child_processes import Programs
from weightbus.trainer_agent.machine import PublishReport
from weightbus.trainer_agent.sources.hf_module import HFModuleSource
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors

from ..kit.flat_module import FlatModule
from .fleet import Fleet
from .models import Answers, ask_oracle, check_answers, write_checkpoints
from .plain_rank import read

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

PROMPTS = [[5, 17, 33, 64, 101, 7], [400, 3, 9], [77, 78, 79, 80], [250, 1, 250, 2, 250], [11], [301, 302]]
SEEDS = 4
LEFT = "model.layers.0."
MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
COPIES = {
    "model.mtp_layers.0.embed_tokens.weight": "model.embed_tokens.weight",
    "model.mtp_layers.0.shared_head.head.weight": "lm_head.weight",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seed 0 is served; of the others one layer is that of seed 0, which no trainer sends. The last is whole."""
    folder = write_checkpoints(tmp_path_factory.mktemp("left"), SEEDS)
    frozen = {name: each for name, each in read(folder, 0).items() if name.startswith(LEFT)}
    for seed in range(1, SEEDS - 1):
        save_file(read(folder, seed) | frozen, folder / f"seed{seed}" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expected(checkpoints: Path) -> dict[int, Answers]:
    """What each seed must answer, by transformers."""
    return ask_oracle(checkpoints, SEEDS, PROMPTS)


@pytest.fixture(scope="module")
def fleet(checkpoints: Path, expected: dict[int, Answers]) -> Iterator[Fleet]:
    """A coordinator and an engine."""
    del expected
    yield from _deployed(checkpoints)


def _deployed(folder: Path) -> Iterator[Fleet]:
    with Programs(folder) as programs:
        deployment = Fleet(folder, programs)
        try:
            deployment.start_coordinator()
            deployment.start_engine("one", tp=1)
            deployment.wait_ready("one")
            yield deployment
        finally:
            deployment.close()


def _publish(
    fleet: Fleet, tensors: dict[str, torch.Tensor], version: int, transport: str, model: str, *left: str
) -> PublishReport:
    source = HFModuleSource(FlatModule(tensors), model=model)
    with TrainerAgent.connect(
        source,
        channel="e2e",
        coordinator=fleet.coordinator,
        transport=(transport,),
        keys=fleet.keys,
        left=left,
        checkpoint_dir=fleet.folder / "disk",
        hf_config_dir=fleet.folder / "seed0",
        environ={},
    ) as agent:
        return agent.publish(version)


def _reloads(fleet: Fleet) -> int:
    return (fleet.folder / "sidecar-one.log").read_text().count("launch_checkpoint_loaded_again")


@pytest.mark.parametrize(
    ("version", "seed", "transport", "reloads"),
    [
        (1, 1, "local", 0),
        (2, 2, "direct", 0),
        (3, 1, "distributed", 0),
        (4, 2, "sends", 0),
        (5, 1, "disk", 0),
        (6, 3, "local", 0),
        (7, 2, "direct", 1),
        (8, 1, "local", 1),
    ],
)
def test_a_version_with_a_frozen_layer_is_served_and_proven(  # noqa: PLR0917
    fleet: Fleet, checkpoints: Path, expected: dict[int, Answers], version: int, seed: int, transport: str, reloads: int
) -> None:
    """By every transport, with the layer of the launch; version 6 sends it too, so version 7 brings it back (N64)."""
    whole = seed == SEEDS - 1
    sent = {name: each for name, each in read(checkpoints, seed).items() if whole or not name.startswith(LEFT)}
    report = _publish(fleet, sent, version, transport, "Qwen3ForCausalLM", *([] if whole else [LEFT]))
    assert [(each.outcome, each.transport, each.verified_by) for each in report.engines] == [
        ("committed", transport, "live-digest")
    ]
    check_answers(fleet, "one", PROMPTS, expected[seed], str(version))
    assert _reloads(fleet) == reloads


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An engine of a checkpoint with a prediction layer."""
    folder = write_checkpoints(tmp_path_factory.mktemp("mimo"), 1)
    (folder / "seed0" / "config.json").write_text(json.dumps(MIMO))
    drawn = {
        spec.name: torch.randn(spec.shape).bfloat16() * 0.1 for spec in hf_tensors(HFModel.parse(MIMO), "bfloat16")
    }
    drawn |= {copy: drawn[of].clone() for copy, of in COPIES.items()}
    save_file(drawn, folder / "seed0" / "model.safetensors", {"format": "pt"})
    yield from _deployed(folder)


@pytest.mark.parametrize(
    ("version", "transport"), [(1, "local"), (2, "direct"), (3, "distributed"), (4, "sends"), (5, "disk")]
)
def test_a_prediction_layer_that_is_not_trained_stays(mimo: Fleet, version: int, transport: str) -> None:
    """Nothing is declared: by the served folder it is known as such. SGLang's main model holds none of it (N64).

    Its copies of the embedding and the output layer, as GLM-4.5 has them, follow what was sent in folders, too.
    """
    stored = read(mimo.folder, 0)
    sent = {name: each * (1 + version) for name, each in stored.items() if "mtp" not in name}
    report = _publish(mimo, sent, version, transport, "MiMoForCausalLM")
    (one,) = report.engines
    assert (one.outcome, one.transport) == ("committed", transport)
    assert one.verified_by.endswith("-digest; what is left was not compared")
    assert mimo.generate("one", [5, 17, 33], 4)[1] == str(version)
    assert _reloads(mimo) == 0
    if transport == "disk":
        (written,) = (mimo.folder / "disk").rglob(LEFT_SHARD)
        held = load_file(written)
        assert held.keys() == {name for name in stored if "mtp" in name}
        for name, each in held.items():
            assert torch.equal(each, sent[COPIES[name]] if name in COPIES else stored[name]), name
