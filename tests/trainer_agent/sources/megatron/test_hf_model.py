"""What a Hugging Face config means, against lists written by hand; real checkpoints: test_model_families.py."""

import pytest

from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.trainer_agent.source import LayoutMismatch, UnsupportedModel
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors

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
    return {spec.name: spec.shape for spec in hf_tensors(HFModel.parse(config), "bfloat16")}


def test_a_qwen3_layer_has_the_names_and_shapes_of_its_checkpoint() -> None:
    """Order and shapes are those of a published Qwen3 checkpoint: embedding, layers, norm, head."""
    assert hf_tensors(HFModel.parse(QWEN3), "bfloat16") == tuple(
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


def test_sizes_that_a_config_leaves_out_follow_from_the_others() -> None:
    """Old Llama configs name neither head_dim nor the number of key-value heads."""
    config = {key: value for key, value in QWEN3.items() if key not in {"head_dim", "num_key_value_heads"}}
    model = HFModel.parse(config)
    assert (model.sizes["head_dim"], model.sizes["groups"]) == (2, 4)


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
        ({"intermediate_size": None}, LayoutMismatch, "intermediate_size=None"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(change: dict[str, object], error: type[Exception], part: str) -> None:
    """What is missing or strange is named; nothing is guessed."""
    with pytest.raises(error, match=part):
        HFModel.parse(QWEN3 | change)


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
    assert HFModel.parse(QWEN3 | change).dtype == dtype


SPARSE = {"num_experts": 2, "moe_intermediate_size": 4, "architectures": ["Qwen3MoeForCausalLM"]}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 1,
    "v_head_dim": 2,
    "n_routed_experts": 2,
    "moe_intermediate_size": 4,
}


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        (SPARSE, [True] * 4),
        (SPARSE | {"mlp_only_layers": [1, 2]}, [True, False, False, True]),
        (SPARSE | {"decoder_sparse_step": 2}, [False, True, False, True]),
        (DEEPSEEK | {"first_k_dense_replace": 3}, [False, False, False, True]),
        (DEEPSEEK | {"moe_layer_freq": [0, 1, 0, 1]}, [False, True, False, True]),
        ({}, [False] * 4),
    ],
)
def test_a_config_says_which_layers_have_experts(change: dict[str, object], sparse: list[bool]) -> None:
    """Each family has its own field for it."""
    model = HFModel.parse(QWEN3 | change | {"num_hidden_layers": 4})
    assert [layer.experts for layer in model.layers] == sparse


@pytest.mark.parametrize("unused", ["rms_norm_eps", "intermediate_size", "head_dim", "torch_dtype"])
def test_what_decides_no_name_and_no_shape_need_not_be_said(unused: str) -> None:
    """Some configs leave out what their family takes for granted, or the MLP of layers that they do not have."""
    whole = QWEN3 | SPARSE | {"hidden_size": 12}
    assert names({key: value for key, value in whole.items() if key != unused}) == names(whole)


def test_a_dense_layer_needs_the_size_of_its_mlp() -> None:
    """Also where all others have experts."""
    with pytest.raises(LayoutMismatch, match="intermediate_size=None"):
        HFModel.parse(QWEN3 | SPARSE | {"num_hidden_layers": 2, "mlp_only_layers": [0], "intermediate_size": None})


def test_experts_follow_each_other_whole() -> None:
    """Gate, up and down of one expert, then of the next: what one rank holds lies together in a bucket."""
    found = [name for name in names(QWEN3 | SPARSE) if ".experts." in name]
    assert [name.removeprefix("model.layers.0.mlp.experts.") for name in found] == [
        f"{expert}.{part}_proj.weight" for expert in range(2) for part in ("gate", "up", "down")
    ]


def test_a_prediction_layer_is_numbered_after_the_last() -> None:
    """As DeepSeek's checkpoints number it, with its projection and norms beside a layer like the last."""
    found = names(QWEN3 | DEEPSEEK | {"num_nextn_predict_layers": 1})
    assert found.keys() >= {
        "model.layers.1.enorm.weight",
        "model.layers.1.eh_proj.weight",
        "model.layers.1.shared_head.norm.weight",
        "model.layers.1.mlp.experts.1.down_proj.weight",
    }
    assert found["model.layers.1.eh_proj.weight"] == (8, 16)


def test_router_biases_keep_their_precision() -> None:
    """Megatron and engines keep them in single precision, whatever else is served in."""
    model = HFModel.parse(QWEN3 | DEEPSEEK)
    odd = {spec.name: spec.dtype for spec in hf_tensors(model, "bfloat16") if spec.dtype != "bfloat16"}
    assert odd == {"model.layers.0.mlp.gate.e_score_correction_bias": "float32"}


def test_the_text_part_of_a_model_of_several_inputs() -> None:
    """Qwen3-VL: sizes are in a section, names below a prefix, and whether embeddings are tied is said outside."""
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": QWEN3, "tie_word_embeddings": True}
    found = names(config)
    assert "model.language_model.layers.0.self_attn.q_norm.weight" in found
    assert "lm_head.weight" not in found
    with pytest.raises(LayoutMismatch, match="text_config"):
        HFModel.parse({"architectures": ["Qwen3VLForConditionalGeneration"]})
