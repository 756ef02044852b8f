"""A plain module as a source."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightbus.dataplane.manifest import Manifest
from weightbus.trainer_agent.assembly import DTYPES
from weightbus.trainer_agent.hf_module import HFModuleSource
from weightbus.trainer_agent.source import LayoutMismatch, Source, UnknownParameter, UnsupportedModel


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


def export(source: Source, bucket_bytes: int) -> dict[str, torch.Tensor]:
    manifest = Manifest.of(source.model, source.tensors(), bucket_bytes)
    found: dict[str, torch.Tensor] = {}
    for index, bucket in enumerate(manifest.buckets):
        out = torch.empty(bucket.nbytes, dtype=torch.uint8)
        source.assemble(manifest, index, out)
        for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            found[spec.name] = out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
    return found


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
    with pytest.raises(ValueError, match="the root gives"):
        source.agree(None)
    with pytest.raises(ValueError, match="the root gives"):
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
    """Named with its shape and dtype; quantised values would be served without what scales them."""
    with pytest.raises(UnknownParameter, match=rf"'scale' \(\) .*{advice}"):
        HFModuleSource(change(nn.ParameterDict({"scale": torch.tensor(0.5)})), dtype=served)


def test_fused_experts_are_refused() -> None:
    """In memory transformers fuses experts that checkpoints name one by one."""
    module = nn.Module()
    module.experts = nn.Module()
    module.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 4))
    with pytest.raises(UnsupportedModel, match=r"experts\.gate_up_proj"):
        HFModuleSource(module)
