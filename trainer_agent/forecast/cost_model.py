"""Bytes and figures become seconds: the steps of one round that is not the first, the pause, the busiest link. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from weightbus.dataplane.tensors import Column

from . import calibration as figures
from .calibration import Calibration
from .fleet import FleetSpec, Ground, Links, Placed, Way
from .traffic import Traffic

_GB = 1e9


class StepCost(msgspec.Struct, frozen=True):
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


@dataclass(frozen=True, eq=False)
class Wave:
    """Engines that stand still together: all of a round, or those whose turn it is."""

    ground: Ground
    traffic: Traffic
    kept: int
    """Bytes, by the engine GPU that keeps most."""

    @property
    def engines(self) -> int:
        """How many."""
        return sum(len(group.gpu) for group in self.ground.groups)


class RoundCost(msgspec.Struct, frozen=True):
    """The prediction."""

    steps: tuple[StepCost, ...]
    """Those of all waves added up."""
    total_s: float
    waves: int
    serving: int
    """Engines that no wave stops at the same time: so many serve at any time, at least."""
    pause_s: float
    """How long a request that is running waits; in the wave with the longest pause."""
    beside_s: float | None
    """... of engines that have memory to take all of it beside what they serve. Null unless all go by sends."""
    loads: tuple[Load, ...]
    """Busiest first; of the longest wave."""
    kept_gigabytes: float
    """What the engine GPU with most of the weights keeps of them."""


def rate(given: float | None, figure: Calibration) -> float:
    """Bytes a second of what was given in GB/s, or else measured."""
    return (given or figure.value) * _GB


def round_of(fleet: FleetSpec, ground: Ground, waves: Sequence[Wave], volume: Volume) -> RoundCost:
    """One steady round: nothing is recorded, planned, compiled or connected anew, and no group is formed.

    Whatever all engines are asked before the first wave stands still is asked once.
    """
    engines = sum(wave.engines for wave in waves)
    assembled = any(not group.way.by_parts for group in ground.groups)
    before = (
        StepCost("acquire", figures.ACQUIRE_S.value, paused=False),
        StepCost("digest", _digest(volume, ground, assembled=assembled), paused=False),
        StepCost("announce", figures.ANNOUNCE_S.value, paused=False),
        StepCost("prepare", figures.PREPARE_S.value + figures.BARRIER_ENGINE_S.value * engines, paused=False),
    )
    turns = [_turn(fleet.links, wave, volume, first=not index) for index, wave in enumerate(waves)]
    spent: Counter[str] = Counter()
    for turn in turns:
        spent.update({step.name: step.seconds for step in turn.steps})
    steps = (*before, *(StepCost(step.name, spent[step.name], step.paused) for step in turns[0].steps))
    beside = [turn.beside_s for turn in turns if turn.beside_s is not None]
    return RoundCost(
        steps,
        sum(step.seconds for step in steps),
        len(waves),
        engines - max(wave.engines for wave in waves),
        max(turn.pause_s for turn in turns),
        max(beside) if len(beside) == len(turns) else None,
        max(turns, key=lambda turn: sum(step.seconds for step in turn.steps)).loads,
        max(wave.kept for wave in waves) / _GB,
    )


def joining_s(fleet: FleetSpec, wave: Wave, volume: Volume) -> float:
    """From the `Hello` of this wave's one engine until it gets requests: a round of it alone, in which all is new.

    Its loader was recorded before. Nothing is committed.
    """
    alone = round_of(fleet, wave.ground, (wave,), volume).total_s - figures.COMMIT_S.value
    return alone + figures.JOIN_S.value + volume.tensors * figures.JOIN_TENSOR_S.value


@dataclass(frozen=True)
class _Turn:
    """What one wave takes, from its offer until it serves."""

    steps: tuple[StepCost, ...]
    pause_s: float
    beside_s: float | None
    loads: tuple[Load, ...]


def _turn(links: Links, wave: Wave, volume: Volume, *, first: bool) -> _Turn:
    barrier = figures.BARRIER_ENGINE_S.value * wave.engines
    groups = wave.ground.groups
    whole = [group for group in groups if not group.way.by_parts]
    loads = [*_links(links, wave.ground, wave.traffic)]
    by_parts = max((load.seconds for load in loads), default=0.0)
    by_root = [*_whole(links, wave.ground, volume, whole)]
    moved = max(by_parts, sum(load.seconds for load in by_root) + _calls(volume, whole))
    proof = figures.CHECKSUM_GB_S if whole else figures.PROOF_GB_S
    durable = figures.COMMIT_S.value
    # The first wave commits. Each later one has an epoch of its own, which is on the disk before its offer.
    steps = (
        StepCost("offer", figures.OFFER_S.value + (0.0 if first else durable), paused=False),
        StepCost("pause", figures.PAUSE_S.value + barrier, paused=True),
        StepCost("transfer", moved + figures.CALL_S.value + barrier, paused=True),
        StepCost("verify", wave.kept / rate(None, proof) + figures.VERIFY_S.value + barrier, paused=True),
        StepCost("commit", durable if first else 0.0, paused=True),
        StepCost("resume", figures.RESUME_S.value + barrier, paused=True),
    )
    # The first engine that stops and the last that goes on see most of it; of those two steps one sees about half.
    half = sum(step.seconds for step in steps if step.name in {"pause", "resume"}) / 2
    pause = sum(step.seconds for step in steps if step.paused) - half
    flip = wave.kept / rate(links.device, figures.DEVICE_GB_S)
    by_sends = all(group.way is Way.SENDS for group in groups)
    ordered = tuple(sorted((*loads, *by_root), key=lambda load: -load.seconds))
    return _Turn(steps, pause, pause - moved + flip if by_sends else None, ordered)


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
