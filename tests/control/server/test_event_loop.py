"""The loop: every effect carried out in order, with a bus in memory and with real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from weightbus.control.bus.interface import AgentLink, Incoming, SendOutcome, TrustRevoked
from weightbus.control.bus.sockets import DealerLink, RouterBus
from weightbus.control.journal import writer_thread
from weightbus.control.journal.etcd import Deposed, Etcd, KeyValue, Term, TxnResult
from weightbus.control.journal.etcd_journal import EtcdJournal
from weightbus.control.journal.sqlite_journal import SqliteJournal
from weightbus.control.journal.writer_thread import WriterThread
from weightbus.control.machine.effects import (
    Acknowledge,
    AnyObservation,
    AnyRecord,
    Committed,
    EpochTaken,
    LeaseEnded,
    Peer,
    Refusal,
    SendTo,
)
from weightbus.control.machine.states import Limits
from weightbus.control.protocol.errors import JournalUnwritable, VersionNotNewer
from weightbus.control.protocol.messages import (
    Ack,
    Acquire,
    AgentId,
    Alive,
    Commit,
    Epoch,
    Granted,
    Heartbeat,
    Hello,
    Message,
    Outcome as Ended,
    RefusalCode,
    Refused,
    Release,
    RequestId,
    Role,
    RoundDone,
    Version,
    Welcome,
)
from weightbus.control.server import event_loop as module
from weightbus.control.server.event_loop import BATCH_RATE, BATCH_S, SETTLE_S, EventLoop

from ..memory_bus import MemoryBus
from ..world import CHANNEL, Agent, Engine, Trainer, World, engine_info, trainer_info

PROTOCOL = Path(module.__file__).parents[1] / "protocol" / "PROTOCOL.md"
LIMITS = Limits(retry_s=0.05, probe_s=0.05, heartbeat_s=0.2, silence_s=60.0)


class Running:
    """A server on a thread of its own."""

    def __init__(self, server: EventLoop) -> None:
        self.server = server
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:  # noqa: BLE001  # shown by `stop`
            self.error = error

    def stop(self) -> float:
        began = time.monotonic()
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server does not stop"
        if self.error:
            raise self.error
        return time.monotonic() - began


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    closing: list[Callable[[], object]] = []

    def begin(bus: MemoryBus | RouterBus, observed: list[AnyObservation] | None = None) -> Running:
        journal = SqliteJournal(tmp_path / "journal", by=1)
        server = EventLoop(bus, journal, LIMITS, observe=(observed if observed is not None else []).append)
        running = Running(server)

        def close() -> None:
            if running.thread.is_alive():
                running.stop()
            bus.close()
            journal.close()

        closing.append(close)
        running.close = close  # type: ignore[attr-defined]
        return running

    yield begin
    for close in reversed(closing):
        close()


class Wire:
    """Agents of `World` on real links: what they are told comes from a server instead of a machine."""

    def __init__(self, link: Callable[[], AgentLink]) -> None:
        self.world = World()
        self.link = link
        self.links: dict[str, AgentLink] = {}
        self.world.deliver = self.deliver  # type: ignore[method-assign, assignment]

    def add(self, agent: Agent) -> Agent:
        self.links[agent.name] = self.link()
        self.links[agent.name].open()
        self.world.agents[agent.name] = agent
        agent.live()
        return agent

    def deliver(self, agent: Agent, message: Message, blob: bytes | None = None) -> None:
        until = time.monotonic() + 30
        while not self.links[agent.name].send(message, blob):  # type: ignore[arg-type]
            assert time.monotonic() < until, "cannot send"
            self.links[agent.name].poll(0.01)

    def until(self, what: Callable[[], bool], limit_s: float = 30.0) -> None:
        until = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < until, "it never happened"
            for name, link in self.links.items():
                for item in link.poll(0.005):
                    assert not isinstance(item, Exception), item
                    self.world.agents[name].take(item[0])

    def close(self) -> None:
        for link in self.links.values():
            link.close()


def ready(running: Running) -> int:
    channel = running.server.status.channels.get(CHANNEL)
    return len(channel.ready) if channel else 0


def play(wire: Wire, running: Running) -> None:
    engines = [wire.add(Engine(wire.world, f"e{n}", engine_info(f"e{n}"))) for n in range(2)]
    trainer = wire.add(Trainer(wire.world, "trainer", trainer_info()))
    wire.until(lambda: all(agent.got(Welcome) for agent in wire.world.agents.values()))
    assert isinstance(trainer, Trainer)
    trainer.acquire(1)
    wire.until(lambda: bool(trainer.got(RoundDone)))
    assert trainer.done
    assert {r.engine: r.outcome.value for r in trainer.done.engines} == {"e0": "committed", "e1": "committed"}
    assert all(isinstance(engine, Engine) and engine.label == 1 for engine in engines)
    wire.until(lambda: ready(running) == 2)


def test_whole_round_in_memory(start: Callable[..., Running]) -> None:
    """The loop carries a round from Acquire to RoundDone, and its status document shows it."""
    bus = MemoryBus()
    running = start(bus)
    wire = Wire(bus.link)
    play(wire, running)
    wire.until(lambda: running.server.status.channels[CHANNEL].round.version is None)
    document = msgspec.json.decode(running.server.status_json)
    assert document["channels"]["policy"]["committed"]["version"] == 1
    assert document["channels"]["policy"]["ready"] == ["http://e0:30000", "http://e1:30000"]


def test_whole_round_over_sockets_and_a_restart(start: Callable[..., Running]) -> None:
    """The same over TCP; the next coordinator on the same journal knows the version and counts its boot."""
    bus = RouterBus("127.0.0.1", 0)
    running = start(bus)
    wire = Wire(lambda: DealerLink(f"tcp://127.0.0.1:{bus.router_port}"))
    try:
        play(wire, running)
    finally:
        wire.close()
    assert running.stop() < 15
    running.close()  # type: ignore[attr-defined]
    again = start(RouterBus("127.0.0.1", 0))
    view = again.server.status
    assert view.boot == 2
    assert view.channels[CHANNEL].committed
    assert view.channels[CHANNEL].committed.version == 1


def test_what_is_no_message_is_refused_and_the_loop_goes_on(start: Callable[..., Running]) -> None:
    """Garbage gets an answer, is observed, and harms no agent (F20)."""
    bus = MemoryBus()
    observed: list[AnyObservation] = []
    start(bus, observed)
    link = bus.link()
    link.open()
    for frames in ([b""], [b"WB\x01>", b"\xff"], [b"WB\x63>", b"\x80"], [b"", b"", b"", b""]):
        bus.inject(link, frames)
    wire = Wire(bus.link)
    wire.links["x"] = link
    wire.world.agents["x"] = Agent(wire.world, "x")
    wire.until(lambda: len(wire.world.agents["x"].got(Refused)) == 4)
    found = [m.code for m in wire.world.agents["x"].got(Refused) if isinstance(m, Refused)]
    assert sorted(set(found)) == [RefusalCode.NOT_ALLOWED, RefusalCode.PROTOCOL_MISMATCH]
    assert len([note for note in observed if isinstance(note, Refusal)]) == 4


class _Distrusting(MemoryBus):
    """Says once that an agent is not trusted any more."""

    named: str = ""

    def poll(self, timeout_s: float, gather_s: float = 0.0) -> Sequence[Incoming]:  # type: ignore[override]  # may say more
        found: list[Incoming] = [*super().poll(timeout_s, gather_s)]
        if name := self.named:
            self.named = ""
            found.append(TrustRevoked(AgentId(name), "it was taken off the allow-list"))
        return found


def test_a_distrusted_trainer_loses_its_lease(start: Callable[..., Running]) -> None:
    """What the bus finds out of a key reaches the machine: the lease of its trainer ends at once."""
    bus = _Distrusting()
    observed: list[AnyObservation] = []
    start(bus, observed)
    wire = Wire(bus.link)
    trainer = wire.add(Trainer(wire.world, "trainer", trainer_info()))
    wire.until(lambda: bool(trainer.got(Welcome)))
    trainer.deaf = True
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1)))
    wire.until(lambda: bool(trainer.got(Granted)))
    bus.named = "trainer"
    bus.wake()
    wire.until(lambda: any(isinstance(each, LeaseEnded) for each in observed))
    (ended,) = [each for each in observed if isinstance(each, LeaseEnded)]
    assert "is not trusted any more" in ended.reason


def test_stop_while_a_trainer_holds_a_lease(start: Callable[..., Running]) -> None:
    """A stop takes the lease back and refuses the next; it waits for no agent."""
    bus = MemoryBus()
    running = start(bus)
    wire = Wire(bus.link)
    trainer = wire.add(Trainer(wire.world, "trainer", trainer_info()))
    wire.until(lambda: bool(trainer.got(Welcome)))
    trainer.deaf = True
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1)))
    wire.until(lambda: bool(trainer.got(Granted)))
    assert running.stop() < 15
    assert running.server.status.channels[CHANNEL].lease is None


def test_a_stop_waits_no_longer_than_stated(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is durable is carried on, for as long as `STOP_S`: a service manager kills soon after that (N54)."""
    assert f"at most {module.STOP_S:g} s; then the sockets close" in " ".join(PROTOCOL.read_text().split())
    monkeypatch.setattr(module, "STOP_S", 0.5)
    running = start(MemoryBus())
    bus = cast("MemoryBus", running.server._bus)
    wire = Wire(bus.link)
    engine = wire.add(Engine(wire.world, "e0", engine_info("e0")))
    assert isinstance(engine, Engine)
    engine.script[Commit] = lambda _message: None
    trainer = wire.add(Trainer(wire.world, "trainer", trainer_info()))
    wire.until(lambda: bool(engine.got(Welcome) and trainer.got(Welcome)))
    assert isinstance(trainer, Trainer)
    trainer.acquire(1)
    wire.until(lambda: bool(engine.got(Commit)))
    began = time.monotonic()
    running.server.stop()
    running.thread.join(10.0)
    assert not running.thread.is_alive()
    assert time.monotonic() - began >= 0.5
    assert not running.server.machine.stopped, "the round is not over"


class FailingJournal:
    """A journal on a disk that is full until told otherwise."""

    boot = 1
    stride = 1

    def __init__(self) -> None:
        self.full = True
        self.records: list[AnyRecord] = []

    def check(self) -> None:
        """Its file is what it was."""

    def disown(self, record: AnyRecord) -> None:
        """Nothing is written late."""

    def confirm(self) -> None:
        pass

    def write(self, record: AnyRecord) -> None:
        if self.full:
            raise JournalUnwritable("j", "full", "free room")
        self.records.append(record)

    def restore(self) -> dict[object, object]:
        return {}

    def close(self) -> None:
        pass


def test_journal_that_fails_is_tried_again() -> None:
    """A full disk ends nothing: requests are refused until the probe gets through, then they are granted."""
    bus, journal = MemoryBus(), FailingJournal()
    running = Running(EventLoop(bus, journal, LIMITS, observe=lambda _what: None))  # type: ignore[arg-type]
    wire = Wire(bus.link)
    trainer = wire.add(Trainer(wire.world, "trainer", trainer_info()))
    wire.until(lambda: bool(trainer.got(Welcome)))
    trainer.deaf = True
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1)))
    wire.until(lambda: bool(trainer.got(Refused)))
    wire.until(lambda: running.server.status.read_only)
    journal.full = False
    wire.until(lambda: not running.server.status.read_only)
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1)))
    wire.until(lambda: bool(trainer.got(Granted)))
    running.stop()
    bus.close()


class HangingJournal(FailingJournal):
    """A journal on a disk that can hang in a write, and ends it with success."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.thawed = threading.Event()
        self.thawed.set()
        self.disowned: list[AnyRecord] = []

    def write(self, record: AnyRecord) -> None:
        self.thawed.wait(60)
        super().write(record)

    def disown(self, record: AnyRecord) -> None:
        self.disowned.append(record)


def test_disk_that_hangs_stops_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are answered, the status says it, nothing is granted; what is written late is disowned (N48, A7)."""
    monkeypatch.setattr(writer_thread, "HUNG_S", 0.5)
    bus, journal = MemoryBus(), HangingJournal()
    writer = WriterThread(journal, bus.wake)  # type: ignore[arg-type]
    running = Running(EventLoop(bus, journal, LIMITS, observe=lambda _what: None, writer=writer))  # type: ignore[arg-type]
    wire = Wire(bus.link)
    trainer = wire.add(Trainer(wire.world, "trainer", trainer_info()))
    wire.until(lambda: bool(trainer.got(Welcome)))
    trainer.deaf = True
    journal.thawed.clear()
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1)))
    wire.until(lambda: bool(trainer.got(Refused)))
    wire.until(lambda: running.server.status.read_only)
    assert time.monotonic() - running.server.stepped_at < 1.0
    assert writer.hung_s > 0.4
    assert trainer.got(Granted) == []
    journal.thawed.set()
    wire.until(lambda: not running.server.status.read_only)
    assert journal.disowned == journal.records[:1]
    assert isinstance(journal.records[0], EpochTaken)
    assert writer.hung_s == 0.0
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1)))
    wire.until(lambda: bool(trainer.got(Granted)))
    running.stop()
    writer.close()
    assert writer.closed


class NewerJournal(FailingJournal):
    """A journal that holds a version unknown to its writer."""

    def write(self, record: AnyRecord) -> None:
        if isinstance(record, Committed):
            raise VersionNotNewer("j", "holds version 5", "publish a higher one")
        self.records.append(record)


def test_a_journal_that_holds_a_newer_version_ends_the_round_and_not_the_loop() -> None:
    """The trainer is told, and the loop serves on."""
    bus, journal = MemoryBus(), NewerJournal()
    running = Running(EventLoop(bus, journal, LIMITS, observe=lambda _what: None))  # type: ignore[arg-type]
    wire = Wire(bus.link)
    trainer = wire.add(Trainer(wire.world, "trainer", trainer_info()))
    wire.until(lambda: bool(trainer.got(Welcome)))
    for version in (1, 2):
        trainer.acquire(version)
        wire.until(lambda version=version: len(trainer.got(RoundDone)) == version)
    assert {(each.outcome, each.reason.partition(": ")[2]) for each in trainer.got(RoundDone)} == {
        (Ended.ABORTED, "the journal does not take it: holds version 5")
    }
    assert not running.server.status.read_only
    running.stop()
    bus.close()


class YesStore:
    """An etcd that is empty and agrees to everything; a lease in it is never renewed."""

    members = ("nowhere",)

    def under(self, _prefix: str) -> tuple[KeyValue, ...]:
        return ()

    def txn(self, *_asked: object) -> TxnResult:
        return TxnResult(succeeded=True, revision=1, found=())

    def revoke(self, _lease: int) -> None:
        pass


def test_a_leader_whose_time_is_over_looks_at_nothing_that_came_in() -> None:
    """It slept beyond its lease: what came meanwhile is for another. It neither answers nor takes any of it."""
    now = [0.0]
    store = cast("Etcd", YesStore())
    term = Term(store, "p/leader", token=1, lease=1, ttl_s=3600.0, granted_at=0.0, clock=lambda: now[0])
    observed: list[AnyObservation] = []
    bus = MemoryBus()
    journal = EtcdJournal(store, "p", term)
    server = EventLoop(bus, journal, LIMITS, observe=observed.append)
    link = bus.link()
    link.open()
    hello = msgspec.structs.replace(Trainer(World(), "t0", trainer_info()).hello(), incarnation="1")
    now[0] = 3600.0
    link.send(hello)
    bus.inject(link, [b"junk"])
    with pytest.raises(Deposed, match="could not be renewed in time"):
        server.step(0.0)
    assert (list(link.poll(0.0)), observed, len(server.machine.membership)) == ([], [], 0)
    term.resign()


def test_broken_machine_ends_the_loop(start: Callable[..., Running]) -> None:
    """An invariant that does not hold ends the process: what is durable is true, and a restart begins there."""
    bus = MemoryBus()
    running = start(bus)

    def broken(*_args: object) -> None:
        raise AssertionError("broken")

    running.server.machine.handle = broken  # type: ignore[method-assign, assignment]
    link = bus.link()
    link.open()
    hello = Hello(request="r", agent="x", role=Role.OBSERVER, channel=CHANNEL, incarnation="i")  # type: ignore[arg-type]
    link.send(hello)
    running.thread.join(30)
    assert isinstance(running.error, AssertionError)


def test_an_acknowledgement_leaves_before_the_next_command(tmp_path: Path) -> None:
    """Acknowledgements wait for a quiet moment, but not when their agent is told something anyway."""
    bus = MemoryBus()
    sent: list[tuple[Peer, Message]] = []
    bus.send = lambda peer, message, _blob=None: (sent.append((peer, message)), SendOutcome.SENT)[1]  # type: ignore[method-assign,assignment]
    journal = SqliteJournal(tmp_path / "journal", by=1)
    server = EventLoop(bus, journal, LIMITS, observe=lambda _what: None)
    one, two = Peer(b"one"), Peer(b"two")
    asked = [Release(request=RequestId(f"k{number}"), channel=CHANNEL, epoch=Epoch(1)) for number in range(2)]
    acks = [Ack(request=each.request) for each in asked]
    server._perform(Acknowledge([(one, asked[0]), (two, asked[1])]), 0.0)
    assert sent == []
    alive = Alive(seq=1, boot=1, committed=None)
    server._perform(SendTo(peer=two, message=alive), 0.0)
    assert sent == [(two, acks[1]), (two, alive)]
    server.step(0.0)
    assert sent[2:] == [(one, acks[0])]
    journal.close()


def test_a_stream_of_heartbeats_is_batched_while_idle(tmp_path: Path) -> None:
    """Messages that follow one another closely are looked at together, but never while a lease is held or asked for."""
    gathered: list[float] = []
    bus, now = MemoryBus(), [0.0]
    poll = bus.poll
    bus.poll = lambda _timeout_s, gather_s=0.0: (gathered.append(gather_s), poll(0.0))[1]  # type: ignore[method-assign]
    journal = SqliteJournal(tmp_path / "journal", by=1)
    server = EventLoop(bus, journal, LIMITS, observe=lambda _what: None, clock=lambda: now[0])
    link = bus.link()
    link.open()
    hello = msgspec.structs.replace(Trainer(World(), "t0", trainer_info()).hello(), incarnation="1")

    def gathers(*said: Heartbeat | Hello | Acquire) -> bool:
        for message in said:
            link.send(message)
        server.step(0.0)
        server.step(0.0)
        return gathered[-1] >= BATCH_S

    now[0] = 10.0
    assert not gathers(hello)
    beats = [Heartbeat(seq=number) for number in range(int(BATCH_RATE))]
    assert not gathers(*beats[:8]), "so few agents wait for nothing"
    assert gathers(*beats)
    now[0] += 5.0
    assert not gathers(beats[0]), "nothing came for long"
    assert gathers(*beats)
    assert not gathers(Acquire(request=RequestId("k"), channel=CHANNEL, version=Version(1))), "a lease is held"
    link.send(Release(request=RequestId("l"), channel=CHANNEL, epoch=Epoch(1)))
    assert not gathers(*beats), "its trainer may come again"
    now[0] += SETTLE_S
    assert gathers(*beats)
    journal.close()


def test_an_agent_that_ends_silently_is_missed_without_traffic(start: Callable[..., Running]) -> None:
    """Others may stand still for it, and its silence counts only after `silence_s`."""
    bus = RouterBus("127.0.0.1", 0)
    running = start(bus)
    links = [DealerLink(f"tcp://127.0.0.1:{bus.router_port}") for _ in range(2)]
    wire = Wire(links.pop)
    engines = [wire.add(Engine(wire.world, f"e{number}", engine_info(f"e{number}"))) for number in range(2)]
    wire.until(lambda: all(engine.got(Welcome) for engine in engines) and ready(running) == 2)
    wire.links.pop("e1").close()
    began = time.monotonic()
    wire.until(lambda: ready(running) == 1)
    assert time.monotonic() - began < LIMITS.silence_s / 2
    wire.close()
