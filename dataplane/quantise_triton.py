# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore,misc,no-any-return"
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917
# A Triton kernel is not Python that a type checker can follow: the checks are off in this one small file.
"""Quantises tiles of weights on a GPU: each element is read once and written once. Imported only when needed.

A row of the table is a tile of at most ROWS x COLUMNS elements, which holds whole blocks; a program takes one:

    source, bytes between its rows, elements, bytes between rows, scales, bytes between rows, zero points,
    bytes between rows, (rows << 32) + columns

Divisions are IEEE's (`tl.div_rn`), so that the bits are those of quantise_torch.py. `FAST` divides by multiplying with
the reciprocal and correcting once with a fused multiply-add, which rounds the same for normal numbers (Markstein, IBM
J. Res. Dev. 34, 1990); tests/gpu/quantised.py compares both. It needs a fused multiply-add, which Triton's interpreter
does not have.
"""

import triton
import triton.language as tl

TABLE_COLUMNS = 9

_E4M3_MAX = tl.constexpr(448.0)
_EPSILON = tl.constexpr(1.1920928955078125e-07)
_LEAST_AMAX = tl.constexpr(1e-4)
_SMALL = tl.constexpr(2.0**-60)
_LARGER = tl.constexpr(2.0**64)


@triton.jit
def _steps(bytes_apart, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Bytes between rows as elements. The product tells the compiler their divisibility; a hint on a load is lost."""
    size: tl.constexpr = DTYPE.primitive_bitwidth // 8
    if size < ALIGN:
        return bytes_apart // ALIGN * (ALIGN // size)
    return bytes_apart // size


@triton.jit
def _load(
    table, DTYPE: tl.constexpr, SERVED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A tile as float32, rounded to the served dtype first; zeros outside of it."""
    row = table + tl.program_id(0).to(tl.int64) * 9
    shape = tl.load(row + 8)
    line, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (line < (shape >> 32).to(tl.int32)) & (column < tl.multiple_of(shape.to(tl.int32), ALIGN))
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE), bitcast=True), ALIGN)
    step = _steps(tl.load(row + 1), DTYPE, ALIGN)
    values = tl.load(source + line * step + column, mask=inside, other=0.0)
    return row, line, column, inside, values.to(SERVED).to(tl.float32)


@triton.jit
def _store(row, at: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, line, column, values, inside):
    """Into the tensor whose address and step are the table's columns `at` and `at` + 1."""
    target = tl.multiple_of(tl.load(row + at).to(tl.pointer_type(DTYPE), bitcast=True), ALIGN)
    step = _steps(tl.load(row + at + 1), DTYPE, ALIGN)
    tl.store(target + line * step + column, values, mask=inside)


@triton.jit
def _divided(values, scale, FAST: tl.constexpr):
    """The quotient, rounded once. `FAST`: where it is so small that e4m3 has no number for it, it may be off."""
    if FAST:
        larger = tl.where(scale < _SMALL, _LARGER, 1.0)  # both by a power of two: what is corrected with stays normal
        scale *= larger
        values *= larger
        inverse = tl.div_rn(1.0, scale)
        first = values * inverse
        return tl.fma(tl.fma(-first, scale, values), inverse, first)
    return tl.div_rn(values, scale + tl.zeros_like(values))


@triton.jit
def _stored(scale, SCALE: tl.constexpr):
    """The scale in its own dtype, which may have no number for one so small: nothing is divided by zero."""
    stored = scale.to(SCALE)
    return tl.where(stored == 0, _EPSILON, stored).to(SCALE)


@triton.jit
def _e4m3(scaled):
    return tl.clamp(scaled, -_E4M3_MAX, _E4M3_MAX).to(tl.float8e4nv)


@triton.jit
def fp8_block(
    table, DTYPE: tl.constexpr, SERVED: tl.constexpr, SCALE: tl.constexpr, UP: tl.constexpr, FAST: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile is one block, or one row of a weight that has a scale for each."""
    row, line, column, inside, values = _load(table, DTYPE, SERVED, ALIGN, ROWS, COLUMNS)
    amax = tl.max(tl.abs(values))
    if UP:
        bits = tl.div_rn(tl.maximum(amax, _LEAST_AMAX), _E4M3_MAX).to(tl.int32, bitcast=True)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(amax, _E4M3_MAX)
    stored = _stored(scale, SCALE)
    tl.store(tl.load(row + 4).to(tl.pointer_type(SCALE), bitcast=True), stored)
    scale = stored.to(tl.float32)
    # At most 449.75, with a scale of 8 bits: the nearest number of e4m3 is 448, without a bound of our own.
    scaled = _divided(values, scale, FAST).to(tl.float8e4nv)
    _store(row, 2, tl.float8e4nv, ALIGN, line, column, scaled, inside)


@triton.jit
def mxfp8(
    table, DTYPE: tl.constexpr, SERVED: tl.constexpr, UP: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blocks are 32 columns of a row."""
    row, line, column, inside, values = _load(table, DTYPE, SERVED, ALIGN, ROWS, COLUMNS)
    blocks = tl.reshape(values, (ROWS, COLUMNS // 32, 32))
    amax = tl.max(tl.abs(blocks), axis=2)
    if UP:
        exponent = (tl.div_rn(amax, _E4M3_MAX + tl.zeros_like(amax)).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    else:
        exponent = tl.maximum(((amax.to(tl.int32, bitcast=True) + 0x200000) >> 23) - 8, 0)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.reshape(blocks * inverse[:, :, None], (ROWS, COLUMNS))
    _store(row, 2, tl.float8e4nv, ALIGN, line, column, _e4m3(scaled), inside)
    across = tl.arange(0, COLUMNS // 32)[None, :]
    shape = tl.load(row + 8)
    there = (line < (shape >> 32).to(tl.int32)) & (across * 32 < shape.to(tl.int32))
    _store(row, 4, tl.uint8, 1, line, across, exponent.to(tl.uint8), there)


@triton.jit
def _even(values):
    """Rounded to the nearest integer, halves to even: exact below 2 ** 22."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def int4(
    table, DTYPE: tl.constexpr, SERVED: tl.constexpr, SCALE: tl.constexpr, SYMMETRIC: tl.constexpr,
    GROUP: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Groups are GROUP columns of a row; ROWS is a multiple of 8, so that zero points fill words."""
    row, line, _column, _inside, values = _load(table, DTYPE, SERVED, ALIGN, ROWS, COLUMNS)
    groups = tl.reshape(values, (ROWS, COLUMNS // GROUP, GROUP))
    low, high = tl.minimum(tl.min(groups, axis=2), 0.0), tl.maximum(tl.max(groups, axis=2), 0.0)
    if SYMMETRIC:
        scale = tl.div_rn(tl.maximum(-low, high), 7.5 + tl.zeros_like(low))
    else:
        scale = tl.div_rn(high - low, 15.0 + tl.zeros_like(low))
    empty = scale == 0
    stored = _stored(scale, SCALE)
    scaled = tl.div_rn(groups, stored.to(tl.float32)[:, :, None] + tl.zeros_like(groups))
    across = tl.arange(0, COLUMNS // GROUP)[None, :]
    shape = tl.load(row + 8)
    rows, columns = (shape >> 32).to(tl.int32), shape.to(tl.int32)
    _store(row, 4, SCALE, 1, line, across, stored, (line < rows) & (across * GROUP < columns))
    if not SYMMETRIC:
        zero = _even(tl.clamp(-8.0 - tl.div_rn(low, tl.where(empty, 1.0, scale)), -8.0, 7.0))
        zero = tl.where(empty, 0.0, zero)
        scaled += zero[:, :, None]
        points = tl.reshape(zero.to(tl.int32) + 8, (ROWS // 8, 8, COLUMNS // GROUP))
        words = tl.sum(points << (tl.arange(0, 8) * 4)[None, :, None], axis=1)
        down = tl.arange(0, ROWS // 8)[:, None]
        _store(row, 6, tl.int32, 1, down, across, words, (down * 8 < rows) & (across * GROUP < columns))
    integers = _even(tl.clamp(scaled, -8.0, 7.0)).to(tl.int32) + 8
    eights = tl.reshape(integers, (ROWS, COLUMNS // 8, 8))
    words = tl.sum(eights << (tl.arange(0, 8) * 4)[None, None, :], axis=2)
    along = tl.arange(0, COLUMNS // 8)[None, :]
    _store(row, 2, tl.int32, 4, line, along, words, (line < rows) & (along * 8 < columns))
