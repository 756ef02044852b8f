"""The served checkpoint's own config says which weights are quantized; what it says and we cannot do is said."""

from __future__ import annotations

from typing import Any

import pytest

from weightbus.dataplane.quantize.schemes import (
    Quantization,
    Scheme,
    UnknownScheme,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int4,
    mxfp8,
    quantized_tensors,
    read_quantization_config,
)
from weightbus.dataplane.tensors.manifest import TensorSpec

Config = dict[str, Any]

QWEN3_FP8: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V3: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
WEIGHTS_8: Config = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "float",
}
TOKENS: Config = {
    "dynamic": True,
    "num_bits": 8,
    "observer": None,
    "strategy": "token",
    "symmetric": True,
    "type": "float",
}
WEIGHTS_4: Config = {**WEIGHTS_8, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(weights: Config, form: str, ignore: list[str] | None = None, **more: object) -> Config:
    return {
        "config_groups": {"group_0": {"input_activations": None, "targets": ["Linear"], "weights": weights}},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head"] if ignore is None else ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **more,
    }


def grouped(**more: object) -> Config:
    """With FP8 channels, and further words in the group."""
    config = compressed(WEIGHTS_8, "float-quantized")
    config["config_groups"]["group_0"] |= more
    return config


def of(config: Config) -> Quantization:
    found = read_quantization_config({"architectures": ["X"], "quantization_config": config})
    assert found is not None
    return found


def weight(name: str, shape: tuple[int, ...] = (256, 512)) -> TensorSpec:
    return TensorSpec(name, "bfloat16", shape)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (QWEN3_FP8, fp8_block((128, 128))),
        (DEEPSEEK_V3, fp8_block((128, 128))),
        ({**DEEPSEEK_V3, "scale_fmt": "ue8m0"}, fp8_block((128, 128), power_of_two=True)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor()),
        ({"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}, mxfp8()),
        (compressed(WEIGHTS_8, "float-quantized"), fp8_channel()),
        (compressed({**WEIGHTS_8, "strategy": "tensor"}, "naive-quantized"), fp8_tensor()),
        (
            compressed({**WEIGHTS_8, "strategy": "block", "block_structure": [128, 128]}, "float-quantized"),
            fp8_block((128, 128), scale="weight_scale"),
        ),
        (
            compressed({**WEIGHTS_8, "strategy": "group", "group_size": 32}, "mxfp8-quantized"),
            mxfp8(compressed=True),
        ),
        (compressed(WEIGHTS_4, "pack-quantized"), int4(128, symmetric=True)),
        (compressed({**WEIGHTS_4, "group_size": 32, "symmetric": False}, "pack-quantized"), int4(32, symmetric=False)),
        (compressed({**WEIGHTS_4, "strategy": None, "group_size": -1}, "pack-quantized"), int4(0, symmetric=True)),
        (compressed({**WEIGHTS_4, "actorder": "weight"}, "pack-quantized"), int4(128, symmetric=True)),
    ],
)
def test_known_configs(config: Config, scheme: Scheme) -> None:
    """Configs as checkpoints on the hub have them choose the scheme that they are stored in."""
    assert of(config).scheme_of(weight("model.layers.3.mlp.down_proj.weight")) == scheme


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_scales_are_in_the_dtype_that_the_config_names(name: str) -> None:
    """Where there are no files to say it."""
    config = compressed({**WEIGHTS_8, "scale_dtype": f"torch.{name}"}, "float-quantized")
    scheme = of(config).scheme_of(weight("model.layers.3.mlp.down_proj.weight"))
    assert scheme is not None
    assert scheme.scale_dtype == name
    exponents = {**WEIGHTS_8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    assert of(compressed(exponents, "mxfp8-quantized")).rules[0].scheme == mxfp8(compressed=True)


def test_plain_checkpoints_are_left_alone() -> None:
    """No quantization_config, no quantization; one in the text part of a model counts."""
    assert read_quantization_config({"architectures": ["X"]}) is None
    assert read_quantization_config({"text_config": {"quantization_config": DEEPSEEK_V3}}) is not None
    assert read_quantization_config({"vision_config": {"hidden_size": 8, "quantization_config": {}}}) is None
    assert read_quantization_config({"quantization_config": None, "text_config": None}) is None


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_either_key_says_it(key: str) -> None:
    """Older checkpoints of compressed-tensors have the other one."""
    found = read_quantization_config({key: compressed(WEIGHTS_8, "float-quantized")})
    assert found is not None
    assert [rule.scheme for rule in found.rules] == [fp8_channel()]


@pytest.mark.parametrize("config", [{"quantization_config": []}, {"compression_config": False}, {"text_config": ["x"]}])
def test_what_is_no_object_is_not_taken_for_a_plain_checkpoint(config: Config) -> None:
    """Whatever wrote it meant something."""
    with pytest.raises(UnknownScheme, match="expected a JSON object"):
        read_quantization_config(config)


def test_a_quantized_part_is_not_taken_for_a_plain_model() -> None:
    """A config deeper down than it is read from: passing as bfloat16 would be a guess."""
    with pytest.raises(UnknownScheme, match=r"thinker_config\.text_config\.quantization_config"):
        read_quantization_config({"thinker_config": {"text_config": {"quantization_config": DEEPSEEK_V3}}})


@pytest.mark.parametrize(
    "name",
    ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm", "model.norm",
     "model.layers.0.mlp.shared_expert_gate", "model.layers.61.shared_head.head"],
)  # fmt: skip
@pytest.mark.parametrize("config", [QWEN3_FP8, DEEPSEEK_V3])
def test_what_sglang_never_quantizes(name: str, config: Config) -> None:
    """Tables, norms, routers and the head stay as they are, named in the config or not."""
    assert of(config).scheme_of(weight(f"{name}.weight")) is None
    assert of(config).scheme_of(TensorSpec(f"{name}.bias", "bfloat16", (256,))) is None


def test_exceptions_are_whole_parts_of_a_path() -> None:
    """``mlp.gate`` is not ``mlp.gate_proj``; ``layers.1`` is not ``layers.11``; with or without ``model.``."""
    exceptions = {"ignored_layers": ["mlp.gate", "model.layers.1"], "modules_to_not_convert": ["layers.2.self_attn"]}
    found = of({**DEEPSEEK_V3, **exceptions})
    quantized = lambda name: found.scheme_of(weight(f"{name}.weight")) is not None  # noqa: E731
    assert quantized("model.layers.0.mlp.gate_proj")
    assert not quantized("model.layers.1.mlp.gate_proj")
    assert quantized("model.layers.11.mlp.gate_proj")
    assert not quantized("model.layers.2.self_attn.q_proj")
    assert quantized("model.layers.2.mlp.up_proj")


def test_targets_patterns_and_groups() -> None:
    """A name goes before a pattern, a pattern before a class; ignored patterns match from the start of the name.

    Classes are found as SGLang finds them, in capitals or not.
    """
    assert of(grouped(targets=["linear"])).scheme_of(weight("a.up_proj.weight")) == fp8_channel()
    config = compressed(
        WEIGHTS_4, "mixed-precision", ["lm_head", "re:.*mlp.gate$", "re:visual.*", "layers.4.self_attn.q_proj"]
    )
    groups = config["config_groups"]
    groups["group_0"]["format"] = "pack-quantized"
    groups["group_1"] = {"targets": ["re:.*self_attn.*"], "weights": WEIGHTS_8, "format": "float-quantized",
                         "input_activations": TOKENS}  # fmt: skip
    groups["group_2"] = {"targets": ["model.layers.0.self_attn.o_proj"],
                         "weights": {**WEIGHTS_8, "strategy": "tensor"}, "format": "float-quantized"}  # fmt: skip
    found = of(config)
    at = lambda name: found.scheme_of(weight(f"{name}.weight"))  # noqa: E731
    assert at("model.layers.0.mlp.up_proj") == int4(128, symmetric=True)
    assert at("model.layers.0.self_attn.q_proj") == fp8_channel()
    assert at("model.layers.0.self_attn.o_proj") == fp8_tensor()
    assert at("model.layers.4.self_attn.q_proj") is None
    assert at("model.visual.blocks.0.attn.qkv") == int4(128, symmetric=True)
    assert at("visual.blocks.0.attn.qkv") is None
    assert at("lm_head") is None
    assert of(compressed(WEIGHTS_4, "pack-quantized", [])).scheme_of(weight("lm_head.weight")) is not None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'.*known are"),
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_algo": "NVFP4"}, "quantized as ''"),
        ({**DEEPSEEK_V3, "fmt": "e5m2"}, "fmt"),
        ({**DEEPSEEK_V3, "activation_scheme": "static"}, "activation_scheme"),
        ({**DEEPSEEK_V3, "scale_fmt": "e5m3"}, "scale_fmt"),
        ({**DEEPSEEK_V3, "some_new_word": 1}, "some_new_word"),
        (compressed({**WEIGHTS_4, "num_bits": 3}, "pack-quantized"), "int3 by group"),
        (compressed({**WEIGHTS_8, "type": "int"}, "int-quantized"), "int8 by channel"),
        (compressed({**WEIGHTS_8, "symmetric": False}, "float-quantized"), "asymmetric"),
        (compressed({**WEIGHTS_4, "actorder": "group"}, "pack-quantized"), "activations"),
        (compressed(WEIGHTS_4, "marlin-24"), "marlin-24"),
        (compressed({**WEIGHTS_4, "type": "float", "strategy": "tensor_group"}, "nvfp4-pack-quantized"), "float4"),
        (compressed(WEIGHTS_8, "float-quantized", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(WEIGHTS_8, "float-quantized", sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        (compressed(WEIGHTS_8, "float-quantized", ["re:*(gate"]), "no pattern"),
        (compressed({**WEIGHTS_8, "scale_dtype": "torch.float8_e4m3fn"}, "float-quantized"), "float8_e4m3fn"),
        (compressed({**WEIGHTS_4, "scale_dtype": "torch.uint8"}, "pack-quantized"), "scales of int4"),
        (compressed(WEIGHTS_8, "float-quantized", transform_config={"config_groups": {"r": {}}}), "transform_config"),
        (compressed({**WEIGHTS_8, "dynamic": True}, "float-quantized"), "no stored weights"),
        (compressed({**WEIGHTS_8, "strategy": "tensor", "symmetric": False}, "float-quantized"), "tensor, asymmetric"),
        (compressed({**WEIGHTS_8, "strategy": "group", "group_size": 64}, "mxfp8-quantized"), "float8 by group"),
        (compressed({**WEIGHTS_8, "rotated": True}, "float-quantized"), "rotated"),
        (grouped(rotated=True), "rotated"),
        (grouped(output_activations=TOKENS), "calibrated"),
        (grouped(targets=[]), "targets"),
        (grouped(targets=["Linear", ""]), "targets"),
        ({**DEEPSEEK_V3, "quant_method": "mxfp8"}, r"\[1, 32\].*\[128, 128\]"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "no weight_block_size"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(config: Config, said: str) -> None:
    """An unknown scheme, or an unknown word in a known one, is refused before anything is published."""
    with pytest.raises(UnknownScheme, match=said):
        of(config)
    static = compressed(WEIGHTS_8, "float-quantized")
    static["config_groups"]["group_0"]["input_activations"] = {**TOKENS, "dynamic": False}
    with pytest.raises(UnknownScheme, match="calibrated"):
        of(static)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.layers.0.mixer.fancy_table.weight", (256, 512), "nothing says whether"),
        ("model.layers.61.eh_proj.weight", (256, 512), "nothing says whether"),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 256, 512), "one by one"),
    ],
)
def test_what_cannot_be_told_is_refused(name: str, shape: tuple[int, ...], said: str) -> None:
    """A module whose name says nothing, and experts in one tensor, need the checkpoint's files or another source."""
    with pytest.raises(UnknownScheme, match=said):
        of(DEEPSEEK_V3).scheme_of(weight(name, shape))
    ignoring = of({**DEEPSEEK_V3, "modules_to_not_convert": [name.removesuffix(".weight").rpartition(".")[0]]})
    assert ignoring.scheme_of(weight(name, shape)) is None


def test_classes_that_names_do_not_tell_are_refused() -> None:
    """``Linear`` is what linear layers are; which modules are of another class only files say."""
    config = compressed(WEIGHTS_8, "float-quantized")
    config["config_groups"]["group_0"]["targets"] = ["FusedMoE", "re:.*o_proj$"]
    up = weight("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(UnknownScheme, match="nothing says whether"):
        of(config).scheme_of(up)
    assert of(config).scheme_of(weight("model.layers.0.self_attn.o_proj.weight")) == fp8_channel()
    assert of(config).scheme_of(up, stored(up)) is None
    assert of(compressed(WEIGHTS_8, "float-quantized", ["Linear"])).scheme_of(up) is None


@pytest.mark.parametrize(
    ("trained", "there"),
    [
        (weight("a.up_proj.weight"), [TensorSpec("a.up_proj.weight", "float8_e4m3fn", (256, 512))]),
        (
            weight("a.up_proj.weight"),
            [
                TensorSpec("a.up_proj.weight", "float8_e4m3fn", (256, 512)),
                TensorSpec("a.up_proj.weight_scale", "float32", (256, 1)),
            ],
        ),
        (weight("a.up_proj.weight"), [TensorSpec("a.up_proj.weight_packed", "int32", (256, 64))]),
        (
            TensorSpec("a.experts.gate_up_proj", "bfloat16", (8, 256, 512)),
            [TensorSpec("a.experts.gate_up_proj", "float8_e4m3fn", (8, 256, 512))],
        ),
    ],
)
def test_what_the_files_have_quantized_in_another_way_is_refused(trained: TensorSpec, there: list[TensorSpec]) -> None:
    """Without a scale, or with another one than the config says: it does not pass as bfloat16."""
    with pytest.raises(UnknownScheme, match="without a scale of the kind"):
        of(DEEPSEEK_V3).scheme_of(trained, stored(*there))


def test_what_the_format_cannot_hold_is_refused() -> None:
    """A group that does not divide a weight would be stored as something that no engine reads."""
    with pytest.raises(UnknownScheme, match=r"200 columns.*leaves as they are"):
        of(compressed(WEIGHTS_4, "pack-quantized")).scheme_of(weight("model.layers.0.mlp.up_proj.weight", (256, 200)))


def stored(*specs: TensorSpec) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


def test_files_say_it_better_than_names() -> None:
    """What has scales in the served checkpoint is quantized here, in their dtype; what has none is not."""
    found, odd, up = (
        of(compressed(WEIGHTS_8, "float-quantized")),
        weight("a.fancy_table.weight"),
        weight("a.up_proj.weight"),
    )
    files = stored(
        TensorSpec("a.fancy_table.weight", "float8_e4m3fn", (256, 512)),
        TensorSpec("a.fancy_table.weight_scale", "bfloat16", (256, 1)),
        up,
    )
    assert found.scheme_of(up, files) is None
    scheme = found.scheme_of(odd, files)
    assert scheme is not None
    assert set(quantized_tensors(odd, scheme)) <= set(files.values())


def test_groups_choose_where_there_are_files_too() -> None:
    """A file has a scale, and the config says what kind of it."""
    config = grouped(targets=["re:.*self_attn.*"])
    config["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": {**WEIGHTS_8, "strategy": "tensor"}}
    for name, scheme, shape in (("a.self_attn.q_proj", fp8_channel(), (256, 1)), ("a.up_proj", fp8_tensor(), (1,))):
        files = stored(
            TensorSpec(f"{name}.weight", "float8_e4m3fn", (256, 512)),
            TensorSpec(f"{name}.weight_scale", "float32", shape),
        )
        assert of(config).scheme_of(weight(f"{name}.weight"), files) == scheme


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_has_the_shape_that_it_is_stored_in(shape: tuple[int, ...]) -> None:
    """Checkpoints were written with either."""
    up = weight("a.up_proj.weight")
    files = stored(
        TensorSpec(up.name, "float8_e4m3fn", up.shape), TensorSpec("a.up_proj.weight_scale", "float32", shape)
    )
    scheme = of({"quant_method": "fp8", "activation_scheme": "dynamic"}).scheme_of(up, files)
    assert scheme is not None
    assert set(quantized_tensors(up, scheme)) == set(files.values())


def test_what_the_files_do_not_have_is_refused() -> None:
    """Under another name it would pass as bfloat16; an output layer that is tied to a table is not stored."""
    files = stored(
        TensorSpec("model.language_model.layers.0.mlp.up_proj.weight", "float8_e4m3fn", (256, 512)),
        TensorSpec("model.language_model.layers.0.mlp.up_proj.weight_scale_inv", "float32", (2, 4)),
        TensorSpec("model.language_model.layers.0.mlp.down_proj.weight", "float8_e4m3fn", (512, 256)),
    )
    with pytest.raises(UnknownScheme, match=r"no 'model\.layers\.0\.mlp\.up_proj.*they have 'model\.language.*up_proj"):
        of(DEEPSEEK_V3).scheme_of(weight("model.layers.0.mlp.up_proj.weight"), files)
    assert of(DEEPSEEK_V3).scheme_of(weight("lm_head.weight"), files) is None


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (TensorSpec("a.up_proj.weight_scale_inv", "float32", (2, 5)), r"\(2, 5\).*\(2, 4\)"),
        (TensorSpec("a.up_proj.weight_scale_inv", "uint8", (2, 4)), "stored as uint8"),
    ],
)
def test_files_that_contradict_the_config(scale: TensorSpec, said: str) -> None:
    """Scales of another shape or kind than the config says: neither is believed."""
    up = weight("a.up_proj.weight")
    files = stored(TensorSpec(up.name, "float8_e4m3fn", up.shape), scale)
    with pytest.raises(UnknownScheme, match=said):
        of(DEEPSEEK_V3).scheme_of(up, files)
