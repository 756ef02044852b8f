"""Copies in stages: each is launched when what it reads is there, while those before it are under way."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..tensors import Column
from .copy_engine import PreparedCopies, WaitStage, no_wait
from .copy_table import CopyTable


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
