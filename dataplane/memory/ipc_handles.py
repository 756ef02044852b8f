"""The handle of a staging buffer in a message: two fixed binary structs, decoded with every bound checked.

torch's own way of sharing pickles a private tuple. `export_cuda` is the only function that touches that tuple; plain
fields travel, and the side that needs torch's form again builds it from them.
"""

import re
import struct
from typing import Final, cast

import msgspec
import torch

from ..errors import NotExportable, TransferFailed
from .device_identity import device_name


class HostMemory(msgspec.Struct, frozen=True):
    """Shared memory as torch's file_system sharing names it: what `rebuild_storage_filename` takes."""

    manager: bytes
    handle: bytes
    nbytes: int


class CudaMemory(msgspec.Struct, frozen=True):
    """Device memory exported by CUDA IPC: what torch's `rebuild_cuda_tensor` takes, as plain fields."""

    device_uuid: str
    handle: bytes
    storage_nbytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


_MAGIC: Final = b"WBM1"
_HOST: Final = struct.Struct("<4sBxHQQ128s")
_CUDA: Final = struct.Struct("<4sBBHHHQQQ48s128s128s128s")
_KIND_HOST: Final = 1
_KIND_CUDA: Final = 2
_MAX_BYTES: Final = 2**48
_UUID: Final = re.compile(r"^[A-Za-z0-9-]{8,48}$")
_SEGMENT: Final = re.compile(r"^[A-Za-z0-9._-]{1,128}$")

_IPC_HANDLE_BYTES: Final = 64
"""cudaIpcMemHandle_t. Since 2.5 torch puts two bytes before it: a version and what kind of memory it is."""


_Shared = tuple[int, bytes, int, int, bytes, int, bytes, bool]


class HostSegment(msgspec.Struct, frozen=True):
    """Memory by its name under ``/dev/shm``. `generation` tells two segments of one name apart."""

    name: str
    nbytes: int
    generation: int


def encode_host(segment: HostSegment) -> bytes:
    """The struct of a shared-memory segment."""
    name = segment.name.encode("ascii")
    return _HOST.pack(_MAGIC, _KIND_HOST, len(name), segment.nbytes, segment.generation, name)


def encode_cuda(memory: CudaMemory) -> bytes:
    """The struct of device memory."""
    uuid = memory.device_uuid.encode("ascii")
    fields = (memory.handle, memory.ref_counter_handle, memory.event_handle)
    if len(uuid) > 48 or any(len(field) > 128 for field in fields):
        raise NotExportable(f"torch's CUDA IPC handle has unexpected sizes {[len(field) for field in fields]}")
    return _CUDA.pack(
        _MAGIC, _KIND_CUDA, memory.event_sync_required, *(len(field) for field in fields), memory.storage_nbytes,
        memory.storage_offset_bytes, memory.ref_counter_offset, uuid, *fields,
    )  # fmt: skip


def decode(data: bytes) -> HostSegment | CudaMemory:
    """Decode either struct. Raises `TransferFailed` on bytes that the encoders cannot have written."""
    kind = data[4] if len(data) > 4 and data[:4] == _MAGIC else 0
    if kind == _KIND_HOST and len(data) == _HOST.size:
        return _decode_host(data)
    if kind == _KIND_CUDA and len(data) == _CUDA.size:
        return _decode_cuda(data)
    raise TransferFailed(f"{len(data)} bytes that begin with {data[:5].hex()} name no memory this version knows")


def _decode_host(data: bytes) -> HostSegment:
    _, _, length, nbytes, generation, name = _HOST.unpack(data)
    text = name[:length].decode("ascii", "replace")
    if length > 128 or not _SEGMENT.match(text) or not 0 < nbytes <= _MAX_BYTES:
        raise TransferFailed(f"memory {text!r} of {nbytes} bytes is out of bounds")
    return HostSegment(text, nbytes, generation)


def _decode_cuda(data: bytes) -> CudaMemory:
    _, _, sync, handle_len, counter_len, event_len, nbytes, offset, counter_at, raw_uuid, *fields = _CUDA.unpack(data)
    uuid = raw_uuid.rstrip(b"\0").decode("ascii", "replace")
    lengths = (handle_len, counter_len, event_len)
    if not _UUID.match(uuid) or max(lengths) > 128 or not 0 < nbytes <= _MAX_BYTES or offset > _MAX_BYTES or sync > 1:
        raise TransferFailed(f"memory of GPU {uuid!r} with {nbytes} bytes at {offset} is out of bounds")
    handle, counter, event = (field[:length] for field, length in zip(fields, lengths, strict=True))
    return CudaMemory(uuid, handle, nbytes, offset, counter, counter_at, event, bool(sync))


def export_cuda(memory: torch.Tensor) -> CudaMemory:
    """The handle by which another process of this host opens `memory`, which begins its storage.

    Raises `NotExportable` for memory of expandable segments, which torch shares by file descriptors that only a child
    process can take over.
    """
    # The private tuple of torch.multiprocessing.reductions; test_handles.py fails when torch changes its order.
    shared = cast("_Shared", memory.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage]
    _, handle, storage_nbytes, offset, counter, counter_at, event, sync = shared
    plain = handle if len(handle) == _IPC_HANDLE_BYTES else handle[2:] if handle[1:2] == b"c" else b""
    if len(plain) != _IPC_HANDLE_BYTES:
        raise NotExportable(
            "this GPU memory comes from an expandable segment and cannot be opened by another process: "
            "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or choose the distributed or disk transport"
        )
    uuid = device_name(memory.device)
    return CudaMemory(uuid, handle, storage_nbytes, offset, counter, counter_at, event, bool(sync))
