"""Digests from where the ranks' shards lie, against the digests of the packed tensors."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.errors import CoverageError, DigestMismatch, ManifestError, Unsupported
from weightbus.dataplane.reshard.digest_shares import (
    DigestDivision,
    ShareDigester,
    ShareSums,
    divide_digest_work,
)
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView, contiguous_strides

TENSORS = (
    TensorSpec("even", "bfloat16", (12, 16)),
    TensorSpec("odd", "bfloat16", (6, 5)),
    TensorSpec("long", "float32", (24,)),
    TensorSpec("deep", "bfloat16", (2, 6, 8)),
    TensorSpec("scalar", "float32", ()),
)
RANKS = 3


def cuts(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """Equal parts along each axis."""
    sizes = [extent // count for extent, count in zip(shape, parts, strict=True)]
    return [
        Box(
            tuple(i * s for i, s in zip(at, sizes, strict=True)),
            tuple((i + 1) * s for i, s in zip(at, sizes, strict=True)),
        )
        for at in product(*(range(count) for count in parts))
    ]


class Ranks:
    """Every tensor cut somehow; its parts on one rank or several, some transposed, some kept in float32."""

    def __init__(self, data: st.DataObject) -> None:
        torch.manual_seed(data.draw(st.integers(0, 99)))
        self.values = {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in TENSORS}
        for name in data.draw(st.lists(st.sampled_from([spec.name for spec in TENSORS]))):
            flat = self.values[name].view(-1)
            # No NaN where it would be cast: torch gives it one of several patterns of bits.
            specials = [torch.inf, -torch.inf, *([torch.nan] if flat.dtype is torch.float32 else [])]
            flat[data.draw(st.integers(0, flat.numel() - 1))] = data.draw(st.sampled_from(specials))
        self.memories: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
        shards: list[list[Shard]] = [[] for _ in range(RANKS)]
        for spec in TENSORS:
            parts = tuple(data.draw(st.sampled_from([n for n in (1, 2, 3) if e % n == 0])) for e in spec.shape)
            for box in cuts(spec.shape, parts):
                for rank in data.draw(st.permutations(range(RANKS)))[: data.draw(st.integers(1, RANKS))]:
                    dtype = data.draw(st.sampled_from([spec.dtype, "float32"]))
                    value = self.values[spec.name][tuple(map(slice, box.start, box.stop))].to(getattr(torch, dtype))
                    if len(box.shape) == 2 and data.draw(st.booleans()):
                        value = value.t().contiguous().t()
                    else:
                        value = value.contiguous()
                    view = ShardView(len(self.memories[rank]), 0, tuple(value.stride()))
                    shards[rank].append(Shard(spec.name, box, dtype, view))
                    self.memories[rank].append(value)
        self.shards = Shards.join([Shards.of(TENSORS, mine, rank) for rank, mine in enumerate(shards)])

    def reports(self, division: DigestDivision, pass_bytes: int) -> list[ShareSums]:
        """What each rank says."""
        return [
            ShareDigester(division.share(rank, pass_bytes), memory, torch.device("cpu"), TorchCopyEngine()).run()
            for rank, memory in enumerate(self.memories)
        ]

    def odd(self) -> dict[int, int]:
        """Elements that are no finite numbers, as torch sees them."""
        found = {at: int((~torch.isfinite(self.values[spec.name])).sum()) for at, spec in enumerate(TENSORS)}
        return {at: count for at, count in found.items() if count}

    def expected(self) -> bytes:
        return b"".join(
            integrity.digest_tensors(self.values[spec.name].contiguous().view(-1).view(torch.uint8), (0, spec.nbytes))
            for spec in TENSORS
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_ranks_sums_are_the_digests_of_the_packed_tensors(data: st.DataObject) -> None:
    """However a model is cut, replicated and laid out, and also where masters of another dtype are cast.

    Each element that is no finite number is counted once, whichever of its ranks reads it.
    """
    ranks = Ranks(data)
    division = divide_digest_work(ranks.shards)

    found = ranks.reports(division, data.draw(st.sampled_from([1, 64, 1 << 20])))

    assert division.digests(found) == (ranks.expected(), ranks.odd())


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_element_is_read_once(data: st.DataObject) -> None:
    """Replicas share the reading: the ranks' tables hold each tensor's words exactly once."""
    ranks = Ranks(data)
    division = divide_digest_work(ranks.shards)
    shares = [division.share(rank, 64) for rank in range(RANKS)]
    apart = sum(TENSORS[index].nbytes for index in division.odd.tolist())

    read = sum(share.in_place.nbytes + sum(each.boxes.nbytes for each in share.passes) for share in shares)

    assert read == sum(spec.nbytes for spec in TENSORS) - apart
    assert sum(int(share.odd.copies.target_bytes.sum()) for share in shares) == apart


def whole(tensor: TensorSpec, storage: int) -> Shard:
    return Shard(
        tensor.name, Box.whole(tensor.shape), tensor.dtype, ShardView(storage, 0, contiguous_strides(tensor.shape))
    )


def test_replicas_take_turns() -> None:
    """Two ranks that hold everything read about half of it each."""
    tensors = tuple(TensorSpec(f"t{n}", "bfloat16", (8, 8)) for n in range(10))
    shards = Shards.join([Shards.of(tensors, [whole(t, n) for n, t in enumerate(tensors)], rank) for rank in range(2)])

    division = divide_digest_work(shards)

    assert [division.share(rank, 64).in_place.nbytes for rank in range(2)] == [640, 640]


def test_a_model_of_odd_boxes_is_left_to_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks would have to send each other is bounded."""
    monkeypatch.setattr("weightbus.dataplane.reshard.digest_shares.MOST_ODD_BYTES", 59)
    tensors = TENSORS[1:2]

    with pytest.raises(Unsupported, match="odd"):
        divide_digest_work(Shards.of(tensors, [whole(tensors[0], 0)]))


def test_a_hole_is_named() -> None:
    """No digest is made of a part of a model."""
    half = Shard("even", Box((0, 0), (6, 16)), "bfloat16", ShardView(0, 0, (16, 1)))

    with pytest.raises(CoverageError, match="even"):
        divide_digest_work(Shards.of(TENSORS[:1], [half]))


def test_sums_of_other_tensors_are_refused() -> None:
    """A rank that counts otherwise than the root runs another version."""
    division = divide_digest_work(Shards.of(TENSORS[:1], [whole(TENSORS[0], 0)]))

    with pytest.raises(ManifestError, match="rank 0 gave sums of 2 tensors, 1 fell"):
        division.digests([ShareSums(np.zeros((2, 2), np.uint64), b"")])


def test_masters_that_differ_are_noticed() -> None:
    """Odd boxes that overlap must agree: two ranks cannot both be right."""
    tensors = TENSORS[1:2]
    shards = Shards.of(tensors, [whole(tensors[0], 0)])
    division = divide_digest_work(shards)
    twice = DigestDivision(Shards.join([shards, Shards.of(tensors, [whole(tensors[0], 0)], 1)]), division.odd)

    with pytest.raises(DigestMismatch, match="trainer rank 0"):
        twice.digests([ShareSums(np.zeros((2, 0), np.uint64), odd) for odd in (bytes(60), bytes(59) + b"x")])
