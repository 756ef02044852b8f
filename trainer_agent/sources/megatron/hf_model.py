"""A served model by its Hugging Face config: its sizes, its layers, and every tensor of its checkpoint. No torch.

model_families.py says what a family consists of; this reads one model of it. `Model` is the same on every rank of a
source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast

import msgspec

from weightbus.dataplane.tensors import TensorSpec

from ...source import SERVED, LayoutMismatch, UnsupportedModel
from .hf_compute_settings import Word, words_of
from .layer_blocks import EMBEDDING, FINAL_NORM, OUTPUT, Rules
from .model_families import FAMILIES, Family, Prediction
from .parameter_mapping import Fusion, Heads, MappingRule, MappingTarget, Norm, TensorCut

MOST_LAYERS: Final = 4096
"""That a model may have. Each is looked at, and none that is known has a tenth of it."""


class Layer(msgspec.Struct, frozen=True):
    """What one layer is made of."""

    linear: bool = False
    """Its attention is a gated delta net."""
    experts: bool = False


class Model(msgspec.Struct, frozen=True):
    """A served decoder: the sizes and switches of its Hugging Face config that decide names and shapes."""

    architecture: str
    sizes: dict[str, int]
    switches: tuple[str, ...]
    layers: tuple[Layer, ...]
    predictions: int
    """Multi-token prediction layers that are trained, and served."""
    eps: float | None
    """Of its norms, where the config says it. It decides no name and no shape."""
    dtype: str | None
    """In which the config says it is served."""
    words: dict[str, Word] = {}
    """What else it says of how the model computes, by its own words."""

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> Model:
        """Read a Hugging Face ``config.json``. Raises `UnsupportedModel` or `LayoutMismatch`."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        fields = _Fields(config, family)
        layers = tuple(_layers(fields, family))
        sizes = _sizes(fields, family, dense=any(not layer.experts for layer in layers))
        switches = {name for name, value in family.switches.items() if fields.switch(value)}
        switches |= {"tied"} if fields.top("tie_word_embeddings", False) else set()
        switches |= {"q_lora"} if "q_lora" in sizes else set()
        switches |= {"shared_experts"} if "shared_ffn" in sizes else set()
        predicted = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_layers")
        return cls(
            architecture=architecture,
            sizes=sizes,
            switches=tuple(sorted(switches)),
            layers=layers,
            predictions=fields.few(predicted, MOST_LAYERS) if family.prediction else 0,
            eps=fields.number("rms_norm_eps"),
            dtype=_dtype(fields),
            words=fields.words(),
        )

    @property
    def family(self) -> Family:
        """The table that says what the model consists of."""
        return FAMILIES[self.architecture]

    @property
    def heads(self) -> Heads:
        """What fused attention parameters are made of."""
        size = self.sizes
        return Heads(
            heads=size["heads"],
            groups=size["groups"],
            head_dim=size["head_dim"],
            key_heads=size.get("delta_keys", 1),
            key_dim=size.get("delta_key_dim", 1),
            value_heads=size.get("delta_values", 1),
            value_dim=size.get("delta_value_dim", 1),
        )

    def on(self, when: str | None) -> bool:
        """A rule with this condition applies."""
        if when is None:
            return True
        return when.removeprefix("not ") not in self.switches if when.startswith("not ") else when in self.switches

    def rules_of(self, layer: Layer) -> tuple[MappingRule, ...]:
        """The rules of everything in such a layer, that apply."""
        family = self.family
        blocks: Sequence[Rules] = (
            family.linear_attention if layer.linear else family.attention,
            family.norms,
            family.experts if layer.experts else family.mlp,
        )
        return tuple(rule for block in blocks for rule in block if self.on(rule.when))

    def shift_of(self, target: MappingTarget, *, zero_centred: bool) -> int:
        """What is added to a trained norm's weight, which is around zero or around one, to serve it."""
        if target.norm is Norm.NOT:
            return 0
        served_at_zero = self.family.zero_centred and target.norm is Norm.FAMILY
        return int(zero_centred) - int(served_at_zero)

    def spec(self, target: MappingTarget, prefix: str, dtype: str, expert: int | None = None) -> TensorSpec:
        """The tensor that `target` is below `prefix`."""
        return TensorSpec(
            name=prefix + self.rename(target.name).replace("{e}", str(expert)),
            dtype=target.dtype or dtype,
            shape=tuple(self.sizes[size] for size in target.shape),
        )

    def rename(self, name: str) -> str:
        """What the family's checkpoints call what blocks call `name`."""
        for ours, theirs in self.family.renames:
            name = name.replace(ours, theirs)
        return name


class LayerPlace(NamedTuple):
    """A part of the served model: the layer and its prefix, or one of the parts that a model has once."""

    rules: tuple[MappingRule, ...]
    prefix: str


def decoder_layer(model: Model, index: int) -> LayerPlace:
    """Layer `index` of the decoder."""
    return LayerPlace(model.rules_of(model.layers[index]), f"{model.family.body}layers.{index}.")


def prediction_layer(model: Model, index: int) -> LayerPlace:
    """The transformer layer of multi-token prediction layer `index`: it is of the kind of the last layer."""
    prediction = _prediction(model)
    return LayerPlace(model.rules_of(model.layers[-1]), _numbered(prediction.layer, model, index))


def prediction_parts(model: Model, index: int) -> LayerPlace:
    """What a prediction layer has around its transformer layer, by full names."""
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
    return LayerPlace(rules, "")


def body(model: Model) -> LayerPlace:
    """The parts that a model has once, below its prefix."""
    return LayerPlace((EMBEDDING, FINAL_NORM), model.family.body)


def head(model: Model) -> LayerPlace:
    """The output layer, unless it is the embedding."""
    return LayerPlace((OUTPUT,) if model.on(OUTPUT.when) else (), "")


def served_tensors(model: Model, dtype: str) -> tuple[TensorSpec, ...]:
    """Every tensor of the served model, layer by layer: what a complete set of pieces must cover."""
    return tuple(_tensors(model, dtype))


def _tensors(model: Model, dtype: str) -> Iterator[TensorSpec]:
    embedding, norm = body(model).rules
    yield from _of(model, LayerPlace((embedding,), model.family.body), dtype)
    for index in range(len(model.layers)):
        yield from _of(model, decoder_layer(model, index), dtype)
    yield from _of(model, LayerPlace((norm,), model.family.body), dtype)
    yield from _of(model, head(model), dtype)
    for index in range(model.predictions):
        yield from _of(model, prediction_parts(model, index), dtype)
        yield from _of(model, prediction_layer(model, index), dtype)


def _of(model: Model, place: LayerPlace, dtype: str) -> Iterator[TensorSpec]:
    targets = [target for rule in place.rules for target in rule.served]
    for target in targets:
        if "{e}" not in target.name:
            yield model.spec(target, place.prefix, dtype)
    each = [target for target in targets if "{e}" in target.name]
    if each:
        for expert in range(model.sizes["experts"]):
            yield from (model.spec(target, place.prefix, dtype, expert) for target in each)


def _prediction(model: Model) -> Prediction:
    prediction = model.family.prediction
    if prediction is None:
        raise UnsupportedModel(f"{model.architecture} is not known to have multi-token prediction layers")
    return prediction


def _numbered(name: str, model: Model, index: int) -> str:
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
"""Where a size usually is in a config. Of these a model has those that its blocks name."""

_EVERY_MODEL: Final = frozenset({"hidden", "heads", "vocab"})
_DENSE_LAYERS: Final = frozenset({"ffn"})


class _Fields:
    """A config, read with errors that say what is wrong with it."""

    def __init__(self, config: Mapping[str, object], family: Family) -> None:
        inner = config if family.section is None else config.get(family.section)
        if not isinstance(inner, Mapping):
            raise LayoutMismatch(f"the Hugging Face config has no {family.section!r}, where its language model is")
        self._whole = config
        self._inner = cast("Mapping[str, object]", inner)

    def get(self, key: str, default: object = None) -> object:
        value = self._inner.get(key)
        return default if value is None else value

    def top(self, key: str, default: object) -> object:
        """A field that models of several kinds of input have outside of their language model."""
        value = self._whole.get(key)
        return self.get(key, default) if value is None else value

    def switch(self, value: bool | str) -> bool:
        return bool(self.get(value, False)) if isinstance(value, str) else value

    def words(self) -> dict[str, Word]:
        return words_of(self._inner)

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
    """Sizes by name. One that a rule needs and the config does not give is the config's fault, not a KeyError."""

    def __missing__(self, name: str) -> int:
        known = " or ".join(_USUAL_KEYS.get(name, (name,)))
        raise LayoutMismatch(f"the Hugging Face config says nothing of {known}, which its model needs")


def _sizes(fields: _Fields, family: Family, *, dense: bool) -> dict[str, int]:
    size, needed = _Sizes(one=1), _EVERY_MODEL | _DENSE_LAYERS if dense else _EVERY_MODEL
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


def _layers(fields: _Fields, family: Family) -> Iterator[Layer]:
    kinds = fields.flags("layer_types")
    count, every = fields.size("num_hidden_layers"), fields.size("full_attention_interval", 4)
    if count > MOST_LAYERS:
        raise LayoutMismatch(
            f"the Hugging Face config says num_hidden_layers={count}: {MOST_LAYERS} at most are served"
        )
    frequency = fields.flags("moe_layer_freq")
    dense_first = fields.first(("first_k_dense_replace",), 0)
    step = fields.first(("decoder_sparse_step",), 1)
    dense = fields.flags("mlp_only_layers") or ()
    for index in range(count):
        if kinds is not None and index < len(kinds):
            linear = kinds[index] == "linear_attention"
        else:
            linear = bool((index + 1) % every)
        if frequency is not None and index < len(frequency):
            sparse = bool(frequency[index])
        else:
            sparse = index >= dense_first and index not in dense and step > 0 and (index + 1) % step == 0
        yield Layer(linear=linear and bool(family.linear_attention), experts=sparse and bool(family.experts))


def _architecture(config: Mapping[str, object]) -> str:
    named = config.get("architectures")
    first: object = None
    if isinstance(named, (list, tuple)) and named:
        first = named[0]  # pyright: ignore[reportUnknownVariableType]  # JSON: anything may be in the list
    if not isinstance(first, str) or first not in FAMILIES:
        raise UnsupportedModel(
            f"the Hugging Face config names {first!r}; these are served: {', '.join(FAMILIES)}. "
            f"Others need a table in model_families.py, or ExportedSource where Megatron-Bridge knows them"
        )
    return first


def _dtype(fields: _Fields) -> str | None:
    """``dtype`` since transformers 5, ``torch_dtype`` before."""
    value = fields.top("dtype", fields.top("torch_dtype", None))
    if value is None:
        return None
    if not isinstance(value, str) or value.removeprefix("torch.") not in SERVED:
        raise UnsupportedModel(
            f"the Hugging Face config says dtype={value!r}: parameters can be served in {', '.join(SERVED)}"
        )
    return value.removeprefix("torch.")
