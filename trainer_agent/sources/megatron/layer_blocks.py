"""The rules that families share, by the block of a layer: attention, MLP, experts, norms. Tables, no code.

A row names a Megatron-core parameter below its layer (``decoder.layers.N.``), with local and Transformer Engine names
side by side, and the Hugging Face tensors below theirs (``model.layers.N.``). Experts have ``{e}`` for their index.
Shapes are in names of sizes; hf_model.py says where each comes from.
"""

from __future__ import annotations

from typing import Final

from .parameter_mapping import Cut, Fusion, Norm, Rule, Target

Rules = tuple[Rule, ...]


def _norm(name: str, size: str = "hidden", kind: Norm = Norm.FAMILY) -> Target:
    return Target(name, (size,), kind)


EMBEDDING: Final = Rule(
    ("embedding.word_embeddings.weight",),
    (Target("embed_tokens.weight", ("vocab", "hidden")),),
    Cut.ROWS,
    Fusion.VOCABULARY,
)
FINAL_NORM: Final = Rule(("decoder.final_layernorm.weight", "decoder.final_norm.weight"), (_norm("norm.weight"),))
OUTPUT: Final = Rule(
    ("output_layer.weight",),
    (Target("lm_head.weight", ("vocab", "hidden")),),
    Cut.ROWS,
    Fusion.VOCABULARY,
    when="not tied",
)

NORMS: Final[Rules] = (
    Rule(
        (
            "input_layernorm.weight",
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.in_proj.layer_norm_weight",
        ),
        (_norm("input_layernorm.weight"),),
    ),
    Rule(("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), (_norm("post_attention_layernorm.weight"),)),
)

SANDWICH_NORMS: Final[Rules] = (
    Rule(("post_self_attn_layernorm.weight",), (_norm("post_self_attn_layernorm.weight"),)),
    Rule(("post_mlp_layernorm.weight",), (_norm("post_mlp_layernorm.weight"),)),
)

_Q, _K, _V, _O = (f"self_attn.{part}_proj" for part in "qkvo")

ATTENTION: Final[Rules] = (
    Rule(
        ("self_attention.linear_qkv.weight",),
        (
            Target(f"{_Q}.weight", ("query", "hidden")),
            Target(f"{_K}.weight", ("key", "hidden")),
            Target(f"{_V}.weight", ("key", "hidden")),
        ),
        Cut.ROWS,
        Fusion.QKV,
    ),
    Rule(
        ("self_attention.linear_qkv.bias",),
        (Target(f"{_Q}.bias", ("query",)), Target(f"{_K}.bias", ("key",)), Target(f"{_V}.bias", ("key",))),
        Cut.ROWS,
        Fusion.QKV,
        when="qkv_bias",
    ),
    Rule(("self_attention.linear_proj.weight",), (Target(f"{_O}.weight", ("hidden", "attended")),), Cut.COLUMNS),
    Rule(("self_attention.linear_proj.bias",), (Target(f"{_O}.bias", ("hidden",)),), when="proj_bias"),
)

HEAD_NORMS: Final[Rules] = (
    Rule(("self_attention.q_layernorm.weight",), (_norm("self_attn.q_norm.weight", "head_dim"),), when="qk_norm"),
    Rule(("self_attention.k_layernorm.weight",), (_norm("self_attn.k_norm.weight", "head_dim"),), when="qk_norm"),
)

# Over all heads at once; a rank holds the part of its own heads.
WIDE_HEAD_NORMS: Final[Rules] = (
    Rule(("self_attention.q_layernorm.weight",), (_norm("self_attn.q_norm.weight", "query"),), Cut.ROWS_OR_NONE),
    Rule(("self_attention.k_layernorm.weight",), (_norm("self_attn.k_norm.weight", "key"),), Cut.ROWS_OR_NONE),
)

GATED_ATTENTION: Final[Rules] = (
    Rule(
        ("self_attention.linear_qkv.weight",),
        (
            Target(f"{_Q}.weight", ("gated_query", "hidden")),
            Target(f"{_K}.weight", ("key", "hidden")),
            Target(f"{_V}.weight", ("key", "hidden")),
        ),
        Cut.ROWS,
        Fusion.GATED_QKV,
    ),
    Rule(("self_attention.linear_proj.weight",), (Target(f"{_O}.weight", ("hidden", "attended")),), Cut.COLUMNS),
)

LATENT_ATTENTION: Final[Rules] = (
    Rule(
        ("self_attention.linear_q_proj.weight",),
        (Target(f"{_Q}.weight", ("latent_query", "hidden")),),
        Cut.ROWS,
        when="not q_lora",
    ),
    Rule(
        ("self_attention.linear_q_down_proj.weight",),
        (Target("self_attn.q_a_proj.weight", ("q_lora", "hidden")),),
        Cut.ROWS_OR_NONE,
        when="q_lora",
    ),
    Rule(
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        (_norm("self_attn.q_a_layernorm.weight", "q_lora"),),
        when="q_lora",
    ),
    Rule(
        ("self_attention.linear_q_up_proj.weight",),
        (Target("self_attn.q_b_proj.weight", ("latent_query", "q_lora")),),
        Cut.ROWS,
        when="q_lora",
    ),
    Rule(
        ("self_attention.linear_kv_down_proj.weight",),
        (Target("self_attn.kv_a_proj_with_mqa.weight", ("latent_kv", "hidden")),),
        Cut.ROWS_OR_NONE,
    ),
    Rule(
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        (_norm("self_attn.kv_a_layernorm.weight", "kv_lora"),),
    ),
    Rule(
        ("self_attention.linear_kv_up_proj.weight",),
        (Target("self_attn.kv_b_proj.weight", ("keys_and_values", "kv_lora")),),
        Cut.ROWS,
    ),
    Rule(("self_attention.linear_proj.weight",), (Target(f"{_O}.weight", ("hidden", "latent_attended")),), Cut.COLUMNS),
)

_INDEXER = "self_attention.core_attention.indexer"

SPARSE_INDEXER: Final[Rules] = (
    Rule((f"{_INDEXER}.linear_wq_b.weight",), (Target("self_attn.indexer.wq_b.weight", ("indexer_query", "q_lora")),)),
    Rule((f"{_INDEXER}.linear_wk.weight",), (Target("self_attn.indexer.wk.weight", ("indexer_dim", "hidden")),)),
    Rule((f"{_INDEXER}.k_norm.weight",), (_norm("self_attn.indexer.k_norm.weight", "indexer_dim"),)),
    Rule((f"{_INDEXER}.k_norm.bias",), (Target("self_attn.indexer.k_norm.bias", ("indexer_dim",)),)),
    Rule(
        (f"{_INDEXER}.linear_weights_proj.weight",),
        (Target("self_attn.indexer.weights_proj.weight", ("indexer_heads", "hidden")),),
    ),
)

DELTA_NET: Final[Rules] = (
    Rule(
        ("self_attention.in_proj.weight",),
        (
            Target("linear_attn.in_proj_qkvz.weight", ("delta_qkvz", "hidden")),
            Target("linear_attn.in_proj_ba.weight", ("delta_ba", "hidden")),
        ),
        Cut.ROWS,
        Fusion.DELTA_IN,
    ),
    Rule(
        ("self_attention.conv1d.weight",),
        (Target("linear_attn.conv1d.weight", ("delta_channels", "one", "delta_kernel")),),
        Cut.ROWS,
        Fusion.DELTA_CONVOLUTION,
    ),
    Rule(("self_attention.A_log",), (Target("linear_attn.A_log", ("delta_values",)),), Cut.ROWS),
    Rule(("self_attention.dt_bias",), (Target("linear_attn.dt_bias", ("delta_values",)),), Cut.ROWS),
    Rule(("self_attention.out_norm.weight",), (_norm("linear_attn.norm.weight", "delta_value_dim", Norm.ONE),)),
    Rule(
        ("self_attention.out_proj.weight",),
        (Target("linear_attn.out_proj.weight", ("hidden", "delta_attended")),),
        Cut.COLUMNS,
    ),
)


def _gated(trained: str, served: str, size: str, when: str | None = None) -> Rules:
    """A gated MLP: two projections fused in, one out."""
    gate, up, down = (f"{served}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        Rule(
            (f"{trained}.linear_fc1.weight",),
            (Target(gate, (size, "hidden")), Target(up, (size, "hidden"))),
            Cut.ROWS,
            Fusion.GATED,
            when,
        ),
        Rule((f"{trained}.linear_fc2.weight",), (Target(down, ("hidden", size)),), Cut.COLUMNS, when=when),
    )


MLP: Final[Rules] = (
    *_gated("mlp", "mlp", "ffn"),
    Rule(
        ("mlp.linear_fc1.bias",),
        (Target("mlp.gate_proj.bias", ("ffn",)), Target("mlp.up_proj.bias", ("ffn",))),
        Cut.ROWS,
        Fusion.GATED,
        when="mlp_bias",
    ),
    Rule(("mlp.linear_fc2.bias",), (Target("mlp.down_proj.bias", ("hidden",)),), when="mlp_bias"),
)

STACKED_MLP: Final[Rules] = (
    Rule(
        ("mlp.linear_fc1.weight",),
        (Target("mlp.gate_up_proj.weight", ("gate_and_up", "hidden")),),
        Cut.ROWS,
        Fusion.GATED,
    ),
    Rule(("mlp.linear_fc2.weight",), (Target("mlp.down_proj.weight", ("hidden", "ffn")),), Cut.COLUMNS),
)

ROUTED_EXPERTS: Final[Rules] = (
    Rule(("mlp.router.weight",), (Target("mlp.gate.weight", ("experts", "hidden")),)),
    *_gated("mlp.experts", "mlp.experts.{e}", "expert_ffn"),
)
"""Experts go by one name, sequential or grouped; parameter_names.py takes their indexes out of their names."""

ROUTER_BIAS: Final[Rules] = (
    # Kept in single precision by Megatron and by engines, whatever the model is served in.
    Rule(("mlp.router.expert_bias",), (Target("mlp.gate.e_score_correction_bias", ("experts",), dtype="float32"),)),
)

SHARED_EXPERTS: Final[Rules] = _gated("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", "shared_experts")

GATED_SHARED_EXPERT: Final[Rules] = (
    *_gated("mlp.shared_experts", "mlp.shared_expert", "shared_ffn", "shared_experts"),
    Rule(
        ("mlp.shared_experts.gate_weight",),
        (Target("mlp.shared_expert_gate.weight", ("one", "hidden")),),
        when="shared_experts",
    ),
)
