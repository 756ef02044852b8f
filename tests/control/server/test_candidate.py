"""One coordinator of several: it refuses agents while it stands by, and resigns from a term that it cannot use."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import structlog

from weightbus.control.bus.interface import REJECTED_KEY
from weightbus.control.bus.sockets import DealerLink
from weightbus.control.cli.entry_point import main
from weightbus.control.journal.etcd import Election, EtcdUnavailable, LeaderRecord
from weightbus.control.protocol.errors import JournalUnwritable
from weightbus.control.protocol.messages import (
    AgentId,
    Bye,
    Channel,
    Heartbeat,
    Hello,
    Incarnation,
    RefusalCode,
    Refused,
    RequestId,
    Role,
    ToCoordinator,
)
from weightbus.control.server import coordinator_process as module
from weightbus.control.server.coordinator_process import CoordinatorCandidate, StandbyPorts, StandbyServer
from weightbus.control.server.settings import CoordinatorSettings

DEADLINE_S = 30.0
HELLO = Hello(
    request=RequestId("h"),
    agent=AgentId("o"),
    role=Role.OBSERVER,
    channel=Channel("policy"),
    incarnation=Incarnation("o-1"),
)


class Follower:
    """An election that another coordinator has won."""

    def stand(self) -> LeaderRecord:
        return LeaderRecord("c0", "tcp://127.0.0.1:1")


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[StandbyServer]:
    settings = CoordinatorSettings(
        insecure_loopback=True, router_port=0, http_port=0, journal=tmp_path / "journal.sqlite"
    )
    standby = StandbyServer(settings, None)
    thread = threading.Thread(target=lambda: standby.run(cast("Election", Follower())))
    thread.start()
    yield standby
    standby.stop()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def scraped(standby: StandbyServer) -> dict[str, float]:
    page = urllib.request.urlopen(f"http://127.0.0.1:{standby.ports.http}/metrics", timeout=DEADLINE_S).read().decode()
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name.removeprefix("weightbus_"): float(value) for name, value in lines}


def say(link: DealerLink, message: ToCoordinator | bytes) -> None:
    """Once: what would be said twice would be answered twice."""
    until = time.monotonic() + DEADLINE_S
    if isinstance(message, bytes):
        cast("Any", link)._socket.send(message)
        return
    while not link.send(message):
        assert time.monotonic() < until, "no connection"
        link.poll(0.01)


def answered(link: DealerLink, message: ToCoordinator | bytes) -> Refused:
    """What is answered to `message`, or to bytes that are none."""
    say(link, message)
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        for heard in link.poll(0.1):
            assert isinstance(heard, tuple)
            assert isinstance(heard[0], Refused)
            return heard[0]
    raise AssertionError("nothing was answered")


def test_every_refusal_is_answered_and_counted(standby: StandbyServer) -> None:
    """Agents are sent to the leader; bytes that are no message are refused as by a leader (S13)."""
    link = DealerLink(f"tcp://127.0.0.1:{standby.ports.router}")
    link.open()
    try:
        refused = answered(link, HELLO)
        assert (refused.code, refused.leader) == (RefusalCode.NOT_LEADER, "tcp://127.0.0.1:1")
        assert answered(link, Heartbeat(seq=1)).code is RefusalCode.NOT_LEADER
        refused = answered(link, b"no message")
        assert (refused.request, refused.code) == (REJECTED_KEY, RefusalCode.NOT_ALLOWED)
        say(link, Bye())
        assert answered(link, HELLO).request == HELLO.request, "a farewell needs no answer"
    finally:
        link.close()
    until = time.monotonic() + DEADLINE_S
    while scraped(standby)['messages_refused_total{code="not_leader"}'] < 3:  # counted after it was answered
        assert time.monotonic() < until
    found = scraped(standby)
    assert found['messages_refused_total{code="not_leader"}'] == 3
    assert found['messages_refused_total{code="not_allowed"}'] == 1
    assert found['connections_total{event="accepted"}'] >= 1


@pytest.mark.parametrize("command", ["status", "plan"])
def test_a_standby_names_the_leader_to_people(
    standby: StandbyServer, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The standby knows no channels, and names the coordinator to ask."""
    url = f"http://127.0.0.1:{standby.ports.http}"
    until = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while "c0" not in standby.readiness().reason:
        assert time.monotonic() < until
        pause.wait(0.02)
    assert main([command, f"--url={url}"]) == 1
    assert "stands by; 'c0' leads, with agents at tcp://127.0.0.1:1: name its HTTP port" in capsys.readouterr().err


class Unreachable:
    """An election at a store that cannot be asked, for one reason after the other; then it is stopped."""

    def __init__(self, standby: StandbyServer, problems: Sequence[str]) -> None:
        self._standby, self._problems = standby, list(problems)

    def stand(self) -> LeaderRecord:
        problem = self._problems.pop(0)
        if not self._problems:
            self._standby.stop()
        if not problem:
            return LeaderRecord("c0", "tcp://127.0.0.1:1")
        raise EtcdUnavailable(["127.0.0.1:1"], problem)


def test_a_store_that_cannot_be_asked_is_told_once_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start on, before the first answer, and again after a new failure."""
    monkeypatch.setattr(module, "ELECTION_S", 0.0)
    standby = StandbyServer(CoordinatorSettings(insecure_loopback=True, router_port=0, http_port=0), None)
    problems = ["refused", "refused", "timed out", "timed out", "", "timed out", "timed out"]
    with structlog.testing.capture_logs() as lines:
        assert standby.run(cast("Election", Unreachable(standby, problems))) is None
    found = [(line["event"], line.get("problem")) for line in lines]
    gone = "store_unavailable"
    assert found == [(gone, "refused"), (gone, "timed out"), ("stands_by", None), (gone, "timed out")]


def test_no_alarm_goes_off_at_a_standby(standby: StandbyServer) -> None:
    """It writes nothing, so no journal of its is unwritable; that is what the alarm for a full disk looks at."""
    assert scraped(standby)["journal_writable"] == 1


class Term:
    """One that was won."""

    def __init__(self) -> None:
        self.resigned = 0

    def resign(self) -> None:
        self.resigned += 1


class Standby:
    """Is elected once, and told to stop the next time."""

    ports = StandbyPorts(router=1, http=2)
    terms: ClassVar[list[Term | None]]

    def __init__(self, *_given: object) -> None:
        pass

    def run(self, _election: object) -> Term | None:
        return self.terms.pop(0)


def _cannot(*_given: object) -> None:
    raise JournalUnwritable("etcd://x", "no answer", "writing is tried again by itself")


@pytest.mark.parametrize("fails", ["EtcdJournal", "CoordinatorProcess"])
def test_an_elected_candidate_that_cannot_lead_resigns(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store went away between election and boot: the term is given back at once, and the next one is stood for.

    A term that is kept is renewed by its own thread: no coordinator would lead while this process lives.
    """
    term = Term()
    Standby.terms = [term, None]
    monkeypatch.setattr(module, "StandbyServer", Standby)
    monkeypatch.setattr(module, "EtcdJournal", lambda *_given: None)
    monkeypatch.setattr(module, fails, _cannot)
    monkeypatch.setattr(CoordinatorCandidate, "_election", lambda *_given: None)
    settings = CoordinatorSettings(insecure_loopback=True, store="etcd://127.0.0.1:1/x")
    CoordinatorCandidate(settings).run()
    assert term.resigned == 1
    assert Standby.terms == [], "it stood by again"
