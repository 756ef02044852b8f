"""Is the model that is trained the one that is served, and is it spread in ways that are understood? No torch.

Features that change what weights mean, or where they are, often leave no trace in names and shapes. So everything here
is compared, and what differs is refused with what was found, what is expected and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ...source import LayoutMismatch, UnsupportedModel
from .compute_checks import differences
from .hf_model import Model


class _Expectation(msgspec.Struct, frozen=True):
    """A field of the trained model's config, the value it must have, and why."""

    field: str
    expected: object
    why: str


_ALWAYS: Final = (
    _Expectation("gated_linear_unit", True, "the served families have gated MLPs"),
    _Expectation("normalization", "RMSNorm", "the served families have RMSNorm"),
    _Expectation("qk_l2_norm", False, "the served families have RMSNorm, if any, on q and k"),
    _Expectation("moe_single_grouped_weight", False, "experts are read one by one"),
    _Expectation("moe_mlp_glu_interleave_size", None, "gate and up are read as two halves, not as blocks in turn"),
    _Expectation("moe_shared_expert_glu_interleave_size", None, "gate and up are read as two halves, not in turn"),
    _Expectation("glu_linear_offset", 0.0, "the served families add nothing to what is gated"),
    _Expectation("softmax_type", "vanilla", "the served families have no attention sinks"),
    _Expectation("apply_residual_connection_post_layernorm", False, "the served families add what was not normed"),
    _Expectation("moe_apply_probs_on_input", False, "the served families weigh what experts give, not what they get"),
    _Expectation("moe_router_force_load_balancing", False, "experts would be chosen at random, for measuring only"),
    _Expectation("moe_router_force_biased", None, "experts would be chosen at random, for measuring only"),
    _Expectation("dsa_indexer_scoring_relu", True, "the served family's indexer cuts scores at zero"),
    _Expectation("moe_latent_size", None, "experts of a latent size are not served"),
    _Expectation("use_mup", False, "the served families have no width multipliers"),
    _Expectation("gtp_weight_remat_size", 1, "weights cut along this further axis are not read yet"),
    _Expectation("gtp_remat_size", 1, "weights cut along this further axis are not read yet"),
    _Expectation("expert_gtp_weight_remat_size", 1, "weights cut along this further axis are not read yet"),
    _Expectation("expert_gtp_remat_size", 1, "weights cut along this further axis are not read yet"),
)

_SIZES: Final = {
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_moe_experts": "experts",
    "moe_ffn_hidden_size": "expert_ffn",
    "moe_shared_expert_intermediate_size": "shared_ffn",
}
_PLAIN_ATTENTION: Final = {"num_query_groups": "groups", "kv_channels": "head_dim"}
_LATENT: Final = {
    "q_lora_rank": "q_lora",
    "kv_lora_rank": "kv_lora",
    "qk_head_dim": "nope_dim",
    "qk_pos_emb_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
}
_DELTA: Final = {
    "linear_num_key_heads": "delta_keys",
    "linear_key_head_dim": "delta_key_dim",
    "linear_num_value_heads": "delta_values",
    "linear_value_head_dim": "delta_value_dim",
    "linear_conv_kernel_dim": "delta_kernel",
}
"""Field of a TransformerConfig -> size of a served model."""


def check_config(config: object, model: Model) -> None:
    """Raise unless `config`, a TransformerConfig, describes `model`: `UnsupportedModel` or `LayoutMismatch`."""
    for wanted in (*_ALWAYS, *_meaning(model)):
        found = getattr(config, wanted.field, wanted.expected)
        if (found or None) != (wanted.expected or None):
            raise UnsupportedModel(
                f"the trained model has {wanted.field}={found!r}, {wanted.expected!r} is expected: {wanted.why}; "
                f"train with what is expected, or serve another model"
            )
    activation = getattr(getattr(config, "activation_func", None), "__name__", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"the trained model has activation_func={activation}, the served families have silu")
    for field, expected in _agreed(model).items():
        found = getattr(config, field, expected)
        if (found or None) != (expected or None):
            raise LayoutMismatch(
                f"the trained model has {field}={found!r}, the Hugging Face config gives {expected!r}: "
                f"build the source with the config of the model that is being trained"
            )
    for setting, found, meant, expected in differences(config, model):
        amounts = "" if meant == found else f", which amounts to {meant!r}"
        raise LayoutMismatch(
            f"the trained model has {setting}={found!r}{amounts}; the Hugging Face config gives {expected!r}: train "
            f"with that, or build the source with the config of the model that is being trained"
        )


def check_tied(tied: bool, model: Model) -> None:
    """Raise `LayoutMismatch` unless trained and served model agree on whether embedding and output are one."""
    if tied != ("tied" in model.switches):
        raise LayoutMismatch(
            f"the trained model has share_embeddings_and_output_weights={tied}, "
            f"the Hugging Face config tie_word_embeddings={'tied' in model.switches}: make them equal"
        )


def check_axes(sizes: Mapping[str, int]) -> None:
    """Raise `UnsupportedModel` for an axis of more than one rank that cuts weights in a way that is not read."""
    for axis, size in sizes.items():
        if size > 1:
            raise UnsupportedModel(
                f"the group {axis!r} has {size} ranks, and weights cut along this axis are not read: "
                f"train with a size of 1"
            )


def _meaning(model: Model) -> tuple[_Expectation, ...]:
    family = model.family
    latent, variant = "kv_lora" in model.sizes, family.variant
    return (
        _Expectation("multi_latent_attention", latent, "attention is not of the served family's kind"),
        _Expectation("experimental_attention_variant", variant, "attention is not of the served family's kind"),
        _Expectation("attention_output_gate", "output_gate" in model.switches, "the served family decides on gates"),
        _Expectation("moe_shared_expert_gate", "shared_expert_gate" in model.switches, "the served family has it so"),
        _Expectation("rotary_interleaved", family.rotates_pairs, "the served family rotates otherwise"),
        _Expectation("activation_func_clamp_value", None, "the served families clamp nothing"),
    )


def _agreed(model: Model) -> dict[str, object]:
    sizes = dict(_SIZES)
    sizes |= _LATENT if "kv_lora" in model.sizes else _PLAIN_ATTENTION
    sizes |= _DELTA if "delta_keys" in model.sizes else {}
    agreed: dict[str, object] = {field: model.sizes.get(size) for field, size in sizes.items()}
    if not model.family.experts:
        agreed["num_moe_experts"] = None
    if any(not layer.experts for layer in model.layers):
        agreed["ffn_hidden_size"] = model.sizes["ffn"]
    if "kv_lora" not in model.sizes:
        agreed["qk_layernorm"] = "qk_norm" in model.switches
    agreed["layernorm_epsilon"] = model.eps
    return agreed
