"""The trainer of the campaign: `trainer.py FOLDER COORDINATOR`. Publishes one version after the other, for ever.

A version that was reported as committed is written to FOLDER/acks, with fsync, before anything else is done. After a
restart it resumes from an older checkpoint, as trainers do, and has to learn that its version is too old.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import model

from weightbus.control.messages import Code
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.errors import AgentClosed, ConnectFailed, PublishFailed
from weightbus.trainer_agent.hf_module import HFModuleSource

OLDER = 3
"""How many versions the checkpoint is behind that a restarted trainer resumes from."""


def build(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have these names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        where = root
        for part in path:
            if part not in dict(where.named_children()):
                where.add_module(part, nn.Module())
            where = where.get_submodule(part)
        where.register_parameter(leaf, nn.Parameter(tensor.clone(), requires_grad=False))
    return root


def last_ack(folder: Path) -> int:
    """The newest version that was reported as committed."""
    lines = (folder / "acks").read_text().splitlines() if (folder / "acks").exists() else []
    return max((json.loads(line)["version"] for line in lines if line.endswith("}")), default=0)


def acknowledge(folder: Path, version: int) -> None:
    """The version was reported as committed: from now on it must not get lost."""
    with (folder / "acks").open("a") as file:
        file.write(json.dumps({"version": version, "at": time.monotonic()}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def connect(folder: Path, coordinator: str, module: nn.Module) -> TrainerAgent:
    """A new agent; tries until there is a coordinator."""
    while True:
        try:
            return TrainerAgent.connect(
                HFModuleSource(module, model="Qwen3ForCausalLM"),
                channel="chaos",
                coordinator=coordinator,
                transport=("local",),
                insecure_loopback=True,
                bucket_bytes=64 * 1024,
                acquire_timeout_s=20,
                transfer_timeout_s=10,
                round_timeout_s=60,
                abandon_timeout_s=5,
                request_timeout_s=5,
                runtime_dir=folder / "run",
            )
        except ConnectFailed as error:
            note(f"connect: {error}")


def main() -> None:
    """Publish."""
    folder, coordinator = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    checkpoint = folder / "checkpoint"
    module = build(model.weights(checkpoint, model.LAUNCH))
    version = max(1, last_ack(folder) - OLDER)
    agent = connect(folder, coordinator, module)
    while True:
        for name, tensor in model.weights(checkpoint, version).items():
            module.get_parameter(name).copy_(tensor)
        try:
            agent.publish(version)
        except PublishFailed as failed:
            note(f"{version}: {failed}")
            version += failed.code is Code.VERSION_NOT_NEWER
            time.sleep(0.05)
        except AgentClosed as closed:
            note(f"{version}: {closed}")
            agent = connect(folder, coordinator, module)
        else:
            acknowledge(folder, version)
            version += 1


def note(line: str) -> None:
    """For whoever reads the log."""
    sys.stderr.write(f"{time.monotonic():.3f} {line[:500]}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
