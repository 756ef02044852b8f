"""Each tensor is served in the dtype that the served checkpoint keeps it in; float32 masters give all of their bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

from weightbus.trainer_agent.source import LayoutMismatch, UnsupportedModel
from weightbus.trainer_agent.sources.exported import ExportedSource, FullTensorSource
from weightbus.trainer_agent.sources.hf_module import FSDPSource, HFModuleSource
from weightbus.trainer_agent.sources.tensor_dtypes import TensorDtypes, has_files, kept_in_float32

from ...kit.exporting import export

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tiny(nn.Module):
    """A model with a weight, a router and a bias of its experts, which is a buffer."""

    _keep_in_fp32_modules = ("norm",)
    _keep_in_fp32_modules_strict: tuple[str, ...] = ("gate.bias",)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.gate = nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4, bias=False)
        self.register_buffer("count", torch.arange(3))


def stored(folder: Path, **dtypes: torch.dtype) -> Path:
    """A checkpoint of `Tiny` in bfloat16, but for `dtypes`."""
    folder.mkdir(exist_ok=True)
    weights = {name: value.detach().clone() for name, value in Tiny().state_dict().items()}
    cast = {name: value.bfloat16() if value.is_floating_point() else value for name, value in weights.items()}
    cast |= {name.replace("_", "."): cast[name.replace("_", ".")].to(dtype) for name, dtype in dtypes.items()}
    save_file(cast, folder / "model.safetensors")
    return folder


def found(source: Any) -> dict[str, str]:
    """The dtypes that a source serves."""
    return {spec.name: spec.dtype for spec in source.tensors()}


def test_a_kept_tensor_has_the_bits_of_its_master(tmp_path: Path) -> None:
    """The rest is cast as before."""
    module, folder = Tiny(), stored(tmp_path / "m", gate_weight=torch.float32)
    source = HFModuleSource(module, dtype=torch.bfloat16, served=folder)
    assert found(source) == {
        "up.weight": "bfloat16",
        "gate.weight": "float32",
        "gate.bias": "bfloat16",
        "norm.weight": "bfloat16",
        "count": "int64",
    }
    taken = export(source, 100)
    assert torch.equal(taken["gate.weight"], module.gate.weight)
    assert torch.equal(taken["up.weight"], module.up.weight.bfloat16())


def test_what_the_trainer_has_in_fewer_bits_is_widened(tmp_path: Path) -> None:
    """No value changes."""
    module, folder = Tiny().bfloat16(), stored(tmp_path / "m", gate_weight=torch.float32)
    taken = export(HFModuleSource(module, served=folder), 100)
    assert taken["gate.weight"].dtype is torch.float32
    assert torch.equal(taken["gate.weight"], module.gate.weight.float())


def test_the_main_dtype_is_replaced_and_others_stay(tmp_path: Path) -> None:
    """For a server that was launched in another dtype than its files."""
    folder = stored(tmp_path / "m", gate_weight=torch.float32)
    served = found(HFModuleSource(Tiny(), dtype=torch.float16, served=folder))
    assert {name: served[name] for name in ("up.weight", "norm.weight", "gate.weight")} == {
        "up.weight": "float16",
        "norm.weight": "float16",
        "gate.weight": "float32",
    }


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_every_source_takes_it(tmp_path: Path) -> None:
    """Sharded, gathered and exported ones, and dtypes by name in place of a folder."""
    module, folder = Tiny(), stored(tmp_path / "m", gate_weight=torch.float32)
    wanted = found(HFModuleSource(module, dtype=torch.bfloat16, served=folder))
    for served in (folder, str(folder), {**wanted, "count": "float32"}):
        sources = (
            FSDPSource(module, dtype=torch.bfloat16, served=served),
            FullTensorSource(module, dtype=torch.bfloat16, served=served),
            ExportedSource(
                lambda: iter(module.state_dict().items()), model="Tiny", dtype=torch.bfloat16, served=served
            ),
        )
        for source in sources:
            assert found(source) == wanted
            assert torch.equal(export(source, 100)["gate.weight"], module.gate.weight)
            source.close()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from([None, *DTYPES]), st.sampled_from(DTYPES))
def test_every_tensor_is_the_masters_cast_once(own: torch.dtype, asked: torch.dtype | None, kept: torch.dtype) -> None:
    """Whatever the three are: bytes are those of a single cast from the trainer's tensor."""
    module = Tiny().to(own)
    source = HFModuleSource(module, dtype=asked, served={"gate.weight": kept})
    taken, served = export(source, 50), found(source)
    assert served["gate.weight"] == str(kept).removeprefix("torch.")
    for name, tensor in module.state_dict().items():
        assert torch.equal(taken[name], tensor.to(getattr(torch, served[name])))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("float16", {"norm.weight", "gate.bias"}), ("bfloat16", {"gate.bias"}), ("float32", set[str]())],
)
def test_what_transformers_keeps_in_float32_is_kept(dtype: str, kept: set[str]) -> None:
    """One list is for float16 alone, the strict one for any 16 bits; patterns are those of transformers."""
    module = Tiny()
    assert {name for name, _ in module.named_parameters() if kept_in_float32(module, name, dtype)} == kept
    served = found(HFModuleSource(module, dtype=getattr(torch, dtype)))
    assert {name for name, each in served.items() if each == "float32"} == (kept if dtype != "float32" else
        {"up.weight", "gate.weight", "gate.bias", "norm.weight"})  # fmt: skip
    module._keep_in_fp32_modules_strict = ("up.*weight",)
    assert kept_in_float32(module, "layers.0.up.proj.weight", "bfloat16")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_source_keeps_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported tensors have no module: the class in transformers says it, where the trainer has imported that."""
    module = Tiny()
    wanted = found(HFModuleSource(module, dtype=dtype))
    assert wanted["gate.bias"] == "float32"
    monkeypatch.setattr("sys.modules", {**sys.modules, "transformers": SimpleNamespace(Tiny=Tiny, tiny=3)})
    for served in (None, {"up.weight": dtype}):
        exported = ExportedSource(lambda: iter(module.state_dict().items()), model="Tiny", dtype=dtype, served=served)
        assert found(exported) == wanted
        assert torch.equal(export(exported, 100)["gate.bias"], module.gate.bias)
        exported.close()
    unknown = ExportedSource(lambda: iter(module.state_dict().items()), model="tiny", dtype=dtype)
    assert found(unknown)["gate.bias"] == str(dtype).removeprefix("torch.")
    unknown.close()
    monkeypatch.undo()
    for kind in (FSDPSource, FullTensorSource):
        source = kind(module, dtype=dtype)
        assert found(source) == wanted
        source.close()


def test_an_index_names_the_files(tmp_path: Path) -> None:
    """Files beside it do not count, and half of a checkpoint is told."""
    folder = stored(tmp_path / "m", gate_weight=torch.float32)
    save_file({"up.weight": torch.zeros(6, 4, dtype=torch.float64)}, folder / "consolidated.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"gate.weight": "model.safetensors"}}))
    assert has_files(folder)
    assert TensorDtypes(None, folder).of("up.weight", "float32") == "bfloat16"
    index.write_text(json.dumps({"weight_map": {"gate.weight": "gone.safetensors"}}))
    assert not has_files(folder)
    with pytest.raises(LayoutMismatch, match=r"some of those that its index names are missing"):
        TensorDtypes(None, folder)
    index.write_text("[]")
    with pytest.raises(LayoutMismatch, match=r"cannot be read as a safetensors checkpoint.*give served="):
        TensorDtypes(None, folder)


def test_what_tells_no_dtype_is_refused(tmp_path: Path) -> None:
    """With the places that would."""
    with pytest.raises(LayoutMismatch, match=r"no safetensors files in .*, or the dtypes by name"):
        HFModuleSource(Tiny(), served=tmp_path)
    with pytest.raises(UnsupportedModel, match=r"served=\{'up.weight': ..\} asks for 'int8'"):
        HFModuleSource(Tiny(), served={"up.weight": "int8"})
