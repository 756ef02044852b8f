"""Runs and slices of tensors, and the shards of checkpoint tensors that a rank holds through them. Pure, no torch.

Megatron's fused parameters and DTensor's shards are both sequences of runs, of which a rank holds a slice: along each
dimension one run for a plain shard, several where FSDP cuts shards of tensor parallelism again. DTensor's cuts are
`torch.chunk`'s: equal parts but for the last ones, which may be smaller or empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

import msgspec

from weightbus.dataplane.tensors import Box, Shard, ShardView

from ..source import UnsupportedModel


class RowRun(msgspec.Struct, frozen=True):
    """`length` indexes of a tensor from `start` on, at positions from `at` on of the sequence."""

    start: int
    length: int
    at: int = 0
    tensor: int = 0
    """Index of the tensor, in a sequence of several tensors."""


def concatenate(runs: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """The same runs, each placed behind the one before it."""
    found: list[RowRun] = []
    at = 0
    for run in runs:
        found.append(RowRun(run.start, run.length, at, run.tensor))
        at += run.length
    return tuple(found)


def total_length(runs: Sequence[RowRun]) -> int:
    """Sum of the runs' lengths."""
    return sum(run.length for run in runs)


def slice_runs(runs: Sequence[RowRun], start: int, length: int) -> tuple[RowRun, ...]:
    """The runs at positions `start` to `start + length` of a sequence, as a sequence of its own."""
    found: list[RowRun] = []
    for run in runs:
        first = max(run.at, start)
        last = min(run.at + run.length, start + length)
        if first < last:
            found.append(RowRun(run.start + first - run.at, last - first, first - start, run.tensor))
    return tuple(found)


class Axis(msgspec.Struct, frozen=True):
    """One dimension of a slice: a dimension of its source, every `step`-th index of it."""

    source: int
    step: int = 1


class Slice(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint as a slice of a tensor in memory.

    Element ``(i, j, ..)`` is the source's element at `origin`, moved by ``i * axes[0].step`` along dimension
    ``axes[0].source``, and so on. Source dimensions without an axis stay where `origin` says.
    """

    tensor: str
    shape: tuple[int, ...]
    source: str
    origin: tuple[int, ...]
    axes: tuple[Axis, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Slice:
        """A tensor that is stored as it is."""
        dims = range(len(shape))
        return cls(name, tuple(shape), name, tuple(0 for _ in dims), tuple(Axis(dim) for dim in dims))


class DTensorCut(msgspec.Struct, frozen=True):
    """This rank holds part `index` of `parts` equal ones of dimension `dim`.

    `after` is DTensor's split factor, 1 for a plain cut: into how many parts the dimension was cut before, by the cuts
    that come later in the list. Without such cuts the dimension is that many tensors, fused, of each of which the rank
    holds part `index`: transformers' tensor parallelism cuts gate and up so.
    """

    dim: int
    parts: int
    index: int
    after: int = 1


class LocalShard(msgspec.Struct, frozen=True):
    """One rank's part of a tensor: runs for each dimension, and their strides in its own tensor `storage`."""

    runs: tuple[tuple[RowRun, ...], ...]
    strides: tuple[int, ...]
    storage: int
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(total_length(runs) for runs in self.runs)


def runs_of(shape: Sequence[int], cuts: Sequence[DTensorCut]) -> tuple[tuple[RowRun, ...], ...]:
    """Runs of each dimension that remain after `cuts`, in the order of the device mesh. Empty where nothing remains.

    Raises `UnsupportedModel` for a split factor that the later cuts do not explain.
    """
    return tuple(_cut_dim(size, [cut for cut in cuts if cut.dim == dim], shape) for dim, size in enumerate(shape))


def _cut_dim(size: int, cuts: Sequence[DTensorCut], shape: Sequence[int]) -> tuple[RowRun, ...]:
    runs: tuple[RowRun, ...] = (RowRun(0, size),) if size else ()
    for cut, fused in _in_order(cuts, shape):
        size = -(-total_length(runs) // fused)
        tensors = [slice_runs(runs, each * size, size) for each in range(fused)]
        runs = concatenate(run for each in tensors for run in _chunk(each, cut))
    return runs


def _chunk(runs: Sequence[RowRun], cut: DTensorCut) -> tuple[RowRun, ...]:
    share = -(-total_length(runs) // cut.parts)
    return slice_runs(runs, cut.index * share, share)


def _in_order(cuts: Sequence[DTensorCut], shape: Sequence[int]) -> list[tuple[DTensorCut, int]]:
    """Cuts in the order in which they were made, each with the number of fused tensors that it cuts.

    A strided cut comes after all that stand behind it; where none does, its split factor is that number.
    """
    done: list[tuple[DTensorCut, int]] = []
    for position, cut in enumerate(reversed(cuts)):
        behind = cuts[len(cuts) - position :]
        if cut.after == 1 or not behind:
            done.insert(0, (cut, cut.after))
        elif cut.after == prod(each.parts for each in behind):
            done.append((cut, 1))
        else:
            raise UnsupportedModel(
                f"dimension {cut.dim} of a tensor {tuple(shape)} was cut into {cut.parts} after {cut.after} parts, "
                f"{prod(each.parts for each in behind)} are known: only FSDP over tensor parallelism cuts twice"
            )
    return done


def shards_of(cut: Slice, local: LocalShard) -> Iterator[Shard]:
    """The shards of a checkpoint tensor, slice `cut`, that a rank holds through `local`, its part of the source."""
    held = [[_fixed(runs, at)] for runs, at in zip(local.runs, cut.origin, strict=True)]
    free = {axis.source for axis, size in zip(cut.axes, cut.shape, strict=True) if size > 1}
    if any(at == [None] for dim, at in enumerate(held) if dim not in free):
        return
    fixed = sum(
        (at[0] or 0) * stride
        for dim, (at, stride) in enumerate(zip(held, local.strides, strict=True))
        if dim not in free
    )
    choices = [
        _along(axis, size, cut, local) if size > 1 else ((0, 1, 0, 0),)
        for axis, size in zip(cut.axes, cut.shape, strict=True)
    ]
    for chosen in product(*choices):
        box = Box(tuple(each[0] for each in chosen), tuple(each[1] for each in chosen))
        offset = fixed + sum(each[2] for each in chosen)
        yield Shard(cut.tensor, box, local.dtype, ShardView(local.storage, offset, tuple(each[3] for each in chosen)))


def _fixed(runs: Sequence[RowRun], index: int) -> int | None:
    """Local position of one index of a dimension; None when the rank does not hold it."""
    return next((run.at + index - run.start for run in runs if run.start <= index < run.start + run.length), None)


def _along(axis: Axis, size: int, cut: Slice, local: LocalShard) -> tuple[tuple[int, int, int, int], ...]:
    """Intervals of an axis that a rank holds: first and last index, offset of the first in its memory, stride."""
    origin, step, stride = cut.origin[axis.source], axis.step, local.strides[axis.source]
    found: list[tuple[int, int, int, int]] = []
    for run in local.runs[axis.source]:
        first = max(0, -(-(run.start - origin) // step))
        last = min(size, (run.start + run.length - 1 - origin) // step + 1)
        if first < last:
            found.append((first, last, (run.at + origin + first * step - run.start) * stride, step * stride))
    return tuple(found)
