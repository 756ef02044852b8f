"""Registration: agents join, send heartbeats and leave, and their channels are told. Pure.

Each event returns the channel that has to be flushed after it, if there is one.
"""

from __future__ import annotations

from ..protocol import AgentId, Alive, Channel as ChannelId, Heartbeat, Hello, RefusalCode, Role, Topology, Welcome
from .authorization import may_join
from .channel import Channel
from .effect_queue import EffectQueue
from .effects import AgentJoined, AgentLeft
from .events import MessageReceived, Peer, TrustLost
from .limits import Limits
from .membership import Agent, Membership
from .reply_cache import Decision, Restored
from .route import Routing


class Registration:
    """Registers agents in `membership` and makes their channels on demand."""

    def __init__(
        self,
        boot: int,
        limits: Limits,
        routing: Routing,
        channels: dict[ChannelId, Channel],
        membership: Membership,
        *,
        out: EffectQueue,
        stride: int,
        keyed: bool,
    ) -> None:
        self._boot, self._limits, self._routing = boot, limits, routing
        self._channels, self._membership, self._out = channels, membership, out
        self._stride, self._keyed = stride, keyed

    # -- joining ----------------------------------------------------------------------------------------------------

    def may_enter(self, message: Hello, event: MessageReceived, before: Agent | None, now: float) -> Decision:
        """Whether an agent may join; `before` is the agent that has its name."""
        verdict = may_join(message, event.principal, self._membership.on(event.peer), before, keyed=self._keyed)
        if verdict.ok and message.channel not in self._channels and len(self._channels) >= self._limits.max_channels:
            found = f"{len(self._channels)} channels are known, max_channels = {self._limits.max_channels}"
            advice = "raise it, or have one forgotten that is not needed any more: `weightbus forget-channel NAME`"
            verdict = Decision(RefusalCode.NOT_ALLOWED, f"{found}: {advice}")
        return self._membership.verdict(message, event.peer, now) if verdict.ok else verdict

    def welcome(self, message: Hello, event: MessageReceived, before: Agent | None, now: float) -> Channel:
        """Register an agent; `before` is its own earlier registration, if this incarnation is known."""
        peer = event.peer
        if before and before.peer and before.peer != peer:
            self._out.evict(before.peer, "came back on another connection")
        agent = self._membership.join(message, peer, now, event.principal)
        if message.channel not in self._channels:
            self._channels[message.channel] = Channel(
                message.channel, self._limits, self._routing, Restored(), stride=self._stride
            )
        channel = self._channels[message.channel]
        self._out.send(
            peer,
            Welcome(
                request=message.request,
                boot=self._boot,
                epoch=channel.epoch,
                committed=channel.committed,
                heartbeat_s=self._limits.heartbeat_s,
                silence_s=self._limits.silence_s,
            ),
        )
        note = AgentJoined(
            agent=agent.name,
            role=agent.role,
            channel=agent.channel,
            incarnation=agent.incarnation,
            returning=before is not None,
        )
        self._out.observe(note)
        if agent.role is Role.ENGINE:
            channel.engine_joined(agent, now)
        elif agent.role is Role.TRAINER:
            channel.trainer_heard(agent, now)
            channel.trainer_joined(agent, now)
        return channel

    # -- alive ------------------------------------------------------------------------------------------------------

    def heartbeat(self, agent: Agent, message: Heartbeat, peer: Peer, now: float) -> Channel | None:
        """An agent is alive; the heartbeat of an engine may report a change of its server."""
        channel = self._channels[agent.channel]
        if message.seq:
            allowed = channel.allowed_versions
            committed = allowed.committed.version if allowed.committed else None
            self._out.send(peer, Alive(seq=message.seq, boot=self._boot, committed=committed, max_lag=allowed.max_lag))
        moved = agent.role is Role.ENGINE and channel.engine_heard(agent.name, message, now)
        return channel if moved else None

    def located(self, agent: Agent, message: Topology) -> None:
        """An agent reported its topology."""
        agent.topology = message
        if agent.role is Role.ENGINE:
            self._channels[agent.channel].engine_located(agent.name, message)

    # -- leaving ----------------------------------------------------------------------------------------------------

    def disconnected(self, peer: Peer, now: float) -> None:
        """A connection is gone. Its agent may reconnect within `reconnect_s`."""
        agent = self._membership.disconnect(peer, now)
        channel = self._channels.get(agent.channel) if agent else None
        if agent and channel and channel.round and channel.round.waits_for(agent.name):
            self._membership.expect(agent.name, now)

    def missed(self, channel: Channel, now: float) -> None:
        """Engines are about to pause for a trainer: if its connection is gone already, it has `reconnect_s` left."""
        agent = self._membership.get(channel.round.holder) if channel.round else None
        if agent and agent.peer is None:
            self._membership.expect(agent.name, now)

    def distrusted(self, event: TrustLost, now: float) -> Channel | None:
        """The allow-list has dropped an agent's key: remove the agent."""
        agent = self._membership.get(event.agent)
        return self.leave(agent, f"is not trusted any more: {event.reason}", now) if agent else None

    def give_up_on(self, name: AgentId, now: float) -> Channel | None:
        """Remove an agent if it was silent for too long."""
        agent = self._membership.get(name)
        reason = self._membership.why_lost(agent, now) if agent else ""
        return self.leave(agent, reason, now) if agent and reason else None

    def leave(self, agent: Agent, reason: str, now: float, *, evict: bool = True) -> Channel:
        """Remove an agent for good, with its lease and its part in a round."""
        self._membership.remove(agent.name)
        if evict and agent.peer:
            self._out.evict(agent.peer, reason)
        self._out.observe(AgentLeft(agent=agent.name, role=agent.role, channel=agent.channel, reason=reason))
        channel = self._channels[agent.channel]
        if agent.role is Role.ENGINE:
            channel.engine_lost(agent.name, reason, now)
        elif agent.role is Role.TRAINER:
            channel.trainer_lost(agent, reason, now)
        return channel
