"""A torch DCP checkpoint as FSDP trainers write it, read by the names that its Hugging Face config gives.

The model is built from the config without memory, which gives the names of its tensors in memory and in checkpoints
(checkpoint_conversion.py). The names of the files are one or the other, below one prefix (``model.``, ``app.model.``
and so on). Trainers save more than the model: an optimizer, an average of the weights (EMA), a reference model. A
prefix with all of the model's names below it, and no others, is a copy of the model; among several the user chooses.
A whole tensor in memory is on the host only while buckets are cut from it.

DCP's ``.metadata`` is a pickle, which torch loads: its writer can run code here. A setting must allow it.
"""

# torch's checkpointing and transformers leave much untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from weightbus.dataplane.tensors import TensorSpec

from ..assembly import DTYPES
from ..machine import BadCheckpoint, UnfinishedCheckpoint
from ..source import AssemblyFailed
from ..sources import Slice, slices, stored_tensors
from .checkpoint_folder import CorruptCheckpoint, changed, fingerprint

METADATA: Final = ".metadata"
"""The file that DCP writes last."""
_COUNTS: Final = re.compile(r"^(?:num|n)_(?:.*_)?(layers?|experts)$")
_FLOATS: Final = ("bfloat16", "float16", "float32", "float64")
"""dtypes of weights. 8-bit formats are excluded: they are incomplete without scales."""


class DcpFiles:
    """A torch DCP checkpoint. Satisfies `Checkpoint`."""

    def __init__(self, folder: Path, model: str, config: Mapping[str, Any], prefix: str = "") -> None:
        """Raises `UnfinishedCheckpoint` or `BadCheckpoint`. `prefix` is that of the keys, if there may be several."""
        self.model = model
        self.config = config
        self._folder = folder
        self._opened = fingerprint(folder)
        saved = _saved_tensors(folder)
        _check_counts(folder, config, saved)
        form = _form(folder, config)
        self._slices, found = _named(folder, form, saved, prefix)
        self._keys = {each.source: found + each.source for each in self._slices}
        self._saved = {source: saved[key] for source, key in self._keys.items()}
        _check_tied(folder, form, found, saved)
        self.tensors = tuple(
            TensorSpec(each.tensor, self._served(folder, each, form), each.shape) for each in self._slices
        )
        self._by_name = {each.tensor: each for each in self._slices}
        self._left: dict[str, int] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    def read(self, wanted: Sequence[TensorSpec], out: torch.Tensor) -> None:
        """Load the whole tensors that are missing, cut slices from them, and free what is used up."""
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

    def check(self) -> None:
        """Compare names, sizes and times of the files. Deleted files were read before, or raised an error."""
        if (self._folder / METADATA).is_file() and fingerprint(self._folder) != self._opened:
            raise AssemblyFailed(changed(self._folder))

    def close(self) -> None:
        """Free the loaded tensors."""
        self._loaded.clear()

    def _served(self, folder: Path, cut: Slice, form: _Form) -> str:
        """Dtype of one tensor: the config's for a parameter (trainers often keep float32), its own for a buffer."""
        stored = str(self._saved[cut.source].properties.dtype).removeprefix("torch.")
        if stored not in _FLOATS and stored != form.buffers.get(cut.source):
            raise BadCheckpoint(folder, f"{cut.source!r} is saved as {stored}; read are {', '.join(_FLOATS)}")
        if not form.dtype or cut.tensor not in form.cast:
            return stored
        if form.dtype not in _FLOATS:
            raise BadCheckpoint(folder, f"its config has dtype {form.dtype!r}; one of {', '.join(_FLOATS)} is expected")
        return form.dtype

    def _load(self, sources: Iterable[str]) -> None:
        blank = {
            source: torch.empty(self._saved[source].size, dtype=self._saved[source].properties.dtype)
            for source in sources
        }
        if not blank:
            return
        _load(self._folder, {self._keys[source]: tensor for source, tensor in blank.items()})
        self._loaded |= blank
        for source in blank:
            self._left[source] = sum(each.source == source for each in self._slices)


def _load(folder: Path, state: dict[str, Any]) -> None:
    """Read tensors by their keys. Raises `AssemblyFailed`, or `CorruptCheckpoint`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process reads it is meant
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    except CheckpointException as error:  # no Exception, which it wraps together with whatever else ended the load
        _raise_unreadable(folder, [cause for cause, _ in error.failures.values()])
    except Exception as error:  # noqa: BLE001  files that contradict their metadata make torch raise anything
        _raise_unreadable(folder, [error])


def _check_tied(folder: Path, form: _Form, prefix: str, saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Check that tensors which the config ties, and which the files hold twice, are equal: one of them is served.

    Raises `BadCheckpoint` when they differ, and `UnfinishedCheckpoint` when they cannot be read now.
    """
    for name, owner in form.tied.items():
        stored = next((each.tensor for each in form.slices if each.source == owner), owner)
        one = prefix + (owner if prefix + owner in saved else stored)
        other = prefix + name
        if one == other or other not in saved or one not in saved:
            continue
        state = {key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype) for key in (one, other)}
        try:
            _load(folder, state)
        except CorruptCheckpoint as error:
            raise BadCheckpoint(folder, str(error)) from error
        except AssemblyFailed as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from error
            raise UnfinishedCheckpoint(folder, str(error)) from error
        first, second = (state[key].to(state[one].dtype).flatten().view(torch.uint8) for key in (one, other))
        if not torch.equal(first, second):  # by bytes: what is no number is not equal to itself
            raise BadCheckpoint(
                folder,
                f"its config ties {other!r} to {one!r}, and they are saved with different weights: save the model "
                f"with its weights tied, or with tie_word_embeddings false in its config",
            )


def _raise_unreadable(folder: Path, causes: Sequence[BaseException]) -> NoReturn:
    """Raise `AssemblyFailed` for missing or unreadable files, which may come back; `CorruptCheckpoint` for others."""
    for cause in causes:
        if not isinstance(cause, Exception):  # an interrupt
            raise cause
    reason = f"{folder} cannot be read: {'; '.join(f'{type(cause).__name__}: {cause}' for cause in causes)}"
    gone = not (folder / METADATA).is_file() or any(isinstance(cause, OSError) for cause in causes)
    kind = AssemblyFailed if gone else CorruptCheckpoint
    raise kind(reason) from (causes[0] if causes else None)


def _saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a complete checkpoint, by key."""
    if not (folder / METADATA).is_file():
        raise UnfinishedCheckpoint(folder, f"there is no {METADATA}, which is written last")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except OSError:
        raise
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
    """Names and shapes of a config's model, in memory and in checkpoints."""

    slices: tuple[Slice, ...]
    shapes: dict[str, tuple[int, ...]]
    """Shapes of its tensors in memory, by name."""
    cast: frozenset[str]
    """Names of checkpoint tensors that are parameters: they are served in `dtype`."""
    dtype: str
    """dtype in the config; empty where it names none."""
    buffers: dict[str, str]
    """dtypes of the tensors in memory that are no parameters, by name."""
    tied: dict[str, str]
    """Name in memory of each tied tensor -> name in memory of the tensor that the checkpoint holds."""


def _named(
    folder: Path, form: _Form, saved: Mapping[str, TensorStorageMetadata], wanted: str
) -> tuple[tuple[Slice, ...], str]:
    """Slices of the checkpoint's tensors, and the prefix of its keys."""
    stored = tuple(Slice.whole(each.tensor, each.shape) for each in form.slices)
    forms = ((form.slices, form.shapes), (stored, {each.tensor: each.shape for each in stored}))
    try:
        index, prefix = chosen([shapes for _, shapes in forms], saved, wanted)
        cuts, shapes = forms[index]
        for name, shape in shapes.items():
            found = tuple(saved[prefix + name].size)
            if found != shape:
                raise BadCheckpoint(folder, f"{prefix + name!r} has shape {found}, its config gives {shape}")
        check_complete(saved, prefix, shapes.keys() | form.tied.keys())
    except NoSuchModel as error:
        raise BadCheckpoint(folder, str(error)) from error
    return cuts, prefix


def _check_counts(folder: Path, config: Mapping[str, Any], saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise `BadCheckpoint` for a config with more layers or experts than the saved tensors can hold.

    The model is built to learn its names, and one with millions of layers would take hours. Every layer has a tensor of
    its own, and every expert a tensor or a row of one.
    """
    most_experts = max([len(saved), *(size for tensor in saved.values() for size in tensor.size)])
    for key, value in config.items():
        if isinstance(value, dict):
            _check_counts(folder, cast("dict[str, Any]", value), saved)
        elif isinstance(value, int) and (counted := _COUNTS.match(key)):
            most = most_experts if counted[1] == "experts" else len(saved)
            if value > most:
                reason = f"its config says {key}={value}, its {len(saved)} tensors have room for {most} at most"
                raise BadCheckpoint(folder, reason)


def _form(folder: Path, config: Mapping[str, Any]) -> _Form:
    """Build the config's model without memory, and read its names in memory and in checkpoints."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # only where DCP folders are read
    except ImportError as error:
        raise BadCheckpoint(folder, "DCP folders are named by transformers, which is not installed") from error
    try:
        known = {key: value for key, value in config.items() if key != "model_type"}
        parsed = AutoConfig.for_model(str(config.get("model_type")), **known)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(parsed)
        tensors = stored_tensors(module)
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        cuts = slices(module, shapes)
    except Exception as error:  # a config may make the code of a model raise anything
        reason = f"{type(error).__name__}: {error}"[:300]  # transformers may list all models that it knows
        raise BadCheckpoint(folder, f"transformers cannot build the model of its config: {reason}") from error
    parameters = {name for name, _ in module.named_parameters()}
    dtype = config.get("dtype") or config.get("torch_dtype") or ""
    return _Form(
        slices=cuts,
        shapes=shapes,
        cast=frozenset(each.tensor for each in cuts if each.source in parameters),
        dtype=str(dtype).removeprefix("torch."),
        buffers={
            name: str(each.dtype).removeprefix("torch.") for name, each in tensors.items() if name not in parameters
        },
        tied=_tied(module, tensors),
    )


def _tied(module: torch.nn.Module, stored: Mapping[str, torch.Tensor]) -> dict[str, str]:
    owners = {id(tensor): name for name, tensor in stored.items()}
    state = cast("dict[str, torch.Tensor]", module.state_dict(keep_vars=True))
    return {name: owners.get(id(tensor), name) for name, tensor in state.items() if name not in stored}


def _cut(whole: torch.Tensor, cut: Slice) -> torch.Tensor:
    strides = whole.stride()
    offset = sum(at * stride for at, stride in zip(cut.origin, strides, strict=True))
    return whole.as_strided(cut.shape, [strides[axis.source] * axis.step for axis in cut.axes], offset)


_SHOWN: Final = 5


class NoSuchModel(Exception):
    """The keys do not hold the model, or several of it. The message has the keys found, and advice."""


def normal(prefix: str) -> str:
    """A user's prefix in the form of the keys: ``model`` and ``model.`` are the same, ``.`` is the empty prefix."""
    bare = prefix.strip(".")
    return f"{bare}." if bare else ""


def chosen(forms: Sequence[Collection[str]], keys: Collection[str], wanted: str) -> tuple[int, str]:
    """Index of the form whose names are among `keys`, and the prefix of these names.

    Each of `forms` has all names of the model. `wanted` is the user's prefix; without it there must be one prefix only.
    Of two forms below the same prefix the earlier is chosen. Raises `NoSuchModel`.
    """
    fitting: dict[str, int] = {}
    for index, names in enumerate(forms):
        for prefix in prefixes(names, keys):
            fitting.setdefault(prefix, index)
    if wanted:
        if (prefix := normal(wanted)) in fitting:
            return fitting[prefix], prefix
        raise NoSuchModel(
            f"the model of its config is not below the prefix {wanted!r}; below these it is: {_listed(fitting)}"
        )
    if len(fitting) > 1:
        raise NoSuchModel(
            f"the model of its config is found below {len(fitting)} prefixes ({_listed(fitting)}):"
            " say which is to be served with --dcp-prefix"
        )
    if not fitting:
        names = forms[0]
        raise NoSuchModel(
            f"the model of its config has {len(names)} tensors, such as {next(iter(names))!r}, and they are not all"
            f" among its keys ({', '.join(sorted(keys)[:3])} and so on)"
        )
    prefix, index = fitting.popitem()
    return index, prefix


def prefixes(names: Collection[str], keys: Collection[str]) -> list[str]:
    """Prefixes below which `keys` hold all of `names`."""
    first = next(iter(names))
    candidates = {key.removesuffix(first) for key in keys if key == first or key.endswith("." + first)}
    return sorted(each for each in candidates if all(each + name in keys for name in names))


def check_complete(keys: Iterable[str], prefix: str, known: Collection[str]) -> None:
    """Raise `NoSuchModel` for keys of the model beyond `known`: more layers, or another head, than in its config.

    Without a prefix other models may be saved beside it: then only keys that begin like its own names are checked.
    """
    inside = (prefix,) if prefix else tuple({name.split(".")[0] + "." for name in known})
    odd = sorted({key for key in keys if key.startswith(inside)} - {prefix + name for name in known})
    if odd:
        more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        raise NoSuchModel(f"{', '.join(map(repr, odd[:_SHOWN]))}{more}: not in the model of its config")


def _listed(prefixes: Iterable[str]) -> str:
    return ", ".join(repr(each or ".") for each in sorted(prefixes)) or "none"
