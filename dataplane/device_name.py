"""Which device: an index means another GPU in another process, a GPU's uuid means the same one everywhere."""

from __future__ import annotations

import torch


def device_name(device: torch.device) -> str:
    """The uuid of a GPU; the type of any other device, such as ``cpu``."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def readable_peers(device: torch.device) -> tuple[str, ...]:
    """The other GPUs, visible to this process, whose memory `device` reads directly."""
    if device.type != "cuda":
        return ()
    others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()) if index != device.index)
    return tuple(device_name(other) for other in others if torch.cuda.can_device_access_peer(device, other))
