"""GPU identity across processes: an index means another GPU in another process, a uuid the same one everywhere."""

from __future__ import annotations

import os
from typing import Final

import torch

NCCL_HOSTID: Final = "NCCL_HOSTID"
"""NCCL's own variable: processes with other values count as other hosts, whatever GPU they share."""


def device_name(device: torch.device) -> str:
    """The uuid of a GPU; the type of any other device, such as ``cpu``."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def nccl_gpu_id(gpu: str, nccl_host: str) -> str:
    """The identity of a GPU as NCCL sees it, which takes no two ranks on one. Empty for a CPU.

    `nccl_host` is the value of `NCCL_HOSTID`, empty where it is not set.
    """
    if gpu == "cpu":
        return ""
    return f"{nccl_host}/{gpu}" if nccl_host else gpu


def nccl_gpu_id_here(gpu: str) -> str:
    """`nccl_gpu_id` with this process's environment."""
    return nccl_gpu_id(gpu, os.environ.get(NCCL_HOSTID, ""))


def readable_peers(device: torch.device) -> tuple[str, ...]:
    """Uuids of the other GPUs, visible to this process, whose memory `device` reads directly."""
    if device.type != "cuda":
        return ()
    others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()) if index != device.index)
    return tuple(device_name(other) for other in others if torch.cuda.can_device_access_peer(device, other))
