"""The coordinator's loop: receive, decide, carry out, arm the timer. One thread owns bus, journal and machine.

The loop decides nothing. A broken invariant of the machine ends the loop and the process: the journal holds the truth,
and a restart begins from there.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Final, Generic, TypeVar, assert_never

import msgspec

from ..bus import (
    AckBatcher,
    ConnectionRejected,
    CoordinatorBus,
    Incoming,
    Rejected,
    SendOutcome,
    Throttled,
    TrustRevoked,
    refusal_observation,
    reply_to_rejected,
)
from ..journal import InlineWriter, Journal, WriterThread
from ..machine import (
    Acknowledge,
    AnyEffect,
    AnyEvent,
    AnyObservation,
    Burst,
    ConnectionLost,
    Coordinator,
    Evict,
    Limits,
    MessageReceived,
    Observe,
    Peer,
    Persist,
    Persisted,
    PersistFailed,
    Refusal,
    Router,
    SendTo,
    SendToAll,
    StatusView,
    StopRequested,
    Tick,
    Token,
    TrustLost,
    Unsent,
    earlier,
    status,
)
from ..protocol import (
    AgentId,
    Alive,
    JournalUnwritable,
    ProtocolError,
    RefusalCode,
    ToAgent,
    VersionNotNewer,
)
from .transport_plan import PlanView, encode_plan, plan_fleet

IDLE_S: Final = 1.0
"""Longest wait of one step, in seconds; no deadline depends on it."""
BATCH_S: Final = 0.05
"""Seconds for which messages may collect before a step, while no lease is held, no round runs and they come fast."""
BATCH_RATE: Final = 64.0
"""Messages a second from which they are collected. A smaller fleet wakes the loop with each, for prompt grants."""
SETTLE_S: Final = 1.0
"""Seconds after a round in which messages are not collected: its trainer may come with the next one."""
WRITE_S: Final = 0.05
"""Seconds for which the loop waits for the result of a write; it goes on with messages after that."""
RESULT_S: Final = 0.1
"""Seconds between two looks for the result after that, unless the result wakes the loop."""
STOP_S: Final = 8.0
"""Seconds that a round may take to end after a stop was asked for: docker kills after ten seconds."""
PROBE_S: Final = 0.5
"""Seconds between the end of a connection and the probe of all peers that have been silent since."""
_PROBE: Final = Alive(seq=0, boot=0)
"""A message without meaning for its reader: no coordinator has boot number 0."""
CLOSE_S: Final = 0.2
"""Seconds for which messages are still answered before the sockets close."""


class EventLoop:
    """Drives one `Coordinator`. `run` blocks; `stop`, `status_json` and `plan_json` may be called from any thread."""

    def __init__(
        self,
        bus: CoordinatorBus,
        journal: Journal,
        limits: Limits,
        *,
        observe: Callable[[AnyObservation], None],
        written: Callable[[float], None] = lambda _seconds: None,
        clock: Callable[[], float] = time.monotonic,
        keyed: bool = False,
        warnings: Callable[[], tuple[str, ...]] = tuple,
        writer: InlineWriter | WriterThread | None = None,
    ) -> None:
        """`written` is told how long each write took; `keyed`: agents without a trusted key are refused.

        `warnings` are shown in the status. `writer` writes to `journal`; None writes on the loop's own thread.
        """
        self.machine = Coordinator(
            limits, journal.boot, Router(), journal.restore(), stride=journal.stride, keyed=keyed
        )
        self._bus = bus
        self._writer = writer or InlineWriter(journal)
        self._writing: Token | None = None
        """The record whose result is awaited."""
        self._observe = observe
        self._written = written
        self._clock = clock
        self._events: deque[AnyEvent] = deque()
        self._acks = AckBatcher()
        self._stop = threading.Event()
        self._stop_by: float | None = None
        self._warnings = warnings
        self._status_snapshot = LoopSnapshot(self._view, clock)
        self._plan_snapshot = LoopSnapshot(self._plan, clock)
        self._snapshots = (self._status_snapshot, self._plan_snapshot)
        self._to_forget: deque[tuple[AgentId, Future[str]]] = deque()
        """Engines that an operator wants to be forgotten, filled on HTTP threads."""
        self._received_at = clock()
        """Time of the last message, by `clock`."""
        self._rate = 0.0
        """Messages a second at `_received_at`: a count that decays with a time constant of one second."""
        self._closed_count = 0
        self._closed_at: tuple[float, float] | None = None
        """Times at which the first and the last of the ended connections closed whose peers are not known yet."""
        self._busy_at = clock()
        """Time at which a lease was last held or a round running."""
        self.stepped_at = clock()
        """Time at which the last step ended, for the readiness page."""

    def forget_engine(self, name: AgentId) -> str:
        """Drop a lost engine from status and metrics; why not, or empty. Not for the loop's own thread."""
        asked: Future[str] = Future()
        self._to_forget.append((name, asked))
        self._bus.wake()
        return asked.result(READ_S)

    @property
    def status(self) -> StatusView:
        """Status as of now, written by the loop. Not to be read on the loop's own thread while it runs."""
        return self._status_snapshot.read(self._bus.wake)

    @property
    def status_json(self) -> bytes:
        """`status` as JSON."""
        return status.encode(self.status)

    @property
    def plan_json(self) -> bytes:
        """Transport plan of every channel as JSON. Not to be read on the loop's own thread while it runs."""
        return encode_plan(self._plan_snapshot.read(self._bus.wake))

    def _view(self, now: float) -> StatusView:
        return msgspec.structs.replace(self.machine.status(now), warnings=self._warnings())

    def _plan(self, _now: float) -> PlanView:
        return plan_fleet(self.machine.channels.values(), self.machine.membership)

    def stop(self) -> None:
        """Grant nothing more, end running rounds, then return from `run`. Safe in a signal handler."""
        self._stop.set()
        self._bus.wake()

    def reload_allow_list(self) -> None:
        """Wake the loop, so that the bus compares its sessions with the allow-list. Safe in a signal handler."""
        self._bus.wake()

    def run(self) -> None:
        """Serve until `stop`; at most `STOP_S` longer."""
        for snapshot in self._snapshots:
            snapshot.open()
        try:
            while not self._finished():
                self.step(self._wait_s())
            self._send_due_acks(quiet=True, last=True)
            until = self._clock() + CLOSE_S
            while (left := until - self._clock()) > 0:
                self.step(left)
        finally:
            for snapshot in self._snapshots:
                snapshot.close()

    def step(self, timeout_s: float) -> None:
        """Wait for something to happen, at most `timeout_s`, and carry out everything that follows from it."""
        received = self._bus.poll(0.0 if self.acks_pending else timeout_s, self._batch_s())
        if received:
            now = self._clock()
            self._rate = self._rate_at(now) + len(received)
            self._received_at = now
        self._send_due_acks(quiet=not received)
        self._writer.confirm()
        self._take_result(0.0)
        if self._stop.is_set() and self._stop_by is None:
            self._stop_by = self._clock() + STOP_S
            self._events.append(StopRequested())
        messages = [item for item in received if isinstance(item, MessageReceived)]
        if len(messages) < len(received):
            for item in received:
                self._take(item)
        elif messages:
            self._events.append(Burst(messages))
        deadline = None if self._writing is not None else self.machine.next_deadline()
        if deadline is not None and self._clock() >= deadline:
            self._events.append(Tick())
        self._probe_silent_peers()
        self._drain()
        while self._to_forget:
            name, asked = self._to_forget.popleft()
            asked.set_result(self.machine.forget_engine(name))
        for snapshot in self._snapshots:
            snapshot.serve()
        self.stepped_at = self._clock()

    def _batch_s(self) -> float:
        """Seconds for which messages may collect, so that a fleet's heartbeats do not wake the loop one by one."""
        now = self._clock()
        if not self.machine.idle:
            self._busy_at = now
            return 0.0
        rested = now - self._busy_at >= SETTLE_S and not self.acks_pending
        return BATCH_S if rested and self._rate_at(now) >= BATCH_RATE else 0.0

    def _rate_at(self, now: float) -> float:
        return self._rate * math.exp(self._received_at - now)

    def _take(self, item: Incoming) -> None:
        match item:
            case MessageReceived():
                self._events.append(item)
            case Rejected():
                self._send(item.peer, reply_to_rejected(item))
                self._observe(refusal_observation(item))
            case TrustRevoked():
                self._events.append(TrustLost(agent=item.agent, reason=item.reason))
            case Throttled() | ConnectionRejected():
                self._observe(refusal_observation(item))
            case _:
                assert_never(item)

    def _drain(self) -> None:
        """Carry out every effect of an event before the next event; the journal's answers go first."""
        while self._events:
            event, now = self._events.popleft(), self._clock()
            for effect in self.machine.handle(event, now):
                self._perform(effect, now)

    def _perform(self, effect: AnyEffect, now: float) -> None:
        match effect:
            case Acknowledge():
                self._acks.add(effect.requests, now)
            case Observe():
                self._observe(effect.what)
            case SendTo():
                self._acknowledge((effect.peer,), effect.message)
                self._send(effect.peer, effect.message, effect.blob)
            case SendToAll():
                self._send_to_all(effect.peers, effect.message)
            case Persist():
                self._persist(effect)
            case Evict():
                self._bus.forget(effect.peer)
            case _:
                assert_never(effect)

    def _probe_silent_peers(self) -> None:
        """Send a probe to every silent peer after a connection has ended.

        ZeroMQ says that a connection ended, and only a send says which one; a round may be waiting for that agent.
        """
        now = self._clock()
        if (closed := self._bus.closed) != self._closed_count:
            self._closed_count, self._closed_at = closed, (self._closed_at[0] if self._closed_at else now, now)
        if self._closed_at is not None and now >= self._closed_at[0] + PROBE_S:
            first, last = self._closed_at
            self._closed_at = (last, last) if last > first else None
            silent = self.machine.membership.silent_since(first)
            self._events.extend(ConnectionLost(peer=peer) for peer in self._bus.send_to_all(silent, _PROBE))

    def _persist(self, effect: Persist) -> None:
        self._writer.begin(effect.record)
        self._writing = effect.token
        self._take_result(WRITE_S)

    def _take_result(self, wait_s: float) -> None:
        """Report the result of the running write to the machine, if there is one within `wait_s`."""
        if self._writing is None or (result := self._writer.result(wait_s)) is None:
            return
        token, self._writing = self._writing, None
        match result.error:
            case None:
                self._written(result.seconds)
                self._events.appendleft(Persisted(token=token))
            case JournalUnwritable():
                self._events.appendleft(PersistFailed(token=token, reason=str(result.error)))
            case VersionNotNewer():
                self._events.appendleft(PersistFailed(token=token, reason=result.error.problem, again=False))
            case _:
                raise result.error

    def _send_to_all(self, peers: tuple[Peer, ...], message: ToAgent) -> None:
        self._acknowledge(peers, message)
        try:
            gone = self._bus.send_to_all(peers, message)
        except ProtocolError as error:
            self._report_unsent(peers, message, error)
        else:
            self._events.extend(ConnectionLost(peer=peer) for peer in gone)

    def _acknowledge(self, peers: tuple[Peer, ...], message: ToAgent) -> None:
        """Send the pending `Ack` of each peer right before `message`, so that both leave in one packet."""
        if self._acks:
            for peer, ack in self._acks.take_before(peers, message):
                self._send(peer, ack)

    def _send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> None:
        try:
            delivery = self._bus.send(peer, message, blob)
        except ProtocolError as error:
            self._report_unsent((peer,), message, error)
            return
        if delivery is SendOutcome.GONE:
            self._events.append(ConnectionLost(peer=peer))

    def _report_unsent(self, peers: tuple[Peer, ...], message: ToAgent, error: ProtocolError) -> None:
        reason = f"could not be sent: {error}"
        self._events.append(Unsent(peers=peers, message=message, reason=reason))
        self._observe(Refusal(agent="?", message=message.kind, code=RefusalCode.NOT_ALLOWED, reason=reason))

    @property
    def acks_pending(self) -> bool:
        """True while acknowledgements wait for a moment without input: no agent is blocked by a late `Ack`."""
        return self._acks.urgent

    def next_deadline(self) -> float | None:
        """Time of the next timer of machine or acknowledgements; None without one.

        While a record is written the machine decides nothing, and the loop looks for the result.
        """
        if self._writing is not None:
            return earlier(self._clock() + RESULT_S, self._acks.next_deadline())
        return earlier(self.machine.next_deadline(), self._acks.next_deadline())

    def _send_due_acks(self, *, quiet: bool, last: bool = False) -> None:
        if self._acks:
            for peer, ack in self._acks.take_due(math.inf if last else self._clock(), quiet=quiet):
                self._send(peer, ack)

    def _wait_s(self) -> float:
        now = self._clock()
        times = [now + IDLE_S]
        due = (*(snapshot.due() for snapshot in self._snapshots), self.next_deadline())
        times += [at for at in due if at is not None]
        times += [self._closed_at[0] + PROBE_S] if self._closed_at else []
        return max(0.0, min(times) - now)

    def _finished(self) -> bool:
        return self._stop_by is not None and (self.machine.stopped or self._clock() >= self._stop_by)


def on_signals(stop: Callable[[], None], reload_allow_list: Callable[[], None]) -> None:
    """Have SIGTERM and SIGINT call `stop`, and SIGHUP `reload_allow_list`. To be called on the main thread."""

    def call(number: int, frame: FrameType | None) -> None:
        del frame
        (reload_allow_list if number == signal.SIGHUP else stop)()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, call)


View = TypeVar("View")
READ_S: Final = 5.0
"""Seconds for which a reader waits for the loop; then it gets the last document."""
REST: Final = 10.0
"""Pause between two documents, as a multiple of the time that writing took: at most a tenth of the loop's time."""


class LoopSnapshot(Generic[View]):
    """A document of the machine, such as the status, written on the loop's thread and read on others.

    Only the loop may look at the machine. With thousands of engines a document takes work, so it is written on demand,
    and never for no reader. A reader that asks after an event sees that event in the document.
    """

    def __init__(self, write: Callable[[float], View], clock: Callable[[], float] = time.monotonic) -> None:
        """`write` makes the document of a moment; it is called on the loop's thread only."""
        self._write = write
        self._clock = clock
        self._changed = threading.Condition()
        self._requested = 0
        self._written = 0
        """Number of the last request that the document answers."""
        self._open = False
        self._rest_until = clock()
        self._view = write(clock())

    # -- readers -------------------------------------------------------------------------------------------------------

    def read(self, wake: Callable[[], None]) -> View:
        """The document as of now; `wake` wakes the loop. Blocks; not for the loop's thread while the loop runs."""
        with self._changed:
            if self._open:
                self._requested += 1
                mine = self._requested
                wake()
                self._changed.wait_for(lambda: self._written >= mine or not self._open, READ_S)
            return self._view

    # -- the loop ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to serve: readers wait for the loop from now on."""
        with self._changed:
            self._open = True

    def close(self) -> None:
        """Write the document for the last time; readers wait no longer."""
        with self._changed:
            self._write_view()
            self._open = False

    def serve(self) -> None:
        """Write the document if a reader waits, unless it was written a moment ago."""
        if self._requested != self._written and self._clock() >= self._rest_until:
            with self._changed:
                self._write_view()

    def due(self) -> float | None:
        """Time at which `serve` has work; None without a reader."""
        return self._rest_until if self._requested != self._written else None

    def _write_view(self) -> None:
        began = self._clock()
        self._view = self._write(began)
        ended = self._clock()
        self._rest_until = ended + REST * (ended - began)
        self._written = self._requested
        self._changed.notify_all()
