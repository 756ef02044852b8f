"""Elements that are NaN or infinite are counted in the digest's own pass, whatever their format and place."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy.box_digests import BoxTable
from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.digest.nonfinite import masks_of
from weightbus.dataplane.tensors.manifest import ITEM_BYTES

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def odd(values: torch.Tensor) -> int:
    """How many are no finite numbers, as torch sees them."""
    if not values.is_floating_point():
        return 0
    return int((~torch.isfinite(values.double())).sum())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """One tensor of some dtype, of random bits, or of numbers with a few bits drawn over them."""
    dtype = getattr(torch, draw(st.sampled_from([*FLOATS, "int32", "uint8", "bool"])))
    count = draw(st.one_of(st.integers(1, 40), st.integers(1000, 20_000)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    if dtype.is_floating_point and draw(st.booleans()):
        values = torch.randn(count, generator=random).to(dtype)
        if draw(st.booleans()):
            specials = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf]).to(dtype)
            for _ in range(draw(st.integers(1, 5))):
                values[draw(st.integers(0, count - 1))] = specials[draw(st.integers(0, 3))]
        return values
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=random)
    return (bits & 1).view(dtype) if dtype is torch.bool else bits.view(dtype)


@settings(max_examples=200, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=6), st.sampled_from([0, 1, 8]))
def test_counts_are_torchs(values: list[torch.Tensor], skew: int) -> None:
    """Tensors of any dtypes packed one after another, at any byte: each has its own count, and the digest it had."""
    parts = [each.view(torch.uint8) for each in values]
    memory = torch.cat([torch.zeros(skew, dtype=torch.uint8), *parts])
    offsets = [skew + end for end in accumulate([0, *map(len, parts)])]
    names = [str(each.dtype).removeprefix("torch.") for each in values]

    digests, counts = integrity.digest_and_count(memory, offsets, masks_of(names))

    assert counts.tolist() == [odd(each) for each in values]
    assert digests == integrity.digest_tensors(memory, offsets)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_of_bits(dtype: str) -> None:
    """All elements of two bytes or less, and for wider ones all exponents with the least and the most mantissas."""
    item = ITEM_BYTES[dtype]
    if item <= 2:
        bits = np.arange(1 << 8 * item, dtype=f"<u{item}")
    else:
        mantissa = 23 if item == 4 else 52
        heads = np.arange(1 << 8 * item - mantissa, dtype=f"<u{item}") << np.array(mantissa, f"<u{item}")
        tails = np.array([0, 1, (1 << mantissa) - 1], f"<u{item}")
        bits = (heads[:, None] | tails).reshape(-1)
    values = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, dtype))
    expected = (~torch.isfinite(values.double())).long()
    padded = torch.zeros(len(values), 8 // item, dtype=values.dtype)
    for at in range(8 // item):  # in each place of a word, a tensor of one word each
        padded.zero_()
        padded[:, at] = values
        memory = padded.view(torch.uint8).reshape(-1)
        bounds = list(range(0, memory.numel() + 1, 8))
        _, counts = integrity.digest_and_count(memory, bounds, masks_of([dtype] * len(values)))
        assert counts.tolist() == expected.tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*FLOATS, "int16"]), st.integers(1, 9), st.integers(1, 40), st.integers(0, 3), st.integers(0, 99)
)
def test_counts_of_boxes_in_place(dtype: str, rows: int, words: int, gap: int, seed: int) -> None:
    """A strided box is counted where it lies, without what lies beside it."""
    item = ITEM_BYTES[dtype]
    row = words * 8
    step = row + gap * item
    random = torch.Generator().manual_seed(seed)
    region = torch.randint(0, 256, (rows * step + 8,), dtype=torch.uint8, generator=random)
    one, wide = np.ones(1, np.int64), np.ones((1, 3), np.int64)
    grid, steps, word_steps = wide.copy(), wide * 0, wide * 0
    grid[:, 2], steps[:, 2], word_steps[:, 2] = rows, step, words
    table = BoxTable(2, one, one * 0, one * 0, one * item, one * item, one * words, one * 0, grid, steps, word_steps)
    inside = torch.stack([region[at * step : at * step + row] for at in range(rows)])

    digest = TorchCopyEngine().prepare_digest(table, [region], masks_of(["float64", dtype]))
    digest.launch()

    assert digest.counts().tolist() == [0, odd(inside.reshape(-1).view(getattr(torch, dtype)))]


def test_counts_need_a_mask_for_each_tensor() -> None:
    """Masks of other tensors are an error, not other counts."""
    with pytest.raises(ValueError, match="fit"):
        integrity.digest_and_count(torch.zeros(16, dtype=torch.uint8), [0, 8, 16], masks_of(["float32"]))


KERNELS = """
from contextlib import nullcontext
import numpy as np
import torch
torch.cuda.device_of = lambda memory: nullcontext()
from weightbus.dataplane.digest import digest_triton, tensor_digest as integrity
from weightbus.dataplane.digest.nonfinite import masks_of
from weightbus.dataplane.copy import copy_triton, tiles
from weightbus.dataplane.copy.box_digests import BoxTable
from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
digest_triton.SEGMENT_WORDS, digest_triton.BLOCK = 64, 32
torch.manual_seed(3)
dtypes = ["float64", "bfloat16", "float32", "float8_e5m2", "float16", "int32", "float8_e4m3fn", "bfloat16", "float64"]
for skew in (0, 2, 7):
    bounds = np.array([skew + n for n in (0, 8, 10, 1502, 1602, 1610, 2122, 2602, 2616, 2680)], dtype=np.int64)
    memory = torch.randint(0, 256, (2700,), dtype=torch.uint8)
    masks = masks_of(dtypes)
    expected, counts = integrity.digest_and_count(memory, bounds.tolist(), masks)
    assert counts.sum() > 0
    lanes, found = digest_triton.sum_tensors(memory, bounds, masks)
    assert integrity.finish_digests(lanes, np.diff(bounds)) == expected, skew
    assert found.tolist() == counts.tolist(), (skew, found, counts)
    lanes, found = digest_triton.sum_tensors(memory, bounds)
    assert integrity.finish_digests(lanes, np.diff(bounds)) == expected and not found.any()
one, wide = np.ones(1, np.int64), np.ones((1, 3), np.int64)
for dtype, item, step in (("float64", 8, 8), ("bfloat16", 2, 6), ("float8_e4m3fn", 1, 3), ("float32", 4, 8)):
    words, rows, far = 5, 7, 300
    grid, steps, word_steps = wide.copy(), wide * 0, wide * 0
    grid[:, 2], steps[:, 2], word_steps[:, 2] = rows, far, words
    begin = one * (4 if item == 4 else 0)
    table = BoxTable(2, one, one * 0, begin, one * item, one * step, one * words, one * 0, grid, steps, word_steps)
    region = torch.randint(0, 256, (8 + rows * far,), dtype=torch.uint8)
    region[8:16] = 255
    masks = masks_of(["int32", dtype])
    digest = TorchCopyEngine().prepare_digest(table, [region], masks)
    expected = digest.run()
    lanes, counts = torch.zeros((2, 2), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    base = np.array([region.data_ptr()], np.int64)
    for size, rows_of in tiles.word_tiles(table, base, torch.device("cpu")):
        assert size != 16
        copy_triton.accumulate(rows_of, size, lanes, torch.from_numpy(masks.view(np.int64)), counts)
    assert np.array_equal(copy_triton.as_lanes(lanes), expected), dtype
    assert counts.tolist() == digest.counts().tolist(), (dtype, counts, digest.counts())
    assert counts.sum() > 0, dtype
print("equal")
"""


def test_kernels_count_as_the_cpu_in_the_interpreter(tmp_path: Path) -> None:
    """The GPU's kernels, run by Triton's interpreter, give the CPU's counts, and the digests of before."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("skew", [0, 1, 2, 4])
def test_kernel_counts_as_the_cpu(skew: int) -> None:
    """On a GPU the counts are the CPU's, for small and large tensors at every alignment."""
    offsets = [skew, skew + 8, skew + 1_000_010, skew + 1_000_012, skew + 9_000_012, skew + 9_000_020]
    masks = masks_of(["float64", "bfloat16", "float16", "float8_e4m3fn", "float32"])
    memory = torch.randint(0, 256, (9_000_100,), dtype=torch.uint8)
    digests, counts = integrity.digest_and_count(memory.cuda(), offsets, masks)
    expected = integrity.digest_and_count(memory, offsets, masks)
    assert digests == expected[0]
    assert counts.tolist() == expected[1].tolist()
