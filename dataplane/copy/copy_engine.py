"""Carries out tables of copies, and digests what they wrote. One implementation for each kind of device.

`prepare` is slow and happens once for a plan: it may build pointer tables, streams or a CUDA graph. `run` is what a
paused server waits for: no work that grows with the number of rows may happen in Python there, but on the CPU twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ..tensors import Column
from .box_digests import BoxTable, Lanes
from .copy_table import CopyTable

WaitStage = Callable[[int], None]
"""Called before the copies of a stage are launched, stage by stage: returns when all that they read is there."""


def no_wait(stage: int) -> None:
    """Implements `WaitStage`: all of it is there."""
    del stage


class PreparedCopies(Protocol):
    """A table bound to memory. Used from one thread."""

    fallback_reason: str
    """Why it is slower than it could be; empty where it is not."""

    @property
    def busy(self) -> bool:
        """Something that was launched is under way."""
        ...

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row. Returns when the bytes are in the targets, and other streams may read them.

        Begins when no stream reads the targets any more: a paused server may still compute its last batch. What `ready`
        raises leaves stages out; of those before, nothing is under way any more.
        """
        ...

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, in the order of the current stream. Returns at once where the device works by itself."""
        ...

    def move_source(self, source: torch.Tensor | None) -> None:
        """The only region that is copied from lies here now; None: nowhere, until it is told again.

        Costs much less than to bind the table anew. Raises `ValueError` where addresses are aligned otherwise than
        before, to 16 bytes.
        """
        ...

    def close(self) -> None:
        """Let go of the memory; `run` must not be called again."""
        ...


class PreparedDigest(Protocol):
    """A table of boxes bound to memory. Used from one thread."""

    def launch(self) -> None:
        """Begin to sum up every group, in the order of the current stream. Returns at once where the device can."""
        ...

    def lanes(self) -> Lanes:
        """(2, groups) uint64: the sums of both lanes of every group, as of the last `launch`. Waits for it."""
        ...

    def run(self) -> Lanes:
        """`launch` and `lanes`: the sums as they are now. One pass over the memory."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class CopyEngine(Protocol):
    """Binds tables to memory.

    Regions are 1-D uint8 tensors over whole allocations (sources) or over a target's memory, numbered as in the table.
    Source regions may lie on another device than the target ones; they are read only.
    """

    def prepare_copies(
        self,
        table: CopyTable,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        stages: Column | None = None,
    ) -> PreparedCopies:
        """Bind a table whose bounds `CopyTable.check` has proven.

        `stages`, (rows,), says which rows are copied before which, and together; without them all are one stage, 0.
        """
        ...

    def prepare_parts(
        self, table: CopyTable, parts: Column, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> Mapping[int, PreparedCopies]:
        """Bind a table of which each part is launched by itself; by number, (rows,) `parts` says which is whose."""
        ...

    def prepare_digest(self, table: BoxTable, regions: Sequence[torch.Tensor]) -> PreparedDigest:
        """Bind a table of boxes whose bounds `BoxTable.check` has proven."""
        ...


def split_by_stage(table: CopyTable, stages: Column) -> dict[int, CopyTable]:
    """The rows of each stage, (rows,) `stages`, in the order of the stages and there in that of the table."""
    numbers: list[int] = np.unique(stages).tolist()
    return {number: table.take(np.flatnonzero(stages == number)) for number in numbers}


class StagedCopies:
    """Implements `PreparedCopies` with a table for each stage, on one stream."""

    def __init__(
        self, stages: Mapping[int, PreparedCopies], device: torch.device | None = None, fallback_reason: str = ""
    ) -> None:
        """`device` is the GPU of the targets; without one they are in host memory."""
        self._stages = dict(sorted(stages.items()))
        self._device = device if device is not None and device.type == "cuda" else None
        self.fallback_reason = fallback_reason

    @property
    def busy(self) -> bool:
        """Something that was launched is under way. Any stage can say it: the stream is that of all."""
        return next((each.busy for each in self._stages.values()), False)

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, once whatever the device still computes from the targets has ended, on any stream."""
        if self._device is None:
            return self.launch(ready)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            try:
                return self.launch(ready)
            finally:
                torch.cuda.current_stream().synchronize()

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, in the order of the current stream."""
        for stage, copies in self._stages.items():
            ready(stage)
            copies.launch()

    def move_source(self, source: torch.Tensor | None) -> None:
        """The only region that is copied from lies here now."""
        for copies in self._stages.values():
            copies.move_source(source)

    def close(self) -> None:
        """Let go of the memory."""
        for copies in self._stages.values():
            copies.close()
        self._stages = {}
