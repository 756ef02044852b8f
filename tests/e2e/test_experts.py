"""A trainer of experts on two expert-parallel ranks publishes to files, and transformers computes what it computes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightbus.control.protocol.messages import TransportKind
from weightbus.control.server.coordinator_process import CoordinatorProcess
from weightbus.control.server.settings import CoordinatorSettings
from weightbus.engine_agent.engines.sglang import cpu_server
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors

from ..kit.loopback_engine import LoopbackEngine
from ..kit.tiny_families import FAMILIES

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

KIT = Path(__file__).parent.parent / "kit"
SHIM = Path(cpu_server.__file__).with_name("cpu_shim")
WORLD = 2


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """A real coordinator on sockets, with one engine of the channel that reads files."""
    settings = CoordinatorSettings(
        insecure_loopback=True, router_port=0, http_port=0, journal=tmp_path / "journal.sqlite"
    )
    service = CoordinatorProcess(settings)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    address = f"tcp://127.0.0.1:{service.router_port}"
    engine = LoopbackEngine("e0", "moe", address, tmp_path / "run", TransportKind.DISK)
    engine.start()
    yield address
    engine.close()
    service.stop()
    thread.join(20)


def run(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A program of the kit, with Transformer Engine's stand-in and what transformers needs."""
    paths = [str(KIT / "te_stub"), str(SHIM), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-W", "ignore", str(KIT / program), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed; it must have ended well."""
    try:
        out, errors = process.communicate(timeout=480)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return out


def write(folder: Path) -> Path:
    """A tiny Qwen3-MoE with random weights. By hand: transformers is imported once, at the end."""
    folder.mkdir()
    config = FAMILIES["qwen3_moe"].config | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (folder / "config.json").write_text(json.dumps(config))
    chance = torch.Generator().manual_seed(0)
    weights = {
        spec.name: torch.randn(spec.shape, generator=chance) * 0.05 + (len(spec.shape) == 1)
        for spec in hf_tensors(HFModel.parse(config), "float32")
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_experts_that_were_trained_are_what_files_hold(coordinator: str, tmp_path: Path) -> None:
    """Two steps, two versions: the second's files load without a name too many or too few, and give the same logits."""
    checkpoint = write(tmp_path / "hf")
    (tmp_path / "config").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "config")
    ranks = [
        run("moe_trainer.py", rank, WORLD, tmp_path / "rendezvous", checkpoint, tmp_path, coordinator)
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            finish(rank)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    reports = json.loads((tmp_path / "reports.json").read_text())
    assert [engine["version"] for report in reports for engine in report["engines"]] == [1, 2]
    (published,) = (tmp_path / "checkpoints" / "moe").glob("v2-e*[0-9]")
    before, after = tmp_path / "before.safetensors", tmp_path / "loaded.safetensors"
    assert json.loads(finish(run("hf_folder.py", checkpoint, before, published, after))) == [{}, {}]
    loaded = load_file(after)["logits"]
    trained = load_file(tmp_path / "trained.safetensors")["logits"]
    assert (loaded - trained).abs().max() < 1e-4 * trained.abs().max()
    assert (load_file(before)["logits"] - trained).abs().max() > 0.05 * trained.abs().max(), (
        "nothing was learned: the test proves nothing"
    )
