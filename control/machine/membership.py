"""The agents that are alive: names and incarnations, their connections, and when each was last heard. Pure.

A name belongs to one incarnation at a time. A newer incarnation gets it when the connection of the old one is gone, or
when the old one was silent for `takeover_s`: long enough for several heartbeats of a live agent, short enough for a
sidecar that was killed and restarted to be back before it counts as lost.

A server belongs to one engine agent at a time, in all channels: two agents would pause and load it against each other,
and the ready list would name it twice. Another agent gets the server once the first one has said Bye or is lost, not
while it may still reconnect: a short disconnect must not hand a server to an agent that was started by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

import msgspec

from ..protocol import (
    AgentId,
    Channel,
    EngineInfo,
    Hello,
    Incarnation,
    InvariantBroken,
    RefusalCode,
    Role,
    Topology,
    TrainerInfo,
)
from .events import Peer, Principal
from .limits import Limits, earlier
from .reply_cache import YES, Decision


class Agent(msgspec.Struct, kw_only=True):
    """One agent that said `Hello`."""

    name: AgentId
    role: Role
    channel: Channel
    incarnation: Incarnation
    peer: Peer | None
    """Its connection; None while it is gone and the agent may still reconnect."""
    heard_at: float
    engine: EngineInfo | None = None
    trainer: TrainerInfo | None = None
    topology: Topology | None = None
    """Its last topology report."""
    principal: Principal | None = None
    """Owner of its connection's key at its `Hello`; covers that `Hello`'s name, role and channel."""


class Membership:
    """The agents that count as alive."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._agents: dict[AgentId, Agent] = {}
        self._by_peer: dict[Peer, AgentId] = {}
        self._by_server: dict[str, AgentId] = {}
        self._away: dict[AgentId, float] = {}
        """Agents without a connection -> since when; the longest first."""

    def verdict(self, hello: Hello, peer: Peer, now: float) -> Decision:
        """Whether the name and the server of this `Hello` are free for its agent."""
        name = self._name_verdict(hello, peer, now)
        return self._server_verdict(hello, now) if name.ok else name

    def _name_verdict(self, hello: Hello, peer: Peer, now: float) -> Decision:
        known = self._agents.get(hello.agent)
        if known is None and len(self._agents) >= self._limits.max_agents:
            return Decision(RefusalCode.NOT_ALLOWED, f"{len(self._agents)} agents are here, no more are taken", 10.0)
        if known is None or known.incarnation == hello.incarnation or known.peer in (None, peer):
            return YES
        silent_s = now - known.heard_at
        if silent_s >= self._limits.takeover_s:
            return YES
        found = f"another process, {known.incarnation}, answered to {hello.agent!r} {silent_s:.1f} s ago"
        reason = f"{found}: give this one another name, or stop the other"
        return Decision(RefusalCode.NAME_TAKEN, reason, self._limits.takeover_s - silent_s)

    def _server_verdict(self, hello: Hello, now: float) -> Decision:
        holder = self._by_server.get(_server(hello.engine))
        if holder is None or holder == hello.agent or hello.engine is None:
            return YES
        rival = self._agents[holder]
        found = f"{rival.name!r} of channel {rival.channel!r} answers for the server at {hello.engine.url}"
        reason = (
            f"{found}, last heard of {now - rival.heard_at:.1f} s ago: one server, one agent. Stop one of the two; if"
            " they are different servers, tell each agent with --url where clients reach its own"
        )
        return Decision(RefusalCode.SERVER_TAKEN, reason, self._limits.takeover_s)

    def join(self, hello: Hello, peer: Peer, now: float, principal: Principal | None = None) -> Agent:
        """Register the agent of `hello` on connection `peer`. `principal`, with keys, was authorized to say it."""
        before = self._agents.get(hello.agent)
        if before and before.peer:
            self._by_peer.pop(before.peer, None)
        if (other := self._by_peer.get(peer)) and other != hello.agent:
            self.remove(other)
        self._forget(hello.agent)
        agent = self._agents[hello.agent] = Agent(
            name=hello.agent,
            role=hello.role,
            channel=hello.channel,
            incarnation=hello.incarnation,
            peer=peer,
            heard_at=now,
            engine=hello.engine,
            trainer=hello.trainer,
            topology=before.topology if before and before.incarnation == hello.incarnation else None,
            principal=principal,
        )
        self._by_peer[peer] = hello.agent
        if server := _server(hello.engine):
            self._by_server[server] = hello.agent
        return agent

    def heard(self, peer: Peer, now: float) -> Agent | None:
        """The agent on connection `peer`, marked as heard at `now`."""
        name = self._by_peer.get(peer)
        if name is None:
            return None
        agent = self._agents.pop(name)
        agent.heard_at = now
        self._agents[name] = agent  # at the end: the dict stays ordered by `heard_at`, the most silent first
        return agent

    def on(self, peer: Peer) -> Agent | None:
        """The agent on connection `peer`."""
        name = self._by_peer.get(peer)
        return self._agents[name] if name is not None else None

    def disconnect(self, peer: Peer, now: float) -> Agent | None:
        """A connection is gone; its agent may reconnect until it counts as lost."""
        name = self._by_peer.pop(peer, None)
        if name is None:
            return None
        agent = msgspec.structs.replace(self._agents[name], peer=None)
        self._agents[name] = agent
        if agent.role is Role.ENGINE:  # a trainer may be busy for longer, and then only its lease waits
            self._away[name] = now
        return agent

    def expect(self, name: AgentId, now: float) -> None:
        """Engines are paused for this agent, whose connection is gone: it is lost after `reconnect_s`."""
        self._away.setdefault(name, now)

    def remove(self, name: AgentId) -> Agent | None:
        """Forget the agent."""
        agent = self._forget(name)
        if agent and agent.peer:
            self._by_peer.pop(agent.peer, None)
        return agent

    def _forget(self, name: AgentId) -> Agent | None:
        agent = self._agents.pop(name, None)
        self._away.pop(name, None)
        if agent and self._by_server.get(server := _server(agent.engine)) == name:
            del self._by_server[server]
        return agent

    def peers(self, names: Iterable[AgentId]) -> tuple[Peer, ...]:
        """The connections of the named agents, without those that have none."""
        known = map(self._agents.get, names)
        return tuple([agent.peer for agent in known if agent is not None and agent.peer is not None])

    def get(self, name: AgentId) -> Agent | None:
        """The agent of that name."""
        return self._agents.get(name)

    def trainers(self, channel: Channel) -> list[Agent]:
        """The trainers of `channel`, the one that was heard last at the end."""
        return [agent for agent in self._agents.values() if agent.role is Role.TRAINER and agent.channel == channel]

    def lost(self, now: float) -> list[Agent]:
        """Agents that were silent, or without a connection, for too long."""
        silent = list(takewhile(lambda agent: self._silent_at(agent) <= now, self._agents.values()))
        away = takewhile(lambda name: self._away[name] + self._limits.reconnect_s <= now, self._away)
        return silent + [agent for agent in map(self._agents.__getitem__, away) if self._silent_at(agent) > now]

    def silent_since(self, at: float) -> tuple[Peer, ...]:
        """The connections of agents that were silent since `at`."""
        silent = takewhile(lambda agent: agent.heard_at <= at, self._agents.values())
        return tuple([agent.peer for agent in silent if agent.peer is not None])

    def why_lost(self, agent: Agent, now: float) -> str:
        """Why this agent counts as lost; empty if it does not."""
        silence = f"was silent for {now - agent.heard_at:.1f} s"
        gone_at = self._away.get(agent.name)
        if gone_at is not None and gone_at + self._limits.reconnect_s <= now:
            return f"{silence}, and its connection is gone"
        return silence if self._silent_at(agent) <= now else ""

    def next_deadline(self) -> float | None:
        """The time at which the next agent is lost unless it is heard."""
        agent, gone_at = next(iter(self._agents.values()), None), next(iter(self._away.values()), None)
        lost_at = None if gone_at is None else gone_at + self._limits.reconnect_s
        return earlier(None if agent is None else self._silent_at(agent), lost_at)

    def _silent_at(self, agent: Agent) -> float:
        return agent.heard_at + self._limits.silence_s

    def __len__(self) -> int:
        return len(self._agents)

    def check(self) -> None:
        """Raise `InvariantBroken` unless connections and agents name each other."""
        for peer, name in self._by_peer.items():
            if name not in self._agents or self._agents[name].peer != peer:
                raise InvariantBroken(f"connection {peer!r} is {name}'s, which is not on it")
        heard_at = float("-inf")
        for agent in self._agents.values():
            if agent.heard_at < heard_at:
                raise InvariantBroken("agents are not in the order in which they were last heard of")
            heard_at = agent.heard_at
            if agent.peer is not None and self._by_peer.get(agent.peer) != agent.name:
                raise InvariantBroken(f"{agent.name} is on connection {agent.peer!r}, which belongs to another agent")
            if (server := _server(agent.engine)) and self._by_server.get(server) != agent.name:
                raise InvariantBroken(
                    f"{agent.name} is the agent of {server}, which is {self._by_server.get(server)}'s"
                )
        if not self._agents.keys() >= set(self._by_server.values()):
            raise InvariantBroken("a server belongs to an agent that is not here")


def _server(engine: EngineInfo | None) -> str:
    """Key of an agent's server: its URL, normalized; empty for an agent without a server."""
    return engine.url.rstrip("/").lower() if engine else ""
