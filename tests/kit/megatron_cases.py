"""Which tiny models the tests of the Megatron source export, and in which layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

VOCABULARY = 250
PADDED_VOCABULARY = 256


class Layout(NamedTuple):
    """How a model is spread over ranks; what is left over is data parallelism."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None


def hf_config(architecture: str = "Qwen3ForCausalLM", **changes: object) -> dict[str, Any]:
    """The Hugging Face config of a tiny model."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16 if architecture != "Qwen2ForCausalLM" else 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return config | changes


TOKENS = [[row * 120 + column * 10 for column in range(12)] for row in range(2)]


class Case(NamedTuple):
    """One model in one layout. Cases with equal `content` must export equal bytes."""

    world: int
    layout: Layout
    content: str = "qwen3"
    fused_norms: bool = False
    wrapped: bool = False
    dtype: str | None = None
    bucket_bytes: int = 1 << 14


CONTENTS: dict[str, dict[str, Any]] = {
    "qwen3": hf_config(),
    "qwen3-tied": hf_config(tie_word_embeddings=True),
    "qwen3-2-groups": hf_config(num_key_value_heads=2),
    "qwen2": hf_config("Qwen2ForCausalLM"),
    "llama": hf_config("LlamaForCausalLM"),
    "llama-biases": hf_config("LlamaForCausalLM", attention_bias=True, mlp_bias=True),
}

CASES: dict[str, Case] = {
    "replicas": Case(2, Layout()),
    "tp2": Case(2, Layout(tp=2)),
    "tp2-fused-norms": Case(2, Layout(tp=2), fused_norms=True),
    "tp2-wrapped": Case(2, Layout(tp=2), wrapped=True),
    "tp2-tiny-buckets": Case(2, Layout(tp=2), bucket_bytes=1),
    "tp2-one-bucket": Case(2, Layout(tp=2), bucket_bytes=1 << 30),
    "pp2": Case(2, Layout(pp=2)),
    "pp2-vpp2": Case(2, Layout(pp=2, vpp=2)),
    "tied-replicas": Case(2, Layout(), "qwen3-tied"),
    "tied-pp2": Case(2, Layout(pp=2), "qwen3-tied"),
    "2-groups-tp2": Case(2, Layout(tp=2), "qwen3-2-groups"),
    "qwen2-tp2": Case(2, Layout(tp=2), "qwen2"),
    "llama-tp2": Case(2, Layout(tp=2), "llama"),
    "llama-biases-tp2": Case(2, Layout(tp=2), "llama-biases"),
    "bfloat16-tp2": Case(2, Layout(tp=2), "llama", dtype="bfloat16"),
    "tp2-replicas": Case(4, Layout(tp=2)),
    "tp2-pp2": Case(4, Layout(tp=2, pp=2)),
    "tp4": Case(4, Layout(tp=4)),
    "tied-tp2-pp2-vpp2": Case(4, Layout(tp=2, pp=2, vpp=2), "qwen3-tied"),
    "2-groups-tp4": Case(4, Layout(tp=4), "qwen3-2-groups"),
    "llama-biases-tp2-pp2": Case(4, Layout(tp=2, pp=2), "llama-biases"),
}
