"""The comparison of replicas on all ranks before a version is published.

Layouts are exchanged once. A comparison reads what each rank shares with others, where it lies, and gathers one table
of digests from every rank: the number of messages depends on neither tensors nor replicas.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from weightbus.control.log import get_log
from weightbus.dataplane.copy import copy_engine_for
from weightbus.dataplane.errors import ManifestError, Unsupported
from weightbus.dataplane.reshard import ReplicaUnits, digest_replicas, find_replicas
from weightbus.dataplane.tensors import Shards

from ..export import Exportable
from ..machine import DifferingReplicas, OnDifference, ReplicasCompared
from ..settings import TrainerSettings
from ..source import Source
from .rank_commands import CommandedRanks, CompareReplicas

_log = get_log(__name__)


class _Found(msgspec.Struct, frozen=True):
    """What one rank says in a comparison."""

    table: bytes = b""
    """Digests of its units."""
    error: str = ""
    """Why it could not digest them."""


_FOUND: Final = msgspec.msgpack.Decoder(_Found)


class ReplicaCheck:
    """One rank's part in comparisons of a source's replicas. Calls are collective, but for `due` and `refusal`."""

    def __init__(self, source: Source, settings: TrainerSettings) -> None:
        """`source` is that of the trained weights, before anything quantizes them."""
        self._source = source if isinstance(source, Exportable) else None
        self._tensors = tuple(source.tensors())
        self._ranks = CommandedRanks(source)
        self._policy, self._every = settings.replicas, settings.replicas_every
        self._publications = 0
        """Number of publications that `due` was asked about."""
        self._all: ReplicaUnits | None = None
        """Units of all ranks, once layouts were exchanged."""
        self._own: ReplicaUnits | None = None

    def due(self) -> bool:
        """Count one publication; True if its replicas are to be compared. Rank 0 only."""
        due = self._publications % self._every == 0
        self._publications += 1
        able = self._policy is not OnDifference.OFF and self._source is not None
        return due and able and (self._all is None or len(self._all.unit) > 0)

    def command(self) -> ReplicasCompared | None:
        """Have all ranks compare. Rank 0 only; the others call `compare` when they hear of it."""
        self._ranks.tell(CompareReplicas())
        return self.compare()

    def compare(self) -> ReplicasCompared | None:
        """Compare. Returns what was found on rank 0; None on other ranks, and where nothing could be compared.

        Raises a `SourceError`, on every rank alike, if the weights cannot be read.
        """
        source = self._source
        if source is None:
            return None
        began = time.monotonic()
        if self._all is None:
            shards = source.local_shards(self._tensors)
            self._all = find_replicas(Shards.decode(source.collect(shards.encode()), self._tensors))
            self._own = self._all.of_rank(source.rank)
        if not len(self._all.unit) or self._own is None:
            return None
        memory = source.memory()
        try:
            mine = _Found(_digest(self._own, memory))
        except (ManifestError, Unsupported, RuntimeError, ValueError) as error:
            mine = _Found(error=f"rank {source.rank}: {error}")
        found = [_FOUND.decode(each) for each in source.collect(msgspec.msgpack.encode(mine))]
        if source.rank:
            return None
        if errors := [each.error for each in found if each.error]:
            _log.warning("replicas_not_compared", reason=errors[0])
            return None
        differing, first = self._all.differing([each.table for each in found])
        return ReplicasCompared(
            parts=int(self._all.unit[-1]) + 1,
            seconds=time.monotonic() - began,
            differing=differing,
            first=tuple(DifferingReplicas(self._tensors[each.index].name, each.ranks) for each in first),
        )

    def refusal(self, found: ReplicasCompared | None, version: int) -> str:
        """Why `version` must not be published after what a comparison found; empty if it may. Logs a difference."""
        if found is None:
            return ""
        if not found.differing:
            _log.debug("replicas_equal", version=version, parts=found.parts, seconds=round(found.seconds, 3))
            return ""
        first = [str(each) for each in found.first]
        _log.warning("replicas_differ", version=version, tensors=found.differing, first=first)
        return f"{found}; replicas = refuse" if self._policy is OnDifference.REFUSE else ""


def _digest(own: ReplicaUnits, memory: Sequence[torch.Tensor]) -> bytes:
    """The digests of this rank's units, behind all writes of a training step."""
    used = {int(storage) for storage in own.shards.storage}
    devices = {memory[storage].device for storage in used}
    if len(devices) > 1:
        raise Unsupported(f"its replicas lie on several devices ({', '.join(sorted(map(str, devices)))})")
    device = next(iter(devices), torch.device("cpu"))
    if device.type != "cuda":
        return digest_replicas(own, memory, device, copy_engine_for(device))
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        return digest_replicas(own, memory, device, copy_engine_for(device))
