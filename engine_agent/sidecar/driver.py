"""The driver of a sidecar: carries events to the machine and its effects out. Owns the threads, and no decision.

bus reader     commands and welcomes of the coordinator                  -> events
worker         one operation at a time on the server                     -> events
monitor        whether the server is there, and which process generation -> events
reply sender   replies, in order, each until it is acknowledged
main           the machine; an error of any thread is raised here
"""

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, assert_never

import msgspec

from weightbus.control.bus import BusClient, BusSettings
from weightbus.control.log import get_log
from weightbus.control.protocol import (
    Abort,
    AgentId,
    Channel,
    ClientClosed,
    Commit,
    CoordinatorUnreachable,
    EngineHealth,
    EngineInfo,
    EngineMessage,
    Heartbeat,
    Hello,
    Incarnation,
    NotTrusted,
    Pause,
    Prepare,
    ProcessLocation,
    RefusalCode,
    Refused,
    RequestId,
    RequestRefused,
    Role,
    ToAgent,
    Topology,
    Transfer,
    WeightbusError,
    Welcome,
    clip,
    lasting,
)
from weightbus.control.security import AllowList, agent_key_files, allow_list_path
from weightbus.control.server import (
    FOREIGN_ACTS,
    SERVER_PAUSED,
    SERVER_UP,
    SIDECAR_CONNECTED,
    SIDECAR_HEALTH,
    SIDECAR_ORPHANED,
    SIDECAR_VERSION,
    SIDECAR_WEIGHTS,
    HttpPort,
    Metrics,
    MetricSource,
    Readiness,
)
from weightbus.dataplane.errors import Unsupported
from weightbus.dataplane.processes import default_runtime_dir, host_identity, open_runtime_dir
from weightbus.dataplane.tensors import Manifest
from weightbus.dataplane.transports import Receiver, ReceiverContext, registry as transports

from ..engines import Engine, EngineConnection, EngineFacts, ProcessesUnread, has_ended, open_engine
from ..errors import EngineAgentError, ServerError, ServerInUse, ServerSilent
from ..machine import (
    GENERATES,
    Answer,
    Cancel,
    Commanded,
    Effect,
    EngineMachine,
    Event,
    ForeignAct,
    ForgetAnswers,
    JoinAgain,
    Note,
    Operated,
    Operation,
    OrphanPolicy,
    Remember,
    Result,
    RunOperation,
    ServerFound,
    ServerGone,
    ServerTaken,
    ServerView,
    TimePassed,
    Validate,
    WeightState,
    Welcomed,
    name_of,
)
from ..state_file import EffectDispatcher, LockHeld, StateFile, StateWriter, server_claim
from .admission_page import AdmissionPage
from .file_resync import FileResync
from .memory_release import MemoryRelease, Noticed
from .operation_executor import LOOK_S, OperationExecutor
from .prerecording import Prerecorder
from .server_watch import Calm, DigestFile, ServerWatch, WeightSampler
from .settings import EngineAgentSettings, check_trust, read_keys
from .topology import opened_by, places_of, places_on, topology_of

TICK_S: Final = 0.5
SETTLE_S: Final = 30.0
"""Longest wait of a sidecar that was refused, for its server to be resumed."""
PATIENCE: Final = 3
"""Polls without an answer, or broken connections, before the server counts as gone."""
_RETRY_S: Final = 0.2
_TELL_S: Final = 5.0
"""Seconds between two lines of the log while the coordinator does not answer at the start."""
_WORKERS_S: Final = 0.2
"""Seconds between two looks whether all workers live, where they can be seen."""
_SEVERAL_S: Final = 30.0
"""An address that led to several servers is used again when one alone has answered for so long."""
_SEVERAL: Final = (
    "several servers answer at its address, as behind a balancer: give this agent the address of one of them"
)
_NO_ADMIN_KEY: Final = (
    "any client of the server may load, pause, release and resume its weights: give the server --admin-api-key KEY, and"
    " this agent --admin-api-key-file FILE with the same key"
)
_LOCATE_S: Final = 10.0
"""Seconds to the next look where the workers are, after one that failed."""
_ALONE_S: Final = 15.0
"""Seconds after which a sidecar whose server never answered joins without it, so that its reason is seen there."""
_FIRST_LOOK_S: Final = 2.0
"""Seconds between two looks whether the workers of a server without any version answer."""
_START_S: Final = 3.0
"""A server that starts answers its health check with 503 at once; one that is paused does not answer it at all."""
_CLOSE_S: Final = 5.0
_ANSWER_S: Final = 5.0
_AGAIN_S: Final = 0.1
_SAY_FIRST_S: Final = 0.001
"""The result of an operation is sent before its thread looks ahead: threads of one process wait for each other."""


def _level(view: ServerView) -> int:
    """Log level of a change of health: every round makes a server dirty and clean again, which is worth one line."""
    if view.health is EngineHealth.CLEAN:
        return logging.INFO
    return logging.DEBUG if view.on_its_way else logging.WARNING


def _since(what: str, seconds: float) -> str:
    """`what` with the wall-clock time at which it began, `seconds` ago, and how long that is."""
    at = datetime.now(UTC) - timedelta(seconds=seconds)
    return f"{what} since {at:%H:%M:%S} UTC, for {seconds:.0f} s"


class _Stop(msgspec.Struct, frozen=True):
    """The sidecar was asked to end, or a thread of it died."""

    error: BaseException | None = None


class _Ended(Exception):
    """`stop` was called: waits end."""


class Trouble(msgspec.Struct, frozen=True):
    """Why the server can take no version now, since when, and whether it may only be starting."""

    reason: str
    since: float
    starting: bool = False

    def lasting(self) -> str:
        """The reason with its duration until now."""
        return lasting(self.reason, time.monotonic() - self.since)


class EngineAgent:
    """One sidecar. `run` blocks until `stop`; the server is left as it is, and its record on disk."""

    def __init__(self, settings: EngineAgentSettings) -> None:  # noqa: PLR0915  one statement for each part
        self.settings = settings
        self.metrics = Metrics(MetricSource.ENGINE)
        self._incarnation = Incarnation(os.urandom(8).hex())
        self._records = StateFile(settings.state_dir, settings.name)
        self._records.claim()
        self._claim = server_claim(settings.runtime_dir or default_runtime_dir(), settings.server, settings.name)
        keys, exposed = read_keys(settings)
        memory_file = settings.state_dir / f"{settings.name}.memory.json"
        connection = EngineConnection(settings.server, keys, settings.dialect, memory_file)
        self._server = open_engine(settings.engine, connection)
        self._trust = None if settings.insecure_loopback else AllowList(allow_list_path(settings.keys))
        self._executor = OperationExecutor(
            settings.name,
            self._server,
            self._receiver,
            settings.model_path,
            self.metrics,
            proof=settings.verify,
            trust=self._trust,
        )
        self._server.observe(self._executor.called)
        self.metrics.live(SIDECAR_CONNECTED, self._connection)
        self._machine = EngineMachine(
            Channel(settings.channel),
            self._incarnation,
            self._records.read(),
            orphans=settings.orphaned,
            orphaned_s=settings.orphaned_s,
            ends_pauses=settings.ends_pauses,
        )
        self._writer = StateWriter(self._records.write)
        self._events: queue.SimpleQueue[Event | _Stop | Noticed] = queue.SimpleQueue()
        self._dispatcher = EffectDispatcher(
            self._machine, self._writer.now, self._carry_out, self._events.put, self._writer.later
        )
        self._view = self._machine.view()
        self._operations: queue.SimpleQueue[RunOperation | Callable[[], None] | None] = queue.SimpleQueue()
        self._reply_sender = ReplySender(lambda: self._bus, settings.name)
        self._errands = 0
        """Errands of the worker thread for other parts of the sidecar: counted when one begins, and when it ends."""
        self._digests = DigestFile(settings.state_dir / f"{settings.name}.digests.json")
        self._executor.kept = self._digests.read()
        sampler = WeightSampler(self._server, lambda: (self._executor.loads, self._executor.proven), self._digests)
        watch = ServerWatch(
            self._server, self._calm, self._events.put, settings.watch_s, sampler if settings.watch_weights else None
        )
        self._monitor = ServerMonitor(
            self._server, self._events.put, settings.poll_s, watch=watch, untried=self._is_untried
        )
        self._told_trouble: Trouble | None = None
        """Trouble as the coordinator was told it last."""
        self._unclean = ""
        """Why the server is not clean, as the coordinator was told it last; empty while it is."""
        self._unwelcome = "the coordinator has not answered yet"
        """Why this sidecar has not joined; empty once it has."""
        self._file_resync = FileResync(settings.saved_dir, settings, self._executor) if settings.saved_dir else None
        self._memory_release = MemoryRelease(self._server, self._events.put, self._records.read)
        self._prerecorder = Prerecorder(
            settings, self._server, lambda: self._view, self._events.put, self._executor.remember_layout,
            note_used=self._executor.left.note_used,
        )  # fmt: skip
        self._bus: BusClient | None = None
        self._greeted_with: EngineFacts | None = None
        """Facts of the server in the last `Hello`; None if it had never answered."""
        self.http_port = 0
        """Where the HTTP port listens, once `run` has opened it."""
        self._described: EngineFacts | None = None
        """Facts of the server as the coordinator was told them."""
        self._locations: tuple[str, tuple[ProcessLocation, ...]] = ("", ())
        """Identity of a process generation, and the locations of its workers."""
        self._locate_at = 0.0
        self._around: tuple[object, ...] = ()
        self._joins_again = False
        """True if the coordinator is to be told of another process generation of the server."""
        self._taken = ""
        """The refusal that names another sidecar of this server; empty while there is none."""
        self._started_at = time.monotonic()
        self._stopping = threading.Event()
        """Set once the bus is closed on purpose: its errors are no failures."""
        self._log = get_log(__name__).bind(agent=settings.name, channel=settings.channel)
        for setting, advice in exposed.items():
            self._log.warning("key_file_exposed", setting=setting, reason=advice)
        if not keys.admin:
            self._log.warning("server_without_admin_key", reason=_NO_ADMIN_KEY)

    def run(self) -> None:
        """Serve until `stop`. Raises the error that made it impossible to go on."""
        check_trust(self.settings)
        self._claim_server()
        http = HttpPort(
            self.settings.http_bind,
            self.settings.http_port,
            registry=self.metrics.registry,
            readiness=self._readiness,
            status=self._status,
            warnings=lambda: filter(None, (self._trust.problem or self._trust.warning,) if self._trust else ()),
            actions={"/give-back": self._give_back} if self.settings.gives_back else {},
            questions={"/admit": AdmissionPage(lambda: self._view, self._cause_of_trouble, self.metrics).answer},
        )
        self.http_port = http.port
        http.start()
        thread = threading.Thread(target=self._work, name="worker", daemon=True)
        try:
            thread.start()
            self._reply_sender.start()
            self._log.info("waiting_for_server", server=self.settings.server)
            self._monitor.start()
            if not self._await_server(min(_ALONE_S, self.settings.start_timeout_s)):
                self._connect()
                self._await_server(self.settings.start_timeout_s)
            self._server.check_keys()
            self._prerecord()
            self._connect()
            self._loop()
        except _Ended:
            self._log.info("stopped")
        finally:
            self._close(http, thread)

    def stop(self) -> None:
        """End `run`, from any thread or signal handler."""
        self._events.put(_Stop())

    def _claim_server(self) -> None:
        """Be the only sidecar of this server on this host. The coordinator refuses those of other hosts."""
        try:
            open_runtime_dir(self._claim.path.parent)
            self._claim.take()
        except LockHeld as held:
            raise ServerInUse(self.settings.server, held.holder) from held
        except (OSError, Unsupported) as error:
            # Only the local transport needs the folder, and fails with this reason when it is used.
            self._log.warning("server_not_claimed", reason=str(error))

    # -- the main thread -----------------------------------------------------------------------------------------------

    def _settle_alone(self) -> None:
        """Before this sidecar ends: a clean server that a round has paused is resumed at the end of its pause lease."""
        until = time.monotonic() + SETTLE_S
        while self._machine.owes_resume and time.monotonic() < until:
            self._step(self._next())

    def _await_server(self, wait_s: float) -> bool:
        """Wait for the server, whose facts the first message to the coordinator tells. False if it never answered yet.

        Raises `EngineAgentError` once `start_timeout_s` is over.
        """
        until = self._started_at + wait_s
        while not self._view.up:
            self._step(self._next())
            up = self._view.up
            if not up:  # its trouble is over with the Hello that tells its transports, and not before
                self._tell_trouble()
            if up or time.monotonic() < until:
                continue
            trouble = self._trouble()
            said = trouble.lasting() if trouble else f"no server at {self.settings.server}"
            if wait_s >= self.settings.start_timeout_s:
                raise EngineAgentError(f"{said}; given up after {self.settings.start_timeout_s:g} s")
            self._log.warning("server_not_reached", server=self.settings.server, reason=said)
            return False
        return True

    def _is_untried(self) -> bool:
        """Whether the server has held no version since its launch, and nothing is being done to it."""
        view = self._view
        idle = view.doing in {"", name_of(Validate)} and view.reached is None
        return idle and view.held is None and view.health is EngineHealth.CLEAN

    def _trouble(self) -> Trouble | None:
        """Why the server can take no version now; None if it can."""
        trouble = self._monitor.trouble
        return trouble if trouble is None or not self._view.up or trouble.starting else None

    def _cause_of_trouble(self) -> str:
        trouble = self._trouble()
        return trouble.lasting() if trouble else ""

    def _tell_trouble(self) -> None:
        """Report the topology again when the trouble has changed, or why the server is not clean.

        The duration of a trouble alone is no change. A round tells its own reasons.
        """
        trouble, unclean, view = self._trouble(), self._unclean, self._view
        if view.health is EngineHealth.CLEAN or not view.up:
            unclean = ""
        elif view.reached is None:
            unclean = view.reason
        if trouble == self._told_trouble and unclean == self._unclean:
            return
        before, self._told_trouble, self._unclean = self._told_trouble, trouble, unclean
        if trouble is None and before is not None:
            self._log.info("server_in_order", server=self.settings.server)
        elif trouble is not None and trouble != before:
            self._log.warning("server_in_trouble", reason=trouble.reason, starting=trouble.starting)
        if self._bus is not None:
            self._bus.report_topology()

    def _prerecord(self) -> None:
        self._operations.put(self._prerecorder.carry_out)
        while not self._prerecorder.over:  # no round waits for this engine yet
            self._step(self._next())

    def _connect(self) -> None:
        """Join the coordinator as what the server is now; again if it was launched with other ranks than before."""
        old, self._bus = self._bus, None
        if old is not None:
            old.close()
        self._look_around()
        given = self.settings
        curve = agent_key_files(given.keys, given.name, insecure_loopback=given.insecure_loopback)
        settings = BusSettings(endpoint=given.coordinator, curve=curve)
        bus = BusClient(settings, self._hello, self._heartbeat, topology=self._topology)
        try:
            welcome = self._join(bus)
        except RequestRefused as refused:
            bus.close()
            self._log.error("refused_by_coordinator", reason=str(refused))
            self._settle_alone()
            raise
        except BaseException:
            bus.close()
            raise
        facts = self._greeted_with
        self._bus, self._executor.blobs, self._described = bus, bus, facts
        self._unwelcome = self._taken = ""
        known = {"server_version": facts.version, "tp": facts.tp} if facts else {"server": "not known yet"}
        self._log.info("joined", **known, boot=welcome.boot, epoch=welcome.epoch)
        if facts is not None:
            self._warn_of_limits()
        self._dispatch(Welcomed(welcome))
        threading.Thread(target=self._listen, args=(bus,), name="bus-reader", daemon=True).start()

    def _warn_of_limits(self) -> None:
        """Warn of transports that cannot serve this engine, and of versions that it will refuse."""
        server = self._server
        for found, needed in server.limitations():
            self._log.warning("transports_limited", reason=f"{found}: {needed}", transports=server.transports())
        for reason in server.refusals(self.settings.model_path or Path(self._view.checkpoint)):
            self._log.warning("every_version_will_be_refused", reason=reason)

    def _join(self, bus: BusClient) -> Welcome:
        until = time.monotonic() + self.settings.start_timeout_s
        told_at = time.monotonic()
        while True:
            try:
                return bus.start(TICK_S)
            except (CoordinatorUnreachable, RequestRefused) as error:
                refusal = error if isinstance(error, RequestRefused) else None
                if (refusal is not None and not refusal.retry_after_s) or time.monotonic() >= until:
                    raise
                self._unwelcome = str(error)
                if time.monotonic() >= told_at + _TELL_S:
                    told_at = time.monotonic()
                    self._log.warning("hello_refused" if refusal else "coordinator_unreachable", reason=str(error))
                if refusal is not None:
                    self._refused(refusal)
                self._catch_up()

    def _catch_up(self) -> None:
        """Handle events while the coordinator is waited for: a server that must not generate is paused without it."""
        self._step(None)
        while not self._events.empty():
            self._step(self._next())

    def _loop(self) -> None:
        while True:
            self._step(self._next())
            self._tell_trouble()
            if self._view.up and self._is_laid_out_anew():
                self._connect()
            elif self._look_around() and self._bus is not None:
                self._bus.report_topology()

    def _is_laid_out_anew(self) -> bool:
        facts, before = self._server.facts, self._described
        self._described = facts
        return before is not None and facts is not before and facts.layout != before.layout

    def _look_around(self) -> bool:
        """Look where the workers are and which transports they can take; returns whether anything has changed."""
        facts, before = self._facts, self._around
        if facts is None:
            return False
        if self._view.up and facts.identity != self._locations[0]:
            self._locate(facts)
        self._around = self._locations, self._executor.takes, self._executor.devices, facts.unrecordable
        return self._around != before

    def _locate(self, facts: EngineFacts) -> None:
        """Find the workers of a process generation, once; again after a while where that could not be looked at."""
        if time.monotonic() < self._locate_at:
            return
        try:
            places = places_of(facts)
            self._server.set_reachable_memory(facts.identity, opened_by(facts, places))
            self._locations = facts.identity, places
        except ProcessesUnread as error:
            self._locate_at, self._locations = time.monotonic() + _LOCATE_S, ("", ())
            self._log.warning("workers_not_located", reason=error.reason, again_s=_LOCATE_S)

    def _next(self) -> Event | _Stop | Noticed | None:
        try:
            return self._events.get(timeout=TICK_S)
        except queue.Empty:
            return None

    def _step(self, event: Event | _Stop | Noticed | None) -> None:
        if self._monitor.failure is not None:
            raise self._monitor.failure
        if isinstance(event, _Stop):
            raise _Ended if event.error is None else event.error
        if isinstance(event, Noticed):
            event.event.set()
        elif event is not None:
            self._dispatch(event)
        if (lost := self._writer.failure()) is not None:
            self._dispatcher.lost(*lost)
        self._dispatcher.retry()
        if self._bus is not None:
            refusal = self._bus.refusal
            self._refused(refusal[0] if refusal else None)
        self._dispatch(TimePassed(self._heard_at()))
        if self._file_resync is not None and self._bus is not None:
            command = self._file_resync.next(self._view, self._bus, time.monotonic())
            if command is not None:
                self._dispatch(Commanded(command))

    def _refused(self, refusal: RequestRefused | None) -> None:
        """Note that the coordinator refuses this sidecar, which was welcomed before, or is not welcomed yet."""
        taken = str(refusal) if refusal is not None and refusal.code is RefusalCode.SERVER_TAKEN else ""
        before, self._taken = self._taken, taken
        if taken and taken != before:
            self._dispatch(ServerTaken(taken))

    def _heard_at(self) -> float:
        heard = self._bus.heard_at if self._bus else None
        return float("-inf") if heard is None else heard

    def _dispatch(self, event: Event) -> None:
        before = self._dispatcher.problem
        self._dispatcher.dispatch(event, time.monotonic())
        if self._dispatcher.problem and not before:
            self._log.error("record_not_written", reason=self._dispatcher.problem, path=str(self._records.path))
        released = self._memory_release.begun or self._server.weights_released
        self._show(msgspec.structs.replace(self._machine.view(), memory_released=released))
        again, self._joins_again = self._joins_again, False
        if again and self._bus is not None:
            self._bus.join_again()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Remember():
                raise AssertionError("records are the dispatcher's")
            case Answer():
                self._reply_sender.say(effect.message)
            case ForgetAnswers():
                self._reply_sender.forget()
            case JoinAgain():
                self._joins_again = True
            case RunOperation():
                self._operations.put(effect)
            case Cancel():
                self._executor.cancel(effect.number)
            case Note():
                self._log.info(effect.event, detail=effect.detail)
            case ForeignAct():
                self.metrics.add(FOREIGN_ACTS, what=effect.what)
                self._log.warning("server_touched_by_another_party", what=effect.what, detail=effect.detail)
            case _:
                assert_never(effect)

    def _show(self, view: ServerView) -> None:
        before, self._view = self._view, view
        if view == before:
            return
        self.metrics.set(SERVER_UP, view.up)
        self.metrics.set(SERVER_PAUSED, view.paused)
        self.metrics.set(SIDECAR_ORPHANED, view.orphaned)
        self.metrics.set(SIDECAR_VERSION, view.held.version if view.held else -1)
        for health in EngineHealth:
            self.metrics.set(SIDECAR_HEALTH, view.health is health, health=health.value)
        for state in WeightState:
            self.metrics.set(SIDECAR_WEIGHTS, view.weights is state, state=state.value)
        if view.orphaned and not before.orphaned:
            held = view.held and view.held.version
            self._log.error("engine_orphaned", held=held, health=view.health.value, reason=self._fate_of_orphan(view))
        if (view.health, view.on_its_way) != (before.health, before.on_its_way):
            held = view.held and view.held.version
            self._log.log(_level(view), "health", health=view.health.value, held=held, reason=view.reason)

    def _close(self, http: HttpPort, thread: threading.Thread) -> None:
        self._stopping.set()
        self._monitor.stop()
        self._operations.put(None)
        self._executor.cancel()
        self._prerecorder.close()
        if self._bus is not None:
            self._bus.close()
        self._reply_sender.stop()
        if thread.is_alive():
            thread.join(_CLOSE_S)
        if self._file_resync is not None:
            self._file_resync.close()
        self._executor.close()
        self._server.close()
        http.stop()
        self._writer.close()
        self._digests.close()
        self._records.release()
        self._claim.release()

    # -- other threads -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        done: tuple[Operation, Result] | None = None
        kept: Manifest | None = None
        while True:
            try:
                run = self._operations.get(timeout=_SAY_FIRST_S if done else None)
            except queue.Empty:
                if done:
                    self._executor.look_ahead(*done)
                    if (copied := self._executor.copied) is not None and copied is not kept:
                        self._prerecorder.remember(kept := copied)
                done = None
                continue
            done = None
            if run is None:
                return
            if not isinstance(run, RunOperation):
                self._errands += 1
                try:
                    run()
                finally:
                    self._errands += 1
                continue
            result = self._executor.perform(run.operation, run.identity, run.number)
            if isinstance(run.operation, Validate) and self._executor.silent:
                self._monitor.note_silence()  # before the round that it ends is over
            self._events.put(Operated(run.number, result))
            done = run.operation, result

    def _listen(self, bus: BusClient) -> None:
        try:
            while not self._stopping.is_set():
                message = bus.next(1.0)
                if isinstance(message, Refused):
                    self._log.error("refused_by_coordinator", code=message.code.value, reason=message.reason)
                if isinstance(message, Prepare | Pause | Transfer | Commit | Abort):
                    self._events.put(Commanded(message))
                elif isinstance(message, Welcome):
                    self._events.put(Welcomed(message))
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
            if not self._stopping.is_set() and bus is self._bus:
                self._events.put(_Stop(error))

    def _calm(self) -> Calm | None:
        view, errands = self._view, self._errands
        if view.doing or not view.up or errands % 2:
            return None
        serves = view.weights in GENERATES and not view.paused and not view.memory_released
        return Calm(view.operations, errands, self._server.facts.identity, serves, view.held)

    def _receiver(self, kind: str) -> Receiver:
        given = self.settings
        context = ReceiverContext(
            runtime_dir=given.runtime_dir, beside=given.beside, hands_on=given.hands_on, ahead=self._prerecorder.ahead
        )
        return transports.by_name(kind).receiver(context)

    def _give_back(self) -> Readiness:
        return self._memory_release.ask(self._view, self._operations.put)

    # -- messages and views --------------------------------------------------------------------------------------------

    @property
    def _facts(self) -> EngineFacts | None:
        """Facts of the server; None while it has never answered."""
        return self._server.facts if self._machine.identity else None

    def _hello(self) -> Hello:
        view, facts = self._view, self._facts
        self._greeted_with = facts
        if facts is None:
            return self._hello_of(self._unknown_server())
        info = EngineInfo(
            url=self.settings.url or self.settings.server,
            server_version=facts.version,
            tp=facts.tp,
            pp=facts.pp,
            dp=facts.dp,
            device=facts.device,
            host=host_identity(),
            transports=tuple(kind for kind in self.settings.transports if kind.value in self._server.transports()),
            live_digest=self._server.digest_algorithm,
            health=view.health,
            held=view.held,
            memory_released=view.memory_released,
            generation=facts.generation,
            follows=view.follows,
            socket=facts.socket,
        )
        return self._hello_of(info)

    def _unknown_server(self) -> EngineInfo:
        """Description of a server that has never answered: it takes no version, and its trouble is in the topology."""
        return EngineInfo(
            url=self.settings.url or self.settings.server,
            server_version="",
            tp=1,
            pp=1,
            dp=1,
            device="",
            host=host_identity(),
            transports=(),
            health=EngineHealth.PENDING,
        )

    def _hello_of(self, info: EngineInfo) -> Hello:
        return Hello(
            request=RequestId("filled-in-by-the-client"),
            agent=AgentId(self.settings.name),
            role=Role.ENGINE,
            channel=Channel(self.settings.channel),
            incarnation=self._incarnation,
            engine=info,
        )

    def _topology(self) -> Topology:
        folder = self.settings.runtime_dir or default_runtime_dir()
        trouble, now = self._trouble(), time.monotonic()
        if self._facts is None:
            found = topology_of({}, self.settings.transports, folder, (), {})
        else:
            places = self._locations[1] or places_on(self._executor.devices)
            lacking = self._server.missing_transports()
            found = topology_of(lacking, self.settings.transports, folder, places, self._executor.takes)
        if self._unclean:
            found = msgspec.structs.replace(found, unclean=clip(self._unclean))
        if trouble is None:
            return found
        return msgspec.structs.replace(
            found, trouble=clip(trouble.reason), trouble_s=max(0.0, now - trouble.since), starting=trouble.starting
        )

    def _heartbeat(self) -> Heartbeat:
        view = self._view
        return Heartbeat(
            seq=0, epoch=view.epoch, health=view.health, held=view.held, memory_released=view.memory_released
        )

    def _fate_of_orphan(self, view: ServerView) -> str:
        """What keeps a server from serving whose coordinator is gone, and what mends it."""
        found = f"{self._out_of_touch()}, longer than orphaned_s = {self.settings.orphaned_s:g}"
        if view.held is None:
            return f"{found}: only a whole version mends it, so start the coordinator again, and publish"
        if self.settings.orphaned is OrphanPolicy.SERVE_VERIFIED:
            return f"{found}: it is served without its commit (orphaned = serve_verified); start the coordinator again"
        return f"{found}: start the coordinator again, which settles it, or set orphaned = serve_verified"

    def _connected(self) -> bool:
        return not self._out_of_touch()

    def _connection(self) -> float:
        """1 while the coordinator answers, else 0; NaN once it refuses the key: no alert is for a removed trust."""
        if self._connected():
            return 1.0
        return math.nan if self._bus is not None and self._bus.untrusted else 0.0

    def _out_of_touch(self) -> str:
        """Why this engine counts as out of the coordinator's sight, and since when; empty while it does not.

        An engine that is not trusted, or whose server is another one's, is out at once, as on the ready list. Any other
        refusal, as of a coordinator that has just restarted, and silence count after `silence_s`.
        """
        bus, now = self._bus, time.monotonic()
        refusal = bus.refusal if bus else None
        silence = bus.welcome.silence_s if bus and bus.welcome else 0.0
        at_once = refusal is not None and (isinstance(refusal[0], NotTrusted) or bool(self._taken))
        if refusal is not None and (at_once or now - self._heard_at() > silence):
            error, since = refusal
            return f"{_since('refused', now - since)} ({error})"
        if now - self._heard_at() <= silence:
            return ""
        heard = self._heard_at()
        found = "the coordinator was not heard of yet"
        found = found if heard < 0 else _since("the coordinator is silent", now - heard)
        untrusted = bus.untrusted if bus else None
        return f"{found} ({untrusted})" if untrusted else found

    def _readiness(self) -> Readiness:  # noqa: PLR0911  a list of reasons
        """Whether clients may be sent here: the server generates from one complete, verified set of weights."""
        view = self._view
        bus = self._bus
        committed = bus.committed if bus else None
        if (trouble := self._trouble()) is not None:
            starting = "starting: " if trouble.starting else ""
            return Readiness(False, f"{starting}{trouble.lasting()}")
        if bus is None and self._unwelcome:
            return Readiness(False, f"not joined: {self._unwelcome}")
        if not view.up or view.health is not EngineHealth.CLEAN:
            orphaned = f"; {self._fate_of_orphan(view)}" if view.orphaned else ""
            return Readiness(False, f"{view.health.value}: {view.reason}{orphaned}")
        if view.paused:
            return Readiness(False, f"paused, {view.doing or view.weights.value}")
        if out_of_touch := self._out_of_touch():
            return Readiness(False, f"{out_of_touch}: what is committed by now is not known")
        found = f"version {view.held.version}" if view.held else "the weights of its launch"
        max_lag = bus.max_lag if bus else 0
        if committed is not None and (view.held is None or not 0 <= committed - view.held.version <= max_lag):
            why = f": {view.declined}" if view.declined else ""
            return Readiness(False, f"holds {found}, committed is {committed}{why}")
        return Readiness(True, found)

    def _status(self) -> bytes:
        readiness = self._readiness()
        document = {
            "agent": self.settings.name,
            "channel": self.settings.channel,
            "incarnation": self._incarnation,
            "server": self.settings.server,
            "connected": self._connected(),
            "ready": readiness.ready,
            "reason": readiness.reason,
            "engine": self._view,
            "facts": self._facts if self._view.up else None,
            "taken": self._executor.taken,
            "cast": self._executor.cast,
            "takes": self._executor.takes,
        }
        return msgspec.json.encode(document)


class ReplySender:
    """One thread that sends the replies of an engine in order, each again until it is acknowledged.

    A version that is verified during its transfer gives two replies at a time. If the second waited for the `Ack` of
    the first, requests would wait for one more exchange with the coordinator. `say` and `forget` are called from one
    other thread.
    """

    def __init__(self, line: Callable[[], BusClient | None], agent: str) -> None:
        """`line` returns the present connection, if there is one."""
        self._line = line
        self._log = get_log(__name__).bind(agent=agent)
        self._answers: queue.SimpleQueue[tuple[int, EngineMessage] | None] = queue.SimpleQueue()
        self._boot = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reply-sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def say(self, message: EngineMessage) -> None:
        """Queue `message` behind earlier ones."""
        self._answers.put((self._boot, message))

    def forget(self) -> None:
        """Drop all messages queued until now."""
        self._boot += 1

    def stop(self) -> None:
        """Stop sending. To be called when the line is closed."""
        self._stopping.set()
        self._answers.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (first := self._answers.get()) is not None:
            waiting = [first]
            while not self._answers.empty() and (more := self._answers.get()) is not None:
                if more not in waiting:  # a repeated command gets an equal reply
                    waiting.append(more)
            while waiting and not self._stopping.is_set():
                begun = [(item, self._begin(item[1])) for item in waiting if item[0] == self._boot]
                waiting = [item for item, sent in begun if not self._said(item[1], sent)]
                if waiting:
                    self._stopping.wait(_AGAIN_S)
            if self._stopping.is_set():
                return

    def _begin(self, message: EngineMessage) -> Callable[[], ToAgent] | WeightbusError:
        """Send `message`; the function that is returned waits for the acknowledgement, or raises."""
        bus = self._line()
        if bus is None:
            return ClientClosed("there is no line to the coordinator")
        try:
            return bus.ask(message, deadline_s=_ANSWER_S)
        except WeightbusError as error:
            return error

    def _said(self, message: EngineMessage, sent: Callable[[], ToAgent] | WeightbusError) -> bool:
        """Whether `message` is settled: acknowledged, or refused for good."""
        try:
            if isinstance(sent, WeightbusError):
                raise sent
            sent()
        except (CoordinatorUnreachable, ClientClosed):
            return False
        except RequestRefused as refused:
            self._log.info("answer_refused", answer=message.kind, reason=str(refused))
        except WeightbusError as error:
            self._log.error("answer_not_sent", answer=message.kind, reason=str(error))
        return True


class ServerMonitor:
    """Polls the server: whether it is there, and still the same process generation. Reports changes only.

    One thread from `start` to `stop`; `report` is called on it. The label is asked for, which is answered without the
    workers: a server that is busy loading is not lost. A label that this sidecar has not set, or a process that ended,
    means another process generation even if no poll ever failed. A server of which a worker has died still answers for
    seconds, until it ends: it is reported gone at once.
    """

    def __init__(
        self,
        server: Engine,
        report: Callable[[ServerFound | ServerGone], None],
        poll_s: float = 1.0,
        timeout_s: float = 5.0,
        *,
        watch: ServerWatch | None = None,
        untried: Callable[[], bool] = lambda: False,
    ) -> None:
        """`untried` says whether the server has held no version since its launch: its workers are looked at then."""
        self._untried = untried
        self._looked_at = float("-inf")
        self.trouble: Trouble | None = None
        """What is wrong with the server as of the last poll; read on other threads."""
        self._server, self._watch = server, watch
        self._report = report
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._known: EngineFacts | None = None
        self._workers: dict[int, int] = {}
        """Start time of each worker of this process generation, by process id."""
        self._up = False
        self._misses = 0
        self._past: set[str] = set()
        """Process generations that were followed by another one."""
        self._several = ("", 0.0)
        """The last one that was found at an address that leads to several, and until when that is taken for granted."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-watch", daemon=True)
        self.failure: BaseException | None = None
        """The error that ended the thread, if one did."""

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(self._timeout_s + _START_S + 1)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.poll()
                hurry = self._up and self._misses
                self._rest(min(self._poll_s, _RETRY_S) if hurry else self._poll_s)
        except BaseException as error:
            self.failure = error
            raise

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stopping.wait(min(left, _WORKERS_S)):
            if self._worker_died():
                return

    def poll(self) -> None:
        """Look once."""
        if self._worker_died():
            return
        try:
            before = self._known.identity if self._known and self._up else ""
            if not self._up or self._process_ended() or self._server.label(self._timeout_s) != self._server.last_label:
                self._find()
            same = self._up and self._known is not None and self._known.identity == before  # whatever its label is
            if same and self._watch is not None and self._watch.due:
                self._watch_it(self._watch)
            self._misses = 0
        except ServerError as error:
            self._missed(error)
        else:
            self._look_at_workers()

    def note_silence(self) -> None:
        """Its workers did not answer a check for a version. From any thread."""
        if self.trouble is None and self._untried():
            self.trouble = Trouble("has answered nothing", time.monotonic() - LOOK_S, starting=True)

    def _look_at_workers(self) -> None:
        """A server that compiles or captures graphs answers its HTTP side only: look until it holds a version."""
        now = time.monotonic()
        if not self._up:
            return
        if not self._untried():
            self.trouble = None
        elif now >= self._looked_at + _FIRST_LOOK_S:
            self._looked_at = now
            try:
                self._server.answers(self._timeout_s)
                self.trouble = None
            except ServerSilent:
                since = self.trouble.since if self.trouble else now
                self.trouble = Trouble("has answered nothing", since, starting=True)
            except ServerError:
                self.trouble = None  # the next poll says what it is

    def _watch_it(self, watch: ServerWatch) -> None:
        sight = watch.look(self._timeout_s)
        if sight is not None and self._known is not None and sight.identity not in {"", self._known.identity}:
            self._find()

    def _process_ended(self) -> bool:
        process = self._known.process if self._known else None
        return process is not None and has_ended(*process)

    def _worker_died(self) -> bool:
        """Whether a worker has died, after which the server will end."""
        if self._process_ended():
            self._workers = {}
        died = [pid for pid, started in self._workers.items() if has_ended(pid, started)]
        if died and self._up:
            self._up = False
            reason = f"its worker has died, process {died[0]}"
            self._server.abandon(reason)
            self.trouble = Trouble(f"{reason}: launch the server again", time.monotonic())
            self._report(ServerGone(reason))
        return bool(died)

    def _find(self) -> None:
        """Read the facts. A new process generation counts once its start is over: pausing its warm-up would end it."""
        facts = self._server.identify(self._timeout_s)
        if self._is_one_of_several(facts):
            self._up = False
            self.trouble = Trouble(_SEVERAL, self.trouble.since if self.trouble else time.monotonic())
            self._report(ServerGone(_SEVERAL, answers=True))
            return
        if self._known is None or facts.identity != self._known.identity:
            if self._known is not None:
                self._past.add(self._known.identity)
            self._started()
            self._workers = dict(self._server.workers())
        self._known, self._up = facts, True
        self._report(ServerFound(facts.identity, facts.label, facts.model_path, facts.undefined))

    def _is_one_of_several(self, facts: EngineFacts) -> bool:
        """Whether the address leads to several servers, as behind a balancer: then no call can be meant for one.

        An earlier process generation that is back after a later one shows it, and so do several connections.
        """
        now, (last, until) = time.monotonic(), self._several
        known = self._known is not None and facts.identity == self._known.identity
        if facts.identity != last and (facts.identity in self._past or now < until):
            self._several = facts.identity, now + _SEVERAL_S
        elif not known and self._server.answering(self._timeout_s) != {facts.identity}:
            return True
        return now < self._several[1]

    def _started(self) -> None:
        try:
            self._server.alive(_START_S)
        except ServerSilent:
            return  # paused, or busy; in any case not starting

    def _missed(self, error: ServerError) -> None:
        self._misses += 1
        if not self._up or self._misses >= PATIENCE:
            since = self.trouble.since if self.trouble else time.monotonic()
            self.trouble = Trouble(self._server.explain(error), since, starting=self._known is None)
        ended = self._process_ended()
        if self._up and (ended or self._misses >= PATIENCE):
            self._up = False
            self._report(ServerGone(str(error)))
