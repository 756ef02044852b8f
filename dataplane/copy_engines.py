"""Which engine copies on a device."""

from __future__ import annotations

import torch

from .copy_cuda import CudaEngine
from .copy_engine import CopyEngine
from .copy_torch import TorchEngine
from .errors import Unsupported


def engine_for(device: torch.device) -> CopyEngine:
    """The engine of a device. Raises `Unsupported` for one that has none."""
    if device.type == "cpu":
        return TorchEngine()
    if device.type == "cuda":
        return CudaEngine(device)
    raise Unsupported(f"there is no copy engine for {device}: let this engine take the local transport")
