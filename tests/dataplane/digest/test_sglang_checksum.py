"""The checksum of SGLang's GPU parameters: equal to its definition, however the parameter is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.digest import sglang_checksum as fmix

M32 = 0xFFFFFFFF
M64 = (1 << 64) - 1


def definition(data: bytes) -> str:
    """SGLang's gpu_tensor_hash, word by word, in plain Python."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    seed_a = 0x243F6A88
    seed_b = ((seed_a * 0x9E3779B1) ^ 0xDEADBEEF) & M32

    def rotate(x: int, by: int) -> int:
        return ((x << by) | (x >> (32 - by))) & M32

    def finish(x: int) -> int:
        x ^= x >> 16
        x = (x * 0x85EBCA6B) & M32
        x ^= x >> 13
        x = (x * 0xC2B2AE35) & M32
        return x ^ (x >> 16)

    total = 0
    for tile in range(0, len(words), 8192):
        a = b = 0
        for at in range(tile, min(tile + 8192, len(words))):
            a += finish(words[at] ^ (((at * 0x27D4EB2D + seed_a) & M32) ^ rotate(at, 15)))
            b += finish(words[at] ^ (((at * 0x165667B1 + seed_b) & M32) ^ rotate(at, 13)))
        size = len(words) * 4 & M32
        total += (finish((a & M32) ^ size) << 32) | finish((b & M32) ^ size)
    x = total & M64
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & M64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & M64
    return f"{x ^ (x >> 31):016x}"


def noise(words: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Bytes of `words` random words."""
    return np.random.default_rng(seed).integers(0, 256, words * 4, dtype=np.uint8)


def checksum(data: npt.NDArray[np.uint8]) -> str:
    """Of one parameter that lies in one shard."""
    lanes = fmix.ChecksumLanes([data.nbytes])
    found = lanes.zeros()
    fmix.accumulate(data, fmix.segments(0, data.nbytes, data.nbytes, 1, word=0, tile=0), found)
    return lanes.finish(found)[0]


@pytest.mark.parametrize("words", [1, 2, 8191, 8192, 8193, 20_000])
def test_a_whole_parameter_gives_what_the_definition_gives(words: int) -> None:
    """At and around the borders of tiles, too."""
    data = noise(words)
    assert checksum(data) == definition(data.tobytes())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_cut_in_any_order_gives_the_same(data: st.DataObject) -> None:
    """Shards of two parameters, out of order, with zeros behind one of them."""
    first, second = noise(data.draw(st.integers(1, 20_000)), 1), noise(data.draw(st.integers(1, 9_000)), 2)
    padding = data.draw(st.integers(0, 9_000))
    lanes = fmix.ChecksumLanes([first.nbytes, second.nbytes + padding * 4])
    found = lanes.zeros()
    shards: list[tuple[npt.NDArray[np.uint8], int, int, int]] = []
    for parameter, whole in enumerate((first, second)):
        cuts = sorted(
            data.draw(st.sets(st.integers(1, max(1, len(whole) // 4 - 1)), max_size=4)) | {0, len(whole) // 4}
        )
        shards += [(whole, parameter, a, b) for a, b in pairwise(cuts)]
    for whole, parameter, begin, end in data.draw(st.permutations(shards)):
        size = (end - begin) * 4
        table = fmix.segments(begin * 4, size, size, 1, word=begin, tile=int(lanes.first[parameter]))
        fmix.accumulate(whole, table, found)
    fmix.accumulate_zeros(padding, len(second) // 4, int(lanes.first[1]), found)

    expected = [definition(first.tobytes()), definition(second.tobytes() + bytes(padding * 4))]
    assert lanes.finish(found) == expected


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 900), gap=st.integers(0, 50), word=st.integers(0, 9_000))
def test_a_slice_of_columns_is_packed_row_after_row(rows: int, width: int, gap: int, word: int) -> None:
    """Strided runs give the same as their packed copy, at any position of the parameter."""
    whole = noise(rows * (width + gap)).reshape(rows, -1)
    packed = np.ascontiguousarray(whole[:, : width * 4]).reshape(-1)
    before = noise(word, 3)
    lanes = fmix.ChecksumLanes([before.nbytes + packed.nbytes])
    found = lanes.zeros()
    fmix.accumulate(before, fmix.segments(0, before.nbytes, before.nbytes, 1, word=0, tile=0), found)
    fmix.accumulate(whole.reshape(-1), fmix.segments(0, width * 4, (width + gap) * 4, rows, word=word, tile=0), found)

    assert lanes.finish(found) == [definition(before.tobytes() + packed.tobytes())]


def test_bytes_that_are_no_words_are_refused() -> None:
    """Such a parameter has no prediction; a wrong one would condemn a sound engine."""
    with pytest.raises(ValueError, match="multiple of four"):
        fmix.ChecksumLanes([6])


def test_the_kernel_adds_what_numpy_adds() -> None:
    """Under Triton's interpreter, where there is no GPU: the same lanes from the same table."""
    program = """
import numpy as np, torch
from weightbus.dataplane.digest import sglang_checksum as fmix
from weightbus.dataplane.digest import digest_triton as fmix_triton
data = np.random.default_rng(1).integers(0, 256, 90_000, dtype=np.uint8)
whole = fmix.segments(4, 40_000, 40_000, 1, word=100, tile=0)
table = fmix.join([whole, fmix.segments(40_004, 400, 800, 60, word=3, tile=2)])
lanes = np.zeros((6, 2), dtype=np.uint32)
fmix.accumulate(data, table, lanes)
found = torch.zeros((6, 2), dtype=torch.int32)
fmix_triton._sum_checksums[(len(table),)](torch.from_numpy(data), torch.from_numpy(table), found, BLOCK=1024)
assert (found.numpy().view(np.uint32) == lanes).all(), (found, lanes)
"""
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], check=False, env=interpreted, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
