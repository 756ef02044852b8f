"""What a trainer rank lets others read: its allocations, once each, and where its local tensors lie in them. Pure data.

A *region* is one allocation of the exporting process: a block of shared memory, or what one cudaMalloc returned. It is
opened once by each reader and holds many storages. How a region is opened is no part of this: handles travel over the
exporter's socket (export_wire.py), and are useless to anybody who has only read an `ExportMap`.

Ownership: the exporter owns the memory and promises, for as long as a reader's connection is open, not to free a region
of the generation that the reader opened. What the regions hold may be read between `publish` and its return only.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
import numpy as np

from .boxes import Column
from .errors import ManifestError


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One allocation."""

    nbytes: int
    device: str
    """``cpu``, or the GPU's uuid: a device index means another GPU in another process."""


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a local tensor begins."""

    region: int
    offset: int
    """Bytes."""


class ExportMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one holder exports. Equal layouts have equal maps, in whatever process and generation."""

    holder: int
    host: str
    """`host.host_identity` of the process."""
    regions: tuple[Region, ...]
    places: tuple[Place, ...]
    """By the number that pieces give a local tensor as `storage`."""

    def encode(self) -> bytes:
        """Canonical bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, blob: bytes) -> ExportMap:
        """Read and check what `encode` wrote. Raises `ManifestError` on anything else."""
        try:
            found = _DECODER.decode(blob)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"not a map of exported memory: {error}") from error
        if any(region.nbytes < 1 for region in found.regions):
            raise ManifestError("an exported region has no bytes")
        if any(
            not 0 <= place.region < len(found.regions) or not 0 <= place.offset < found.regions[place.region].nbytes
            for place in found.places
        ):
            raise ManifestError("an exported tensor lies outside of its region")
        return found

    def digest(self) -> str:
        """SHA-256, hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    def columns(self) -> tuple[Column, Column]:
        """(places,), (places,): region and byte offset of each local tensor."""
        table = np.array([(place.region, place.offset) for place in self.places], np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final[msgspec.msgpack.Decoder[ExportMap]] = msgspec.msgpack.Decoder(ExportMap)
