"""Where a parameter belongs, by its name on one rank, and what is said of those that belong nowhere."""

import pytest

from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, advice_for, match_parameter
from weightbus.trainer_agent.sources.megatron.model_families import FAMILIES

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
