"""What a source of one process lets engines read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightbus.control.errors import ConfigurationError
from weightbus.control.messages import TransportKind
from weightbus.dataplane.cover import prove
from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.exporter import RegionExporter
from weightbus.dataplane.importer import RegionImporter
from weightbus.dataplane.manifest import Manifest
from weightbus.dataplane.transport import Address
from weightbus.trainer_agent.exposure import Exposure
from weightbus.trainer_agent.hf_module import HFModuleSource
from weightbus.trainer_agent.leader import lead
from weightbus.trainer_agent.settings import TrainerSettings


@pytest.fixture
def source() -> HFModuleSource:
    """A module with a transposed and a tied parameter."""
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(torch.arange(12.0).view(3, 4).t())
    module.second = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    module.third = module.second
    return HFModuleSource(module)


@pytest.fixture
def exposure(source: HFModuleSource, tmp_path: Path) -> Iterator[Exposure]:
    made = Exposure(source, Manifest.of("toy", source.tensors()), tmp_path / "r", "c")
    yield made
    made.close()


def test_the_live_parameters_are_what_is_read(source: HFModuleSource, exposure: Exposure) -> None:
    """Every tensor once, where it lies and as it lies; readers see later values too."""
    exposed = exposure()
    importer = RegionImporter()
    piece = next(p for p in map(exposed.pieces.at, range(len(exposed.pieces))) if p.tensor == "first")
    place = exposed.exports[0].places[piece.view.storage]
    (exporter,) = exposed.exporters

    importer.open(Address(exporter.address), 0, exporter.generation, [place.region], 10.0)
    memory = importer.region(0, place.region)[place.offset :].view(torch.float32)
    seen = torch.as_strided(memory, (4, 3), piece.view.strides, piece.view.offset)
    source.local(source.tensors())[0][0].data[0, 0] = 99.0

    prove(exposed.pieces)
    assert seen[0, 0] == 99.0
    assert torch.equal(seen[1:], torch.arange(12.0).view(3, 4).t()[1:])
    assert exposure().digest() == exposed.digest()
    importer.close()


def test_memory_that_cannot_be_exported_is_found_at_the_start(
    source: HFModuleSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trainer that allows nothing else does not start; it is told why, and what to allow."""

    def refuse(_self: RegionExporter, _tensors: object) -> object:
        raise NotExportable("an expandable segment")

    monkeypatch.setattr(RegionExporter, "export", refuse)
    settings = TrainerSettings(
        channel="c",
        transport=(TransportKind.DIRECT,),
        insecure_loopback=True,
        runtime_dir=tmp_path / "r",  # type: ignore[arg-type]
    )

    with pytest.raises(ConfigurationError, match="allow local too"):
        lead(source, settings, Manifest.of("toy", source.tensors()))
