"""The digest algorithm against a slow reference, and what it must notice."""

import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.errors import DigestMismatch

MASK = 2**64 - 1


def splitmix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def reference(data: bytes) -> bytes:
    """``mix64x2`` as tensor_digest.py's docstring defines it, one word at a time."""
    padded = data + bytes(-len(data) % 8)
    a = b = 0
    for i in range(len(padded) // 8):
        x = splitmix((int.from_bytes(padded[i * 8 : i * 8 + 8], "little") + (i + 1) * integrity.PHI) & MASK)
        y = x * integrity.LANE_B & MASK
        a, b = a + x & MASK, b + (y ^ (y >> 32)) & MASK
    a = splitmix(a + len(data) * integrity.LANE_A & MASK)
    b = splitmix(b + len(data) * integrity.LANE_B & MASK)
    return a.to_bytes(8, "little") + b.to_bytes(8, "little")


def memory_of(data: bytes, skew: int = 0) -> torch.Tensor:
    whole = torch.zeros(len(data) + skew, dtype=torch.uint8)
    whole[skew:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return whole[skew:]


def pattern(nbytes: int, seed: int = 1) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).numpy().tobytes())


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    item=st.sampled_from([1, 2, 4, 8]),
    skew=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
def test_equals_reference(sizes: list[int], item: int, skew: int, seed: int) -> None:
    """Every packing of tensors, aligned or not, gives what the definition says."""
    offsets = [0, *accumulate(size * item for size in sizes)]
    data = pattern(offsets[-1], seed)
    expected = b"".join(reference(data[a:b]) for a, b in pairwise(offsets))
    assert integrity.digest_tensors(memory_of(data, skew), offsets) == expected


@pytest.mark.parametrize("skew", [0, 2])
def test_equals_reference_across_chunks(skew: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than a chunk, and chunks that hold many tensors, give the same digests."""
    monkeypatch.setattr(integrity, "_CHUNK_WORDS", 16)
    monkeypatch.setattr(integrity, "_REPACK_WORDS", 24)
    sizes = [8, 1000, 8, 16, 8, 128, 136, 2048, 24, 8, 8, 200, 8 * 24, 8 * 24 + 8, 3]
    offsets = [0, *accumulate(sizes)]
    data = pattern(offsets[-1])
    expected = b"".join(reference(data[a:b]) for a, b in pairwise(offsets))
    assert integrity.digest_tensors(memory_of(data, skew), offsets) == expected


def test_offsets_may_begin_later_and_memory_may_be_larger() -> None:
    """Only the bytes between the first and the last offset count."""
    data = pattern(640)
    found = integrity.digest_tensors(memory_of(data), [16, 40, 600])
    assert found == reference(data[16:40]) + reference(data[40:600])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d: bytes([d[0] ^ 1]) + d[1:], id="one bit"),
        pytest.param(lambda d: d[8:16] + d[:8] + d[16:], id="two words swapped"),
        pytest.param(lambda d: d[-8:] + d[:-8], id="rotated by a word"),
        pytest.param(lambda d: d[-1:] + d[:-1], id="rotated by a byte"),
        pytest.param(lambda d: d[:-8] + bytes(8), id="end missing"),
        pytest.param(lambda d: d[:4096] * 2, id="first half twice"),
        pytest.param(lambda d: d[4096:] + d[:4096], id="halves swapped"),
    ],
)
def test_notices(change: object) -> None:
    """Damage as transports do it changes both lanes (F16)."""
    data = pattern(8192)
    assert callable(change)
    before = integrity.digest_tensors(memory_of(data), [0, 8192])
    after = integrity.digest_tensors(memory_of(change(data)), [0, 8192])
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


def test_zeros_of_another_length_differ() -> None:
    """Padding does not make a shorter tensor equal to a longer one."""
    digests = {integrity.digest_tensors(torch.zeros(64, dtype=torch.uint8), [0, n]) for n in range(1, 65)}
    assert len(digests) == 64


def test_check_names_the_tensor() -> None:
    """A mismatch names the tensor and both digests; a match says nothing."""
    data = pattern(96)
    offsets, names = [0, 32, 64, 96], ["a", "b", "c"]
    good = integrity.digest_tensors(memory_of(data), offsets)
    integrity.check_digests(memory_of(data), offsets, good, names)
    bad = memory_of(data)
    bad[40] ^= 4
    with pytest.raises(DigestMismatch, match="'b'") as caught:
        integrity.check_digests(bad, offsets, good, names)
    assert caught.value.tensor == "b"
    assert caught.value.expected == good[16:32].hex()
    with pytest.raises(ValueError, match="fit"):
        integrity.check_digests(bad, offsets, good[:16], names)


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 9, 8], [-8, 8], [0, 65]])
def test_refuses_offsets(offsets: list[int]) -> None:
    """Offsets outside the memory, or empty tensors, are an error and not a wrong digest."""
    with pytest.raises(ValueError, match="offsets"):
        integrity.digest_tensors(torch.zeros(64, dtype=torch.uint8), offsets)


def test_refuses_other_memory() -> None:
    """Only packed bytes have a digest."""
    with pytest.raises(ValueError, match="uint8"):
        integrity.digest_tensors(torch.zeros(64), [0, 64])


KERNEL = """
import torch
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.digest import digest_triton as integrity_triton
integrity_triton.SEGMENT_WORDS, integrity_triton.BLOCK = 64, 32
from contextlib import nullcontext
torch.cuda.device_of = lambda memory: nullcontext()
import numpy as np
for skew in (0, 1, 2, 4, 7):
    offsets = [skew + n for n in (0, 1, 9, 1500, 1502, 1600, 1608, 2120, 2600, 2607)]
    memory = torch.randint(0, 256, (2700,), dtype=torch.uint8)
    bounds = np.asarray(offsets, dtype=np.int64)
    lanes, _ = integrity_triton.sum_tensors(memory, bounds)
    assert integrity.finish_digests(lanes, np.diff(bounds)) == integrity.digest_tensors(memory, offsets), skew
print("equal")
"""


def test_kernel_equals_cpu_in_the_interpreter(tmp_path: Path) -> None:
    """The GPU kernel, run by Triton's interpreter, gives the CPU's digests at every alignment."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("skew", [0, 1, 2, 4])
def test_kernel_equals_cpu(skew: int) -> None:
    """On a GPU one launch gives the CPU's digests, for small and large tensors at every alignment."""
    offsets = [skew, skew + 8, skew + 1_000_010, skew + 1_000_012, skew + 9_000_012, skew + 9_000_019]
    memory = torch.randint(0, 256, (9_000_100,), dtype=torch.uint8)
    assert integrity.digest_tensors(memory.cuda(), offsets) == integrity.digest_tensors(memory, offsets)
