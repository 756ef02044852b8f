"""Storages that are moved into arenas of shared memory."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.memory import exports, shared_arenas
from weightbus.dataplane.memory.exports import RegionExporter, RegionImporter
from weightbus.dataplane.memory.shared_arenas import ArenaLookup, movable, move

OPEN_S = 60.0


def arena_at(tensor: torch.Tensor) -> shared_arenas.Arena:
    """The arena in which it lies."""
    found = ArenaLookup().of(tensor.data_ptr())
    assert found is not None
    return found


def test_a_moved_storage_is_the_same_storage() -> None:
    """Parameters, views, tied weights, gradients and optimizer states go on as if nothing had happened."""
    assert movable()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weight, view = model[0].weight, model[0].weight.detach()[1:]
    twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twin[1].weight = twin[0].weight
    twin.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(twin.parameters(), lr=0.1)

    def step(trained: nn.Module, by: torch.optim.Optimizer) -> None:
        trained(torch.ones(2, 4)).sum().backward()
        by.step()

    step(model, optimizer)
    storage = weight.untyped_storage()
    move([storage])
    step(model, optimizer)
    step(twin, other)
    step(twin, other)

    assert model[1].weight is weight
    assert weight.untyped_storage().data_ptr() == view.untyped_storage().data_ptr() == storage.data_ptr()
    assert torch.equal(weight[1:], view)
    assert torch.equal(weight, twin[0].weight)
    assert storage.nbytes() == 64


def test_storages_share_an_arena_until_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """One larger than an arena has its own; each begins where torch's own allocator could have put it."""
    monkeypatch.setattr(shared_arenas, "ARENA_BYTES", 256)
    tensors = [torch.full((size,), float(size)) for size in (3, 17, 400, 1, 2)]

    move([each.untyped_storage() for each in tensors])

    arenas = [arena_at(each) for each in tensors]
    assert arenas[0] is arenas[1] is not arenas[2]
    assert arenas[3] is arenas[4] is not arenas[2]
    assert [len(each) for each in arenas] == [192, 192, 1600, 128, 128]
    assert [each.data_ptr() % 64 for each in tensors] == [0] * 5
    assert [each.unique().tolist() for each in tensors] == [[3.0], [17.0], [400.0], [1.0], [2.0]]


def test_an_arena_ends_with_its_last_storage() -> None:
    """Its memory and its descriptor are returned; a storage that was given back elsewhere holds nothing up."""
    first, second = torch.ones(3), torch.ones(5)
    move([first.untyped_storage(), second.untyped_storage()])
    descriptor = arena_at(first).fd

    del first
    second.untyped_storage().resize_(40)  # torch allocates anew
    gc.collect()

    assert ArenaLookup().of(second.data_ptr()) is None
    assert second.tolist() == [1.0] * 5
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_two_exporters_of_one_model_leave_it_where_it_is(tmp_path: Path) -> None:
    """Channels of one trainer: the second finds the arena of the first."""
    weight = torch.ones(8)
    first, second = (RegionExporter(tmp_path / "run", channel, 0) for channel in ("a", "b"))
    first.export([weight])
    address = weight.data_ptr()
    second.export([weight])

    assert weight.data_ptr() == address
    assert second.generation == 1
    first.close()
    second.close()


def test_a_torch_that_lays_storages_out_otherwise_takes_a_descriptor_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are; more are refused before any is moved, with the limit."""
    monkeypatch.setattr(exports, "movable", lambda: False)
    exporter = RegionExporter(tmp_path / "run", "c", 0)
    exporter.export([torch.ones(3), torch.ones(5)])
    assert [each.region.nbytes for each in exporter._held.values()] == [12, 20]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    late = [torch.ones(1) for _ in range(300)]

    with pytest.raises(NotExportable, match=r"300 parameters would take a descriptor each .* \(300, 256 of them"):
        exporter.export(late)

    assert not any(each.is_shared() for each in late)
    exporter.close()


def test_parameters_in_a_file_are_refused(tmp_path: Path) -> None:
    """No descriptor of theirs can be passed, and moving them would part the trainer from its file."""
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=64)
    exporter = RegionExporter(tmp_path / "run", "c", 0)
    with pytest.raises(NotExportable, match="256 bytes of parameters are mapped from a file"):
        exporter.export([mapped])
    exporter.close()


def test_memory_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes and what to do; the storages stay where they are."""

    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    weight = torch.ones(8)
    before = weight.data_ptr()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(NotExportable, match="64 bytes of shared memory cannot be had"):
        move([weight.untyped_storage()])
    assert weight.data_ptr() == before


def test_more_parameters_than_descriptors_and_mappings(tmp_path: Path) -> None:
    """110,000 of them, in a process that may open 256 files: one region, which a reader opens as a whole."""
    program = textwrap.dedent(f"""
        import resource, torch
        from pathlib import Path
        from weightbus.dataplane.memory.exports import RegionExporter
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        parameters = [torch.full((2,), float(number)) for number in range(110_000)]
        exporter = RegionExporter(Path({str(tmp_path / "run")!r}), "c", 0)
        found = exporter.export(parameters)
        print(exporter.address(), len(found.regions), found.places[-1].offset, flush=True)
        input()
        exporter.close()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        address, regions, last = trainer.stdout.readline().split()
        assert int(regions) == 1
        importer = RegionImporter()
        importer.open(address, 0, 1, [0], OPEN_S)
        seen = importer.region(0, 0)[int(last) :].view(torch.float32)
        assert seen[:2].tolist() == [109_999.0] * 2
        importer.close()
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.wait(OPEN_S) == 0
