"""Checks that the trained model is the one of the Hugging Face config, and is cut along known axes. No torch.

Features that change the meaning or the place of weights often leave no trace in names and shapes. So the settings of
the TransformerConfig are compared one by one, and a difference is refused with the value found, the value expected and
advice: structure (`_ALWAYS`), sizes, and settings that change only the computation (the tables at the end: routing of
experts, the range of attention, rotation of a latent attention). A setting that the release of Megatron lacks, or that
the Hugging Face config does not name, is not compared. The rotation of grouped attention cannot be: it is an argument
of the model and no field of a TransformerConfig.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, cast

from msgspec import UNSET

from ...source import LayoutMismatch, UnsupportedModel
from .hf_model import HFModel

USUAL_DIVISOR: Final = 128
"""Megatron's own default of ``make_vocab_size_divisible_by``."""


Expectation = tuple[str, object, str]
"""A field of the trained model's config, the value it must have, and why."""

_ALWAYS: Final[tuple[Expectation, ...]] = (
    ("gated_linear_unit", True, "the served families have gated MLPs"),
    ("normalization", "RMSNorm", "the served families have RMSNorm"),
    ("qk_l2_norm", False, "the served families have RMSNorm, if any, on q and k"),
    ("moe_single_grouped_weight", False, "experts are read one by one"),
    ("moe_mlp_glu_interleave_size", None, "gate and up are read as two halves, not as blocks in turn"),
    ("moe_shared_expert_glu_interleave_size", None, "gate and up are read as two halves, not in turn"),
    ("glu_linear_offset", 0.0, "the served families add nothing to what is gated"),
    ("softmax_type", "vanilla", "the served families have no attention sinks"),
    ("apply_residual_connection_post_layernorm", False, "the served families add what was not normed"),
    ("moe_apply_probs_on_input", False, "the served families weigh what experts give, not what they get"),
    ("moe_router_force_load_balancing", False, "experts would be chosen at random, for measuring only"),
    ("moe_router_force_biased", None, "experts would be chosen at random, for measuring only"),
    ("dsa_indexer_scoring_relu", True, "the served family's indexer cuts scores at zero"),
    ("moe_latent_size", None, "experts of a latent size are not served"),
    ("use_mup", False, "the served families have no width multipliers"),
    ("gtp_weight_remat_size", 1, "weights cut along this further axis are not read yet"),
    ("gtp_remat_size", 1, "weights cut along this further axis are not read yet"),
    ("expert_gtp_weight_remat_size", 1, "weights cut along this further axis are not read yet"),
    ("expert_gtp_remat_size", 1, "weights cut along this further axis are not read yet"),
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


def check_config(config: object, model: HFModel) -> None:
    """Raise unless `config`, a TransformerConfig, describes `model`: `UnsupportedModel` or `LayoutMismatch`."""
    for field, expected, why in (*_ALWAYS, *_expected_structure(model)):
        found = getattr(config, field, expected)
        if (found or None) != (expected or None):
            raise UnsupportedModel(
                f"the trained model has {field}={found!r}, {expected!r} is expected: {why}; "
                f"train with what is expected, or serve another model"
            )
    activation = _activation(getattr(config, "activation_func", None))
    if activation not in {None, model.family.activation}:
        raise UnsupportedModel(
            f"the trained model has activation_func={activation}, {model.architecture} has {model.family.activation}: "
            f"train with that"
        )
    for field, expected in _expected_values(model).items():
        found = getattr(config, field, expected)
        if (found or None) != (expected or None):
            raise LayoutMismatch(
                f"the trained model has {field}={found!r}, the Hugging Face config gives {expected!r}: "
                f"build the source with the config of the model that is being trained"
            )
    for setting, meaning, expected in compute_settings(config, model):
        if not hasattr(config, setting) or expected is UNSET or _same(meaning, expected):
            continue
        found = getattr(config, setting)
        amounts = "" if meaning == found else f", which amounts to {meaning!r}"
        raise LayoutMismatch(
            f"the trained model has {setting}={found!r}{amounts}; the Hugging Face config gives {expected!r}: train "
            f"with that, or build the source with the config of the model that is being trained"
        )


_ACTIVATIONS: Final = {"swish": "silu", "fast_gelu": "gelu_tanh"}
"""Functions under the name that a family has for them."""


def _activation(function: object) -> str | None:
    """Name of an activation function; None for one without a name."""
    if isinstance(function, functools.partial):
        approximation: object = function.keywords.get("approximate", "none")
        suffix = "" if approximation == "none" else f"_{approximation}"
        return f"{_activation(function.func)}{suffix}"
    name: str | None = getattr(function, "__name__", None)
    return name if name is None else _ACTIVATIONS.get(name, name)


def check_tied(tied: bool, model: HFModel) -> None:
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


def _expected_structure(model: HFModel) -> tuple[Expectation, ...]:
    family = model.family
    latent, variant = "kv_lora" in model.sizes, family.variant
    return (
        ("multi_latent_attention", latent, "attention is not of the served family's kind"),
        ("experimental_attention_variant", variant, "attention is not of the served family's kind"),
        ("attention_output_gate", "output_gate" in model.switches, "the served family decides on gates"),
        ("moe_shared_expert_gate", "shared_expert_gate" in model.switches, "the served family has it so"),
        ("rotary_interleaved", family.rotates_pairs, "the served family rotates otherwise"),
        ("activation_func_clamp_value", None, "the served families clamp nothing"),
    )


def _expected_values(model: HFModel) -> dict[str, object]:
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


def check_padding(name: str, rows: int, vocabulary: int, ranks: int, divisible_by: int | None) -> None:
    """Raise `LayoutMismatch` unless `rows`, of all tensor-parallel `ranks` together, may be `vocabulary` with padding.

    Megatron pads a vocabulary to a multiple of ``make_vocab_size_divisible_by`` times the tensor-parallel ranks. Rows
    beyond the served vocabulary are cut without a trace, so a config with too small a ``vocab_size`` would lose tokens
    that were trained. No model carries the setting: where `divisible_by`, the trainer's value, is None, a padding that
    any value up to the default explains is accepted; where it is given, the padding must be exactly that, or none.
    """
    if divisible_by is not None and divisible_by < 1:
        raise UnsupportedModel(f"vocab_divisible_by={divisible_by}: a positive number is expected")
    padding = rows - vocabulary
    if padding <= 0:  # none; or too few rows, which the shapes tell
        return
    known = divisible_by is not None
    multiple = ranks * (divisible_by or _largest_divisor(rows // ranks))
    if padding < multiple and rows % multiple == 0:
        return
    found = f"{name!r} has {rows} rows on {ranks} tensor-parallel ranks, the Hugging Face config says vocab_size="
    expected = (
        f"vocab_divisible_by={divisible_by} pads that to {-(-vocabulary // multiple) * multiple}"
        if known
        else f"no make_vocab_size_divisible_by up to {USUAL_DIVISOR} pads that so far"
    )
    raise LayoutMismatch(
        f"{found}{vocabulary}, which leaves {padding} rows as padding; {expected}: build the source with the config of "
        f"the model that is being trained, or with vocab_divisible_by=N where the trainer pads to another multiple"
    )


def _largest_divisor(rows: int) -> int:
    """The largest ``make_vocab_size_divisible_by``, up to the default, that gives each rank so many rows."""
    return next(number for number in range(min(USUAL_DIVISOR, rows), 0, -1) if rows % number == 0)


Setting = tuple[str, object, object]
"""A field of a TransformerConfig, what its value means, and what the Hugging Face config asks for: UNSET where it names
nothing. Several values may mean the same: scaled by 1 is not scaled."""


def compute_settings(config: object, model: HFModel) -> Iterator[Setting]:
    """Settings of `config`, a TransformerConfig, that may make another function of the same weights.

    Only settings that affect `model`: a dense model has no router, even if its config describes one.
    """
    yield from _attention(config, model)
    if "kv_lora" in model.sizes:
        yield from _latent_rotation(config, model)
    if model.family.experts:
        yield from _routing(config, model)
    if model.family.variant == "dsa":
        for field, key, default in _INDEXER:
            yield field, getattr(config, field, None), model.compute_settings.get(key, default)


def _same(found: object, expected: object) -> bool:
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        return math.isclose(found, expected, rel_tol=1e-6)
    return found == expected


def _attention(config: object, model: HFModel) -> Iterator[Setting]:
    window: object = getattr(config, "window_size", None)
    back: object = cast("Sequence[object]", window)[0] if isinstance(window, (tuple, list)) else window
    # -1 is no limit in Megatron. A window that servers have is not compared: they honor it in different ways.
    limited = model.compute_settings.get("use_sliding_window", model.compute_settings.get("sliding_window"))
    yield "window_size", None if back == -1 else back, UNSET if limited else None
    # Megatron keeps a list, with a true value for each layer that is not rotated.
    frequency: object = getattr(config, "no_rope_freq", None)
    layers = cast("Sequence[object]", frequency) if isinstance(frequency, (tuple, list)) else [frequency]
    yield "no_rope_freq", any(layers), False
    if "kv_lora" not in model.sizes:
        size, scale = model.sizes["head_dim"], getattr(config, "softmax_scale", None)
        wanted = model.compute_settings.get("query_pre_attn_scalar", size)
        yield "softmax_scale", size**-0.5 if scale is None else scale, float(wanted) ** -0.5


def _latent_rotation(config: object, model: HFModel) -> Iterator[Setting]:
    served = model.compute_settings
    kind = served.get("rope_type", served.get("type", "default"))
    stretch = 1.0 if kind == "default" else served.get("factor", UNSET) if kind == "yarn" else UNSET
    factor, whole, part = (getattr(config, key, None) for key in ("rotary_scaling_factor", "mscale", "mscale_all_dim"))
    trained = (1.0 if factor is None else factor) if getattr(config, "rope_type", None) == "yarn" else 1.0
    yield "rotary_base", getattr(config, "rotary_base", None), served.get("rope_theta", UNSET)
    yield "rotary_scaling_factor", trained, stretch
    wanted = _mscale(stretch, served.get("mscale", 1.0)), _mscale(stretch, served.get("mscale_all_dim", 0.0))
    # Megatron scales the attention by it for any kind of rotation.
    yield "mscale_all_dim", _mscale(factor, part), UNSET if stretch is UNSET else wanted[1]
    magnitude = _mscale(trained, whole) / _mscale(trained, part)
    yield "mscale", magnitude, UNSET if stretch is UNSET else wanted[0] / wanted[1]
    if stretch not in {UNSET, 1.0}:
        for field in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
            yield field, getattr(config, field, None), served.get(field, UNSET)


def _mscale(factor: object, weight: object) -> float:
    """YaRN's magnitude for a context that is `factor` times as long."""
    if not isinstance(factor, (int, float)) or not isinstance(weight, (int, float)) or factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


def _routing(config: object, model: HFModel) -> Iterator[Setting]:
    def trained(field: str) -> object:
        return getattr(config, f"moe_router_{field}", None)

    served = model.compute_settings
    scores, normalized = served.get("scoring_func", model.family.scores), served.get("norm_topk_prob", UNSET)
    yield "moe_router_topk", trained("topk"), served.get("num_experts_per_tok", UNSET)
    yield "moe_router_score_function", trained("score_function"), scores
    # Softmax over all experts, before the best are chosen, is what leaves their scores unnormalized.
    all_scored = UNSET if normalized is UNSET or scores != "softmax" else not normalized
    yield "moe_router_pre_softmax", trained("pre_softmax"), all_scored
    scaled = trained("topk_scaling_factor") or 1.0
    yield "moe_router_topk_scaling_factor", scaled, served.get("routed_scaling_factor", 1.0)
    limit = _limited(served.get("n_group"), served.get("topk_group"))
    yield "moe_router_group_topk", _limited(trained("num_groups"), trained("group_topk")), limit
    # Sinkhorn is the one kind of balancing that chooses other experts.
    kinds = trained("load_balancing_type")
    sinkhorn = "sinkhorn" if kinds == "sinkhorn" or (isinstance(kinds, list) and "sinkhorn" in kinds) else None
    yield "moe_router_load_balancing_type", sinkhorn, None


def _limited(groups: object, chosen: object) -> object:
    """Number of expert groups that are chosen from, of all; None where no group is left out."""
    limits = isinstance(groups, int) and isinstance(chosen, int) and 0 < chosen < groups
    return f"{chosen} of {groups}" if limits else None


_INDEXER: Final[tuple[tuple[str, str, object], ...]] = (
    ("dsa_indexer_topk", "index_topk", UNSET),
    ("dsa_indexer_topk_freq", "index_topk_freq", 1),
    ("dsa_indexer_skip_topk_offset", "index_skip_topk_offset", 0),
    ("dsa_indexer_rope_interleaved", "indexer_rope_interleave", UNSET),
)
"""Field of a TransformerConfig, key of the Hugging Face config, and its default."""
