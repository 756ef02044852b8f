"""The memory that a trainer rank exports: its allocations, once each, and where local tensors lie in them. Pure data.

A *region* is one allocation of the exporting process: a block of shared memory, or what one cudaMalloc returned. A
reader opens it once; it holds many storages. Handles are not in the map: they travel over the exporter's socket
(exports.py), so a reader of the map alone can open nothing.

Ownership: the exporter owns the memory, and frees no region of the generation that a reader opened while that reader's
connection is open. The contents may be read between `publish` and its return only.
"""

from __future__ import annotations

import hashlib
from itertools import chain
from operator import attrgetter
from typing import Final

import msgspec
import numpy as np

from ..errors import ManifestError
from ..tensors import Column


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One allocation."""

    nbytes: int
    device: str
    """``cpu``, or the GPU's uuid: a device index means another GPU in another process."""


class ExportedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Where a local tensor begins."""

    region: int
    offset: int
    """Bytes from the beginning of the region."""


class ArenaParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A local tensor that is made anew for every version, from its beginning on, and may be read while it is made."""

    storage: int
    """Its index in `ExportMap.places`."""
    ends: tuple[int, ...]
    """Bytes from its beginning, ascending: where each part ends."""
    flags: int = msgspec.field(name="marks")
    """Bytes from its beginning to the ready flags, an int64 for each part: the number of the round that made it last.
    """


class ArenaRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ArenaParts` as readers know them: all but `region` in bytes from the beginning of that region."""

    region: int
    begin: int
    ends: tuple[int, ...]
    flags: int = msgspec.field(name="marks")


class ExportMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The exported memory of one rank. Equal layouts have equal maps, in any process and generation."""

    rank: int = msgspec.field(name="holder")
    host: str
    """`host_identity` of the process."""
    regions: tuple[Region, ...]
    places: tuple[ExportedTensor, ...]
    """Of each local tensor, by the number that shards give as `storage`."""
    parts: ArenaParts | None = None
    """The local tensor that is made part by part, if any. All others are complete when they are offered."""

    @property
    def made(self) -> ArenaRegion | None:
        """`parts`, in their region."""
        if self.parts is None:
            return None
        place = self.places[self.parts.storage]
        ends = tuple(place.offset + end for end in self.parts.ends)
        return ArenaRegion(place.region, place.offset, ends, place.offset + self.parts.flags)

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
        if not _inside(found):
            raise ManifestError("an exported tensor lies outside of its region")
        if found.parts is not None:
            _check_parts(found, found.parts)
        return found

    def digest(self) -> str:
        """SHA-256, hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    def columns(self) -> tuple[Column, Column]:
        """(places,), (places,): region and byte offset of each local tensor."""
        both = np.fromiter(chain.from_iterable(map(_PLACE, self.places)), np.int64, 2 * len(self.places))
        return both[::2].copy(), both[1::2].copy()


def _inside(export: ExportMap) -> bool:
    """True when every place lies in a region of the map."""
    try:
        region, offset = export.columns()
        sizes = np.array([each.nbytes for each in export.regions], np.int64)
    except OverflowError:  # no memory is so large
        return False
    known = (region >= 0) & (region < len(sizes))
    return bool(known.all() and (offset >= 0).all() and (offset < sizes[region]).all())


def _check_parts(export: ExportMap, parts: ArenaParts) -> None:
    if not 0 <= parts.storage < len(export.places) or not 0 < len(parts.ends) <= MAX_ARENA_PARTS:
        raise ManifestError(f"{len(parts.ends)} parts of local tensor {parts.storage} are made: there is no such")
    made = export.made
    assert made is not None
    nbytes = export.regions[made.region].nbytes
    ascending = all(a < b for a, b in zip((0, *parts.ends), parts.ends, strict=False))
    flags = (made.flags, made.flags + READY_FLAG_BYTES * len(made.ends))
    if not ascending or made.ends[-1] > nbytes or flags[0] < 0 or flags[1] > nbytes or flags[0] % READY_FLAG_BYTES:
        raise ManifestError(
            f"parts that end at {made.ends}, with ready flags at {flags[0]}, are none of {nbytes} bytes"
        )


_PLACE: Final = attrgetter("region", "offset")
MAX_ARENA_PARTS: Final = 64
READY_FLAG_BYTES: Final = 8
"""Of the ready flag of a part: an int64."""
_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final[msgspec.msgpack.Decoder[ExportMap]] = msgspec.msgpack.Decoder(ExportMap)
