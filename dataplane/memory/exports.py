"""Memory that a trainer rank exports and workers open: regions, leases, and the wire between both.

On a host storages are moved into arenas of anonymous shared memory (shared_arenas.py): parameters, views and
optimizers go on as before. Nothing has a name in ``/dev/shm``, so a dead process leaves nothing behind, and the kernel
keeps what a reader has mapped. A region is an arena of many storages, or a storage that the trainer itself has shared.
On a GPU a region is what one cudaMalloc returned, and holds many storages; CUDA IPC names it by a handle of 64 bytes.

A reader asks for regions of one generation; the exporter answers with all of them, and with file descriptors in the
same order for those in host memory. The connection that a reader keeps open is its lease: regions that it was granted
are kept for it, also when the trainer has replaced the storages.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import select
import socket
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, cast

import msgspec
import torch
from msgspec import Meta

from ..errors import NotExportable, PeerLost, StaleSession, TransferFailed, Unsupported
from ..processes import (
    MAX_FDS,
    ConnectionPool,
    Deadline,
    FrameListener,
    Frames,
    PooledConnection,
    WireEnd,
    WireMessage,
    host_identity,
    open_runtime_dir,
)
from .cuda_memory import HANDLE_BYTES, Driver, device_name
from .export_map import ArenaParts, ExportedTensor, ExportMap, Region
from .shared_arenas import Arena, ArenaLookup, movable, move
from .shared_memory import addresses_of

_MAX_MESSAGE: Final = 64 * 1024
_END_S: Final = 10.0
"""Seconds for the thread that serves readers to stop listening, or to end. It waits for none of them."""
_ACCEPT_S: Final = 0.05
"""Seconds for a connection that waits to be accepted, and has mostly gone again where it takes longer."""
_SPARE_DESCRIPTORS: Final = 256
_LOG: Final = logging.getLogger(__name__)


# -- the wire ----------------------------------------------------------------------------------------------------------


class Ask(WireMessage, frozen=True, tag="Ask"):
    """Reader: regions of one generation."""

    generation: int
    regions: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=MAX_FDS)]


class GrantedRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one region is opened: by a cudaIpcMemHandle_t of the GPU `uuid`; in host memory by a descriptor."""

    region: int
    nbytes: Annotated[int, Meta(gt=0, le=2**48)]
    uuid: Annotated[str, Meta(pattern=r"^([A-Za-z0-9-]{8,48})?$")] = ""
    handle: bytes = b""

    def __post_init__(self) -> None:
        if len(self.handle) != (HANDLE_BYTES if self.uuid else 0):
            raise ValueError(f"a handle of {len(self.handle)} bytes names no memory of {self.uuid or 'a host'}")


class Grant(WireMessage, frozen=True, tag="Grant"):
    """Exporter: all regions of the request."""

    generation: int
    regions: Annotated[tuple[GrantedRegion, ...], Meta(max_length=MAX_FDS)]


class Refuse(WireMessage, frozen=True, tag="Refuse"):
    """Exporter: refusal. `generation` is the present one."""

    generation: int
    reason: str


EXPORTER: Final = WireEnd[Grant | Refuse, Ask](Ask)
READER: Final = WireEnd[Ask, Grant | Refuse](Grant | Refuse)


# -- the kinds of memory -----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ExportedRegion:
    """A region, and the storages that keep it from being freed."""

    region: Region
    fd: int = -1
    """Its descriptor in host memory."""
    handle: bytes = b""
    """Its CUDA IPC handle on a GPU."""
    storages: tuple[torch.UntypedStorage, ...] = ()
    arena: Arena | None = None
    """The arena that it is: keeps the descriptor open."""


class ExportableHostMemory:
    """The memory of a host: a region for each arena, and for each storage that the trainer shares itself."""

    outlives = True
    """True where a reader's mapping stays readable after the exporter frees the memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lookup = ArenaLookup()

    def share(
        self, tensors: Sequence[torch.Tensor], known: Mapping[int, ExportedRegion]
    ) -> tuple[dict[int, ExportedRegion], tuple[ExportedTensor, ...]]:
        """The regions of `tensors` by identity, those in `known` unchanged, and where each tensor begins.

        An identity is never given to another region. Raises `NotExportable`.
        """
        self._make_shareable(tensors)
        held: dict[int, ExportedRegion] = {}
        places: list[ExportedTensor] = []
        numbers: dict[int, int] = {}
        storages: dict[int, list[torch.UntypedStorage]] = {}
        for tensor in tensors:
            if tensor.device != self._device:
                raise NotExportable(f"a tensor is on {tensor.device}, the others are on {self._device}")
            identity, offset, make = self._place(tensor)
            if identity not in held:
                held[identity] = known.get(identity) or make()
            storages.setdefault(identity, []).append(tensor.untyped_storage())
            places.append(ExportedTensor(numbers.setdefault(identity, len(numbers)), offset))
        for identity, each in storages.items():
            held[identity].storages = tuple(each)
        return held, tuple(places)

    def settle(self) -> None:
        """Block until this process's writes are visible to others: a CPU has no pending ones."""

    def _make_shareable(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move what is not shared into arenas. Raises `NotExportable`, before anything is moved if that can be known.

        An empty storage has no memory, and no shard lies in it: `_place` is not asked for it.
        """
        lookup = ArenaLookup()
        apart: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self._device and not lookup.of(address := storage.data_ptr()):
                apart[address] = storage
        apart = {address: each for address, each in apart.items() if not each.is_shared()}
        if movable():
            move(apart.values())
        else:
            _check_descriptors(len(apart))
        self._lookup = ArenaLookup()

    def _place(self, tensor: torch.Tensor) -> tuple[int, int, Callable[[], ExportedRegion]]:
        """Identity of the tensor's region, the tensor's first byte in it, and how to export it."""
        storage = tensor.untyped_storage()
        arena = self._lookup.of(storage.data_ptr())
        if arena is not None:
            return arena.address, tensor.data_ptr() - arena.address, lambda: _whole(arena)
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return -int(storage._cdata), offset, lambda: _share(storage)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class ExportableDeviceMemory(ExportableHostMemory):
    """The memory of one GPU: a region for each allocation."""

    outlives = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._driver = Driver()
        self._uuid = device_name(device)

    def share(
        self, tensors: Sequence[torch.Tensor], known: Mapping[int, ExportedRegion]
    ) -> tuple[dict[int, ExportedRegion], tuple[ExportedTensor, ...]]:
        """Name the allocations that the tensors lie in, after `settle`."""
        with torch.cuda.device(self._device):
            return super().share(tensors, known)

    def _make_shareable(self, tensors: Sequence[torch.Tensor]) -> None:
        """The driver shares memory where it is."""
        del tensors
        self.settle()

    def settle(self) -> None:
        """Synchronize all streams: a training step may write on any."""
        torch.cuda.synchronize(self._device)

    def _place(self, tensor: torch.Tensor) -> tuple[int, int, Callable[[], ExportedRegion]]:
        found = self._driver.allocation(tensor.data_ptr())
        region = Region(found.nbytes, self._uuid)
        return (
            found.identity,
            tensor.data_ptr() - found.base,
            lambda: ExportedRegion(region, handle=self._driver.ipc_handle(found)),
        )


def exportable_memory_of(tensors: Sequence[torch.Tensor]) -> ExportableHostMemory:
    """The kind of memory that `tensors` lie in. Raises `NotExportable` for several devices."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise NotExportable(f"one rank's tensors are on {sorted(map(str, devices))}, expected one device")
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in {"cpu", "cuda"}:
        raise NotExportable(
            f"memory of {device} cannot be opened by other processes: let it be published from host memory"
        )
    return ExportableHostMemory(device) if device.type == "cpu" else ExportableDeviceMemory(device)


def _whole(arena: Arena) -> ExportedRegion:
    return ExportedRegion(Region(len(arena), "cpu"), fd=arena.fd, arena=arena)


def _check_descriptors(storages: int) -> None:
    """Raise `NotExportable` unless `storages` more descriptors can be open: torch would move some, and then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    free = hard - len(list(Path("/proc/self/fd").iterdir())) - _SPARE_DESCRIPTORS
    if storages > free:
        raise NotExportable(
            f"{storages} parameters would take a descriptor each with torch {torch.__version__}, and {max(0, free)} are"
            f" free of the limit of open files ({hard}, {_SPARE_DESCRIPTORS} of them for other uses): raise it"
            " (ulimit -n)"
        )


def _share(storage: torch.UntypedStorage) -> ExportedRegion:
    """Export a storage that the trainer shares itself; any other is moved into shared memory in place."""
    try:
        # The private half of Tensor.share_memory_; test_exports.py fails when torch changes what it returns.
        fd, nbytes = cast("tuple[int, int]", storage._share_fd_cpu_())  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage]
    except RuntimeError as error:
        raise NotExportable(
            f"torch cannot move {storage.nbytes()} bytes into shared memory ({error}): enlarge /dev/shm "
            "(docker: --shm-size) or the limit of open files (ulimit -n)"
        ) from error
    if fd < 0:
        raise NotExportable(
            f"{storage.nbytes()} bytes of parameters are mapped from a file, which no other process can be given: load"
            " them into memory"
        )
    return ExportedRegion(Region(nbytes, "cpu"), fd=fd)


class LocalMemory:
    """One rank's storages, described as an export map although nothing is exported; `sends` plans from such maps.

    They are numbered in the order in which its tensors first name them.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pointers: list[int] = []
        self._map: ExportMap | None = None
        self.regions: tuple[torch.Tensor, ...] = ()
        """1-D uint8 over each storage, numbered as in the map. They keep the storages alive."""

    def describe(self, tensors: Sequence[torch.Tensor]) -> ExportMap:
        """The map of `tensors`; the previous one while no address changed. Raises `Unsupported` for several devices."""
        pointers = addresses_of(tensors)
        if self._map is not None and pointers == self._pointers:
            return self._map
        if len({tensor.device for tensor in tensors}) > 1:
            raise Unsupported("one rank's tensors are on several devices: its part of a model must be on one")
        numbers: dict[int, int] = {}
        regions: list[torch.Tensor] = []
        places: list[ExportedTensor] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage.data_ptr(), len(numbers))
            if number == len(regions):
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                regions.append(flat.set_(storage, 0, (storage.nbytes(),), (1,)))
            places.append(ExportedTensor(number, int(tensor.storage_offset()) * tensor.element_size()))
        self.regions = tuple(regions)
        self._pointers = pointers
        named = tuple(Region(each.numel(), device_name(each.device)) for each in regions)
        self._map = ExportMap(self._rank, host_identity(), named, tuple(places))
        return self._map


# -- the exporter ------------------------------------------------------------------------------------------------------


class _Reader(PooledConnection):
    """A connection to a reader, which is a lease."""

    def __init__(self) -> None:
        super().__init__("reader")
        self.regions: list[ExportedRegion] = []


class _LeaseServer:
    """Answers readers on a thread of its own, which lives until `stop` and, on a GPU, until they have hung up."""

    def __init__(
        self, path: Path, answer: Callable[[Ask], tuple[Grant | Refuse, list[ExportedRegion]]], *, outlives: bool
    ) -> None:
        self.readers: dict[_Reader, None] = {}
        self.stopped = False
        self._answer = answer
        self._outlives = outlives
        self._listener = FrameListener(path)
        self._pool: ConnectionPool[_Reader] = ConnectionPool(self._hear, self._drop)
        self._wake, self._stirred = socket.socketpair()
        self._deaf = threading.Event()
        """Set when no reader is accepted any more."""
        self._pool.watch(self._listener, self._admit)
        self._pool.watch(self._stirred, self._turn_away)
        self.thread = threading.Thread(target=self._run, name="weightbus-export", daemon=True)
        self.thread.start()

    def stop(self, seconds: float) -> bool:
        """Take no more readers; False when the thread has not done its part within `seconds`.

        The kernel keeps host memory that readers have mapped. A GPU's memory is kept here, by the thread, until its
        readers have closed their end.
        """
        self.stopped = True
        self._wake.close()
        if not self._outlives:
            return self._deaf.wait(seconds)
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def _run(self) -> None:
        while self.readers or not self._deaf.is_set():
            self._pool.poll(None)
        self._pool.close()

    def _turn_away(self) -> None:
        """`stop` was called: hang up on readers, or ask them to."""
        for watched in (self._stirred, self._listener):
            self._pool.unwatch(watched)
            watched.close()
        for reader in tuple(self.readers):
            if self._outlives:
                self._drop(reader, "")
            elif reader.frames is not None:
                reader.frames.finish()
        self._deaf.set()

    def _admit(self) -> None:
        try:
            frames = self._listener.accept(Deadline(_ACCEPT_S), "a reader")
        except TransferFailed:  # it went away again, or belongs to another user
            return
        frames.limit = _MAX_MESSAGE
        reader = _Reader()
        self.readers[reader] = None
        self._pool.add(reader, frames)

    def _hear(self, reader: _Reader, packet: bytes) -> None:
        answer, granted = self._answer(EXPORTER.decode(packet))
        reader.regions += granted
        if reader.frames is None:
            return
        fds = [each.fd for each in granted if each.fd >= 0]
        for part in reader.frames.framed(EXPORTER.encode(answer)):
            if reader.frames.push(part, fds):  # to wait for it would keep other readers waiting
                raise PeerLost("it does not read what it is told")
            fds = []

    def _drop(self, reader: _Reader, reason: str) -> None:
        del reason  # a lease may end at any time
        self._pool.drop(reader)
        self.readers.pop(reader, None)


class RegionExporter:
    """The exporting side of one rank."""

    def __init__(self, runtime_dir: Path, channel: str, rank: int) -> None:
        self._path = runtime_dir / f"{channel}-export-{rank}-{os.getpid()}.sock"
        self._rank = rank
        self._generation = 0
        self._memory: ExportableHostMemory | None = None
        self._held: dict[int, ExportedRegion] = {}
        self._map: ExportMap | None = None
        self._pointers: list[int] = []
        self._lock = threading.Lock()
        self._server: _LeaseServer | None = None

    @property
    def generation(self) -> int:
        """Grows with every `export` that changed a region."""
        return self._generation

    @property
    def readers(self) -> int:
        """Open connections."""
        return len(self._server.readers) if self._server is not None else 0

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
        if self._server is None or self._server.stopped:
            open_runtime_dir(self._path.parent)
            self._server = _LeaseServer(self._path, self._answer, outlives=self._memory.outlives)
        self._pointers = addresses_of(tensors)  # those of a host have been moved
        regions = tuple(each.region for each in held.values())
        self._map = ExportMap(self._rank, host_identity(), regions, places, parts)
        return self._map

    def settle(self) -> None:
        """Block until every write to the exported memory that this process has begun is done."""
        if self._memory is not None:
            self._memory.settle()

    def address(self) -> str:
        """Path of the socket that readers connect to."""
        return os.fspath(self._path)

    def close(self) -> None:
        """Take no more readers and close the present connections. See `_LeaseServer.stop`."""
        with self._lock:
            self._held, self._map, self._pointers = {}, None, []
        server = self._server
        # What a thread that goes on may still grant is its own: it holds the leases.
        if server is not None and not server.stopped and not server.stop(_END_S):
            _LOG.warning("the thread that serves readers of %s has not ended within %g s", self._path, _END_S)

    def _answer(self, ask: Ask) -> tuple[Grant | Refuse, list[ExportedRegion]]:
        with self._lock:
            held, generation = tuple(self._held.values()), self._generation
        if ask.generation != generation or max(ask.regions) >= len(held):
            reason = f"{len(held)} regions of generation {generation} are exported"
            return Refuse(generation=generation, reason=reason), []
        asked = [held[number] for number in ask.regions]
        granted = tuple(
            GrantedRegion(number, each.region.nbytes, each.region.device if each.handle else "", each.handle)
            for number, each in zip(ask.regions, asked, strict=True)
        )
        return Grant(generation=generation, regions=granted), asked


# -- the importer ------------------------------------------------------------------------------------------------------


class RegionImporter:
    """The importing side: opens regions once each, and keeps them open round after round.

    Used from one thread at a time.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is the reader's; without one, only host memory can be opened."""
        self._device = device or torch.device("cpu")
        self._exporters: dict[int, _Exporter] = {}

    def open(self, address: str, rank: int, generation: int, regions: Sequence[int], deadline_s: float) -> None:
        """Open these regions of `rank`. Open regions of this generation stay, older generations are closed."""
        known = self._exporters.get(rank)
        if known is None or known.generation != generation or known.address != address or known.dead():
            if known is not None:
                del self._exporters[rank]
                known.close()
            known = self._exporters[rank] = _Exporter(address, generation, self._device, Deadline(deadline_s))
        missing = [region for region in regions if region not in known.regions]
        for at in range(0, len(missing), MAX_FDS):
            known.ask(missing[at : at + MAX_FDS], Deadline(deadline_s))

    def region(self, rank: int, region: int) -> torch.Tensor:
        """1-D uint8, read only. Valid until `close`, or until a newer generation is opened."""
        return self._exporters[rank].regions[region]

    def remote(self, rank: int, region: int) -> bool:
        """True when the region lies on another GPU than the reader's.

        The driver calls every opened region the reader's own.
        """
        return region in self._exporters[rank].remote

    def keep(self, ranks: Collection[int]) -> None:
        """Close the regions of all other ranks; their death is no longer an error."""
        for rank in [each for each in self._exporters if each not in ranks]:
            self._exporters.pop(rank).close()

    def check(self) -> None:
        """Raise `PeerLost` when the process behind an open region has died or has closed its exports."""
        for rank, exporter in self._exporters.items():
            if exporter.dead():
                raise PeerLost(f"trainer rank {rank}, whose memory is being read, is gone")

    def alive(self) -> bool:
        """True when every process behind an open region still exports it."""
        return not any(exporter.dead() for exporter in self._exporters.values())

    def close(self) -> None:
        """Close all regions."""
        self.keep(())


class _Exporter:
    """One connection to an exporter, which is the lease."""

    def __init__(self, address: str, generation: int, device: torch.device, deadline: Deadline) -> None:
        self.address = address
        self.generation = generation
        self.regions: dict[int, torch.Tensor] = {}
        self.remote: set[int] = set()
        """Regions on another GPU."""
        self._device = device
        self._driver: Driver | None = None
        self._mapped: list[int] = []
        self._pidfd = -1
        self._frames = Frames.connect(address, deadline, with_fds=True)
        self._frames.limit = _MAX_MESSAGE
        pid = self._frames.pid
        try:
            if pid and pid != os.getpid():  # 0: a process of another PID namespace, whose socket has to tell
                self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            self.close()
            raise PeerLost(f"the exporter {address} does not answer: {error}") from error

    def ask(self, regions: Sequence[int], deadline: Deadline) -> None:
        """Open regions that are not open yet."""
        READER.say(self._frames, Ask(generation=self.generation, regions=tuple(regions)), deadline)
        fds: list[int] = []
        try:
            answer = READER.hear(self._frames, deadline, "exported memory")
            fds = self._frames.take_fds()
            self._take(answer, tuple(regions), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, answer: Grant | Refuse, asked: tuple[int, ...], fds: Sequence[int]) -> None:
        """Open the regions of an answer. Mappings keep memory alive; the caller closes the descriptors."""
        if isinstance(answer, Refuse):
            if answer.generation != self.generation:
                raise StaleSession(answer.generation, self.generation)
            raise TransferFailed(f"the exporter refused: {answer.reason}")
        host = [each for each in answer.regions if not each.uuid]
        if tuple(each.region for each in answer.regions) != asked or len(host) != len(fds):
            raise TransferFailed(f"{len(fds)} descriptors and {len(answer.regions)} regions came for {len(asked)}")
        for each, fd in zip(host, fds, strict=True):
            self.regions[each.region] = _mapped(fd, each.nbytes)
        for each in answer.regions:
            if each.uuid:
                self.regions[each.region] = self._opened(each)
                if each.uuid != device_name(self._device):
                    self.remote.add(each.region)

    def _opened(self, granted: GrantedRegion) -> torch.Tensor:
        """A GPU's memory, opened for the reader's own device: a kernel on another one would fault on it."""
        if self._device.type != "cuda":
            raise TransferFailed("the exporter's memory is on a GPU, and this worker has none")
        try:
            self._driver = self._driver or Driver()
        except NotExportable as error:
            raise TransferFailed(str(error)) from error
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # makes the device's context the thread's
            pointer = self._driver.open_ipc(granted.handle)
        self._mapped.append(pointer)
        # torch asks the driver whose memory a pointer is, and would copy a peer's; this is what its CUDA graphs use.
        make = cast("_MakeStorage", torch._C._construct_storage_from_data_pointer)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
        storage = make(pointer, self._device, granted.nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (granted.nbytes,), (1,))

    def dead(self) -> bool:
        """True when its process ended, or hung up."""
        poll = select.poll()
        for fd in [self._frames.fileno(), *([self._pidfd] if self._pidfd >= 0 else [])]:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Unmap, then hang up: the exporter frees memory without leases."""
        self.regions = {}
        if self._driver is not None:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                while self._mapped:
                    self._driver.close_ipc(self._mapped.pop())
        self._frames.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


_MakeStorage = Callable[[int, torch.device, int], torch.UntypedStorage]


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    """Another process's shared memory, read only."""
    found = os.fstat(fd).st_size
    if found < nbytes:
        raise TransferFailed(f"a region of {nbytes} bytes came as {found} bytes of shared memory")
    try:
        mapped = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise TransferFailed(
            f"a region of {nbytes} bytes cannot be mapped ({error.strerror}): raise the limit of open files (ulimit -n)"
            " or of mappings (vm.max_map_count) for this process"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it cannot be written, as intended
        return torch.frombuffer(mapped, dtype=torch.uint8)
