"""Origin of the contents of each memory while a loader runs: a source, a constant, or a calculation.

Torch is used for dtypes and storages only; dispatch_mode.py turns operations into calls here.

Memory is flat and counted in elements. A `SourceWindow` is a strided view of it, and a `Move` two windows of one shape:
element by element the same values, `here` in the memory that was written and `there` where they came from.

Views are followed through any number of memories by writing positions as digits: if every stride that occurs divides
the next larger one, a position is a number in a mixed radix, a window that no addition carries over is a box of digits,
and boxes intersect digit by digit. Windows that carry are cut until they do not. Strides that do not divide one another
raise `Scattered`; nothing is ever approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from typing import Final

import torch

from weightbus.dataplane.reshard import NotCopiedCause
from weightbus.dataplane.tensors import Box

_WIDER: Final[dict[torch.dtype, frozenset[torch.dtype]]] = {
    torch.float8_e4m3fn: frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    torch.float8_e5m2: frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.float32: frozenset({torch.float64}),
}
"""Casts that lose nothing: what follows them is a cast of the original."""


class ReadsValues(Exception):
    """The loader asks for the values of tensors that have none."""

    def __init__(self, sources: Iterable[int], operation: str) -> None:
        self.sources = frozenset(sources)
        self.operation = operation
        super().__init__(f"{operation} reads values of tensors {sorted(self.sources)[:4]}")


class Number(float):
    """Result of `item` on sources. Storing it in a tensor is a copy; deciding or calculating by it reads them."""

    sources: frozenset[int] = frozenset()
    read: set[int]
    """Sources whose numbers decided something; those of this number are added then."""

    @classmethod
    def of(cls, value: float, sources: frozenset[int], read: set[int]) -> Number:
        """`value`, which stands for the only element of these."""
        number = cls(value)
        number.sources, number.read = sources, read
        return number

    __hash__ = float.__hash__


def _noted(name: str) -> Callable[..., object]:
    does: Callable[..., object] = getattr(float, name)

    def noting(number: Number, *others: object) -> object:
        number.read.update(number.sources)
        return does(number, *others)

    return noting


for _name in (
    "abs", "add", "bool", "ceil", "divmod", "eq", "float", "floor", "floordiv", "ge", "gt", "int", "le", "lt", "mod",
    "mul", "ne", "neg", "pos", "pow", "radd", "rdivmod", "rfloordiv", "rmod", "rmul", "round", "rpow", "rsub",
    "rtruediv", "sub", "truediv", "trunc",
):  # fmt: skip
    setattr(Number, f"__{_name}__", _noted(f"__{_name}__"))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where elements come from: copied from one source, one value, or calculated (`cause` says how)."""

    sources: frozenset[int]
    path: tuple[torch.dtype, ...] = ()
    """The dtypes that the elements had, the source's first. One is a plain copy, two are a cast."""
    value: float | None = None
    cause: NotCopiedCause | None = None
    detail: str = ""

    @property
    def copied(self) -> bool:
        """Straight from one source."""
        return self.value is None and self.cause is None

    def read_as(self, dtype: torch.dtype, stored: torch.dtype) -> Origin:
        """Seen through a view of `dtype` of memory that holds `stored`."""
        if dtype == stored or not self.copied:
            return self
        if len(self.path) == 1 and dtype.itemsize == stored.itemsize:
            return replace(self, path=(dtype,))
        return calculated(self.sources, NotCopiedCause.COMPUTED, f"bits of {stored} read as {dtype}")

    def cast(self, dtype: torch.dtype) -> Origin:
        """Converted to `dtype`, as `copy_` does it."""
        if not self.copied or dtype == self.path[-1]:
            return self
        kept = list(self.path)
        if len(kept) > 1 and kept[-1] in _WIDER.get(kept[-2], frozenset()):
            del kept[-1]
        path = tuple(kept) if kept[-1] == dtype else (*kept, dtype)
        if len(path) > 2:
            return calculated(
                self.sources, NotCopiedCause.COMPUTED, "cast by way of " + ", ".join(map(str, path[1:-1]))
            )
        return replace(self, path=path)


def calculated(sources: Iterable[int], cause: NotCopiedCause, detail: str) -> Origin:
    """Not a copy."""
    return Origin(frozenset(sources), cause=cause, detail=detail)


def constant(value: float) -> Origin:
    """One value."""
    return Origin(frozenset(), value=value)


@dataclass(frozen=True, slots=True)
class Write:
    """Elements that were written, and where they come from. Without a source, `move.there` means nothing."""

    move: Move
    origin: Origin


@dataclass(slots=True, eq=False)
class WrittenMemory:
    """One storage. `writes` are in order, later ones over earlier ones."""

    storage: torch.UntypedStorage
    """Kept, so that its identity is not used again while the loader runs."""
    dtype: torch.dtype
    source: int | None = None
    engine: bool = False
    writes: list[Write] = field(default_factory=list[Write])

    def sources(self) -> frozenset[int]:
        """Every tensor that anything here was made from."""
        own = frozenset[int]() if self.source is None else frozenset({self.source})
        return own.union(*(write.origin.sources for write in self.writes))

    def read(self, tensor: torch.Tensor, here: SourceWindow) -> list[Write]:
        """The contents of `tensor`, a view of this memory, as writes to a memory where its elements are at `here`."""
        move = Move(tuple(tensor.shape), here, window_of(tensor))
        if self.source is not None and not self.writes:
            return [Write(move, self._before(tensor.dtype))]
        if tensor.dtype.itemsize != self.dtype.itemsize:
            detail = f"memory of {self.dtype} read as {tensor.dtype}"
            return [Write(move, calculated(self.sources(), NotCopiedCause.COMPUTED, detail))]
        try:
            found, missing = compose(move, [write.move for write in self.writes])
        except Scattered as scattered:
            return [Write(move, calculated(self.sources(), NotCopiedCause.SCATTERED, str(scattered)))]
        written = [Write(part, self.writes[at].origin.read_as(tensor.dtype, self.dtype)) for part, at in found]
        return [*written, *(Write(part, self._before(tensor.dtype)) for part in missing)]

    def _before(self, dtype: torch.dtype) -> Origin:
        """Content where nothing was written, seen as `dtype`: loaders change sources in place, too."""
        if self.source is not None:
            return Origin(frozenset({self.source}), (self.dtype,)).read_as(dtype, self.dtype)
        what = "what the model held before" if self.engine else "memory that nothing was written to"
        return calculated((), NotCopiedCause.COMPUTED, what)


def window_of(tensor: torch.Tensor) -> SourceWindow:
    """Where a tensor's elements are in its storage."""
    return SourceWindow(int(tensor.storage_offset()), tuple(tensor.stride()))


def identity_of(tensor: torch.Tensor) -> int:
    """Names a storage for as long as it lives: views of one storage have one identity."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


# -- moves ------------------------------------------------------------------------------------------------------------

MOST_BOXES: Final = 8192
"""Boxes that one copy may fall into. Beyond, moving the tensor whole is cheaper than describing its parts."""


class Scattered(Exception):
    """Elements are in places that a reasonable number of boxes cannot describe."""


@dataclass(frozen=True, slots=True)
class SourceWindow:
    """A strided view: element ``index`` is at ``offset + sum(index * strides)``."""

    offset: int
    strides: tuple[int, ...]

    def narrowed(self, axis: int, start: int) -> SourceWindow:
        """The window that begins at index `start` of `axis`."""
        return SourceWindow(self.offset + start * self.strides[axis], self.strides)


@dataclass(frozen=True, slots=True)
class Move:
    """The same elements in two memories."""

    shape: tuple[int, ...]
    here: SourceWindow
    there: SourceWindow

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def reach(self) -> tuple[int, int]:
        """First and last position here, inclusive."""
        return self.here.offset, self.here.offset + sum(
            (extent - 1) * stride for extent, stride in zip(self.shape, self.here.strides, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of digits, and where its elements are in another memory: `offset` is that of the digits all zero."""

    digits: Box
    offset: int
    strides: tuple[int, ...]
    repeats: tuple[tuple[int, int], ...] = ()
    """(extent, stride) in the other memory of axes along which the digits stay: a value that is spread out."""


def reverse(move: Move) -> Move:
    """With the two memories exchanged."""
    return Move(move.shape, move.there, move.here)


def radix(*strides: Iterable[int]) -> tuple[int, ...]:
    """All strides that occur, largest first. Raises `Scattered` unless each divides the one before."""
    chain = sorted({stride for group in strides for stride in group if stride} | {1}, reverse=True)
    for larger, smaller in pairwise(chain):
        if larger % smaller:
            raise Scattered(f"strides {larger} and {smaller} do not divide one another")
    return tuple(chain)


def cells(move: Move, chain: tuple[int, ...]) -> list[Cell]:
    """The positions `here` as boxes of digits in `chain`, with where each element is `there`."""
    found: list[Cell] = []
    pending = [_squeezed(move)]
    while pending:
        if len(found) + len(pending) > MOST_BOXES:
            raise Scattered(f"a view of shape {move.shape} falls into more than {MOST_BOXES} boxes")
        one = pending.pop()
        parts = _uncarried(one, chain)
        if parts is None:
            found.append(_cell(one, chain))
        else:
            pending.extend(parts)
    return found


def compose(move: Move, others: Sequence[Move]) -> tuple[list[tuple[Move, int]], list[Move]]:
    """Follow `move` one memory further back.

    `others` say how the memory `there` of `move` was written, in order, later ones over earlier ones. Returns the moves
    from where those came from, each with the number of the write, and what of `move` no write accounts for.
    """
    low, high = reverse(move).reach
    near = [(at, each) for at, each in enumerate(others) if each.reach[0] <= high and each.reach[1] >= low]
    chain = radix(_long_strides(move.shape, move.there), *(_long_strides(each.shape, each.here) for _, each in near))
    found: list[tuple[Move, int]] = []
    wanted = cells(reverse(move), chain)
    for at, each in reversed(near):
        writes = cells(each, chain)
        remaining: list[Cell] = []
        for want in wanted:
            common = [both for write in writes if (both := _meet(want, write)) is not None]
            found.extend((both, at) for both in common)
            remaining.extend(_without(want, writes))
        wanted = remaining
        if not wanted:
            break
    return found, [_as_move(cell, chain) for cell in wanted]


def boxes_of(move: Move, shape: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[Box, SourceWindow]]:
    """The elements `here` as boxes of a tensor of `shape` and `strides`, each with its window `there` by axis.

    Raises `Scattered` when they are not boxes of that tensor.
    """
    simple = _plain_box(move, shape, strides)
    if simple is not None:
        yield simple
        return
    move = _flattened(move)
    axes = sorted((axis for axis in range(len(shape)) if shape[axis] > 1), key=lambda axis: -strides[axis])
    chain = radix(_long_strides(move.shape, move.here), (strides[axis] for axis in axes))
    count = 0
    for cell in cells(move, chain):
        for box, window in _tensor_boxes(cell, chain, shape, strides, axes):
            count += 1
            if count > MOST_BOXES:
                raise Scattered(f"a view of shape {move.shape} falls into more than {MOST_BOXES} boxes")
            yield box, window


# -- digits ---------------------------------------------------------------------------------------------------------


def _long_strides(shape: Sequence[int], window: SourceWindow) -> Iterator[int]:
    return (stride for extent, stride in zip(shape, window.strides, strict=True) if extent > 1)


def _squeezed(move: Move) -> Move:
    """Without the axes of one element."""
    kept = [axis for axis, extent in enumerate(move.shape) if extent != 1]
    if len(kept) == len(move.shape):
        return move
    return Move(
        tuple(move.shape[axis] for axis in kept),
        SourceWindow(move.here.offset, tuple(move.here.strides[axis] for axis in kept)),
        SourceWindow(move.there.offset, tuple(move.there.strides[axis] for axis in kept)),
    )


def _flattened(move: Move) -> Move:
    """Axes that continue each other on both sides as one: what was written by another shape than the tensor's."""
    shape: list[int] = []
    here: list[int] = []
    there: list[int] = []
    for extent, near, far in zip(move.shape, move.here.strides, move.there.strides, strict=True):
        if shape and here[-1] == near * extent and there[-1] == far * extent:
            shape[-1], here[-1], there[-1] = shape[-1] * extent, near, far
        else:
            shape.append(extent)
            here.append(near)
            there.append(far)
    return Move(
        tuple(shape), SourceWindow(move.here.offset, tuple(here)), SourceWindow(move.there.offset, tuple(there))
    )


def _uncarried(move: Move, chain: tuple[int, ...]) -> list[Move] | None:
    """Parts of `move` in place of an axis whose steps carry into the next digit; None when no axis does."""
    for axis, (extent, stride) in enumerate(zip(move.shape, move.here.strides, strict=True)):
        if stride == 0:
            continue
        place = chain.index(stride)
        if place == 0:
            continue
        limit = chain[place - 1] // stride
        first = move.here.offset // stride % limit
        if first + extent <= limit:
            continue
        if first:
            return _cut(move, axis, limit - first)
        if extent % limit:
            return _cut(move, axis, extent // limit * limit)
        return [_split(move, axis, limit)]
    return None


def _cut(move: Move, axis: int, at: int) -> list[Move]:
    """The indexes below `at`, and the others."""
    head, tail = list(move.shape), list(move.shape)
    head[axis], tail[axis] = at, move.shape[axis] - at
    rest = Move(tuple(tail), move.here.narrowed(axis, at), move.there.narrowed(axis, at))
    return [_squeezed(replace(move, shape=tuple(head))), _squeezed(rest)]


def _split(move: Move, axis: int, inner: int) -> Move:
    """The axis as two: the inner one of `inner` elements."""

    def both(window: SourceWindow) -> SourceWindow:
        stride = window.strides[axis]
        return SourceWindow(
            window.offset, (*window.strides[:axis], stride * inner, stride, *window.strides[axis + 1 :])
        )

    shape = (*move.shape[:axis], move.shape[axis] // inner, inner, *move.shape[axis + 1 :])
    return _squeezed(Move(shape, both(move.here), both(move.there)))


def _cell(move: Move, chain: tuple[int, ...]) -> Cell:
    """A move no axis of which carries."""
    start = [
        move.here.offset // unit % (chain[at - 1] // unit) if at else move.here.offset // unit
        for at, unit in enumerate(chain)
    ]
    stop = [digit + 1 for digit in start]
    strides = [0] * len(chain)
    offset = move.there.offset
    repeats: list[tuple[int, int]] = []
    for extent, here, there in zip(move.shape, move.here.strides, move.there.strides, strict=True):
        if here == 0:
            repeats.append((extent, there))
            continue
        place = chain.index(here)
        if strides[place] or stop[place] != start[place] + 1:
            raise Scattered(f"a view of shape {move.shape} and strides {move.here.strides} overlaps itself")
        stop[place] += extent - 1
        strides[place] = there
        offset -= start[place] * there
    return Cell(Box(tuple(start), tuple(stop)), offset, tuple(strides), tuple(repeats))


def _position(cell: Cell, start: Sequence[int]) -> int:
    return cell.offset + sum(digit * stride for digit, stride in zip(start, cell.strides, strict=True))


def _meet(want: Cell, write: Cell) -> Move | None:
    """The elements of both: from the memory of `want` to that of `write`."""
    common = want.digits.intersect(write.digits)
    if common is None:
        return None
    if write.repeats:
        raise Scattered("a memory was written by a view that overlaps itself")
    extents = tuple(extent for extent, _ in want.repeats)
    return _squeezed(
        Move(
            (*extents, *common.shape),
            SourceWindow(_position(want, common.start), (*(stride for _, stride in want.repeats), *want.strides)),
            SourceWindow(_position(write, common.start), ((0,) * len(extents)) + write.strides),
        )
    )


def _without(want: Cell, writes: Sequence[Cell]) -> list[Cell]:
    rest = [want.digits]
    for write in writes:
        rest = [part for each in rest for part in each.subtract(write.digits)]
    return [replace(want, digits=part) for part in rest]


def _as_move(cell: Cell, chain: tuple[int, ...]) -> Move:
    """From the other memory to the one of the digits."""
    extents = tuple(extent for extent, _ in cell.repeats)
    start = cell.digits.start
    return _squeezed(
        Move(
            (*extents, *cell.digits.shape),
            SourceWindow(_position(cell, start), (*(stride for _, stride in cell.repeats), *cell.strides)),
            SourceWindow(
                sum(digit * unit for digit, unit in zip(start, chain, strict=True)), ((0,) * len(extents)) + chain
            ),
        )
    )


# -- boxes of tensors -------------------------------------------------------------------------------------------------


def _plain_box(move: Move, shape: Sequence[int], strides: Sequence[int]) -> tuple[Box, SourceWindow] | None:
    """The usual case, quickly: a slice of the tensor with the tensor's own strides, its axes in order."""
    long = [axis for axis in range(len(shape)) if shape[axis] > 1]
    if any(strides[outer] < strides[inner] * shape[inner] for outer, inner in pairwise(long)):
        return None
    start, stop, there = [0] * len(shape), [1] * len(shape), [0] * len(shape)
    left = move.here.offset
    for axis in long:
        start[axis], left = divmod(left, strides[axis])
        stop[axis] = start[axis] + 1
    at, seen = len(move.shape) - 1, 1
    for axis in reversed(long):
        while at >= 0 and move.shape[at] == 1:
            at -= 1
        if at >= 0 and move.here.strides[at] == strides[axis]:
            stop[axis] = start[axis] + move.shape[at]
            there[axis] = move.there.strides[at]
            seen *= move.shape[at]
            at -= 1
    if left or seen != move.size or any(stop[axis] > shape[axis] for axis in long):
        return None
    return Box(tuple(start), tuple(stop)), SourceWindow(move.there.offset, tuple(there))


@dataclass(frozen=True, slots=True)
class _Interval:
    """Indexes of one axis; `at` is what the first one adds to the position there."""

    start: int
    stop: int
    stride: int
    at: int


def _tensor_boxes(
    cell: Cell, chain: tuple[int, ...], shape: Sequence[int], strides: Sequence[int], axes: Sequence[int]
) -> Iterator[tuple[Box, SourceWindow]]:
    """A cell as boxes. An axis may be several digits; where those are no interval, one box for each value."""
    smallest = strides[axes[-1]] if axes else chain[0] + 1
    if any(unit < smallest and cell.digits.stop[at] > 1 for at, unit in enumerate(chain)):
        raise Scattered("elements lie between those of the tensor, or outside of it")
    outer: list[int | None] = [None, *(strides[axis] for axis in axes)]
    intervals = [_intervals(cell, chain, strides[axis], below) for axis, below in zip(axes, outer, strict=False)]
    for copy in product(*(range(extent) for extent, _ in cell.repeats)):
        base = cell.offset + sum(index * stride for index, (_, stride) in zip(copy, cell.repeats, strict=True))
        for chosen in product(*intervals):
            start, stop, there = [0] * len(shape), [1] * len(shape), [0] * len(shape)
            for axis, interval in zip(axes, chosen, strict=True):
                if interval.stop > shape[axis]:
                    raise Scattered("elements lie outside of the tensor")
                start[axis], stop[axis], there[axis] = interval.start, interval.stop, interval.stride
            offset = base + sum(interval.at for interval in chosen)
            yield Box(tuple(start), tuple(stop)), SourceWindow(offset, tuple(there))


def _intervals(cell: Cell, chain: tuple[int, ...], stride: int, below: int | None) -> list[_Interval]:
    """The indexes that a cell has on the axis of `stride`; its digits are those up to the next larger axis."""
    places = [at for at, unit in enumerate(chain) if unit >= stride and (below is None or unit < below)]
    found = [_Interval(0, 1, 0, 0)]
    for at in reversed(places):
        low, high, there = cell.digits.start[at], cell.digits.stop[at], cell.strides[at]
        unit = chain[at] // stride
        only = found[0]
        joins = (only.start, only.stop) == (0, unit) and (unit == 1 or there == only.stride * unit)
        if high - low > 1 and len(found) == 1 and joins:
            step = there if unit == 1 else only.stride
            found = [_Interval(low * unit, high * unit, step, only.at + low * there)]
            continue
        if len(found) * (high - low) > MOST_BOXES:
            raise Scattered(f"an axis falls into more than {MOST_BOXES} intervals")
        found = [
            _Interval(each.start + digit * unit, each.stop + digit * unit, each.stride, each.at + digit * there)
            for digit in range(low, high)
            for each in found
        ]
    return found
