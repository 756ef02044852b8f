"""Finds the mapping rule of a Megatron-core parameter by its name on one rank. Pure, no torch.

Names are local to a rank: layers are counted from 0 in every pipeline chunk, experts from 0 on every expert-parallel
rank. `match_parameter` converts local indexes to global ones with functions of the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from .hf_model import HFModel, LayerMapping, body, decoder_layer, head, prediction_layer, prediction_parts
from .parameter_mapping import MappingRule, by_name

_LAYER: Final = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_PREDICTION: Final = re.compile(r"^mtp\.layers\.(\d+)\.(?:(mtp_model_layer|transformer_layer)\.)?(.+)$")
"""Its transformer layer is called `transformer_layer` up to Megatron-core 0.16 and `mtp_model_layer` since."""
_SEQUENTIAL: Final = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_GROUPED: Final = re.compile(r"^mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$")

TRAINING_ONLY: Final = (
    "mlp.router.local_tokens_per_expert",
    "mlp.router.global_tokens_per_expert",
    "mlp.router.ga_steps",
)
"""Counters of the trainer. No other persistent buffer is left out."""

ADVICE: Final[tuple[tuple[str, str], ...]] = (
    ("experts.weight", "train experts as grouped Transformer Engine linears or sequentially, not as one tensor"),
    ("experts.linear_fc1.weight", "train with moe_single_grouped_weight=False: one tensor for each expert"),
    ("qb_beta", "quantile balancing is not served; use moe_router_load_balancing_type of another kind"),
    ("adapter", "merge the adapter into its base weights before building the source"),
    ("lora", "merge the adapter into its base weights before building the source"),
    ("norm.bias", "only RMSNorm without bias is served"),
    ("norm_bias", "only RMSNorm without bias is served"),
    ("softmax_offset", "attention sinks are not served; train with softmax_type='vanilla'"),
    ("mixer", "Mamba layers are not served"),
    ("mtp.", "this kind of multi-token prediction is not served; train with mtp_num_layers=None"),
    ("experts", "the served model has no such experts: give the config of the model that is trained"),
    ("router", "the served model has no such router: give the config of the model that is trained"),
)
"""Advice for a parameter without a rule, by a part of its name; the first match is used."""


class ParameterMatch(NamedTuple):
    """A parameter's rule, and the prefix and expert of its Hugging Face tensors."""

    rule: MappingRule
    prefix: str
    expert: int | None
    """Global index of the expert; None for a parameter of no expert."""
    name: str
    """The parameter's name with global indexes."""


def match_parameter(
    name: str,
    model: HFModel,
    layer_of: Callable[[int], int],
    expert_of: Callable[[int], int],
    prediction_of: Callable[[int], int],
) -> ParameterMatch | None:
    """The rule for a local parameter name; None when there is none.

    `layer_of`, `expert_of` and `prediction_of` convert local indexes of layers, experts and prediction layers.
    """
    if (match := _LAYER.match(name)) is not None:
        index = layer_of(int(match[1]))
        known = 0 <= index < len(model.layers)
        return _within(decoder_layer(model, index), match[2], f"decoder.layers.{index}.", expert_of) if known else None
    if (match := _PREDICTION.match(name)) is not None:
        return _in_prediction(match, prediction_of(int(match[1])), model, expert_of)
    for part in (body(model), head(model)):
        if (rule := by_name(part.rules).get(name)) is not None:
            return ParameterMatch(rule, part.prefix, None, name)
    return None


def advice_for(name: str, model: HFModel) -> str:
    """Advice for a parameter that no rule names."""
    for part, advice in ADVICE:
        if part in name:
            return advice
    return f"remove it, or add a rule for it to {model.architecture} in model_families.py"


def _in_prediction(
    match: re.Match[str], index: int, model: HFModel, expert_of: Callable[[int], int]
) -> ParameterMatch | None:
    inner = match[2]
    if not 0 <= index < model.predictions:
        return None
    place = prediction_parts(model, index) if inner is None else prediction_layer(model, index)
    return _within(place, match[3], f"mtp.layers.{index}." + (f"{inner}." if inner else ""), expert_of)


def _within(place: LayerMapping, local: str, prefix: str, expert_of: Callable[[int], int]) -> ParameterMatch | None:
    name, expert = _expert(local)
    rule = by_name(place.rules).get(name)
    if rule is None:
        return None
    index = None if expert is None else expert_of(expert)
    # An expert's parameter is named with its index, and nothing else is.
    if (index is None) != ("{e}" not in rule.targets[0].name):
        return None
    shown = prefix + name if index is None else f"{prefix}{name} of expert {index}"
    return ParameterMatch(rule, place.prefix, index, shown)


def _expert(local: str) -> tuple[str, int | None]:
    """One name for the parameters of an expert, whether experts are modules of their own or grouped; and its index."""
    if (match := _SEQUENTIAL.match(local)) is not None:
        return f"mlp.experts.{match[2]}", int(match[1])
    if (match := _GROUPED.match(local)) is not None:
        return f"mlp.experts.{match[1]}", int(match[2])
    return local, None
