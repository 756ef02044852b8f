"""Serves the memory that a trainer rank exports: a socket, generations, and leases.

The connection that a reader keeps open is its lease: regions that it was granted are kept for it, also when the trainer
has replaced the storages. exportable_memory.py knows the kinds of memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from ..errors import PeerLost, TransferFailed, Unsupported
from ..processes import host_identity, open_runtime_dir, peer_pid
from . import export_messages as wire
from .export_map import ArenaParts, ExportMap
from .exportable_memory import ExportableMemory, ExportedRegion, exportable_memory_of
from .tensor_bytes import addresses_of

_MAX_PATH: Final = 107
_END_S: Final = 10.0
"""Seconds for the thread that serves readers to end. It waits for none of them."""
_LOG: Final = logging.getLogger(__name__)


class RegionExporter:
    """The exporting side of one rank. A thread of its own serves readers."""

    def __init__(self, runtime_dir: Path, channel: str, rank: int) -> None:
        self._path = runtime_dir / f"{channel}-export-{rank}-{os.getpid()}.sock"
        self._holder = rank
        self._generation = 0
        self._memory: ExportableMemory | None = None
        self._held: dict[int, ExportedRegion] = {}
        self._map: ExportMap | None = None
        self._pointers: list[int] = []
        self._lock = threading.Lock()
        self._leases: dict[socket.socket, list[ExportedRegion]] = {}
        self._listener: socket.socket | None = None
        self._wake: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def generation(self) -> int:
        """Grows with every `export` that changed a region."""
        return self._generation

    @property
    def readers(self) -> int:
        """Open connections."""
        with self._lock:
            return len(self._leases)

    def export(
        self, tensors: Sequence[torch.Tensor], *, settled: bool = True, parts: ArenaParts | None = None
    ) -> ExportMap:
        """Make the memory of `tensors` readable, `parts` of it before they are made. Raises `NotExportable`.

        Without `settled` it may return while this process still writes there: `settle` waits for that.
        """
        if self._memory is None:
            self._memory = exportable_memory_of(tensors)
        # No other tensor can be where these were: their storages are held here.
        pointers = addresses_of(tensors)
        if self._map is not None and self._map.parts == parts and pointers == self._pointers:
            if settled:
                self._memory.settle()
            return self._map
        with self._lock:
            held, places = self._memory.share(tensors, self._held)
            if list(held) != list(self._held):
                self._generation += 1
            self._held = held
        self._serve()
        self._pointers = addresses_of(tensors)  # those of a host have been moved
        regions = tuple(each.region for each in held.values())
        self._map = ExportMap(self._holder, host_identity(), regions, places, parts)
        return self._map

    def settle(self) -> None:
        """Block until every write to the exported memory that this process has begun is done."""
        if self._memory is not None:
            self._memory.settle()

    def address(self) -> str:
        """Path of the socket that readers connect to."""
        return os.fspath(self._path)

    def close(self) -> None:
        """Take no more readers and close the present connections.

        The kernel keeps host memory that readers have mapped. A GPU's memory is kept here, by the thread, until its
        readers have closed their end.
        """
        with self._lock:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
                self._path.unlink(missing_ok=True)
            thread, self._thread = self._thread, None
            self._held, self._map, self._pointers = {}, None, []
            self._stir()
        if thread is not None and (self._memory is None or self._memory.outlives):
            thread.join(_END_S)
            if thread.is_alive():  # what it may still grant is its own: it holds the leases
                _LOG.warning("the thread that serves readers of %s has not ended within %g s", self._path, _END_S)
        if self._wake is not None:
            self._wake.close()
            self._wake = None

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
            while not self._ended():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is stirred:
                        listener = self._stirred(selector, stirred, listener)
                    elif key.fileobj is listener:
                        self._admit(selector, key.fileobj)
                    elif key.fileobj in self._leases:
                        self._hear(selector, key.fileobj)

    def _ended(self) -> bool:
        """True when closed and without leases."""
        with self._lock:
            return self._thread is not threading.current_thread() and not self._leases

    def _stirred(
        self, selector: selectors.BaseSelector, stirred: socket.socket, listener: socket.socket | None
    ) -> socket.socket | None:
        """Handle a wake-up: when closing, stop listening and close leases.

        Returns the socket that is still listened on.
        """
        if not stirred.recv(64):
            selector.unregister(stirred)
        with self._lock:
            if self._listener is not None or listener is None:
                return listener
            with contextlib.suppress(KeyError, ValueError):  # its descriptor is closed
                selector.unregister(listener)
            for reader in tuple(self._leases):
                if self._memory is None or self._memory.outlives:
                    selector.unregister(reader)
                    reader.close()
                    del self._leases[reader]
                else:
                    with contextlib.suppress(OSError):  # it went away at the same moment, and is heard of next
                        reader.shutdown(socket.SHUT_WR)
        return None

    def _admit(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        try:
            reader, _ = listener.accept()
        except OSError:  # it went away again, or we are closing
            return
        try:
            peer_pid(reader)
        except PeerLost:
            reader.close()
            return
        reader.setblocking(False)
        with self._lock:
            self._leases[reader] = []
        selector.register(reader, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, reader: socket.socket) -> None:
        try:
            ask = wire.decode_ask(wire.receive(reader)[0])
            self._answer(reader, ask)
        except (PeerLost, TransferFailed, TimeoutError, BlockingIOError):
            selector.unregister(reader)
            reader.close()
            with self._lock:
                self._leases.pop(reader, None)

    def _answer(self, reader: socket.socket, ask: wire.Ask) -> None:
        with self._lock:
            held = tuple(self._held.values())
            generation = self._generation
            granted = ask.generation == generation and all(number < len(held) for number in ask.regions)
            if granted:
                self._leases[reader].extend(held[number] for number in ask.regions)
        if not granted:
            reason = f"{len(held)} regions of generation {generation} are exported"
            return wire.send(reader, wire.encode_refuse(wire.Refuse(generation, reason)))
        asked = [held[number] for number in ask.regions]
        records = tuple(
            wire.GrantedRegions(number, each.kind, each.region.nbytes, each.uuid, each.handle)
            for number, each in zip(ask.regions, asked, strict=True)
        )
        packet = wire.encode_grant(wire.Grant(generation, records))
        return wire.send(reader, packet, [each.fd for each in asked if each.fd >= 0])
