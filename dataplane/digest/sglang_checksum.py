"""The checksum that SGLang's weights_checker gives of a parameter on a GPU, computed from its parts. Pure numpy.

SGLang hashes the live parameter (``gpu_tensor_hash``, kernels/ops/memory/gpu_tensor_hash.py, the same arithmetic from
0.5.12 to 0.5.23): every 32-bit word is mixed with its position in two lanes, lanes are summed over tiles of 8192 words,
every tile is finished with the number of bytes, and the sum of the tiles is finished again. Sums commute, so parts
may come in any order from any bucket; a publisher predicts the checksum without ever holding the fused parameter.

Parts are *segments*: rows of (first byte in the bucket, words, first word in the parameter, first tile of the
parameter), each a contiguous run within one tile. `segments` makes them once per bucket; `accumulate` adds them up on
the host, and sglang_checksum_triton.py on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

ALGORITHM: Final = "sglang-fmix32-8"
TILE_WORDS: Final = 8192
WORD_BYTES: Final = 4

SEED_A: Final = 0x243F6A88
SEED_B: Final = ((SEED_A * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
POSITION_A: Final = 0x27D4EB2D
POSITION_B: Final = 0x165667B1
FMIX_1: Final = 0x85EBCA6B
FMIX_2: Final = 0xC2B2AE35

Words = npt.NDArray[np.uint32]
Table = npt.NDArray[np.int64]


class ChecksumLanes:
    """The layout of all parameters' tiles in one array of lanes, and the checksums that follow from the lanes.

    Args:
        sizes: bytes of every parameter. Must be multiples of four: others cannot be cut at words.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        if any(size % WORD_BYTES for size in sizes):
            raise ValueError("a parameter whose bytes are no multiple of four has no lanes")
        self._nbytes = np.asarray(sizes, dtype=np.int64)
        tiles = -(-self._nbytes // (TILE_WORDS * WORD_BYTES))
        self.first = np.concatenate([[0], np.cumsum(tiles)])[:-1]
        """First tile of every parameter."""
        self.tiles = int(tiles.sum())
        self._owner = np.repeat(np.arange(len(sizes)), tiles)

    def zeros(self) -> Words:
        """Lanes before anything was added, [tiles, 2]."""
        return np.zeros((self.tiles, 2), dtype=np.uint32)

    def finish(self, lanes: Words) -> list[str]:
        """The checksum of every parameter, sixteen hexadecimal digits each. `lanes` is left as it was."""
        size = (self._nbytes[self._owner] & 0xFFFFFFFF).astype(np.uint32)
        done = _fmix(lanes ^ size[:, None]).astype(np.uint64)
        values = (done[:, 0] << np.uint64(32)) | done[:, 1]
        sums = np.zeros(len(self._nbytes), dtype=np.uint64)
        np.add.at(sums, self._owner, values)
        return [f"{_splitmix(int(value)):016x}" for value in sums]


def segments(source: int, row_bytes: int, stride: int, rows: int, *, word: int, tile: int) -> Table:
    """The segments of `rows` runs of `row_bytes`, `stride` bytes apart in the bucket, packed in the parameter.

    Args:
        source: first byte of the first run in the bucket.
        row_bytes: of one run; as `source` and `stride` a multiple of four.
        stride: bytes from one run to the next.
        rows: how many.
        word: position of the first run in the parameter, in words.
        tile: first tile of the parameter.
    """
    if stride == row_bytes:
        row_bytes, rows = row_bytes * rows, 1
    row_words = row_bytes // WORD_BYTES
    starts = np.arange(rows, dtype=np.int64) * row_words + word
    first_tile, last_tile = starts // TILE_WORDS, (starts + row_words - 1) // TILE_WORDS
    counts = last_tile - first_tile + 1
    row = np.repeat(np.arange(rows, dtype=np.int64), counts)
    nth = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.maximum(starts[row], (first_tile[row] + nth) * TILE_WORDS)
    end = np.minimum(starts[row] + row_words, (first_tile[row] + nth + 1) * TILE_WORDS)
    offset = source + row * stride + (begin - starts[row]) * WORD_BYTES
    return np.stack([offset, end - begin, begin, np.full(len(row), tile)], axis=1)


def join(tables: Iterable[Table]) -> Table:
    """Several tables as one."""
    return np.concatenate([np.zeros((0, 4), dtype=np.int64), *tables])


def accumulate(memory: npt.NDArray[np.uint8], table: Table, lanes: Words) -> None:
    """Add every segment of `table`, read from `memory`, to `lanes`."""
    for offset, count, begin, tile in table.tolist():
        words = np.frombuffer(memory[offset : offset + count * WORD_BYTES].tobytes(), dtype="<u4")
        lanes[tile + begin // TILE_WORDS] += _sums(words, begin)


def accumulate_zeros(count: int, begin: int, tile: int, lanes: Words) -> None:
    """Add `count` words of zeros from word `begin` on: padding counts, because positions do."""
    end = begin + count
    while begin < end:
        stop = min(end, (begin // TILE_WORDS + 1) * TILE_WORDS)
        lanes[tile + begin // TILE_WORDS] += _sums(np.zeros(stop - begin, dtype=np.uint32), begin)
        begin = stop


def _sums(words: Words, begin: int) -> Words:
    position = np.arange(begin, begin + len(words), dtype=np.int64).astype(np.uint32)
    mixed_a = (position * np.uint32(POSITION_A) + np.uint32(SEED_A)) ^ _rotate(position, 15)
    mixed_b = (position * np.uint32(POSITION_B) + np.uint32(SEED_B)) ^ _rotate(position, 13)
    sums = [_fmix(words ^ mixed).sum(dtype=np.uint32) for mixed in (mixed_a, mixed_b)]
    return np.array(sums, dtype=np.uint32)


def _rotate(x: Words, by: int) -> Words:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def _fmix(x: Words) -> Words:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(FMIX_1)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(FMIX_2)
    return x ^ (x >> np.uint32(16))


def _splitmix(x: int) -> int:
    mask = (1 << 64) - 1
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & mask
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
