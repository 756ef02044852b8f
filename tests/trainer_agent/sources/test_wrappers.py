"""What trainers wrap around a model: taken off, or refused with a way out that works."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from weightbus.trainer_agent.assembly.assembler import has_plain_memory
from weightbus.trainer_agent.source import LayoutMismatch, UnknownParameter, UnsupportedModel
from weightbus.trainer_agent.sources.exported import ExportedSource, FullTensorSource
from weightbus.trainer_agent.sources.hf_module import FSDPSource, HFModuleSource
from weightbus.trainer_agent.sources.wrappers import without_wrappers

from ...kit import real_te
from ...kit.exporting import differing, export
from ...kit.quantized_tensor import Float8Tensor


class Layer(nn.Module):
    """One matrix, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


class TinyForCausalLM(nn.Module):
    """Two layers, of which a trainer may wrap each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A world of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class DeepSpeedEngine(nn.Module):
    """The class name of DeepSpeed's engine, which holds the model as `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(module: nn.Module) -> nn.Module:
    return cast("nn.Module", torch.compile(module, backend="eager"))


def checkpointed(model: TinyForCausalLM) -> nn.Module:
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    return model


def compiled_layer(model: TinyForCausalLM) -> nn.Module:
    model.layers[0] = compiled(model.layers[0])
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        nn.parallel.DistributedDataParallel,
        nn.DataParallel,
        compiled,
        DeepSpeedEngine,
        checkpointed,
        compiled_layer,
        lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
        lambda model: nn.parallel.DistributedDataParallel(compiled(compiled_layer(model))),
        checkpoint_wrapper,
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_wrappers_that_keep_parameters_are_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Names, values and architecture are those of the model inside."""
    model = TinyForCausalLM()
    inside = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = HFModuleSource(wrap(model))
    assert source.model == "TinyForCausalLM"
    assert differing(export(source, 100), inside) == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shard", [fully_shard, replicate_with_fsdp.replicate, replicate])
def test_calls_that_change_the_class_of_a_module(shard: Callable[[nn.Module], Any]) -> None:
    """Sharded or replicated in place: architecture, names and values stay, for every source of modules."""
    model = TinyForCausalLM()
    inside = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shard(model)
    assert type(model) is not TinyForCausalLM
    for kind in (HFModuleSource, FSDPSource, FullTensorSource):
        source = kind(model)
        assert source.model == "TinyForCausalLM"
        assert differing(export(source, 100), inside) == []
        source.close()


class Tuner(nn.Module):
    """A layer that an adapter was put into."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.ia3_l = nn.Parameter(torch.ones(4))


def adapted(base: str) -> Callable[[TinyForCausalLM], nn.Module]:
    """A model of which one layer derives from a class of this name, as peft's classes do; peft need not be there."""

    def adapt(model: TinyForCausalLM) -> nn.Module:
        model.layers[0].proj = type("Layer", (Tuner, type(base, (), {})), {})()
        return model

    return adapt


def partitioned(model: TinyForCausalLM) -> nn.Module:
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = tuple(parameter.shape), torch.empty(0)
    return model


def emptied(model: TinyForCausalLM) -> nn.Module:
    model.embed.weight.data = torch.empty(0)
    return model


def part_in_data_parallel(model: TinyForCausalLM) -> nn.Module:
    model.layers[0] = nn.DataParallel(model.layers[0])
    return model


def of_megatron(model: TinyForCausalLM) -> nn.Module:
    model.layers[0] = type("TransformerLayer", (Layer, type("MegatronModule", (), {})), {})()
    return model


REFUSED: list[tuple[Callable[[TinyForCausalLM], nn.Module], str]] = [
    (adapted("BaseTunerLayer"), r"'layers\.0\.proj' \(Layer\) is an adapter.* merge it into its base weights before"),
    (adapted("PeftModel"), "merge_and_unload"),
    (adapted("AuxiliaryTrainingWrapper"), "merge_and_unload"),
    (adapted("AdapterWrapper"), "merge it into its base weights"),
    (partitioned, r"'embed\.weight' \(0,\) is partitioned by DeepSpeed ZeRO-3, its whole shape is \(6, 4\): .* gather"),
    (emptied, r"'embed\.weight' has shape \(0,\): .* ZeRO-3 .* ExportedSource"),
    (part_in_data_parallel, r"'layers\.0' \(DataParallel\) wraps a part of the model"),
    (of_megatron, "use MegatronSource"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_parameters_that_are_not_the_models_are_refused(
    change: Callable[[TinyForCausalLM], nn.Module], words: str
) -> None:
    """When the source is built, by every source of modules; with what to do."""
    module = change(TinyForCausalLM())
    for kind in (HFModuleSource, FullTensorSource):
        with pytest.raises(UnsupportedModel, match=words):
            kind(module)


def flat(model: TinyForCausalLM) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def flat_layers(model: TinyForCausalLM) -> nn.Module:
    model.layers[1] = flat(model.layers[1])
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [flat, flat_layers])
def test_flat_parameters_are_refused_before_anything_is_gathered_and_the_way_out_works(
    wrap: Callable[[TinyForCausalLM], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older FullyShardedDataParallel, around all or a part; its state dict gathers the whole model."""
    model = TinyForCausalLM()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    module = wrap(model)

    def taken(*_: object, **__: object) -> None:
        raise AssertionError("a state dict was taken")

    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "state_dict", taken)
        for kind in (HFModuleSource, FSDPSource, FullTensorSource):
            with pytest.raises(UnsupportedModel, match=r"FullyShardedDataParallel.*fully_shard.*get_model_state_dict"):
                kind(module)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield from get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)).items()

    source = ExportedSource(gathered, model="TinyForCausalLM")
    assert differing(export(source, 100), before) == []
    source.close()


def test_a_part_that_is_called_adapter_is_served() -> None:
    """Vision towers have such parts; only a low-rank pair is an adapter by its name."""
    model = TinyForCausalLM()
    model.adapter = nn.Linear(4, 4)
    model.layers[0].adapter = nn.Linear(4, 4)
    assert {"adapter.weight", "layers.0.adapter.bias"} <= {spec.name for spec in HFModuleSource(model).tensors()}
    model.layers[0].lora_A = nn.Linear(4, 2)
    with pytest.raises(UnsupportedModel, match=r"'layers\.0\.lora_A\.weight' is part of an adapter"):
        HFModuleSource(model)


@pytest.mark.parametrize("module", [nn.Module(), nn.ModuleList(), nn.Sequential()])
def test_a_container_of_torch_gives_no_model_its_name(module: nn.Module) -> None:
    """Engines compare the name with their config: the name is asked for, and one that is given is taken."""
    module.add_module("tiny", TinyForCausalLM())
    source = HFModuleSource(module)
    with pytest.raises(UnsupportedModel, match="build the source with model="):
        _ = source.model
    assert HFModuleSource(module, model="TinyForCausalLM").model == "TinyForCausalLM"
    with pytest.raises(UnsupportedModel, match="build the source with model="):
        _ = FullTensorSource(module).model


@pytest.mark.usefixtures("one_rank")
def test_a_stand_in_has_the_classes_that_parts_had_before_they_were_sharded() -> None:
    """With the trainer's own tensors, shared parts shared, wrappers gone; the trainer's module keeps its classes."""
    model = TinyForCausalLM()
    model.again = model.layers[0]
    names = [(name, type(part)) for name, part in model.named_modules()]
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    compiled_layer(checkpointed(model))
    plain = without_wrappers(model)
    assert [(name, type(part)) for name, part in plain.named_modules()] == names
    assert plain.again is plain.layers[0]
    assert plain.embed.weight is model.embed.weight
    assert type(model).__name__ == "FSDPTinyForCausalLM"


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_module_on_several_ranks_is_no_single_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of its tensors would be served as the whole."""
    model = TinyForCausalLM()
    fully_shard(model)
    local = type(model.embed.weight).to_local
    monkeypatch.setattr(type(model.embed.weight), "to_local", lambda self: local(self)[:2])
    with pytest.raises(LayoutMismatch):
        HFModuleSource(model)


def quantized(model: TinyForCausalLM) -> tuple[TinyForCausalLM, dict[str, torch.Tensor]]:
    """The model with one parameter in FP8, and the values that it computes with."""
    weight = nn.Parameter(Float8Tensor(model.layers[0].proj.weight.detach().bfloat16()), requires_grad=False)
    model.layers[0].proj.weight = weight
    expected: dict[str, torch.Tensor] = {name: each.detach() for name, each in model.state_dict(keep_vars=True).items()}
    return model, expected | {"layers.0.proj.weight": weight.dequantize()}


def test_parameters_kept_quantized_are_never_read_as_they_lie() -> None:
    """They look as if they were in 16 bits: told by their type, named with the way out."""
    model, _ = quantized(TinyForCausalLM())
    for dtype in (None, torch.bfloat16):
        with pytest.raises(UnknownParameter, match=r"'layers\.0\.proj\.weight' .*Float8Tensor, quantized.*FullTensorS"):
            HFModuleSource(model, dtype=dtype)


def test_parameters_kept_quantized_are_dequantized_where_whole_tensors_are_gathered() -> None:
    """By their own class, anew for each version."""
    model, expected = quantized(TinyForCausalLM())
    source = FullTensorSource(model)
    assert differing(export(source, 100), expected) == []
    model.layers[0].proj.weight._scale_inv *= 2
    doubled = expected["layers.0.proj.weight"] * 2
    assert torch.equal(export(source, 100)["layers.0.proj.weight"], doubled)


@pytest.mark.usefixtures("one_rank")
def test_parameters_kept_quantized_are_dequantized_under_fsdp_and_from_exporters() -> None:
    """The shard of a DTensor may be quantized, and an exporter may yield what the trainer holds."""
    model, expected = quantized(TinyForCausalLM())
    source = ExportedSource(lambda: iter(model.state_dict(keep_vars=True).items()), model="TinyForCausalLM")
    assert differing(export(source, 100), expected) == []
    source.close()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    local = Float8Tensor(expected["embed.weight"].bfloat16())
    sharded: Any = dist.tensor.DTensor.from_local(local, mesh, [dist.tensor.Shard(0)], run_check=False)
    model.embed.weight = nn.Parameter(sharded, requires_grad=False)
    with pytest.raises(UnknownParameter, match="Float8Tensor, quantized"):
        FSDPSource(model)
    whole = FullTensorSource(model)
    assert torch.equal(export(whole, 100)["embed.weight"], local.dequantize())
    whole.close()


def test_other_kinds_of_tensors_are_refused_by_type() -> None:
    """A class that answers for its memory without saying how to dequantize it."""
    kind = type("PackedTensor", (Float8Tensor,), {"dequantize": torch.Tensor.dequantize})
    model = TinyForCausalLM()
    model.embed.weight = nn.Parameter(kind(torch.rand(6, 4)), requires_grad=False)
    with pytest.raises(UnknownParameter, match=r"'embed\.weight' .*PackedTensor, .*need not be its values.*plain"):
        HFModuleSource(model)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tensor classes of its wheel; CONTRIBUTING.md says how to unpack one."""
    if not (folder := os.environ.get("WEIGHTBUS_TE_OVERLAY")):
        pytest.skip("WEIGHTBUS_TE_OVERLAY names no folder with the wheel of transformer_engine")
    yield real_te.tensor_classes(Path(folder), monkeypatch)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore")
def test_transformer_engines_own_classes_are_told_and_dequantized(transformer_engine: Any) -> None:
    """Every quantized class is refused where memory is read; `Float8Tensor` is served as it dequantizes itself."""
    kinds = [kind for kind in vars(transformer_engine).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, torch.Tensor)]
    assert len(kinds) >= 5
    for kind in kinds:
        assert not has_plain_memory(torch.Tensor._make_wrapper_subclass(kind, (2, 2), dtype=torch.bfloat16)), kind
    model = TinyForCausalLM()
    values = model.layers[0].proj.weight.detach().bfloat16()
    model.layers[0].proj.weight = nn.Parameter(real_te.float8(transformer_engine, values), requires_grad=False)
    with pytest.raises(UnknownParameter, match=r"transformer_engine's Float8Tensor, quantized.*FullTensorSource"):
        HFModuleSource(model)
    source = FullTensorSource(model)
    for _ in range(2):
        held = model.layers[0].proj.weight
        assert torch.equal(export(source, 100)["layers.0.proj.weight"], held.dequantize())
        held._scale_inv.mul_(2)


class Gathered:
    """As deepspeed.zero.GatheredParameters: inside, parameters have their values; afterwards, none."""

    def __init__(self, whole: dict[str, torch.Tensor], model: nn.Module) -> None:
        self.whole, self.model = whole, model

    def __enter__(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data = self.whole[name].clone()

    def __exit__(self, *_: object) -> None:
        for parameter in self.model.parameters():
            parameter.data = torch.empty(0)


@pytest.mark.usefixtures("one_rank")
def test_the_way_out_of_zero3_serves_every_version() -> None:
    """Gathered one layer after another by an exporter, by the names that parameters have; nothing stays gathered."""
    model = TinyForCausalLM()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    partitioned(model)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            with Gathered(whole, model):
                yield name, parameter.detach()

    source = ExportedSource(gathered, model="TinyForCausalLM")
    for _ in range(2):
        assert differing(export(source, 100), whole) == []
        for tensor in whole.values():
            tensor.add_(1)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    source.close()
