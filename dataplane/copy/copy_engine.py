"""Copies and digests of one device: the interface, its implementation for CPUs, and copies that wait for their sources.

`prepare_copies` is slow and happens once for a plan: it may build pointer tables, streams or a CUDA graph. A paused
server waits for `run`: no work that grows with the number of rows happens in Python there, but on a CPU. The
implementation with torch and numpy is also the reference for kernels.

Copies may read memory while it is made, stage by stage. A trainer rank makes quantized weights from the beginning of
its arena on, and its device writes a flag behind each part: the number of the round. Flags lie in the memory that is
read, so a reader needs no message. Until a flag shows the round of the offer, the part is that of an earlier round, or
a mixture.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ..digest import Words, add_counts, mix_words
from ..errors import ManifestError, StaleSession
from ..memory import READY_FLAG_BYTES, ArenaRegion
from ..processes import Deadline
from ..tensors import DTYPES, Column
from .box_digests import WORD_BYTES, BoxTable, Lanes
from .copy_table import ITEM_SIZES, CopyTable, run_span

WaitStage = Callable[[int], None]
"""Called before the copies of a stage are launched, in the order of stages.

Blocks until all that they read is there.
"""


def no_wait(stage: int) -> None:
    """A `WaitStage` for sources that are complete."""
    del stage


class PreparedCopies(ABC):
    """A copy table bound to memory. Used from one thread."""

    fallback_reason: str = ""
    """Why copies are slower than they could be; empty otherwise."""
    device: torch.device = torch.device("cpu")
    """That of the targets."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True while launched copies are running."""

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row. Returns when the bytes are in the targets and other streams may read them.

        Begins when no stream reads the targets any more: a paused server may still compute its last batch. An exception
        of `ready` leaves the remaining stages out; none of those before is running any more.
        """
        if self.device.type != "cuda":
            return self.launch(ready)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            try:
                return self.launch(ready)
            finally:
                torch.cuda.current_stream().synchronize()

    @abstractmethod
    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, on the current stream. Asynchronous where the device is."""

    @abstractmethod
    def move_source(self, source: torch.Tensor | None) -> None:
        """The only source region lies here now; None: nowhere, until the next call.

        Much cheaper than binding the table anew. Raises `ValueError` where the address is aligned otherwise than
        before, to 16 bytes.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the memory; `run` must not be called again."""


class PreparedDigest(ABC):
    """A box table bound to memory. Used from one thread."""

    @abstractmethod
    def launch(self) -> None:
        """Start to sum every group, on the current stream. Asynchronous where the device is."""

    @abstractmethod
    def lanes(self) -> Lanes:
        """(2, groups) uint64: both lanes of every group, as of the last `launch`. Blocks until they are there."""

    @abstractmethod
    def counts(self) -> Column:
        """(groups,): elements that are not finite, as of the last `launch`; 0 without `masks`. Blocks as `lanes`."""

    def run(self) -> Lanes:
        """`launch` and `lanes`: the sums of the present contents, in one pass over the memory."""
        self.launch()
        return self.lanes()

    @abstractmethod
    def close(self) -> None:
        """Release the memory."""


class CopyEngine(ABC):
    """Binds tables to memory.

    Regions are 1-D uint8 tensors over whole allocations (sources) or over a target's memory, numbered as in the table.
    Source regions may lie on another device than the target ones; they are read only.
    """

    @abstractmethod
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

    @abstractmethod
    def prepare_parts(
        self, table: CopyTable, parts: Column, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> Mapping[int, PreparedCopies]:
        """Bind a table whose parts are launched one by one: by number, as `parts`, (rows,), gives it."""

    @abstractmethod
    def prepare_digest(
        self, table: BoxTable, regions: Sequence[torch.Tensor], masks: Words | None = None
    ) -> PreparedDigest:
        """Bind a box table that has passed `BoxTable.check`.

        With `masks`, (groups,) of the dtypes in the regions (digest/nonfinite.py), elements that are not finite are
        counted in the same pass.
        """


def split_by_stage(table: CopyTable, stages: Column) -> dict[int, CopyTable]:
    """The rows of each stage of `stages`, (rows,), ascending; within a stage in the order of the table."""
    numbers: list[int] = np.unique(stages).tolist()
    return {number: table.take(np.flatnonzero(stages == number)) for number in numbers}


class StagedCopies(PreparedCopies):
    """`PreparedCopies` with a table for each stage, on one stream.

    A stage is launched when its sources are there, while earlier ones are running.
    """

    def __init__(
        self,
        stages: Mapping[int, PreparedCopies],
        device: torch.device = PreparedCopies.device,
        fallback_reason: str = "",
    ) -> None:
        self._stages = dict(sorted(stages.items()))
        self.device = device
        self.fallback_reason = fallback_reason

    @property
    def busy(self) -> bool:
        """True while launched copies are running. All stages share a stream, so any one can tell."""
        return next((each.busy for each in self._stages.values()), False)

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


_UNSIGNED: Final[dict[int, type[np.unsignedinteger]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK_WORDS: Final = 64 * 1024
_ONE_TENSOR: Final[Column] = np.zeros(1, np.int64)
"""Where the tensors of a block begin that is of one tensor."""


class TorchCopyEngine(CopyEngine):
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

    def prepare_digest(
        self, table: BoxTable, regions: Sequence[torch.Tensor], masks: Words | None = None
    ) -> TorchDigest:
        """Bind a table of boxes, on a CPU."""
        return TorchDigest(table, regions, masks)


class TorchCopies(PreparedCopies):
    """`PreparedCopies` by torch."""

    def __init__(self, table: CopyTable, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._rows: list[list[int]] = table.numbers().tolist()
        self._from = self._views(sources)
        self._to: list[torch.Tensor] = []
        for _, target, _, target_at, _, target_dtype, run, *shape in self._rows:
            self._to.append(_view(targets[target], target_at, target_dtype, (*shape[:3], run), shape[6:]))
        self.device = next((each.device for each in self._to), self.device)

    @property
    def busy(self) -> bool:
        """False: a CPU copies synchronously."""
        return False

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


class TorchDigest(PreparedDigest):
    """`PreparedDigest` by numpy."""

    def __init__(self, table: BoxTable, regions: Sequence[torch.Tensor], masks: Words | None = None) -> None:
        self._table, self._masks = table, masks
        self._regions: list[npt.NDArray[np.uint8]] = [region.numpy() for region in regions]
        self._lanes: Lanes = np.zeros((2, table.groups), np.uint64)
        self._counts: Column = np.zeros(table.groups, np.int64)

    def launch(self) -> None:
        """Sum every group; synchronous."""
        table = self._table
        lanes, counts = np.zeros((2, table.groups), np.uint64), np.zeros(table.groups, np.int64)
        for row in range(len(table)):
            group = int(table.group[row])
            for words, at in _words(table, row, self._regions[int(table.region[row])]):
                lanes[:, group] += mix_words(words, at)
                if self._masks is not None:
                    add_counts(words, _ONE_TENSOR, self._masks[group : group + 1], counts[group : group + 1])
        self._lanes, self._counts = lanes, counts

    def lanes(self) -> Lanes:
        """The sums of the last `launch`."""
        return self._lanes

    def counts(self) -> Column:
        """Elements that are not finite, of the last `launch`."""
        return self._counts

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


_FENCE_LOOK_S: Final = 0.0005


class DeviceFence:
    """A point behind all work that was queued on the current stream of `device` when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def reached(self) -> bool:
        """True when the device is done with it. Raises RuntimeError when the device has failed."""
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def wait(self, deadline: Deadline) -> None:
        """Block until `reached`. Raises `DeadlineExceeded`, and RuntimeError as `reached`."""
        while not self.reached():
            deadline.check("the device to finish what it was given")
            time.sleep(_FENCE_LOOK_S)


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
    first, last = run_span(table.source_at, table.grid, table.source_step)
    last += table.run * ITEM_SIZES[table.source_dtype]
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
