"""The subcommand ``plan``: the transport of each engine for the next version, why, and what a faster one needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ..machine import TransferEnds
from ..protocol import (
    NAME_PATTERN,
    ConfigurationError,
    Count,
    EngineInfo,
    Malformed,
    NoTrainer,
    ProcessLocation,
    Topology,
    TrainerInfo,
    TransportKind,
)
from ..server import ChannelPlan, EnginePlan, PlanView, TrainerPlan, encode_plan, parse_plan, plan_engines, trainer_plan
from ..terminal_text import byte_size, terminal_safe
from . import status_view
from .settings import SettingsCommand

_URL: Final = "http://127.0.0.1:5752"
_SHOWN: Final = 4


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``weightbus plan``."""

    url: Annotated[str, Meta(description="the coordinator's HTTP port")] = _URL
    explain: Annotated[bool, Meta(description="say also why, and what a faster transport would need")] = False
    json: Annotated[bool, Meta(description="print the document as it is")] = False
    channel: Annotated[str, Meta(description="only this one")] = ""
    file: Annotated[
        Path | None, Meta(description="no coordinator: a description of a trainer and its engines (JSON)")
    ] = None
    timeout_s: Annotated[float, Meta(description="how long an answer may take", gt=0, le=86400)] = 5.0


class PlanCommand(SettingsCommand[PlanSettings]):
    """``weightbus plan``: prints the transports that the coordinator would choose, and its reasons."""

    help: str = "show by which transport each engine takes versions; --explain: why, and what a faster one needs"
    section: str = "plan"
    kind = PlanSettings

    def do(self, given: PlanSettings) -> int:
        """Read the plan over HTTP, or make it from a file, and print it."""
        view = _read_plan(given)
        if given.channel:
            view = PlanView({given.channel: _channel(view, given.channel)})
        if not any(each.trainer for each in view.channels.values()):
            raise NoTrainer
        if given.json:
            print(encode_plan(view).decode())  # noqa: T201
            return 0
        status_view.print_unwrapped(Console(), render_plan(view, explain=given.explain))
        return 0


def _read_plan(given: PlanSettings) -> PlanView:
    if given.file is None:
        return parse_plan(status_view.fetch(given.url, given.timeout_s, "/plan"))
    if given.url != _URL:
        print(f"--url {terminal_safe(given.url)} is not asked: --file describes the fleet", file=sys.stderr)  # noqa: T201
    try:
        document = given.file.read_bytes()
    except OSError as problem:
        advice = "give a JSON file with trainer and engines, or leave --file out to ask a coordinator"
        raise ConfigurationError(f"{given.file} cannot be read: {problem.strerror}; {advice}") from problem
    return plan_described_fleet(document)


def _channel(view: PlanView, name: str) -> ChannelPlan:
    if name not in view.channels:
        raise ConfigurationError(f"no channel {name!r}; there are: {', '.join(sorted(view.channels)) or 'none'}")
    return view.channels[name]


def render_plan(view: PlanView, *, explain: bool) -> Text:
    """A paragraph for each channel; with `explain` also the reasons, and what a faster transport needs.

    Lines are as long as their content, so that names and commands stay whole at any width.
    """
    shown = Text(no_wrap=True, overflow="ignore")
    for number, (name, channel) in enumerate(sorted(view.channels.items())):
        title, *lines = _channel_lines(name, channel, explain=explain)
        shown.append(f"{chr(10) * 2 if number else ''}{terminal_safe(title)}", style="bold")
        for line in lines:
            shown.append(f"\n  {terminal_safe(line)}")
    return shown


def _channel_lines(name: str, channel: ChannelPlan, *, explain: bool) -> Iterator[str]:
    if channel.trainer is None:
        yield f"channel {name}: no trainer has joined or published yet"
        return
    yield f"channel {name}: {_trainer_line(channel.trainer)}"
    rows = [("engine", "transport", "bytes per GPU", "last round")]
    for engine, each in sorted(channel.engines.items()):
        last = f"{each.last.value}, {each.last_s:.3f} s" if each.last else "-"
        way = each.transport.value if each.transport else "none"
        rows.append((terminal_safe(engine), way, _size(each.bytes_per_gpu), last))
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
    if not channel.engines:
        yield "no engine is here"
    if explain:
        for engine, each in sorted(channel.engines.items()):
            yield from _explanation(engine, each)


def _trainer_line(trainer: TrainerPlan) -> str:
    said = f"trainer {trainer.name}, {trainer.device}"
    if not trainer.here:
        said += ", not connected now"
    if len(trainer.hosts) > 1:
        said += f", {len(trainer.hosts)} hosts"
    said += f", offers {', '.join(kind.value for kind in trainer.transports) or 'nothing'}"
    return said if trainer.version is None else f"{said}; version {trainer.version} has {_size(trainer.bytes)}"


def _explanation(engine: str, plan: EnginePlan) -> Iterator[str]:
    yield f"{engine}: {plan.why}"
    if plan.transport is not None:
        yield f"  bytes per GPU: {_size(plan.bytes_per_gpu)}, {plan.bytes_why}"
    if plan.devices:
        more = f" and {len(plan.devices) - _SHOWN} more" if len(plan.devices) > _SHOWN else ""
        yield f"  workers on {', '.join(plan.devices[:_SHOWN])}{more}, host {plan.host}"
    for each in plan.faster:
        yield f"  not {each.transport.value}: {each.found}{f'. For that: {each.needed}' if each.needed else ''}"
    if plan.transport is not None and not plan.faster:
        yield "  nothing is preferred to it"


def _size(count: int | None) -> str:
    return "not known yet" if count is None else byte_size(count)


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


plan = PlanCommand()
