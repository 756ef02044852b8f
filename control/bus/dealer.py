"""The agent's ZeroMQ socket, a DEALER. router.py explains its options."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import zmq

from ..protocol import ConfigurationError, ProtocolError, ToAgent, ToCoordinator, codec
from ..security import CurveFiles, KeyPair, read_public_key, read_secret_key
from .session import split_endpoints
from .sockets import Waker, burst, check_library, public_of, set_common

HEARTBEAT_MS: Final = 10_000
"""Interval of ZMTP's own heartbeats, and the longest wait for their answer: longer than two thousand simultaneous
handshakes keep the coordinator's I/O thread busy."""
FAREWELL_MS: Final = 200
"""How long a closing agent waits for its last message to leave."""


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

    def open(self, endpoint_index: int = 0) -> None:
        """Drop the connection and begin a new one, to the endpoint of that index. Does not block."""
        self._drop(linger_ms=0)
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket = dealer
        set_common(dealer)
        _set_connecting(dealer, self._pair, self._coordinator_key)
        dealer.set(zmq.IMMEDIATE, 1)
        dealer.set(zmq.MAXMSGSIZE, codec.MAX_ANSWER_BYTES)
        _connect(dealer, self._endpoints[endpoint_index])

    def poll(self, timeout_s: float) -> Sequence[tuple[ToAgent, bytes | None] | ProtocolError]:
        """Return messages as soon as there are any, or nothing after `timeout_s` or `wake`."""
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
        poller.poll(max(0, round(timeout_s * 1000)))
        self._waker.clear()
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

    def _drop(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._socket.close(linger=linger_ms)
            self._socket = None


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
