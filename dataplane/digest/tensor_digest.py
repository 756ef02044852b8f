"""Digests of tensors as they were sent and as they arrived, the same on a CPU and on a GPU.

Algorithm ``mix64x2``, 16 bytes per tensor. A tensor's bytes are read as little-endian 64-bit words w[0], w[1], ..., the
last one padded with zeros; all arithmetic is modulo 2**64::

    x = splitmix64(w[i] + (i + 1) * PHI)            one word at one place, a bijection of the word
    y = x * LANE_B;  y ^= y >> 32                   a second, independent view of it
    A = sum of x,  B = sum of y                     sums, so that any order and any cut of the work gives them
    digest = splitmix64(A + bytes * LANE_A), splitmix64(B + bytes * LANE_B), both little-endian

It detects flipped bits, words that changed places, shifts, omissions and a wrong length. It does not resist an attacker
constructing a collision: the peers of a transfer are trusted, the path between them is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ..errors import DigestMismatch
from .nonfinite import add_counts

ALGORITHM: Final = "mix64x2"
DIGEST_BYTES: Final = 16

PHI: Final = 0x9E3779B97F4A7C15
LANE_A: Final = 0xD1B54A32D192ED03
LANE_B: Final = 0xD6E8FEB86659FD93

_MASK: Final = 2**64 - 1
_CHUNK_WORDS: Final = 16 * 1024
"""Two arrays of this many words stay in the second-level cache of current CPUs; twice as many is a fifth slower."""
_REPACK_WORDS: Final = 128 * 1024

_Words = npt.NDArray[np.uint64]
_Bounds = npt.NDArray[np.int64]


def digest_tensors(memory: torch.Tensor, offsets: Sequence[int]) -> bytes:
    """Digests of the tensors packed in `memory` (1-D, uint8), concatenated, 16 bytes each.

    `offsets` holds where each tensor begins and, last, where the last one ends (`Manifest.offsets_of`). On a GPU this
    is one kernel on the current stream, and the call returns when it has run.
    """
    return _digest(memory, offsets, None)[0]


def digest_and_count(memory: torch.Tensor, offsets: Sequence[int], masks: _Words) -> tuple[bytes, _Bounds]:
    """`digest_tensors`, and (tensors,) how many elements of each are NaN or infinite, in the same pass.

    `masks`, (tensors,), are those of the tensors' dtypes (nonfinite.py).
    """
    if len(masks) != len(offsets) - 1:
        raise ValueError(f"{len(masks)} masks and {len(offsets)} offsets do not fit together")
    return _digest(memory, offsets, masks)


def _digest(memory: torch.Tensor, offsets: Sequence[int], masks: _Words | None) -> tuple[bytes, _Bounds]:
    """Digests, and counts where `masks`, (tensors,), are given: those of nonfinite.py."""
    bounds = np.asarray(offsets, dtype=np.int64)
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(f"expected contiguous 1-D uint8 memory, found {memory.dtype} of shape {tuple(memory.shape)}")
    if len(bounds) < 2 or bounds[0] < 0 or bounds[-1] > memory.numel() or bool((np.diff(bounds) <= 0).any()):
        raise ValueError(f"offsets must grow within the {memory.numel()} bytes of the memory")
    if memory.device.type == "cuda":
        from .digest_triton import sum_tensors  # noqa: PLC0415  triton and a compiler are not there without a GPU

        lanes, counts = sum_tensors(memory, bounds, masks)
    else:
        lanes, counts = _accumulate_bytes(memory.numpy(), bounds, masks)
    return finish_digests(lanes, np.diff(bounds)), counts


def check_digests(memory: torch.Tensor, offsets: Sequence[int], expected: bytes, names: Sequence[str]) -> None:
    """Raise `DigestMismatch`, naming the first tensor, unless the tensors in `memory` have the `expected` digests."""
    if len(expected) != DIGEST_BYTES * len(names) or len(offsets) != len(names) + 1:
        raise ValueError(
            f"{len(names)} names, {len(offsets)} offsets and {len(expected)} digest bytes do not fit together"
        )
    found = digest_tensors(memory, offsets)
    if found == expected:
        return
    for at, name in enumerate(names):
        cut = slice(at * DIGEST_BYTES, (at + 1) * DIGEST_BYTES)
        if found[cut] != expected[cut]:
            raise DigestMismatch(name, found[cut].hex(), expected[cut].hex())


def mix_words(words: _Words, at: _Bounds) -> _Words:
    """(2,): the contribution to both lanes of words of one tensor, at these indexes of its packed words."""
    x = words + (at.astype(np.uint64) + np.uint64(1)) * np.uint64(PHI)
    scratch = np.empty_like(x)
    _splitmix(x, scratch)
    y = x * np.uint64(LANE_B)
    y ^= y >> np.uint64(32)
    return np.array([np.add.reduce(x), np.add.reduce(y)], dtype=np.uint64)


def finish_digests(lanes: _Words, nbytes: _Bounds) -> bytes:
    """Digests from the sums of both lanes, (2, tensors), and the tensors' sizes in bytes."""
    lengths = nbytes.astype(np.uint64)
    out = np.empty((len(lengths), 2), dtype="<u8")
    for lane, factor in enumerate((LANE_A, LANE_B)):
        column = lanes[lane] + lengths * np.uint64(factor)
        _splitmix(column, np.empty_like(column))
        out[:, lane] = column
    return out.tobytes()


@dataclass(frozen=True)
class _Sums:
    """What is added up of some tensors."""

    lanes: _Words
    """(2, tensors)."""
    masks: _Words | None
    """(tensors,): those of nonfinite.py; None where nothing is counted."""
    counts: _Bounds
    """(tensors,): elements that are not finite."""

    def of(self, first: int, last: int) -> _Sums:
        """Those of a run of tensors."""
        masks = None if self.masks is None else self.masks[first:last]
        return _Sums(self.lanes[:, first:last], masks, self.counts[first:last])


def _accumulate_bytes(
    data: npt.NDArray[np.uint8], bounds: _Bounds, masks: _Words | None = None
) -> tuple[_Words, _Bounds]:
    """Both lanes and the count of every tensor. Tensors on 8-byte boundaries are read in place, all in one pass."""
    tensors = len(bounds) - 1
    sums = _Sums(np.zeros((2, tensors), dtype=np.uint64), masks, np.zeros(tensors, np.int64))
    starts = bounds[:-1]
    if bool(((starts + data.ctypes.data) % 8 == 0).all()):
        first, whole = int(bounds[0]), int(bounds[-1] - bounds[0]) // 8 * 8
        word_bounds = (bounds - first + 7) // 8
        words = data[first : first + whole].view("<u8").astype(np.uint64, copy=False)
        if whole:
            _accumulate(words, np.minimum(word_bounds, whole // 8), sums)
        if first + whole < bounds[-1]:
            tail = np.zeros(8, dtype=np.uint8)
            tail[: int(bounds[-1]) - first - whole] = data[first + whole : int(bounds[-1])]
            last = np.array([word_bounds[-2] - whole // 8, 1], dtype=np.int64)
            _accumulate(tail.view("<u8").astype(np.uint64, copy=False), last, sums.of(tensors - 1, tensors))
    else:
        _accumulate_repacked(data, bounds, sums)
    return sums.lanes, sums.counts


def _accumulate_repacked(data: npt.NDArray[np.uint8], bounds: _Bounds, sums: _Sums) -> None:
    """Copy tensors to 8-byte boundaries, a cache-sized group at a time: packed 2-byte tensors of odd length need it."""
    scratch = np.zeros(_REPACK_WORDS, dtype="<u8")
    as_bytes = scratch.view(np.uint8)
    group: list[int] = [0]
    first = 0

    def flush(last: int) -> None:
        nonlocal first
        if last > first:
            words = scratch[: group[-1]].astype(np.uint64, copy=False)
            _accumulate(words, np.array(group, dtype=np.int64), sums.of(first, last))
        first = last
        del group[1:]

    edges: list[int] = bounds.tolist()
    for at, (start, end) in enumerate(pairwise(edges)):
        words = (end - start + 7) // 8
        if group[-1] + words > _REPACK_WORDS:
            flush(at)
        if words > _REPACK_WORDS:
            for done in range(0, words, _REPACK_WORDS):
                piece = data[start + done * 8 : min(end, start + (done + _REPACK_WORDS) * 8)]
                count = (len(piece) + 7) // 8
                scratch[count - 1] = 0
                as_bytes[: len(piece)] = piece
                here = scratch[:count].astype(np.uint64, copy=False)
                _accumulate(here, np.array([-done, count]), sums.of(at, at + 1))
            first = at + 1
            continue
        here_at = group[-1]
        scratch[here_at + words - 1] = 0
        as_bytes[here_at * 8 : here_at * 8 + end - start] = data[start:end]
        group.append(here_at + words)
    flush(len(edges) - 1)


def _accumulate(words: _Words, bounds: _Bounds, sums: _Sums) -> None:
    """Add `words` to the sums of the tensors that begin at the word indices `bounds`; the last bound is the end.

    A first bound below zero says that the first tensor began that many words earlier. Bounds may repeat only at the end
    (a last tensor whose only word is a tail that comes later).
    """
    lanes = sums.lanes
    size = min(_CHUNK_WORDS, len(words))
    ramp = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(PHI)
    x, y = np.empty(size, dtype=np.uint64), np.empty(size, dtype=np.uint64)
    for low in range(0, len(words), size):
        high = min(low + size, len(words))
        count = high - low
        first = int(np.searchsorted(bounds, low, side="right")) - 1
        last = int(np.searchsorted(bounds, high, side="left"))
        here = bounds[first:last]
        cuts = np.maximum(here - low, 0)
        a, b = x[:count], y[:count]
        np.add(words[low:high], ramp[:count], out=a)
        if sums.masks is not None:
            add_counts(words[low:high], cuts, sums.masks[first:last], sums.counts[first:last])
        if len(here) == 1:
            np.add(a, np.uint64((low - int(here[0])) * PHI & _MASK), out=a)
        else:
            shifts = (low - here).astype(np.uint64) * np.uint64(PHI)
            np.add(a, np.repeat(shifts, np.diff(cuts, append=count)), out=a)
        _splitmix(a, b)
        lanes[0, first:last] += np.add.reduceat(a, cuts)
        np.multiply(a, np.uint64(LANE_B), out=a)
        np.right_shift(a, np.uint64(32), out=b)
        np.bitwise_xor(a, b, out=a)
        lanes[1, first:last] += np.add.reduceat(a, cuts)


def _splitmix(x: _Words, scratch: _Words) -> None:
    """The finalizer of splitmix64, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0)):
        np.right_shift(x, np.uint64(shift), out=scratch)
        np.bitwise_xor(x, scratch, out=x)
        if factor:
            np.multiply(x, np.uint64(factor), out=x)
