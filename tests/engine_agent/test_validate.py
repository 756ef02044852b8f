"""What SGLang would die of or swallow is refused first, with everything that is wrong in one message."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import save_file

from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.engine_agent import checkpoint, validate
from weightbus.engine_agent.dialects import dialect_of
from weightbus.engine_agent.errors import UnfitManifest
from weightbus.engine_agent.identity import ServerFacts
from weightbus.engine_agent.payload import LOADER

from ..kit import tiny_model


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
    """SGLang would keep its old value and report success."""
    with pytest.raises(UnfitManifest, match=r"1 tensors \(model\.norm\.weight\) missing"):
        check([spec for spec in specs(folder) if spec.name != "model.norm.weight"], folder)


def test_an_unknown_name_is_refused(folder: Path) -> None:
    """SGLang would skip it and report success."""
    with pytest.raises(UnfitManifest, match=r"model\.extra.*unknown"):
        check([*specs(folder), TensorSpec("model.extra", "bfloat16", (1,))], folder)


def test_a_wrong_shape_is_refused_and_named(folder: Path) -> None:
    """SGLang would exit."""
    changed = [TensorSpec(s.name, s.dtype, (65,)) if s.name == "model.norm.weight" else s for s in specs(folder)]
    with pytest.raises(UnfitManifest, match=r"'model\.norm\.weight' has shape \(65,\), the server's has \(64,\)"):
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
    """Draft models and quantised weights would not be what the table says."""
    with pytest.raises(UnfitManifest):
        check(specs(folder), folder, **changes)


def test_a_server_with_a_draft_model_takes_direct_copies(folder: Path) -> None:
    """They are the one transport that reaches and proves every model of a server."""
    speculates = {"speculative": "EAGLE", "loaders": (LOADER,)}

    check(specs(folder), folder, "direct", **speculates)
    with pytest.raises(UnfitManifest, match="cannot prove what its draft model holds"):
        check(specs(folder), folder, "local", **speculates)


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


def test_a_checkpoint_out_of_sight_is_refused_with_advice(tmp_path: Path) -> None:
    """Nothing is passed on unverified."""
    with pytest.raises(UnfitManifest, match="--model-path"):
        checkpoint.expected(tmp_path / "gone")
