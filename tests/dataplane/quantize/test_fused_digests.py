"""Sums made while quantizing equal tensor_digest.py, or are left to a later pass."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.quantize.quantize_tasks import (
    DigestSums,
    QuantizeTask,
    fully_summed_tensors,
    prepare_tasks,
    word_layout,
)
from weightbus.dataplane.quantize.schemes import SCHEMES, Scheme, fp8_block, fp8_channel, fp8_tensor, int4, mxfp8
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView, contiguous_strides

CPU = torch.device("cpu")
BLOCKS = fp8_block((16, 16))


def cuts(data: st.DataObject, extent: int, step: int) -> list[int]:
    """Borders along one axis, on the grain of the scheme."""
    inner = st.sets(st.sampled_from(range(step, extent, step)), max_size=3) if extent > step else st.just(set[int]())
    return sorted({0, extent, *data.draw(inner)})


@settings(deadline=None, max_examples=60)
@given(
    st.data(),
    st.sampled_from([BLOCKS, fp8_block((16, 24), power_of_two=True), fp8_channel()]),
    st.integers(1, 50),
    st.integers(1, 12),
)
def test_the_parts_of_a_weight_add_up_to_its_digest(
    data: st.DataObject, scheme: Scheme, height: int, width: int
) -> None:
    """However it is cut, in whatever order, with any stride on both sides, and in every run anew."""
    shape = (height, 8 * width)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(height))
    rows, columns = (step or extent for step, extent in zip(scheme.block, shape, strict=True))
    boxes = [
        Box((top, left), (bottom, right))
        for top, bottom in pairwise(cuts(data, shape[0], rows))
        for left, right in pairwise(cuts(data, shape[1], columns))
    ]
    whole = torch.zeros(shape, dtype=torch.float8_e4m3fn)
    lanes, tasks = torch.full((3, 2), 9), list[QuantizeTask]()
    for box in data.draw(st.permutations(boxes)):
        words = word_layout(scheme, box, shape)
        assert words is not None
        cut = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        scales = scheme.parts(TensorSpec("w", "bfloat16", box.shape))[1]
        outs = (whole[cut], torch.zeros(scales.shape, dtype=getattr(torch, scales.dtype)))
        tasks.append(QuantizeTask(scheme, weight[cut], torch.bfloat16, outs, DigestSums(lanes, 1, *words)))
    prepared = prepare_tasks(tasks, CPU)

    for _ in range(2):
        prepared.run()
        packed = whole.view(torch.uint8).view(-1)
        sums = lanes[1:2].numpy().view(np.uint64).T.copy()
        assert integrity.finish_digests(sums, np.array([packed.numel()])) == integrity.digest_tensors(
            packed, (0, len(packed))
        )
        assert lanes[0].tolist() == lanes[2].tolist() == [9, 9]
        weight *= -0.3


@pytest.mark.parametrize(
    ("scheme", "start", "stop", "shape"),
    [
        (fp8_tensor(), (0, 0), (32, 32), (32, 32)),
        (mxfp8(), (0, 0), (32, 32), (32, 32)),
        (int4(32, symmetric=True), (0, 0), (32, 32), (32, 32)),
        (BLOCKS, (0, 0), (32, 36), (32, 36)),  # the last word of a row is the first one of the next
        (fp8_block((16, 12)), (0, 0), (32, 48), (32, 48)),  # a block ends within a word
        (fp8_channel(), (0, 4), (32, 16), (32, 16)),
        (fp8_channel(), (0, 0), (32, 12), (32, 16)),
        (BLOCKS, (0, 0), (1 << 17, 1 << 17), (1 << 17, 1 << 17)),  # no room in the kernel's table
    ],
)
def test_what_has_no_whole_words_is_read_again(
    scheme: Scheme, start: tuple[int, int], stop: tuple[int, int], shape: tuple[int, int]
) -> None:
    """A scheme, a row, a block or a box."""
    assert word_layout(scheme, Box(start, stop), shape) is None


def test_every_scheme_is_decided() -> None:
    """By its elements and its scales, whatever it is called."""
    found = {scheme.name for scheme in SCHEMES if word_layout(scheme, Box((0, 0), (256, 256)), (256, 256))}
    assert found == {"fp8-block", "fp8-block-ue8m0", "fp8-channel"}
    renamed = msgspec.structs.replace(BLOCKS, name="other")
    assert word_layout(renamed, Box((16, 32), (32, 64)), (64, 64)) == (16 * 8 + 4, 8)


def shards(*boxes: tuple[int, tuple[int, int], tuple[int, int]]) -> Shards:
    specs = [TensorSpec(f"t{number}", "float8_e4m3fn", (64, 64)) for number in range(4)]
    rows = [
        Shard(f"t{number}", box, "float8_e4m3fn", ShardView(0, 0, contiguous_strides(box.shape)))
        for number, start, stop in boxes
        for box in [Box(start, stop)]
    ]
    return Shards.of(specs, rows)


def test_sums_count_only_where_they_are_of_all_that_falls_to_a_rank() -> None:
    """Cut otherwise they are of the same; of more or of less they are not, and nothing is known of what has none."""
    summed = shards((0, (0, 0), (32, 64)), (1, (0, 0), (64, 64)), (2, (0, 0), (32, 64)))
    chosen = shards(
        (0, (0, 0), (32, 32)), (0, (0, 32), (32, 64)),  # the same
        (1, (0, 0), (32, 64)),  # the rest falls to another rank
        (2, (0, 0), (48, 64)),
        (3, (0, 0), (64, 64)),
    )  # fmt: skip

    assert fully_summed_tensors(chosen, summed).tolist() == [0]
    assert fully_summed_tensors(shards(), summed).tolist() == []
