"""Origin of the contents of each memory while a loader runs: a source, a constant, or a calculation.

Torch is used for dtypes and storages only; dispatch_mode.py turns operations into calls here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from weightbus.dataplane.reshard import NotCopiedCause

from .view_composition import Move, Scattered, SourceWindow, compose

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
        """What `tensor`, a view of this memory, holds, as writes to a memory where its elements are at `here`."""
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
