"""Bounds in a fleet as large as is let in; test_work.py has what an answer costs in it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from weightbus.control.machine import coordinator
from weightbus.control.machine.coordinator import MAX_GRANTS
from weightbus.control.machine.effects import Acknowledge, Burst, MessageReceived, SendTo
from weightbus.control.machine.participants import FleetAtStart, PendingCommands, RoundCommands
from weightbus.control.machine.round import Round
from weightbus.control.machine.states import Limits, Route
from weightbus.control.machine.status import StatusView
from weightbus.control.protocol import codec
from weightbus.control.protocol.messages import (
    Abort,
    Acquire,
    AgentId,
    Epoch,
    GetStatus,
    Granted,
    Heartbeat,
    HeldVersion,
    Prepare,
    Prepared,
    Publish,
    Refused,
    RequestId,
    Sent,
    TransportKind,
    Version,
)
from weightbus.control.server.event_loop import LoopSnapshot

from ..world import CHANNEL, MANIFEST, World, digest, engine_info, table_of

QUIET = StatusView(boot=1, read_only=False, stopping=False, agents=0, blob_bytes=0, channels={})


def abort(epoch: int) -> Abort:
    return Abort(channel=CHANNEL, epoch=epoch, reason="", deadline_s=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["x", "\N{GREEK SMALL LETTER OMEGA}", "\N{SNAKE}"], ids=["ascii", "two bytes", "four"])
def test_thousands_of_reasons_fit_into_one_message(word: str) -> None:
    """A fleet as large as is let in fails with long reasons: its trainer is told all the same."""
    names = [AgentId(f"{number:064d}") for number in range(Limits().max_agents)]
    infos = {name: engine_info(name) for name in names}
    routes = {name: Route(None, word * codec.MAX_TEXT_CHARACTERS) for name in names}
    publish = Publish(
        request=RequestId("r"),
        channel=CHANNEL,
        epoch=Epoch(1),
        version=Version(1),
        manifest=digest(MANIFEST),
        table=digest(table_of(1)),
        bytes=1,
        buckets=1,
    )
    outside: dict[str, Any] = {
        "pending_commands": PendingCommands(1.0, 8.0),
        "event_trace": deque(),
        "observe": lambda _: None,
    }
    round_ = Round(publish, AgentId("t"), routes, infos, FleetAtStart(), limits=Limits(), now=0.0, **outside)
    done = round_.done(1.0)
    assert all(report.reason.startswith(word) for report in done.engines)
    codec.TO_AGENT.encode(done)
    why = dict.fromkeys(names, word * codec.MAX_TEXT_CHARACTERS)
    codec.TO_AGENT.encode(RoundCommands(publish, Limits()).withdraw(Epoch(1), why))
    sent = Sent(request=RequestId("s"), channel=CHANNEL, epoch=Epoch(1), failed=why)
    codec.TO_COORDINATOR.encode(sent)


def test_a_fleet_of_long_names_fits_into_one_message() -> None:
    """What names every engine that is let in can be sent, though pods are called what they are called."""
    held = HeldVersion(version=Version(2**53), manifest=digest(MANIFEST), table=digest(table_of(1)))
    names = [AgentId(f"{number:064d}") for number in range(Limits().max_agents)]
    info = engine_info(
        url=f"http://{'n' * 120}:30000", host="h" * 36, transports=tuple(TransportKind), live_digest="x" * 20, held=held
    )
    granted = Granted(
        request=RequestId("r"),
        channel=CHANNEL,
        epoch=Epoch(1),
        lease_s=10.0,
        committed=held,
        engines=dict.fromkeys(names, info),
        routes=dict.fromkeys(names, TransportKind.DISTRIBUTED),
    )
    codec.TO_AGENT.encode(granted)


def test_few_descriptions_of_the_fleet_are_kept() -> None:
    """What every grant says of every engine does not pile up with the rounds; the newest grants are still repeated."""
    world = World()
    world.engine("e0")
    trainer = world.trainer()
    for version in range(1, 3 * MAX_GRANTS):
        trainer.acquire(version)
        world.settle()
    asked = [message for message in trainer.said if isinstance(message, Acquire)]
    kept = [message for message in asked if world.machine.replies.get(trainer.name, message)]
    assert kept == asked[-MAX_GRANTS:]


def test_a_status_that_no_message_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply says where else to read it, instead of nothing."""
    monkeypatch.setattr(coordinator, "MAX_ANSWER_BYTES", 10)
    world = World()
    trainer = world.trainer()
    trainer.say(GetStatus(request=trainer.key()))
    world.settle()
    (refused,) = trainer.got(Refused)
    assert isinstance(refused, Refused)
    assert "HTTP" in refused.reason


def test_what_many_are_told_alike_is_one_object() -> None:
    """The bus encodes a command once because every engine gets the very same one."""
    world = World()
    engines = [world.engine(f"e{number}") for number in range(3)]
    world.publish(world.trainer(), 1)
    assert len({id(engine.got(Prepare)[0]) for engine in engines}) == 1


def test_the_longest_due_goes_first() -> None:
    """Duties come in the order in which they fell due; replaced and dropped ones never come."""
    pending = PendingCommands(1.0, 8.0)
    for number, name in enumerate("abc"):
        pending.assign(AgentId(name), abort(number + 1), 0.1 * number)
    pending.assign(AgentId("a"), abort(9), 0.3)
    pending.drop(AgentId("b"))
    assert pending.next_deadline() == 0.2
    assert [(*agents, command.epoch) for agents, command in pending.due(0.5)] == [("c", 3), ("a", 9)]
    assert pending.due(1.4) == []
    assert pending.next_deadline() == 1.5
    assert [agents for agents, _ in pending.due(1.5)] == [("c",), ("a",)]
    assert pending.next_deadline() == 3.5, "each waits twice as long as before"
    pending.drop(AgentId("c"))
    pending.drop(AgentId("a"))
    assert pending.next_deadline() is None


def test_only_the_newest_order_is_given() -> None:
    """Of orders that replace each other before any was due, one is told, once; what was dropped is not."""
    pending = PendingCommands(1.0, 8.0)
    for number, name in enumerate("aba"):
        pending.assign(AgentId(name), abort(number + 1), 0.0)
    pending.drop(AgentId("b"))
    pending.assign(AgentId("c"), abort(4), 5.0)
    assert [(*agents, command.epoch) for agents, command in pending.due(0.0)] == [("a", 3)]
    assert pending.due(0.5) == []
    assert [agents for agents, _ in pending.due(5.0)] == [("a",), ("c",)]


def test_what_is_told_together_is_repeated_together() -> None:
    """Thousands have one timer; an engine that answered, or got another command meanwhile, is not told again."""
    pending = PendingCommands(1.0, 8.0)
    names = [AgentId(f"e{number}") for number in range(4)]
    pending.assign_all(names, (abort(1),), 0.0)
    assert [agents for agents, _ in pending.due(0.0)] == [tuple(names)]
    pending.drop(names[0])
    pending.assign(names[1], abort(2), 0.5)
    assert [(agents, command.epoch) for agents, command in pending.due(1.0)] == [
        (("e2", "e3"), 1),
        (("e1",), 2),
    ]
    pending.drop(names[2])
    pending.drop(names[3])
    assert pending.next_deadline() == 2.0, "the one that was told something else"


def test_what_follows_is_repeated_alone() -> None:
    """An engine that answered the first of two commands is told the second again, when both were due."""
    pending = PendingCommands(1.0, 8.0)
    for name in "abc":
        pending.assign_all((AgentId(name),), (abort(1), abort(2)), 0.0)
    assert [(*agents, command.epoch) for agents, command in pending.due(0.0)] == [
        (name, epoch) for name in "abc" for epoch in (1, 2)
    ]
    for name in "ab":
        pending.acknowledge_first(AgentId(name))
    pending.drop(AgentId("b"))
    assert pending.next_deadline() == 1.0
    assert sorted((*agents, command.epoch) for agents, command in pending.due(1.0)) == [("a", 2), ("c", 1), ("c", 2)]
    pending.acknowledge_first(AgentId("c"))
    assert pending.next_deadline() == 3.0
    assert sorted((*agents, command.epoch) for agents, command in pending.due(3.0)) == [("a", 2), ("c", 2)]
    assert len(pending) == 2


def test_an_engine_that_goes_on_after_all_others_ended_is_still_told() -> None:
    """A duty whose agents have all answered has no timer any more; one that comes to it gets a new one."""
    pending = PendingCommands(1.0, 8.0)
    pending.assign_all([AgentId("a"), AgentId("b")], (abort(1), abort(2)), 1.0)
    pending.acknowledge_first(AgentId("a"))
    pending.drop(AgentId("a"))
    assert pending.next_deadline() == 1.0
    pending.acknowledge_first(AgentId("b"))
    assert pending.next_deadline() == 1.0
    assert [(*agents, command.epoch) for agents, command in pending.due(1.0)] == [("b", 2)]


def test_what_many_answered_is_one_effect() -> None:
    """Acknowledgements that follow one another are owed together, and in their place among everything else."""
    world = World()
    engines = [world.engine(f"e{number}") for number in range(3)]
    for engine in engines:
        engine.ignore(Prepare)
    world.trainer().acquire(1)
    world.settle()
    told = [engine.got(Prepare)[0] for engine in engines]
    answers = [
        Prepared(request=engine.key(), channel=CHANNEL, epoch=command.epoch, seconds=0.1)  # type: ignore[attr-defined]
        for engine, command in zip(engines, told, strict=True)
    ]
    said = [MessageReceived(engine.peer, answer) for engine, answer in zip(engines, answers, strict=True)]
    effects = world.machine.handle(Burst(said), world.now)
    owed = [effect.requests for effect in effects if isinstance(effect, Acknowledge)]
    assert owed == [[(engine.peer, answer) for engine, answer in zip(engines, answers, strict=True)]]
    assert isinstance(effects[0], Acknowledge), "before what follows from them"
    between = MessageReceived(engines[1].peer, Heartbeat(seq=1))
    kinds = [type(effect) for effect in world.machine.handle(Burst([said[0], between, said[2]]), world.now)]
    assert kinds == [Acknowledge, SendTo, Acknowledge], "each in its place"


def reader(snapshot: LoopSnapshot[StatusView], wake: Callable[[], None], found: list[StatusView]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.append(snapshot.read(wake)))
    thread.start()
    return thread


def test_the_status_is_written_for_readers_only() -> None:
    """Without a request the loop writes nothing; a request gets what is true after it."""
    written: list[float] = []
    snapshot = LoopSnapshot(lambda now: (written.append(now), QUIET)[1])
    snapshot.open()
    for _ in range(100):
        snapshot.serve()
    assert len(written) == 1, "once, when it was made"
    asked, found = threading.Event(), []
    thread = reader(snapshot, asked.set, found)
    assert asked.wait(30)
    assert snapshot.due() is not None
    while not found:
        snapshot.serve()
        thread.join(0.001)
    assert found == [QUIET]
    assert len(written) == 2
    assert snapshot.due() is None


def test_a_status_that_takes_long_is_written_seldom() -> None:
    """However often the status is requested, the loop spends a tenth of its time on it."""
    now = [0.0]

    def slow(_at: float) -> StatusView:
        now[0] += 0.03
        return QUIET

    snapshot = LoopSnapshot(slow, lambda: now[0])
    snapshot.open()
    writes = 0
    while now[0] < 3.0:
        snapshot._requested += 1
        before = now[0]
        snapshot.serve()
        writes += now[0] != before
        now[0] += 0.001
    assert 8 <= writes <= 11


def test_a_loop_that_is_over_keeps_no_engine_waiting() -> None:
    """Readers that wait when the loop ends get its last word."""
    snapshot = LoopSnapshot(lambda _now: QUIET)
    snapshot.open()
    asked, found = threading.Event(), []
    thread = reader(snapshot, asked.set, found)
    assert asked.wait(30)
    snapshot.close()
    thread.join(30)
    assert found == [QUIET]
    assert snapshot.read(lambda: None) is QUIET
