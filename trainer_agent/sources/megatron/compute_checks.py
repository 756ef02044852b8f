"""How the trained model computes, against the words of the served one's config, setting by setting. No torch.

These settings change nothing in names and shapes, and what a weight is worth all the same: how experts are chosen, what
attention sees, how a latent attention rotates. A setting that the release lacks, or of which the config says nothing,
is not compared. What is no field of a TransformerConfig cannot be: the rotation of grouped attention is an argument of
the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, cast

from msgspec import UNSET

from .hf_model import Model


class Setting(NamedTuple):
    """A field of a TransformerConfig: what its value amounts to, and what it must."""

    field: str
    meant: Callable[[object, Model], object]
    """Given the config. Several values may amount to the same: scaled by 1 is not scaled."""
    expected: Callable[[Model], object]
    """UNSET where the served config says nothing of it."""


class Difference(NamedTuple):
    """A setting that is not as the served model has it."""

    field: str
    found: object
    meant: object
    expected: object


def differences(config: object, model: Model) -> Iterator[Difference]:
    """Every setting of `config`, a TransformerConfig, that makes another function of the same weights."""
    for setting in settings_of(model):
        if not hasattr(config, setting.field):
            continue
        expected = setting.expected(model)
        meant = setting.meant(config, model)
        if expected is not UNSET and not _same(meant, expected):
            yield Difference(setting.field, getattr(config, setting.field), meant, expected)


def settings_of(model: Model) -> tuple[Setting, ...]:
    """Those that mean something for `model`: a dense one has no router, whatever its config says of one."""
    latent = "kv_lora" in model.sizes
    return (
        *ATTENTION,
        *(LATENT_ATTENTION if latent else GROUPED_ATTENTION),
        *(ROUTING if model.family.experts else ()),
        *(INDEXER if model.family.variant == "dsa" else ()),
    )


def _same(found: object, expected: object) -> bool:
    if isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        return math.isclose(found, expected, rel_tol=1e-6)
    return found == expected


def _plain(field: str) -> Callable[[object, Model], object]:
    return lambda config, _: getattr(config, field)


def _word(name: str, unsaid: object = UNSET) -> Callable[[Model], object]:
    return lambda model: model.words.get(name, unsaid)


def _is(value: object) -> Callable[[Model], object]:
    return lambda _: value


def _window(config: object, _: Model) -> object:
    """How far attention looks back; Megatron says -1 for as far as there is."""
    window: object = getattr(config, "window_size", None)
    back: object = cast("Sequence[object]", window)[0] if isinstance(window, (tuple, list)) else window
    return None if back == -1 else back


def _no_window(model: Model) -> object:
    """Few servers honor a window, each in its own words: of a config that has one, nothing is compared."""
    return UNSET if model.words.get("use_sliding_window") else None


def _unrotated(config: object, _: Model) -> object:
    """Megatron makes a list of it, with something true for each layer that is not rotated."""
    frequency: object = getattr(config, "no_rope_freq", None)
    layers = cast("Sequence[object]", frequency) if isinstance(frequency, (tuple, list)) else [frequency]
    return any(layers)


def _softmax_scale(config: object, model: Model) -> object:
    scale: object = getattr(config, "softmax_scale", None)
    return _plain_scale(model) if scale is None else scale


def _plain_scale(model: Model) -> object:
    return model.sizes["head_dim"] ** -0.5


def _scores(model: Model) -> object:
    return model.words.get("scoring_func", model.family.scores)


def _all_scored(model: Model) -> object:
    """Softmax over all experts, before the best are chosen, is what leaves their scores unnormalized."""
    normalized = model.words.get("norm_topk_prob", UNSET)
    return UNSET if normalized is UNSET or _scores(model) != "softmax" else not normalized


def _scaled(config: object, _: Model) -> object:
    return getattr(config, "moe_router_topk_scaling_factor", None) or 1.0


def _limited(groups: object, chosen: object) -> object:
    """How many groups of how many experts come from; None where no group is left out."""
    limits = isinstance(groups, int) and isinstance(chosen, int) and 0 < chosen < groups
    return f"{chosen} of {groups}" if limits else None


def _trained_limit(config: object, _: Model) -> object:
    return _limited(getattr(config, "moe_router_num_groups", None), getattr(config, "moe_router_group_topk", None))


def _served_limit(model: Model) -> object:
    return _limited(model.words.get("n_group"), model.words.get("topk_group"))


def _balancing(config: object, _: Model) -> object:
    """Of all ways to balance experts, this one chooses them otherwise."""
    kinds: object = getattr(config, "moe_router_load_balancing_type", None)
    return "sinkhorn" if kinds == "sinkhorn" or (isinstance(kinds, list) and "sinkhorn" in kinds) else None


def _mscale(factor: object, weight: object) -> float:
    """YaRN's magnitude: of context that is `factor` times as long."""
    if not isinstance(factor, (int, float)) or not isinstance(weight, (int, float)) or factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


def _stretch(config: object, _: Model) -> object:
    return getattr(config, "rotary_scaling_factor", 1.0) if getattr(config, "rope_type", None) == "yarn" else 1.0


def _served_stretch(model: Model) -> object:
    kind = model.words.get("rope_type", model.words.get("type", "default"))
    if kind == "default":
        return 1.0
    return model.words.get("factor", UNSET) if kind == "yarn" else UNSET


def _trained_scale(config: object, _: Model) -> object:
    """Megatron scales the attention by it for any kind of rotation."""
    return _mscale(getattr(config, "rotary_scaling_factor", None), getattr(config, "mscale_all_dim", None))


def _served_scale(model: Model) -> object:
    stretch = _served_stretch(model)
    return UNSET if stretch is UNSET else _mscale(stretch, model.words.get("mscale_all_dim", 0.0))


def _trained_magnitude(config: object, model: Model) -> object:
    stretch = _stretch(config, model)
    whole, part = (_mscale(stretch, getattr(config, field, None)) for field in ("mscale", "mscale_all_dim"))
    return whole / part


def _served_magnitude(model: Model) -> object:
    stretch = _served_stretch(model)
    if stretch is UNSET:
        return UNSET
    return _mscale(stretch, model.words.get("mscale", 1.0)) / _mscale(stretch, model.words.get("mscale_all_dim", 0.0))


def _yarn(field: str) -> Setting:
    """A setting of both by one name, that means something where the context is stretched."""

    def expected(model: Model) -> object:
        return model.words.get(field, UNSET) if _served_stretch(model) not in {UNSET, 1.0} else UNSET

    return Setting(field, _plain(field), expected)


ATTENTION: Final = (
    Setting("window_size", _window, _no_window),
    Setting("no_rope_freq", _unrotated, _is(value=False)),
)
GROUPED_ATTENTION: Final = (Setting("softmax_scale", _softmax_scale, _plain_scale),)
LATENT_ATTENTION: Final = (
    Setting("rotary_base", _plain("rotary_base"), _word("rope_theta")),
    Setting("rotary_scaling_factor", _stretch, _served_stretch),
    Setting("mscale_all_dim", _trained_scale, _served_scale),
    Setting("mscale", _trained_magnitude, _served_magnitude),
    _yarn("original_max_position_embeddings"),
    _yarn("beta_fast"),
    _yarn("beta_slow"),
)
ROUTING: Final = (
    Setting("moe_router_topk", _plain("moe_router_topk"), _word("num_experts_per_tok")),
    Setting("moe_router_score_function", _plain("moe_router_score_function"), _scores),
    Setting("moe_router_pre_softmax", _plain("moe_router_pre_softmax"), _all_scored),
    Setting("moe_router_topk_scaling_factor", _scaled, _word("routed_scaling_factor", 1.0)),
    Setting("moe_router_group_topk", _trained_limit, _served_limit),
    Setting("moe_router_load_balancing_type", _balancing, _is(None)),
)
INDEXER: Final = (
    Setting("dsa_indexer_topk", _plain("dsa_indexer_topk"), _word("index_topk")),
    Setting("dsa_indexer_topk_freq", _plain("dsa_indexer_topk_freq"), _word("index_topk_freq", 1)),
    Setting("dsa_indexer_skip_topk_offset", _plain("dsa_indexer_skip_topk_offset"), _word("index_skip_topk_offset", 0)),
    Setting("dsa_indexer_rope_interleaved", _plain("dsa_indexer_rope_interleaved"), _word("indexer_rope_interleave")),
)
