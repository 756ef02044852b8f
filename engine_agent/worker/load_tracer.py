"""Runs a model's own loader once, with tensors that have no contents, and writes down what it would have copied where.

Nothing is written to the model. What a loader rebinds is put back, what it reads ends that tensor's part: the loader is
run again without it, and the tensor is named as one that goes through the loader in every round. The result is proven:
what is not covered by exactly one copy, constant or named tensor stands in a list of its own (load_trace.py).

Runs inside the engine's worker, in the thread that owns the model. Imports torch and nothing of the engine.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, TypeAlias

import numpy as np
import torch

from weightbus.dataplane.errors import NotTraceable
from weightbus.dataplane.reshard import ConstantFill, LoadTarget, LoadTrace, NotCopiedCause, StagedTensor, TargetBox
from weightbus.dataplane.tensors import (
    Box,
    Boxes,
    Shard,
    Shards,
    ShardView,
    TensorSpec,
    contiguous_strides,
    find_overlap,
    subtract_all,
)

from .dispatch_mode import Tracer, traced
from .memory_origins import (
    Move,
    Origin,
    ReadsValues,
    Scattered,
    SourceWindow,
    Write,
    WrittenMemory,
    boxes_of,
    identity_of,
    reverse,
    window_of,
)
from .model_tensors import ModelTensors

_ATTEMPTS: Final = 32
"""Runs of the loader. Each but the last one leaves out at least one tensor more than the one before."""

_ONE_BY_ONE: Final = 8
"""Then the same tensors of all layers are left out with the one that was found: loading them is right, too."""
_NUMBER: Final = re.compile(r"\d+")
_ONE: Final = 0.37
_ANOTHER: Final = -5.21
"""Placeholders for the numbers that loaders ask for. The two have nothing in common."""

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]


def trace_load(
    model: torch.nn.Module, load: Callable[[NamedTensors], object], tensors: Sequence[TensorSpec], rank: int
) -> LoadTrace:
    """Trace of `load`, the bound `load_weights` of `model`, with `tensors`. Raises `NotTraceable`."""
    left_out: dict[int, StagedTensor] = {}
    for attempt in range(_ATTEMPTS):
        tracer, held, found = _attempt(model, load, tensors, left_out)
        if not found:
            trace = LoadTraceBuilder(tensors, held, tracer, left_out).load_trace(rank)
            if not tracer.numbered:
                return trace
            # What Python or torch makes of a number is not seen. With another number it is another trace.
            again, held, found = _attempt(model, load, tensors, left_out, _ANOTHER)
            other = None if found else LoadTraceBuilder(tensors, held, again, left_out).load_trace(rank)
            if other is not None and other.digest() == trace.digest():
                return trace
            found |= _loaded(tracer.numbered, NotCopiedCause.READ, "item")
        if set(found) <= set(left_out):
            raise _lost(next(iter(found.values())).detail)
        left_out |= found if attempt < _ONE_BY_ONE else _kin(found, tensors) | found
    names = ", ".join(tensors[index].name for index in sorted(left_out)[:4])
    detail = next(iter(left_out.values())).detail
    raise _lost(f"more and more tensors must be left out ({names} .., {detail})")


def _lost(detail: str) -> NotTraceable:
    return NotTraceable(f"this model's loader cannot be recorded: {detail}; let this engine take the local transport")


def _attempt(
    model: torch.nn.Module,
    load: Callable[[NamedTensors], object],
    tensors: Sequence[TensorSpec],
    left_out: dict[int, StagedTensor],
    number: float = _ONE,
) -> tuple[Tracer, ModelTensors, dict[int, StagedTensor]]:
    """Run the loader once. Returns the tensors that must be left out, if there are any."""
    held = ModelTensors(model)
    tracer = Tracer(held.device, number)
    for tensor in held.tensors:
        tracer.adopt(tensor)
    sources = tracer.sources(tensors)
    try:
        with traced(tracer):
            load(_stream(tracer, tensors, sources, left_out))
    except ReadsValues as reads:
        named = reads.sources or _current(tracer)
        if not named:
            raise _lost(f"it reads values that come from no tensor of the version ({reads.operation})") from reads
        return tracer, held, _loaded(named, NotCopiedCause.READ, reads.operation)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        if tracer.current is None:
            raise _lost(detail) from error
        return tracer, held, _loaded(_current(tracer), NotCopiedCause.READ, detail)
    finally:
        rebound = held.restore(tracer)
    found = _loaded(tracer.read_and_forgotten(), NotCopiedCause.READ, "item")
    for origins, name in rebound:
        found |= _loaded(origins, NotCopiedCause.REBOUND, name)
    return tracer, held, {index: each for index, each in found.items() if index not in left_out}


def _stream(
    tracer: Tracer,
    tensors: Sequence[TensorSpec],
    sources: Sequence[torch.Tensor],
    left_out: dict[int, StagedTensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    for number, spec in enumerate(tensors):
        if number in left_out:
            continue
        tracer.current = number
        yield spec.name, sources[number]
    tracer.current = None


def _kin(found: Mapping[int, StagedTensor], tensors: Sequence[TensorSpec]) -> dict[int, StagedTensor]:
    """The tensors whose names differ from those in numbers only."""
    known = {_NUMBER.sub("#", tensors[index].name): each for index, each in found.items()}
    forms = {number: known.get(_NUMBER.sub("#", spec.name)) for number, spec in enumerate(tensors)}
    return {
        number: StagedTensor(number, each.cause, f"as {tensors[each.tensor].name}: {each.detail}")
        for number, each in forms.items()
        if each is not None
    }


def _current(tracer: Tracer) -> frozenset[int]:
    return frozenset() if tracer.current is None else frozenset({tracer.current})


def _loaded(sources: Iterable[int], cause: NotCopiedCause, detail: str) -> dict[int, StagedTensor]:
    return {index: StagedTensor(index, cause, detail) for index in sources}


@dataclass(frozen=True, slots=True)
class _Landed:
    """A box of a target, and its content. `there` is by axis of the target, in the source's packed elements."""

    target: int
    box: Box
    origin: Origin
    there: SourceWindow

    def cut(self, box: Box) -> _Landed:
        """The part of it that `box`, which lies inside, is."""
        moved = sum((b - a) * s for a, b, s in zip(self.box.start, box.start, self.there.strides, strict=True))
        return replace(self, box=box, there=SourceWindow(self.there.offset + moved, self.there.strides))


class LoadTraceBuilder:
    """Builds the load trace of one run of a loader: copies, exceptions, and the proof that no tensor is missing."""

    def __init__(
        self, tensors: Sequence[TensorSpec], held: ModelTensors, tracer: Tracer, left_out: dict[int, StagedTensor]
    ) -> None:
        self._tensors = tensors
        self._tracer = tracer
        self._targets = held.targets
        self._live = held.tensors
        self._loaded = dict(left_out)
        for index, operation in tracer.unknown.items():
            self._load(index, NotCopiedCause.UNKNOWN_TARGET, operation)
        self._rewritten: list[TargetBox] = []

    def load_trace(self, rank: int) -> LoadTrace:
        """The result."""
        landed, self._rewritten = _last_written(list(self._land()))
        for each in landed:
            if each.origin.cause is not None:
                for index in each.origin.sources:
                    self._load(index, each.origin.cause, each.origin.detail)
        kept = {index for each in landed for index in each.origin.sources}
        dropped = frozenset(self._tracer.touched - kept - set(self._loaded))
        if self._loaded:
            # A tensor that is kept aside for one that was left out looks like one that is dropped.
            for index in dropped:
                self._load(index, NotCopiedCause.PARTNER, "read, and nothing of it was stored without the others")
            dropped = frozenset[int]()
        found = list(self._pieces(landed))
        pieces = [piece for index, piece in found if index not in self._loaded]
        unread = set(range(len(self._tensors))) - self._tracer.touched - kept - set(self._loaded)
        return LoadTrace(
            rank=rank,
            targets=self._targets,
            copies=Shards.of(self._tensors, pieces, rank=rank),
            loaded=tuple(self._loaded[index] for index in sorted(self._loaded)),
            unread=tuple(sorted(unread)),
            dropped=tuple(sorted(dropped)),
            constants=tuple(
                ConstantFill(each.target, each.box, each.origin.value)
                for each in landed
                if each.origin.value is not None
            ),
            unwritten=tuple(_holes(self._targets, landed)),
            rewritten=tuple(self._rewritten),
        )

    def _load(self, index: int, cause: NotCopiedCause, detail: str) -> None:
        self._loaded.setdefault(index, StagedTensor(index, cause, detail))

    def _land(self) -> Iterator[_Landed]:
        """Every write to the model's memory, in order, as boxes of its tensors."""
        by_memory: dict[int, list[int]] = defaultdict(list)
        for number, tensor in enumerate(self._live):
            by_memory[identity_of(tensor)].append(number)
        for numbers in by_memory.values():
            memory = self._tracer.memory_of(self._live[numbers[0]])
            assert memory is not None
            for write in memory.writes:
                yield from self._locate(write, memory, numbers)

    def _locate(self, write: Write, memory: WrittenMemory, numbers: Sequence[int]) -> Iterator[_Landed]:
        """The boxes of one write, in the first tensor of its memory that it lies in."""
        reasons: list[str] = []
        for number in numbers:
            tensor = self._live[number]
            here = write.move.here
            moved = replace(write.move, here=SourceWindow(here.offset - window_of(tensor).offset, here.strides))
            if moved.here.offset < 0:
                continue
            try:
                boxes = list(boxes_of(moved, tensor.shape, tensor.stride()))
            except Scattered as scattered:
                reasons.append(str(scattered))
                continue
            yield from (_Landed(number, box, write.origin, there) for box, there in boxes)
            return
        detail = reasons[0] if reasons else "outside of every tensor of its memory"
        # Without a source, it may have written over anything that is there.
        for index in write.origin.sources or memory.sources():
            self._load(index, NotCopiedCause.SCATTERED, f"{self._targets[numbers[0]].name}: {detail}")

    def _pieces(self, landed: Sequence[_Landed]) -> Iterator[tuple[int, Shard]]:
        """Copies of tensors that are nothing but copied."""
        for each in landed:
            if not each.origin.copied:
                continue
            (index,) = each.origin.sources
            if index in self._loaded:
                continue
            spec, target = self._tensors[index], self._targets[each.target]
            path = [str(dtype).removeprefix("torch.") for dtype in each.origin.path]
            if len(path) == 2 and (path[0], path[1]) != (spec.dtype, target.dtype):
                self._load(index, NotCopiedCause.COMPUTED, f"read as {path[0]} and cast to {path[1]}")
                continue
            dtype = path[1] if len(path) == 2 else spec.dtype
            base = sum(start * stride for start, stride in zip(each.box.start, target.strides, strict=True))
            move = Move(each.box.shape, SourceWindow(base, target.strides), each.there)
            try:
                boxes = list(boxes_of(reverse(move), spec.shape, contiguous_strides(spec.shape)))
            except Scattered as scattered:
                self._load(index, NotCopiedCause.SCATTERED, f"{target.name}: {scattered}")
                continue
            yield from (
                (index, Shard(spec.name, box, dtype, ShardView(each.target, at.offset, at.strides)))
                for box, at in boxes
            )


def _last_written(landed: list[_Landed]) -> tuple[list[_Landed], list[TargetBox]]:
    """Without what was written over, and where that was."""
    if not landed or find_overlap(_boxes([(each.target, each.box) for each in landed])) is None:
        return landed, []
    by_target: dict[int, list[_Landed]] = defaultdict(list)
    patches: list[TargetBox] = []
    for each in landed:
        earlier = by_target[each.target]
        kept: list[_Landed] = []
        for old in earlier:
            common = old.box.intersect(each.box)
            if common is None:
                kept.append(old)
                continue
            if old.origin != each.origin:
                patches.append(TargetBox(each.target, common))
            kept.extend(old.cut(part) for part in old.box.subtract(common))
        by_target[each.target] = [*kept, each]
    return [each for group in by_target.values() for each in group], patches


def _holes(targets: Sequence[LoadTarget], landed: Sequence[_Landed]) -> Iterator[TargetBox]:
    """Parts of parameters that nothing was written to."""
    written: dict[int, list[Box]] = defaultdict(list)
    for each in landed:
        if each.origin.cause is None or each.origin.sources:  # what was calculated of nothing is not done in a round
            written[each.target].append(each.box)
    for number, target in enumerate(targets):
        if not target.parameter or sum(box.size for box in written[number]) == prod(target.shape):
            continue  # what was written is disjoint, so as many elements are all of them
        yield from (TargetBox(number, box) for box in subtract_all(Box.whole(target.shape), written[number]))


def _boxes(placed: Sequence[tuple[int, Box]]) -> Boxes:
    axes = max(len(box.start) for _, box in placed) or 1
    start = np.array([box.start + (0,) * (axes - len(box.start)) for _, box in placed], np.int64)
    stop = np.array([box.stop + (1,) * (axes - len(box.stop)) for _, box in placed], np.int64)
    return Boxes(np.array([number for number, _ in placed], np.int64), start.reshape(-1, axes), stop.reshape(-1, axes))
