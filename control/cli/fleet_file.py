"""A trainer and engines described in a JSON file, for a transport plan without a coordinator. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from ..machine import TransferEnds
from ..protocol import NAME_PATTERN, Count, EngineInfo, Malformed, ProcessLocation, Topology, TrainerInfo, TransportKind
from ..server import ChannelPlan, PlanView, plan_engines, trainer_plan

_DEVICES: Final = ("cpu", "cuda")
_WHAT: Final = "this does not describe a trainer and its engines"


class AgentDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One agent of a described fleet: the facts of its `Hello` and `Topology`. An omitted field is not known."""

    info: EngineInfo
    topology: Topology | None = None


class FleetDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    trainer: TrainerInfo
    engines: dict[str, msgspec.Raw]
    """`AgentDescription` by engine, decoded one by one so that an error names its engine."""
    topology: Topology | None = None
    """Topology of the trainer."""
    bytes: Count | None = None
    """Size of a version."""


Described = TypeVar("Described", FleetDescription, AgentDescription)


def plan_described_fleet(document: bytes) -> PlanView:
    """Transport plan of the described fleet, as a coordinator would make it. Raises `Malformed`."""
    fleet = _read(document, FleetDescription, "")
    found = {name: _read(bytes(each), AgentDescription, f"engine {name!r}: ") for name, each in fleet.engines.items()}
    wrong = [f"the trainer: {why}" for why in _trainer_problems(fleet)]
    for name, end in found.items():
        wrong += [f"engine {name!r}: {why}" for why in _engine_problems(name, end)]
    if wrong:
        raise Malformed(f"no fleet can be as this one: {'; '.join(wrong)}")
    ends = {name: TransferEnds(fleet.trainer, each.info, fleet.topology, each.topology) for name, each in found.items()}
    trainer = trainer_plan("trainer", fleet.trainer, fleet.topology, here=False)
    return PlanView({"imagined": ChannelPlan(trainer=trainer, engines=plan_engines(ends, fleet.bytes))})


def _read(document: bytes, kind: type[Described], whose: str) -> Described:
    try:
        return msgspec.json.decode(document, type=kind)
    except RecursionError as problem:
        raise Malformed(f"{_WHAT}: {whose}it is nested deeper than any description") from problem
    except ValueError as problem:
        raise Malformed(f"{_WHAT}: {whose}{problem}. Known: {_known(kind)}") from problem


def _known(kind: type[FleetDescription | AgentDescription]) -> str:
    """Names of the valid fields, for the error."""
    own: dict[str, type[msgspec.Struct]] = {"": kind}
    own |= {"trainer": TrainerInfo} if kind is FleetDescription else {"info": EngineInfo}
    own |= {"topology": Topology, "places": ProcessLocation}
    return "; ".join(
        f"{name}: ".removeprefix(": ") + ", ".join(each.__struct_encode_fields__) for name, each in own.items()
    )


def _trainer_problems(fleet: FleetDescription) -> Iterator[str]:
    ranks, info = fleet.trainer.ranks, fleet.trainer
    yield from _end_problems(info.device, info.transports)
    if ranks < 1:
        yield f"ranks = {ranks}, one at least is expected"
    places = fleet.topology.places if fleet.topology else ()
    yield from _place_problems(places, ranks, f"ranks = {ranks}")


def _engine_problems(name: str, end: AgentDescription) -> Iterator[str]:
    info, places = end.info, end.topology.places if end.topology else ()
    if not re.match(NAME_PATTERN, name):
        yield "its name is none that an agent may have: letters, digits, '.', '_' and '-', 64 at most"
    yield from _end_problems(info.device, info.transports)
    workers, said = info.tp * info.pp, f"tp x pp = {info.tp} x {info.pp}"
    if places and len(places) < workers:
        yield f"{len(places)} places for {said} workers: describe all of them, or none"
    yield from _place_problems(places, workers, said)


def _end_problems(device: str, transports: Sequence[TransportKind]) -> Iterator[str]:
    if device not in _DEVICES:
        yield f"device = {device!r}, {' or '.join(_DEVICES)} is expected"
    if len(set(transports)) != len(transports):
        yield f"transports names one twice: {', '.join(transports)}"


def _place_problems(places: Sequence[ProcessLocation], most: int, said: str) -> Iterator[str]:
    ranks = [place.rank for place in places]
    if len(set(ranks)) != len(ranks):
        yield f"places names a rank twice: {', '.join(map(str, ranks))}"
    elif most > 0 and (beyond := [rank for rank in ranks if rank >= most]):
        yield f"places names rank {beyond[0]}, and {said}: ranks are counted from 0"
