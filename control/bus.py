"""The ZeroMQ sockets: the only file that knows zmq. Carries messages; decides nothing about them.

The coordinator binds a ROUTER (commands) and a PUB (hints, lossy); an agent connects a DEALER. Every socket belongs to
one thread. The options and their numbers were each chosen against a failure seen with libzmq 4.3.5:

- no routing id is ever set: the ROUTER names each connection anew, so nobody can take another's name by asking for it,
  and a peer that reconnects is not ignored as a duplicate of itself;
- ROUTER_MANDATORY with non-blocking sends: a peer that is gone or slow is an answer (`Delivery`), not a silent drop,
  and cannot hold up the others;
- ZMTP heartbeats find half-open connections; they prove only that the peer's I/O thread lives, so agents send theirs;
- IMMEDIATE at the agent: nothing is queued for a connection that does not stand, to arrive long after it was meant;
- HANDSHAKE_IVL before bind: connections that never finish their handshake do not collect;
- CURVE with ZAP_DOMAIN and ZAP_ENFORCE_DOMAIN: when the authenticator's thread is gone, strangers are refused. Without
  both they would be let in.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from . import codec
from .errors import ConfigurationError, Malformed, ProtocolError, WeightbusError
from .events import Peer
from .keys import AGENTS, COORDINATOR, AllowList, CurveFiles, KeyPair, read_public, read_secret
from .links import Delivery, Received, Rejected
from .messages import Hint, ToAgent, ToCoordinator

ZAP_DOMAIN: Final = "weightbus"
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: the arithmetic of enums would cost more than the call."""
HWM: Final = 1000
QUEUE_LIMIT: Final = 1000
"""Messages kept for a peer that does not take them; with one more it counts as gone."""
MAX_BURST: Final = 256
"""Messages taken per poll, so that a flood cannot keep timers from running."""
FLUSH_S: Final = 0.05
"""How often queued messages are offered again to a slow peer."""
FAREWELL_MS: Final = 200
"""How long a closing agent waits for its last message to leave."""


@dataclass(frozen=True)
class ServerKeys:
    """The coordinator's keys, and who may connect."""

    pair: KeyPair
    allow: AllowList

    @classmethod
    def read(cls, folder: Path) -> ServerKeys:
        """From a folder that ``weightbus keygen`` made."""
        secret = read_secret(folder / f"{COORDINATOR}.key")
        return cls(KeyPair(public_of(secret), secret), AllowList(folder / AGENTS))


def new_keypair() -> KeyPair:
    """A new CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def public_of(secret: str) -> str:
    """The public half of a secret key."""
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")


def libzmq_version() -> str:
    """Of the library that is loaded, and whether it can encrypt."""
    return f"{zmq.zmq_version()} ({'with' if zmq.has('curve') else 'WITHOUT'} CURVE)"


def check_library() -> None:
    """Refuse a libzmq with known holes, or one that cannot encrypt."""
    if zmq.zmq_version_info() < (4, 3, 5):
        raise ConfigurationError(f"libzmq {zmq.zmq_version()} has known holes, 4.3.5 is needed: upgrade pyzmq")
    if not zmq.has("curve"):
        raise ConfigurationError("this libzmq was built without CURVE: install pyzmq from its own wheels")


class RouterBus:
    """The coordinator's sockets. `links.CoordinatorBus` says what the calls mean."""

    def __init__(self, bind: str, router_port: int, pub_port: int, keys: ServerKeys | None = None) -> None:
        """Binds at once. Port 0 takes a free one: see `router_port` and `pub_port`."""
        check_library()
        host = _host(bind, keys)
        self._keys = keys
        self._queues: dict[Peer, deque[codec.Frames]] = {}
        self._encoded: tuple[ToAgent | None, codec.Frames] = (None, [])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._waker = _Waker()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._pub: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        try:
            self._secure()
            self.router_port = _bind(self._router, host, router_port, "router_port")
            self.pub_port = _bind(self._pub, host, pub_port, "pub_port")
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._waker.fileno(), zmq.POLLIN)

    def _secure(self) -> None:
        for each in (self._router, self._pub):
            _set_common(each)
            each.set(zmq.HANDSHAKE_IVL, 2000)
            each.set(zmq.BACKLOG, 4096)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        if self._keys is None:
            return
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, _Doorman(self._keys.allow))
        for each in (self._router, self._pub):
            each.set(zmq.CURVE_SERVER, 1)
            each.set(zmq.CURVE_SECRETKEY, self._keys.pair.secret.encode("ascii"))
            each.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode("ascii"))
            each.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def poll(self, timeout_s: float) -> Sequence[Received | Rejected]:
        """What came in, at once if anything did; nothing after `timeout_s` or `wake`."""
        if self._authenticator is not None and not self._authenticator.is_alive():
            raise WeightbusError("the thread that authenticates agents died: nobody new can connect; start again")
        self._flush()
        wait_s = min(timeout_s, FLUSH_S) if self._queues else timeout_s
        if any(ready == self._waker.fileno() for ready, _ in self._poller.poll(max(0, round(wait_s * 1000)))):
            self._waker.clear()
        return [self._read(frames) for frames in _burst(self._router)]

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> Delivery:
        """Send without ever waiting."""
        frames = self._encode(message, blob)
        queue = self._queues.get(peer)
        if queue is None:
            outcome = self._offer(peer, frames)
            if outcome is not Delivery.QUEUED:
                return outcome
            queue = self._queues[peer] = deque()
        if len(queue) >= QUEUE_LIMIT:
            self.forget(peer)
            return Delivery.GONE
        queue.append(frames)
        return Delivery.QUEUED

    def forget(self, peer: Peer) -> None:
        """Drop what is queued for `peer`."""
        self._queues.pop(peer, None)

    def hint(self, hint: Hint) -> None:
        """Tell whoever listens; nobody may."""
        with contextlib.suppress(zmq.Again):  # hints are lossy by contract
            self._pub.send_multipart(codec.HINT.encode(hint), zmq.NOBLOCK)

    def wake(self) -> None:
        """End the running `poll`, or the next one."""
        self._waker.set()

    def close(self) -> None:
        """Release the sockets; within a second."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()
        self._waker.close()

    def _encode(self, message: ToAgent, blob: bytes | None) -> codec.Frames:
        """Frames of `message`; of one that goes to many, one after the other, only once."""
        if message is not self._encoded[0] or blob is not None:
            self._encoded = (message, codec.TO_AGENT.encode(message, blob))
        return self._encoded[1]

    def _read(self, parts: list[zmq.Frame]) -> Received | Rejected:
        peer = Peer(parts[0].bytes)
        principal = ""
        try:
            if self._keys is not None:
                principal = self._principal(parts[-1], self._keys.allow)
            message, blob = codec.TO_COORDINATOR.decode([part.bytes for part in parts[1:]])
        except ProtocolError as error:
            return Rejected(peer, error, principal)
        return Received(peer, message, blob, principal)

    @staticmethod
    def _principal(frame: zmq.Frame, allow: AllowList) -> str:
        """The agent behind the connection's key. Asked for every message: ZAP only ever looks at new connections."""
        name = allow.agent_of(str(frame.get("User-Id")))
        if name is None:
            raise Malformed("this connection's key is not allowed any more")
        return name

    def _offer(self, peer: Peer, frames: codec.Frames) -> Delivery:
        try:
            self._router.send(peer, _MORE)  # whether the rest can go is decided here
            for frame in frames[:-1]:
                self._router.send(frame, _MORE)
            self._router.send(frames[-1], _NOBLOCK)
        except zmq.Again:
            return Delivery.QUEUED
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        return Delivery.SENT

    def _flush(self) -> None:
        for peer, queue in list(self._queues.items()):
            while queue:
                outcome = self._offer(peer, queue[0])
                if outcome is Delivery.QUEUED:
                    break
                if outcome is Delivery.GONE:
                    queue.clear()
                    break
                queue.popleft()
            if not queue:
                del self._queues[peer]


class DealerLink:
    """An agent's socket. `links.AgentLink` says what the calls mean."""

    def __init__(self, endpoint: str, curve: CurveFiles | None = None) -> None:
        """Reads the keys; connects only when `open` is called."""
        check_library()
        self._endpoint = endpoint
        self._coordinator_key = read_public(curve.coordinator) if curve else ""
        secret = read_secret(curve.secret) if curve else ""
        self._pair = KeyPair(public_of(secret), secret) if curve else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker = _Waker()
        self._socket: zmq.Socket[bytes] | None = None

    def open(self) -> None:
        """Connect anew, dropping the connection there was. Does not wait for it to stand."""
        self._drop(linger_ms=0)
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket = dealer
        _set_common(dealer)
        _set_connecting(dealer, self._pair, self._coordinator_key)
        dealer.set(zmq.IMMEDIATE, 1)
        _connect(dealer, self._endpoint)

    def poll(self, timeout_s: float) -> Sequence[tuple[ToAgent, bytes | None] | ProtocolError]:
        """What came in, at once if anything did; nothing after `timeout_s` or `wake`."""
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
        poller.poll(max(0, round(timeout_s * 1000)))
        self._waker.clear()
        return [] if self._socket is None else [_read_answer(parts) for parts in _burst(self._socket)]

    def send(self, message: ToCoordinator, blob: bytes | None = None) -> bool:
        """Send without waiting; False when it cannot go now (not connected, or too much is under way)."""
        frames = codec.TO_COORDINATOR.encode(message, blob)
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
        """Drop the connection; what was sent just before gets a moment to leave."""
        self._drop(FAREWELL_MS)
        self._context.term()
        self._waker.close()

    def _drop(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
            self._socket = None


class HintReader:
    """Listens to the coordinator's hints. They are lossy: what they hint at is read from the status."""

    def __init__(self, endpoint: str, curve: CurveFiles | None = None) -> None:
        check_library()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        pair = None
        if curve is not None:
            secret = read_secret(curve.secret)
            pair = KeyPair(public_of(secret), secret)
        _set_common(self._sub)
        _set_connecting(self._sub, pair, read_public(curve.coordinator) if curve else "")
        self._sub.set(zmq.SUBSCRIBE, codec.MAGIC)
        _connect(self._sub, endpoint)

    def read(self, timeout_s: float) -> Hint | None:
        """The next hint, or None after `timeout_s`. Raises `ProtocolError` for what is not one."""
        if not self._sub.poll(max(0, round(timeout_s * 1000))):
            return None
        return codec.HINT.decode(self._sub.recv_multipart(zmq.NOBLOCK))[0]

    def close(self) -> None:
        """Stop listening."""
        self._sub.close(linger=0)
        self._context.term()


class _Doorman:
    """What the authenticator's thread asks. Must not raise: that thread would die of it."""

    def __init__(self, allow: AllowList) -> None:
        self._allow = allow

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == ZAP_DOMAIN and self._allow.agent_of(key.decode("ascii", "replace"), fresh=True) is not None


class _Waker:
    """A file descriptor that a poll can wait for and any thread or signal handler can set."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is set already; closed: nobody waits any more
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._reader.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def _set_common(each: zmq.Socket[bytes]) -> None:
    each.set(zmq.LINGER, 0)
    each.set(zmq.SNDHWM, HWM)
    each.set(zmq.RCVHWM, HWM)
    each.set(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
    each.set(zmq.HEARTBEAT_IVL, 1000)
    each.set(zmq.HEARTBEAT_TIMEOUT, 3000)
    each.set(zmq.HEARTBEAT_TTL, 3000)
    each.set(zmq.IPV6, 1)


def _set_connecting(each: zmq.Socket[bytes], pair: KeyPair | None, coordinator_key: str) -> None:
    each.set(zmq.CONNECT_TIMEOUT, 1000)
    each.set(zmq.RECONNECT_IVL, 100)
    each.set(zmq.RECONNECT_IVL_MAX, 2000)
    if pair is not None:
        each.set(zmq.CURVE_PUBLICKEY, pair.public.encode("ascii"))
        each.set(zmq.CURVE_SECRETKEY, pair.secret.encode("ascii"))
        each.set(zmq.CURVE_SERVERKEY, coordinator_key.encode("ascii"))


def _connect(each: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        each.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigurationError(f"{endpoint!r} is not an endpoint ({error}); write tcp://host:port") from error


def _host(bind: str, keys: ServerKeys | None) -> str:
    try:
        address = ipaddress.ip_address(bind)
    except ValueError as problem:
        raise ConfigurationError(f"bind = {bind!r} is not an IP address") from problem
    if keys is None and not address.is_loopback:
        raise ConfigurationError(
            f"bind = {bind}: without keys the bus may only listen on the loopback, because anyone who reaches it could"
            " publish weights. Make keys with `weightbus keygen --keys keys AGENT...` and start with `--keys keys`,"
            " or bind 127.0.0.1"
        )
    return f"[{address}]" if address.version == 6 else str(address)


def _bind(each: zmq.Socket[bytes], host: str, port: int, setting: str) -> int:
    try:
        each.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        advice = f"choose another {setting}, or stop what listens there"
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}; {advice}") from error
    return int(each.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def _burst(each: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    for _ in range(MAX_BURST):
        try:
            yield each.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


def _read_answer(parts: list[zmq.Frame]) -> tuple[ToAgent, bytes | None] | ProtocolError:
    try:
        return codec.TO_AGENT.decode([part.bytes for part in parts])
    except ProtocolError as error:
        return error
