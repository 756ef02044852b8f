"""Which exporter shares the memory of a device."""

from __future__ import annotations

from pathlib import Path

import torch

from .errors import NotExportable
from .host_export import HostExporter
from .region import Exporter


def exporter_for(device: torch.device, runtime_dir: Path, channel: str, holder: int) -> Exporter:
    """The exporter of rank `holder` for tensors on `device`. Raises `NotExportable` for a device that has none."""
    if device.type == "cpu":
        return HostExporter(runtime_dir, channel, holder)
    raise NotExportable(f"memory of {device} cannot be shared yet: add another transport after direct")
