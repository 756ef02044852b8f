"""Copies and digests on a GPU: tables are cut into tiles once, and every round is one launch for each vector size.

Copy engines take long runs out of a peer's memory where streams are given for them (peer_copies.py). Rows that cast are
copied by torch, all in one call; few plans have any.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import numpy as np
import torch

from ..errors import CopyEnginesUnavailable
from ..tensors import Column
from .box_digests import BoxTable, Lanes
from .copy_engine import StagedCopies, WaitStage, no_wait, split_by_stage
from .copy_table import CopyTable
from .copy_torch import TorchCopies
from .memcpy_batch import CopyBatch, Mask, rows_for_copy_engines, split_into_runs
from .peer_copies import PeerCopies
from .tiles import SOURCE, VECTORS, Tiles, staged_tiles, word_tiles


class CudaCopyEngine:
    """`CopyEngine` for one GPU. Source regions may be a peer's memory that was opened for it."""

    def __init__(
        self,
        device: torch.device,
        streams: int = 0,
        remote: Collection[int] = (),
        library: ctypes.CDLL | None = None,
    ) -> None:
        """`remote` are addresses of peer memory; copy engines read it on `streams` streams, or the kernel if that is 0.

        `library` replaces libcuda in tests.
        """
        self._device = device
        self._streams = streams
        self._remote = frozenset(remote)
        self._library = library

    def prepare_copies(
        self,
        table: CopyTable,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        stages: Column | None = None,
    ) -> CudaCopies | StagedCopies | PeerCopies:
        """Bind a table."""
        stages = np.zeros(len(table), np.int64) if stages is None else stages
        by_engines: Mask = np.zeros(len(table), np.bool_)
        if self._streams and len(table):
            remote = np.array([each.data_ptr() in self._remote for each in sources], np.int64)
            by_engines = rows_for_copy_engines(table, remote)

        def kernel(rows: Mask) -> dict[int, CudaCopies]:
            return self.prepare_parts(table.take(np.flatnonzero(rows)), stages[rows], sources, targets)

        if not by_engines.any():
            return self._staged(kernel(~by_engines))
        long = np.flatnonzero(by_engines)
        try:
            runs = split_into_runs(table.take(long), _bases(sources), _bases(targets), stages[long])
            batch = CopyBatch(runs, self._streams, self._library)
        except CopyEnginesUnavailable as error:
            return self._staged(kernel(np.ones(len(table), np.bool_)), str(error))
        rest = kernel(~by_engines)
        return PeerCopies(self._device, batch, rest, lambda: kernel(by_engines), (*sources, *targets))

    def prepare_parts(
        self, table: CopyTable, parts: Column, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> dict[int, CudaCopies]:
        """Bind a table whose parts are launched one by one. All parts together cost as much as one."""
        order = np.argsort(parts, kind="stable")
        table, parts = table.take(order), parts[order]
        plain = np.flatnonzero(table.casts == 0)
        tiles: dict[int, list[Tiles]] = {}
        if len(plain):
            bases = _bases(sources), _bases(targets)
            tiles = staged_tiles(table.take(plain), parts[plain], *bases, self._device)
        return {
            part: CudaCopies(self._device, rows, sources, targets, tiles=tiles.get(part, []))
            for part, rows in split_by_stage(table, parts).items()
        }

    def _staged(self, stages: dict[int, CudaCopies], fallback_reason: str = "") -> CudaCopies | StagedCopies:
        """Copies that the kernel alone executes."""
        only = stages.get(0) if len(stages) == 1 else None
        if only is None:
            return StagedCopies(stages, self._device, fallback_reason)
        only.fallback_reason = fallback_reason
        return only

    def prepare_digest(self, table: BoxTable, regions: Sequence[torch.Tensor]) -> CudaDigest:
        """Bind a table of boxes."""
        return CudaDigest(self._device, table, regions)


class CudaCopies:
    """`PreparedCopies` by kernel."""

    def __init__(
        self,
        device: torch.device,
        table: CopyTable,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        tiles: list[Tiles],
    ) -> None:
        """`tiles` are those of rows without casts."""
        self.fallback_reason = ""
        self._device = device
        self._casts = TorchCopies(table.take(np.flatnonzero(table.casts)), sources, targets)
        self._tiles = tiles
        self._memory = (tuple(sources), tuple(targets))
        self._source_at = sources[0].data_ptr() if sources else 0

    @property
    def busy(self) -> bool:
        """True while launched copies are running."""
        return not torch.cuda.current_stream(self._device).query()

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, after all streams of the device have ended; blocks until done."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self.launch(ready)
            torch.cuda.current_stream().synchronize()

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, on the current stream of this device."""
        from .copy_triton import copy  # noqa: PLC0415  triton is not there without a GPU

        ready(0)
        with torch.cuda.device(self._device):
            for vector, table in self._tiles:
                copy(table, vector)
            self._casts.launch()

    def move_source(self, source: torch.Tensor | None) -> None:
        """The only source region has moved. Raises `ValueError` for another alignment."""
        if source is not None:
            moved = source.data_ptr() - self._source_at
            if moved % VECTORS[0]:
                raise ValueError(f"what lay at {self._source_at:#x} cannot be followed to {source.data_ptr():#x}")
            if moved:
                for _, table in self._tiles:
                    table[:, SOURCE] += moved
            self._source_at += moved
        self._casts.move_source(source)
        self._memory = ((source,) if source is not None else (), self._memory[1])

    def close(self) -> None:
        """Release the memory."""
        self._tiles, self._memory = [], ((), ())
        self._casts.close()


class CudaDigest:
    """`PreparedDigest` by kernel."""

    def __init__(self, device: torch.device, table: BoxTable, regions: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._tiles = word_tiles(table, _bases(regions), device) if len(table) else []
        self._lanes = torch.zeros((table.groups, 2), dtype=torch.int64, device=device)
        self._memory = regions

    def launch(self) -> None:
        """Start to sum every group, on the current stream of this device."""
        from .copy_triton import accumulate  # noqa: PLC0415  triton is not there without a GPU

        with torch.cuda.device(self._device):
            self._lanes.zero_()
            for item, table in self._tiles:
                accumulate(table, item, self._lanes)

    def lanes(self) -> Lanes:
        """The sums of the last `launch`; blocks until they are there."""
        from .copy_triton import as_lanes  # noqa: PLC0415  triton is not there without a GPU

        with torch.cuda.device(self._device):
            return as_lanes(self._lanes)

    def run(self) -> Lanes:
        """`launch` and `lanes`."""
        self.launch()
        return self.lanes()

    def close(self) -> None:
        """Release the memory."""
        self._tiles, self._memory = [], ()


def _bases(regions: Sequence[torch.Tensor]) -> Column:
    return np.array([region.data_ptr() for region in regions], np.int64)
