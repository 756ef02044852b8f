"""The coordinator's loop: receive, decide, carry out, arm the timer. One thread owns bus, journal and machine.

It decides nothing. When the machine finds one of its own invariants broken the loop ends and the process with it: what
is durable is true, and a restart begins from there.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Final, assert_never

from . import status
from .coordinator import Coordinator
from .effects import AnyEffect, AnyObservation, Evict, Observe, Persist, PublishHint, Refusal, SendTo
from .errors import JournalCorrupt, JournalUnwritable, ProtocolError, WrongProtocol
from .events import (
    AnyEvent,
    MessageReceived,
    Peer,
    PeerLost,
    Persisted,
    PersistFailed,
    StopRequested,
    Tick,
    TrustLost,
)
from .ids import RequestId
from .journal import Journal
from .limits import Limits
from .links import CoordinatorBus, Delivery, Distrusted, Incoming, Received, Rejected, TurnedAway
from .messages import Code, Refused, ToAgent

STATUS_EVERY_S: Final = 0.02
"""How old the status document may be after something happened: with thousands of engines it is work to write it."""
IDLE_S: Final = 1.0
"""The loop looks around at least so often; nothing depends on it but the age of the status document."""
ENGINE_EVENTS: Final = frozenset({"ready", "not_ready"})
"""Hints of single engines: thousands may come at once, and the status need not be written for each."""
STOP_S: Final = 8.0
"""How long a round may take to end after a stop was asked for: docker kills after ten seconds."""
FAREWELL_S: Final = 0.2
"""How long strangers are still answered before the sockets close."""
REJECTED_KEY: Final = RequestId("rejected")
"""Stands in the `Refused` that answers what is no message."""


class Server:
    """Drives one `Coordinator`. `run` blocks; `stop` and `status` may be called from anywhere."""

    def __init__(
        self,
        bus: CoordinatorBus,
        journal: Journal,
        limits: Limits,
        *,
        observe: Callable[[AnyObservation], None],
        on_status: Callable[[status.StatusView], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine = Coordinator(limits, journal.boot, journal.restore())
        self._bus = bus
        self._journal = journal
        self._observe = observe
        self._on_status = on_status
        self._clock = clock
        self._events: deque[AnyEvent] = deque()
        self._stop = threading.Event()
        self._stop_by: float | None = None
        self._changed = False
        """Something was announced since the status was written: whoever reads it next should see that."""
        self._status_at = clock()
        self._stale = False
        self._view = self.machine.status(self._status_at)

    @property
    def status(self) -> status.StatusView:
        """The newest status, at most a second old. Immutable: safe to read from any thread."""
        return self._view

    @property
    def status_json(self) -> bytes:
        """The same as JSON."""
        return status.encode(self._view)

    def stop(self) -> None:
        """Grant nothing more, end running rounds, then return from `run`. Safe in a signal handler."""
        self._stop.set()
        self._bus.wake()

    def look_again(self) -> None:
        """End the running wait. Safe in a signal handler."""
        self._bus.wake()

    def run(self) -> None:
        """Serve until `stop`; at most `STOP_S` longer."""
        self._show(self._clock())
        while not self._finished():
            self.step(self._wait_s())
        until = self._clock() + FAREWELL_S
        while (left := until - self._clock()) > 0:
            self.step(left)
        self._show(self._clock())

    def step(self, timeout_s: float) -> None:
        """Wait for something to happen, at most `timeout_s`, and carry out everything that follows from it."""
        received = self._bus.poll(timeout_s)
        if self._stop.is_set() and self._stop_by is None:
            self._stop_by = self._clock() + STOP_S
            self._events.append(StopRequested())
        for item in received:
            self._take(item)
        deadline = self.machine.next_deadline()
        if deadline is not None and self._clock() >= deadline:
            self._events.append(Tick())
        self._drain()
        now = self._clock()
        if now - self._status_at >= (STATUS_EVERY_S if self._stale else IDLE_S):
            self._show(now)

    def _take(self, item: Incoming) -> None:
        match item:
            case Received(peer=peer, message=message, blob=blob, principal=principal):
                self._events.append(MessageReceived(peer=peer, message=message, blob=blob, principal=principal))
            case Rejected():
                self._reject(item)
            case Distrusted():
                self._events.append(TrustLost(agent=item.agent, reason=item.reason))
            case TurnedAway():
                self._observe(Refusal(agent="?", message="?", code=Code.NOT_ALLOWED, reason=item.reason))
            case _:
                assert_never(item)

    def _drain(self) -> None:
        """Carry out every effect of an event before the next event; the journal's answers go before the rest."""
        while self._events:
            event = self._events.popleft()
            for effect in self.machine.handle(event, self._clock()):
                self._perform(effect)

    def _perform(self, effect: AnyEffect) -> None:
        match effect:
            case Persist():
                self._persist(effect)
            case SendTo():
                if self._changed:  # whoever is told that a round ended may read the status next
                    self._show(self._clock())
                self._send(effect.peer, effect.message, effect.blob)
            case PublishHint():
                self._bus.hint(effect.hint)
                self._changed = self._changed or effect.hint.event not in ENGINE_EVENTS
            case Evict():
                self._bus.forget(effect.peer)
            case Observe():
                self._stale = True
                self._observe(effect.what)
            case _:
                assert_never(effect)

    def _persist(self, effect: Persist) -> None:
        try:
            self._journal.write(effect.record)
        except JournalCorrupt:
            raise
        except JournalUnwritable as error:
            self._events.appendleft(PersistFailed(token=effect.token, reason=str(error)))
        else:
            self._events.appendleft(Persisted(token=effect.token))

    def _send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> None:
        try:
            delivery = self._bus.send(peer, message, blob)
        except ProtocolError as error:
            reason = f"could not be sent: {error}"
            self._observe(Refusal(agent="?", message=type(message).__name__, code=Code.NOT_ALLOWED, reason=reason))
            return
        if delivery is Delivery.GONE:
            self._events.append(PeerLost(peer=peer))

    def _reject(self, item: Rejected) -> None:
        code = Code.PROTOCOL_MISMATCH if isinstance(item.error, WrongProtocol) else Code.NOT_ALLOWED
        reason = str(item.error)
        self._send(item.peer, Refused(request=REJECTED_KEY, code=code, reason=reason))
        self._observe(
            Refusal(agent=item.principal.name if item.principal else "?", message="?", code=code, reason=reason)
        )

    def _wait_s(self) -> float:
        now = self._clock()
        times = [now + IDLE_S]
        if self._stale:
            times.append(self._status_at + STATUS_EVERY_S)
        if (deadline := self.machine.next_deadline()) is not None:
            times.append(deadline)
        return max(0.0, min(times) - now)

    def _finished(self) -> bool:
        return self._stop_by is not None and (self.machine.stopped or self._clock() >= self._stop_by)

    def _show(self, now: float) -> None:
        self._status_at, self._stale = now, False
        self._view = self.machine.status(now)
        self._on_status(self._view)


def on_signals(stop: Callable[[], None], look_again: Callable[[], None]) -> None:
    """Let SIGTERM and SIGINT end the service, and SIGHUP have it read its allow-list. Call from the main thread."""

    def call(number: int, frame: FrameType | None) -> None:
        del frame
        (look_again if number == signal.SIGHUP else stop)()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, call)
