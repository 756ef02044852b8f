"""What a rank holds of a tensor, against torch's own cuts and against counting."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from weightbus.trainer_agent.source import UnsupportedModel
from weightbus.trainer_agent.sources.tensor_slices import (
    Axis,
    DTensorCut,
    LocalShard,
    RowRun,
    Slice,
    runs_of,
    shards_of,
)

SIZES = st.integers(1, 17)
PARTS = st.integers(1, 5)


def indexes(runs: tuple[RowRun, ...]) -> list[int]:
    assert [run.at for run in runs] == [sum(run.length for run in runs[:n]) for n in range(len(runs))]
    return [index for run in runs for index in range(run.start, run.start + run.length)]


def torch_cut(whole: torch.Tensor, parts: int, index: int, after: int = 1) -> torch.Tensor:
    placement = Shard(0) if after == 1 else _StridedShard(0, split_factor=after)
    return placement._split_tensor(whole, parts, with_padding=False)[0][index]


@settings(deadline=None)
@given(SIZES, PARTS, st.data())
def test_a_plain_shard_is_torchs(size: int, parts: int, data: st.DataObject) -> None:
    """Uneven and empty shards included."""
    index = data.draw(st.integers(0, parts - 1))
    (runs,) = runs_of((size,), [DTensorCut(0, parts, index)])
    assert indexes(runs) == torch_cut(torch.arange(size), parts, index).tolist()


@settings(deadline=None)
@given(SIZES, PARTS, PARTS, st.data())
def test_two_plain_shards_are_cut_from_left_to_right(size: int, one: int, two: int, data: st.DataObject) -> None:
    """As a mesh of two dimensions shards one dimension of a tensor."""
    at, then = data.draw(st.integers(0, one - 1)), data.draw(st.integers(0, two - 1))
    (runs,) = runs_of((size,), [DTensorCut(0, one, at), DTensorCut(0, two, then)])
    assert indexes(runs) == torch_cut(torch_cut(torch.arange(size), one, at), two, then).tolist()


@settings(deadline=None)
@given(SIZES, PARTS, st.integers(2, 5), st.data())
def test_fsdp_cuts_what_tensor_parallelism_left(size: int, fsdp: int, tp: int, data: st.DataObject) -> None:
    """The strided placement stands first and was made last: FSDP chunks the rank's tensor-parallel shard."""
    at, then = data.draw(st.integers(0, fsdp - 1)), data.draw(st.integers(0, tp - 1))
    (runs,) = runs_of((size,), [DTensorCut(0, fsdp, at, after=tp), DTensorCut(0, tp, then)])
    assert indexes(runs) == torch_cut(torch_cut(torch.arange(size), tp, then), fsdp, at).tolist()
    if size % (fsdp * tp) == 0:  # elsewhere torch's own reading of the placements is another
        assert indexes(runs) == torch_cut(torch_cut(torch.arange(size), fsdp, at, after=tp), tp, then).tolist()


@settings(deadline=None)
@given(SIZES, PARTS, st.integers(2, 5), PARTS, st.data())
def test_tensor_parallelism_cuts_each_of_fused_tensors(
    size: int, tp: int, fused: int, fsdp: int, data: st.DataObject
) -> None:
    """A strided placement with no cut behind it: transformers cuts gate and up of experts so. FSDP may cut it again."""
    at, then = data.draw(st.integers(0, tp - 1)), data.draw(st.integers(0, fsdp - 1))
    held = torch_cut(torch.arange(size), tp, at, after=fused)
    (runs,) = runs_of((size,), [DTensorCut(0, tp, at, after=fused)])
    assert indexes(runs) == held.tolist()
    if tp > 1:
        (runs,) = runs_of((size,), [DTensorCut(0, fsdp, then, after=tp), DTensorCut(0, tp, at, after=fused)])
        assert indexes(runs) == torch_cut(held, fsdp, then).tolist()


def test_a_split_factor_that_nothing_explains_is_refused() -> None:
    """A layout that is not known must not be guessed."""
    with pytest.raises(UnsupportedModel, match="after 3 parts, 2 are known"):
        runs_of((8, 8), [DTensorCut(0, 2, 0, after=3), DTensorCut(0, 2, 1)])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_pieces_of_all_ranks_are_the_checkpoint_tensor(data: st.DataObject) -> None:
    """Any slice of a tensor in memory, with steps and transposed, cut along any dimension: every element once."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    dims = data.draw(st.permutations(range(len(shape))))
    kept = dims[: data.draw(st.integers(0, len(shape)))]
    origin = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    axes, sizes = [], []
    for dim in kept:
        step = data.draw(st.integers(1, 3))
        sizes.append(data.draw(st.integers(1, (shape[dim] - 1 - origin[dim]) // step + 1)))
        axes.append(Axis(dim, step))
    wanted = Slice("t", tuple(sizes), "m", tuple(origin), tuple(axes))
    strides = whole.stride()
    start = sum(at * stride for at, stride in zip(origin, strides, strict=True))
    expected = whole.as_strided(sizes, [strides[axis.source] * axis.step for axis in axes], start)

    cut_dim, parts = data.draw(st.integers(0, len(shape) - 1)), data.draw(PARTS)
    tp = data.draw(st.integers(1, 3))
    found = torch.full(tuple(sizes), -1)
    for index in range(parts):
        for then in range(tp):
            runs = runs_of(shape, [DTensorCut(cut_dim, parts, index, after=tp), DTensorCut(cut_dim, tp, then)])
            local = whole.index_select(cut_dim, torch.tensor(indexes(runs[cut_dim]), dtype=torch.long))
            held = LocalShard(runs, local.stride(), 5, "int64")
            assert held.shape == tuple(local.shape)
            for piece in shards_of(wanted, held):
                assert (piece.tensor, piece.view.storage, piece.dtype) == ("t", 5, "int64")
                box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
                assert (found[box] == -1).all(), "an element is held twice"
                found[box] = local.as_strided(piece.box.shape, piece.view.strides, piece.view.offset)
    assert torch.equal(found, expected)
