"""Features of the trained model that leave no trace in names and shapes: each is compared, and refused by name."""

from types import SimpleNamespace

import pytest
import torch

from weightbus.trainer_agent.megatron_checks import check_axes, check_config, check_tied
from weightbus.trainer_agent.megatron_description import _served_dtype
from weightbus.trainer_agent.served import Model, served_tensors
from weightbus.trainer_agent.source import LayoutMismatch, UnsupportedModel

HF = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 10,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "moe_intermediate_size": 5,
}
MODEL = Model.parse(HF)


def config(**changes: object) -> SimpleNamespace:
    fields: dict[str, object] = {
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 3,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 5,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
        "multi_latent_attention": False,
    }
    return SimpleNamespace(**fields | changes)


def test_the_served_model_passes() -> None:
    """A field that an older Megatron-core does not have is no objection."""
    check_config(config(), MODEL)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_moe_experts": 8}, LayoutMismatch),
        ({"moe_ffn_hidden_size": 6}, LayoutMismatch),
        ({"moe_shared_expert_intermediate_size": 5}, LayoutMismatch),
        ({"num_query_groups": 4}, LayoutMismatch),
        ({"layernorm_epsilon": 1e-5}, LayoutMismatch),
        ({"qk_layernorm": False}, LayoutMismatch),
        ({"multi_latent_attention": True}, UnsupportedModel),
        ({"attention_output_gate": True}, UnsupportedModel),
        ({"experimental_attention_variant": "dsa"}, UnsupportedModel),
        ({"rotary_interleaved": True}, UnsupportedModel),
        ({"moe_shared_expert_gate": True}, UnsupportedModel),
        ({"normalization": "LayerNorm"}, UnsupportedModel),
        ({"activation_func": torch.nn.functional.gelu}, UnsupportedModel),
        ({"gtp_weight_remat_size": 2}, UnsupportedModel),
        ({"moe_latent_size": 3}, UnsupportedModel),
    ],
)
def test_any_other_model_is_refused(change: dict[str, object], error: type[Exception]) -> None:
    """The message names the field and what was found."""
    with pytest.raises(error, match=next(iter(change))):
        check_config(config(**change), MODEL)


def test_a_dense_model_trained_with_experts_is_refused() -> None:
    """Also where the config of the served model has nothing to say of experts."""
    dense = Model.parse(HF | {"architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(LayoutMismatch, match="num_moe_experts=4"):
        check_config(config(ffn_hidden_size=12), dense)


@pytest.mark.parametrize("dtype", ["int8", "bool", "torch.uint8", "float8_e4m3fn", 16])
def test_a_config_that_would_be_served_in_nonsense_is_refused(dtype: object) -> None:
    """Fractions would be gone in integers, and in eight bits there would be no scale."""
    with pytest.raises(UnsupportedModel, match=f"dtype={dtype!r}: .* bfloat16, float16, float32, float64"):
        Model.parse(HF | {"dtype": dtype})
    assert Model.parse(HF | {"dtype": "torch.float16"}).dtype == "float16"


def test_a_dtype_of_the_callers_choice_is_held_to_the_same() -> None:
    """What is passed goes before what the config says."""
    with pytest.raises(UnsupportedModel, match=r"'int8': .* bfloat16, float16, float32, float64"):
        _served_dtype(torch.int8, MODEL, ())
    assert _served_dtype(torch.float64, MODEL, ()) == "float64"


@pytest.mark.parametrize(
    "lost", ["moe_intermediate_size", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts"]
)
def test_a_config_with_a_hole_is_named(lost: str) -> None:
    """A size that the family needs, by the config's own word for it: no KeyError of ours."""
    whole = {**HF, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 1}
    del whole["num_experts"]
    whole |= {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 3}
    assert served_tensors(Model.parse(whole), "bfloat16")
    del whole[lost]
    with pytest.raises(LayoutMismatch, match=f"says nothing of .*{lost}"):
        served_tensors(Model.parse(whole), "bfloat16")


def test_tying_must_agree() -> None:
    """Otherwise an output layer would be served that engines do not have, or missing."""
    check_tied(False, MODEL)
    with pytest.raises(LayoutMismatch, match="tie_word_embeddings=False"):
        check_tied(True, MODEL)


def test_an_axis_that_is_not_read_is_refused() -> None:
    """Of one rank it cuts nothing; of more, weights would be served in part."""
    check_axes({"gtp_remat": 1, "expt_gtp_remat": 1})
    with pytest.raises(UnsupportedModel, match="'expt_gtp_remat' has 2 ranks"):
        check_axes({"gtp_remat": 1, "expt_gtp_remat": 2})
