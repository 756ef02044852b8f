# pyright: basic
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore,misc,no-any-return"
# ruff: noqa: ANN001, ANN202, N803, PLR0917, SIM102
# A Triton kernel is not Python that a type checker can follow: the checks are off in this one small file.
"""Kernels that copy and sum the tiles of tiles.py, one launch for each vector size, and write their tables.

Imported only when needed. A thread moves several 16-byte vectors, and issues all loads before the first store. Triton
alone would load 8 bytes at a time where it cannot see that all sides are aligned, so loads and stores are PTX.
Addresses may point into a peer GPU's memory that was opened for this device.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ..digest import digest_triton
from .tiles import TILE_VECTORS

_PHI = tl.constexpr(0x9E3779B97F4A7C15)
_LANE_B = tl.constexpr(0xD6E8FEB86659FD93)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)

_carried, _signs, _count = digest_triton.carried, digest_triton.signs, digest_triton.count


@triton.jit
def _place(begin, shape, magic, BLOCK: tl.constexpr):
    """Row, column and whether they are inside, of some vectors of a tile."""
    rows, width = (shape >> 32).to(tl.int32), shape.to(tl.int32)
    at = begin + tl.arange(0, BLOCK)
    line = tl.where(width == 1, at, tl.umulhi(at.to(tl.uint32), magic.to(tl.uint32)).to(tl.int32))
    return line, at - line * width, at < rows * width


@triton.jit
def _copy_16(table, TILE: tl.constexpr):
    row = table + tl.program_id(0).to(tl.int64) * 6
    line, column, inside = _place(0, tl.load(row + 4), tl.load(row + 5), TILE)
    source = tl.load(row) + line * tl.load(row + 2) + column * 16
    target = tl.load(row + 1) + line * tl.load(row + 3) + column * 16
    keep = inside.to(tl.int32)
    low, high = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.u64 $0, 0; mov.u64 $1, 0;"
        " @p ld.global.L1::no_allocate.v2.u64 {$0, $1}, [$2]; }",
        "=&l,=&l,l,r", [source, keep], dtype=(tl.int64, tl.int64), is_pure=False, pack=1,
    )  # fmt: skip
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.global.L1::no_allocate.v2.u64 [$1], {$2, $3}; mov.u32 $0, 0; }",
        "=r,l,l,l,r", [target, low, high, keep], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _copy_small(table, VECTOR: tl.constexpr, TILE: tl.constexpr):
    row = table + tl.program_id(0).to(tl.int64) * 6
    line, column, inside = _place(0, tl.load(row + 4), tl.load(row + 5), TILE)
    source = tl.load(row) + line * tl.load(row + 2) + column * VECTOR
    target = tl.load(row + 1) + line * tl.load(row + 3) + column * VECTOR
    if VECTOR == 8:
        tl.store(target.to(tl.pointer_type(tl.int64)), tl.load(source.to(tl.pointer_type(tl.int64)), inside), inside)
    elif VECTOR == 4:
        tl.store(target.to(tl.pointer_type(tl.int32)), tl.load(source.to(tl.pointer_type(tl.int32)), inside), inside)
    elif VECTOR == 2:
        tl.store(target.to(tl.pointer_type(tl.int16)), tl.load(source.to(tl.pointer_type(tl.int16)), inside), inside)
    else:
        tl.store(target.to(tl.pointer_type(tl.int8)), tl.load(source.to(tl.pointer_type(tl.int8)), inside), inside)


@triton.jit
def _mixed(word, index):
    """The contribution of a word at its place to both lanes (tensor_digest.py)."""
    x = word + (index + 1).to(tl.uint64) * _PHI
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    y = x * _LANE_B
    return x, y ^ (y >> 32)


@triton.jit
def _words(first, step, item_step, line, column, inside, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    """The word at a line and column, and the one behind it where they are read in pairs."""
    second = tl.zeros((BLOCK,), dtype=tl.uint64)
    if ITEM == 16:
        address = first + line * step + column * 16
        word, second = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.u64 $0, 0; mov.u64 $1, 0;"
            " @p ld.global.L1::no_allocate.v2.u64 {$0, $1}, [$2]; }",
            "=&l,=&l,l,r", [address, inside.to(tl.int32)], dtype=(tl.uint64, tl.uint64), is_pure=True, pack=1,
        )  # fmt: skip
    elif ITEM == 8:
        address = first + line * step + column * item_step
        word = tl.load(address.to(tl.pointer_type(tl.uint64)), mask=inside, other=0)
    else:
        address = first + line * step + column * (item_step * (8 // ITEM))
        word = tl.zeros((BLOCK,), dtype=tl.uint64)
        for part in tl.static_range(8 // ITEM):  # pyright: ignore[reportGeneralTypeIssues]
            at = address + part * item_step
            if ITEM == 4:
                element = tl.load(at.to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
            elif ITEM == 2:
                element = tl.load(at.to(tl.pointer_type(tl.uint16)), mask=inside, other=0)
            else:
                element = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
            word |= element.to(tl.uint64) << (part * ITEM * 8)
    return word, second


@triton.jit
def _sum_words(table, lanes, masks, counts, COUNTED: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    row = table + tl.program_id(0).to(tl.int64) * 8
    first, step, item_step = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    word_at, word_step, shape, magic = tl.load(row + 3), tl.load(row + 4), tl.load(row + 6), tl.load(row + 7)
    group = tl.load(row + 5)
    sum_a = tl.zeros((BLOCK,), dtype=tl.uint64)
    sum_b = tl.zeros((BLOCK,), dtype=tl.uint64)
    seen = tl.zeros((BLOCK,), dtype=tl.uint64)
    mask = tl.load(masks + group).to(tl.uint64, bitcast=True) if COUNTED else tl.full((), 0, tl.uint64)
    for begin in range(0, (shape >> 32).to(tl.int32) * shape.to(tl.int32), BLOCK):
        line, column, inside = _place(begin, shape, magic, BLOCK)
        word, second = _words(first, step, item_step, line, column, inside, ITEM, BLOCK)
        index = word_at + line * word_step + column * (2 if ITEM == 16 else 1)
        if COUNTED:
            seen |= _carried(word, mask)
        if ITEM == 16:
            if COUNTED:
                seen |= _carried(second, mask)
            x, y = _mixed(second, index + 1)
            sum_a += tl.where(inside, x, 0)
            sum_b += tl.where(inside, y, 0)
        x, y = _mixed(word, index)
        sum_a += tl.where(inside, x, 0)
        sum_b += tl.where(inside, y, 0)
    tl.atomic_add(lanes + group * 2, tl.sum(sum_a).to(tl.int64), sem="relaxed")
    tl.atomic_add(lanes + group * 2 + 1, tl.sum(sum_b).to(tl.int64), sem="relaxed")
    if COUNTED:  # which elements they are is looked for where there is one: a second pass, over this tile alone
        if tl.max((seen & _signs(mask) != 0).to(tl.int32)) > 0:  # pyright: ignore[reportOperatorIssue]
            found = tl.zeros((BLOCK,), dtype=tl.uint64)
            for begin in range(0, (shape >> 32).to(tl.int32) * shape.to(tl.int32), BLOCK):
                line, column, inside = _place(begin, shape, magic, BLOCK)
                word, second = _words(first, step, item_step, line, column, inside, ITEM, BLOCK)
                found += (_carried(word, mask) & _signs(mask)) >> 7
                found += (_carried(second, mask) & _signs(mask)) >> 7
            tl.atomic_add(counts + group, _count(found), sem="relaxed")


def copy(table: torch.Tensor, vector: int) -> None:
    """Copy every tile of `table`, (tiles, 6) int64 on the device, on the current stream."""
    if vector == 16:
        _copy_16[(len(table),)](table, TILE=TILE_VECTORS, num_warps=8)  # pyright: ignore[reportCallIssue]
    else:
        _copy_small[(len(table),)](table, VECTOR=vector, TILE=TILE_VECTORS, num_warps=8)  # pyright: ignore[reportCallIssue]


def accumulate(
    table: torch.Tensor, item: int, lanes: torch.Tensor, masks: torch.Tensor | None, counts: torch.Tensor
) -> None:
    """Add the sums of every tile of `table`, (tiles, 8) int64, to `lanes`, (groups, 2) int64, on the current stream.

    With `masks`, (groups,) int64 of nonfinite.py, elements that are not finite to `counts`, (groups,) int64.
    """
    looked_for = counts if masks is None else masks
    _sum_words[(len(table),)](
        table, lanes, looked_for, counts, COUNTED=masks is not None, ITEM=item, BLOCK=1024,
        num_warps=8,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip


def as_lanes(lanes: torch.Tensor) -> npt.NDArray[np.uint64]:
    """(2, groups): waits for the kernels."""
    return np.ascontiguousarray(lanes.cpu().numpy().view(np.uint64).T)


_BLOCK = 256


@triton.jit(do_not_specialize=["rows", "tiles", "steps", "places", "most"])
def _write(table, records, rows, tiles, steps, places, most, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = tile < tiles
    width = 9 + 5 * (places + 2)
    low, high = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64) + rows
    for _ in range(steps):  # the first row that ends behind this tile
        half = (low + high) // 2
        behind = tl.load(records + half * width, mask=low < high, other=0) <= tile
        low, high = tl.where((low < high) & behind, half + 1, low), tl.where((low < high) & ~behind, half, high)
    record = records + tl.minimum(low, rows - 1) * width
    number = tile - tl.load(record + 1)
    along = tl.load(record + 8)
    part, number = number % along, number // along
    along = tl.load(record + 7)
    last, number = number % along, number // along
    along = tl.load(record + 6)
    middle, first = number % along, number // along
    row = table + tile * (places + 2)
    runs, vectors = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for place in range(places + 2):
        form = record + 9 + 5 * place
        found = tl.load(form) + first * tl.load(form + 1) + middle * tl.load(form + 2)
        found += last * tl.load(form + 3) + part * tl.load(form + 4)
        tl.store(row + place, found, inside)
        runs = tl.where(place == places, found, runs)
        vectors = tl.where(place == places + 1, found, vectors)
    together = tl.minimum(tl.load(record + 2), tl.load(record + 3) - runs)
    wide = tl.minimum(tl.load(record + 4) - vectors, most)
    magic = tl.where(wide > 1, ((1 << 32) + wide - 1) // tl.maximum(wide, 1), 0)
    tl.store(row + places, (together << 32) | wide, inside)
    tl.store(row + places + 1, magic, inside)


def write(table: torch.Tensor, records: torch.Tensor, most: int) -> None:
    """Fill `table`, (tiles, places + 2), from the `records` of the rows (tiles.py), on the current stream."""
    tiles, columns = table.shape
    steps = len(records).bit_length()
    grid = (triton.cdiv(tiles, _BLOCK),)
    with torch.cuda.device(table.device) if table.is_cuda else torch.no_grad():
        _write[grid](table, records, len(records), tiles, steps, columns - 2, most, BLOCK=_BLOCK)  # pyright: ignore[reportArgumentType]
