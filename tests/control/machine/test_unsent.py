"""Commands that cannot be encoded: no answer is awaited for them, and all other agents go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from weightbus.control.bus.interface import SendOutcome
from weightbus.control.journal.sqlite_journal import SqliteJournal
from weightbus.control.machine.effects import AnyObservation, EngineFailed, Peer, Refusal
from weightbus.control.protocol.errors import Malformed
from weightbus.control.protocol.messages import (
    Abort,
    Commit,
    Message,
    Outcome,
    Pause,
    Policy,
    Prepare,
    RoundDone,
    Send,
    ToAgent,
    Transfer,
)
from weightbus.control.server.event_loop import EventLoop

from ..memory_bus import MemoryBus
from ..server.test_event_loop import Running, Wire
from ..world import LIMITS, Agent, Engine, Trainer, World, engine_info, trainer_info

ALONE = Policy(max_paused=1)


def unable(world: World, name: str, *kinds: type[Message]) -> None:
    """From now on no command of `kinds` to `name` can be encoded."""

    def unsendable(agent: Agent, message: Message) -> bool:
        return agent.name == name and isinstance(message, kinds)

    world.unsendable = unsendable


def outcomes(done: RoundDone | None) -> dict[str, str]:
    assert done is not None
    return {report.engine: report.outcome.value for report in done.engines}


@pytest.mark.parametrize("policy", [Policy(), ALONE, Policy(min_engines=2)])
@pytest.mark.parametrize("kind", [Prepare, Pause, Transfer])
def test_an_engine_that_cannot_be_told_fails_at_once_and_the_others_go_on(kind: type[Message], policy: Policy) -> None:
    """No deadline passes; it goes on with what it served, and takes the next version."""
    world = World()
    engines = [world.engine(f"e{number}") for number in range(3)]
    trainer = world.trainer()
    trainer.policy = policy
    unable(world, "e1", kind)
    trainer.acquire(1)
    world.settle()
    assert world.now == 0.0
    assert outcomes(trainer.done) == {"e0": "committed", "e1": "aborted", "e2": "committed"}
    failed = [each for each in world.observed if isinstance(each, EngineFailed)]
    assert [(each.engine, f"{kind.__name__} could not be sent" in each.reason) for each in failed] == [("e1", True)]
    assert world.ready == ("e0", "e2")
    unable(world, "e1")
    done = world.publish(trainer, 2)
    assert set(outcomes(done).values()) == {"committed"}
    assert [engine.weights for engine in engines] == [2, 2, 2]


@pytest.mark.parametrize("kinds", [(Commit,), (Prepare, Abort), (Transfer, Abort)])
def test_an_engine_that_cannot_be_told_to_go_on_either_is_left_as_it_is(kinds: tuple[type[Message], ...]) -> None:
    """It is in quarantine until it says something, and the round ends for the others."""
    world = World()
    for name in ("e0", "e1"):
        world.engine(name)
    trainer = world.trainer()
    unable(world, "e1", *kinds)
    trainer.acquire(1)
    world.settle()
    assert world.now == 0.0
    assert outcomes(trainer.done) == {"e0": "committed", "e1": "quarantined"}
    assert world.ready == ("e0",)
    unable(world, "e1")
    done = world.publish(trainer, 2)
    assert set(outcomes(done).values()) == {"committed"}


def test_a_trainer_that_cannot_be_told_to_send_hears_that_its_round_is_over() -> None:
    """And engines that were not asked for anything yet go on."""
    world = World()
    world.engine("e0")
    trainer = world.trainer()
    unable(world, "trainer", Send)
    trainer.acquire(1)
    world.settle()
    assert world.now == 0.0
    assert trainer.done is not None
    assert trainer.done.outcome is Outcome.ABORTED
    assert "Send could not be sent" in trainer.done.reason
    unable(world, "trainer")
    assert world.publish(trainer, 2).outcome is Outcome.COMMITTED


def test_a_trainer_that_cannot_be_told_of_further_turns_has_its_version_nevertheless() -> None:
    """What is committed stays; those whose turn did not come keep what they have."""
    world = World()
    for name in ("e0", "e1"):
        world.engine(name)
    trainer = world.trainer()
    trainer.policy = ALONE
    told: list[Message] = []

    def second(_agent: Agent, message: Message) -> bool:
        told.extend([message] if isinstance(message, Send) else [])
        return isinstance(message, Send) and len(told) > 1

    world.unsendable = second
    trainer.acquire(1)
    world.settle()
    assert trainer.done is not None
    assert trainer.done.outcome is Outcome.COMMITTED
    assert sorted(outcomes(trainer.done).values()) == ["aborted", "committed"]


def test_an_engine_that_cannot_be_told_what_to_do_outside_of_rounds_is_not_told_again_and_again() -> None:
    """Until something is new: then it is tried once more."""
    world = World()
    engine = world.engine("e0")
    world.publish(world.trainer(), 1)
    tried: list[Message] = []

    def never(_agent: Agent, message: Message) -> bool:
        tried.extend([message] if isinstance(message, Commit) else [])
        return isinstance(message, Commit)

    world.unsendable = never
    engine.crash()
    engine.live()
    world.settle()
    world.advance(60.0)
    assert len(tried) <= 1
    world.unsendable = lambda _agent, _message: False
    engine.connect()
    world.publish(world.trainer("other"), 2)
    assert world.ready == ("e0",)


class _Unwriting(MemoryBus):
    """Has a message that is none."""

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> SendOutcome:
        if isinstance(message, Transfer):
            raise Malformed("Transfer cannot be encoded")
        return super().send(peer, message, blob)

    def send_to_all(self, peers: Sequence[Peer], message: ToAgent) -> Sequence[Peer]:
        return [peer for peer in peers if self.send(peer, message) is SendOutcome.GONE]


@pytest.mark.parametrize("engines", [1, 2])
def test_the_loop_says_what_it_could_not_send(tmp_path: Path, engines: int) -> None:
    """To one engine or to several alike: the round is over long before any deadline, and it is counted."""
    bus, observed = _Unwriting(), list[AnyObservation]()
    journal = SqliteJournal(tmp_path / "journal", by=1)
    running = Running(EventLoop(bus, journal, LIMITS, observe=observed.append))
    wire = Wire(bus.link)
    for number in range(engines):
        wire.add(Engine(wire.world, f"e{number}", engine_info(f"e{number}")))
    trainer = wire.add(Trainer(wire.world, "trainer", trainer_info()))
    assert isinstance(trainer, Trainer)
    began = time.monotonic()
    trainer.acquire(1)
    wire.until(lambda: bool(trainer.got(RoundDone)))
    assert time.monotonic() - began < LIMITS.pause_s / 2
    assert set(outcomes(trainer.done).values()) == {"aborted"}
    assert [each.message for each in observed if isinstance(each, Refusal)] == ["Transfer"]
    assert len([each for each in observed if isinstance(each, EngineFailed)]) == engines
    wire.close()
    running.stop()
    bus.close()
    journal.close()
