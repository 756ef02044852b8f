"""The arithmetic of every scheme with torch: the reference, and what runs on a CPU.

The formats are those of the libraries that define them, bit for bit (tests/dataplane/quantize/test_quantize_tasks.py
compares): compressed-tensors 0.18 (`calculate_qparams`, `quantize`, `pack_to_int32`) computed in float32, SGLang's
`per_block_cast_to_fp8` for scales that are powers of two. Two bits differ: the sign of a zero, which compressed-tensors
drops, and MXFP8's exponent where a block holds subnormal numbers alone, 1 here and 0 in SGLang. What becomes of a block
with a NaN or an infinity, which those libraries leave open, is said in schemes.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from ..digest import LANE_B, PHI
from .schemes import PACKED, Element, Scaling, Scheme

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
