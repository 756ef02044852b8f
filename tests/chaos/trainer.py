"""One rank of a trainer of the campaign: `trainer.py FOLDER COORDINATOR CHANNEL RANK RANKS TRANSPORT RENDEZVOUS`.

It publishes for ever. A version that was reported as committed is written to FOLDER/acks-CHANNEL, with fsync, before
anything else is done. After a restart it resumes from an older checkpoint, as trainers do, and has to learn that its
version is too old. Its key is ``trainer-CHANNEL``.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))

import model  # which makes the tests importable

from tests.kit.flat_module import FlatModule
from weightbus.control.protocol.messages import RefusalCode
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.machine.errors import AgentClosed, ConnectFailed, PublishFailed
from weightbus.trainer_agent.sources.hf_module import FSDPSource

GROUP_S = 60.0
"""How long the ranks wait for each other."""
OLDER = 3
"""How many versions the checkpoint is behind that a restarted trainer resumes from."""
FIRST = {"chaos": 1, "other": 1_000_001}
"""Channel -> its first version: no two channels publish the same weights."""


def build(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have these names."""
    return FlatModule({name: tensor.clone() for name, tensor in tensors.items()})


def shard(module: nn.Module) -> nn.Module:
    """Over all ranks, with FSDP2."""
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def fill(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """This rank's rows of every tensor."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        parameter.to_local().copy_(tensors[name].chunk(ranks)[rank])


def last_ack(acks: Path) -> int:
    """The newest version that was reported as committed."""
    lines = acks.read_text().splitlines() if acks.exists() else []
    return max((json.loads(line)["version"] for line in lines if line.endswith("}")), default=0)


def acknowledge(acks: Path, version: int) -> None:
    """The version was reported as committed: from now on it must not get lost."""
    with acks.open("a") as file:
        file.write(json.dumps({"version": version, "at": time.monotonic()}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def connect(folder: Path, coordinator: str, channel: str, module: nn.Module, transport: str) -> TrainerAgent:
    """A new agent; tries until there is a coordinator."""
    while True:
        try:
            return TrainerAgent.connect(
                FSDPSource(module, model="Qwen3ForCausalLM", timeout_s=GROUP_S),
                name=f"trainer-{channel}",
                channel=channel,
                coordinator=coordinator,
                transport=(transport,),
                keys=folder / "keys",
                bucket_bytes=64 * 1024,
                acquire_timeout_s=20,
                transfer_timeout_s=10,
                round_timeout_s=60,
                abandon_timeout_s=5,
                request_timeout_s=5,
                runtime_dir=folder / ("run" if channel == "chaos" else f"run-{channel}"),
            )
        except ConnectFailed as error:
            note(f"connect: {error}")
            time.sleep(0.2)


@torch.no_grad()
def main() -> None:
    """Publish."""
    folder, coordinator, channel = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank, ranks, transport, rendezvous = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6], sys.argv[7]
    torch.set_num_threads(1)
    minute = dt.timedelta(seconds=GROUP_S)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=minute)
    checkpoint = folder / "checkpoint"
    acks = folder / f"acks-{channel}"
    version = max(FIRST[channel], last_ack(acks) - OLDER)
    module = shard(build(model.weights(checkpoint, model.LAUNCH)))
    agent = connect(folder, coordinator, channel, module, transport)
    while True:
        fill(module, model.weights(checkpoint, version))
        try:
            agent.publish(version)
        except PublishFailed as failed:
            note(f"{version}: {failed}")
            version += failed.code is RefusalCode.VERSION_NOT_NEWER
            time.sleep(0.05)
        except AgentClosed as closed:
            note(f"{version}: {closed}")
            agent = connect(folder, coordinator, channel, module, transport)
        else:
            if rank == 0:
                acknowledge(acks, version)
            version += 1


def note(line: str) -> None:
    """For whoever reads the log."""
    sys.stderr.write(f"{time.monotonic():.3f} {line[:500]}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
