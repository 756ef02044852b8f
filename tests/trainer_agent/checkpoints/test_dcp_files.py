"""Torch DCP folders without transformers: which model is read, below which prefix, in which dtypes; broken files."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save

from weightbus.trainer_agent.checkpoints import dcp_files
from weightbus.trainer_agent.checkpoints.checkpoint_folder import CorruptCheckpoint
from weightbus.trainer_agent.checkpoints.dcp_files import DcpFiles, NoSuchModel, check_complete, chosen, normal
from weightbus.trainer_agent.machine.errors import BadCheckpoint
from weightbus.trainer_agent.source import AssemblyFailed
from weightbus.trainer_agent.sources.tensor_slices import Slice

SHAPES = {"model.embed.weight": (8, 4), "model.norm.weight": (4,), "model.hash": (3,)}
BUFFER = "model.hash"
HEAD = "lm_head.weight"


def tensors(value: float) -> dict[str, torch.Tensor]:
    """As a trainer has them: parameters in float32, and a table of whole numbers that the model has as such."""
    return {
        name: torch.full(shape, value, dtype=torch.int64 if name == BUFFER else torch.float32)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(autouse=True)
def form(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers would say of the config, whose dtype it is told."""

    def told(_folder: Path, config: dict[str, Any]) -> object:
        return dcp_files._Form(
            slices=tuple(Slice.whole(name, shape) for name, shape in SHAPES.items()),
            shapes=dict(SHAPES),
            cast=frozenset(SHAPES.keys() - {BUFFER}),
            dtype=config.get("dtype", "bfloat16"),
            tied={HEAD: "model.embed.weight"} if config.get("tied") else {},
            buffers={BUFFER: "int64"},
        )

    monkeypatch.setattr(dcp_files, "_form", told)


def written(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process writes it is meant
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


def read(files: DcpFiles) -> set[float]:
    """All values of all tensors."""
    values: set[float] = set()
    for spec in files.tensors:
        out = torch.empty(spec.nbytes, dtype=torch.uint8)
        files.read([spec], out)
        values |= set(out.view(getattr(torch, spec.dtype)).tolist())
    return values


def test_of_two_models_the_one_that_was_asked_for_is_read(tmp_path: Path) -> None:
    """Without being asked neither is: the average of the weights has their names, and stands first."""
    folder = written(tmp_path, {"model": tensors(1), "ema": tensors(2)})
    with pytest.raises(BadCheckpoint, match=r"2 prefixes \('ema\.', 'model\.'\).*--dcp-prefix"):
        DcpFiles(folder, "M", {})
    assert read(DcpFiles(folder, "M", {}, "model")) == {1.0}
    assert read(DcpFiles(folder, "M", {}, "ema.")) == {2.0}


def test_a_head_of_its_own_that_the_config_ties_is_refused(tmp_path: Path) -> None:
    """It would not be served, and the embedding in its place. A copy of the embedding is none of its own."""
    state = tensors(1)
    own = written(tmp_path / "own", {"model": {**state, HEAD: torch.full((8, 4), 2.0)}})
    with pytest.raises(BadCheckpoint, match=r"ties 'model\.lm_head\.weight' to 'model\.model\.embed\.weight'"):
        DcpFiles(own, "M", {"tied": True})
    copy = written(tmp_path / "copy", {"model": {**state, HEAD: state["model.embed.weight"].clone()}})
    assert read(DcpFiles(copy, "M", {"tied": True})) == {1.0}


def test_what_the_config_does_not_know_is_named(tmp_path: Path) -> None:
    """Scales of 8-bit weights, a head for values: the model without them is another one."""
    folder = written(tmp_path, {"model": {**tensors(1), "v_head.weight": torch.ones(2)}})
    with pytest.raises(BadCheckpoint, match=r"'model\.v_head\.weight': not in the model of its config"):
        DcpFiles(folder, "M", {})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64, torch.uint8, torch.bool])
def test_weights_that_are_no_floats_of_training_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without their scales they would be cast to nonsense. A buffer that the model has in that dtype is none."""
    state = tensors(1)
    state["model.embed.weight"] = state["model.embed.weight"].to(dtype)
    folder = written(tmp_path, {"model": state})
    with pytest.raises(BadCheckpoint, match=r"'model\.embed\.weight' is saved as .*; read are bfloat16, float16"):
        DcpFiles(folder, "M", {})


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bananas"])
def test_no_weights_are_cast_to_what_cannot_hold_them(tmp_path: Path, dtype: str) -> None:
    """Whatever the config says."""
    folder = written(tmp_path, {"model": tensors(1)})
    with pytest.raises(BadCheckpoint, match=f"its config has dtype '{dtype}'"):
        DcpFiles(folder, "M", {"dtype": dtype})
    assert {spec.dtype for spec in DcpFiles(folder, "M", {"dtype": "float32"}).tensors} == {"float32", "int64"}


def test_files_that_went_may_come_back_and_corrupt_ones_stay_so(tmp_path: Path) -> None:
    """Torch wraps both in what is no Exception: they are told apart, and are ours."""
    folder = written(tmp_path / "kept", {"model": tensors(1)})
    corrupt = DcpFiles(folder, "M", {})
    for file in folder.glob("*.distcp"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        read(corrupt)
    for what in ("*", "*.distcp"):
        folder = written(tmp_path / "gone", {"model": tensors(1)})
        gone = DcpFiles(folder, "M", {})
        for file in folder.glob(what):
            file.unlink()
        with pytest.raises(AssemblyFailed, match="No such file") as caught:
            read(gone)
        assert not isinstance(caught.value, CorruptCheckpoint)


def test_an_interrupt_while_reading_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch wraps it like any failure: it still ends the process."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    files = DcpFiles(written(tmp_path, {"model": tensors(1)}), "M", {})
    monkeypatch.setattr(dcp_files.FileSystemReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(files)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 5_000_000}, "num_hidden_layers=5000000, its 3 tensors have room for 3"),
        ({"n_layer": 4}, "n_layer=4, its 3 tensors have room for 3"),
        ({"text_config": {"num_layers": 4}}, "num_layers=4"),
        ({"n_routed_experts": 9}, "n_routed_experts=9, its 3 tensors have room for 8"),
    ],
)
def test_a_model_that_cannot_be_in_the_files_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], words: str
) -> None:
    """One of millions of layers would hold the watch up for hours."""
    built: list[str] = []
    usual = dcp_files._form
    monkeypatch.setattr(dcp_files, "_form", lambda *given: (built.append("built"), usual(*given))[1])
    folder = written(tmp_path, {"model": tensors(1)})
    with pytest.raises(BadCheckpoint, match=words):
        DcpFiles(folder, "M", config)
    assert not built
    assert read(DcpFiles(folder, "M", {"num_hidden_layers": 3, "max_window_layers": 28, "num_experts": 8})) == {1.0}


ODD = [ZeroDivisionError("0"), AttributeError("x"), AssertionError(), TypeError("x"), RecursionError(), OSError("hub")]


@pytest.mark.parametrize("error", ODD, ids=lambda each: type(each).__name__)
def test_whatever_a_config_makes_transformers_raise_is_about_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No heads, a width that is text: the classes of models check little, and each in its own way."""
    monkeypatch.undo()

    def for_model(*_: object, **__: object) -> None:
        raise error

    stub = SimpleNamespace(AutoConfig=SimpleNamespace(for_model=for_model), AutoModelForCausalLM=None)
    monkeypatch.setitem(sys.modules, "transformers", stub)
    folder = written(tmp_path, {"model": tensors(1)})
    with pytest.raises(BadCheckpoint, match=f"cannot build the model of its config: {type(error).__name__}"):
        DcpFiles(folder, "M", {"model_type": "odd"})


def test_metadata_that_cannot_be_read_now_is_no_bad_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors or a network file system may be back soon: a folder that was called bad is not looked at again."""
    folder = written(tmp_path, {"model": tensors(1)})

    def unread(_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(dcp_files.FileSystemReader, "read_metadata", unread)
        with pytest.raises(OSError, match="Too many open files"):
            DcpFiles(folder, "M", {})
    assert read(DcpFiles(folder, "M", {})) == {1.0}


def test_files_that_are_written_to_while_they_are_read_are_no_version(tmp_path: Path) -> None:
    """What was read may be of two states; a folder that is gone was read while it was there."""
    files = DcpFiles(written(tmp_path / "a", {"model": tensors(1)}), "M", {})
    files.check()
    written(tmp_path / "a", {"model": tensors(2)})
    with pytest.raises(AssemblyFailed, match="was written to while it was read"):
        files.check()
    shutil.rmtree(tmp_path / "a")
    files.check()


MODEL = ("model.embed.weight", "model.norm.weight", "lm_head.weight")
FUSED = ("model.experts.gate_up", "model.norm.weight")
SPLIT = ("model.experts.0.gate", "model.norm.weight")


def below(prefix: str, names: tuple[str, ...] = MODEL) -> set[str]:
    return {prefix + name for name in names}


@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
def test_the_only_prefix_is_found(prefix: str) -> None:
    """Whatever else is saved, as long as it is no copy of the model."""
    keys = below(prefix) | {"optimizer.model.embed.weight", "optimizer.step"}
    assert chosen([MODEL, MODEL], keys, "") == (0, prefix)


def test_of_several_models_none_is_guessed() -> None:
    """An average beside the weights, the old policy, the optimizer's moments: all have the names."""
    keys = below("model.") | below("ema.") | below("")
    with pytest.raises(NoSuchModel, match=r"3 prefixes \('\.', 'ema\.', 'model\.'\).*--dcp-prefix"):
        chosen([MODEL, MODEL], keys, "")
    for wanted, prefix in (("model", "model."), ("ema.", "ema."), (".", "")):
        assert chosen([MODEL, MODEL], keys, wanted) == (0, prefix)


def test_copies_in_different_forms_are_several_models_too() -> None:
    """One by its names in memory, one by those of its checkpoint."""
    keys = below("model.", FUSED) | below("ema.", SPLIT)
    with pytest.raises(NoSuchModel, match=r"'ema\.', 'model\.'"):
        chosen([FUSED, SPLIT], keys, "")
    assert chosen([FUSED, SPLIT], keys, "ema") == (1, "ema.")


def test_a_prefix_without_the_model_is_refused() -> None:
    """With those that have it."""
    with pytest.raises(NoSuchModel, match=r"not below the prefix 'actor'; below these it is: 'model\.'"):
        chosen([MODEL, MODEL], below("model."), "actor")
    with pytest.raises(NoSuchModel, match="they are not all among its keys"):
        chosen([MODEL, MODEL], below("model.") - {"model.lm_head.weight"}, "")


def test_what_is_below_the_prefix_must_be_known() -> None:
    """A value head, scales, more layers: serving the rest would be another model. Beside the prefix anything may be."""
    check_complete(below("model.") | {"optimizer.step", "lr"}, "model.", MODEL)
    check_complete(below("") | {"optimizer.step"}, "", MODEL)
    for prefix, odd in (("app.", "v_head.weight"), ("model.", "lm_head.weight_scale"), ("", "model.extra")):
        with pytest.raises(NoSuchModel, match=f"'{prefix}{odd}': not in the model"):
            check_complete(below(prefix) | {prefix + odd}, prefix, MODEL)


def test_dots_at_the_end_of_a_prefix_may_be_left_out() -> None:
    """And a dot alone is no prefix at all."""
    assert [normal(each) for each in ("model", "model.", "a.b", ".")] == ["model.", "model.", "a.b.", ""]
