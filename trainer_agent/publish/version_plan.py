"""What a trainer of a checkpoint would publish, said before there is a trainer: from config and headers, no weights.

It is made as a publication makes it: the tensors of a source, quantized as the served checkpoint requires
(`as_served`), and a manifest with what is left (`VersionLayout`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from weightbus.dataplane.tensors import Left, Manifest, TensorSpec, covering, main_dtype

from ..assembly import DTYPES
from ..checkpoints import checkpoint_folder as folders, open_checkpoint
from ..machine import UnfinishedCheckpoint
from ..quantized import as_served
from ..settings import TrainerSettings
from ..source import SERVABLE_DTYPES, AssemblyFailed, UnsupportedModel, check_dtype
from ..sources import CollectiveSource, SingleRank, TensorDtypes, cast_dtype, has_files, transformers_class
from ..sources.megatron import HFModel, has_table, hf_tensors
from .bucket_staging import VersionLayout

_FLOATS: Final = frozenset(SERVABLE_DTYPES)


class SourceKind(enum.StrEnum):
    """How a trainer presents its model."""

    FILES = "files"
    """By the names in the checkpoint's files, from memory that engines can be given: FSDP2, a plain module."""
    EXPORTED = "exported"
    """By those names, tensor for tensor: an exporter such as Megatron-Bridge, `weightbus trainer-agent`."""
    MEGATRON = "megatron"
    """By the family's table over the config: `MegatronSource`. Without a table it is `EXPORTED`, by Megatron-Bridge."""

    @property
    def in_place(self) -> bool:
        """True if the source says where its tensors lie, as `direct` and `sends` need it."""
        return self is not SourceKind.EXPORTED


class PlannedVersion(msgspec.Struct, frozen=True):
    """What every version would be."""

    manifest: Manifest
    source: SourceKind
    trained: tuple[TensorSpec, ...]
    """The tensors as the trainer's checkpoint has them, before casts and quantization; without those that are left."""


class _PlannedSource(CollectiveSource):
    """A source on one process that has names and no weights."""

    device = torch.device("cpu")

    def __init__(self, model: str, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(SingleRank())
        self.model = model
        self.left: tuple[Left, ...] = ()
        self._tensors = tuple(tensors)

    def tensors(self) -> Sequence[TensorSpec]:
        return self._tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        del out
        raise AssemblyFailed(f"bucket {index} of {manifest.model} is planned only")


def planned_version(
    folder: Path, settings: TrainerSettings, kind: SourceKind | None, dtype: str, served: Path | None = None
) -> PlannedVersion:
    """The version that a trainer of the checkpoint in `folder` would publish with `settings`.

    Args:
        folder: the checkpoint; its config alone is enough for a family that has a table.
        settings: of the trainer. What their `left` covers is not trained.
        kind: how the model is presented; None: by its files, or by the table where there are none.
        dtype: the ``dtype=`` that the source is given; empty for none.
        served: the ``served=`` that it is given; `MegatronSource` knows it from the folder.

    Raises `BadCheckpoint` for a folder that does not tell, and `SourceError` for a model that cannot be served.
    """
    if dtype:
        check_dtype(dtype, "dtype")
    if kind is SourceKind.MEGATRON and not has_table(folders.read_config(folder, settings.hf_config_dir)):
        kind = SourceKind.EXPORTED
    found = None if kind is SourceKind.MEGATRON else _by_files(folder, settings, required=kind is not None)
    kind = SourceKind.MEGATRON if found is None else kind or SourceKind.FILES
    model, tensors = found or _by_table(folder, settings, dtype)
    trained = tuple(spec for spec in tensors if not covering(settings.left, spec.name))
    source = as_served(_PlannedSource(model, _as_sent(model, trained, folder, kind, dtype, served)), settings)
    return PlannedVersion(VersionLayout.of(source, settings).manifest, kind, trained)


def _as_sent(  # noqa: PLR0917  the arguments of `planned_version`
    model: str, trained: Sequence[TensorSpec], folder: Path, kind: SourceKind, dtype: str, served: Path | None
) -> list[TensorSpec]:
    """The tensors in the dtypes in which the source serves them."""
    asked, known = DTYPES[dtype] if dtype else None, served
    if kind is SourceKind.MEGATRON:
        named = main_dtype(trained)
        asked, known = DTYPES[named] if named else None, folder if has_files(folder) else None
    dtypes, found = TensorDtypes(asked, known), transformers_class(model)
    cast = None if kind is SourceKind.MEGATRON else dtypes.dtype
    return [
        msgspec.structs.replace(each, dtype=dtypes.of(each.name, cast_dtype(found, each.name, each.dtype, cast)))
        if each.dtype in _FLOATS
        else each
        for each in trained
    ]


def _by_files(folder: Path, settings: TrainerSettings, *, required: bool) -> tuple[str, Sequence[TensorSpec]] | None:
    try:
        checkpoint = open_checkpoint(folder, "", settings.hf_config_dir, dcp=False)
    except UnfinishedCheckpoint:
        if required or any(folder.glob("*.safetensors*")):
            raise
        return None
    checkpoint.close()
    return checkpoint.model, checkpoint.tensors


def _by_table(folder: Path, settings: TrainerSettings, dtype: str) -> tuple[str, Sequence[TensorSpec]]:
    model = HFModel.parse(folders.read_config(folder, settings.hf_config_dir))
    if not (named := dtype or model.dtype):
        raise UnsupportedModel(f"the config of {folder} names no dtype: give the one that the source is given (dtype)")
    return model.architecture, hf_tensors(model, named)
