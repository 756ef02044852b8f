"""The routing policy: which transport each engine's tensors take, and why not a faster one. Pure.

Each transport has a list of possible objections. The trainer's first preference without an objection is chosen. A fact
that an agent did not report raises no objection: the attempt will show. A transport that is not built in has one
objection alone: that the engine does not offer it.

One objection concerns several engines: an NCCL group takes no two ranks on one GPU. Of engines that share a GPU the
first is in the group; the others take a transport within the host if they can, and otherwise go in a later wave.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from ..protocol import AgentId, PeerAccess, ProcessLocation, Topology, TransportKind
from .states import Objection, Route, TransferEnds

PREFERRED: Final = (
    TransportKind.DIRECT,
    TransportKind.SENDS,
    TransportKind.LOCAL,
    TransportKind.DISTRIBUTED,
    TransportKind.DISK,
)
"""All transports, from the fewest copies to the most: a trainer's preferences by default."""
IN_PLACE: Final = frozenset({TransportKind.DIRECT, TransportKind.SENDS})
"""Transports that move tensors from the ranks' own memory, without buckets."""
GROUPS: Final = frozenset({TransportKind.SENDS, TransportKind.DISTRIBUTED})
"""Transports with one collective group for all engines of an attempt."""
_NO_GROUPS: Final = (TransportKind.DIRECT, TransportKind.LOCAL)
"""Transports within a host that need no collective group."""
_SHOWN: Final = 3
_REMEMBERED: Final = 4096

_Name = TypeVar("_Name", bound=str)


class Router:
    """The coordinator's `Routing`, which remembers the choice for each engine alone, with the ends it was made for."""

    def __init__(self) -> None:
        self._chosen: dict[AgentId, tuple[TransferEnds, Route]] = {}

    def __call__(self, fleet: Mapping[AgentId, TransferEnds]) -> Mapping[AgentId, Route]:
        """The routes of engines that are served together."""
        if len(self._chosen) > _REMEMBERED:
            self._chosen.clear()
        for name, ends in fleet.items():
            known = self._chosen.get(name)
            if known is None or known[0] != ends:
                self._chosen[name] = ends, choose(ends)
        return without_gpu_conflicts({name: self._chosen[name] for name in fleet})


def choose(ends: TransferEnds) -> Route:
    """The trainer's first preference that can serve the engine, regardless of other engines."""
    objections: dict[TransportKind, Objection] = {}
    for kind in ends.trainer.transports:
        found = objection(kind, ends)
        if found is None:
            return _route(kind, ends, objections)
        objections[kind] = found
    return _route(None, ends, objections)


def without_gpu_conflicts(chosen: Mapping[_Name, tuple[TransferEnds, Route]]) -> dict[_Name, Route]:
    """The routes of engines that are served together, in order of preference, from the choices for each alone.

    Of engines on one GPU only the first joins a collective group. The others take a transport without a group if there
    is one; otherwise they keep the transport, and need a group of their own in a later wave: see `Route.gpus`.
    """
    routes: dict[_Name, Route] = {}
    holders: dict[tuple[TransportKind, str], _Name] = {}
    for name, (ends, route) in chosen.items():
        kind = route.transport
        taken = [gpu for gpu in route.gpus if kind is not None and (kind, gpu) in holders]
        if taken and kind is not None:
            routes[name] = _outside_group(holders[kind, taken[0]], taken[0], kind, ends, route)
            continue
        routes[name] = route
        holders |= {(kind, gpu): name for gpu in route.gpus if kind is not None}
    return routes


def _outside_group(holder: str, gpu: str, kind: TransportKind, ends: TransferEnds, route: Route) -> Route:
    """The route of an engine on a GPU that engine `holder` has in the group of `kind`."""
    conflict = Objection(
        f"engine {holder} is on GPU {gpu} too, and NCCL takes no two ranks on one", "serve on GPUs of its own"
    )
    for other in ends.trainer.transports:
        if other in _NO_GROUPS and objection(other, ends) is None:
            return _route(other, ends, {kind: conflict})
    return msgspec.structs.replace(
        route, reason=f"{route.reason}, in a group after that of the others: {conflict.found}"
    )


def _route(chosen: TransportKind | None, ends: TransferEnds, objections: Mapping[TransportKind, Objection]) -> Route:
    hurdles = dict(_objections_before(chosen, ends, objections))
    said = "; ".join(f"{kind.value}: {each.found}" for kind, each in objections.items())
    if chosen is None:
        return Route(None, f"no transport: {said or 'the trainer offers none'}", objections=hurdles)
    reason = f"{chosen.value}: {_merit(chosen, ends)}{f' ({said})' if said else ''}"
    gpus = tuple(_gpu_of(place) for place in _of(ends.from_engine).places if place.device != "cpu")
    return Route(chosen, reason, _shares_gpu(ends), ends.both_await_tables, hurdles, gpus if chosen in GROUPS else ())


def objection(kind: TransportKind, ends: TransferEnds) -> Objection | None:
    """Why `kind` cannot serve the engine; None if no reason is known."""
    if found := _engine_offers(ends, kind):
        return found
    return next(filter(None, (rule(ends) for rule in _RULES.get(kind, ()))), None)


def _objections_before(
    chosen: TransportKind | None, ends: TransferEnds, objections: Mapping[TransportKind, Objection]
) -> Iterator[tuple[TransportKind, Objection]]:
    known = chosen is None or chosen in PREFERRED
    for kind in (*(PREFERRED if known else ()), *ends.trainer.transports):
        if kind == chosen:
            return
        if kind in objections:
            yield kind, objections[kind]
        elif kind not in ends.trainer.transports:
            yield kind, _not_offered(kind, ends)
        else:
            yield kind, Objection("the trainer prefers another", "put it first in the trainer's setting transport")


def _not_offered(kind: TransportKind, ends: TransferEnds) -> Objection:
    """The trainer does not offer `kind`, for the reason that it reported."""
    told = ends.from_trainer.lacking.get(kind) if ends.from_trainer else None
    return Objection(f"trainer: {told.found}", told.needed) if told else Objection("the trainer does not offer it")


# -- objections --------------------------------------------------------------------------------------------------------


def _engine_offers(ends: TransferEnds, kind: TransportKind) -> Objection | None:
    told = ends.from_engine.lacking.get(kind) if ends.from_engine else None
    if kind in ends.engine.transports and told is None:
        return None
    untold = "the engine agent does not offer it, and its log says why"
    return Objection(told.found, told.needed) if told else Objection(untold)


def _one_replica(ends: TransferEnds) -> Objection | None:
    dp = ends.engine.dp
    return Objection(f"dp={dp}: only disk reaches every replica", "serve each replica by itself") if dp > 1 else None


def _one_stage(ends: TransferEnds, reason: str) -> Objection | None:
    pp = ends.engine.pp
    return Objection(f"pp={pp}: {reason}", "serve without pipeline stages (--pp-size 1)") if pp > 1 else None


def _not_a_snapshot(ends: TransferEnds) -> Objection | None:
    if not ends.snapshot:
        return None
    return Objection("the version is a snapshot, and its memory is trained on", 'publish with mode = "live"')


def _one_host(ends: TransferEnds) -> Objection | None:
    if ends.trainer.host != ends.engine.host:
        return Objection("trainer and engine are on different hosts", "serve on the trainer's host")
    trainer, engine = _of(ends.from_trainer), _of(ends.from_engine)
    if _differ(trainer.files, engine.files) and _differ(trainer.folder, engine.folder):
        return Objection(
            "on one host, but in containers that do not share the folder of the trainer's sockets",
            "mount one folder into both and name it in both as runtime_dir",
        )
    return None


def _all_ranks_here(ends: TransferEnds) -> Objection | None:
    elsewhere = [place.rank for place in _of(ends.from_trainer).places if place.host != ends.engine.host]
    if not elsewhere:
        return None
    return Objection(f"{_ranks(elsewhere)} of the trainer on another host", "serve on the host of all ranks")


def _opens_device_memory(ends: TransferEnds) -> Objection | None:
    if (ends.trainer.device, ends.engine.device) != ("cuda", "cpu"):
        return None
    return Objection("an engine without a GPU cannot open the trainer's device memory")


def _one_device_kind(ends: TransferEnds, reason: str) -> Objection | None:
    if ends.trainer.device == ends.engine.device:
        return None
    return Objection(f"trainer on {ends.trainer.device}, engine on {ends.engine.device}: {reason}")


def _reads(ends: TransferEnds, *, all_ranks: bool) -> Objection | None:
    """Every worker's GPU can read the memory of rank 0's GPU, or of all ranks' GPUs."""
    if ends.engine.device != "cuda":
        return None
    for worker, rank in product(_of(ends.from_engine).places, _sources(ends, all_ranks=all_ranks)):
        found = _reaches(worker, rank)
        if isinstance(found, Objection):
            return found
    return None


def _reaches(worker: ProcessLocation, rank: ProcessLocation) -> PeerAccess | Objection | None:
    """How the GPU of `worker` reaches that of `rank`; None if neither side reported it."""
    if worker.device == rank.device:
        return PeerAccess.NVLINK  # its own memory, which is nearer still
    pair = f"worker {worker.rank} on GPU {worker.device}, rank {rank.rank} on GPU {rank.device}"
    told = None if worker.reach is None else worker.reach.get(rank.device)
    if worker.reach is not None and told is None:
        return Objection(
            f"the server does not see a GPU of the trainer's: {pair}",
            "start the server with CUDA_VISIBLE_DEVICES that holds the trainer's GPUs too, and choose its own with"
            " --base-gpu-id",
        )
    if told is None and rank.reach is not None:
        told = rank.reach.get(worker.device)
    if told is PeerAccess.NONE:
        return Objection(f"the driver gives no peer access: {pair}", "GPUs that are joined by NVLink, or PCIe peers")
    return told


def _no_shared_gpu(ends: TransferEnds, *, all_ranks: bool) -> Objection | None:
    """An NCCL communicator takes no two ranks on one GPU."""
    workers: dict[str, int] = {}
    for worker in _of(ends.from_engine).places:
        if _gpu_of(worker) in workers:
            return Objection(
                f"workers {workers[_gpu_of(worker)]} and {worker.rank} are on one GPU, and NCCL takes no two ranks"
                " on one",
                "serve with a GPU for each worker",
            )
        if worker.device != "cpu":
            workers[_gpu_of(worker)] = worker.rank
    ranks: dict[str, int] = {}
    for rank in _sources(ends, all_ranks=all_ranks):
        if _gpu_of(rank) in workers:
            return Objection(
                f"worker {workers[_gpu_of(rank)]} and rank {rank.rank} of the trainer are on one GPU, and NCCL"
                " takes no two ranks on one",
                "serve on GPUs of its own",
            )
        if _gpu_of(rank) in ranks and rank.device != "cpu":
            return Objection(
                f"ranks {ranks[_gpu_of(rank)]} and {rank.rank} of the trainer are on one GPU, and NCCL takes no two"
                " ranks on one",
                "train on a GPU for each rank",
            )
        ranks[_gpu_of(rank)] = rank.rank
    return None


def _address_leads_here(ends: TransferEnds) -> Objection | None:
    """A loopback address leads nowhere but in its own network namespace."""
    trainer, engine = _of(ends.from_trainer), _of(ends.from_engine)
    if not trainer.address or not _is_loopback(trainer.address):
        return None
    if ends.trainer.host == ends.engine.host and not _differ(trainer.network, engine.network):
        return None
    known = ", ".join(f"{each.addresses[0]} ({each.name})" for each in trainer.nics[:_SHOWN] if each.addresses)
    return Objection(
        f"the trainer tells engines to come to {trainer.address}, which they cannot reach from where they are",
        f"set the trainer's host to an address of its network{f': {known}' if known else ''}",
    )


_RULES: Final[Mapping[TransportKind, tuple[Callable[[TransferEnds], Objection | None], ...]]] = {
    TransportKind.DIRECT: (
        _not_a_snapshot,
        _one_replica,
        partial(_one_stage, reason="plans are made for servers without pipeline stages"),
        _one_host,
        _all_ranks_here,
        partial(_one_device_kind, reason="no worker reads the other's memory"),
        partial(_reads, all_ranks=True),
    ),
    TransportKind.SENDS: (
        _not_a_snapshot,
        _one_replica,
        partial(_one_stage, reason="plans are made for servers without pipeline stages"),
        partial(_one_device_kind, reason="no common collective backend"),
        partial(_no_shared_gpu, all_ranks=True),
        _address_leads_here,
    ),
    TransportKind.LOCAL: (
        _one_replica,
        _one_host,
        _opens_device_memory,
        partial(_reads, all_ranks=False),
    ),
    TransportKind.DISTRIBUTED: (
        _one_replica,
        partial(_one_stage, reason="SGLang joins a group only without pipeline stages"),
        partial(_one_device_kind, reason="no common collective backend"),
        partial(_no_shared_gpu, all_ranks=False),
        _address_leads_here,
    ),
}


# -- merits ------------------------------------------------------------------------------------------------------------


def _merit(kind: TransportKind, ends: TransferEnds) -> str:
    """The advantage of `kind`, in a few words."""
    words = _MERITS.get(kind)
    return words(ends) if words else "a transport that both sides have, and the coordinator does not know"


def _shares_gpu(ends: TransferEnds) -> bool:
    workers = {place.device for place in _of(ends.from_engine).places if place.device != "cpu"}
    return any(place.device in workers for place in _of(ends.from_trainer).places)


def _links(ends: TransferEnds) -> str:
    if ends.engine.device != "cuda":
        return ""
    pairs = list(product(_of(ends.from_engine).places, _sources(ends, all_ranks=True)))
    found = [_reaches(worker, rank) for worker, rank in pairs]
    if not pairs or None in found:
        return ", as far as is known: which GPUs reach each other was not told"
    own = sum(worker.device == rank.device for worker, rank in pairs)
    ways = [way for way, each in ((f"{own} pairs share a GPU", own), *_counted(found, own)) if each]
    return f" ({', '.join(ways)})"


def _counted(found: list[PeerAccess | Objection | None], own: int) -> Iterator[tuple[str, int]]:
    for reach, words in ((PeerAccess.NVLINK, "over NVLink"), (PeerAccess.P2P, "by peer access")):
        count = found.count(reach) - (own if reach is PeerAccess.NVLINK else 0)
        yield f"{count} pairs {words}", count


_MERITS: Final[Mapping[TransportKind, Callable[[TransferEnds], str]]] = {
    TransportKind.DIRECT: lambda ends: f"on the trainer's host, its workers read the ranks' memory{_links(ends)}",
    TransportKind.SENDS: lambda ends: (
        f"{'elsewhere' if ends.trainer.host != ends.engine.host else 'apart from the trainer'},"
        " every rank sends each worker what it stores"
    ),
    TransportKind.LOCAL: lambda _: "on the trainer's host, whole buckets through shared memory",
    TransportKind.DISTRIBUTED: lambda _: "broadcasts in collective groups, whole buckets to every worker",
    TransportKind.DISK: lambda _: "a checkpoint in a folder that both see",
}


# -- helpers -----------------------------------------------------------------------------------------------------------

_NOWHERE: Final = Topology(request="-")  # type: ignore[arg-type]  # stands for a missing report; never sent


def _differ(one: str, other: str) -> bool:
    """True if both are known and differ."""
    return bool(one and other and one != other)


def _gpu_of(place: ProcessLocation) -> str:
    return place.nccl_gpu_id or place.device


def _of(topology: Topology | None) -> Topology:
    return topology or _NOWHERE


def _sources(ends: TransferEnds, *, all_ranks: bool) -> tuple[ProcessLocation, ...]:
    places = _of(ends.from_trainer).places
    return places if all_ranks else places[:1]


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(str(each) for each in numbers[:_SHOWN])
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more}"


def _is_loopback(address: str) -> bool:
    """Whether an address, a host name or an endpoint is of the loopback; False for anything unparsable."""
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or address.strip("[]")
    except ValueError:  # brackets that are not closed
        return False
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback or (mapped or found).is_unspecified
