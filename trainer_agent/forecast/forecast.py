"""Predicts rounds of one model, tries the fleet with one thing changed, and reports: as a document, and as text.

Layouts are computed once and reused for every fleet.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightbus.control.protocol import TransportKind
from weightbus.control.terminal_text import terminal_safe

from . import cost_model
from .cost_model import CalibratedValue, RoundCost, RoundVolume, Wave, joining_s, rate, round_cost
from .fleet import (
    EngineLocation,
    Engines,
    FleetError,
    FleetSpec,
    ForecastTransport,
    Links,
    PlacedEngines,
    Placement,
    TrainerSpec,
    place_engines,
    waves,
)
from .traffic import (
    Overlaps,
    Tensors,
    Traffic,
    digested_bytes,
    engine_shards,
    gathered_bytes,
    overlaps,
    shard_traffic,
    trainer_shards,
)


class Forecast:
    """Predicts rounds of one model, and caches layouts and traffic."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._trainer_shards = cache(partial(trainer_shards, tensors))
        self._engine_shards = cache(partial(engine_shards, tensors))
        self._overlaps = cache(self._find_overlaps)
        self._engine_bytes = cache(self._find_engine_bytes)
        self._traffic: dict[tuple[TrainerSpec, PlacedEngines], tuple[Traffic, ...]] = {}

    def round(self, fleet: FleetSpec) -> RoundCost:
        """One steady round. Raises `FleetError` for a fleet that cannot be."""
        placement = place_engines(fleet)
        return round_cost(fleet, placement, self._waves(fleet, placement), self._volume(fleet, placement))

    def joining_s(self, fleet: FleetSpec) -> float | None:
        """Seconds to bring the version to one more engine like the slowest of these; None unless all use sends."""
        placement = place_engines(fleet)
        if any(group.transport is not ForecastTransport.SENDS for group in placement.groups):
            return None  # measured of no other transport
        volume = self._volume(fleet, placement)
        alone = (replace(placement, groups=(replace(group, gpu=group.gpu[:1]),)) for group in placement.groups)
        return max(joining_s(fleet, wave, volume) for one in alone for wave in self._waves(fleet, one))

    def traffic(self, fleet: FleetSpec) -> Traffic:
        """Bytes by pair of a trainer rank and an engine's GPU, of the groups that get their parts."""
        placement = place_engines(fleet)
        return self._waves(replace(fleet, max_paused=None), placement)[0].traffic

    def _waves(self, fleet: FleetSpec, placement: Placement) -> tuple[Wave, ...]:
        parts: dict[tuple[int, ...], Traffic] = {}
        for group in placement.groups:
            if group.transport.sends_shards:
                parts.update(zip(group.gpu, self._of(placement, group), strict=True))
        return tuple(
            Wave(
                each,
                Traffic.join(
                    [parts[gpus] for group in each.groups if group.transport.sends_shards for gpus in group.gpu]
                ),
                max(self._engine_bytes(group.engines.tp, group.engines.ep) for group in each.groups),
            )
            for each in waves(placement, fleet.max_paused)
        )

    def _of(self, placement: Placement, group: PlacedEngines) -> tuple[Traffic, ...]:
        key = (placement.trainer, group)
        if key not in self._traffic:
            found = self._overlaps(placement.trainer, group.engines.tp, group.engines.ep)
            self._traffic[key] = shard_traffic(placement, group, self._trainer_shards(placement.trainer), found)
        return self._traffic[key]

    def _find_overlaps(self, trainer: TrainerSpec, tp: int, ep: int) -> Overlaps:
        return overlaps(self.tensors, self._trainer_shards(trainer), self._engine_shards(tp, ep))

    def _find_engine_bytes(self, tp: int, ep: int) -> int:
        needed = self._engine_shards(tp, ep)
        sizes = needed.boxes.sizes * self.tensors.item[needed.boxes.space]
        return int(np.bincount(needed.worker, weights=sizes).max())

    def _volume(self, fleet: FleetSpec, placement: Placement) -> RoundVolume:
        held, trainer = self._trainer_shards(fleet.trainer), fleet.trainer
        gathered = np.zeros(trainer.gpus, np.int64)
        found = gathered_bytes(self.tensors, held)
        gathered[: len(found)] = found
        # Stages that broadcast gather their own tensors in parallel; for files and buckets rank 0 gathers all of them.
        staged = {group.transport for group in placement.groups if not group.transport.sends_shards} == {
            ForecastTransport.DISTRIBUTED
        }
        stages = trainer.pp if staged else 1
        roots = np.arange(trainer.gpus) // (trainer.gpus // stages) * (trainer.gpus // stages)
        ranks = np.arange(trainer.gpus)
        beside = (ranks // trainer.gpus_per_host == roots // trainer.gpus_per_host) & (ranks != roots)
        beyond = ranks // trainer.gpus_per_host != roots // trainer.gpus_per_host
        near, far = (np.bincount(roots, weights=gathered * chosen).max() for chosen in (beside, beyond))
        return RoundVolume(
            total=self.tensors.total,
            tensors=len(self.tensors.specs),
            buckets=-(-self.tensors.total // (fleet.bucket_mb * 1024 * 1024)),
            digested=int(digested_bytes(self.tensors, held).max()),
            near_gather=int(near),
            far_gather=int(far),
            roots=stages,
        )


_WORTH: Final = 0.01
"""Least saving that is reported, as a fraction of the round."""


class WhatIf(msgspec.Struct, frozen=True):
    """One change, and what the round would be with it."""

    what: str
    total_s: float
    pause_s: float


def changes(forecast: Forecast, fleet: FleetSpec, now: RoundCost, most: int = 3) -> tuple[WhatIf, ...]:
    """The `most` that save most of the round, best first; of equal ones the first that was tried."""
    found: list[WhatIf] = []
    for what, other in _candidates(forecast, fleet):
        try:
            then = forecast.round(other)
        except FleetError:
            continue  # this fleet cannot be changed so
        if now.total_s - then.total_s > _WORTH * now.total_s:
            found.append(WhatIf(what, then.total_s, then.pause_s))
    return tuple(sorted(found, key=lambda change: change.total_s)[:most])


def _candidates(forecast: Forecast, fleet: FleetSpec) -> Iterator[tuple[str, FleetSpec]]:
    """Descriptions of changes, with the changed fleets."""
    for what, links in _links(fleet.links):
        yield what, replace(fleet, links=links)
    yield from ((what, replace(fleet, engines=groups)) for what, groups in _engines(forecast, fleet))
    if any(not group.transport or not group.transport.sends_shards for group in fleet.engines):
        yield "buckets four times as large", replace(fleet, bucket_mb=4 * fleet.bucket_mb)


def _links(links: Links) -> Iterator[tuple[str, Links]]:
    for name, figure in (
        ("nic", cost_model.NIC_GB_S),
        ("nvlink", cost_model.NVLINK_GB_S),
        ("device", cost_model.DEVICE_GB_S),
        ("storage", cost_model.STORAGE_GB_S),
    ):
        twice = 2 * rate(getattr(links, name), figure) / 1e9
        yield f"{name} twice as fast: {twice:g} GB/s", replace(links, **{name: twice})
    if links.nics_per_host is not None:
        yield "a NIC for each GPU", replace(links, nics_per_host=None)


def _engines(forecast: Forecast, fleet: FleetSpec) -> Iterator[tuple[str, tuple[Engines, ...]]]:
    """Another transport, another location, experts whole or cut; for all groups."""
    groups = fleet.engines
    for way in ForecastTransport:
        if way is not ForecastTransport.NEAREST and any(group.transport is not way for group in groups):
            yield f"by {way.value}", tuple(replace(group, transport=way) for group in groups)
    for where in EngineLocation:
        if any(group.location is not where for group in groups):
            moved = tuple(replace(group, location=where, transport=None, shift=0) for group in groups)
            try:
                chosen = {group.transport.value for group in place_engines(replace(fleet, engines=moved)).groups}
            except FleetError:
                continue  # this fleet cannot be changed so
            yield f"engines on {where.value}, by {' and '.join(sorted(chosen))}", moved
    if forecast.tensors.model.family.experts:
        if any(group.ep < group.tp for group in groups):
            yield "engines with experts whole (engine ep = tp)", tuple(replace(each, ep=each.tp) for each in groups)
        if any(group.ep > 1 for group in groups):
            yield "engines with experts cut (engine ep = 1)", tuple(replace(each, ep=1) for each in groups)


_BAR = 40


class Report(msgspec.Struct, frozen=True):
    """One answer of ``weightbus simulate-fleet``."""

    model: str
    dtype: str
    parameters: int
    bytes: int
    tensors: int
    fleet: FleetSpec
    """The fleet, with the transports that were chosen."""
    round: RoundCost
    joining_s: float | None
    """From the `Hello` of one more engine until it gets requests. Null unless all go by sends."""
    changes: tuple[WhatIf, ...]
    notes: tuple[str, ...]


def report_of(forecast: Forecast, fleet: FleetSpec, most: int) -> Report:
    """Everything. Raises `FleetError` for a fleet that cannot be."""
    placed = place_engines(fleet).groups
    settled = replace(fleet, engines=tuple(replace(each.engines, transport=each.transport) for each in placed))
    tensors, now, joining_s = forecast.tensors, forecast.round(settled), forecast.joining_s(settled)
    found = changes(forecast, settled, now, most)
    return Report(
        model=tensors.model.architecture,
        dtype=tensors.specs[0].dtype,
        parameters=int((tensors.nbytes // tensors.item).sum()),
        bytes=tensors.total,
        tensors=len(tensors.specs),
        fleet=settled,
        round=now,
        joining_s=joining_s,
        changes=found,
        notes=tuple(_notes(settled, now, joining_s, found)),
    )


def _notes(fleet: FleetSpec, now: RoundCost, joining_s: float | None, found: tuple[WhatIf, ...]) -> Iterator[str]:
    ways = {group.transport for group in fleet.engines}
    for way in set(ForecastTransport) - {ForecastTransport(kind.value) for kind in TransportKind}:
        if way in ways or any(way.value in each.what for each in found):
            yield f"{way.value} is predicted, and not offered by this version"
    if now.kept_gigabytes > cost_model.GPU_GB.value:
        kept = f"{now.kept_gigabytes:.0f} GB of weights, a B300 has {cost_model.GPU_GB.value:g}"
        yield f"an engine's GPU would keep {kept}: give engine tp, or engine ep"
    if fleet.links.nic is None and any("NIC" in load.link for load in now.loads):
        nic = cost_model.NIC_GB_S
        yield f"{nic.value:g} GB/s for a NIC is {nic.source}; --nic says what yours does"
    if ForecastTransport.SENDS in ways:
        yield "sends were measured between two GPUs of a host: larger groups are taken to fill their links as well"
        pause_s = now.double_buffered_pause_s
        waits = "" if pause_s is None else f", and a request waits {_seconds(pause_s)}"
        yield f"engines are taken to stand still for what is sent: with memory for it they go on until the flip{waits}"
        yield "left out: what the first rank does for each pair of a rank and a worker before they begin"
    if ForecastTransport.DISTRIBUTED in ways:
        yield "distributed was measured with servers that join groups: over NVLink not with sidecars in their places"
    if joining_s is not None:
        yield "joining: its loader recorded ahead, from when the trainer offers the version (snapshots: every second)"
        yield "joining was measured with one worker and a model cut in two: larger layouts plan and connect for longer"
    yield from _turns(fleet, now)
    beside = sum(group.workers for group in fleet.engines if group.location is EngineLocation.HOSTS)
    each = fleet.trainer.gpus_on(0) + -(-beside // -(-fleet.trainer.gpus // fleet.trainer.gpus_per_host))
    if beside and each > fleet.trainer.gpus_per_host:
        yield f"the trainer's hosts are taken to have {each} GPUs each, all joined by NVLink"
    if fleet.links.nics_per_host is not None and any("NIC" in load.link for load in now.loads):
        yield "a GPU is taken to use one NIC of its host's at a time"
    yield "a first round also records, plans and connects: seconds more"


def _turns(fleet: FleetSpec, now: RoundCost) -> Iterator[str]:
    grouped = any(
        group.transport in {ForecastTransport.SENDS, ForecastTransport.DISTRIBUTED} for group in fleet.engines
    )
    if grouped and sum(group.count for group in fleet.engines) > 1:
        yield "engines are taken to have GPUs of their own: over NCCL those that share one take turns (--max-paused)"
    if now.waves > 1 and any(group.transport is ForecastTransport.DISTRIBUTED for group in fleet.engines):
        yield "over distributed every wave connects in its pause, in each round: left out"
    if now.waves > 1:
        yield "engines have their turns in the order in which they are described; links are those of the longest wave"


def render(report: Report) -> RenderableType:
    """Steps with bars, the busiest links, what would help."""
    size = f"{_count(report.parameters)} parameters, {_count(report.bytes)}B in {report.dtype}"
    head = [Text(f"{terminal_safe(report.model)}: {size}, {report.tensors:,} tensors", style="bold")]
    head += [Text(_trainer_line(report.fleet.trainer)), *(Text(_engines_line(each)) for each in report.fleet.engines)]
    ends = Text("\n".join(_ends(report)), style="bold")
    notes = [Text(f"note: {note}", style="dim") for note in report.notes]
    blank = Text("")
    return Group(*head, blank, _steps(report.round), ends, blank, _loads(report.round), blank, _changes(report), *notes)


def _ends(report: Report) -> Iterator[str]:
    now, engines = report.round, sum(group.count for group in report.fleet.engines)
    waits = f"a request that runs waits {_seconds(now.pause_s)}"
    if now.waves == 1:
        yield f"round {_seconds(now.total_s)}, of which {waits}"
    else:
        waves = f"{now.waves} waves of at most {_many(engines - now.serving, 'engine')}"
        yield f"round {_seconds(now.total_s)} in {waves}, of which {waits}: that of its engine"
        yield f"at least {now.serving} of {engines} engines serve at any time"
    if report.joining_s is not None:
        yield f"an engine that joins is routable after about {_seconds(report.joining_s)}"


def _trainer_line(trainer: TrainerSpec) -> str:
    hosts = -(-trainer.gpus // trainer.gpus_per_host)
    cut = f"tp {trainer.tp}, pp {trainer.pp}, ep {trainer.ep}, etp {trainer.expert_tp}"
    dp = trainer.gpus // trainer.tp // trainer.pp
    return f"trainer: {_many(trainer.gpus, 'GPU')} on {_many(hosts, 'host')}, {cut}, dp {dp}"


def _engines_line(engines: Engines) -> str:
    way = engines.transport.value if engines.transport else "?"
    cut = f"tp {engines.tp}, ep {engines.ep}"
    return f"engines: {engines.count} of {cut} ({_many(engines.workers, 'GPU')}) on {engines.location.value}, by {way}"


def _steps(now: RoundCost) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("step")
    table.add_column("seconds", justify="right")
    table.add_column("- serving, # paused" if now.waves == 1 else "- serving, # a wave is paused")
    for step in now.steps:
        width = max(1, round(_BAR * step.seconds / now.total_s))
        table.add_row(step.name, _seconds(step.seconds), ("#" if step.paused else "-") * width)
    return table


def _loads(now: RoundCost) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("busiest link")
    for column in ("GB", "mean GB", "seconds"):
        table.add_column(column, justify="right")
    for load in now.loads:
        where = load.link if load.link.endswith(("GPU", "host")) else f"{load.link},"
        name = where + " " + load.where.removeprefix("GPU ").removeprefix("host ")
        table.add_row(name, f"{load.gigabytes:.1f}", f"{load.mean_gigabytes:.1f}", _seconds(load.seconds))
    return table


def _changes(report: Report) -> RenderableType:
    if not report.changes:
        return Text("nothing that was tried makes this round shorter by a hundredth")
    table = Table(box=None, pad_edge=False)
    table.add_column("what would help most")
    for column in ("round", "wait", "saves"):
        table.add_column(column, justify="right")
    now = report.round.total_s
    for change in report.changes:
        saved = f"{100 * (now - change.total_s) / now:.0f} %"
        table.add_row(change.what, _seconds(change.total_s), _seconds(change.pause_s), saved)
    return table


def figures_table() -> Table:
    """Every constant and where it is from."""
    table = Table(box=None, pad_edge=False)
    for column in ("figure", "value", "from"):
        table.add_column(column)
    for name, figure in vars(cost_model).items():
        if isinstance(figure, CalibratedValue):
            table.add_row(name.lower(), f"{figure.value:g}", figure.source)
    return table


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def _count(value: int) -> str:
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value} "
