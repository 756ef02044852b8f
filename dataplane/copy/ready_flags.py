"""Ready flags: copies that read memory while it is made, stage by stage.

A trainer rank makes quantized weights from the beginning of its arena on, and its device writes a flag behind each
part: the number of the round. Flags lie in the memory that is read, so a reader needs no message. Until a flag shows
the round of the offer, the part is that of an earlier round, or a mixture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from ..errors import ManifestError, StaleSession
from ..memory import READY_FLAG_BYTES, ArenaRegion
from ..processes import Deadline
from ..tensors import Column
from .copy_table import AXES, ITEM_SIZES, CopyTable

_LOOK_S: Final = 0.0001
"""Seconds between looks."""
_SPIN_S: Final = 0.00005
"""Seconds. A look at a GPU's memory takes less, unless the link is busy."""
_ALIVE_S: Final = 0.01
"""Seconds between looks whether the making rank is alive."""

NeededParts = tuple[tuple[int, int], ...]
"""(rank, parts): the first `parts` parts of the rank's arena are read."""


def stages_of_rows(table: CopyTable, made: Mapping[int, ArenaRegion]) -> Column:
    """(rows,): the number of parts that must be there before each row is copied. `made` is by source region.

    0 where a row reads no arena. A row that crosses parts needs all of them, and one that reaches beyond the last part
    needs every part.
    """
    stages = np.zeros(len(table), np.int64)
    reach = (table.grid - 1) * table.source_step
    first = table.source_at + np.minimum(reach, 0).sum(axis=1)
    last = table.source_at + np.maximum(reach, 0).sum(axis=1) + table.run * ITEM_SIZES[table.source_dtype]
    assert reach.shape[1] == AXES
    for number, each in made.items():
        ends = np.array(each.ends, np.int64)
        reads = (table.source == number) & (first < ends[-1]) & (last > each.begin)
        until: Column = np.minimum(last, ends[-1])
        needed: Column = np.searchsorted(ends, until, side="left")
        stages[reads] = needed[reads] + 1
    return stages


def needed_parts_by_stage(table: CopyTable, stages: Column, ranks: Mapping[int, int]) -> dict[int, NeededParts]:
    """The parts that each stage reads. `ranks` are those of the source regions with an arena."""
    pairs: list[list[int]] = np.unique(np.stack([stages, table.source], axis=1), axis=0).tolist()
    found: dict[int, set[tuple[int, int]]] = {}
    for stage, number in pairs:
        if stage:
            found.setdefault(stage, set()).add((ranks[number], stage))
    return {stage: tuple(sorted(each)) for stage, each in found.items()}


def ready_flags_in(region: torch.Tensor, made: ArenaRegion) -> torch.Tensor:
    """(parts,) int64: the flags in a region, 1-D uint8. Raises `ManifestError` where they lie outside of it."""
    end = made.flags + READY_FLAG_BYTES * len(made.ends)
    if made.flags < 0 or made.flags % READY_FLAG_BYTES or end > len(region) or not made.ends:
        raise ManifestError(f"{len(made.ends)} flags at byte {made.flags} are not in a region of {len(region)} bytes")
    return region[made.flags : end].view(torch.int64)


class ReadyFlags:
    """The flags of all ranks that a worker reads from. Used from one thread."""

    def __init__(self, flags: Mapping[int, torch.Tensor], alive: Callable[[], None]) -> None:
        """`flags`, (parts,) int64, are by rank, on one device. `alive` raises where a rank is gone."""
        self._flags = dict(flags)
        self._alive = alive
        self._wanted: Callable[[], None] = alive
        self._rounds: Mapping[int, int] = {}
        self._there: dict[int, int] = {}
        self._deadline = Deadline(0.0)
        self.seconds = 0.0
        """Seconds waited since `begin` without a running copy."""
        device = next((each.device for each in self._flags.values()), torch.device("cpu"))
        self._far = _DeviceFlags(self._flags, device) if device.type == "cuda" else None

    def begin(self, rounds: Mapping[int, int], within_s: float, wanted: Callable[[], None]) -> None:
        """Start a round: each rank's flags have to show its number within `within_s` seconds. 0: all parts are there.

        `wanted` raises when the round is called off.
        """
        self._rounds, self._deadline, self.seconds = rounds, Deadline(within_s), 0.0
        self._wanted = wanted
        self._there = {rank: len(each) for rank, each in self._flags.items() if not rounds.get(rank)}

    def wait(self, needs: Sequence[tuple[int, int]], busy: Callable[[], bool]) -> None:
        """Block until these parts are there; `busy` says whether copies are running meanwhile.

        Raises `PeerLost` for a rank that is gone, `StaleSession` for one that makes a newer round, the errors of
        `wanted`, and `DeadlineExceeded` with the missing part.
        """
        looked_at = time.perf_counter()
        asked_at = looked_at
        while (rank := self._missing(needs)) is not None:
            of = len(self._flags[rank])
            self._deadline.check(f"part {self._there.get(rank, 0) + 1} of {of} that trainer rank {rank} makes")
            now = time.perf_counter()
            if now - asked_at >= _ALIVE_S:
                asked_at = now
                self._alive()
                self._wanted()
            time.sleep(_LOOK_S)
            now = time.perf_counter()
            if not busy():
                self.seconds += now - looked_at
            looked_at = now

    def close(self) -> None:
        """Release the memory."""
        if self._far is not None:
            self._far.close()
            self._far = None
        self._flags = {}

    def _missing(self, needs: Sequence[tuple[int, int]]) -> int | None:
        """A rank that has not made all needed parts; None when there is none."""
        if self._first(needs) is None:
            return None
        lacking = {rank: each for rank, each in self._flags.items() if self._there.get(rank, 0) < len(each)}
        for rank, flags in (_numbers(lacking) if self._far is None else self._far.look(lacking)).items():
            wanted = self._rounds.get(rank, 0)
            known = self._there.get(rank, 0)
            while known < len(flags) and flags[known] == wanted:
                known += 1
            if wanted and max(flags) > wanted:  # its flags were zero, or older, when this round was offered
                raise StaleSession(max(flags), wanted, "round")
            self._there[rank] = known
        return self._first(needs)

    def _first(self, needs: Sequence[tuple[int, int]]) -> int | None:
        return next((rank for rank, parts in needs if self._there.get(rank, 0) < parts), None)


def _numbers(flags: Mapping[int, torch.Tensor]) -> dict[int, list[int]]:
    columns: dict[int, Column] = {rank: each.numpy() for rank, each in flags.items()}
    return {rank: each.tolist() for rank, each in columns.items()}


class _DeviceFlags:
    """Ready flags in a GPU's memory, read by small copies on a stream of their own, which no other copy waits for."""

    def __init__(self, flags: Mapping[int, torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._shown = {rank: torch.zeros(len(each), dtype=torch.int64, pin_memory=True) for rank, each in flags.items()}
        self._looked_at: dict[int, torch.Tensor] = {}
        """Pinned copies of the flags, while a look is running."""

    def look(self, flags: Mapping[int, torch.Tensor]) -> dict[int, list[int]]:
        """The flags of a moment ago. Empty while the copy that fetches them is running."""
        if not self._looked_at:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for rank, each in flags.items():
                    self._shown[rank].copy_(each, non_blocking=True)
                self._read.record(self._stream)
            self._looked_at = {rank: self._shown[rank] for rank in flags}
        until = time.perf_counter() + _SPIN_S
        while not self._read.query():  # type: ignore[no-untyped-call]
            if time.perf_counter() > until:
                return {}
        found, self._looked_at = _numbers(self._looked_at), {}
        return found

    def close(self) -> None:
        """Block until nothing reads the memory any more."""
        self._stream.synchronize()
