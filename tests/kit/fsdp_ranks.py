"""The program of one FSDP2 rank: shards tiny transformers models in every way of its world size, and exports them.

    python tests/kit/fsdp_ranks.py RANK WORLD RENDEZVOUS_FILE OUT

Every rank writes ``OUT/rank<r>.json``: for every case what differed from the module before it was sharded, and from
`full_tensor()` after an optimizer step; and what it was told where a refusal was expected.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quantizing
import torch
import torch.distributed as dist
from exporting import differing, export
from exposing import wrongly_exposed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.quantized.quantized_source import quantized
from weightbus.trainer_agent.source import SourceError
from weightbus.trainer_agent.sources.checkpoint_conversion import revert, stored_tensors
from weightbus.trainer_agent.sources.collective_source import local_tensor
from weightbus.trainer_agent.sources.exported import FullTensorSource
from weightbus.trainer_agent.sources.hf_module import FSDPSource, HFModuleSource

EVEN = {"hidden_size": 16, "intermediate_size": 32, "head_dim": 8, "num_key_value_heads": 2, "vocab_size": 64}
ODD = {"hidden_size": 18, "intermediate_size": 25, "head_dim": 6, "num_key_value_heads": 1, "vocab_size": 67}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 7}

Make = Callable[[], nn.Module]
Sharding = Callable[[nn.Module], None]


def make(kind: str, sizes: dict[str, int], *, tied: bool = False, experts: int = 0) -> Make:
    """A tiny model with the same random weights on every rank."""

    def build() -> nn.Module:
        torch.manual_seed(7)
        plain: dict[str, Any] = {**sizes, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": tied}
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**plain))
        if kind == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**plain))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**EXPERTS, **plain}, num_experts=experts))

    return build


def by_layer(mesh: DeviceMesh | None = None, **how: Any) -> Sharding:
    """Every layer, then the rest: as trainers do it."""

    def shard(module: nn.Module) -> None:
        for layer in module.model.layers:
            fully_shard(layer, mesh=mesh, **how)
        fully_shard(module, mesh=mesh, **how)

    return shard


def hybrid(module: nn.Module) -> None:
    """Two replicas of two shards each."""
    by_layer(init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))(module)


def over_tensor_parallel(module: nn.Module) -> None:
    """Two by two: columns and rows first, FSDP over what is left of each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    linear = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in module.model.layers:
        parallelize_module(layer, mesh["tp"], linear)
    parallelize_module(module, mesh["tp"], {"lm_head": ColwiseParallel()})
    by_layer(mesh["dp"])(module)


def over_fused_tensor_parallel(module: nn.Module) -> None:
    """As transformers' own tensor parallelism: a rank has its part of gate and of up, which are one tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            if name in {"gate_up_proj", "down_proj"}:
                cut = _StridedShard(1, split_factor=2) if name == "gate_up_proj" else Shard(2)
                part.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh["tp"], [cut])))
    by_layer(mesh["dp"])(module)


def expert_parallel(module: nn.Module) -> None:
    """Each half of the experts on two ranks, sharded over a mesh of its own; everything else over all four."""
    grid = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ep", "fsdp"))
    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    distribute(module, flat, grid["fsdp"], grid.get_local_rank("ep"))


def distribute(module: nn.Module, mesh: DeviceMesh, of_experts: DeviceMesh | None, half: int) -> None:
    """Shard every parameter over `mesh`; of experts one half, over `of_experts` or, without one, left as it is."""
    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            mine = parameter.data.chunk(2)[half].clone() if parameter.dim() == 3 else parameter.data
            held = mesh if parameter.dim() < 3 else of_experts
            sharded = mine if held is None else distribute_tensor(mine, held, [Shard(0)])
            part.register_parameter(name, nn.Parameter(sharded))


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
CASES: dict[int, dict[str, tuple[Make, Sharding]]] = {
    2: {
        "llama": (make("llama", EVEN), by_layer()),
        "tied": (make("qwen3", EVEN, tied=True), by_layer(mp_policy=BFLOAT16)),
        "odd": (make("qwen3", ODD), by_layer()),
        "experts": (make("moe", EVEN, experts=4), by_layer()),
    },
    4: {
        "odd experts": (make("moe", ODD, experts=3), by_layer()),  # the fourth rank has no expert
        "hybrid": (make("moe", ODD, experts=3), hybrid),
        "over tensor parallel": (make("llama", EVEN), over_tensor_parallel),
        "over fused tensor parallel": (
            make("moe", EVEN | {"moe_intermediate_size": 8}, experts=4),
            over_fused_tensor_parallel,
        ),
        "expert parallel": (make("moe", ODD, experts=6), expert_parallel),
        "odd over tensor parallel": (make("qwen3", ODD), over_tensor_parallel),
    },
}


def run_case(build: Make, shard: Sharding) -> dict[str, Any]:
    """Export before and after a step of the optimizer; what differed, on the root."""
    module = build()
    before = revert(module, {name: tensor.detach().clone() for name, tensor in stored_tensors(module).items()})
    shard(module)
    source = FSDPSource(module, dtype=torch.bfloat16, timeout_s=60.0)
    told: dict[str, Any] = {"model": source.model, "tensors": len(source.tensors()), "heads": source.head_dim}
    found = export(source, 1500)
    told["differs"] = differing(found, {name: tensor.bfloat16() for name, tensor in before.items()} if found else {})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stepped = export(source, 4000)
    told["unchanged"] = sorted(name for name in found if torch.equal(found[name], stepped[name]))
    told["wrongly exposed"] = wrongly_exposed(source, stepped)
    served = quantizing.config(8)
    shrunk = export(quantized(source, served), 1500)
    told["differs quantized"] = quantizing.differing(shrunk, quantizing.whole(stepped, served)) if shrunk else []
    told["wrongly exposed quantized"] = wrongly_exposed(quantized(source, served), shrunk)
    told["quantized"] = sum(each.dtype == torch.float8_e4m3fn for each in shrunk.values())
    if shard is expert_parallel:
        told["gathered whole"] = refusal(lambda: FullTensorSource(module, timeout_s=60.0))
        told["differs from full_tensor"] = []
    else:
        whole = FullTensorSource(module, dtype=torch.bfloat16, timeout_s=60.0)
        assert {spec.name for spec in whole.tensors()} == {spec.name for spec in source.tensors()}
        told["differs from full_tensor"] = differing(stepped, export(whole, 4000))
        whole.close()
    told["empty shards"] = sum(not local_tensor(parameter).numel() for parameter in module.parameters())
    told["extra"] = _extra(source)
    source.close()
    return told


def refusal(make: Callable[[], object]) -> str:
    """What a source says that refuses to be built."""
    try:
        make()
    except SourceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _extra(source: FSDPSource) -> list[int]:
    """Bytes of the largest bucket, and the most that this rank needed beside it."""
    manifest = Manifest.of(source.model, source.tensors(), 1500)
    peak = 0
    for index, bucket in enumerate(manifest.buckets):
        source.assemble(manifest, index, torch.empty(bucket.nbytes, dtype=torch.uint8) if source.root else None)
        assembler = source._planned.of(manifest, None, source._plan).assembler
        scratch = assembler._scratch if assembler else None
        peak = max(peak, 0 if scratch is None else scratch.numel())
    return [manifest.largest_bucket, peak]


class OneMatrix(nn.Module):
    """A model that no config describes."""


def told_apart(attempt: Callable[[str, nn.Module], None]) -> None:
    """Models that were built differently on the ranks, and parts that lie on meshes which do not know each other."""
    rank = dist.get_rank()
    module = make("qwen3", EVEN | {"head_dim": 8 if rank else 4})()
    by_layer()(module)
    attempt("another width on rank 1", module)
    module = make("moe", EVEN, experts=4)()
    distribute(module, init_device_mesh("cpu", (2,)), None, rank)
    attempt("experts of one rank that nothing tells apart", module)
    module = OneMatrix()
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "fsdp"))
    module.weight = nn.Parameter(distribute_tensor(torch.full((4, 4), float(rank)), meshes["fsdp"], [Shard(0)]))
    attempt("different parts on meshes apart", module)
    module.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), meshes["fsdp"], [Shard(0)]))
    attempt("replicas on meshes apart", module)


def refusals() -> dict[str, str]:
    """What every rank is told when the module on one of them, or on all, cannot be served."""
    told: dict[str, str] = {}

    def attempt(
        what: str, module: nn.Module | None, kind: type[FSDPSource | FullTensorSource] = FSDPSource, **given: Any
    ) -> None:
        try:
            kind(module, timeout_s=60.0, **given).close()
        except SourceError as error:
            told[what] = f"{type(error).__name__}: {error}"
        dist.barrier()

    rank = dist.get_rank()
    module = make("qwen3", EVEN)()
    by_layer()(module)
    module.lm_head.lora_A = nn.Linear(2, 2) if rank else None
    attempt("an adapter on rank 1", module)
    attempt("an adapter on rank 1, gathered whole", module, FullTensorSource)
    module = make("qwen3", EVEN)()
    by_layer()(module)
    attempt("another dtype on rank 1", module, dtype=torch.bfloat16 if rank else torch.float32)
    told_apart(attempt)
    module = make("qwen3", EVEN)()
    with torch.no_grad():
        module.model.norm.weight.add_(rank)
    for layer in module.model.layers:
        fully_shard(layer)
    attempt("a part that is not sharded and not equal", module)
    module = make("qwen3", EVEN, tied=True)()
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
    by_layer()(module)
    attempt("tied in the config alone", module)
    module = make("qwen3", EVEN)()
    by_layer()(module)
    weight = module.lm_head.weight
    partial = DTensor.from_local(weight.to_local().detach(), weight.device_mesh, [Partial()], run_check=False)
    module.lm_head.register_parameter("weight", nn.Parameter(partial))
    attempt("a sum that was not made", module)
    module = make("qwen3", EVEN)()
    by_layer()(module)
    attempt("no module on rank 1", None if rank else module)
    source = FSDPSource(module, timeout_s=60.0)
    told["sharded, as a single module"] = refusal(lambda: HFModuleSource(module))
    if rank:
        module.load_state_dict({name: each.clone() for name, each in module.state_dict().items()}, assign=True)
    for what, read in {"assembled": lambda: export(source, 1500), "exposed": source.memory}.items():
        try:
            read()
        except SourceError as error:
            told[f"replaced on rank 1, {what}"] = f"{type(error).__name__}: {error}"
    source.close()
    return told


def main() -> None:
    """Every case of this world size, in order."""
    rank, world, rendezvous, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    minute = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=minute)
    told: dict[str, Any] = {name: run_case(*case) for name, case in CASES[world].items()}
    if world == 2:
        told["refusals"] = refusals()
    (out / f"rank{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
