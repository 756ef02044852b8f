"""The ZeroMQ sockets of both ends, the coordinator's ROUTER and an agent's DEALER: they carry messages, no more.

Every socket belongs to one thread. No other module imports zmq. Each option was chosen against a failure seen with
libzmq 4.3.5:

- no routing id is set: the ROUTER names each connection anew, so an agent cannot take another's name by asking for it,
  and a peer that reconnects is not ignored as a duplicate of itself;
- ROUTER_MANDATORY with non-blocking sends: a peer that is gone or slow is an answer (`SendOutcome`), not a silent drop,
  and cannot hold up the others;
- half-open connections are found by TCP keepalive, which costs nothing, and by the agent through ZMTP heartbeats too.
  The coordinator sends no ZMTP heartbeats, and agents set no time to live: libzmq searches the timers of all
  connections to end one, and with two thousand of them does little else (`cancel_timer`, O(n) for each PING). Both
  prove only that the peer's host is alive, so agents send heartbeats of their own;
- IMMEDIATE at the agent: no message is queued for a connection that is not established, to arrive much too late;
- HANDSHAKE_IVL before bind: connections that never finish their handshake do not pile up;
- CURVE with ZAP_DOMAIN and ZAP_ENFORCE_DOMAIN: while the authenticator's thread is gone, new connections are refused.
  Without both they would be accepted;
- ZAP checks new connections only, so the key of every message (User-Id) is looked up again;
- a monitor counts failed handshakes, which appear nowhere else.

The coordinator limits the messages of each agent, so that a flood slows down, and then cuts off, its sender and no
other agent. Bursts of a few thousand messages are accepted, because an agent that reconnects has much to say; `RATE` a
second may go on for ever. Messages above that are dropped unread, like any that are lost on the way: agents repeat
requests without a reply. After `DROPS_BEFORE_CUT_OFF` dropped messages, without a pause that frees half of the burst,
an agent is cut off until it was quiet for `CUT_OFF_S`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import ipaddress
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.backend import Socket

from ..machine import MessageReceived, Peer, Principal
from ..protocol import (
    AgentId,
    ConfigurationError,
    ProtocolError,
    ToAgent,
    ToCoordinator,
    WeightbusError,
    codec,
)
from ..security import (
    AGENT_KEYS_FOLDER,
    ALLOW_LIST_FILE,
    COORDINATOR_KEYS,
    RELOAD_S,
    AllowList,
    CurveFiles,
    KeyPair,
    check_public_key,
    fingerprint,
    read_allow_list,
    read_public_key,
    read_secret_key,
)
from .interface import ConnectionRejected, Incoming, Rejected, SendOutcome, Throttled, TrustRevoked, UntrustedKey
from .session import split_endpoints

HWM: Final = 1000
KEEPALIVE_IDLE_S: Final = 2
KEEPALIVE_INTERVAL_S: Final = 1
KEEPALIVE_COUNT: Final = 3
UNACKNOWLEDGED_MS: Final = 4000
"""A silent connection, or one that takes nothing, is given up by the kernel after about four seconds."""
MAX_BURST: Final = 256
"""Messages taken per poll, so that a flood cannot keep timers from running."""


def new_keypair() -> KeyPair:
    """A new CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def public_of(secret: str) -> str:
    """The public half of a secret key."""
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")


def libzmq_version() -> str:
    """Version of the loaded libzmq, and whether it can encrypt."""
    return f"{zmq.zmq_version()} ({'with' if zmq.has('curve') else 'WITHOUT'} CURVE)"


def check_library() -> None:
    """Refuse a libzmq with known holes, or one that cannot encrypt."""
    if zmq.zmq_version_info() < (4, 3, 5):
        raise ConfigurationError(f"libzmq {zmq.zmq_version()} has known holes, 4.3.5 is needed: upgrade pyzmq")
    if not zmq.has("curve"):
        raise ConfigurationError("this libzmq was built without CURVE: install pyzmq from its own wheels")


class Waker:
    """A file descriptor that a poll can wait for and any thread or signal handler can set."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The file descriptor to poll."""
        return self._reader.fileno()

    def set(self) -> None:
        """End the wait. From any thread, and in a signal handler."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is set already; closed: no poll is left to end
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Reset, so that the next poll blocks again."""
        with contextlib.suppress(BlockingIOError):
            while len(self._reader.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Release the file descriptors."""
        self._reader.close()
        self._writer.close()


def set_common(each: zmq.Socket[bytes]) -> None:
    """The options of every socket, whichever side it is on."""
    each.set(zmq.LINGER, 0)
    each.set(zmq.SNDHWM, HWM)
    each.set(zmq.RCVHWM, HWM)
    each.set(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
    each.set(zmq.IPV6, 1)
    each.set(zmq.TCP_KEEPALIVE, 1)
    each.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    each.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    each.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
    each.set(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)


def explain_handshake(number: int, value: int) -> str:
    """Why a connection came to nothing, by the number and value of its monitor's event."""
    match number:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"a connection was refused: its key is not trusted (ZAP said {value})"
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return f"a connection was refused: its handshake broke the rules (ZMTP error {value:#x})"
        case _:
            return "a connection was refused: no handshake, or not the one asked for, within its time"


def burst(each: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Messages that have arrived, at most `MAX_BURST`."""
    for _ in range(MAX_BURST):
        try:
            yield each.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


RATE: Final = 2_000.0
"""Messages a second. The fastest agent, which sends a request and waits for each reply, stays below."""
BURST: Final = 10_000
DROPS_BEFORE_CUT_OFF: Final = 50_000
CUT_OFF_S: Final = 5.0
MAX_ACCOUNTS: Final = 8_192
"""Accounts kept; beyond that, or beyond twice the number of agents over their rate, accounts within their rate are
forgotten, which changes nothing for their agents."""


class RateDecision(enum.Enum):
    """The fate of one message."""

    TAKEN = "taken"
    SLOWED = "slowed"
    """Dropped, as the first one above the rate."""
    CUT = "cut"
    """Dropped, and its sender is cut off from here on."""
    DROPPED = "dropped"


_TAKEN: Final = RateDecision.TAKEN
"""A name of its own: the lookup of an enum's member would take as long as all the rest."""


class Account:
    """The messages of one agent, as the time until which they would have lasted at the rate."""

    __slots__ = ("_burst_s", "_cost_s", "_dropped", "_patience", "until")

    def __init__(self, rate: float, burst: int, patience: int) -> None:
        self.until = 0.0
        self._cost_s, self._burst_s, self._patience = 1.0 / rate, burst / rate, patience
        self._dropped = 0
        """Messages dropped since the flood began."""

    def count_message(self, now: float) -> RateDecision:
        """Count one message at `now`; returns its fate."""
        until = self.until
        if until < now:  # nearly always
            self.until, self._dropped = now + self._cost_s, 0
            return _TAKEN
        if until - now <= self._burst_s:
            self.until = until + self._cost_s
            if until - now <= self._burst_s / 2:
                self._dropped = 0
            return _TAKEN
        self._dropped += 1
        if self._dropped >= self._patience:
            self.until = now + self._burst_s + CUT_OFF_S
        return {1: RateDecision.SLOWED, self._patience: RateDecision.CUT}.get(self._dropped, RateDecision.DROPPED)


class RateLimiter:
    """An account for each agent's key."""

    def __init__(self, rate: float = RATE, burst: int = BURST, patience: int = DROPS_BEFORE_CUT_OFF) -> None:
        self._limits = rate, burst, patience
        self._full_at = MAX_ACCOUNTS
        self._accounts: dict[str | bytes, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def full(self) -> bool:
        """True if it is time to `forget`."""
        return len(self._accounts) >= self._full_at

    def account(self, key: str | bytes) -> Account:
        """The account of `key`. A caller that keeps it checks `full` with every new connection."""
        known = self._accounts.get(key)
        if known is None:
            known = self._accounts[key] = Account(*self._limits)
        return known

    def forget(self, now: float) -> None:
        """Drop the accounts that are within their rate."""
        self._accounts = {key: account for key, account in self._accounts.items() if account.until > now}
        self._full_at = max(MAX_ACCOUNTS, 2 * len(self._accounts))  # else every message might look at all of them


_FAILED_HANDSHAKES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_CONNECTION_EVENTS: Final[Mapping[int, str]] = {
    zmq.EVENT_ACCEPTED: "accepted",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "established",
    zmq.EVENT_DISCONNECTED: "closed",
}
ZAP_DOMAIN: Final = "weightbus"
MONITOR: Final = "inproc://connections"
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: arithmetic with enums would cost more than the call."""
_NO_COPY: Final = False  # passed by position: as a keyword it would cost a third of the call
HANDSHAKE_MS: Final = 10_000
"""Longest handshake. Two thousand simultaneous connections wait for one thread: with less, the last ones are cut off,
return, and make the queue longer."""
MAX_FRAMES: Final = 2
"""Most frames of one message beyond its first; no valid message has more. Further frames are dropped unread."""
MAX_SKIPPED: Final = 4096
"""Frames of such a message that one poll drops, so that timers still run."""
MAX_REFUSED: Final = 16
"""Refused keys that are remembered for the status."""
REFUSED_S: Final = 60.0
"""Seconds for which a refused key is shown. Its agent tries again every few seconds."""
MAX_CONNECTIONS: Final = 8192
"""Connections with a remembered key; beyond that, keys are read again from their next messages."""
UNREAD: Final = 64
"""Messages, of any size, that libzmq queues for a slow peer."""
QUEUE_LIMIT: Final = 1000
QUEUE_BYTES: Final = 16 * 1024 * 1024
"""Bounds of the queue for a slow peer beyond that; with one more message it counts as gone."""
LOOK_S: Final = 0.1
"""Interval at which the monitor is read."""
FLUSH_S: Final = 0.05
"""Interval at which queued messages are offered to a slow peer again."""


@dataclass(frozen=True)
class ServerKeys:
    """The coordinator's key pair, and the allow-list of agents."""

    pair: KeyPair
    trust: AllowList

    @classmethod
    def read(cls, folder: Path) -> ServerKeys:
        """From a folder that ``weightbus keygen`` made. Raises `PeerKeyError`."""
        secret_path, public_path = folder / f"{COORDINATOR_KEYS}.key", folder / f"{COORDINATOR_KEYS}.pub"
        secret = read_secret_key(secret_path)
        pair = KeyPair(public_of(secret), secret)
        if public_path.exists():  # nothing here needs it, but agents are given it, and with another none could connect
            check_public_key(public_path, secret_path, pair.public)
        read_allow_list(folder / ALLOW_LIST_FILE)
        return cls(pair, AllowList(folder / ALLOW_LIST_FILE))


class RouterBus:
    """The coordinator's sockets. Implements `interface.CoordinatorBus`."""

    def __init__(self, bind: str, router_port: int, keys: ServerKeys | None = None) -> None:
        """Binds at once. Port 0 takes a free one: see `router_port`. Without keys: loopback only."""
        check_library()
        self._host = check_bind(bind, keys)
        self._keys = keys
        self._trusted: Mapping[str, Principal] = keys.trust.principals() if keys else {}
        self.connections: Counter[str] = Counter(accepted=0, established=0, refused=0, closed=0)
        """Number of connections by event. One that libzmq drops silently counts as accepted and closed only."""
        self.throttled: Counter[AgentId] = Counter()
        """Messages dropped above the rate, by the name of the agent's key."""
        self._rate_limiter = RateLimiter()
        self._queues: dict[Peer, _Queue] = {}
        self._connections: dict[Peer, _Connection] = {}
        """By connection. The key of a connection never changes, and the ROUTER uses no name twice."""
        self._poll_left_some = False
        """True if the last poll took `MAX_BURST` messages, and may have left some."""
        self._skipping = False
        """True while the next frames belong to a message of too many frames."""
        self._encoded: tuple[ToAgent | None, codec.Frames] = (None, [])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._key_check: _KeyCheck | None = None
        self._waker = Waker()
        self._gather_poller = zmq.Poller()
        """Polls the waker alone, to gather messages meanwhile."""
        self._gather_poller.register(self._waker.fileno(), zmq.POLLIN)
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fileno(), zmq.POLLIN)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._receive_peer: Final = cast("Callable[[int], Peer]", self._router.recv)
        self._receive_frame: Final = cast("Callable[[int, bool], zmq.Frame]", self._router.recv)
        self._send_frame: Final = partial(Socket.send, self._router)
        """pyzmq's base call, without the options of other socket types: a third of the time."""
        self._monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        """Receives events of connections."""
        self._monitor_at = time.monotonic()
        try:
            self._authenticate()
            self._secure()
            self._router.set(zmq.ROUTER_MANDATORY, 1)
            self._router.set(zmq.SNDHWM, UNREAD)
            self._watch_connections()
            self.router_port = _bind(self._router, self._host, router_port)
        except BaseException:
            self.close()
            raise
        self._poller.register(self._router, zmq.POLLIN)

    def _authenticate(self) -> None:
        if self._keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._key_check = _KeyCheck(self._keys.trust)
            self._authenticator.configure_curve_callback(ZAP_DOMAIN, self._key_check)

    def _secure(self) -> None:
        each = self._router
        set_common(each)
        each.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        each.set(zmq.BACKLOG, 4096)
        if self._keys is not None:
            each.set(zmq.CURVE_SERVER, 1)
            each.set(zmq.CURVE_SECRETKEY, self._keys.pair.secret.encode("ascii"))
            each.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode("ascii"))
            each.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _watch_connections(self) -> None:
        self._router.monitor(MONITOR, sum(_CONNECTION_EVENTS) | _FAILED_HANDSHAKES)
        self._monitor.set(zmq.LINGER, 0)
        self._monitor.set(zmq.RCVHWM, 0)  # libzmq's own thread would block when it is full
        self._monitor.connect(MONITOR)

    def poll(self, timeout_s: float, gather_s: float = 0.0) -> Sequence[Incoming]:
        """What came in, at once if anything did; nothing after `timeout_s` or `wake`. First it may gather."""
        if self._authenticator is not None and not self._authenticator.is_alive():
            raise WeightbusError(
                "the thread that authenticates agents died: no agent can connect any more; start again"
            )
        if gather_s and not self._poll_left_some:
            self._gather_poller.poll(round(gather_s * 1000))
        self._flush()
        wait_s = min(timeout_s, FLUSH_S if self._queues else RELOAD_S)
        ready = self._poller.poll(max(0, round(wait_s * 1000)))
        incoming: list[Incoming] = [*self._follow_trust(), *self._connection_changes()]
        for each, _ in ready:
            if each is self._router:
                self._take_burst(incoming)
            else:
                self._waker.clear()
        return incoming

    def _take_burst(self, incoming: list[Incoming]) -> None:
        """Take messages that have arrived, at most `MAX_BURST`."""
        receive_peer, receive_frame = self._receive_peer, self._receive_frame
        connections, now, read = self._connections, time.monotonic(), codec.TO_COORDINATOR.read_one
        checked, taken = self._keys is not None, RateDecision.TAKEN
        self._poll_left_some = False
        for _ in range(MAX_BURST):
            if self._skipping and not self._skip():
                break
            try:
                peer = receive_peer(_NOBLOCK)
            except zmq.Again:
                return
            frame = receive_frame(_NOBLOCK, _NO_COPY)
            one = frame.bytes
            rest = (
                self._receive_rest() if frame.more else None
            )  # the frame's own flag: the socket's option takes longer
            connection = connections.get(peer) or self._note_connection(peer, frame, now)
            decision = connection.account.count_message(now)
            if decision is not taken:
                incoming.extend(self._throttled(connection, decision))
                continue
            principal = connection.principal  # looked up for every message: ZAP checks new connections only
            if rest is not None or (principal is None and checked):
                incoming.append(self._read(peer, principal, [one, *(rest or ())]))
                continue
            try:
                message = read(one)
            except ProtocolError as error:
                incoming.append(Rejected(peer, error, principal))
            else:
                incoming.append(MessageReceived(peer, message, None, principal))
        self._poll_left_some = True

    def _receive_rest(self) -> list[bytes]:
        """The frames of a message beyond its first, at most `MAX_FRAMES`; further ones are skipped."""
        rest: list[bytes] = []
        while len(rest) < MAX_FRAMES:
            frame = self._receive_frame(_NOBLOCK, _NO_COPY)
            rest.append(frame.bytes)
            if not frame.more:
                return rest
        self._skipping = True
        return rest

    def _skip(self) -> bool:
        """Drop the rest of a message of too many frames; False if `MAX_SKIPPED` were not enough."""
        for _ in range(MAX_SKIPPED):
            if not self._receive_frame(_NOBLOCK, _NO_COPY).more:
                self._skipping = False
                return True
        return False

    def _throttled(self, connection: _Connection, decision: RateDecision) -> Iterator[Throttled]:
        """Count a message that is dropped unread; report the first one, and the one that cuts its agent off."""
        agent = connection.principal.name if connection.principal else AgentId("?")
        self.throttled[agent] += 1
        if decision is RateDecision.SLOWED:
            yield Throttled(agent, f"says more than {RATE:.0f} messages a second: what is above is dropped")
        elif decision is RateDecision.CUT:
            yield Throttled(agent, f"goes on flooding: not listened to before it was quiet for {CUT_OFF_S:.0f} s")

    def _note_connection(self, peer: Peer, frame: zmq.Frame, now: float) -> _Connection:
        """Remember the key of a connection, from its first message. Without keys each connection has an account."""
        if len(self._connections) >= MAX_CONNECTIONS or self._rate_limiter.full:
            self._connections.clear()
            self._rate_limiter.forget(now)
        key = peer.hex() if self._keys is None else str(frame.get("User-Id"))
        return self._connections.setdefault(
            peer, _Connection(key, self._rate_limiter.account(key), self._trusted.get(key))
        )

    def _follow_trust(self) -> list[TrustRevoked]:
        if self._keys is None:
            return []
        trusted = self._keys.trust.principals()
        if trusted is self._trusted:
            return []
        before, self._trusted = self._trusted, trusted
        for connection in self._connections.values():
            connection.principal = trusted.get(connection.key)
        reason = self._keys.trust.problem or "it was taken off the allow-list, or its entry there was changed"
        lost = [each for key, each in before.items() if trusted.get(key) != each]
        return [TrustRevoked(each.name, reason) for each in lost]

    def _connection_changes(self) -> list[ConnectionRejected]:
        """Read the monitor, a few times a second: count connections and return the rejected ones."""
        found: list[ConnectionRejected] = []
        now = time.monotonic()
        if now < self._monitor_at:
            return found
        self._monitor_at = now + LOOK_S
        for frames in burst(self._monitor):
            number, value = struct.unpack("=Hi", frames[0].bytes)
            if event := _CONNECTION_EVENTS.get(number):
                self.connections[event] += 1
            else:
                self.connections["refused"] += 1
                found.append(ConnectionRejected(explain_handshake(number, value)))
        return found

    def refused(self) -> tuple[str, ...]:
        """Keys that were refused lately, each with what to do about it. From any thread; reads files."""
        return self._key_check.refused() if self._key_check else ()

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> SendOutcome:
        """Send without blocking."""
        frames = self._encode(message, blob)
        queue = self._queues.get(peer)
        if queue is None:
            outcome = self._offer(peer, frames)
            if outcome is not SendOutcome.QUEUED:
                return outcome
            queue = self._queues[peer] = _Queue()
        if not queue.add(frames):
            self.forget(peer)
            return SendOutcome.GONE
        return SendOutcome.QUEUED

    def send_to_all(self, peers: Sequence[Peer], message: ToAgent) -> Sequence[Peer]:
        """Send to each of `peers` without blocking. Returns the peers with `SendOutcome.GONE`.

        The message is encoded once. The loop calls no function of ours, which keeps libzmq's thread awake.
        """
        (frame,) = self._encode(message, None)
        queues, send, gone = self._queues, self._send_frame, list[Peer]()
        for peer in peers:
            if peer not in queues:
                try:
                    send(peer, _MORE)
                    send(frame, _NOBLOCK)
                except zmq.ZMQError:  # slow or gone: `send` below finds out which
                    pass
                else:
                    continue
            if self.send(peer, message) is SendOutcome.GONE:
                gone.append(peer)
        return gone

    @property
    def closed(self) -> int:
        """Number of connections that have ended."""
        return self.connections["closed"]

    def forget(self, peer: Peer) -> None:
        """Drop what is queued for `peer`."""
        self._queues.pop(peer, None)
        self._connections.pop(peer, None)

    def wake(self) -> None:
        """End the running `poll`, or the next one."""
        self._waker.set()

    def close(self) -> None:
        """Release the sockets; within a second."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._router.close(linger=0)
        self._monitor.close(linger=0)
        self._context.term()
        self._waker.close()

    def _encode(self, message: ToAgent, blob: bytes | None) -> codec.Frames:
        """Frames of `message`; cached for a message that goes to several peers in a row."""
        if message is not self._encoded[0] or blob is not None:
            self._encoded = (message, codec.pack(codec.TO_AGENT.encode(message, blob)))
        return self._encoded[1]

    def _read(self, peer: Peer, principal: Principal | None, frames: codec.Frames) -> MessageReceived | Rejected:
        if principal is None and self._keys is not None:
            return Rejected(peer, UntrustedKey(fingerprint(self._connections[peer].key)))
        try:
            message, blob = codec.TO_COORDINATOR.read(frames)
        except ProtocolError as error:
            return Rejected(peer, error, principal)
        return MessageReceived(peer, message, blob, principal)

    def _offer(self, peer: Peer, frames: codec.Frames) -> SendOutcome:
        try:
            self._send_frame(peer, _MORE)  # if this frame can be sent, so can the rest
            for frame in frames[:-1]:
                self._send_frame(frame, _MORE)
            self._send_frame(frames[-1], _NOBLOCK)
        except zmq.Again:
            return SendOutcome.QUEUED
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendOutcome.GONE
        return SendOutcome.SENT

    def _flush(self) -> None:
        for peer, queue in list(self._queues.items()):
            outcome = SendOutcome.SENT
            while queue and outcome is SendOutcome.SENT:
                outcome = self._offer(peer, queue.first)
                if outcome is SendOutcome.SENT:
                    queue.drop_first()
            if not queue or outcome is SendOutcome.GONE:
                del self._queues[peer]


@dataclass(slots=True)
class _Connection:
    """The key of a connection."""

    key: str
    account: Account
    """Rate account of the key, shared by all its connections."""
    principal: Principal | None
    """Present owner of the key by the allow-list; None if it is not trusted."""


class _Queue:
    """Messages for one peer, bounded in number and bytes."""

    def __init__(self) -> None:
        self._messages: deque[codec.Frames] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, frames: codec.Frames) -> bool:
        """Queue a message; False if there is no room."""
        nbytes = self._nbytes + sum(map(len, frames))
        if len(self._messages) >= QUEUE_LIMIT or nbytes > QUEUE_BYTES:
            return False
        self._messages.append(frames)
        self._nbytes = nbytes
        return True

    @property
    def first(self) -> codec.Frames:
        """The oldest message."""
        return self._messages[0]

    def drop_first(self) -> None:
        """Remove the oldest message, which was sent."""
        self._nbytes -= sum(map(len, self._messages.popleft()))


class _KeyCheck:
    """Tells the authenticator's thread whether a key is trusted. Must not raise: the thread would die."""

    def __init__(self, trust: AllowList) -> None:
        self._trust = trust
        self._refused: dict[str, float] = {}
        """Keys that were refused lately, and when, the last one at the end; at most `MAX_REFUSED`."""

    def callback(self, domain: str, key: bytes) -> bool:
        name = key.decode("ascii", "replace")
        trusted = domain == ZAP_DOMAIN and name in self._trust.principals(fresh=True)
        self._refused.pop(name, None)
        if not trusted:
            self._refused[name] = time.monotonic()
            for old in list(self._refused)[:-MAX_REFUSED]:
                self._refused.pop(old, None)
        return trusted

    def refused(self) -> tuple[str, ...]:
        """What to do about the keys that were refused within `REFUSED_S`."""
        now = time.monotonic()
        keys = [key for key, at in tuple(self._refused.items()) if now - at <= REFUSED_S]
        return tuple(f"a connection was refused: {self.explain(key)}" for key in keys)

    def explain(self, key: str) -> str:
        """The key by its fingerprint and, by the files beside the allow-list, its name; the command that trusts it."""
        known: dict[str, str] = {}
        for path in (self._trust.path.parent / AGENT_KEYS_FOLDER).glob("*.pub"):
            with contextlib.suppress(WeightbusError):
                known[read_public_key(path)] = path.stem
        name = known.get(key, "")
        shown = fingerprint(key)
        found = f"{name!r}, whose key has the fingerprint {shown}," if name else f"the key of fingerprint {shown}"
        where = "" if name else " once its NAME.pub is in the folder of agents' keys"
        return (
            f"{found} is not trusted: run `weightbus trust add {name or 'NAME'} --role ROLE"
            f" --channels CHANNEL` here{where}"
        )


def check_bind(bind: str, keys: ServerKeys | None) -> str:
    """`bind` as ZeroMQ writes it. Raises `ConfigurationError` if it is no IP address, or needs keys."""
    try:
        address = ipaddress.ip_address(bind)
    except ValueError as problem:
        raise ConfigurationError(f"bind = {bind!r} is not an IP address") from problem
    if keys is None and not address.is_loopback:
        raise ConfigurationError(
            f"bind = {bind}: without keys the bus may only listen on the loopback, because anyone who reaches it could"
            " publish weights. Make keys with `weightbus keygen` and leave out --insecure-loopback, or bind 127.0.0.1"
        )
    return f"[{address}]" if address.version == 6 else str(address)


def _bind(each: zmq.Socket[bytes], host: str, port: int) -> int:
    try:
        each.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        advice = "choose another router_port, or stop what listens there"
        if error.errno == errno.EADDRNOTAVAIL:
            advice = "that is no address of this machine: give --bind one that is, or 0.0.0.0 for all of them"
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}; {advice}") from error
    return int(each.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


HEARTBEAT_MS: Final = 10_000
"""Interval of ZMTP's own heartbeats, and the longest wait for their answer: longer than two thousand simultaneous
handshakes keep the coordinator's I/O thread busy."""
FAREWELL_MS: Final = 200
"""How long a closing agent waits for its last message to leave."""


_LINK_EVENTS: Final = (
    _FAILED_HANDSHAKES | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED
)


class LinkProblem(enum.Enum):
    """Why an agent's connection is not established, as its socket tells."""

    UNTRUSTED = "untrusted"
    """The coordinator refused the agent's key."""
    OTHER_KEY = "other key"
    """The handshake broke off: another coordinator key than the agent was given, or no coordinator."""
    NOT_LISTENING = "not listening"
    """Nothing listens at the endpoint."""


class DealerLink:
    """An agent's socket. Implements `interface.AgentLink`."""

    def __init__(self, endpoint: str, curve: CurveFiles | None = None) -> None:
        """Reads the keys; connects only when `open` is called. `endpoint` may be several, comma-separated."""
        check_library()
        self._endpoints = split_endpoints(endpoint)
        for each in self._endpoints:
            _check_endpoint(each, curve)
        self._coordinator_key = read_public_key(curve.coordinator) if curve else ""
        secret = read_secret_key(curve.secret) if curve else ""
        self._pair = KeyPair(public_of(secret), secret) if curve else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker = Waker()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._opened = 0
        self.problem: LinkProblem | None = None
        """Why there is no connection, by its last events; None while there is one, or nothing is known."""

    @property
    def coordinator_key(self) -> str:
        """Public key of the coordinator that this agent was given; empty without keys."""
        return self._coordinator_key

    def open(self, endpoint_index: int = 0) -> None:
        """Drop the connection and begin a new one, to the endpoint of that index. Does not block."""
        self._drop(linger_ms=0)
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket = dealer
        set_common(dealer)
        _set_connecting(dealer, self._pair, self._coordinator_key)
        dealer.set(zmq.IMMEDIATE, 1)
        dealer.set(zmq.MAXMSGSIZE, codec.MAX_ANSWER_BYTES)
        self._opened += 1
        dealer.monitor(where := f"inproc://link-{self._opened}", _LINK_EVENTS)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.set(zmq.LINGER, 0)
        self._monitor.connect(where)
        _connect(dealer, self._endpoints[endpoint_index])

    def poll(self, timeout_s: float) -> Sequence[tuple[ToAgent, bytes | None] | ProtocolError]:
        """Return messages as soon as there are any, or nothing after `timeout_s` or `wake`."""
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
        poller.poll(max(0, round(timeout_s * 1000)))
        self._waker.clear()
        if self._monitor is not None:
            for frames in burst(self._monitor):
                self._note(struct.unpack("=Hi", frames[0].bytes)[0])
        return [] if self._socket is None else [_read_answer(parts) for parts in burst(self._socket)]

    def send(self, message: ToCoordinator, blob: bytes | None = None) -> bool:
        """Send without blocking; False if not connected, or if too many messages are under way."""
        frames = codec.pack(codec.TO_COORDINATOR.encode(message, blob))
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        """End the running `poll`, or the next one."""
        self._waker.set()

    def close(self) -> None:
        """Drop the connection, after a moment for the last message to leave."""
        self._drop(FAREWELL_MS)
        self._context.term()
        self._waker.close()

    def _note(self, event: int) -> None:
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.problem = None
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.problem = LinkProblem.UNTRUSTED
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                if self.problem is not LinkProblem.UNTRUSTED:
                    self.problem = LinkProblem.OTHER_KEY
            case zmq.EVENT_CONNECT_RETRIED:
                self.problem = self.problem or LinkProblem.NOT_LISTENING
            case zmq.EVENT_CONNECTED:
                self.problem = None if self.problem is LinkProblem.NOT_LISTENING else self.problem
            case _:
                pass

    def _drop(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
            self._socket = None
        if self._monitor is not None:
            self._monitor.close(linger=0)
            self._monitor = None


def _set_connecting(each: zmq.Socket[bytes], pair: KeyPair | None, coordinator_key: str) -> None:
    each.set(zmq.CONNECT_TIMEOUT, 1000)
    each.set(zmq.RECONNECT_IVL, 100)
    each.set(zmq.RECONNECT_IVL_MAX, 2000)
    each.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    each.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_MS)
    if pair is not None:
        each.set(zmq.CURVE_PUBLICKEY, pair.public.encode("ascii"))
        each.set(zmq.CURVE_SECRETKEY, pair.secret.encode("ascii"))
        each.set(zmq.CURVE_SERVERKEY, coordinator_key.encode("ascii"))


def _connect(each: zmq.Socket[bytes], endpoint: str) -> None:
    if not endpoint.startswith("tcp://"):
        raise ConfigurationError(f"{endpoint!r} is not an endpoint; write tcp://host:port")
    try:
        each.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigurationError(f"{endpoint!r} is not an endpoint ({error}); write tcp://host:port") from error


def _check_endpoint(endpoint: str, curve: CurveFiles | None) -> None:
    """Without keys, refuse an endpoint on another machine: a stranger there could make engines load any weights."""
    host = urlsplit(endpoint).hostname or ""
    if curve is not None or not endpoint.startswith("tcp://") or _is_loopback(host):
        return  # what is no TCP endpoint is refused when it is connected to
    raise ConfigurationError(
        f"coordinator = {endpoint}: without keys an agent speaks over the loopback only, which {host!r} is not. Make"
        " keys with `weightbus keygen` and name their folder with --keys, or connect to tcp://127.0.0.1:PORT"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_answer(parts: list[zmq.Frame]) -> tuple[ToAgent, bytes | None] | ProtocolError:
    try:
        return codec.TO_AGENT.decode(codec.unpack([part.bytes for part in parts]))
    except ProtocolError as error:
        return error
