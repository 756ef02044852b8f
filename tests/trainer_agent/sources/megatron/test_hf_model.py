"""A Hugging Face config and Megatron's names, against lists by hand; real checkpoints: test_model_families.py."""

import pytest

from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.trainer_agent.source import LayoutMismatch, UnsupportedModel
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, advice_for, hf_tensors, match_parameter
from weightbus.trainer_agent.sources.megatron.model_families import FAMILIES

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

MOE = {"num_experts": 2, "moe_intermediate_size": 4}


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
        ("Qwen2MoeForCausalLM", MOE, {"q", "k", "v"}),
        ("Qwen2MoeForCausalLM", MOE | {"qkv_bias": False}, set()),
    ],
)
def test_biases_are_the_familys(architecture: str, switches: dict[str, object], biased: set[str]) -> None:
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


SPARSE = {**MOE, "architectures": ["Qwen3MoeForCausalLM"]}
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
        (
            DEEPSEEK | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "first_k_dense_replace": 1},
            [False, True, False, True],
        ),
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


QWEN3_5 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": QWEN3
    | SPARSE
    | {
        "full_attention_interval": 1,
        "shared_expert_intermediate_size": 4,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 2,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
    },
}
STACKED = {"gate_up_proj": (2, 8, 8), "down_proj": (2, 8, 4)}
ONE_BY_ONE = {f"{expert}.{part}_proj.weight" for expert in range(2) for part in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("change", "stored", "decoder", "prediction"),
    [
        ({}, (), STACKED.keys(), ONE_BY_ONE),
        ({"quantization_config": {"quant_method": "fp8"}}, (), ONE_BY_ONE, ONE_BY_ONE),
        ({}, ("model.norm.weight",), ONE_BY_ONE, ONE_BY_ONE),
        (
            {},
            ("model.language_model.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.gate_up_proj"),
            STACKED.keys(),
            STACKED.keys(),
        ),
        ({}, ("mtp.layers.0.mlp.experts.gate_up_proj",), ONE_BY_ONE, STACKED.keys()),
    ],
)
def test_the_files_decide_whether_experts_are_one_tensor(
    change: dict[str, object], stored: tuple[str, ...], decoder: set[str], prediction: set[str]
) -> None:
    """Checkpoints of one architecture do either, in the decoder and in the prediction layer.

    Without files they are taken to be as released: those in FP8 have experts one by one.
    """
    found = {spec.name: spec.shape for spec in hf_tensors(HFModel.parse(QWEN3_5 | change, stored), "bfloat16")}
    for layer, expected in (("model.language_model.layers.0", decoder), ("mtp.layers.0", prediction)):
        prefix = f"{layer}.mlp.experts."
        experts = {name.removeprefix(prefix): shape for name, shape in found.items() if name.startswith(prefix)}
        assert experts.keys() == set(expected)
        assert all(experts[name] == shape for name, shape in STACKED.items() if name in experts)


CONFIG = {
    "num_hidden_layers": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "vocab_size": 10,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 4,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
GLM = HFModel.parse(CONFIG | {"architectures": ["Glm4MoeForCausalLM"]})
LLAMA = HFModel.parse(CONFIG | {"architectures": ["LlamaForCausalLM"]})
DOWN = "mlp.experts.{e}.down_proj.weight"


def place(name: str, model: HFModel = GLM) -> tuple[str, int | None] | None:
    """The first served tensor and the expert; on a stage that begins at layer 16, with experts from 4."""
    found = match_parameter(name, model, lambda layer: 16 + layer, lambda expert: 4 + expert, lambda index: index)
    return None if found is None else (found.prefix + found.rule.targets[0].name, found.expert)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.1.self_attention.linear_proj.weight", ("model.layers.17.self_attn.o_proj.weight", None)),
        ("decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight", (f"model.layers.17.{DOWN}", 6)),
        ("decoder.layers.1.mlp.experts.linear_fc2.weight2", (f"model.layers.17.{DOWN}", 6)),
        ("decoder.layers.1.mlp.router.expert_bias", ("model.layers.17.mlp.gate.e_score_correction_bias", None)),
        ("mtp.layers.0.enorm.weight", ("model.layers.20.enorm.weight", None)),
        ("mtp.layers.0.mtp_model_layer.mlp.router.weight", ("model.layers.20.mlp.gate.weight", None)),
        ("mtp.layers.0.transformer_layer.mlp.router.weight", ("model.layers.20.mlp.gate.weight", None)),
        ("decoder.final_layernorm.weight", ("model.norm.weight", None)),
        ("decoder.final_norm.weight", ("model.norm.weight", None)),
        ("output_layer.weight", ("lm_head.weight", None)),
    ],
)
def test_names_are_made_global(name: str, expected: tuple[str, int | None]) -> None:
    """Layers and experts are counted from the rank's first; both generations of prediction layers are known."""
    assert place(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.4.mlp.router.weight",  # a layer that the served model does not have
        "decoder.layers.1.mlp.linear_fc1.weight",  # a dense MLP where there are experts
        "decoder.layers.1.mlp.experts.linear_fc1.weight",
        "decoder.layers.1.mlp.experts.weight1",
        "decoder.layers.1.mlp.experts.linear_fc1.bias0",
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight0",
        "decoder.layers.1.input_layernorm.bias",
        "decoder.layers.x.mlp.router.weight",
        "mtp.layers.1.eh_proj.weight",
        "mtp.layers.0.mtp_model_layer.layers.0.mlp.router.weight",
        "mlp.router.weight",
        "module.output_layer.weight",
    ],
)
def test_what_no_rule_names_has_no_place(name: str) -> None:
    """Names are matched whole: nothing is served under a name that merely resembles a known one."""
    assert place(name) is None


def test_a_dense_model_has_no_experts() -> None:
    """What a family does not have is not found because another has it."""
    assert place("decoder.layers.1.mlp.router.weight", LLAMA) is None
    assert place("decoder.layers.1.self_attention.q_layernorm.weight", LLAMA) is None
    assert place("mtp.layers.0.eh_proj.weight", LLAMA) is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("decoder.layers.0.mlp.experts.weight1", "grouped Transformer Engine linears or sequentially"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", "moe_single_grouped_weight=False"),
        ("mtp.layers.0.mtp_model_layer.layers.0.x.weight", "mtp_num_layers=None"),
        ("decoder.layers.0.mlp.linear_fc1.adapter.weight", "merge"),
        ("decoder.final_layernorm.bias", "RMSNorm"),
        ("decoder.layers.0.mixer.A_log", "Mamba"),
        ("vision.weight", "Glm4MoeForCausalLM"),
    ],
)
def test_advice_fits_the_parameter(name: str, part: str) -> None:
    """An error for a parameter that is not served says what to do about it."""
    assert part in advice_for(name, GLM)


def test_no_name_stands_for_two_rules() -> None:
    """In no layer of any family does a parameter have a choice of rules."""
    for family in FAMILIES.values():
        for attention in (family.attention, family.linear_attention):
            for mlp in (family.mlp, family.experts):
                rules = [rule for block in (family.norms, attention, mlp) for rule in block]
                names = [(name, rule.when) for rule in rules for name in rule.megatron_names]
                assert len(names) == len(set(names))
