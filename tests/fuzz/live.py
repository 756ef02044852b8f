"""Attacks a coordinator that runs, over its CURVE sockets, while an honest agent asks for its status. `make fuzz-live`.

Strangers without keys, with keys nobody trusts, with half a handshake or another protocol; an agent with a good key
that sends garbage, too much in a frame, too many frames, or simply too much. The coordinator must answer the honest
agent all the while, count every refusal, and end when it is told to. The last line is the tally.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import zmq
from prometheus_client import CollectorRegistry

from weightbus.control.bus.client import BusClient, BusSettings
from weightbus.control.bus.sockets import new_keypair, public_of
from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
from weightbus.control.protocol import codec
from weightbus.control.protocol.errors import ProtocolError
from weightbus.control.protocol.messages import AgentId, Channel, Heartbeat, Hello, Incarnation, RequestId, Role
from weightbus.control.security.keys import CurveFiles, read_public_key, read_secret_key
from weightbus.control.server.coordinator_process import CoordinatorProcess
from weightbus.control.server.settings import CoordinatorSettings

from ..control.protocol.test_codec import TO_COORDINATOR
from .mutations import Frames, Mutator

CHANNEL: Final = Channel("policy")
NAMES: Final = ("honest", "hostile")
DEADLINE_S: Final = 60.0
GREETING: Final = b"\xff" + b"\x00" * 8 + b"\x7f" + b"\x03\x01"


class Findings(msgspec.Struct):
    """What the attacks came to."""

    garbage: int = 0
    """Frames that no decoder takes, sent with a good key."""
    refused: int = 0
    """Refusals that the coordinator counted."""
    flood: int = 0
    """Messages of the flood that had to be counted: all, or none where it cost the connection."""
    connections: int = 0
    """Connections that strangers made."""
    turned_away: int = 0
    """Connections that the coordinator counted as accepted, and never as established."""
    pings: int = 0
    slowest_ping_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"garbage={self.garbage} flood={self.flood} refused={self.refused} connections={self.connections}"
            f" turned_away={self.turned_away} pings={self.pings} slowest_ping_s={self.slowest_ping_s:.3f}"
        )


class Target:
    """A coordinator with keys, on a thread; and an honest agent that pings it."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        make_deployment_keys(self.keys, [AgentKeys(AgentId(name), Role.OBSERVER, (CHANNEL,)) for name in NAMES])
        settings = CoordinatorSettings(keys=self.keys, router_port=0, http_port=0, journal=folder / "journal.sqlite")
        self.service = CoordinatorProcess(settings)
        self.port = self.service.router_port
        self.findings = Findings()
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()
        self._over = threading.Event()
        self._pinger = threading.Thread(target=self._ping)
        self._pinger.start()
        self._problem: BaseException | None = None

    def close(self) -> None:
        """End both, and raise what went wrong with either."""
        self._over.set()
        self._pinger.join(DEADLINE_S)
        self.service.stop()
        self._thread.join(DEADLINE_S)
        if self._problem is not None:
            raise self._problem
        assert not self._pinger.is_alive(), "the honest agent waits for ever"
        assert not self._thread.is_alive(), "the coordinator does not end"

    def metric(self, name: str, **labels: str) -> float:
        """A sample as a scrape shows it: gauges and connections are brought up to date by being asked for."""
        urllib.request.urlopen(f"http://127.0.0.1:{self.service.http.port}/metrics", timeout=DEADLINE_S).close()
        registry: CollectorRegistry = self.service.registry
        return registry.get_sample_value(f"weightbus_{name}", labels or None) or 0.0

    @property
    def refused(self) -> int:
        registry: CollectorRegistry = self.service.registry
        samples = [s for family in registry.collect() for s in family.samples]
        dropped = self.service.server._bus.throttled.total()  # type: ignore[attr-defined]  # it is a RouterBus
        return dropped + int(sum(s.value for s in samples if s.name == "weightbus_messages_refused_total"))

    def wait_for(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not what():
            if self._problem is not None:
                raise self._problem
            assert time.monotonic() < until, f"it never came to that: {self.findings}, refused {self.refused}"
            time.sleep(0.02)

    def _ping(self) -> None:
        settings = BusSettings(endpoint=f"tcp://127.0.0.1:{self.port}", curve=CurveFiles.of(self.keys, "honest"))
        try:
            with BusClient(settings, lambda: hello_of("honest")) as client:
                client.start(DEADLINE_S)
                while not self._over.is_set():
                    begun = time.monotonic()
                    client.status(DEADLINE_S)
                    self.findings.pings += 1
                    self.findings.slowest_ping_s = max(self.findings.slowest_ping_s, time.monotonic() - begun)
                    self._over.wait(0.01)
        except BaseException as error:  # noqa: BLE001  told to whoever closes this
            self._problem = error


def hello_of(name: str) -> Hello:
    return Hello(
        request=RequestId("h"),
        agent=AgentId(name),
        role=Role.OBSERVER,
        channel=CHANNEL,
        incarnation=Incarnation(f"{name}-1"),
    )


def strangers(target: Target, count: int, random: Random) -> None:
    """Connections that do not get as far as a message, in every way a handshake can fail."""
    openings = (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        GREETING,
        GREETING[:5],
        GREETING + b"NULL".ljust(20, b"\0") + b"\0" * 32,
        GREETING + b"PLAIN".ljust(20, b"\0") + b"\0" * 32 + b"\x04\x20\x05HELLO\x01a\x01b",
        GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32,
        GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32 + b"\x04\xc8\x05HELLO" + random.randbytes(194),
        GREETING + b"CURVE".ljust(20, b"\0") + b"\0" * 32 + b"\x06" + b"\xff" * 8,
        random.randbytes(200),
    )
    with contextlib.ExitStack() as stack:
        for index in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", target.port)))
            with contextlib.suppress(ConnectionError):  # thrown out already
                connection.sendall(openings[index % len(openings)])
            target.findings.connections += 1
        target.wait_for(lambda: target.metric("connections_total", event="accepted") >= count)


def unknown_keys(target: Target, count: int) -> None:
    """Complete handshakes with keys that nobody trusts."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.closing(_Sockets(context)) as sockets:
        before = target.refused
        for _ in range(count):
            pair = new_keypair()
            sockets.dealer(target, pair.public, pair.secret).send(b"x", zmq.NOBLOCK)
            target.findings.connections += 1
        target.wait_for(lambda: target.refused >= before + count)


def garbage(target: Target, count: int, seed: int) -> None:
    """Frames of every wrong kind over a connection with a good key; each that is no message is counted."""
    mutator = Mutator([codec.TO_COORDINATOR.encode(message, blob) for message, blob in TO_COORDINATOR], seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.closing(_Sockets(context)) as sockets:
        dealer = sockets.trusted(target)
        before = target.refused
        for _ in range(count):
            frames = mutator.next() or [b""]
            if max(map(len, frames)) > codec.MAX_FRAME_BYTES:
                continue  # would cost the connection, and what is under way on it: see `too_much`
            if len(frames) > 1:
                frames = codec.pack(frames)
            dealer.send_multipart(frames)
            target.findings.garbage += not _is_message(frames)
            with contextlib.suppress(zmq.Again):
                while True:
                    dealer.recv_multipart(zmq.NOBLOCK)
        target.wait_for(lambda: target.refused >= before + target.findings.garbage)


def too_much(target: Target, floods: int) -> None:
    """Frames above the limit, which cost the connection; a message of a thousand frames; and a flood of good ones."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.closing(_Sockets(context)) as sockets:
        closed = target.metric("connections_total", event="closed")
        sockets.trusted(target).send(b"x" * (codec.MAX_FRAME_BYTES + 1))
        target.wait_for(lambda: target.metric("connections_total", event="closed") > closed)
        dealer = sockets.trusted(target)
        before = target.refused
        dealer.send_multipart([b"x"] * 1000)
        target.wait_for(lambda: target.refused > before)
        before = target.refused
        beat = codec.pack(codec.TO_COORDINATOR.encode(Heartbeat(seq=1)))
        closed = target.metric("connections_total", event="closed")
        for _ in range(floods):  # nobody reads the answers: they pile up, and are dropped at their limit
            dealer.send_multipart(beat)

        def cut_off() -> bool:
            """A peer that reads nothing for seconds is; its last messages are lost with the connection."""
            return target.metric("connections_total", event="closed") > closed

        target.wait_for(lambda: target.refused >= before + floods or cut_off())
        target.findings.flood = 0 if cut_off() else floods


class _Sockets:
    """DEALERs that are closed together."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._open: list[zmq.Socket[bytes]] = []

    def dealer(self, target: Target, public: str, secret: str) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        self._open.append(dealer)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.CURVE_PUBLICKEY, public.encode())
        dealer.set(zmq.CURVE_SECRETKEY, secret.encode())
        dealer.set(zmq.CURVE_SERVERKEY, read_public_key(target.keys / "coordinator.pub").encode())
        dealer.connect(f"tcp://127.0.0.1:{target.port}")
        return dealer

    def trusted(self, target: Target) -> zmq.Socket[bytes]:
        secret = read_secret_key(target.keys / "agents/hostile.key")
        return self.dealer(target, public_of(secret), secret)

    def close(self) -> None:
        for each in self._open:
            each.close()
        self._context.term()


def _is_message(frames: Frames) -> bool:
    try:
        codec.TO_COORDINATOR.decode(codec.unpack(frames))
    except ProtocolError:
        return False
    return True


def campaign(inputs: int, seed: int = 1) -> Findings:
    """All attacks at once, on a coordinator of their own. `inputs` is how many frames of garbage are sent."""
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        problems: list[BaseException] = []

        def attack(what: Callable[[], None]) -> None:
            try:
                what()
            except BaseException as error:  # noqa: BLE001  raised below
                problems.append(error)

        attacks = (
            lambda: strangers(target, 200, Random(seed)),
            lambda: unknown_keys(target, 50),
            lambda: garbage(target, inputs, seed),
        )
        threads = [threading.Thread(target=attack, args=(each,)) for each in attacks]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            attack(lambda: too_much(target, inputs // 2))
            connections = {e: target.metric("connections_total", event=e) for e in ("accepted", "established")}
            target.findings.turned_away = int(connections["accepted"] - connections["established"])
            target.findings.refused = target.refused
        finally:
            target.close()
        if problems:
            raise problems[0]
        return target.findings


def main() -> int:
    """Run the attacks and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(campaign(given.inputs, given.seed))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
