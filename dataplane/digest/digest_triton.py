# pyright: basic
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore,misc,no-any-return"
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917, SIM102
# A Triton kernel is not Python that a type checker can follow: the checks are off in this one small file.
"""Sums of digests on a GPU: one launch per bucket, a program per segment. Imported only when needed.

For ``mix64x2`` (tensor_digest.py) a segment is a run of at most `SEGMENT_WORDS` words of one tensor. Every word is put
together from the two aligned 8-byte granules that hold it, so tensors may begin at any byte, and every granule that is
read holds at least one byte of the tensor (granules never straddle an allocation).
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from . import sglang_checksum as fmix

SEGMENT_WORDS = 16 * 1024
BLOCK = 2048

_PHI = tl.constexpr(0x9E3779B97F4A7C15)
_LANE_B = tl.constexpr(0xD6E8FEB86659FD93)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _word(granules, index, nbytes, skip, WORDS: tl.constexpr):
    """Words of a tensor that begins `skip` bytes behind an aligned granule, and whether they are inside of it."""
    shift = (skip * 8).to(tl.uint64)
    left = nbytes - index * 8
    inside = left > 0
    low = tl.load(granules + index, mask=inside, other=0)
    reach = tl.where(skip > 0, skip, -8 * WORDS)
    high = tl.load(granules + index + 1, mask=left + reach > 8, other=0)
    word = low >> shift
    word = tl.where(skip > 0, word | (high << ((64 - shift) & 63)), word)
    extra = (tl.maximum(8 - left, 0) * 8).to(tl.uint64)
    return tl.where(extra > 0, (word << (extra & 63)) >> (extra & 63), word), inside


@triton.jit
def carried(word, mask):
    """Words in which elements that are not finite have their sign set: see nonfinite.py."""
    return (word & mask) + (mask & ~(mask << 1))


@triton.jit
def signs(mask):
    """The bits of `carried` that count."""
    return (mask << 1) & ~mask


@triton.jit
def count(found):
    """How many such elements `found` has, of which each byte is a number of elements; at most 255 in all."""
    return tl.sum(((found * 0x0101010101010101) >> 56).to(tl.int64))


@triton.jit
def _sum_segments(memory, table, lanes, masks, counts, COUNTED: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = table + tl.program_id(0) * 4
    address = memory.to(tl.int64) + tl.load(row)
    position = tl.load(row + 1)
    nbytes = tl.load(row + 2)
    tensor = tl.load(row + 3)
    skip = address % 8
    granules = (address - skip).to(tl.pointer_type(tl.uint64))
    sum_a = tl.zeros((BLOCK,), dtype=tl.uint64)
    sum_b = tl.zeros((BLOCK,), dtype=tl.uint64)
    seen = tl.zeros((BLOCK,), dtype=tl.uint64)
    mask = tl.load(masks + tensor).to(tl.uint64, bitcast=True) if COUNTED else tl.full((), 0, tl.uint64)
    for at in range(0, WORDS, BLOCK):
        index = at + tl.arange(0, BLOCK).to(tl.int64)
        word, inside = _word(granules, index, nbytes, skip, WORDS)
        if COUNTED:
            seen |= carried(word, mask)
        x = word + (position + index + 1).to(tl.uint64) * _PHI
        x = (x ^ (x >> 30)) * _MIX_1
        x = (x ^ (x >> 27)) * _MIX_2
        x = x ^ (x >> 31)
        y = x * _LANE_B
        y = y ^ (y >> 32)
        sum_a += tl.where(inside, x, 0)
        sum_b += tl.where(inside, y, 0)
    tl.atomic_add(lanes + tensor * 2, tl.sum(sum_a).to(tl.int64))
    tl.atomic_add(lanes + tensor * 2 + 1, tl.sum(sum_b).to(tl.int64))
    if COUNTED:  # which elements they are is looked for where there is one: a second pass, over this segment alone
        if tl.max((seen & signs(mask) != 0).to(tl.int32)) > 0:  # pyright: ignore[reportOperatorIssue]
            found = tl.zeros((BLOCK,), dtype=tl.uint64)
            for at in range(0, WORDS, BLOCK):
                word, _inside = _word(granules, at + tl.arange(0, BLOCK).to(tl.int64), nbytes, skip, WORDS)
                found += (carried(word, mask) & signs(mask)) >> 7
            tl.atomic_add(counts + tensor, count(found))


def segments(bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rows of (first byte, first word within the tensor, bytes, tensor), each within one tensor."""
    sizes = np.diff(bounds)
    pieces = -(-sizes // (SEGMENT_WORDS * 8))
    tensor = np.repeat(np.arange(len(sizes)), pieces)
    piece = np.arange(len(tensor)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    skipped = piece * SEGMENT_WORDS * 8
    nbytes = np.minimum(sizes[tensor] - skipped, SEGMENT_WORDS * 8)
    return np.stack([bounds[:-1][tensor] + skipped, piece * SEGMENT_WORDS, nbytes, tensor], axis=1).astype(np.int64)


def sum_tensors(
    memory: torch.Tensor, bounds: npt.NDArray[np.int64], masks: npt.NDArray[np.uint64] | None = None
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Both lanes of every tensor, as tensor_digest.py defines them; waits for the kernel.

    And (tensors,): the elements that are not finite, where `masks`, (tensors,), of nonfinite.py are given.
    """
    table = torch.from_numpy(segments(bounds)).to(memory.device)
    tensors = len(bounds) - 1
    sums = torch.zeros((tensors, 3), dtype=torch.int64, device=memory.device)
    lanes, counts = sums.view(-1)[: 2 * tensors], sums.view(-1)[2 * tensors :]
    looked_for = counts if masks is None else torch.from_numpy(masks.view(np.int64)).to(memory.device)
    with torch.cuda.device_of(memory):
        _sum_segments[(len(table),)](
            memory, table, lanes, looked_for, counts, COUNTED=masks is not None, WORDS=SEGMENT_WORDS, BLOCK=BLOCK,
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
    found = sums.view(-1).cpu().numpy()
    return np.ascontiguousarray(found[: 2 * tensors].view(np.uint64).reshape(-1, 2).T), found[2 * tensors :]


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
def _sum_checksums(memory, table, lanes, BLOCK: tl.constexpr):
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


def sum_checksums(memory: torch.Tensor, table: torch.Tensor, lanes: torch.Tensor) -> None:
    """Add the segments of `table` (int64, [segments, 4], on the device) in `memory` to `lanes` (int32, [tiles, 2]).

    Asynchronous, on the current stream.
    """
    if len(table):
        with torch.cuda.device_of(memory):
            _sum_checksums[(len(table),)](memory, table, lanes, BLOCK=1024)  # pyright: ignore[reportArgumentType] - a kernel is not called as it is written
