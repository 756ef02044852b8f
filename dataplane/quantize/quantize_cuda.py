"""Quantizes on a GPU: tasks become tables of tiles, made on the host once; a run is a launch for each kind of tile.

FP8 with one scale for a tensor takes two launches over all tensors together: the largest magnitudes first, which never
leave the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .quantize_tasks import WORD, ClearedSums, QuantizeTask, run_task
from .schemes import Element, Scaling, Scheme

LaunchTable = npt.NDArray[np.int64]

TILE: Final = 128
"""Rows and columns of a tile of small blocks; a block of FP8 is a tile of its own."""
_MOST: Final = 16384
"""Most elements of a tile."""
_MOST_OF_ROWS: Final = 32768
"""... where a row cannot be cut, or eight with their zero points: programs of up to 32 warps."""
_LANES_BYTES: Final = 16
_INT4_TILE: Final = 4096
"""Elements."""
_PER_WARP: Final = 1024
"""Elements: at least 32 for each thread, so that all of its loads are of 16 bytes."""
_REGISTERS: Final = 80
"""Of a thread with 64 elements of a block: on an H200 1.16 times as fast as with 128, since more programs fit a
multiprocessor; 64 are too few (`by_registers` of tests/gpu/quantized.py)."""


class TileShape(NamedTuple):
    """At most so many rows and columns of a weight in a tile."""

    rows: int
    columns: int


class LaunchKind(NamedTuple):
    """The common properties of the tiles of one launch."""

    scheme: Scheme
    dtype: torch.dtype
    served: torch.dtype
    scale: torch.dtype
    aligned: bool
    """Addresses and steps are multiples of 16 bytes, widths of 16 elements."""
    tile: TileShape
    summed: bool = False
    """True when the stored elements are summed."""


class CudaTasks:
    """`PreparedTasks` by kernel."""

    def __init__(self, tasks: Sequence[QuantizeTask]) -> None:
        self._rest: list[QuantizeTask] = []
        device = tasks[0].weight.device if tasks else torch.device("cpu")
        self._largest = torch.zeros(len(tasks), dtype=torch.int32, device=device)
        """By task with one scale: the largest magnitude."""
        kinds: dict[LaunchKind, list[LaunchTable]] = defaultdict(list)
        for number, task in enumerate(tasks):
            tile = tile_shape(task.scheme, task.weight.shape)
            if tile is None or not _readable(task.weight) or not _summable(task):
                self._rest.append(task)
                continue
            kind, table = _tiles(task, tile)
            if task.scheme.flat is not None:
                table[:, 6] = self._largest.data_ptr() + number * self._largest.element_size()
            kinds[kind].append(table)
        self._sums = ClearedSums(tasks)
        self._tables = [(kind, torch.as_tensor(np.concatenate(found), device=device)) for kind, found in kinds.items()]

    @property
    def keeps(self) -> bool:
        """True when torch quantizes a task that no kernel supports."""
        return bool(self._rest)

    @torch.no_grad()
    def run(self) -> None:
        """One launch for each kind, or two. Tasks that no kernel supports take several passes of torch."""
        self._sums.clear()
        if any(kind.scheme.flat is not None for kind, _ in self._tables):
            self._largest.zero_()
        for kind, table in self._tables:
            launch(kind, table)
        for task in self._rest:
            run_task(task)


def tile_shape(scheme: Scheme, shape: Sequence[int]) -> TileShape | None:
    """The tile for weights of `shape`; None where no kernel applies: a block that does not fit one program."""
    rows, columns = (size or extent for size, extent in zip(scheme.block, shape, strict=True))
    wide = _power(columns)
    if scheme.element is Element.INT4:
        if _several(scheme):
            return TileShape(_INT4_TILE // TILE, TILE)
        down = max(1 if scheme.symmetric else 8, min(TILE, _INT4_TILE // wide))
        return TileShape(down, columns) if down * wide <= _MOST_OF_ROWS else None
    if scheme.scale_dtype == "uint8" or scheme.flat is not None:
        return TileShape(TILE, TILE)
    return TileShape(rows, columns) if _power(rows) * wide <= (_MOST if rows > 1 else _MOST_OF_ROWS) else None


def launch(kind: LaunchKind, table: torch.Tensor, *, fast: bool = True, registers: int = _REGISTERS) -> None:
    """Quantize every tile of `table`, (tiles, 9) int64 on the device, on the current stream."""
    from . import quantize_triton as kernels  # noqa: PLC0415  Triton is there where a GPU is

    for name, constants in kernels_of(kind, fast=fast, registers=registers):
        getattr(kernels, name)[(len(table),)](table, **constants)


def kernels_of(
    kind: LaunchKind, *, fast: bool = True, registers: int = _REGISTERS
) -> tuple[tuple[str, dict[str, object]], ...]:
    """The kernels for tiles of a kind, in order, and their constants.

    `fast`: where multiply-adds are fused, as on every GPU.
    """
    import triton.language as tl  # noqa: PLC0415

    types = {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }
    scheme = kind.scheme
    rows, columns = map(_power, kind.tile)
    warps = 8 if rows * columns <= _MOST else 32
    common: dict[str, object] = {
        "DTYPE": types[kind.dtype],
        "SERVED": types[kind.served],
        "ALIGN": 16 if kind.aligned else 1,
        "ROWS": rows,
        "COLUMNS": columns,
        "FAST": fast,
        "num_warps": max(1, min(warps, rows * columns // _PER_WARP)),
    }
    up = scheme.scaling is Scaling.UP
    if scheme.element is Element.INT4:
        group = scheme.block[1] if _several(scheme) else columns
        scale = {"SCALE": types[kind.scale], "SYMMETRIC": scheme.symmetric, "GROUP": group}
        return (("int4", {**common, **scale}),)
    if scheme.scale_dtype == "uint8":
        return (("mxfp8", {**common, "UP": up}),)
    if scheme.flat is not None:
        second = {**common, "maxnreg": registers} if kind.aligned else common
        return (("fp8_amax", common), ("fp8_tensor", {**second, "SCALE": types[kind.scale]}))
    fits = rows * columns == TILE * TILE and (kind.aligned or not kind.summed)
    few = {"maxnreg": registers} if fits else {}
    return (("fp8_block", {**common, **few, "SCALE": types[kind.scale], "UP": up, "SUMMED": kind.summed}),)


def _several(scheme: Scheme) -> bool:
    """True when a tile holds several whole groups of INT4; otherwise it is one, padded."""
    return scheme.block[1] > 0 and TILE % scheme.block[1] == 0


def _power(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def _tiles(task: QuantizeTask, tile: TileShape) -> tuple[LaunchKind, LaunchTable]:
    """The rows of one task."""
    rows, columns = task.weight.shape
    down, across = np.arange(0, rows, tile.rows), np.arange(0, columns, tile.columns)
    top, left = (axis.reshape(-1) for axis in np.meshgrid(down, across, indexing="ij"))
    table = np.zeros((len(top), 9), np.int64)
    cells = _cells(task.scheme, task.weight.shape)
    places: Iterable[tuple[torch.Tensor, tuple[int, int]]] = (
        (task.weight, (1, 1)),
        *zip(task.outs, cells, strict=False),
    )
    for at, (tensor, cell) in enumerate(places):
        step = tensor.stride(0) if tensor.dim() == 2 else 0
        item = tensor.element_size()
        table[:, 2 * at] = tensor.data_ptr() + (top // cell[0] * step + left // cell[1]) * item
        table[:, 2 * at + 1] = step * item
    height, width = np.minimum(rows - top, tile.rows), np.minimum(columns - left, tile.columns)
    table[:, 8] = (height << 32) + width
    aligned = bool((table[:, :4] % 16 == 0).all() and (width % 16 == 0).all())
    if task.sums is not None:
        table[:, 6] = task.sums.lanes.data_ptr() + task.sums.number * _LANES_BYTES
        table[:, 7] = (task.sums.step << 32) + task.sums.at + top * task.sums.step + left // WORD
    dtypes = (task.weight.dtype, task.served, task.outs[1].dtype)
    return LaunchKind(task.scheme, *dtypes, aligned, tile, task.sums is not None), table


def _readable(weight: torch.Tensor) -> bool:
    """Its rows are runs of a dtype that kernels know. Outputs always are: they lie in buckets and arenas."""
    runs = weight.shape[1] == 1 or weight.stride(1) == 1
    return runs and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _summable(task: QuantizeTask) -> bool:
    """Its elements, if they are to be summed up, are stored as words."""
    out = task.outs[0]
    return task.sums is None or (out.data_ptr() % WORD == 0 and out.stride(0) % WORD == 0)


def _cells(scheme: Scheme, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Elements of the weight behind one element of each output."""
    rows, columns = (size or extent for size, extent in zip(scheme.block, shape, strict=True))
    elements = (1, 8) if scheme.element is Element.INT4 else (1, 1)
    return [elements, (rows, columns), (8 * rows, columns)]
