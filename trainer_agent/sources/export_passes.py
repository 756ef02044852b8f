"""What an exporter yielded first, and whether it goes on yielding that: pass after pass, tensor by tensor.

Bytes are placed by what the first pass said. An exporter that changes its mind would have tensors cast, left out or
served twice, and engines would verify the result as what was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set as AbstractSet
from typing import Final, NamedTuple

import torch

from weightbus.dataplane.tensors import ITEM_BYTES, TensorSpec

from ..assembly import objection
from ..source import (
    AssemblyFailed,
    LayoutMismatch,
    SourceError,
    UnknownParameter,
    UnsupportedModel,
    check_manifestable,
    check_served,
)

Exported = Iterable[tuple[str, torch.Tensor]]

_EIGHT_BITS: Final = "float8_"
_ALIKE: Final = "it must yield the same tensors every time, or the source be built again"


class Listing(NamedTuple):
    """What the first pass said."""

    tensors: tuple[TensorSpec, ...]
    exported: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype as they came, before any cast."""
    device: torch.device
    """Of the first tensor."""


def listed(exported: Exported, dtype: torch.dtype | None) -> Listing:
    """Read one pass. Raises a `SourceError` for whatever cannot be served."""
    if dtype is not None:
        check_served(_name(dtype), "dtype=")
    tensors: list[TensorSpec] = []
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    device = torch.device("cpu")
    for name, tensor in exported:
        if name in forms:
            raise LayoutMismatch(f"{name!r} was exported twice in one pass: a tensor has one name, and goes once")
        served = _served(name, tensor, dtype)
        device = device if tensors else tensor.device
        tensors.append(TensorSpec(name, served, tuple(tensor.shape)))
        forms[name] = tuple(tensor.shape), tensor.dtype
    if not tensors:
        raise UnsupportedModel("the exporter yields no tensors: give it the model of this rank")
    check_manifestable(tensors)
    return Listing(tuple(tensors), forms, device)


class ExportPass:
    """One pass over the weights, held against the first."""

    def __init__(self, exported: Exported, listing: Listing) -> None:
        self._exported = iter(exported)
        self._listing = listing
        self._seen: set[str] = set()

    def following(self, missing: AbstractSet[str]) -> tuple[str, torch.Tensor]:
        """The next tensor. Raises `LayoutMismatch` when there is none, for `missing` are still to come."""
        found = self._next()
        if found is None:
            raise LayoutMismatch(
                f"the exporter ended without {sorted(missing)[:5]}, which it exported before: {_ALIKE}"
            )
        return found

    def finish(self) -> None:
        """Its last collectives, and the proof that nothing comes after what was listed."""
        while self._next() is not None:
            pass

    def _next(self) -> tuple[str, torch.Tensor] | None:
        found = next(self._exported, None)
        if found is not None:
            self._check(*found)
        return found

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._listing.exported:
            raise LayoutMismatch(f"{name!r} was not exported before, and is now: {_ALIKE}")
        if name in self._seen:
            raise LayoutMismatch(f"{name!r} was exported twice in one pass: {_ALIKE}")
        self._seen.add(name)
        shape, dtype = self._listing.exported[name]
        if tuple(tensor.shape) != shape:
            raise LayoutMismatch(
                f"{name!r} was exported with shape {shape}, and now with {tuple(tensor.shape)}: {_ALIKE}"
            )
        if tensor.dtype != dtype:
            raise LayoutMismatch(f"{name!r} was exported as {dtype}, and now as {tensor.dtype}: {_ALIKE}")
        if advice := objection(tensor, rounded=False):
            raise UnknownParameter(name, shape, str(dtype), advice)


def guarded(export: Callable[[], Exported]) -> Iterator[tuple[str, torch.Tensor]]:
    """One pass of `export`; what goes wrong in it is an `AssemblyFailed`, for its collectives broke off with it."""
    try:
        yield from export()
    except SourceError:
        raise
    except Exception as error:
        raise AssemblyFailed(
            f"the exporter failed ({type(error).__name__}: {error}): find the rank that failed first"
        ) from error


def _served(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    exported = _name(tensor.dtype)
    if advice := objection(tensor, rounded=False):
        raise UnknownParameter(name, tensor.shape, exported, advice)
    if exported.startswith(_EIGHT_BITS):
        advice = "its scale is not part of it: export in 16 bits or more, and let servers quantize"
        raise UnknownParameter(name, tensor.shape, exported, advice)
    if exported not in ITEM_BYTES:
        raise UnsupportedModel(f"{name!r} is exported as {exported}; these can travel: {', '.join(ITEM_BYTES)}")
    return _name(wanted)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
