"""Topology of a server: the locations of its workers, and the transports that it cannot take.

A server does not report which GPUs it uses, but their indices among those that its processes see. So the GPU driver is
asked with the environment of such a process (gpu_topology.py). Locations that cannot be found out, such as those of a
server in another container, are not reported.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from weightbus.control.log import get_log
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
from weightbus.dataplane.memory import NCCL_HOSTID, GpuSurveyFailed, VisibleGpu, gpus_visible_to, nccl_gpu_id
from weightbus.dataplane.processes import (
    files_identity,
    folder_identity,
    host_identity,
    network_identity,
    network_interfaces,
)

from ..engines import EngineFacts, Limitation, ProcessesUnread, environment_of, require_unseen

_PROC: Final = Path("/proc")
_YES: Final = ("true", "1", "yes", "y")
_SHARED: Final = ("/dev/shm", tempfile.gettempdir())  # noqa: S108  looked at, nothing is written
"""Folders in which shared memory and the socket of its manager are found (dataplane/memory/shared_memory.py)."""
_NO_KEY: Final = RequestId("filled-in-by-the-client")
_log = get_log(__name__)


def topology_of(
    lacking: Mapping[str, Limitation],
    allowed: tuple[TransportKind, ...],
    runtime_dir: Path,
    places: tuple[ProcessLocation, ...],
    takes: Mapping[str, int],
) -> Topology:
    """The topology of one process generation, as the coordinator is told it.

    `lacking` are the transports that the server cannot take, `allowed` those of the settings, `places` the locations of
    its workers, and `takes` the bytes of a round that the worker with most of them receives, by transport.
    """
    left_out = MissingTransport(found="the engine agent's setting transports leaves it out", needed="add it there")
    lacks = {kind: left_out for kind in PREFERRED if kind not in allowed}
    lacks |= {
        TransportKind(kind): MissingTransport(found=each.found, needed=each.needed) for kind, each in lacking.items()
    }
    return Topology(
        request=_NO_KEY,
        network=network_identity(),
        files=files_identity(),
        folder=folder_identity(runtime_dir),
        places=places,
        nics=tuple(
            NetworkInterface(name=each.name, addresses=each.addresses, mbps=each.mbps) for each in network_interfaces()
        ),
        lacking=lacks,
        takes={TransportKind(kind): size for kind, size in takes.items()},
        supports_deferred_digests=True,
    )


def places_of(facts: EngineFacts) -> tuple[ProcessLocation, ...]:
    """One for each worker; none where it cannot be found out. Takes about a second where there are GPUs.

    Raises `ProcessesUnread` where a later look may find it out.
    """
    if facts.device != "cuda":
        return tuple(ProcessLocation(rank=rank, host=host_identity(), device=facts.device) for rank in range(facts.tp))
    if facts.process is None or not facts.gpus or facts.pp > 1 or facts.dp > 1:
        return ()
    try:
        environment = environment_of(facts.process[0])
        alone = environment.get(facts.ONE_GPU_VARIABLE, "").lower() in _YES
        nccl_host = environment.get(NCCL_HOSTID, "")
        return tuple(_placed(facts.gpus, gpus_visible_to(environment), nccl_host, alone=alone))
    except (OSError, GpuSurveyFailed, ValueError) as problem:
        if isinstance(problem.__cause__, OSError | subprocess.TimeoutExpired):  # the driver was not even asked
            raise ProcessesUnread(problem.__cause__) from problem
        _log.info("gpus_not_known", reason=str(problem))
        return ()


def opened_by(facts: EngineFacts, places: tuple[ProcessLocation, ...]) -> str:
    """Where memory of this process has to lie for all workers of a server to open it; empty where one may not.

    ``cpu``, or the uuid of the first one's GPU, which the others have to reach. Shared memory is a file of its owner
    alone, in a folder that both have to see; of memory on a GPU the driver asks that both are in one IPC namespace.
    A worker that cannot open such memory ends its server, so an unknown reach counts as none. Raises `ProcessesUnread`
    where a later look may find it out.
    """
    if facts.process is None or facts.dp > 1 or facts.pp > 1 or not places:
        return ""
    try:
        reason = _foreign(_PROC / str(facts.process[0]), facts.device)
    except OSError as problem:  # it ended, or is another user's
        require_unseen(problem)
        reason = str(problem)
    reason = reason or _apart(places)
    if reason:
        _log.info("server_opens_nothing_of_ours", reason=reason)
    return "" if reason else places[0].device


def _foreign(process: Path, device: str) -> str:
    """Why a process may not open memory of this one's; empty where it may. Raises `OSError`."""
    lines = (process / "status").read_text().splitlines()
    users = {int(each) for line in lines if line.startswith("Uid:") for each in line.split()[1:]}
    if users != {os.geteuid()}:  # real, effective, saved, and that of the file system
        return f"the server is run by user {sorted(users)}, the engine agent by {os.geteuid()}"
    if device == "cpu":
        shares = all((process / "root" / each[1:]).samefile(each) for each in _SHARED)
        return "" if shares else f"the server has other folders under {' and '.join(_SHARED)}"
    return "" if (process / "ns/ipc").samefile("/proc/self/ns/ipc") else "the server is in another IPC namespace"


def _apart(places: tuple[ProcessLocation, ...]) -> str:
    """The worker that is not known to reach the first one's GPU, by its driver; empty where all do."""
    first = places[0].device
    for each in places:
        if each.device != first and (each.reach or {}).get(first, PeerAccess.NONE) is PeerAccess.NONE:
            return f"worker {each.rank} on GPU {each.device} is not known to reach GPU {first} of worker 0"
    return ""


def places_on(devices: tuple[str, ...]) -> tuple[ProcessLocation, ...]:
    """One for each of `devices`, as the workers said themselves; which others they reach is not known."""
    return tuple(ProcessLocation(rank=rank, host=host_identity(), device=device) for rank, device in enumerate(devices))


def _placed(
    numbers: tuple[int, ...], seen: tuple[VisibleGpu, ...], nccl_host: str, *, alone: bool
) -> list[ProcessLocation]:
    """`alone`: each worker sees no GPU but its own."""
    if max(numbers) >= len(seen):
        raise GpuSurveyFailed(
            f"the server uses GPU number {max(numbers)}, and {len(seen)} are seen with its environment"
        )
    return [
        ProcessLocation(
            rank=rank,
            host=host_identity(),
            device=seen[number].uuid,
            reach={} if alone else {other: PeerAccess(word) for other, word in seen[number].reach.items()},
            nccl_gpu_id=nccl_gpu_id(seen[number].uuid, nccl_host) if nccl_host else "",
        )
        for rank, number in enumerate(numbers)
    ]
