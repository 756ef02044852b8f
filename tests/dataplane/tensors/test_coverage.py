"""The choice among replicas, and load balancing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from weightbus.dataplane.tensors.coverage import choose_replicas
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Shards, whole_tensor_shard

TENSORS = tuple(TensorSpec(f"t{number}", "bfloat16", (8, 4)) for number in range(48))


def held(stages: int, replicas: int) -> Shards:
    """Every stage of a pipeline holds tensors that follow each other, on ranks that follow each other."""
    shards = [
        Shards.of(
            TENSORS, [whole_tensor_shard(spec, "bfloat16", 0)], number * stages // len(TENSORS) * replicas + replica
        )
        for number, spec in enumerate(TENSORS)
        for replica in range(replicas)
    ]
    return Shards.join(shards)


@pytest.mark.parametrize("reader", [0, 1, 7, -1, 1 << 70])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 4), (4, 4), (8, 2), (3, 1)])
def test_replicas_of_every_stage_take_turns(stages: int, replicas: int, reader: int) -> None:
    """Whatever their numbers are: no rank gives more than another that holds as much, to any reader."""
    chosen = choose_replicas(held(stages, replicas), reader)

    assert sorted(chosen.boxes.space.tolist()) == list(range(len(TENSORS)))
    given = Counter(chosen.rank.tolist())
    assert set(given.values()) == {len(TENSORS) // (stages * replicas)}
    assert len(given) == stages * replicas


def test_the_nearest_take_turns_among_themselves() -> None:
    """Two of four replicas are near: each gives half, the others nothing."""
    distance = np.array([1, 0, 1, 0], np.int64)

    given = Counter(choose_replicas(held(1, 4), 0, distance).rank.tolist())

    assert given == {1: 24, 3: 24}
