"""Memory into which an engine's agent receives buckets and out of which its server's workers load them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import torch

from ...errors import NotExportable, TransferFailed
from ...memory import BucketBuffers, CudaMemory, HostMemory, device_name, ipc_handles as handles
from ...processes import Deadline

SLOTS: Final = 2
"""One is received while the server loads the other."""
_SPARE_BYTES: Final = 1280 << 20
"""For what NCCL and CUDA take of a GPU beside the slots, and for the server.

An idle group of two took 0.94 GB of an H200 (`idle_group_bytes` in tests/gpu/results/nccl.json).
"""
_CUMEM: Final = "NCCL_CUMEM_ENABLE"


class SidecarBuffers(Protocol):
    """Slots of one size, kept from round to round. `TorchSharedBuffers` is this on the host."""

    @property
    def count(self) -> int:
        """How many `reserve` made."""
        ...

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        ...

    def holds(self, nbytes: int) -> bool:
        """There are slots, and of at least so many bytes."""
        ...

    def reserve(self, nbytes: int, buckets: int, deadline: Deadline) -> None:
        """Have slots of at least `nbytes` ready for `buckets` buckets. Raises `TransferFailed`, `OutOfSharedMemory`."""
        ...

    def memory(self, index: int) -> torch.Tensor:
        """The bytes of a slot, 1-D uint8."""
        ...

    def lend(self, index: int, tp: int) -> HostMemory | CudaMemory:
        """What the `tp` workers of a server open, for one load."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class GpuRoom:
    """Whether slots can be made on the GPU of a server, as far as this process has found out. It outlives them."""

    def __init__(self) -> None:
        self._refused: dict[torch.device, tuple[int, str]] = {}
        """The smallest slots that could not be made, in bytes each, and why."""

    def memory(self, device: torch.device) -> SidecarDeviceMemory:
        """Slots there; none yet."""
        return SidecarDeviceMemory(device, partial(self._refuse, device))

    def why_not(self, uuid: str, nbytes: int, held: int = 0) -> str:
        """Why a process cannot take buckets of `nbytes` on GPU `uuid`; empty where it can. `held` it would give back.

        What could not be made once is not tried again, whatever is free: each time costs a version.
        """
        # Sources of a broadcast have 0, because SGLang sets that in its workers, and all members need the same.
        if os.environ.setdefault(_CUMEM, "0") != "0":
            return f"{_CUMEM} is {os.environ[_CUMEM]!r} in the engine agent, and '0' at the trainer"
        try:
            device = gpu_named(uuid)
            if device in self._refused and nbytes >= self._refused[device][0]:
                return f"{self._refused[device][1]}; this is tried again when the engine agent was started again"
            free = int(torch.cuda.mem_get_info(device)[0]) + held
        except (TransferFailed, RuntimeError) as error:  # torch's, of a driver that is not there or a GPU that is full
            return _short(error)
        if free < (needed := SLOTS * nbytes + _SPARE_BYTES):
            return f"GPU {uuid} has {free} bytes free, and {needed} are needed"
        return ""

    def _refuse(self, device: torch.device, nbytes: int, reason: str) -> None:
        if device not in self._refused or nbytes < self._refused[device][0]:
            self._refused[device] = nbytes, reason


class SidecarDeviceMemory:
    """On a GPU, opened by CUDA IPC."""

    def __init__(self, device: torch.device, refused: Callable[[int, str], None]) -> None:
        """`refused` is told of slots that cannot be made: their bytes, and why."""
        self._device = device
        self._refused = refused
        self._pool: BucketBuffers | None = None

    @property
    def count(self) -> int:
        """How many `reserve` made."""
        return len(self._pool.buffers) if self._pool is not None else 0

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.count * self._pool.buffer_bytes if self._pool is not None else 0

    def holds(self, nbytes: int) -> bool:
        """There are slots, and of at least so many bytes."""
        return self._pool is not None and self._pool.buffer_bytes >= nbytes

    def reserve(self, nbytes: int, buckets: int, deadline: Deadline) -> None:
        """Have slots of at least `nbytes` ready. Raises `TransferFailed` where the GPU has no room."""
        del buckets, deadline  # as many as ever, and at once
        if self.holds(nbytes):
            return
        self.close()
        try:
            self._try_out(nbytes)
            self._pool = BucketBuffers(self._device, SLOTS, nbytes, "handing")
        except (RuntimeError, NotExportable) as error:  # torch.OutOfMemoryError is one of the first
            reason = f"{SLOTS} buckets of {nbytes} bytes could not be made on {self._device}: {_short(error)}"
            self._refused(nbytes, reason)
            raise TransferFailed(reason) from error

    def _try_out(self, nbytes: int) -> None:
        """Have memory for all slots, and give it back: torch keeps memory that was exported and never opened."""
        tried: list[torch.Tensor] = []
        try:
            tried.extend(torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS))
        finally:
            tried.clear()
            torch.cuda.empty_cache()

    def memory(self, index: int) -> torch.Tensor:
        """The bytes of a slot, 1-D uint8."""
        assert self._pool is not None
        return self._pool.buffers[index].memory

    def lend(self, index: int, tp: int) -> CudaMemory:
        """What every worker opens."""
        del tp  # the driver counts them
        assert self._pool is not None
        lent = handles.decode(self._pool.buffers[index].exported)
        assert isinstance(lent, CudaMemory)
        return lent

    def close(self) -> None:
        """Give it back to the GPU."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        torch.cuda.empty_cache()


def gpu_named(uuid: str) -> torch.device:
    """The GPU of that uuid, as this process counts them. Raises `TransferFailed`."""
    for number in range(torch.cuda.device_count()):
        if device_name(device := torch.device("cuda", number)) == uuid:
            return device
    raise TransferFailed(f"this process does not see the server's GPU {uuid}")


def _short(error: Exception) -> str:
    """Torch's errors end in a page of advice."""
    return str(error).partition("\n")[0][:300]
