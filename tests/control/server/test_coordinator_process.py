"""The coordinator as it is deployed: real sockets, real journal, real clients, one whole round and a restart."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from tests.kit.waiting import until
from weightbus.control import protocol as m
from weightbus.control.bus.client import BusClient, BusSettings
from weightbus.control.bus.session import SessionTiming
from weightbus.control.bus.sockets import RouterBus
from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
from weightbus.control.machine.status import StatusView
from weightbus.control.protocol.errors import ConfigurationError, RequestRefused
from weightbus.control.protocol.messages import AgentId, Channel, Incarnation, RequestId, Version
from weightbus.control.security.trust import ALLOW_LIST_FILE
from weightbus.control.server.coordinator_process import CoordinatorProcess
from weightbus.control.server.settings import CoordinatorSettings

from ..memory_bus import MemoryBus

CHANNEL = Channel("policy")
DEADLINE_S = 60.0
QUICK = SessionTiming(resend_first_s=0.1, resend_max_s=0.2, silence_s=DEADLINE_S)
LOCAL = m.TransportKind.LOCAL
TRAINER = m.TrainerInfo(host="h", device="cpu", ranks=1, transports=(LOCAL,))


def settings(folder: Path, port: int = 0) -> CoordinatorSettings:
    return CoordinatorSettings(
        insecure_loopback=True,
        router_port=port,
        http_port=0,
        journal=folder / "journal.sqlite",
        heartbeat_s=0.1,
        silence_s=DEADLINE_S,  # no agent is lost because the machine is busy
        takeover_s=0.5,
    )


class Running:
    """A service on a thread."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.service = CoordinatorProcess(settings(folder, port))
        self.port = self.service.router_port
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def stop(self) -> None:
        self.service.stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    @property
    def view(self) -> StatusView:
        return self.service.server.status

    def wait_for(self, found: Callable[[StatusView], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while not found(self.view):
            assert time.monotonic() < end, self.view
            pause.wait(0.02)

    def metric(self, line: str) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.service.http.port}/metrics", timeout=30) as page:
            return line in page.read().decode()


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    each = Running(tmp_path)
    yield each
    each.stop()


def agent(port: int, name: str, role: m.Role, info: Callable[[], m.EngineInfo] | None = None) -> BusClient:
    def hello() -> m.Hello:
        return m.Hello(
            request=RequestId("x"),
            agent=AgentId(name),
            role=role,
            channel=CHANNEL,
            incarnation=Incarnation(f"{name}-1"),
            engine=info() if info else None,
            trainer=None if info else TRAINER,
        )

    return BusClient(BusSettings(endpoint=f"tcp://127.0.0.1:{port}", timing=QUICK), hello)


class Engine:
    """Takes every version, at once."""

    def __init__(self, port: int, name: str) -> None:
        self.name = name
        self.held: m.HeldVersion | None = None
        self.client = agent(port, name, m.Role.ENGINE, self._info)
        self.client.start(DEADLINE_S)
        self.welcomes = 0
        self.unexpected: m.ToAgent | None = None
        """A command that it does not know; it ends."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _info(self) -> m.EngineInfo:
        return m.EngineInfo(
            url=f"http://{self.name}",
            server_version="0",
            tp=1,
            pp=1,
            dp=1,
            device="cpu",
            host="h",
            transports=(LOCAL,),
            held=self.held,
        )

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self.client.close()
        assert self.unexpected is None

    def _run(self) -> None:
        while not self._stop.is_set():
            order = self.client.next(0.1)
            if isinstance(order, m.Welcome):
                self.welcomes += 1
            elif order is not None:
                for answer in self._answers(order):
                    self._say(answer)

    def _say(self, answer: m.ToCoordinator) -> None:
        """Late answers are refused and nothing is to be done: what it was told after its Hello may cross a round."""
        try:
            self.client.request(answer, deadline_s=DEADLINE_S)
        except RequestRefused as refused:
            if refused.code is not m.RefusalCode.STALE_EPOCH:
                raise

    def _answers(self, order: m.ToAgent) -> Iterator[m.ToCoordinator]:
        key = self.client.new_request
        match order:
            case m.Prepare(epoch=epoch):
                yield m.Prepared(request=key(), channel=CHANNEL, epoch=epoch, seconds=0.01)
            case m.Pause(epoch=epoch):
                yield m.Paused(request=key(), channel=CHANNEL, epoch=epoch, seconds=0.01)
            case m.Transfer(epoch=epoch, manifest=manifest, table=table, version=version):
                self.held = m.HeldVersion(version=version, manifest=manifest, table=table)
                yield m.Transferred(request=key(), channel=CHANNEL, epoch=epoch, bytes=10, buckets=1, seconds=0.01)
                yield m.Verified(
                    request=key(),
                    channel=CHANNEL,
                    epoch=epoch,
                    version=version,
                    table=table,
                    verified_by="live-digest",
                    seconds=0.01,
                )
            case m.Commit(epoch=epoch, version=version):
                yield m.Serving(
                    request=key(), channel=CHANNEL, epoch=epoch, version=version, seconds=0.01, paused_s=0.1
                )
            case m.Abort(epoch=epoch):  # its first heartbeat came between a lease and its round
                held = self.held.version if self.held else None
                yield m.Serving(request=key(), channel=CHANNEL, epoch=epoch, version=held, seconds=0.01, paused_s=0.0)
            case _:
                self.unexpected = order
                self._stop.set()


def publish(trainer: BusClient, version: int, *, leased: Callable[[], None] = lambda: None) -> m.RoundDone:
    """One round, as the trainer sees it. `leased` is called between its lease and its first message."""
    key = trainer.new_request
    granted = trainer.request(m.Acquire(request=key(), channel=CHANNEL, version=Version(version)))
    assert isinstance(granted, m.Granted)
    leased()
    manifest, table = trainer.put_blob(b"m" * 600_000), trainer.put_blob(b"t%d" % version)
    order = {"channel": CHANNEL, "version": Version(version), "manifest": manifest, "table": table}
    trainer.request(m.Publish(request=key(), epoch=granted.epoch, bytes=10, buckets=1, **order))
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        match trainer.next(0.1):
            case m.Send(epoch=epoch):
                offer = m.Endpoint(transport=LOCAL, address="/x")
                trainer.request(m.Offered(request=key(), channel=CHANNEL, epoch=epoch, offers=(offer,)))
                trainer.request(m.Sent(request=key(), channel=CHANNEL, epoch=epoch))
            case m.RoundDone() as done if done.version == version:
                return done
            case _:
                pass
    pytest.fail("the round did not end")


def test_round_over_real_sockets(running: Running) -> None:
    """Two engines take a version; status and metrics tell of it."""
    engines = [Engine(running.port, name) for name in ("e0", "e1")]
    try:
        with agent(running.port, "t0", m.Role.TRAINER) as trainer:
            trainer.start(DEADLINE_S)
            done = publish(trainer, 5)
            assert done.outcome is m.Outcome.COMMITTED, done
            assert {report.outcome for report in done.engines} == {m.Outcome.COMMITTED}
            running.wait_for(lambda view: len(view.channels["policy"].ready) == 2)
            channel = running.view.channels["policy"]
            assert channel.committed is not None
            assert channel.committed.version == 5
            assert msgspec.json.decode(trainer.status())["channels"]["policy"]["committed"]["version"] == 5
            assert publish(trainer, 6).outcome is m.Outcome.COMMITTED
            running.wait_for(lambda _: running.metric('weightbus_engine_version{channel="policy",engine="e1"} 6.0'))
            for line in (
                'weightbus_committed_version{channel="policy"} 6.0',
                'weightbus_rounds_total{channel="policy",outcome="committed"} 2.0',
                'weightbus_engine_version_lag{channel="policy",engine="e0"} 0.0',
                'weightbus_transfer_bytes_total{channel="policy",transport="local"} 40.0',
                'weightbus_agents_connected{channel="policy",role="engine"} 2.0',
                'weightbus_pause_seconds_count{channel="policy"} 4.0',
                'weightbus_round_seconds_count{channel="policy",phase="transferring"} 2.0',
                'weightbus_round_seconds_count{channel="policy",phase="total"} 2.0',
            ):
                running.wait_for(lambda _, line=line: running.metric(line))  # type: ignore[misc]
    finally:
        for each in engines:
            each.close()
    running.wait_for(lambda view: view.agents == 0)


def test_engines_heard_of_between_a_lease_and_its_round_take_part(running: Running) -> None:
    """Their first heartbeat comes when the channel has an epoch: they are told to serve what they have (settled)."""
    engines = [Engine(running.port, name) for name in ("e0", "e1")]
    try:
        with agent(running.port, "t0", m.Role.TRAINER) as trainer:
            trainer.start(DEADLINE_S)
            ready = lambda view: len(view.channels["policy"].ready) == 2  # noqa: E731
            done = publish(trainer, 5, leased=lambda: running.wait_for(ready))
            assert {report.outcome for report in done.engines} == {m.Outcome.COMMITTED}
    finally:
        for each in engines:
            each.close()


def test_restart_between_rounds(tmp_path: Path) -> None:
    """A coordinator that was restarted knows the version, refuses to go back, and its agents go on by themselves."""
    first = Running(tmp_path)
    port = first.port
    engine = Engine(port, "e0")
    trainer = agent(port, "t0", m.Role.TRAINER)
    trainer.start(DEADLINE_S)
    try:
        assert publish(trainer, 1).outcome is m.Outcome.COMMITTED
        first.stop()
        second = Running(tmp_path, port)
        try:
            assert second.view.boot == 2
            with pytest.raises(RequestRefused, match="version_not_newer"):
                trainer.request(m.Acquire(request=trainer.new_request(), channel=CHANNEL, version=Version(0)))
            second.wait_for(lambda view: view.agents == 2)
            assert publish(trainer, 2).outcome is m.Outcome.COMMITTED
            assert engine.welcomes == 1
        finally:
            second.stop()
    finally:
        trainer.close()
        engine.close()


def test_readiness_follows_the_loop(running: Running, tmp_path: Path) -> None:
    """Ready while the loop moves; not once it is asked to stop, nor when it is stuck."""
    assert running.service.readiness().ready
    running.stop()
    assert running.service.readiness().reason == "stopping"
    stuck = CoordinatorProcess(settings(tmp_path / "stuck"))
    stuck.server.stepped_at -= 100.0
    assert "not moved" in stuck.readiness().reason
    stuck.close()


def test_an_allow_list_that_is_not_in_force_is_shown(tmp_path: Path) -> None:
    """A list that nobody may use ends the readiness; one that is broken is a warning while the one before stands."""
    keys = tmp_path / "keys"
    make_deployment_keys(keys, [AgentKeys(AgentId("e0"), m.Role.ENGINE, (CHANNEL,))])
    locked = msgspec.structs.replace(settings(tmp_path), insecure_loopback=False, keys=keys)
    with contextlib.closing(CoordinatorProcess(locked)) as service:
        assert service.readiness().ready
        assert service.server.machine._keyed, "the machine knows that no agent joins without a key"
        trust = keys / ALLOW_LIST_FILE
        good = trust.read_bytes()
        trust.write_text("nonsense")
        until(lambda: "the list that was read before stands" in "".join(service.warnings()))
        assert service.readiness().ready
        assert service.server._view(0.0).warnings == service.warnings()
        trust.chmod(0o666)
        trust.write_bytes(good)
        until(lambda: "no agent is trusted" in service.readiness().reason)
        trust.chmod(0o600)
        until(lambda: service.readiness().ready and not service.warnings())


def test_what_cannot_start_leaves_nothing_behind(running: Running, tmp_path: Path) -> None:
    """A second coordinator on the same port fails with advice; its journal is free, its ports are too."""
    other = tmp_path / "other"
    with pytest.raises(ConfigurationError, match="router_port"):
        CoordinatorProcess(settings(other, running.port))
    free = CoordinatorProcess(settings(other))
    free.close()
    CoordinatorProcess(settings(other)).close()


def test_memory_bus_is_as_faithful_as_sockets() -> None:
    """The stand-in refuses what the wire would refuse, and loses only what it is told to."""
    bus = MemoryBus()
    link = bus.link()
    assert link.send(m.Bye()) is False
    link.open()
    assert link.send(m.Bye(reason="x")) is True
    (received,) = bus.poll(0.0)
    assert bus.send(received.peer, m.Alive(seq=1, boot=1)).value == "sent"
    assert link.poll(0.0) == [(m.Alive(seq=1, boot=1), None)]
    bus.lose = lambda message: isinstance(message, m.Alive)
    assert bus.send(received.peer, m.Alive(seq=2, boot=1)).value == "sent"
    assert link.poll(0.0) == []
    bus.inject(link, [b"junk"])
    (rejected,) = bus.poll(0.0)
    assert "1 parts" in str(getattr(rejected, "error", ""))
    bus.cut()
    assert bus.send(received.peer, m.Alive(seq=3, boot=1)).value == "gone"
    assert link.send(m.Bye()) is False
    link.open()
    link.wake()
    assert link.poll(DEADLINE_S) == []
    bus.close()
    link.open()
    assert link.send(m.Bye()) is False
    link.close()


def test_one_thread_owns_the_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever HTTP, signals or others ask for: the bus is touched by the loop's thread alone, but for `wake`."""
    users: dict[object, set[int]] = defaultdict(set)
    for name in ("poll", "send", "forget"):
        real = getattr(RouterBus, name)

        def noted(bus: RouterBus, *args: object, real: Callable[..., object] = real) -> object:
            users[bus].add(threading.get_ident())
            return real(bus, *args)

        monkeypatch.setattr(RouterBus, name, noted)
    running = Running(tmp_path)
    client = agent(running.port, "t0", m.Role.TRAINER)
    with client:
        client.start(DEADLINE_S)
        urllib.request.urlopen(f"http://127.0.0.1:{running.service.http.port}/status", timeout=DEADLINE_S).close()
        client.status()
        running.service.reload_allow_list()
    running.stop()
    assert users[running.service.server._bus] == {running._thread.ident}
