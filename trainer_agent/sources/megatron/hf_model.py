"""A Hugging Face model, parsed from its config: sizes, layers, every tensor of its checkpoint, and the rule of each.

model_families.py has the tables of each family; an `HFModel` is one model of a family, the same on every rank of a
source. `match_parameter` finds the mapping rule of a Megatron-core parameter by its name, which is local to a rank:
layers are counted from 0 in every pipeline chunk, experts from 0 on every expert-parallel rank. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast

import msgspec

from weightbus.dataplane.tensors import Left, LeftReason, TensorSpec, shortest_prefixes

from ...source import SERVABLE_DTYPES, LayoutMismatch, UnsupportedModel
from .model_families import EMBEDDING, FAMILIES, FINAL_NORM, OUTPUT, UNSAID, Family, Prediction, Rules
from .parameter_mapping import Fusion, MappingRule, MappingTarget, Norm, TensorCut

MOST_LAYERS: Final = 4096
"""Most layers of a model. Each is looked at; no known model has a tenth of it."""

ConfigValue = bool | int | float | str

_ROUTING: Final = (
    "num_experts_per_tok",
    "scoring_func",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
)
_INDEXER: Final = ("index_topk", "indexer_rope_interleave", "index_topk_freq", "index_skip_topk_offset")
_ATTENTION: Final = ("rope_theta", "use_sliding_window", "sliding_window", "query_pre_attn_scalar")
_ROTATION: Final = (
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)
_NESTED: Final = ("rope_scaling", "rope_parameters")
"""Sections with the settings of the rotation: since transformers 5 all of them in the second, before that all but
``rope_theta`` in the first."""


class LayerKind(msgspec.Struct, frozen=True):
    """The kinds of blocks in one layer."""

    linear: bool = False
    """True for a gated delta net in place of attention."""
    experts: bool = False


class HFModel(msgspec.Struct, frozen=True):
    """A decoder: the sizes and switches of its Hugging Face config that determine names and shapes."""

    architecture: str
    sizes: dict[str, int]
    switches: tuple[str, ...]
    layers: tuple[LayerKind, ...]
    predictions: int
    """Number of multi-token prediction layers."""
    eps: float | None
    """Epsilon of the norms; None where the config names none."""
    dtype: str | None
    """dtype that the config names; None where it names none."""
    compute_settings: dict[str, ConfigValue] = {}
    """Settings of the config that change the model's computation, but no name and no shape, by the config's keys."""

    @classmethod
    def parse(cls, config: Mapping[str, object], names: Collection[str] = ()) -> HFModel:
        """Read a Hugging Face ``config.json``. Raises `UnsupportedModel` or `LayoutMismatch`.

        `names` are the tensors of the served checkpoint where it is at hand: whether a tensor holds one expert or all
        of a layer's is seen there alone. Without it, the family's releases decide.
        """
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        fields = _Fields(config, family)
        layers = tuple(_layers(fields, family))
        sizes = _sizes(fields, family, dense=any(not layer.experts for layer in layers))
        switches = {name for name, value in family.switches.items() if fields.switch(value)}
        switches |= {"tied"} if fields.top("tie_word_embeddings", family.tied) else set()
        switches |= {"q_lora"} if "q_lora" in sizes else set()
        switches |= {"shared_experts"} if "shared_ffn" in sizes else set()
        switches |= _stacked(config, family, names)
        predicted = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_layers", "mtp_num_hidden_layers")
        return cls(
            architecture=architecture,
            sizes=sizes,
            switches=tuple(sorted(switches)),
            layers=layers,
            predictions=fields.few(predicted, MOST_LAYERS) if family.prediction else 0,
            eps=fields.number("rms_norm_eps"),
            dtype=_dtype(fields),
            compute_settings=fields.compute_settings(),
        )

    @property
    def family(self) -> Family:
        """The table of the model's family."""
        return FAMILIES[self.architecture]

    def applies(self, when: str | None) -> bool:
        """True when a rule with this condition applies; see `MappingRule.when`."""
        if when is None:
            return True
        return when.removeprefix("not ") not in self.switches if when.startswith("not ") else when in self.switches

    def rules_of(self, layer: LayerKind) -> tuple[MappingRule, ...]:
        """The mapping rules that apply to such a layer."""
        family = self.family
        blocks: Sequence[Rules] = (
            family.linear_attention if layer.linear else family.attention,
            family.norms,
            family.experts if layer.experts else family.mlp,
        )
        return tuple(rule for block in blocks for rule in block if self.applies(rule.when))

    def shift_of(self, target: MappingTarget, *, zero_centred: bool) -> int:
        """Number that is added to Megatron's norm weight, centered at zero or one, to get the checkpoint's."""
        if target.norm is Norm.NOT:
            return 0
        served_at_zero = self.family.zero_centred and target.norm is Norm.FAMILY
        return int(zero_centred) - int(served_at_zero)

    def spec(self, target: MappingTarget, prefix: str, dtype: str, expert: int | None = None) -> TensorSpec:
        """The Hugging Face tensor of `target` below `prefix`."""
        of_one = tuple(self.sizes[size] for size in target.shape)
        return TensorSpec(
            name=prefix + self.rename(target.name).replace("{e}", str(expert)),
            dtype=target.dtype or dtype,
            shape=(self.sizes["experts"], *of_one) if target.stacked else of_one,
        )

    def rename(self, name: str) -> str:
        """The family's checkpoint name for the blocks' name `name`."""
        for ours, theirs in self.family.renames:
            name = name.replace(ours, theirs)
        return name


class LayerMapping(NamedTuple):
    """The mapping rules of one layer, or of a part that a model has once, with the prefix of its tensors' names."""

    rules: tuple[MappingRule, ...]
    prefix: str

    def rule(self, name: str) -> MappingRule | None:
        """The rule of a parameter by its name below the layer; None when there is none."""
        return next((rule for rule in self.rules if name in rule.megatron_names), None)


def decoder_layer(model: HFModel, index: int) -> LayerMapping:
    """Layer `index` of the decoder."""
    return LayerMapping(model.rules_of(model.layers[index]), f"{model.family.body}layers.{index}.")


def prediction_layer(model: HFModel, index: int) -> LayerMapping:
    """The transformer layer of multi-token prediction layer `index`: it is of the kind of the last layer."""
    prediction = _prediction(model)
    kept = set(model.switches) - {"stacked"}
    if "stacked_predictions" in model.switches:
        kept.add("stacked")
    of_layer = msgspec.structs.replace(model, switches=tuple(sorted(kept)))
    return LayerMapping(of_layer.rules_of(model.layers[-1]), _numbered(prediction.layer, model, index))


def prediction_parts(model: HFModel, index: int) -> LayerMapping:
    """The parts of a prediction layer around its transformer layer, by full names."""
    prediction = _prediction(model)
    names = (prediction.embedding_norm, prediction.hidden_norm, prediction.projection, prediction.norm)
    norm_e, norm_h, projection, norm = (_numbered(name, model, index) for name in names)
    rules = (
        MappingRule(("enorm.weight",), (MappingTarget(norm_e, ("hidden",), Norm.FAMILY),)),
        MappingRule(("hnorm.weight",), (MappingTarget(norm_h, ("hidden",), Norm.FAMILY),)),
        MappingRule(
            ("eh_proj.weight",),
            (MappingTarget(projection, ("hidden", "two_hidden")),),
            TensorCut.ROWS,
            Fusion.SWAPPED_HALVES if prediction.swapped else Fusion.PLAIN,
        ),
        MappingRule(("final_layernorm.weight",), (MappingTarget(norm, ("hidden",), Norm.FAMILY),)),
    )
    return LayerMapping(rules, "")


def once(model: HFModel) -> tuple[LayerMapping, LayerMapping, LayerMapping]:
    """Embedding, final norm and output layer; no rule for an output layer that is the embedding."""
    output = (OUTPUT,) if model.applies(OUTPUT.when) else ()
    prefix = model.family.body
    return (
        LayerMapping((EMBEDDING,), prefix),
        LayerMapping((FINAL_NORM,), prefix),
        LayerMapping(output, model.family.head),
    )


def layer_mappings(model: HFModel) -> Iterator[LayerMapping]:
    """The whole model: embedding, layers, final norm, output layer, then parts and layer of each prediction."""
    embedding, *behind = once(model)
    yield embedding
    yield from (decoder_layer(model, index) for index in range(len(model.layers)))
    yield from behind
    for index in range(model.predictions):
        yield prediction_parts(model, index)
        yield prediction_layer(model, index)


def hf_tensors(model: HFModel, dtype: str) -> tuple[TensorSpec, ...]:
    """Every tensor of the checkpoint, layer by layer; a complete set of shards covers all of them."""
    return tuple(spec for mapping in layer_mappings(model) for spec in _of(model, mapping, dtype))


def untrained(model: HFModel, sent: Iterable[str]) -> tuple[Left, ...]:
    """Tensors of the whole `model` that are not among the names `sent`: those of predictions that are not trained."""
    names = set(sent)
    left = [spec.name for spec in hf_tensors(model, "") if spec.name not in names]
    return tuple(Left(name, LeftReason.NOT_TRAINED) for name in shortest_prefixes(left, names))


def _of(model: HFModel, place: LayerMapping, dtype: str) -> Iterator[TensorSpec]:
    targets = [target for rule in place.rules for target in rule.targets]
    for target in targets:
        if "{e}" not in target.name:
            yield model.spec(target, place.prefix, dtype)
    each = [target for target in targets if "{e}" in target.name]
    if each:
        for expert in range(model.sizes["experts"]):
            yield from (model.spec(target, place.prefix, dtype, expert) for target in each)


def _prediction(model: HFModel) -> Prediction:
    prediction = model.family.prediction
    if prediction is None:
        raise UnsupportedModel(f"{model.architecture} is not known to have multi-token prediction layers")
    return prediction


def _numbered(name: str, model: HFModel, index: int) -> str:
    return name.replace("{i}", str(index)).replace("{next}", str(len(model.layers) + index))


_USUAL_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "expert_ffn": ("moe_intermediate_size",),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "nope_dim": ("qk_nope_head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
    "indexer_heads": ("index_n_heads",),
    "indexer_dim": ("index_head_dim",),
    "delta_keys": ("linear_num_key_heads",),
    "delta_key_dim": ("linear_key_head_dim",),
    "delta_values": ("linear_num_value_heads",),
    "delta_value_dim": ("linear_value_head_dim",),
    "delta_kernel": ("linear_conv_kernel_dim",),
}
"""Usual config keys of each size. A model needs the sizes that its blocks name."""


class _Fields:
    """A Hugging Face config, read with errors that name the wrong field."""

    def __init__(self, config: Mapping[str, object], family: Family) -> None:
        inner: Mapping[str, object] | None = config
        for key in family.section.split(".") if family.section else ():
            found = inner.get(key) if inner is not None else None
            inner = cast("Mapping[str, object]", found) if isinstance(found, Mapping) else None
        if inner is None:
            raise LayoutMismatch(f"the Hugging Face config has no {family.section!r}, where its language model is")
        self._whole = config
        self._inner = inner

    def get(self, key: str, default: object = None) -> object:
        value = self._inner.get(key)
        return default if value is None else value

    def top(self, key: str, default: object) -> object:
        """A field that multimodal models keep outside of the config of their language model."""
        value = self._whole.get(key)
        return self.get(key, default) if value is None else value

    def switch(self, value: bool | str) -> bool:
        return bool(self.get(value, value in UNSAID)) if isinstance(value, str) else value

    def compute_settings(self) -> dict[str, ConfigValue]:
        """Settings that change the model's computation, by the config's keys."""
        known = [(key, self.get(key)) for key in (*_ROUTING, *_INDEXER, *_ATTENTION)]
        for section in _NESTED:
            if isinstance(inner := self.get(section), Mapping):
                known += [(key, cast("Mapping[str, object]", inner).get(key)) for key in _ROTATION]
        return {key: value for key, value in known if isinstance(value, (bool, int, float, str))}

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LayoutMismatch(f"the Hugging Face config says {key}={value!r}: a positive number is expected")
        return value

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise LayoutMismatch(f"the Hugging Face config says {key}={value!r}: a number is expected")
        return float(value)

    def first(self, keys: Sequence[str], default: int) -> int:
        """The first of these fields that is there and is a count."""
        found = (self.get(key) for key in keys)
        return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), default)

    def few(self, keys: Sequence[str], most: int) -> int:
        """As `first`; 0 where there is none. Raises `LayoutMismatch` for more than `most`, or less than none."""
        found = self.first(keys, 0)
        if not 0 <= found <= most:
            raise LayoutMismatch(f"the Hugging Face config says {' or '.join(keys)}={found}: 0 to {most} are expected")
        return found

    def flags(self, key: str) -> Sequence[object] | None:
        value = self.get(key)
        return cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else None


class _Sizes(dict[str, int]):
    """Sizes by name. A size that a rule needs and the config lacks raises `LayoutMismatch`, not `KeyError`."""

    def __missing__(self, name: str) -> int:
        known = " or ".join(_USUAL_KEYS.get(name, (name,)))
        raise LayoutMismatch(f"the Hugging Face config says nothing of {known}, which its model needs")


def _sizes(fields: _Fields, family: Family, *, dense: bool) -> dict[str, int]:
    size, needed = _Sizes(one=1), {"hidden", "heads", "vocab", *(("ffn",) if dense else ())}
    for name, keys in _USUAL_KEYS.items():
        known = (family.keys[name],) if name in family.keys else keys
        present = [key for key in known if fields.get(key) is not None]
        if present or name in needed:
            size[name] = fields.size(present[0] if present else known[0])
    hidden, heads = size["hidden"], size["heads"]
    size["groups"] = fields.size("num_key_value_heads", heads)
    size["head_dim"] = fields.size("head_dim", hidden // heads)
    if heads % size["groups"]:
        raise LayoutMismatch(f"num_attention_heads={heads} is no multiple of num_key_value_heads={size['groups']}")
    if family.experts:
        size |= _shared_experts(fields, size)
    size |= {
        "two_hidden": 2 * hidden,
        "query": heads * size["head_dim"],
        "gated_query": 2 * heads * size["head_dim"],
        "attended": heads * size["head_dim"],
        "key": size["groups"] * size["head_dim"],
    }
    if "expert_ffn" in size:
        size["expert_gate_and_up"] = 2 * size["expert_ffn"]
    if "ffn" in size:
        size["gate_and_up"] = 2 * size["ffn"]
    if "kv_lora" in size:
        size |= {
            "latent_query": heads * (size["nope_dim"] + size["rope_dim"]),
            "latent_kv": size["kv_lora"] + size["rope_dim"],
            "keys_and_values": heads * (size["nope_dim"] + size["value_dim"]),
            "latent_attended": heads * size["value_dim"],
        }
    if "indexer_heads" in size:
        size["indexer_query"] = size["indexer_heads"] * size["indexer_dim"]
    if "delta_keys" in size:
        key, value = size["delta_keys"] * size["delta_key_dim"], size["delta_values"] * size["delta_value_dim"]
        size |= {
            "delta_qkvz": 2 * key + 2 * value,
            "delta_ba": 2 * size["delta_values"],
            "delta_channels": 2 * key + value,
            "delta_attended": value,
        }
    return size


def _shared_experts(fields: _Fields, size: Mapping[str, int]) -> dict[str, int]:
    if fields.get("shared_expert_intermediate_size"):
        return {"shared_ffn": fields.size("shared_expert_intermediate_size")}
    if fields.get("n_shared_experts"):
        return {"shared_ffn": fields.size("n_shared_experts") * size["expert_ffn"]}
    return {}


def _stacked(config: Mapping[str, object], family: Family, names: Collection[str]) -> set[str]:
    """The switches of experts that are one tensor, in the decoder and, which may differ, in prediction layers."""
    found = {name.startswith("mtp.") for name in names if name.endswith(".experts.gate_up_proj")}
    if not names:
        found = {False} if family.stacked and not config.get("quantization_config") else found
    return {"stacked_predictions" if predicted else "stacked" for predicted in found}


def _layers(fields: _Fields, family: Family) -> Iterator[LayerKind]:
    kinds = fields.flags("layer_types")
    count, every = fields.size("num_hidden_layers"), fields.size("full_attention_interval", 4)
    if count > MOST_LAYERS:
        raise LayoutMismatch(
            f"the Hugging Face config says num_hidden_layers={count}: {MOST_LAYERS} at most are served"
        )
    frequency = fields.flags("moe_layer_freq")
    types = fields.flags("mlp_layer_types")
    dense_first = fields.first(("first_k_dense_replace",), 0)
    step = fields.first(("decoder_sparse_step",), 1)
    dense = fields.flags("mlp_only_layers") or ()
    for index in range(count):
        if kinds is not None and index < len(kinds):
            linear = kinds[index] == "linear_attention"
        else:
            linear = bool((index + 1) % every)
        if types is not None and index < len(types):
            sparse = types[index] == "sparse"
        elif frequency is not None and index < len(frequency):
            sparse = bool(frequency[index])
        else:
            sparse = index >= dense_first and index not in dense and step > 0 and (index + 1) % step == 0
        yield LayerKind(linear=linear and bool(family.linear_attention), experts=sparse and bool(family.experts))


def named_architecture(config: Mapping[str, object]) -> str | None:
    """The first of ``architectures``; None where there is no name."""
    named = config.get("architectures")
    first: object = None
    if isinstance(named, (list, tuple)) and named:
        first = named[0]  # pyright: ignore[reportUnknownVariableType]  # JSON: anything may be in the list
    return first if isinstance(first, str) else None


def has_table(config: Mapping[str, object]) -> bool:
    """Whether the model of ``config.json`` is of a family with a table; others go through Megatron-Bridge."""
    return named_architecture(config) in FAMILIES


def _architecture(config: Mapping[str, object]) -> str:
    first = named_architecture(config)
    if first is None or first not in FAMILIES:
        raise UnsupportedModel(
            f"the Hugging Face config names {first!r}; these have a table: {', '.join(FAMILIES)}. Others need one in "
            f"model_families.py, or Megatron-Bridge, which MegatronSource then uses by itself"
        )
    return first


def _dtype(fields: _Fields) -> str | None:
    """``dtype`` since transformers 5, ``torch_dtype`` before."""
    value = fields.top("dtype", fields.top("torch_dtype", None))
    if value is None:
        return None
    if not isinstance(value, str) or value.removeprefix("torch.") not in SERVABLE_DTYPES:
        raise UnsupportedModel(
            f"the Hugging Face config says dtype={value!r}: parameters can be served in {', '.join(SERVABLE_DTYPES)}"
        )
    return value.removeprefix("torch.")


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
    return next(
        (ParameterMatch(rule, each.prefix, None, name) for each in once(model) if (rule := each.rule(name))), None
    )


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
    rule = place.rule(name)
    if rule is None:
        return None
    index = None if expert is None else expert_of(expert)
    # An expert's parameter is named with its index, and nothing else is.
    if (index is not None) != rule.of_expert:
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
