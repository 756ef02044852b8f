"""The forged pickle: every name in it is allowed by the server, and what comes out is what was meant."""

import base64
import pickletools
from typing import Any

import pytest

from weightbus.dataplane.memory import CudaMemory, HostMemory
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.transports.interface import SharedBucket
from weightbus.engine_agent.engines.sglang.pickle_payload import serialized

TENSORS = [TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (5,)), TensorSpec("c", "int8", ())]
MANIFEST = Manifest.of("M", TENSORS)
HOST = HostMemory(b"/tmp/manager", b"/segment", 4096)
CUDA = CudaMemory("GPU-uuid", b"h" * 64, 4096, 2**33, b"ref", 3, b"event", True)
ALLOWED = {
    "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata",
    "sglang.srt.utils.patch_torch _rebuild_cuda_tensor_modified",
    "torch.multiprocessing.reductions rebuild_storage_filename",
    "torch.multiprocessing.reductions rebuild_typed_storage",
    "torch.multiprocessing.reductions rebuild_tensor",
    "torch.storage UntypedStorage",
    "torch.storage TypedStorage",
    "torch Tensor",
    "torch Size",
    "torch uint8",
    "torch float32",
    "torch bfloat16",
    "torch int8",
}
"""Of the exact list in SGLang 0.5.21 to 0.5.23 (srt/utils/common.py, SafeUnpickler)."""


def opcodes(memory: HostMemory | CudaMemory, ranks: int = 1) -> list[tuple[str, Any]]:
    """The instructions of one payload."""
    bucket = SharedBucket(0, MANIFEST.buckets[0], MANIFEST.tensors_of(0), memory)
    payloads = serialized(bucket, ranks)
    assert len(payloads) == ranks
    assert len(set(payloads)) == 1
    return [(code.name, argument) for code, argument, _ in pickletools.genops(base64.b64decode(payloads[0]))]


@pytest.mark.parametrize("memory", [HOST, CUDA], ids=["host", "cuda"])
def test_only_allowed_names_are_asked_for(memory: HostMemory | CudaMemory) -> None:
    """One name outside the list ends the server."""
    codes = opcodes(memory, ranks=2)
    strings = [argument if name == "BINUNICODE" else None for name, argument in codes]
    named = {f"{strings[i - 2]} {strings[i - 1]}" for i, (name, _) in enumerate(codes) if name == "STACK_GLOBAL"}
    assert named <= ALLOWED
    assert not {name for name, _ in codes} & {"GLOBAL", "INST", "OBJ", "NEWOBJ", "BUILD", "EXT1"}


def test_offsets_count_bytes() -> None:
    """start, end and numel of each tensor, in the packed order."""
    numbers = [argument for name, argument in opcodes(HOST) if name == "BININT"]
    for span in ((0, 24, 24), (24, 34, 10), (34, 35, 1)):
        assert any(tuple(numbers[i : i + 3]) == span for i in range(len(numbers)))


def test_device_memory_travels_by_uuid_and_handle() -> None:
    """The fields of torch's rebuild_cuda_tensor in its order, offsets above 2 GiB included."""
    values = [argument for _, argument in opcodes(CUDA) if argument is not None]
    at = values.index("GPU-uuid")
    assert values[at : at + 6] == ["GPU-uuid", b"h" * 64, 4096, 2**33, b"ref", 3]
