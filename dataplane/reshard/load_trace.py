"""The load trace: what an engine's own loader does with its tensors, as data; recorded once, executed as copies.

One `LoadTrace` describes one worker of one server: which part of which served tensor ends up where in its parameters.
The copies are `Shards`, the same description that trainers give of theirs, so a planner only has to intersect the two.
Everything else that the loader does is in one of the lists, by name and with the reason; a tensor, or an element of a
parameter, that is in none of them and in no copy does not exist (engine_agent/worker/load_tracer.py checks it).

Engine memory is named by *targets*: parameters, buffers and tensors that modules hold as attributes. A target's dtype
and strides are those of the live tensor, and offsets count elements from its first one.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import msgspec
import numpy as np

from ..errors import ManifestError
from ..tensors import DTYPES, Box, Column, Shards, TensorSpec, tensor_positions

_SHOWN: Final = 4
"""Names of a list in a summary."""


class LoadTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the engine's model, as it lies in memory."""

    name: str
    """As `named_parameters` gives it; an attribute of a module is named in the same way."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    parameter: bool
    """True for parameters, whose elements must all be accounted for. Buffers and attributes are only followed."""
    aliases: tuple[str, ...] = ()
    """Other names of the same memory: tied weights."""


class NotCopiedCause(enum.StrEnum):
    """Why a tensor does not travel as copies."""

    COMPUTED = "computed"
    """The stored value was calculated from it: scaled, requantized, added to."""
    READ = "read"
    """The loader looks at its values, so what it does next depends on them."""
    SCATTERED = "scattered"
    """Its elements land in more places than boxes can describe."""
    REBOUND = "rebound"
    """The loader replaces a tensor of the model by a new one in place of writing to it."""
    UNKNOWN_TARGET = "unknown_target"
    """It is written to memory that is no parameter, buffer or attribute of the model."""
    PARTNER = "partner"
    """It is loaded together with a tensor of another cause."""


class StagedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor that goes whole through the engine's own loader, in every round."""

    tensor: int
    cause: NotCopiedCause
    detail: str = ""
    """The operation that was seen, for people."""
    held: str = ""
    """Dtype to which the loader casts it, where that loses bits; empty where it is staged for another reason."""


class TargetBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of one target."""

    target: int
    box: Box


class ConstantFill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a target that the loader fills with one value: padding."""

    target: int
    box: Box
    value: float


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """The load trace of one worker. `copies.storage` numbers `targets`, `copies.rank` is the worker's rank."""

    rank: int
    targets: tuple[LoadTarget, ...]
    copies: Shards
    """Disjoint in the targets. A shard's dtype is that of the target: another one than the tensor's is a cast."""
    loaded: tuple[StagedTensor, ...] = ()
    """Tensors that are no copies: staged whole, given to the engine's loader, its post-load step run once."""
    unread: tuple[int, ...] = ()
    """Tensors that this worker does not ask for: other ranks' experts, other stages' layers, unknown names."""
    dropped: tuple[int, ...] = ()
    """Tensors that were read, and left no value behind."""
    constants: tuple[ConstantFill, ...] = ()
    unwritten: tuple[TargetBox, ...] = ()
    """Parts of parameters that the loader does not write."""
    rewritten: tuple[TargetBox, ...] = ()
    """Parts that were written more than once. The copies hold the last write."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The served tensors that were offered to the loader; all indexes of tensors refer to them."""
        return self.copies.tensors

    @property
    def staged(self) -> tuple[int, ...]:
        """The tensors that go whole through the engine's loader."""
        return tuple(each.tensor for each in self.loaded)

    @property
    def account(self) -> str:
        """Summary for people: tensors that are no copies and why, tensors not asked for, parts not written."""
        copied = len(np.unique(self.copies.boxes.space))
        through = [f"{self.tensors[each.tensor].name} ({each.cause}: {each.detail})" for each in self.loaded]
        apart = [f"{self.targets[each.target].name}{_ranges(each.box)}" for each in self.unwritten]
        lists = {
            "through the engine's own loader": through,
            "not asked for": [self.tensors[index].name for index in self.unread],
            "read, and nothing of it kept": [self.tensors[index].name for index in self.dropped],
            "parts that are left as they are": apart,
        }
        told = [
            f"{len(self.tensors)} tensors, {copied} of them copies",
            *(f"{what}: {_some(names)}" for what, names in lists.items() if names),
        ]
        return "; ".join(told)

    @property
    def held_dtypes(self) -> dict[str, frozenset[str]]:
        """By tensor, the dtypes of the parameters that its copies are written to."""
        pairs = np.unique(np.stack([self.copies.boxes.space, self.copies.dtype], axis=1), axis=0)
        found: dict[str, frozenset[str]] = {}
        rows: list[tuple[int, int]] = pairs.tolist()
        for index, dtype in rows:
            name = self.tensors[index].name
            found[name] = found.get(name, frozenset()) | {DTYPES[dtype]}
        return found

    @property
    def unused(self) -> frozenset[str]:
        """Tensors that no memory of this worker is loaded from: not asked for, or nothing of them kept."""
        return frozenset(self.tensors[index].name for index in (*self.unread, *self.dropped))

    def reordered(self, tensors: Sequence[TensorSpec]) -> LoadTrace | None:
        """The trace of a loader that is offered `tensors`; None when they differ, or their order may matter.

        It matters where a place is written twice: the last tensor offered stays.
        """
        if tuple(tensors) == self.tensors:
            return self
        if self.rewritten:
            return None
        try:
            return self.renumbered(tensors, tensor_positions(tensors, self.tensors))
        except ManifestError:
            return None

    def renumbered(self, tensors: Sequence[TensorSpec], places: Column) -> LoadTrace:
        """The trace with the tensors in the order of `tensors`; `places`, (tensors,), is the new index of each."""
        moved: list[int] = places.tolist()
        loaded = [msgspec.structs.replace(each, tensor=moved[each.tensor]) for each in self.loaded]
        return replace(
            self,
            copies=self.copies.renumbered(tensors, places),
            loaded=tuple(sorted(loaded, key=lambda each: each.tensor)),
            unread=tuple(sorted(moved[index] for index in self.unread)),
            dropped=tuple(sorted(moved[index] for index in self.dropped)),
        )

    def same(self, other: LoadTrace) -> bool:
        """True when both traces are equal. So are their digests then, which cost more."""
        mine, others = [
            (each.rank, each.targets, each.loaded, each.unread, each.dropped, each.constants, each.unwritten,
             each.rewritten)
            for each in (self, other)
        ]  # fmt: skip
        numbers = self.copies.numbers(), other.copies.numbers()
        return mine == others and self.tensors == other.tensors and np.array_equal(*numbers)

    def encode(self) -> bytes:
        """Canonical bytes, which the worker sends to its sidecar, and the sidecar to the trainer."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        return _ENCODER.encode(
            _Wire(
                self.rank, self.targets, self.copies.encode(), self.loaded, self.unread, self.dropped, self.constants,
                self.unwritten, self.rewritten,
            )
        )  # fmt: skip

    @classmethod
    def decode(cls, blob: bytes, tensors: Sequence[TensorSpec]) -> LoadTrace:
        """The trace that `encode` wrote of these tensors, checked. Raises `ManifestError` on anything else."""
        try:
            wire = _DECODER.decode(blob)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"not a trace: {error}") from error
        trace = cls(
            wire.rank, wire.targets, Shards.decode([wire.copies], tensors), wire.loaded, wire.unread, wire.dropped,
            wire.constants, wire.unwritten, wire.rewritten,
        )  # fmt: skip
        trace.check()
        return trace

    def check(self) -> None:
        """Raise `ManifestError` when a list names a tensor or target that does not exist."""
        tensors, targets = len(self.tensors), len(self.targets)
        named = [*(each.tensor for each in self.loaded), *self.unread, *self.dropped]
        places = [each.target for each in self.constants]
        places += [patch.target for patch in (*self.unwritten, *self.rewritten)]
        if any(not 0 <= index < tensors for index in named):
            raise ManifestError(f"a trace of {tensors} tensors names another one")
        if any(not 0 <= index < targets for index in [*places, *self.copies.storage.tolist()]):
            raise ManifestError(f"a trace of {targets} targets names another one")

    def digest(self) -> str:
        """SHA-256, hexadecimal: the name of the trace on both sides of a plan."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self._encoded).hexdigest()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _ranges(box: Box) -> str:
    return f"[{', '.join(f'{start}..{stop}' for start, stop in zip(box.start, box.stop, strict=True))}]"


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: int
    targets: tuple[LoadTarget, ...]
    copies: bytes
    loaded: tuple[StagedTensor, ...]
    unread: tuple[int, ...]
    dropped: tuple[int, ...]
    constants: tuple[ConstantFill, ...]
    unwritten: tuple[TargetBox, ...]
    rewritten: tuple[TargetBox, ...]


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final[msgspec.msgpack.Decoder[_Wire]] = msgspec.msgpack.Decoder(_Wire)
