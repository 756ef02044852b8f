"""Memory that processes of one host share by name, and the staging buffers that lie in it or on a GPU.

A `Segment` is POSIX shared memory. Its name carries its owner (PID namespace, PID, start time), so that the next
process can tell leftovers from memory in use. Memory is reserved when it is created: a full ``/dev/shm`` is an error
here and not a SIGBUS in the middle of a copy.

A sender packs buckets in `BucketBuffers`, allocated once, exported once, reused round after round. Their handles travel
as plain fields: torch's own way of sharing pickles a private tuple. A receiver copies a bucket into
`TorchSharedBuffers`, which an inference server's workers map, checks the copy, and only then tells the server: later
writes of the trainer to its own memory cannot reach the server.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import selectors
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta

from ..errors import DataplaneError, DeadlineExceeded, NotExportable, OutOfSharedMemory, TransferFailed
from ..processes import Deadline
from ..tensors import Column
from .cuda_memory import CudaMemory, export_cuda

DIRECTORY: Final = Path("/dev/shm")  # noqa: S108  where Linux keeps POSIX shared memory
_NAME: Final = re.compile(r"^weightbus-[A-Za-z0-9._-]{0,64}-(\d+)-(\d+)-(\d+)-(\d+)$")
_SERIAL: Final = itertools.count()


class Segment:
    """A named shard of shared memory that this process owns; unlinked by `close`, or when the process ends."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._unlink = weakref.finalize(self, _unlink_own, DIRECTORY / name, os.getpid())

    @classmethod
    def create(cls, purpose: str, nbytes: int) -> Self:
        """Reserve `nbytes`. Raises `OutOfSharedMemory`."""
        pid = os.getpid()
        name = f"weightbus-{purpose}-{_namespace()}-{pid}-{_started(pid)}-{next(_SERIAL)}"
        if not _NAME.match(name):
            raise ValueError(f"{purpose!r} cannot stand in the name of shared memory (letters, digits, '.', '_', '-')")
        segment = cls(name, nbytes)
        fd = os.open(segment.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            segment.close()
            stat = os.statvfs(DIRECTORY)
            raise OutOfSharedMemory(nbytes, stat.f_bavail * stat.f_frsize) from error
        finally:
            os.close(fd)
        return segment

    @property
    def path(self) -> Path:
        """The file behind the name."""
        return DIRECTORY / self.name

    def close(self) -> None:
        """Unlink the name. Mappings stay valid until they are dropped."""
        self._unlink()


def map_readonly(name: str, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map another process's segment. Raises `TransferFailed` when it is not there, too small or not ours to read."""
    if not _NAME.match(name):
        raise TransferFailed(f"{name!r} is not the name of a weightbus segment")
    try:
        fd = os.open(DIRECTORY / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise TransferFailed(f"shared memory {name!r} cannot be opened: {error.strerror}") from error
    try:
        stat = os.fstat(fd)
        if stat.st_uid != os.getuid() or stat.st_size < nbytes:
            raise TransferFailed(
                f"shared memory {name!r} has {stat.st_size} bytes and owner {stat.st_uid}, "
                f"expected {nbytes} bytes and owner {os.getuid()}"
            )
        return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), dtype=np.uint8)
    finally:
        os.close(fd)


def remove_leftovers() -> tuple[str, ...]:
    """Unlink the segments of ended processes of this PID namespace; returns their names."""
    swept: list[str] = []
    for path in DIRECTORY.glob("weightbus-*"):
        match = _NAME.match(path.name)
        if match is None or int(match[1]) != _namespace() or _started(int(match[2])) == int(match[3]):
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):  # swept by another process, or another user's
            path.unlink()
            swept.append(path.name)
    return tuple(swept)


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; -1 when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(text.rpartition(")")[2].split()[19])


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _unlink_own(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the finalizer, not the memory
        path.unlink(missing_ok=True)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """1-D uint8 over a tensor's memory, from its first element to its last one. Not a copy."""
    item = tensor.element_size()
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), int(tensor.storage_offset()) * item, (int(reach) * item,), (1,))


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Addresses of the first elements.

    A steady round asks thousands of tensors for this alone, without a Python loop.
    """
    return list(map(torch.Tensor.data_ptr, tensors))


def sizes_of(regions: Sequence[torch.Tensor]) -> Column:
    """(regions,): bytes of each."""
    return np.array([region.numel() for region in regions], np.int64)


_HEADER_BYTES: Final = 4096
"""torch keeps 64 bytes before the data; a page leaves room for more."""
_USES_PER_RANK: Final = 16
"""More than one load can use up: pipeline stages open the payload of their tensor rank too."""

_MAX_PATH: Final = 107
"""sun_path of a Unix socket, less its terminating zero."""
_MANAGER_FAILED: Final = b"ERROR: "
"""Begin of the manager's only line when it fails (torch/lib/libshm/manager.cpp)."""
_MANAGER_NAME_BYTES: Final = len("/torch-shm-dir-XXXXXX/manager.sock")
"""Bytes that the manager adds to the path of its folder."""


class HostMemory(msgspec.Struct, frozen=True):
    """Shared memory as torch's file_system sharing names it: what `rebuild_storage_filename` takes."""

    manager: bytes
    handle: bytes
    nbytes: int


class TorchSharedBuffers:
    """Up to `buffers` segments of one size, allocated when first needed and replaced only when too small.

    Workers of an inference server map them with torch's own file_system sharing, of which three properties (2.9 to
    2.13, libshm) matter:

    * A worker connects to a ``torch_shm_manager`` whose socket is named in the payload. One is started here, with its
      output closed, in place of the one torch would fork with our standard error. It ends by itself when its last
      client has gone; the workers stay connected, so it may outlive us until the server ends, and does no harm.
    * The first bytes of a segment count its users. The process that takes the count to zero unlinks the name, and dies
      with an uncaught C++ exception if that fails. The count is therefore kept far above what workers give back, and
      only this process unlinks the name.
    * A worker gives back one use for each time it opens the memory.
    """

    def __init__(self, runtime_dir: Path, buffers: int = 2) -> None:
        self._runtime_dir = runtime_dir
        self._count = buffers
        self._manager: _Manager | None = None
        self._buffers: list[_Buffer] = []

    def reserve(self, nbytes: int, buckets: int, deadline: Deadline) -> None:
        """Have buffers of at least `nbytes` ready for `buckets` buckets. Raises `OutOfSharedMemory`."""
        wanted = min(self._count, buckets)
        if len(self._buffers) >= wanted and self.holds(nbytes):
            return
        self._drop()
        if self._manager is None or not self._manager.alive:
            remove_leftovers()
            self._manager = _Manager(self._runtime_dir, deadline)
        for _ in range(wanted):
            self._buffers.append(_Buffer(self._manager.handle, nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def holds(self, nbytes: int) -> bool:
        """True when there are buffers of at least `nbytes`."""
        return bool(self._buffers) and self._buffers[0].nbytes >= nbytes

    @property
    def count(self) -> int:
        """Buffers that `reserve` made."""
        return len(self._buffers)

    def memory(self, index: int) -> torch.Tensor:
        """The bytes of buffer `index`, 1-D uint8."""
        return self._buffers[index].memory

    def lend(self, index: int, tp: int) -> HostMemory:
        """The handle that the `tp` ranks of a server open.

        Call it for every load: it counts the uses that they give back.
        """
        return self._buffers[index].lend(tp)

    def close(self) -> None:
        """Unlink all segments. Memory that workers have mapped stays valid for them."""
        self._drop()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _drop(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


class _Buffer:
    def __init__(self, manager: bytes, nbytes: int) -> None:
        self.nbytes = nbytes
        self._segment = Segment.create("engine", nbytes + _HEADER_BYTES)
        handle = f"/{self._segment.name}".encode("ascii")
        self._storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, nbytes)  # noqa: SLF001  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage]
        self._lent = HostMemory(manager, handle, nbytes)
        self.lend(1)
        self.memory = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def lend(self, tp: int) -> HostMemory:
        for _ in range(tp * _USES_PER_RANK):
            self._storage._shared_incref()  # type: ignore[no-untyped-call]  # noqa: SLF001
        return self._lent

    def close(self) -> None:
        self._segment.close()
        self.memory = torch.empty(0, dtype=torch.uint8)


def _short_enough(runtime_dir: Path) -> Path:
    """A folder for the manager's socket, whose path must fit sun_path: torch only says "no such file" otherwise."""
    for folder in (runtime_dir, Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")):  # noqa: S108 - its folder is its own
        if len(os.fsencode(folder)) + _MANAGER_NAME_BYTES <= _MAX_PATH and os.access(folder, os.W_OK):
            return folder
    raise DataplaneError(f"{runtime_dir} is too long for the name of a socket, and /tmp cannot be written: shorten it")


class _Manager:
    """A ``torch_shm_manager`` of our own. `handle` is the path of its socket."""

    def __init__(self, runtime_dir: Path, deadline: Deadline) -> None:
        program = Path(torch.__file__).parent / "bin" / "torch_shm_manager"
        folder = _short_enough(runtime_dir)
        try:
            self._process = subprocess.Popen(  # noqa: S603  torch's own program
                [program],
                env={**os.environ, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DataplaneError(f"{program} cannot be started: {error.strerror}; is this torch complete?") from error
        self.handle = self._read_handle(folder, deadline)

    def _read_handle(self, folder: Path, deadline: Deadline) -> bytes:
        assert self._process.stdout is not None
        with self._process.stdout as stdout, selectors.DefaultSelector() as either:
            either.register(stdout, selectors.EVENT_READ)
            line = self._line(stdout.fileno(), either, deadline)
        if line and line.endswith(b"\n") and not line.startswith(_MANAGER_FAILED):
            return line.strip()
        self._process.kill()
        self._process.wait()  # nothing keeps a process from that
        if line is None:
            raise DeadlineExceeded("torch_shm_manager to name its socket", deadline.seconds)
        said = line.decode("utf-8", "replace").removeprefix(_MANAGER_FAILED.decode()).strip() or "nothing"
        raise DataplaneError(f"torch_shm_manager got no socket in {folder}, and said: {said}. Is there room?")

    @staticmethod
    def _line(file: int, either: selectors.BaseSelector, deadline: Deadline) -> bytes | None:
        """Up to the end of a line, or of all that comes; None where that takes too long."""
        found = b""
        while not found.endswith(b"\n"):
            if not either.select(deadline.left()):
                return None
            if not (more := os.read(file, 4096)):
                break
            found += more
        return found

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Nothing to stop: killed while a worker has memory mapped, it would take the worker with it."""
        self._process.poll()
        # Popen warns about a child that is still running; this one ends after its last client.
        self._process.returncode = self._process.returncode if self._process.returncode is not None else 0


class HostSegment(msgspec.Struct, frozen=True, tag="host", forbid_unknown_fields=True):
    """Memory by its name under ``/dev/shm``. `generation` tells two segments of one name apart."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    nbytes: Annotated[int, Meta(gt=0, le=2**48)]
    generation: int


_HANDLE: Final[msgspec.msgpack.Decoder[HostSegment | CudaMemory]] = msgspec.msgpack.Decoder(HostSegment | CudaMemory)


def decode_handle(data: bytes) -> HostSegment | CudaMemory:
    """The memory behind `exported` of a staging buffer. Raises `TransferFailed` on bytes that name none."""
    try:
        return _HANDLE.decode(data)
    except (ValueError, RecursionError) as error:
        raise TransferFailed(f"{len(data)} bytes name no memory that this version knows: {error}") from error


_GENERATIONS: Final = itertools.count(1)


class HostStagingBuffer:
    """Shared memory of this host, named in ``/dev/shm``."""

    def __init__(self, purpose: str, nbytes: int, generation: int) -> None:
        self._segment = Segment.create(purpose, nbytes)
        self.memory = torch.from_file(str(self._segment.path), shared=True, size=nbytes, dtype=torch.uint8)
        self.exported = msgspec.msgpack.encode(HostSegment(self._segment.name, nbytes, generation))

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
            named = export_cuda(self.memory)
        except NotExportable:
            # The trainer's allocator maps its memory itself, and may: only what others open has to be plain.
            self._pool, self.memory = allocate_without_expandable_segments(device, nbytes)
            named = export_cuda(self.memory)
        self.exported = msgspec.msgpack.encode(named)

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
    """`buffers` staging buffers of `buffer_bytes` each on one device, of the process that makes them.

    A buffer may be written again once the sender's `reclaim` has returned for the bucket that was sent from it, and not
    before.

    Raises `NotExportable` when other processes cannot open the device's memory, `OutOfSharedMemory` when the host has
    no room. Leftovers of dead processes are removed first.
    """

    def __init__(self, device: torch.device | str, buffers: int, buffer_bytes: int, name: str) -> None:
        self.device = torch.device(device)
        self.buffer_bytes = buffer_bytes
        self.generation = next(_GENERATIONS)
        """Distinguishes these buffers from earlier ones of this process."""
        self.buffers: list[HostStagingBuffer | CudaStagingBuffer] = []
        if self.device.type not in {"cpu", "cuda"}:
            raise NotExportable(f"memory of {self.device} cannot be shared: stage buckets on cpu or cuda")
        remove_leftovers()
        try:
            for _ in range(buffers):
                if self.device.type == "cuda":
                    self.buffers.append(CudaStagingBuffer(self.device, buffer_bytes))
                else:
                    self.buffers.append(HostStagingBuffer(name, buffer_bytes, self.generation))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free all buffers. May be called twice; not while a bucket is being sent."""
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []
