"""What SGLang would die of or swallow is refused first, with everything that is wrong in one message."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from weightbus.dataplane.quantize import schemes as quantization_config
from weightbus.dataplane.tensors import Copy, Left
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.engine_agent.engines import checkpoint_spec as checkpoint
from weightbus.engine_agent.engines.sglang import compatibility as validate
from weightbus.engine_agent.engines.sglang.compatibility import DIALECTS, UnknownDialect, dialect_of, refusals
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.engine_agent.engines.sglang.server_identity import ServerFacts, facts_of
from weightbus.engine_agent.errors import UnfitManifest

from ....kit import tiny_model


def facts(**changes: Any) -> ServerFacts:
    """A plain server, changed."""
    plain = ServerFacts(
        identity="i",
        version="0.5.23",
        tp=1,
        pp=1,
        dp=1,
        dp_attention=False,
        device="cpu",
        dtype="auto",
        model_path="/m",
        architectures=("Qwen3ForCausalLM",),
        speculative="",
        quantization="",
        label="default",
    )
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served checkpoint."""
    return tiny_model.write(tmp_path_factory.mktemp("served") / "m", 1)


def specs(folder: Path) -> list[TensorSpec]:
    """All its tensors."""
    found = checkpoint.expected(folder)
    return [TensorSpec(name, found.dtypes.get(name, "bfloat16"), shape) for name, shape in found.shapes.items()]


def check(tensors: list[TensorSpec], folder: Path, transport: str = "local", **changes: Any) -> None:
    """Validate a manifest of `tensors`."""
    manifest = Manifest.of("Qwen3ForCausalLM", tensors)
    validate.check(manifest, facts(**changes), dialect_of("0.5.23"), checkpoint.expected(folder), transport)


def test_the_served_set_fits(folder: Path) -> None:
    """The checkpoint's own tensors are taken."""
    check(specs(folder), folder)


def test_a_missing_tensor_is_refused(folder: Path) -> None:
    """SGLang would keep its old value and report success (F17)."""
    with pytest.raises(UnfitManifest, match=r"1 tensors \(model\.norm\.weight\) missing"):
        check([spec for spec in specs(folder) if spec.name != "model.norm.weight"], folder)


def test_an_unknown_name_is_refused(folder: Path) -> None:
    """SGLang would skip it and report success."""
    with pytest.raises(UnfitManifest, match=r"model\.extra.*unknown"):
        check([*specs(folder), TensorSpec("model.extra", "bfloat16", (1,))], folder)


def _leaving(folder: Path, *left: str, sent_without: str = "model.layers.1.") -> None:
    """Validate a manifest without the tensors below `sent_without`, of which `left` are declared."""
    sent = [spec for spec in specs(folder) if not spec.name.startswith(sent_without)]
    manifest = Manifest.of("Qwen3ForCausalLM", sent, left=map(Left, left))
    validate.check(manifest, facts(), dialect_of("0.5.23"), checkpoint.expected(folder), "local")


def test_what_is_left_need_not_be_sent(folder: Path) -> None:
    """Sent and left are together exactly the server's tensors (N64)."""
    _leaving(folder, "model.layers.1.")
    _leaving(folder, "model.layers.1.mlp.", "model.layers.1.self_attn.", "model.layers.1.input_layernorm.weight",
             "model.layers.1.post_attention_layernorm.weight")  # fmt: skip


def test_what_is_neither_sent_nor_left_is_refused_with_the_setting_that_leaves_it(folder: Path) -> None:
    """Nothing is left by accident (N64)."""
    with pytest.raises(UnfitManifest, match=r"11 tensors .* missing.*left = \[\"model\.layers\.1\.\"\]"):
        _leaving(folder)
    with pytest.raises(
        UnfitManifest, match=r"3 tensors .*layers\.1\.mlp.* missing.*left = \[\"model\.layers\.1\.mlp\.\"\]"
    ):
        _leaving(folder, "model.layers.1.self_attn.", "model.layers.1.input_layernorm.weight",
                 "model.layers.1.post_attention_layernorm.weight")  # fmt: skip


def test_an_entry_that_leaves_nothing_of_the_checkpoint_is_refused(folder: Path) -> None:
    """A slip of the pen: also where what is sent is complete without it (N64)."""
    with pytest.raises(UnfitManifest, match=r"covers nothing of the served checkpoint: 1 entries \(model\.visual\.\)"):
        _leaving(folder, "model.layers.1.", "model.visual.")
    with pytest.raises(UnfitManifest, match=r"covers nothing of the served checkpoint: 1 entries \(model\.visual\.\)"):
        _leaving(folder, "model.visual.", sent_without="no such tensor")


@pytest.mark.parametrize(
    ("name", "of", "fits"),
    [
        ("model.layers.1.input_layernorm.weight", "model.norm.weight", True),
        ("model.layers.1.input_layernorm.weight", "model.embed_tokens.weight", False),
        ("model.layers.2.embed_tokens.weight", "model.embed_tokens.weight", False),
    ],
)
def test_a_copy_is_a_tensor_of_the_checkpoint_like_the_one_it_follows(
    folder: Path, name: str, of: str, *, fits: bool
) -> None:
    """It is neither sent nor missing; one of another shape, or that the checkpoint has not, is refused (N64)."""
    sent = [spec for spec in specs(folder) if spec.name != name]
    manifest = Manifest.of("Qwen3ForCausalLM", sent, copies=[Copy(name, of)])
    expected = checkpoint.expected(folder)
    if fits:
        validate.check(manifest, facts(), dialect_of("0.5.23"), expected, "local")
        return
    with pytest.raises(UnfitManifest, match=r"1 copies \(model\.layers.* cannot follow"):
        validate.check(manifest, facts(), dialect_of("0.5.23"), expected, "local")


def test_files_beside_the_models_own_do_not_count(folder: Path, tmp_path: Path) -> None:
    """Mistral's consolidated weights, adapters, and buffers that engines compute."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    save_file({"base_model.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    save_file({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / "model-rope.safetensors")
    check(specs(folder), tmp_path)


def test_a_wrong_shape_is_refused_and_named(folder: Path) -> None:
    """SGLang would exit. The refusal says what to serve."""
    changed = [TensorSpec(s.name, s.dtype, (65,)) if s.name == "model.norm.weight" else s for s in specs(folder)]
    shapes = r"'model\.norm\.weight' has shape \(65,\), the server's has \(64,\)"
    with pytest.raises(UnfitManifest, match=shapes + ".*launch the server with a checkpoint of the trained model"):
        check(changed, folder)


def test_another_dtype_is_refused(folder: Path) -> None:
    """SGLang would cast in silence, and digests of live weights would differ."""
    changed = [TensorSpec(s.name, "float32", s.shape) for s in specs(folder)]
    with pytest.raises(UnfitManifest, match=r"25 tensors.*dtype"):
        check(changed, folder)


def test_another_architecture_is_refused(folder: Path) -> None:
    """Names can agree by accident."""
    with pytest.raises(UnfitManifest, match="manifest is of Qwen3ForCausalLM, the server serves LlamaForCausalLM"):
        check(specs(folder), folder, architectures=("LlamaForCausalLM",))


@pytest.mark.parametrize(
    ("changes", "able"),
    [({"dp": 2}, {"disk"}), ({"pp": 2}, {"local", "disk"}), ({"tp": 2}, {"local", "distributed", "disk"})],
)
def test_layouts_decide_transports(folder: Path, changes: dict[str, int], able: set[str]) -> None:
    """Replicas answer tensors with HTTP 500, stages of a pipeline claim the same ranks of a group."""
    for transport in ("local", "distributed", "disk"):
        if transport in able:
            check(specs(folder), folder, transport, **changes)
        else:
            with pytest.raises(UnfitManifest, match="cannot serve an engine with"):
                check(specs(folder), folder, transport, **changes)


@pytest.mark.parametrize("changes", [{"speculative": "EAGLE"}, {"quantization": "fp8"}])
def test_servers_with_derived_weights_are_refused(folder: Path, changes: dict[str, str]) -> None:
    """Draft models and quantized weights would not be what the table says."""
    with pytest.raises(UnfitManifest):
        check(specs(folder), folder, **changes)


def test_a_server_with_a_draft_model_takes_direct_copies(folder: Path) -> None:
    """They are the one transport that reaches and proves every model of a server."""
    speculates = {"speculative": "EAGLE", "loaders": (LOADER,)}

    check(specs(folder), folder, "direct", **speculates)
    with pytest.raises(UnfitManifest, match="cannot prove what its draft model holds"):
        check(specs(folder), folder, "local", **speculates)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"dp": 2}, "a sidecar each"),
        ({"speculative": "EAGLE"}, f"--custom-weight-loader {LOADER}"),
        ({"pp": 2}, "local and disk"),
        ({"moves_experts": "--enable-eplb", "loaders": (LOADER,)}, "--init-expert-location"),
    ],
)
def test_fewer_transports_come_with_advice(folder: Path, changes: dict[str, Any], advice: str) -> None:
    """In the log of the sidecar, and in whatever it refuses."""
    assert [advice in f"{found}: {needed}" for found, needed in validate.limits(facts(**changes))] == [True]
    with pytest.raises(UnfitManifest, match=advice):
        check(specs(folder), folder, "sends", **changes)
    assert not list(validate.limits(facts(loaders=(LOADER,), dp_attention=True, tp=2)))


def test_a_server_whose_environment_is_wrong_is_not_paused_for_direct_copies(folder: Path) -> None:
    """Refused before, in the words that its workers would have in the pause; other transports serve it."""
    wrong = {"misset": "WEIGHTBUS_WORKER_BRANCHES in the server's environment is 'many'", "loaders": (LOADER,)}
    with pytest.raises(UnfitManifest, match=r"can: sends, local, distributed, disk; WEIGHTBUS_WORKER_BRANCHES.*'many'"):
        check(specs(folder), folder, "direct", **wrong)
    check(specs(folder), folder, "sends", **wrong)
    assert {kind: why for kind, (why, _) in validate.missing(facts(**wrong)).items()} == {"direct": wrong["misset"]}
    speculates = facts(**wrong, speculative="EAGLE")
    assert validate.transports_of(speculates) == ()
    assert validate.missing(speculates)["direct"][0] == wrong["misset"]
    assert not any("'many'" in why for why, _ in validate.missing(facts(**wrong, pp=2)).values()), (
        "it is not that alone"
    )


@pytest.mark.parametrize("transport", ["direct", "sends"])
@pytest.mark.parametrize(
    ("said", "flag"),
    [
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"elastic_ep_backend": "mooncake"}, "--elastic-ep-backend"),
    ],
)
def test_what_was_recorded_of_experts_that_move_is_not_used(
    folder: Path, transport: str, said: dict[str, object], flag: str
) -> None:
    """Refused by the flag. A server that loads by itself asks where they are; fixed places, redundant too, are kept."""
    fixed = {"enable_eplb": False, "elastic_ep_backend": None, "ep_num_redundant_experts": 2}
    moves = {"loaders": (LOADER,), "moves_experts": facts_of(said, {}, "http://127.0.0.1").moves_experts}

    assert not facts_of(fixed, {}, "http://127.0.0.1").moves_experts
    check(specs(folder), folder, transport, loaders=(LOADER,))
    check(specs(folder), folder, "local", **moves)
    with pytest.raises(UnfitManifest, match=rf"moves experts while it serves \({flag}\).*--init-expert-location"):
        check(specs(folder), folder, transport, **moves)


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", False), ("qwen3", True), ("llama", True)])
def test_the_table_agrees_with_the_files(tmp_path: Path, architecture: tiny_model.Architecture, tied: bool) -> None:
    """config.json alone tells the same names and shapes as the safetensors headers."""
    made = tiny_model.write(tmp_path / "m", architecture=architecture, tied=tied)
    by_header = checkpoint.expected(made)
    (made / "model.safetensors").unlink()
    by_table = checkpoint.expected(made)
    table = {name: shape for name, shape in by_table.shapes.items() if name in by_header.shapes}
    assert table == by_header.shapes
    assert by_table.shapes.keys() - by_header.shapes.keys() <= by_table.optional


def test_shards_are_read_by_their_index(folder: Path, tmp_path: Path) -> None:
    """A shard that is missing makes the headers useless rather than half of an expectation."""
    weights = tiny_model.tensors(json.loads((folder / "config.json").read_text()), 1)
    names = list(weights)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, some in parts.items():
        save_file({name: weights[name] for name in some}, tmp_path / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["NewForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint.expected(tmp_path).shapes.keys() == weights.keys()
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UnfitManifest, match="nothing says which tensors"):
        checkpoint.expected(tmp_path)


def test_files_are_read_again_when_they_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand headers take as long as a version takes to move: the same ones are read once."""
    made = tiny_model.write(tmp_path / "m", tied=False)
    first = checkpoint.expected(made)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_headers", lambda _: pytest.fail("they are as they were"))
        assert checkpoint.expected(made) == first

    save_file({"new.weight": torch.zeros(2, 3)}, made / "model.safetensors")
    assert checkpoint.expected(made).shapes == {"new.weight": (2, 3)}
    (made / "config.json").write_text("{")
    with pytest.raises(UnfitManifest, match=r"is not a model's config"):
        checkpoint.expected(made)


@pytest.mark.parametrize("how", ["written again", "put in its place"])
def test_a_file_of_the_same_size_is_another_one(tmp_path: Path, how: str) -> None:
    """By its time, or as another file with the same time, which a copied checkpoint has."""
    made = tiny_model.write(tmp_path / "m", tied=False)
    file = made / "model.safetensors"
    save_file({"old.weight": torch.zeros(2, 3)}, file)
    assert checkpoint.expected(made).shapes == {"old.weight": (2, 3)}
    before, other = file.stat(), tmp_path / "other"
    save_file({"new.weight": torch.zeros(2, 3)}, other)
    if how == "written again":
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    else:
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(file)
    after = file.stat()
    same = [getattr(before, name) == getattr(after, name) for name in ("st_ino", "st_size", "st_mtime_ns")]
    assert same == [how == "written again", True, how != "written again"]
    assert checkpoint.expected(made).shapes == {"new.weight": (2, 3)}


@pytest.mark.parametrize("files", [True, False], ids=["from headers", "from the table"])
def test_what_all_share_cannot_be_changed(tmp_path: Path, files: bool) -> None:
    """It is the answer to the next question."""
    made = tiny_model.write(tmp_path / "m")
    if not files:
        (made / "model.safetensors").unlink()
    found = checkpoint.expected(made)
    for mapping in (found.shapes, found.dtypes):
        with pytest.raises(TypeError):
            mapping["x"] = ()  # type: ignore[index]
    assert checkpoint.expected(made) is found


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": ["a.safetensors"]}', '{"weight_map": {"a": 1}}', "\xff"]
)
def test_an_index_that_names_no_files_is_refused_with_advice(tmp_path: Path, index: str) -> None:
    """It is a checkpoint that is half copied, or another file of that name."""
    made = tiny_model.write(tmp_path / "m")
    file = made / "model.safetensors.index.json"
    file.write_bytes(index.encode("latin-1"))
    with pytest.raises(
        UnfitManifest, match=r"index\.json does not say in which files .*Put the checkpoint's own index"
    ):
        checkpoint.expected(made)
    file.unlink()
    assert checkpoint.expected(made).shapes


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}


CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
}


def stored_quantized(folder: Path, config: dict[str, Any], module: str = "model.layers.0.mlp.up_proj") -> Path:
    """A checkpoint of one weight, quantized as `config` says, and of one that is not."""
    folder.mkdir()
    content = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(content))
    weight = TensorSpec(f"{module}.weight", "bfloat16", (256, 256))
    quantization = quantization_config.read_quantization_config(content)
    assert quantization is not None
    scheme = quantization.scheme_of(weight)
    assert scheme is not None
    tensors = {
        spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in (
            TensorSpec("model.norm.weight", "bfloat16", (256,)),
            *quantization_config.quantized_tensors(weight, scheme),
        )
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_quantized_checkpoint_names_its_tensors(tmp_path: Path) -> None:
    """FP8 in blocks on a GPU is updated; weights that came unquantized are refused by name and dtype."""
    folder = stored_quantized(tmp_path / "m", FP8)
    check(specs(folder), folder, device="cuda")
    check(specs(folder), folder, device="cuda", quantization="fp8")
    plain = [spec for spec in specs(folder) if not spec.name.endswith("_scale_inv")]
    with pytest.raises(UnfitManifest, match=r"weight_scale_inv\) missing"):
        check(plain, folder, device="cuda")
    cast = [TensorSpec(spec.name, "bfloat16", spec.shape) for spec in specs(folder)]
    with pytest.raises(UnfitManifest, match=r"up_proj.weight' is bfloat16 in the manifest .*, float8_e4m3fn in "):
        check(cast, folder, device="cuda")


@pytest.mark.parametrize(
    ("config", "module", "changes", "said"),
    [
        (FP8, "a.up_proj", {"device": "cpu"}, "for its CPU"),
        (FP8, "a.up_proj", {"quantization": "w8a8_fp8"}, "its checkpoint is fp8"),
        (FP8, "a.up_proj", {"architectures": ("LlamaForCausalLM",)}, "drops scales"),
        ({**FP8, "weight_block_size": None}, "a.up_proj", {}, r"fp8-tensor.*transposes.*weight_block_size"),
        (CHANNELS, "a.up_proj", {}, r"fp8-channel.*transposes.*weight_block_size"),
        ({**FP8, "quant_method": "mxfp8", "weight_block_size": [1, 32]}, "a.up_proj", {}, "mxfp8.*swizzles"),
        (INT4, "a.up_proj", {}, "experts only"),
    ],
)
def test_layouts_that_cannot_be_loaded_again(
    tmp_path: Path, config: dict[str, Any], module: str, changes: dict[str, Any], said: str
) -> None:
    """What a server turned into another layout and cannot turn back is refused, with what to serve instead."""
    folder = stored_quantized(tmp_path / "m", config, module)
    with pytest.raises(UnfitManifest, match=said):
        check(specs(folder), folder, **{"device": "cuda", **changes})


def test_packed_experts_need_sessions(tmp_path: Path) -> None:
    """Experts in INT4 are given back at the beginning of a session, so servers without sessions are refused."""
    folder = stored_quantized(tmp_path / "m", INT4, "model.layers.0.mlp.experts.3.up_proj")
    check(specs(folder), folder, device="cuda")
    manifest = Manifest.of("Qwen3ForCausalLM", specs(folder))
    with pytest.raises(UnfitManifest, match=r"0\.5\.21"):
        validate.check(manifest, facts(device="cuda"), dialect_of("0.5.17"), checkpoint.expected(folder), "local")


def test_quantized_checkpoints_that_do_not_tell(tmp_path: Path) -> None:
    """Without files nothing says which tensors are quantized; an unknown scheme says what is known."""
    folder = stored_quantized(tmp_path / "m", FP8)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnfitManifest, match="put them there"):
        checkpoint.expected(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gguf"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnfitManifest, match=r"'gguf'.*known are"):
        checkpoint.expected(folder)


def test_a_checkpoint_out_of_sight_is_refused_with_advice(tmp_path: Path) -> None:
    """Nothing is passed on unverified."""
    with pytest.raises(UnfitManifest, match="--model-path"):
        checkpoint.expected(tmp_path / "gone")


@pytest.mark.parametrize(
    ("version", "sessions", "cpu"),
    [
        ("0.5.11", False, False),
        ("0.5.12.post1", False, False),
        ("0.5.20", False, False),
        ("0.5.21", True, False),
        ("0.5.23", True, True),
    ],
)
def test_known_versions(version: str, sessions: bool, cpu: bool) -> None:
    """Sessions from 0.5.21, checksums without a GPU from 0.5.23."""
    dialect = dialect_of(version)
    assert (dialect.sessions, dialect.cpu_checksums) == (sessions, cpu)


@pytest.mark.parametrize("version", ["0.5.10", "0.5.24", "0.6.0", "0.5.23.dev7+gabc", "", "main"])
def test_unknown_versions_are_refused_with_advice(version: str) -> None:
    """A guess could end the server; the way around it is named."""
    with pytest.raises(UnknownDialect, match="--dialect"):
        dialect_of(version)
    assert dialect_of(version, "0.5.23").name == "0.5.23"


def test_ranges_follow_each_other() -> None:
    """Every version from the first to the last belongs to exactly one dialect."""
    for before, after in pairwise(DIALECTS):
        assert after.first == (*before.last[:2], before.last[2] + 1)


NEWEST = dialect_of("0.5.23")


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (FP8, {}, ""),
        (CHANNELS, {}, "transposes.*weight_block_size"),
        (INT4, {}, "unpacks experts only"),
        (FP8, {"device": "cpu"}, "serve the plain checkpoint"),
    ],
)
def test_what_prepare_will_refuse_is_known_before(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    """By the served checkpoint alone, without a version."""
    folder = stored_quantized(tmp_path / "m", config)
    found = [*refusals(facts(**{"device": "cuda", **changes}), NEWEST, folder)]
    assert len(found) == bool(said)
    if said:
        assert re.search(said, found[0])


def test_a_plain_server_is_told_of_only_where_something_is_wrong(tmp_path: Path) -> None:
    """A server that quantizes by itself, and a checkpoint that the sidecar does not see."""
    folder = tiny_model.write(tmp_path / "m", 1)
    assert [*refusals(facts(), NEWEST, folder)] == []
    (reason,) = refusals(facts(device="cuda", quantization="fp8"), NEWEST, folder)
    assert "--quantization fp8" in reason
    (reason,) = refusals(facts(), NEWEST, tmp_path / "gone")
    assert "--model-path" in reason


KEPT = "model.norm.weight"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16 that keeps one tensor in float32, as releases keep routers."""
    made = tiny_model.write(tmp_path_factory.mktemp("kept") / "m", 1)
    weights = load_file(made / "model.safetensors")
    save_file({name: value.float() if name == KEPT else value for name, value in weights.items()},
              made / "model.safetensors")  # fmt: skip
    return made


def in_dtype(folder: Path, main: str, kept: str) -> list[TensorSpec]:
    """All tensors in `main` but for `KEPT`."""
    return [TensorSpec(spec.name, kept if spec.name == KEPT else main, spec.shape) for spec in specs(folder)]


@pytest.mark.parametrize(
    ("launched", "main", "apart", "fits"),
    [
        ("auto", "bfloat16", "float32", True),
        ("auto", "bfloat16", "bfloat16", True),
        ("auto", "bfloat16", "float16", False),
        ("auto", "float32", "float32", False),
        ("float16", "float16", "float16", True),
        ("half", "float16", "float16", True),
        ("float16", "float16", "float32", True),
        ("float16", "bfloat16", "float32", False),
        ("float16", "float16", "bfloat16", False),
        ("float32", "float32", "float32", True),
        ("float32", "bfloat16", "float32", False),
        ("bfloat16", "bfloat16", "bfloat16", True),
    ],
)
def test_each_tensor_has_its_own_dtype(kept: Path, launched: str, main: str, apart: str, fits: bool) -> None:
    """That of its file; of the launch, where that is not the files'; or one whose values both have."""
    tensors = in_dtype(kept, main, apart)
    if fits:
        check(tensors, kept, dtype=launched)
        return
    with pytest.raises(UnfitManifest, match=r"in the manifest \(as the trainer's source serves it\), "):
        check(tensors, kept, dtype=launched)


def test_a_refused_dtype_is_told_with_its_places_and_the_setting(kept: Path, folder: Path) -> None:
    """Manifest, file, server, and what to change at the trainer or at the server."""
    with pytest.raises(UnfitManifest) as refused:
        check(in_dtype(folder, "bfloat16", "bfloat16"), folder, dtype="float16")
    told = str(refused.value)
    stored = f"bfloat16 in {folder / 'model.safetensors'}, float16 in the server (--dtype float16), as for 24 more"
    assert f"'lm_head.weight' is bfloat16 in the manifest (as the trainer's source serves it), {stored}" in told
    assert "build the trainer's source with dtype=torch.float16, or launch the server with --dtype bfloat16" in told

    with pytest.raises(UnfitManifest, match=f"with served='{kept}', dtype=torch.float16, which gives each tensor"):
        check(in_dtype(kept, "bfloat16", "float32"), kept, dtype="float16")


@pytest.mark.parametrize(
    ("launched", "main", "apart", "held", "fits"),
    [
        ("auto", "bfloat16", "float32", "float32", True),
        ("auto", "bfloat16", "bfloat16", "float32", True),
        ("auto", "bfloat16", "float32", "bfloat16", True),  # rounded, as it was at the launch
        ("auto", "bfloat16", "float32", "float16", False),
        ("float16", "float16", "float32", "float16", False),
        ("float16", "float16", "float16", "float32", True),
        ("float16", "float16", "float32", "float32", True),
    ],
)
def test_what_the_server_holds_decides(  # noqa: PLR0917  the columns of a table
    kept: Path, launched: str, main: str, apart: str, held: str, fits: bool
) -> None:
    """A tensor is taken if its recorded parameter has all of its values; else as at the launch, never overflowing."""
    manifest = Manifest.of("Qwen3ForCausalLM", in_dtype(kept, main, apart))
    server, recorded = facts(dtype=launched), {KEPT: frozenset({held})}

    def checked() -> None:
        dialect = dialect_of("0.5.23")
        validate.check(manifest, server, dialect, checkpoint.expected(kept), "local", held=recorded)

    if fits:
        checked()
    else:
        with pytest.raises(UnfitManifest, match=rf"{KEPT}' is {apart} .* {held} in the server \(its parameters"):
            checked()
    cast = validate.casts(manifest, server, checkpoint.expected(kept), recorded)
    assert cast == ({KEPT: held} if apart != held else {})


def test_a_code_made_float32_parameter_takes_float32(folder: Path) -> None:
    """Files in bfloat16 say nothing of it; the recorded loader does."""
    manifest = Manifest.of("Qwen3ForCausalLM", in_dtype(folder, "bfloat16", "float32"))
    found, dialect = checkpoint.expected(folder), dialect_of("0.5.23")
    validate.check(manifest, facts(), dialect, found, "local", held={KEPT: frozenset({"float32"})})
    with pytest.raises(UnfitManifest, match=KEPT):
        validate.check(manifest, facts(), dialect, found, "local")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float16"),
        ({}, "float16"),
        ({"torch_dtype": "float32", "model_type": "gemma3_text"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"text_config": {"torch_dtype": "float32", "model_type": "gemma3_text"}}, "bfloat16"),
    ],
)
def test_auto_is_what_sglang_makes_of_the_config(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    """A config of float32, or of none, is served in 16 bits."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **config}))
    save_file({"a.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert validate.launch_dtype(facts(), checkpoint.expected(tmp_path)) == dtype
    (guessed,) = validate.tensors_of(facts(), checkpoint.expected(tmp_path))
    assert guessed.dtype == dtype
    check_one = Manifest.of("Qwen3ForCausalLM", [guessed])
    validate.check(check_one, facts(), dialect_of("0.5.23"), checkpoint.expected(tmp_path), "local")


FLOATS = ("bfloat16", "float16", "float32")


@given(
    st.sampled_from(["auto", *FLOATS]), st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.sampled_from([*FLOATS, ""])
)
def test_nothing_that_is_taken_becomes_infinite(kept: Path, launched: str, sent: str, apart: str, held: str) -> None:
    """Whatever was recorded: no float16 parameter takes a wider dtype, and the tensors of the main dtype are exact."""
    manifest = Manifest.of("Qwen3ForCausalLM", in_dtype(kept, sent, apart))
    server, recorded = facts(dtype=launched), {KEPT: frozenset({held})} if held else {}
    try:
        validate.check(manifest, server, dialect_of("0.5.23"), checkpoint.expected(kept), "local", held=recorded)
    except UnfitManifest:
        return
    main = validate.launch_dtype(server, checkpoint.expected(kept))
    assert sent == main
    assert held != "float16" or apart == "float16", "values of the others are infinite there"


def test_tensors_that_a_source_keeps_apart_need_the_served_files(folder: Path) -> None:
    """A source that was given the right dtype, and keeps norms in float32 beside it, is not told to take that dtype."""
    found, dialect = checkpoint.expected(folder), dialect_of("0.5.23")
    manifest = Manifest.of("Qwen3ForCausalLM", in_dtype(folder, "float16", "float32"))
    with pytest.raises(UnfitManifest) as refused:
        validate.check(manifest, facts(dtype="float16"), dialect, found, "local")
    told = str(refused.value)
    assert re.search(
        rf"1 tensors are .*'{KEPT}' is float32 .* source with served='.*', dtype=torch.float16, which", told
    )
    assert "--dtype float32" not in told
