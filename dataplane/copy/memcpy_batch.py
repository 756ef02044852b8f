"""Long runs of bytes through the hardware copy engines of a GPU, by a few calls of cuMemcpyBatchAsync.

A copy engine moves contiguous bytes with one command, which is fast for long runs. Two GPUs that read from each other
at the same time are faster with it than with a kernel, whose requests travel against the other GPU's bytes; on one GPU
the kernel is faster.

The arguments of the calls are prepared once. Calls go to streams round robin, so that several engines work. Graphs of
memcpy nodes would be as many commands for the engines, and more work to launch.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import CopyEnginesUnavailable
from ..memory import error_name
from ..tensors import Column
from .copy_table import AXES, ITEM_SIZES, CopyTable

MIN_RUN_BYTES: Final = 1024 * 1024
"""Bytes. The kernel copies shorter runs: submitting one costs the host half a microsecond, and an engine as much."""
MAX_RUN_BYTES: Final = 32 * 1024 * 1024
"""Bytes. Longer runs are cut, so that batches can be as long as they should."""
SHARES: Final = (1, 1, 2, 4, 8, 8, 8, 8, 8, 8)
"""Relative sizes of batches, in the order of their submission.

An engine begins when all of its batch is submitted: the first are short, and while one is copied, the next twice as
long one is submitted. Each begins a little late, which the other engines make good meanwhile (tests/gpu/copies.py).
"""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CopyRuns:
    """Runs that are contiguous on both sides. All columns are (runs,) int64."""

    source: Column
    """Address of the first byte."""
    target: Column
    nbytes: Column
    stage: Column
    """Runs of a stage are submitted before those of the next one."""

    def __len__(self) -> int:
        return len(self.source)

    def take(self, runs: Column) -> CopyRuns:
        """The given runs, in their order."""
        return CopyRuns(*(getattr(self, field.name)[runs] for field in fields(self)))


def rows_for_copy_engines(table: CopyTable, remote: Column) -> Mask:
    """(rows,): rows without casts, with long runs, that read from a peer; `remote` is (regions,) 0 or 1."""
    worth: Mask = (table.run * ITEM_SIZES[table.target_dtype] >= MIN_RUN_BYTES) & (table.casts == 0)
    found: Mask = worth & (remote[table.source] != 0)
    return found


def split_into_runs(
    table: CopyTable, source_base: Column, target_base: Column, stages: Column | None = None
) -> CopyRuns:
    """The runs of a table without casts, long ones in parts; bases are the addresses of the regions.

    `stages` are those of the rows; without them all are of stage 0.
    """
    nbytes = table.run * ITEM_SIZES[table.target_dtype]
    parts = -(-nbytes // MAX_RUN_BYTES)
    count: Column = table.grid.prod(axis=1, dtype=np.int64) * parts
    row = np.repeat(np.arange(len(table)), count)
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    number, part = np.divmod(number, parts[row])
    begin = part * MAX_RUN_BYTES
    source: Column = (source_base[table.source] + table.source_at)[row] + begin
    target: Column = (target_base[table.target] + table.target_at)[row] + begin
    for axis in range(AXES - 1, -1, -1):
        number, index = np.divmod(number, table.grid[row, axis])
        source += index * table.source_step[row, axis]
        target += index * table.target_step[row, axis]
    stage = np.zeros(len(row), np.int64) if stages is None else stages[row]
    return CopyRuns(source, target, np.minimum(nbytes[row] - begin, MAX_RUN_BYTES), stage)


def split_into_batches(runs: CopyRuns, shares: Sequence[int] = SHARES) -> list[CopyRuns]:
    """Batches to submit one after another, none of them empty: consecutive runs, sized by `shares`.

    A batch has runs of one stage; a batch that a stage border cuts becomes two.
    """
    runs = runs.take(np.argsort(runs.stage, kind="stable"))
    before = np.cumsum(runs.nbytes) - runs.nbytes
    ends = np.cumsum(shares) * int(runs.nbytes.sum()) // sum(shares)
    call: Column = np.searchsorted(ends, before, side="right")
    begins: Column = np.flatnonzero(np.diff(call, prepend=-1) | np.diff(runs.stage, prepend=-1))
    borders: list[int] = [*begins.tolist(), len(runs)]
    return [runs.take(np.arange(a, b)) for a, b in itertools.pairwise(borders)]


_IN_STREAM_ORDER: Final = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1. The hints are for managed memory."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def _columns(runs: CopyRuns) -> list[npt.NDArray[np.uint64]]:
    return [np.ascontiguousarray(each, np.uint64) for each in (runs.target, runs.source, runs.nbytes)]


class CopyBatch:
    """Batches of copies, prepared. The caller keeps the memory alive."""

    def __init__(
        self, runs: CopyRuns, streams: int, library: ctypes.CDLL | None = None, shares: Sequence[int] = SHARES
    ) -> None:
        """On at most `streams` streams, a call for each share. Raises `CopyEnginesUnavailable`.

        `library` replaces libcuda in tests.
        """
        try:
            self._library = library if library is not None else ctypes.CDLL("libcuda.so.1")
            self._call = self._library.cuMemcpyBatchAsync_v2
        except (OSError, AttributeError) as error:
            raise CopyEnginesUnavailable(
                f"the CUDA driver has no batches of copies ({error}): it is older than 13.0"
            ) from error
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)
        self._calls = [(int(each.stage[0]), _columns(each)) for each in split_into_batches(runs, shares)]
        self._stream_count = min(streams, len(self._calls))

    def __len__(self) -> int:
        """Streams that `launch` needs."""
        return self._stream_count

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that have runs, ascending."""
        return tuple(dict.fromkeys(stage for stage, _ in self._calls))

    def launch(self, streams: Sequence[int], stage: int | None = None) -> None:
        """Submit a stage, or all, to streams with these handles, none of which is the default stream.

        Raises `CopyEnginesUnavailable`; some copies may be running then.
        """
        if len(streams) != self._stream_count:
            raise ValueError(f"{len(streams)} streams, expected {self._stream_count}")
        for stream, (of, columns) in zip(itertools.cycle(streams), self._calls, strict=False):
            if stage not in {None, of}:
                continue
            code = self._call(
                *(ctypes.c_void_p(column.ctypes.data) for column in columns), ctypes.c_size_t(len(columns[0])),
                ctypes.byref(self._attributes), ctypes.byref(self._first), ctypes.c_size_t(1), ctypes.c_void_p(stream),
            )  # fmt: skip
            if code:
                raise CopyEnginesUnavailable(
                    f"the copy engines could not be started ({error_name(self._library, code)})"
                )
