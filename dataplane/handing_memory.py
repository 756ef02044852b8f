"""Memory into which an engine's agent receives buckets and out of which its server's workers load them."""

from __future__ import annotations

import os
from typing import Final, Protocol

import torch

from . import handles
from .deadline import Deadline
from .device_name import device_name
from .errors import TransferFailed
from .staging import BucketPool
from .transport import CudaMemory, HostMemory

SLOTS: Final = 2
"""One is received while the server loads the other."""
_SPARE_BYTES: Final = 512 << 20
"""Left to the server, and for what NCCL and a context take of a GPU."""
_CUMEM: Final = "NCCL_CUMEM_ENABLE"


class HandingMemory(Protocol):
    """Slots of one size, kept from round to round. `EngineMemory` is this on the host."""

    @property
    def slots(self) -> int:
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

    def memory(self, slot: int) -> torch.Tensor:
        """The bytes of a slot, 1-D uint8."""
        ...

    def lend(self, slot: int, tp: int) -> HostMemory | CudaMemory:
        """What the `tp` workers of a server open, for one load."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class DeviceMemory:
    """On a GPU, opened by CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: BucketPool | None = None

    @property
    def slots(self) -> int:
        """How many `reserve` made."""
        return len(self._pool.slots) if self._pool is not None else 0

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.slots * self._pool.slot_bytes if self._pool is not None else 0

    def holds(self, nbytes: int) -> bool:
        """There are slots, and of at least so many bytes."""
        return self._pool is not None and self._pool.slot_bytes >= nbytes

    def reserve(self, nbytes: int, buckets: int, deadline: Deadline) -> None:
        """Have slots of at least `nbytes` ready. Raises `TransferFailed` where the GPU has no room."""
        del buckets, deadline  # as many as ever, and at once
        if self.holds(nbytes):
            return
        self.close()
        try:
            self._pool = BucketPool(self._device, SLOTS, nbytes, "handing")
        except torch.cuda.OutOfMemoryError as error:
            raise TransferFailed(f"{self._device} has no room for {SLOTS} buckets of {nbytes} bytes") from error

    def memory(self, slot: int) -> torch.Tensor:
        """The bytes of a slot, 1-D uint8."""
        assert self._pool is not None
        return self._pool.slots[slot].memory

    def lend(self, slot: int, tp: int) -> CudaMemory:
        """What every worker opens."""
        del tp  # the driver counts them
        assert self._pool is not None
        lent = handles.decode(self._pool.slots[slot].exported)
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


def why_not(uuid: str, nbytes: int, held: int = 0) -> str:
    """Why a process cannot take buckets of `nbytes` on GPU `uuid`; empty where it can. `held` it would give back."""
    # Sources of a broadcast have 0, because SGLang sets that in its workers, and all members need the same.
    if os.environ.setdefault(_CUMEM, "0") != "0":
        return f"{_CUMEM} is {os.environ[_CUMEM]!r} in the engine agent, and '0' at the trainer"
    try:
        device = gpu_named(uuid)
        free = int(torch.cuda.mem_get_info(device)[0]) + held
    except (TransferFailed, RuntimeError) as error:  # torch's, of a driver that is not there or a GPU that is full
        return str(error).partition("\n")[0]
    if free < (needed := SLOTS * nbytes + _SPARE_BYTES):
        return f"GPU {uuid} has {free} bytes free, and {needed} are needed"
    return ""
