"""Tensors with a shape, a device and a storage of their own, and no memory: all of them lie in the same few pages.

A loader can look at everything but their values, and a storage's identity follows every view. What is written to one
overwrites the others, so nothing may be written: their maker intercepts every operation on them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import torch

_MAP_NORESERVE: Final = 0x4000
"""Linux's number; Python names it since 3.13 only. Without it the kernel refuses more than there is memory."""


class _DeviceMemory:
    """Memory of a GPU as other libraries see it; torch makes a new storage over it each time it is given one."""

    def __init__(self, memory: torch.Tensor, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


class PhantomTensors:
    """Makes phantom tensors, on one device. Grows to the largest one: address space on a CPU, memory on a GPU.

    What was made before it grew keeps the smaller memory, so `reserve` the largest first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: mmap.mmap | None = None
        self._gpu: torch.Tensor | None = None
        self._nbytes = 0

    def make(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor over a new storage, packed unless `strides` say otherwise."""
        sizes = torch.Size(shape)
        if sizes.numel() == 0:
            return torch.empty(sizes, dtype=dtype, device=self._device)
        if strides is None:
            return self._storage(sizes.numel() * dtype.itemsize).view(dtype).view(sizes)
        count = 1 + sum((extent - 1) * stride for extent, stride in zip(sizes, strides, strict=True))
        return self._storage(count * dtype.itemsize).view(dtype).as_strided(sizes, tuple(strides))

    def reserve(self, nbytes: int) -> None:
        """Have room for tensors of up to `nbytes`."""
        if nbytes > self._nbytes:
            self._grow(nbytes)

    def _storage(self, nbytes: int) -> torch.Tensor:
        """1-D, uint8."""
        self.reserve(nbytes)
        if self._host is not None:
            return torch.frombuffer(self._host, dtype=torch.uint8, count=nbytes)
        if self._gpu is not None:
            return torch.as_tensor(_DeviceMemory(self._gpu, nbytes), device=self._device)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)  # neither: memory for each of them

    def _grow(self, nbytes: int) -> None:
        self._nbytes = nbytes
        if self._device.type == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._host = mmap.mmap(-1, nbytes, flags=flags)  # pages that are never written take no memory
        elif self._device.type == "cuda":
            self._gpu = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
