"""One rank of a trainer of experts: steps on a tiny Qwen3-MoE over two expert-parallel ranks, each published to files.

    python tests/kit/moe_trainer.py RANK WORLD RENDEZVOUS_FILE CHECKPOINT OUT COORDINATOR

Experts are grouped, as Transformer Engine's are. Rank 0 writes ``OUT/reports.json``; the last rank
``OUT/trained.safetensors``, the logits that the trained ranks compute.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path

import mcore_on_cpu

mcore_on_cpu.prepare()

import msgspec  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_models import build, load, logits, start  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_families import TOKENS, Layout  # noqa: E402

from weightbus.trainer_agent import MegatronSource, TrainerAgent  # noqa: E402
from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu  # noqa: E402

FAMILY = "qwen3_moe"
STEPS = 2


def main() -> None:
    """Train and publish."""
    rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    checkpoint, out, coordinator = Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6]
    torch.set_num_threads(1)
    megatron_cpu.install()
    mcore_on_cpu.patch()
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=dt.timedelta(seconds=60)
    )
    layout = Layout(ep=world, te=True)
    start(layout, gloo=True)
    hf = json.loads((checkpoint / "config.json").read_text())
    (chunk,) = build(FAMILY, hf, layout)
    load(FAMILY, hf, [chunk], load_file(checkpoint / "model.safetensors"))

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk.train())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01), [model])
    source = MegatronSource(model, hf_config=hf, timeout_s=60.0)
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    reports = []
    with TrainerAgent.connect(
        source,
        channel="moe",
        coordinator=coordinator,
        insecure_loopback=True,
        transport=("disk",),
        runtime_dir=out / "run",
        bucket_bytes=1 << 16,
        checkpoint_dir=out / "checkpoints",
        hf_config_dir=out / "config",
    ) as agent:
        for version in range(1, STEPS + 1):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            model(tokens, positions, None, labels=tokens.roll(rank, 1)).float().mean().backward()
            model.finish_grad_sync()
            optimizer.step()
            reports.append(msgspec.to_builtins(agent.publish(version)))
    found = logits([chunk.eval()], tokens)
    if rank == 0:
        (out / "reports.json").write_text(json.dumps(reports))
    if rank == world - 1:
        save_file({"logits": found}, out / "trained.safetensors")
    source.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
