"""The agents that are alive, what each may do, and which trainer has the lease of a channel, until when. Pure.

A name belongs to one incarnation at a time. A newer incarnation gets it when the connection of the old one is gone, or
when the old one was silent for `takeover_s`: long enough for several heartbeats of a live agent, short enough for a
sidecar that was killed and restarted to be back before it counts as lost.

A server belongs to one engine agent at a time, in all channels: two agents would pause and load it against each other,
and the ready list would name it twice. Two agents have one server if they name one URL, if what the server says of its
launch is equal (it may be reached at several addresses), or if it listens on one socket (which outlasts a launch: until
the first agent has seen the new one, or is lost, its entry stands for the socket). Another agent gets the server once
the first one has said Bye or is lost, not while it may still reconnect: a short disconnect must not hand a server to an
agent that was started by mistake.

At most one trainer may publish in a channel, under an epoch that only grows. The lease keeps trainers from wasted work.
The epoch is what keeps a former holder from changing anything: every receiver compares it, whatever the clock says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, get_args

import msgspec

from ..protocol import (
    PROTOCOL,
    Acquire,
    AgentId,
    Bye,
    Channel,
    EngineInfo,
    EngineMessage,
    Epoch,
    GetBlob,
    GetStatus,
    Granted,
    Heartbeat,
    HeldVersion,
    Hello,
    Incarnation,
    InvariantBroken,
    RefusalCode,
    RequestId,
    Role,
    ToCoordinator,
    Topology,
    TrainerInfo,
    TrainerMessage,
    Version,
)
from .effects import EpochTaken, LeaseEnded, LeaseGranted, Peer, Principal
from .states import BEFORE_COMMIT, YES, Decision, Limits, RoundState, Route, earlier, may_defer_digests


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


LINEAGE: Final = 4096
"""Process generations of servers of which the last agent is remembered."""


class Ownership(NamedTuple):
    """The agent that has one process generation of a server, or had it last."""

    hello: RequestId
    """Key of its `Hello`; the agent writes it down once it is welcomed."""
    incarnation: Incarnation
    follows: str
    """As it said in that `Hello`."""
    doubted: bool
    """As it was answered."""


class Membership:
    """The agents that count as alive."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._agents: dict[AgentId, Agent] = {}
        self._by_peer: dict[Peer, AgentId] = {}
        self._by_server: dict[str, AgentId] = {}
        """The agent of each server, by every key of `_servers`."""
        self._last_agents: dict[str, Ownership] = {}
        """The agent that was welcomed last for each generation of a server, the newest `LINEAGE`, the oldest first."""
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
        others = (self._by_server.get(server) for server in _servers(hello.engine))
        holder = next((name for name in others if name not in (None, hello.agent)), None)
        if holder is None or hello.engine is None:
            return YES
        rival, url = self._agents[holder], hello.engine.url
        found = f"{rival.name!r} of channel {rival.channel!r} answers for the server at {url}"
        advice = "if they are different servers, tell each agent with --url where clients reach its own"
        if rival.engine and _address(rival.engine) != _address(hello.engine):
            same = rival.engine.generation == hello.engine.generation
            why = "one process, by what it says of its start" if same else "one listening socket of one host"
            found = f"{found}, which it reaches at {rival.engine.url} (both are {why})"
            advice = f"if {hello.agent!r} is for another server, give it the address of that one with --server"
        reason = f"{found}, last heard of {now - rival.heard_at:.1f} s ago: one server, one agent. Stop one of the two;"
        return Decision(RefusalCode.SERVER_TAKEN, f"{reason} {advice}", self._limits.takeover_s)

    def note_owner(self, hello: Hello) -> bool:
        """Note that the agent of `hello` has its server from now on.

        Returns whether another agent had it since this one wrote down what it knows of the server's weights. A repeated
        `Hello` gets the same answer: the agent may not have heard the first one.
        """
        engine = hello.engine
        if engine is None or not engine.generation:
            return False
        last = self._last_agents.pop(engine.generation, None)
        if last is None or engine.follows == last.hello:
            doubted = False
        elif hello.request == last.hello or (hello.incarnation, engine.follows) == (last.incarnation, last.follows):
            doubted = last.doubted
        else:
            doubted = True
        self._last_agents[engine.generation] = Ownership(hello.request, hello.incarnation, engine.follows, doubted)
        if len(self._last_agents) > LINEAGE:
            del self._last_agents[next(iter(self._last_agents))]
        return doubted

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
        self._by_server.update(dict.fromkeys(_servers(hello.engine), hello.agent))
        return agent

    def heard(self, agent: Agent, now: float) -> None:
        """Mark `agent` as heard at `now`: it said something that it may say. A refused message is no sign of life."""
        agent.heard_at = now
        self._agents[agent.name] = self._agents.pop(agent.name)  # at the end: the most silent agent stays first

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
        for server in _servers(agent.engine) if agent else ():
            if self._by_server.get(server) == name:
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
            for server in _servers(agent.engine):
                if (owner := self._by_server.get(server)) != agent.name:
                    raise InvariantBroken(f"{agent.name} is the agent of {server}, which is {owner}'s")
        if not self._agents.keys() >= set(self._by_server.values()):
            raise InvariantBroken("a server belongs to an agent that is not here")


def _servers(engine: EngineInfo | None) -> tuple[str, ...]:
    """Keys of an agent's server: its URL and, as far as they are known, its process generation and its socket."""
    if engine is None:
        return ()
    known = ("generation", engine.generation), ("socket", engine.socket)
    return (_address(engine), *(f"{what} {value}" for what, value in known if value))


def _address(engine: EngineInfo) -> str:
    return engine.url.rstrip("/").lower()


ALLOWED: Final[Mapping[type, frozenset[Role]]] = {
    **dict.fromkeys((Hello, Heartbeat, Bye, GetStatus), frozenset(Role)),
    **dict.fromkeys((Topology, GetBlob), frozenset({Role.TRAINER, Role.ENGINE})),
    **dict.fromkeys(get_args(TrainerMessage), frozenset({Role.TRAINER})),
    **dict.fromkeys(get_args(EngineMessage), frozenset({Role.ENGINE})),
}
"""The roles that may send each message. A message type without a row fails a test."""


def may_say(agent: Agent, message: ToCoordinator, principal: Principal | None) -> Decision:
    """Whether `agent` may send `message`: its role allows it, and the message is about its own channel.

    With keys, `principal` is the owner of the connection's key by the allow-list of now. Its name and role must be
    those of the agent's `Hello`; the comparison is skipped while the principal is the one of the `Hello`.
    """
    channel: Channel = getattr(message, "channel", agent.channel)
    if principal is agent.principal and agent.role in ALLOWED[type(message)] and channel == agent.channel:
        return YES
    if reason := _not_the_agents_key(agent, principal):
        return Decision(RefusalCode.NOT_ALLOWED, reason)
    if agent.role not in ALLOWED[type(message)]:
        return Decision(RefusalCode.NOT_ALLOWED, f"not for the role {agent.role.value}")
    if channel != agent.channel:
        return Decision(RefusalCode.NOT_ALLOWED, f"{agent.name} joined channel {agent.channel!r}, not {channel!r}")
    if principal and not principal.covers(channel):
        return Decision(RefusalCode.NOT_ALLOWED, f"{agent.name}'s key is not trusted in channel {channel!r}")
    return YES


def _not_the_agents_key(agent: Agent, principal: Principal | None) -> str:
    if not principal and not agent.principal:
        return ""
    if principal is None or principal.name != agent.name:
        found = f"{principal.name!r}'s" if principal else "not on the allow-list"
        return f"the connection's key is {found}, not {agent.name!r}'s"
    if principal.role is not agent.role:
        return f"{agent.name!r} is trusted as {principal.role.value} now, and joined as {agent.role.value}"
    return ""


def may_join(
    message: Hello, principal: Principal | None, current: Agent | None, known: Agent | None, *, keyed: bool = False
) -> Decision:
    """Whether an agent may join.

    `principal` is the owner of the connection's key, `current` the agent that joined on this connection before, `known`
    the agent that has the name. With `keyed` every agent needs a trusted key.
    """
    if message.protocol != PROTOCOL:
        older = "agent" if message.protocol < PROTOCOL else "coordinator"
        reason = f"found protocol {message.protocol}, expected {PROTOCOL}: upgrade the {older}"
        return Decision(RefusalCode.PROTOCOL_MISMATCH, reason)
    if keyed and not principal:
        return Decision(RefusalCode.NOT_ALLOWED, f"{message.agent!r} came without a key that is trusted")
    return (
        Decision(RefusalCode.NOT_ALLOWED, reason) if (reason := _objection(message, principal, current, known)) else YES
    )


def _objection(message: Hello, principal: Principal | None, current: Agent | None, known: Agent | None) -> str:
    if principal and (reason := _not_by_key(message, principal)):
        return reason
    if (message.engine is not None) is not (message.role is Role.ENGINE):
        return "an engine, and no other role, describes an engine in Hello"
    if (message.trainer is not None) is not (message.role is Role.TRAINER):
        return "a trainer, and no other role, describes a trainer in Hello"
    if current and current.name != message.agent:
        return f"this connection is {current.name!r}'s: one connection, one agent"
    same = known is not None and known.incarnation == message.incarnation
    if known and same and (known.role, known.channel) != (message.role, message.channel):
        return f"{message.agent!r} is {known.role.value} of channel {known.channel!r}"
    return ""


def _not_by_key(message: Hello, principal: Principal) -> str:
    """Why the key does not cover this agent: a key is valid for one name, in one role, in its channels."""
    if principal.name != message.agent:
        return f"the connection's key is {principal.name!r}'s, not {message.agent!r}'s"
    if principal.role is not message.role:
        found = f"{message.agent!r} is trusted as {principal.role.value}, not as {message.role.value}"
        added = f"`weightbus trust add NAME --role {message.role.value} --channels {message.channel}`"
        return f"{found}: name the agent that is with --name, or make it by `weightbus keygen NAME` and {added}"
    if not principal.covers(message.channel):
        found = f"{message.agent!r} is trusted in {', '.join(principal.channels)}, not in {message.channel!r}"
        channels = ",".join((*principal.channels, message.channel))
        wider = f"`weightbus trust add {message.agent} --role {message.role.value} --channels {channels}`"
        return f"{found}: name one of those with --channel, or run {wider} where the coordinator runs"
    return ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to publish one version of a channel."""

    holder: AgentId
    incarnation: Incarnation
    epoch: Epoch
    """Present epoch; it rises with every retry or wave. The holder learns it from `Send`."""
    first_epoch: Epoch
    """Epoch as granted."""
    version: Version
    granted_at: float
    heard_at: float
    rollback: bool = False
    """True if the channel may go back to a lower version under this lease."""

    def expires_at(self, lease_s: float) -> float:
        """The time at which the lease ends if the holder stays silent."""
        return self.heard_at + lease_s


_ENDING_S: Final = 0.2
"""Seconds after which to acquire again while a round ends: most engines resume in less."""


class LateGrant(msgspec.Struct, frozen=True):
    """The answer to an `Acquire`, which had to wait for the journal."""

    agent: AgentId
    request: Acquire
    answer: Granted | Decision


class LeaseHolder:
    """The lease of one channel, and the request that waits for its epoch to become durable."""

    def __init__(self, channel: Channel, limits: Limits, event_trace: Sequence[object]) -> None:
        self.lease: Lease | None = None
        self._channel = channel
        self._limits = limits
        self._event_trace = event_trace
        self._requested: tuple[Agent, Acquire] | None = None

    def held_by(self, agent: Agent) -> bool:
        """Whether this incarnation holds the lease."""
        return self.lease is not None and (self.lease.holder, self.lease.incarnation) == (agent.name, agent.incarnation)

    def may_acquire(self, agent: Agent, round_: RoundState | None, now: float) -> Decision:
        """Whether `agent` may acquire the lease. It may replace its own unused lease, but not during a round.

        `round_` is the state of the running round. A trainer with a round that can only end by now is told to wait.
        """
        lease, mine = self.lease, self.held_by(agent)
        if round_ is None and (lease is None or mine):
            return YES
        if lease is None:
            return Decision(RefusalCode.LEASE_HELD, "the last round is still coming to its end", 1.0)
        own = f"your round at epoch {lease.epoch} is"
        if mine and round_ not in BEFORE_COMMIT:
            return Decision(RefusalCode.LEASE_HELD, f"{own} still coming to its end", _ENDING_S)
        if mine:
            return Decision(RefusalCode.NOT_ALLOWED, f"{own} running: wait for RoundDone or Abandon it")
        remaining = max(0.0, lease.expires_at(self._limits.lease_s) - now)
        reason = f"{lease.holder} holds the channel at epoch {lease.epoch} for version {lease.version}"
        return Decision(RefusalCode.LEASE_HELD, reason, max(0.1, min(remaining, 1.0)))

    def may_use(self, agent: Agent, epoch: Epoch, highest: Epoch) -> Decision:
        """Whether `agent` may act under `epoch`, where `highest` is the highest epoch ever taken in the channel."""
        lease = self.lease
        if epoch > highest:
            return Decision(RefusalCode.NOT_ALLOWED, f"epoch {epoch} was never granted; the highest is {highest}")
        if lease is None:
            found = f"epoch {epoch} has ended"
        elif not self.held_by(agent):
            found = f"{lease.holder} has been granted epoch {lease.epoch} since"
        elif epoch != lease.epoch:
            found = f"found epoch {epoch}, expected {lease.epoch}"
        else:
            return YES
        return Decision(RefusalCode.STALE_EPOCH, f"{found}; acquire again")

    def request(self, agent: Agent, message: Acquire, epoch: Epoch) -> EpochTaken:
        """Note the request of `agent`. Returns the record that must be durable before the lease is granted."""
        self._requested = (agent, message)
        return EpochTaken(
            channel=self._channel,
            epoch=epoch,
            holder=agent.name,
            version=message.version,
            rollback=message.rollback,
            run=message.run,
        )

    def grant(
        self,
        record: EpochTaken,
        committed: HeldVersion | None,
        engines: Mapping[AgentId, EngineInfo],
        routes: Callable[[Agent], Mapping[AgentId, Route]],
        now: float,
    ) -> tuple[LeaseEnded | LateGrant | LeaseGranted, ...]:
        """The epoch is durable: grant the lease to the trainer that requested it.

        `routes` gives the routes of a trainer that has reported its topology.
        """
        if self._requested is None:
            raise InvariantBroken(f"epoch {record.epoch} is durable, but no trainer requested it", self._event_trace)
        agent, message = self._requested
        self._requested = None
        ended = self.end("its holder acquired again")
        self.lease = Lease(
            holder=agent.name,
            incarnation=agent.incarnation,
            epoch=record.epoch,
            first_epoch=record.epoch,
            version=message.version,
            granted_at=now,
            heard_at=now,
            rollback=message.rollback,
        )
        told: Mapping[AgentId, Route] = routes(agent) if agent.topology else {}
        granted = Granted(
            request=message.request,
            channel=self._channel,
            epoch=record.epoch,
            lease_s=self._limits.lease_s,
            committed=committed,
            engines={str(name): info for name, info in engines.items()},
            routes={str(name): each.transport for name, each in told.items() if each.transport},
            may_defer_digests=may_defer_digests(told.values()),
        )
        note = LeaseGranted(channel=self._channel, holder=agent.name, epoch=record.epoch, version=message.version)
        return (*ended, LateGrant(agent.name, message, granted), note)

    def refuse(self, reason: str) -> tuple[LateGrant, ...]:
        """The epoch could not be written: tell the trainer to acquire again later."""
        requested, self._requested = self._requested, None
        if requested is None:
            return ()
        agent, message = requested
        return (LateGrant(agent.name, message, Decision(RefusalCode.READ_ONLY, reason, retry_after_s=2.0)),)

    def epoch_raised(self, epoch: Epoch) -> None:
        """The lease goes on under a higher epoch."""
        if self.lease:
            self.lease = msgspec.structs.replace(self.lease, epoch=epoch)

    def heard(self, agent: Agent, now: float) -> None:
        """A trainer is alive: if it holds the lease, the lease is extended."""
        if self.lease and self.held_by(agent):
            self.lease = msgspec.structs.replace(self.lease, heard_at=now)

    def end(self, reason: str) -> tuple[LeaseEnded, ...]:
        """End the lease, if there is one."""
        lease, self.lease = self.lease, None
        if lease is None:
            return ()
        return (LeaseEnded(channel=self._channel, holder=lease.holder, epoch=lease.epoch, reason=reason),)

    def next_deadline(self, *, in_round: bool) -> float | None:
        """The time at which the lease ends unless its holder is heard, or publishes."""
        if self.lease is None:
            return None
        silent = self.lease.expires_at(self._limits.lease_s)
        return silent if in_round else min(silent, self.lease.granted_at + self._limits.publish_s)

    def overdue(self, now: float, *, in_round: bool) -> str:
        """Why the lease ends at `now`; empty if it does not."""
        due = self.next_deadline(in_round=in_round)
        if self.lease is None or due is None or now < due:
            return ""
        if now >= self.lease.expires_at(self._limits.lease_s):
            return f"silent for {now - self.lease.heard_at:.1f} s"
        return f"nothing published within {self._limits.publish_s:.0f} s"
