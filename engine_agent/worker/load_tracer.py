"""Runs a model's own loader once, with tensors that have no contents, and writes down what it would have copied where.

Nothing is written to the model. What a loader rebinds is put back, what it reads ends that tensor's part: the loader is
run again without it, and the tensor is named as one that goes through the loader in every round. The result is proven:
what is not covered by exactly one copy, constant or named tensor stands in a list of its own (load_trace.py).

Runs inside the engine's worker, in the thread that owns the model. Imports torch and nothing of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import torch

from weightbus.dataplane.errors import NotTraceable
from weightbus.dataplane.reshard import LoadTrace, NotCopiedCause, StagedTensor
from weightbus.dataplane.tensors import TensorSpec

from .dispatch_mode import Tracer, traced
from .load_trace_builder import LoadTraceBuilder
from .memory_origins import ReadsValues
from .model_tensors import ModelTensors

_ATTEMPTS: Final = 32
"""Runs of the loader. Each but the last one leaves out at least one tensor more than the one before."""

_ONE_BY_ONE: Final = 8
"""Then the same tensors of all layers are left out with the one that was found: loading them is right, too."""
_NUMBER: Final = re.compile(r"\d+")
_ONE: Final = 0.37
_ANOTHER: Final = -5.21
"""What stands for the numbers that loaders ask for, as near as nothing. They have nothing in common."""

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]


def trace_load(
    model: torch.nn.Module, load: Callable[[NamedTensors], object], tensors: Sequence[TensorSpec], rank: int
) -> LoadTrace:
    """What `load`, the bound `load_weights` of `model`, does with `tensors`. Raises `NotTraceable`."""
    left_out: dict[int, StagedTensor] = {}
    for attempt in range(_ATTEMPTS):
        tracer, held, found = _attempt(model, load, tensors, left_out)
        if not found:
            trace = LoadTraceBuilder(tensors, held, tracer, left_out).load_trace(rank)
            if not tracer.numbered:
                return trace
            # What Python or torch makes of a number is not seen. With another number it is another trace.
            again, held, found = _attempt(model, load, tensors, left_out, _ANOTHER)
            if (
                not found
                and LoadTraceBuilder(tensors, held, again, left_out).load_trace(rank).digest() == trace.digest()
            ):
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
