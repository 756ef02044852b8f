# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore,misc,no-any-return"
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917, SIM300
# A Triton kernel is not Python that a type checker can follow: the checks are off in this one small file.
"""Quantizes tiles of weights on a GPU: each element is read once and written once. Imported only when needed.

A row of the table is a tile of at most ROWS x COLUMNS elements, which holds whole blocks; a program takes one:

    source, bytes between its rows, elements, bytes between rows, scales, bytes between rows, zero points,
    bytes between rows, (rows << 32) + columns

Where one scale is of a whole tensor, its tiles are read twice: `fp8_amax` finds the largest magnitude of all of them,
`fp8_tensor` comes behind it in the stream. In the place of the zero points stands where that magnitude is kept, as
bits, which begin as zeros and are ordered as magnitudes are, NaN above all.

Where FP8 is summed up as well (`SUMMED`), what its elements add to the digest of their tensor (tensor_digest.py) is of
the very words that are stored, and in the place of the zero points stand

    the tensor's two sums, (words between rows << 32) + index of the tile's first word in the packed tensor

Divisions are IEEE's (`tl.div_rn`), so that the bits are those of quantize_tasks.py. `FAST` divides by multiplying with
the reciprocal and correcting once with a fused multiply-add, which rounds the same for normal numbers (Markstein, IBM
J. Res. Dev. 34, 1990); tests/gpu/quantized.py compares both. It needs a fused multiply-add, which Triton's interpreter
does not have, and is where PTX is used.
"""

import triton
import triton.language as tl

TABLE_COLUMNS = 9

_E4M3_MAX = tl.constexpr(448.0)
_LEAST_AMAX = tl.constexpr(1e-4)
_SMALL = tl.constexpr(2.0**-60)
_LARGER = tl.constexpr(2.0**64)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_PHI = tl.constexpr(0x9E3779B97F4A7C15)
_LANE_B = tl.constexpr(0xD6E8FEB86659FD93)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


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
        if scale < _SMALL:  # both by a power of two: what is corrected with stays normal
            scale *= _LARGER
            values *= _LARGER
        inverse = tl.div_rn(1.0, scale)
        first = values * inverse
        return tl.fma(tl.fma(first, -scale, values), inverse, first)
    return tl.div_rn(values, scale + tl.zeros_like(values))


@triton.jit
def _stored(scale, finite, SCALE: tl.constexpr):
    """The scale in its own dtype, which may have no number for one so small: 2**-23, and nothing is divided by zero.

    NaN for a block that is not `finite`.
    """
    # As bits: a NaN that was converted would have other ones than the reference's, and on a GPU a bfloat16 that is zero
    # was not found equal to zero.
    if SCALE == tl.float32:
        bits = scale.to(tl.int32, bitcast=True)
        bits = tl.where(finite, tl.where(bits & 0x7FFFFFFF == 0, 0x34000000, bits), 0x7FC00000)
    else:
        nan: tl.constexpr = 0x7FC0 if SCALE == tl.bfloat16 else 0x7E00
        least: tl.constexpr = 0x3400 if SCALE == tl.bfloat16 else 0x0002
        bits = scale.to(SCALE).to(tl.int16, bitcast=True)
        bits = tl.where(finite, tl.where(bits & 0x7FFF == 0, least, bits), nan).to(tl.int16)
    return bits.to(SCALE, bitcast=True)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(values, axis: tl.constexpr, FAST: tl.constexpr):
    """The largest magnitude; NaN where there is one. The interpreter would take a call for each element."""
    if FAST:
        return tl.reduce(tl.abs(values), axis, _larger)
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(scaled):
    return tl.clamp(scaled, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _byte(scaled, place: tl.constexpr):
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint64) << (8 * place)


@triton.jit
def _words(scaled, FAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) float32 as e4m3, eight of them in a word, the first in the lowest byte.

    Threads hold whole words, so that nothing moves between them; as bytes that Triton has converted, they would have to
    be put together one by one.
    """
    even, odd = tl.split(tl.reshape(scaled, (ROWS, COLUMNS // 8, 2, 2, 2)))
    even_low, even_high = tl.split(even)
    odd_low, odd_high = tl.split(odd)
    e0, e4 = tl.split(even_low)
    e1, e5 = tl.split(odd_low)
    e2, e6 = tl.split(even_high)
    e3, e7 = tl.split(odd_high)
    if FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b, c, d; .reg .b32 low, high;"
            " cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
            " cvt.rn.satfinite.e4m3x2.f32 c, $6, $5; cvt.rn.satfinite.e4m3x2.f32 d, $8, $7;"
            " mov.b32 low, {a, b}; mov.b32 high, {c, d}; mov.b64 $0, {low, high}; }",
            "=l,f,f,f,f,f,f,f,f", [e0, e1, e2, e3, e4, e5, e6, e7], dtype=tl.uint64, is_pure=True, pack=1,
        )  # fmt: skip
    low = _byte(e0, 0) | _byte(e1, 1) | _byte(e2, 2) | _byte(e3, 3)
    return low | _byte(e4, 4) | _byte(e5, 5) | _byte(e6, 6) | _byte(e7, 7)


@triton.jit
def _sum(row, line, along, words, inside):
    """Add what the words of a tile, which are stored, make up of both lanes of their tensor's digest."""
    place = tl.load(row + 7).to(tl.uint64)
    # (index + 1) * PHI, with as few products of 64 bits as there are rows.
    begin, step = ((place & 0xFFFFFFFF) + 1) * _PHI, (place >> 32) * _PHI
    x = words + (line.to(tl.uint64) * step + (along.to(tl.uint64) * _PHI + begin))
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    y = x * _LANE_B
    y = y ^ (y >> 32)
    lanes = tl.load(row + 6).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_add(lanes, tl.sum(tl.where(inside, x, 0)).to(tl.int64), sem="relaxed")
    tl.atomic_add(lanes + 1, tl.sum(tl.where(inside, y, 0)).to(tl.int64), sem="relaxed")


@triton.jit
def fp8_block(
    table, DTYPE: tl.constexpr, SERVED: tl.constexpr, SCALE: tl.constexpr, UP: tl.constexpr, FAST: tl.constexpr,
    SUMMED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile is one block, or one row of a weight that has a scale for each."""
    row, line, column, inside, values = _load(table, DTYPE, SERVED, ALIGN, ROWS, COLUMNS)
    amax = _largest(values, None, FAST)
    finite = amax <= _LARGEST
    if UP:
        bits = tl.div_rn(tl.maximum(amax, _LEAST_AMAX), _E4M3_MAX).to(tl.int32, bitcast=True)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(amax, _E4M3_MAX)
    stored = _stored(scale, finite, SCALE)
    tl.store(tl.load(row + 4).to(tl.pointer_type(SCALE), bitcast=True), stored)
    # At most 449.75, with a scale of 8 bits: the nearest number of e4m3 is 448, without a bound of our own.
    scaled = _divided(values, stored.to(tl.float32), FAST)
    if SUMMED:
        words = _words(scaled, FAST, ROWS, COLUMNS)
        shape, along = tl.load(row + 8), tl.arange(0, COLUMNS // 8)[None, :]
        there = (line < (shape >> 32).to(tl.int32)) & (along < shape.to(tl.int32) // 8)
        # A word at a time, as threads hold them: for wider stores they would hand each other every second one.
        _store(row, 2, tl.uint64, 8, line, along, words, there)
        _sum(row, line, along, words, there)
    else:
        _store(row, 2, tl.float8e4nv, ALIGN, line, column, scaled.to(tl.float8e4nv), inside)


@triton.jit
def fp8_amax(
    table, DTYPE: tl.constexpr, SERVED: tl.constexpr, FAST: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile is any part of a tensor."""
    row, _line, _column, _inside, values = _load(table, DTYPE, SERVED, ALIGN, ROWS, COLUMNS)
    bits = _largest(values, None, FAST).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(tl.load(row + 6).to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def fp8_tensor(
    table, DTYPE: tl.constexpr, SERVED: tl.constexpr, SCALE: tl.constexpr, FAST: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile is any part of a tensor. All of them store the same scale."""
    row, line, column, inside, values = _load(table, DTYPE, SERVED, ALIGN, ROWS, COLUMNS)
    found = tl.load(tl.load(row + 6).to(tl.pointer_type(tl.int32), bitcast=True))
    amax = found.to(tl.float32, bitcast=True)
    stored = _stored(tl.div_rn(amax, _E4M3_MAX), amax <= _LARGEST, SCALE)
    tl.store(tl.load(row + 4).to(tl.pointer_type(SCALE), bitcast=True), stored)
    scaled = _divided(values, stored.to(tl.float32), FAST)
    _store(row, 2, tl.float8e4nv, ALIGN, line, column, scaled.to(tl.float8e4nv), inside)


@triton.jit
def mxfp8(
    table, DTYPE: tl.constexpr, SERVED: tl.constexpr, UP: tl.constexpr, FAST: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Blocks are 32 columns of a row."""
    row, line, column, inside, values = _load(table, DTYPE, SERVED, ALIGN, ROWS, COLUMNS)
    blocks = tl.reshape(values, (ROWS, COLUMNS // 32, 32))
    amax = _largest(blocks, 2, FAST)
    finite = amax <= _LARGEST
    if UP:
        exponent = (tl.div_rn(amax, _E4M3_MAX + tl.zeros_like(amax)).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    else:
        exponent = tl.maximum(((amax.to(tl.int32, bitcast=True) + 0x200000) >> 23) - 8, 0)
    exponent = tl.where(finite, exponent, 255)
    # As bits: Triton compares the constants of a module with what they were, and a NaN is not equal to itself.
    inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.int32).to(tl.float32, bitcast=True)
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
    GROUP: tl.constexpr, FAST: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Groups are GROUP columns of a row; ROWS is a multiple of 8 where there are zero points, which fill words.

    A group that is shorter than GROUP is a tile's only one: the zeros that fill it up are in every range.
    """
    row, line, _column, _inside, values = _load(table, DTYPE, SERVED, ALIGN, ROWS, COLUMNS)
    groups = tl.reshape(values, (ROWS, COLUMNS // GROUP, GROUP))
    low, high = tl.minimum(tl.min(groups, axis=2), 0.0), tl.maximum(tl.max(groups, axis=2), 0.0)
    finite = _largest(groups, 2, FAST) <= _LARGEST
    if SYMMETRIC:
        scale = tl.div_rn(tl.maximum(-low, high), 7.5 + tl.zeros_like(low))
    else:
        scale = tl.div_rn(high - low, 15.0 + tl.zeros_like(low))
    empty = (scale == 0) | ~finite
    stored = _stored(scale, finite, SCALE)
    scaled = tl.div_rn(groups, stored.to(tl.float32)[:, :, None] + tl.zeros_like(groups))
    scaled = tl.where(finite[:, :, None], scaled, 0.0)
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
