"""Lets engines read the live weights of all ranks where they are: what the direct transport offers.

Every rank exports its own memory and digests its share of it; the root joins what they say of themselves. Pieces and
maps travel when they are new; in a steady round a rank sends its generation and its sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from weightbus.dataplane.copy_engines import engine_for
from weightbus.dataplane.direct import Exposed
from weightbus.dataplane.direct_wire import Exporting
from weightbus.dataplane.errors import CoverageError, ManifestError, NotExportable, Unsupported
from weightbus.dataplane.exporter import RegionExporter
from weightbus.dataplane.exports import ExportMap
from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.dataplane.pieces import Pieces
from weightbus.dataplane.share_digest import PASS_BYTES, ShareDigest
from weightbus.dataplane.shares import Division, divide

from .mirror import Mirror


@runtime_checkable
class Exposable(Protocol):
    """A source whose tensors can be read by other processes. Every rank holds one."""

    @property
    def rank(self) -> int:
        """Of this process, in the source's group."""
        ...

    def held(self, tensors: Sequence[TensorSpec]) -> Pieces:
        """All that this rank holds of `tensors`, replicas included; `storage` numbers what `memory` gives."""
        ...

    def memory(self) -> Sequence[torch.Tensor]:
        """This rank's own tensors as they are now. Collective: what is still on its way between ranks arrives first."""
        ...

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """What every rank passed, by rank. Collective."""
        ...


class _Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says in every round."""

    refusal: str = ""
    """Why it cannot expose its memory."""
    layout: str = ""
    """Digest of its `_Layout`."""
    address: str = ""
    generation: int = 0


class _Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says when its layout is new to the others."""

    pieces: bytes
    exports: bytes


class _Sums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What its memory adds to the digests."""

    lanes: bytes
    odd: bytes


@dataclass(frozen=True, eq=False)
class _Local:
    """This rank's part of the model. Storages are numbered anew: those of the source in `used`, then the mirror's."""

    pieces: Pieces
    digest: str
    used: tuple[int, ...]
    mirror: Mirror

    @classmethod
    def of(cls, pieces: Pieces, memory: Sequence[torch.Tensor]) -> _Local:
        """What lies in no piece is left out, what is shifted is mirrored."""
        used, numbers = np.unique(pieces.storage, return_inverse=True)
        indexes: list[int] = used.tolist()
        device = memory[indexes[0]].device if indexes else torch.device("cpu")
        mirror = Mirror(replace(pieces, storage=numbers), len(indexes), device)
        return cls(mirror.pieces, mirror.pieces.digest(), tuple(indexes), mirror)


class Exposure:
    """Exports one rank's tensors for as long as it lives. Calls are collective, but for `current` and `close`."""

    def __init__(self, source: Exposable, manifest: Manifest, runtime_dir: Path, channel: str) -> None:
        self._source = source
        self._manifest = manifest
        self._exporter = RegionExporter(runtime_dir, channel, source.rank)
        self._local: _Local | None = None
        self._tensors: list[torch.Tensor] = []
        self._layouts: tuple[str, ...] = ()
        self._exposed: Exposed | None = None
        self._division: Division | None = None
        self._unsummed = ""
        self._share: ShareDigest | None = None
        self._exports: ExportMap | None = None
        self._name = ""
        """Of this rank's pieces and of `_exports`."""

    @property
    def current(self) -> Exposed:
        """What was exposed last. Raises `NotExportable` before there is anything."""
        if self._exposed is None:
            raise NotExportable("nothing is exposed yet")
        return self._exposed

    def standing(self) -> Exposed:
        """`current`, to be asked for at each offer."""
        return self.current

    def expose(self) -> None:
        """Make the memory readable as it is now, on every rank. Raises `NotExportable`, on every rank alike."""
        mine = self._exported()
        found = [_STANDING.decode(each) for each in self._source.collect(_encode(mine))]
        refusals = [f"rank {rank}: {each.refusal}" for rank, each in enumerate(found) if each.refusal]
        if refusals:
            raise NotExportable("; ".join(refusals[:_SHOWN]))
        layouts = tuple(each.layout for each in found)
        exporters = tuple(
            Exporting(holder=rank, address=each.address, generation=each.generation) for rank, each in enumerate(found)
        )
        if layouts != self._layouts or self._exposed is None:
            self._learn(self._source.collect(_encode(self._layout())), exporters)
            self._layouts = layouts
        elif exporters != self._exposed.exporters:
            self._exposed = replace(self._exposed, exporters=exporters)

    def digests(self) -> bytes | None:
        """Of every tensor, one after another, as the memory is now, on the root; empty elsewhere.

        None where the layout does not allow it: everywhere, and no rank reads anything.
        """
        division = self._divided()
        if division is None:
            return None
        lanes, odd = self._bound(division).run()
        sums = [_SUMS.decode(each) for each in self._source.collect(_encode(_Sums(_raw(lanes), odd)))]
        if self._source.rank:
            return b""
        return division.digests([_lanes(each.lanes) for each in sums], [each.odd for each in sums])

    def take_part(self, *, digests: bool) -> None:
        """What the leader's call asks of the other ranks."""
        self.expose()
        if digests:
            self.digests()

    @property
    def unsummed(self) -> str:
        """Why there are no `digests`; empty when there are."""
        return self._unsummed

    def close(self) -> None:
        """Share no more. Engines notice before they read again."""
        self._drop_share()
        self._exporter.close()
        self._exposed, self._layouts = None, ()

    # -- this rank -----------------------------------------------------------------------------------------------------

    def _exported(self) -> _Standing:
        memory = self._source.memory()
        try:
            return self._export(memory)
        except (NotExportable, Unsupported, ManifestError, OSError) as error:
            return _Standing(refusal=f"{error}" or type(error).__name__)

    def _export(self, memory: Sequence[torch.Tensor]) -> _Standing:
        local = self._local
        if local is None:
            local = self._local = _Local.of(self._source.held(self._manifest.tensors), memory)
        local.mirror.refresh([memory[index] for index in local.used])
        self._tensors = [memory[index] for index in local.used] + local.mirror.tensors
        exports = self._exporter.export(self._tensors)
        if exports is not self._exports:  # the exporter gives the map that it gave while nothing has moved
            self._exports, self._name = exports, local.digest + exports.digest()
            self._drop_share()
        return _Standing(
            layout=self._name,
            address=self._exporter.address().address,
            generation=self._exporter.generation,
        )

    def _layout(self) -> _Layout:
        """What this rank's standing named."""
        assert self._local is not None
        assert self._exports is not None
        return _Layout(self._local.pieces.encode(), self._exports.encode())

    @property
    def _device(self) -> torch.device:
        return self._tensors[0].device if self._tensors else torch.device("cpu")

    def _bound(self, division: Division) -> ShareDigest:
        """This rank's share over its memory as it is now: `_export` drops it when other memory was put there."""
        if self._share is None:
            share = division.share(self._source.rank, PASS_BYTES)
            self._share = ShareDigest(share, self._tensors, self._device, engine_for(self._device))
        return self._share

    def _drop_share(self) -> None:
        if self._share is not None:
            self._share.close()
            self._share = None

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def _learn(self, blobs: Sequence[bytes], exporters: tuple[Exporting, ...]) -> None:
        layouts = [_LAYOUT.decode(each) for each in blobs]
        pieces = Pieces.decode([each.pieces for each in layouts], self._manifest.tensors)
        exports = tuple(ExportMap.decode(each.exports) for each in layouts)
        self._exposed = Exposed(pieces, exports, exporters)
        self._division, self._unsummed = None, ""
        self._drop_share()

    def _divided(self) -> Division | None:
        if self._division is None and not self._unsummed:
            try:
                self._division = divide(self.current.pieces)
            except (Unsupported, CoverageError) as error:
                self._unsummed = str(error)
        return self._division


def _raw(lanes: np.typing.NDArray[np.uint64]) -> bytes:
    return np.ascontiguousarray(lanes).astype("<u8").tobytes()


def _lanes(blob: bytes) -> np.typing.NDArray[np.uint64]:
    found: np.typing.NDArray[np.uint64] = np.frombuffer(blob, "<u8").astype(np.uint64).reshape(2, -1)
    return found


_SHOWN: Final = 3
_STANDING: Final = msgspec.msgpack.Decoder(_Standing)
_LAYOUT: Final = msgspec.msgpack.Decoder(_Layout)
_SUMS: Final = msgspec.msgpack.Decoder(_Sums)


def _encode(said: _Standing | _Layout | _Sums) -> bytes:
    return msgspec.msgpack.encode(said)
