"""An agent's conversation with the coordinator, as a pure machine: `handle(event, now)` returns what is to be done.

It says Hello until it is welcomed, sends heartbeats, repeats requests until they are answered or too late, connects
anew when nothing is heard, and says Hello again when the coordinator does not know it (any more). A command of a later
step answers what was said of the steps before it (ack_batching.py). client.py owns the socket, the thread and the
clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

from ..protocol import (
    Abort,
    Ack,
    Alive,
    BlobPage,
    Commit,
    CoordinatorUnreachable,
    Granted,
    Pause,
    ProtocolError,
    RefusalCode,
    Refused,
    RequestId,
    RequestRefused,
    Status,
    ToAgent,
    ToCoordinator,
    Transfer,
    Version,
    WeightbusError,
    Welcome,
    WrongProtocol,
)
from .ack_batching import acknowledges

RETRYABLE: Final = frozenset(
    {
        RefusalCode.NAME_TAKEN,
        RefusalCode.SERVER_TAKEN,
        RefusalCode.SHUTTING_DOWN,
        RefusalCode.READ_ONLY,
        RefusalCode.NOT_LEADER,
    }
)
"""Refusals of a `Hello` that pass with time. After any other the session is over."""


ANSWERED: Final = 3
"""Of so many heartbeats one is answered: that halves what a quiet fleet costs its coordinator."""


class Phase(enum.Enum):
    """What is true of the session."""

    JOINING = "joining"
    """Hello is repeated; requests wait."""
    JOINED = "joined"
    """Welcomed on this connection; heartbeats run, requests are repeated until answered."""
    REFUSED = "refused"
    """The coordinator will not have this agent, whatever it repeats. Nothing is sent any more."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Every wait of the session, in seconds."""

    hello_first_s: float = 0.02
    """A connection takes a few milliseconds to stand; a Hello before that is lost..."""
    hello_max_s: float = 1.0
    """... and repeated after twice as long each time, up to this."""
    resend_first_s: float = 0.5
    resend_max_s: float = 4.0
    silence_s: float = 5.0
    """A connection on which nothing is heard for so long is dropped. Once welcomed, `Welcome.silence_s` holds."""
    elsewhere_s: float = 2.0
    """Where several coordinators are known: one that says nothing for so long, or for three heartbeats, is left for
    the next."""


# -- events ----------------------------------------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True):
    """A request, to be answered by `expires_at`."""

    key: RequestId
    message: ToCoordinator
    blob: bytes | None
    expires_at: float
    deadline_s: float


class Heard(msgspec.Struct, frozen=True):
    """A message came in."""

    message: ToAgent
    blob: bytes | None = None


class Garbled(msgspec.Struct, frozen=True):
    """Something came in that is not a message."""

    error: ProtocolError


class Ticked(msgspec.Struct, frozen=True):
    """Time passed."""


Event = Asked | Heard | Garbled | Ticked

# -- effects ---------------------------------------------------------------------------------------------------------


class Connect(msgspec.Struct, frozen=True):
    """Drop the connection and make a new one."""

    place: int = 0
    """Which of the endpoints, counted from 0."""


class SayHello(msgspec.Struct, frozen=True):
    """Send `Hello` under this key."""

    key: RequestId


class SayAlive(msgspec.Struct, frozen=True):
    """Send `Heartbeat` with this number; 0: no answer is wanted."""

    seq: int


class Transmit(msgspec.Struct, frozen=True):
    """Send. That it may get lost is reckoned with."""

    message: ToCoordinator
    blob: bytes | None


class Resolve(msgspec.Struct, frozen=True):
    """A request was answered."""

    key: RequestId
    answer: ToAgent
    blob: bytes | None


class Reject(msgspec.Struct, frozen=True):
    """A request will not be answered, or was refused."""

    key: RequestId
    error: WeightbusError


class Join(msgspec.Struct, frozen=True):
    """The coordinator welcomed this agent, for the first time or again."""

    welcome: Welcome


class Deliver(msgspec.Struct, frozen=True):
    """A command for the agent."""

    message: ToAgent


class GiveUp(msgspec.Struct, frozen=True):
    """The session is over; nothing asked from now on will be answered."""

    error: WeightbusError


Effect = Connect | SayHello | SayAlive | Transmit | Resolve | Reject | Join | Deliver | GiveUp


class _Pending(msgspec.Struct):
    asked: Asked
    resend_at: float
    backoff_s: float


class AgentSession:
    """One agent's conversation. Drive it from one thread."""

    def __init__(self, endpoint: str, keys: str, timing: Timing, now: float) -> None:
        """`endpoint` may be several, comma-separated: one of them leads, the others refuse and say who does.

        `keys` begins every Hello's request key; it must be unlike that of any other session.
        """
        self.phase = Phase.JOINING
        self.welcome: Welcome | None = None
        self.committed: Version | None = None
        """Newest version that the coordinator called committed in this agent's channel."""
        self.max_lag = 0
        """Versions that an engine may be behind it and still be ready."""
        self.refusal: RequestRefused | None = None
        """Why the last `Hello` was refused, while it is repeated."""
        self._endpoint = endpoint
        self._endpoints = split_endpoints(endpoint)
        self._place = 0
        self._keys = keys
        self._timing = timing
        self._pending: dict[RequestId, _Pending] = {}
        self._started_at = now
        self._heard_at: float | None = None
        self._silent_since = now
        self._connected = False
        self._over: WeightbusError | None = None
        self._noise = ""
        self._hellos = 0
        self._hello_key = RequestId("")
        self._hello_at = now
        self._hello_backoff_s = timing.hello_first_s
        self._beats = 0
        self._beat_at = now
        self._unanswered = 0
        """Heartbeats since the last answer to one."""
        self._watchful = False
        """Paused, and to resume by itself if the coordinator falls silent: every heartbeat is to be answered."""

    @property
    def heard_at(self) -> float | None:
        """When the coordinator was last heard of, in whatever words."""
        return self._heard_at

    # -- the door ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Take `event`, which happened at `now` (monotonic seconds)."""
        match event:
            case Asked():
                return self._ask(event, now)
            case Heard():
                self._heard_at = self._silent_since = now
                return self._hear(event.message, event.blob, now)
            case Garbled():
                return self._garbled(event.error)
            case Ticked():
                return self._tick(now)

    def next_deadline(self) -> float:
        """When a `Ticked` is due."""
        if self.phase is Phase.REFUSED:
            return float("inf")
        joined = self.phase is Phase.JOINED
        due = min(self._silent_since + self._silence_s, self._beat_at if joined else self._hello_at)
        for each in self._pending.values():
            due = min(due, each.asked.expires_at, each.resend_at if joined else due)
        return due

    def unreachable(self, waiting_for: str, tried_s: float, now: float) -> WeightbusError:
        """The error for a wait that ended: says what was found instead of an answer."""
        if self._over is not None:
            return self._over
        if self.refusal is not None:
            return self.refusal
        if self.phase is Phase.JOINED and self._heard_at is not None:
            found = f"connected, and last heard of {now - self._heard_at:.1f} s ago, but this was not answered"
        elif self._heard_at is not None:
            found = f"connection lost, last heard of {now - self._heard_at:.1f} s ago"
        else:
            found = "nothing was heard at all"
        noise = f"; what came was no message: {self._noise}" if self._noise else ""
        return CoordinatorUnreachable(self._endpoint, tried_s, waiting_for, found + noise)

    # -- events --------------------------------------------------------------------------------------------------------

    def _ask(self, asked: Asked, now: float) -> tuple[Effect, ...]:
        if self._over is not None:
            return (Reject(asked.key, self._over),)
        self._pending[asked.key] = _Pending(asked, now, self._timing.resend_first_s)
        return self._resend(now)

    def _hear(self, message: ToAgent, blob: bytes | None, now: float) -> tuple[Effect, ...]:
        match message:
            case Welcome():
                return self._welcomed(message, now)
            case Refused():
                return self._refused(message, now)
            case Ack() | Granted() | BlobPage() | Status():
                known = self._pending.pop(message.request, None)
                return (Resolve(message.request, message, blob),) if known else ()  # a duplicate, or too late
            case Alive():
                if self.welcome is not None and message.boot == self.welcome.boot:
                    self.committed, self.max_lag = message.committed, message.max_lag
                    self._unanswered = 0
                    self._beat_at = now + self.welcome.heartbeat_s  # who was answered together speaks together again
                return ()
            case Pause() | Transfer() | Commit() | Abort():
                return self._commanded(message)
            case _:
                return (Deliver(message),)

    def _commanded(self, command: Pause | Transfer | Commit | Abort) -> tuple[Effect, ...]:
        """A command says too that what was answered to those before it has arrived."""
        if isinstance(command, Commit):
            self.committed = command.version  # before the next Alive says so
        self._watchful = isinstance(command, Pause | Transfer)
        known = [key for key, each in self._pending.items() if acknowledges(command, each.asked.message)]
        for key in known:
            del self._pending[key]
        return (*(Resolve(key, Ack(request=key), None) for key in known), Deliver(command))

    def _welcomed(self, welcome: Welcome, now: float) -> tuple[Effect, ...]:
        if self.phase is not Phase.JOINING or welcome.request != self._hello_key:
            return ()  # a duplicate
        self.phase = Phase.JOINED
        self.welcome, self.refusal, self._noise = welcome, None, ""
        self.committed, self.max_lag = welcome.committed.version if welcome.committed else None, 0
        self._beat_at = now + welcome.heartbeat_s
        self._unanswered = ANSWERED  # the first one asks
        for each in self._pending.values():
            each.resend_at, each.backoff_s = now, self._timing.resend_first_s
        return (Join(welcome), *self._resend(now))

    def _refused(self, refused: Refused, now: float) -> tuple[Effect, ...]:
        error = RequestRefused(refused.code, refused.reason, refused.retry_after_s)
        if refused.code is RefusalCode.UNKNOWN_AGENT:
            # One refusal for each message that was under way; all but the first find the Hello sent already.
            return self._rejoin(now) if self.phase is Phase.JOINED else ()
        if refused.code is RefusalCode.NOT_LEADER:
            return self._not_leader(refused, error, now)
        if self._pending.pop(refused.request, None):
            return (Reject(refused.request, error),)
        return self._turned_away(refused, error, now) if self.phase is Phase.JOINING else ()

    def _not_leader(self, refused: Refused, error: RequestRefused, now: float) -> tuple[Effect, ...]:
        """Go to the one that leads, if it is known; else ask the next one, after a while. What was asked is kept."""
        if self.phase is Phase.JOINING and refused.request != self._hello_key:
            return ()  # of an earlier Hello
        self.refusal = error
        leader = self._endpoints.index(refused.leader) if refused.leader in self._endpoints else self._place
        known = leader != self._place
        self._place = leader if known else (self._place + 1) % len(self._endpoints)
        wait_s = 0.0 if known else max(refused.retry_after_s, self._timing.hello_first_s)
        self.phase, self._silent_since = Phase.JOINING, now
        self._hello_at, self._hello_backoff_s = now + wait_s, self._timing.hello_first_s
        self._new_hello_key()
        return (Connect(self._place), *self._greet(now))

    def _turned_away(self, refused: Refused, error: RequestRefused, now: float) -> tuple[Effect, ...]:
        if refused.code is RefusalCode.PROTOCOL_MISMATCH:  # said of what could not be read, so without its key
            return self._end(error)
        if refused.request != self._hello_key:
            return ()
        if refused.code not in RETRYABLE and not refused.retry_after_s:
            return self._end(error)
        self.refusal = error
        self._hello_at = now + max(refused.retry_after_s, self._hello_backoff_s)
        self._new_hello_key()
        return ()

    def _garbled(self, error: ProtocolError) -> tuple[Effect, ...]:
        self._noise = str(error)
        if isinstance(error, WrongProtocol) and self.phase is Phase.JOINING:
            return self._end(error)
        return ()

    def _tick(self, now: float) -> tuple[Effect, ...]:
        if self.phase is Phase.REFUSED:
            return ()
        effects = self._expire(now)
        if not self._connected or now >= self._silent_since + self._silence_s:
            if self._connected:
                self._place = (self._place + 1) % len(self._endpoints)
            self._connected = True
            self._silent_since = now
            return (*effects, Connect(self._place), *self._rejoin(now))
        if self.phase is Phase.JOINING:
            return (*effects, *self._greet(now))
        return (*effects, *self._beat(now), *self._resend(now))

    # -- what follows --------------------------------------------------------------------------------------------------

    @property
    def _silence_s(self) -> float:
        joined = self.welcome if self.phase is Phase.JOINED else None
        silence_s = joined.silence_s if joined else self._timing.silence_s
        if len(self._endpoints) == 1:
            return silence_s
        return min(silence_s, max(self._timing.elsewhere_s, 3 * joined.heartbeat_s if joined else 0.0))

    def _rejoin(self, now: float) -> tuple[Effect, ...]:
        self.phase = Phase.JOINING
        self._hello_at, self._hello_backoff_s = now, self._timing.hello_first_s
        self._new_hello_key()
        return self._greet(now)

    def _new_hello_key(self) -> None:
        # The same key would be answered with the Welcome, or the refusal, of before.
        self._hellos += 1
        self._hello_key = RequestId(f"{self._keys}-hello-{self._hellos}")

    def _greet(self, now: float) -> tuple[Effect, ...]:
        if now < self._hello_at:
            return ()
        self._hello_at = now + self._hello_backoff_s
        self._hello_backoff_s = min(2 * self._hello_backoff_s, self._timing.hello_max_s)
        return (SayHello(self._hello_key),)

    def _beat(self, now: float) -> tuple[Effect, ...]:
        if now < self._beat_at or self.welcome is None:
            return ()
        self._beats += 1
        self._unanswered += 1
        self._beat_at = now + self.welcome.heartbeat_s
        return (SayAlive(self._beats if self._wants_answer(self.welcome) else 0),)

    def _wants_answer(self, welcome: Welcome) -> bool:
        """Every third heartbeat is answered, or one in `silence_s / 3`; every one while much depends on it."""
        often = min(ANSWERED, self._silence_s // (3 * welcome.heartbeat_s))
        return self._watchful or self._unanswered >= often

    def _resend(self, now: float) -> tuple[Effect, ...]:
        if self.phase is not Phase.JOINED or not self._pending:
            return ()
        due = [each for each in self._pending.values() if now >= each.resend_at]
        for each in due:
            each.resend_at = now + each.backoff_s
            each.backoff_s = min(2 * each.backoff_s, self._timing.resend_max_s)
        return tuple(Transmit(each.asked.message, each.asked.blob) for each in due)

    def _expire(self, now: float) -> tuple[Effect, ...]:
        if not self._pending:
            return ()
        late = [each.asked for each in self._pending.values() if now >= each.asked.expires_at]
        for asked in late:
            del self._pending[asked.key]
        return tuple(Reject(asked.key, self.unreachable(asked.message.kind, asked.deadline_s, now)) for asked in late)

    def _end(self, error: WeightbusError) -> tuple[Effect, ...]:
        self.phase, self._over = Phase.REFUSED, error
        rejected = tuple(Reject(key, error) for key in self._pending)
        self._pending.clear()
        return (*rejected, GiveUp(error))

    @property
    def pending(self) -> Mapping[RequestId, ToCoordinator]:
        """What waits for an answer."""
        return {key: each.asked.message for key, each in self._pending.items()}


def split_endpoints(endpoint: str) -> tuple[str, ...]:
    """The endpoints in a comma-separated list; at least one, though it may be empty."""
    return tuple(each.strip() for each in endpoint.split(","))
