"""The coordinator's loop: receive, decide, carry out, arm the timer. One thread owns bus, journal and machine.

It decides nothing. When the machine finds one of its own invariants broken the loop ends and the process with it: what
is durable is true, and a restart begins from there.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Final, assert_never

from ..bus import (
    AckBatcher,
    CoordinatorBus,
    Delivery,
    Distrusted,
    Incoming,
    Rejected,
    Throttled,
    TurnedAway,
    answer_to,
    refusal_of,
)
from ..journal import Journal
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
    StopRequested,
    Tick,
    TrustLost,
    Unsent,
    earlier,
    status,
)
from ..protocol import Alive, JournalCorrupt, JournalUnwritable, ProtocolError, RefusalCode, ToAgent, VersionNotNewer
from . import transport_plan as plan_document
from .status_snapshot import LoopSnapshot

IDLE_S: Final = 1.0
"""The loop looks around at least so often; nothing depends on it."""
BATCH_S: Final = 0.05
"""How long messages may gather while no lease is held and no round runs, if they come in a stream."""
BATCH_RATE: Final = 64.0
"""From so many in a second on it is one. Of fewer agents each wakes the loop, and a lease is granted at once."""
SETTLE_S: Final = 1.0
"""So long after a round nothing gathers: its trainer may come with the next one."""
STOP_S: Final = 8.0
"""How long a round may take to end after a stop was asked for: docker kills after ten seconds."""
PROBE_S: Final = 0.5
"""So long after a connection has ended, those who have said nothing since are sent something."""
_PROBE: Final = Alive(seq=0, boot=0)
"""To no agent does it say anything: no coordinator has this number."""
FAREWELL_S: Final = 0.2
"""How long strangers are still answered before the sockets close."""


class EventLoop:
    """Drives one `Coordinator`. `run` blocks; `stop` and `status` may be called from anywhere."""

    def __init__(
        self,
        bus: CoordinatorBus,
        journal: Journal,
        limits: Limits,
        *,
        observe: Callable[[AnyObservation], None],
        clock: Callable[[], float] = time.monotonic,
        keyed: bool = False,
    ) -> None:
        """`keyed`: who comes without a key that is trusted is refused."""
        self.machine = Coordinator(
            limits, journal.boot, Router(), journal.restore(), stride=journal.stride, keyed=keyed
        )
        self._bus = bus
        self._journal = journal
        self._observe = observe
        self._clock = clock
        self._events: deque[AnyEvent] = deque()
        self._receipts = AckBatcher()
        self._stop = threading.Event()
        self._stop_by: float | None = None
        self._desk = LoopSnapshot(self.machine.status, clock)
        self._plan_desk = LoopSnapshot(self._plan, clock)
        self._desks = (self._desk, self._plan_desk)
        self._came_at = clock()
        """When something last came in."""
        self._pace = 0.0
        """How much came within about a second, when something last came."""
        self._closed = 0
        self._ended: tuple[float, float] | None = None
        """When connections have ended, the first and the last of them, of which it is not known yet whose they were."""
        self._busy_at = clock()
        """When a lease was last seen held, or a round running."""
        self.moved_at = clock()
        """When the loop was last seen to move."""

    @property
    def status(self) -> status.StatusView:
        """The status as it is now, written by the loop. For other threads than the loop's."""
        return self._desk.read(self._bus.wake)

    @property
    def status_json(self) -> bytes:
        """The same as JSON."""
        return status.encode(self.status)

    @property
    def plan_json(self) -> bytes:
        """By which transport each engine would take a version, as JSON. For other threads than the loop's."""
        return plan_document.encode_plan(self._plan_desk.read(self._bus.wake))

    def _plan(self, _now: float) -> plan_document.PlanView:
        return plan_document.plan_fleet(self.machine.channels.values(), self.machine.members)

    def stop(self) -> None:
        """Grant nothing more, end running rounds, then return from `run`. Safe in a signal handler."""
        self._stop.set()
        self._bus.wake()

    def look_again(self) -> None:
        """End the running wait. Safe in a signal handler."""
        self._bus.wake()

    def run(self) -> None:
        """Serve until `stop`; at most `STOP_S` longer."""
        for desk in self._desks:
            desk.open()
        try:
            while not self._finished():
                self.step(self._wait_s())
            self._say_the_rest(quiet=True, last=True)
            until = self._clock() + FAREWELL_S
            while (left := until - self._clock()) > 0:
                self.step(left)
        finally:
            for desk in self._desks:
                desk.close()

    def step(self, timeout_s: float) -> None:
        """Wait for something to happen, at most `timeout_s`, and carry out everything that follows from it."""
        received = self._bus.poll(0.0 if self.yields else timeout_s, self._gather_s())
        if received:
            now = self._clock()
            self._pace = self._pace_at(now) + len(received)
            self._came_at = now
        self._say_the_rest(quiet=not received)
        self._journal.confirm()
        if self._stop.is_set() and self._stop_by is None:
            self._stop_by = self._clock() + STOP_S
            self._events.append(StopRequested())
        messages = [item for item in received if isinstance(item, MessageReceived)]
        if len(messages) < len(received):
            for item in received:
                self._take(item)
        elif messages:
            self._events.append(Burst(messages))
        deadline = self.machine.next_deadline()
        if deadline is not None and self._clock() >= deadline:
            self._events.append(Tick())
        self._find_the_lost()
        self._drain()
        for desk in self._desks:
            desk.serve()
        self.moved_at = self._clock()

    def _gather_s(self) -> float:
        """How long messages may gather, so that a fleet's heartbeats do not wake the loop one by one."""
        now = self._clock()
        if not self.machine.calm:
            self._busy_at = now
            return 0.0
        rested = now - self._busy_at >= SETTLE_S and not self.yields
        return BATCH_S if rested and self._pace_at(now) >= BATCH_RATE else 0.0

    def _pace_at(self, now: float) -> float:
        return self._pace * math.exp(self._came_at - now)

    def _take(self, item: Incoming) -> None:
        match item:
            case MessageReceived():
                self._events.append(item)
            case Rejected():
                self._send(item.peer, answer_to(item))
                self._observe(refusal_of(item))
            case Distrusted():
                self._events.append(TrustLost(agent=item.agent, reason=item.reason))
            case Throttled() | TurnedAway():
                self._observe(refusal_of(item))
            case _:
                assert_never(item)

    def _drain(self) -> None:
        """Carry out every effect of an event before the next event; the journal's answers go before the rest."""
        while self._events:
            event, now = self._events.popleft(), self._clock()
            for effect in self.machine.handle(event, now):
                self._perform(effect, now)

    def _perform(self, effect: AnyEffect, now: float) -> None:
        match effect:
            case Acknowledge():
                self._receipts.owe(effect.owed, now)
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

    def _find_the_lost(self) -> None:
        """Whose connection has ended is said by a bus when something is sent over it; all may wait for that agent."""
        now = self._clock()
        if (closed := self._bus.closed) != self._closed:
            self._closed, self._ended = closed, (self._ended[0] if self._ended else now, now)
        if self._ended is not None and now >= self._ended[0] + PROBE_S:
            first, last = self._ended
            self._ended = (last, last) if last > first else None
            silent = self.machine.members.silent_since(first)
            self._events.extend(ConnectionLost(peer=peer) for peer in self._bus.send_to_all(silent, _PROBE))

    def _persist(self, effect: Persist) -> None:
        try:
            self._journal.write(effect.record)
        except JournalCorrupt:
            raise
        except JournalUnwritable as error:
            self._events.appendleft(PersistFailed(token=effect.token, reason=str(error)))
        except VersionNotNewer as error:
            self._events.appendleft(PersistFailed(token=effect.token, reason=error.problem, again=False))
        else:
            self._events.appendleft(Persisted(token=effect.token))

    def _send_to_all(self, peers: tuple[Peer, ...], message: ToAgent) -> None:
        self._acknowledge(peers, message)
        try:
            gone = self._bus.send_to_all(peers, message)
        except ProtocolError as error:
            self._unsent(peers, message, error)
        else:
            self._events.extend(ConnectionLost(peer=peer) for peer in gone)

    def _acknowledge(self, peers: tuple[Peer, ...], message: ToAgent) -> None:
        """An `Ack` leaves before whatever else its agent is told, in one packet with it."""
        if self._receipts:
            for peer, ack in self._receipts.before(peers, message):
                self._send(peer, ack)

    def _send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> None:
        try:
            delivery = self._bus.send(peer, message, blob)
        except ProtocolError as error:
            self._unsent((peer,), message, error)
            return
        if delivery is Delivery.GONE:
            self._events.append(ConnectionLost(peer=peer))

    def _unsent(self, peers: tuple[Peer, ...], message: ToAgent, error: ProtocolError) -> None:
        reason = f"could not be sent: {error}"
        self._events.append(Unsent(peers=peers, message=message, reason=reason))
        self._observe(Refusal(agent="?", message=message.kind, code=RefusalCode.NOT_ALLOWED, reason=reason))

    @property
    def yields(self) -> bool:
        """Nobody goes on because of an `Ack`: it waits for a moment, until nothing is there to be read."""
        return self._receipts.pressing

    def next_deadline(self) -> float | None:
        """When there is something to do though nothing happens."""
        return earlier(self.machine.next_deadline(), self._receipts.next_deadline())

    def _say_the_rest(self, *, quiet: bool, last: bool = False) -> None:
        if self._receipts:
            for peer, ack in self._receipts.due(math.inf if last else self._clock(), quiet=quiet):
                self._send(peer, ack)

    def _wait_s(self) -> float:
        now = self._clock()
        times = [now + IDLE_S]
        due = (*(desk.due() for desk in self._desks), self.next_deadline())
        times += [at for at in due if at is not None]
        times += [self._ended[0] + PROBE_S] if self._ended else []
        return max(0.0, min(times) - now)

    def _finished(self) -> bool:
        return self._stop_by is not None and (self.machine.stopped or self._clock() >= self._stop_by)


def on_signals(stop: Callable[[], None], look_again: Callable[[], None]) -> None:
    """Let SIGTERM and SIGINT end the service, and SIGHUP have it read its allow-list. Call from the main thread."""

    def call(number: int, frame: FrameType | None) -> None:
        del frame
        (look_again if number == signal.SIGHUP else stop)()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, call)
