"""Which Hugging Face tensors the parameters of a Megatron-core decoder are made of. Pure arithmetic, no torch.

Three tables say everything: `FAMILIES` (what a served architecture consists of), `MODEL_RULES` and `LAYER_RULES` (what
one Megatron parameter, by its global name, becomes). pieces.py applies a rule to one shard.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from weightbus.dataplane.manifest import ITEM_BYTES, TensorSpec

from .source import LayoutMismatch, UnsupportedModel


class Family(msgspec.Struct, frozen=True):
    """What distinguishes the dense decoders that are served. A string names the config key that decides."""

    qk_norm: bool = False
    qkv_bias: bool | str = False
    proj_bias: bool | str = False
    mlp_bias: bool | str = False


FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", proj_bias="attention_bias", mlp_bias="mlp_bias"),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, qkv_bias="attention_bias", proj_bias="attention_bias"),
}


class Dense(msgspec.Struct, frozen=True):
    """A served dense decoder: the sizes and switches of its Hugging Face config that decide names and shapes."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    proj_bias: bool
    mlp_bias: bool
    eps: float
    dtype: str | None

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> Dense:
        """Read a Hugging Face ``config.json``. Raises `UnsupportedModel` or `LayoutMismatch`."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")

        groups = _size(config, "num_key_value_heads", heads)
        if heads % groups:
            raise LayoutMismatch(f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}")

        def switch(value: bool | str) -> bool:
            return bool(config.get(value, False)) if isinstance(value, str) else value

        return cls(
            architecture=architecture,
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            ffn=_size(config, "intermediate_size"),
            heads=heads,
            groups=groups,
            head_dim=_size(config, "head_dim", hidden // heads),
            vocab=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family.qk_norm,
            qkv_bias=switch(family.qkv_bias),
            proj_bias=switch(family.proj_bias),
            mlp_bias=switch(family.mlp_bias),
            eps=_number(config, "rms_norm_eps"),
            dtype=_dtype(config),
        )


class Fusion(enum.Enum):
    """How the rows of a full Megatron parameter consist of the rows of its served tensors."""

    NONE = enum.auto()
    """They are one tensor's rows."""
    VOCABULARY = enum.auto()
    """They are one tensor's rows, then padding up to a multiple that suits the trainer."""
    QKV = enum.auto()
    """For each KV group: the rows of its query heads, of its key head, of its value head."""
    GATED = enum.auto()
    """All rows of gate, then all of up."""


class Split(enum.Enum):
    """How tensor parallelism cuts the full parameter."""

    NONE = enum.auto()
    """Not at all: every rank holds it."""
    ROWS = enum.auto()
    """Rank r holds the r-th run of rows."""
    HALVES = enum.auto()
    """Rank r holds the r-th run of rows of each served tensor."""
    COLUMNS = enum.auto()
    """Rank r holds the r-th run of columns."""


class Rule(msgspec.Struct, frozen=True):
    """What one Megatron parameter becomes."""

    served: tuple[str, ...]
    split: Split = Split.NONE
    fusion: Fusion = Fusion.NONE


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GLU = ("mlp.gate_proj", "mlp.up_proj")


def _each(modules: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(f"{module}.{kind}" for module in modules)


MODEL_RULES: Final[dict[str, Rule]] = {
    "embedding.word_embeddings.weight": Rule(("model.embed_tokens.weight",), Split.ROWS, Fusion.VOCABULARY),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
    "output_layer.weight": Rule(("lm_head.weight",), Split.ROWS, Fusion.VOCABULARY),
}
"""Parameters that a model has once."""

LAYER_RULES: Final[dict[str, Rule]] = {
    "input_layernorm.weight": Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Rule(_each(_QKV, "weight"), Split.ROWS, Fusion.QKV),
    "self_attention.linear_qkv.bias": Rule(_each(_QKV, "bias"), Split.ROWS, Fusion.QKV),
    "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), Split.COLUMNS),
    "self_attention.linear_proj.bias": Rule(("self_attn.o_proj.bias",)),
    "pre_mlp_layernorm.weight": Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": Rule(_each(_GLU, "weight"), Split.HALVES, Fusion.GATED),
    "mlp.linear_fc1.bias": Rule(_each(_GLU, "bias"), Split.HALVES, Fusion.GATED),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), Split.COLUMNS),
    "mlp.linear_fc2.bias": Rule(("mlp.down_proj.bias",)),
}
"""Parameters of a layer, below ``decoder.layers.<global index>.``; with and without Transformer Engine."""

_LAYER: Final = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")

ADVICE: Final[tuple[tuple[str, str], ...]] = (
    ("experts", "mixtures of experts are not served yet; dense models are"),
    ("router", "mixtures of experts are not served yet; dense models are"),
    ("mtp.", "multi-token prediction layers are not served yet; train with mtp_num_layers=None"),
    ("adapter", "merge the adapter into its base weights before building the source"),
    ("lora", "merge the adapter into its base weights before building the source"),
    ("norm", "only RMSNorm without bias is served"),
    ("softmax_offset", "attention sinks are not served; train with softmax_type='vanilla'"),
)
"""What to do about a parameter that no rule names, by a part of its name; the first that fits."""


def advice_for(name: str) -> str:
    """What to do about a parameter that no rule names."""
    for part, advice in ADVICE:
        if part in name:
            return advice
    return f"only the parameters of dense decoders are served ({', '.join(FAMILIES)}); remove it, or add a rule"


def served_tensors(model: Dense, dtype: str) -> tuple[TensorSpec, ...]:
    """Every tensor of the served model, in checkpoint order: what a complete set of shards must cover."""
    layer = _layer_shapes(model)
    vocabulary = (model.vocab, model.hidden)
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", vocabulary)]
    for index in range(model.layers):
        shapes.extend((f"model.layers.{index}.{name}", shape) for name, shape in layer)
    shapes.append(("model.norm.weight", (model.hidden,)))
    if not model.tied:
        shapes.append(("lm_head.weight", vocabulary))
    return tuple(TensorSpec(name, dtype, shape) for name, shape in shapes)


def rule_for(name: str) -> tuple[Rule, str] | None:
    """The rule for a parameter by its global name, and the prefix of its served names; None when there is none."""
    if (rule := MODEL_RULES.get(name)) is not None:
        return rule, ""
    if (match := _LAYER.match(name)) is not None and (rule := LAYER_RULES.get(match[2])) is not None:
        return rule, f"model.layers.{match[1]}."
    return None


def _layer_shapes(model: Dense) -> list[tuple[str, tuple[int, ...]]]:
    query, key = model.heads * model.head_dim, model.groups * model.head_dim
    shapes: list[tuple[str, tuple[int, ...] | None]] = [
        ("self_attn.q_proj.weight", (query, model.hidden)),
        ("self_attn.k_proj.weight", (key, model.hidden)),
        ("self_attn.v_proj.weight", (key, model.hidden)),
        ("self_attn.q_proj.bias", (query,) if model.qkv_bias else None),
        ("self_attn.k_proj.bias", (key,) if model.qkv_bias else None),
        ("self_attn.v_proj.bias", (key,) if model.qkv_bias else None),
        ("self_attn.o_proj.weight", (model.hidden, query)),
        ("self_attn.o_proj.bias", (model.hidden,) if model.proj_bias else None),
        ("self_attn.q_norm.weight", (model.head_dim,) if model.qk_norm else None),
        ("self_attn.k_norm.weight", (model.head_dim,) if model.qk_norm else None),
        ("input_layernorm.weight", (model.hidden,)),
        ("post_attention_layernorm.weight", (model.hidden,)),
        ("mlp.gate_proj.weight", (model.ffn, model.hidden)),
        ("mlp.up_proj.weight", (model.ffn, model.hidden)),
        ("mlp.gate_proj.bias", (model.ffn,) if model.mlp_bias else None),
        ("mlp.up_proj.bias", (model.ffn,) if model.mlp_bias else None),
        ("mlp.down_proj.weight", (model.hidden, model.ffn)),
        ("mlp.down_proj.bias", (model.hidden,) if model.mlp_bias else None),
    ]
    return [(name, shape) for name, shape in shapes if shape is not None]


def _architecture(config: Mapping[str, object]) -> str:
    named = config.get("architectures")
    first: object = None
    if isinstance(named, (list, tuple)) and named:
        first = named[0]  # pyright: ignore[reportUnknownVariableType]  # JSON: anything may be in the list
    if not isinstance(first, str) or first not in FAMILIES:
        raise UnsupportedModel(f"the Hugging Face config names {first!r}; these are served: {', '.join(FAMILIES)}")
    return first


def _size(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutMismatch(f"the Hugging Face config says {key}={value!r}: a positive number is expected")
    return value


def _number(config: Mapping[str, object], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise LayoutMismatch(f"the Hugging Face config says {key}={value!r}: a number is expected")
    return float(value)


def _dtype(config: Mapping[str, object]) -> str | None:
    """``dtype`` since transformers 5, ``torch_dtype`` before."""
    value = config.get("dtype", config.get("torch_dtype"))
    if value is None:
        return None
    if not isinstance(value, str) or value.removeprefix("torch.") not in ITEM_BYTES:
        raise UnsupportedModel(
            f"the Hugging Face config says dtype={value!r}: one of {', '.join(ITEM_BYTES)} can be served"
        )
    return value.removeprefix("torch.")
