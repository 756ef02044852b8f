"""Staging buffers: names, permissions, and leftovers of dead owners."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from weightbus.dataplane.errors import NotExportable, OutOfSharedMemory, TransferFailed
from weightbus.dataplane.memory import (
    ipc_handles as handles,
    posix_shm as segments,
    staging_buffers as staging,
    torch_shared_memory as engine_memory,
)
from weightbus.dataplane.memory.ipc_handles import CudaMemory
from weightbus.dataplane.processes.connections import Deadline

CUDA = CudaMemory("GPU-0123-4567", b"\1c" + bytes(range(64)), 1 << 30, 512, b"/torch_1_2_3", 7, b"e" * 64, True)


def test_slots_are_seen_by_whoever_opens_them() -> None:
    """What is written to a buffer is what its exported name leads to, round after round, until close."""
    pool = staging.BucketBuffers("cpu", 2, 5000, "pool")
    exported = [buffer.exported for buffer in pool.buffers]
    segment = handles.decode(exported[1])
    assert isinstance(segment, handles.HostSegment)
    assert (segment.nbytes, segment.generation) == (5000, pool.generation)
    seen = segments.map_readonly(segment.name, segment.nbytes)
    for value in (7, 9):
        pool.buffers[1].memory.fill_(value)
        assert set(seen.tolist()) == {value}
    assert [buffer.exported for buffer in pool.buffers] == exported
    pool.close()
    pool.close()
    assert not (segments.DIRECTORY / segment.name).exists()
    with pytest.raises(TransferFailed, match="cannot be opened"):
        segments.map_readonly(segment.name, segment.nbytes)


def test_generations_differ() -> None:
    """Two pools of one name are told apart."""
    first, second = staging.BucketBuffers("cpu", 1, 64, "same"), staging.BucketBuffers("cpu", 1, 64, "same")
    assert first.buffers[0].exported != second.buffers[0].exported
    first.close()
    second.close()


def test_a_full_host_is_an_error_and_leaves_nothing() -> None:
    """Memory that is not there is refused when the pool is made, with advice, and nothing of it stays."""
    before = set(segments.DIRECTORY.glob("weightbus-greedy-*"))
    with pytest.raises(OutOfSharedMemory, match="shm-size"):
        staging.BucketBuffers("cpu", 1, 1 << 46, "greedy")
    assert set(segments.DIRECTORY.glob("weightbus-greedy-*")) == before


def test_other_devices_are_refused() -> None:
    """Only memory that can be shared makes a pool."""
    with pytest.raises(NotExportable, match="meta"):
        staging.BucketBuffers("meta", 1, 64, "meta")


def test_dead_processes_leave_nothing() -> None:
    """A process that was killed leaves segments; the next one to start sweeps them up, and none that is in use."""
    program = (
        "import os, signal; from weightbus.dataplane.memory import posix_shm as segments; "
        "own = segments.Segment.create('victim', 64); print(own.name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    own = segments.Segment.create("own", 64)
    for _ in range(10):  # any other program of ours that starts on this host may be the one that sweeps
        dead = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False, timeout=120
        )
        name = dead.stdout.strip()
        swept = segments.remove_leftovers()
        assert name.startswith("weightbus-victim-")
        assert not (segments.DIRECTORY / name).exists()
        assert own.path.exists()
        if name in swept:
            break
    else:
        pytest.fail("ten times it was gone before")
    own.close()


def test_a_forked_child_does_not_unlink() -> None:
    """The memory belongs to the process that made it, whatever its children do when they end."""
    own = segments.Segment.create("parent", 64)
    pid = os.fork()
    if pid == 0:
        own.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert own.path.exists()
    own.close()
    assert not own.path.exists()


@pytest.mark.parametrize("name", ["../etc/passwd", "torch_1_2_3", "weightbus-x-1-2-3-4/../y"])
def test_only_our_segments_are_opened(name: str) -> None:
    """A peer cannot make us open another file."""
    with pytest.raises(TransferFailed, match="not the name"):
        segments.map_readonly(name, 64)


def test_too_small_is_refused() -> None:
    """A segment shorter than the peer says would end the process with SIGBUS."""
    own = segments.Segment.create("small", 64)
    with pytest.raises(TransferFailed, match="64 bytes"):
        segments.map_readonly(own.name, 128)
    own.close()


@pytest.mark.parametrize("memory", [handles.HostSegment("weightbus-a-1-2-3-4", 1 << 40, 3), CUDA], ids=["host", "cuda"])
def test_handles_survive_the_wire(memory: handles.HostSegment | CudaMemory) -> None:
    """Both structs are read back as they were written, have a fixed size, and nothing shorter or longer is read."""
    data = handles.encode_cuda(memory) if isinstance(memory, CudaMemory) else handles.encode_host(memory)
    assert handles.decode(data) == memory
    for wrong in (data[:-1], data + b"\0", data[4:], b"", b"WBM1", b"WBM1\7" + data[5:], b"\x80\4" + data[2:]):
        with pytest.raises(TransferFailed, match="name no memory"):
            handles.decode(wrong)


@pytest.mark.parametrize("at", [5, 6, 7, 8, 9])
def test_handles_out_of_bounds(at: int) -> None:
    """A length, a size or a name that no encoder writes is refused, and nothing but `TransferFailed` is raised."""
    for data in (handles.encode_host(handles.HostSegment("a-1", 64, 1)), handles.encode_cuda(CUDA)):
        broken = data[:at] + b"\xff" * 24 + data[at + 24 :]
        with pytest.raises(TransferFailed, match="out of bounds"):
            handles.decode(broken)


def test_torch_still_shares_gpu_memory_as_we_read_it() -> None:
    """`export_cuda` unpacks a private tuple of torch: its fields and their order are those of `reduce_tensor`."""
    source = "".join(inspect.getsource(reductions.reduce_tensor).split())
    order = (
        "(device,handle,storage_size_bytes,storage_offset_bytes,ref_counter_handle,ref_counter_offset,"
        "event_handle,event_sync_required,)=storage._share_cuda_()"
    )
    assert order in source
    taken = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert taken[7:] == [
        "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip


def test_engine_memory_outlives_its_users(tmp_path: Path) -> None:
    """Workers open and drop a buffer as often as they like; it stays ours, its name too, until close."""
    memory = engine_memory.TorchSharedBuffers(tmp_path)
    memory.reserve(4000, 5, Deadline(60))
    assert memory.count == 2
    memory.memory(0).fill_(5)
    for _ in range(40):
        lent = memory.lend(0, 1)
        storage = reductions.rebuild_storage_filename(torch.UntypedStorage, lent.manager, lent.handle, lent.nbytes)
        assert int(torch.empty(0, dtype=torch.uint8).set_(storage).sum()) == 5 * 4000
        del storage
    name = lent.handle.decode().removeprefix("/")
    assert (segments.DIRECTORY / name).exists()
    memory.reserve(3000, 1, Deadline(60))
    assert memory.lend(0, 1).handle == lent.handle
    memory.reserve(9000, 5, Deadline(60))
    assert memory.memory(1).numel() == 9000
    assert not (segments.DIRECTORY / name).exists()
    memory.close()
    memory.close()
    assert list(segments.DIRECTORY.glob(f"weightbus-engine-*-{os.getpid()}-*")) == []


def test_a_slot_that_others_cannot_open_is_made_of_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the trainer's allocator maps its own: it goes on as it is, and buckets can be opened. If they can."""
    plain = torch.ones(64, dtype=torch.uint8)

    def export(memory: torch.Tensor) -> CudaMemory:
        if memory is not plain:
            raise NotExportable("mapped by its allocator")
        return CUDA

    monkeypatch.setattr(staging, "allocate_without_expandable_segments", lambda _device, _nbytes: (None, plain))
    monkeypatch.setattr(handles, "export_cuda", export)
    buffer = staging.CudaStagingBuffer(torch.device("cpu"), 64)
    assert buffer.memory is plain
    monkeypatch.setattr(
        staging, "allocate_without_expandable_segments", lambda _device, nbytes: (None, torch.empty(nbytes))
    )
    with pytest.raises(NotExportable):
        staging.CudaStagingBuffer(torch.device("cpu"), 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_slots_are_exported() -> None:
    """A GPU buffer has a handle that the struct can carry."""
    pool = staging.BucketBuffers("cuda", 1, 1 << 20, "gpu")
    memory = handles.decode(pool.buffers[0].exported)
    assert isinstance(memory, CudaMemory)
    assert memory.storage_nbytes >= 1 << 20
    pool.close()
