"""What trainers wrap around a model: taken off here, or refused with the way out.

Wrappers that keep every parameter whole and where it was, or replace it with a DTensor, are taken off:
DistributedDataParallel, DataParallel, DeepSpeed's engine (ZeRO-1 and 2), torch.compile, activation checkpointing,
`fully_shard`. The others keep flat, empty or further parameters, which no source may take for those of the model: they
are refused when a source is built, before a state dict is taken, which some answer by gathering the whole model.

Libraries that may be absent are not imported: their classes are told by name, along a type's `__mro__`.
"""

from __future__ import annotations

import re
from typing import Final, cast

import torch
from torch import nn

from ..source import UnsupportedModel

_IN_NAMES: Final = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
"""What torch.compile and activation checkpointing put into the names of parameters."""
_AROUND: Final = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""Class of a wrapper -> attribute with the module inside."""
_ROOT_ONLY: Final = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"})
"""Wrappers whose `module` would be taken for a part of the model's names anywhere else."""
_ADAPTED: Final = frozenset({"BaseTunerLayer", "BaseTuner", "PeftModel", "AuxiliaryTrainingWrapper", "AdapterWrapper"})
"""Bases of the classes with which peft, and Megatron-Bridge (the last one), put adapters into a model."""
_GATHERED: Final = (
    "ExportedSource over an exporter that gathers whole tensors, under the names that checkpoints have, serves it"
)


_MADE_BY: Final = ("torch.distributed.", "torch.nn.parallel.")
"""Modules of torch whose calls change a module's class on the fly."""


def bases(kind: type) -> frozenset[str]:
    """Names of a class and of all its bases."""
    return frozenset(each.__name__ for each in kind.__mro__)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside its wrappers, itself sharded or not."""
    while (inner := _inside(module)) is not None:  # not by its truth: some modules have a length
        module = inner
    return module


def _inside(module: nn.Module) -> nn.Module | None:
    names = bases(type(module))
    attribute = next((attribute for name, attribute in _AROUND.items() if name in names), None)
    inner = getattr(module, attribute, None) if attribute else None
    return inner if isinstance(inner, nn.Module) else None


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return _IN_NAMES.sub("", name)


def architecture(module: nn.Module) -> str:
    """The class that the checkpoint's config names; empty for a container of torch, which no config names."""
    kind = _unsharded(type(unwrapped(module)))
    return "" if kind.__module__.startswith("torch.") else kind.__name__


def _unsharded(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before `fully_shard` or `replicate`, which make a class of theirs and that one."""
    own = (each for each in kind.__mro__ if issubclass(each, nn.Module))
    return next((each for each in own if not each.__module__.startswith(_MADE_BY)), kind)


def without_wrappers(module: nn.Module) -> nn.Module:
    """A stand-in for `module` with the same tensors, for code that goes by classes and names of its parts.

    Each part has the class that it had before it was sharded, and wrappers are left out. The trainer's module is not
    changed. The stand-in is not made to compute.
    """
    return _stand_in(module, {})


def _stand_in(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    module = unwrapped(module)
    if id(module) in known:
        return known[id(module)]
    made = known[id(module)] = object.__new__(_unsharded(type(module)))
    inside: dict[str, nn.Module | None] = module.__dict__["_modules"]
    parts = {name: None if part is None else _stand_in(part, known) for name, part in inside.items()}
    made.__dict__.update({**module.__dict__, "_modules": parts})
    return made


def check_wrappers(module: nn.Module) -> None:
    """Raise `UnsupportedModel` for a module whose parameters are not the model's, with the way out. Reads no values."""
    inner = unwrapped(module)
    parts = cast("list[tuple[str, nn.Module]]", list(inner.named_modules()))  # pyright: ignore[reportUnknownArgumentType]
    for raw, part in parts:
        names = bases(type(part))
        where = f"{plain_name(raw) or 'the model'!r} ({type(part).__name__})"
        if "FullyShardedDataParallel" in names or "MegatronFSDP" in names:
            raise UnsupportedModel(
                f"{where} keeps its parameters as parts of flat ones: shard the model by "
                "torch.distributed.fsdp.fully_shard (FSDP2; in verl, strategy: fsdp2), which FSDPSource reads; "
                f"otherwise {_GATHERED}: get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)) "
                "of torch.distributed.checkpoint.state_dict gathers"
            )
        if names & _ADAPTED:
            raise UnsupportedModel(
                f"{where} is an adapter, or holds one, which no served checkpoint has: merge it into its base weights "
                "before publishing, and build the source on what peft's merge_and_unload() returns (of a copy, while "
                "training goes on)"
            )
        if part is not inner and names & _ROOT_ONLY:
            raise UnsupportedModel(
                f"{where} wraps a part of the model, and its 'module' would stand in the names of the checkpoint: "
                "wrap the whole model, or give the source the module that has no such part"
            )
        if "MegatronModule" in names:
            raise UnsupportedModel(f"{where} is a module of Megatron-core: use MegatronSource")
    for raw, parameter in inner.named_parameters():
        _check_partitioned(plain_name(raw), parameter)


def _check_partitioned(name: str, parameter: torch.Tensor) -> None:
    whole = getattr(parameter, "ds_shape", None)
    if whole is not None:
        raise UnsupportedModel(
            f"{name!r} {tuple(parameter.shape)} is partitioned by DeepSpeed ZeRO-3, its whole shape is {tuple(whole)}: "
            f"train with ZeRO-2, or with fully_shard, or gather: {_GATHERED} (deepspeed.zero.GatheredParameters)"
        )
    if tuple(parameter.shape) == (0,):
        raise UnsupportedModel(
            f"{name!r} has shape (0,): its values are kept elsewhere, as DeepSpeed ZeRO-3 and FullyShardedDataParallel "
            f"do. Gather before publishing: {_GATHERED}; a parameter that has no values is left out of the state dict"
        )
