"""Staging buffers: names, permissions, and leftovers of dead owners."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch.multiprocessing import reductions

from weightbus.dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    NotExportable,
    OutOfSharedMemory,
    TransferFailed,
)
from weightbus.dataplane.memory import shared_memory as memories
from weightbus.dataplane.memory.cuda_memory import CudaMemory
from weightbus.dataplane.processes.connections import Deadline

CUDA = CudaMemory("GPU-0123-4567", b"\1c" + bytes(range(64)), 1 << 30, 512, b"/torch_1_2_3", 7, b"e" * 64, True)


def test_slots_are_seen_by_every_process_that_opens_them() -> None:
    """What is written to a buffer is what its exported name leads to, round after round, until close."""
    pool = memories.BucketBuffers("cpu", 2, 5000, "pool")
    exported = [buffer.exported for buffer in pool.buffers]
    segment = memories.decode_handle(exported[1])
    assert isinstance(segment, memories.HostSegment)
    assert (segment.nbytes, segment.generation) == (5000, pool.generation)
    seen = memories.map_readonly(segment.name, segment.nbytes)
    for value in (7, 9):
        pool.buffers[1].memory.fill_(value)
        assert set(seen.tolist()) == {value}
    assert [buffer.exported for buffer in pool.buffers] == exported
    pool.close()
    pool.close()
    assert not (memories.DIRECTORY / segment.name).exists()
    with pytest.raises(TransferFailed, match="cannot be opened"):
        memories.map_readonly(segment.name, segment.nbytes)


def test_generations_differ() -> None:
    """Two pools of one name are told apart."""
    first, second = memories.BucketBuffers("cpu", 1, 64, "same"), memories.BucketBuffers("cpu", 1, 64, "same")
    assert first.buffers[0].exported != second.buffers[0].exported
    first.close()
    second.close()


def test_a_full_host_is_an_error_and_leaves_nothing() -> None:
    """Memory that is not there is refused when the pool is made, with advice, and nothing of it stays."""
    before = set(memories.DIRECTORY.glob("weightbus-greedy-*"))
    with pytest.raises(OutOfSharedMemory, match="shm-size"):
        memories.BucketBuffers("cpu", 1, 1 << 46, "greedy")
    assert set(memories.DIRECTORY.glob("weightbus-greedy-*")) == before


def test_other_devices_are_refused() -> None:
    """Only memory that can be shared makes a pool."""
    with pytest.raises(NotExportable, match="meta"):
        memories.BucketBuffers("meta", 1, 64, "meta")


def test_dead_processes_leave_nothing() -> None:
    """A process that was killed leaves segments; the next one to start sweeps them up, and none that is in use."""
    program = (
        "import os, signal; from weightbus.dataplane.memory.shared_memory import Segment; "
        "own = Segment.create('victim', 64); print(own.name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    own = memories.Segment.create("own", 64)
    for _ in range(10):  # any other program of ours that starts on this host may be the one that sweeps
        dead = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False, timeout=120
        )
        name = dead.stdout.strip()
        swept = memories.remove_leftovers()
        assert name.startswith("weightbus-victim-")
        assert not (memories.DIRECTORY / name).exists()
        assert own.path.exists()
        if name in swept:
            break
    else:
        pytest.fail("ten times it was gone before")
    own.close()


def test_a_forked_child_does_not_unlink() -> None:
    """The memory belongs to the process that made it, whatever its children do when they end."""
    own = memories.Segment.create("parent", 64)
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
        memories.map_readonly(name, 64)


def test_too_small_is_refused() -> None:
    """A segment shorter than the peer says would end the process with SIGBUS."""
    own = memories.Segment.create("small", 64)
    with pytest.raises(TransferFailed, match="64 bytes"):
        memories.map_readonly(own.name, 128)
    own.close()


@pytest.mark.parametrize(
    "memory", [memories.HostSegment("weightbus-a-1-2-3-4", 1 << 40, 3), CUDA], ids=["host", "cuda"]
)
def test_handles_survive_the_wire(memory: memories.HostSegment | CudaMemory) -> None:
    """Both structs are read back as they were written, and nothing shorter or longer is read."""
    data = msgspec.msgpack.encode(memory)
    assert memories.decode_handle(data) == memory
    for wrong in (data[:-1], data + b"\0", data[4:], b"", b"WBM1", b"\x80\4" + data[2:]):
        with pytest.raises(TransferFailed, match="name no memory"):
            memories.decode_handle(wrong)


@pytest.mark.parametrize(
    "memory",
    [
        memories.HostSegment("a/1", 64, 1),
        memories.HostSegment("a-1", 0, 1),
        memories.HostSegment("a-1", 1 << 49, 1),
        msgspec.structs.replace(CUDA, device_uuid="../1"),
        msgspec.structs.replace(CUDA, handle=b"h" * 129),
        msgspec.structs.replace(CUDA, storage_nbytes=0),
        msgspec.structs.replace(CUDA, storage_offset_bytes=1 << 49),
    ],
)
def test_handles_out_of_bounds(memory: memories.HostSegment | CudaMemory) -> None:
    """A length, a size or a name that no sender writes is refused."""
    with pytest.raises(TransferFailed, match="name no memory"):
        memories.decode_handle(msgspec.msgpack.encode(memory))


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
    memory = memories.TorchSharedBuffers(tmp_path)
    memory.reserve(4000, 5, Deadline(60))
    assert memory.count == 2
    memory.memory(0).fill_(5)
    for _ in range(40):
        lent = memory.lend(0, 1)
        storage = reductions.rebuild_storage_filename(torch.UntypedStorage, lent.manager, lent.handle, lent.nbytes)
        assert int(torch.empty(0, dtype=torch.uint8).set_(storage).sum()) == 5 * 4000
        del storage
    name = lent.handle.decode().removeprefix("/")
    assert (memories.DIRECTORY / name).exists()
    memory.reserve(3000, 1, Deadline(60))
    assert memory.lend(0, 1).handle == lent.handle
    memory.reserve(9000, 5, Deadline(60))
    assert memory.memory(1).numel() == 9000
    assert not (memories.DIRECTORY / name).exists()
    memory.close()
    memory.close()
    assert list(memories.DIRECTORY.glob(f"weightbus-engine-*-{os.getpid()}-*")) == []


def test_a_slot_that_others_cannot_open_is_made_of_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the trainer's allocator maps its own: it goes on as it is, and buckets can be opened. If they can."""
    plain = torch.ones(64, dtype=torch.uint8)

    def export(memory: torch.Tensor) -> CudaMemory:
        if memory is not plain:
            raise NotExportable("mapped by its allocator")
        return CUDA

    monkeypatch.setattr(memories, "allocate_without_expandable_segments", lambda _device, _nbytes: (None, plain))
    monkeypatch.setattr(memories, "export_cuda", export)
    buffer = memories.CudaStagingBuffer(torch.device("cpu"), 64)
    assert buffer.memory is plain
    monkeypatch.setattr(
        memories, "allocate_without_expandable_segments", lambda _device, nbytes: (None, torch.empty(nbytes))
    )
    with pytest.raises(NotExportable):
        memories.CudaStagingBuffer(torch.device("cpu"), 64)


def test_a_deep_runtime_dir_does_not_break_the_managers_socket(tmp_path: Path) -> None:
    """Its name would not fit a socket's; torch would only say "no such file" in the middle of a transfer."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    memory = memories.TorchSharedBuffers(deep, buffers=1)
    memory.reserve(1000, 1, Deadline(10.0))

    assert memory._manager is not None
    assert len(memory._manager.handle) <= memories._MAX_PATH
    assert os.fsencode(deep) not in memory._manager.handle
    memory.close()


def test_a_manager_that_cannot_make_its_socket_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at once, for lack of room or of a folder: that is said, and no deadline runs out."""
    monkeypatch.setattr(memories, "_short_enough", lambda folder: folder / "gone")
    with pytest.raises(DataplaneError, match=r"got no socket in .*gone, and said: could not"):
        memories.TorchSharedBuffers(tmp_path).reserve(64, 1, Deadline(60.0))


def test_a_manager_that_stops_in_the_middle_of_a_word_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that does not answer within the deadline is an error, and is killed."""
    program = tmp_path / "bin" / "torch_shm_manager"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf /torch\nexec sleep 20\n", encoding="ascii")
    program.chmod(0o700)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(DeadlineExceeded, match="to name its socket"):
        memories.TorchSharedBuffers(tmp_path).reserve(64, 1, Deadline(1.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_slots_are_exported() -> None:
    """A GPU buffer has a handle that the struct can carry."""
    pool = memories.BucketBuffers("cuda", 1, 1 << 20, "gpu")
    memory = memories.decode_handle(pool.buffers[0].exported)
    assert isinstance(memory, CudaMemory)
    assert memory.storage_nbytes >= 1 << 20
    pool.close()
