"""Staging buffers in which buckets are packed: allocated once, exported once, reused round after round.

They belong to the process that made them. A buffer may be written again once the sender's `reclaim` has returned for
the bucket that was sent from it, and not before.
"""

from __future__ import annotations

import itertools
import os
from typing import Final

import torch

from ..errors import NotExportable
from . import ipc_handles as handles, posix_shm as segments

_GENERATIONS: Final = itertools.count(1)


class HostStagingBuffer:
    """Shared memory of this host, named in ``/dev/shm``."""

    def __init__(self, purpose: str, nbytes: int, generation: int) -> None:
        self._segment = segments.Segment.create(purpose, nbytes)
        self.memory = torch.from_file(str(self._segment.path), shared=True, size=nbytes, dtype=torch.uint8)
        self.exported = handles.encode_host(handles.HostSegment(self._segment.name, nbytes, generation))

    def close(self) -> None:
        """Free the memory; processes that have mapped it keep it until they unmap it."""
        self._segment.close()
        self.memory = torch.empty(0, dtype=torch.uint8)


class CudaStagingBuffer:
    """One cudaMalloc on a GPU, opened by other processes through CUDA IPC."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._pool: torch.cuda.MemPool | None = None
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # Exported once for the buffer's life: every export would cost torch another reference counter.
        try:
            named = handles.export_cuda(self.memory)
        except NotExportable:
            # The trainer's allocator maps its memory itself, and may: only what others open has to be plain.
            self._pool, self.memory = allocate_without_expandable_segments(device, nbytes)
            named = handles.export_cuda(self.memory)
        self.exported = handles.encode_cuda(named)

    def close(self) -> None:
        """Return the memory to torch's allocator."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._pool = None


def allocate_without_expandable_segments(device: torch.device, nbytes: int) -> tuple[torch.cuda.MemPool, torch.Tensor]:
    """Memory of one cudaMalloc, where torch's allocator makes expandable segments, and the pool that it belongs to.

    It has a pool of its own, so that no free block of an expandable segment is taken, and the setting is off meanwhile,
    for which torch has a private function only. Settings from the environment are restored afterwards.
    """
    before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    if "expandable_segments" not in before:
        before = ",".join(filter(None, (before, "expandable_segments:True")))
    pool = torch.cuda.MemPool()
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    configure = newer or torch.cuda.memory._set_allocator_settings  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportDeprecated]
    configure("expandable_segments:False")
    try:
        with torch.cuda.device(device), torch.cuda.use_mem_pool(pool):
            return pool, torch.empty(nbytes, dtype=torch.uint8, device=device)
    finally:
        configure(before)


class BucketBuffers:
    """`buffers` staging buffers of `buffer_bytes` each on one device.

    Raises `NotExportable` when other processes cannot open the device's memory, `OutOfSharedMemory` when the host has
    no room. Leftovers of dead processes are removed first.
    """

    def __init__(self, device: torch.device | str, buffers: int, buffer_bytes: int, name: str) -> None:
        self.device = torch.device(device)
        self.buffer_bytes = buffer_bytes
        self.generation = next(_GENERATIONS)
        """Distinguishes these buffers from earlier ones of this process."""
        self._buffers: list[HostStagingBuffer | CudaStagingBuffer] = []
        if self.device.type not in {"cpu", "cuda"}:
            raise NotExportable(f"memory of {self.device} cannot be shared: stage buckets on cpu or cuda")
        segments.remove_leftovers()
        try:
            for _ in range(buffers):
                if self.device.type == "cuda":
                    self._buffers.append(CudaStagingBuffer(self.device, buffer_bytes))
                else:
                    self._buffers.append(HostStagingBuffer(name, buffer_bytes, self.generation))
        except BaseException:
            self.close()
            raise

    @property
    def buffers(self) -> list[HostStagingBuffer | CudaStagingBuffer]:
        """The buffers."""
        return self._buffers

    def close(self) -> None:
        """Free all buffers. May be called twice; not while a bucket is being sent."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []
