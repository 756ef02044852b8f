"""Checks, once per publication, that a model still holds the parameters that its source was built on.

Trainers replace parameters: `load_state_dict(assign=True)`, a new `nn.Parameter`, a conversion of the whole module. A
source would then read tensors that are no longer trained, or read with the strides of other tensors, and no digest can
tell. New memory under a parameter of the same form is allowed, also on another device, because trainers offload between
phases: a parameter is read where its memory is now.
"""

# torch leaves Tensor.stride partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from weightbus.dataplane.memory import Driver

from ..source import LayoutMismatch

Reader = Callable[[], Mapping[str, torch.Tensor]]
"""Returns the tensors of a model as they are now, by their names in memory. Reads no values, calls no other rank."""

_ADVICE = "build the source again after replacing parameters"
_OFFLOADED = (
    "it was offloaded, or its torch_memory_saver region is paused: load it back, or resume the region, before"
    " publishing; or move it to host memory with `.data = .data.cpu()`, where it is read, too"
)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, not copied: the whole tensor when it is not sharded."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`local_tensor` of each."""
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


class ParameterIdentity:
    """The parameters of one rank's model as they were when its source was built."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        # The tensors themselves, not their ids: an id is given again when its object is gone.
        self._then = {name: (tensor, _Form.of(tensor)) for name, tensor in read().items()}

    def check(self) -> None:
        """Raise `LayoutMismatch` unless the model holds the same parameters, in the same form, with memory."""
        now = self._read()
        for name, (tensor, form) in self._then.items():
            found = now.get(name)
            if found is None:
                raise LayoutMismatch(f"{name!r} ({form}) is not in the model any more: {_ADVICE}")
            new = _Form.of(found)
            if new != form:
                raise LayoutMismatch(f"{name!r} is now {new}, the source was built when it was {form}: {_ADVICE}")
            if found is not tensor:
                raise LayoutMismatch(
                    f"{name!r} ({new}) is another tensor now, the source was built on the one before: {_ADVICE}"
                )
            if not _has_memory(found):
                raise LayoutMismatch(
                    f"{name!r} ({new} on {local_tensor(found).device}) has no memory now: {_OFFLOADED}"
                )
        for name in now.keys() - self._then.keys():
            raise LayoutMismatch(f"{name!r} ({_Form.of(now[name])}) was not in the model before: {_ADVICE}")


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for an offloaded parameter: it keeps its shape over an emptied storage or unmapped memory."""
    mine = local_tensor(tensor)
    if not mine.numel():
        return True
    steps = zip(mine.shape, mine.stride(), strict=True)
    end = mine.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps)
    if mine.is_meta or mine.untyped_storage().nbytes() < end * mine.element_size():
        return False
    return mine.device.type != "cuda" or _driver().mapped(mine.data_ptr())


@cache
def _driver() -> Driver:
    return Driver()


class _Form(NamedTuple):
    """The properties of a tensor that its shards depend on, all but its address."""

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of this rank's part."""
    strides: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[object, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        mine = local_tensor(tensor)
        placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else ()
        whole, shape, strides = tuple(tensor.shape), tuple(mine.shape), tuple(mine.stride())
        return cls(whole, shape, strides, mine.dtype, placements)

    def __str__(self) -> str:
        part = f" of {self.whole} {self.placements}" if self.placements else ""
        return f"{self.shape}{part} with strides {self.strides}, {self.dtype}"
