"""What would make a round shorter: the same fleet with one thing changed, calculated again. Pure, no table of advice."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from . import figures
from .fleet import Fleet, FleetError, Way, Where
from .forecast import Forecast
from .seconds import Round, rate

_WORTH = 0.01
"""Of the round: what saves less is not said."""


class Change(msgspec.Struct, frozen=True):
    """One change, and what the round would be with it."""

    what: str
    total_s: float
    pause_s: float


def changes(forecast: Forecast, fleet: Fleet, now: Round, most: int = 3) -> tuple[Change, ...]:
    """The `most` that save most of the round, best first; of equal ones the first that was tried."""
    found: list[Change] = []
    for what, other, evenly in _candidates(forecast, fleet):
        try:
            then = forecast.round(other, evenly=evenly)
        except FleetError:
            continue  # this fleet cannot be changed so
        if now.total_s - then.total_s > _WORTH * now.total_s:
            found.append(Change(what, then.total_s, then.pause_s))
    return tuple(sorted(found, key=lambda change: change.total_s)[:most])


def _candidates(forecast: Forecast, fleet: Fleet) -> Iterator[tuple[str, Fleet, bool]]:
    links = fleet.links
    for name, figure in (
        ("nic", figures.NIC_GB_S), ("nvlink", figures.NVLINK_GB_S),
        ("device", figures.DEVICE_GB_S), ("storage", figures.STORAGE_GB_S),
    ):  # fmt: skip
        twice = 2 * rate(getattr(links, name), figure) / 1e9
        yield f"{name} twice as fast: {twice:g} GB/s", replace(fleet, links=replace(links, **{name: twice})), False
    if links.nics_per_host is not None:
        yield "a NIC for each GPU", replace(fleet, links=replace(links, nics_per_host=None)), False
    yield "replicas of a part take turns evenly (the planner's turns go by rank number)", fleet, True
    for way in Way:
        if way is not Way.NEAREST and any(group.way is not way for group in fleet.engines):
            yield f"by {way.value}", _with(fleet, way=way), False
    for where in Where:
        if any(group.where is not where for group in fleet.engines):
            yield f"engines on {where.value}", _with(fleet, where=where, way=None), False
    if any(not group.way or not group.way.by_parts for group in fleet.engines):
        yield "buckets four times as large", replace(fleet, bucket_mb=4 * fleet.bucket_mb), False
    if forecast.tensors.model.family.experts:
        if any(group.ep < group.tp for group in fleet.engines):
            groups = tuple(replace(group, ep=group.tp) for group in fleet.engines)
            yield "engines with experts whole (engine ep = tp)", replace(fleet, engines=groups), False
        if any(group.ep > 1 for group in fleet.engines):
            groups = tuple(replace(group, ep=1) for group in fleet.engines)
            yield "engines with experts cut (engine ep = 1)", replace(fleet, engines=groups), False


def _with(fleet: Fleet, **fields: object) -> Fleet:
    return replace(fleet, engines=tuple(replace(group, **fields) for group in fleet.engines))
