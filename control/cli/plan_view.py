"""The plan for people: one table for each channel, and below it the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..server import ChannelPlan, EnginePlan, PlanView, TrainerPlan
from ..terminal_text import terminal_safe

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_SHOWN: Final = 4


def render_plan(view: PlanView, *, explain: bool) -> RenderableType:
    """Every channel; with `explain` also why, and what a faster transport would need."""
    return Group(*(part for name, each in sorted(view.channels.items()) for part in _channel(name, each, explain)))


def _channel(name: str, channel: ChannelPlan, explain: bool) -> Iterator[RenderableType]:
    if channel.trainer is None:
        yield Text(terminal_safe(f"channel {name}: no trainer has joined or published yet"))
        return
    title = Text(terminal_safe(f"channel {name}: {_trainer(channel.trainer)}"), style="bold")
    table = Table(title=title, title_justify="left")
    for column in ("engine", "transport", "bytes per GPU", "last round"):
        table.add_column(column, overflow="fold")
    for engine, each in sorted(channel.engines.items()):
        last = f"{each.last.value}, {each.last_s:.3f} s" if each.last else "-"
        way = each.transport.value if each.transport else "none"
        table.add_row(Text(terminal_safe(engine)), way, size(each.bytes_per_gpu), last)
    yield table
    if not channel.engines:
        yield Text("no engine is here")
    if explain:
        why = (line for engine, each in sorted(channel.engines.items()) for line in _why(engine, each))
        yield Text("\n".join(map(terminal_safe, why)))


def _trainer(trainer: TrainerPlan) -> str:
    said = f"trainer {trainer.name}, {trainer.device}"
    if not trainer.here:
        said += ", not connected now"
    if len(trainer.hosts) > 1:
        said += f", {len(trainer.hosts)} hosts"
    said += f", offers {', '.join(kind.value for kind in trainer.transports) or 'nothing'}"
    return said if trainer.version is None else f"{said}; version {trainer.version} has {size(trainer.bytes)}"


def _why(engine: str, plan: EnginePlan) -> Iterator[str]:
    yield f"{engine}: {plan.why}"
    if plan.transport is not None:
        yield f"  bytes per GPU: {size(plan.bytes_per_gpu)}, {plan.bytes_why}"
    if plan.devices:
        more = f" and {len(plan.devices) - _SHOWN} more" if len(plan.devices) > _SHOWN else ""
        yield f"  workers on {', '.join(plan.devices[:_SHOWN])}{more}, host {plan.host}"
    for each in plan.faster:
        yield f"  not {each.transport.value}: {each.found}{f'. For that: {each.needed}' if each.needed else ''}"
    if plan.transport is not None and not plan.faster:
        yield "  nothing is preferred to it"


def size(count: int | None) -> str:
    """A number of bytes, as people read it."""
    if count is None:
        return "not known yet"
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if not unit else f"{value:.3g} {_UNITS[unit]}"
