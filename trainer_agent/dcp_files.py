"""A torch DCP checkpoint as FSDP trainers write it, read by the names that its Hugging Face config gives.

The model is built from the config without memory, which says what its tensors are called in memory and in checkpoints
(checkpoint_form.py). The names of the files are one or the other, below one prefix (``model.``, ``app.model.`` and so
on). A whole tensor in memory is on the host only while buckets are cut from it.

DCP's ``.metadata`` is a pickle, which torch reads: who may write it may run code here. That is asked for by a setting.
"""

# torch's checkpointing and transformers leave much untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from weightbus.dataplane.manifest import ITEM_BYTES, TensorSpec

from .assembly import DTYPES
from .checkpoint_form import Slice, slices, stored_tensors
from .errors import BadCheckpoint, UnfinishedCheckpoint
from .source import AssemblyFailed, SourceError

METADATA: Final = ".metadata"
"""Written by DCP after all other files."""


class DcpFiles:
    """A torch DCP checkpoint. Satisfies `Checkpoint`."""

    def __init__(self, folder: Path, model: str, config: Mapping[str, Any]) -> None:
        """Raises `UnfinishedCheckpoint` or `BadCheckpoint`."""
        self.model = model
        self.config = config
        self._folder = folder
        saved = _saved_tensors(folder)
        form = _form(folder, config)
        self._slices, prefix = _named(folder, form, saved)
        self._keys = {each.source: prefix + each.source for each in self._slices}
        self._saved = {source: saved[key] for source, key in self._keys.items()}
        self.tensors = tuple(
            TensorSpec(each.tensor, self._served(folder, each, form), each.shape) for each in self._slices
        )
        self._by_name = {each.tensor: each for each in self._slices}
        self._left: dict[str, int] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    def read(self, wanted: Sequence[TensorSpec], out: torch.Tensor) -> None:
        """Load what is not loaded yet, cut, and forget what is used up."""
        cuts = [self._by_name[spec.name] for spec in wanted]
        self._load({cut.source for cut in cuts} - self._loaded.keys())
        at = 0
        for spec, cut in zip(wanted, cuts, strict=True):
            target = out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
            target.copy_(_cut(self._loaded[cut.source], cut))
            at += spec.nbytes
            self._left[cut.source] -= 1
            if not self._left[cut.source]:
                del self._loaded[cut.source]

    def close(self) -> None:
        """Forget what is loaded."""
        self._loaded.clear()

    def _served(self, folder: Path, cut: Slice, form: _Form) -> str:
        """Trainers keep parameters in float32: what the config says is served. Buffers stay as they are."""
        stored = self._saved[cut.source].properties.dtype
        name = form.dtype if form.dtype and cut.tensor in form.cast and stored.is_floating_point else str(stored)
        name = name.removeprefix("torch.")
        if name not in ITEM_BYTES:
            raise BadCheckpoint(folder, f"{cut.tensor!r} has dtype {name}; these can travel: {', '.join(ITEM_BYTES)}")
        return name

    def _load(self, sources: Iterable[str]) -> None:
        blank = {
            source: torch.empty(self._saved[source].size, dtype=self._saved[source].properties.dtype)
            for source in sources
        }
        if not blank:
            return
        state: dict[str, Any] = {self._keys[source]: tensor for source, tensor in blank.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that one process reads it is meant
                load(state, storage_reader=FileSystemReader(self._folder), no_dist=True)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise AssemblyFailed(f"{self._folder} cannot be read: {error}") from error
        self._loaded |= blank
        for source in blank:
            self._left[source] = sum(each.source == source for each in self._slices)


def _saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a finished checkpoint, by key."""
    if not (folder / METADATA).is_file():
        raise UnfinishedCheckpoint(folder, f"there is no {METADATA}, which is written last")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # a pickle may raise whatever it likes
        raise BadCheckpoint(folder / METADATA, f"torch cannot read it: {type(error).__name__}: {error}") from error
    ends: dict[str, int] = {}
    for info in cast("Mapping[object, Any]", metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for file, end in ends.items():
        path = folder / file
        if not path.is_file() or path.stat().st_size < end:
            raise UnfinishedCheckpoint(folder, f"{file} is not there or shorter than {end} bytes")
    return {
        key: saved for key, saved in metadata.state_dict_metadata.items() if isinstance(saved, TensorStorageMetadata)
    }


class _Form(msgspec.Struct, frozen=True):
    """What the model of a config is called and how it looks."""

    slices: tuple[Slice, ...]
    shapes: dict[str, tuple[int, ...]]
    """Of its tensors in memory, by name."""
    cast: frozenset[str]
    """Tensors of the checkpoint that are parameters: they are served in `dtype`."""
    dtype: str
    tied: frozenset[str]
    """Names in memory of tensors that the checkpoint holds under another."""


def _named(folder: Path, form: _Form, saved: Mapping[str, TensorStorageMetadata]) -> tuple[tuple[Slice, ...], str]:
    """What the checkpoint consists of, and the prefix of its keys."""
    cuts, shapes = form.slices, form.shapes
    prefix = _prefix(list(shapes), saved)
    if prefix is None:
        cuts = tuple(Slice.whole(each.tensor, each.shape) for each in cuts)
        shapes = {each.tensor: each.shape for each in cuts}
        prefix = _prefix(list(shapes), saved)
    if prefix is None:
        shown = ", ".join(sorted(saved)[:3])
        raise BadCheckpoint(
            folder,
            f"the model of its config has {len(shapes)} tensors, such as {next(iter(shapes))!r}, and they are not all"
            f" among its keys ({shown} and so on)",
        )
    for name, shape in shapes.items():
        found = tuple(saved[prefix + name].size)
        if found != shape:
            raise BadCheckpoint(folder, f"{prefix + name!r} has shape {found}, its config gives {shape}")
    _check_complete(folder, saved, prefix, shapes.keys() | form.tied)
    return cuts, prefix


def _check_complete(folder: Path, saved: Iterable[str], prefix: str, known: Iterable[str]) -> None:
    """A model with more layers than its config says must not lose them. Beside the model others may be saved."""
    inside = tuple({prefix + name.split(".")[0] + "." for name in known})
    odd = sorted({key for key in saved if key.startswith(inside)} - {prefix + name for name in known})
    if odd:
        raise BadCheckpoint(folder, f"{odd[0]!r} and {len(odd) - 1} more are not in the model of its config")


def _form(folder: Path, config: Mapping[str, Any]) -> _Form:
    """How the model of the config names its tensors in memory and in checkpoints."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # only where DCP folders are read
    except ImportError as error:
        raise BadCheckpoint(folder, "DCP folders are named by transformers, which is not installed") from error
    try:
        known = {key: value for key, value in config.items() if key != "model_type"}
        parsed = AutoConfig.for_model(str(config.get("model_type")), **known)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(parsed)
        shapes = {name: tuple(each.shape) for name, each in stored_tensors(module).items()}
        cuts = slices(module, shapes)
    except (ImportError, ValueError, KeyError, TypeError, RuntimeError, SourceError) as error:
        reason = str(error)[:300]  # transformers may list all models that it knows
        raise BadCheckpoint(folder, f"transformers cannot build the model of its config: {reason}") from error
    parameters = {name for name, _ in module.named_parameters()}
    dtype = config.get("dtype") or config.get("torch_dtype") or ""
    return _Form(
        slices=cuts,
        shapes=shapes,
        cast=frozenset(each.tensor for each in cuts if each.source in parameters),
        dtype=str(dtype),
        tied=frozenset(module.state_dict()) - shapes.keys(),
    )


def _prefix(names: Sequence[str], saved: Mapping[str, TensorStorageMetadata]) -> str | None:
    """What stands before every one of `names` among the keys; None when nothing does."""
    candidates = sorted(
        {key.removesuffix(names[0]) for key in saved if key == names[0] or key.endswith("." + names[0])}
    )
    return next((each for each in candidates if all(each + name in saved for name in names)), None)


def _cut(whole: torch.Tensor, cut: Slice) -> torch.Tensor:
    strides = whole.stride()
    offset = sum(at * stride for at, stride in zip(cut.origin, strides, strict=True))
    return whole.as_strided(cut.shape, [strides[axis.source] * axis.step for axis in cut.axes], offset)
