"""Who is there: agents by name and incarnation, their connections, and when each was last heard of. Pure.

A name belongs to one incarnation at a time. A newer one gets it when the old one's connection is gone, or when the old
one was not heard of for `takeover_s`: long enough that a live agent has sent several heartbeats, short enough that a
sidecar that was killed and restarted is back before anybody takes it for lost.
"""

from __future__ import annotations

from itertools import takewhile

import msgspec

from .errors import InvariantBroken
from .events import Peer
from .ids import AgentId, Channel, Incarnation
from .lease import YES, Verdict
from .limits import Limits
from .messages import Code, EngineInfo, Hello, Role, TrainerInfo


class Agent(msgspec.Struct, kw_only=True):
    """One agent that said `Hello`."""

    name: AgentId
    role: Role
    channel: Channel
    incarnation: Incarnation
    peer: Peer | None
    """None while its connection is gone and it may still come back."""
    heard_at: float
    engine: EngineInfo | None = None
    trainer: TrainerInfo | None = None


class Membership:
    """The agents that are taken to be alive."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._agents: dict[AgentId, Agent] = {}
        self._by_peer: dict[Peer, AgentId] = {}

    def verdict(self, hello: Hello, peer: Peer, now: float) -> Verdict:
        """Whether this `Hello` may have the name it asks for."""
        known = self._agents.get(hello.agent)
        if known is None and len(self._agents) >= self._limits.max_agents:
            return Verdict(Code.NOT_ALLOWED, f"{len(self._agents)} agents are here, no more are taken", 10.0)
        if known is None or known.incarnation == hello.incarnation or known.peer in (None, peer):
            return YES
        silent_s = now - known.heard_at
        if silent_s >= self._limits.takeover_s:
            return YES
        found = f"another process, {known.incarnation}, answered to {hello.agent!r} {silent_s:.1f} s ago"
        reason = f"{found}: give this one another name, or stop the other"
        return Verdict(Code.NAME_TAKEN, reason, self._limits.takeover_s - silent_s)

    def join(self, hello: Hello, peer: Peer, now: float) -> Agent | None:
        """Seat the agent of `hello` on `peer`. Returns who had the name before."""
        before = self._agents.get(hello.agent)
        if before and before.peer:
            self._by_peer.pop(before.peer, None)
        if (other := self._by_peer.get(peer)) and other != hello.agent:
            self.remove(other)
        self._agents.pop(hello.agent, None)
        self._agents[hello.agent] = Agent(
            name=hello.agent,
            role=hello.role,
            channel=hello.channel,
            incarnation=hello.incarnation,
            peer=peer,
            heard_at=now,
            engine=hello.engine,
            trainer=hello.trainer,
        )
        self._by_peer[peer] = hello.agent
        return before

    def heard(self, peer: Peer, now: float) -> Agent | None:
        """Who speaks on `peer`; noted as alive."""
        name = self._by_peer.get(peer)
        if name is None:
            return None
        agent = self._agents.pop(name)
        agent.heard_at = now
        self._agents[name] = agent  # at the end: the dict stays ordered by `heard_at`, the most silent first
        return agent

    def on(self, peer: Peer) -> Agent | None:
        """Who sits on `peer`."""
        name = self._by_peer.get(peer)
        return self._agents[name] if name is not None else None

    def disconnect(self, peer: Peer) -> Agent | None:
        """The connection is gone; its agent may come back on another until it has been silent for too long."""
        name = self._by_peer.pop(peer, None)
        if name is None:
            return None
        self._agents[name] = msgspec.structs.replace(self._agents[name], peer=None)
        return self._agents[name]

    def remove(self, name: AgentId) -> Agent | None:
        """Forget the agent."""
        agent = self._agents.pop(name, None)
        if agent and agent.peer:
            self._by_peer.pop(agent.peer, None)
        return agent

    def get(self, name: AgentId) -> Agent | None:
        """The agent of that name."""
        return self._agents.get(name)

    def silent(self, now: float) -> list[Agent]:
        """Who has not been heard of for too long."""
        silence_s = self._limits.silence_s
        return list(takewhile(lambda agent: now >= agent.heard_at + silence_s, self._agents.values()))

    def next_deadline(self) -> float | None:
        """When the next agent will have been silent for too long."""
        most_silent = next(iter(self._agents.values()), None)
        return None if most_silent is None else most_silent.heard_at + self._limits.silence_s

    def __len__(self) -> int:
        return len(self._agents)

    def check(self) -> None:
        """Raise `InvariantBroken` unless connections and agents name each other."""
        for peer, name in self._by_peer.items():
            if name not in self._agents or self._agents[name].peer != peer:
                raise InvariantBroken(f"connection {peer!r} is {name}'s, who does not sit on it")
        heard = [agent.heard_at for agent in self._agents.values()]
        if heard != sorted(heard):
            raise InvariantBroken("agents are not in the order in which they were last heard of")
        for agent in self._agents.values():
            if agent.peer is not None and self._by_peer.get(agent.peer) != agent.name:
                raise InvariantBroken(f"{agent.name} sits on {agent.peer!r}, which does not know it")
