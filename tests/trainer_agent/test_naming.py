"""What a Hugging Face config means, and which parameter becomes which tensor, against lists written by hand."""

import pytest

from weightbus.dataplane.manifest import TensorSpec
from weightbus.trainer_agent.naming import (
    FAMILIES,
    LAYER_RULES,
    MODEL_RULES,
    Dense,
    advice_for,
    rule_for,
    served_tensors,
)
from weightbus.trainer_agent.source import LayoutMismatch, UnsupportedModel

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 10,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def names(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in served_tensors(Dense.parse(config), "bfloat16")}


def test_a_qwen3_layer_has_the_names_and_shapes_of_its_checkpoint() -> None:
    """Order and shapes are those of a published Qwen3 checkpoint: embedding, layers, norm, head."""
    assert served_tensors(Dense.parse(QWEN3), "bfloat16") == tuple(
        TensorSpec(name, "bfloat16", shape)
        for name, shape in (
            ("model.embed_tokens.weight", (10, 8)),
            ("model.layers.0.self_attn.q_proj.weight", (12, 8)),
            ("model.layers.0.self_attn.k_proj.weight", (6, 8)),
            ("model.layers.0.self_attn.v_proj.weight", (6, 8)),
            ("model.layers.0.self_attn.o_proj.weight", (8, 12)),
            ("model.layers.0.self_attn.q_norm.weight", (3,)),
            ("model.layers.0.self_attn.k_norm.weight", (3,)),
            ("model.layers.0.input_layernorm.weight", (8,)),
            ("model.layers.0.post_attention_layernorm.weight", (8,)),
            ("model.layers.0.mlp.gate_proj.weight", (12, 8)),
            ("model.layers.0.mlp.up_proj.weight", (12, 8)),
            ("model.layers.0.mlp.down_proj.weight", (8, 12)),
            ("model.norm.weight", (8,)),
            ("lm_head.weight", (10, 8)),
        )
    )


def test_a_tied_model_has_no_head() -> None:
    """Tied embeddings travel once, as checkpoints hold them."""
    assert "lm_head.weight" not in names(QWEN3 | {"tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("architecture", "switches", "biased"),
    [
        ("LlamaForCausalLM", {}, set()),
        ("LlamaForCausalLM", {"attention_bias": True}, {"q", "k", "v", "o"}),
        ("LlamaForCausalLM", {"mlp_bias": True}, {"gate", "up", "down"}),
        ("Qwen2ForCausalLM", {}, {"q", "k", "v"}),
        ("Qwen3ForCausalLM", {"attention_bias": True}, {"q", "k", "v", "o"}),
    ],
)
def test_biases_are_the_familys(architecture: str, switches: dict[str, bool], biased: set[str]) -> None:
    """Each family has the biases that its modelling code in transformers has."""
    found = names(QWEN3 | switches | {"architectures": [architecture]})
    assert {name.split(".")[-2].removesuffix("_proj") for name in found if name.endswith(".bias")} == biased


def test_only_qwen3_has_query_and_key_norms() -> None:
    """The others would not know what to do with them."""
    with_norms = {
        family for family in FAMILIES if any("q_norm" in name for name in names(QWEN3 | {"architectures": [family]}))
    }
    assert with_norms == {"Qwen3ForCausalLM"}


def test_sizes_that_a_config_leaves_out_follow_from_the_others() -> None:
    """Old Llama configs name neither head_dim nor the number of key-value heads."""
    config = {key: value for key, value in QWEN3.items() if key not in {"head_dim", "num_key_value_heads"}}
    model = Dense.parse(config)
    assert (model.head_dim, model.groups) == (2, 4)


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedModel, "'GPT2LMHeadModel'"),
        ({"architectures": []}, UnsupportedModel, "None"),
        ({"hidden_size": None}, LayoutMismatch, "hidden_size=None"),
        ({"hidden_size": "8"}, LayoutMismatch, "hidden_size='8'"),
        ({"num_hidden_layers": True}, LayoutMismatch, "num_hidden_layers=True"),
        ({"vocab_size": 0}, LayoutMismatch, "vocab_size=0"),
        ({"rms_norm_eps": "small"}, LayoutMismatch, "rms_norm_eps='small'"),
        ({"dtype": "float4"}, UnsupportedModel, "dtype='float4'"),
        ({"num_key_value_heads": 3}, LayoutMismatch, "num_key_value_heads=3"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(change: dict[str, object], error: type[Exception], part: str) -> None:
    """What is missing or strange is named; nothing is guessed."""
    with pytest.raises(error, match=part):
        Dense.parse(QWEN3 | change)


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_the_dtype_is_read_under_either_name(change: dict[str, object], dtype: str | None) -> None:
    """Transformers 5 writes ``dtype``, older versions ``torch_dtype``."""
    assert Dense.parse(QWEN3 | change).dtype == dtype


def test_rules_know_a_parameters_layer() -> None:
    """The served prefix carries the global index of the layer."""
    found = rule_for("decoder.layers.17.mlp.linear_fc2.weight")
    assert found == (LAYER_RULES["mlp.linear_fc2.weight"], "model.layers.17.")
    assert rule_for("output_layer.weight") == (MODEL_RULES["output_layer.weight"], "")


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.experts.linear_fc1.weight0",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.input_layernorm.bias",
        "mtp.layers.0.eh_proj.weight",
        "decoder.layers.x.mlp.linear_fc2.weight",
        "mlp.linear_fc2.weight",
        "module.output_layer.weight",
    ],
)
def test_what_no_rule_names_has_no_rule(name: str) -> None:
    """Names are matched whole: nothing is served under a name that merely resembles a known one."""
    assert rule_for(name) is None


def test_advice_fits_the_parameter() -> None:
    """Who trains experts, adapters or LayerNorms reads what to do about them."""
    assert "experts" in advice_for("decoder.layers.0.mlp.experts.linear_fc1.weight0")
    assert "mtp_num_layers=None" in advice_for("mtp.layers.0.eh_proj.weight")
    assert "merge" in advice_for("decoder.layers.0.mlp.linear_fc1.adapter.weight")
    assert "RMSNorm" in advice_for("decoder.final_layernorm.bias")
    assert "Qwen3ForCausalLM" in advice_for("vision.weight")


def test_every_tensor_of_every_family_comes_from_a_rule() -> None:
    """No family promises a tensor that no Megatron parameter could fill."""
    filled = {served for rule in LAYER_RULES.values() for served in rule.served}
    filled_once = {served for rule in MODEL_RULES.values() for served in rule.served}
    for family in FAMILIES:
        for name in names(QWEN3 | {"architectures": [family], "attention_bias": True, "mlp_bias": True}):
            assert name in filled_once or name.removeprefix("model.layers.0.") in filled
