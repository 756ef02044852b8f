"""Quantizes many weights in place of storage: with torch on a CPU, in one pass of a Triton kernel on a GPU.

`prepare_tasks` is slow and happens once for a plan; a round waits for `run` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from . import quantize_torch
from .schemes import Scheme


class DigestSums(NamedTuple):
    """Where a tensor's digest is summed, and where in it the quantized elements of a task lie.

    Sums are of the bytes as they are stored, never of the source. Tasks that share a sum are prepared together.
    """

    lanes: torch.Tensor
    """(tensors, 2) int64 on the tasks' device."""
    number: int
    """Row of the tensor."""
    at: int
    """Index in the packed tensor of the first word."""
    step: int
    """Words from one row to the next."""


class QuantizeTask(NamedTuple):
    """A weight, or a part of one on the scheme's grain, and its outputs. All of it may be strided."""

    scheme: Scheme
    weight: torch.Tensor
    """(rows, columns), as it is kept."""
    served: torch.dtype
    """The dtype in which it would be served unquantized; values are rounded to it first."""
    outs: tuple[torch.Tensor, ...]
    """Its parts but ``weight_shape``, in the order of `Scheme.parts`."""
    sums: DigestSums | None = None
    """Of the first output; where `fused_digests.word_layout` allows."""


class PreparedTasks(Protocol):
    """Tasks bound to memory. Used from one thread."""

    @property
    def keeps(self) -> bool:
        """True when it keeps references to the memory; otherwise it only knows addresses."""
        ...

    def run(self) -> None:
        """Quantize every weight as it is now, and set its sums. On a GPU on the current stream."""
        ...


def prepare_tasks(tasks: Sequence[QuantizeTask], device: torch.device) -> PreparedTasks:
    """Bind tasks with memory on `device`."""
    if device.type == "cuda":
        from .quantize_cuda import CudaTasks  # noqa: PLC0415  Triton is there where a GPU is

        return CudaTasks(tasks)
    return TorchTasks(tasks)


class TorchTasks:
    """`PreparedTasks` by torch, one task after another."""

    keeps = True

    def __init__(self, tasks: Sequence[QuantizeTask]) -> None:
        self._tasks = tuple(tasks)
        self._sums = ClearedSums(tasks)

    @torch.no_grad()
    def run(self) -> None:
        """Quantize."""
        self._sums.clear()
        for task in self._tasks:
            run_task(task)


def run_task(task: QuantizeTask) -> None:
    """One task with torch, on any device."""
    quantize_torch.quantize(task.scheme, task.weight.to(task.served), task.outs)
    if task.sums is not None:
        lanes = task.sums.lanes[task.sums.number]
        quantize_torch.add_sums(task.outs[0], task.sums.at, task.sums.step, lanes)


class ClearedSums:
    """The sums that tasks add to, set to zero before each run."""

    def __init__(self, tasks: Sequence[QuantizeTask]) -> None:
        sums = [task.sums for task in tasks if task.sums is not None]
        self._lanes = sums[0].lanes if sums else None
        numbers = sorted({each.number for each in sums})
        self._rows = torch.tensor(numbers, device=sums[0].lanes.device) if sums else None

    def clear(self) -> None:
        """Set them to zero, on the current stream."""
        if self._lanes is not None and self._rows is not None:
            self._lanes.index_fill_(0, self._rows, 0)
