"""The subcommand ``plan``: how each engine would take the next version, why so, and what a faster way would need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from rich.console import Console

from ..protocol import ConfigurationError, NoTrainer
from ..server import PlanView, transport_plan as plan_document
from ..terminal_text import terminal_safe
from . import fleet_file as imagined_fleet, plan_view, status_view
from .settings_command import SettingsCommand

_URL: Final = "http://127.0.0.1:5752"


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
    """Shows the transports that the coordinator has chosen, and its reasons."""

    help: str = "show by which transport each engine takes versions; --explain: why, and what a faster one needs"
    section: str = "plan"
    kind = PlanSettings

    def do(self, given: PlanSettings) -> int:
        """Read the plan over HTTP, or make it of a file, and print it."""
        view = _read(given)
        if given.channel:
            view = PlanView({given.channel: _channel(view, given.channel)})
        if not any(each.trainer for each in view.channels.values()):
            raise NoTrainer
        if given.json:
            print(plan_document.encode_plan(view).decode())  # noqa: T201
            return 0
        Console().print(plan_view.render_plan(view, explain=given.explain))
        return 0


def _read(given: PlanSettings) -> PlanView:
    if given.file is None:
        return plan_document.parse_plan(status_view.fetch(given.url, given.timeout_s, "/plan"))
    if given.url != _URL:
        print(f"--url {terminal_safe(given.url)} is not asked: --file describes the fleet", file=sys.stderr)  # noqa: T201
    try:
        document = given.file.read_bytes()
    except OSError as problem:
        advice = "give a JSON file with trainer and engines, or leave --file out to ask a coordinator"
        raise ConfigurationError(f"{given.file} cannot be read: {problem.strerror}; {advice}") from problem
    return imagined_fleet.plan_described_fleet(document)


def _channel(view: PlanView, name: str) -> plan_document.ChannelPlan:
    if name not in view.channels:
        raise ConfigurationError(f"no channel {name!r}; there are: {', '.join(sorted(view.channels)) or 'none'}")
    return view.channels[name]


plan = PlanCommand()
