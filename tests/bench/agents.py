"""Simulated engine agents for the bench: a thousand DEALER sockets in one process, as cheap as they can be made.

    python tests/bench/agents.py FIRST COUNT      commands on stdin, one line of JSON each; answers on stdout

They speak the real protocol to the coordinator (`ours`) and answer what the bare ROUTER sends (`bare`) with a payload
of the same size, by the same steps, keys included: what is compared is the other end. What all are told alike is
decoded once, what all say alike is encoded once: only the request's key differs. Answers to requests that nobody waits
for are only counted. Not an example of an agent.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from weightbus.control.bus.session import HEARTBEATS_PER_ANSWER
from weightbus.control.bus.sockets import HEARTBEAT_MS
from weightbus.control.protocol import codec
from weightbus.control.protocol.messages import (
    PROTOCOL,
    Abort,
    AgentId,
    Channel,
    Commit,
    EngineHealth,
    EngineInfo,
    Heartbeat,
    HeldVersion,
    Hello,
    Incarnation,
    Message,
    Pause,
    Paused,
    Prepare,
    Prepared,
    RequestId,
    Role,
    Serving,
    ToAgent,
    Transfer,
    Transferred,
    TransportKind,
    Verified,
)
from weightbus.control.security.keys import CurveFiles, read_public_key, read_secret_key

CHANNEL: Final = Channel("bench")
CURVE_KEYS = tuple[bytes, bytes, bytes]
_HEADER: Final = codec.MAGIC + bytes((PROTOCOL,)) + b">"
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgspec.msgpack.Decoder(ToAgent).decode
_COUNTED: Final = frozenset({b"Ack", b"Alive", b"Welcome"})
_ANY_KEY: Final = RequestId("??????-????????")
_ANY_BYTES: Final = _ANY_KEY.encode()
_NOBLOCK: Final = int(zmq.NOBLOCK)
_HEADER_BYTES: Final = len(_HEADER)
LATE_S: Final = 2.0
"""How long the last answers are waited for."""
COMMAND: Final = b"C"
"""The first byte of what the bare ROUTER wants answered; what begins otherwise acknowledges an answer."""


def name_of(number: int) -> str:
    """The agent of that number."""
    return f"engine-{number}"


class Agent:
    """One engine that does at once what it is told."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, name_of(number)
        self.held: HeldVersion | None = None
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

    def key(self) -> RequestId:
        """A request key of its own, as long as everybody's."""
        return RequestId(self.key_bytes().decode())

    def key_bytes(self) -> bytes:
        """The same as it travels."""
        self.keys += 1
        return b"%06d-%08d" % (self.number, self.keys)


class Known(NamedTuple):
    """What a payload that many are sent means to each of them."""

    held: HeldVersion | None
    """What whoever is told it holds from now on, if that changes."""
    answers: tuple[tuple[bytes, bytes], ...]
    """What is answered, before and after the key."""

    @classmethod
    def of(cls, told: Message) -> Known:
        """A command."""
        held = (
            HeldVersion(version=told.version, manifest=told.manifest, table=told.table)
            if isinstance(told, Transfer)
            else None
        )
        said = (_HEADER + _ENCODE(each) for each in answers(told, lambda: _ANY_KEY))
        return cls(held, tuple((before, after) for before, _, after in (each.partition(_ANY_BYTES) for each in said)))


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
        self._ready: dict[str, select.epoll] = {}
        """By side: the sockets' own descriptors. To look at a thousand sockets for every message that comes would cost
        more than all the rest; edge-triggered, as ZeroMQ's descriptors are."""
        self._places: dict[str, dict[int, int]] = {}
        """By side: which agent a descriptor is of."""
        self._known: dict[bytes, Known] = {}
        """By payload. An agent must not take longer over ours than over the bare socket's: both share the cores."""
        self._bare = Known(None, ())
        self._counts = dict.fromkeys(_COUNTED, 0)

    def connect(self, side: str, endpoint: str, keys: Path) -> dict[str, Any]:
        """Connect every agent at once; for `ours` until each was welcomed, for `bare` until each was answered."""
        sockets = self._sides[side]
        ready = self._ready[side] = select.epoll()
        ready.register(sys.stdin.fileno(), select.EPOLLIN)
        secrets = [_curve(keys, agent.name) for agent in self._agents]
        began = time.monotonic()
        for secret in secrets:
            dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RECONNECT_IVL, 100)
            if side == "ours":  # as sockets.py sets them for real agents
                dealer.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
                dealer.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_MS)
            dealer.curve_secretkey, dealer.curve_publickey, dealer.curve_serverkey = secret
            dealer.connect(endpoint)
            sockets.append(dealer)
            ready.register(dealer.fileno(), select.EPOLLIN | select.EPOLLET)
        for at, (agent, dealer) in enumerate(zip(self._agents, sockets, strict=True)):
            hello = agent.hello() if side == "ours" else agent.beat(0)
            dealer.send_multipart([_HEADER + _ENCODE(hello)] if side == "ours" else [_ENCODE(hello)])
            self._drain(side, at, dealer, echo=False)  # a socket that was never read signals nothing
        answered: set[int] = set()
        places = self._places[side] = {dealer.fileno(): at for at, dealer in enumerate(sockets)}
        while len(answered) < len(sockets):
            if time.monotonic() > began + 120:
                raise TimeoutError(f"{len(answered)} of {len(sockets)} agents were answered within 120 s")
            for each, _ in ready.poll(1.0):
                at = places.get(each)
                if at is not None and self._drain(side, at, sockets[at], echo=False):
                    answered.add(at)
        return {"seconds": time.monotonic() - began}

    def serve(self, side: str, size: int = 0) -> dict[str, Any]:
        """Answer until the next line on stdin; to the bare socket with `size` bytes."""
        around = bytes(max(0, size - len(_ANY_BYTES)))
        half = len(around) // 2
        self._bare = Known(None, ((around[:half], around[half:]),))
        sockets, ready, places = self._sides[side], self._ready[side], self._places[side]
        for at, dealer in enumerate(sockets):  # what came before is no edge any more
            self._drain(side, at, dealer)
        while True:
            for each, _ in ready.poll():
                at = places.get(each)
                if at is None:
                    return {"known": len(self._known)}
                self._drain(side, at, sockets[at])

    def beat(self, seconds: float, interval_s: float, settle_s: float = 0.0) -> dict[str, Any]:
        """Heartbeats as real agents send them: the next one `interval_s` after the answer to the last, or after itself.

        One in three wants an answer (session.py). They begin evenly spread. Returns how many were sent in the last
        `seconds`, how many of these were to be answered, and how many answers came.
        """
        sockets, ready, places = self._sides["ours"], self._ready["ours"], self._places["ours"]
        now = time.monotonic()
        gap = interval_s / len(sockets)
        due = deque((now + at * gap, at) for at in range(len(sockets)))
        counted_from, until = now + settle_s, now + settle_s + seconds
        sent = asked = answered = beats = 0
        unanswered = [at % HEARTBEATS_PER_ANSWER for at in range(len(sockets))]
        while now < until or (answered < asked and now < until + LATE_S):
            while due and due[0][0] <= now < until:
                at = due.popleft()[1]
                beats += 1
                unanswered[at] += 1
                asks = unanswered[at] >= HEARTBEATS_PER_ANSWER
                self._drain("ours", at, sockets[at])
                self._say(sockets[at], _ENCODE(self._agents[at].beat(beats if asks else 0)))
                sent += now >= counted_from
                asked += asks and now >= counted_from
                if not asks:
                    due.append((now + interval_s, at))
            wait_s = min(0.1, max(0.0, due[0][0] - now)) if due else 0.1
            for each, _ in ready.poll(wait_s):
                before, at = self._counts[b"Alive"], places.get(each)
                if at is None:
                    continue
                self._drain("ours", at, sockets[at])
                if self._counts[b"Alive"] > before:
                    answered += now >= counted_from
                    unanswered[at] = 0
                    due.append((time.monotonic() + interval_s, at))
            now = time.monotonic()
        return {"sent": sent, "asked": asked, "answered": answered}

    def close(self) -> None:
        """Drop every connection."""
        self._context.destroy(linger=0)

    def _drain(self, side: str, at: int, dealer: zmq.Socket[bytes], *, echo: bool = True) -> bool:
        """Take and answer what one agent was sent; returns whether it was anything.

        Ends when nothing is left: the descriptor tells of changes only.
        """
        some = False
        while True:
            try:
                payload = dealer.recv(_NOBLOCK)
            except zmq.Again:
                return some
            some = True
            known = self._known.get(payload)
            if known is not None:
                self._answer(self._agents[at], dealer, known)
            elif side == "ours":
                self._hear(self._agents[at], dealer, payload)
            elif echo and payload[:1] == COMMAND:
                self._known[payload] = self._bare
                self._answer(self._agents[at], dealer, self._bare)

    @staticmethod
    def _say(dealer: zmq.Socket[bytes], payload: bytes) -> None:
        dealer.send(_HEADER + payload)

    @staticmethod
    def _answer(agent: Agent, dealer: zmq.Socket[bytes], known: Known) -> None:
        if known.held is not None:
            agent.held = known.held
        for before, after in known.answers:
            dealer.send(before + agent.key_bytes() + after)

    def _hear(self, agent: Agent, dealer: zmq.Socket[bytes], frame: bytes) -> None:
        payload = frame[_HEADER_BYTES:]
        length = payload[6] & 0x1F  # a map of few fields, then "type", then a short string: its tag
        tag = payload[7 : 7 + length]
        if tag in _COUNTED:
            self._counts[tag] += 1
            return
        if tag == b"Refused" and b"unknown_agent" in payload:  # its connection broke and came back
            self._say(dealer, _ENCODE(agent.hello()))
            return
        if len(self._known) > 64:
            self._known.clear()
        known = self._known[frame] = Known.of(_DECODE(payload))
        self._answer(agent, dealer, known)


def _curve(folder: Path, name: str) -> CURVE_KEYS:
    files = CurveFiles.of(folder, name)
    secret = read_secret_key(files.secret).encode()
    return secret, zmq.curve_public(secret), read_public_key(files.coordinator).encode()


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
                answer = herd.beat(**asked)
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
