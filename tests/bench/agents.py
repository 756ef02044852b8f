"""Simulated engine agents for the bench: a thousand DEALER sockets in one process, as cheap as they can be made.

    python tests/bench/agents.py FIRST COUNT      commands on stdin, one line of JSON each; answers on stdout

They speak the real protocol to the coordinator (`ours`) and answer what the bare ROUTER sends (`bare`) with a payload
of the same size. What all are told alike is decoded once, what all say alike is encoded once: only the request's key
differs. Answers to requests that nobody waits for are only counted. Not an example of an agent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from weightbus.control import codec
from weightbus.control.ids import AgentId, Channel, Incarnation, RequestId
from weightbus.control.keys import CurveFiles, read_public, read_secret
from weightbus.control.messages import (
    PROTOCOL,
    Abort,
    Commit,
    EngineHealth,
    EngineInfo,
    Heartbeat,
    Held,
    Hello,
    Message,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Role,
    Serving,
    ToAgent,
    Transfer,
    Transferred,
    TransportKind,
    Verified,
)

CHANNEL: Final = Channel("bench")
CURVE_KEYS = tuple[bytes, bytes, bytes]
_HEADER: Final = codec.MAGIC + bytes((PROTOCOL,)) + b">"
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgspec.msgpack.Decoder(ToAgent).decode
_COUNTED: Final = frozenset({b"Ack", b"Alive", b"Welcome"})
_ANY_KEY: Final = RequestId("??????-????????")
COMMAND: Final = b"C"
"""The first byte of what the bare ROUTER wants answered; what begins otherwise acknowledges an answer."""


def name_of(number: int) -> str:
    """The agent of that number."""
    return f"engine-{number}"


class Agent:
    """One engine that does at once what it is told."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, name_of(number)
        self.held: Held | None = None
        self.keys = 0

    def hello(self) -> Hello:
        """As an engine that was just launched."""
        info = EngineInfo(
            url=f"http://{self.name}:30000",
            server_version="0.5.23",
            tp=1,
            pp=1,
            dp=1,
            device="cuda",
            host="bench",
            transports=(TransportKind.DISK,),
            held=self.held,
        )
        return Hello(
            request=self.key(),
            agent=AgentId(self.name),
            role=Role.ENGINE,
            channel=CHANNEL,
            incarnation=Incarnation("1"),
            engine=info,
        )

    def beat(self, seq: int) -> Heartbeat:
        """The heartbeat of an engine that serves."""
        return Heartbeat(seq=seq, health=EngineHealth.CLEAN, held=self.held)

    def hear(self, told: Message) -> None:
        """Take note of a command."""
        if isinstance(told, Transfer):
            self.held = Held(version=told.version, manifest=told.manifest, table=told.table)

    def key(self) -> RequestId:
        """A request key of its own, as long as everybody's."""
        self.keys += 1
        return RequestId(f"{self.number:06}-{self.keys:08}")


def answers(told: Message, key: Callable[[], RequestId]) -> list[Message]:
    """What any agent says to a command."""
    match told:
        case Prepare():
            return [Prepared(request=key(), channel=CHANNEL, epoch=told.epoch, seconds=0.001)]
        case Pause():
            return [Paused(request=key(), channel=CHANNEL, epoch=told.epoch, seconds=0.001)]
        case Transfer():
            common: Any = {"channel": CHANNEL, "epoch": told.epoch, "seconds": 0.001}
            held = {"version": told.version, "table": told.table, "verified_by": "live-digest"}
            return [
                Transferred(request=key(), bytes=0, buckets=0, **common),
                Verified(request=key(), **held, **common),  # type: ignore[arg-type]
            ]
        case Commit() | Abort():
            version = told.version if isinstance(told, Commit) else None
            served: Any = {"version": version, "seconds": 0.001, "paused_s": 0.01}
            return [Serving(request=key(), channel=CHANNEL, epoch=told.epoch, **served)]
        case _:
            return []


class Herd:
    """The sockets of one process. Only one side, ours or the bare one, is listened to at a time."""

    def __init__(self, first: int, count: int) -> None:
        self._agents = [Agent(first + at) for at in range(count)]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * count + 64)
        self._sides: dict[str, list[zmq.Socket[bytes]]] = {"ours": [], "bare": []}
        self._pollers: dict[str, zmq.Poller] = {}
        self._decoded: dict[bytes, tuple[Message, tuple[bytes, ...]]] = {}
        """By payload: the command, and what is answered, but for the key."""
        self._bare_answer = b""
        self._counts = dict.fromkeys(_COUNTED, 0)

    def connect(self, side: str, endpoint: str, keys: Path) -> dict[str, Any]:
        """Connect every agent at once; for `ours` until each was welcomed, for `bare` until each was answered."""
        sockets = self._sides[side]
        poller = self._pollers[side] = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        secrets = [_curve(keys, agent.name) for agent in self._agents]
        began = time.monotonic()
        for secret in secrets:
            dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RECONNECT_IVL, 100)
            if side == "ours":  # as bus.py sets them for real agents
                dealer.set(zmq.HEARTBEAT_IVL, 1000)
                dealer.set(zmq.HEARTBEAT_TIMEOUT, 3000)
                dealer.set(zmq.HEARTBEAT_TTL, 3000)
            dealer.curve_secretkey, dealer.curve_publickey, dealer.curve_serverkey = secret
            dealer.connect(endpoint)
            sockets.append(dealer)
            poller.register(dealer, zmq.POLLIN)
        for agent, dealer in zip(self._agents, sockets, strict=True):
            hello = agent.hello() if side == "ours" else agent.beat(0)
            dealer.send_multipart([_HEADER, _ENCODE(hello)] if side == "ours" else [_ENCODE(hello)])
        answered: set[int] = set()
        places = {dealer: at for at, dealer in enumerate(sockets)}
        while len(answered) < len(sockets):
            if time.monotonic() > began + 120:
                raise TimeoutError(f"{len(answered)} of {len(sockets)} agents were answered within 120 s")
            time.sleep(0.005)  # to look at a thousand sockets for every answer would be what is measured
            for each, _ in poller.poll(1000):
                if not isinstance(each, int) and self._drain(side, places[each], each, echo=False):
                    answered.add(places[each])
        return {"seconds": time.monotonic() - began}

    def serve(self, side: str, size: int = 0) -> dict[str, Any]:
        """Answer until the next line on stdin; to the bare socket with `size` bytes."""
        self._bare_answer = bytes(size)
        sockets, poller = self._sides[side], self._pollers[side]
        places = {dealer: at for at, dealer in enumerate(sockets)}
        while True:
            for each, _ in poller.poll():
                if isinstance(each, int):
                    return {"decoded": len(self._decoded)}
                self._drain(side, places[each], each)

    def beat(self, seconds: float, interval_s: float) -> dict[str, Any]:
        """One heartbeat of each agent per `interval_s`, evenly spread; returns how many were sent and answered."""
        sockets = self._sides["ours"]
        before, sent = self._counts[b"Alive"], 0
        began = time.monotonic()
        gap = interval_s / len(sockets)
        while (now := time.monotonic()) < began + seconds:
            due = int((now - began) / gap) + 1
            for number in range(sent, due):
                at = number % len(sockets)
                self._drain("ours", at, sockets[at])
                beat = self._agents[at].beat(number // len(sockets))
                sockets[at].send_multipart([_HEADER, _ENCODE(beat)])
            sent = due
            time.sleep(0.001)
        time.sleep(0.5)
        for at, dealer in enumerate(sockets):
            self._drain("ours", at, dealer)
        return {"sent": sent, "answered": self._counts[b"Alive"] - before}

    def close(self) -> None:
        """Drop every connection."""
        self._context.destroy(linger=0)

    def _drain(self, side: str, at: int, dealer: zmq.Socket[bytes], *, echo: bool = True) -> bool:
        """Take and answer what one agent was sent; returns whether it was anything."""
        some = False
        while dealer.get(zmq.EVENTS) & zmq.POLLIN:
            frames = dealer.recv_multipart(zmq.NOBLOCK)
            some = True
            if side == "ours":
                self._hear(self._agents[at], dealer, frames[1])
            elif echo and frames[0][:1] == COMMAND:
                dealer.send_multipart([self._bare_answer])
        return some

    def _hear(self, agent: Agent, dealer: zmq.Socket[bytes], payload: bytes) -> None:
        length = payload[6] & 0x1F  # a map of few fields, then "type", then a short string: its tag
        tag = payload[7 : 7 + length]
        if tag in _COUNTED:
            self._counts[tag] += 1
            return
        if tag == b"Refused" and b"unknown_agent" in payload:  # its connection broke and came back
            dealer.send_multipart([_HEADER, _ENCODE(agent.hello())])
            return
        known = self._decoded.get(payload)
        if known is None:
            if len(self._decoded) > 64:
                self._decoded.clear()
            told = _DECODE(payload)
            known = self._decoded[payload] = told, tuple(map(_ENCODE, answers(told, lambda: _ANY_KEY)))
        agent.hear(known[0])
        for answer in known[1]:
            dealer.send_multipart([_HEADER, answer.replace(_ANY_KEY.encode(), agent.key().encode())])


def _curve(folder: Path, name: str) -> CURVE_KEYS:
    files = CurveFiles.of(folder, name)
    secret = read_secret(files.secret).encode()
    return secret, zmq.curve_public(secret), read_public(files.coordinator).encode()


def main() -> None:
    """Carry out one command after the other."""
    herd = Herd(int(sys.argv[1]), int(sys.argv[2]))
    while line := _line():
        asked = json.loads(line)
        match asked.pop("do"):
            case "connect":
                answer = herd.connect(asked["side"], asked["endpoint"], Path(asked["keys"]))
            case "serve":
                _say({"serving": True})
                answer = herd.serve(**asked)
            case "idle":
                answer = {}
            case "beat":
                answer = herd.beat(asked["seconds"], asked["interval_s"])
            case other:
                raise ValueError(other)
        _say(answer)
    herd.close()


def _line() -> bytes:
    """The next line, unbuffered: the poller must see every byte that was not read yet."""
    line = b""
    while not line.endswith(b"\n"):
        byte = sys.stdin.buffer.raw.read(1)  # type: ignore[attr-defined]
        if not byte:
            return b""
        line += byte
    return line


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
