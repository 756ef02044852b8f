"""Shared memory that an inference server's workers can map with torch's own file_system sharing.

The receiver copies a bucket here, checks the copy, and only then tells the server: later writes of the trainer to its
own memory cannot reach the server. Three properties of torch's sharing (2.9 to 2.13, libshm) shape this module:

* A worker connects to a ``torch_shm_manager`` whose socket is named in the payload. One is started here, with its
  output closed, in place of the one torch would fork with our standard error. It ends by itself when its last client
  has gone; the workers stay connected, so it may outlive us until the server ends, and does no harm.
* The first bytes of a segment count its users. The process that takes the count to zero unlinks the name, and dies with
  an uncaught C++ exception if that fails. The count is therefore kept far above what workers give back, and only this
  process unlinks the name.
* A worker gives back one use for each time it opens the memory.
"""

import os
import selectors
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import torch

from ..errors import DataplaneError, DeadlineExceeded
from ..processes import Deadline
from . import posix_shm as segments
from .ipc_handles import HostMemory

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


class TorchSharedBuffers:
    """Up to `buffers` segments of one size, allocated when first needed and replaced only when too small."""

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
            segments.remove_leftovers()
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
        self._segment = segments.Segment.create("engine", nbytes + _HEADER_BYTES)
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
