"""The program of one of four ranks: compares replicas of models in several layouts, one of them perturbed on one rank.

    python tests/kit/replica_ranks.py RANK WORLD RENDEZVOUS_FILE OUT megatron|torch

Every rank writes ``OUT/rank<r>.json``: for every case what the comparison found before and after a parameter of one
rank was changed, and how many messages it took.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightbus.trainer_agent.publish.replica_check import ReplicaCheck
from weightbus.trainer_agent.settings import TrainerSettings
from weightbus.trainer_agent.source import Source

SETTINGS = TrainerSettings(channel="policy", insecure_loopback=True)
PERTURBED = 2


def compare(source: Source, chunks: Sequence[nn.Module], name: str) -> dict[str, Any]:
    """What is found of equal replicas, and once `name`'s first element differs on one rank."""
    calls = 0
    collect = source.collect  # type: ignore[attr-defined]  # every source here has it

    def counted(blob: bytes) -> Sequence[bytes]:
        nonlocal calls
        calls += 1
        return collect(blob)  # type: ignore[no-any-return]

    source.collect = counted  # type: ignore[attr-defined]
    check = ReplicaCheck(source, SETTINGS)
    equal, laid_out = check.compare(), calls
    if dist.get_rank() == PERTURBED:
        named = [each for chunk in chunks for at, each in chunk.named_parameters() if at.endswith(name)]
        with torch.no_grad():
            local = named[0].to_local() if hasattr(named[0], "to_local") else named[0]
            local.view(-1)[0] += 0.5
    odd = check.compare()
    told: dict[str, Any] = {"first messages": laid_out, "messages": calls - laid_out}
    if equal is not None and odd is not None:
        told |= {"parts": equal.parts, "equal": equal.differing, "differing": odd.differing}
        told["first"] = [[each.name, each.ranks] for each in odd.first]
    return told


def megatron() -> dict[str, Any]:
    """Tensor, data and expert parallelism of Megatron-core."""
    from family_models import build, start
    from tiny_families import FAMILIES, Layout

    from weightbus.trainer_agent.sources.megatron import cpu_emulation
    from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

    cpu_emulation.install()
    told: dict[str, Any] = {}
    for case, family, layout in (
        ("tp2 dp2", "qwen3", Layout(tp=2, dp=2)),
        ("tp4", "qwen3", Layout(tp=4)),
        ("ep2 dp2", "qwen3_moe", Layout(ep=2, dp=4)),
    ):
        hf = {**FAMILIES[family].config, "architectures": [FAMILIES[family].architecture], "dtype": "float32"}
        start(layout)
        chunks = build(family, hf, layout)
        with torch.no_grad():
            for name, parameter in chunks[0].named_parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        source = MegatronSource(chunks, hf_config=hf, timeout_s=60.0)
        told[case] = compare(source, chunks, "final_layernorm.weight")
        source.close()
    return told


def torch_modules() -> dict[str, Any]:
    """Hybrid FSDP2, and a plain module on every rank."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # one for CUDA does not import beside a torch for the CPU
    from fsdp_ranks import EVEN, ODD, hybrid, make

    from weightbus.trainer_agent.sources.hf_module import FSDPSource

    told: dict[str, Any] = {}
    for case, sizes, shard in (("hybrid", EVEN, hybrid), ("odd hybrid", ODD, hybrid), ("plain", ODD, None)):
        module = make("qwen3", sizes)()
        if shard is not None:
            shard(module)
        source = FSDPSource(module, dtype=torch.bfloat16, timeout_s=60.0)
        told[case] = compare(source, [module], "model.norm.weight")
        source.close()
    return told


def main() -> None:
    """Run the cases of one framework."""
    rank, world, rendezvous, out, which = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
        sys.argv[5],
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=dt.timedelta(seconds=120)
    )
    told = megatron() if which == "megatron" else torch_modules()
    (out / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
