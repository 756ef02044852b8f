"""The copy engine of a device, and the number of streams for a GPU's hardware copy engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch

from ..errors import Unsupported
from .copy_cuda import CudaCopyEngine
from .copy_engine import CopyEngine
from .copy_torch import TorchCopyEngine

DEFAULT_COPY_STREAMS: Final = 4
"""Streams on which copy engines read a peer's memory, unless the environment says otherwise."""
COPY_STREAMS_SETTING: Final = "WEIGHTBUS_WORKER_BRANCHES"
"""Environment variable of the engine's server."""
MAX_COPY_STREAMS: Final = 32


def copy_streams_setting(environment: Mapping[str, str]) -> int:
    """Streams for copy engines that read from a peer; 0: a kernel copies everything. Raises `Unsupported`."""
    asked = environment.get(COPY_STREAMS_SETTING, "")
    if not asked:
        return DEFAULT_COPY_STREAMS
    if not asked.isascii() or not asked.isdecimal() or int(asked) > MAX_COPY_STREAMS:
        raise Unsupported(
            f"{COPY_STREAMS_SETTING} in the server's environment is {asked!r}, expected a whole number from 0 (a kernel"
            f" copies all) to {MAX_COPY_STREAMS}: correct it, and start the server again"
        )
    return int(asked)


def copy_engine_for(device: torch.device, streams: int = 0, remote: Collection[int] = ()) -> CopyEngine:
    """The copy engine of a device. Raises `Unsupported` for a device without one.

    On a GPU, long runs out of peer memory, at the addresses `remote`, go through hardware copy engines on `streams`
    streams.
    """
    if device.type == "cpu":
        return TorchCopyEngine()
    if device.type == "cuda":
        return CudaCopyEngine(device, streams, remote)
    raise Unsupported(f"there is no copy engine for {device}: let this engine take the local transport")
