"""One tiny model of every served family, and the layouts in which tests train it.

Each has what its family is known for: KV groups, biases, first layers that are dense, shared experts, latent attention.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

MARKS = ("uneven", "te", "hybrid")
"""Fields of a layout that are there or are not."""


class Layout(NamedTuple):
    """How a model is spread over ranks; what is left over is data parallelism."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    te: bool = False
    """Transformer Engine's modules and names (grouped experts, fused norms) instead of local ones."""
    hybrid: bool = False

    dp: int = 1
    cp: int = 1
    uneven: bool = False
    """The first pipeline stage has one layer, the second all others."""

    @property
    def world(self) -> int:
        """Ranks that it takes: experts are spread over the ranks that data parallelism leaves, too."""
        dense = self.tp * self.pp * self.dp * self.cp
        sparse = (self.etp or self.tp) * self.ep * self.pp
        return max(dense, -(-sparse // (self.tp * self.pp)) * self.tp * self.pp)

    def __str__(self) -> str:
        """As test ids say it."""
        sizes = {
            "dp": self.dp,
            "cp": self.cp,
            "tp": self.tp,
            "pp": self.pp,
            "vpp": self.vpp or 1,
            "ep": self.ep,
            "etp": self.etp or 0,
        }
        parts = [f"{name}{size}" for name, size in sizes.items() if size > (0 if name == "etp" else 1)]
        marks = [mark for mark in MARKS if getattr(self, mark)]
        return "-".join([*parts, *marks]) or "alone"


VOCABULARY = 250
PADDED_VOCABULARY = 256
TOKENS = [[row * 120 + column * 10 for column in range(12)] for row in range(2)]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_NO_HEAD_DIM = {key: value for key, value in _SIZES.items() if key != "head_dim"}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_DEEPSEEK = {
    **_NO_HEAD_DIM,
    **_EXPERTS,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

_MINISTRAL3 = {
    **_SIZES,
    "rms_norm_eps": 1e-5,  # Megatron-Bridge takes it for granted
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64,
    },
}
# Megatron-core has one rotation for all layers.
_ONE_ROTATION = {
    kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
}
_GEMMA3 = {
    **_SIZES,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "rope_local_base_freq": 10000.0,  # that of the other layers, too
}
_GEMMA3_CORE = {"layernorm_zero_centered_gamma": True, "softmax_scale": 32**-0.5, "window_size": (63, 0)}

_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
_QWEN_VISION = {name: value for name, value in _QWEN_TOWER.items() if name != "deepstack_visual_indexes"}
_EARS = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "output_dim": 64,
    "downsample_hidden_size": 16,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


class Tiny(NamedTuple):
    """A family's tiny model."""

    architecture: str
    config: dict[str, Any]
    """Of the transformers class `made_as`, or of the architecture's own."""
    core: dict[str, Any] = {}  # noqa: RUF012  a table's default, never written
    """Fields of a TransformerConfig beyond those that sizes give."""
    made_as: str | None = None
    """Transformers has no class of the architecture; this one has the same tensors."""
    predictions: int = 0
    core_from: int = 16
    core_to: int = 19
    """Minor versions of Megatron-core that build it: the first and the last."""

    vision: dict[str, Any] | None = None
    """Config of the vision tower of a multimodal model, of which the language model is served."""
    beside: dict[str, Any] = {}  # noqa: RUF012
    """Further fields of a multimodal model's config."""

    def built_by(self, core: int) -> bool:
        """This minor version of Megatron-core has the model."""
        return self.core_from <= core <= self.core_to


_MOE = {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
_SIGMOID = {
    **_MOE,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_dtype": "fp32",
}

_DELTA = {
    **_SIZES,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
_DELTA_EXPERTS = {**_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48}
_DELTA_CORE: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "deterministic_mode": True,
}
_DELTA_CORE_EXPERTS = {**_MOE, **_DELTA_CORE, "moe_shared_expert_gate": True}

FAMILIES: dict[str, Tiny] = {
    "llama": Tiny("LlamaForCausalLM", _SIZES),
    "llama_biases": Tiny("LlamaForCausalLM", {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    "qwen2": Tiny("Qwen2ForCausalLM", _NO_HEAD_DIM),
    "qwen3": Tiny("Qwen3ForCausalLM", _SIZES),
    "qwen3_tied": Tiny("Qwen3ForCausalLM", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3_2_groups": Tiny("Qwen3ForCausalLM", {**_SIZES, "num_key_value_heads": 2}),
    "qwen2_moe": Tiny(
        "Qwen2MoeForCausalLM",
        {
            **_NO_HEAD_DIM,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 48,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
        {**_MOE, "moe_shared_expert_gate": True, "moe_layer_freq": [1, 0, 1, 1]},
    ),
    "qwen2_moe_no_biases": Tiny(
        "Qwen2MoeForCausalLM",
        {
            **_NO_HEAD_DIM,
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 48,
            "decoder_sparse_step": 1,
            "qkv_bias": False,
        },
        {**_MOE, "moe_shared_expert_gate": True},
    ),
    "qwen3_moe": Tiny("Qwen3MoeForCausalLM", {**_SIZES, **_EXPERTS, "num_experts": 4, "decoder_sparse_step": 1}, _MOE),
    "glm4": Tiny(
        "Glm4ForCausalLM",
        {**_SIZES, "attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": 0},
        {"rotary_interleaved": True},
    ),
    "glm4_moe": Tiny(
        "Glm4MoeForCausalLM",
        {
            **_SIZES,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        },
        _SIGMOID,
        predictions=1,
    ),
    "deepseek_v3": Tiny("DeepseekV3ForCausalLM", {**_DEEPSEEK, "num_nextn_predict_layers": 1}, _SIGMOID, predictions=1),
    # 0.19 puts a norm before the query's projection here, which the family does not have: that is refused.
    "deepseek_v3_no_q_lora": Tiny("DeepseekV3ForCausalLM", {**_DEEPSEEK, "q_lora_rank": None}, _SIGMOID, core_to=18),
    "kimi_k2": Tiny(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "n_shared_experts": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
        _SIGMOID,
    ),
    "kimi_k25": Tiny(
        "KimiK25ForConditionalGeneration",
        {**_DEEPSEEK, "n_shared_experts": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
        _SIGMOID,
        made_as="Kimi_K25ForConditionalGeneration",
        vision=_TOWER,
        beside={"projection_hidden_size": 32},
    ),
    # Of layers that the config names one by one; transformers rotates halves in its indexer, and pairs elsewhere.
    "deepseek_v32": Tiny(
        "DeepseekV32ForCausalLM",
        {
            **_DEEPSEEK,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 4,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
        {
            **_SIGMOID,
            "moe_layer_freq": [0, 1, 0, 1],
            "experimental_attention_variant": "dsa",
            "dsa_indexer_rotate_activation": False,
            "dsa_indexer_rope_interleaved": False,
            "dsa_indexer_k_norm_epsilon": 1e-6,
        },
        core_from=19,
    ),
    "glm5": Tiny(
        "GlmMoeDsaForCausalLM",
        {**_DEEPSEEK, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4, "num_nextn_predict_layers": 1},
        {
            **_SIGMOID,
            "experimental_attention_variant": "dsa",
            "dsa_indexer_rotate_activation": False,
            "dsa_indexer_rope_interleaved": True,
            "dsa_indexer_k_norm_epsilon": 1e-6,
        },
        predictions=1,
        core_from=19,
    ),
    "mimo": Tiny(
        "MiMoForCausalLM",
        {**_NO_HEAD_DIM, "num_nextn_predict_layers": 1},
        made_as="Qwen2ForCausalLM",
        predictions=1,
    ),
    "minimax_m2": Tiny(
        "MiniMaxM2ForCausalLM",
        {**_SIZES, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**_SIGMOID, "moe_layer_freq": 1},
    ),
    "qwen3_next": Tiny("Qwen3NextForCausalLM", _DELTA_EXPERTS, _DELTA_CORE_EXPERTS, predictions=1, core_from=19),
    "qwen3_5": Tiny("Qwen3_5ForCausalLM", _DELTA, _DELTA_CORE, predictions=1, core_from=19),
    "qwen3_5_vl": Tiny(
        "Qwen3_5ForConditionalGeneration",
        {**_DELTA, "tie_word_embeddings": True},
        _DELTA_CORE,
        core_from=19,
        vision=_QWEN_VISION,
    ),
    "qwen3_5_moe": Tiny("Qwen3_5MoeForCausalLM", _DELTA_EXPERTS, _DELTA_CORE_EXPERTS, predictions=1, core_from=19),
    "qwen3_5_moe_vl": Tiny(
        "Qwen3_5MoeForConditionalGeneration",
        _DELTA_EXPERTS,
        _DELTA_CORE_EXPERTS,
        predictions=1,
        core_from=19,
        vision=_QWEN_VISION,
    ),
    "qwen3_omni": Tiny(
        "Qwen3OmniMoeForConditionalGeneration",
        {**_SIZES, **_EXPERTS, "num_experts": 4, "decoder_sparse_step": 1},
        _MOE,
        made_as="Qwen3OmniMoeThinkerForConditionalGeneration",
        vision=_QWEN_TOWER,
        beside={"audio_config": _EARS},
    ),
    "qwen3_vl": Tiny("Qwen3VLForConditionalGeneration", _SIZES, vision=_QWEN_TOWER),
    "mistral": Tiny("MistralForCausalLM", _SIZES),
    "ministral": Tiny("MinistralForCausalLM", _SIZES),
    "ministral3": Tiny("Ministral3ForCausalLM", _MINISTRAL3),
    "mistral3": Tiny(
        "Mistral3ForConditionalGeneration",
        {**_MINISTRAL3, "model_type": "ministral3"},
        vision={"model_type": "pixtral", **_TOWER},
    ),
    "olmo2": Tiny("Olmo2ForCausalLM", _NO_HEAD_DIM),
    "olmo3": Tiny("Olmo3ForCausalLM", {**_NO_HEAD_DIM, "sliding_window": 64, "rope_parameters": _ONE_ROTATION}),
    "olmoe": Tiny(
        "OlmoeForCausalLM",
        {
            **_NO_HEAD_DIM,
            "num_key_value_heads": 8,  # Megatron-Bridge sizes the norm of keys by all heads
            "intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
        _MOE,
    ),
    "gemma3": Tiny("Gemma3ForCausalLM", _GEMMA3, _GEMMA3_CORE),
    "gemma3_vl": Tiny(
        "Gemma3ForConditionalGeneration",
        {**_GEMMA3, "model_type": "gemma3_text"},
        _GEMMA3_CORE,
        vision={"model_type": "siglip_vision_model", "vision_use_head": False, **_TOWER},
    ),
}

TOWERS = (
    *("model.visual.", "vision_tower.", "multi_modal_projector.", "mm_projector.", "model.mm_projector."),
    *("thinker.visual.", "thinker.audio_tower."),
)
"""Tensors of multimodal models beside the language model."""


def text_of(names: Mapping[str, T]) -> dict[str, T]:
    """What belongs to the language model."""
    return {name: value for name, value in names.items() if not name.startswith(TOWERS)}


def predicted_tensors(family: str, config: dict[str, Any]) -> dict[str, str]:
    """Tensors of a prediction layer, as published checkpoints name them -> a tensor of the last layer of equal shape.

    Transformers has no module for them. An empty value stands for a norm, ``+`` for the projection of both inputs.
    """
    last = config["num_hidden_layers"] - 1
    if family.startswith(("qwen3_next", "qwen3_5")):
        outside = {"pre_fc_norm_embedding": "", "pre_fc_norm_hidden": "", "norm": "", "fc": "+"}
        body = "model." if FAMILIES[family].vision is None else "model.language_model."
        return {f"mtp.{name}.weight": like for name, like in outside.items()} | {
            "mtp.layers.0.": f"{body}layers.{last}."
        }
    if family == "mimo":
        names = {"token_layernorm": "", "hidden_layernorm": "", "final_layernorm": "", "input_proj": "+"}
        prefix = "model.mtp_layers.0."
    else:
        names = {"enorm": "", "hnorm": "", "shared_head.norm": "", "eh_proj": "+"}
        prefix = f"model.layers.{last + 1}."
    return {f"{prefix}{name}.weight": like for name, like in names.items()} | {prefix: f"model.layers.{last}."}


class Case(NamedTuple):
    """One family in one layout."""

    family: str
    layout: Layout

    def __str__(self) -> str:
        """FAMILY:LAYOUT, which `parse` reads."""
        return f"{self.family}:{self.layout}"


_DENSE = (
    Layout(),
    Layout(dp=2),
    Layout(tp=2),
    Layout(tp=4),
    Layout(tp=2, dp=2),
    Layout(pp=2),
    Layout(pp=2, uneven=True),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, vpp=2),
    Layout(tp=2, pp=2, dp=2),
    Layout(pp=4),
    Layout(tp=2, cp=2),
)
_EXPERTS = (
    *_DENSE,
    Layout(ep=2),
    Layout(ep=4),
    Layout(ep=2, dp=4),
    Layout(tp=2, ep=2, etp=1),
    Layout(tp=2, ep=2, etp=2),
    Layout(tp=2, ep=4, etp=1),
    Layout(ep=2, etp=2),
    Layout(tp=4, ep=2, etp=1),
    Layout(pp=2, ep=2),
    Layout(pp=2, vpp=2, ep=2),
    Layout(tp=2, pp=2, ep=2, etp=1),
    Layout(tp=2, pp=2, ep=2, etp=2),
    Layout(tp=2, pp=2, vpp=2, ep=2, etp=1),
)


def matrix(*, core: int, most: int = 8) -> Iterator[Case]:
    """Every case of at most `most` ranks, for a minor version of Megatron-core."""
    for family, tiny in FAMILIES.items():
        experts = any(key in tiny.config for key in ("num_experts", "n_routed_experts", "num_local_experts"))
        for layout in _EXPERTS if experts else _DENSE:
            for kind in (layout, layout._replace(te=True), layout._replace(te=True, hybrid=True)):
                case = Case(family, kind)
                if tiny.built_by(core) and layout.world <= most and _possible(case, core):
                    yield case


def _possible(case: Case, core: int) -> bool:
    tiny, layout = FAMILIES[case.family], case.layout
    if layout.hybrid:
        plain = case.family in {"llama", "qwen2", "qwen3", "qwen3_2_groups", "qwen3_moe"}
        return plain and core >= 19 and not layout.vpp and not layout.uneven
    if layout.cp > 1 and not layout.te:
        return False  # its local attention is not built for context parallelism
    # These are built of specs that only exist for Transformer Engine.
    special = ("experimental_attention_variant", "layernorm_zero_centered_gamma")
    return layout.te or not any(tiny.core.get(field) for field in special)


ALWAYS = (
    # NVIDIA's own resharding is silently wrong here: experts cut by tensor parallelism, sequential experts on ranks.
    "qwen3_moe:tp2-ep2-etp2-te",
    "qwen3_moe:ep2",
    "deepseek_v3:tp2-ep2-etp1-te",
    "qwen3_2_groups:tp4",
)


def slice_of(cases: Iterable[Case], *, seed: str, count: int) -> list[Case]:
    """`count` of the cases, the same for the same seed; what must never be left out comes first."""
    every = list(cases)
    first = [case for case in every if str(case) in ALWAYS]
    rest = [case for case in every if str(case) not in ALWAYS]
    random.Random(seed).shuffle(rest)
    return [*first, *rest][:count]


def parse(text: str) -> Case:
    """Read what `str` of a case wrote."""
    family, _, layout = text.partition(":")
    fields: dict[str, int | bool] = {}
    for part in layout.split("-"):
        if part in MARKS:
            fields[part] = True
        elif part != "alone":
            fields[part.rstrip("0123456789")] = int(part.lstrip("abcdefghijklmnopqrstuvwxyz"))
    return Case(family, Layout(**fields))  # type: ignore[arg-type]
