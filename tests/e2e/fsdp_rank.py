"""One of two FSDP2 ranks: publishes two checkpoints and saves a third, `python fsdp_rank.py FOLDER COORDINATOR KEYS`.

The weights of seed 3 are published live as version 101, straight from the shards, those of seed 4 from a snapshot as
version 102, during which the weights become those of seed 5; these are saved as a torch DCP checkpoint in
``FOLDER/watched/step-103``. Rank 0 prints both reports, one line of JSON each.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from weightbus.trainer_agent import FSDPSource, PublishReport, TrainerAgent
from weightbus.trainer_agent.demo import toy_task as task

sys.modules.setdefault("torchvision", None)  # made for CUDA, it does not import beside a torch for the CPU

from transformers import AutoModelForCausalLM


def become(module: nn.Module, folder: Path) -> None:
    """Take the weights of another checkpoint, in place, as an optimizer's step would."""
    weights = task.read_checkpoint(folder)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            whole = weights[name].float()
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def say(report: PublishReport) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(msgspec.to_builtins(report)) + "\n")
        sys.stdout.flush()


def main() -> None:
    folder, coordinator, keys = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = AutoModelForCausalLM.from_pretrained(folder / "seed3", dtype=torch.float32)
    for layer in module.model.layers:
        fully_shard(layer)
    fully_shard(module)
    source = FSDPSource(module, dtype=torch.bfloat16, timeout_s=180)
    with TrainerAgent.connect(source, channel="e2e", coordinator=coordinator, keys=keys, transport="direct") as agent:
        say(agent.publish(101))
    with TrainerAgent.connect(
        source, channel="e2e", coordinator=coordinator, keys=keys, transport="local", bucket_bytes=50_000
    ) as agent:
        become(module, folder / "seed4")
        handle = agent.publish(102, mode="snapshot")
        become(module, folder / "seed5")
        say(handle.wait())
    source.close()
    target = folder / "watched" / "step-103"
    save({"model": module.state_dict(), "step": torch.tensor(103)}, checkpoint_id=target)
    if dist.get_rank() == 0:
        shutil.copy(folder / "seed5" / "config.json", target)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
