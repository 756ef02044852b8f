"""The one place that writes the pickle SGLang's update_weights_from_tensor demands. Nothing here reads a pickle.

The server unpickles ``{"flattened_tensor": tensor, "metadata": [FlattenedTensorMetadata, ...]}``. Its tensor is a
reference to memory that the server maps by itself, so a payload is a few kilobytes whatever the bucket weighs.

The opcodes are written by hand. Python's pickler can only name classes it can import, and this process has no SGLang
(whose torch would have to match); nor may it map the memory itself just to describe it. The names below are in the
unpickler's allow-list of every version from 0.5.11 (by prefix) and 0.5.21 (by exact name) to 0.5.23:

* ``rebuild_storage_filename`` for shared memory: any process may open it. torch's default sharing strategy, file
  descriptors, ends the server unless it is our child.
* ``patch_torch._rebuild_cuda_tensor_modified`` for device memory: torch's own function with the device named by its
  uuid in place of an index, which means another GPU to a server with other visible devices.

Every rank maps the same memory, so each gets the same payload. torch's consumer gives up one reference to shared
memory for each rank that maps it; the owner of the memory accounts for that (dataplane's staging).
"""

import base64
import struct
from collections.abc import Sequence
from typing import Final

from weightbus.dataplane.memory import CudaMemory, HostMemory
from weightbus.dataplane.transports import SharedBucket

LOAD_FORMAT: Final = "flattened_bucket"
LOADER: Final = "weightbus.engine_agent.worker_loader.load"
"""The function that a server must name as ``--custom-weight-loader`` for `direct` and `sends`."""
PREFIX: Final = "weightbus:"
"""Of the name that an invitation loads; the rest is the path of the sidecar's socket."""


class _Name:
    """A global of the reading process."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name


class _Call:
    """A value that the reading process gets by calling a global of its own."""

    def __init__(self, function: _Name, *arguments: "_Node") -> None:
        self.function = function
        self.arguments = arguments


_Node = _Name | _Call | bool | int | str | bytes | tuple["_Node", ...] | list["_Node"] | dict[str, "_Node"]

_METADATA: Final = _Name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
_TENSOR: Final = _Name("torch", "Tensor")
_SIZE: Final = _Name("torch", "Size")
_UNTYPED: Final = _Name("torch.storage", "UntypedStorage")
_TYPED: Final = _Name("torch.storage", "TypedStorage")
_UINT8: Final = _Name("torch", "uint8")
_REDUCTIONS: Final = "torch.multiprocessing.reductions"


def serialized(bucket: SharedBucket, ranks: int) -> list[str]:
    """``serialized_named_tensors`` of `bucket` for a server with `ranks` tensor-parallel ranks."""
    content: dict[str, _Node] = {"flattened_tensor": _tensor(bucket), "metadata": _metadata(bucket)}
    return [base64.b64encode(_pickle(content)).decode("ascii")] * ranks


def invitation(path: str, ranks: int) -> list[str]:
    """``serialized_named_tensors`` that bring every rank's loader the name of a socket."""
    content: list[_Node] = [(f"{PREFIX}{path}", _nothing())]
    return [base64.b64encode(_pickle(content)).decode("ascii")] * ranks


def _nothing() -> _Call:
    """A tensor without elements: SGLang moves whatever it is given to its device."""
    return _flat(_Call(_Name(_REDUCTIONS, "rebuild_storage_empty"), _UNTYPED), 0)


def _flat(storage: _Call, nbytes: int) -> _Call:
    typed = _Call(_Name(_REDUCTIONS, "rebuild_typed_storage"), storage, _UINT8)
    return _Call(_Name(_REDUCTIONS, "rebuild_tensor"), _TENSOR, typed, (0, _Call(_SIZE, (nbytes,)), (1,), False))


def _metadata(bucket: SharedBucket) -> list[_Node]:
    """Where each tensor lies. Start, end and ``numel`` count bytes, because the flat tensor is one of bytes."""
    rows: list[_Node] = []
    at = 0
    for tensor in bucket.tensors:
        end = at + tensor.nbytes
        dtype = _Name("torch", tensor.dtype)
        rows.append(_Call(_METADATA, tensor.name, _Call(_SIZE, tensor.shape), dtype, at, end, end - at))
        at = end
    return rows


def _tensor(bucket: SharedBucket) -> _Call:
    """A flat tensor over the bucket's bytes, which may be fewer than the memory holds."""
    memory = bucket.memory
    if isinstance(memory, HostMemory):
        rebuild = _Name(_REDUCTIONS, "rebuild_storage_filename")
        return _flat(_Call(rebuild, _UNTYPED, memory.manager, memory.handle, memory.nbytes), bucket.spec.nbytes)
    return _cuda_tensor(memory, bucket.spec.nbytes)


def _cuda_tensor(memory: CudaMemory, nbytes: int) -> _Call:
    return _Call(
        _Name("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
        _TENSOR,
        _Call(_SIZE, (nbytes,)),
        (1,),  # stride
        0,  # the tensor's offset in its storage, in elements
        _TYPED,
        _UINT8,
        memory.device_uuid,
        memory.handle,
        memory.storage_nbytes,
        memory.storage_offset_bytes,
        False,  # requires_grad
        memory.ref_counter_handle,
        memory.ref_counter_offset,
        memory.event_handle,
        memory.event_sync_required,
    )


def _pickle(content: _Node) -> bytes:
    """Pickle protocol 4, without a memo: no object of ours stands twice by identity."""
    return b"\x80\x04" + _encode(content) + b"."


def _encode(node: _Node) -> bytes:  # noqa: PLR0911 - one line for each kind of node
    match node:
        case _Name():
            return _encode(node.module) + _encode(node.name) + b"\x93"  # STACK_GLOBAL
        case _Call():
            return _encode(node.function) + _encode(node.arguments) + b"R"  # REDUCE
        case bool():
            return b"\x88" if node else b"\x89"  # NEWTRUE, NEWFALSE
        case int():
            return _integer(node)
        case str():
            text = node.encode("utf-8")
            return b"X" + struct.pack("<I", len(text)) + text  # BINUNICODE
        case bytes():
            return b"B" + struct.pack("<I", len(node)) + node  # BINBYTES
        case tuple():
            return b"(" + _all(node) + b"t"  # MARK .. TUPLE
        case list():
            return b"](" + _all(node) + b"e"  # EMPTY_LIST MARK .. APPENDS
        case dict():
            items = b"".join(_encode(key) + _encode(value) for key, value in node.items())
            return b"}(" + items + b"u"  # EMPTY_DICT MARK .. SETITEMS


def _all(nodes: Sequence[_Node]) -> bytes:
    return b"".join(map(_encode, nodes))


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)  # BININT
    return b"\x8a\x08" + struct.pack("<q", value)  # LONG1 of eight bytes
