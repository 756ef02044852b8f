"""The supported families, each a table: the blocks of its layers, its switches, its names. Blocks are tables, too.

A row of a block names a Megatron-core parameter below its layer (``decoder.layers.N.``), with local and Transformer
Engine names side by side, and the Hugging Face tensors below theirs (``model.layers.N.``). Experts have ``{e}`` for
their index, or ``[e]`` behind the name of a tensor that holds all of them. Shapes are in names of sizes, which
hf_model.py reads from the config.

To add a family:

1. Find its architecture in ``config.json``, and a checkpoint's tensor names.
2. Add an entry of `FAMILIES`, from the blocks here; a block that no family has yet is a tuple of rules.
3. A size that the config has under another name goes into `keys`, a tensor that the checkpoint has under another name
   into `renames`. What a switch (`qkv_bias`, `qk_norm`, ..) is set to is True, False or the config key that decides.
4. Add a tiny config to tests/kit/tiny_families.py. The tests take it from there: every layout of it against the files
   that transformers writes, its logits on real ranks, and Megatron-Bridge where that is installed and knows the family.

CONTRIBUTING.md walks through the last one that was added.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .parameter_mapping import Fusion, MappingRule, MappingTarget, Norm, TensorCut

Rules = tuple[MappingRule, ...]


def _rule(
    trained: str,
    served: str,
    cut: TensorCut = TensorCut.NONE,
    fusion: Fusion = Fusion.PLAIN,
    *,
    when: str | None = None,
    norm: Norm = Norm.NOT,
    dtype: str | None = None,
) -> MappingRule:
    """A row: alternative names of the parameter, and its tensors, each as ``name: sizes of its axes``."""
    targets = (each.partition(": ") for each in served.split(", "))
    tensors = (
        MappingTarget(name.removesuffix("[e]"), tuple(sizes.split()), norm, dtype, stacked=name.endswith("[e]"))
        for name, _, sizes in targets
    )
    return MappingRule(tuple(trained.split()), tuple(tensors), cut, fusion, when)


def _norm(trained: str, served: str, cut: TensorCut = TensorCut.NONE, *, when: str | None = None) -> MappingRule:
    return _rule(trained, served, cut, when=when, norm=Norm.FAMILY)


_ROWS, _COLUMNS, _ROWS_OR_NONE = TensorCut.ROWS, TensorCut.COLUMNS, TensorCut.ROWS_OR_NONE

EMBEDDING: Final = _rule(
    "embedding.word_embeddings.weight", "embed_tokens.weight: vocab hidden", _ROWS, Fusion.VOCABULARY
)
FINAL_NORM: Final = _norm("decoder.final_layernorm.weight decoder.final_norm.weight", "norm.weight: hidden")
OUTPUT: Final = _rule("output_layer.weight", "lm_head.weight: vocab hidden", _ROWS, Fusion.VOCABULARY, when="not tied")
NORMS: Final[Rules] = (
    _norm(
        "input_layernorm.weight self_attention.linear_qkv.layer_norm_weight self_attention.in_proj.layer_norm_weight",
        "input_layernorm.weight: hidden",
    ),
    _norm("pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight: hidden"),
)
SANDWICH_NORMS: Final[Rules] = (
    _norm("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight: hidden"),
    _norm("post_mlp_layernorm.weight", "post_mlp_layernorm.weight: hidden"),
)
# Before and behind each block; behind it as a module of the layer, or of the linear that ends the block.
GEMMA_NORMS: Final[Rules] = (
    NORMS[0],
    _norm("pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight: hidden"),
    _norm(
        "post_self_attn_layernorm.weight self_attention.linear_proj.post_layernorm.weight",
        "post_attention_layernorm.weight: hidden",
    ),
    _norm(
        "post_mlp_layernorm.weight mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight: hidden"
    ),
)
# Behind each block only.
OLMO_NORMS: Final[Rules] = (
    _norm("post_self_attn_layernorm.weight", "post_attention_layernorm.weight: hidden"),
    _norm("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight: hidden"),
)


def _qkv(kind: str, query: str, key: str, fusion: Fusion, when: str | None = None) -> MappingRule:
    q, k, v = (f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return _rule(f"self_attention.linear_qkv.{kind}", f"{q}: {query}, {k}: {key}, {v}: {key}", _ROWS, fusion, when=when)


ATTENTION: Final[Rules] = (
    _qkv("weight", "query hidden", "key hidden", Fusion.QKV),
    _qkv("bias", "query", "key", Fusion.QKV, when="qkv_bias"),
    _rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight: hidden attended", _COLUMNS),
    _rule("self_attention.linear_proj.bias", "self_attn.o_proj.bias: hidden", when="proj_bias"),
)
HEAD_NORMS: Final[Rules] = (
    _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight: head_dim", when="qk_norm"),
    _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight: head_dim", when="qk_norm"),
)
# Over all heads at once; a rank holds the part of its own heads.
WIDE_HEAD_NORMS: Final[Rules] = (
    _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight: query", _ROWS_OR_NONE),
    _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight: key", _ROWS_OR_NONE),
)
GATED_ATTENTION: Final[Rules] = (
    _qkv("weight", "gated_query hidden", "key hidden", Fusion.GATED_QKV),
    _rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight: hidden attended", _COLUMNS),
)
LATENT_ATTENTION: Final[Rules] = (
    _rule(
        "self_attention.linear_q_proj.weight", "self_attn.q_proj.weight: latent_query hidden", _ROWS, when="not q_lora"
    ),
    _rule(
        "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_proj.weight: q_lora hidden",
        _ROWS_OR_NONE,
        when="q_lora",
    ),
    _norm(
        "self_attention.q_layernorm.weight self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attn.q_a_layernorm.weight: q_lora",
        when="q_lora",
    ),
    _rule(
        "self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight: latent_query q_lora", _ROWS, when="q_lora"
    ),
    _rule(
        "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight: latent_kv hidden",
        _ROWS_OR_NONE,
    ),
    _norm(
        "self_attention.kv_layernorm.weight self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attn.kv_a_layernorm.weight: kv_lora",
    ),
    _rule("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight: keys_and_values kv_lora", _ROWS),
    _rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight: hidden latent_attended", _COLUMNS),
)
_INDEXER: Final = "self_attention.core_attention.indexer"
SPARSE_INDEXER: Final[Rules] = (
    _rule(f"{_INDEXER}.linear_wq_b.weight", "self_attn.indexer.wq_b.weight: indexer_query q_lora"),
    _rule(f"{_INDEXER}.linear_wk.weight", "self_attn.indexer.wk.weight: indexer_dim hidden"),
    _norm(f"{_INDEXER}.k_norm.weight", "self_attn.indexer.k_norm.weight: indexer_dim"),
    _rule(f"{_INDEXER}.k_norm.bias", "self_attn.indexer.k_norm.bias: indexer_dim"),
    _rule(f"{_INDEXER}.linear_weights_proj.weight", "self_attn.indexer.weights_proj.weight: indexer_heads hidden"),
)


def _delta_rest(kept: str | None = None) -> Rules:
    """A gated delta net behind its first projection; `kept` is the dtype of decay and norm, if it is their own."""
    return (
        _rule(
            "self_attention.conv1d.weight",
            "linear_attn.conv1d.weight: delta_channels one delta_kernel",
            _ROWS,
            Fusion.DELTA_CONVOLUTION,
        ),
        _rule("self_attention.A_log", "linear_attn.A_log: delta_values", _ROWS, dtype=kept),
        _rule("self_attention.dt_bias", "linear_attn.dt_bias: delta_values", _ROWS),
        _rule("self_attention.out_norm.weight", "linear_attn.norm.weight: delta_value_dim", norm=Norm.ONE, dtype=kept),
        _rule("self_attention.out_proj.weight", "linear_attn.out_proj.weight: hidden delta_attended", _COLUMNS),
    )


DELTA_NET: Final[Rules] = (
    _rule(
        "self_attention.in_proj.weight",
        "linear_attn.in_proj_qkvz.weight: delta_qkvz hidden, linear_attn.in_proj_ba.weight: delta_ba hidden",
        _ROWS,
        Fusion.DELTA_IN,
    ),
    *_delta_rest(),
)
PLAIN_DELTA_NET: Final[Rules] = (
    _rule(
        "self_attention.in_proj.weight",
        "linear_attn.in_proj_qkv.weight: delta_channels hidden, linear_attn.in_proj_z.weight: delta_attended hidden, "
        "linear_attn.in_proj_b.weight: delta_values hidden, linear_attn.in_proj_a.weight: delta_values hidden",
        _ROWS,
        Fusion.DELTA_IN_PLAIN,
    ),
    *_delta_rest("float32"),
)
"""Qwen3.5's, whose releases keep decay and norm in single precision."""


def _gated(trained: str, served: str, size: str, when: str | None = None) -> Rules:
    """A gated MLP: two projections fused in, one out."""
    gate, up, down = (f"{served}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        _rule(
            f"{trained}.linear_fc1.weight",
            f"{gate}: {size} hidden, {up}: {size} hidden",
            _ROWS,
            Fusion.GATED,
            when=when,
        ),
        _rule(f"{trained}.linear_fc2.weight", f"{down}: hidden {size}", _COLUMNS, when=when),
    )


MLP: Final[Rules] = (
    *_gated("mlp", "mlp", "ffn"),
    _rule(
        "mlp.linear_fc1.bias", "mlp.gate_proj.bias: ffn, mlp.up_proj.bias: ffn", _ROWS, Fusion.GATED, when="mlp_bias"
    ),
    _rule("mlp.linear_fc2.bias", "mlp.down_proj.bias: hidden", when="mlp_bias"),
)
STACKED_MLP: Final[Rules] = (
    _rule("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight: gate_and_up hidden", _ROWS, Fusion.GATED),
    _rule("mlp.linear_fc2.weight", "mlp.down_proj.weight: hidden ffn", _COLUMNS),
)
ROUTED_EXPERTS: Final[Rules] = (
    _rule("mlp.router.weight", "mlp.gate.weight: experts hidden"),
    *_gated("mlp.experts", "mlp.experts.{e}", "expert_ffn"),
)
"""Experts go by one name, sequential or grouped; `match_parameter` takes their indexes out of their names."""
STACKABLE_EXPERTS: Final[Rules] = (
    _rule("mlp.router.weight", "mlp.gate.weight: experts hidden"),
    *_gated("mlp.experts", "mlp.experts.{e}", "expert_ffn", "not stacked"),
    _rule(
        "mlp.experts.linear_fc1.weight",
        "mlp.experts.gate_up_proj[e]: expert_gate_and_up hidden",
        _ROWS,
        Fusion.GATED,
        when="stacked",
    ),
    _rule("mlp.experts.linear_fc2.weight", "mlp.experts.down_proj[e]: hidden expert_ffn", _COLUMNS, when="stacked"),
)
"""One by one, or all experts of a layer in one tensor: checkpoints of one architecture do either."""
ROUTER_BIAS: Final[Rules] = (
    # Kept in single precision by Megatron and by engines, whatever the model is served in.
    _rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias: experts", dtype="float32"),
)
SHARED_EXPERTS: Final[Rules] = _gated("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", "shared_experts")
GATED_SHARED_EXPERT: Final[Rules] = (
    *_gated("mlp.shared_experts", "mlp.shared_expert", "shared_ffn", "shared_experts"),
    _rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight: one hidden", when="shared_experts"),
)


class Prediction(msgspec.Struct, frozen=True):
    """How a family's checkpoints name a multi-token prediction layer."""

    layer: str
    """Prefix of its transformer layer: ``{i}`` counts these layers from 0, ``{next}`` from the model's last."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    swapped: bool = False
    """The projection takes the hidden state first, and Megatron's the embedding."""


UNSAID: Final = frozenset({"qkv_bias"})
"""Keys of switches that are on where a config does not have them; others are off."""


class Family(msgspec.Struct, frozen=True):
    """The properties that distinguish one family of decoders."""

    attention: Rules = ATTENTION
    linear_attention: Rules = ()
    mlp: Rules = MLP
    experts: Rules = ()
    """The MLP of layers with experts; none if there are no such layers."""
    norms: Rules = NORMS
    switches: dict[str, bool | str] = {}
    """True, False, or the key of the config that decides; see `UNSAID`."""
    keys: dict[str, str] = {}
    """Size -> config key, where it is not the usual one."""
    renames: tuple[tuple[str, str], ...] = ()
    """Replacements in names below the layer, from the blocks' names to the checkpoints'; in order."""
    prediction: Prediction | None = None
    body: str = "model."
    """Prefix of all but the output layer."""
    head: str = ""
    """Prefix of the output layer."""
    tied: bool = False
    """Embedding and output layer are one where the config does not say (``tie_word_embeddings``)."""
    section: str | None = None
    """Key of the language model's config in that of a multimodal model; keys of several levels are parted by dots."""
    megatron_prefix: str = ""
    """Prefix of Megatron's language model in a multimodal model."""
    left_out: tuple[str, ...] = ()
    """Prefixes of Megatron parameters outside the language model, which are not served."""
    zero_centred: bool = False
    """Norm weights are centered at zero in checkpoints."""
    activation: str = "silu"
    """Activation of the MLPs, by its name in config_checks.py."""
    rotates_pairs: bool = False
    """Rotary embeddings rotate adjacent pairs, not halves."""
    variant: str | None = None
    """Megatron's name of an experimental attention; None for others."""
    stacked: bool = False
    """Released checkpoints hold a layer's experts in one tensor, unless they are quantized; see `STACKABLE_EXPERTS`."""
    scores: str = "softmax"
    """Score function of the router, where the config names none (``scoring_func``)."""


_BIASED: Final = {"qkv_bias": "attention_bias", "proj_bias": "attention_bias"}

_NEXT_LAYER: Final = Prediction(
    layer="model.layers.{next}.",
    embedding_norm="model.layers.{next}.enorm.weight",
    hidden_norm="model.layers.{next}.hnorm.weight",
    projection="model.layers.{next}.eh_proj.weight",
    norm="model.layers.{next}.shared_head.norm.weight",
)

_DEEPSEEK_V3: Final = Family(
    attention=LATENT_ATTENTION,
    experts=(*ROUTED_EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS),
    prediction=_NEXT_LAYER,
    scores="sigmoid",
)

_GEMMA3: Final = Family(
    attention=(*ATTENTION, *HEAD_NORMS),
    norms=GEMMA_NORMS,
    switches={**_BIASED, "qk_norm": True},
    tied=True,
    zero_centred=True,
    activation="gelu_tanh",
)

_OLMO2: Final = Family(
    attention=(*ATTENTION, *WIDE_HEAD_NORMS), norms=OLMO_NORMS, switches={**_BIASED, "qk_norm": True}
)
_SPARSE_ATTENTION: Final = msgspec.structs.replace(
    _DEEPSEEK_V3, attention=(*LATENT_ATTENTION, *SPARSE_INDEXER), variant="dsa"
)
_KIMI_K25: Final = msgspec.structs.replace(
    _DEEPSEEK_V3,
    body="language_model.model.",
    head="language_model.",
    section="text_config",
    megatron_prefix="language_model.",
    left_out=("vision_tower.", "mm_projector."),
    prediction=None,
)
_QWEN3_NEXT: Final = Family(
    attention=(*GATED_ATTENTION, *HEAD_NORMS),
    linear_attention=DELTA_NET,
    experts=(*ROUTED_EXPERTS, *GATED_SHARED_EXPERT),
    switches={"qk_norm": True, "output_gate": True, "shared_expert_gate": True},
    prediction=Prediction(
        layer="mtp.layers.{i}.",
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc.weight",
        norm="mtp.norm.weight",
    ),
    zero_centred=True,
    variant="gated_delta_net",
)
_QWEN3_5_MOE: Final = msgspec.structs.replace(
    _QWEN3_NEXT, linear_attention=PLAIN_DELTA_NET, experts=(*STACKABLE_EXPERTS, *GATED_SHARED_EXPERT)
)
_QWEN3_5: Final = msgspec.structs.replace(_QWEN3_5_MOE, experts=(), switches={"qk_norm": True, "output_gate": True})


def _of_several_inputs(family: Family, *, stacked: bool = False) -> Family:
    """The family as the language model of a multimodal one, as Qwen's are built."""
    return msgspec.structs.replace(
        family,
        body="model.language_model.",
        section="text_config",
        megatron_prefix="language_model.",
        left_out=("vision_model.",),
        stacked=stacked,
    )


FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(switches={**_BIASED, "mlp_bias": "mlp_bias"}),
    "Qwen2ForCausalLM": Family(switches={"qkv_bias": True}),
    "Qwen3ForCausalLM": Family(attention=(*ATTENTION, *HEAD_NORMS), switches={**_BIASED, "qk_norm": True}),
    "Qwen2MoeForCausalLM": Family(
        experts=(*ROUTED_EXPERTS, *GATED_SHARED_EXPERT),
        switches={"qkv_bias": "qkv_bias", "shared_expert_gate": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        attention=(*ATTENTION, *HEAD_NORMS), experts=ROUTED_EXPERTS, switches={**_BIASED, "qk_norm": True}
    ),
    "Glm4ForCausalLM": Family(
        mlp=STACKED_MLP,
        norms=(*NORMS, *SANDWICH_NORMS),
        switches={"qkv_bias": "attention_bias"},
        rotates_pairs=True,
    ),
    "Glm4MoeForCausalLM": Family(
        attention=(*ATTENTION, *HEAD_NORMS),
        experts=(*ROUTED_EXPERTS, *ROUTER_BIAS, *SHARED_EXPERTS),
        switches={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        prediction=_NEXT_LAYER,
        scores="sigmoid",
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,  # Kimi-K2 names this architecture, too
    "KimiK2ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _SPARSE_ATTENTION,
    "GlmMoeDsaForCausalLM": _SPARSE_ATTENTION,
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,  # as transformers calls it; the first is of the remote code
    "MiMoForCausalLM": Family(
        switches={"qkv_bias": True},
        prediction=Prediction(
            layer="model.mtp_layers.{i}.",
            embedding_norm="model.mtp_layers.{i}.token_layernorm.weight",
            hidden_norm="model.mtp_layers.{i}.hidden_layernorm.weight",
            projection="model.mtp_layers.{i}.input_proj.weight",
            norm="model.mtp_layers.{i}.final_layernorm.weight",
            swapped=True,
        ),
    ),
    "MiniMaxM2ForCausalLM": Family(
        attention=(*ATTENTION, *WIDE_HEAD_NORMS),
        experts=(*ROUTED_EXPERTS, *ROUTER_BIAS),
        switches={"qk_norm": True},
        scores="sigmoid",
        keys={"expert_ffn": "intermediate_size"},
        renames=(
            ("mlp.gate.e_score", "block_sparse_moe.e_score"),
            ("mlp.", "block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".down_proj.", ".w2."),
            (".up_proj.", ".w3."),
        ),
    ),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _of_several_inputs(_QWEN3_5),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _of_several_inputs(_QWEN3_5_MOE, stacked=True),
    "Qwen3OmniMoeForConditionalGeneration": msgspec.structs.replace(
        _of_several_inputs(
            Family(attention=(*ATTENTION, *HEAD_NORMS), experts=ROUTED_EXPERTS, switches={**_BIASED, "qk_norm": True})
        ),
        body="thinker.model.",
        head="thinker.",
        section="thinker_config.text_config",
        megatron_prefix="thinker.language_model.",
        left_out=("thinker.visual.", "thinker.audio_model.", "talker.", "code2wav."),
    ),
    "Qwen3VLForConditionalGeneration": Family(
        attention=(*ATTENTION, *HEAD_NORMS),
        switches={**_BIASED, "qk_norm": True},
        body="model.language_model.",
        section="text_config",
        megatron_prefix="language_model.",
        left_out=("vision_model.",),
    ),
    "MistralForCausalLM": Family(),
    "MinistralForCausalLM": Family(),
    "Ministral3ForCausalLM": Family(),
    "Mistral3ForConditionalGeneration": Family(
        body="language_model.model.",
        head="language_model.",
        section="text_config",
        megatron_prefix="language_model.",
        left_out=("vision_tower.", "multi_modal_projector."),
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2,
    "OlmoeForCausalLM": Family(
        attention=(*ATTENTION, *WIDE_HEAD_NORMS),
        experts=ROUTED_EXPERTS,
        switches={**_BIASED, "qk_norm": True},
        keys={"expert_ffn": "intermediate_size"},
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": msgspec.structs.replace(
        _GEMMA3,
        body="language_model.model.",
        head="language_model.",
        section="text_config",
        megatron_prefix="language_model.",
        left_out=("vision_tower.", "multi_modal_projector."),
    ),
}
