"""Whom the last snapshot is brought to by itself, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from weightbus.control.machine.status import ChannelView, LeaseView
from weightbus.control.protocol.errors import ClientClosed, WeightbusError
from weightbus.trainer_agent.publish import snapshot
from weightbus.trainer_agent.publish.snapshot import SnapshotPublisher, engines_behind

from .test_lag_limit import view

if TYPE_CHECKING:
    from weightbus.trainer_agent.publish.driver import PublicationDriver

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
def test_who_is_behind(channel: ChannelView | None, version: int, names: tuple[str, ...]) -> None:
    """Who is here and lacks what is committed: not who is gone, nor who gave its memory back."""
    assert engines_behind(channel, version) == names


@pytest.mark.parametrize(
    ("channel", "offered"),
    [
        (BEHIND, True),
        (msgspec.structs.replace(BEHIND, lease=LeaseView("another", 9, 8, 5.0)), False),
        (view(7, {"e0": (7, "serving")}), False),
    ],
)
def test_nothing_is_offered_while_somebody_else_holds_the_lease(
    monkeypatch: pytest.MonkeyPatch, channel: ChannelView, offered: bool
) -> None:
    """Its version is newer: a catch-up that waited for the lease would bring what is old by then."""
    monkeypatch.setattr(snapshot, "parse", lambda _: SimpleNamespace(channels={"c": channel}))
    settings = SimpleNamespace(channel="c", request_timeout_s=1.0)
    rounds = SnapshotPublisher.__new__(SnapshotPublisher)
    rounds._context = cast("Any", SimpleNamespace(settings=settings, bus=SimpleNamespace(status=lambda _: b"")))
    assert rounds.behind(7) is offered


def bare(**context: object) -> SnapshotPublisher:
    """Without stores."""
    rounds = SnapshotPublisher.__new__(SnapshotPublisher)
    rounds._context, rounds._warned = cast("Any", SimpleNamespace(**context)), set()
    return rounds


def test_why_nobody_is_looked_for_is_said_once() -> None:
    """It is tried every second, and what keeps it may stay for days: each reason is a warning, with advice."""
    reasons = iter(["refused", "refused", "closed", "refused", "closed", *(f"request {n}" for n in range(1000))])

    def status(_deadline_s: float) -> bytes:
        raise WeightbusError(next(reasons))

    settings = SimpleNamespace(channel="c", request_timeout_s=1.0)
    rounds = bare(settings=settings, bus=SimpleNamespace(status=status))
    with capture_logs() as lines:
        found = [rounds.behind(7) for _ in range(1005)]
    assert not any(found)
    assert [line["error"] for line in lines[:3]] == ["refused", "closed", "request 0"]
    assert {(line["log_level"], "weightbus status" in line["advice"]) for line in lines} == {("warning", True)}
    assert len(lines) < 100


def test_a_status_that_says_nothing_is_a_reason_too() -> None:
    """Such as that of a coordinator of another release."""
    settings = SimpleNamespace(channel="c", request_timeout_s=1.0)
    rounds = bare(settings=settings, bus=SimpleNamespace(status=lambda _deadline_s: b"{]"))
    with capture_logs() as lines:
        assert not rounds.behind(7)
        assert not rounds.behind(7)
    assert [line["log_level"] for line in lines] == ["warning"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_round_learns_of_the_coordinator_is_kept(fails: bool) -> None:
    """By the next one too, of live weights or of a snapshot: else each takes the same coordinator for a new one."""
    rounds = bare(boot=1)
    rounds._contexts = [cast("Any", SimpleNamespace(boot=0)) for _ in range(2)]
    seen: list[int] = []

    def drive(buffer: int, learns: int) -> PublicationDriver:
        own = rounds._context_of(buffer)
        seen.append(own.boot)

        def run() -> str:
            own.boot = learns
            if fails:
                raise ClientClosed("gone")
            return "result"

        made = SimpleNamespace(run=run, fail=str, report=str, cause=None)
        return cast("PublicationDriver", made)

    rounds._run(drive(0, 2), 0)
    assert rounds._context.boot == 2
    rounds._run(drive(1, 3), 1)
    rounds._run(drive(0, 3), 0)
    assert seen == [1, 2, 3]
