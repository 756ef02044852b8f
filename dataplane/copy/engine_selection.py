"""Which engine copies on a device, and by how many branches of a GPU's own copy engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch

from ..errors import Unsupported
from .copy_cuda import CudaCopyEngine
from .copy_engine import CopyEngine
from .copy_torch import TorchCopyEngine

DEFAULT_COPY_STREAMS: Final = 4
"""Streams that copy engines read a peer's memory on, unless the environment says otherwise."""
COPY_STREAMS_SETTING: Final = "WEIGHTBUS_WORKER_BRANCHES"
"""In the environment of the engine's server, whose workers copy."""
MAX_COPY_STREAMS: Final = 32


def copy_streams_setting(environment: Mapping[str, str]) -> int:
    """On how many streams copy engines are to read from a peer; 0: a kernel copies all. Raises `Unsupported`."""
    asked = environment.get(COPY_STREAMS_SETTING, "")
    if not asked:
        return DEFAULT_COPY_STREAMS
    if not asked.isascii() or not asked.isdecimal() or int(asked) > MAX_COPY_STREAMS:
        raise Unsupported(
            f"{COPY_STREAMS_SETTING} in the server's environment is {asked!r}, expected a whole number from 0 (a kernel"
            f" copies all) to {MAX_COPY_STREAMS}: correct it, and start the server again"
        )
    return int(asked)


def copy_engine_for(device: torch.device, branches: int = 0, remote: Collection[int] = ()) -> CopyEngine:
    """The engine of a device. Raises `Unsupported` for one that has none.

    On a GPU, long runs out of regions on another one, whose addresses are `remote`, go through copy engines, on so many
    streams (`branches`), if any are asked for.
    """
    if device.type == "cpu":
        return TorchCopyEngine()
    if device.type == "cuda":
        return CudaCopyEngine(device, branches, remote)
    raise Unsupported(f"there is no copy engine for {device}: let this engine take the local transport")
