"""Exports the host memory of live tensors: their storages become shared memory in place, and readers get descriptors.

torch moves a storage into anonymous shared memory without changing who refers to it: parameters, views and optimizers
go on as before. Nothing has a name in ``/dev/shm``, so nothing is left behind by whoever dies, and the kernel
keeps what a reader has mapped. One descriptor is open for each storage.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch

from . import export_wire as wire
from .deadline import Deadline
from .errors import DeadlineExceeded, NotExportable, PeerLost, TransferFailed, Unsupported
from .exports import ExportMap, Place, Region
from .host import host_identity
from .local import open_runtime_dir
from .transport import Address

_MAX_PATH: Final = 107
_SPARE_DESCRIPTORS: Final = 256


@dataclass(frozen=True, slots=True)
class _Shared:
    storage: torch.UntypedStorage
    fd: int
    nbytes: int


class HostExporter:
    """Implements `region.Exporter` for host memory. One for each rank; readers are served by a thread of its own."""

    def __init__(self, runtime_dir: Path, channel: str, holder: int) -> None:
        self._path = runtime_dir / f"{channel}-export-{holder}-{os.getpid()}.sock"
        self._holder = holder
        self._generation = 0
        self._shared: dict[int, _Shared] = {}
        self._order: tuple[int, ...] = ()
        self._map: ExportMap | None = None
        self._lock = threading.Condition()
        self._readers: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._wake: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def generation(self) -> int:
        """Grows with every `export` that changed a region."""
        return self._generation

    def export(self, tensors: Sequence[torch.Tensor]) -> ExportMap:
        """Make the storages of `tensors` readable. Raises `NotExportable`."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise NotExportable(f"a tensor is on {tensor.device}, this exporter shares host memory only")
            storages.setdefault(_identity(tensor), tensor.untyped_storage())
        order = tuple(storages)
        numbers = {identity: number for number, identity in enumerate(order)}
        with self._lock:
            shared = {identity: self._shared.get(identity) or _share(storage) for identity, storage in storages.items()}
            if order != self._order:
                self._generation += 1
                self._order, self._shared = order, shared
        self._map = ExportMap(
            self._holder,
            host_identity(),
            tuple(Region(each.nbytes, "cpu") for each in shared.values()),
            tuple(
                Place(numbers[_identity(tensor)], int(tensor.storage_offset()) * tensor.element_size())
                for tensor in tensors
            ),
        )
        self._serve()
        return self._map

    def address(self) -> Address:
        """The socket that readers connect to."""
        return Address(os.fspath(self._path))

    def close(self, deadline_s: float) -> None:
        """Take no more readers, wait for the present ones, then drop the memory. Raises `DeadlineExceeded`."""
        deadline = Deadline(deadline_s)
        with self._lock:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
                self._path.unlink(missing_ok=True)
                self._stir()
            if not self._lock.wait_for(lambda: not self._readers, deadline.left()):
                raise DeadlineExceeded(f"{len(self._readers)} readers to let go of exported memory", deadline_s)
            thread, self._thread = self._thread, None
            self._stir()
        if thread is not None:
            thread.join()
        if self._wake is not None:
            self._wake.close()
            self._wake = None
        self._shared, self._order = {}, ()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if self._thread is not None:
            return
        open_runtime_dir(self._path.parent)
        if len(os.fsencode(self._path)) > _MAX_PATH:
            raise Unsupported(f"{self._path} is too long for the name of a socket: shorten runtime_dir")
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(os.fspath(self._path))
        self._path.chmod(0o600)
        self._listener.listen(64)
        self._wake, stirred = socket.socketpair()
        stirred.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(stirred,), name="weightbus-export", daemon=True)
        self._thread.start()

    def _stir(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # the thread is gone already
                self._wake.send(b".")

    def _run(self, stirred: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, stirred:
            selector.register(stirred, selectors.EVENT_READ)
            with self._lock:
                listener = self._listener
            if listener is not None:
                selector.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is stirred:
                        stirred.recv(64)
                    elif key.fileobj is listener:
                        self._admit(selector, key.fileobj)
                    else:
                        self._hear(selector, key.fileobj)
                with self._lock:
                    if self._listener is None and listener is not None:
                        with contextlib.suppress(KeyError, ValueError):  # its descriptor is closed
                            selector.unregister(listener)
                        listener = None
                    if self._thread is None:
                        return

    def _admit(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        try:
            reader, _ = listener.accept()
        except OSError:  # it went away again, or we are closing
            return
        try:
            wire.peer_of(reader)
        except PeerLost:
            reader.close()
            return
        reader.setblocking(False)
        with self._lock:
            self._readers.add(reader)
        selector.register(reader, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, reader: socket.socket) -> None:
        try:
            ask = wire.decode_ask(wire.receive(reader)[0])
            self._answer(reader, ask)
        except (PeerLost, TransferFailed, TimeoutError, BlockingIOError):
            selector.unregister(reader)
            reader.close()
            with self._lock:
                self._readers.remove(reader)
                self._lock.notify_all()

    def _answer(self, reader: socket.socket, ask: wire.Ask) -> None:
        with self._lock:
            regions = tuple(self._shared.values())
            generation = self._generation
        if ask.generation != generation or any(number >= len(regions) for number in ask.regions):
            reason = f"{len(regions)} regions of generation {generation} are exported"
            return wire.send(reader, wire.encode_refuse(wire.Refuse(generation, reason)))
        granted = tuple(wire.Granted(number, wire.HOST, regions[number].nbytes) for number in ask.regions)
        packet = wire.encode_grant(wire.Grant(generation, granted))
        return wire.send(reader, packet, [regions[number].fd for number in ask.regions])


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _share(storage: torch.UntypedStorage) -> _Shared:
    """Move a storage into shared memory, where it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        # The private half of Tensor.share_memory_; test_exports.py fails when torch changes what it returns.
        fd, nbytes = cast("tuple[int, int]", storage._share_fd_cpu_())  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage]
    except RuntimeError as error:
        raise NotExportable(
            f"torch cannot move {storage.nbytes()} bytes into shared memory ({error}): enlarge /dev/shm "
            f"(docker: --shm-size) or the limit of open files (now {hard}, {_SPARE_DESCRIPTORS} of them for other uses)"
        ) from error
    return _Shared(storage, fd, nbytes)
