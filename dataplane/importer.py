"""Opens what exporters share, once each, and holds it round after round. The worker's side of region.py."""

from __future__ import annotations

import mmap
import os
import select
import socket
import warnings
from collections.abc import Callable, Sequence

import torch

from . import export_wire as wire
from .deadline import Deadline
from .errors import DeadlineExceeded, PeerLost, StaleSession, TransferFailed
from .transport import Address

OpenCuda = Callable[[wire.Granted], torch.Tensor]
"""Opens a CUDA IPC handle on the reader's device: 1-D uint8."""


class RegionImporter:
    """Implements `region.Importer`. Used from one thread."""

    def __init__(self, open_cuda: OpenCuda | None = None) -> None:
        self._open_cuda = open_cuda
        self._exporters: dict[int, _Exporter] = {}

    def open(self, address: Address, holder: int, generation: int, regions: Sequence[int], deadline_s: float) -> None:
        """Open these regions of `holder`; what is open of this generation stays, older generations are closed."""
        known = self._exporters.get(holder)
        if known is None or known.generation != generation or known.address != address or known.dead():
            if known is not None:
                known.close()
            known = self._exporters[holder] = _Exporter(address, generation, Deadline(deadline_s))
        missing = [region for region in regions if region not in known.regions]
        for at in range(0, len(missing), wire.BATCH):
            known.ask(missing[at : at + wire.BATCH], self._open_cuda, Deadline(deadline_s))

    def region(self, holder: int, region: int) -> torch.Tensor:
        """1-D uint8, to be read only."""
        return self._exporters[holder].regions[region]

    def check(self) -> None:
        """Raise `PeerLost` when the process behind an open region has died or has closed its exports."""
        for holder, exporter in self._exporters.items():
            if exporter.dead():
                raise PeerLost(f"trainer rank {holder}, whose memory is being read, is gone")

    def close(self) -> None:
        """Let go of everything."""
        for exporter in self._exporters.values():
            exporter.close()
        self._exporters = {}


class _Exporter:
    """One connection, which is the lease."""

    def __init__(self, address: Address, generation: int, deadline: Deadline) -> None:
        self.address = address
        self.generation = generation
        self.regions: dict[int, torch.Tensor] = {}
        self._pidfd = -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(deadline.check("an exporter"))
            self._socket.connect(address.address)
            pid = wire.peer_of(self._socket)
            if pid and pid != os.getpid():  # 0: a process of another PID namespace, whose socket has to tell
                self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            self.close()
            raise PeerLost(f"the exporter {address.address} does not answer: {error}") from error
        except PeerLost:
            self.close()
            raise

    def ask(self, regions: Sequence[int], open_cuda: OpenCuda | None, deadline: Deadline) -> None:
        """Open regions that are not open yet."""
        self._socket.settimeout(deadline.check("exported memory"))
        wire.send(self._socket, wire.encode_ask(wire.Ask(self.generation, tuple(regions))))
        try:
            packet, fds = wire.receive(self._socket)
        except TimeoutError as error:
            raise DeadlineExceeded("exported memory", deadline.seconds) from error
        try:
            self._take(wire.decode_answer(packet), tuple(regions), fds, open_cuda)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(
        self, answer: wire.Grant | wire.Refuse, asked: tuple[int, ...], fds: Sequence[int], open_cuda: OpenCuda | None
    ) -> None:
        """Open what an answer hands over. Mappings keep memory of their own alive; the descriptors are not ours."""
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
                if open_cuda is None:
                    raise TransferFailed("the exporter's memory is on a GPU, and this worker has none")
                self.regions[each.region] = open_cuda(each)

    def dead(self) -> bool:
        """Its process ended, or it hung up."""
        watched = [self._socket.fileno(), *([self._pidfd] if self._pidfd >= 0 else [])]
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.regions = {}
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
        warnings.simplefilter("ignore", UserWarning)  # torch warns that nobody may write to it, which is the point
        return torch.frombuffer(mapped, dtype=torch.uint8)
