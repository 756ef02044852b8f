"""The coordinator as a process: alone, or as one of several that share an etcd and of which one leads.

`CoordinatorProcess` builds bus, journal, machine and HTTP port from settings, and runs them to the end.
`CoordinatorCandidate` alternates between that and `StandbyServer`, which holds its ports, tells agents which one leads,
and stands for election.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from functools import partial
from typing import Final, assert_never

import msgspec

from ..bus import (
    ConnectionRejected,
    Incoming,
    Rejected,
    RouterBus,
    ServerKeys,
    Throttled,
    TrustRevoked,
    refusal_observation,
    reply_to_rejected,
)
from ..journal import (
    Deposed,
    Election,
    Etcd,
    EtcdJournal,
    EtcdUnavailable,
    Journal,
    LeaderRecord,
    SqliteJournal,
    Term,
    WriterThread,
    parse_url,
    read_login,
)
from ..log import get_log
from ..machine import HEARTBEAT_KEY, MessageReceived, Refusal, StandbyView, StatusView, status as status_document
from ..protocol import AgentId, Bye, Heartbeat, JournalUnwritable, RefusalCode, Refused, ToCoordinator
from ..security import keys_folder
from .event_loop import EventLoop
from .http_server import HttpAnswer, HttpPort, Readiness, url_of
from .metrics import (
    ALLOW_LIST_IN_FORCE,
    JOURNAL_HUNG_SECONDS,
    JOURNAL_SECONDS,
    Metrics,
    MetricSource,
    ObservationReporter,
)
from .settings import CoordinatorSettings
from .status_page import SECURITY_HEADERS, render_page

STALLED_S: Final = 5.0
"""Seconds without a step after which the loop, which steps every second, counts as stuck."""


def read_keys(settings: CoordinatorSettings) -> ServerKeys | None:
    """The coordinator's keys and allow-list; None with ``insecure_loopback``. Raises `PeerKeyError`."""
    return None if settings.insecure_loopback else ServerKeys.read(keys_folder(settings.keys))


class CoordinatorProcess:
    """One coordinator. All sockets are bound and the journal is open once constructed; `run` serves until `stop`."""

    def __init__(self, settings: CoordinatorSettings, journal: Journal | None = None) -> None:
        """`journal`: None opens the SQLite journal of the settings. A given journal is closed by this process too."""
        keys = read_keys(settings)
        self._keys = keys
        self._writer: WriterThread
        metrics = Metrics(MetricSource.COORDINATOR)
        reporter = ObservationReporter(metrics)
        showing = threading.Lock()
        with contextlib.ExitStack() as undo:
            bus = RouterBus(settings.bind, settings.router_port, keys)
            undo.callback(bus.close)
            journal = journal or SqliteJournal(settings.journal)
            self._writer = writer = WriterThread(journal, bus.wake)
            undo.callback(_close_journal, writer, journal)

            def show() -> None:
                view = self.server.status
                with showing:
                    reporter.show(view)
                    metrics.set(JOURNAL_HUNG_SECONDS, writer.hung_s)
                    metrics.set(ALLOW_LIST_IN_FORCE, float(not self._trust_problem()))
                    reporter.count(bus.connections, bus.throttled)

            self.server = EventLoop(
                bus,
                journal,
                settings.limits(),
                observe=reporter.observe,
                written=partial(metrics.observe, JOURNAL_SECONDS),
                keyed=keys is not None,
                warnings=self.warnings,
                writer=writer,
            )
            self._refused = bus.refused
            self.registry = metrics.registry
            self.http = HttpPort(
                settings.http_bind,
                settings.http_port,
                registry=self.registry,
                refresh=show,
                readiness=self.readiness,
                warnings=self.warnings,
                status=lambda: status_document.encode(self._status()),
                pages={
                    "/": lambda: _page(self._status(), self.readiness()),
                    "/plan": lambda: HttpAnswer("application/json", self.server.plan_json),
                },
                named_actions={"/forget-engine": self._forget_engine},
            )
            undo.callback(self.http.stop)
            self._undo = undo.pop_all()
        self.router_port = bus.router_port
        self._log = get_log(__name__)
        self._settings = settings
        self._boot = journal.boot

    def run(self) -> None:
        """Serve until `stop`, then release all resources. Raises the error that broke the loop."""
        with self._undo:
            self.http.start()
            self._log.info(
                "coordinator_started",
                boot=self._boot,
                bind=self._settings.bind,
                router_port=self.router_port,
                http=url_of(self._settings.http_bind, self.http.port),
                journal=self._settings.store or str(self._settings.journal),
                keys="" if self._keys is None else str(self._keys.trust.path),
            )
            self.server.run()
            self._log.info("coordinator_stopped")

    def close(self) -> None:
        """Release all resources without having run."""
        self._undo.close()

    def stop(self) -> None:
        """End `run`; from any thread or signal handler."""
        self.server.stop()

    def reload_allow_list(self) -> None:
        """Read the allow-list now instead of at its next poll. Safe in a signal handler."""
        if self._keys is not None:
            self._keys.trust.expire()
        self.server.reload_allow_list()

    def warnings(self) -> tuple[str, ...]:
        """What is wrong around this process, for ``/healthz`` and the status."""
        return tuple(filter(None, (self._hang(), self._trust_problem())))

    def _hang(self) -> str:
        hung_s = self._writer.hung_s
        return f"the journal's disk has not taken a record for {hung_s:.0f} s: nothing is granted" if hung_s else ""

    def _trust_problem(self) -> str:
        return "" if self._keys is None else self._keys.trust.problem or self._keys.trust.warning

    def _status(self) -> StatusView:
        """The status. Files of keys are read on this thread, not on the loop's."""
        return msgspec.structs.replace(self.server.status, refused=self._refused())

    def _forget_engine(self, name: str) -> Readiness:
        problem = self.server.forget_engine(AgentId(name))
        return Readiness(not problem, problem or f"forgotten: {name}")

    def readiness(self) -> Readiness:
        """Ready while agents are served and a version could be committed."""
        machine = self.server.machine  # another thread's: single values may be read, nothing may be walked
        stuck_s = time.monotonic() - self.server.stepped_at
        if machine.stopping:
            return Readiness(False, "stopping")
        if self._keys is not None and self._keys.trust.problem:
            return Readiness(False, f"no agent is trusted: {self._keys.trust.problem}")
        if hang := self._hang():
            return Readiness(False, hang)
        if machine.read_only:
            return Readiness(False, "the journal takes no writes: nothing is granted until it does")
        if stuck_s > STALLED_S:
            return Readiness(False, f"the loop has not moved for {stuck_s:.1f} s")
        return Readiness(True, f"boot {machine.boot}, {len(machine.membership)} agents")


def _close_journal(writer: WriterThread, journal: Journal) -> None:
    """End the writes and close the journal, unless its disk hangs: then the end of the process does."""
    writer.close()
    if writer.closed:
        journal.close()
    else:
        get_log(__name__).warning("journal_not_closed", reason="its disk hangs")


CALL_SHARE: Final = 0.4
"""Timeout of a call to the store, as a share of the leader's lease: a lost answer must not cost the lease."""
ELECTION_S: Final = 0.25
"""Seconds between two attempts to be elected: what a failover takes on top of the lease."""
RETRY_S: Final = 0.5
"""Seconds after which a refused agent may ask again, if no leader is known."""


class CoordinatorCandidate:
    """`run` serves, in one role or the other, until `stop`."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._store = parse_url(settings.store)
        self._login = read_login(settings.store_login_file)
        self._settings = settings
        self._keys = read_keys(settings)
        self._log = get_log(__name__)
        self._name = settings.name or socket.gethostname()
        self._stop = threading.Event()
        self._role: StandbyServer | CoordinatorProcess = StandbyServer(settings, self._keys)

    def run(self) -> None:
        """Stand by and lead in turn. Raises the error that broke either role."""
        while not self._stop.is_set():
            standby = self._role
            assert isinstance(standby, StandbyServer)
            etcd = self._connect()
            term = standby.run(self._election(etcd, standby.ports))
            if term is None:
                etcd.close()
                return
            settings = _with_ports(self._settings, standby.ports)
            try:
                self._lead(settings, term)
            except (Deposed, JournalUnwritable) as problem:  # the latter: etcd went away between election and boot
                self._log.warning("deposed", reason=str(problem))
            finally:
                etcd.close()
            if not self._stop.is_set():
                self._role = StandbyServer(settings, self._keys)

    def stop(self) -> None:
        """End `run`; from any thread or signal handler."""
        self._stop.set()
        self._role.stop()

    def reload_allow_list(self) -> None:
        """Read the allow-list now. Safe in a signal handler."""
        if self._keys is not None:
            self._keys.trust.expire()

    def _lead(self, settings: CoordinatorSettings, term: Term) -> None:
        try:
            # a connection of its own: a slow write must not hold up the renewal of the lease
            journal = EtcdJournal(self._connect(), self._store.prefix, term)
            process = CoordinatorProcess(settings, journal)
        except BaseException:
            term.resign()
            raise
        self._role = process
        if self._stop.is_set():  # it came while the process was built
            process.stop()
        process.run()

    def _connect(self) -> Etcd:
        return Etcd(self._store.members, self._settings.leader_s * CALL_SHARE, self._login)

    def _election(self, etcd: Etcd, ports: StandbyPorts) -> Election:
        host = f"[{self._settings.bind}]" if ":" in self._settings.bind else self._settings.bind
        endpoint = self._settings.advertise or f"tcp://{host}:{ports.router}"
        return Election(etcd, self._store.prefix, LeaderRecord(self._name, endpoint), self._settings.leader_s)


class StandbyPorts(msgspec.Struct, frozen=True):
    """Ports at which this coordinator is reached, in either role."""

    router: int
    http: int


def _with_ports(settings: CoordinatorSettings, ports: StandbyPorts) -> CoordinatorSettings:
    """The settings with the ports that were bound: both roles answer at the same ones."""
    return msgspec.structs.replace(settings, router_port=ports.router, http_port=ports.http)


class StandbyServer:
    """One period of standing by. Everything is bound once constructed; `run` ends with a term, or with `stop`."""

    def __init__(self, settings: CoordinatorSettings, keys: ServerKeys | None) -> None:
        self._log = get_log(__name__)
        self._stop = threading.Event()
        self._leader: LeaderRecord | None = None
        self._problem = "not asked yet"
        with contextlib.ExitStack() as undo:
            self._bus = RouterBus(settings.bind, settings.router_port, keys)
            undo.callback(self._bus.close)
            metrics = Metrics(MetricSource.COORDINATOR)
            self._reporter = ObservationReporter(metrics)
            http = HttpPort(
                settings.http_bind,
                settings.http_port,
                registry=metrics.registry,
                refresh=self._count,
                readiness=self.readiness,
                status=self._status,
                pages={
                    "/": lambda: _page(self._view(), self.readiness()),
                    "/plan": lambda: HttpAnswer("application/json", self._status()),
                },
            )
            undo.callback(http.stop)
            self._undo = undo.pop_all()
        self._http = http
        self.ports = StandbyPorts(self._bus.router_port, http.port)

    def run(self, election: Election) -> Term | None:
        """Refuse agents until elected; None if stopped before. The ports are free afterwards."""
        with self._undo:
            self._http.start()
            stand_at = time.monotonic()
            while not self._stop.is_set():
                if (now := time.monotonic()) >= stand_at:
                    stand_at = now + ELECTION_S
                    if (term := self._stand(election)) is not None:
                        return term
                for received in self._bus.poll(max(0.0, stand_at - time.monotonic())):
                    self._receive(received)
            return None

    def stop(self) -> None:
        """End `run`. Safe in a signal handler."""
        self._stop.set()
        self._bus.wake()

    def readiness(self) -> Readiness:
        """Never ready; the reason names the leader, or the problem with the store."""
        return Readiness(False, f"stands by: {self._situation()}")

    def _stand(self, election: Election) -> Term | None:
        try:
            found = election.stand()
        except EtcdUnavailable as error:
            if error.problem != self._problem:
                self._log.warning("store_unavailable", problem=error.problem)
            self._leader, self._problem = None, error.problem
            return None
        self._problem = ""
        if isinstance(found, Term):
            return found
        if found != self._leader:
            self._log.info("stands_by", leader=found.name, endpoint=found.endpoint)
        self._leader = found
        return None

    def _receive(self, received: Incoming) -> None:
        match received:
            case MessageReceived(message=Bye()) | TrustRevoked():
                pass  # a standby has no members
            case MessageReceived():
                refused, principal = self._refusal(received.message), received.principal
                self._bus.send(received.peer, refused)
                agent = principal.name if principal else "?"
                kind = received.message.kind
                self._reporter.observe(Refusal(agent=agent, message=kind, code=refused.code, reason=refused.reason))
            case Rejected():
                self._bus.send(received.peer, reply_to_rejected(received))
                self._reporter.observe(refusal_observation(received))
            case Throttled() | ConnectionRejected():
                self._reporter.observe(refusal_observation(received))
            case _:
                assert_never(received)

    def _count(self) -> None:
        self._reporter.count(self._bus.connections, self._bus.throttled)

    def _refusal(self, message: ToCoordinator) -> Refused:
        request = HEARTBEAT_KEY if isinstance(message, Heartbeat | Bye) else message.request
        return Refused(
            request=request,
            code=RefusalCode.NOT_LEADER,
            reason=f"this coordinator is not the leader: {self._situation()}",
            retry_after_s=RETRY_S,
            leader=self._leader.endpoint if self._leader else "",
        )

    def _situation(self) -> str:
        if self._problem:
            return f"the store cannot be asked who leads ({self._problem})"
        return f"{self._leader.name} leads, at {self._leader.endpoint}" if self._leader else "no coordinator leads yet"

    def _status(self) -> bytes:
        return msgspec.json.encode(self._view())

    def _view(self) -> StandbyView:
        leader = self._leader or LeaderRecord()
        return StandbyView(stands_by=True, leader=leader.name, endpoint=leader.endpoint)


def _page(view: StatusView | StandbyView, found: Readiness) -> HttpAnswer:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    page = render_page(view, ready=found.ready, situation=found.reason, at=at)
    return HttpAnswer("text/html; charset=utf-8", page, headers=SECURITY_HEADERS)
