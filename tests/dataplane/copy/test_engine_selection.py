"""Prepared copies follow their source to another place, and let go of it. What they copy: test_tiles.py."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from weightbus.dataplane.copy.copy_cuda import CudaCopyEngine
from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
from weightbus.dataplane.copy.copy_table import AXES, CopyTable
from weightbus.dataplane.tensors.shards import DTYPES

from .test_tiles import REGION, column, copies, fits, memory

CPU = torch.device("cpu")
BYTES = column(DTYPES.index("uint8"))
ONE, NONE = np.ones((1, AXES), np.int64), np.zeros((1, AXES), np.int64)
ROW = CopyTable(column(0), column(0), column(64), column(0), BYTES, BYTES, column(4096), ONE, NONE, NONE)


@given(copies())
@settings(max_examples=100, deadline=None)
def test_what_follows_copies_as_if_it_were_bound_anew(table: CopyTable) -> None:
    """The CPU's engine, to any place, by way of nowhere."""
    if not fits(table):
        return
    first, second, found, expected = memory(1), memory(3), memory(2), memory(2)
    prepared = TorchCopyEngine().prepare_copies(table, [first], [found])
    prepared.move_source(None)
    prepared.move_source(second)
    prepared.run()

    TorchCopyEngine().prepare_copies(table, [second], [expected]).run()
    assert torch.equal(found, expected)


@given(copies())
@settings(max_examples=100, deadline=None)
def test_a_gpus_tiles_follow(table: CopyTable) -> None:
    """They are those of a table that is bound anew, in the same places; tiles need no GPU to be made."""
    if not fits(table):
        return
    whole, target = torch.zeros(3 * REGION, dtype=torch.uint8), memory(2)
    engine, region = CudaCopyEngine(CPU), whole[REGION:]
    prepared = engine.prepare_copies(table, [whole], [target])
    places = [tiles.data_ptr() for _, tiles in prepared._tiles]
    for source in (region, None, whole, region):
        prepared.move_source(source)
        anew = engine.prepare_copies(table, [whole if source is whole else region], [target])
        for (size, tiles), (expected_size, expected) in zip(prepared._tiles, anew._tiles, strict=True):
            assert size == expected_size
            assert torch.equal(tiles, expected)
    assert places == [tiles.data_ptr() for _, tiles in prepared._tiles]


@pytest.mark.parametrize("engine", [TorchCopyEngine(), CudaCopyEngine(CPU)], ids=["torch", "cuda"])
def test_what_lies_nowhere_is_not_held(engine: TorchCopyEngine | CudaCopyEngine) -> None:
    """Its memory is free for others."""
    source, target = memory(1), memory(2)
    prepared = engine.prepare_copies(ROW, [source], [target])
    watched = weakref.ref(source.untyped_storage())
    prepared.move_source(None)
    del source
    assert watched() is None


def test_another_alignment_is_refused() -> None:
    """A tile's vectors lie on multiples of their size, on both sides."""
    whole = memory(1)
    prepared = CudaCopyEngine(CPU).prepare_copies(ROW, [whole], [memory(2)])
    with pytest.raises(ValueError, match="cannot be followed"):
        prepared.move_source(whole[8:])
