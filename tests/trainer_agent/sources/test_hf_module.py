"""A plain module as a source."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.source import LayoutMismatch, UnknownParameter, UnsupportedModel
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

from ...kit.exporting import export


class Tiny(nn.Module):
    """An embedding tied to a head, a convolution, a scalar and a mask that checkpoints do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 2, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000])
def test_every_tensor_travels_once_under_its_name(bucket_bytes: int) -> None:
    """Tied tensors go under their first name, and what the state dict leaves out stays at home."""
    module = Tiny()
    found = export(HFModuleSource(module), bucket_bytes)
    expected = {name: tensor for name, tensor in module.state_dict().items() if name != "head.weight"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_served_dtype_may_be_another() -> None:
    """Masters in float32 are cast on the way."""
    module = Tiny()
    found = export(HFModuleSource(module, model="TinyForCausalLM", dtype=torch.bfloat16), 100)
    assert torch.equal(found["embed.weight"], module.embed.weight.bfloat16())


def test_it_is_its_own_group() -> None:
    """One process: the root, which agrees with itself."""
    source = HFModuleSource(Tiny())
    assert (source.root, source.model, source.device) == (True, "Tiny", torch.device("cpu"))
    assert source.agree(b"go") == b"go"


def test_what_a_root_must_give_is_asked_for() -> None:
    """A caller that took itself for a follower is told."""
    source = HFModuleSource(Tiny())
    with pytest.raises(ValueError, match="only the root"):
        source.agree(None)
    with pytest.raises(ValueError, match="only the root"):
        source.assemble(Manifest.of("Tiny", source.tensors()), 0, None)


def test_a_manifest_of_another_module_is_refused() -> None:
    """The names must be this module's."""
    source = HFModuleSource(Tiny())
    with pytest.raises(LayoutMismatch):
        source.assemble(Manifest.of("Tiny", source.tensors()[:2]), 0, torch.empty(1000, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("change", "served", "advice"),
    [
        (lambda module: module.to_empty(device="meta"), None, "no values yet"),
        (lambda module: module.to(torch.float8_e4m3fn), torch.bfloat16, "scale would be lost"),
    ],
)
def test_memory_that_is_not_the_values_is_refused(
    change: Callable[[nn.Module], nn.Module], served: torch.dtype | None, advice: str
) -> None:
    """Named with its shape and dtype; quantized values would be served without what scales them."""
    with pytest.raises(UnknownParameter, match=rf"'scale' \(\) .*{advice}"):
        HFModuleSource(change(nn.ParameterDict({"scale": torch.tensor(0.5)})), dtype=served)


def assign(module: Tiny) -> None:
    module.load_state_dict({name: torch.zeros_like(each) for name, each in module.state_dict().items()}, assign=True)


def replace(module: Tiny) -> None:
    module.conv.weight = nn.Parameter(torch.zeros_like(module.conv.weight))


def turn(module: Tiny) -> None:
    module.conv.weight.data = torch.zeros(3, 4, 2).permute(2, 1, 0)


def shrink(module: Tiny) -> None:
    module.conv.weight.data = torch.zeros(1, 4, 3)


def convert(module: Tiny) -> None:
    module.half()


def remove(module: Tiny) -> None:
    module.conv.bias = None


def add(module: Tiny) -> None:
    module.late = nn.Parameter(torch.zeros(2))


def untie(module: Tiny) -> None:
    module.head.weight = nn.Parameter(torch.zeros(5, 4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (assign, "'scale' .* is another tensor now"),
        (replace, r"'conv\.weight' .* is another tensor now"),
        (
            turn,
            r"'conv\.weight' is now \(2, 4, 3\) with strides \(1, 2, 8\).* it was .* with strides \(12, 3, 1\)",
        ),
        (shrink, r"'conv\.weight' is now \(1, 4, 3\) .* it was \(2, 4, 3\)"),
        (convert, "'scale' is now .*float16.* it was .*float32"),
        (remove, r"'conv\.bias' .* is not in the model any more"),
        (add, "'late' .* was not in the model before"),
        (untie, r"'head\.weight' .* was not in the model before"),
    ],
)
def test_replaced_parameters_are_refused_and_not_served_as_they_were(
    change: Callable[[Tiny], None], words: str
) -> None:
    """By the first bucket of the next version, and where memory is read by others: digests could not tell."""
    module = Tiny()
    source = HFModuleSource(module)
    export(source, 100)
    change(module)
    with pytest.raises(LayoutMismatch, match=f"{words}.*build the source again after replacing parameters"):
        export(source, 100)
    with pytest.raises(LayoutMismatch, match=words):
        source.memory()


def test_new_memory_under_a_parameter_is_read() -> None:
    """Of the same form it is no other parameter: optimizers that offload do that."""
    module = Tiny()
    source = HFModuleSource(module)
    export(source, 100)
    for parameter in module.parameters():
        parameter.data = torch.rand(3 + parameter.numel())[3:].view(parameter.shape)
    found = export(source, 100)
    assert all(torch.equal(found[name], parameter) for name, parameter in module.named_parameters())
    assert all(
        any(parameter.data_ptr() == each.data_ptr() for each in source.memory()) for parameter in module.parameters()
    )


def test_parameters_that_were_offloaded_are_refused_and_read_again_when_they_are_back() -> None:
    """Trainers empty storages under parameters that keep their shape; nothing is read from where nothing is."""
    module = Tiny()
    source = HFModuleSource(module)
    first = export(source, 100)
    storage = module.conv.weight.untyped_storage()
    storage.resize_(0)
    with pytest.raises(LayoutMismatch, match=r"'conv\.weight' .* on cpu\) has no memory now: .* load it back"):
        export(source, 100)
    with pytest.raises(LayoutMismatch, match="has no memory now"):
        source.memory()
    storage.resize_(module.conv.weight.numel() * 4)
    with torch.no_grad():
        module.conv.weight.copy_(first["conv.weight"] + 1)
    assert torch.equal(export(source, 100)["conv.weight"], first["conv.weight"] + 1)


@pytest.mark.parametrize("name", ["a b", "ünder", "x" * 257, "_scale:0"])
def test_names_that_cannot_travel_are_refused_at_the_start(name: str) -> None:
    """Not when the first version is published; with what to do."""
    with pytest.raises(UnsupportedModel, match=r"is not a tensor name .* rename the tensor as checkpoints would"):
        HFModuleSource(nn.ParameterDict({name: torch.zeros(2)}))


def test_shapes_that_cannot_travel_are_refused_at_the_start() -> None:
    """A parameter without elements, as a part that was left empty on purpose."""
    with pytest.raises(UnsupportedModel, match=r"'empty' has shape \(0, 4\).* leave it out of the state dict"):
        HFModuleSource(nn.ParameterDict({"empty": torch.zeros(0, 4)}))


@pytest.mark.parametrize("served", [torch.int8, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64])
def test_parameters_are_served_as_floats_of_sixteen_bits_or_more(served: torch.dtype) -> None:
    """Fractions would be gone in integers, and in eight bits there would be no scale."""
    with pytest.raises(UnsupportedModel, match=f"'{str(served)[6:]}': .* bfloat16, float16, float32, float64"):
        HFModuleSource(Tiny(), dtype=served)


def test_fused_experts_are_refused() -> None:
    """In memory transformers fuses experts that checkpoints name one by one."""
    module = nn.Module()
    module.experts = nn.Module()
    module.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 4))
    with pytest.raises(UnsupportedModel, match=r"experts\.gate_up_proj"):
        HFModuleSource(module)


class Config:
    """Of a model whose head is a matrix of its own."""

    tie_word_embeddings = False


class Untied(nn.Module):
    """Says one thing and holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.embed = nn.Embedding(5, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.embed.weight


def test_a_head_that_is_shared_and_not_tied_is_refused() -> None:
    """An engine that follows the config wants it, and nobody would send it."""
    with pytest.raises(LayoutMismatch, match=r"'lm_head\.weight' and 'embed\.weight' are one tensor"):
        HFModuleSource(Untied())
    module = Untied()
    module.lm_head.weight = nn.Parameter(torch.ones(5, 4))
    assert [spec.name for spec in HFModuleSource(module).tensors()] == ["embed.weight", "lm_head.weight"]


def test_names_are_those_inside_of_data_parallel() -> None:
    """The wrapper is no part of the model."""
    inside = [spec.name for spec in HFModuleSource(Tiny()).tensors()]
    assert [spec.name for spec in HFModuleSource(nn.DataParallel(Tiny())).tensors()] == inside


def test_a_weight_that_is_computed_is_refused() -> None:
    """Its parts are not what a checkpoint holds."""
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(UnsupportedModel, match="remove the parametrization"):
        HFModuleSource(nn.Sequential(module))
