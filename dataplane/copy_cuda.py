"""Copies and digests on a GPU: tables are cut into tiles once, and every round is one launch for each vector size.

Rows that cast are done by torch, all in one call; few recordings have any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .boxes import Column
from .copy_engine import Lanes
from .copy_table import CopyTable
from .copy_torch import TorchCopies
from .digest_table import BoxTable
from .tiles import copy_tiles, word_tiles


class CudaEngine:
    """Implements `CopyEngine` for one GPU. Sources may be a peer's memory, opened for this GPU or for the peer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copies(self, table: CopyTable, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> CudaCopies:
        """Bind a table."""
        return CudaCopies(self._device, table, sources, targets)

    def digest(self, table: BoxTable, regions: Sequence[torch.Tensor]) -> CudaDigest:
        """Bind a table of boxes."""
        return CudaDigest(self._device, table, regions)


class CudaCopies:
    """Implements `PreparedCopies`. Rows are copied by the device for which their source was opened."""

    def __init__(
        self,
        device: torch.device,
        table: CopyTable,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        self._device = device
        plain = table.take(np.flatnonzero(table.casts == 0))
        self._casts = TorchCopies(table.take(np.flatnonzero(table.casts)), sources, targets)
        self._tiles: list[tuple[torch.device, int, torch.Tensor]] = []
        for at, rows in _rows_by_device(plain, sources).items():
            tiles = copy_tiles(plain.take(rows), _bases(sources), _bases(targets))
            self._tiles += [(at, each.vector, _on(at, each.packed())) for each in tiles]
        self._memory = (sources, targets)

    def run(self) -> None:
        """Copy every row, once whatever the device still computes from the targets has ended, on any stream."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self.launch()
            for at in {self._device, *(at for at, _, _ in self._tiles)}:
                torch.cuda.current_stream(at).synchronize()

    def launch(self) -> None:
        """Copy every row, in the order of the current stream of the device that copies it."""
        from .copy_triton import copy  # noqa: PLC0415  triton is not there without a GPU

        for at, vector, table in self._tiles:
            with torch.cuda.device(at):
                copy(table, vector)
        with torch.cuda.device(self._device):
            self._casts.launch()

    def close(self) -> None:
        """Let go of the memory."""
        self._tiles, self._memory = [], ((), ())
        self._casts.close()


class CudaDigest:
    """Implements `PreparedDigest`."""

    def __init__(self, device: torch.device, table: BoxTable, regions: Sequence[torch.Tensor]) -> None:
        self._device = device
        tiles = word_tiles(table, _bases(regions)) if len(table) else []
        self._tiles = [(each.item, _on(device, each.packed())) for each in tiles]
        self._lanes = torch.zeros((table.groups, 2), dtype=torch.int64, device=device)
        self._memory = regions

    def run(self) -> Lanes:
        """The sums of both lanes of every group."""
        from .copy_triton import accumulate, as_lanes  # noqa: PLC0415  triton is not there without a GPU

        with torch.cuda.device(self._device):
            self._lanes.zero_()
            for item, table in self._tiles:
                accumulate(table, item, self._lanes)
            return as_lanes(self._lanes)

    def close(self) -> None:
        """Let go of the memory."""
        self._tiles, self._memory = [], ()


def _rows_by_device(table: CopyTable, sources: Sequence[torch.Tensor]) -> dict[torch.device, Column]:
    devices = sorted({source.device for source in sources}, key=str)
    numbers = np.array([devices.index(source.device) for source in sources], np.int64)
    of_rows = numbers[table.source]
    return {device: rows for at, device in enumerate(devices) if len(rows := np.flatnonzero(of_rows == at))}


def _on(device: torch.device, table: Column) -> torch.Tensor:
    return torch.from_numpy(table).to(device)  # pyright: ignore[reportUnknownMemberType]


def _bases(regions: Sequence[torch.Tensor]) -> Column:
    return np.array([region.data_ptr() for region in regions], np.int64)
