"""Runs of bytes (memcpy_runs.py) through the copy engines of a GPU: some calls of cuMemcpyBatchAsync.

What the calls take is made ready once. They go to streams in turn, so that several engines work. Graphs of memcpy
nodes would be as many commands for the engines, and more work to launch.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import CopyEnginesUnavailable
from ..memory import error_name
from .memcpy_runs import SHARES, CopyRuns, split_into_batches

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
    """Copies that were made ready. Their memory is the caller's to keep."""

    def __init__(
        self, runs: CopyRuns, branches: int, library: ctypes.CDLL | None = None, shares: Sequence[int] = SHARES
    ) -> None:
        """On at most so many streams, a call for each share.

        `library` stands for libcuda. Raises `CopyEnginesUnavailable`.
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
        self._branches = min(branches, len(self._calls))

    def __len__(self) -> int:
        """Streams that `launch` needs."""
        return self._branches

    @property
    def stages(self) -> tuple[int, ...]:
        """Those that there are runs of, in their order."""
        return tuple(dict.fromkeys(stage for stage, _ in self._calls))

    def launch(self, streams: Sequence[int], stage: int | None = None) -> None:
        """Copy a stage, or all, in the orders of streams with these handles, of which none is the default one.

        Raises `CopyEnginesUnavailable`; some of it may be under way then.
        """
        if len(streams) != self._branches:
            raise ValueError(f"{len(streams)} streams, expected {self._branches}")
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
