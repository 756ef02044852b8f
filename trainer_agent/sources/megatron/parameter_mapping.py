"""Mapping rules from Megatron-core parameters to Hugging Face tensors, as data, and their arithmetic. Pure, no torch.

A `MappingRule` maps a parameter by its name within a layer: the Hugging Face tensors that it consists of, how their
rows are fused into its rows, and how tensor parallelism cuts it. `shards_of` applies a rule to one rank's part of the
parameter, without the parts of other ranks.

A parameter's rows are *sections*, one after another. Tensor parallelism cuts each section by itself, so that a rank
holds its share of the first, then its share of the second: gate and up of a gated MLP are two sections, a fused QKV is
one. A section consists of row runs: rows that are consecutive in a Hugging Face tensor, too.

The mapping rests on two facts: Megatron interleaves QKV by KV group (``[q .. q, k, v]`` per group) and cuts the result
into equal rows, inside a group when there are fewer groups than ranks; gate and up are cut separately, so that a rank
holds ``[gate_r; up_r]``, dense or expert, sequential or grouped. The attribute `partition_stride` says neither.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from weightbus.dataplane.tensors import Box, Shard, ShardView, TensorSpec

from ...source import LayoutMismatch
from ..tensor_slices import RowRun, concatenate, slice_runs, total_length


class Norm(enum.Enum):
    """Center of a norm's weight in the checkpoint, zero or one; Megatron's weight may have the other center."""

    NOT = enum.auto()
    """The tensor is no norm's weight."""
    FAMILY = enum.auto()
    """The center of the family's norms: one, for most families."""
    ONE = enum.auto()
    """One, also in families whose other norms are centered at zero."""


class MappingTarget(msgspec.Struct, frozen=True):
    """A Hugging Face tensor: its name below the layer's prefix, and its shape in names of the model's sizes."""

    name: str
    shape: tuple[str, ...]
    norm: Norm = Norm.NOT
    dtype: str | None = None
    """None for the model's dtype."""
    stacked: bool = False
    """The tensor holds all experts, along a first axis that `shape` leaves out; a parameter holds one of them."""


class Fusion(enum.Enum):
    """How the rows of a full parameter consist of the rows of its Hugging Face tensors."""

    PLAIN = enum.auto()
    """One tensor's rows."""
    VOCABULARY = enum.auto()
    """One tensor's rows, then padding up to the trainer's multiple."""
    QKV = enum.auto()
    """One section: for each KV group the rows of its query heads, of its key head, of its value head."""
    GATED_QKV = enum.auto()
    """As QKV, with the output gates of the group's heads after their queries; both are served in q, head by head."""
    GATED = enum.auto()
    """Two sections: all rows of gate, all of up. Served as two tensors or, one above the other, as one."""
    DELTA_IN = enum.auto()
    """Six sections: q, k, v, z, b and a of a gated delta net, served by key head in two tensors, qkvz and ba."""
    DELTA_IN_PLAIN = enum.auto()
    """As DELTA_IN, served in four tensors: q, k and v one above the other, z, b, a."""
    DELTA_CONVOLUTION = enum.auto()
    """Three sections of one tensor: the channels of q, of k and of v."""
    SWAPPED_HALVES = enum.auto()
    """One tensor's rows, with the halves of its columns exchanged."""


class TensorCut(enum.Enum):
    """How tensor parallelism cuts the full parameter."""

    NONE = enum.auto()
    """No cut: every rank holds the whole parameter."""
    ROWS = enum.auto()
    """Rank r holds the r-th share of the rows of each section."""
    COLUMNS = enum.auto()
    """Rank r holds the r-th share of the columns."""
    ROWS_OR_NONE = enum.auto()
    """Rows, into fewer shares than ranks, or no cut; decided by shape (MLA's down projections, wide norms)."""


class MappingRule(msgspec.Struct, frozen=True):
    """The Hugging Face tensors of one Megatron parameter."""

    megatron_names: tuple[str, ...]
    """Alternative names below the layer: a norm, for example, may be fused into a linear."""
    targets: tuple[MappingTarget, ...]
    cut: TensorCut = TensorCut.NONE
    fusion: Fusion = Fusion.PLAIN
    when: str | None = None
    """Switch of the model that must be on, or off with the prefix ``not ``; None for a rule that always applies."""

    @property
    def of_expert(self) -> bool:
        """True for a parameter that each expert has."""
        return self.targets[0].stacked or "{e}" in self.targets[0].name


class ParallelRank(msgspec.Struct, frozen=True):
    """Rank and size of one parallel group."""

    rank: int
    ranks: int


class LocalParameter(msgspec.Struct, frozen=True):
    """Form of one local tensor, without torch."""

    name: str
    """The trainer's name, with global indexes; for messages."""
    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


_Section = tuple[RowRun, ...]
_PADDING: Final = -1
"""Tensor index of padding rows."""


def shards_of(
    rule: MappingRule,
    local: LocalParameter,
    served: Sequence[TensorSpec],
    shifts: Sequence[int],
    *,
    sizes: Mapping[str, int],
    share: ParallelRank,
    expert: int | None = None,
) -> Iterator[Shard]:
    """The shards of Hugging Face tensors in `local`, one rank's part of a parameter.

    `served` are the rule's tensors, in its order; `shifts` are the numbers added to their values; `sizes` are the
    model's; `expert` is the index of the parameter's expert, if it has one. Raises `LayoutMismatch` unless `local` has
    the shape that their sizes give.
    """
    if expert is not None and rule.targets[0].stacked:
        of_one = [msgspec.structs.replace(spec, shape=spec.shape[1:]) for spec in served]
        for shard in shards_of(rule, local, of_one, shifts, sizes=sizes, share=share):
            yield _stacked(shard, expert, local)
        return
    rows = [spec.shape[0] for spec in served]
    sections = _sections(rule.fusion, rows, sizes)
    full = sum(map(total_length, sections))
    if rule.fusion is Fusion.VOCABULARY:
        full = max(full, local.shape[0] * share.ranks)
        sections = [concatenate([*sections[0], RowRun(0, full - rows[0], tensor=_PADDING)])]
    share = _share_of(rule.cut, local, full, share)
    _check_shape(rule.cut, local, (full, *served[0].shape[1:]), share)
    by_rows = ParallelRank(0, 1) if rule.cut is TensorCut.COLUMNS else share
    width = served[0].shape[1] if len(served[0].shape) > 1 else 0
    columns = list(_columns(rule, width, share))
    for at, run in _held(sections, by_rows):
        if run.tensor != _PADDING:
            for column_at, column, count in columns:
                yield _shard(local, served[run.tensor], (at, run), (column_at, column, count), shifts[run.tensor])


def _shard(
    local: LocalParameter, spec: TensorSpec, rows: tuple[int, RowRun], columns: tuple[int, int, int], shift: int
) -> Shard:
    at, run = rows
    column_at, column, count = columns
    start, stop = [0] * len(spec.shape), list(spec.shape)
    start[0], stop[0] = run.start, run.start + run.length
    offset = at * local.strides[0]
    if len(spec.shape) > 1:
        start[1], stop[1] = column, column + count
        offset += column_at * local.strides[1]
    box = Box(tuple(start), tuple(stop))
    return Shard(spec.name, box, local.dtype, ShardView(local.storage, offset, local.strides), shift)


def _stacked(shard: Shard, expert: int, local: LocalParameter) -> Shard:
    """The shard of one expert's tensor, in the tensor that holds all experts."""
    box = Box((expert, *shard.box.start), (expert + 1, *shard.box.stop))
    strides = (local.shape[0] * local.strides[0], *shard.view.strides)
    return msgspec.structs.replace(shard, box=box, view=msgspec.structs.replace(shard.view, strides=strides))


def _columns(rule: MappingRule, width: int, share: ParallelRank) -> Iterator[tuple[int, int, int]]:
    """Column ranges of a rank's part: first local column, first column of the Hugging Face tensor, number."""
    if rule.fusion is Fusion.SWAPPED_HALVES:
        half = width // 2
        yield half, 0, half
        yield 0, half, width - half
    elif rule.cut is TensorCut.COLUMNS:
        yield 0, share.rank * (width // share.ranks), width // share.ranks
    else:
        yield 0, 0, width


def _share_of(cut: TensorCut, local: LocalParameter, full: int, share: ParallelRank) -> ParallelRank:
    """The cut that the local shape shows: number of parts, and index of this part."""
    if cut is TensorCut.NONE:
        return ParallelRank(0, 1)
    if cut is TensorCut.ROWS_OR_NONE:
        parts = full // local.shape[0] if local.shape[0] and full % local.shape[0] == 0 else share.ranks
        if parts and share.ranks % parts == 0:
            return ParallelRank(share.rank * parts // share.ranks, parts)
    return share


def _check_shape(cut: TensorCut, local: LocalParameter, full: tuple[int, ...], share: ParallelRank) -> None:
    axis = 1 if cut is TensorCut.COLUMNS else 0
    found = tuple(size * share.ranks if at == axis else size for at, size in enumerate(local.shape))
    if found != full:
        raise LayoutMismatch(
            f"{local.name!r}: {share.ranks} shards of {local.shape} make {found}, the Hugging Face config gives "
            f"{full}: build the source with the config of the model that is being trained"
        )


def _held(sections: Sequence[_Section], share: ParallelRank) -> Iterator[tuple[int, RowRun]]:
    """Row runs of a rank's part, each with its first local row."""
    at = 0
    for section in sections:
        size = total_length(section) // share.ranks
        for run in slice_runs(section, share.rank * size, size):
            yield at + run.at, run
        at += size


def _sections(fusion: Fusion, rows: Sequence[int], sizes: Mapping[str, int]) -> list[_Section]:
    if fusion in {Fusion.QKV, Fusion.GATED_QKV}:
        return [concatenate(_qkv(sizes, gated=fusion is Fusion.GATED_QKV))]
    if fusion is Fusion.DELTA_IN:
        return list(_delta_in(sizes))
    if fusion in {Fusion.DELTA_IN_PLAIN, Fusion.DELTA_CONVOLUTION}:
        key, value = (sizes[f"delta_{each}s"] * sizes[f"delta_{each}_dim"] for each in ("key", "value"))
        qkv: list[_Section] = [(RowRun(0, key),), (RowRun(key, key),), (RowRun(2 * key, value),)]
        return [*qkv, *((RowRun(0, size, tensor=tensor),) for tensor, size in enumerate(rows) if tensor)]
    if fusion is Fusion.GATED:
        if len(rows) == 1:
            half = rows[0] // 2
            return [(RowRun(0, half),), (RowRun(half, half),)]
        return [(RowRun(0, size, tensor=tensor),) for tensor, size in enumerate(rows)]
    return [(RowRun(0, rows[0]),)]


def _qkv(sizes: Mapping[str, int], *, gated: bool) -> Iterator[RowRun]:
    size, each = sizes["head_dim"], sizes["heads"] // sizes["groups"]
    for group in range(sizes["groups"]):
        if gated:
            first = group * each
            # q is served head by head, each with its query rows and then its gate rows.
            for half in range(2):
                yield from (RowRun((2 * head + half) * size, size) for head in range(first, first + each))
        else:
            yield RowRun(group * each * size, each * size)
        yield RowRun(group * size, size, tensor=1)
        yield RowRun(group * size, size, tensor=2)


def _delta_in(sizes: Mapping[str, int]) -> Iterator[_Section]:
    heads, key, value = sizes["delta_keys"], sizes["delta_key_dim"], sizes["delta_value_dim"]
    values = sizes["delta_values"] // heads
    widths: Final = (key, key, values * value, values * value)
    at = 0
    for width in widths:
        yield concatenate(RowRun(head * sum(widths) + at, width) for head in range(heads))
        at += width
    for half in range(2):
        yield concatenate(RowRun((2 * head + half) * values, values, tensor=1) for head in range(heads))
