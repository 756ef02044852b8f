"""The collective half of a publication: buckets into slots, and their digests. Leader's side.

A model whose buckets all fit the pool is assembled once and stays in its slots until the publication ends. A larger one
is assembled twice: once for the digests, which must be known before the round, and once more to be sent. Both passes
must read the same weights, and the second one is compared bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from weightbus.control.messages import EngineInfo
from weightbus.dataplane import integrity
from weightbus.dataplane.manifest import DigestTable, Manifest
from weightbus.dataplane.transport import Slot

from . import orders
from .live import LiveDigester, LivePlan, layouts_wanted
from .report import Stopwatch
from .source import Source


class Pool(Protocol):
    """What is asked of dataplane's `BucketPool`."""

    @property
    def slots(self) -> Sequence[Slot]:
        """The buffers."""
        ...

    def close(self) -> None:
        """Give them back."""
        ...


class WeightsDiffer(Exception):
    """The weights were not the same when they were read for the second time."""

    def __init__(self, tensors: Sequence[str]) -> None:
        self.tensors = tuple(tensors)
        shown = ", ".join(self.tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        super().__init__(
            f"{shown} changed between the digest and the transfer: do not step the optimizer while publish runs, or"
            " raise `slots` so that the model is staged whole"
        )


class Staging:
    """Assembles the buckets of one manifest on all ranks, into the slots of one pool."""

    def __init__(
        self, source: Source, manifest: Manifest, pool: Pool, ranks: orders.Ranks, head_dim: int | None = None
    ) -> None:
        self.manifest = manifest
        self.name = manifest.digest()
        self.blob = manifest.encode()
        self._source, self._pool, self._ranks = source, pool, ranks
        self._plan = LivePlan(manifest, (), head_dim)
        self.head_dim = head_dim
        self._table: DigestTable | None = None

    @property
    def slots(self) -> Sequence[Slot]:
        """Where the buckets go: bucket `i` into slot ``i % len(slots)``."""
        return self._pool.slots

    @property
    def whole(self) -> bool:
        """All buckets fit the slots at once: after `digest` they are all there."""
        return len(self.manifest.buckets) <= len(self.slots)

    @property
    def table(self) -> DigestTable:
        """The digests of the publication that runs. Raises `RuntimeError` before `digest`."""
        if self._table is None:
            raise RuntimeError("no digests yet: digest first")
        return self._table

    def begin(self) -> None:
        """A new publication: what was read for an earlier one no longer counts."""
        self._table = None

    def digest(self, version: int, engines: Mapping[str, EngineInfo], watch: Stopwatch) -> DigestTable:
        """Read every bucket and digest it, for `engines`. Collective. Within one publication it is read only once."""
        wanted = layouts_wanted(engines)
        if self._table is not None and wanted <= self._plan.wanted:
            return self._table
        if self._plan.wanted != wanted:
            self._plan = LivePlan(self.manifest, wanted, self.head_dim)
        live = LiveDigester(self._plan)
        digests: list[bytes] = []
        for index in range(len(self.manifest.buckets)):
            slot = self.slots[index % len(self.slots)]
            digests.append(self._gather(index, slot, watch))
            with watch.phase("digest"):
                live.feed(index, slot.memory)
        self._table = DigestTable(self.name, version, integrity.ALGORITHM, b"".join(digests), live.result())
        return self._table

    def refill(self, index: int, watch: Stopwatch) -> None:
        """Read bucket `index` once more into its slot. Collective. Raises `WeightsDiffer` if it is another."""
        found = self._gather(index, self.slots[index % len(self.slots)], watch)
        expected = self.table.of_bucket(self.manifest.buckets[index])
        if found == expected:
            return
        size = integrity.DIGEST_BYTES
        raise WeightsDiffer(
            [
                tensor.name
                for at, tensor in enumerate(self.manifest.tensors_of(index))
                if found[at * size : (at + 1) * size] != expected[at * size : (at + 1) * size]
            ]
        )

    def _gather(self, index: int, slot: Slot, watch: Stopwatch) -> bytes:
        with watch.phase("assemble"):
            self._ranks.tell(orders.Assemble(index))
            self._source.assemble(self.manifest, index, slot.memory)
        with watch.phase("digest"):
            memory = slot.memory[: self.manifest.buckets[index].nbytes]
            return integrity.digest_tensors(memory, self.manifest.offsets_of(index))
