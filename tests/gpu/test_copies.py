"""On a real GPU: tables are carried out as the CPU's engine does it, and memory is opened across processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.dataplane.copy.test_tiles import boxes, column, copies, fits, memory
from tests.kit.waiting import until
from weightbus.dataplane.copy.box_digests import BoxTable
from weightbus.dataplane.copy.copy_cuda import copy_engine_for
from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.errors import PeerLost, StaleSession
from weightbus.dataplane.memory.exports import RegionImporter
from weightbus.dataplane.tensors.shards import DTYPES

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
OPEN_S = 20.0


@given(copies())
@settings(max_examples=200, deadline=None)
def test_copies_are_those_of_the_cpu(table: CopyTable) -> None:
    """Every shape and alignment, byte for byte, and nothing beside it."""
    if not fits(table):
        return
    source, expected = memory(1), memory(2)
    found = expected.to(GPU)
    TorchCopyEngine().prepare_copies(table, [source], [expected]).run()

    copy_engine_for(GPU).prepare_copies(table, [source.to(GPU)], [found]).run()

    assert torch.equal(found.cpu(), expected)


@given(boxes())
@settings(max_examples=150, deadline=None)
def test_digests_are_those_of_the_cpu(table: BoxTable) -> None:
    """Whole words, words put together from elements, strided and misaligned."""
    end = int(table.at[0]) + int(((table.grid - 1) * table.step).sum())
    region = memory(3)
    if end + int(table.words[0]) * 8 // int(table.item[0]) * int(table.item_step[0]) >= len(region):
        return

    lanes = copy_engine_for(GPU).prepare_digest(table, [region.to(GPU)]).run()

    assert np.array_equal(lanes, TorchCopyEngine().prepare_digest(table, [region]).run())


def test_casts_are_torchs() -> None:
    """float32 masters served as bfloat16, in one table with a plain copy."""
    one, three, wide = np.ones(2, np.int64), np.ones((2, 3), np.int64), np.zeros((2, 3), np.int64)
    f32, bf16 = DTYPES.index("float32"), DTYPES.index("bfloat16")
    table = CopyTable(
        one * 0, one * 0, column(0, 512), column(0, 512), column(f32, bf16), column(bf16, bf16), column(64, 128),
        three, wide, wide,
    )  # fmt: skip
    source, expected = torch.randn(256).view(torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    found = expected.to(GPU)
    TorchCopyEngine().prepare_copies(table, [source], [expected]).run()

    copy_engine_for(GPU).prepare_copies(table, [source.to(GPU)], [found]).run()

    assert torch.equal(found.cpu(), expected)
    assert replace(table).casts.tolist() == [1, 0]


class Trainer:
    """A process that exports what it is told to, line by line."""

    PROGRAM = textwrap.dedent("""
        import sys, torch
        from pathlib import Path
        from weightbus.dataplane.errors import NotExportable
        from weightbus.dataplane.memory.exports import RegionExporter
        device = torch.device("cuda", int(sys.argv[2]))
        exporter = RegionExporter(Path(sys.argv[1]), "c", 0)
        held = [torch.full((1 << 20,), 5.0, device=device)]
        for line in sys.stdin:
            match line.strip():
                case "replace":
                    held = [torch.full((1 << 24,), 7.0, device=device)]
                case "write":
                    held[0].fill_(9.0)
                case "free":
                    held = []
                    exporter.close()
                    torch.cuda.empty_cache()
            if held:
                try:
                    exported = exporter.export(held)
                    print(exporter.address(), exporter.generation, exported.places[0].offset,
                          exported.regions[0].nbytes, flush=True)
                except NotExportable as error:
                    print("refused:", error, flush=True)
            else:
                print(torch.cuda.memory_reserved(device), exporter.readers, flush=True)
    """)

    def __init__(self, runtime: Path, gpu: int, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, str(runtime), str(gpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, line: str) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=[0, 1], ids=["same GPU", "peer GPU"])
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    if request.param >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    made = Trainer(tmp_path / "run", request.param)
    yield made
    made.close()


def read(importer: RegionImporter, offset: str) -> float:
    return float(importer.region(0, 0)[int(offset) : int(offset) + 4].clone().view(torch.float32).item())


def test_a_reader_sees_what_the_trainer_writes(trainer: Trainer) -> None:
    """In the trainer's own memory, on the same GPU and on a peer; another storage is another generation."""
    importer = RegionImporter(GPU)
    address, generation, offset, nbytes = trainer.ask("export")
    importer.open(address, 0, int(generation), [0], OPEN_S)
    assert importer.region(0, 0).numel() == int(nbytes)
    assert read(importer, offset) == 5.0

    assert trainer.ask("write")[:2] == [address, generation]
    assert read(importer, offset) == 9.0

    _, newer, offset, _ = trainer.ask("replace")
    assert int(newer) == int(generation) + 1
    importer.check()
    with pytest.raises(StaleSession):
        importer.open(address, 1, int(generation), [0], OPEN_S)
    importer.open(address, 0, int(newer), [0], OPEN_S)
    assert read(importer, offset) == 7.0
    importer.close()


@pytest.mark.parametrize("branches", [0, 1, 4])
def test_copy_engines_and_kernel_share_a_table(trainer: Trainer, branches: int) -> None:
    """Long and short runs of a peer's memory, once and again; on the same GPU the kernel takes all of them."""
    importer = RegionImporter(GPU)
    address, generation, offset, _ = trainer.ask("export")
    importer.open(address, 0, int(generation), [0], OPEN_S)
    run = column(1 << 20, 100, 2 << 20, 64 << 10) // 2
    at, zero = int(offset) + 2 * (np.cumsum(run) - run), run * 0
    grid, steps = np.ones((4, 3), np.int64), np.zeros((4, 3), np.int64)
    grid[3, 2], steps[3, 2] = 8, 128 << 10
    bf16 = zero + DTYPES.index("bfloat16")
    table = CopyTable(zero, zero, at, at - int(offset), bf16, bf16, run, grid, steps, steps)
    found = torch.zeros(4 << 20, dtype=torch.uint8, device=GPU)
    region = importer.region(0, 0)
    remote = [region.data_ptr()] if importer.remote(0, 0) else []
    copies = copy_engine_for(GPU, branches, remote).prepare_copies(table, [region], [found])
    assert copies.fallback_reason == ""

    for value in (5.0, 9.0):
        if value == 9.0:
            trainer.ask("write")
        found.zero_()
        copies.run()
        expected = torch.zeros(4 << 20, dtype=torch.uint8)
        source = torch.full((1 << 20,), value).view(torch.uint8)
        rows = replace(table, source_at=at - int(offset))
        TorchCopyEngine().prepare_copies(rows, [source], [expected]).run()
        assert torch.equal(found.cpu(), expected)
    copies.close()
    importer.close()


def test_memory_is_kept_until_readers_have_let_go(trainer: Trainer) -> None:
    """A trainer that closes and frees does not pull memory away from under a kernel."""
    importer = RegionImporter(GPU)
    address, generation, offset, _ = trainer.ask("export")
    importer.open(address, 0, int(generation), [0], OPEN_S)

    reserved, readers = trainer.ask("free")

    assert int(reserved) > 0
    assert readers == "1"
    assert read(importer, offset) == 5.0
    until(lambda: not importer.alive(), "its end")  # a thread hangs up, for which `close` does not wait
    with pytest.raises(PeerLost):
        importer.check()
    importer.close()
    for _ in range(200):
        if trainer.ask("look") == ["0", "0"]:
            return
        trainer.ask("free")
    pytest.fail("the memory was not freed after its only reader had gone")


def test_a_trainer_that_died_is_noticed(trainer: Trainer) -> None:
    """SIGKILL between two rounds."""
    importer = RegionImporter(GPU)
    address, generation, _, _ = trainer.ask("export")
    importer.open(address, 0, int(generation), [0], OPEN_S)
    importer.check()

    trainer.process.kill()
    trainer.process.wait()

    with pytest.raises(PeerLost):
        importer.check()
    importer.close()


def test_memory_of_expandable_segments_is_refused_with_advice(tmp_path: Path) -> None:
    """At the first export, before anybody waits for it."""
    made = Trainer(tmp_path / "run", 0, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    try:
        words = " ".join(made.ask("export"))
    finally:
        made.close()
    assert words.startswith("refused:")
    assert "expandable_segments" in words
