"""Batches of copies on a host's memory: the contract that copy_cuda.py has with libcuda.

The struct is written down here a second time, field by field as cuda.h of CUDA 13.0 has it, and what a driver refuses
is refused. Copies are carried out last first: nobody may rely on an order between them.
"""

from __future__ import annotations

import ctypes
from typing import Any

INVALID_VALUE, NOT_SUPPORTED = 1, 801


class Location(ctypes.Structure):
    """CUmemLocation_v1."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int), ("srcLocHint", Location), ("dstLocHint", Location),
        ("flags", ctypes.c_uint),
    )  # fmt: skip


class FakeBatches:
    """Stands in for ctypes.CDLL("libcuda.so.1")."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int]] = []
        """Stream and copies of each call."""
        self.code = 0
        """What calls return that copy nothing."""

    def cuGetErrorName(self, code: ctypes.c_int, name: Any) -> int:  # noqa: N802
        known = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", NOT_SUPPORTED: b"CUDA_ERROR_NOT_SUPPORTED"}
        name._obj.value = known.get(code.value)
        return 0

    def cuMemcpyBatchAsync_v2(  # noqa: N802, PLR0917
        self, targets: ctypes.c_void_p, sources: ctypes.c_void_p, sizes: ctypes.c_void_p, count: ctypes.c_size_t,
        attributes: Any, indexes: Any, attributes_count: ctypes.c_size_t, stream: ctypes.c_void_p,
    ) -> int:  # fmt: skip
        for each in (targets, sources, sizes, stream):
            assert isinstance(each, ctypes.c_void_p)  # a bare int would be cut to 32 bits
        for each in (count, attributes_count, indexes._obj):
            assert isinstance(each, ctypes.c_size_t)
        if self.code:
            return self.code
        given = Attributes.from_buffer_copy(bytes(attributes._obj).ljust(ctypes.sizeof(Attributes), b"\xff"))
        hints = (given.srcLocHint, given.dstLocHint)
        if given.srcAccessOrder not in {1, 2, 3} or given.flags or any(hint.type or hint.id for hint in hints):
            return INVALID_VALUE
        if not count.value or attributes_count.value != 1 or indexes._obj.value or not stream.value:
            return INVALID_VALUE  # the legacy default stream is not taken
        columns = [(ctypes.c_uint64 * count.value).from_address(each.value or 0) for each in (targets, sources, sizes)]
        if not all(columns[2]):
            return INVALID_VALUE
        for target, source, size in reversed(list(zip(*columns, strict=True))):
            ctypes.memmove(target, source, size)
        self.launched.append((stream.value, count.value))
        return 0
