"""The supported families, each a table: the blocks of its layers, its switches, its names.

To add one:

1. Find its architecture in ``config.json``, and a checkpoint's tensor names.
2. Add an entry here. Blocks come from layer_blocks.py; a block that no family has yet is a tuple of rules there.
3. A size that the config has under another name goes into `keys`, a tensor that the checkpoint has under another name
   into `renames`. What a switch (`qkv_bias`, `qk_norm`, ..) is set to is True, False or the config key that decides.
4. Add a tiny config to tests/kit/tiny_families.py. The tests take it from there: every layout of it against the files
   that transformers writes, its logits on real ranks, and Megatron-Bridge where that is installed and knows the family.

CONTRIBUTING.md walks through the last one that was added.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .layer_blocks import (
    ATTENTION,
    DELTA_NET,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    HEAD_NORMS,
    LATENT_ATTENTION,
    MLP,
    NORMS,
    ROUTED_EXPERTS,
    ROUTER_BIAS,
    SANDWICH_NORMS,
    SHARED_EXPERTS,
    SPARSE_INDEXER,
    STACKED_MLP,
    WIDE_HEAD_NORMS,
    Rules,
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


class Family(msgspec.Struct, frozen=True):
    """The properties that distinguish one family of decoders."""

    attention: Rules = ATTENTION
    linear_attention: Rules = ()
    mlp: Rules = MLP
    experts: Rules = ()
    """The MLP of layers with experts; none if there are no such layers."""
    norms: Rules = NORMS
    switches: dict[str, bool | str] = {}
    keys: dict[str, str] = {}
    """Size -> config key, where it is not the usual one."""
    renames: tuple[tuple[str, str], ...] = ()
    """Replacements in names below the layer, from the blocks' names to the checkpoints'; in order."""
    prediction: Prediction | None = None
    body: str = "model."
    """Prefix of all but the output layer."""
    section: str | None = None
    """Key of the language model's config in that of a multimodal model."""
    megatron_prefix: str = ""
    """Prefix of Megatron's language model in a multimodal model."""
    left_out: tuple[str, ...] = ()
    """Prefixes of Megatron parameters outside the language model, which are not served."""
    zero_centred: bool = False
    """Norm weights are centered at zero in checkpoints."""
    rotates_pairs: bool = False
    """Rotary embeddings rotate adjacent pairs, not halves."""
    variant: str | None = None
    """Megatron's name of an experimental attention; None for others."""
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

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(switches={**_BIASED, "mlp_bias": "mlp_bias"}),
    "Qwen2ForCausalLM": Family(switches={"qkv_bias": True}),
    "Qwen3ForCausalLM": Family(attention=(*ATTENTION, *HEAD_NORMS), switches={**_BIASED, "qk_norm": True}),
    "Qwen2MoeForCausalLM": Family(
        experts=(*ROUTED_EXPERTS, *GATED_SHARED_EXPERT), switches={"qkv_bias": True, "shared_expert_gate": True}
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
    "GlmMoeDsaForCausalLM": msgspec.structs.replace(
        _DEEPSEEK_V3, attention=(*LATENT_ATTENTION, *SPARSE_INDEXER), variant="dsa"
    ),
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
    "Qwen3NextForCausalLM": Family(
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
    ),
    "Qwen3VLForConditionalGeneration": Family(
        attention=(*ATTENTION, *HEAD_NORMS),
        switches={**_BIASED, "qk_norm": True},
        body="model.language_model.",
        section="text_config",
        megatron_prefix="language_model.",
        left_out=("vision_model.",),
    ),
}
