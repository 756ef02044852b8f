"""Runs of bytes (copy_runs.py) through the copy engines of a GPU: one call of cuMemcpyBatchAsync for each branch.

What the calls take is made ready once. Branches go to streams of their own, so that several engines work. Graphs of
memcpy nodes would be as many commands for the engines, and take ten times as long to launch.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np

from .copy_runs import CopyRuns, branches_of
from .errors import NoCopyEngines

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


class CopyBatch:
    """Copies that were made ready. Their memory is the caller's to keep."""

    def __init__(self, runs: CopyRuns, branches: int, library: ctypes.CDLL | None = None) -> None:
        """In at most so many branches. `library` stands for libcuda. Raises `NoCopyEngines`."""
        try:
            self._library = library if library is not None else ctypes.CDLL("libcuda.so.1")
            self._call = self._library.cuMemcpyBatchAsync_v2
        except (OSError, AttributeError) as error:
            raise NoCopyEngines(f"the CUDA driver has no batches of copies ({error}): it is older than 13.0") from error
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)
        self._branches = [
            tuple(np.ascontiguousarray(each, np.uint64) for each in (part.target, part.source, part.nbytes))
            for part in branches_of(runs, branches)
        ]

    def __len__(self) -> int:
        """Branches: streams that `launch` needs."""
        return len(self._branches)

    def launch(self, streams: Sequence[int]) -> None:
        """Copy everything, each branch in the order of the stream with its handle, which is not the default one.

        Raises `NoCopyEngines`; some of it may be under way then.
        """
        for stream, columns in zip(streams, self._branches, strict=True):
            code = self._call(
                *(ctypes.c_void_p(column.ctypes.data) for column in columns), ctypes.c_size_t(len(columns[0])),
                ctypes.byref(self._attributes), ctypes.byref(self._first), ctypes.c_size_t(1), ctypes.c_void_p(stream),
            )  # fmt: skip
            if code:
                raise NoCopyEngines(f"the copy engines could not be started ({self._story(code)})")

    def _story(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        return f"{name.value.decode() if name.value else 'CUDA error'}, {code}"
