"""A world of ranks, one after another in one process: every family in many layouts, without a collective.

    python tests/kit/family_worlds.py CHECKPOINTS OUT CASE...

Megatron-core builds each rank's part under torch's fake process group, the oracle of family_models.py fills it, and the
ranks' shards are then assembled by their own assemblers, with gather messages handed over in memory.
``OUT/<case>.json`` says what differs, bit for bit, from the checkpoint, in its own dtype or in bfloat16. What only real
ranks show, collectives and logits, is family_ranks.py's.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mcore_on_cpu

mcore_on_cpu.prepare()

import quantizing  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.fake_pg  # noqa: E402  registers the backend "fake"
from exporting import tensors_in  # noqa: E402
from family_models import build, load, start  # noqa: E402
from quantized_world import Post  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_families import Case, parse, text_of  # noqa: E402

from weightbus.dataplane.tensors.manifest import Manifest, cut  # noqa: E402
from weightbus.dataplane.tensors.shards import Shards  # noqa: E402
from weightbus.trainer_agent.assembly.assembler import DTYPES, Assembler  # noqa: E402
from weightbus.trainer_agent.assembly.gather_plan import plan  # noqa: E402
from weightbus.trainer_agent.quantized.quantized_source import quantized  # noqa: E402
from weightbus.trainer_agent.sources.collective_source import (  # noqa: E402
    RankLayout,
    RankShards,
    check_layouts,
    distinct_shards,
    encode,
)
from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu  # noqa: E402
from weightbus.trainer_agent.sources.megatron.megatron_source import (  # noqa: E402
    check_order,
    describe_chunks,
    roots_of,
)

KINDS = {
    "norms in linears": re.compile(r"linear_(qkv|fc1)\.layer_norm_weight$"),
    "grouped experts": re.compile(r"experts\.linear_fc[12]\.weight\d+$"),
    "extra state": re.compile(r"\._extra_state$"),
}
"""What Transformer Engine's modules put into a state dict; Megatron-core's own linears have an extra state, too."""


def described(
    case: Case, rank: int, hf: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> tuple[RankShards, set[str]]:
    """What `rank` says it holds, and which of these kinds."""
    world = case.layout.world
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        start(case.layout)
        chunks = build(case.family, hf, case.layout)
        load(case.family, hf, chunks, tensors)
        names = [name for chunk in chunks for name in chunk.state_dict(keep_vars=True)]
        kinds = {kind for kind, pattern in KINDS.items() if any(map(pattern.search, names))}
        return describe_chunks(chunks, hf, dtype, rank), kinds
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run_case(case: Case, world: int, checkpoints: Path) -> dict[str, Any]:
    """Describe, agree, plan and assemble; compare with the checkpoint."""
    began = time.perf_counter()
    folder = checkpoints / case.family
    hf = json.loads((folder / "config.json").read_text())
    full = load_file(folder / "model.safetensors")
    expected = text_of(full)
    chance = random.Random(str(case))
    dtype = chance.choice([None, torch.bfloat16])
    found_by = [described(case, rank, hf, expected, dtype) for rank in range(world)]
    ranks = [description for description, _ in found_by]
    expected |= {spec.name: expected[spec.name].to(DTYPES[spec.dtype]) for spec in ranks[0].tensors}
    rosters = check_layouts([encode(RankLayout(each.facts(), each.shards.encode(), each.stages)) for each in ranks])
    check_order(rosters)
    pieces = distinct_shards(rosters, ranks[0].tensors)
    bucket_bytes = chance.choice([1, 5000, 40_000, 1 << 30])
    manifest = Manifest.of("M", ranks[0].tensors, bucket_bytes)
    roots = [0] * len(manifest.buckets)
    if case.layout.pp > 1 and chance.choice([True, False]):
        owners = roots_of(rosters, pieces)
        sources = sorted(set(owners))
        manifest, shares = cut("M", ranks[0].tensors, [sources.index(owner) for owner in owners], bucket_bytes)
        roots = [sources[source] for source in shares.of]
    zero_copy = chance.choice([1, 2000, 1 << 20])
    letters: dict[int, list[torch.Tensor]] = defaultdict(list)
    assemblers = [
        Assembler(
            plan(manifest, pieces, rank=rank, roots=roots, zero_copy_bytes=zero_copy),
            each.parameters,
            rank,
            roots,
            Post(rank, letters),
        )
        for rank, each in enumerate(ranks)
    ]
    odd: list[str] = []
    for index, bucket in enumerate(manifest.buckets):
        out = torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8)
        for rank in sorted(range(world), key=lambda rank: rank == roots[index]):
            assemblers[rank].run(index, out if rank == roots[index] else None, torch.device("cpu"))
        for name, found in tensors_in(manifest, index, out).items():
            if name not in expected or not torch.equal(found, expected[name]):
                odd.append(name)
    odd += [name for name in expected if name not in {spec.name for spec in manifest.tensors}]
    odd += quantized_otherwise(ranks, pieces, expected, chance)
    return {
        "odd": odd[:5],
        "count": len(odd),
        "tensors": len(expected),
        "kinds": sorted(set[str]().union(*(kinds for _, kinds in found_by))),
        "seconds": round(time.perf_counter() - began, 2),
    }


def quantized_otherwise(
    ranks: Sequence[RankShards], pieces: Shards, expected: dict[str, torch.Tensor], chance: random.Random
) -> list[str]:
    """What is other bits when ranks quantize the blocks that they hold than when whole tensors are quantized."""
    config = quantizing.config(chance.choice([4, 16, 128]), expected)
    letters: dict[int, list[torch.Tensor]] = defaultdict(list)
    sources = [
        quantized(quantizing.Held(rank, pieces, each.parameters, Post(rank, letters)), config)
        for rank, each in enumerate(ranks)
    ]
    manifest = Manifest.of("M", sources[0].tensors(), chance.choice([1, 5000, 1 << 30]))

    def assemble(index: int, out: torch.Tensor) -> None:
        for source in reversed(sources):
            source.assemble(manifest, index, out if source.root else None)

    served = {spec.name: expected[spec.name] for spec in ranks[0].tensors}
    found = quantizing.collected(manifest, assemble)
    return [f"quantized {name}" for name in quantizing.differing(found, quantizing.whole(served, config))]


def main() -> None:
    checkpoints, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    megatron_cpu.install()
    mcore_on_cpu.patch()
    for name in sys.argv[3:]:
        case = parse(name)
        world = case.layout.world
        try:
            verdict = run_case(case, world, checkpoints)
        except Exception as error:  # noqa: BLE001  a case that fails must not hide the others
            verdict = {"error": f"{type(error).__name__}: {error}"}
        (out / f"{name}.json").write_text(json.dumps(verdict))
        print(name, verdict, flush=True)  # noqa: T201  a program's output


if __name__ == "__main__":
    main()
