"""Cost of one round that is not the first: seconds of its steps, its pause, its busiest links. Pure.

Every constant stands with its source. One set serves all fleets; none is fitted to a single run. The runs are in
tests/gpu/results and tests/bench/results, of two H200s and of two busy cores. Constants that were not measured are
marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from weightbus.dataplane.tensors import Column

from .fleet import FleetSpec, ForecastTransport, Links, PlacedEngines, Placement
from .traffic import Traffic


class CalibratedValue(msgspec.Struct, frozen=True):
    """A constant and its source."""

    value: float
    source: str


DEVICE_GB_S: Final = CalibratedValue(1940.0, "colocated.json: 31.2 GB copied on one H200 in 16 ms")
NVLINK_GB_S: Final = CalibratedValue(
    375.0, "peer.json: 31.2 GB read from the other H200 in 80 ms, with what it takes to begin"
)
BOTH_WAYS: Final = CalibratedValue(
    0.9, "crosswise.json beside peer.json: what is left of NVLink one way while both are used"
)
NIC_GB_S: Final = CalibratedValue(45.0, "not measured: 0.9 of a 400 Gb/s NIC")
STORAGE_GB_S: Final = CalibratedValue(0.75, "stock.json: 16.4 GB written and read in 43.8 s, one machine's disk")
GATHER_GB_S: Final = CalibratedValue(253.0, "gather.json: what the first rank receives of a model that two hold")

DIGEST_GB_S: Final = CalibratedValue(3200.0, "copies.json, digest: parameters where they lie")
DIGEST_TENSOR_S: Final = CalibratedValue(0.4e-6, "peer.json: 9,435 tensors")
DIGEST_BESIDE_GB_S: Final = CalibratedValue(
    1480.0, "colocated.json: the same on a GPU whose server generates meanwhile"
)
DIGEST_BESIDE_TP_S: Final = CalibratedValue(
    0.165, "crosswise.json: what it waits for a server whose workers wait for each other"
)
DIGEST_BUCKET_S: Final = CalibratedValue(2.8e-3, "stock.json: 30 buckets of 512 MB")
PROOF_GB_S: Final = CalibratedValue(3200.0, "colocated and peer.json: a worker reads its live parameters")
CHECKSUM_GB_S: Final = CalibratedValue(280.0, "stock.json: the server's own checksum of them")
LOCAL_BUCKET_S: Final = CalibratedValue(6.9e-3, "stock.json: one call to the server for each bucket")
GROUP_BUCKET_S: Final = CalibratedValue(3.8e-3, "stock.json, NCCL: the same, beside the broadcast; servers join")
LOAD_TENSOR_S: Final = CalibratedValue(110e-6, "colocated and peer.json, flattened buckets: the server's loader")
LOAD_GROUP_TENSOR_S: Final = CalibratedValue(
    62e-6, "stages.json: the same after a broadcast, but for the wire and the calls; servers join"
)
LOAD_PART_TENSOR_S: Final = CalibratedValue(
    205e-6, "crosswise.json: the same where each worker takes a part of each tensor"
)

ACQUIRE_S: Final = CalibratedValue(2.3e-3, "every run with one engine")
ANNOUNCE_S: Final = CalibratedValue(3.4e-3, "every run with one engine")
PREPARE_S: Final = CalibratedValue(3.1e-3, "every run with one engine")
PAUSE_S: Final = CalibratedValue(5.6e-3, "every run with one engine")
OFFER_S: Final = CalibratedValue(1.8e-3, "every run with one engine")
CALL_S: Final = CalibratedValue(7.0e-3, "colocated, peer and crosswise.json: a transfer but for offer, copy and proof")
VERIFY_S: Final = CalibratedValue(0.2e-3, "every run with one engine")
COMMIT_S: Final = CalibratedValue(0.7e-3, "every run with one engine: label, journal and fsync")
RESUME_S: Final = CalibratedValue(4.3e-3, "every run with one engine")
JOIN_S: Final = CalibratedValue(
    0.086, "joiner.json: a group, a manifest to read and small parts that an engine's first round has, mean of two"
)
JOIN_TENSOR_S: Final = CalibratedValue(
    14.5e-6, "joiner.json: layout, plan and what to expect of 9,435 tensors, by one worker"
)
GPU_GB: Final = CalibratedValue(288.0, "not measured: the memory of a B300")
BARRIER_ENGINE_S: Final = CalibratedValue(
    0.035e-3, "control.json: 2,048 agents resumed in 72 ms, on two cores that ran them, too"
)
_GB = 1e9


class StepCost(msgspec.Struct, frozen=True):
    """A part of the round, as `PublishReport.seconds` names it."""

    name: str
    seconds: float
    paused: bool
    """True where engines do not generate."""


class LinkLoad(msgspec.Struct, frozen=True):
    """The busiest link of a kind."""

    link: str
    where: str
    gigabytes: float
    mean_gigabytes: float
    """Mean over the links of this kind that carry anything."""
    seconds: float


class RoundVolume(msgspec.Struct, frozen=True):
    """Sizes of a version, beside the traffic of shards."""

    total: int
    """Bytes of a version."""
    tensors: int
    buckets: int
    digested: int
    """Bytes digested by the rank with most of them."""
    near_gather: int
    """Bytes that a root gathers from other ranks of its host; the most of any root."""
    far_gather: int
    """Bytes that a root gathers from other hosts; the most of any root."""
    roots: int
    """Ranks that assemble whole tensors: rank 0, or the first of each stage where all of them are broadcast."""


@dataclass(frozen=True, eq=False)
class Wave:
    """Engines that are paused together: all of a round, or one wave of a rolling round."""

    placement: Placement
    traffic: Traffic
    engine_bytes: int
    """Bytes of weights on the engine GPU with most of them."""

    @property
    def engines(self) -> int:
        """Number of engines."""
        return sum(len(group.gpu) for group in self.placement.groups)


class RoundCost(msgspec.Struct, frozen=True):
    """The prediction."""

    steps: tuple[StepCost, ...]
    """Steps, summed over all waves."""
    total_s: float
    waves: int
    serving: int
    """Least number of engines that serve at any time."""
    pause_s: float
    """Seconds that a running request waits, in the wave with the longest pause."""
    double_buffered_pause_s: float | None = msgspec.field(name="beside_s")
    """`pause_s` of engines with memory for a double-buffered receive. None unless all use sends."""
    loads: tuple[LinkLoad, ...]
    """Links of the longest wave, busiest first."""
    kept_gigabytes: float
    """Weights on the engine GPU with most of them, in GB."""


def rate(given: float | None, figure: CalibratedValue) -> float:
    """Bytes per second of a rate that was given in GB/s, or else of the calibrated one."""
    return (given or figure.value) * _GB


def round_cost(fleet: FleetSpec, placement: Placement, waves: Sequence[Wave], volume: RoundVolume) -> RoundCost:
    """One steady round: nothing is recorded, planned, compiled or connected anew, and no group is formed.

    Whatever all engines are asked before the first wave stands still is asked once.
    """
    engines = sum(wave.engines for wave in waves)
    assembled = any(not group.transport.sends_shards for group in placement.groups)
    before = (
        StepCost("acquire", ACQUIRE_S.value, paused=False),
        StepCost("digest", _digest(volume, placement, assembled=assembled), paused=False),
        StepCost("announce", ANNOUNCE_S.value, paused=False),
        StepCost("prepare", PREPARE_S.value + BARRIER_ENGINE_S.value * engines, paused=False),
    )
    waves_costs = [_wave_cost(fleet.links, wave, volume, first=not index) for index, wave in enumerate(waves)]
    spent: Counter[str] = Counter()
    for cost in waves_costs:
        spent.update({step.name: step.seconds for step in cost.steps})
    steps = (*before, *(StepCost(step.name, spent[step.name], step.paused) for step in waves_costs[0].steps))
    buffered = [cost.double_buffered_pause_s for cost in waves_costs if cost.double_buffered_pause_s is not None]
    return RoundCost(
        steps,
        sum(step.seconds for step in steps),
        len(waves),
        engines - max(wave.engines for wave in waves),
        max(cost.pause_s for cost in waves_costs),
        max(buffered) if len(buffered) == len(waves_costs) else None,
        max(waves_costs, key=lambda cost: cost.total_s).loads,
        max(cost.kept_gigabytes for cost in waves_costs),
    )


def joining_s(fleet: FleetSpec, wave: Wave, volume: RoundVolume) -> float:
    """From the `Hello` of this wave's one engine until it gets requests: a round of it alone, in which all is new.

    Its loader was recorded before. Nothing is committed.
    """
    alone = round_cost(fleet, wave.placement, (wave,), volume).total_s - COMMIT_S.value
    return alone + JOIN_S.value + volume.tensors * JOIN_TENSOR_S.value


def _wave_cost(links: Links, wave: Wave, volume: RoundVolume, *, first: bool) -> RoundCost:
    """Cost of one wave, from its offer until it serves."""
    barrier = BARRIER_ENGINE_S.value * wave.engines
    groups = wave.placement.groups
    whole = [group for group in groups if not group.transport.sends_shards]
    loads = [*_links(links, wave.placement, wave.traffic)]
    by_parts = max((load.seconds for load in loads), default=0.0)
    by_root = [*_whole(links, wave.placement, volume, whole)]
    moved = max(by_parts, sum(load.seconds for load in by_root) + _calls(volume, whole))
    proof = CHECKSUM_GB_S if whole else PROOF_GB_S
    durable = COMMIT_S.value
    # The first wave commits. Each later one has an epoch of its own, which is on the disk before its offer.
    steps = (
        StepCost("offer", OFFER_S.value + (0.0 if first else durable), paused=False),
        StepCost("pause", PAUSE_S.value + barrier, paused=True),
        StepCost("transfer", moved + CALL_S.value + barrier, paused=True),
        StepCost("verify", wave.engine_bytes / rate(None, proof) + VERIFY_S.value + barrier, paused=True),
        StepCost("commit", durable if first else 0.0, paused=True),
        StepCost("resume", RESUME_S.value + barrier, paused=True),
    )
    # The first engine that stops and the last that goes on see most of it; of those two steps one sees about half.
    half = sum(step.seconds for step in steps if step.name in {"pause", "resume"}) / 2
    pause = sum(step.seconds for step in steps if step.paused) - half
    swap = wave.engine_bytes / rate(links.device, DEVICE_GB_S)
    by_sends = all(group.transport is ForecastTransport.SENDS for group in groups)
    ordered = tuple(sorted((*loads, *by_root), key=lambda load: -load.seconds))
    buffered = pause - moved + swap if by_sends else None
    total_s = sum(step.seconds for step in steps)
    return RoundCost(steps, total_s, 1, 0, pause, buffered, ordered, wave.engine_bytes / _GB)


def _digest(volume: RoundVolume, placement: Placement, *, assembled: bool) -> float:
    """Seconds of the digest, before any engine pauses: servers on the trainer's GPUs generate meanwhile."""
    if assembled:
        gathered = volume.near_gather / rate(None, GATHER_GB_S)
        return gathered + volume.buckets / volume.roots * DIGEST_BUCKET_S.value
    beside = [each.engines for each in placement.groups if min(each.gpus) < placement.trainer.gpus]
    speed = rate(None, DIGEST_BESIDE_GB_S if beside else DIGEST_GB_S)
    waits = DIGEST_BESIDE_TP_S.value if any(engines.tp > 1 for engines in beside) else 0.0
    return volume.digested / speed + volume.tensors * DIGEST_TENSOR_S.value + waits


def _links(links: Links, placement: Placement, traffic: Traffic) -> Iterator[LinkLoad]:
    """The busiest device, NVLink and NIC of the traffic of shards."""
    host = np.array(placement.host, np.int64)
    source, target, nbytes = traffic.source, traffic.target, traffic.nbytes
    own = source == target
    beside = ~own & (host[source] == host[target])
    beyond = host[source] != host[target]
    size = len(host)

    def sums(where: Column, chosen: Column) -> Column:
        total = np.zeros(size, np.int64)
        np.add.at(total, where[chosen], nbytes[chosen])
        return total

    yield from _busiest("copies within GPU", "GPU", sums(target, own), rate(links.device, DEVICE_GB_S))
    out, back = sums(source, beside), sums(target, beside)
    speed = np.where((out > 0) & (back > 0), BOTH_WAYS.value, 1.0) * rate(links.nvlink, NVLINK_GB_S)
    yield from _busiest("NVLink out of GPU", "GPU", out, speed)
    yield from _busiest("NVLink into GPU", "GPU", back, speed)
    nic = rate(links.nic, NIC_GB_S)
    for direction, end in (("out of", source), ("into", target)):
        sent = sums(end, beyond)
        yield from _busiest(f"NIC {direction} GPU", "GPU", sent, nic)
        if links.nics_per_host is not None:
            by_host = np.zeros(int(host.max()) + 1, np.int64)
            np.add.at(by_host, host, sent)
            yield from _busiest(f"NICs {direction} host", "host", by_host, nic * links.nics_per_host)


def _busiest(
    link: str, kind: str, nbytes: Column, speed: float | np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> Iterator[LinkLoad]:
    used = nbytes > 0
    if not used.any():
        return
    seconds = nbytes / speed
    at = int(np.argmax(seconds))
    yield LinkLoad(link, f"{kind} {at}", float(nbytes[at]) / _GB, float(nbytes[used].mean()) / _GB, float(seconds[at]))


def _whole(links: Links, placement: Placement, volume: RoundVolume, groups: list[PlacedEngines]) -> Iterator[LinkLoad]:
    """Loads of whole tensors: gathered on rank 0 or on the first rank of each stage, then sent to each group."""
    if not groups:
        return
    host = np.array(placement.host, np.int64)
    total = volume.total / _GB

    def load(link: str, nbytes: float, speed: float, gpu: int = 0) -> LinkLoad:
        return LinkLoad(link, f"GPU {gpu}", nbytes / _GB, nbytes / _GB, nbytes / speed)

    if volume.near_gather:
        yield load("gathering over NVLink into GPU", volume.near_gather, rate(None, GATHER_GB_S))
    nic = rate(links.nic, NIC_GB_S)
    if volume.far_gather:
        yield load("gathering over the NIC into GPU", volume.far_gather, nic)
    taken: dict[ForecastTransport, list[int]] = {}
    for group in groups:
        taken.setdefault(group.transport, []).extend(group.gpus)
    if receiving := taken.get(ForecastTransport.DISTRIBUTED):
        of_sources = {host[gpu] for gpu in range(0, placement.trainer.gpus, placement.trainer.gpus // volume.roots)}
        far = [gpu for gpu in receiving if {host[gpu]} != of_sources]
        if far:
            yield load("broadcast over the NIC into GPU", volume.total, nic, far[0])
        else:
            nvlink = rate(links.nvlink, NVLINK_GB_S)
            yield load("broadcast over NVLink into GPU", volume.total, nvlink, receiving[0])
    if ForecastTransport.LOCAL in taken:
        yield load("buckets read from GPU", volume.total, rate(links.device, DEVICE_GB_S))
    if ForecastTransport.DISK in taken:
        readers = {host[gpu] for gpu in taken[ForecastTransport.DISK]}
        seconds = (1 + len(readers)) * volume.total / rate(links.storage, STORAGE_GB_S)
        yield LinkLoad("storage", f"{len(readers)} hosts read", (1 + len(readers)) * total, total, seconds)


def _calls(volume: RoundVolume, groups: list[PlacedEngines]) -> float:
    """Seconds of the slowest engine's calls and loader."""
    slowest = 0.0
    for group in groups:
        if group.transport is ForecastTransport.DISK:
            continue
        by_group = group.transport is ForecastTransport.DISTRIBUTED
        each = GROUP_BUCKET_S if by_group else LOCAL_BUCKET_S
        alone = LOAD_GROUP_TENSOR_S if by_group else LOAD_TENSOR_S
        loader = LOAD_PART_TENSOR_S if group.engines.tp > 1 else alone
        slowest = max(slowest, volume.buckets * each.value + volume.tensors * loader.value)
    return slowest
