"""A coordinator that does not lead: it holds the ports, says who leads, and stands for election until it is elected."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final, assert_never

import msgspec

from ..bus import Distrusted, Incoming, Rejected, RouterBus, ServerKeys, Throttled, TurnedAway, answer_to, refusal_of
from ..journal import Election, EtcdUnavailable, LeaderRecord, Term
from ..log import get_log
from ..machine import HEARTBEAT_KEY, MessageReceived, Refusal, StandbyView
from ..protocol import Bye, Heartbeat, RefusalCode, Refused, ToCoordinator
from .http_server import HttpPort, Readiness
from .metrics import Metrics, MetricSource
from .reporter import ObservationReporter
from .settings import CoordinatorSettings

ASK_S: Final = 0.25
"""How often it is looked whether anybody leads: what a failover takes on top of the lease."""
RETRY_S: Final = 0.5
"""When a refused agent may ask again, if nobody is known to lead."""


class StandbyPorts(msgspec.Struct, frozen=True):
    """Where this coordinator is reached, in either role."""

    router: int
    http: int


class StandbyServer:
    """One time of standing by. Everything is bound once constructed; `run` ends with a term, or with `stop`."""

    def __init__(self, settings: CoordinatorSettings, keys: ServerKeys | None) -> None:
        self._log = get_log(__name__)
        self._stop = threading.Event()
        self._leader: LeaderRecord | None = None
        self._problem = "nobody was asked yet"
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
                plan=self._status,
            )
            undo.callback(http.stop)
            self._undo = undo.pop_all()
        self._http = http
        self.ports = StandbyPorts(self._bus.router_port, http.port)

    def run(self, election: Election) -> Term | None:
        """Refuse agents until elected; None if stopped before. The ports are free afterwards."""
        with self._undo:
            self._http.start()
            ask_at = time.monotonic()
            while not self._stop.is_set():
                if (now := time.monotonic()) >= ask_at:
                    ask_at = now + ASK_S
                    if (term := self._ask(election)) is not None:
                        return term
                for received in self._bus.poll(max(0.0, ask_at - time.monotonic())):
                    self._take(received)
            return None

    def stop(self) -> None:
        """End `run`. Safe in a signal handler."""
        self._stop.set()
        self._bus.wake()

    def readiness(self) -> Readiness:
        """Never ready; says what is waited for."""
        return Readiness(False, f"stands by: {self._situation()}")

    def _ask(self, election: Election) -> Term | None:
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

    def _take(self, received: Incoming) -> None:
        match received:
            case MessageReceived(message=Bye()) | Distrusted():
                pass  # nobody is a member here
            case MessageReceived():
                refused, principal = self._refusal(received.message), received.principal
                self._bus.send(received.peer, refused)
                agent = principal.name if principal else "?"
                kind = received.message.kind
                self._reporter.observe(Refusal(agent=agent, message=kind, code=refused.code, reason=refused.reason))
            case Rejected():
                self._bus.send(received.peer, answer_to(received))
                self._reporter.observe(refusal_of(received))
            case Throttled() | TurnedAway():
                self._reporter.observe(refusal_of(received))
            case _:
                assert_never(received)

    def _count(self) -> None:
        self._reporter.count_connections(self._bus.connections)
        self._reporter.count_throttled(self._bus.throttled)

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
        return f"{self._leader.name} leads, at {self._leader.endpoint}" if self._leader else "nobody leads yet"

    def _status(self) -> bytes:
        leader = self._leader or LeaderRecord()
        return msgspec.json.encode(StandbyView(stands_by=True, leader=leader.name, endpoint=leader.endpoint))
