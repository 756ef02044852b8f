"""Boxes and shards: which box of which Hugging Face tensor lies where in the memory of which rank. Pure data, no torch.

A box is a half-open range of indexes along every axis of a tensor. A shard is a box of a tensor and a strided view of
one local tensor of its rank, element by element the same. Fused, cut, padded, replicated and transposed parameters are
all sets of shards; nothing else about a training framework is known here. One description serves every path: assembling
whole tensors, writing files, and copying from shard to shard. It is not torch's `Shard`, a DTensor placement.

`Box` and `Shard` are one, for building, for reading and for messages. `Boxes` and `Shards` are many, as columns: ranks
exchange them and planners work on them (coverage.py: the choice among replicas, and the check that they are a model). A
model of 20,000 tensors on 64 ranks is a million boxes, so nothing here loops over them in Python.

    tensors     the tensors described: names, dtypes in which they are served, shapes
    rank        rank that holds the shard
    storage     index of a local tensor, in the rank's own list of them
    dtype       of that local tensor; it may differ from the served one
    offset      elements from the first element of the local tensor
    stride      elements of the local tensor for one step along each axis of the served tensor
    shift       added to every element (norms that a trainer keeps around zero); 0 for a plain copy
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import ClassVar, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ManifestError
from .manifest import ITEM_BYTES, TensorSpec

Column = npt.NDArray[np.int64]

_PAIRS_AT_ONCE: Final = 1 << 22
"""Candidate pairs compared in one step: about 200 MB of temporaries."""


class Box(msgspec.Struct, frozen=True):
    """The indexes ``start[axis] <= i < stop[axis]`` on every axis. A scalar's box has no axes and one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each axis."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """True when not empty, and inside a tensor of `shape`."""
        return len(self.start) == len(self.stop) == len(shape) and all(
            0 <= start < stop <= extent for start, stop, extent in zip(self.start, self.stop, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common part; None when it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """The part outside of `other`, as disjoint boxes: at most two for each axis."""
        common = self.intersect(other)
        if common is None:
            return (self,)
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for axis in range(len(start)):
            if start[axis] < common.start[axis]:
                rest.append(Box(tuple(start), (*stop[:axis], common.start[axis], *stop[axis + 1 :])))
            if common.stop[axis] < stop[axis]:
                rest.append(Box((*start[:axis], common.stop[axis], *start[axis + 1 :]), tuple(stop)))
            start[axis], stop[axis] = common.start[axis], common.stop[axis]
        return tuple(rest)


def subtract_all(box: Box, others: Sequence[Box]) -> tuple[Box, ...]:
    """The part of `box` outside of all `others`, as disjoint boxes."""
    rest = [box]
    for other in others:
        rest = [part for each in rest for part in each.subtract(other)]
    return tuple(rest)


@dataclass(frozen=True, eq=False)
class Table:
    """Rows as columns of int64: the fields of type `Column`, each (rows,), the last few (rows, axes)."""

    KIND: ClassVar[str] = "rows"
    """Of what the rows are, for messages."""
    WIDE: ClassVar[tuple[int, int]] = (0, 1)
    """How many of the columns have axes, and how many axes."""

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return tuple(field.name for field in fields(cls) if field.type == "Column")

    def __len__(self) -> int:
        return len(getattr(self, self.columns()[0]))

    def take(self, rows: Column) -> Self:
        """The given rows, in their order."""
        if is_identity(rows, len(self)):
            return self
        return replace(self, **{name: getattr(self, name)[rows] for name in self.columns()})

    def numbers(self) -> Column:
        """(rows, all columns and axes): side by side, in the order of the fields."""
        return np.column_stack([getattr(self, name) for name in self.columns()])

    @classmethod
    def of_numbers(cls, numbers: Column, **others: object) -> Self:
        """The table of a matrix that `numbers` gave; `others` are the fields that are no columns."""
        wide, axes = cls.WIDE
        flat = len(cls.columns()) - wide
        parts = [numbers[:, at] for at in range(flat)]
        parts += [numbers[:, flat + axes * part : flat + axes * (part + 1)] for part in range(wide)]
        return cls(**others, **dict(zip(cls.columns(), parts, strict=True)))

    def encode(self) -> bytes:
        """The columns as bytes: the same for the same rows on every machine."""
        return self.numbers().astype("<i8").tobytes()

    @classmethod
    def decode(cls, blob: bytes, **others: object) -> Self:
        """The table that `encode` wrote. Raises `ManifestError` on anything else; `check` compares it with memory."""
        wide, axes = cls.WIDE
        width = len(cls.columns()) + wide * (axes - 1)
        if len(blob) % (8 * width):
            raise ManifestError(f"not a table of {cls.KIND}: {len(blob)} bytes, expected a multiple of {8 * width}")
        return cls.of_numbers(np.frombuffer(blob, "<i8").astype(np.int64).reshape(-1, width), **others)


@dataclass(frozen=True, eq=False)
class Boxes(Table):
    """Many boxes as columns. Tensors with fewer axes than the columns have extent 1 on the further ones."""

    space: Column
    """(boxes,): index of the tensor."""
    start: Column
    """(boxes, axes): first index."""
    stop: Column
    """(boxes, axes): index behind the last one."""

    @property
    def extents(self) -> Column:
        """(boxes, axes): indexes along each axis."""
        return self.stop - self.start

    @property
    def sizes(self) -> Column:
        """(boxes,): elements."""
        extents = self.extents
        sizes = np.ones(len(self), np.int64)
        for axis in range(extents.shape[1]):
            sizes *= extents[:, axis]
        return sizes

    def at(self, index: int) -> Box:
        """The box of row `index`, with all axes of the columns."""
        return Box(tuple(self.start[index].tolist()), tuple(self.stop[index].tolist()))


def is_identity(rows: Column, count: int) -> bool:
    """True when `rows` are 0, 1, .. `count` - 1: taking them changes nothing."""
    return len(rows) == count and np.array_equal(rows, np.arange(count))


def pad_axes(column: Column, axes: int, fill: int) -> Column:
    """Columns for further axes: `fill` is 0 for a start or a stride, and 1 for a stop."""
    rows, known = column.shape
    if known >= axes:
        return column
    wide = np.full((rows, axes), fill, np.int64)
    wide[:, :known] = column
    return wide


def intersect(a: Boxes, b: Boxes) -> tuple[Column, Column, Boxes]:
    """All overlapping pairs of a box of `a` and a box of `b`: rows of `a`, rows of `b`, and the common parts.

    Ordered by row of `a`, then of `b`. Takes time in the number of pairs, not of all products: a space with one box of
    `b` is a lookup; in the others boxes are sorted along the axis that `b` is cut along most, and only neighbors on it
    are compared.
    """
    axes = max(a.start.shape[1], b.start.shape[1])
    a = Boxes(a.space, pad_axes(a.start, axes, 0), pad_axes(a.stop, axes, 1))
    b = Boxes(b.space, pad_axes(b.start, axes, 0), pad_axes(b.stop, axes, 1))
    rows, others = _ordered([(rows, others) for rows, others in _pairs(a, b) if len(rows)], len(b))
    common = Boxes(a.space[rows], np.maximum(a.start[rows], b.start[others]), np.minimum(a.stop[rows], b.stop[others]))
    return rows, others, common


def find_overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Two rows that overlap; None when every element of every space is in at most one box."""
    rows, others, _ = intersect(boxes, boxes)
    double = np.flatnonzero(rows != others)
    return (int(rows[double[0]]), int(others[double[0]])) if len(double) else None


def volumes(boxes: Boxes, spaces: int) -> Column:
    """(spaces,): elements of the boxes of each space, common ones counted for each box."""
    total = np.zeros(spaces, np.int64)
    np.add.at(total, boxes.space, boxes.sizes)
    return total


def _pairs(a: Boxes, b: Boxes) -> Iterator[tuple[Column, Column]]:
    """Overlapping pairs."""
    if not len(a) or not len(b):
        return
    spaces = int(max(a.space.max(), b.space.max())) + 1
    count = np.bincount(b.space, minlength=spaces)[a.space]
    place = np.zeros(spaces, np.int64)
    place[b.space] = np.arange(len(b))
    rows = np.flatnonzero(count == 1)
    others = place[a.space[rows]]
    overlap = _overlap(a, rows, b, others)
    yield rows[overlap], others[overlap]
    crowded = np.flatnonzero(count > 1)
    if len(crowded):
        for some, found in _candidates(a.take(crowded), b):
            yield crowded[some], found


def _ordered(pairs: Sequence[tuple[Column, Column]], count: int) -> tuple[Column, Column]:
    """All pairs by their first row, then by the second, which is less than `count`."""
    rows = np.concatenate([pair[0] for pair in pairs]) if pairs else np.empty(0, np.int64)
    others = np.concatenate([pair[1] for pair in pairs]) if pairs else np.empty(0, np.int64)
    key = rows * count + others
    if (key[1:] > key[:-1]).all():
        return rows, others
    order = np.argsort(key, kind="stable")
    return rows[order], others[order]


def _overlap(a: Boxes, rows: Column, b: Boxes, others: Column) -> npt.NDArray[np.bool_]:
    """(pairs,) bool: which of these pairs overlap."""
    apart = (a.start[rows] >= b.stop[others]) | (b.start[others] >= a.stop[rows])
    found = np.ones(len(rows), bool)
    for axis in range(apart.shape[1]):
        found &= ~apart[:, axis]
    return found


def _candidates(a: Boxes, b: Boxes) -> Iterator[tuple[Column, Column]]:
    """Overlapping pairs, a bounded number of comparisons at a time."""
    axis_of = _cut_axis(b, int(max(a.space.max(), b.space.max())) + 1)
    span = int(max(a.stop.max(), b.stop.max())) + 1
    a_from, a_to = (_key(a, column, axis_of, span) for column in (a.start, a.stop))
    b_from, b_to = (_key(b, column, axis_of, span) for column in (b.start, b.stop))
    order = np.argsort(b_from, kind="stable")
    reach = np.maximum.accumulate(b_to[order])  # how far any box up to here goes, which grows
    first = np.searchsorted(reach, a_from, side="right")
    count = np.maximum(np.searchsorted(b_from[order], a_to, side="left") - first, 0)
    ends = np.cumsum(count)
    at = 0
    while at < len(a):
        limit = (ends[at - 1] if at else 0) + _PAIRS_AT_ONCE
        until = max(at + 1, int(np.searchsorted(ends, limit, side="right")))
        rows = np.repeat(np.arange(at, until), count[at:until])
        within = np.arange(len(rows)) - np.repeat(
            ends[at:until] - count[at:until] - (ends[at] - count[at]), count[at:until]
        )
        others = order[first[rows] + within]
        overlap = _overlap(a, rows, b, others)
        yield rows[overlap], others[overlap]
        at = until


def _key(boxes: Boxes, column: Column, axis_of: Column, span: int) -> Column:
    """One number for space and position along the space's axis, in that order."""
    return boxes.space * span + column[np.arange(len(boxes)), axis_of[boxes.space]]


def _cut_axis(boxes: Boxes, spaces: int) -> Column:
    """(spaces,): the axis along which the boxes of each space begin at the most different places."""
    distinct = np.zeros((spaces, boxes.start.shape[1]), np.int64)
    for axis in range(boxes.start.shape[1]):
        order = np.lexsort((boxes.start[:, axis], boxes.space))
        space, start = boxes.space[order], boxes.start[order, axis]
        new = np.ones(len(space), bool)
        new[1:] = (space[1:] != space[:-1]) | (start[1:] != start[:-1])
        np.add.at(distinct[:, axis], space[new], 1)
    axes: Column = np.argmax(distinct, axis=1)
    return axes


DTYPES: Final = tuple(ITEM_BYTES)
"""Dtypes by their number in columns."""
_ITEM_BYTES: Final[Column] = np.array([*ITEM_BYTES.values()], np.int64)
_NUMBERS: Final = {name: number for number, name in enumerate(DTYPES)}

_COLUMNS: Final = ("rank", "storage", "dtype", "offset", "shift")
_MAX_AXES: Final = 8
_MOST_KEY: Final = 1 << 62


class ShardView(msgspec.Struct, frozen=True):
    """A strided view: `offset` and `strides` in elements of local tensor `storage`."""

    storage: int
    offset: int
    strides: tuple[int, ...]


class Shard(msgspec.Struct, frozen=True):
    """A box of one served tensor, and the local memory that holds it in `dtype`."""

    tensor: str
    box: Box
    dtype: str
    view: ShardView
    shift: int = 0


@dataclass(frozen=True, eq=False)
class Shards:
    """Many shards of many ranks as columns; the module's docstring describes each column."""

    tensors: tuple[TensorSpec, ...]
    boxes: Boxes
    rank: Column
    storage: Column
    dtype: Column
    offset: Column
    stride: Column
    shift: Column

    def __len__(self) -> int:
        return len(self.boxes)

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec], shards: Iterable[Shard], rank: int = 0) -> Shards:
        """The shards of one rank. Raises `ManifestError` for one that names no tensor or lies outside of its tensor."""
        shards = tuple(shards)
        number = {spec.name: index for index, spec in enumerate(tensors)} if shards else {}
        axes = max((len(spec.shape) for spec in (tensors if shards else ())), default=0) or 1
        rows = [_row(shard, number, tensors, axes) for shard in shards]
        table = np.array(rows, np.int64).reshape(len(rows), 5 + 3 * axes)
        start, stop, stride = (table[:, 5 + axes * part : 5 + axes * (part + 1)] for part in range(3))
        return cls(
            tensors=tuple(tensors),
            boxes=Boxes(table[:, 0], start, stop),
            rank=np.full(len(rows), rank, np.int64),
            storage=table[:, 1],
            dtype=table[:, 2],
            offset=table[:, 3],
            stride=stride,
            shift=table[:, 4],
        )

    @classmethod
    def join(cls, parts: Sequence[Shards]) -> Shards:
        """All shards of all parts, in order. Raises `ManifestError` unless they describe the same tensors."""
        first = parts[0]
        if any(part.tensors != first.tensors for part in parts):
            raise ManifestError("the ranks describe different tensors: give every rank the same model and config")
        axes = max(part.boxes.start.shape[1] for part in parts)
        boxes = Boxes(
            np.concatenate([part.boxes.space for part in parts]),
            np.concatenate([pad_axes(part.boxes.start, axes, 0) for part in parts]),
            np.concatenate([pad_axes(part.boxes.stop, axes, 1) for part in parts]),
        )
        return cls(
            tensors=first.tensors,
            boxes=boxes,
            stride=np.concatenate([pad_axes(part.stride, axes, 0) for part in parts]),
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS},
        )

    def take(self, rows: Column) -> Shards:
        """The shards of these rows, in their order."""
        if is_identity(rows, len(self)):
            return self
        return replace(
            self,
            boxes=self.boxes.take(rows),
            stride=self.stride[rows],
            **{name: getattr(self, name)[rows] for name in _COLUMNS},
        )

    def at(self, index: int) -> Shard:
        """The shard of row `index`."""
        spec = self.tensors[int(self.boxes.space[index])]
        axes = len(spec.shape)
        box = self.boxes.at(index)
        return Shard(
            spec.name,
            Box(box.start[:axes], box.stop[:axes]),
            DTYPES[int(self.dtype[index])],
            ShardView(int(self.storage[index]), int(self.offset[index]), tuple(self.stride[index, :axes].tolist())),
            int(self.shift[index]),
        )

    def of_rank(self, rank: int) -> Shards:
        """The shards of one rank."""
        return self.take(np.flatnonzero(self.rank == rank))

    def within(self, boxes: Boxes, rows: Column) -> Shards:
        """The parts `boxes` of the shards of `rows`, one each; every box must lie inside its shard."""
        whole = self.take(rows)
        moved = np.sum((boxes.start - whole.boxes.start) * whole.stride, axis=1)
        return replace(whole, boxes=boxes, offset=whole.offset + moved)

    def ordered(self, tensors: Sequence[TensorSpec]) -> Shards:
        """The same shards with tensors in the order of `tensors`. Raises `ManifestError` if those are others."""
        return self.renumbered(tensors, tensor_positions(tensors, self.tensors))

    def renumbered(self, tensors: Sequence[TensorSpec], places: Column) -> Shards:
        """`ordered`, where `places`, (tensors,), is the index in `tensors` of each tensor."""
        return replace(self, tensors=tuple(tensors), boxes=replace(self.boxes, space=places[self.boxes.space]))

    def encode(self) -> bytes:
        """Bytes that travel between ranks: the same for the same shards on every machine.

        Tensors are named by digest.
        """
        numbers = self.numbers().astype("<i8").tobytes()
        return _ENCODER.encode(_Wire(_about(self.tensors).digest, self.boxes.start.shape[1], numbers))

    @classmethod
    def decode(cls, blobs: Sequence[bytes], tensors: Sequence[TensorSpec]) -> Shards:
        """The shards that several ranks encoded, joined. Raises `ManifestError` unless they describe these tensors."""
        described = tuple(tensors)
        shards = cls.join([_decode(blob, described) for blob in blobs])
        shards.check()
        return shards

    def check(self) -> None:
        """Raise `ManifestError` unless every shard is a box inside its tensor, in a dtype that can travel."""
        known = (self.boxes.space >= 0) & (self.boxes.space < len(self.tensors))
        known &= (self.dtype >= 0) & (self.dtype < len(DTYPES)) & (self.storage >= 0) & (self.offset >= 0)
        if not known.all():
            raise ManifestError(f"shard {int(np.argmin(known))} names a tensor, dtype or place that there is not")
        inside = (self.boxes.start >= 0) & (self.boxes.start < self.boxes.stop)
        shapes = pad_axes(_about(self.tensors).shapes, inside.shape[1], 1)
        if shapes.shape[1] > inside.shape[1] and len(self):
            raise ManifestError(f"shards of {inside.shape[1]} axes, of tensors that have up to {shapes.shape[1]}")
        inside &= self.boxes.stop <= shapes[self.boxes.space, : inside.shape[1]]
        if not inside.all():
            odd = self.boxes.at(int(np.argmin(inside.all(axis=1))))
            raise ManifestError(f"a shard {odd.start}..{odd.stop} is empty or lies outside of its tensor")

    def digest(self) -> str:
        """SHA-256, hexadecimal, of the description; independent of the order of shards and tensors."""
        named = self.ordered(sorted(self.tensors, key=lambda spec: spec.name))
        return hashlib.sha256(named.take(lexsort_rows(named.numbers())).encode()).hexdigest()

    def numbers(self) -> Column:
        """(shards, columns): all columns but the tensors, in a fixed order."""
        ends = (self.boxes.start, self.boxes.stop, self.stride)
        return np.column_stack((self.boxes.space, self.rank, self.storage, self.dtype, self.offset, self.shift, *ends))


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensors: bytes
    axes: int
    numbers: bytes


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final[msgspec.msgpack.Decoder[_Wire]] = msgspec.msgpack.Decoder(_Wire)


@dataclass(frozen=True, eq=False)
class _Tensors:
    """Values that follow from the served tensors alone; planners ask for them again and again."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(_ENCODER.encode(self.tensors)).digest()

    @cached_property
    def dtypes(self) -> Column:
        """(tensors,)."""
        return _fixed(np.array([_NUMBERS[spec.dtype] for spec in self.tensors], np.int64))

    @cached_property
    def shapes(self) -> Column:
        """(tensors, axes of the one with most): 1 where a tensor has no such axis."""
        shapes = [spec.shape for spec in self.tensors]
        axes = np.fromiter(map(len, shapes), np.int64, len(shapes))
        row = np.repeat(np.arange(len(shapes)), axes)
        extents = np.ones((len(shapes), int(axes.max(initial=0))), np.int64)
        extents[row, np.arange(len(row)) - (np.cumsum(axes) - axes)[row]] = list(chain.from_iterable(shapes))
        return _fixed(extents)

    @cached_property
    def sizes(self) -> tuple[Column, Column]:
        """(tensors,), (tensors,): elements, and bytes of one."""
        return _fixed(self.shapes.prod(axis=1)), _fixed(_ITEM_BYTES[self.dtypes])


_known: tuple[_Tensors, ...] = ()
_MOST_KNOWN: Final = 4


def _about(tensors: tuple[TensorSpec, ...]) -> _Tensors:
    """The `_Tensors` of the last few tuples: a layout's shards, plans and verifications share one."""
    global _known  # noqa: PLW0603 - replaced as a whole: threads may ask at a time
    for each in _known:
        if each.tensors is tensors:
            return each
    made = _Tensors(tensors)
    _known = (*_known[1 - _MOST_KNOWN :], made)
    return made


def _fixed(column: Column) -> Column:
    column.flags.writeable = False
    return column


def whole_tensor_shard(spec: TensorSpec, dtype: str, storage: int) -> Shard:
    """A whole tensor, contiguous in local tensor `storage`."""
    return Shard(spec.name, Box.whole(spec.shape), dtype, ShardView(storage, 0, contiguous_strides(spec.shape)))


def tensor_positions(tensors: Sequence[TensorSpec], others: Sequence[TensorSpec]) -> Column:
    """(others,): the index in `tensors` of each of `others`.

    Raises `ManifestError` unless both are the same tensors.
    """
    place = {spec.name: index for index, spec in enumerate(tensors)}
    found = [place.get(spec.name, -1) for spec in others]
    if len(place) != len(found) or any(spec != tensors[at] for spec, at in zip(others, found, strict=True)):
        raise ManifestError("these are not the tensors that the shards describe")
    return np.array(found, np.int64)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides)) if shape else ()


def packed_strides(extents: Column) -> Column:
    """(rows, axes): strides, in elements, of packed boxes of `extents`, (rows, axes)."""
    strides = np.ones_like(extents)
    strides[:, :-1] = np.cumprod(extents[:, :0:-1], axis=1)[:, ::-1]
    return strides


def served_dtypes(shards: Shards) -> Column:
    """(shards,): the dtype in which each shard's tensor is served."""
    return _about(shards.tensors).dtypes[shards.boxes.space]


def served_sizes(tensors: tuple[TensorSpec, ...]) -> tuple[Column, Column]:
    """(tensors,), (tensors,): elements of each tensor, and bytes of one element as served."""
    return _about(tensors).sizes


def served_strides(shards: Shards) -> Column:
    """(shards, axes): strides, in elements, of each shard's whole tensor, packed."""
    extents = pad_axes(_about(shards.tensors).shapes, shards.boxes.start.shape[1], 1)
    return packed_strides(extents)[shards.boxes.space]


def lexsort_rows(table: Column) -> Column:
    """The permutation that sorts the rows of a table, earlier columns first; stable."""
    keys = _keys(table)
    if len(keys) == 1:
        return np.argsort(keys[0], kind="stable")
    return np.lexsort(keys[::-1]) if keys else np.arange(len(table))


def _keys(table: Column) -> list[Column]:
    """Fewer columns that sort rows in the same order: adjacent columns share an int64 where they fit."""
    if not len(table):
        return []
    columns = np.ascontiguousarray(table.T)
    least = columns.min(axis=1)
    spans: list[int] = [int(most) - int(low) + 1 for most, low in zip(columns.max(axis=1), least, strict=True)]
    found: list[Column] = []
    room = 0
    for column, low, span in zip(columns, least, spans, strict=True):
        if span == 1:
            continue
        if room >= span:
            found[-1] = found[-1] * span + (column - low)
            room //= span
        elif span <= _MOST_KEY:
            found.append(column - low)
            room = _MOST_KEY // span
        else:
            found.append(column)
            room = 0
    return found


def _decode(blob: bytes, tensors: tuple[TensorSpec, ...]) -> Shards:
    try:
        wire = _DECODER.decode(blob)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"not a table of shards: {error}") from error
    axes, width = wire.axes, 6 + 3 * wire.axes
    if not 1 <= axes <= _MAX_AXES or len(wire.numbers) % (8 * width):
        raise ManifestError(f"not a table of shards: {len(wire.numbers)} bytes for {axes} axes")
    if wire.tensors != _about(tensors).digest:
        raise ManifestError("the shards are of other tensors than these: give every rank the same model and config")
    table = np.frombuffer(wire.numbers, "<i8").astype(np.int64, copy=False).reshape(-1, width)  # `join` copies it
    start, stop, stride = (table[:, 6 + axes * part : 6 + axes * (part + 1)] for part in range(3))
    rank, storage, dtype, offset, shift = (table[:, column] for column in range(1, 6))
    return Shards(tensors, Boxes(table[:, 0], start, stop), rank, storage, dtype, offset, stride, shift)


def _row(shard: Shard, number: Mapping[str, int], tensors: Sequence[TensorSpec], axes: int) -> tuple[int, ...]:
    index = number.get(shard.tensor)
    if index is None:
        raise ManifestError(f"a shard of {shard.tensor!r}, which is not served")
    if not shard.box.fits(tensors[index].shape) or len(shard.view.strides) != len(shard.box.start):
        raise ManifestError(f"a shard {shard.box} of {shard.tensor!r} {tensors[index].shape} is empty or outside of it")
    pad = axes - len(shard.box.start)
    return (
        index,
        shard.view.storage,
        DTYPES.index(shard.dtype),
        shard.view.offset,
        shard.shift,
        *shard.box.start,
        *(0,) * pad,
        *shard.box.stop,
        *(1,) * pad,
        *shard.view.strides,
        *(0,) * pad,
    )
