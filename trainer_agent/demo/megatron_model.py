"""The policy as Megatron-core trains it: built for the groups that are set up, loaded from the Hugging Face folder.

The only code of the demo that knows Megatron's model; `learner.py` trains it. Import after `megatron_cpu.install()`.
"""

# Megatron is typed in part, and generously: what it returns is unknown to a strict reader.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch.nn import functional

from ..sources.megatron import CONFIG
from .initial_checkpoint import ModelShape


def build(shape: ModelShape) -> GPTModel:
    """This rank's part of the policy, bfloat16 and not yet loaded."""
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_groups,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        **cast("dict[str, Any]", {**CONFIG, **(_experts(shape) if shape.experts else {})}),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=cast("ModuleSpec", get_gpt_decoder_block_spec(config, use_transformer_engine=False)),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        share_embeddings_and_output_weights=False,
    )


def _experts(shape: ModelShape) -> dict[str, object]:
    """What a TransformerConfig says of experts, which are modules of their own: grouped ones need a GPU."""
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


def load(model: GPTModel, weights: Mapping[str, torch.Tensor], shape: ModelShape) -> None:
    """Fill this rank's parameters from Hugging Face tensors. Raises `KeyError` for one without a counterpart."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    first = cast("int", model.decoder.layers[0].layer_number) - 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = from_hf(_in_model(name, first), weights, shape)
            if getattr(parameter, "tensor_model_parallel", False):
                dim = int(getattr(parameter, "partition_dim", 0))
                parts = [piece.chunk(ranks, dim)[rank] for piece in full]
            else:
                parts = list(full)
            parameter.copy_(torch.cat(parts))


def _in_model(name: str, first: int) -> str:
    """A parameter's name with its layer's number in the whole model, where this stage begins with layer `first`."""
    if not name.startswith("decoder.layers."):
        return name
    decoder, layers, index, local = name.split(".", 3)
    return f"{decoder}.{layers}.{first + int(index)}.{local}"


def from_hf(name: str, weights: Mapping[str, torch.Tensor], shape: ModelShape) -> tuple[torch.Tensor, ...]:
    """The Hugging Face tensors that make up one Megatron parameter, each to be cut by rank and then stacked."""
    if name in _WHOLE:
        return (weights[_WHOLE[name]],)
    _, _, index, local = name.split(".", 3)
    layer = f"model.layers.{index}."
    if local == "self_attention.linear_qkv.weight":
        return (_interleave(weights, layer + "self_attn.", shape),)
    if local in _IN_LAYER:
        return (weights[layer + _IN_LAYER[local]],)
    mlp, _, kind = local.rpartition(".linear_")
    prefix = layer + _served_mlp(mlp, shape)
    if kind == "fc1.weight":
        return weights[prefix + "gate_proj.weight"], weights[prefix + "up_proj.weight"]
    return (weights[{"fc2.weight": prefix + "down_proj.weight"}[kind]],)


def _served_mlp(local: str, shape: ModelShape) -> str:
    """The MLP of a layer, or the expert that this rank counts as its n-th."""
    outer, _, number = local.partition(".local_experts.")
    if not number:
        return "mlp."
    here = shape.experts // parallel_state.get_expert_model_parallel_world_size()
    return f"{outer}.{parallel_state.get_expert_model_parallel_rank() * here + int(number)}."


def _interleave(weights: Mapping[str, torch.Tensor], prefix: str, shape: ModelShape) -> torch.Tensor:
    """Megatron keeps, group after group, the queries of a group, its key and its value."""
    rows = [weights[f"{prefix}{part}_proj.weight"].view(shape.kv_groups, -1, shape.hidden) for part in "qkv"]
    return torch.cat(rows, dim=1).reshape(-1, shape.hidden)


_WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
