"""The coordinator's ZeroMQ sockets. Carries messages; decides nothing about them.

The coordinator binds a ROUTER; an agent connects a DEALER (dealer.py). Every socket belongs to one thread. Only these
two modules and sockets.py import zmq. Each option was chosen against a failure seen with libzmq 4.3.5:

- no routing id is set: the ROUTER names each connection anew, so an agent cannot take another's name by asking for it,
  and a peer that reconnects is not ignored as a duplicate of itself;
- ROUTER_MANDATORY with non-blocking sends: a peer that is gone or slow is an answer (`Delivery`), not a silent drop,
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
"""

from __future__ import annotations

import errno
import ipaddress
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.backend import Socket

from ..machine import MessageReceived, Peer, Principal
from ..protocol import AgentId, ConfigurationError, Malformed, ProtocolError, ToAgent, WeightbusError, codec
from ..security import (
    ALLOW_LIST_FILE,
    COORDINATOR_KEYS,
    RELOAD_S,
    AllowList,
    KeyPair,
    check_public_key,
    read_allow_list,
    read_secret_key,
)
from .interface import ConnectionRejected, Delivery, Incoming, Rejected, Throttled, TrustRevoked
from .rate_limit import CUT_OFF_S, RATE, Account, RateDecision, RateLimiter
from .sockets import MAX_BURST, Waker, burst, check_library, explain_handshake, public_of, set_common

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
            self._authenticator.configure_curve_callback(ZAP_DOMAIN, _KeyCheck(self._keys.trust))

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

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> Delivery:
        """Send without blocking."""
        frames = self._encode(message, blob)
        queue = self._queues.get(peer)
        if queue is None:
            outcome = self._offer(peer, frames)
            if outcome is not Delivery.QUEUED:
                return outcome
            queue = self._queues[peer] = _Queue()
        if not queue.add(frames):
            self.forget(peer)
            return Delivery.GONE
        return Delivery.QUEUED

    def send_to_all(self, peers: Sequence[Peer], message: ToAgent) -> Sequence[Peer]:
        """Send to each of `peers` without blocking. Returns the peers with `Delivery.GONE`.

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
            if self.send(peer, message) is Delivery.GONE:
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
            return Rejected(peer, Malformed("this connection's key is not trusted any more"))
        try:
            message, blob = codec.TO_COORDINATOR.read(frames)
        except ProtocolError as error:
            return Rejected(peer, error, principal)
        return MessageReceived(peer, message, blob, principal)

    def _offer(self, peer: Peer, frames: codec.Frames) -> Delivery:
        try:
            self._send_frame(peer, _MORE)  # if this frame can be sent, so can the rest
            for frame in frames[:-1]:
                self._send_frame(frame, _MORE)
            self._send_frame(frames[-1], _NOBLOCK)
        except zmq.Again:
            return Delivery.QUEUED
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        return Delivery.SENT

    def _flush(self) -> None:
        for peer, queue in list(self._queues.items()):
            outcome = Delivery.SENT
            while queue and outcome is Delivery.SENT:
                outcome = self._offer(peer, queue.first)
                if outcome is Delivery.SENT:
                    queue.drop_first()
            if not queue or outcome is Delivery.GONE:
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

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == ZAP_DOMAIN and key.decode("ascii", "replace") in self._trust.principals(fresh=True)


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
