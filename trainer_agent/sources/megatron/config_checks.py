"""Checks that the trained model is the one of the Hugging Face config, and is cut along known axes. No torch.

Features that change the meaning or the place of weights often leave no trace in names and shapes. So the settings of
the TransformerConfig are compared one by one, and a difference is refused with the value found, the value expected and
advice: structure (`_ALWAYS`), sizes, and settings that change only the computation (the tables at the end: routing of
experts, the range of attention, rotation of a latent attention). A setting that the release of Megatron lacks, or that
the Hugging Face config does not name, is not compared. The rotation of grouped attention cannot be: it is an argument
of the model and no field of a TransformerConfig.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast

import msgspec
from msgspec import UNSET

from ...source import LayoutMismatch, UnsupportedModel
from .hf_model import HFModel

USUAL_DIVISOR: Final = 128
"""Megatron's own default of ``make_vocab_size_divisible_by``."""


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


def check_config(config: object, model: HFModel) -> None:
    """Raise unless `config`, a TransformerConfig, describes `model`: `UnsupportedModel` or `LayoutMismatch`."""
    for wanted in (*_ALWAYS, *_expected_structure(model)):
        found = getattr(config, wanted.field, wanted.expected)
        if (found or None) != (wanted.expected or None):
            raise UnsupportedModel(
                f"the trained model has {wanted.field}={found!r}, {wanted.expected!r} is expected: {wanted.why}; "
                f"train with what is expected, or serve another model"
            )
    activation = getattr(getattr(config, "activation_func", None), "__name__", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"the trained model has activation_func={activation}, the served families have silu")
    for field, expected in _expected_values(model).items():
        found = getattr(config, field, expected)
        if (found or None) != (expected or None):
            raise LayoutMismatch(
                f"the trained model has {field}={found!r}, the Hugging Face config gives {expected!r}: "
                f"build the source with the config of the model that is being trained"
            )
    for setting, found, meaning, expected in differences(config, model):
        amounts = "" if meaning == found else f", which amounts to {meaning!r}"
        raise LayoutMismatch(
            f"the trained model has {setting}={found!r}{amounts}; the Hugging Face config gives {expected!r}: train "
            f"with that, or build the source with the config of the model that is being trained"
        )


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


def _expected_structure(model: HFModel) -> tuple[_Expectation, ...]:
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


class ComputeSetting(NamedTuple):
    """A field of a TransformerConfig, and how its value compares with the Hugging Face config."""

    field: str
    meaning: Callable[[object, HFModel], object]
    """Meaning of the field's value. Several values may mean the same: scaled by 1 is not scaled."""
    expected: Callable[[HFModel], object]
    """Meaning that the Hugging Face config asks for; UNSET where it names none."""


class SettingDifference(NamedTuple):
    """A setting of the trained model that differs from the Hugging Face config."""

    field: str
    found: object
    meaning: object
    expected: object


def differences(config: object, model: HFModel) -> Iterator[SettingDifference]:
    """Settings of `config`, a TransformerConfig, that make another function of the same weights."""
    for setting in settings_of(model):
        if not hasattr(config, setting.field):
            continue
        expected = setting.expected(model)
        meaning = setting.meaning(config, model)
        if expected is not UNSET and not _same(meaning, expected):
            yield SettingDifference(setting.field, getattr(config, setting.field), meaning, expected)


def settings_of(model: HFModel) -> tuple[ComputeSetting, ...]:
    """Settings that affect `model`: a dense model has no router, whatever its config says of one."""
    latent = "kv_lora" in model.sizes
    return (
        *ATTENTION_SETTINGS,
        *(LATENT_ATTENTION_SETTINGS if latent else GROUPED_ATTENTION_SETTINGS),
        *(ROUTING_SETTINGS if model.family.experts else ()),
        *(INDEXER_SETTINGS if model.family.variant == "dsa" else ()),
    )


def _same(found: object, expected: object) -> bool:
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        return math.isclose(found, expected, rel_tol=1e-6)
    return found == expected


def _as_is(field: str) -> Callable[[object, HFModel], object]:
    return lambda config, _: getattr(config, field)


def _setting(key: str, default: object = UNSET) -> Callable[[HFModel], object]:
    return lambda model: model.compute_settings.get(key, default)


def _is(value: object) -> Callable[[HFModel], object]:
    return lambda _: value


def _window(config: object, _: HFModel) -> object:
    """Tokens that attention looks back; None for no limit, which is -1 in Megatron."""
    window: object = getattr(config, "window_size", None)
    back: object = cast("Sequence[object]", window)[0] if isinstance(window, (tuple, list)) else window
    return None if back == -1 else back


def _no_window(model: HFModel) -> object:
    """No window; UNSET for a config that has one, because servers honor windows in different ways."""
    return UNSET if model.compute_settings.get("use_sliding_window") else None


def _unrotated(config: object, _: HFModel) -> object:
    """True where any layer is not rotated: Megatron keeps a list, with a true value for each such layer."""
    frequency: object = getattr(config, "no_rope_freq", None)
    layers = cast("Sequence[object]", frequency) if isinstance(frequency, (tuple, list)) else [frequency]
    return any(layers)


def _softmax_scale(config: object, model: HFModel) -> object:
    scale: object = getattr(config, "softmax_scale", None)
    return _plain_scale(model) if scale is None else scale


def _plain_scale(model: HFModel) -> object:
    return model.sizes["head_dim"] ** -0.5


def _scores(model: HFModel) -> object:
    return model.compute_settings.get("scoring_func", model.family.scores)


def _all_scored(model: HFModel) -> object:
    """Softmax over all experts, before the best are chosen, is what leaves their scores unnormalized."""
    normalized = model.compute_settings.get("norm_topk_prob", UNSET)
    return UNSET if normalized is UNSET or _scores(model) != "softmax" else not normalized


def _scaled(config: object, _: HFModel) -> object:
    return getattr(config, "moe_router_topk_scaling_factor", None) or 1.0


def _limited(groups: object, chosen: object) -> object:
    """Number of expert groups that are chosen from, of all; None where no group is left out."""
    limits = isinstance(groups, int) and isinstance(chosen, int) and 0 < chosen < groups
    return f"{chosen} of {groups}" if limits else None


def _trained_limit(config: object, _: HFModel) -> object:
    return _limited(getattr(config, "moe_router_num_groups", None), getattr(config, "moe_router_group_topk", None))


def _served_limit(model: HFModel) -> object:
    return _limited(model.compute_settings.get("n_group"), model.compute_settings.get("topk_group"))


def _balancing(config: object, _: HFModel) -> object:
    """Sinkhorn, the one kind of balancing that chooses other experts; None for all others."""
    kinds: object = getattr(config, "moe_router_load_balancing_type", None)
    return "sinkhorn" if kinds == "sinkhorn" or (isinstance(kinds, list) and "sinkhorn" in kinds) else None


def _mscale(factor: object, weight: object) -> float:
    """YaRN's magnitude for a context that is `factor` times as long."""
    if not isinstance(factor, (int, float)) or not isinstance(weight, (int, float)) or factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


def _stretch(config: object, _: HFModel) -> object:
    return getattr(config, "rotary_scaling_factor", 1.0) if getattr(config, "rope_type", None) == "yarn" else 1.0


def _served_stretch(model: HFModel) -> object:
    kind = model.compute_settings.get("rope_type", model.compute_settings.get("type", "default"))
    if kind == "default":
        return 1.0
    return model.compute_settings.get("factor", UNSET) if kind == "yarn" else UNSET


def _trained_scale(config: object, _: HFModel) -> object:
    """Megatron scales the attention by it for any kind of rotation."""
    return _mscale(getattr(config, "rotary_scaling_factor", None), getattr(config, "mscale_all_dim", None))


def _served_scale(model: HFModel) -> object:
    stretch = _served_stretch(model)
    return UNSET if stretch is UNSET else _mscale(stretch, model.compute_settings.get("mscale_all_dim", 0.0))


def _trained_magnitude(config: object, model: HFModel) -> object:
    stretch = _stretch(config, model)
    whole, part = (_mscale(stretch, getattr(config, field, None)) for field in ("mscale", "mscale_all_dim"))
    return whole / part


def _served_magnitude(model: HFModel) -> object:
    stretch = _served_stretch(model)
    if stretch is UNSET:
        return UNSET
    return _mscale(stretch, model.compute_settings.get("mscale", 1.0)) / _mscale(
        stretch, model.compute_settings.get("mscale_all_dim", 0.0)
    )


def _yarn(field: str) -> ComputeSetting:
    """A setting that has one name in both configs, and matters where the context is stretched."""

    def expected(model: HFModel) -> object:
        return model.compute_settings.get(field, UNSET) if _served_stretch(model) not in {UNSET, 1.0} else UNSET

    return ComputeSetting(field, _as_is(field), expected)


ATTENTION_SETTINGS: Final = (
    ComputeSetting("window_size", _window, _no_window),
    ComputeSetting("no_rope_freq", _unrotated, _is(value=False)),
)
GROUPED_ATTENTION_SETTINGS: Final = (ComputeSetting("softmax_scale", _softmax_scale, _plain_scale),)
LATENT_ATTENTION_SETTINGS: Final = (
    ComputeSetting("rotary_base", _as_is("rotary_base"), _setting("rope_theta")),
    ComputeSetting("rotary_scaling_factor", _stretch, _served_stretch),
    ComputeSetting("mscale_all_dim", _trained_scale, _served_scale),
    ComputeSetting("mscale", _trained_magnitude, _served_magnitude),
    _yarn("original_max_position_embeddings"),
    _yarn("beta_fast"),
    _yarn("beta_slow"),
)
ROUTING_SETTINGS: Final = (
    ComputeSetting("moe_router_topk", _as_is("moe_router_topk"), _setting("num_experts_per_tok")),
    ComputeSetting("moe_router_score_function", _as_is("moe_router_score_function"), _scores),
    ComputeSetting("moe_router_pre_softmax", _as_is("moe_router_pre_softmax"), _all_scored),
    ComputeSetting("moe_router_topk_scaling_factor", _scaled, _setting("routed_scaling_factor", 1.0)),
    ComputeSetting("moe_router_group_topk", _trained_limit, _served_limit),
    ComputeSetting("moe_router_load_balancing_type", _balancing, _is(None)),
)
INDEXER_SETTINGS: Final = (
    ComputeSetting("dsa_indexer_topk", _as_is("dsa_indexer_topk"), _setting("index_topk")),
    ComputeSetting("dsa_indexer_topk_freq", _as_is("dsa_indexer_topk_freq"), _setting("index_topk_freq", 1)),
    ComputeSetting(
        "dsa_indexer_skip_topk_offset", _as_is("dsa_indexer_skip_topk_offset"), _setting("index_skip_topk_offset", 0)
    ),
    ComputeSetting(
        "dsa_indexer_rope_interleaved", _as_is("dsa_indexer_rope_interleaved"), _setting("indexer_rope_interleave")
    ),
)
