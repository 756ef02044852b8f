"""The program of one rank: models that cannot be served, and models that change under their source.

    python tests/kit/megatron_ranks.py RANK WORLD RENDEZVOUS_FILE OUT

Every rank writes ``OUT/rank<r>.json`` with what it was told. What layouts export is family_ranks.py's.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exporting import differing, export
from family_models import build as build_family, start
from quantized_tensor import Float8Tensor
from tiny_families import FAMILIES, TOKENS, Layout
from torch import nn

from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.source import AssemblyFailed, SourceError, head_dim_of
from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

MODEL = {**FAMILIES["qwen3"].config, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32"}
TIED = {**MODEL, "tie_word_embeddings": True}


def build(hf: dict[str, Any], layout: Layout, **changes: object) -> list[nn.Module]:
    """This rank's chunks."""
    return build_family("qwen3", hf, layout, **changes)


def fill(chunks: Sequence[nn.Module], seed: int) -> None:
    """Give every parameter content that depends on `seed` and its name."""
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode())))


def wrapped(chunk: nn.Module) -> nn.Module:
    """As trainers wrap it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)


class Attempts(dict[str, str]):
    """What this rank was told, by what was tried."""

    def __call__(self, what: str, chunks: list[nn.Module] | None, hf: dict[str, Any]) -> None:
        """Try to build a source."""
        try:
            MegatronSource(chunks, hf_config=hf, timeout_s=60.0).close()
        except SourceError as error:
            self[what] = f"{type(error).__name__}: {error}"
        dist.barrier()


def misnumbered() -> dict[str, str]:
    """What every rank is told when layers are not where their numbers say."""
    attempt, layout, hf = Attempts(), Layout(pp=2), MODEL
    start(layout)
    source = MegatronSource(build(hf, layout), hf_config=hf | {"vocab_size": 100}, vocab_divisible_by=256)
    attempt["padded to 256"] = str({spec.name: spec.shape for spec in source.tensors()}["lm_head.weight"])
    source.close()
    chunks = build(hf, layout)
    if dist.get_rank() == 1:
        layers = chunks[0].decoder.layers
        layers[0], layers[1] = layers[1], layers[0]
    attempt("layers exchanged on rank 1", chunks, hf)
    chunks = build(hf, layout)
    if dist.get_rank() == 1:
        chunks[0].decoder.layers[0].layer_number = 1
    attempt("a layer's number changed on rank 1", chunks, hf)
    chunks = build(hf, layout)
    for module in chunks[0].decoder.modules():
        if hasattr(module, "layer_number"):
            module.layer_number += -2 if dist.get_rank() else 2
    attempt("stages exchanged", chunks, hf)
    return attempt


def kept_in_fp8(chunks: list[nn.Module]) -> list[nn.Module]:
    """On rank 1, the chunks with one matrix as Transformer Engine keeps it under `fp8_param`."""
    if dist.get_rank() == 1:
        linear = chunks[0].decoder.layers[1].mlp.linear_fc2
        linear.weight = nn.Parameter(Float8Tensor(linear.weight.detach()), requires_grad=False)
    return chunks


def refusals() -> dict[str, str]:
    """What every rank is told when the model on one of them, or on all, cannot be served."""
    attempt = told = Attempts()
    layout = Layout(pp=2)
    start(layout)
    hf = MODEL
    chunks = build(hf, layout)
    attempt("another ffn", chunks, hf | {"intermediate_size": 128})
    attempt("another vocabulary", chunks, hf | {"vocab_size": 300})
    attempt("a vocabulary cut short", chunks, hf | {"vocab_size": 100})
    attempt("tied", chunks, hf | {"tie_word_embeddings": True})
    attempt("another family", chunks, hf | {"architectures": ["GPT2LMHeadModel"]})
    attempt("different configs", chunks, hf | {"dtype": "bfloat16" if dist.get_rank() else "float32"})
    attempt("one stage missing", chunks if dist.get_rank() == 0 else build(hf, layout)[:0], hf)
    if dist.get_rank() == 1:
        chunks[0].decoder.register_buffer("counts", torch.zeros(3))
    attempt("a buffer on rank 1", chunks, hf)
    chunks = build(hf, layout)
    if dist.get_rank() == 1:
        chunks[0].decoder.layers[1].mlp.adapter = nn.Linear(4, 4)
    attempt("an adapter on rank 1", chunks, hf)
    chunks = build(hf, layout)
    if dist.get_rank() == 1:
        norm = chunks[0].decoder.layers[1].input_layernorm
        norm.weight = nn.Parameter(norm.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    attempt("a quantized norm on rank 1", chunks, hf)
    attempt("a parameter kept in FP8 on rank 1", kept_in_fp8(build(hf, layout)), hf)
    chunks = build(hf, layout)
    attempt("nothing on rank 1", None if dist.get_rank() else chunks, hf)
    chunks = build(hf, layout)
    source = MegatronSource(chunks, hf_config=hf, timeout_s=60.0)
    if dist.get_rank() == 1:
        norm = chunks[0].decoder.layers[1].input_layernorm
        norm.weight = nn.Parameter(norm.weight.detach().clone())
    for what, read in {"assembled": lambda: export(source, 1 << 14), "exposed": source.memory}.items():
        try:
            read()
        except SourceError as error:
            told[f"replaced on rank 1, {what}"] = f"{type(error).__name__}: {error}"
    source.close()
    attempt("a model without values", [chunk.to_empty(device="meta") for chunk in build(hf, layout)], hf)
    chunks = build(hf, layout, num_moe_experts=2, moe_router_topk=2, moe_ffn_hidden_size=96)
    attempt("experts", chunks, hf)
    chunks = build(hf, layout)
    if dist.get_rank() == 1:
        chunks[0].decoder.layers[0].self_attention.linear_qkv.layer_norm_weight = nn.Parameter(torch.ones(64))
    attempt("one norm twice on rank 1", chunks, hf)
    start(Layout())
    tied = TIED
    (chunk,) = build(tied, Layout())
    chunk.output_layer.weight = nn.Parameter(chunk.embedding.word_embeddings.weight.detach().clone())
    attempt("tied with an output of its own", [chunk], tied)
    return told


def two_models() -> dict[str, str]:
    """Two sources, one over each half of the world, built anew: whether each exports what it holds.

    The same whether wrapped or not and through buckets of any size, and rounded where another type is served.
    """
    from megatron.core import parallel_state

    layout = Layout(tp=2)
    start(layout)
    half = dist.get_rank() // 2
    first: dict[str, torch.Tensor] = {}
    verdicts = []
    for wrap, bucket_bytes, dtype in ((False, 1 << 14, None), (True, 1, None), (False, 1 << 30, torch.bfloat16)):
        chunks = build(MODEL, layout)
        fill(chunks, seed=half + 1)
        served = [wrapped(chunk) for chunk in chunks] if wrap else chunks
        group = parallel_state.get_tensor_model_parallel_group()
        source = MegatronSource(served, hf_config=MODEL, dtype=dtype, group=group, timeout_s=60.0)
        assert head_dim_of(source) is not None, "the leader would not ask it"
        assert source.head_dim == MODEL["head_dim"]
        tensors = export(source, bucket_bytes)
        if source.root:
            first = first or tensors
            norm = dict(chunks[0].named_parameters())["decoder.final_layernorm.weight"]
            expected = {name: tensor.to(dtype) if dtype else tensor for name, tensor in first.items()}
            same = torch.equal(expected["model.norm.weight"], norm.to(dtype) if dtype else norm)
            verdicts.append(same and not differing(tensors, expected) and len(tensors) == len(source.tensors()))
        assert source.agree(bytes([half, wrap]) if source.root else None) == bytes([half, wrap])
        source.close()
    return {"two models": str(verdicts)}


def late_gather() -> dict[str, str]:
    """What is exported right after a step whose new parameters are gathered only by the next forward pass."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layout, hf = Layout(), MODEL
    start(layout, gloo=True)
    (chunk,) = build(hf, layout, bf16=True, params_dtype=torch.bfloat16)
    fill([chunk], 0)
    overlapped = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True
    )
    model = DistributedDataParallel(chunk.config, overlapped, chunk.bfloat16())
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        [model],
    )
    source = MegatronSource(model, hf_config=hf, dtype=torch.bfloat16, timeout_s=60.0)
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    model(tokens, positions, None, labels=tokens).float().mean().backward()
    model.finish_grad_sync()
    optimizer.step()
    stale = {name: parameter.clone() for name, parameter in chunk.named_parameters()}
    exported = export(source, 1 << 20)
    lagged = sum(not torch.equal(stale[name], parameter) for name, parameter in chunk.named_parameters())
    with torch.no_grad():
        model(tokens, positions, None)
    again = export(source, 1 << 20)
    source.close()
    equal = all(torch.equal(tensor, again[name]) for name, tensor in exported.items())
    return {"late gather": "equal" if equal else "stale", "lagged": str(lagged)}


def lose_a_peer() -> dict[str, str]:
    """What rank 0 is told, and when, after rank 1 left in the middle of a version."""
    layout = Layout(tp=2)
    start(layout)
    source = MegatronSource(build(MODEL, layout), hf_config=MODEL, timeout_s=60.0)
    manifest = Manifest.of(source.model, source.tensors(), 1 << 14)
    if not source.root:
        source.assemble(manifest, 0, None)
        return {}
    source.assemble(manifest, 0, torch.empty(manifest.buckets[0].nbytes, dtype=torch.uint8))
    began = time.monotonic()
    try:
        source.assemble(manifest, 1, torch.empty(manifest.buckets[1].nbytes, dtype=torch.uint8))
    except AssemblyFailed as error:
        return {"lost peer": f"AssemblyFailed: {error}", "lost peer seconds": str(time.monotonic() - began)}
    return {}


def main() -> None:
    """Run everything that a world of this size is asked for."""
    rank, world, rendezvous, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    megatron_cpu.install()
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=dt.timedelta(seconds=60)
    )
    told = two_models() if world == 4 else refusals() | misnumbered() | late_gather() | lose_a_peer()
    (out / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
