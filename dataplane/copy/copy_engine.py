"""The interface of copies and digests, one implementation for each kind of device, and copies in stages.

`prepare_copies` is slow and happens once for a plan: it may build pointer tables, streams or a CUDA graph. A paused
server waits for `run`: no work that grows with the number of rows happens in Python there, but on a CPU.
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
"""Called before the copies of a stage are launched, in the order of stages.

Blocks until all that they read is there.
"""


def no_wait(stage: int) -> None:
    """A `WaitStage` for sources that are complete."""
    del stage


class PreparedCopies(Protocol):
    """A copy table bound to memory. Used from one thread."""

    fallback_reason: str
    """Why copies are slower than they could be; empty otherwise."""

    @property
    def busy(self) -> bool:
        """True while launched copies are running."""
        ...

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row. Returns when the bytes are in the targets and other streams may read them.

        Begins when no stream reads the targets any more: a paused server may still compute its last batch. An exception
        of `ready` leaves the remaining stages out; none of those before is running any more.
        """
        ...

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, on the current stream. Asynchronous where the device is."""
        ...

    def move_source(self, source: torch.Tensor | None) -> None:
        """The only source region lies here now; None: nowhere, until the next call.

        Much cheaper than binding the table anew. Raises `ValueError` where the address is aligned otherwise than
        before, to 16 bytes.
        """
        ...

    def close(self) -> None:
        """Release the memory; `run` must not be called again."""
        ...


class PreparedDigest(Protocol):
    """A box table bound to memory. Used from one thread."""

    def launch(self) -> None:
        """Start to sum every group, on the current stream. Asynchronous where the device is."""
        ...

    def lanes(self) -> Lanes:
        """(2, groups) uint64: both lanes of every group, as of the last `launch`. Blocks until they are there."""
        ...

    def run(self) -> Lanes:
        """`launch` and `lanes`: the sums of the present contents, in one pass over the memory."""
        ...

    def close(self) -> None:
        """Release the memory."""
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
        """Bind a table that has passed `CopyTable.check`.

        `stages`, (rows,), are launched in ascending order; without them all rows are of stage 0.
        """
        ...

    def prepare_parts(
        self, table: CopyTable, parts: Column, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> Mapping[int, PreparedCopies]:
        """Bind a table whose parts are launched one by one: by number, as `parts`, (rows,), gives it."""
        ...

    def prepare_digest(self, table: BoxTable, regions: Sequence[torch.Tensor]) -> PreparedDigest:
        """Bind a box table that has passed `BoxTable.check`."""
        ...


def split_by_stage(table: CopyTable, stages: Column) -> dict[int, CopyTable]:
    """The rows of each stage of `stages`, (rows,), ascending; within a stage in the order of the table."""
    numbers: list[int] = np.unique(stages).tolist()
    return {number: table.take(np.flatnonzero(stages == number)) for number in numbers}


class StagedCopies:
    """`PreparedCopies` with a table for each stage, on one stream.

    A stage is launched when its sources are there, while earlier ones are running.
    """

    def __init__(
        self, stages: Mapping[int, PreparedCopies], device: torch.device | None = None, fallback_reason: str = ""
    ) -> None:
        """`device` is the GPU of the targets; None for host memory."""
        self._stages = dict(sorted(stages.items()))
        self._device = device if device is not None and device.type == "cuda" else None
        self.fallback_reason = fallback_reason

    @property
    def busy(self) -> bool:
        """True while launched copies are running. All stages share a stream, so any one can tell."""
        return next((each.busy for each in self._stages.values()), False)

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, after all streams of the device have ended; blocks until done."""
        if self._device is None:
            return self.launch(ready)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            try:
                return self.launch(ready)
            finally:
                torch.cuda.current_stream().synchronize()

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, on the current stream."""
        for stage, copies in self._stages.items():
            ready(stage)
            copies.launch()

    def move_source(self, source: torch.Tensor | None) -> None:
        """The only source region has moved."""
        for copies in self._stages.values():
            copies.move_source(source)

    def close(self) -> None:
        """Release the memory."""
        for copies in self._stages.values():
            copies.close()
        self._stages = {}
