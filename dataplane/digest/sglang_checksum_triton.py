# pyright: basic
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore,misc,no-any-return"
# ruff: noqa: ANN001, ANN202
# A Triton kernel is not Python that a type checker can follow: the checks are off in this one small file.
"""The lanes of `fmix` on a GPU: one launch per bucket, a program per segment. Imported only when needed."""

import torch
import triton
import triton.language as tl

from . import sglang_checksum as fmix

BLOCK = 1024

_TILE = tl.constexpr(fmix.TILE_WORDS)
_SEED_A = tl.constexpr(fmix.SEED_A)
_SEED_B = tl.constexpr(fmix.SEED_B)
_POSITION_A = tl.constexpr(fmix.POSITION_A)
_POSITION_B = tl.constexpr(fmix.POSITION_B)
_FMIX_1 = tl.constexpr(fmix.FMIX_1)
_FMIX_2 = tl.constexpr(fmix.FMIX_2)


@triton.jit
def _fmix(x):
    x ^= x >> 16
    x = x * tl.full((), _FMIX_1, tl.uint32)
    x ^= x >> 13
    x = x * tl.full((), _FMIX_2, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _sum_segments(memory, table, lanes, BLOCK: tl.constexpr):  # noqa: N803
    row = table + tl.program_id(0).to(tl.int64) * 4
    words = (memory.to(tl.int64) + tl.load(row)).to(tl.pointer_type(tl.uint32))
    count = tl.load(row + 1)
    begin = tl.load(row + 2)
    lane = (tl.load(row + 3) + begin // _TILE) * 2
    sum_a = tl.zeros((BLOCK,), dtype=tl.uint32)
    sum_b = tl.zeros((BLOCK,), dtype=tl.uint32)
    for at in range(0, count, BLOCK):
        index = at + tl.arange(0, BLOCK)
        inside = index < count
        word = tl.load(words + index, mask=inside, other=0)
        place = (begin + index).to(tl.uint32)
        mixed_a = (place * tl.full((), _POSITION_A, tl.uint32) + tl.full((), _SEED_A, tl.uint32)) ^ (
            (place << 15) | (place >> 17)
        )
        mixed_b = (place * tl.full((), _POSITION_B, tl.uint32) + tl.full((), _SEED_B, tl.uint32)) ^ (
            (place << 13) | (place >> 19)
        )
        sum_a += tl.where(inside, _fmix(word ^ mixed_a), 0).to(tl.uint32)
        sum_b += tl.where(inside, _fmix(word ^ mixed_b), 0).to(tl.uint32)
    tl.atomic_add(lanes + lane, tl.sum(sum_a).to(tl.uint32).to(tl.int32, bitcast=True))
    tl.atomic_add(lanes + lane + 1, tl.sum(sum_b).to(tl.uint32).to(tl.int32, bitcast=True))


def accumulate(memory: torch.Tensor, table: torch.Tensor, lanes: torch.Tensor) -> None:
    """Add the segments of `table` (int64, [segments, 4], on the device) in `memory` to `lanes` (int32, [tiles, 2]).

    Asynchronous, on the current stream.
    """
    if len(table):
        with torch.cuda.device_of(memory):
            _sum_segments[(len(table),)](memory, table, lanes, BLOCK=BLOCK)  # pyright: ignore[reportArgumentType] - a kernel is not called as it is written
