"""Topology of a trainer's ranks, and the transports it lacks: what rank 0 tells the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import torch

from weightbus.control.machine import PREFERRED
from weightbus.control.protocol import (
    MissingTransport,
    NetworkInterface,
    PeerAccess,
    ProcessLocation,
    RequestId,
    Topology,
    TransportKind,
)
from weightbus.dataplane.memory import GpuSurveyFailed, device_name, gpus_visible_here, nccl_gpu_id_here
from weightbus.dataplane.processes import (
    files_identity,
    folder_identity,
    host_identity,
    network_identity,
    network_interfaces,
)
from weightbus.dataplane.transports import LoadedBy, registry as transports

from ..settings import TrainerSettings

_NO_KEY: Final = RequestId("filled-in-by-the-client")


def location_of(rank: int, device: torch.device) -> ProcessLocation:
    """Location of this process, whose weights are on `device`."""
    name = device_name(device)
    reach = None if device.type != "cuda" else _reach(name)
    gpu_id = "" if (gpu_id := nccl_gpu_id_here(name)) == name else gpu_id
    return ProcessLocation(rank=rank, host=host_identity(), device=name, reach=reach, nccl_gpu_id=gpu_id)


def topology_of(
    settings: TrainerSettings,
    kinds: tuple[TransportKind, ...],
    places: tuple[ProcessLocation, ...],
    *,
    runtime_dir: Path,
    refusals: dict[TransportKind, str],
) -> Topology:
    """The `Topology` message. `kinds` are offered; `refusals` say why transports that were wanted are not.

    Which GPUs reach each other is told for rank 0's own host: engines on other hosts read no rank's memory.
    """
    here = host_identity()
    return Topology(
        request=_NO_KEY,
        network=network_identity(),
        files=files_identity(),
        folder=folder_identity(runtime_dir),
        address=settings.host,
        places=tuple(each if each.host == here else msgspec.structs.replace(each, reach=None) for each in places),
        nics=tuple(
            NetworkInterface(name=each.name, addresses=each.addresses, mbps=each.mbps) for each in network_interfaces()
        ),
        lacking={kind: _lack(kind, settings, refusals) for kind in PREFERRED if kind not in kinds},
        supports_deferred_digests=settings.open_tables,
    )


def _lack(kind: TransportKind, settings: TrainerSettings, refusals: dict[TransportKind, str]) -> MissingTransport:
    if kind not in settings.preferences():
        return MissingTransport(
            found="its setting transport leaves it out", needed=f"add {kind.value} to it, or leave it unset"
        )
    if transports.by_name(kind).loaded_by is LoadedBy.FILES:
        return MissingTransport(
            found="it has no checkpoint_dir", needed="set checkpoint_dir to a folder that both sides see"
        )
    found = refusals.get(kind, "its memory cannot be given in place")
    needed = "what the reason names" if transports.by_name(kind).in_place else ""
    return MissingTransport(found=found[:_TEXT], needed=needed)


def _reach(name: str) -> dict[str, PeerAccess] | None:
    try:
        own = [each for each in gpus_visible_here() if each.uuid == name]
    except GpuSurveyFailed:
        return None
    return {other: PeerAccess(word) for other, word in own[0].reach.items()} if own else None


_TEXT: Final = 2048
