"""The program of one rank: exports every case of its world size, then what the tests need to judge it.

    python tests/kit/megatron_ranks.py RANK WORLD RENDEZVOUS_FILE OUT

Rank 0 writes ``OUT/<case>.safetensors`` (the served tensors), the last rank ``OUT/<case>.logits.safetensors``, and
every rank ``OUT/rank<r>.json`` with what it was told where a refusal was expected.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exposing import wrongly_exposed
from megatron_cases import CASES, CONTENTS, TOKENS, Case, Layout
from megatron_models import build, fill, logits, start
from safetensors.torch import save_file
from torch import nn

from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.assembly.assembler import DTYPES
from weightbus.trainer_agent.source import AssemblyFailed, HasHeadDim, SourceError
from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource


def export(source: MegatronSource, bucket_bytes: int) -> dict[str, torch.Tensor]:
    """All served tensors, on the root, through buckets of `bucket_bytes`."""
    manifest = Manifest.of(source.model, source.tensors(), bucket_bytes)
    tensors: dict[str, torch.Tensor] = {}
    for index, bucket in enumerate(manifest.buckets):
        out = torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8) if source.root else None
        source.assemble(manifest, index, out)
        if out is None:
            continue
        for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            tensors[spec.name] = out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
    return tensors


def run_case(name: str, case: Case, out: Path) -> None:
    """Export one case and compute its logits."""
    start(case.layout)
    hf = CONTENTS[case.content]
    chunks = build(hf, case.layout, fused_norms=case.fused_norms)
    fill(chunks)
    served = [_wrap(chunk) for chunk in chunks] if case.wrapped else chunks
    source = MegatronSource(served, hf_config=hf, dtype=DTYPES[case.dtype] if case.dtype else None, timeout_s=60.0)
    assert isinstance(source, HasHeadDim), "the leader would not ask it"
    assert source.head_dim == hf["head_dim"]
    tensors = export(source, case.bucket_bytes)
    assert wrongly_exposed(source, tensors) == []
    if source.root:
        save_file(tensors, out / f"{name}.safetensors")
    found = logits(chunks, torch.tensor(TOKENS))
    if dist.get_rank() == dist.get_world_size() - 1:
        save_file({"logits": found}, out / f"{name}.logits.safetensors")
    for size in (0, 10, 1016, 1017, 5000):
        blob = bytes(range(256)) * 20
        assert source.agree(blob[:size] if source.root else None) == blob[:size]
    source.close()


def _wrap(chunk: nn.Module) -> nn.Module:
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
    attempt, layout, hf = Attempts(), Layout(pp=2), CONTENTS["qwen3"]
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


def refusals() -> dict[str, str]:
    """What every rank is told when the model on one of them, or on all, cannot be served."""
    attempt = told = Attempts()
    layout = Layout(pp=2)
    start(layout)
    hf = CONTENTS["qwen3"]
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
    tied = CONTENTS["qwen3-tied"]
    (chunk,) = build(tied, Layout())
    chunk.output_layer.weight = nn.Parameter(chunk.embedding.word_embeddings.weight.detach().clone())
    attempt("tied with an output of its own", [chunk], tied)
    return told


def two_models() -> dict[str, str]:
    """Two sources, one over each half of the world, built twice: whether each exports what it holds."""
    from megatron.core import parallel_state

    layout, hf = Layout(tp=2), CONTENTS["qwen3"]
    start(layout)
    half = dist.get_rank() // 2
    verdicts = []
    for build_number in range(2):
        chunks = build(hf, layout)
        fill(chunks, seed=half + 1)
        source = MegatronSource(
            chunks, hf_config=hf, group=parallel_state.get_tensor_model_parallel_group(), timeout_s=60.0
        )
        tensors = export(source, 1 << 14)
        if source.root:
            norm = dict(chunks[0].named_parameters())["decoder.final_layernorm.weight"]
            verdicts.append(torch.equal(tensors["model.norm.weight"], norm) and len(tensors) == len(source.tensors()))
        assert source.agree(bytes([half, build_number]) if source.root else None) == bytes([half, build_number])
        source.close()
    return {"two models": str(verdicts)}


def late_gather() -> dict[str, str]:
    """What is exported right after a step whose new parameters are gathered only by the next forward pass."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    layout, hf = Layout(), CONTENTS["qwen3"]
    start(layout)
    (chunk,) = build(hf, layout, bf16=True, params_dtype=torch.bfloat16)
    fill([chunk])
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
    source = MegatronSource(build(CONTENTS["qwen3"], layout), hf_config=CONTENTS["qwen3"], timeout_s=60.0)
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
    for name, case in CASES.items():
        if case.world == world and (len(sys.argv) < 6 or name in sys.argv[5:]):
            run_case(name, case, out)
    told: dict[str, str] = {}
    if len(sys.argv) < 6:
        told = two_models() if world == 4 else refusals() | misnumbered() | late_gather() | lose_a_peer()
    (out / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
