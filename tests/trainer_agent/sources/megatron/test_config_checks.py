"""Features of the trained model that leave no trace in names and shapes: each is compared, and refused by name."""

import functools
from types import SimpleNamespace

import pytest
import torch

from weightbus.trainer_agent.source import LayoutMismatch, UnsupportedModel
from weightbus.trainer_agent.sources.megatron import config_checks as megatron_checks
from weightbus.trainer_agent.sources.megatron.config_checks import (
    check_axes,
    check_config,
    check_padding,
    check_tied,
    compute_settings,
)
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors
from weightbus.trainer_agent.sources.megatron.megatron_source import _served_dtype

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
MODEL = HFModel.parse(HF)


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


def test_a_config_that_does_not_say_an_epsilon_is_not_that_of_the_trained_model() -> None:
    """Names and shapes would be the same: what a server assumes then is its own business, and not known here."""
    unsaid = HFModel.parse({key: value for key, value in HF.items() if key != "rms_norm_eps"})
    with pytest.raises(LayoutMismatch, match=r"layernorm_epsilon=1e-06, the Hugging Face config gives None"):
        check_config(config(), unsaid)


WORDS = {"num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT_HF = HF | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    **WORDS,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "index_n_heads": 2,
    "index_head_dim": 4,
    "index_topk": 8,
    "indexer_rope_interleave": True,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
LATENT_CONFIG = {
    "multi_latent_attention": True,
    "experimental_attention_variant": "dsa",
    "moe_shared_expert_intermediate_size": 5,
    "ffn_hidden_size": 12,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_head_dim": 2,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 3,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "dsa_indexer_topk": 8,
    "dsa_indexer_rope_interleaved": True,
    "rope_type": "yarn",
    "rotary_base": 10000,
    "rotary_scaling_factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
DELTA_HF = HF | {
    "architectures": ["Qwen3NextForCausalLM"],
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 3,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4,
}
DELTA_CONFIG = {
    "experimental_attention_variant": "gated_delta_net",
    "attention_output_gate": True,
    "moe_shared_expert_gate": True,
}
MODELS: dict[str, tuple[HFModel, dict[str, object]]] = {
    "grouped": (HFModel.parse(HF | WORDS), {"moe_router_topk": 2}),
    "latent": (HFModel.parse(LATENT_HF), LATENT_CONFIG),
    "delta": (HFModel.parse(DELTA_HF), DELTA_CONFIG),
}

REFUSED: dict[str, dict[str, object]] = {
    "grouped": {
        "gated_linear_unit": False,
        "normalization": "LayerNorm",
        "qk_l2_norm": True,
        "moe_single_grouped_weight": True,
        "moe_mlp_glu_interleave_size": 32,
        "moe_shared_expert_glu_interleave_size": 32,
        "glu_linear_offset": 1.0,
        "softmax_type": "off-by-one",
        "apply_residual_connection_post_layernorm": True,
        "moe_apply_probs_on_input": True,
        "moe_router_force_load_balancing": True,
        "moe_router_force_biased": 0.5,
        "moe_latent_size": 3,
        "use_mup": True,
        "gtp_weight_remat_size": 2,
        "gtp_remat_size": 2,
        "expert_gtp_weight_remat_size": 2,
        "expert_gtp_remat_size": 2,
        "activation_func": torch.nn.functional.gelu,
        "activation_func_clamp_value": 7.0,
        "multi_latent_attention": True,
        "experimental_attention_variant": "dsa",
        "attention_output_gate": True,
        "moe_shared_expert_gate": True,
        "rotary_interleaved": True,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 6,
        "moe_shared_expert_intermediate_size": 5,
        "num_query_groups": 4,
        "kv_channels": 4,
        "qk_layernorm": False,
        "layernorm_epsilon": 1e-5,
        "window_size": (128, 0),
        "no_rope_freq": [0, 1],
        "softmax_scale": 3.0,
        "moe_router_topk": 7,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
    },
    "latent": {
        "ffn_hidden_size": 13,
        "q_lora_rank": 7,
        "kv_lora_rank": 5,
        "qk_head_dim": 3,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 4,
        "moe_router_group_topk": 3,
        "dsa_indexer_scoring_relu": False,
        "dsa_indexer_topk": 9,
        "dsa_indexer_topk_freq": 2,
        "dsa_indexer_skip_topk_offset": 1,
        "dsa_indexer_rope_interleaved": False,
        "rotary_base": 1_000_000,
        "rotary_scaling_factor": 32,
        "mscale": 0.5,
        "mscale_all_dim": 0.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 1,
        "beta_slow": 2,
    },
    "delta": {
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 2,
    },
}
"""Field -> a value that makes another model of the same weights, or other weights; by what kind of model has it."""


def test_the_model_that_is_served_passes() -> None:
    """Each of these kinds, with every setting as its config says; otherwise what is refused below says nothing."""
    for model, fields in MODELS.values():
        check_config(config(**fields), model)


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in REFUSED.items() for field in fields])
def test_any_other_model_is_refused(kind: str, field: str) -> None:
    """One setting alone, and the message names it and what was found. A row that goes from a table is missed here."""
    model, fields = MODELS[kind]
    with pytest.raises((LayoutMismatch, UnsupportedModel), match=rf"the trained model has {field}="):
        check_config(config(**fields | {field: REFUSED[kind][field]}), model)


def test_every_row_of_the_tables_has_a_value_that_it_refuses() -> None:
    """A row that comes to a table without one is missed here."""
    rows: set[str] = {"activation_func"}
    for model, fields in MODELS.values():
        rows |= {row[0] for row in (*megatron_checks._ALWAYS, *megatron_checks._expected_structure(model))}
        rows |= set(megatron_checks._expected_values(model))
        rows |= {row[0] for row in compute_settings(config(**fields), model)}
    assert rows == {field for fields in REFUSED.values() for field in fields}


NEUTRAL: tuple[tuple[str, dict[str, object]], ...] = (
    ("grouped", {"softmax_scale": 3**-0.5}),
    ("grouped", {"window_size": (-1, 0)}),
    ("grouped", {"no_rope_freq": [0, 0]}),
    ("grouped", {"moe_router_num_groups": 1, "moe_router_group_topk": 1}),
    ("grouped", {"moe_router_topk_scaling_factor": 1.0}),
    ("grouped", {"moe_mlp_glu_interleave_size": 0}),
    ("latent", {"softmax_scale": 3.0}),
    ("latent", {"moe_router_pre_softmax": True}),
    ("latent", {"moe_router_load_balancing_type": "seq_aux_loss"}),
)


@pytest.mark.parametrize(("kind", "change"), NEUTRAL)
def test_what_amounts_to_the_same_passes(kind: str, change: dict[str, object]) -> None:
    """Said otherwise, or of no meaning for this kind: sigmoids are normalized after, latent attention scales itself."""
    model, fields = MODELS[kind]
    check_config(config(**fields | change), model)


def test_what_the_config_does_not_say_is_not_compared() -> None:
    """Neither how many experts are chosen, nor how scores are normalized, nor a window that servers have."""
    check_config(config(moe_router_topk=7, moe_router_pre_softmax=True), MODEL)
    check_config(config(window_size=(128, 0)), HFModel.parse(HF | {"use_sliding_window": True}))


def dense(architecture: str, **said: object) -> HFModel:
    """A model without experts."""
    left = {key: value for key, value in HF.items() if key not in {"num_experts", "moe_intermediate_size"}}
    return HFModel.parse(left | {"architectures": [architecture]} | said)


DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "ffn_hidden_size": 12, "qk_layernorm": False}


def test_a_window_is_one_of_the_served_model_where_its_config_uses_it() -> None:
    """Mistral's config has a size and no switch; Qwen2's has a size that its switch turns off."""
    trained = config(**DENSE, window_size=(4095, 0))
    check_config(trained, dense("MistralForCausalLM", sliding_window=4096))
    for other in (dense("MistralForCausalLM", sliding_window=None), dense("MistralForCausalLM")):
        with pytest.raises(LayoutMismatch, match=r"window_size=\(4095, 0\)"):
            check_config(trained, other)
    with pytest.raises(LayoutMismatch, match=r"window_size=\(4095, 0\)"):
        check_config(trained, dense("Qwen2ForCausalLM", sliding_window=4096, use_sliding_window=False))


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """A stand-in for Megatron-core's function of this name."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def test_the_activation_is_that_of_the_family() -> None:
    """Gemma has GELU by tanh, which trainers write in several ways; the exact one is another function."""
    gemma = dense("Gemma3ForCausalLM", query_pre_attn_scalar=3)
    fields = DENSE | {"qk_layernorm": True}
    gelu = torch.nn.functional.gelu
    for accepted in (fast_gelu, functools.partial(gelu, approximate="tanh")):
        check_config(config(**fields, activation_func=accepted), gemma)
    for other in (gelu, torch.nn.functional.silu, functools.partial(gelu, approximate="none")):
        with pytest.raises(UnsupportedModel, match=r"activation_func=(gelu|silu), Gemma3ForCausalLM has gelu_tanh"):
            check_config(config(**fields, activation_func=other), gemma)
    with pytest.raises(UnsupportedModel, match="activation_func=gelu_tanh, MistralForCausalLM has silu"):
        check_config(config(**DENSE, activation_func=fast_gelu), dense("MistralForCausalLM"))


def test_gemma_scales_its_attention_by_a_number_of_its_config() -> None:
    """Not by the size of a head, as other families do; a trainer that leaves it at that is refused."""
    gemma = dense("Gemma3ForCausalLM", query_pre_attn_scalar=16)
    fields = DENSE | {"qk_layernorm": True, "activation_func": fast_gelu}
    check_config(config(**fields, softmax_scale=0.25), gemma)
    for wrong in (None, 3**-0.5):
        with pytest.raises(LayoutMismatch, match=r"softmax_scale=.*gives 0\.25"):
            check_config(config(**fields, softmax_scale=wrong), gemma)


def test_embedding_and_output_are_one_where_the_family_has_it_so() -> None:
    """Gemma's released configs do not say it, Mistral's say nothing of an output layer of its own."""
    assert "tied" in dense("Gemma3ForCausalLM").switches
    assert "tied" not in dense("Gemma3ForCausalLM", tie_word_embeddings=False).switches
    assert "tied" not in dense("MistralForCausalLM").switches


def test_without_a_longer_context_the_latent_attention_is_not_scaled() -> None:
    """Megatron scales its softmax by `mscale_all_dim` for a plain rotation, too."""
    model = HFModel.parse(LATENT_HF | {"rope_scaling": None})
    plain = LATENT_CONFIG | {"rope_type": "rope", "mscale_all_dim": 0.0}
    check_config(config(**plain), model)
    with pytest.raises(LayoutMismatch, match=r"mscale_all_dim=1\.0, which amounts to 1\.36.*gives 1\.0"):
        check_config(config(**plain | {"mscale_all_dim": 1.0}), model)
    check_config(config(**plain | {"rope_type": "yarn", "rotary_scaling_factor": 1.0, "mscale_all_dim": 1.0}), model)


def test_a_dense_model_trained_with_experts_is_refused() -> None:
    """Also where the config of the served model has nothing to say of experts."""
    model = HFModel.parse(HF | {"architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(LayoutMismatch, match="num_moe_experts=4"):
        check_config(config(ffn_hidden_size=12), model)


@pytest.mark.parametrize("dtype", ["int8", "bool", "torch.uint8", "float8_e4m3fn", 16])
def test_a_config_that_would_be_served_in_nonsense_is_refused(dtype: object) -> None:
    """Fractions would be gone in integers, and in eight bits there would be no scale."""
    with pytest.raises(UnsupportedModel, match=f"dtype={dtype!r}: .* bfloat16, float16, float32, float64"):
        HFModel.parse(HF | {"dtype": dtype})
    assert HFModel.parse(HF | {"dtype": "torch.float16"}).dtype == "float16"


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
    assert hf_tensors(HFModel.parse(whole), "bfloat16")
    del whole[lost]
    with pytest.raises(LayoutMismatch, match=f"says nothing of .*{lost}"):
        hf_tensors(HFModel.parse(whole), "bfloat16")


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


NAME = "embedding.word_embeddings.weight"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("divisible_by", [1, 2, 7, 100, 128])
@pytest.mark.parametrize("vocabulary", [250, 50257, 151936, 151669])
def test_what_megatron_pads_is_padding(vocabulary: int, divisible_by: int, ranks: int) -> None:
    """By any setting up to its usual one, known or not, on any number of ranks."""
    multiple = divisible_by * ranks
    rows = -(-vocabulary // multiple) * multiple
    check_padding(NAME, rows, vocabulary, ranks, None)
    check_padding(NAME, rows, vocabulary, ranks, divisible_by)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "ranks"),
    [
        (152064, 151669, 2),  # the config of another model of the family
        (152064, 128256, 8),
        (151936, 151936 - 128, 1),
        (251, 250, 1),  # a prime: no setting gives one row of padding
    ],
)
def test_more_than_megatron_pads_is_refused(rows: int, vocabulary: int, ranks: int) -> None:
    """Tokens that were trained would not be served. The message says both numbers and what to do."""
    with pytest.raises(LayoutMismatch, match=f"has {rows} rows on {ranks} .* vocab_size={vocabulary}, .*config of the"):
        check_padding(NAME, rows, vocabulary, ranks, None)


def test_a_trainer_that_pads_further_says_so() -> None:
    """The padding must then be what its setting gives, to the row."""
    check_padding(NAME, 2048, 1100, 2, 1024)
    check_padding(NAME, 1100, 1100, 2, 1024)
    with pytest.raises(LayoutMismatch, match="vocab_divisible_by=1024 pads that to 2048"):
        check_padding(NAME, 4096, 1100, 2, 1024)
    with pytest.raises(LayoutMismatch, match="vocab_divisible_by=64 pads that to 1152"):
        check_padding(NAME, 1280, 1100, 2, 64)
    with pytest.raises(UnsupportedModel, match="vocab_divisible_by=0"):
        check_padding(NAME, 1280, 1100, 2, 0)
