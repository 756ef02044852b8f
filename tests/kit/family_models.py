"""Tiny real Megatron-core models of every family, in any layout, with the weights of a Hugging Face checkpoint.

`load` is the oracle that cuts: it makes each whole Megatron parameter of whole Hugging Face tensors, as plainly as
can be, and takes the rank's part by the parameter's own attributes. It shares nothing with what it checks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tiny_families import FAMILIES, PADDED_VOCABULARY, VOCABULARY, Layout
from torch import nn

from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu

Tensors = Mapping[str, torch.Tensor]


def start(layout: Layout, *, gloo: bool = False) -> None:
    """Set Megatron's groups up for `layout`, over all ranks of the world.

    `gloo`: with the further groups that optimizers want. Under a fake backend they would wait for other ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=gloo,
    )
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def language_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model, in that of a multimodal one."""
    hf = hf.get("thinker_config", hf)
    return hf.get("text_config", hf)


def _routing(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What only some families say of their routers."""
    fields: dict[str, Any] = {}
    if hf.get("routed_scaling_factor", 1.0) != 1.0:
        fields["moe_router_topk_scaling_factor"] = hf["routed_scaling_factor"]
    if hf.get("n_group", 1) > 1:
        fields |= {"moe_router_num_groups": hf["n_group"], "moe_router_group_topk": hf["topk_group"]}
    return fields


_gelu_tanh = functools.partial(nn.functional.gelu, approximate="tanh")


def _qkv_bias(architecture: str, hf: Mapping[str, Any]) -> bool:
    return architecture[:5] in {"Qwen2", "MiMoF"} and hf.get("qkv_bias", True)


def transformer_config(family: str, hf: Mapping[str, Any], layout: Layout, **changes: object) -> Any:
    """The TransformerConfig of the model that `hf` describes."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    tiny = FAMILIES[family]
    hf = language_model(hf)
    biases = bool(hf.get("mlp_bias"))
    heads = hf["num_attention_heads"]
    fields: dict[str, Any] = {
        **megatron_cpu.CONFIG,
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads", heads),
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "add_bias_linear": biases,
        "add_qkv_bias": biases or bool(hf.get("attention_bias")) or _qkv_bias(tiny.architecture, hf),
        "gated_linear_unit": True,
        "activation_func": _gelu_tanh if "hidden_activation" in hf else nn.functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": any(part in tiny.architecture for part in ("Qwen3", "Glm4Moe", "MiniMax", "Gemma3", "Olmo")),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "transformer_impl": "transformer_engine" if layout.te else "local",
    }
    experts = hf.get("num_experts") or hf.get("n_routed_experts") or hf.get("num_local_experts")
    if experts:
        width = hf.get("moe_intermediate_size") or hf["intermediate_size"]
        shared = hf.get("shared_expert_intermediate_size") or width * (hf.get("n_shared_experts") or 0)
        fields |= {
            "num_moe_experts": experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": shared or None,
            "moe_grouped_gemm": layout.te,
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),
            **_routing(hf),
        }
    if tiny.predictions:
        fields["mtp_num_layers"] = tiny.predictions
    if layout.uneven:
        fields["num_layers_in_first_pipeline_stage"] = 1
    if layout.vpp and tiny.predictions:
        # Without one Megatron-core has no place for the prediction layer; and stages need not be of one size.
        stages = [["embedding"], ["decoder"], ["decoder"], ["decoder", "decoder", "mtp", "loss"]]
        fields["pipeline_model_parallel_layout"] = stages
    kind = TransformerConfig
    if "kv_lora_rank" in hf:
        kind = MLATransformerConfig
        fields |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": hf["q_lora_rank"],
            "kv_lora_rank": hf["kv_lora_rank"],
            "qk_head_dim": hf["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
            "v_head_dim": hf["v_head_dim"],
            "rope_type": "rope",
            "rotary_base": hf.get("rope_theta", 10000),
            "num_query_groups": heads,
        }
    for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim"):
        if f"linear_{name}" in hf:
            fields[f"linear_{name}"] = hf[f"linear_{name}"]
    if "linear_conv_kernel_dim" in hf:
        fields["linear_conv_kernel_dim"] = hf["linear_conv_kernel_dim"]
    if "index_n_heads" in hf:
        fields |= {
            "sequence_parallel": layout.tp > 1,
            "cp_comm_type": "allgather",
            "dsa_indexer_n_heads": hf["index_n_heads"],
            "dsa_indexer_head_dim": hf["index_head_dim"],
            "dsa_indexer_topk": hf["index_topk"],
        }
    return kind(**fields | tiny.core | changes)


def build(family: str, hf: Mapping[str, Any], layout: Layout, **changes: object) -> list[nn.Module]:
    """This rank's chunks."""
    if layout.hybrid:
        return [_hybrid(family, hf, layout)]
    config = transformer_config(family, hf, layout, **changes)
    return [_chunk(family, hf, layout, config, stage if layout.vpp else None) for stage in range(layout.vpp or 1)]


def _chunk(family: str, hf: Mapping[str, Any], layout: Layout, config: Any, vp_stage: int | None) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs as specs

    text = language_model(hf)
    if config.experimental_attention_variant if hasattr(config, "experimental_attention_variant") else None:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as experimental

        spec = experimental.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    else:
        spec = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=layout.te, normalization="RMSNorm", vp_stage=vp_stage
        )
    if family in {"olmo2", "olmo3"}:
        _without_norms_before(spec)
    more: dict[str, Any] = {}
    if config.mtp_num_layers:
        more["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=layout.te, vp_stage=vp_stage
        )
    if text.get("partial_rotary_factor"):
        more["rotary_percent"] = text["partial_rotary_factor"]
    rope = text.get("rope_parameters") or {}
    if rope.get("partial_rotary_factor"):
        more["rotary_percent"] = rope["partial_rotary_factor"]
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=text["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
        position_embedding_type="rope",
        rotary_base=10000,
        vp_stage=vp_stage,
        **more,
    )
    _complete(family, text, layout, chunk)
    return chunk.eval()


def _without_norms_before(spec: Any) -> None:
    """Take the norms before attention and MLP out of a block's layers."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
        for block, linear in ((layer.submodules.self_attention, "linear_qkv"), (layer.submodules.mlp, "linear_fc1")):
            if "LayerNorm" in getattr(block.submodules, linear).__name__:
                setattr(block.submodules, linear, TEColumnParallelLinear)


def _hybrid(family: str, hf: Mapping[str, Any], layout: Layout) -> nn.Module:
    """0.19's HybridModel: each served layer is two of its layers, one of attention and one of an MLP."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    layers = hf["num_hidden_layers"]
    config = transformer_config(family, hf, layout, num_layers=2 * layers)
    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_stack_spec,
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=hf["max_position_embeddings"],
        hybrid_layer_pattern=("*E" if config.num_moe_experts else "*-") * layers,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
        position_embedding_type="rope",
        rotary_base=10000,
    ).eval()


WIDE_NORMS = {"minimax_m2", "olmo2", "olmo3", "olmoe"}


class _WideNorm(nn.RMSNorm):
    """Over all heads at once, as MiniMax-M2 and OLMo have it. Of heads on several ranks only the weights are right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


class _CenteredNorm(nn.RMSNorm):
    """Its weight is centered at zero, as `layernorm_zero_centered_gamma` says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight + 1, self.eps)


def _complete(family: str, hf: Mapping[str, Any], layout: Layout, chunk: Any) -> None:
    """Modules that Megatron-core gets from a trainer's own specs: GLM4's further norms, MiniMax's wide ones."""
    eps = hf["rms_norm_eps"]
    if "gemma3" in family and hasattr(chunk, "embedding"):
        chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output * hf["hidden_size"] ** 0.5)
    for layer in chunk.decoder.layers:
        if family in {"glm4", "olmo2", "olmo3"}:
            layer.post_self_attn_layernorm = nn.RMSNorm(hf["hidden_size"], eps)
            layer.post_mlp_layernorm = nn.RMSNorm(hf["hidden_size"], eps)
            layer.self_attention.register_forward_hook(_then(layer.post_self_attn_layernorm))
            layer.mlp.register_forward_hook(_then(layer.post_mlp_layernorm))
        if "gemma3" in family:
            for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                linear.post_layernorm = _CenteredNorm(hf["hidden_size"], eps)
                linear.register_forward_hook(_then(linear.post_layernorm))
        if family in WIDE_NORMS:
            heads = hf["num_attention_heads"] // layout.tp
            groups = max(1, hf["num_key_value_heads"] // layout.tp)
            size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
            layer.self_attention.q_layernorm = _WideNorm(heads * size, eps)
            layer.self_attention.k_layernorm = _WideNorm(groups * size, eps)


def _then(norm: nn.Module) -> Any:
    """A hook that puts `norm` behind a block, whose output comes with a bias."""
    return lambda _module, _inputs, output: (norm(output[0]), *output[1:])


@torch.no_grad()
def load(family: str, hf: Mapping[str, Any], chunks: Sequence[nn.Module], tensors: Tensors) -> None:
    """Give every parameter and expert bias its part of the checkpoint's tensors."""
    for chunk in chunks:
        state = dict(chunk.named_parameters())
        state |= {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")}
        for local, parameter in state.items():
            full = _whole(family, language_model(hf), chunk, local, tensors)
            parameter.copy_(_part(local, parameter, full, wide=family in WIDE_NORMS))


def _part(name: str, parameter: torch.Tensor, full: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """This rank's part of a whole parameter, by the parameter's attributes."""
    from megatron.core import parallel_state as state

    expert = ".experts." in name
    ranks = state.get_expert_tensor_parallel_world_size() if expert else state.get_tensor_model_parallel_world_size()
    rank = state.get_expert_tensor_parallel_rank() if expert else state.get_tensor_model_parallel_rank()
    if wide and name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        parts = full.chunk(full.shape[0] // parameter.shape[0])
        return parts[rank * len(parts) // ranks]
    if parameter.shape == full.shape or (not expert and not getattr(parameter, "tensor_model_parallel", False)):
        return full
    # What Transformer Engine's grouped linears say of themselves is wrong where Megatron cuts them for it.
    dim = int("linear_fc1" not in name) if expert else parameter.partition_dim  # type: ignore[attr-defined]
    if (dim == 0 and "word_embeddings" in name) or "output_layer" in name:
        padding = parameter.shape[0] * ranks - full.shape[0]
        full = torch.cat([full, torch.full((padding, full.shape[1]), 99.0)])
    if "linear_fc1" in name:
        return torch.cat([half.chunk(ranks, dim)[rank] for half in full.chunk(2, dim)], dim)
    if "in_proj" in name or "conv1d" in name:
        sections = full.split(_DELTA[name.rsplit(".", 2)[-2]], dim)
        return torch.cat([section.chunk(ranks, dim)[rank] for section in sections], dim)
    return full.chunk(ranks, dim)[rank]


_DELTA = {"in_proj": [32, 32, 64, 64, 8, 8], "conv1d": [32, 32, 64]}
"""Rows of q, k, v, z, b and a of the tiny gated delta net."""


def _whole(family: str, hf: Mapping[str, Any], chunk: Any, local: str, tensors: Tensors) -> torch.Tensor:
    """A whole Megatron parameter made of whole tensors."""
    embedding = min((name for name in tensors if name.endswith("embed_tokens.weight")), key=len)
    head = next((name for name in tensors if name.endswith("lm_head.weight")), embedding)
    body = embedding.removesuffix("embed_tokens.weight")
    once = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": f"{body}norm.weight",
        "decoder.final_norm.weight": f"{body}norm.weight",
        "output_layer.weight": head,
    }
    if local in once:
        return tensors[once[local]]
    kind, _, index, rest = local.split(".", 3)
    if kind == "mtp":
        return _predicted(family, hf, rest, tensors)
    layer = chunk.decoder.layers[int(index)].layer_number - 1
    if hasattr(chunk, "hybrid_layer_pattern"):
        layer //= 2
    return _in_layer(family, hf, rest, f"{body}layers.{layer}.", tensors)


def _predicted(family: str, hf: Mapping[str, Any], rest: str, tensors: Tensors) -> torch.Tensor:
    inner = re.match(r"(?:mtp_model_layer|transformer_layer)\.(.*)", rest)
    mimo, qwen = family == "mimo", family.startswith(("qwen3_next", "qwen3_5"))
    prefix = "model.mtp_layers.0." if mimo else f"model.layers.{hf['num_hidden_layers']}."
    if inner:
        return _in_layer(family, hf, inner[1], "mtp.layers.0." if qwen else prefix, tensors)
    if qwen:
        theirs = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "final_layernorm": "norm"}
        part = rest.removesuffix(".weight")
        return tensors[f"mtp.{theirs.get(part, 'fc')}.weight"]
    theirs = {
        "enorm.weight": "token_layernorm" if mimo else "enorm",
        "hnorm.weight": "hidden_layernorm" if mimo else "hnorm",
        "final_layernorm.weight": "final_layernorm" if mimo else "shared_head.norm",
        "eh_proj.weight": "input_proj" if mimo else "eh_proj",
    }
    found = tensors[f"{prefix}{theirs[rest]}.weight"]
    if mimo and rest == "eh_proj.weight":
        found = torch.cat(list(reversed(found.chunk(2, 1))), 1)
    return found


_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "post_self_attn_layernorm.weight": "post_self_attn_layernorm.weight",
    "post_mlp_layernorm.weight": "post_mlp_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
    "self_attention.conv1d.weight": "linear_attn.conv1d.weight",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    "self_attention.core_attention.indexer.linear_wq_b.weight": "self_attn.indexer.wq_b.weight",
    "self_attention.core_attention.indexer.linear_wk.weight": "self_attn.indexer.wk.weight",
    "self_attention.core_attention.indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "self_attention.core_attention.indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "self_attention.core_attention.indexer.linear_weights_proj.weight": "self_attn.indexer.weights_proj.weight",
}

_GEMMA_NORMS = {
    "mlp.linear_fc1.layer_norm_weight": "pre_feedforward_layernorm.weight",
    "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
}
_OLMO_NORMS = {
    "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
    "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
}
_OTHER_NORMS = {"gemma3": _GEMMA_NORMS, "gemma3_vl": _GEMMA_NORMS, "olmo2": _OLMO_NORMS, "olmo3": _OLMO_NORMS}


def _in_layer(  # noqa: PLR0911  one for each kind of parameter
    family: str, hf: Mapping[str, Any], rest: str, prefix: str, tensors: Tensors
) -> torch.Tensor:
    def get(name: str) -> torch.Tensor:
        if family == "minimax_m2":
            name = re.sub(r"^mlp\.", "block_sparse_moe.", name).replace("gate.e_score", "e_score")
            name = name.replace("gate_proj", "w1").replace("down_proj", "w2").replace("up_proj", "w3")
        return tensors[prefix + name]

    if rest == "self_attention.q_layernorm.weight" and "kv_lora_rank" in hf:
        return get("self_attn.q_a_layernorm.weight")
    if rest == "self_attention.out_norm.weight":
        return get("linear_attn.norm.weight") - 1
    names = _PLAIN | _OTHER_NORMS.get(family, {})
    if rest in names:
        return get(names[rest])
    if rest.startswith("self_attention.linear_qkv."):
        return _qkv(hf, *(get(f"self_attn.{part}_proj.{rest.rsplit('.', maxsplit=1)[-1]}") for part in "qkv"))
    if rest == "self_attention.in_proj.weight":
        return _delta(family, hf, get)
    if rest == "mlp.linear_fc1.weight" and family == "glm4":
        return get("mlp.gate_up_proj.weight")
    where, layer, kind = _mlp(
        rest, shared="mlp.shared_expert" if "shared_expert_intermediate_size" in hf else "mlp.shared_experts"
    )
    stacked = tensors.get(f"{prefix}mlp.experts.{'down_proj' if layer == 'linear_fc2' else 'gate_up_proj'}")
    if ".experts." in where and stacked is not None:
        return stacked[int(where.rsplit(".", 1)[-1])]
    parts = ("down",) if layer == "linear_fc2" else ("gate", "up")
    return torch.cat([get(f"{where}.{part}_proj.{kind}") for part in parts])


def _mlp(rest: str, shared: str) -> tuple[str, str, str]:
    from megatron.core import parallel_state as state

    first = state.get_expert_model_parallel_rank() * 4 // state.get_expert_model_parallel_world_size()
    if match := re.match(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc.)\.(.*)", rest):
        return f"mlp.experts.{first + int(match[1])}", match[2], match[3]
    if match := re.match(r"mlp\.experts\.(linear_fc.)\.weight(\d+)", rest):
        return f"mlp.experts.{first + int(match[2])}", match[1], "weight"
    where, layer, kind = rest.rsplit(".", 2)
    return where.replace("mlp.shared_experts", shared), layer, kind


def _qkv(hf: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups, size = hf["num_key_value_heads"], hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    tail = q.shape[1:]
    if q.shape[0] == 2 * hf["num_attention_heads"] * size:
        q, gate = q.view(-1, 2, size, *tail).unbind(1)
        parts = [q.reshape(groups, -1, *tail), gate.reshape(groups, -1, *tail)]
    else:
        parts = [q.view(groups, -1, *tail)]
    return torch.cat([*parts, k.view(groups, -1, *tail), v.view(groups, -1, *tail)], 1).reshape(-1, *tail)


def _delta(family: str, hf: Mapping[str, Any], get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    if family.startswith("qwen3_5"):
        return torch.cat([get(f"linear_attn.in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")])
    qkvz, ba = get("linear_attn.in_proj_qkvz.weight"), get("linear_attn.in_proj_ba.weight")
    keys, each = hf["linear_num_key_heads"], hf["linear_num_value_heads"] // hf["linear_num_key_heads"]
    key, value = hf["linear_key_head_dim"], hf["linear_value_head_dim"] * each
    q, k, v, z = qkvz.view(keys, -1, qkvz.shape[1]).split([key, key, value, value], 1)
    b, a = ba.view(keys, -1, ba.shape[1]).split([each, each], 1)
    return torch.cat([part.reshape(-1, qkvz.shape[1]) for part in (q, k, v, z, b, a)])


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
