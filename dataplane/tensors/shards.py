"""Shards: which box of which Hugging Face tensor lies where in the memory of which rank. Pure data, no torch.

One description for every path: assembling whole tensors, writing files, and copying from shard to shard. A shard is a
box of a tensor and a strided view of one local tensor of its rank, element by element the same. Fused, cut, padded,
replicated and transposed parameters are all sets of shards; nothing else about a training framework is known here. It
is not torch's `Shard`, a DTensor placement.

`Shard` is one, for building and for reading. `Shards` are many, as columns: ranks exchange them and planners work on
them (coverage.py: the choice among replicas, and the check that they are a model).

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Final

import msgspec
import numpy as np

from ..errors import ManifestError
from .boxes import Box, Boxes, Column, is_identity, pad_axes
from .manifest import ITEM_BYTES, TensorSpec

DTYPES: Final = tuple(ITEM_BYTES)
"""Dtypes by their number in columns."""
_ITEM_BYTES: Final[Column] = np.array([*ITEM_BYTES.values()], np.int64)
_NUMBERS: Final = {name: number for number, name in enumerate(DTYPES)}

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
            rank=np.concatenate([part.rank for part in parts]),
            storage=np.concatenate([part.storage for part in parts]),
            dtype=np.concatenate([part.dtype for part in parts]),
            offset=np.concatenate([part.offset for part in parts]),
            stride=np.concatenate([pad_axes(part.stride, axes, 0) for part in parts]),
            shift=np.concatenate([part.shift for part in parts]),
        )

    def take(self, rows: Column) -> Shards:
        """The shards of these rows, in their order."""
        if is_identity(rows, len(self)):
            return self
        return replace(
            self,
            boxes=self.boxes.take(rows),
            rank=self.rank[rows],
            storage=self.storage[rows],
            dtype=self.dtype[rows],
            offset=self.offset[rows],
            stride=self.stride[rows],
            shift=self.shift[rows],
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
