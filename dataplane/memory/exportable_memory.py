"""The memory that other processes can open, and how: storages on a host, allocations on a GPU.

On a host torch moves a storage into anonymous shared memory in place: parameters, views and optimizers go on as before.
Nothing has a name in ``/dev/shm``, so a dead process leaves nothing behind, and the kernel keeps what a reader has
mapped. One descriptor is open for each storage.

On a GPU a region is what one cudaMalloc returned, and holds many storages; CUDA IPC names it by a handle of 64 bytes.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import torch

from ..errors import NotExportable
from . import export_messages as wire
from .cuda_driver import Driver
from .device_identity import device_name
from .export_map import ExportedTensor, Region

_SPARE_DESCRIPTORS: Final = 256


@dataclass(slots=True, eq=False)
class ExportedRegion:
    """A region, and the storages that keep it from being freed."""

    region: Region
    kind: int
    """`export_messages.HOST` or `CUDA`."""
    storages: list[torch.UntypedStorage]
    fd: int = -1
    uuid: str = ""
    handle: bytes = b""


class ExportableMemory(Protocol):
    """One kind of memory."""

    outlives: bool
    """True where a reader's mapping stays readable after the exporter frees the memory."""

    def share(
        self, tensors: Sequence[torch.Tensor], known: Mapping[int, ExportedRegion]
    ) -> tuple[dict[int, ExportedRegion], tuple[ExportedTensor, ...]]:
        """The regions of `tensors` by identity, those in `known` unchanged, and where each tensor begins.

        An identity is never given to another region. Raises `NotExportable`.
        """
        ...

    def settle(self) -> None:
        """Block until this process's writes are visible to others."""
        ...


def exportable_memory_of(tensors: Sequence[torch.Tensor]) -> ExportableMemory:
    """The kind of memory that `tensors` lie in. Raises `NotExportable` for several devices."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise NotExportable(f"one rank's tensors are on {sorted(map(str, devices))}, expected one device")
    device = next(iter(devices), torch.device("cpu"))
    if device.type == "cpu":
        return ExportableHostMemory()
    if device.type == "cuda":
        return ExportableDeviceMemory(device)
    raise NotExportable(f"memory of {device} cannot be opened by other processes: let it be published from host memory")


class ExportableHostMemory:
    """`ExportableMemory` on a host: a region for each storage."""

    outlives = True

    def share(
        self, tensors: Sequence[torch.Tensor], known: Mapping[int, ExportedRegion]
    ) -> tuple[dict[int, ExportedRegion], tuple[ExportedTensor, ...]]:
        """Move storages into shared memory in place."""
        held: dict[int, ExportedRegion] = {}
        places: list[ExportedTensor] = []
        numbers: dict[int, int] = {}
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise NotExportable(f"a tensor is on {tensor.device}, the others are in host memory")
            identity = int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            if identity not in held:
                held[identity] = known.get(identity) or _share(tensor.untyped_storage())
            number = numbers.setdefault(identity, len(numbers))
            places.append(ExportedTensor(number, int(tensor.storage_offset()) * tensor.element_size()))
        return held, tuple(places)

    def settle(self) -> None:
        """A CPU has no pending writes."""


class ExportableDeviceMemory:
    """`ExportableMemory` on one GPU: a region for each allocation."""

    outlives = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = Driver()
        self._uuid = device_name(device)

    def share(
        self, tensors: Sequence[torch.Tensor], known: Mapping[int, ExportedRegion]
    ) -> tuple[dict[int, ExportedRegion], tuple[ExportedTensor, ...]]:
        """Name the allocations that the tensors lie in, after `settle`."""
        held: dict[int, ExportedRegion] = {}
        places: list[ExportedTensor] = []
        numbers: dict[int, int] = {}
        storages: dict[int, list[torch.UntypedStorage]] = {}
        self.settle()
        with torch.cuda.device(self._device):
            for tensor in tensors:
                if tensor.device != self._device:
                    raise NotExportable(f"a tensor is on {tensor.device}, the others are on {self._device}")
                allocation = self._driver.allocation(tensor.data_ptr())
                identity = allocation.identity
                if identity not in held:
                    held[identity] = known.get(identity) or ExportedRegion(
                        Region(allocation.nbytes, self._uuid),
                        wire.CUDA,
                        [],
                        uuid=self._uuid,
                        handle=self._driver.ipc_handle(allocation),
                    )
                storages.setdefault(identity, []).append(tensor.untyped_storage())
                number = numbers.setdefault(identity, len(numbers))
                places.append(ExportedTensor(number, tensor.data_ptr() - allocation.base))
        for identity, each in storages.items():
            held[identity].storages = each
        return held, tuple(places)

    def settle(self) -> None:
        """Synchronize all streams: a training step may write on any."""
        torch.cuda.synchronize(self._device)


def _share(storage: torch.UntypedStorage) -> ExportedRegion:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        # The private half of Tensor.share_memory_; test_export_map.py fails when torch changes what it returns.
        fd, nbytes = cast("tuple[int, int]", storage._share_fd_cpu_())  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage]
    except RuntimeError as error:
        raise NotExportable(
            f"torch cannot move {storage.nbytes()} bytes into shared memory ({error}): enlarge /dev/shm "
            f"(docker: --shm-size) or the limit of open files (now {hard}, {_SPARE_DESCRIPTORS} of them for other uses)"
        ) from error
    return ExportedRegion(Region(nbytes, "cpu"), wire.HOST, [storage], fd=fd)
