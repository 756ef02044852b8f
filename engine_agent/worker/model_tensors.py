"""The tensors that a model holds: by name, by memory, and as they were before a loader was let near them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol, TypeAlias, cast

import torch

from weightbus.dataplane.reshard import LoadTarget
from weightbus.dataplane.tensors import ITEM_BYTES

from .memory_origins import Number, WrittenMemory, identity_of, window_of

_Container: TypeAlias = list[object] | dict[object, object]
_TORCHS_OWN: Final = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH: Final = 2
"""Of containers in containers."""


class Known(Protocol):
    """The part of a tracer that is used here."""

    def memory_of(self, tensor: torch.Tensor) -> WrittenMemory | None:
        """Known contents of a tensor's storage."""
        ...


class _Held:
    """One tensor."""

    def __init__(self, name: str, place: dict[str, object], attribute: str, tensor: torch.Tensor, kind: int) -> None:
        self.name = name
        self.place = place
        self.attribute = attribute
        self.tensor = tensor
        self.parameter = kind == 0
        self.data = tensor.detach()
        self.aliases: list[str] = []


class ModelTensors:
    """Parameters first, then buffers, then tensors that modules hold as plain attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._held: list[_Held] = []
        places: dict[tuple[object, ...], _Held] = {}
        for held in _walk(model):
            window = window_of(held.tensor)
            key = (identity_of(held.tensor), window.offset, window.strides, tuple(held.tensor.shape), held.tensor.dtype)
            first = places.setdefault(key, held)
            if first is held:
                self._held.append(held)
            else:
                first.aliases.append(held.name)
        self._before = {module: [dict(each) for each in _dictionaries(module)] for module in model.modules()}
        self._containers = [
            (f"{prefix}.{attribute}", container, _copy(container))
            for prefix, module in _modules(model)
            for attribute, value in _dictionaries(module)[2].items()
            if attribute not in _TORCHS_OWN
            for container in _containers(value)
        ]
        parameters = [held.tensor for held in self._held if held.parameter]
        self.device = parameters[0].device if parameters else torch.device("cpu")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that have memory, as targets are numbered."""
        return [held.data for held in self._held]

    @property
    def targets(self) -> tuple[LoadTarget, ...]:
        """The tensors as targets of a load trace."""
        return tuple(
            LoadTarget(
                held.name,
                _dtype(held.data),
                tuple(held.data.shape),
                tuple(held.data.stride()),
                held.parameter,
                tuple(held.aliases),
            )
            for held in self._held
        )

    def in_place(self) -> bool:
        """The model still holds these tensors, in this memory: neither its loader nor a post-load step moved them."""
        return all(
            held.place.get(held.attribute) is held.tensor and held.tensor.data_ptr() == held.data.data_ptr()
            for held in self._held
        )

    def restore(self, tracer: Known) -> list[tuple[frozenset[int], str]]:
        """Put back every tensor that was replaced. Returns what the new ones were made from, and their names."""
        found: list[tuple[frozenset[int], str]] = []
        for held in self._held:
            tensor = held.tensor
            if (identity_of(tensor), window_of(tensor), tensor.shape) != (
                identity_of(held.data),
                window_of(held.data),
                held.data.shape,
            ):
                found.append((_sources(tensor, tracer), held.name))
                tensor.data = held.data
        for name, container, copy in self._containers:
            if strange := _strange(container, tracer) - _strange(copy, tracer):
                found.append((strange, name))
                _refill(container, copy)
        names = {module: name for name, module in _modules(self._model)}
        for module, before in self._before.items():
            for now, kept in zip(_dictionaries(module), before, strict=True):
                found.extend(_reset(now, kept, names[module], tracer))
        return [(sources, name) for sources, name in found if sources]


def _dictionaries(module: torch.nn.Module) -> tuple[dict[str, object], ...]:
    """Where a module keeps its parameters, its buffers, and everything else."""
    return (
        cast("dict[str, object]", module._parameters),  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        cast("dict[str, object]", module._buffers),  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        cast("dict[str, object]", module.__dict__),
    )


def _modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return cast("list[tuple[str, torch.nn.Module]]", list(model.named_modules()))  # pyright: ignore[reportUnknownArgumentType]


def _walk(model: torch.nn.Module) -> Iterator[_Held]:
    for kind in range(3):
        for prefix, module in _modules(model):
            place = _dictionaries(module)[kind]
            for attribute, tensor in place.items():
                if isinstance(tensor, torch.Tensor) and _has_memory(tensor):
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    yield _Held(name, place, attribute, tensor, kind)


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0
    return plain and _dtype(tensor) in ITEM_BYTES


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _reset(
    now: dict[str, object], before: dict[str, object], prefix: str, tracer: Known
) -> Iterator[tuple[frozenset[int], str]]:
    """Make one dictionary of a module what it was, as far as tensors go."""
    for name, value in list(now.items()):
        if value is before.get(name) or name in _TORCHS_OWN:
            continue
        if not isinstance(value, torch.Tensor | Number):
            strange = next((_strange(each, tracer) for each in _containers(value)), None)
            if not strange:
                continue
            yield strange, f"{prefix}.{name}"
        if name in before:
            now[name] = before[name]
        else:
            del now[name]
        if isinstance(value, torch.Tensor | Number):
            yield _sources(value, tracer), f"{prefix}.{name}"
    for name, value in before.items():
        if isinstance(value, torch.Tensor) and name not in now:
            now[name] = value


def _containers(value: object, depth: int = 0) -> Iterator[_Container]:
    """`value`, if it is a list or a dictionary, and those in it: models keep tensors there, too."""
    if not isinstance(value, list | dict) or depth > _DEPTH:
        return
    container = cast("_Container", value)
    yield container
    for each in list(_elements(container)):
        yield from _containers(each, depth + 1)


def _elements(container: _Container) -> Iterable[object]:
    return container.values() if isinstance(container, dict) else container


def _copy(container: _Container) -> _Container:
    return dict(container) if isinstance(container, dict) else list(container)


def _refill(container: _Container, before: _Container) -> None:
    container.clear()
    if isinstance(container, dict) and isinstance(before, dict):
        container.update(before)
    elif isinstance(container, list) and isinstance(before, list):
        container.extend(before)


def _strange(container: _Container, tracer: Known) -> frozenset[int]:
    """Sources of the tensors and numbers in it, at any depth, that are not the model's own."""
    found = frozenset[int]()
    for each in (each for inner in _containers(container) for each in _elements(inner)):
        if isinstance(each, Number):
            found |= each.sources
        elif isinstance(each, torch.Tensor):
            memory = tracer.memory_of(each)
            found |= frozenset() if memory is None or memory.engine else memory.sources()
    return found


def _sources(tensor: torch.Tensor | Number, tracer: Known) -> frozenset[int]:
    if isinstance(tensor, Number):
        return tensor.sources
    memory = tracer.memory_of(tensor)
    return frozenset() if memory is None else memory.sources()
