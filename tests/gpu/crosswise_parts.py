"""What the two processes of crosswise.py share: where they meet, what they hold, which rows, and the comparison."""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.memory.exporter import RegionExporter
from weightbus.dataplane.memory.importer import RegionImporter
from weightbus.dataplane.tensors.shards import DTYPES

BF16 = DTYPES.index("bfloat16")
MEET_S = 40.0
STREAMS = 8


class Lost(Exception):
    """The other process does not come, or has said that it will not."""


class Pair:
    """Where two processes wait for each other, within microseconds, and tell each other a number."""

    def __init__(self, path: str, side: int) -> None:
        file = os.open(path, os.O_RDWR)
        self._cells = np.frombuffer(mmap.mmap(file, 4096), np.float64)
        os.close(file)
        self._side, self._turn = side, 0

    def meet(self, number: float = 0.0) -> tuple[float, float]:
        """Both numbers, once both are here."""
        self._turn += 1
        mine, other = self._side * 64, (1 - self._side) * 64
        self._cells[mine + 1 + self._turn % 2] = number
        self._cells[mine] = self._turn
        until = time.monotonic() + MEET_S
        while self._cells[other] < self._turn:
            os.sched_yield()
            if time.monotonic() > until:
                raise Lost
        if math.isinf(self._cells[other]) and self._turn > self._cells[other + 8]:
            raise Lost
        found = float(self._cells[other + 1 + self._turn % 2])
        return (number, found) if self._side == 0 else (found, number)

    def leave(self) -> None:
        """Nobody is to wait for this side any more."""
        self._cells[self._side * 64 + 8] = self._turn
        self._cells[self._side * 64] = math.inf


class Side:
    """One process: its GPU, what it holds, and what it reads of the other."""

    def __init__(self, side: int, work: Path, pairs: int, *, dry: bool) -> None:
        self.side, self.dry = side, dry
        self.pair = Pair(str(work / "pair"), side)
        self.device = torch.device("cpu") if dry else torch.device("cuda", side)
        if not dry:
            torch.cuda.set_device(self.device)
        self.large = (3 if not dry else 1) * 2**20
        self.small = self.large // 2
        self.pairs = pairs
        self.nbytes = pairs * (self.large + self.small)
        self.source = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        self.target = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        self.generator = torch.Generator(self.device).manual_seed(1000 + side)
        self.exporter = RegionExporter(work / "run", "cross", side)
        self.peer_source, self.peer_target = self._opened(work)
        self.library: Any = None
        if dry:
            from tests.kit.fake_batches import FakeBatches

            self.library = FakeBatches()
        self.streams: list[Any] = [None] * STREAMS
        if not dry:
            self.streams = [torch.cuda.Stream(self.device) for _ in range(STREAMS)]
            torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def _opened(self, work: Path) -> tuple[torch.Tensor, torch.Tensor]:
        """The other's source and target."""
        exported = self.exporter.export([self.source, self.target])
        mine = {
            "address": self.exporter.address(),
            "generation": self.exporter.generation,
            "places": [(place.region, place.offset) for place in exported.places],
        }
        (work / f"side-{self.side}.new").write_text(json.dumps(mine))
        (work / f"side-{self.side}.new").rename(work / f"side-{self.side}.json")
        self.pair.meet()
        other = json.loads((work / f"side-{1 - self.side}.json").read_text())
        self.importer = RegionImporter(self.device)
        regions = sorted({region for region, _ in other["places"]})
        self.importer.open(other["address"], 0, other["generation"], regions, 30.0)
        found = [self.importer.region(0, region)[at : at + self.nbytes] for region, at in other["places"]]
        return found[0], found[1]

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def stream(self) -> int:
        return 0 if self.dry else int(torch.cuda.current_stream().cuda_stream)

    def refill(self) -> None:
        """Other random bytes."""
        self.source.view(torch.int64).random_(generator=self.generator)
        self.sync()

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds on the device from before the launch to its end, and those of the launch on the host."""
        if self.dry:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began, 0.0
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        began = time.perf_counter()
        run()
        launched = time.perf_counter() - began
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000, launched


# -- tables ------------------------------------------------------------------------------------------------------------


def table(parts: Sequence[tuple[np.ndarray, np.ndarray, int, tuple[int, int, int]]]) -> CopyTable:
    """Rows at (source, target), of runs of so many bytes, in (lines, source step, target step)."""
    columns: list[list[np.ndarray]] = []
    for source, target, run, (lines, source_step, target_step) in parts:
        flat, wide = np.zeros(len(source), np.int64), np.zeros((len(source), 3), np.int64)
        grid, from_step, to_step = wide + 1, wide.copy(), wide.copy()
        if lines > 1:
            grid[:, 2], from_step[:, 2], to_step[:, 2] = lines, source_step, target_step
        columns.append(
            [flat, flat, source, target, flat + BF16, flat + BF16, flat + run // 2, grid, from_step, to_step]
        )
    return CopyTable(*(np.concatenate(each) for each in zip(*columns, strict=True)))


def rows(large: int, small: int, pairs: int) -> CopyTable:
    """A trainer's experts, both matrices one after another, into an engine's two stacks. In the order of the source."""
    number, both = np.arange(pairs, dtype=np.int64), large + small
    found = table(
        [
            (number * both, number * large, large, (1, 0, 0)),
            (number * both + large, pairs * large + number * small, small, (1, 0, 0)),
        ]
    )
    return found.take(np.argsort(found.source_at, kind="stable"))


def whole(nbytes: int) -> CopyTable:
    """One row."""
    zero = np.zeros(1, np.int64)
    return table([(zero, zero, nbytes, (1, 0, 0))])


def columns(width: int, lines: int, nbytes: int) -> CopyTable:
    """The left half of the columns of matrices with so many lines, packed."""
    matrix = lines * width
    number = np.arange(nbytes // 2 // matrix, dtype=np.int64)
    return table([(number * 2 * matrix, number * matrix, width, (lines, 2 * width, width))])


def same(copied: CopyTable, source: torch.Tensor, target: torch.Tensor) -> bool:
    """All of it, by torch's own indexing."""
    sides = (source.view(torch.int64), target.view(torch.int64))
    for lines, words, steps, begins in views(copied):
        together = max(1, 2**26 // words)
        for begin in begins:
            shape, at = (lines, words), [each // 8 for each in begin]
            both = [
                side.as_strided(shape, (step // 8, 1), first)
                for side, step, first in zip(sides, steps, at, strict=True)
            ]
            for line in range(0, lines, together):
                if not equal(both[0][line : line + together], both[1][line : line + together]):
                    return False
    return True


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A long line in parts: what is compared takes an eighth of its size."""
    part = 2**27
    return all(torch.equal(a[:, at : at + part], b[:, at : at + part]) for at in range(0, a.shape[1], part))


def views(copied: CopyTable) -> list[tuple[int, int, tuple[int, int], list[tuple[int, int]]]]:
    """(lines, words in one, bytes from one to the next on both sides, where each view begins).

    Single runs of one length at equal distances are one view.
    """
    found = []
    forms = np.unique(np.stack([copied.grid[:, 2], copied.run * 2], axis=1), axis=0).tolist()
    for lines, run in forms:
        part = copied.take(np.flatnonzero((copied.grid[:, 2] == lines) & (copied.run * 2 == run)))
        begins = list(zip(part.source_at.tolist(), part.target_at.tolist(), strict=True))
        gaps = np.unique(np.diff(np.array(begins), axis=0), axis=0)
        if lines > 1:
            steps = (int(part.source_step[0, 2]), int(part.target_step[0, 2]))
            found.append((lines, run // 8, steps, begins))
        elif len(gaps) == 1:
            found.append((len(begins), run // 8, (int(gaps[0, 0]), int(gaps[0, 1])), begins[:1]))
        else:
            found.append((1, run // 8, (run, run), begins))
    return found
