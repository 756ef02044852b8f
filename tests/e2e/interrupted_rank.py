"""A rank of a torchrun job that publishes in a channel that is busy: `interrupted_rank.py COORDINATOR CHECKPOINT`.

It waits in `publish` for the lease: rank 0 for the coordinator, the others in a collective.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.chaos import model
from tests.chaos.trainer import build
from weightbus.trainer_agent import FSDPSource, TrainerAgent


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = build(model.weights(Path(sys.argv[2]), 1))
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    source = FSDPSource(module, model="Qwen3ForCausalLM", timeout_s=120)
    with TrainerAgent.connect(
        source,
        channel="c",
        coordinator=sys.argv[1],
        insecure_loopback=True,
        transport="local",
    ) as agent:
        sys.stdout.write(json.dumps({"rank": dist.get_rank()}) + "\n")
        sys.stdout.flush()
        agent.publish(1)


if __name__ == "__main__":
    main()
