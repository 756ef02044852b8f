"""Exports the live weights of all ranks where they lie: the memory that `direct` and `sends` transfer.

Every rank exports its own memory, or describes it, and digests its share; all ranks exchange their announcements, and
rank 0 joins the digests. Shards and export maps are exchanged when they change; in a steady round a rank announces its
generation and its digests. With `direct` engines fetch the memory; with `sends` ranks send it by threads of their own.
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
from weightbus.dataplane.copy import ITEM_SIZES, DeviceFence, Lanes, copy_engine_for
from weightbus.dataplane.errors import CoverageError, ManifestError, NotExportable, Unsupported
from weightbus.dataplane.memory import ArenaParts, ExportMap, LocalMemory, RegionExporter
from weightbus.dataplane.processes import Deadline
from weightbus.dataplane.quantize import FusedDigests
from weightbus.dataplane.reshard import (
    PASS_BYTES,
    DigestDivision,
    DigestShare,
    ShareDigester,
    ShareSums,
    divide_digest_work,
)
from weightbus.dataplane.tensors import DTYPES, Column, Manifest, Shards, TensorSpec, packed_strides, served_dtypes
from weightbus.dataplane.transports import Address, ExportedWeights, Exporting
from weightbus.dataplane.transports.sends import RankSender

from .topology import location_of


@runtime_checkable
class Exportable(Protocol):
    """A source with tensors that other processes can read. Every rank holds one."""

    @property
    def rank(self) -> int:
        """Rank of this process in the source's group."""
        ...

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        """Shards of `tensors` on this rank, replicas included; `storage` is an index into `memory`."""
        ...

    def memory(self) -> Sequence[torch.Tensor]:
        """This rank's own tensors as they are now. Collective: transfers between ranks that write them end first."""
        ...

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """Gather `blob` of every rank, by rank. Collective."""
        ...


@runtime_checkable
class PreparingSource(Exportable, Protocol):
    """A source that computes what engines read of its weights, and can begin before it is waited for.

    It accumulates checksums of what it computes, so that digests need not read all of it again, and sets ready flags in
    its memory as parts become complete, so that readers need not wait for all.
    """

    def prepare(self) -> None:
        """Begin to compute it from the weights as they are now. Collective.

        All earlier writes to the weights, on any stream of a GPU, have ended before it begins.
        """
        ...

    def memory(self, *, prepared: bool = False) -> Sequence[torch.Tensor]:
        """As `Exportable.memory`; with `prepared` the last `prepare` counts, and nothing is begun anew."""
        ...

    def summed(self, tensors: Sequence[TensorSpec]) -> FusedDigests:
        """Shards of `local_shards` with accumulated checksums. The same in every version."""
        ...

    def sums(self) -> Lanes:
        """(2, checksums of `summed`) uint64: both lanes of the bytes written since `prepare`. Blocks until it ends."""
        ...

    def ready_parts(self) -> ArenaParts | None:
        """Parts that get ready flags, `storage` as in `memory`; None without parts. The same in every version.

        All other writes of `prepare` precede the last flag in stream order. Memory that `prepare` does not write is
        complete when it returns; and no flag shows a round that has not begun.
        """
        ...

    def ready_round(self) -> int:
        """Value of the ready flags since the last `prepare`: never used before, and not 0."""
        ...


class _Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's export of the current version, as the other ranks are told in every round."""

    refusal: str = ""
    """Why this rank cannot export at all; empty if it can."""
    unreadable: str = ""
    """Why engines cannot read its memory, which it can send; empty if they can."""
    layout: str = ""
    """Digest of its `_Layout`."""
    address: str = ""
    generation: int = 0
    round: int = 0
    """Value of its ready flags in this version; 0 without flags."""


class _Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's shards and export maps, exchanged when a layout is new to the other ranks."""

    shards: bytes
    exports: bytes
    """Export map of the memory that engines read; empty if they read none."""
    own: bytes
    """Export map of the memory that this rank sends; empty if it sends none."""
    place: ProcessLocation
    """Location of the rank."""


class _DigestLanes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's contribution to the digests."""

    lanes: bytes
    odd: bytes
    nonfinite: dict[int, int] = {}
    """Elements that are NaN or infinite, by tensor."""


class DerivedTensors:
    """Copies, in served form, of the few shards that are not served as they are trained: norms kept around zero.

    A reader copies bytes. A shard to which a number is added before it is served is kept with the number added in a
    derived tensor of its rank, which is refreshed before every publication and exported like the other tensors.
    `shards` are all of the rank's shards, none of them shifted.
    """

    def __init__(self, shards: Shards, storages: int, device: torch.device) -> None:
        """`storages` is the number of local tensors; derived tensors are numbered after them."""
        rows = np.flatnonzero(shards.shift != 0)
        self._shifted = shards.take(rows)
        self.tensors: list[torch.Tensor] = []
        """One for each dtype in which shifted shards are served."""
        served = served_dtypes(self._shifted)
        storage, dtype, offset, stride = (
            each.copy() for each in (shards.storage, shards.dtype, shards.offset, shards.stride)
        )
        kinds: list[int] = np.unique(served).tolist()
        for kind in kinds:
            here = rows[served == kind]
            sizes = -(-shards.boxes.sizes[here] * ITEM_SIZES[kind] // 16) * 16 // ITEM_SIZES[kind]
            storage[here], dtype[here] = storages + len(self.tensors), kind
            offset[here] = np.cumsum(sizes) - sizes
            stride[here] = packed_strides(shards.boxes.extents[here])
            self.tensors.append(torch.zeros(int(sizes.sum()), dtype=getattr(torch, DTYPES[kind]), device=device))
        self.shards = replace(
            shards, storage=storage, dtype=dtype, offset=offset, stride=stride, shift=np.zeros_like(shards.shift)
        )
        self._mirrored = self.shards.take(rows)
        self._storages = storages

    @torch.no_grad()
    def refresh(self, storages: Sequence[torch.Tensor]) -> None:
        """Copy the current values of the shifted shards, with their shifts added."""
        for row in range(len(self._shifted)):
            shard, copy = self._shifted.at(row), self._mirrored.at(row)
            source, target = storages[shard.view.storage], self.tensors[copy.view.storage - self._storages]
            trained = source.as_strided(
                shard.box.shape, shard.view.strides, source.storage_offset() + shard.view.offset
            )
            target.as_strided(copy.box.shape, copy.view.strides, copy.view.offset).copy_(trained + shard.shift)


@dataclass(frozen=True, eq=False)
class _LocalShards:
    """This rank's shards. Storages are renumbered: the source's storages in `used`, then those of derived tensors."""

    shards: Shards
    digest: str
    used: tuple[int, ...]
    derived: DerivedTensors
    ready_parts: ArenaParts | None
    """Parts with ready flags."""

    def used_of(self, memory: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Storages of the source that hold shards, in their new order."""
        return tuple(map(memory.__getitem__, self.used))

    @classmethod
    def of(cls, shards: Shards, memory: Sequence[torch.Tensor], ready_parts: ArenaParts | None) -> _LocalShards:
        """Leaves out storages without shards, and derives the shifted ones."""
        used, numbers = np.unique(shards.storage, return_inverse=True)
        indexes: list[int] = used.tolist()
        device = memory[indexes[0]].device if indexes else torch.device("cpu")
        derived = DerivedTensors(replace(shards, storage=numbers), len(indexes), device)
        if ready_parts is not None:
            ready_parts = msgspec.structs.replace(ready_parts, storage=indexes.index(ready_parts.storage))
        return cls(derived.shards, derived.shards.digest(), tuple(indexes), derived, ready_parts)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A version that is prepared on this rank and not exported yet."""

    announcement: _Announcement
    ready_flags: bool
    """True if readers wait for ready flags."""
    unflagged: torch.cuda.Event | None
    """Recorded behind the device's writes that no ready flag covers; None if there are none."""


class MemoryExport:
    """Exports one rank's tensors until it is closed.

    Calls are collective, but for `current`, `described`, `join_sends`, `settle` and `close`.
    """

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
        """`read`: engines open the memory. `sent`: ranks send it. Equal on every rank."""
        self._source = source
        self._preparing = source if isinstance(source, PreparingSource) else None
        self._manifest = manifest
        self._exporter = RegionExporter(runtime_dir, channel, source.rank) if read else None
        self._sent_memory = LocalMemory(source.rank) if sent else None
        self._sends = RankSender(channel, source.rank)
        self.unreadable = "" if read else "it was not asked for"
        """Why engines cannot read the memory; empty if they can."""
        self.places: tuple[ProcessLocation, ...] = ()
        """Locations of the ranks, once memory was exported."""
        self._described: ExportedWeights | None = None
        self._exported_weights: ExportedWeights | None = None
        self._pieces: Shards | None = None
        """Shards of all ranks."""
        self._local: _LocalShards | None = None
        self._tensors: list[torch.Tensor] = []
        self._layouts: tuple[str, ...] = ()
        """Digests of the layouts that all ranks know of each other."""
        self._division: DigestDivision | None = None
        self.undigestible = ""
        """Why `digests` returns None; empty if it does not."""
        self.nonfinite: dict[int, int] = {}
        """By tensor: elements that are NaN or infinite, as of the last `digests`. Empty on other ranks than 0."""
        self.digesting = False
        """True while a device digests this rank's share."""
        self._share: ShareDigester | None = None
        """Digests this rank's share; bound to its memory and the layout of all ranks."""
        self._known: tuple[Column, Column] | None = None
        """Checksums of the source that count for the share: their numbers, and the share's tensors they belong to."""
        self._prepared: _Prepared | None = None
        """Memory of the version before stays readable under its own layout; engines must not read it any more."""
        self._fence: DeviceFence | None = None
        """Behind the device work that `prepare` began, until it was waited for."""
        self._maps: tuple[ExportMap | None, ExportMap | None] = (None, None)
        """Export maps of the memory that engines read, and of the memory that is sent."""
        self._name = ""
        """Digest of this rank's shards and of `_maps`."""

    @property
    def current(self) -> ExportedWeights:
        """The weights that were exported last, for engines to read. Raises `NotExportable` before the first export."""
        if self._exported_weights is None:
            raise NotExportable("nothing is exposed yet")
        return self._exported_weights

    def described(self) -> ExportedWeights:
        """The weights that the ranks send. Raises `NotExportable` before the first export."""
        if self._described is None:
            raise NotExportable("nothing is described yet")
        return self._described

    def prepare(self, *, digests: bool, ready_flags: bool = False) -> None:
        """Begin to compute what is exported from the weights as they are now, and to digest it if `digests`.

        No engine may be reading. On a GPU the work has only begun when this returns. Errors are raised by `export`.
        `ready_flags` as for `export`. `export` and `digests` may follow in any order.
        """
        if self._preparing is not None:
            self._preparing.prepare()
        announcement = self._announce(prepared=True, ready_flags=ready_flags)
        self.digesting = False  # digests that ran before are of no use
        flagged = self._has_ready_flags(ready_flags)
        self._prepared = _Prepared(announcement, flagged, self._behind_unflagged(flagged))
        if digests and not announcement.refusal and self._share is not None:
            self._begin_digests(self._share)
        self._fence = DeviceFence(self._device)

    def settle(self, deadline_s: float) -> None:
        """Block until the work that `prepare` began has ended: afterwards the weights may change. Not collective.

        Returns at once if it was waited for. Raises `DeadlineExceeded`, and RuntimeError if the device has failed.
        """
        fence, self._fence = self._fence, None
        if fence is not None:
            fence.wait(Deadline(deadline_s))

    def export(self, *, prepared: bool = False, ready_flags: bool = False) -> None:
        """Make the memory readable on every rank. Raises `NotExportable`, on every rank alike.

        Without `prepared` all of the memory as it is now is complete when this returns. With it, the last `prepare` is
        exported: it is complete but, if readers know `ready_flags`, for flagged parts. Digests are not waited for.
        """
        announcement = self._prepared_announcement(ready_flags) if prepared else None
        if announcement is None:
            self._prepared = None
            announcement = self._announce(prepared=prepared, ready_flags=ready_flags)
            self.digesting = False  # of what was prepared
            if self._exporter is not None:
                self._exporter.settle()
        self._exchange(announcement)

    def digests(self) -> bytes | None:
        """Digests of all tensors as the memory is now, concatenated, on rank 0; empty on other ranks.

        None on every rank if the layout does not allow digests in place; then no memory is read. Sets `nonfinite`.
        """
        division = self._divided()
        if division is None:
            return None
        if self._share is None:
            self._share = ShareDigester(
                self._share_of(division), self._tensors, self._device, copy_engine_for(self._device)
            )
        if not self.digesting:
            self._await_step()
            self._begin_digests(self._share)
        own = self._share.result()
        self.digesting, self._fence = False, None
        if self._known is not None and self._preparing is not None:
            own.lanes[:, self._known[1]] += self._preparing.sums()[:, self._known[0]]
        mine = _encode(_DigestLanes(own.lanes.astype("<u8").tobytes(), own.odd, own.nonfinite))
        found = [_DIGEST_LANES.decode(each) for each in self._source.collect(mine)]
        if self._source.rank:
            return b""
        sums = [
            ShareSums(np.frombuffer(each.lanes, "<u8").astype(np.uint64).reshape(2, -1), each.odd, each.nonfinite)
            for each in found
        ]
        digests, self.nonfinite = division.digests(sums)
        return digests

    def join_sends(self, address: Address, epoch: int, deadline_s: float) -> None:
        """Have this rank take part in sending `epoch`, by a thread of its own. Not collective.

        Sends do not look at ready flags: they wait until all of the memory is complete.
        """
        if self._sent_memory is not None:
            self._sends.begin(address, epoch, self._sent_memory.regions, deadline_s)

    def close(self) -> None:
        """Stop exporting. Engines notice before they read again."""
        self._drop_share()
        self._sends.close()
        if self._exporter is not None:
            self._exporter.close()
        self._prepared = None
        self._exported_weights, self._described, self._pieces, self._layouts = None, None, None, ()

    # -- this rank -----------------------------------------------------------------------------------------------------

    def _prepared_announcement(self, ready_flags: bool) -> _Announcement | None:
        """Announcement of the prepared version, complete but for flagged parts.

        None if no version is prepared, or if readers know ready flags now and did not when it was prepared.
        """
        prepared = self._prepared
        if prepared is None or prepared.ready_flags is not self._has_ready_flags(ready_flags):
            return None
        if prepared.unflagged is not None:
            prepared.unflagged.synchronize()
        self._prepared = None
        return prepared.announcement

    def _has_ready_flags(self, ready_flags: bool) -> bool:
        """True if readers wait for ready flags, provided that they know them."""
        local = self._local
        return ready_flags and self._exporter is not None and local is not None and local.ready_parts is not None

    def _announce(self, *, prepared: bool, ready_flags: bool) -> _Announcement:
        preparing = self._preparing
        memory = self._source.memory() if preparing is None else preparing.memory(prepared=prepared)
        try:
            return self._export_local(memory, ready_flags=ready_flags)
        except (NotExportable, Unsupported, ManifestError, OSError) as error:
            return _Announcement(refusal=f"{error}" or type(error).__name__)

    def _export_local(self, memory: Sequence[torch.Tensor], *, ready_flags: bool) -> _Announcement:
        local = self._local
        if local is None:
            parts = self._preparing.ready_parts() if self._preparing is not None else None
            local = self._local = _LocalShards.of(self._source.local_shards(self._manifest.tensors), memory, parts)
        used = local.used_of(memory)
        local.derived.refresh(used)
        self._tensors = [*used, *local.derived.tensors]
        exports, unreadable = self._export_to_readers(local, ready_flags=ready_flags)
        # After that: exporting moves storages of the host.
        own = None if self._sent_memory is None else self._sent_memory.describe(self._tensors)
        if exports is not self._maps[0] or own is not self._maps[1]:  # both are the same while nothing has moved
            self._maps = exports, own
            self._name = "".join((local.digest, *(each.digest() if each else "-" for each in self._maps)))
            self._drop_share()
        exporter = self._exporter if exports is not None else None
        return _Announcement(
            unreadable=unreadable,
            layout=self._name,
            address=exporter.address() if exporter else "",
            generation=exporter.generation if exporter else 0,
            round=self._preparing.ready_round() if exports and exports.parts and self._preparing is not None else 0,
        )

    def _export_to_readers(self, local: _LocalShards, *, ready_flags: bool) -> tuple[ExportMap | None, str]:
        """Export map for readers; or None and the reason, where the memory can be sent instead."""
        if self._exporter is None:
            return None, ""
        try:
            parts = local.ready_parts if ready_flags else None
            return self._exporter.export(self._tensors, settled=False, parts=parts), ""
        except (NotExportable, Unsupported, OSError) as error:
            if self._sent_memory is None:
                raise
            return None, f"{error}" or type(error).__name__

    @property
    def _device(self) -> torch.device:
        return self._tensors[0].device if self._tensors else torch.device("cpu")

    def _begin_digests(self, share: ShareDigester) -> None:
        """Have a device digest this rank's share, in stream order behind the work that computes it."""
        share.begin()
        self.digesting = True

    def _behind_unflagged(self, flagged: bool) -> torch.cuda.Event | None:
        """An event behind the writes that `export` has to wait for, and in front of the digests."""
        self._await_step()
        writes = self._device.type == "cuda" and self._preparing is not None
        if not writes or (self._local is not None and flagged and not self._local.derived.tensors):
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _await_step(self) -> None:
        """Wait for a training step, which may write the exported weights on any stream."""
        if self._device.type == "cuda" and self._preparing is None:
            torch.cuda.synchronize(self._device)

    def _share_of(self, division: DigestDivision) -> DigestShare:
        """This rank's share without the tensors that the source itself sums up."""
        rank, self._known = self._source.rank, None
        if self._preparing is None:
            return division.share(rank, PASS_BYTES)
        summed = self._preparing.summed(self._manifest.tensors)
        known = division.known(rank, summed.shards)
        share = division.share(rank, PASS_BYTES, known)
        sums = np.flatnonzero(np.isin(summed.tensor, known))
        if len(sums):
            self._known = sums, np.searchsorted(share.tensors, summed.tensor[sums])
        return share

    def _drop_share(self) -> None:
        if self.digesting and self._exporter is not None:
            self._exporter.settle()  # a device reads by it
        self.digesting = False
        if self._share is not None:
            self._share.close()
            self._share = None

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def _exchange(self, announcement: _Announcement) -> None:
        """Exchange announcements, and layouts where one is new; keep the weights of all ranks."""
        found = [_ANNOUNCEMENT.decode(each) for each in self._source.collect(_encode(announcement))]
        refusals = [f"rank {rank}: {each.refusal}" for rank, each in enumerate(found) if each.refusal]
        if refusals:
            raise NotExportable("; ".join(refusals[:_SHOWN]))
        unreadable = [f"rank {rank}: {each.unreadable}" for rank, each in enumerate(found) if each.unreadable]
        if unreadable and self._exporter is not None:  # on any rank: all of them know, and go on by sending
            self.unreadable = "; ".join(unreadable[:_SHOWN])
            self._exporter.close()
            self._exporter, self._exported_weights, self._pieces = None, None, None
        layouts = tuple(each.layout for each in found)
        exporters = tuple(
            Exporting(holder=rank, address=each.address, generation=each.generation, round=each.round)
            for rank, each in enumerate(found)
        )
        if layouts != self._layouts or self._pieces is None:
            assert self._local is not None
            exports, own = (b"" if each is None else each.encode() for each in self._maps)
            place = location_of(self._source.rank, self._device)
            layout = _Layout(self._local.shards.encode(), exports, own, place)
            self._learn([_LAYOUT.decode(each) for each in self._source.collect(_encode(layout))], exporters)
            self._layouts = layouts
        elif self._exported_weights is not None and exporters != self._exported_weights.exporters:
            self._exported_weights = self._exported_weights.again(exporters)

    def _learn(self, layouts: Sequence[_Layout], exporters: tuple[Exporting, ...]) -> None:
        self.places = tuple(each.place for each in layouts)
        self._pieces = shards = Shards.decode([each.shards for each in layouts], self._manifest.tensors)
        self._exported_weights = self._described = None
        if not self.unreadable:
            self._exported_weights = ExportedWeights(
                shards, tuple(ExportMap.decode(each.exports) for each in layouts), exporters
            )
        if self._sent_memory is not None:
            self._described = ExportedWeights(shards, tuple(ExportMap.decode(each.own) for each in layouts), ())
        self._division, self.undigestible = None, ""
        self._drop_share()

    def _divided(self) -> DigestDivision | None:
        if self._division is None and not self.undigestible:
            assert self._pieces is not None
            try:
                self._division = divide_digest_work(self._pieces)
            except (Unsupported, CoverageError) as error:
                self.undigestible = str(error)
        return self._division


_SHOWN: Final = 3
"""Refusals that an error names."""
_ANNOUNCEMENT: Final = msgspec.msgpack.Decoder(_Announcement)
_LAYOUT: Final = msgspec.msgpack.Decoder(_Layout)
_DIGEST_LANES: Final = msgspec.msgpack.Decoder(_DigestLanes)
_encode: Final = msgspec.msgpack.encode
