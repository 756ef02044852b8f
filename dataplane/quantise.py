"""Quantises many weights where they lie: with torch on a CPU, in one pass of a Triton kernel on a GPU.

Preparing is slow and happens once for a plan; `run` is what a round waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from . import quantise_torch
from .quantisation import Scheme


class Task(NamedTuple):
    """A weight, or a part of one on the scheme's grain, and where its parts go. All of it may be strided."""

    scheme: Scheme
    weight: torch.Tensor
    """(rows, columns), as it is kept."""
    served: torch.dtype
    """In which it would be served unquantised; values are rounded to it first."""
    outs: tuple[torch.Tensor, ...]
    """Its parts but ``weight_shape``, in the order of `Scheme.parts`."""


class PreparedTasks(Protocol):
    """Tasks bound to memory. Used from one thread."""

    @property
    def keeps(self) -> bool:
        """It keeps the memory that it is bound to; otherwise it only knows where that is."""
        ...

    def run(self) -> None:
        """Quantise every weight as it is now. On a GPU in the order of the current stream."""
        ...


def prepare(tasks: Sequence[Task], device: torch.device) -> PreparedTasks:
    """Bind tasks whose memory is on `device`."""
    if device.type == "cuda":
        from .quantise_cuda import CudaTasks  # noqa: PLC0415  Triton is there where a GPU is

        return CudaTasks(tasks)
    return TorchTasks(tasks)


class TorchTasks:
    """Implements `PreparedTasks`, one task after another."""

    keeps = True

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)

    @torch.no_grad()
    def run(self) -> None:
        """Quantise."""
        for task in self._tasks:
            quantise_torch.quantise(task.scheme, task.weight.to(task.served), task.outs)
