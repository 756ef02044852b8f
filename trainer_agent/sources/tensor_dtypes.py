"""The dtype in which each tensor of a checkpoint is served: one for most, others for those that releases keep apart.

Releases keep some tensors in float32 beside a model in 16 bits: routers, biases of experts, A_log. The checkpoint that
engines serve says which. A master in float32 then gives all of its bits; a tensor that the trainer holds in fewer bits
is widened, which changes no value. Only headers of files are read, never weights.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.tensors import main_dtype, stored_files, stored_tensors

from ..source import SERVABLE_DTYPES, LayoutMismatch, check_dtype

Served: TypeAlias = "Path | str | Mapping[str, str | torch.dtype]"
"""The folder of the checkpoint that engines serve, or dtypes by the names of its tensors."""


class TensorDtypes:
    """The dtypes that a source was asked to serve in."""

    def __init__(self, dtype: torch.dtype | None = None, served: Served | None = None) -> None:
        """`dtype` stands for the dtype that most of `served` have; what is kept in another one there stays so.

        Raises `UnsupportedModel` for a dtype that parameters cannot be cast to, and `LayoutMismatch` for a folder whose
        files cannot be read.
        """
        self.dtype: str | None = None
        if dtype is not None:
            self.dtype = str(dtype).removeprefix("torch.")
            check_dtype(self.dtype, "dtype=")
        self._named: Mapping[str, str] = {}
        if isinstance(served, Mapping):
            self._named = {name: str(each).removeprefix("torch.") for name, each in served.items()}
            for name, each in self._named.items():
                check_dtype(each, f"served={{{name!r}: ..}}")
        elif served is not None:
            self._named = _stored_dtypes(Path(served), self.dtype)

    def __bool__(self) -> bool:
        """True where tensors have dtypes by their names."""
        return bool(self._named)

    def of(self, name: str, otherwise: str) -> str:
        """The dtype of the checkpoint's tensor `name`; `otherwise` where nothing names it, or it has no fraction."""
        return self._named.get(name, otherwise) if otherwise in SERVABLE_DTYPES else otherwise


def _stored_dtypes(folder: Path, main: str | None) -> dict[str, str]:
    """Dtypes by the files of `folder`; where `main` is given, it stands for the dtype of most elements."""
    try:
        stored = stored_tensors(folder)
    except ManifestError as error:
        raise LayoutMismatch(f"{error}: give served= the folder of the checkpoint that engines serve") from error
    if not stored:
        raise LayoutMismatch(
            f"there are no safetensors files in {folder}, or some of those that its index names are missing, and they"
            " say in which dtype each tensor is served: give served= the folder of the checkpoint that engines serve,"
            " or the dtypes by name"
        )
    found = {name: place.spec.dtype for name, place in stored.items() if place.spec.dtype in SERVABLE_DTYPES}
    if main is None:
        return found
    most = main_dtype(place.spec for place in stored.values())
    return {name: main if dtype == most else dtype for name, dtype in found.items()}


def has_files(folder: Path) -> bool:
    """Whether all of a checkpoint's files are in `folder`, and not its config and index alone."""
    try:
        return bool(paths := stored_files(folder)) and all(path.is_file() for path in paths)
    except (OSError, ValueError):
        return False


def transformers_class(architecture: str) -> type | None:
    """The class of this name, where this process has imported transformers and that has one."""
    try:
        found: object = getattr(sys.modules.get("transformers"), architecture, None)
    except (ImportError, RuntimeError):  # a class whose own dependencies are missing, or of another torch
        return None
    return found if isinstance(found, type) else None


def cast_dtype(model: object, name: str, own: str, dtype: str | None) -> str:
    """Dtype in which a floating-point tensor of `own` dtype is served where ``dtype=`` is given, and nothing else.

    `model` is a module, or a class of transformers, that may keep some tensors in float32.
    """
    if dtype is None or own == dtype:
        return own
    return "float32" if kept_in_float32(model, name, dtype) else dtype


def kept_in_float32(model: object, name: str, dtype: str) -> bool:
    """Whether transformers keeps the tensor `name` in float32 in a model of `dtype`, as `model` or its class says.

    ``_keep_in_fp32_modules`` is for float16 alone, ``_keep_in_fp32_modules_strict`` for any 16 bits.
    """
    lists = {
        "float16": ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        "bfloat16": ("_keep_in_fp32_modules_strict",),
    }
    parts = [part for each in lists.get(dtype, ()) for part in getattr(model, each, None) or ()]
    return any(re.search(part.replace("*", ".*"), name) for part in parts)  # as transformers looks for them
