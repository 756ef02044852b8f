"""Tiles: what a GPU's blocks are told to do is what the tables say. Carried out here one vector at a time."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy import tiles as module
from weightbus.dataplane.copy.box_digests import BoxTable
from weightbus.dataplane.copy.copy_engine import TorchCopies, TorchDigest
from weightbus.dataplane.copy.copy_table import AXES, ITEM_SIZES, CopyTable
from weightbus.dataplane.copy.tiles import TILE_VECTORS, TILE_WORDS, Tiles, reciprocal, staged_tiles, word_tiles
from weightbus.dataplane.digest.tensor_digest import mix_words
from weightbus.dataplane.tensors.shards import DTYPES, Column

REGION = 1 << 18


def memory(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (REGION,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def column(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(values, np.int64)


@st.composite
def grids(draw: st.DrawFn, item: int, most: int) -> tuple[int, list[int], list[int], int]:
    """A run, the extents of a grid, disjoint steps in bytes, and where it begins; in one region."""
    run = draw(st.sampled_from([1, 2, 3, 8, 24, 96, most]))
    extents = [draw(st.sampled_from([1, 1, 2, 3, 7, 40])) for _ in range(AXES)]
    step, steps = run, [0] * AXES
    for axis in draw(st.permutations(range(AXES))):
        if extents[axis] == 1:
            continue
        step += draw(st.sampled_from([0, 0, 1, 4, 8]))
        steps[axis] = step * item
        step *= extents[axis]
    begin = draw(st.integers(0, 40)) * item
    return run, extents, steps, begin


@st.composite
def copies(draw: st.DrawFn) -> CopyTable:
    """One row of any shape that stays inside of the regions."""
    dtype = draw(st.sampled_from([DTYPES.index(name) for name in ("uint8", "bfloat16", "float32", "int64")]))
    item = int(ITEM_SIZES[dtype])
    run, extents, source_steps, source = draw(grids(item, TILE_VECTORS * 3 + 5))
    target_steps = [0] * AXES
    step = run * item + draw(st.sampled_from([0, 0, 2, 16])) * item
    for axis in range(AXES - 1, -1, -1):
        if extents[axis] > 1:
            target_steps[axis] = step
            step *= extents[axis]
    wide = (np.array([values], np.int64) for values in (extents, source_steps, target_steps))
    return CopyTable(
        column(0), column(0), column(source), column(draw(st.integers(0, 40)) * item), column(dtype), column(dtype),
        column(run), *wide,
    )  # fmt: skip


def tiles_of(table: CopyTable, bases: tuple[Column, Column]) -> list[Tiles]:
    """Of all rows at once: there is one stage."""
    return staged_tiles(table, np.zeros(len(table), np.int64), *bases, torch.device("cpu"))[0]


def fits(table: CopyTable) -> bool:
    reach = [(table.grid - 1) * step for step in (table.source_step, table.target_step)]
    ends = [at + each.sum(axis=1) for at, each in zip((table.source_at, table.target_at), reach, strict=True)]
    return all(int(end[0]) + int(table.target_bytes[0]) < REGION for end in ends)


@given(copies())
@settings(max_examples=150, deadline=None)
def test_tiles_copy_what_the_table_says(table: CopyTable) -> None:
    """Byte for byte, nothing else is written, and no tile is larger than a block can take."""
    if not fits(table):
        return
    source, expected, found = memory(1), memory(2), memory(2)
    TorchCopies(table, [source], [expected]).run()
    bases = column(source.data_ptr()), column(found.data_ptr())

    for vector, tiles in tiles_of(table, bases):
        for src, dst, src_step, dst_step, shape, magic in tiles.tolist():
            rows, width = shape >> 32, shape & 0xFFFFFFFF
            assert rows * width <= TILE_VECTORS
            assert not any(place % vector for place in (src, dst, src_step, dst_step))  # a GPU faults on others
            for at in range(rows * width):
                line = at if width == 1 else at * magic >> 32
                place = at - line * width
                ctypes.memmove(dst + line * dst_step + place * vector, src + line * src_step + place * vector, vector)

    assert torch.equal(found, expected)


@given(st.lists(copies(), min_size=2, max_size=5))
@settings(max_examples=50, deadline=None)
def test_rows_are_cut_one_by_one(tables: list[CopyTable]) -> None:
    """The tiles of a table are those of its rows, one after another."""
    bases = column(1 << 40), column(1 << 41)
    alone: dict[int, list[torch.Tensor]] = {}
    for table in tables:
        for vector, tiles in tiles_of(table, bases):
            alone.setdefault(vector, []).append(tiles)
    together = joined(tables)
    found = dict(tiles_of(together, bases))

    assert found.keys() == alone.keys()
    assert all(torch.equal(tiles, torch.cat(alone[vector])) for vector, tiles in found.items())


@given(st.lists(st.tuples(copies(), st.integers(0, 3)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_stages_are_cut_as_if_alone(rows: list[tuple[CopyTable, int]]) -> None:
    """Each stage has the tiles of its own rows, and no other."""
    rows = sorted(rows, key=lambda each: each[1])
    bases = column(1 << 40), column(1 << 41)
    tables: dict[int, list[CopyTable]] = {}
    for table, stage in rows:
        tables.setdefault(stage, []).append(table)
    together = joined([table for table, _ in rows])
    found = staged_tiles(together, np.repeat(*stages_of(rows)), *bases, torch.device("cpu"))

    assert found.keys() == tables.keys()
    for stage, mine in tables.items():
        alone = dict(tiles_of(joined(mine), bases))
        assert dict(found[stage]).keys() == alone.keys()
        assert all(torch.equal(tiles, alone[vector]) for vector, tiles in found[stage])


def stages_of(rows: list[tuple[CopyTable, int]]) -> tuple[Column, Column]:
    """The stage of each table, and how many rows it has."""
    return np.array([stage for _, stage in rows]), np.array([len(table) for table, _ in rows])


def joined(tables: list[CopyTable]) -> CopyTable:
    return CopyTable.of_numbers(np.concatenate([table.numbers() for table in tables]))


KERNEL = """
import numpy as np
import torch
from weightbus.dataplane.copy import tiles
from weightbus.dataplane.copy import copy_triton as tiles_triton
from weightbus.dataplane.copy.copy_table import AXES

random = np.random.default_rng(5)
for rows, places in ((1, 2), (2, 4), (7, 6), (33, 4)):
    width = random.choice([1, 3, 100, 2048, 5000], rows)
    grid = random.choice([1, 1, 2, 7, 41], (rows, AXES))
    cut = tiles._cut(width, grid, 2048)
    anywhere = [
        tiles._Place(random.integers(0, 1 << 50, rows), random.integers(-(1 << 30), 1 << 30, (rows, AXES)), 16)
        for _ in range(places)
    ]
    expected = tiles._written(cut, anywhere, torch.device("cpu"))
    write, tiles.write_by_torch = tiles.write_by_torch, tiles_triton.write
    assert torch.equal(tiles._written(cut, anywhere, torch.device("cpu")), expected), (rows, places)
    tiles.write_by_torch = write
print("equal")
"""


def test_the_kernel_writes_what_torch_does(tmp_path: Path) -> None:
    """Run by Triton's interpreter."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_tiles_are_there_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are written on one stream, and read on any."""
    told: list[str] = []
    kernel = SimpleNamespace(write=lambda *_: told.append("written"))
    monkeypatch.setitem(sys.modules, "weightbus.dataplane.copy.copy_triton", kernel)
    stream = SimpleNamespace(synchronize=lambda: told.append("there"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, **_: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(module, "_on", lambda _device, rows: torch.from_numpy(rows))
    cut = module._cut(column(3), np.ones((1, 3), np.int64), 2048)

    module._written(cut, [module._Place(column(0), np.zeros((1, 3), np.int64), 16)], torch.device("cuda", 0))

    assert told == ["written", "there"]


@st.composite
def boxes(draw: st.DrawFn) -> BoxTable:
    """One row of any shape."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    words, extents, steps, begin = draw(grids(8, TILE_WORDS + 6))
    item_step = draw(st.sampled_from([item, item, item * 3]))
    stretched = [step * (item_step // item) for step in steps]
    shift = draw(st.sampled_from([0, 0, item]))
    word_steps = [draw(st.integers(1, 5000)) if extent > 1 else 0 for extent in extents]
    wide = (np.array([values], np.int64) for values in (extents, stretched, word_steps))
    return BoxTable(
        3, column(1), column(0), column(begin + shift), column(item), column(item_step), column(words), column(77),
        *wide,
    )  # fmt: skip


@given(boxes())
@settings(max_examples=100, deadline=None)
def test_tiles_digest_what_the_table_says(table: BoxTable) -> None:
    """The same words at the same places, whichever way they are read."""
    end = int(table.at[0]) + int(((table.grid - 1) * table.step).sum())
    if end + int(table.words[0]) * 8 // int(table.item[0]) * int(table.item_step[0]) >= REGION:
        return
    region = memory(3)
    expected = TorchDigest(table, [region]).run()
    data, base = region.numpy(), region.data_ptr()
    lanes = np.zeros((2, 3), np.uint64)

    for item, tiles in word_tiles(table, column(base), torch.device("cpu")):
        words, parts = max(item // 8, 1), np.arange(max(8 // item, 1))
        for address, step, item_step, word_at, word_step, group, shape, magic in tiles.tolist():
            rows, width = shape >> 32, shape & 0xFFFFFFFF
            assert rows * width * words <= TILE_WORDS
            assert not address % item
            assert not step % item
            at = np.arange(rows * width)
            line = at if width == 1 else at * magic >> 32
            place = at - line * width
            first = address - base + line * step + place * item_step * len(parts)
            elements = first[:, None] + parts * item_step
            raw = data[(elements[:, :, None] + np.arange(item)).reshape(len(at), 8 * words)]
            index = (word_at + line * word_step + place * words)[:, None] + np.arange(words)
            lanes[:, group] += mix_words(np.ascontiguousarray(raw).view("<u8").reshape(-1), index.reshape(-1))

    assert np.array_equal(lanes, expected)


def test_one_multiplication_divides_every_place_of_a_tile() -> None:
    """For every width that a tile of several rows can have."""
    at = np.arange(TILE_WORDS, dtype=np.int64)
    widths = torch.arange(1, TILE_WORDS + 1)
    magics: list[int] = reciprocal(widths).tolist()

    assert magics.pop(0) == 0
    for width, magic in enumerate(magics, 2):
        assert 0 < magic < 1 << 32
        assert np.array_equal(at * magic >> 32, at // width)
