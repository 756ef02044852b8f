"""What one Megatron-core parameter becomes, as data, and which pieces one shard of it is. Pure arithmetic, no torch.

A `MappingRule` says it for a parameter by its name within a layer: the served tensors that it consists of, how their
rows are fused into its rows, and how tensor parallelism cuts it. `pieces_of` applies a rule to the shard of one rank,
which never needs more than its own part.

A parameter's rows are *sections*, one after another. Tensor parallelism cuts each section by itself, so that a rank
holds its share of the first, then its share of the second: gate and up of a gated MLP are two sections, a fused QKV is
one. A section consists of runs: rows that follow each other in a served tensor, too.

Two facts that this rests on: Megatron interleaves QKV by KV group (``[q .. q, k, v]`` per group) and cuts the result
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
from ..row_runs import RowRun, extent, in_sequence, stretch


class Norm(enum.Enum):
    """Around what a norm's weight is served; the trained one may be around the other number."""

    NOT = enum.auto()
    """It is no norm's weight."""
    FAMILY = enum.auto()
    """Around what the family says: one, for most."""
    ONE = enum.auto()
    """Around one, whatever the other norms of the family are."""


class MappingTarget(msgspec.Struct, frozen=True):
    """A served tensor: its name below the layer's prefix, and its shape in names of the model's sizes."""

    name: str
    shape: tuple[str, ...]
    norm: Norm = Norm.NOT
    dtype: str | None = None
    """None: as the model is served."""


class Fusion(enum.Enum):
    """How the rows of a full parameter consist of the rows of its served tensors."""

    PLAIN = enum.auto()
    """They are one tensor's rows."""
    VOCABULARY = enum.auto()
    """They are one tensor's rows, then padding up to a multiple that suits the trainer."""
    QKV = enum.auto()
    """One section: for each KV group the rows of its query heads, of its key head, of its value head."""
    GATED_QKV = enum.auto()
    """As QKV, with the output gates of the group's heads after their queries; both are served in q, head by head."""
    GATED = enum.auto()
    """Two sections: all rows of gate, all of up. Served as two tensors or, one above the other, as one."""
    DELTA_IN = enum.auto()
    """Six sections: q, k, v, z, b and a of a gated delta net, served by key head in two tensors, qkvz and ba."""
    DELTA_CONVOLUTION = enum.auto()
    """Three sections of one tensor: the channels of q, of k and of v."""
    SWAPPED_HALVES = enum.auto()
    """One tensor's rows, with the halves of its columns exchanged."""


class TensorCut(enum.Enum):
    """How tensor parallelism cuts the full parameter."""

    NONE = enum.auto()
    """Not at all: every rank holds it."""
    ROWS = enum.auto()
    """Rank r holds the r-th share of the rows of each section."""
    COLUMNS = enum.auto()
    """Rank r holds the r-th share of the columns."""
    ROWS_OR_NONE = enum.auto()
    """By rows, into fewer shares than ranks, or not at all: its shape tells (MLA's down projections, wide norms)."""


class MappingRule(msgspec.Struct, frozen=True):
    """What one Megatron parameter becomes."""

    trained: tuple[str, ...]
    """Names below the layer, one of which it has: norms, for example, are fused into linears or are not."""
    served: tuple[MappingTarget, ...]
    cut: TensorCut = TensorCut.NONE
    fusion: Fusion = Fusion.PLAIN
    when: str | None = None
    """The switch of the model that must be on, or with ``not `` before it, off."""


class Heads(msgspec.Struct, frozen=True):
    """What fused attention parameters are made of, in rows."""

    heads: int = 1
    groups: int = 1
    head_dim: int = 1
    key_heads: int = 1
    key_dim: int = 1
    value_heads: int = 1
    value_dim: int = 1


class MappedShare(msgspec.Struct, frozen=True):
    """Which of how many tensor-parallel shards."""

    rank: int
    ranks: int


class LocalParameter(msgspec.Struct, frozen=True):
    """One local tensor: what is known of it without torch."""

    name: str
    """As the trainer calls it, with global indexes; for messages."""
    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


_Section = tuple[RowRun, ...]
_PADDING: Final = -1
"""The tensor of rows that belong to none."""


def pieces_of(
    rule: MappingRule,
    local: LocalParameter,
    served: Sequence[TensorSpec],
    shifts: Sequence[int],
    *,
    heads: Heads,
    share: MappedShare,
) -> Iterator[Shard]:
    """What a shard holds of the tensors `served`, which are those of the rule, in its order.

    `shifts` is what is added to each of them. Raises `LayoutMismatch` unless the shard has the shape that their sizes
    give.
    """
    rows = [spec.shape[0] for spec in served]
    sections = _sections(rule.fusion, rows, heads)
    full = sum(map(extent, sections))
    if rule.fusion is Fusion.VOCABULARY:
        full = max(full, local.shape[0] * share.ranks)
        sections = [in_sequence([*sections[0], RowRun(0, full - rows[0], tensor=_PADDING)])]
    share = _share_of(rule.cut, local, full, share)
    _check_shape(rule.cut, local, (full, *served[0].shape[1:]), share)
    by_rows = MappedShare(0, 1) if rule.cut is TensorCut.COLUMNS else share
    width = served[0].shape[1] if len(served[0].shape) > 1 else 0
    columns = list(_columns(rule, width, share))
    for at, run in _held(sections, by_rows):
        if run.tensor != _PADDING:
            for column_at, column, count in columns:
                yield _piece(local, served[run.tensor], (at, run), (column_at, column, count), shifts[run.tensor])


def _piece(
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


def _columns(rule: MappingRule, width: int, share: MappedShare) -> Iterator[tuple[int, int, int]]:
    """Which columns a shard holds: where they begin locally, where they are served, how many."""
    if rule.fusion is Fusion.SWAPPED_HALVES:
        half = width // 2
        yield half, 0, half
        yield 0, half, width - half
    elif rule.cut is TensorCut.COLUMNS:
        yield 0, share.rank * (width // share.ranks), width // share.ranks
    else:
        yield 0, 0, width


def _share_of(cut: TensorCut, local: LocalParameter, full: int, share: MappedShare) -> MappedShare:
    """Into how many parts the parameter is really cut, and which of them this is."""
    if cut is TensorCut.NONE:
        return MappedShare(0, 1)
    if cut is TensorCut.ROWS_OR_NONE:
        parts = full // local.shape[0] if local.shape[0] and full % local.shape[0] == 0 else share.ranks
        if parts and share.ranks % parts == 0:
            return MappedShare(share.rank * parts // share.ranks, parts)
    return share


def _check_shape(cut: TensorCut, local: LocalParameter, full: tuple[int, ...], share: MappedShare) -> None:
    axis = 1 if cut is TensorCut.COLUMNS else 0
    found = tuple(size * share.ranks if at == axis else size for at, size in enumerate(local.shape))
    if found != full:
        raise LayoutMismatch(
            f"{local.name!r}: {share.ranks} shards of {local.shape} make {found}, the Hugging Face config gives "
            f"{full}: build the source with the config of the model that is being trained"
        )


def _held(sections: Sequence[_Section], share: MappedShare) -> Iterator[tuple[int, RowRun]]:
    """The runs of a shard, each with the local row at which it begins."""
    at = 0
    for section in sections:
        size = extent(section) // share.ranks
        for run in stretch(section, share.rank * size, size):
            yield at + run.at, run
        at += size


def _sections(fusion: Fusion, rows: Sequence[int], heads: Heads) -> list[_Section]:
    if fusion in {Fusion.QKV, Fusion.GATED_QKV}:
        return [in_sequence(_qkv(heads, gated=fusion is Fusion.GATED_QKV))]
    if fusion is Fusion.DELTA_IN:
        return list(_delta_in(heads))
    if fusion is Fusion.DELTA_CONVOLUTION:
        key, value = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
        return [(RowRun(0, key),), (RowRun(key, key),), (RowRun(2 * key, value),)]
    if fusion is Fusion.GATED:
        if len(rows) == 1:
            half = rows[0] // 2
            return [(RowRun(0, half),), (RowRun(half, half),)]
        return [(RowRun(0, size, tensor=tensor),) for tensor, size in enumerate(rows)]
    return [(RowRun(0, rows[0]),)]


def _qkv(heads: Heads, *, gated: bool) -> Iterator[RowRun]:
    size, each = heads.head_dim, heads.heads // heads.groups
    for group in range(heads.groups):
        if gated:
            first = group * each
            # q is served head by head, each with its query rows and then its gate rows.
            for half in range(2):
                yield from (RowRun((2 * head + half) * size, size) for head in range(first, first + each))
        else:
            yield RowRun(group * each * size, each * size)
        yield RowRun(group * size, size, tensor=1)
        yield RowRun(group * size, size, tensor=2)


def _delta_in(heads: Heads) -> Iterator[_Section]:
    values = heads.value_heads // heads.key_heads
    widths: Final = (heads.key_dim, heads.key_dim, values * heads.value_dim, values * heads.value_dim)
    at = 0
    for width in widths:
        yield in_sequence(RowRun(head * sum(widths) + at, width) for head in range(heads.key_heads))
        at += width
    for half in range(2):
        yield in_sequence(RowRun((2 * head + half) * values, values, tensor=1) for head in range(heads.key_heads))


def by_name(rules: Sequence[MappingRule]) -> Mapping[str, MappingRule]:
    """Rules by every name that they go by. A name stands for one rule only."""
    named: dict[str, MappingRule] = {}
    for rule in rules:
        for name in rule.trained:
            assert name not in named, f"two rules for {name!r}"
            named[name] = rule
    return named
