"""A dispatch mode between a loader and torch: traces moves, and carries out no operation that would change the model.

Every operation on a tensor that is followed comes to `Tracer.dispatch`. Views are made as ever, for they move nothing.
Movements are noted, calculations end the trail, and reading a value raises `ReadsValues`. An operation on other tensors
is none of our business and is carried out.

Three things torch does not report: what threads of the loader's own do, what is done with a tensor's address, and what
is decided by a number. The guards below refuse or note them while a loader is traced.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeAlias, cast
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from weightbus.dataplane.reshard import NotCopiedCause
from weightbus.dataplane.tensors import TensorSpec

from .memory_origins import (
    MOST_BOXES,
    Move,
    Number,
    Origin,
    ReadsValues,
    SourceWindow,
    Write,
    WrittenMemory,
    calculated,
    constant,
    identity_of,
    window_of,
)

_aten: Any = torch.ops.aten
_Args: TypeAlias = Sequence[Any]
_Kwargs: TypeAlias = Mapping[str, Any]
_Handler: TypeAlias = Callable[["Tracer", Any, _Args, _Kwargs], object]


class Tracer:
    """Knows every memory that matters while one loader runs."""

    def __init__(self, device: torch.device, number: float) -> None:
        """`number` is near what stands for each number that is asked for."""
        self.unknown: dict[int, str] = {}
        """Sources that were written to memory of which nothing is known, with the operation."""
        self.touched: set[int] = set()
        """Sources that any operation was given."""
        self.decided: set[int] = set()
        """Sources whose only element decided something, or went into a calculation."""
        self.current: int | None = None
        """The source that the loader was given last."""
        self._device = device
        self._number = number
        self._phantoms: dict[torch.device, PhantomTensors] = {}
        self._memories: dict[int, WrittenMemory] = {}
        self._born: dict[int, torch.UntypedStorage] = {}
        self._values: dict[float, Origin] = {}
        self._unclaimed: dict[float, int] = {}

    # -- traced memory -------------------------------------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor) -> None:
        """Follow a tensor of the model."""
        self._follow(tensor, engine=True)

    def sources(self, tensors: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Phantom tensors for these sources, in their order. To be made before anything is traced: it is quicker."""
        self._phantoms[self._device] = phantoms = PhantomTensors(self._device)
        phantoms.reserve(max((spec.nbytes for spec in tensors), default=1))
        made = [phantoms.make(spec.shape, getattr(torch, spec.dtype)) for spec in tensors]
        for number, tensor in enumerate(made):
            self._follow(tensor, source=number)
        return made

    def memory_of(self, tensor: torch.Tensor) -> WrittenMemory | None:
        """Known contents of a tensor's storage; None when it is not traced."""
        return self._memories.get(identity_of(tensor))

    def read_and_forgotten(self) -> set[int]:
        """Sources whose only element was read as a number that was not stored as it is, or that decided something."""
        return self.decided.union(self._unclaimed.values())

    @property
    def numbered(self) -> frozenset[int]:
        """Sources whose only element was asked for as a number."""
        return frozenset[int]().union(*(origin.sources for origin in self._values.values()))

    def _follow(self, tensor: torch.Tensor, *, source: int | None = None, engine: bool = False) -> WrittenMemory:
        memory = WrittenMemory(tensor.untyped_storage(), tensor.dtype, source, engine)
        return self._memories.setdefault(identity_of(tensor), memory)

    def _make(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device not in self._phantoms:
            self._phantoms[device] = PhantomTensors(device)
        return self._phantoms[device].make(shape, dtype)

    # -- operations ---------------------------------------------------------------------------------------------------

    def dispatch(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """Do, note or refuse one operation."""
        if operation.is_view:
            made: object = operation(*args, **kwargs)
            return self._noted(made) if operation is _aten.lift_fresh.default else made
        found = [self._memories.get(identity_of(each)) for each in _tensors(args, kwargs)]
        followed = [memory for memory in found if memory is not None]
        if not followed:
            return self._carry_out(operation, args, kwargs)
        self.touched.update(memory.source for memory in followed if memory.source is not None)
        handler = _HANDLERS.get(operation)
        return handler(self, operation, args, kwargs) if handler else self._calculate(operation, args, kwargs)

    def _carry_out(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """An operation on nothing that is followed. Its results may be written to later."""
        made: object = operation(*args, **kwargs)
        return made if operation in _ELSEWHERE else self._noted(made)

    def _noted(self, made: object) -> object:
        """A tensor that no traced memory went into: its values are those that the loader always gives it."""
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._born.setdefault(identity_of(tensor), tensor.untyped_storage())
        return made

    def _calculate(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """Anything that is no movement: what it makes or changes has these sources, and no more is known."""
        tensors = _tensors(args, kwargs)
        numbers = (self._values.get(each) for each in (*args, *kwargs.values()) if isinstance(each, float))
        sources = self._sources_of(tensors).union(*(number.sources for number in numbers if number is not None))
        origin = calculated(sources, NotCopiedCause.COMPUTED, str(operation))
        changed = _changed(operation, args, kwargs)
        for tensor in changed:
            self._write(tensor, [Write(_everywhere(tensor), origin)], operation)
        if changed:
            return changed[0] if len(changed) == 1 else tuple(changed)
        result = self._shapes(operation, args, kwargs, origin.sources)

        def phantom(shape: torch.Tensor) -> torch.Tensor:
            made = self._make(shape.shape, shape.dtype, _device_of(tensors, kwargs))
            self._follow(made).writes.append(Write(_everywhere(made), origin))
            return made

        return tree_map_only(torch.Tensor, phantom, result)

    def _shapes(self, operation: Any, args: _Args, kwargs: _Kwargs, sources: frozenset[int]) -> object:
        """Results of the operation, without contents. Raises `ReadsValues` where their shapes depend on values."""

        def shape(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        flat_args, flat_kwargs = tree_map_only(torch.Tensor, shape, (tuple(args), dict(kwargs)))
        if "device" in flat_kwargs:
            flat_kwargs["device"] = torch.device("meta")
        flat_kwargs.pop("pin_memory", None)
        try:
            result: object = operation(*flat_args, **flat_kwargs)
        except (
            RuntimeError,
            NotImplementedError,
            TypeError,
        ) as error:  # "cannot be run on meta tensors", in many words
            raise ReadsValues(sources, str(operation)) from error
        if not any(isinstance(each, torch.Tensor) for each in tree_leaves(result)):
            raise ReadsValues(sources, str(operation))
        return result

    def _sources_of(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        known = (self.memory_of(tensor) for tensor in tensors)
        return frozenset[int]().union(*(memory.sources() for memory in known if memory is not None))

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(self, target: torch.Tensor, writes: Sequence[Write], operation: Any) -> None:
        """Note writes to a view; their `here` is in its storage, counted in its elements."""
        if not target.numel():  # a rank beyond the end of what is cut: it has padding alone
            return
        memory = self.memory_of(target)
        if memory is None:
            identity = identity_of(target)
            if identity not in self._born:
                for write in writes:
                    self.unknown.update(dict.fromkeys(write.origin.sources, str(operation)))
                return
            memory = self._follow(target)
            memory.writes.append(_present(target))
        if target.dtype.itemsize != memory.dtype.itemsize:
            sources = memory.sources().union(*(write.origin.sources for write in writes))
            detail = f"memory of {memory.dtype} written as {target.dtype}"
            whole = torch.empty(0, dtype=memory.dtype, device=target.device).set_(memory.storage)
            memory.writes.append(Write(_everywhere(whole), calculated(sources, NotCopiedCause.SCATTERED, detail)))
            return
        memory.writes.extend(writes)

    def _read(self, tensor: torch.Tensor, target: torch.Tensor) -> list[Write]:
        """Contents of `tensor` as writes to `target`, a view of the same shape."""
        memory = self.memory_of(tensor)
        here = window_of(target)
        if memory is None:
            value = _only_value(tensor) if identity_of(tensor) in self._born else None
            sources = self.numbered if self.current is None else (self.current,)
            unknown = calculated(sources, NotCopiedCause.COMPUTED, "values that came from no tensor")
            origin = unknown if value is None else constant(value)
            return [Write(Move(tuple(target.shape), here, here), origin)]
        found = memory.read(tensor.expand(target.shape), here)
        return [Write(each.move, each.origin.cast(target.dtype)) for each in found]

    def _copy(self, target: torch.Tensor, source: torch.Tensor, operation: Any) -> None:
        if target.numel():
            self._write(target, self._read(source, target), operation)

    def _made_like(self, operation: Any, args: _Args, kwargs: _Kwargs) -> torch.Tensor:
        """The empty result of a movement."""
        tensors = _tensors(args, kwargs)
        shape = self._shapes(operation, args, kwargs, self._sources_of(tensors))
        assert isinstance(shape, torch.Tensor)
        made = self._make(shape.shape, shape.dtype, _device_of(tensors, kwargs))
        made = made.as_strided(shape.shape, shape.stride()) if _dense(shape) else made
        self._follow(made)
        return made

    # -- movements ----------------------------------------------------------------------------------------------------

    def copy_into(self, operation: Any, args: _Args, _kwargs: _Kwargs) -> object:
        """``copy_``."""
        self._copy(args[0], args[1], operation)
        return args[0]

    def same(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """A new memory with the same elements: clone, contiguous, to."""
        made = self._made_like(operation, args, kwargs)
        self._copy(made, args[0], operation)
        return made

    def reshaped(self, _operation: Any, args: _Args, _kwargs: _Kwargs) -> object:
        """``_unsafe_view``: a view that torch does not call one."""
        return args[0].view(args[1])

    def joined(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """``cat``."""
        made = self._made_like(operation, args, kwargs)
        axis = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
        at = 0
        for part in args[0]:
            if part.numel():
                self._copy(made.narrow(axis, at, part.shape[axis]), part, operation)
                at += part.shape[axis]
        return made

    def stacked(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """``stack``."""
        made = self._made_like(operation, args, kwargs)
        axis = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
        for at, part in enumerate(args[0]):
            self._copy(made.select(axis, at), part, operation)
        return made

    def repeated(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """``repeat``."""
        made = self._made_like(operation, args, kwargs)
        source, times = args[0], list(args[1])
        inner = [1] * (len(times) - source.dim()) + list(source.shape)
        apart = made.view([extent for pair in zip(times, inner, strict=True) for extent in pair])
        self._copy(apart, source.view([extent for one in inner for extent in (1, one)]), operation)
        return made

    def padded(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """``constant_pad_nd``; negative padding is left to `_calculate`."""
        source, pads = args[0], list(args[1])
        if min(pads) < 0:
            return self._calculate(operation, args, kwargs)
        made = self._made_like(operation, args, kwargs)
        value = float(args[2] if len(args) > 2 else kwargs.get("value", 0))
        self._write(made, [Write(_everywhere(made), constant(value))], operation)
        inner = made
        for at in range(len(pads) // 2):
            axis = source.dim() - 1 - at
            inner = inner.narrow(axis, pads[2 * at], source.shape[axis])
        self._copy(inner, source, operation)
        return made

    def selected(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """``index_select``, ``x[:, indexes]``, ``flip``: the elements of one axis in another order."""
        source = args[0]
        found = _axis_and_order(operation, args)
        if found is None or any(identity_of(each) in self._memories for each in _tensors(args[1:], kwargs)):
            return self._calculate(operation, args, kwargs)
        axis, order = found
        if len(order) > MOST_BOXES:
            return self._calculate(operation, args, kwargs)
        made = self._made_like(operation, args, kwargs)
        at = 0
        while at < len(order):
            until = at + 1
            while until < len(order) and order[until] == order[until - 1] + 1:
                until += 1
            self._copy(made.narrow(axis, at, until - at), source.narrow(axis, order[at], until - at), operation)
            at = until
        return made

    def filled(self, operation: Any, args: _Args, _kwargs: _Kwargs) -> object:
        """``zero_`` and ``fill_``. A number that was read from a source is known again by its value."""
        target = args[0]
        value = args[1] if len(args) > 1 else 0
        if isinstance(value, torch.Tensor):
            self._copy(target, value, operation)
            return target
        origin = self._values.get(value) if isinstance(value, float) else None
        if origin is None:
            self._write(target, [Write(_everywhere(target), constant(float(value)))], operation)
            return target
        self._unclaimed.pop(value, None)
        spread = Move(tuple(target.shape), window_of(target), SourceWindow(0, (0,) * target.dim()))
        self._write(target, [Write(spread, origin.cast(target.dtype))], operation)
        return target

    def number(self, operation: Any, args: _Args, _kwargs: _Kwargs) -> object:
        """``item``: one element of one source gets a number of its own; anything else is refused."""
        tensor = args[0]
        memory = self.memory_of(tensor)
        assert memory is not None
        alone = memory.storage.nbytes() == tensor.element_size() and not memory.writes
        if memory.source is None or not alone or not tensor.is_floating_point():
            raise ReadsValues(memory.sources(), str(operation))
        value = self._number + (len(self._values) + 1) * 2.0**-40
        self._values[value] = Origin(frozenset({memory.source}), (tensor.dtype,))
        self._unclaimed[value] = memory.source
        return value

    def elsewhere(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """``set_``: memory that no operation made in place of traced memory."""
        raise ReadsValues(self._sources_of(_tensors(args, kwargs)), str(operation))

    def fresh(self, operation: Any, args: _Args, kwargs: _Kwargs) -> object:
        """``zeros_like`` and its kind: only the shape of the tensor is asked for."""
        made = self._made_like(operation, args, kwargs)
        value = _FRESH[operation]
        if value is None:
            value = float(args[-1]) if operation in _FULL else None
        if value is not None:
            self._write(made, [Write(_everywhere(made), constant(value))], operation)
        return made


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Loaders are not compiled, so nothing has to be kept from being; wrappers that do it cost every operation."""
        return False

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: object, args: _Args = (), kwargs: _Kwargs | None = None) -> object:
        del types
        return self._tracer.dispatch(func, args, kwargs or {})


@contextlib.contextmanager
def traced(tracer: Tracer) -> Generator[None]:
    """Everything that this thread does with torch goes through `tracer`."""
    known = tracer.memory_of
    numbers = noting_numbers(known, tracer.decided)
    with in_one_thread(), torch.no_grad(), without_addresses(known), numbers, _Dispatch(tracer):
        yield


# -- operations, by what they do ------------------------------------------------------------------------------------

# ruff: noqa: SLF001 - torch names these operations so
_SAME: Final = (
    _aten.clone.default, _aten._to_copy.default, _aten.lift_fresh_copy.default, _aten.alias_copy.default,
    _aten.detach_copy.default,
)  # fmt: skip
_FRESH: Final[dict[Any, float | None]] = {
    _aten.empty_like.default: None,
    _aten.new_empty.default: None,
    _aten.new_empty_strided.default: None,
    _aten.zeros_like.default: 0.0,
    _aten.new_zeros.default: 0.0,
    _aten.ones_like.default: 1.0,
    _aten.new_ones.default: 1.0,
    _aten.full_like.default: None,
    _aten.new_full.default: None,
}
_FULL: Final = frozenset({_aten.full_like.default, _aten.new_full.default})

_ELSEWHERE: Final = frozenset({_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset})
"""Operations that bring in storages of unknown contents: Python and files fill them."""

_HANDLERS: Final[dict[Any, _Handler]] = {
    _aten.copy_.default: Tracer.copy_into,
    _aten.cat.default: Tracer.joined,
    _aten.stack.default: Tracer.stacked,
    _aten.repeat.default: Tracer.repeated,
    _aten.constant_pad_nd.default: Tracer.padded,
    _aten.index_select.default: Tracer.selected,
    _aten.index.Tensor: Tracer.selected,
    _aten.flip.default: Tracer.selected,
    _aten.fill_.Scalar: Tracer.filled,
    _aten.fill_.Tensor: Tracer.filled,
    _aten.zero_.default: Tracer.filled,
    _aten._local_scalar_dense.default: Tracer.number,
    _aten._unsafe_view.default: Tracer.reshaped,
    **dict.fromkeys(_SAME, Tracer.same),
    **dict.fromkeys(_FRESH, Tracer.fresh),
    **dict.fromkeys(_ELSEWHERE, Tracer.elsewhere),
}


def _tensors(args: _Args, kwargs: _Kwargs) -> list[torch.Tensor]:
    """Of the arguments, and of lists among them: no operation of torch nests them deeper."""
    found: list[torch.Tensor] = []
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found.extend(one for one in cast("Sequence[object]", each) if isinstance(one, torch.Tensor))
    return found


def _everywhere(tensor: torch.Tensor) -> Move:
    """All of a view. There is no other memory."""
    return Move(tuple(tensor.shape), window_of(tensor), window_of(tensor))


def _changed(operation: Any, args: _Args, kwargs: _Kwargs) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    named = {**dict(zip((each.name for each in operation._schema.arguments), args, strict=False)), **kwargs}
    written = [
        each.name for each in operation._schema.arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    return [each for name in written for each in tree_leaves(named.get(name)) if isinstance(each, torch.Tensor)]


def _device_of(tensors: Sequence[torch.Tensor], kwargs: _Kwargs) -> torch.device:
    asked = kwargs.get("device")
    return torch.device(asked) if asked is not None else tensors[0].device


def _dense(shape: torch.Tensor) -> bool:
    """Packed in some order of its axes: its strides need no more memory than its elements."""
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(shape.shape, shape.stride(), strict=True))
    return reach == shape.numel()


def _present(tensor: torch.Tensor) -> Write:
    """Contents of real memory, made while the loader ran, before anything that is followed is written to it."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    value = _only_value(whole)
    unknown = calculated((), NotCopiedCause.COMPUTED, "values that came from no tensor")
    return Write(_everywhere(whole), unknown if value is None else constant(value))


def _only_value(tensor: torch.Tensor) -> float | None:
    """The value that every element has, if they have one."""
    if not tensor.numel() or tensor.dtype.is_complex:
        return None
    flat = tensor.to(torch.float64)
    low = float(flat.min())
    return low if low == float(flat.max()) else None


def _axis_and_order(operation: Any, args: _Args) -> tuple[int, list[int]] | None:
    """The axis that is reordered, and its new order; None for several, or for indexes of more than one axis."""
    source = cast("torch.Tensor", args[0])
    if operation is _aten.flip.default:
        axes = [int(axis) % source.dim() for axis in args[1]]
        return (axes[0], list(range(source.shape[axes[0]]))[::-1]) if len(axes) == 1 else None
    if operation is _aten.index_select.default:
        return int(args[1]) % source.dim(), cast("list[int]", args[2].tolist())
    given = [(axis, index) for axis, index in enumerate(args[1]) if index is not None]
    if len(given) != 1 or given[0][1].dim() != 1 or given[0][1].dtype != torch.int64:
        return None
    axis, index = given[0]
    size = source.shape[axis]
    return axis, [int(each) % size for each in index.tolist()]


# -- guards of what torch does not report -----------------------------------------------------------------------------

_ALONE: Final = threading.Lock()
_ADDRESSES: Final = ("data_ptr", "numpy", "tolist", "__array__", "__dlpack__")
"""Ways out of torch: through them code reads or writes memory unseen."""
_CONVERSIONS: Final = ("__bool__", "__complex__", "__float__", "__index__", "__int__")
"""Numbers of Python's own, of which nothing is known any more. Torch asks for none of them by these names."""
_INTERFACE: Final = "__cuda_array_interface__"
"""One more, which is a property."""


@contextlib.contextmanager
def without_addresses(memory_of: Callable[[torch.Tensor], WrittenMemory | None]) -> Generator[None]:
    """Refuse to this thread the ways out of torch for traced memory.

    The methods are exchanged for the time. A function mode would see them too, and also every other call, which made
    tracing half as slow again.
    """
    mine = threading.get_ident()

    def look(tensor: torch.Tensor, name: str) -> None:
        memory = memory_of(tensor) if threading.get_ident() == mine else None
        if memory is not None:
            raise ReadsValues(memory.sources(), name)

    def guarded(name: str) -> Callable[..., object]:
        method = getattr(torch.Tensor, name)

        def refusing(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            look(tensor, name)
            return method(tensor, *args, **kwargs)

        return refusing

    interface = getattr(torch.Tensor, _INTERFACE)

    def shown(tensor: torch.Tensor) -> object:
        look(tensor, _INTERFACE)
        return interface.__get__(tensor)

    with contextlib.ExitStack() as exchanged:
        for name in _ADDRESSES:
            exchanged.enter_context(mock.patch.object(torch.Tensor, name, guarded(name)))
        exchanged.enter_context(mock.patch.object(torch.Tensor, _INTERFACE, property(shown)))
        yield


@contextlib.contextmanager
def noting_numbers(memory_of: Callable[[torch.Tensor], WrittenMemory | None], read: set[int]) -> Generator[None]:
    """Add to `read` the sources whose only element this thread decides or calculates by."""
    mine = threading.get_ident()
    number_of = torch.Tensor.item

    def followed(tensor: torch.Tensor) -> WrittenMemory | None:
        return memory_of(tensor) if threading.get_ident() == mine else None

    def item(tensor: torch.Tensor) -> object:
        memory, value = followed(tensor), cast("object", number_of(tensor))
        return Number.of(value, memory.sources(), read) if memory is not None and isinstance(value, float) else value

    def noting(name: str) -> Callable[[torch.Tensor], object]:
        method = getattr(torch.Tensor, name)

        def convert(tensor: torch.Tensor) -> object:
            memory = followed(tensor)
            read.update(memory.sources() if memory is not None else ())
            return method(tensor)

        return convert

    with contextlib.ExitStack() as exchanged:
        exchanged.enter_context(mock.patch.object(torch.Tensor, "item", item))
        for name in _CONVERSIONS:
            exchanged.enter_context(mock.patch.object(torch.Tensor, name, noting(name)))
        yield


@contextlib.contextmanager
def in_one_thread() -> Generator[None]:
    """Work that this thread gives to a pool is done at once, by itself: torch's modes belong to a thread.

    One thread at a time: the classes that are changed belong to the process.
    """
    mine = threading.get_ident()
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start

    def run(pool: ThreadPoolExecutor, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if threading.get_ident() != mine:
            return submit(pool, function, *args, **kwargs)
        future: Future[object] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - a future carries whatever was raised
            future.set_exception(error)
        return future

    def refuse(thread: threading.Thread) -> None:
        if threading.get_ident() == mine:
            raise RuntimeError(f"the loader starts a thread {thread.name!r}, in which nothing could be followed")
        start(thread)

    pools, threads = (ThreadPoolExecutor, "submit", run), (threading.Thread, "start", refuse)
    with _ALONE, mock.patch.object(*pools), mock.patch.object(*threads):
        yield


# -- phantom tensors --------------------------------------------------------------------------------------------------

_MAP_NORESERVE: Final = 0x4000
"""Linux's number; Python names it since 3.13 only. Without it the kernel refuses more than there is memory."""


class _DeviceMemory:
    """Memory of a GPU as other libraries see it; torch makes a new storage over it each time it is given one."""

    def __init__(self, memory: torch.Tensor, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


class PhantomTensors:
    """Makes tensors of one device with a shape and a storage of their own, and no memory: all lie in the same pages.

    A loader can look at everything but their values, and a storage's identity follows every view. What is written to
    one overwrites the others, so every operation on them is intercepted. Grows to the largest one: address space on a
    CPU, memory on a GPU.

    What was made before it grew keeps the smaller memory, so `reserve` the largest first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: mmap.mmap | None = None
        self._gpu: torch.Tensor | None = None
        self._nbytes = 0

    def make(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor over a new storage, packed unless `strides` say otherwise."""
        sizes = torch.Size(shape)
        if sizes.numel() == 0:
            return torch.empty(sizes, dtype=dtype, device=self._device)
        if strides is None:
            return self._storage(sizes.numel() * dtype.itemsize).view(dtype).view(sizes)
        count = 1 + sum((extent - 1) * stride for extent, stride in zip(sizes, strides, strict=True))
        return self._storage(count * dtype.itemsize).view(dtype).as_strided(sizes, tuple(strides))

    def reserve(self, nbytes: int) -> None:
        """Have room for tensors of up to `nbytes`."""
        if nbytes > self._nbytes:
            self._grow(nbytes)

    def _storage(self, nbytes: int) -> torch.Tensor:
        """1-D, uint8."""
        self.reserve(nbytes)
        if self._host is not None:
            return torch.frombuffer(self._host, dtype=torch.uint8, count=nbytes)
        if self._gpu is not None:
            return torch.as_tensor(_DeviceMemory(self._gpu, nbytes), device=self._device)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)  # neither: memory for each of them

    def _grow(self, nbytes: int) -> None:
        self._nbytes = nbytes
        if self._device.type == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._host = mmap.mmap(-1, nbytes, flags=flags)  # pages that are never written take no memory
        elif self._device.type == "cuda":
            self._gpu = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
