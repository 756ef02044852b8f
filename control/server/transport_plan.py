"""What `weightbus plan` shows: by which transport each engine would take the next version, and why. Pure.

It is the coordinator's own choice, made as a round makes it (routing.py), so nobody has to guess it from the facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from ..machine import (
    IN_PLACE,
    Agent,
    Channel,
    EngineRecord,
    Membership,
    Publisher,
    Route,
    TransferEnds,
    choose,
    refuse_standby,
    spread,
)
from ..protocol import EngineInfo, Malformed, ProcessLocation, Topology, TrainerInfo, TransportKind

_ENCODER: Final = msgspec.json.Encoder()


class FasterTransport(msgspec.Struct, frozen=True):
    """A transport that would be preferred, and is not taken."""

    transport: TransportKind
    found: str
    needed: str
    """What would change that; empty where nothing would."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that is here."""

    transport: TransportKind | None
    """Null: none can serve it, and rounds leave it out."""
    why: str
    bytes_per_gpu: int | None
    """What the worker with most of them takes of a version. Null: not known yet."""
    bytes_why: str
    faster: tuple[FasterTransport, ...]
    host: str
    devices: tuple[str, ...]
    """One for each worker, as far as known."""
    last: TransportKind | None = None
    """How it got the last version, in this life of the coordinator."""
    last_s: float = 0.0


class TrainerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Whose versions they are."""

    name: str
    here: bool
    """It is connected."""
    device: str
    hosts: tuple[str, ...]
    """Of its ranks, the root's first."""
    devices: tuple[str, ...]
    """One for each rank, as far as known."""
    address: str
    transports: tuple[TransportKind, ...]
    """In order of preference."""
    version: int | None = None
    """The last one that it published in this life of the coordinator."""
    bytes: int | None = None
    """Of that version."""


class ChannelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One channel. Without a trainer nothing can be said of its engines."""

    trainer: TrainerPlan | None
    engines: dict[str, EnginePlan]


class PlanView(msgspec.Struct, frozen=True):
    """The whole document."""

    channels: dict[str, ChannelPlan]


_DECODER: Final = msgspec.json.Decoder(PlanView)


def encode_plan(view: PlanView) -> bytes:
    """JSON."""
    return _ENCODER.encode(view)


def parse_plan(document: bytes) -> PlanView:
    """The document, typed. Raises `CoordinatorOnStandby`, or `Malformed`."""
    try:
        return _DECODER.decode(document)
    except ValueError as problem:
        refuse_standby(document)
        raise Malformed(f"this is not the plan of a coordinator of this version: {problem}") from problem


def plan_fleet(channels: Iterable[Channel], members: Membership) -> PlanView:
    """Every channel, by name."""
    return PlanView({channel.name: _channel(channel, members) for channel in channels})


def _channel(channel: Channel, members: Membership) -> ChannelPlan:
    publisher = channel.publisher
    trainer = _trainer(publisher, members.trainers(channel.name))
    if trainer is None:
        return ChannelPlan(trainer=None, engines={})
    name, here, info, topology = trainer
    size = publisher.bytes if publisher else None
    alive = {str(name): engine for name, engine in channel.engines.items() if engine.alive}
    ends = {name: TransferEnds(info, engine.info, topology, engine.topology) for name, engine in alive.items()}
    engines = plan_engines(ends, size, alive)
    view = trainer_plan(name, info, topology, here=here)
    if publisher is not None:
        view = msgspec.structs.replace(view, version=publisher.version, bytes=publisher.bytes)
    return ChannelPlan(trainer=view, engines=engines)


def trainer_plan(name: str, info: TrainerInfo, topology: Topology | None, *, here: bool) -> TrainerPlan:
    """Of what it says of itself; `here` while it is connected."""
    places = topology.places if topology else ()
    return TrainerPlan(
        name=name,
        here=here,
        device=info.device,
        hosts=tuple(dict.fromkeys((info.host, *(place.host for place in places)))),
        devices=_devices(places),
        address=topology.address if topology else "",
        transports=info.transports,
    )


def _trainer(
    publisher: Publisher | None, present: list[Agent]
) -> tuple[str, bool, TrainerInfo, Topology | None] | None:
    """Who published last, as it is today; before that, who was heard of last."""
    for agent in reversed(present):
        if agent.trainer and (publisher is None or publisher.name == agent.name):
            return agent.name, True, agent.trainer, agent.topology
    return (publisher.name, False, publisher.info, publisher.topology) if publisher else None


def plan_engines(
    fleet: Mapping[str, TransferEnds],
    version_bytes: int | None,
    engines: Mapping[str, EngineRecord] = MappingProxyType({}),
) -> dict[str, EnginePlan]:
    """The choice for engines that are served together. `version_bytes` of the model, where that is known."""
    routes = spread({name: (ends, choose(ends)) for name, ends in fleet.items()})
    return {name: _plan_of(ends, routes[name], version_bytes, engines.get(name)) for name, ends in fleet.items()}


def _plan_of(ends: TransferEnds, route: Route, version_bytes: int | None, engine: EngineRecord | None) -> EnginePlan:
    places = ends.from_engine.places if ends.from_engine else ()
    taken, taken_why = _bytes(route, ends.engine, ends.from_engine, version_bytes)
    return EnginePlan(
        transport=route.transport,
        why=route.reason,
        bytes_per_gpu=taken,
        bytes_why=taken_why,
        faster=tuple(FasterTransport(kind, each.found, each.needed) for kind, each in route.hurdles.items()),
        host=ends.engine.host,
        devices=_devices(places),
        last=engine.took_by if engine else None,
        last_s=engine.took_s if engine else 0.0,
    )


def _bytes(
    route: Route, engine: EngineInfo, told: Topology | None, version_bytes: int | None
) -> tuple[int | None, str]:
    if route.transport is None:
        return None, "it takes none"
    takes: Mapping[TransportKind, int] = told.takes if told else {}
    if route.transport in takes:
        return takes[route.transport], "by its plan"
    if route.transport in IN_PLACE:
        limit = f", of {version_bytes} of the version in {engine.tp} workers" if version_bytes else ""
        return None, f"known when it has taken a version by {route.transport.value}{limit}"
    if version_bytes is None:
        return None, "known when a version was published"
    return version_bytes, "every worker is given the whole version"


def _devices(places: Iterable[ProcessLocation]) -> tuple[str, ...]:
    return tuple(place.device for place in places)
