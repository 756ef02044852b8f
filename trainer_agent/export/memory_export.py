"""Gives engines the live weights of all ranks out of where they are: what `direct` and `sends` offer.

Every rank exports its own memory, or describes it, and digests its share of it; the root joins what they say of
themselves. Pieces and maps travel when they are new; in a steady round a rank sends its generation and its sums. What
is read, engines fetch; what is sent, every rank sends by a thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from weightbus.control.protocol import ProcessLocation
from weightbus.dataplane.copy import DeviceFence, Lanes, copy_engine_for
from weightbus.dataplane.errors import CoverageError, ManifestError, NotExportable, Unsupported
from weightbus.dataplane.memory import ArenaParts, ExportMap, LocalMemory, RegionExporter
from weightbus.dataplane.processes import Deadline
from weightbus.dataplane.quantize import FusedDigests
from weightbus.dataplane.reshard import PASS_BYTES, DigestDivision, DigestShare, ShareDigester, divide_digest_work
from weightbus.dataplane.tensors import Column, Manifest, Shards, TensorSpec
from weightbus.dataplane.transports import Address, ExportedWeights, Exporting
from weightbus.dataplane.transports.sends import RankSender

from .derived_tensors import DerivedTensors
from .topology import location_of


@runtime_checkable
class Exportable(Protocol):
    """A source whose tensors can be read by other processes. Every rank holds one."""

    @property
    def rank(self) -> int:
        """Of this process, in the source's group."""
        ...

    def held(self, tensors: Sequence[TensorSpec]) -> Shards:
        """All that this rank holds of `tensors`, replicas included; `storage` numbers what `memory` gives."""
        ...

    def memory(self) -> Sequence[torch.Tensor]:
        """This rank's own tensors as they are now. Collective: what is still on its way between ranks arrives first."""
        ...

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """What every rank passed, by rank. Collective."""
        ...


@runtime_checkable
class PreparingSource(Exportable, Protocol):
    """A source that makes what is read of its weights: that takes a while, and can be begun before it is waited for."""

    def make(self) -> None:
        """Begin to make it from the weights as they are now. Collective.

        Whatever was writing the weights, on any stream of a GPU, has ended when it begins.
        """
        ...

    def memory(self, *, made: bool = False) -> Sequence[torch.Tensor]:
        """As of every exposable source; with `made`, what the last `make` began is not begun again."""
        ...


@runtime_checkable
class SummingSource(PreparingSource, Protocol):
    """A source that sums up what it makes while it makes it, so that the digests need not read all of it again."""

    def summed(self, tensors: Sequence[TensorSpec]) -> FusedDigests:
        """The pieces of `held` that are summed up. Always the same ones."""
        ...

    def sums(self) -> Lanes:
        """(2, sums of `summed`) uint64: both lanes of the bytes that are there since `make`. Waits for it."""
        ...


@runtime_checkable
class FlaggingSource(PreparingSource, Protocol):
    """A source that marks in its memory how far it has come with what it makes: readers need not wait for all of it."""

    def parts(self) -> ArenaParts | None:
        """What is made part by part, `storage` as in `memory`; None where nothing is. Always the same.

        All else that `make` writes is written in the order of the stream before the last mark is. What it does not
        write, of all that `memory` gives, is there when it returns; and no mark shows a round that is not begun.
        """
        ...

    @property
    def round(self) -> int:
        """What marks show since the last `make`: another number than ever before, and not 0."""
        ...


class _Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says in every round."""

    refusal: str = ""
    """Why nothing of it can be had."""
    unreadable: str = ""
    """Why nobody can read its memory, which it can send."""
    layout: str = ""
    """Digest of its `_Layout`."""
    address: str = ""
    generation: int = 0
    round: int = 0
    """What the marks of its parts have to show."""


class _Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says when its layout is new to the others."""

    pieces: bytes
    exports: bytes
    """Of what can be read; empty where nothing can."""
    own: bytes
    """Of what it sends out of; empty where it does not."""
    place: ProcessLocation
    """Where it is."""


class _Sums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What its memory adds to the digests."""

    lanes: bytes
    odd: bytes


@dataclass(frozen=True, eq=False)
class _Local:
    """This rank's part of the model. Storages are numbered anew: those of the source in `used`, then the mirror's."""

    pieces: Shards
    digest: str
    used: tuple[int, ...]
    mirror: DerivedTensors
    parts: ArenaParts | None
    """What is made part by part."""

    def here(self, memory: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those of the source's storages that are used, in their new numbers."""
        return tuple(map(memory.__getitem__, self.used))

    @classmethod
    def of(cls, pieces: Shards, memory: Sequence[torch.Tensor], parts: ArenaParts | None) -> _Local:
        """What lies in no piece is left out, what is shifted is mirrored."""
        used, numbers = np.unique(pieces.storage, return_inverse=True)
        indexes: list[int] = used.tolist()
        device = memory[indexes[0]].device if indexes else torch.device("cpu")
        mirror = DerivedTensors(replace(pieces, storage=numbers), len(indexes), device)
        if parts is not None:
            parts = msgspec.structs.replace(parts, storage=indexes.index(parts.storage))
        return cls(mirror.pieces, mirror.pieces.digest(), tuple(indexes), mirror, parts)


class MemoryExport:
    """Exports one rank's tensors for as long as it lives. Calls are collective, but for `current` and `close`."""

    def __init__(
        self,
        source: Exportable,
        manifest: Manifest,
        runtime_dir: Path,
        channel: str,
        *,
        read: bool = True,
        sent: bool = False,
    ) -> None:
        """`read`: engines open the memory. `sent`: ranks send out of it. Equal on every rank."""
        self._source = source
        self._manifest = manifest
        self._exporter = RegionExporter(runtime_dir, channel, source.rank) if read else None
        self._own = LocalMemory(source.rank) if sent else None
        self._sends = RankSender(channel, source.rank)
        self.unreadable = "" if read else "it was not asked for"
        """Why the memory cannot be read; empty when it can."""
        self.places: tuple[ProcessLocation, ...] = ()
        """Where the ranks are, once something was exposed."""
        self._described: ExportedWeights | None = None
        self._pieces: Shards | None = None
        self._local: _Local | None = None
        self._tensors: list[torch.Tensor] = []
        self._layouts: tuple[str, ...] = ()
        self._exported_weights: ExportedWeights | None = None
        self._division: DigestDivision | None = None
        self._undigestible = ""
        self._share: ShareDigester | None = None
        self._begun = False
        """`_share` reads the memory already, as it is in this publication."""
        self._ahead: _Standing | None = None
        """What `make` has found."""
        self._behind: DeviceFence | None = None
        """Behind what `make` began, while nobody has waited for that."""
        self._marked = False
        """It has told readers of parts, and of the marks behind them."""
        self._unmarked: torch.cuda.Event | None = None
        """Behind what `make` has a GPU write without a mark."""
        self._known: tuple[Column, Column] | None = None
        """What the source sums up for this rank's share: which of its sums, and of which of the share's tensors."""
        self._maps: tuple[ExportMap | None, ExportMap | None] = (None, None)
        """What can be read, and what is sent out of."""
        self._name = ""
        """Of this rank's pieces and of `_maps`."""

    @property
    def current(self) -> ExportedWeights:
        """What was exposed last. Raises `NotExportable` before there is anything."""
        if self._exported_weights is None:
            raise NotExportable("nothing is exposed yet")
        return self._exported_weights

    def standing(self) -> ExportedWeights:
        """`current`, to be asked for at each offer."""
        return self.current

    def described(self) -> ExportedWeights:
        """What the ranks send out of. Raises `NotExportable` before there is anything."""
        if self._described is None:
            raise NotExportable("nothing is described yet")
        return self._described

    def join(self, address: Address, epoch: int, deadline_s: float) -> None:
        """Have this rank take part in sending `epoch`, by a thread of its own. Not collective.

        What is sent is not looked at part by part: it waits for all that is made.
        """
        if self._own is not None:
            self._sends.begin(address, epoch, self._own.regions, deadline_s)

    def make(self, *, digests: bool, parts: bool = False) -> None:
        """Begin to make what is exposed from the weights as they are now, and to digest it if `digests`.

        `parts` as for `expose`. Nobody may be reading it. On a GPU all of that has only begun when this returns. What
        cannot be exported is found by `expose`. `expose` and `digests` may follow in any order, and `digests` any time
        later.
        """
        if isinstance(self._source, PreparingSource):
            self._source.make()
        self._ahead, self._begun = self._exported(made=True, parts=parts), False
        self._marked = self._marks(parts)
        self._note_unmarked()
        if digests and not self._ahead.refusal and self._share is not None:
            self._begin(self._share)
        self._behind = DeviceFence(self._device)

    def settle(self, deadline_s: float) -> None:
        """Wait for what `make` began where nobody has: afterwards the weights may be changed. Not collective.

        Raises `DeadlineExceeded`, and RuntimeError where the device has failed.
        """
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.wait(Deadline(deadline_s))

    def expose(self, *, made: bool = False, parts: bool = False) -> None:
        """Make the memory readable as it is now, on every rank. Raises `NotExportable`, on every rank alike.

        With `made`, as it was at the last `make`: when this returns, all of it is there but, if readers are told of
        `parts`, those of which they see by their marks when they are, and nothing waits for what digests. Without, all
        of it is there.
        """
        mine, self._ahead = self._ahead, None
        if mine is None or not made or self._marked is not self._marks(parts):
            mine, self._begun = self._exported(made=made, parts=parts), False
            if self._exporter is not None:
                self._exporter.settle()
        elif self._unmarked is not None:
            self._unmarked.synchronize()
        self._unmarked = None
        found = [_STANDING.decode(each) for each in self._source.collect(_encode(mine))]
        refusals = [f"rank {rank}: {each.refusal}" for rank, each in enumerate(found) if each.refusal]
        if refusals:
            raise NotExportable("; ".join(refusals[:_SHOWN]))
        self._give_up_reading([f"rank {rank}: {each.unreadable}" for rank, each in enumerate(found) if each.unreadable])
        layouts = tuple(each.layout for each in found)
        exporters = tuple(
            Exporting(holder=rank, address=each.address, generation=each.generation, round=each.round)
            for rank, each in enumerate(found)
        )
        if layouts != self._layouts or self._pieces is None:
            self._learn(self._source.collect(_encode(self._layout())), exporters)
            self._layouts = layouts
        elif self._exported_weights is not None and exporters != self._exported_weights.exporters:
            self._exported_weights = self._exported_weights.again(exporters)

    def digests(self) -> bytes | None:
        """Of every tensor, one after another, as the memory is now, on the root; empty elsewhere.

        None where the layout does not allow it: everywhere, and no rank reads anything.
        """
        division = self._divided()
        if division is None:
            return None
        share = self._bound(division)
        if not self._begun:
            self._await_step()
            self._begin(share)
        lanes, odd = share.result()
        self._begun, self._behind = False, None
        if self._known is not None and isinstance(self._source, SummingSource):
            lanes[:, self._known[1]] += self._source.sums()[:, self._known[0]]
        sums = [_SUMS.decode(each) for each in self._source.collect(_encode(_Sums(_raw(lanes), odd)))]
        if self._source.rank:
            return b""
        return division.digests([_lanes(each.lanes) for each in sums], [each.odd for each in sums])

    def take_part(self, *, digests: bool, made: bool, parts: bool) -> None:
        """What the leader's call asks of the other ranks."""
        self.expose(made=made, parts=parts)
        if digests:
            self.digests()

    @property
    def undigestible(self) -> str:
        """Why there are no `digests`; empty when there are."""
        return self._undigestible

    def close(self) -> None:
        """Share no more. Engines notice before they read again."""
        self._drop_share()
        self._sends.close()
        if self._exporter is not None:
            self._exporter.close()
        self._exported_weights, self._described, self._pieces, self._layouts = None, None, None, ()

    # -- this rank -----------------------------------------------------------------------------------------------------

    def _marks(self, parts: bool) -> bool:
        """Whether readers look at marks, if they are told of `parts`."""
        local = self._local
        return parts and self._exporter is not None and local is not None and local.parts is not None

    def _exported(self, *, made: bool, parts: bool) -> _Standing:
        source = self._source
        memory = source.memory(made=made) if isinstance(source, PreparingSource) else source.memory()
        try:
            return self._export(memory, parts=parts)
        except (NotExportable, Unsupported, ManifestError, OSError) as error:
            return _Standing(refusal=f"{error}" or type(error).__name__)

    def _export(self, memory: Sequence[torch.Tensor], *, parts: bool) -> _Standing:
        local = self._local
        if local is None:
            marked = self._source.parts() if isinstance(self._source, FlaggingSource) else None
            local = self._local = _Local.of(self._source.held(self._manifest.tensors), memory, marked)
        used = local.here(memory)
        local.mirror.refresh(used)
        self._tensors = [*used, *local.mirror.tensors]
        exports, unreadable = self._read(parts=parts)
        # After that: exporting moves storages of the host.
        own = None if self._own is None else self._own.describe(self._tensors)
        if exports is not self._maps[0] or own is not self._maps[1]:  # both are the same while nothing has moved
            self._maps = exports, own
            self._name = "".join((local.digest, *(each.digest() if each else "-" for each in self._maps)))
            self._drop_share()
        exporter = self._exporter if exports is not None else None
        return _Standing(
            unreadable=unreadable,
            layout=self._name,
            address=exporter.address() if exporter else "",
            generation=exporter.generation if exporter else 0,
            round=self._source.round if exports and exports.parts and isinstance(self._source, FlaggingSource) else 0,
        )

    def _read(self, *, parts: bool) -> tuple[ExportMap | None, str]:
        """What can be read, or why nothing can, where it can be sent instead."""
        if self._exporter is None:
            return None, ""
        try:
            assert self._local is not None
            marked = self._local.parts if parts else None
            return self._exporter.export(self._tensors, settled=False, parts=marked), ""
        except (NotExportable, Unsupported, OSError) as error:
            if self._own is None:
                raise
            return None, f"{error}" or type(error).__name__

    def _layout(self) -> _Layout:
        """What this rank's standing named."""
        assert self._local is not None
        exports, own = (b"" if each is None else each.encode() for each in self._maps)
        return _Layout(self._local.pieces.encode(), exports, own, location_of(self._source.rank, self._device))

    @property
    def _device(self) -> torch.device:
        return self._tensors[0].device if self._tensors else torch.device("cpu")

    def _bound(self, division: DigestDivision) -> ShareDigester:
        """This rank's share over its memory as it is now: `_export` drops it when other memory was put there."""
        if self._share is None:
            share = self._share_of(division)
            self._share = ShareDigester(share, self._tensors, self._device, copy_engine_for(self._device))
        return self._share

    def _begin(self, share: ShareDigester) -> None:
        """Have a device read this rank's share behind what makes it; what is not made has been written."""
        share.begin()
        self._begun = True

    def _note_unmarked(self) -> None:
        """What `expose` has to wait for, in front of what digests."""
        self._unmarked = None
        self._await_step()
        makes = self._device.type == "cuda" and isinstance(self._source, PreparingSource)
        if makes and (self._local is None or not self._marked or self._local.mirror.tensors):
            self._unmarked = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._unmarked.record(torch.cuda.current_stream(self._device))

    def _await_step(self) -> None:
        """A training step may write on any stream what is exposed as it is."""
        if self._device.type == "cuda" and not isinstance(self._source, PreparingSource):
            torch.cuda.synchronize(self._device)

    def _share_of(self, division: DigestDivision) -> DigestShare:
        """Without what the source sums up anyhow."""
        rank, self._known = self._source.rank, None
        if not isinstance(self._source, SummingSource):
            return division.share(rank, PASS_BYTES)
        summed = self._source.summed(self._manifest.tensors)
        known = division.known(rank, summed.pieces)
        share = division.share(rank, PASS_BYTES, known)
        sums = np.flatnonzero(np.isin(summed.tensor, known))
        if len(sums):
            self._known = sums, np.searchsorted(share.tensors, summed.tensor[sums])
        return share

    def _drop_share(self) -> None:
        if self._begun and self._exporter is not None:
            self._exporter.settle()  # a device reads by it
        if self._share is not None:
            self._share.close()
            self._share, self._begun = None, False

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def _learn(self, blobs: Sequence[bytes], exporters: tuple[Exporting, ...]) -> None:
        layouts = [_LAYOUT.decode(each) for each in blobs]
        self.places = tuple(each.place for each in layouts)
        pieces = Shards.decode([each.pieces for each in layouts], self._manifest.tensors)
        self._pieces = pieces
        self._exported_weights = self._described = None
        if not self.unreadable:
            self._exported_weights = ExportedWeights(
                pieces, tuple(ExportMap.decode(each.exports) for each in layouts), exporters
            )
        if self._own is not None:
            self._described = ExportedWeights(pieces, tuple(ExportMap.decode(each.own) for each in layouts), ())
        self._division, self._undigestible = None, ""
        self._drop_share()

    def _give_up_reading(self, refusals: Sequence[str]) -> None:
        """One rank that cannot be read is enough; all of them know, and go on by sending."""
        if not refusals or self._exporter is None:
            return
        self.unreadable = "; ".join(refusals[:_SHOWN])
        self._exporter.close()
        self._exporter, self._exported_weights, self._pieces = None, None, None

    def _divided(self) -> DigestDivision | None:
        if self._division is None and not self._undigestible:
            assert self._pieces is not None
            try:
                self._division = divide_digest_work(self._pieces)
            except (Unsupported, CoverageError) as error:
                self._undigestible = str(error)
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
