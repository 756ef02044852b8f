"""Who is there: agents by name and incarnation, their connections, and when each was last heard of. Pure.

A name belongs to one incarnation at a time. A newer one gets it when the old one's connection is gone, or when the old
one was not heard of for `takeover_s`: long enough that a live agent has sent several heartbeats, short enough that a
sidecar that was killed and restarted is back before anybody takes it for lost.

A server belongs to one engine agent at a time, whatever the channel: two would pause and load it against each other,
and the ready list would name it twice. Another name gets it when the first one said Bye or is lost, not while it may
come back: a connection that breaks for a moment must not hand a server over to an agent that was started by mistake.
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
    """None while its connection is gone and it may still come back."""
    heard_at: float
    engine: EngineInfo | None = None
    trainer: TrainerInfo | None = None
    topology: Topology | None = None
    """What it said last of where it is, if it did."""
    principal: Principal | None = None
    """Whom its connection's key belonged to when it said `Hello`, as name, role and channel of that `Hello` do."""


class Membership:
    """The agents that are taken to be alive."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._agents: dict[AgentId, Agent] = {}
        self._by_peer: dict[Peer, AgentId] = {}
        self._by_server: dict[str, AgentId] = {}
        self._away: dict[AgentId, float] = {}
        """Engines without a connection, and since when; the longest first."""

    def verdict(self, hello: Hello, peer: Peer, now: float) -> Decision:
        """Whether this `Hello` may have the name, and the server, that it asks for."""
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
        """Seat the agent of `hello` on `peer`; `principal`, if there are keys, was found to be allowed to say it."""
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
        if agent.role is Role.ENGINE:  # a trainer may be busy for longer, and then only its lease waits
            self._away[name] = now
        return agent

    def expect(self, name: AgentId, now: float) -> None:
        """Others stand still for this agent, whose connection is gone: it is lost when it is not back soon."""
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
        """The connections of those that have one."""
        known = map(self._agents.get, names)
        return tuple([agent.peer for agent in known if agent is not None and agent.peer is not None])

    def get(self, name: AgentId) -> Agent | None:
        """The agent of that name."""
        return self._agents.get(name)

    def trainers(self, channel: Channel) -> list[Agent]:
        """The trainers of `channel`, who was heard of last at the end."""
        return [agent for agent in self._agents.values() if agent.role is Role.TRAINER and agent.channel == channel]

    def lost(self, now: float) -> list[Agent]:
        """Who has not been heard of, or has had no connection, for too long."""
        silent = list(takewhile(lambda agent: self._silent_at(agent) <= now, self._agents.values()))
        away = takewhile(lambda name: self._away[name] + self._limits.reconnect_s <= now, self._away)
        return silent + [agent for agent in map(self._agents.__getitem__, away) if self._silent_at(agent) > now]

    def silent_since(self, at: float) -> tuple[Peer, ...]:
        """The connections of those who have said nothing since then."""
        silent = takewhile(lambda agent: agent.heard_at <= at, self._agents.values())
        return tuple([agent.peer for agent in silent if agent.peer is not None])

    def why_lost(self, agent: Agent, now: float) -> str:
        """Why this agent is not waited for any longer; empty while it is."""
        silence = f"was silent for {now - agent.heard_at:.1f} s"
        gone_at = self._away.get(agent.name)
        if gone_at is not None and gone_at + self._limits.reconnect_s <= now:
            return f"{silence}, and its connection is gone"
        return silence if self._silent_at(agent) <= now else ""

    def next_deadline(self) -> float | None:
        """When the next agent will be lost, if nothing is heard of it."""
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
                raise InvariantBroken(f"connection {peer!r} is {name}'s, who does not sit on it")
        heard_at = float("-inf")
        for agent in self._agents.values():
            if agent.heard_at < heard_at:
                raise InvariantBroken("agents are not in the order in which they were last heard of")
            heard_at = agent.heard_at
            if agent.peer is not None and self._by_peer.get(agent.peer) != agent.name:
                raise InvariantBroken(f"{agent.name} sits on {agent.peer!r}, which does not know it")
            if (server := _server(agent.engine)) and self._by_server.get(server) != agent.name:
                raise InvariantBroken(f"{agent.name} is beside {server}, which is {self._by_server.get(server)}'s")
        if not self._agents.keys() >= set(self._by_server.values()):
            raise InvariantBroken("a server is held by somebody who is not here")


def _server(engine: EngineInfo | None) -> str:
    """By which a server is known; empty for agents without one."""
    return engine.url.rstrip("/").lower() if engine else ""
