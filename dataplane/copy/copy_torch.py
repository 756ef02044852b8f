"""Copies and digests with torch and numpy: the implementation for CPUs, and the reference for kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ..digest import mix_words
from ..tensors import DTYPES, Column
from .box_digests import WORD_BYTES, BoxTable, Lanes
from .copy_engine import PreparedCopies, StagedCopies, WaitStage, no_wait, split_by_stage
from .copy_table import CopyTable

_UNSIGNED: Final[dict[int, type[np.unsignedinteger]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK_WORDS: Final = 64 * 1024


class TorchCopyEngine:
    """`CopyEngine` with one torch view for each row and side, made once."""

    def prepare_copies(
        self,
        table: CopyTable,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        stages: Column | None = None,
    ) -> PreparedCopies:
        """Bind a table."""
        if stages is None:
            return TorchCopies(table, sources, targets)
        return StagedCopies(self.prepare_parts(table, stages, sources, targets))

    def prepare_parts(
        self, table: CopyTable, parts: Column, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> dict[int, TorchCopies]:
        """Bind a table whose parts are launched one by one."""
        return {at: TorchCopies(rows, sources, targets) for at, rows in split_by_stage(table, parts).items()}

    def prepare_digest(self, table: BoxTable, regions: Sequence[torch.Tensor]) -> TorchDigest:
        """Bind a table of boxes, on a CPU."""
        return TorchDigest(table, regions)


class TorchCopies:
    """`PreparedCopies` by torch."""

    def __init__(self, table: CopyTable, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self.fallback_reason = ""
        self._rows: list[list[int]] = table.numbers().tolist()
        self._from = self._views(sources)
        self._to: list[torch.Tensor] = []
        for _, target, _, target_at, _, target_dtype, run, *shape in self._rows:
            self._to.append(_view(targets[target], target_at, target_dtype, (*shape[:3], run), shape[6:]))

    @property
    def busy(self) -> bool:
        """False: a CPU copies synchronously."""
        return False

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row."""
        self.launch(ready)
        if self._to and self._to[0].device.type == "cuda":
            torch.cuda.current_stream(self._to[0].device).synchronize()

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, on the current stream."""
        ready(0)
        if self._to:
            torch._foreach_copy_(self._to, self._from)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def move_source(self, source: torch.Tensor | None) -> None:
        """The only source region has moved. Raises `ValueError` for another alignment."""
        self._from = [] if source is None else self._views([source])

    def close(self) -> None:
        """Release the memory."""
        self._from, self._to = [], []

    def _views(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for source, _, source_at, _, source_dtype, _, run, *shape in self._rows:
            found.append(_view(sources[source], source_at, source_dtype, (*shape[:3], run), shape[3:6]))
        return found


class TorchDigest:
    """`PreparedDigest` by numpy."""

    def __init__(self, table: BoxTable, regions: Sequence[torch.Tensor]) -> None:
        self._table = table
        self._regions: list[npt.NDArray[np.uint8]] = [region.numpy() for region in regions]
        self._lanes: Lanes = np.zeros((2, table.groups), np.uint64)

    def launch(self) -> None:
        """Sum every group; synchronous."""
        table = self._table
        lanes = np.zeros((2, table.groups), np.uint64)
        for row in range(len(table)):
            for words, at in _words(table, row, self._regions[int(table.region[row])]):
                lanes[:, table.group[row]] += mix_words(words, at)
        self._lanes = lanes

    def lanes(self) -> Lanes:
        """The sums of the last `launch`."""
        return self._lanes

    def run(self) -> Lanes:
        """`launch` and `lanes`."""
        self.launch()
        return self.lanes()

    def close(self) -> None:
        """Release the memory."""
        self._regions = []


def _view(region: torch.Tensor, at: int, dtype: int, shape: Sequence[int], step: Sequence[int]) -> torch.Tensor:
    """The elements of one row on one side."""
    kind: torch.dtype = getattr(torch, DTYPES[dtype])
    begin = int(region.storage_offset()) + at
    if begin % kind.itemsize or any(each % kind.itemsize for each in step):
        raise ValueError(f"a copy of {kind} begins at byte {begin}, not on a multiple of its size")
    strides = (*(each // kind.itemsize for each in step), 1)
    empty = torch.empty(0, dtype=kind, device=region.device)
    return empty.set_(region.untyped_storage(), begin // kind.itemsize, tuple(shape), strides)


def _words(
    table: BoxTable, row: int, region: npt.NDArray[np.uint8]
) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]]:
    """The words of one row and their places in the packed tensor, a cache-sized block at a time."""
    item, words = int(table.item[row]), int(table.words[row])
    per_word = WORD_BYTES // item
    grid, step = tuple(table.grid[row].tolist()), tuple(table.step[row].tolist())
    elements: npt.NDArray[np.unsignedinteger] = np.ndarray(
        (*grid, words * per_word), _UNSIGNED[item], region, int(table.at[row]), (*step, int(table.item_step[row]))
    )
    places = np.indices(grid).reshape(len(grid), -1)
    runs: npt.NDArray[np.int64] = int(table.word_at[row]) + table.word_step[row] @ places
    flat = elements.reshape(len(runs), -1) if len(runs) == 1 or words <= _BLOCK_WORDS else None
    rows_at_once = max(1, _BLOCK_WORDS // words)
    for low in range(0, len(runs), rows_at_once):
        high = min(low + rows_at_once, len(runs))
        block = flat[low:high] if flat is not None else elements[np.unravel_index(low, grid)][None]
        for begin in range(0, words, _BLOCK_WORDS):
            end = min(begin + _BLOCK_WORDS, words)
            packed = np.ascontiguousarray(block[:, begin * per_word : end * per_word]).view(np.uint64)
            at = runs[low:high, None] + np.arange(begin, end)
            yield packed.reshape(-1), at.reshape(-1)
