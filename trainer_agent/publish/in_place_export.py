"""Publishing without buckets: engines take the memory of all ranks, which the ranks export and digest where it lies."""

from __future__ import annotations

from collections.abc import Mapping

from weightbus.control.log import get_log
from weightbus.control.machine import TransferEnds, routing
from weightbus.control.protocol import Endpoint, EngineInfo, TrainerInfo, TransportKind
from weightbus.dataplane.errors import NotExportable
from weightbus.dataplane.transports import Address, registry as transports

from ..export import MemoryExport
from ..source import SourceError
from .rank_commands import CommandedRanks, DigestExported, ExportMemory, JoinSends, PrepareExport

_log = get_log(__name__)


class InPlaceExport:
    """Rank 0's use of its `MemoryExport`: tells the other ranks to make the same calls. Outlives publications."""

    def __init__(self, memory_export: MemoryExport, ranks: CommandedRanks, trainer: TrainerInfo) -> None:
        self.memory_export = memory_export
        self._ranks = ranks
        self._trainer = trainer
        self._logged = ""
        """Reason of the last `digested_by_buckets` warning."""
        self._read = False
        """True if an engine took the memory in the last publication."""
        self._digested = False
        """True if the ranks digested it in the last publication."""
        self._prepared = False
        """True if the running publication was prepared, and not exported yet."""
        self.ready_flags = False
        """True if all engines wait for ready flags."""

    def begin(self) -> None:
        """Begin a publication: nothing is prepared for it."""
        self._prepared = False

    def prepare(self) -> None:
        """Prepare the export, and its digests, if the last publication needed them. Collective."""
        if self._read:
            self._ranks.tell(PrepareExport(self._digested, self.ready_flags))
            self.memory_export.prepare(digests=self._digested, ready_flags=self.ready_flags)
            self._prepared = True

    @property
    def digests_begun(self) -> bool:
        """True if the prepared version is being digested, so that the digests may be deferred."""
        return self._prepared and self._digested

    def split(
        self, engines: Mapping[str, EngineInfo], routes: Mapping[str, TransportKind] | None
    ) -> tuple[int, dict[str, EngineInfo]]:
        """The number of `engines` that take the ranks' memory itself, and the engines that take buckets.

        `routes` are the coordinator's choice; an engine without a route takes no part. None where the coordinator sent
        none: then routes are chosen here, by the engines' `Hello`.
        """
        if routes is None:
            ends = {name: TransferEnds(self._trainer, info) for name, info in engines.items()}
            kinds = {name: routing.choose(each).transport for name, each in ends.items()}
        else:
            kinds = {name: routes.get(name) for name in engines}
        routed = {name: transports.by_name(kind) for name, kind in kinds.items() if kind is not None}
        reading = [name for name, each in routed.items() if each.in_place]
        others = {name: engines[name] for name, each in routed.items() if not each.in_place}
        self._read = bool(reading)
        return len(reading), others

    def export(self, *, digests: bool = False) -> None:
        """Make the memory readable as it is now; with `digests` the other ranks go on to `digests`. Collective."""
        prepared, self._prepared = self._prepared, False
        self._ranks.tell(ExportMemory(digests=digests, prepared=prepared, ready_flags=self.ready_flags))
        try:
            self.memory_export.export(prepared=prepared, ready_flags=self.ready_flags)
        except NotExportable as error:
            raise SourceError(
                f"the memory could be exported before, and now cannot: {error}; what engines read where it is must be "
                f"where it was when the agent connected: load offloaded parameters back before publishing"
            ) from error

    def export_and_digest(self, *, digests: bool) -> bytes | None:
        """Make the memory readable as it is now; return its digests if wanted and possible. Collective."""
        self.export(digests=digests)
        if not digests:
            self._digested = False
            return None
        return self._noted(self.memory_export.digests())

    def digests(self) -> bytes | None:
        """Digests of the memory that was exported before, if the layout allows them. Collective."""
        self._ranks.tell(DigestExported())
        return self._noted(self.memory_export.digests())

    def join_sends(self, offer: Endpoint, epoch: int, deadline_s: float) -> None:
        """Have all ranks send to the engines that connect to `offer`. Collective; returns at once."""
        self._ranks.tell(JoinSends(offer.address, offer.token, epoch, deadline_s))
        self.memory_export.join_sends(Address(offer.address, token=offer.token), epoch, deadline_s)

    def _noted(self, digests: bytes | None) -> bytes | None:
        self._digested = digests is not None
        if digests is None and self._logged != self.memory_export.undigestible:
            self._logged = self.memory_export.undigestible
            _log.warning("digested_by_buckets", reason=self._logged)
        return digests
