"""An agent's session with the coordinator, as a pure machine: `handle(event, now)` returns its effects.

The session says Hello until it is welcomed, sends heartbeats, repeats requests until they are answered or expire,
reconnects when the coordinator is silent, and says Hello again when the coordinator does not know the agent. client.py
owns the socket, the thread and the clock.

A command to an engine acknowledges the engine's earlier answers, because the coordinator sends the next step only after
it has taken the answer to the last one. Where a command follows soon, as in every round, the engine gets one message
instead of two. Both ends decide by `acknowledges`; an engine that repeats its answer all the same gets an `Ack`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from ..machine import Peer
from ..protocol import (
    Abort,
    Ack,
    Alive,
    BlobPage,
    Commit,
    CoordinatorUnreachable,
    Granted,
    Message,
    NotTrusted,
    Outcome,
    Pause,
    Paused,
    Prepared,
    ProtocolError,
    RefusalCode,
    Refused,
    Request,
    RequestId,
    RequestRefused,
    RoundDone,
    Serving,
    Status,
    ToAgent,
    ToCoordinator,
    Transfer,
    Transferred,
    Verified,
    Version,
    WeightbusError,
    Welcome,
    WrongProtocol,
)
from .interface import REJECTED_KEY, UNTRUSTED_KEY

RETRYABLE: Final = frozenset(
    {
        RefusalCode.NAME_TAKEN,
        RefusalCode.SERVER_TAKEN,
        RefusalCode.SHUTTING_DOWN,
        RefusalCode.READ_ONLY,
        RefusalCode.NOT_LEADER,
    }
)
"""Refusals of a `Hello` that are retried. After any other a session that was never welcomed is over."""
UNKNOWN_FIELD: Final = "unknown field"
"""In the reason of a refusal: the coordinator is older than a field of the message."""

HEARTBEATS_PER_ANSWER: Final = 3
"""One of so many heartbeats asks for an answer, which halves the coordinator's load of a quiet fleet."""


class SessionPhase(enum.Enum):
    """Phases of a session."""

    JOINING = "joining"
    """`Hello` is repeated; requests wait."""
    JOINED = "joined"
    """The agent is welcomed on this connection: heartbeats run, requests are repeated until answered."""
    REFUSED = "refused"
    """The coordinator refused this agent, which it had never welcomed, for good. Nothing is sent any more."""


class SessionTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The waits of a session, in seconds."""

    hello_first_s: float = 0.02
    """Wait before the first repetition of a Hello: one sent before the connection is established is lost."""
    hello_max_s: float = 1.0
    """Longest wait before a repetition; it doubles each time."""
    resend_first_s: float = 0.5
    resend_max_s: float = 4.0
    silence_s: float = 5.0
    """Silence after which a connection is dropped. Once welcomed, `Welcome.silence_s` replaces it."""
    elsewhere_s: float = 2.0
    """With several endpoints: silence, or three heartbeats if those are longer, after which the next one is tried."""


# -- events ----------------------------------------------------------------------------------------------------------


class RequestSubmitted(msgspec.Struct, frozen=True):
    """A request was made, to be answered by `expires_at`."""

    key: RequestId
    message: ToCoordinator
    blob: bytes | None
    expires_at: float
    deadline_s: float


class MessageArrived(msgspec.Struct, frozen=True):
    """A message arrived."""

    message: ToAgent
    blob: bytes | None = None


class GarbageArrived(msgspec.Struct, frozen=True):
    """Bytes arrived that are no message."""

    error: ProtocolError


class DescriptionChanged(msgspec.Struct, frozen=True):
    """The agent is another one than its last `Hello` said: its server was launched again."""


class Ticked(msgspec.Struct, frozen=True):
    """Time passed."""


SessionEvent = RequestSubmitted | MessageArrived | GarbageArrived | DescriptionChanged | Ticked

# -- effects ---------------------------------------------------------------------------------------------------------


class Connect(msgspec.Struct, frozen=True):
    """Drop the connection and begin a new one."""

    endpoint_index: int = 0
    """Index of the endpoint, from 0."""


class SendHello(msgspec.Struct, frozen=True):
    """Send `Hello` under this key."""

    key: RequestId
    plain: bool = False
    """Without fields that the coordinator does not know: it is an older one."""


class SendHeartbeat(msgspec.Struct, frozen=True):
    """Send `Heartbeat` with this number; 0 asks for no answer."""

    seq: int


class Transmit(msgspec.Struct, frozen=True):
    """Send a message, which may be lost."""

    message: ToCoordinator
    blob: bytes | None


class Resolve(msgspec.Struct, frozen=True):
    """A request was answered."""

    key: RequestId
    answer: ToAgent
    blob: bytes | None


class Reject(msgspec.Struct, frozen=True):
    """A request was refused, or will not be answered."""

    key: RequestId
    error: WeightbusError


class Join(msgspec.Struct, frozen=True):
    """The coordinator welcomed this agent, at first or again."""

    welcome: Welcome


class Deliver(msgspec.Struct, frozen=True):
    """A command for the agent."""

    message: ToAgent


class GiveUp(msgspec.Struct, frozen=True):
    """The session is over; no further request is answered."""

    error: WeightbusError


SessionEffect = Connect | SendHello | SendHeartbeat | Transmit | Resolve | Reject | Join | Deliver | GiveUp


class _PendingRequest(msgspec.Struct):
    asked: RequestSubmitted
    resend_at: float
    backoff_s: float


class AgentSession:
    """One agent's session. Drive it from one thread."""

    def __init__(
        self,
        endpoint: str,
        keys: str,
        timing: SessionTiming,
        now: float,
        trust_advice: Callable[[], str] = lambda: "add its key to the coordinator's allow-list",
    ) -> None:
        """`endpoint` may be several, comma-separated: one coordinator leads; the others refuse and name the leader.

        `keys` is the prefix of every Hello's request key, unique to this session. `trust_advice` says what an operator
        does to have this agent trusted.
        """
        self.phase = SessionPhase.JOINING
        self.welcome: Welcome | None = None
        self.committed: Version | None = None
        """Current version of this agent's channel, by the coordinator's last message."""
        self.max_lag = 0
        """Number of versions that an engine may be behind `committed` and still be ready."""
        self._round_epoch = 0
        """Highest epoch of a `RoundDone` that named a committed version; reports of earlier rounds may be repeated."""
        self.refusal: RequestRefused | None = None
        """The refusal of the last `Hello`, while it is repeated."""
        self.refused_since: float | None = None
        """The time of the first refusal since the last `Welcome`; None while welcomed."""
        self.unread_at: float | None = None
        """The time at which the coordinator last said that it could not read a message of this agent."""
        self._endpoint = endpoint
        self._endpoints = split_endpoints(endpoint)
        self._endpoint_index = 0
        self._keys = keys
        self._timing = timing
        self._trust_advice = trust_advice
        self._pending: dict[RequestId, _PendingRequest] = {}
        self._started_at = now
        self._heard_at: float | None = None
        self._silent_since = now
        self._connected = False
        self._end_error: WeightbusError | None = None
        self._last_garbage = ""
        self._hellos = 0
        self._hello_key = RequestId("")
        self._hello_at = now
        self._hello_backoff_s = timing.hello_first_s
        self._heartbeats_sent = 0
        self._heartbeat_at = now
        self._unanswered_heartbeats = 0
        """Heartbeats since the last answered one."""
        self._under_pause_lease = False
        """True while the engine is paused and would resume if the coordinator fell silent: every heartbeat asks."""
        self._plain = False
        """True if a `Hello` on this connection was rejected because of a field unknown to the coordinator."""

    @property
    def heard_at(self) -> float | None:
        """The time of the coordinator's last message to this agent as one that it has welcomed.

        A refusal, of whatever code, is none: a coordinator that refuses an agent does not count on it, and tells it
        nothing of what is paused or committed.
        """
        return self._heard_at

    # -- entry ---------------------------------------------------------------------------------------------------------

    def handle(self, event: SessionEvent, now: float) -> tuple[SessionEffect, ...]:
        """Take `event`, which happened at `now` (monotonic seconds)."""
        match event:
            case RequestSubmitted():
                return self._submit(event, now)
            case MessageArrived():
                self._silent_since = now
                if self._is_heard(event.message):
                    self._heard_at = now
                return self._message_arrived(event.message, event.blob, now)
            case GarbageArrived():
                return self._garbage_arrived(event.error)
            case DescriptionChanged():
                return () if self.phase is SessionPhase.REFUSED else self._rejoin(now)
            case Ticked():
                return self._tick(now)

    def next_deadline(self) -> float:
        """The time at which a `Ticked` is due."""
        if self.phase is SessionPhase.REFUSED:
            return float("inf")
        joined = self.phase is SessionPhase.JOINED
        due = min(self._silent_since + self._silence_s, self._heartbeat_at if joined else self._hello_at)
        for each in self._pending.values():
            due = min(due, each.asked.expires_at, each.resend_at if joined else due)
        return due

    def unreachable(self, waiting_for: str, tried_s: float, now: float) -> WeightbusError:
        """The error for a wait that expired: says what was found instead of an answer."""
        if self._end_error is not None:
            return self._end_error
        if self.refusal is not None:
            return self.refusal
        if self.phase is SessionPhase.JOINED and self._heard_at is not None:
            found = f"connected, and last heard of {now - self._heard_at:.1f} s ago, but this was not answered"
        elif self._heard_at is not None:
            found = f"connection lost, last heard of {now - self._heard_at:.1f} s ago"
        else:
            found = "nothing was heard at all"
        noise = f"; what came was no message: {self._last_garbage}" if self._last_garbage else ""
        return CoordinatorUnreachable(self._endpoint, tried_s, waiting_for, found + noise)

    # -- events --------------------------------------------------------------------------------------------------------

    def _submit(self, asked: RequestSubmitted, now: float) -> tuple[SessionEffect, ...]:
        if self._end_error is not None:
            return (Reject(asked.key, self._end_error),)
        self._pending[asked.key] = _PendingRequest(asked, now, self._timing.resend_first_s)
        return self._resend_due(now)

    def _is_heard(self, message: ToAgent) -> bool:
        match message:
            case Refused():
                return False
            case Alive():
                return self.welcome is not None and message.boot == self.welcome.boot
            case Welcome():
                return self.phase is SessionPhase.JOINING and message.request == self._hello_key
            case _:
                return self.welcome is not None

    def _message_arrived(self, message: ToAgent, blob: bytes | None, now: float) -> tuple[SessionEffect, ...]:
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
                    self._unanswered_heartbeats = 0
                    self._heartbeat_at = (
                        now + self.welcome.heartbeat_s
                    )  # keeps agents that were answered together in step
                return ()
            case Pause() | Transfer() | Commit() | Abort():
                return self._commanded(message)
            case _:
                if isinstance(message, RoundDone) and message.outcome is Outcome.COMMITTED:
                    self._note_round(message)
                return (Deliver(message),)

    def _note_round(self, done: RoundDone) -> None:
        """A round committed its version: known before the next `Alive` says so."""
        if done.epoch >= self._round_epoch:
            self.committed, self._round_epoch = done.version, done.epoch

    def _commanded(self, command: Pause | Transfer | Commit | Abort) -> tuple[SessionEffect, ...]:
        """A command also acknowledges the answers to earlier ones."""
        if isinstance(command, Commit):
            self.committed = command.version  # before the next Alive says so
        self._under_pause_lease = isinstance(command, Pause | Transfer)
        known = [key for key, each in self._pending.items() if acknowledges(command, each.asked.message)]
        for key in known:
            del self._pending[key]
        return (*(Resolve(key, Ack(request=key), None) for key in known), Deliver(command))

    def _welcomed(self, welcome: Welcome, now: float) -> tuple[SessionEffect, ...]:
        if self.phase is not SessionPhase.JOINING or welcome.request != self._hello_key:
            return ()  # a duplicate
        self.phase = SessionPhase.JOINED
        self.welcome, self.refusal, self.refused_since, self._last_garbage = welcome, None, None, ""
        self.committed, self.max_lag = welcome.committed.version if welcome.committed else None, 0
        self._heartbeat_at = now + welcome.heartbeat_s
        self._unanswered_heartbeats = HEARTBEATS_PER_ANSWER  # the first one asks
        for each in self._pending.values():
            each.resend_at, each.backoff_s = now, self._timing.resend_first_s
        return (Join(welcome), *self._resend_due(now))

    def _refused(self, refused: Refused, now: float) -> tuple[SessionEffect, ...]:
        error = RequestRefused(refused.code, refused.reason, refused.retry_after_s)
        if refused.code is RefusalCode.UNKNOWN_AGENT:
            # One refusal for each message that was under way; all but the first find the Hello sent already.
            return self._rejoin(now) if self.phase is SessionPhase.JOINED else ()
        if refused.code is RefusalCode.NOT_LEADER:
            return self._not_leader(refused, error, now)
        if refused.request == REJECTED_KEY:
            self.unread_at = now
        if refused.request == UNTRUSTED_KEY:
            return self._expelled(NotTrusted(refused.reason, self._trust_advice()), now, answered=refused)
        if self._pending.pop(refused.request, None):
            return (Reject(refused.request, error),)
        return self._hello_refused(refused, error, now) if self.phase is SessionPhase.JOINING else ()

    def _not_leader(self, refused: Refused, error: RequestRefused, now: float) -> tuple[SessionEffect, ...]:
        """Connect to the leader if it is known, otherwise to the next endpoint after a while. Requests are kept."""
        if self.phase is SessionPhase.JOINING and refused.request != self._hello_key:
            return ()  # of an earlier Hello
        self._note_refusal(error, now)
        leader = self._endpoints.index(refused.leader) if refused.leader in self._endpoints else self._endpoint_index
        known = leader != self._endpoint_index
        self._endpoint_index = leader if known else (self._endpoint_index + 1) % len(self._endpoints)
        wait_s = 0.0 if known else max(refused.retry_after_s, self._timing.hello_first_s)
        self.phase, self._silent_since = SessionPhase.JOINING, now
        self._hello_at, self._hello_backoff_s = now + wait_s, self._timing.hello_first_s
        self._new_hello_key()
        return (Connect(self._endpoint_index), *self._say_hello(now))

    def _hello_refused(self, refused: Refused, error: RequestRefused, now: float) -> tuple[SessionEffect, ...]:
        if refused.request == REJECTED_KEY and UNKNOWN_FIELD in refused.reason and not self._plain:
            self._plain = True
            return self._rejoin(now)
        keyless = refused.code is RefusalCode.PROTOCOL_MISMATCH  # refers to an unreadable message, so it has no key
        if not keyless and refused.request != self._hello_key:
            return ()
        if refused.code not in RETRYABLE and not refused.retry_after_s:
            if self.welcome is not None and refused.code is RefusalCode.NOT_ALLOWED:
                # The same Hello was welcomed before: what changed is the coordinator's allow-list.
                error = NotTrusted(refused.reason, self._trust_advice())
            return self._expelled(error, now, answered=refused)
        self._note_refusal(error, now)
        self._hello_at = now + max(refused.retry_after_s, self._hello_backoff_s)
        self._new_hello_key()
        return ()

    def _expelled(self, error: RequestRefused, now: float, *, answered: Refused) -> tuple[SessionEffect, ...]:
        """A refusal that no retry of this agent's own ends. A session that was welcomed before goes on asking.

        The process behind it has a server to resume, or a training loop to tell: requests fail at once, and the agent
        is back by itself once an operator has mended the cause.
        """
        if self.welcome is None:
            return self._end(error)
        told = () if isinstance(self.refusal, type(error)) else (Deliver(answered),)
        self._note_refusal(error, now)
        rejected = tuple(Reject(key, error) for key in self._pending)
        self._pending.clear()
        if self.phase is SessionPhase.JOINED:
            return (*rejected, *told, *self._rejoin(now))
        self._hello_at = now + self._timing.hello_max_s
        if answered.request == self._hello_key:
            self._new_hello_key()
        return (*rejected, *told)

    def _note_refusal(self, error: RequestRefused, now: float) -> None:
        self.refusal = error
        if self.refused_since is None:
            self.refused_since = now

    def _garbage_arrived(self, error: ProtocolError) -> tuple[SessionEffect, ...]:
        self._last_garbage = str(error)
        if isinstance(error, WrongProtocol) and self.phase is SessionPhase.JOINING and self.welcome is None:
            return self._end(error)
        return ()

    def _tick(self, now: float) -> tuple[SessionEffect, ...]:
        if self.phase is SessionPhase.REFUSED:
            return ()
        effects = self._expire(now)
        if not self._connected or now >= self._silent_since + self._silence_s:
            if self._connected:
                self._endpoint_index = (self._endpoint_index + 1) % len(self._endpoints)
            self._connected = True
            self._silent_since = now
            self._plain = False
            return (*effects, Connect(self._endpoint_index), *self._rejoin(now))
        if self.phase is SessionPhase.JOINING:
            return (*effects, *self._say_hello(now))
        return (*effects, *self._send_heartbeat(now), *self._resend_due(now))

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def _silence_s(self) -> float:
        joined = self.welcome if self.phase is SessionPhase.JOINED else None
        silence_s = joined.silence_s if joined else self._timing.silence_s
        if len(self._endpoints) == 1:
            return silence_s
        return min(silence_s, max(self._timing.elsewhere_s, 3 * joined.heartbeat_s if joined else 0.0))

    def _rejoin(self, now: float) -> tuple[SessionEffect, ...]:
        self.phase = SessionPhase.JOINING
        self._hello_at, self._hello_backoff_s = now, self._timing.hello_first_s
        self._new_hello_key()
        return self._say_hello(now)

    def _new_hello_key(self) -> None:
        # The same key would be answered with the earlier Welcome or refusal.
        self._hellos += 1
        self._hello_key = RequestId(f"{self._keys}-hello-{self._hellos}")

    def _say_hello(self, now: float) -> tuple[SessionEffect, ...]:
        if now < self._hello_at:
            return ()
        self._hello_at = now + self._hello_backoff_s
        self._hello_backoff_s = min(2 * self._hello_backoff_s, self._timing.hello_max_s)
        return (SendHello(self._hello_key, self._plain),)

    def _send_heartbeat(self, now: float) -> tuple[SessionEffect, ...]:
        if now < self._heartbeat_at or self.welcome is None:
            return ()
        self._heartbeats_sent += 1
        self._unanswered_heartbeats += 1
        self._heartbeat_at = now + self.welcome.heartbeat_s
        return (SendHeartbeat(self._heartbeats_sent if self._heartbeat_wants_answer(self.welcome) else 0),)

    def _heartbeat_wants_answer(self, welcome: Welcome) -> bool:
        """Every third heartbeat asks for an answer, or one in `silence_s / 3`; under a pause lease every one does."""
        often = min(HEARTBEATS_PER_ANSWER, self._silence_s // (3 * welcome.heartbeat_s))
        return self._under_pause_lease or self._unanswered_heartbeats >= often

    def _resend_due(self, now: float) -> tuple[SessionEffect, ...]:
        if self.phase is not SessionPhase.JOINED or not self._pending:
            return ()
        due = [each for each in self._pending.values() if now >= each.resend_at]
        for each in due:
            each.resend_at = now + each.backoff_s
            each.backoff_s = min(2 * each.backoff_s, self._timing.resend_max_s)
        return tuple(Transmit(each.asked.message, each.asked.blob) for each in due)

    def _expire(self, now: float) -> tuple[SessionEffect, ...]:
        if not self._pending:
            return ()
        late = [each.asked for each in self._pending.values() if now >= each.asked.expires_at]
        for asked in late:
            del self._pending[asked.key]
        return tuple(Reject(asked.key, self.unreachable(asked.message.kind, asked.deadline_s, now)) for asked in late)

    def _end(self, error: WeightbusError) -> tuple[SessionEffect, ...]:
        self.phase, self._end_error = SessionPhase.REFUSED, error
        rejected = tuple(Reject(key, error) for key in self._pending)
        self._pending.clear()
        return (*rejected, GiveUp(error))

    @property
    def pending(self) -> Mapping[RequestId, ToCoordinator]:
        """The requests that wait for an answer."""
        return {key: each.asked.message for key, each in self._pending.items()}


def split_endpoints(endpoint: str) -> tuple[str, ...]:
    """The endpoints in a comma-separated list; at least one, though it may be empty."""
    return tuple(each.strip() for each in endpoint.split(","))


_IMPLIED_BY: Final[Mapping[type[Message], frozenset[type[Message]]]] = {
    Pause: frozenset({Prepared}),
    Transfer: frozenset({Prepared}),
    Commit: frozenset({Prepared, Paused, Transferred, Verified}),
}
"""The answers, of the same epoch or an earlier one, that each command acknowledges."""
_COMMAND_FOLLOWS: Final = frozenset({Prepared, Verified, Serving})
"""Answers after which an engine waits for its next command, so their `Ack` may wait for that command.

An engine sends one answer after the other: if the `Ack` of a `Transferred` waited, the `Verified` behind it would too.
"""

PROMPT_S: Final = 0.05
"""Longest wait of an `Ack` while messages arrive; an agent repeats its answer after ten times as long."""
HOLD_S: Final = 0.2
"""Longest wait of an `Ack` for a command that acknowledges the same answer."""


def acknowledges(command: Message, answer: Message) -> bool:
    """Whether `command` tells its engine that `answer` has arrived, or does not matter any more."""
    if type(answer) not in _IMPLIED_BY.get(type(command), ()):
        return False
    answered, told = getattr(answer, "epoch", 0), getattr(command, "epoch", 0)
    return bool(answered <= told)


class AckBatcher:
    """The acknowledgements that are due. Those of one connection are sent in the order of its requests."""

    def __init__(self) -> None:
        self._prompt: dict[Peer, list[Request]] = {}
        self._prompt_until = 0.0
        self._held: dict[Peer, Request] = {}
        """At most one request per connection, held for `HOLD_S`: its agent waits for a reply before its next one."""
        self._held_until = 0.0

    def __bool__(self) -> bool:
        return bool(self._prompt or self._held)

    def add(self, requests: Iterable[tuple[Peer, Request]], now: float) -> None:
        """Add requests to be acknowledged, each with its connection."""
        prompt, held = self._prompt, self._held
        for peer, answer in requests:
            if type(answer) in _COMMAND_FOLLOWS and peer not in held:
                if not held:
                    self._held_until = now + HOLD_S
                held[peer] = answer
            else:
                if not prompt:
                    self._prompt_until = now + PROMPT_S
                prompt.setdefault(peer, []).append(answer)

    @property
    def urgent(self) -> bool:
        """True if acknowledgements are due as soon as no message is left to be read."""
        return bool(self._prompt)

    def take_before(self, peers: Sequence[Peer], message: Message) -> list[tuple[Peer, Ack]]:
        """Acknowledgements that `peers` are owed before `message`; the ones that it implies are dropped."""
        first: list[tuple[Peer, Ack]] = []
        prompt, held = self._prompt, self._held
        covered, told = _IMPLIED_BY.get(type(message), frozenset[type[Message]]()), getattr(message, "epoch", 0)
        for peer in peers:
            if prompt and (answers := prompt.pop(peer, None)):
                left = [each for each in answers if type(each) not in covered or getattr(each, "epoch", 0) > told]
                first += [(peer, _ack(answer)) for answer in left]
            if answer := held.get(peer):
                if type(answer) in covered and getattr(answer, "epoch", 0) <= told:  # as `acknowledges`, for thousands
                    del held[peer]
                elif isinstance(
                    answer, Serving
                ):  # the message begins another round, and comes after the acknowledgement
                    del held[peer]
                    first.append((peer, _ack(answer)))
        return first

    def take_due(self, now: float, *, quiet: bool) -> Iterator[tuple[Peer, Ack]]:
        """The acknowledgements to send now. `quiet`: no message is left to be read."""
        if self._prompt and (quiet or now >= self._prompt_until):
            prompt, self._prompt = self._prompt, {}
            yield from ((peer, _ack(answer)) for peer, answers in prompt.items() for answer in answers)
        if self._held and now >= self._held_until:
            held, self._held = self._held, {}
            yield from ((peer, _ack(answer)) for peer, answer in held.items())

    def next_deadline(self) -> float | None:
        """The time at which held acknowledgements are due."""
        return self._held_until if self._held else None


def _ack(answer: Request) -> Ack:
    return Ack(request=answer.request)
