"""A group that moves nothing and copies that are made, with a note of all that happens, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence

import numpy as np
import torch

from weightbus.dataplane.copy.copy_engine import PreparedCopies, TorchCopyEngine, WaitStage, no_wait
from weightbus.dataplane.copy.copy_table import AXES, CopyTable
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.tensors.shards import DTYPES, Column
from weightbus.dataplane.transports.sends.p2p_group import P2PChunk

Row = tuple[int, int, int, int, int]


class NotedGroup:
    """An exchange."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.chunks: list[P2PChunk] = []

    def post(self, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]) -> _Noted:
        number = sum(each.startswith("post") for each in self.notes)
        self.notes.append(f"post {number}")
        self.chunks += [*sends, *receives]
        return _Noted(self.notes, number)

    @contextlib.contextmanager
    def lane(self) -> Generator[None]:
        self.notes.append("in")
        yield
        self.notes.append("out")

    def settle(self) -> None:
        self.notes.append("settle")


class _Noted:
    def __init__(self, notes: list[str], number: int) -> None:
        self._notes, self._number = notes, number

    def wait(self, deadline: Deadline) -> None:
        deadline.check("it")
        self._notes.append(f"wait {self._number}")


class _Copies:
    def __init__(self, copies: PreparedCopies, notes: list[str], name: str) -> None:
        self._copies, self._notes, self._name = copies, notes, name
        self.fallback_reason = ""

    @property
    def busy(self) -> bool:
        return self._copies.busy

    def run(self, ready: WaitStage = no_wait) -> None:
        self._copies.run(ready)

    def launch(self, ready: WaitStage = no_wait) -> None:
        self._notes.append(f"copy {self._name}")
        self._copies.launch(ready)

    def move_source(self, source: torch.Tensor | None) -> None:
        self._copies.move_source(source)

    def close(self) -> None:
        self._notes.append(f"close {self._name}")
        self._copies.close()


class NotedEngine(TorchCopyEngine):
    """Its copies say when they are launched and closed."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def prepare_copies(  # type: ignore[override]
        self,
        table: CopyTable,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        stages: Column | None = None,
    ) -> PreparedCopies:
        """All rows."""
        return _Copies(super().prepare_copies(table, sources, targets, stages), self._notes, "all")

    def prepare_parts(  # type: ignore[override]
        self, table: CopyTable, parts: Column, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> Mapping[int, PreparedCopies]:
        """Each part by itself."""
        found = super().prepare_parts(table, parts, sources, targets)
        return {part: _Copies(each, self._notes, str(part)) for part, each in found.items()}


def byte_rows(*rows: Row) -> CopyTable:
    """Runs of bytes: each its source, the byte of it, its target, the byte of that, and how many there are."""
    source, source_at, target, target_at, run = np.array(rows, np.int64).reshape(-1, 5).T
    kind, ones = np.full(len(rows), DTYPES.index("uint8")), np.ones((len(rows), AXES), np.int64)
    return CopyTable(
        source, target, source_at, target_at, kind, kind, run, ones, np.zeros_like(ones), np.zeros_like(ones)
    )


def lies_in(part: torch.Tensor, memory: Sequence[torch.Tensor]) -> bool:
    """All of its bytes are bytes of one of these."""
    first, last = part.data_ptr(), part.data_ptr() + part.numel()
    return any(each.data_ptr() <= first and last <= each.data_ptr() + each.numel() for each in memory)
