"""Bridge mode: a Megatron-core model of a family without a table, converted by Megatron-Bridge.

`MegatronSource` falls back to it by itself. Every rank then has whole tensors, one after another, as for any other
exporter; `direct` and `sends` give way to buckets. The checks of config_checks.py are not made: whether the trained
model is the served one is left to Megatron-Bridge. No other module imports it, and only a call does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from weightbus.control.log import get_log

from ...source import UnsupportedModel
from ..collective_source import DEFAULT_TIMEOUT_S
from ..exported import Bridge, ExportedSource, bridge_exporter
from ..tensor_dtypes import has_files

_log = get_log(__name__)

PACKAGE: Final = "megatron-bridge"


class _AutoBridge(Protocol):
    """The class methods of Megatron-Bridge's `AutoBridge` that are called."""

    def from_hf_pretrained(self, path: str) -> Bridge:
        """The bridge of a checkpoint with its files."""
        ...

    def from_hf_config(self, config: object) -> Bridge:
        """The bridge of a checkpoint whose config alone is at hand."""
        ...


class _AutoConfig(Protocol):
    """The methods of transformers' `AutoConfig` that are called."""

    def from_pretrained(self, folder: str) -> object:
        """The config of a folder."""
        ...

    def for_model(self, model_type: str, **said: object) -> object:
        """The config of these fields."""
        ...


class BridgedSource(ExportedSource):
    """The live weights of one Megatron-core model, exported by Megatron-Bridge. Satisfies `Source`."""

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        *,
        architecture: str,
        served: Path | Mapping[str, Any],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Export once to learn the tensors that are served. Collective; errors as those of `ExportedSource`.

        Args:
            model_chunks: this rank's chunks, wrapped or not.
            architecture: architecture that the served checkpoint's config names.
            served: that checkpoint: its folder, or the content of its ``config.json``.
            dtype: dtype of floating-point tensors; by default each as the trainer keeps it. Tensors that the files of
                `served` keep in another dtype than most are served in that.
            device: as in `MegatronSource`.
            group: as in `MegatronSource`.
            timeout_s: as in `ExportedSource`.
        """
        self.served = served
        """The checkpoint that engines serve: its folder, or the content of its ``config.json``."""
        export = _Exporter(lambda: bridge_exporter(bridge_of(architecture, served), model_chunks))
        files = served if isinstance(served, Path) and has_files(served) else None
        super().__init__(
            export, model=architecture, dtype=dtype, served=files, device=device, group=group, timeout_s=timeout_s
        )
        if self.root:
            _log.info("bridge_mode", family=architecture, converted_by=PACKAGE, version=_version())


class _Exporter:
    """An exporter that is made by its first call, so that a rank without Megatron-Bridge tells the others."""

    def __init__(self, make: Callable[[], Callable[[], Iterator[tuple[str, torch.Tensor]]]]) -> None:
        self._make = make
        self._export: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = None

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._export = self._export or self._make()
        return self._export()


def bridge_of(architecture: str, served: Path | Mapping[str, Any]) -> Bridge:
    """The `AutoBridge` of the served checkpoint. Raises `UnsupportedModel` where there is none."""
    try:
        module = importlib.import_module("megatron.bridge")
    except ImportError as error:
        raise UnsupportedModel(
            f"no table of MegatronSource knows {architecture!r}, and Megatron-Bridge, which may convert it, cannot be "
            f"imported ({error}): install it with pip install {PACKAGE}, train with FSDP2 and publish from FSDPSource, "
            f"or give ExportedSource an exporter of your own"
        ) from error
    found = cast("_AutoBridge", module.AutoBridge)
    try:
        if isinstance(served, Path) and any(served.glob("*.safetensors")):
            return found.from_hf_pretrained(str(served))
        return found.from_hf_config(_transformers_config(served))
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(
            f"no table of MegatronSource knows {architecture!r}, and Megatron-Bridge {_version()} does not convert it "
            f"({reason[:200]}): install a newer {PACKAGE}, train with FSDP2 and publish from FSDPSource, or give "
            f"ExportedSource an exporter of your own"
        ) from error


def _version() -> str:
    return str(getattr(importlib.import_module("megatron.bridge"), "__version__", "of an unknown version"))


def _transformers_config(served: Path | Mapping[str, Any]) -> object:
    """The config as transformers has it, which comes with Megatron-Bridge."""
    configs = cast("_AutoConfig", importlib.import_module("transformers").AutoConfig)
    if isinstance(served, Path):
        return configs.from_pretrained(str(served))
    said = dict(served)
    return configs.for_model(said.pop("model_type", ""), **said)
