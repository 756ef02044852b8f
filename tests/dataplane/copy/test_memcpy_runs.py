"""Runs for copy engines: they copy what the tables say, and only what is worth it goes to them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy import memcpy_runs as module
from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.copy.copy_torch import TorchCopies
from weightbus.dataplane.copy.memcpy_runs import (
    SHARES,
    CopyRuns,
    rows_for_copy_engines,
    split_into_batches,
    split_into_runs,
)
from weightbus.dataplane.tensors.shards import DTYPES

from .test_tiles import column, copies, fits, memory

BF16, F32 = DTYPES.index("bfloat16"), DTYPES.index("float32")
MB = 2**20


@pytest.mark.parametrize("most", [2**30, 100, 7])
@given(copies())
@settings(max_examples=60, deadline=None)
def test_runs_copy_what_the_table_says(most: int, table: CopyTable) -> None:
    """Byte for byte and nothing beside it, however small the largest run."""
    if not fits(table):
        return
    source, expected, found = memory(1), memory(2), memory(2)
    TorchCopies(table, [source], [expected]).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_RUN_BYTES", most)
        runs = split_into_runs(table, column(source.data_ptr()), column(found.data_ptr()))
    assert int(runs.nbytes.sum()) == int(table.target_bytes.sum())
    assert 0 < int(runs.nbytes.min()) <= int(runs.nbytes.max()) <= most
    for out, to, nbytes in np.stack([runs.source, runs.target, runs.nbytes], axis=1).tolist():
        ctypes.memmove(to, out, nbytes)

    assert torch.equal(found, expected)


def test_a_whole_tensor_is_several_runs() -> None:
    """So that several engines share it."""
    one, wide = column(0), np.zeros((1, 3), np.int64)
    row = CopyTable(one, one, one, one, one + BF16, one + BF16, column(50 * MB), wide + 1, wide, wide)
    runs = split_into_runs(row, column(0), column(2**40))
    assert runs.nbytes.tolist() == [32 * MB] * 3 + [4 * MB]
    assert runs.source.tolist() == [0, 32 * MB, 64 * MB, 96 * MB]
    assert runs.target.tolist() == [2**40 + at for at in runs.source.tolist()]


def test_who_copies_what() -> None:
    """Long runs out of a peer's memory are the engines'; short ones, casts and the GPU's own memory the kernel's."""
    one, wide = column(1, 1, 1, 1, 1, 1), np.zeros((6, 3), np.int64)
    run = column(3 * MB, 3 * MB, 3 * MB, MB - 2, MB, 4096) // 2
    grid, step = wide + 1, wide.copy()
    grid[4:, 2], step[4:, 2] = 64, 2**21
    table = CopyTable(
        column(0, 1, 0, 0, 0, 0), one * 0, one * 0, one * 0, column(BF16, BF16, F32, BF16, BF16, BF16), one * BF16,
        run, grid, step, step,
    )  # fmt: skip

    assert rows_for_copy_engines(table, column(1, 0)).tolist() == [True, False, False, False, True, False]
    assert not rows_for_copy_engines(table, column(0, 0)).any()
    assert rows_for_copy_engines(CopyTable.empty(), column()).tolist() == []


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=400))
def test_calls_are_short_first_and_then_longer(lengths: list[int]) -> None:
    """Together they are all runs, in their order, and none is empty; a call ends within a run of its share's end."""
    nbytes = column(*lengths)
    found = split_into_batches(CopyRuns(np.arange(len(nbytes)), nbytes * 0, nbytes, nbytes * 0))
    assert np.concatenate([each.source for each in found]).tolist() == list(range(len(nbytes)))
    assert all(len(each) for each in found)
    ends = [nbytes.sum() * sum(SHARES[: at + 1]) / sum(SHARES) for at in range(len(SHARES))]
    done = 0
    for each in found:
        done += int(each.nbytes.sum())
        assert any(end - 1 <= done <= end + nbytes.max() for end in ends)


def test_calls_double_until_they_are_all_alike() -> None:
    """What is handed over while one call is copied is at most twice as much, so that nothing waits for the host."""
    found = split_into_batches(
        CopyRuns(column(*range(560)), column(*[0] * 560), column(*[7] * 560), column(*[0] * 560))
    )
    assert [len(each) for each in found] == [10, 10, 20, 40, 80, 80, 80, 80, 80, 80]


def test_a_batch_is_of_one_stage() -> None:
    """Those that are ready first come first, and bytes are shared out as without stages."""
    nbytes = column(*[10] * 8)
    runs = CopyRuns(np.arange(8), nbytes * 0, nbytes, column(1, 0, 2, 0, 1, 2, 2, 0))

    found = split_into_batches(runs, (1, 1))

    assert [each.source.tolist() for each in found] == [[1, 3, 7], [0], [4], [2, 5, 6]]
    assert [np.unique(each.stage).tolist() for each in found] == [[0], [1], [1], [2]]
