"""Which boxes of the served tensors one tensor-parallel shard of a Megatron parameter holds. Pure arithmetic, no torch.

Every rank describes its own shard, so that no rank ever needs a whole parameter: the rows of the full parameter that
the shard holds (by the rule's `Split`) meet the rows that each served tensor takes of it (by the rule's `Fusion`).

Two facts that this rests on: Megatron interleaves QKV by KV group (``[q .. q, k, v]`` per group) and cuts the result
into equal rows, inside a group when there are fewer groups than ranks; gate and up of a gated MLP are cut separately,
so that a rank holds ``[gate_r; up_r]``. The attribute `partition_stride` says neither reliably.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from weightbus.dataplane.manifest import TensorSpec

from .naming import Dense, Fusion, Split, rule_for
from .source import LayoutMismatch


class Piece(msgspec.Struct, frozen=True):
    """`count` equal blocks of rows that a shard holds of one served tensor.

    Block i is rows ``local_row + i * local_step`` of the shard, all its columns, and rows ``served_row + i *
    served_step``, columns ``column .. column + columns``, of the served tensor. A vector has rows of one element.
    """

    tensor: str
    local_row: int
    served_row: int
    rows: int
    columns: int
    column: int = 0
    count: int = 1
    local_step: int = 0
    served_step: int = 0

    @property
    def size(self) -> int:
        """Elements of the piece."""
        return self.count * self.rows * self.columns


class _Run(msgspec.Struct):
    """Consecutive rows that are at `at` on one side and at `to` on the other, there in served tensor `part`."""

    at: int
    to: int
    rows: int
    part: int = 0


def pieces(
    name: str, shape: Sequence[int], served: Mapping[str, TensorSpec], model: Dense, *, rank: int, ranks: int
) -> tuple[Piece, ...]:
    """What tensor-parallel shard `rank` of `ranks`, of local `shape`, holds of the served tensors.

    Raises `LayoutMismatch` when the served model has no such tensor or the shard has another shape than the served
    sizes give, and `KeyError` when no rule names the parameter (ask `rule_for` first).
    """
    found = rule_for(name)
    if found is None:
        raise KeyError(name)
    rule, prefix = found
    targets = [_target(name, prefix + suffix, served) for suffix in rule.served]
    rows = [target.shape[0] for target in targets]
    width = targets[0].shape[1] if len(targets[0].shape) == 2 else 1
    full = sum(rows)
    if rule.fusion is Fusion.VOCABULARY:
        full = max(full, shape[0] * ranks)
    _check_shape(name, shape, (full, *targets[0].shape[1:]), rule.split, ranks)
    columns = width // ranks if rule.split is Split.COLUMNS else width
    column = rank * columns if rule.split is Split.COLUMNS else 0
    held = _held_rows(rule.split, rows, full, rank, ranks)
    fused = _fused_rows(rule.fusion, rows, model)
    names = [target.name for target in targets]
    return _merge(_intersect(held, fused), names, columns, column)


def _check_shape(name: str, shape: Sequence[int], full: Sequence[int], split: Split, ranks: int) -> None:
    cut = {Split.NONE: None, Split.ROWS: 0, Split.HALVES: 0, Split.COLUMNS: 1}[split]
    found = [size * ranks if axis == cut else size for axis, size in enumerate(shape)]
    if found != list(full):
        raise LayoutMismatch(
            f"{name!r}: {ranks} shards of {tuple(shape)} make {tuple(found)}, the Hugging Face config gives "
            f"{tuple(full)}: build the source with the config of the model that is being trained"
        )


def _held_rows(split: Split, rows: Sequence[int], full: int, rank: int, ranks: int) -> list[_Run]:
    """The rows of a shard: `at` in the shard, `to` in the full parameter."""
    if split is Split.ROWS:
        share = full // ranks
        return [_Run(0, rank * share, share)]
    if split is Split.HALVES:
        runs: list[_Run] = []
        local = start = 0
        for size in rows:
            share = size // ranks
            runs.append(_Run(local, start + rank * share, share))
            local += share
            start += size
        return runs
    return [_Run(0, 0, full)]


def _fused_rows(fusion: Fusion, rows: Sequence[int], model: Dense) -> list[_Run]:
    """The rows of the full parameter: `at` in it, `to` in served tensor `part`. Padding belongs to none."""
    if fusion is Fusion.QKV:
        query = model.head_dim * (model.heads // model.groups)
        sizes = (query, model.head_dim, model.head_dim)
        per_group = [(part, size) for _ in range(model.groups) for part, size in enumerate(sizes)]
    else:
        per_group = list(enumerate(rows))
    runs: list[_Run] = []
    at = 0
    taken = [0] * len(rows)
    for part, size in per_group:
        runs.append(_Run(at, taken[part], size, part))
        at += size
        taken[part] += size
    return runs


def _intersect(held: Iterable[_Run], fused: Sequence[_Run]) -> list[_Run]:
    """Rows that a shard holds, `at` in the shard, `to` in served tensor `part`."""
    runs: list[_Run] = []
    for run in held:
        for target in fused:
            first = max(run.to, target.at)
            last = min(run.to + run.rows, target.at + target.rows)
            if first < last:
                runs.append(_Run(run.at + first - run.to, target.to + first - target.at, last - first, target.part))
    return runs


def _merge(runs: Sequence[_Run], names: Sequence[str], columns: int, column: int) -> tuple[Piece, ...]:
    """Join equal, equally spaced runs of one tensor: a copy each would cost more than the bytes."""
    merged: list[Piece] = []
    for part, name in enumerate(names):
        mine = [run for run in runs if run.part == part]
        while mine:
            block = _progression(mine)
            first, second = mine[0], mine[min(1, block - 1)]
            merged.append(
                Piece(
                    name,
                    first.at,
                    first.to,
                    first.rows,
                    columns,
                    column,
                    block,
                    second.at - first.at,
                    second.to - first.to,
                )
            )
            del mine[:block]
    return tuple(merged)


def _progression(runs: Sequence[_Run]) -> int:
    """How many of the first runs are equally long and equally far apart."""
    if len(runs) < 2:
        return 1
    step = (runs[1].at - runs[0].at, runs[1].to - runs[0].to)
    count = 1
    for before, after in pairwise(runs):
        if after.rows != runs[0].rows or (after.at - before.at, after.to - before.to) != step:
            break
        count += 1
    return count


def _target(name: str, served_name: str, served: Mapping[str, TensorSpec]) -> TensorSpec:
    target = served.get(served_name)
    if target is None:
        raise LayoutMismatch(
            f"{name!r} is trained, but the served model has no {served_name!r}: "
            f"make the Hugging Face config (biases, tie_word_embeddings, layers) that of the model being trained"
        )
    return target
