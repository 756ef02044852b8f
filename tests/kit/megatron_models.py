"""Tiny real megatron-core models on CPU ranks, in any layout, with content that depends on the global name only."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron_cases import PADDED_VOCABULARY, VOCABULARY, Layout
from torch import nn

from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu


def start(layout: Layout) -> None:
    """Set Megatron's groups up for `layout`, over all ranks of the world."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
    )
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def transformer_config(hf: dict[str, Any], layout: Layout, **changes: object) -> Any:
    """The TransformerConfig of the model that `hf` describes."""
    from megatron.core.transformer import TransformerConfig

    biases = bool(hf.get("attention_bias") or hf.get("mlp_bias"))
    fields: dict[str, Any] = {
        **megatron_cpu.CONFIG,
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "add_bias_linear": biases,
        "add_qkv_bias": biases or hf["model_type"] == "qwen2",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": hf["model_type"] == "qwen3",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
    }
    return TransformerConfig(**fields | changes)


def build(hf: dict[str, Any], layout: Layout, *, fused_norms: bool = False, **changes: object) -> list[nn.Module]:
    """This rank's chunks. With `fused_norms` norms live in the linear layers, under Transformer Engine's names."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = transformer_config(hf, layout, **changes)
    chunks = []
    for stage in range(layout.vpp or 1):
        vp_stage = stage if layout.vpp else None
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=PADDED_VOCABULARY,
                max_sequence_length=hf["max_position_embeddings"],
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=hf["tie_word_embeddings"],
                position_embedding_type="rope",
                rotary_base=int(hf["rope_theta"]),
                vp_stage=vp_stage,
            )
        )
        if fused_norms:
            _fuse_norms(chunks[-1])
    return chunks


def _fuse_norms(chunk: Any) -> None:
    """Move the norms into the linear layers behind them, as Transformer Engine's fused layers name them."""
    from megatron.core.transformer.identity_op import IdentityOp

    def normed(linear: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = inputs[0]
        return nn.functional.rms_norm(
            x, x.shape[-1:], linear.layer_norm_weight, chunk.config.layernorm_epsilon
        ), *inputs[1:]

    for layer in chunk.decoder.layers:
        for norm, linear in (
            ("input_layernorm", layer.self_attention.linear_qkv),
            ("pre_mlp_layernorm", layer.mlp.linear_fc1),
        ):
            linear.layer_norm_weight = getattr(layer, norm).weight
            linear.register_forward_pre_hook(normed)
            setattr(layer, norm, IdentityOp())


def fill(chunks: Sequence[nn.Module], seed: int = 0) -> None:
    """Give every parameter content that depends on `seed` and its global name only, cut as Megatron cuts it."""
    from megatron.core import parallel_state

    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    aliases = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    for chunk in chunks:
        for local, parameter in chunk.named_parameters():
            name = local
            if local.startswith("decoder.layers."):
                _, _, index, rest = local.split(".", 3)
                number = chunk.get_submodule(f"decoder.layers.{index}").layer_number
                name = f"{number}.{aliases.get(rest, rest)}"
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            shape, cut = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
            dim = getattr(parameter, "partition_dim", 0)
            if cut:
                shape[dim] *= ranks
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            full = torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0)
            if cut:
                stride = 2 if "linear_fc1" in name else 1
                parts = full.chunk(ranks * stride, dim)
                full = torch.cat(parts[rank::ranks], dim)
            with torch.no_grad():
                parameter.copy_(full)


@torch.no_grad()
def logits(chunks: Sequence[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    """The whole model's logits, on every rank of the last stage; elsewhere an empty tensor."""
    from megatron.core import parallel_state as state

    stages, stage = state.get_pipeline_model_parallel_world_size(), state.get_pipeline_model_parallel_rank()
    line = dist.get_process_group_ranks(state.get_pipeline_model_parallel_group())
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, length)
    hidden: torch.Tensor | None = None
    for step in range(len(chunks) * stages):
        if step % stages != stage:
            continue
        chunk = chunks[step // stages]
        if step > 0 and stages > 1:
            hidden = torch.empty(length, batch, chunk.config.hidden_size)
            dist.recv(hidden, src=line[(step - 1) % stages])
        if step > 0:
            chunk.set_input_tensor(hidden)
        hidden = chunk(tokens, positions, None)
        if step < len(chunks) * stages - 1 and stages > 1:
            dist.send(hidden.contiguous(), dst=line[(step + 1) % stages])
    if stage != stages - 1 or hidden is None:
        return torch.empty(0)
    shards = [torch.empty_like(hidden) for _ in range(state.get_tensor_model_parallel_world_size())]
    dist.all_gather(shards, hidden.contiguous(), group=state.get_tensor_model_parallel_group())
    return torch.cat(shards, -1)[..., :VOCABULARY].contiguous()
