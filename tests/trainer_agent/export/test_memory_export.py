"""What the ranks of a source let engines read, and what they digest of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from weightbus.control.protocol.errors import ConfigurationError
from weightbus.control.protocol.messages import TransportKind
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.memory.exports import RegionExporter, RegionImporter
from weightbus.dataplane.tensors.coverage import check_exact_cover
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.trainer_agent.export.memory_export import MemoryExport
from weightbus.trainer_agent.publish.agent import start_rank_zero
from weightbus.trainer_agent.publish.bucket_staging import VersionLayout
from weightbus.trainer_agent.settings import TrainerSettings
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

from ...kit.exposing import read


@pytest.fixture
def source() -> HFModuleSource:
    """A module with a transposed and a tied parameter."""
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(torch.arange(12.0).view(3, 4).t())
    module.second = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    module.third = module.second
    return HFModuleSource(module)


@pytest.fixture
def memory_export(source: HFModuleSource, tmp_path: Path) -> Iterator[MemoryExport]:
    made = MemoryExport(source, Manifest.of("toy", source.tensors()), tmp_path / "r", "c")
    yield made
    made.close()


def test_the_live_parameters_are_what_is_read(source: HFModuleSource, memory_export: MemoryExport) -> None:
    """Every tensor once, where it lies and as it lies; readers see later values too."""
    memory_export.export()
    exported = memory_export.current
    importer = RegionImporter()
    piece = next(p for p in map(exported.shards.at, range(len(exported.shards))) if p.tensor == "first")
    place = exported.exports[0].places[piece.view.storage]
    (exporter,) = exported.exporters

    importer.open(exporter.address, 0, exporter.generation, [place.region], 10.0)
    memory = importer.region(0, place.region)[place.offset :].view(torch.float32)
    seen = torch.as_strided(memory, (4, 3), piece.view.strides, piece.view.offset)
    source.memory()[0].data[0, 0] = 99.0

    check_exact_cover(exported.shards)
    assert seen[0, 0] == 99.0
    assert torch.equal(seen[1:], torch.arange(12.0).view(3, 4).t()[1:])
    memory_export.export()
    assert memory_export.current is exported
    importer.close()


def test_memory_that_cannot_be_exported_is_found_at_the_start(
    source: HFModuleSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trainer that allows nothing else does not start; it is told why, and what to allow (F14)."""

    def refuse(_self: RegionExporter, _tensors: object, **_: object) -> object:
        raise NotExportable("an expandable segment")

    monkeypatch.setattr(RegionExporter, "export", refuse)
    settings = TrainerSettings(
        channel="c",
        transport=(TransportKind.DIRECT,),
        insecure_loopback=True,
        runtime_dir=tmp_path / "r",  # type: ignore[arg-type]
    )

    with pytest.raises(ConfigurationError, match="allow local too"):
        start_rank_zero(source, settings, VersionLayout(Manifest.of("toy", source.tensors()), None))


class Ranks:
    """Ranks of one process: each holds half of every tensor's rows, norms around zero, masters in float32."""

    TENSORS = (TensorSpec("norm", "bfloat16", (16,)), TensorSpec("up", "bfloat16", (8, 12)))

    def __init__(self) -> None:
        self.gathered: list[list[bytes]] = [[], []]
        self.turn = threading.Barrier(2)
        self.values = {"norm": torch.randn(16) * 0.1, "up": torch.randn(8, 12)}

    def source(self, rank: int) -> RankSource:
        return RankSource(self, rank)

    def expected(self) -> dict[str, torch.Tensor]:
        """What assembling buckets makes of it: one is added in the dtype that is trained, then it is cast."""
        return {"norm": (self.values["norm"] + 1).bfloat16(), "up": self.values["up"].bfloat16()}


class RankSource:
    """One of them: `Exportable`."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.mine = [torch.zeros(3), self.half("up"), torch.zeros(0), self.half("norm")]

    def half(self, name: str) -> torch.Tensor:
        value = self.ranks.values[name]
        return value[value.shape[0] // 2 * self.rank :][: value.shape[0] // 2].clone()

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        norm = Shard("norm", Box((8 * self.rank,), (8 * self.rank + 8,)), "float32", ShardView(3, 0, (1,)), shift=1)
        up = Shard("up", Box((4 * self.rank, 0), (4 * self.rank + 4, 12)), "float32", ShardView(1, 0, (12, 1)))
        return Shards.of(tensors, [norm, up], self.rank)

    def memory(self) -> Sequence[torch.Tensor]:
        return self.mine

    def collect(self, blob: bytes) -> Sequence[bytes]:
        self.ranks.gathered[self.rank] = [blob]
        self.ranks.turn.wait(30)
        found = [each[0] for each in self.ranks.gathered]
        self.ranks.turn.wait(30)
        return found


class Group:
    """Both ranks' memory exports, called together."""

    def __init__(self, folder: Path) -> None:
        self.ranks = Ranks()
        self.manifest = Manifest.of("toy", Ranks.TENSORS)
        self.sources = [self.ranks.source(rank) for rank in range(2)]
        self.memory_exports = [MemoryExport(source, self.manifest, folder, "c") for source in self.sources]
        self._pool = ThreadPoolExecutor(2)

    def both(self, call: Callable[[MemoryExport], object]) -> list[object]:
        """What each rank returns; raises what any of them raises, once all have ended."""
        futures = [self._pool.submit(call, memory_export) for memory_export in self.memory_exports]
        wait(futures, 30)
        return [future.result() for future in futures]

    def close(self) -> None:
        for memory_export in self.memory_exports:
            memory_export.close()
        self._pool.shutdown()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "r")
    yield made
    made.close()


def digest(tensor: torch.Tensor) -> bytes:
    packed = tensor.contiguous().view(-1).view(torch.uint8)
    return integrity.digest_tensors(packed, (0, len(packed)))


def test_what_is_served_with_something_added_is_exposed_so(group: Group) -> None:
    """Norms that are kept around zero, and masters in float32: what engines read is what buckets would hold."""
    group.both(MemoryExport.export)
    found = group.both(MemoryExport.digests)

    expected = group.ranks.expected()
    tensors = read(group.memory_exports[0].current, group.manifest)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert found == [digest(expected["norm"]) + digest(expected["up"]), b""]
    assert not group.memory_exports[0].current.shards.shift.any()


def test_a_step_is_in_what_is_read_and_digested_next(group: Group) -> None:
    """In the same memory: the layout and the generations stay, derived tensors follow."""
    group.both(MemoryExport.export)
    group.both(MemoryExport.digests)
    before = group.memory_exports[0].current
    for value in group.ranks.values.values():
        value.mul_(0.5)
    for source in group.sources:
        source.mine[1].copy_(source.half("up"))
        source.mine[3].copy_(source.half("norm"))

    group.both(MemoryExport.export)
    found = group.both(MemoryExport.digests)

    expected = group.ranks.expected()
    tensors = read(group.memory_exports[0].current, group.manifest)
    assert group.memory_exports[0].current is before
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert found[0] == digest(expected["norm"]) + digest(expected["up"])


def test_memory_that_was_replaced_is_exposed_and_digested_anew(group: Group) -> None:
    """An optimizer that offloads puts other memory under a shard: another generation each time.

    The layout changes the first time alone, when the shard leaves the arena that it shared: no plan is made anew later.
    """
    group.both(MemoryExport.export)
    group.both(MemoryExport.digests)
    layouts: list[str] = []
    for generation in (2, 3):
        group.sources[1].mine[1] = group.sources[1].mine[1].clone()
        group.ranks.values["up"][5] = 5.0 + generation
        group.sources[1].mine[1].copy_(group.sources[1].half("up"))

        group.both(MemoryExport.export)
        found = group.both(MemoryExport.digests)

        current = group.memory_exports[0].current
        layouts.append(current.layout)
        assert [each.generation for each in current.exporters] == [1, generation]
        assert found[0] == digest(group.ranks.expected()["norm"]) + digest(group.ranks.expected()["up"])
        assert torch.equal(read(current, group.manifest)["up"], group.ranks.expected()["up"])
    assert layouts[0] == layouts[1]


def test_what_one_rank_cannot_export_every_rank_hears(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """They all raise the same, so that they all go on by the next transport."""
    export = RegionExporter.export

    def refuse(exporter: RegionExporter, tensors: Sequence[torch.Tensor], **how: Any) -> object:
        if exporter._rank == 1:
            raise NotExportable("an expandable segment")
        return export(exporter, tensors, **how)

    monkeypatch.setattr(RegionExporter, "export", refuse)

    def told(memory_export: MemoryExport) -> str:
        with pytest.raises(NotExportable) as raised:
            memory_export.export()
        return str(raised.value)

    assert group.both(told) == ["rank 1: an expandable segment"] * 2


def test_digests_that_a_preparation_began_go_on_through_the_export(group: Group) -> None:
    """They begin once the share is known, are collected once, and end where memory was replaced."""

    def digesting() -> set[bool]:
        return {each.digesting for each in group.memory_exports}

    group.both(MemoryExport.export)
    group.both(lambda each: each.prepare(digests=True))
    assert digesting() == {False}, "no share is known before the first digests"
    group.both(MemoryExport.digests)
    group.both(lambda each: each.prepare(digests=True))
    assert digesting() == {True}
    group.both(lambda each: each.export(prepared=True))
    assert digesting() == {True}
    group.both(MemoryExport.digests)
    assert digesting() == {False}
    group.both(lambda each: each.prepare(digests=True))
    for source in group.sources:
        source.mine[1] = source.mine[1].clone()
    group.both(MemoryExport.export)
    assert digesting() == {False}
    group.both(MemoryExport.close)
    group.both(MemoryExport.close)
