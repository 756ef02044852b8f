"""The document behind `weightbus plan`: the transport of each engine for the next version, and the reason. Pure.

The choice is the coordinator's own, made by the functions that a round uses (machine/routing.py).
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
    without_gpu_conflicts,
)
from ..protocol import EngineInfo, Malformed, ProcessLocation, Topology, TrainerInfo, TransportKind

_ENCODER: Final = msgspec.json.Encoder()


class FasterTransport(msgspec.Struct, frozen=True):
    """A preferred transport that cannot be taken."""

    transport: TransportKind
    found: str
    needed: str
    """Change that would make it possible; empty if there is none."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan for one connected engine."""

    transport: TransportKind | None
    """Null: no transport can serve the engine, and rounds leave it out."""
    why: str
    bytes_per_gpu: int | None
    """Bytes of a version that the worker with the most receives. Null: not known yet."""
    bytes_why: str
    faster: tuple[FasterTransport, ...]
    host: str
    devices: tuple[str, ...]
    """GPU of each worker, as far as known."""
    last: TransportKind | None = None
    """Transport of the engine's last version since the coordinator started."""
    last_s: float = 0.0


class TrainerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer that publishes in the channel."""

    name: str
    here: bool
    """True while the trainer is connected."""
    device: str
    hosts: tuple[str, ...]
    """Hosts of the trainer's ranks, rank 0's first."""
    devices: tuple[str, ...]
    """GPU of each rank, as far as known."""
    address: str
    transports: tuple[TransportKind, ...]
    """Transports in order of preference."""
    version: int | None = None
    """Last version published since the coordinator started."""
    bytes: int | None = None
    """Size of that version."""


class ChannelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One channel. Without a trainer there is no plan for its engines."""

    trainer: TrainerPlan | None
    engines: dict[str, EnginePlan]


class PlanView(msgspec.Struct, frozen=True):
    """The document: one plan for each channel."""

    channels: dict[str, ChannelPlan]


_DECODER: Final = msgspec.json.Decoder(PlanView)


def encode_plan(view: PlanView) -> bytes:
    """The document as JSON."""
    return _ENCODER.encode(view)


def parse_plan(document: bytes) -> PlanView:
    """Decode the document. Raises `CoordinatorOnStandby` or `Malformed`."""
    try:
        return _DECODER.decode(document)
    except ValueError as problem:
        refuse_standby(document)
        raise Malformed(f"this is not the plan of a coordinator of this version: {problem}") from problem


def plan_fleet(channels: Iterable[Channel], members: Membership) -> PlanView:
    """Plan of every channel."""
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
    """Plan entry of a trainer from its `Hello` and `Topology`; `here`: it is connected."""
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
    """The trainer that published last, as it is now; before the first publication, the one that joined last."""
    for agent in reversed(present):
        if agent.trainer and (publisher is None or publisher.name == agent.name):
            return agent.name, True, agent.trainer, agent.topology
    return (publisher.name, False, publisher.info, publisher.topology) if publisher else None


def plan_engines(
    fleet: Mapping[str, TransferEnds],
    version_bytes: int | None,
    engines: Mapping[str, EngineRecord] = MappingProxyType({}),
) -> dict[str, EnginePlan]:
    """Choose a transport for each engine of one round. `version_bytes`: size of a version, None if not known."""
    routes = without_gpu_conflicts({name: (ends, choose(ends)) for name, ends in fleet.items()})
    return {name: _plan_of(ends, routes[name], version_bytes, engines.get(name)) for name, ends in fleet.items()}


def _plan_of(ends: TransferEnds, route: Route, version_bytes: int | None, engine: EngineRecord | None) -> EnginePlan:
    places = ends.from_engine.places if ends.from_engine else ()
    taken, taken_why = _bytes(route, ends.engine, ends.from_engine, version_bytes)
    return EnginePlan(
        transport=route.transport,
        why=route.reason,
        bytes_per_gpu=taken,
        bytes_why=taken_why,
        faster=tuple(FasterTransport(kind, each.found, each.needed) for kind, each in route.objections.items()),
        host=ends.engine.host,
        devices=_devices(places),
        last=engine.last_transport if engine else None,
        last_s=engine.last_transfer_s if engine else 0.0,
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
