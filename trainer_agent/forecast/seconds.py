"""Bytes and figures become seconds: the steps of one round that is not the first, the pause, the busiest link. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from weightbus.dataplane.boxes import Column

from . import figures
from .figures import Figure
from .fleet import Fleet, Ground, Links, Placed, Way
from .traffic import Traffic

_GB = 1e9


class Step(msgspec.Struct, frozen=True):
    """A part of the round, as `PublishReport.seconds` names it."""

    name: str
    seconds: float
    paused: bool
    """Engines do not generate."""


class Load(msgspec.Struct, frozen=True):
    """The busiest link of a kind."""

    link: str
    where: str
    gigabytes: float
    mean_gigabytes: float
    """Of those of its kind that carry anything."""
    seconds: float


class Volume(msgspec.Struct, frozen=True):
    """What a round is calculated from, beside the traffic by parts."""

    total: int
    """Bytes of a version."""
    tensors: int
    buckets: int
    digested: int
    """By the rank that digests most, where it lies."""
    near_parcels: int
    """What a rank that puts whole tensors together gets from others on its host; where several do, the most."""
    far_parcels: int
    sources: int
    """How many do: the first rank, or that of each stage where all whole tensors are broadcast."""
    kept: int
    """By the engine GPU that keeps most."""


class Round(msgspec.Struct, frozen=True):
    """The prediction."""

    steps: tuple[Step, ...]
    total_s: float
    pause_s: float
    """How long a request that is running waits."""
    beside_s: float | None
    """... of engines that have memory to take all of it beside what they serve. Null unless all go by sends."""
    loads: tuple[Load, ...]
    """Busiest first."""
    kept_gigabytes: float
    """What the engine GPU with most of the weights keeps of them."""


def rate(given: float | None, figure: Figure) -> float:
    """Bytes a second of what was given in GB/s, or else measured."""
    return (given or figure.value) * _GB


def round_of(fleet: Fleet, ground: Ground, traffic: Traffic, volume: Volume) -> Round:
    """One steady round: nothing is recorded, planned, compiled or connected anew, and no group is formed."""
    engines = sum(group.engines.count for group in ground.groups)
    barrier = figures.BARRIER_ENGINE_S.value * engines
    whole = [group for group in ground.groups if not group.way.by_parts]
    loads = [*_links(fleet.links, ground, traffic)]
    by_parts = max((load.seconds for load in loads), default=0.0)
    by_root = [*_whole(fleet.links, ground, volume, whole)]
    moved = max(by_parts, sum(load.seconds for load in by_root) + _calls(volume, whole))
    proof = figures.CHECKSUM_GB_S if whole else figures.PROOF_GB_S
    steps = (
        Step("acquire", figures.ACQUIRE_S.value, paused=False),
        Step("digest", _digest(volume, ground, assembled=bool(whole)), paused=False),
        Step("announce", figures.ANNOUNCE_S.value, paused=False),
        Step("prepare", figures.PREPARE_S.value + barrier, paused=False),
        Step("offer", figures.OFFER_S.value, paused=False),
        Step("pause", figures.PAUSE_S.value + barrier, paused=True),
        Step("transfer", moved + figures.CALL_S.value + barrier, paused=True),
        Step("verify", volume.kept / rate(None, proof) + figures.VERIFY_S.value + barrier, paused=True),
        Step("commit", figures.COMMIT_S.value, paused=True),
        Step("resume", figures.RESUME_S.value + barrier, paused=True),
    )
    # The first engine that stops and the last that goes on see most of it; of those two steps one sees about half.
    half = sum(step.seconds for step in steps if step.name in {"pause", "resume"}) / 2
    pause = sum(step.seconds for step in steps if step.paused) - half
    flip = volume.kept / rate(fleet.links.device, figures.DEVICE_GB_S)
    by_sends = all(group.way is Way.SENDS for group in ground.groups)
    ordered = tuple(sorted((*loads, *by_root), key=lambda load: -load.seconds))
    return Round(
        steps,
        sum(step.seconds for step in steps),
        pause,
        pause - moved + flip if by_sends else None,
        ordered,
        volume.kept / _GB,
    )


def _digest(volume: Volume, ground: Ground, *, assembled: bool) -> float:
    """Before anybody pauses: servers on the trainer's GPUs generate, and take their turns there."""
    if assembled:
        gathered = volume.near_parcels / rate(None, figures.GATHER_GB_S)
        return gathered + volume.buckets / volume.sources * figures.DIGEST_BUCKET_S.value
    beside = [
        each.engines for each in ground.groups if any(gpu < ground.trainer.gpus for row in each.gpu for gpu in row)
    ]
    speed = rate(None, figures.DIGEST_BESIDE_GB_S if beside else figures.DIGEST_GB_S)
    waits = figures.DIGEST_BESIDE_TP_S.value if any(engines.tp > 1 for engines in beside) else 0.0
    return volume.digested / speed + volume.tensors * figures.DIGEST_TENSOR_S.value + waits


def _links(links: Links, ground: Ground, traffic: Traffic) -> Iterator[Load]:
    """The busiest device, NVLink and NIC of what goes from shard to shard."""
    host = np.array(ground.host, np.int64)
    source, target, nbytes = traffic.source, traffic.target, traffic.nbytes
    own = source == target
    beside = ~own & (host[source] == host[target])
    beyond = host[source] != host[target]
    size = len(host)

    def sums(where: Column, chosen: Column) -> Column:
        total = np.zeros(size, np.int64)
        np.add.at(total, where[chosen], nbytes[chosen])
        return total

    yield from _busiest("copies within GPU", "GPU", sums(target, own), rate(links.device, figures.DEVICE_GB_S))
    out, back = sums(source, beside), sums(target, beside)
    speed = np.where((out > 0) & (back > 0), figures.BOTH_WAYS.value, 1.0) * rate(links.nvlink, figures.NVLINK_GB_S)
    yield from _busiest("NVLink out of GPU", "GPU", out, speed)
    yield from _busiest("NVLink into GPU", "GPU", back, speed)
    nic = rate(links.nic, figures.NIC_GB_S)
    for direction, end in (("out of", source), ("into", target)):
        sent = sums(end, beyond)
        yield from _busiest(f"NIC {direction} GPU", "GPU", sent, nic)
        if links.nics_per_host is not None:
            by_host = np.zeros(int(host.max()) + 1, np.int64)
            np.add.at(by_host, host, sent)
            yield from _busiest(f"NICs {direction} host", "host", by_host, nic * links.nics_per_host)


def _busiest(
    link: str, kind: str, nbytes: Column, speed: float | np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> Iterator[Load]:
    used = nbytes > 0
    if not used.any():
        return
    seconds = nbytes / speed
    at = int(np.argmax(seconds))
    yield Load(link, f"{kind} {at}", float(nbytes[at]) / _GB, float(nbytes[used].mean()) / _GB, float(seconds[at]))


def _whole(links: Links, ground: Ground, volume: Volume, groups: list[Placed]) -> Iterator[Load]:
    """Whole tensors by way of the first rank, or each stage's: gathered there, then given away one after the other."""
    if not groups:
        return
    host = np.array(ground.host, np.int64)
    total = volume.total / _GB

    def load(link: str, nbytes: float, speed: float, gpu: int = 0) -> Load:
        return Load(link, f"GPU {gpu}", nbytes / _GB, nbytes / _GB, nbytes / speed)

    if volume.near_parcels:
        yield load("gathering over NVLink into GPU", volume.near_parcels, rate(None, figures.GATHER_GB_S))
    nic = rate(links.nic, figures.NIC_GB_S)
    if volume.far_parcels:
        yield load("gathering over the NIC into GPU", volume.far_parcels, nic)
    ways = {group.way for group in groups}
    if Way.DISTRIBUTED in ways:
        takers = [gpu for group in groups if group.way is Way.DISTRIBUTED for row in group.gpu for gpu in row]
        of_sources = {host[gpu] for gpu in range(0, ground.trainer.gpus, ground.trainer.gpus // volume.sources)}
        far = [gpu for gpu in takers if {host[gpu]} != of_sources]
        if far:
            yield load("broadcast over the NIC into GPU", volume.total, nic, far[0])
        else:
            nvlink = rate(links.nvlink, figures.NVLINK_GB_S)
            yield load("broadcast over NVLink into GPU", volume.total, nvlink, takers[0])
    if Way.LOCAL in ways:
        yield load("buckets read from GPU", volume.total, rate(links.device, figures.DEVICE_GB_S))
    if Way.DISK in ways:
        readers = {host[gpu] for group in groups if group.way is Way.DISK for row in group.gpu for gpu in row}
        seconds = (1 + len(readers)) * volume.total / rate(links.storage, figures.STORAGE_GB_S)
        yield Load("storage", f"{len(readers)} hosts read", (1 + len(readers)) * total, total, seconds)


def _calls(volume: Volume, groups: list[Placed]) -> float:
    """What the slowest engine's calls and loader take."""
    slowest = 0.0
    for group in groups:
        if group.way is Way.DISK:
            continue
        by_group = group.way is Way.DISTRIBUTED
        each = figures.GROUP_BUCKET_S if by_group else figures.LOCAL_BUCKET_S
        alone = figures.LOAD_GROUP_TENSOR_S if by_group else figures.LOAD_TENSOR_S
        loader = figures.LOAD_PART_TENSOR_S if group.engines.tp > 1 else alone
        slowest = max(slowest, volume.buckets * each.value + volume.tensors * loader.value)
    return slowest
