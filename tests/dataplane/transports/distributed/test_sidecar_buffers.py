"""Room for an agent that takes part in broadcasts, on its server's GPU. No GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from weightbus.dataplane.errors import NotExportable, TransferFailed
from weightbus.dataplane.memory import cuda_memory as handles
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.transports.distributed import receiver as handing_memory
from weightbus.dataplane.transports.distributed.receiver import GpuRoom

GPU = "GPU-of-the-server"
UUID = "01234567-89ab-cdef-0123-456789abcdef"
BUCKET = 1 << 30
SPARE = 1280 << 20
"""More than an idle group of two was measured to take."""


def has(monkeypatch: pytest.MonkeyPatch, free: int, made: type[Exception] | None = None) -> None:
    """A GPU with `free` bytes, on which slots can be made, or raise `made`."""

    def pool(_device: torch.device, slots: int, nbytes: int, _name: str) -> Any:
        if made is not None:
            raise made("no, and a page of advice\nTry this")
        return SimpleNamespace(buffers=[None] * slots, buffer_bytes=nbytes, close=lambda: None)

    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setattr(handing_memory, "gpu_named", lambda _: torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1 << 40))
    monkeypatch.setattr(handing_memory, "BucketBuffers", pool)


def test_a_gpu_that_is_not_seen_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no error: the server's workers can take part."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "does not see" in GpuRoom().why_not(GPU, 1)
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0", "as the trainer has it"
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert "NCCL_CUMEM_ENABLE is '1'" in GpuRoom().why_not(GPU, 1)


@pytest.mark.parametrize(("free", "fits"), [(2 * BUCKET + SPARE, True), (2 * BUCKET + SPARE - 1, False)])
def test_a_gpu_without_room_is_a_reason(monkeypatch: pytest.MonkeyPatch, free: int, fits: bool) -> None:
    """Two buckets, and something for the server and NCCL."""
    has(monkeypatch, free)
    assert (GpuRoom().why_not(GPU, BUCKET) == "") is fits
    assert not GpuRoom().why_not(GPU, BUCKET, held=1), "what it has would be given back"


@pytest.mark.parametrize("made", [torch.OutOfMemoryError, RuntimeError, NotExportable])
def test_slots_that_could_not_be_made_are_a_reason_from_then_on(
    monkeypatch: pytest.MonkeyPatch, made: type[Exception]
) -> None:
    """Whatever is free, for as much and more; who wants less may try. Another GPU is another matter."""
    has(monkeypatch, 1 << 40, made)
    room = GpuRoom()
    for nbytes in (BUCKET, 2 * BUCKET, BUCKET):
        with pytest.raises(TransferFailed, match="could not be made") as raised:
            room.memory(torch.device("meta")).reserve(nbytes, 6, Deadline(5))
        assert "advice" in str(raised.value)
        assert "Try" not in str(raised.value)
        assert f"2 buckets of {BUCKET} bytes" in room.why_not(GPU, BUCKET)
        assert f"2 buckets of {BUCKET} bytes" in room.why_not(GPU, 2 * BUCKET)
    assert not room.why_not(GPU, BUCKET - 1)
    has(monkeypatch, 1 << 40)
    room.memory(torch.device("meta")).reserve(BUCKET - 1, 6, Deadline(5))
    assert not room.why_not(GPU, BUCKET - 1)
    monkeypatch.setattr(handing_memory, "gpu_named", lambda _: torch.device("meta", 1))
    assert not room.why_not(GPU, BUCKET)


def test_nothing_is_exported_before_there_was_room_for_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps exported memory that nobody opened, on a GPU that has little."""
    has(monkeypatch, 1 << 40)
    empty, asked, kept = torch.empty, [], []
    monkeypatch.setattr(handing_memory, "BucketBuffers", lambda *_: kept.append("exported"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.append("given back"))

    def second_fails(nbytes: int, **given: Any) -> torch.Tensor:
        asked.append(nbytes)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(nbytes, **given)

    monkeypatch.setattr(torch, "empty", second_fails)
    with pytest.raises(TransferFailed, match="could not be made"):
        GpuRoom().memory(torch.device("meta")).reserve(BUCKET, 6, Deadline(5))
    assert asked == [BUCKET, BUCKET]
    assert "exported" not in kept
    assert kept[-1] == "given back"


def test_what_is_lent_is_the_slot_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would load other bytes than those that were compared."""
    lent = [handles.CudaMemory(UUID, bytes([at]) * 64, BUCKET, 0, b"counter", at, b"event", True) for at in (0, 1)]
    slots = [SimpleNamespace(memory=torch.full((4,), at), exported=msgspec.msgpack.encode(lent[at])) for at in (0, 1)]
    has(monkeypatch, 1 << 40)
    monkeypatch.setattr(handing_memory, "BucketBuffers", lambda *_: SimpleNamespace(buffers=slots, buffer_bytes=BUCKET))
    memory = GpuRoom().memory(torch.device("meta"))
    assert (memory.count, memory.nbytes, memory.holds(1)) == (0, 0, False)
    memory.reserve(BUCKET, 6, Deadline(5))
    assert (memory.count, memory.nbytes, memory.holds(BUCKET), memory.holds(BUCKET + 1)) == (2, 2 * BUCKET, True, False)
    assert [memory.lend(at, 2) for at in (0, 1)] == lent
    assert [int(memory.memory(at)[0]) for at in (0, 1)] == [0, 1]
