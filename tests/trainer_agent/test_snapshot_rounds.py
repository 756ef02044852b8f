"""Whom the last snapshot is brought to by itself, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from weightbus.control.status import ChannelView, LeaseView
from weightbus.trainer_agent import snapshot_rounds
from weightbus.trainer_agent.snapshot_rounds import SnapshotRounds, behind_in

from .test_lag import view

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
    assert behind_in(channel, version) == names


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
    monkeypatch.setattr(snapshot_rounds, "parse", lambda _: SimpleNamespace(channels={"c": channel}))
    settings = SimpleNamespace(channel="c", request_timeout_s=1.0)
    rounds = SnapshotRounds.__new__(SnapshotRounds)
    rounds._outfit = cast("Any", SimpleNamespace(settings=settings, bus=SimpleNamespace(status=lambda _: b"")))
    assert rounds.behind(7) is offered
