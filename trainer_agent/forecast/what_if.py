"""Changes of a fleet that would make its round shorter: one thing changed, calculated again. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from . import calibration
from .cost_model import RoundCost, rate
from .fleet import EngineLocation, Engines, FleetError, FleetSpec, ForecastTransport, Links, place_engines
from .forecast import Forecast

_Groups = tuple[Engines, ...]
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
        ("nic", calibration.NIC_GB_S),
        ("nvlink", calibration.NVLINK_GB_S),
        ("device", calibration.DEVICE_GB_S),
        ("storage", calibration.STORAGE_GB_S),
    ):
        twice = 2 * rate(getattr(links, name), figure) / 1e9
        yield f"{name} twice as fast: {twice:g} GB/s", replace(links, **{name: twice})
    if links.nics_per_host is not None:
        yield "a NIC for each GPU", replace(links, nics_per_host=None)


def _engines(forecast: Forecast, fleet: FleetSpec) -> Iterator[tuple[str, _Groups]]:
    """Another transport, another location, experts whole or cut; for all groups."""
    groups = fleet.engines
    for way in ForecastTransport:
        if way is not ForecastTransport.NEAREST and any(group.transport is not way for group in groups):
            yield f"by {way.value}", tuple(replace(group, transport=way) for group in groups)
    for where in EngineLocation:
        if any(group.location is not where for group in groups):
            moved = tuple(replace(group, location=where, transport=None, shift=0) for group in groups)
            yield f"engines on {where.value}, by {_ways(fleet, moved)}", moved
    if forecast.tensors.model.family.experts:
        if any(group.ep < group.tp for group in groups):
            yield "engines with experts whole (engine ep = tp)", tuple(replace(each, ep=each.tp) for each in groups)
        if any(group.ep > 1 for group in groups):
            yield "engines with experts cut (engine ep = 1)", tuple(replace(each, ep=1) for each in groups)


def _ways(fleet: FleetSpec, moved: _Groups) -> str:
    """Transports that would be chosen for these groups; "nothing" for an impossible fleet."""
    try:
        groups = place_engines(replace(fleet, engines=moved)).groups
    except FleetError:
        return "nothing"
    return " and ".join(sorted({group.transport.value for group in groups}))
