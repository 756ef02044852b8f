"""A GPU's memory and its identity across processes: driver calls that torch does not offer, and CUDA IPC handles.

The driver's interface is stable across CUDA versions, and its library is installed with every GPU; neither cuda-python
nor torch's private tuples are needed. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html All calls need
a current context: torch has made one for the device that is current in the thread.

An index means another GPU in another process, a uuid the same one everywhere.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Annotated, Final, cast

import msgspec
import torch
from msgspec import Meta

from ..errors import NotExportable, PeerLost

NCCL_HOSTID: Final = "NCCL_HOSTID"
"""NCCL's own variable: processes with other values count as other hosts, whatever GPU they share."""


def device_name(device: torch.device) -> str:
    """The uuid of a GPU; the type of any other device, such as ``cpu``."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def nccl_gpu_id(gpu: str, nccl_host: str) -> str:
    """The identity of a GPU as NCCL sees it, which takes no two ranks on one. Empty for a CPU.

    `nccl_host` is the value of `NCCL_HOSTID`, empty where it is not set.
    """
    if gpu == "cpu":
        return ""
    return f"{nccl_host}/{gpu}" if nccl_host else gpu


def nccl_gpu_id_here(gpu: str) -> str:
    """`nccl_gpu_id` with this process's environment."""
    return nccl_gpu_id(gpu, os.environ.get(NCCL_HOSTID, ""))


def readable_peers(device: torch.device) -> tuple[str, ...]:
    """Uuids of the other GPUs, visible to this process, whose memory `device` reads directly."""
    if device.type != "cuda":
        return ()
    others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()) if index != device.index)
    return tuple(device_name(other) for other in others if torch.cuda.can_device_access_peer(device, other))


HANDLE_BYTES: Final = 64
"""cudaIpcMemHandle_t. Since 2.5 torch puts two bytes before it: a version and what kind of memory it is."""
_MAX_HANDLE: Final = 128
"""Bytes of any handle of torch's."""
_LAZY_PEER_ACCESS: Final = 1
_BUFFER_ID: Final = 7
"""CU_POINTER_ATTRIBUTE_BUFFER_ID: never given to another allocation of the process."""
_IS_LEGACY_IPC_CAPABLE: Final = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: false for memory that was mapped by its owner."""
_INVALID: Final = 1
"""CUDA_ERROR_INVALID_VALUE: of attributes of pointers that the driver does not know."""
_MEMORY_TYPE: Final = 2
"""CU_POINTER_ATTRIBUTE_MEMORY_TYPE: there for all memory."""
_MAPPED: Final = 13
"""CU_POINTER_ATTRIBUTE_MAPPED: false for addresses that are reserved and have no memory."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The memory that one cudaMalloc returned."""

    base: int
    nbytes: int
    identity: int


class Driver:
    """libcuda. Raises `NotExportable` where it cannot be loaded."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotExportable(f"the CUDA driver cannot be loaded: {error}") from error

    def allocation(self, pointer: int) -> Allocation:
        """The allocation that holds the device memory at `pointer`. Raises `NotExportable`."""
        base, nbytes, identity = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        capable = ctypes.c_int()
        where = ctypes.c_uint64(pointer)
        self._export(
            self._library.cuPointerGetAttribute(ctypes.byref(capable), ctypes.c_int(_IS_LEGACY_IPC_CAPABLE), where)
        )
        if not capable.value:
            raise NotExportable(
                "this GPU memory is mapped by its allocator (expandable_segments, or a pool of torch_memory_saver) and "
                "cannot be opened by another process: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF and keep "
                "parameters outside of such pools, or let the local transport copy them to a bucket that can"
            )
        self._export(self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), where))
        self._export(self._library.cuPointerGetAttribute(ctypes.byref(identity), ctypes.c_int(_BUFFER_ID), where))
        return Allocation(int(base.value), int(nbytes.value), int(identity.value))

    def mapped(self, pointer: int) -> bool:
        """True when there is memory at `pointer`: torch_memory_saver frees memory and keeps the addresses."""
        code, found = self._attribute(_MAPPED, pointer)
        if not code:
            return bool(found)
        # A newer driver knows nothing of such addresses; an older one that cannot tell is no reason to refuse.
        return code != _INVALID or self._attribute(_MEMORY_TYPE, pointer)[0] != _INVALID

    def _attribute(self, attribute: int, pointer: int) -> tuple[int, int]:
        """The driver's code, and the attribute."""
        found, where = ctypes.c_int(0), ctypes.c_uint64(pointer)
        code = self._library.cuPointerGetAttribute(ctypes.byref(found), ctypes.c_int(attribute), where)
        return int(code), found.value

    def ipc_handle(self, allocation: Allocation) -> bytes:
        """The handle by which another process of this host opens the allocation. Raises `NotExportable`."""
        handle = _Handle()
        self._export(self._library.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(allocation.base)))
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open_ipc(self, handle: bytes) -> int:
        """Map an allocation of another process, also of a peer GPU, for the current device. Raises `PeerLost`."""
        opened = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        code = self._library.cuIpcOpenMemHandle_v2(ctypes.byref(opened), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        if code:
            raise PeerLost(f"exported GPU memory cannot be opened: {self._story(code)}; is its process still there?")
        return int(opened.value)

    def close_ipc(self, pointer: int) -> None:
        """Unmap what `open_ipc` returned. Raises `PeerLost`."""
        if code := self._library.cuIpcCloseMemHandle(ctypes.c_uint64(pointer)):
            raise PeerLost(f"exported GPU memory cannot be closed: {self._story(code)}")

    def _export(self, code: int) -> None:
        if code:
            raise NotExportable(f"this GPU memory cannot be named for another process: {self._story(code)}")

    def _story(self, code: int) -> str:
        return error_name(self._library, code)


def error_name(library: ctypes.CDLL, code: int) -> str:
    """Libcuda's name of the error, and its number."""
    name = ctypes.c_char_p()
    library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
    return f"{name.value.decode() if name.value else 'CUDA error'}, {code}"


class CudaMemory(msgspec.Struct, frozen=True, tag="cuda", forbid_unknown_fields=True):
    """Device memory exported by CUDA IPC: what torch's `rebuild_cuda_tensor` takes, as plain fields."""

    device_uuid: Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{8,48}$")]
    handle: Annotated[bytes, Meta(max_length=_MAX_HANDLE)]
    storage_nbytes: Annotated[int, Meta(gt=0, le=2**48)]
    storage_offset_bytes: Annotated[int, Meta(ge=0, le=2**48)]
    ref_counter_handle: Annotated[bytes, Meta(max_length=_MAX_HANDLE)]
    ref_counter_offset: Annotated[int, Meta(ge=0)]
    event_handle: Annotated[bytes, Meta(max_length=_MAX_HANDLE)]
    event_sync_required: bool


_Shared = tuple[int, bytes, int, int, bytes, int, bytes, bool]


def export_cuda(memory: torch.Tensor) -> CudaMemory:
    """The handle by which another process of this host opens `memory`, which begins its storage.

    Raises `NotExportable` for memory of expandable segments, which torch shares by file descriptors that only a child
    process can take over.
    """
    # The private tuple of torch.multiprocessing.reductions; test_shared_memory.py fails when torch changes its order.
    shared = cast("_Shared", memory.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage]
    _, handle, storage_nbytes, offset, counter, counter_at, event, sync = shared
    plain = handle if len(handle) == HANDLE_BYTES else handle[2:] if handle[1:2] == b"c" else b""
    if len(plain) != HANDLE_BYTES:
        raise NotExportable(
            "this GPU memory comes from an expandable segment and cannot be opened by another process: "
            "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or choose the distributed or disk transport"
        )
    if max(len(handle), len(counter), len(event)) > _MAX_HANDLE:
        raise NotExportable(f"torch's CUDA IPC handles have unexpected sizes {[len(handle), len(counter), len(event)]}")
    uuid = device_name(memory.device)
    return CudaMemory(uuid, handle, storage_nbytes, offset, counter, counter_at, event, bool(sync))
