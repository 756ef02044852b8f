"""Bounded staleness: the rule alone, and training loops that stand still for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.kit.waiting import until
from weightbus.control.machine.states import RoundState
from weightbus.control.machine.status import ChannelView, EngineView, HeldStatus, RoundView
from weightbus.control.protocol.messages import TransportKind
from weightbus.trainer_agent.machine.errors import RoundAborted, TooFarAhead
from weightbus.trainer_agent.publish.agent import TrainerAgent
from weightbus.trainer_agent.publish.background_publisher import (
    BackgroundPublisher,
    LagDecision,
    lag_decision,
    oldest_served,
)
from weightbus.trainer_agent.settings import TrainerSettings

from .test_background_publisher import PATIENCE_S, Gate, Loop


@pytest.mark.parametrize(
    ("serving", "coming", "expired", "expected"),
    [
        (4, False, False, LagDecision.GO),
        (5, True, True, LagDecision.GO),
        (6, False, False, LagDecision.GO),
        (3, True, False, LagDecision.WAIT),
        (3, False, False, LagDecision.TOO_FAR),
        (3, True, True, LagDecision.TOO_FAR),
        (None, True, False, LagDecision.WAIT),
        (None, False, False, LagDecision.WAIT),
        (None, False, True, LagDecision.TOO_FAR),
    ],
)
def test_the_rule(serving: int | None, coming: bool, expired: bool, expected: LagDecision) -> None:
    """Go on within the bound; wait while something comes or nothing is known; say so when nothing helps any more."""
    assert lag_decision(5, serving, 1, coming=coming, expired=expired) is expected


def view(committed: int | None, engines: dict[str, tuple[int | None, str]]) -> ChannelView:
    def engine(version: int | None, state: str) -> EngineView:
        return EngineView(
            url="",
            state=state,
            version=version,
            lag=0,
            ready=False,
            reason="",
            last_seen_s=0.0,
            incarnation="",
            server_version="",
            tp=1,
            pp=1,
            dp=1,
            device="cpu",
            transports=(TransportKind.LOCAL,),
        )

    return ChannelView(
        epoch=1,
        committed=None if committed is None else HeldStatus(committed, "", "", 1),
        lease=None,
        round=RoundView(RoundState.IDLE),
        engines={name: engine(version, state) for name, (version, state) in engines.items()},
        ready=(),
    )


@pytest.mark.parametrize(
    ("channel", "expected"),
    [
        (None, 0),
        (view(None, {"e0": (None, "serving")}), 0),
        (view(7, {}), 7),
        (view(7, {"e0": (7, "serving"), "e1": (6, "serving")}), 6),
        (view(7, {"e0": (7, "serving"), "e1": (2, "serving"), "e2": (None, "serving")}), 7),
        (view(7, {"e0": (6, "transferring")}), 6),
        (view(7, {"e0": (6, "dirty"), "e1": (6, "lost"), "e2": (9, "serving")}), 7),
    ],
)
def test_what_is_served_is_the_oldest_version_of_an_engine_that_gets_requests(
    channel: ChannelView | None, expected: int
) -> None:
    """Also of one in the middle of a round. Where nobody gets any, it is the committed version."""
    assert oldest_served(channel, 1) == expected


def test_a_publication_that_ends_while_the_status_is_asked_for_is_waited_for() -> None:
    """The answer may be of the moment before: it is asked for again, and nobody is told that nothing is coming."""
    answers = [view(5, {"e0": (5, "serving")}), view(6, {"e0": (6, "serving")})]
    background = BackgroundPublisher.__new__(BackgroundPublisher)
    background._changed, background._ended = threading.Condition(), 0
    background._queue = cast("Any", SimpleNamespace(pending=1))
    heard: list[object] = []

    def status() -> ChannelView:
        background._ended, background._queue = 1, cast("Any", SimpleNamespace(pending=0))  # while it is under way
        return answers.pop(0)

    settings = TrainerSettings(channel="c", max_lag=1, insecure_loopback=True)
    background._context = cast("Any", SimpleNamespace(settings=settings, channel_status=status))
    assert background.wait_until_allowed(7, cast("Any", SimpleNamespace(tell=heard.append))) == ""
    assert len(heard) == 1


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """Its coordinator is a thread of this process."""
    made = Loop(tmp_path)
    yield made
    made.close()


def test_training_goes_on_one_version_ahead_and_no_further(loop: Loop) -> None:
    """The second snapshot returns when the first is served, on every rank, and says how long that took."""
    gate = Gate()
    engine = loop.engine("e0", gate)
    loop.connect(max_lag=1)
    first = loop.snapshot(1)
    assert gate.reached.wait(PATIENCE_S)
    assert not first[0].over()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(loop.snapshot, 2)
        rank_zero = loop.agents[0]._rank_zero
        assert rank_zero is not None
        background = rank_zero._background
        loop.until(lambda: background.pending == 2)
        with pytest.raises(TimeoutError):
            second.result(1.5)  # three beats: the other rank heard of it, too
        assert background.pending == 2
        gate.opened.set()
        handles = second.result(PATIENCE_S)
    until(lambda: engine.label is not None and engine.label >= 1)  # a moment after the commit
    assert all(handle.stood_s > 0.5 for handle in handles)
    assert first[0].stood_s < handles[0].stood_s, "nobody waited for the first one"
    assert loop.wait(handles).committed
    third = loop.snapshot(3)
    assert loop.wait(third).committed


def test_without_lag_a_snapshot_is_served_when_publish_returns(loop: Loop) -> None:
    """max_lag = 0 is synchronous training."""
    engine = loop.engine("e0")
    loop.connect(max_lag=0)
    for version in (1, 2):
        loop.snapshot(version)
        assert loop.committed() == version
        loop.until(lambda version=version: engine.label == version)  # type: ignore[misc]


@pytest.mark.parametrize("why", ["late", "aborted"])
def test_a_trainer_too_far_ahead_is_told_so_on_every_rank(loop: Loop, why: str) -> None:
    """When the time is over, or at once when nothing is coming; the snapshot's publication is told of as always."""
    gate = Gate()
    engine = loop.engine("e0", gate)
    loop.connect(max_lag=0, lag_timeout_s=0.7 if why == "late" else 60.0)

    def attempt(agent: TrainerAgent) -> TooFarAhead:
        with pytest.raises(TooFarAhead, match="version 1 is 1 ahead of what engines serve") as caught:
            agent.publish(1, mode="snapshot")
        return caught.value

    if why == "aborted":
        engine.before = engine.leave
        gate.opened.set()
    errors = [each for each in loop.each(attempt) if isinstance(each, TooFarAhead)]
    assert len(errors) == 2
    assert str(errors[0]) == str(errors[1])
    assert ("after 1 s" if why == "late" else "nothing is coming") in str(errors[0])
    gate.opened.set()
    handles = [error.handle for error in errors]
    if why == "late":
        assert loop.wait(handles).committed
    else:
        assert loop.failure(handles) == {RoundAborted}
        loop.engine("e1")
    assert loop.publish(2).committed  # live, which no lag_timeout_s holds back
    assert loop.engines["e0" if why == "late" else "e1"].label == 2


def test_an_engine_that_is_left_behind_holds_training_back(loop: Loop) -> None:
    """Not only the committed version counts: whoever gets requests does, until the coordinator sends it none."""
    stuck = Gate()
    stuck.opened.set()
    loop.engine("e0")
    slow = loop.engine("e1", stuck)
    loop.connect(max_lag=1, slow="evict-after", slow_s=5.0)
    loop.snapshot(1)
    assert loop.wait(loop.snapshot(2)).committed

    def refuse() -> None:
        raise RuntimeError("busy")

    slow.before = refuse
    assert loop.wait(loop.snapshot(3)).committed
    handles = loop.snapshot(4)  # e1 serves 2, which is 2 behind: what is under way has to end first
    assert loop.committed() == 4
    loop.until(handles[0].over)
    assert loop.engines["e0"].label == 4


def test_silence_is_no_reason_to_go_on(loop: Loop) -> None:
    """What engines serve is not known while the coordinator is away: training waits for it, and says so in the end."""
    loop.engine("e0")
    loop.connect(max_lag=1, lag_timeout_s=1.0, request_timeout_s=3.0, acquire_timeout_s=3.0)
    assert loop.wait(loop.snapshot(1)).committed
    loop.stop_coordinator()

    def attempt(agent: TrainerAgent) -> str:
        with pytest.raises(TooFarAhead, match="is not known") as caught:
            agent.publish(2, mode="snapshot")
        return str(caught.value)

    assert len(set(loop.each(attempt))) == 1
