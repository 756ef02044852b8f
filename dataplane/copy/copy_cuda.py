"""Copies and digests on a GPU: by a kernel, and out of a peer GPU's memory by hardware copy engines at the same time.

Tables are cut into tiles once (tiles.py), and every round is one launch for each vector size. Rows that cast are copied
by torch, all in one call; few plans have any.

A copy engine moves contiguous bytes with one command, which is fast for long runs, a few calls of cuMemcpyBatchAsync
for all of them. Two GPUs that read from each other at the same time are faster with it than with a kernel, whose
requests travel against the other GPU's bytes; on one GPU the kernel is faster. The arguments of the calls are prepared
once. Calls go to streams round robin, so that several engines work. Graphs of memcpy nodes would be as many commands
for the engines, and more work to launch. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ..digest import Words
from ..errors import CopyEnginesUnavailable, Unsupported
from ..memory import error_name
from ..tensors import Column, Table
from .box_digests import BoxTable, Lanes
from .copy_engine import (
    CopyEngine,
    PreparedCopies,
    PreparedDigest,
    StagedCopies,
    TorchCopies,
    TorchCopyEngine,
    WaitStage,
    no_wait,
    split_by_stage,
)
from .copy_table import AXES, ITEM_SIZES, CopyTable
from .tiles import SOURCE, VECTORS, Tiles, staged_tiles, word_tiles


class PeerCopies(PreparedCopies):
    """`PreparedCopies` by copy engines and kernel."""

    def __init__(
        self,
        device: torch.device,
        batch: CopyBatch,
        rest: Mapping[int, PreparedCopies],
        instead: Callable[[], Mapping[int, PreparedCopies]],
        memory: Sequence[torch.Tensor],
    ) -> None:
        """`rest` are the kernel's copies, by stage; `instead` binds the rows of `batch` to it.

        `memory` is kept alive.
        """
        self.device = device
        self._batch: CopyBatch | None = batch
        self._stages = sorted({*batch.stages, *rest})
        self._kernel: dict[int, list[PreparedCopies]] = defaultdict(list)
        for stage, copies in rest.items():
            self._kernel[stage].append(copies)
        self._instead = instead
        self._memory = tuple(memory)
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(len(batch))]  # type: ignore[no-untyped-call]

    @property
    def busy(self) -> bool:
        """True while launched copies are running."""
        kernel = next((copies.busy for stage in self._kernel.values() for copies in stage), False)  # all on one stream
        return kernel or not all(stream.query() for stream in self._streams)

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, on the current stream of this device.

        When the driver refuses a batch, the kernel copies its rows from then on, and `fallback_reason` says why.
        """
        with self._on_device():
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(self.device))
            try:
                for stage in self._stages:
                    ready(stage)
                    for each in self._kernel[stage]:
                        each.launch()
                    self._launch_batch(stage)
            finally:
                for stream in self._streams:
                    torch.cuda.current_stream(self.device).wait_stream(stream)

    def _launch_batch(self, stage: int) -> None:
        """Submit the copy engines' rows of a stage."""
        if self._batch is None:
            return
        try:
            self._batch.launch(self._handles(self._batch), stage)
        except CopyEnginesUnavailable as error:
            self.fallback_reason, self._batch = str(error), None
            for of, copies in self._instead().items():
                self._kernel[of].append(copies)
                if of == stage:  # a batch that was not refused is carried out
                    copies.launch()

    def move_source(self, source: torch.Tensor | None) -> None:
        """Raise `ValueError`: a peer's memory has its address in the batch, and is bound anew when it moves."""
        del source
        raise ValueError("copies out of a peer's memory are bound anew when it is elsewhere")

    def close(self) -> None:
        """Release the memory."""
        for stream in self._streams:
            stream.synchronize()
        for copies in self._kernel.values():
            for each in copies:
                each.close()
        self._batch, self._memory, self._streams = None, (), []
        self._kernel.clear()
        self._stages = []

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """The device's context for this thread; none without a GPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _handles(self, batch: CopyBatch) -> list[int]:
        if self.device.type != "cuda":
            return list(range(1, len(batch) + 1))
        return [int(stream.cuda_stream) for stream in self._streams]


MIN_RUN_BYTES: Final = 1024 * 1024
"""Bytes. The kernel copies shorter runs: submitting one costs the host half a microsecond, and an engine as much."""
MAX_RUN_BYTES: Final = 32 * 1024 * 1024
"""Bytes. Longer runs are cut, so that batches can be as long as they should."""
SHARES: Final = (1, 1, 2, 4, 8, 8, 8, 8, 8, 8)
"""Relative sizes of batches, in the order of their submission.

An engine begins when all of its batch is submitted: the first are short, and while one is copied, the next twice as
long one is submitted. Each begins a little late, which the other engines make good meanwhile (tests/gpu/copies.py).
"""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CopyRuns(Table):
    """Runs that are contiguous on both sides. All columns are (runs,) int64."""

    source: Column
    """Address of the first byte."""
    target: Column
    nbytes: Column
    stage: Column
    """Runs of a stage are submitted before those of the next one."""


def rows_for_copy_engines(table: CopyTable, remote: Column) -> Mask:
    """(rows,): rows without casts, with long runs, that read from a peer; `remote` is (regions,) 0 or 1."""
    worth: Mask = (table.run * ITEM_SIZES[table.target_dtype] >= MIN_RUN_BYTES) & (table.casts == 0)
    found: Mask = worth & (remote[table.source] != 0)
    return found


def split_into_runs(
    table: CopyTable, source_base: Column, target_base: Column, stages: Column | None = None
) -> CopyRuns:
    """The runs of a table without casts, long ones in parts; bases are the addresses of the regions.

    `stages` are those of the rows; without them all are of stage 0.
    """
    nbytes = table.run * ITEM_SIZES[table.target_dtype]
    parts = -(-nbytes // MAX_RUN_BYTES)
    count: Column = table.grid.prod(axis=1, dtype=np.int64) * parts
    row = np.repeat(np.arange(len(table)), count)
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    number, part = np.divmod(number, parts[row])
    begin = part * MAX_RUN_BYTES
    source: Column = (source_base[table.source] + table.source_at)[row] + begin
    target: Column = (target_base[table.target] + table.target_at)[row] + begin
    for axis in range(AXES - 1, -1, -1):
        number, index = np.divmod(number, table.grid[row, axis])
        source += index * table.source_step[row, axis]
        target += index * table.target_step[row, axis]
    stage = np.zeros(len(row), np.int64) if stages is None else stages[row]
    return CopyRuns(source, target, np.minimum(nbytes[row] - begin, MAX_RUN_BYTES), stage)


def split_into_batches(runs: CopyRuns, shares: Sequence[int] = SHARES) -> list[CopyRuns]:
    """Batches to submit one after another, none of them empty: consecutive runs, sized by `shares`.

    A batch has runs of one stage; a batch that a stage border cuts becomes two.
    """
    runs = runs.take(np.argsort(runs.stage, kind="stable"))
    before = np.cumsum(runs.nbytes) - runs.nbytes
    ends = np.cumsum(shares) * int(runs.nbytes.sum()) // sum(shares)
    call: Column = np.searchsorted(ends, before, side="right")
    begins: Column = np.flatnonzero(np.diff(call, prepend=-1) | np.diff(runs.stage, prepend=-1))
    borders: list[int] = [*begins.tolist(), len(runs)]
    return [runs.take(np.arange(a, b)) for a, b in itertools.pairwise(borders)]


_IN_STREAM_ORDER: Final = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1. The hints are for managed memory."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def _columns(runs: CopyRuns) -> list[npt.NDArray[np.uint64]]:
    return [np.ascontiguousarray(each, np.uint64) for each in (runs.target, runs.source, runs.nbytes)]


class CopyBatch:
    """Batches of copies, prepared. The caller keeps the memory alive."""

    def __init__(
        self, runs: CopyRuns, streams: int, library: ctypes.CDLL | None = None, shares: Sequence[int] = SHARES
    ) -> None:
        """On at most `streams` streams, a call for each share. Raises `CopyEnginesUnavailable`.

        `library` replaces libcuda in tests.
        """
        try:
            self._library = library if library is not None else ctypes.CDLL("libcuda.so.1")
            self._call = self._library.cuMemcpyBatchAsync_v2
        except (OSError, AttributeError) as error:
            raise CopyEnginesUnavailable(
                f"the CUDA driver has no batches of copies ({error}): it is older than 13.0"
            ) from error
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)
        self._calls = [(int(each.stage[0]), _columns(each)) for each in split_into_batches(runs, shares)]
        self._stream_count = min(streams, len(self._calls))

    def __len__(self) -> int:
        """Streams that `launch` needs."""
        return self._stream_count

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that have runs, ascending."""
        return tuple(dict.fromkeys(stage for stage, _ in self._calls))

    def launch(self, streams: Sequence[int], stage: int | None = None) -> None:
        """Submit a stage, or all, to streams with these handles, none of which is the default stream.

        Raises `CopyEnginesUnavailable`; some copies may be running then.
        """
        if len(streams) != self._stream_count:
            raise ValueError(f"{len(streams)} streams, expected {self._stream_count}")
        for stream, (of, columns) in zip(itertools.cycle(streams), self._calls, strict=False):
            if stage not in {None, of}:
                continue
            code = self._call(
                *(ctypes.c_void_p(column.ctypes.data) for column in columns), ctypes.c_size_t(len(columns[0])),
                ctypes.byref(self._attributes), ctypes.byref(self._first), ctypes.c_size_t(1), ctypes.c_void_p(stream),
            )  # fmt: skip
            if code:
                raise CopyEnginesUnavailable(
                    f"the copy engines could not be started ({error_name(self._library, code)})"
                )


class CudaCopyEngine(CopyEngine):
    """`CopyEngine` for one GPU. Source regions may be a peer's memory that was opened for it."""

    def __init__(
        self,
        device: torch.device,
        streams: int = 0,
        remote: Collection[int] = (),
        library: ctypes.CDLL | None = None,
    ) -> None:
        """`remote` are addresses of peer memory; copy engines read it on `streams` streams, or the kernel if that is 0.

        `library` replaces libcuda in tests.
        """
        self._device = device
        self._streams = streams
        self._remote = frozenset(remote)
        self._library = library

    def prepare_copies(
        self,
        table: CopyTable,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        stages: Column | None = None,
    ) -> CudaCopies | StagedCopies | PeerCopies:
        """Bind a table."""
        stages = np.zeros(len(table), np.int64) if stages is None else stages
        by_engines: Mask = np.zeros(len(table), np.bool_)
        if self._streams and len(table):
            remote = np.array([each.data_ptr() in self._remote for each in sources], np.int64)
            by_engines = rows_for_copy_engines(table, remote)

        def kernel(rows: Mask) -> dict[int, CudaCopies]:
            return self.prepare_parts(table.take(np.flatnonzero(rows)), stages[rows], sources, targets)

        if not by_engines.any():
            return self._staged(kernel(~by_engines))
        long = np.flatnonzero(by_engines)
        try:
            runs = split_into_runs(table.take(long), _bases(sources), _bases(targets), stages[long])
            batch = CopyBatch(runs, self._streams, self._library)
        except CopyEnginesUnavailable as error:
            return self._staged(kernel(np.ones(len(table), np.bool_)), str(error))
        rest = kernel(~by_engines)
        return PeerCopies(self._device, batch, rest, lambda: kernel(by_engines), (*sources, *targets))

    def prepare_parts(
        self, table: CopyTable, parts: Column, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> dict[int, CudaCopies]:
        """Bind a table whose parts are launched one by one. All parts together cost as much as one."""
        order = np.argsort(parts, kind="stable")
        table, parts = table.take(order), parts[order]
        plain = np.flatnonzero(table.casts == 0)
        tiles: dict[int, list[Tiles]] = {}
        if len(plain):
            bases = _bases(sources), _bases(targets)
            tiles = staged_tiles(table.take(plain), parts[plain], *bases, self._device)
        return {
            part: CudaCopies(self._device, rows, sources, targets, tiles=tiles.get(part, []))
            for part, rows in split_by_stage(table, parts).items()
        }

    def _staged(self, stages: dict[int, CudaCopies], fallback_reason: str = "") -> CudaCopies | StagedCopies:
        """Copies that the kernel alone executes."""
        only = stages.get(0) if len(stages) == 1 else None
        if only is None:
            return StagedCopies(stages, self._device, fallback_reason)
        only.fallback_reason = fallback_reason
        return only

    def prepare_digest(
        self, table: BoxTable, regions: Sequence[torch.Tensor], masks: Words | None = None
    ) -> CudaDigest:
        """Bind a table of boxes."""
        return CudaDigest(self._device, table, regions, masks)


class CudaCopies(PreparedCopies):
    """`PreparedCopies` by kernel."""

    def __init__(
        self,
        device: torch.device,
        table: CopyTable,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        tiles: list[Tiles],
    ) -> None:
        """`tiles` are those of rows without casts."""
        self.device = device
        self._casts = TorchCopies(table.take(np.flatnonzero(table.casts)), sources, targets)
        self._tiles = tiles
        self._memory = (tuple(sources), tuple(targets))
        self._source_at = sources[0].data_ptr() if sources else 0

    @property
    def busy(self) -> bool:
        """True while launched copies are running."""
        return not torch.cuda.current_stream(self.device).query()

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, on the current stream of this device."""
        from .copy_triton import copy  # noqa: PLC0415  triton is not there without a GPU

        ready(0)
        with torch.cuda.device(self.device):
            for vector, table in self._tiles:
                copy(table, vector)
            self._casts.launch()

    def move_source(self, source: torch.Tensor | None) -> None:
        """The only source region has moved. Raises `ValueError` for another alignment."""
        if source is not None:
            moved = source.data_ptr() - self._source_at
            if moved % VECTORS[0]:
                raise ValueError(f"what lay at {self._source_at:#x} cannot be followed to {source.data_ptr():#x}")
            if moved:
                for _, table in self._tiles:
                    table[:, SOURCE] += moved
            self._source_at += moved
        self._casts.move_source(source)
        self._memory = ((source,) if source is not None else (), self._memory[1])

    def close(self) -> None:
        """Release the memory."""
        self._tiles, self._memory = [], ((), ())
        self._casts.close()


class CudaDigest(PreparedDigest):
    """`PreparedDigest` by kernel."""

    def __init__(
        self, device: torch.device, table: BoxTable, regions: Sequence[torch.Tensor], masks: Words | None = None
    ) -> None:
        self._device = device
        self._tiles = word_tiles(table, _bases(regions), device) if len(table) else []
        self._sums = torch.zeros(table.groups * 3, dtype=torch.int64, device=device)
        """Both lanes of every group, and behind them the counts: cleared and read at once."""
        self._lanes, self._counts = self._sums[: 2 * table.groups].view(-1, 2), self._sums[2 * table.groups :]
        self._masks = None if masks is None else torch.from_numpy(masks.view(np.int64)).to(device)  # pyright: ignore[reportUnknownMemberType]
        self._memory = regions

    def launch(self) -> None:
        """Start to sum every group, on the current stream of this device."""
        from .copy_triton import accumulate  # noqa: PLC0415  triton is not there without a GPU

        with torch.cuda.device(self._device):
            self._sums.zero_()
            for item, table in self._tiles:
                accumulate(table, item, self._lanes, self._masks, self._counts)

    def lanes(self) -> Lanes:
        """The sums of the last `launch`; blocks until they are there."""
        from .copy_triton import as_lanes  # noqa: PLC0415  triton is not there without a GPU

        with torch.cuda.device(self._device):
            return as_lanes(self._lanes)

    def counts(self) -> Column:
        """Elements that are not finite, of the last `launch`; blocks until they are there."""
        found: Column = self._counts.cpu().numpy()
        return found

    def close(self) -> None:
        """Release the memory."""
        self._tiles, self._memory = [], ()


def _bases(regions: Sequence[torch.Tensor]) -> Column:
    return np.array([region.data_ptr() for region in regions], np.int64)


DEFAULT_COPY_STREAMS: Final = 4
"""Streams on which copy engines read a peer's memory, unless the environment says otherwise."""
COPY_STREAMS_SETTING: Final = "WEIGHTBUS_WORKER_BRANCHES"
"""Environment variable of the engine's server."""
MAX_COPY_STREAMS: Final = 32


def copy_streams_setting(environment: Mapping[str, str]) -> int:
    """Streams for copy engines that read from a peer; 0: a kernel copies everything. Raises `Unsupported`."""
    asked = environment.get(COPY_STREAMS_SETTING, "")
    if not asked:
        return DEFAULT_COPY_STREAMS
    if not asked.isascii() or not asked.isdecimal() or int(asked) > MAX_COPY_STREAMS:
        raise Unsupported(
            f"{COPY_STREAMS_SETTING} in the server's environment is {asked!r}, expected a whole number from 0 (a kernel"
            f" copies all) to {MAX_COPY_STREAMS}: correct it, and start the server again"
        )
    return int(asked)


def copy_engine_for(device: torch.device, streams: int = 0, remote: Collection[int] = ()) -> CopyEngine:
    """The copy engine of a device. Raises `Unsupported` for a device without one.

    On a GPU, long runs out of peer memory, at the addresses `remote`, go through hardware copy engines on `streams`
    streams.
    """
    if device.type == "cpu":
        return TorchCopyEngine()
    if device.type == "cuda":
        return CudaCopyEngine(device, streams, remote)
    raise Unsupported(f"there is no copy engine for {device}: let this engine take the local transport")
