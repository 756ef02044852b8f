"""Engines that come after a version was committed, and rounds in which they take turns: a real coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.control.protocol.messages import Outcome, TransportKind
from weightbus.trainer_agent.machine.errors import PublishRefused
from weightbus.trainer_agent.machine.publication import PublishReport
from weightbus.trainer_agent.publish.agent import TrainerAgent

from ...kit.loopback_engine import LoopbackEngine
from ...kit.waiting import until
from .test_background_publisher import Loop
from .test_rounds import Deployment


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """Its coordinator is a thread of this process."""
    made = Loop(tmp_path)
    yield made
    made.close()


def catch_up(deployment: Deployment, version: int) -> PublishReport:
    def one(agent: TrainerAgent) -> PublishReport:
        return agent.catch_up(version)

    first, *others = deployment._each(one, deployment.agents)
    assert all(other == first for other in others)
    assert isinstance(first, PublishReport)
    return first


@pytest.mark.parametrize("transport", [TransportKind.LOCAL, TransportKind.DISK, TransportKind.DISTRIBUTED])
def test_a_joiner_gets_what_is_committed(loop: Loop, transport: TransportKind) -> None:
    """Bit for bit, over any transport; the engine that has it loads nothing again."""
    loads: list[int] = []
    loop.engine("e0", loads.append, transport=transport)
    loop.connect(transport=transport.value)
    loop.publish(1)
    before = len(loads)
    loop.engine("e1", transport=transport)
    report = catch_up(loop, 1)
    assert {each.engine: each.outcome for each in report.engines} == {"e1": Outcome.COMMITTED}
    assert loop.holds("e1")
    assert len(loads) == before
    assert catch_up(loop, 1).engines == (), "nobody is behind any more, and nothing was read"


def test_the_first_engine_of_a_channel_catches_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table was made for no engine at all, and is the one that it is compared with: there is no second one."""
    loop.connect()
    first = loop.publish(1)
    assert first.committed
    monkeypatch.setattr(LoopbackEngine, "live_digest", "sglang-sha256-8")  # for which a table would say more
    loop.engine("e0")
    for _ in range(2):
        caught_up = catch_up(loop, 1)
        assert caught_up.table in (first.table, "")  # nobody is behind the second time, and nothing is read
    assert loop.holds("e0")
    loop.engine("e1")
    later = catch_up(loop, 1)
    assert (later.engines_by(Outcome.COMMITTED), later.table) == (("e1",), first.table)


def test_other_weights_are_no_catch_up(loop: Loop) -> None:
    """They were stepped since: nobody is paused for them, and the agent goes on."""
    loop.engine("e0")
    loop.connect()
    loop.publish(1)
    loop.engine("e1")
    loop.step()
    with pytest.raises(PublishRefused, match="not the weights that are committed"):
        catch_up(loop, 1)
    assert not loop.holds("e1")
    assert loop.publish(2).committed
    assert loop.holds("e0")
    assert loop.holds("e1")


def test_the_last_snapshot_is_brought_to_a_later_engine(loop: Loop) -> None:
    """By itself, while the loop trains on; and again to the next one."""
    loop.engine("e0")
    loop.connect(catch_up_s=0.1)
    assert loop.wait(loop.snapshot(1)).committed
    expected = {name: tensor.clone() for name, tensor in loop.sources[0].weights.items()}
    loop.step()
    for name in ("e1", "e2"):
        engine = loop.engine(name)
        until(lambda engine=engine: engine.label == 1)  # type: ignore[misc]
    loop.sources[0].weights, now = expected, loop.sources[0].weights
    assert loop.holds("e1")
    assert loop.holds("e2")
    loop.sources[0].weights = now
    assert loop.wait(loop.snapshot(2)).committed
    assert [engine.label for engine in loop.engines.values()] == [2, 2, 2]


def test_a_snapshot_that_was_overtaken_is_not_resent(loop: Loop) -> None:
    """A live version was committed since: who comes now waits for the next one, or for a catch-up with that."""
    loop.engine("e0")
    loop.connect(catch_up_s=0.1)
    assert loop.wait(loop.snapshot(1)).committed
    loop.step()
    assert loop.publish(2).committed
    late = loop.engine("e1")
    assert catch_up(loop, 2).engines_by(Outcome.COMMITTED) == ("e1",)
    assert late.label == 2
    assert loop.holds("e1")


@pytest.mark.parametrize("transport", [TransportKind.LOCAL, TransportKind.DISTRIBUTED])
def test_engines_take_turns(loop: Loop, transport: TransportKind) -> None:
    """At most one of them takes the version at a time; all hold it in the end."""
    seen: list[int] = []

    def enters() -> None:
        seen.append(sum(engine.label == len(seen) // 3 + 1 for engine in loop.engines.values()))

    for name in ("e0", "e1", "e2"):
        loop.engine(name, transport=transport).before = enters
    loop.connect(max_paused=1, transport=transport.value)
    for version in (1, 2):
        report = loop.publish(version)
        assert report.engines_by(Outcome.COMMITTED) == ("e0", "e1", "e2")
        assert all(loop.holds(name) for name in loop.engines)
    assert seen == [0, 1, 2] * 2, "each began when the ones before it served the version"
