"""Opens exported regions, once each, and keeps them open round after round. The worker's side of exporter.py."""

from __future__ import annotations

import mmap
import os
import select
import socket
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch

from ..errors import DeadlineExceeded, NotExportable, PeerLost, StaleSession, TransferFailed
from ..processes import Deadline, peer_pid
from . import export_messages as wire
from .cuda_driver import Driver
from .device_identity import device_name

_MakeStorage = Callable[[int, torch.device, int], torch.UntypedStorage]


class RegionImporter:
    """The importing side. Used from one thread at a time."""

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
        for at in range(0, len(missing), wire.BATCH):
            known.ask(missing[at : at + wire.BATCH], Deadline(deadline_s))

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
        for exporter in self._exporters.values():
            exporter.close()
        self._exporters = {}


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
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(deadline.check("an exporter"))
            self._socket.connect(address)
            pid = peer_pid(self._socket)
            if pid and pid != os.getpid():  # 0: a process of another PID namespace, whose socket has to tell
                self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            self.close()
            raise PeerLost(f"the exporter {address} does not answer: {error}") from error
        except PeerLost:
            self.close()
            raise

    def ask(self, regions: Sequence[int], deadline: Deadline) -> None:
        """Open regions that are not open yet."""
        self._socket.settimeout(deadline.check("exported memory"))
        wire.send(self._socket, wire.encode_ask(wire.Ask(self.generation, tuple(regions))))
        try:
            packet, fds = wire.receive(self._socket)
        except TimeoutError as error:
            raise DeadlineExceeded("exported memory", deadline.seconds) from error
        try:
            self._take(wire.decode_answer(packet), tuple(regions), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, answer: wire.Grant | wire.Refuse, asked: tuple[int, ...], fds: Sequence[int]) -> None:
        """Open the regions of an answer. Mappings keep memory alive; the caller closes the descriptors."""
        if isinstance(answer, wire.Refuse):
            if answer.generation != self.generation:
                raise StaleSession(answer.generation, self.generation)
            raise TransferFailed(f"the exporter refused: {answer.reason}")
        host = [each for each in answer.regions if each.memory == wire.HOST]
        if tuple(each.region for each in answer.regions) != asked or len(host) != len(fds):
            raise TransferFailed(f"{len(fds)} descriptors and {len(answer.regions)} regions came for {len(asked)}")
        for each, fd in zip(host, fds, strict=True):
            self.regions[each.region] = _mapped(fd, each.nbytes)
        for each in answer.regions:
            if each.memory == wire.CUDA:
                self.regions[each.region] = self._opened(each)
                if each.uuid != device_name(self._device):
                    self.remote.add(each.region)

    def _opened(self, granted: wire.GrantedRegions) -> torch.Tensor:
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
        watched = [self._socket.fileno(), *([self._pidfd] if self._pidfd >= 0 else [])]
        poll = select.poll()
        for fd in watched:
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
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    """Another process's shared memory, read only."""
    found = os.fstat(fd).st_size
    if found < nbytes:
        raise TransferFailed(f"a region of {nbytes} bytes came as {found} bytes of shared memory")
    mapped = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it cannot be written, as intended
        return torch.frombuffer(mapped, dtype=torch.uint8)
