"""Who is there: agents by name and incarnation, their connections, and when each was last heard of. Pure.

A name belongs to one incarnation at a time. A newer one gets it when the old one's connection is gone, or when the old
one was not heard of for `takeover_s`: long enough that a live agent has sent several heartbeats, short enough that a
sidecar that was killed and restarted is back before anybody takes it for lost.
"""

from __future__ import annotations

from itertools import islice, takewhile

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
        self._away: dict[AgentId, float] = {}
        """Engines without a connection, and since when; the longest first."""

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
        self._away.pop(hello.agent, None)
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

    def disconnect(self, peer: Peer, now: float) -> Agent | None:
        """The connection is gone; its agent may come back on another until it is lost."""
        name = self._by_peer.pop(peer, None)
        if name is None:
            return None
        agent = msgspec.structs.replace(self._agents[name], peer=None)
        self._agents[name] = agent
        if agent.role is Role.ENGINE:  # a trainer keeps its lease until it is silent for too long
            self._away[name] = now
        return agent

    def remove(self, name: AgentId) -> Agent | None:
        """Forget the agent."""
        agent = self._agents.pop(name, None)
        self._away.pop(name, None)
        if agent and agent.peer:
            self._by_peer.pop(agent.peer, None)
        return agent

    def get(self, name: AgentId) -> Agent | None:
        """The agent of that name."""
        return self._agents.get(name)

    def lost(self, now: float) -> list[Agent]:
        """Who has not been heard of, or has had no connection, for too long."""
        silent = list(takewhile(lambda agent: self._silent_at(agent) <= now, self._agents.values()))
        away = takewhile(lambda name: self._away[name] + self._limits.reconnect_s <= now, self._away)
        return silent + [agent for agent in map(self._agents.__getitem__, away) if self._silent_at(agent) > now]

    def why_lost(self, agent: Agent, now: float) -> str:
        """Why this agent is not waited for any longer; empty while it is."""
        silence = f"was silent for {now - agent.heard_at:.1f} s"
        gone_at = self._away.get(agent.name)
        if gone_at is not None and gone_at + self._limits.reconnect_s <= now:
            return f"{silence}, and its connection is gone"
        return silence if self._silent_at(agent) <= now else ""

    def next_deadline(self) -> float | None:
        """When the next agent will be lost, if nothing is heard of it."""
        times = [self._silent_at(agent) for agent in islice(self._agents.values(), 1)]
        times += [gone_at + self._limits.reconnect_s for gone_at in islice(self._away.values(), 1)]
        return min(times, default=None)

    def _silent_at(self, agent: Agent) -> float:
        return agent.heard_at + self._limits.silence_s

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
