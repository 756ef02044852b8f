"""The storages of one rank's tensors, described as an export map (export_map.py) although nothing is exported.

`sends` plans from such maps, and finds the places of a plan in them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import Unsupported
from ..processes import host_identity
from .device_identity import device_name
from .export_map import ExportedTensor, ExportMap, Region
from .tensor_bytes import addresses_of


class LocalMemory:
    """One rank's storages, numbered in the order in which its tensors first name them."""

    def __init__(self, rank: int) -> None:
        self._holder = rank
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
        self._map = ExportMap(self._holder, host_identity(), named, tuple(places))
        return self._map
