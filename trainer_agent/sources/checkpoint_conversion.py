"""How the tensors of a Hugging Face module in memory become the tensors of its checkpoint, which servers load.

They differ: transformers 5 fuses all experts of a layer, gate and up together, while checkpoints name every expert;
some models rename; tied weights are stored once. transformers can undo all that for whole tensors. Here its own
conversion is run once, on tensors without data whose copies are suppressed, so that every result is still a view of
what it was made of: which slice of which tensor in memory each tensor of the checkpoint is. No model is known here by
name, no tensor is allocated, and whatever is more than a slice is refused.
"""

# torch leaves Tensor.stride partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..source import LayoutMismatch, UnsupportedModel
from .tensor_slices import Axis, Slice
from .wrappers import plain_name, unwrapped, without_wrappers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LORA: Final = re.compile(r"(^|[._])lora_")
"""In the names of a low-rank adapter's parameters, whatever library it is from."""
_HEAD: Final = "lm_head.weight"


@runtime_checkable
class _HasConfig(Protocol):
    """What is read of a transformers model."""

    config: Any


def head_dim(module: nn.Module) -> int | None:
    """Elements of one attention head, where the module's config says so."""
    module = unwrapped(module)
    return head_dim_in(lambda key: getattr(module.config, key, None)) if isinstance(module, _HasConfig) else None


def head_dim_in(config: Callable[[str], object]) -> int | None:
    """Elements of one attention head by the fields of a config; None when they do not tell."""
    wide, hidden, heads = (config(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(wide, int):
        return wide
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers that belong to the checkpoint, by their name in memory, not detached.

    Of several names for one tensor (tied embeddings) the first that the model does not call tied, as checkpoints do.
    Raises `LayoutMismatch` when tied tensors came apart, `UnsupportedModel` when an adapter was not merged.
    """
    module = unwrapped(module)
    ignored = set(cast("Iterable[str]", getattr(module, "_keys_to_ignore_on_save", None) or ()))
    named: dict[str, torch.Tensor] = {}
    for raw, tensor in module.state_dict(keep_vars=True).items():
        name = plain_name(raw)
        if _LORA.search(name):
            raise UnsupportedModel(f"{name!r} is part of an adapter: merge it into its base weights before publishing")
        if ".parametrizations." in f".{name}":
            raise UnsupportedModel(
                f"{name!r} is one of several tensors that a weight is computed from: remove the parametrization "
                "(torch.nn.utils.parametrize.remove_parametrizations) before publishing"
            )
        if name not in ignored and isinstance(tensor, torch.Tensor):  # FP8 modules keep other things there
            named[name] = tensor
    _check_tied(module, named)
    secondary = set(cast("Iterable[str]", getattr(module, "all_tied_weights_keys", None) or ()))
    by_tensor: dict[int, str] = {}
    for name in sorted(named, key=lambda each: each in secondary):  # stable: the model's order, tied names last
        by_tensor.setdefault(id(named[name]), name)
    kept = set(by_tensor.values())
    dropped = named.keys() - kept
    config = module.config if isinstance(module, _HasConfig) else None
    # Several names for one tensor may be what the config, or the model by itself, means.
    if _HEAD in dropped and getattr(config, "tie_word_embeddings", None) is False and not secondary:
        first = by_tensor[id(named[_HEAD])]
        raise LayoutMismatch(
            f"{_HEAD!r} and {first!r} are one tensor, and the config does not tie them, so that an engine wants both: "
            "set tie_word_embeddings=True, or give each a tensor of its own"
        )
    return {name: tensor for name, tensor in named.items() if name in kept}


def _check_tied(module: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    tied: object = getattr(module, "all_tied_weights_keys", None)
    config = module.config if isinstance(module, _HasConfig) else None
    if not isinstance(tied, Mapping) or not getattr(config, "tie_word_embeddings", False):
        return
    for name, first in cast("Mapping[str, str]", tied).items():
        if name in named and first in named and named[name] is not named[first]:
            raise LayoutMismatch(
                f"the config ties {name!r} to {first!r}, the module holds two tensors: call tie_weights() before it is"
                " sharded, and shard both in one group, or set tie_word_embeddings=False"
            )


def slices(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> tuple[Slice, ...]:
    """What the checkpoint consists of, given the whole shapes of `stored_tensors`. Pure bookkeeping, no data.

    Raises `UnsupportedModel` for a conversion that is more than slicing.
    """
    revert = _reverter(module)
    if revert is None:
        _check_fused(shapes)
        return tuple(Slice.whole(name, shape) for name, shape in shapes.items())
    blank = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    owners = {_storage(tensor): name for name, tensor in blank.items()}
    with _Uncopied():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        try:
            stored = revert(dict(blank))
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedModel(
                "the checkpoint's tensors are more than slices of those in memory: use FullTensorSource, which has "
                f"transformers convert whole tensors ({error})"
            ) from error
    found: list[Slice] = []
    for name, tensor in stored.items():
        source = owners.get(_storage(tensor))
        if source is None:
            raise UnsupportedModel(
                f"{name!r} is made of several tensors or by arithmetic, only slices are read: use FullTensorSource"
            )
        found.append(_slice(name, tensor, source, tuple(shapes[source])))
    _check_complete(found, shapes)
    return tuple(found)


def _reverter(module: nn.Module) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """What transformers itself does to get the checkpoint's names; None for modules that are not its own."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel  # noqa: PLC0415  # only where the trainer has it

    if not isinstance(unwrapped(module), PreTrainedModel):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415
    except ImportError:  # before 5: names in memory are those of the checkpoint
        return None

    # transformers looks conversions up by the classes of the parts, which fully_shard changed.
    plain = cast("PreTrainedModel", without_wrappers(module))

    def revert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return cast("dict[str, torch.Tensor]", revert_weight_conversion(plain, tensors))

    return revert


def revert(module: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, of whole tensors in memory: what transformers itself would save."""
    reverter = _reverter(module)
    return tensors if reverter is None else reverter(tensors)


class _Uncopied(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its registration is untyped in torch
    """Under it a copy is the view that it would be a copy of, so that offset and strides survive."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    """Identity of a storage that has no data, and so no address."""
    return cast("int", tensor.untyped_storage()._cdata)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _slice(name: str, tensor: torch.Tensor, source: str, whole: tuple[int, ...]) -> Slice:
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    origin: list[int] = []
    rest = tensor.storage_offset()
    for stride in strides:
        origin.append(rest // stride)
        rest %= stride
    axes = tuple(
        _axis(name, size, stride, strides, whole) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    piece = Slice(name, tuple(tensor.shape), source, tuple(origin), axes)
    if not _inside(piece, whole):
        raise UnsupportedModel(f"{name!r} is no slice of {source!r} {whole}: use FullTensorSource")
    return piece


def _axis(name: str, size: int, stride: int, strides: Sequence[int], whole: Sequence[int]) -> Axis:
    """The source dimension that a stride walks along: the outermost that it is a multiple of."""
    for dim, unit in enumerate(strides):
        if whole[dim] > 1 and stride % unit == 0 and (stride // unit) * (size - 1) < whole[dim]:
            return Axis(dim, stride // unit)
    if size == 1:
        return Axis(0, 1)
    raise UnsupportedModel(f"{name!r} is no slice of a tensor in memory: use FullTensorSource")


def _inside(piece: Slice, whole: Sequence[int]) -> bool:
    used = [axis.source for axis, size in zip(piece.axes, piece.shape, strict=True) if size > 1]
    last = list(piece.origin)
    for axis, size in zip(piece.axes, piece.shape, strict=True):
        last[axis.source] += axis.step * (size - 1)
    return len(used) == len(set(used)) and all(at < size for at, size in zip(last, whole, strict=True))


def _check_complete(found: Sequence[Slice], shapes: Mapping[str, Sequence[int]]) -> None:
    """Slices of a tensor do not overlap, so their sizes prove that nothing of it is left out."""
    taken: dict[str, int] = {}
    for each in found:
        taken[each.source] = taken.get(each.source, 0) + prod(each.shape)
    for name, shape in shapes.items():
        if taken.get(name, 0) != prod(shape):
            raise UnsupportedModel(
                f"the checkpoint holds {taken.get(name, 0)} elements of {name!r} {tuple(shape)}, which has "
                f"{prod(shape)}: transformers' conversion of this model is not known here"
            )


def _check_fused(shapes: Mapping[str, Sequence[int]]) -> None:
    for name, shape in shapes.items():
        if "experts." in name and name.endswith(("gate_up_proj", "down_proj")) and len(shape) == 3:
            raise UnsupportedModel(
                f"{name!r} holds all experts in one tensor, checkpoints name each: only"
                " modules of transformers 5 say how"
            )
