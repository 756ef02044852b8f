"""Quantizes many weights in place of storage: with torch on a CPU, in one pass of a Triton kernel on a GPU.

`prepare_tasks` is slow and happens once for a plan; a round waits for `run` alone. The arithmetic with torch is the
reference of every scheme. The formats are those of the libraries that define them, bit for bit
(tests/dataplane/quantize/test_quantize_tasks.py compares): compressed-tensors 0.18 (`calculate_qparams`, `quantize`,
`pack_to_int32`) computed in float32, SGLang's `per_block_cast_to_fp8` for scales that are powers of two. Two bits
differ: the sign of a zero, which compressed-tensors drops, and MXFP8's exponent where a block holds subnormal numbers
alone, 1 here and 0 in SGLang. What becomes of a block with a NaN or an infinity, which those libraries leave open, is
said in schemes.py.

Some elements are summed for their digest while they are made, instead of being read again. A program of the FP8 kernel
holds whole rows of its tile when it stores them: eight elements are a word of the packed tensor, if rows and boxes
begin and end on one, and the order of a sum's words does not matter (box_digests.py). Everything else, scales among it,
is read again in place: scales are four bytes, half a word, and a part in sixteen thousand of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from ..digest import LANE_B, PHI
from ..tensors import Box, Column, Shards, intersect, volumes
from .schemes import PACKED, Element, Scaling, Scheme

WORD: Final = 8
"""FP8 elements in a word."""
_MOST: Final = 1 << 31
"""Words of a tensor that the kernel's table has room for."""


class WordLayout(NamedTuple):
    """The words of a box in its packed tensor."""

    at: int
    """Index of the first word."""
    step: int
    """Words from one row to the next."""


@dataclass(frozen=True, eq=False)
class FusedDigests:
    """The sums of one rank that were made while quantizing."""

    shards: Shards
    """All shards in the sums."""
    tensor: Column
    """(sums,): the tensor of each sum, all different."""


def word_layout(scheme: Scheme, box: Box, shape: Sequence[int]) -> WordLayout | None:
    """The words of `box`, of a weight of `shape` that `scheme` quantizes; None if they are read again.

    That is: for anything but FP8 with a scale for a block or a row; where a row of the tensor, of the box or of a block
    is no whole number of words; and for a tensor of 16 GiB or more.
    """
    if scheme.element is not Element.E4M3 or scheme.flat is not None or scheme.scale_dtype == "uint8":
        return None
    rows, columns = shape
    block = scheme.block[1] or columns
    if columns % WORD or block % WORD or box.start[1] % WORD or box.stop[1] % WORD or rows * columns >= _MOST * WORD:
        return None
    return WordLayout((box.start[0] * columns + box.start[1]) // WORD, columns // WORD)


def fully_summed_tensors(chosen: Shards, summed: Shards) -> Column:
    """The tensors whose share in `chosen` is exactly `summed`, disjoint shards of one rank; ascending.

    Both are of the same tensors, in the same order.
    """
    count = len(chosen.tensors)
    both = volumes(intersect(chosen.boxes, summed.boxes)[2], count)
    same = (both == volumes(chosen.boxes, count)) & (both == volumes(summed.boxes, count))
    return np.flatnonzero(same & (both > 0))


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
    """Of the first output; where `word_layout` allows."""


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
    quantize(task.scheme, task.weight.to(task.served), task.outs)
    if task.sums is not None:
        lanes = task.sums.lanes[task.sums.number]
        add_sums(task.outs[0], task.sums.at, task.sums.step, lanes)


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


E4M3_MAX: Final = 448.0
_EPSILON: Final = torch.finfo(torch.float32).eps
"""The scale where all elements are zero, or nearly, as compressed-tensors has it. Every dtype of scales has it, too."""
_LEAST_AMAX: Final = 1e-4
"""DeepGEMM's bound below which a block's power of two does not shrink any more."""
_BIAS: Final = 127
_MANTISSA_BITS: Final = 23
_MX_SHIFT: Final = 8
"""The largest e4m3 number is 1.75 times two to the power of this."""
_NO_EXPONENT: Final = 255
"""NaN among the exponents."""
_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Of splitmix64's finalizer, as in tensor_digest.py."""
_ROUND_UP: Final = (1 << _MANTISSA_BITS) - 1
_ROUND_NEAREST: Final = 1 << (_MANTISSA_BITS - 2)


def quantize(scheme: Scheme, weight: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Quantize `weight`, (rows, columns) on the scheme's grain, into `outs`: its parts but ``weight_shape``, in order.

    `weight` is in the dtype in which it would be served. `outs` may be strided.
    """
    values = weight.float()
    match scheme.element:
        case Element.E4M3 if scheme.scale_dtype == "uint8":
            _mx(scheme, values, outs)
        case Element.E4M3:
            _fp8(scheme, values, outs)
        case Element.INT4:
            _int4(scheme, values, outs)


def _fp8(scheme: Scheme, values: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    elements, scales = outs
    blocks = _blocks(values, scheme)
    amax = blocks.abs().amax(dim=(1, 3))
    if scheme.scaling is Scaling.UP:
        scale = _power_up(_over(amax.clamp(min=_LEAST_AMAX), E4M3_MAX))
    else:
        scale = _over(amax, E4M3_MAX)
    # What divides is the scale as it is stored: so an engine multiplies with the same number.
    scale = _stored(scale, scales.dtype, torch.isfinite(amax))
    scales.copy_(scale.view(scales.shape))
    scaled = blocks / scale.float()[:, None, :, None]
    elements.copy_(_e4m3(_joined(scaled, values)))


def _mx(scheme: Scheme, values: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    elements, exponents = outs
    blocks = _blocks(values, scheme)
    amax = blocks.abs().amax(dim=(1, 3))
    if scheme.scaling is Scaling.UP:
        bits = (_over(amax, E4M3_MAX).view(torch.int32) + _ROUND_UP) >> _MANTISSA_BITS
    else:
        bits = (((amax.view(torch.int32) + _ROUND_NEAREST) >> _MANTISSA_BITS) - _MX_SHIFT).clamp(min=0)
    finite = torch.isfinite(amax)
    exponents.copy_(torch.where(finite, bits, _NO_EXPONENT).to(torch.uint8))
    inverse = ((2 * _BIAS - bits) << _MANTISSA_BITS).view(torch.float32)  # a finite magnitude leaves it normal
    scaled = blocks * torch.where(finite, inverse, math.nan)[:, None, :, None]
    elements.copy_(_e4m3(_joined(scaled, values)))


def _int4(scheme: Scheme, values: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    packed, scales = outs[:2]
    blocks = _blocks(values, scheme)
    low = blocks.amin(dim=(1, 3)).clamp(max=0)
    high = blocks.amax(dim=(1, 3)).clamp(min=0)
    scale = _over(torch.maximum(-low, high), 7.5) if scheme.symmetric else _over(high - low, 15.0)
    finite = torch.isfinite(torch.maximum(-low, high))
    zero = torch.where((scale == 0) | ~finite, 0, (-8 - low / scale).clamp(-8, 7)).round()
    scale = _stored(scale, scales.dtype, finite)
    scales.copy_(scale)
    scaled = torch.where(finite[:, None, :, None], blocks / scale.float()[:, None, :, None], 0)
    if not scheme.symmetric:
        scaled = scaled + zero[:, None, :, None]
        outs[2].copy_(_pack(zero.t()).t())
    packed.copy_(_pack(_joined(scaled, values).clamp(-8, 7).round()))


def add_sums(elements: torch.Tensor, at: int, step: int, lanes: torch.Tensor) -> None:
    """Add what `elements`, (rows, columns) of one byte, make up of the digest of their tensor to `lanes`, (2,) int64.

    `at` is the index of their first word in the packed tensor, `step` how many words are from one row to the next.
    """
    words = elements.contiguous().view(torch.int64)
    rows, columns = (torch.arange(extent, device=words.device) for extent in words.shape)
    x = words + (rows[:, None] * step + columns + at + 1) * _signed(PHI)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shifted(x, 27)) * _signed(_MIX[1])
    x ^= _shifted(x, 31)
    y = x * _signed(LANE_B)
    y ^= _shifted(y, 32)
    lanes += torch.stack((x.sum(), y.sum()))


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64 if number >> 63 else 0)


def _stored(scale: torch.Tensor, dtype: torch.dtype, finite: torch.Tensor) -> torch.Tensor:
    """The scale in its own dtype, which may have no number for one so small: nothing is divided by zero.

    NaN where a block is not `finite`.
    """
    stored = scale.to(dtype)
    stored = torch.where(stored == 0, torch.full_like(stored, _EPSILON), stored)
    return torch.where(finite, stored, torch.full_like(stored, math.nan))


def _e4m3(scaled: torch.Tensor) -> torch.Tensor:
    """Rounded; a NaN has the sign that a GPU gives it."""
    bounded = scaled.clamp(-E4M3_MAX, E4M3_MAX)
    return bounded.masked_fill(scaled.isnan(), math.nan).to(torch.float8_e4m3fn)


def _over(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """The IEEE quotient. By a number of Python's CUDA would multiply with the reciprocal, which has other bits."""
    return values / values.new_full((), divisor)


def _pack(integers: torch.Tensor) -> torch.Tensor:
    """(rows, 8 n) of -8..7 as (rows, n) int32, the first in the lowest bits."""
    words = (integers.to(torch.int64) + 8).view(integers.shape[0], -1, PACKED)
    shifts = torch.arange(0, 4 * PACKED, 4, device=integers.device)
    unsigned = (words << shifts).sum(dim=2)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)


def _blocks(values: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """(blocks down, rows, blocks across, columns); zeros where the last blocks reach beyond the weight."""
    rows, columns = (size or extent for size, extent in zip(scheme.block, values.shape, strict=True))
    below, beside = -values.shape[0] % rows, -values.shape[1] % columns
    if below or beside:
        values = torch.nn.functional.pad(values, (0, beside, 0, below))
    return values.view(values.shape[0] // rows, rows, values.shape[1] // columns, columns)


def _joined(blocks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What `_blocks` took apart, without what it added."""
    down, rows, across, columns = blocks.shape
    return blocks.reshape(down * rows, across * columns)[: values.shape[0], : values.shape[1]]


def _power_up(values: torch.Tensor) -> torch.Tensor:
    """The least powers of two that are not below `values`, which are normal numbers."""
    bits = (values.view(torch.int32) + _ROUND_UP) >> _MANTISSA_BITS << _MANTISSA_BITS
    return bits.view(torch.float32)
