"""The control network: connections that break, lose, hold back and delay; those of one connection arrive in order.

This is the bus as `control/bus/interface.py` promises it, at its worst: a message may be lost, a partition of one or
both ways holds messages back or swallows them, a connection that stays silent too long is dropped at both ends, and
what was under way on an old connection may arrive after the new one was made. Only agents repeat messages.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from weightbus.control.bus.interface import Rejected, SendOutcome, TrustRevoked, UntrustedKey
from weightbus.control.machine.effects import MessageReceived, Peer
from weightbus.control.protocol.errors import ProtocolError
from weightbus.control.protocol.messages import (
    AgentId,
    Alive,
    Heartbeat,
    RefusalCode,
    Refused,
    ToAgent,
    ToCoordinator,
    Welcome,
)

from .process import Process

if TYPE_CHECKING:
    from .coordinator_process import CoordinatorProcess
    from .invariants import Judge
    from .loop import Loop

CONNECT_S = 0.005
DROPPED_AFTER_S = 4.0
"""TCP's keepalive notices a partition after so long."""


class Weather(msgspec.Struct, kw_only=True):
    """How bad the network is, for all agents."""

    lose: float = 0.0
    repeat: float = 0.0
    """Chance that an agent says something a second time, later."""
    slow: float = 0.0
    """Chance that a message takes seconds."""
    slow_s: float = 3.0


class Connection:
    """One TCP connection between an agent and a life of the coordinator."""

    def __init__(self, line: Line, peer: Peer, life: int) -> None:
        self.line, self.peer, self.life = line, peer, life
        self._opened = line.opened
        self.agent_open = True
        self.coordinator_open = True
        self.up_until = self.down_until = 0.0
        self.held_up: list[tuple[ToCoordinator, bytes | None]] = []
        self.held_down: list[tuple[ToAgent, bytes | None]] = []

    @property
    def reads(self) -> bool:
        """What was sent on it still arrives, also after it broke, until the agent opens another socket."""
        return self.line.opened == self._opened


class Line:
    """An agent's `links.AgentLink`. What arrives waits in `inbox`, and the agent's process is told."""

    def __init__(self, network: Network, owner: Process) -> None:
        self.network, self.owner = network, owner
        self.name = owner.name
        self.connection: Connection | None = None
        self.opened = 0
        self.inbox: deque[tuple[ToAgent, bytes | None] | ProtocolError] = deque()

    def open(self, place: int = 0) -> None:  # noqa: ARG002  # one coordinator
        """Connect anew, dropping the connection there was."""
        self._drop()
        self.opened += 1
        self.network.dial(self, self.opened)

    def poll(self, timeout_s: float) -> Sequence[tuple[ToAgent, bytes | None] | ProtocolError]:
        """What came in. Never waits: the process is woken when something comes."""
        del timeout_s
        taken = list(self.inbox)
        self.inbox.clear()
        return taken

    def send(self, message: ToCoordinator, blob: bytes | None = None) -> bool:
        """Send without waiting."""
        self.owner.passes("send", "before")
        sent = self.connection is not None and self.network.up(self.connection, message, blob)
        self.owner.passes("send", "after")
        return sent

    def wake(self) -> None:
        """Nothing ever waits in `poll`."""

    def close(self) -> None:
        """Drop the connection."""
        self._drop()
        self.opened += 1

    def arrived(self, message: ToAgent, blob: bytes | None) -> None:
        """Called by the network."""
        self.inbox.append((message, blob))
        self.owner.soon(self.owner.heard)  # type: ignore[attr-defined]

    def _drop(self) -> None:
        if self.connection is not None:
            self.network.hang_up(self.connection)
            self.connection = None
        self.inbox.clear()


class Network:
    """Every connection, and what goes wrong with them. Is the coordinator's bus too."""

    def __init__(self, loop: Loop, judge: Judge, rng: random.Random) -> None:
        self.loop, self.judge, self._rng = loop, judge, rng
        self.coordinator: CoordinatorProcess | None = None
        self.weather = Weather()
        self.messages = 0
        self.faults = 0
        self._peers = 0
        self._connections: dict[Peer, Connection] = {}
        self._cut: dict[str, tuple[bool, bool]] = {}
        """Agent -> (nothing goes up, nothing comes down)."""
        self.heard_at: dict[str, float] = {}
        """Agent -> when a message other than a refusal last arrived at it."""
        self.refused_server: dict[str, int] = {}
        """Engine agent -> its life that was refused its server (N47), and not welcomed since."""
        self.revoked: set[str] = set()
        """Agents whose keys were taken off the allow-list."""
        self._received: list[MessageReceived | Rejected | TrustRevoked] = []

    # -- the agents' side

    def dial(self, line: Line, attempt: int, again_s: float = 0.1) -> None:
        """Try to connect, again and again while the line wants this very connection."""
        self.loop.after(CONNECT_S + self._rng.random() * 0.02, lambda: self._dialled(line, attempt, again_s))

    def _dialled(self, line: Line, attempt: int, again_s: float) -> None:
        if line.opened != attempt or not line.owner.alive:
            return
        coordinator = self.coordinator
        barred = line.name in self.revoked or any(self._cut.get(line.name, (False, False)))
        if coordinator is None or not coordinator.alive or barred:
            self.loop.after(again_s, lambda: self.dial(line, attempt, min(2.0, again_s * 2)))
            return
        self._peers += 1
        peer = Peer(self._peers.to_bytes(5, "big"))
        line.connection = self._connections[peer] = Connection(line, peer, coordinator.life)

    def hang_up(self, connection: Connection) -> None:
        """The agent closed its end. What it sent before may still arrive; the coordinator notices a little later."""
        connection.agent_open = False
        self.loop.after(0.01 + self._rng.random() * 3.0, lambda: self._forgotten(connection))

    def _forgotten(self, connection: Connection) -> None:
        connection.coordinator_open = False
        self._connections.pop(connection.peer, None)

    def up(self, connection: Connection, message: ToCoordinator, blob: bytes | None, *, repeated: bool = False) -> bool:
        """From the agent. False when the connection is gone."""
        if not connection.agent_open:
            return False
        weather = self.weather
        if weather.repeat and not repeated and self._rng.random() < weather.repeat:
            self.faults += 1
            later = 0.05 + self._rng.random() * 6.0
            self.loop.after(later, lambda: self._repeat(connection, message, blob))
        if self._lost(connection.line.name, message):
            return True
        connection.up_until = max(connection.up_until, self.loop.now + self._delay())
        self.loop.at(connection.up_until, lambda: self._arrive_up(connection, message, blob))
        return True

    def _repeat(self, connection: Connection, message: ToCoordinator, blob: bytes | None) -> None:
        if connection.agent_open and connection.line.owner.alive:
            self.up(connection, message, blob, repeated=True)

    def _arrive_up(self, connection: Connection, message: ToCoordinator, blob: bytes | None) -> None:
        coordinator = self.coordinator
        if coordinator is None or connection.life != coordinator.life or not connection.coordinator_open:
            return
        if self._cut.get(connection.line.name, (False, False))[0] or connection.held_up:
            connection.held_up.append((message, blob))
            return
        self.messages += 1
        if not isinstance(message, Heartbeat):
            self.loop.note(connection.line.name, "->", message)
        trusted = connection.line.name not in self.revoked
        arrived = MessageReceived(connection.peer, message, blob)
        self._received.append(arrived if trusted else Rejected(connection.peer, UntrustedKey("12ab")))
        coordinator.soon(coordinator.step)

    # -- the coordinator's side: links.CoordinatorBus

    def poll(self, timeout_s: float, gather_s: float = 0.0) -> Sequence[MessageReceived | Rejected | TrustRevoked]:
        """What came in. Never waits."""
        del timeout_s, gather_s
        taken, self._received = self._received, []
        for each in taken:
            if isinstance(each, MessageReceived) and (connection := self._connections.get(each.peer)):
                self.judge.heard(connection.line.name, each.message)
        return taken

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> SendOutcome:
        """Send without waiting."""
        coordinator = self.coordinator
        assert coordinator is not None
        coordinator.passes("send", "before")
        connection = self._connections.get(peer)
        if connection is None or not connection.coordinator_open:
            return SendOutcome.GONE
        if not isinstance(message, Alive):
            self.judge.said(connection.line.name, message)
        if not self._lost(connection.line.name, message):
            earliest = self.loop.now + coordinator.lag + self._delay()
            connection.down_until = max(connection.down_until, earliest)
            self.loop.at(connection.down_until, lambda: self._arrive_down(connection, message, blob))
        coordinator.passes("send", "after")
        return SendOutcome.SENT

    def send_to_all(self, peers: Sequence[Peer], message: ToAgent) -> Sequence[Peer]:
        """Send to one after the other; the coordinator may die between any two."""
        return [peer for peer in peers if self.send(peer, message) is SendOutcome.GONE]

    def _arrive_down(self, connection: Connection, message: ToAgent, blob: bytes | None) -> None:
        if not connection.reads or not connection.line.owner.alive:
            return
        if self._cut.get(connection.line.name, (False, False))[1] or connection.held_down:
            connection.held_down.append((message, blob))
            return
        self.messages += 1
        if not isinstance(message, Alive):
            self.loop.note(connection.line.name, "<-", message)
        if not isinstance(message, Refused):
            self.heard_at[connection.line.name] = self.loop.now
        if isinstance(message, Welcome):
            self.refused_server.pop(connection.line.name, None)
        elif isinstance(message, Refused) and message.code is RefusalCode.SERVER_TAKEN:
            self.refused_server[connection.line.name] = connection.line.owner.life
        connection.line.arrived(message, blob)

    def unheard(self, name: str) -> bool:
        """Whether nothing that an agent says comes through."""
        return self._cut.get(name, (False, False))[0]

    @property
    def closed(self) -> int:
        return 0

    def forget(self, peer: Peer) -> None:
        """Nothing is queued here."""

    def wake(self) -> None:
        """Nothing ever waits in `poll`."""

    def close(self) -> None:
        """The coordinator stopped."""

    # -- faults

    def reset(self) -> None:
        """The coordinator died: every connection breaks, and the sockets connect again by themselves."""
        self._received.clear()
        broken, self._connections = list(self._connections.values()), {}
        for connection in broken:  # what was sent just before may still arrive
            self.loop.after(self._rng.random() * 0.02, lambda broke=connection: self._break(broke))

    def disconnect(self, name: str) -> None:
        """Break the connections of one agent."""
        for connection in [each for each in self._connections.values() if each.line.name == name]:
            self._connections.pop(connection.peer, None)
            self._break(connection)

    def _break(self, connection: Connection) -> None:
        line = connection.line
        connection.coordinator_open = False
        was_open, connection.agent_open = connection.agent_open, False
        if was_open and line.connection is connection:
            line.connection = None
            self.dial(line, line.opened)

    def revoke(self, name: str) -> None:
        """The key of an agent is taken off the allow-list: what it says is refused, as if it were another agent's."""
        self.loop.note(name, "** its key is revoked")
        self.revoked.add(name)
        coordinator = self.coordinator
        if coordinator is not None and coordinator.alive:
            self._received.append(TrustRevoked(AgentId(name), "it was taken off the allow-list"))
            coordinator.soon(coordinator.step)

    def trust_again(self, name: str) -> None:
        """The key is on the list again."""
        if name in self.revoked:
            self.loop.note(name, "** its key is trusted again")
            self.revoked.discard(name)

    def stall(self, name: str, seconds: float) -> None:
        """What is sent to an agent on the connection that it has now arrives so much later, if it reads it still."""
        self.loop.note(name, f"** what it is sent arrives {seconds:.1f} s later")
        for connection in self._connections.values():
            if connection.line.name == name:
                connection.down_until = max(connection.down_until, self.loop.now + seconds)

    def cut(self, name: str, *, up: bool, down: bool) -> None:
        """A partition between one agent and the coordinator."""
        self._cut[name] = (up, down)
        way = "both ways" if up and down else "upwards" if up else "downwards"
        self.loop.note(name, f"** is cut off from the coordinator, {way}")
        if self._rng.random() < 0.6:
            self.loop.after(DROPPED_AFTER_S, lambda: self._starve(name, (up, down)))

    def _starve(self, name: str, cut: tuple[bool, bool]) -> None:
        if self._cut.get(name) == cut:
            self.disconnect(name)

    def heal(self, name: str) -> None:
        """The partition ends; what a standing connection held back arrives now."""
        if self._cut.pop(name, None) is None:
            return
        self.loop.note(name, "** is connected again")
        for connection in [each for each in self._connections.values() if each.line.name == name]:
            held_up, connection.held_up = connection.held_up, []
            held_down, connection.held_down = connection.held_down, []
            for message, blob in held_up:
                self._arrive_up(connection, message, blob)
            for down, blob in held_down:
                self._arrive_down(connection, down, blob)

    def _lost(self, name: str, message: ToAgent | ToCoordinator) -> bool:
        if self.weather.lose and self._rng.random() < self.weather.lose:
            self.faults += 1
            self.loop.note(name, "~~ lost:", message)
            return True
        return False

    def _delay(self) -> float:
        if self.weather.slow and self._rng.random() < self.weather.slow:
            self.faults += 1
            return self._rng.random() * self.weather.slow_s
        return 0.0005 + self._rng.random() * 0.01
