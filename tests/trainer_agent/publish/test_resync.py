"""Engines to which the last snapshot is delivered by itself, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from weightbus.control.machine.status import ChannelView, LeaseView, parse
from weightbus.control.protocol.errors import WeightbusError
from weightbus.trainer_agent.publish.background_publisher import BackgroundPublisher, engines_behind

from .test_lag_limit import view

BEHIND = view(7, {"e0": (7, "serving"), "e1": (6, "serving"), "e2": (None, "pending"), "e3": (None, "dirty")})


@pytest.mark.parametrize(
    ("channel", "version", "names"),
    [
        (BEHIND, 7, ("e1", "e2", "e3")),
        (BEHIND, 6, ()),
        (None, 7, ()),
        (view(None, {"e0": (None, "serving")}), 7, ()),
        (view(7, {"e0": (7, "serving"), "e1": (6, "lost"), "e2": (None, "lost")}), 7, ()),
        (view(7, {"e0": (7, "serving"), "e1": (None, "lent")}), 7, ()),
    ],
)
def test_engines_that_are_behind(channel: ChannelView | None, version: int, names: tuple[str, ...]) -> None:
    """Engines that are present without the committed version: none that are lost, or have released their memory."""
    assert engines_behind(channel, version) == names


def bare(channel_status: Callable[[], ChannelView | None]) -> BackgroundPublisher:
    """Without buffers."""
    made = BackgroundPublisher.__new__(BackgroundPublisher)
    made._context, made._warned = cast("Any", SimpleNamespace(channel_status=channel_status)), set()
    return made


@pytest.mark.parametrize(
    ("channel", "offered"),
    [
        (BEHIND, True),
        (msgspec.structs.replace(BEHIND, lease=LeaseView("another", 9, 8, 5.0)), False),
        (view(7, {"e0": (7, "serving")}), False),
    ],
)
def test_nothing_is_offered_while_another_trainer_holds_the_lease(channel: ChannelView, offered: bool) -> None:
    """Its version is newer: a catch-up that waited for the lease would bring what is old by then."""
    assert bare(lambda: channel)._behind(7) is offered


def test_why_no_engine_is_looked_for_is_said_once() -> None:
    """It is tried every second, and what keeps it may stay for days: each reason is a warning, with advice."""
    reasons = iter(["refused", "refused", "closed", "refused", "closed", *(f"request {n}" for n in range(1000))])

    def status() -> ChannelView:
        raise WeightbusError(next(reasons))

    publisher = bare(status)
    with capture_logs() as lines:
        found = [publisher._behind(7) for _ in range(1005)]
    assert not any(found)
    assert [line["error"] for line in lines[:3]] == ["refused", "closed", "request 0"]
    assert {(line["log_level"], "weightbus status" in line["advice"]) for line in lines} == {("warning", True)}
    assert len(lines) < 100


def test_a_status_that_says_nothing_is_a_reason_too() -> None:
    """Such as that of a coordinator of another release."""
    publisher = bare(lambda: parse(b"{]").channels["c"])
    with capture_logs() as lines:
        assert not publisher._behind(7)
        assert not publisher._behind(7)
    assert [line["log_level"] for line in lines] == ["warning"]
