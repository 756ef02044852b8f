"""Replicas are compared however a model is cut, against a comparison element by element."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
from weightbus.dataplane.reshard.replica_digests import digest_replicas, find_replicas
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView

TENSORS = (
    TensorSpec("even", "bfloat16", (12, 16)),
    TensorSpec("odd", "bfloat16", (6, 5)),
    TensorSpec("long", "float32", (24,)),
)
RANKS = 3


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_differences_are_those_of_a_comparison_by_element(data: st.DataObject) -> None:
    """Boxes that are equal or overlap in part, whole words or not, transposed, kept in one dtype or in several."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    memories: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
    held: list[list[Shard]] = [[] for _ in range(RANKS)]
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor, str]]] = {}
    for spec in TENSORS:
        whole = torch.randn(spec.shape).to(getattr(torch, spec.dtype))
        for rank in range(RANKS):
            first = data.draw(st.integers(0, spec.shape[0] - 1)) if data.draw(st.booleans()) else 0
            last = data.draw(st.integers(first + 1, spec.shape[0])) if data.draw(st.booleans()) else spec.shape[0]
            dtype = data.draw(st.sampled_from([spec.dtype, spec.dtype, "float32"]))
            value = whole[first:last].to(getattr(torch, dtype))
            value = value.t().contiguous().t() if value.dim() == 2 and data.draw(st.booleans()) else value.clone()
            if data.draw(st.integers(0, 3)) == 0:
                value[data.draw(st.integers(0, last - first - 1))] += 1.0
            box = Box((first, *(0,) * (value.dim() - 1)), (last, *spec.shape[1:]))
            held[rank].append(Shard(spec.name, box, dtype, ShardView(len(memories[rank]), 0, tuple(value.stride()))))
            memories[rank].append(value)
            full = torch.full(spec.shape, torch.nan)
            full[first:last] = value.float()
            seen.setdefault(spec.name, []).append((full, ~torch.isnan(full), dtype))
    shards = Shards.join([Shards.of(TENSORS, mine, rank) for rank, mine in enumerate(held)])

    units = find_replicas(shards)
    engine, device = TorchCopyEngine(), torch.device("cpu")
    tables = [digest_replicas(units.of_rank(rank), memories[rank], device, engine) for rank in range(RANKS)]
    count, first_ones = units.differing(tables)

    expected = {spec.name for spec in TENSORS if _differ(seen[spec.name], spec.dtype)}
    assert {TENSORS[each.index].name for each in first_ones} == expected
    assert count == len(expected)
    for each in first_ones:
        assert each.ranks[0][0] == min(rank for side in each.ranks for rank in side)
        assert len(each.ranks) > 1


def _differ(copies: list[tuple[torch.Tensor, torch.Tensor, str]], served: str) -> bool:
    """Whether two copies differ in an element that both hold: as they are kept, or as served if dtypes differ."""
    meet = [(one, other, both) for one, other in combinations(copies, 2) if bool((both := one[1] & other[1]).any())]
    dtypes = {dtype for one, other, _ in meet for dtype in (one[2], other[2])}
    compared = getattr(torch, served if len(dtypes) > 1 else max(dtypes, default=served))
    return any(bool((one[0][both].to(compared) != other[0][both].to(compared)).any()) for one, other, both in meet)
