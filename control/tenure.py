"""The lease of one channel through time: asked for, granted once its epoch is durable, kept alive, ended. Pure.

lease.py says who may; here is who does. What is to be sent and noted goes to the channel's `out`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from .effects import EpochTaken, LeaseEnded, LeaseGranted
from .errors import InvariantBroken
from .ids import AgentId, Channel, Epoch
from .lease import Lease, Verdict
from .limits import Limits
from .membership import Agent
from .messages import Acquire, Code, EngineInfo, Granted, Held
from .routes import Route, may_leave_open


class Late(msgspec.Struct, frozen=True):
    """The answer to a request that had to wait for the journal."""

    agent: AgentId
    question: Acquire
    answer: Granted | Verdict


class Tenure:
    """Who holds the channel, and who waits for an epoch to become durable."""

    def __init__(self, channel: Channel, limits: Limits, story: Sequence[object]) -> None:
        self.lease: Lease | None = None
        self._channel = channel
        self._limits = limits
        self._story = story
        self._asked: tuple[Agent, Acquire] | None = None

    def held_by(self, agent: Agent) -> bool:
        """Whether the lease is this incarnation's."""
        return self.lease is not None and (self.lease.holder, self.lease.incarnation) == (agent.name, agent.incarnation)

    def ask(self, agent: Agent, message: Acquire, epoch: Epoch) -> EpochTaken:
        """Nothing speaks against the wish of `agent`: the record that has to be durable before it is granted."""
        self._asked = (agent, message)
        return EpochTaken(
            channel=self._channel, epoch=epoch, holder=agent.name, version=message.version, rollback=message.rollback
        )

    def grant(
        self,
        record: EpochTaken,
        committed: Held | None,
        engines: Mapping[AgentId, EngineInfo],
        routes: Callable[[Agent], Mapping[AgentId, Route]],
        now: float,
    ) -> tuple[LeaseEnded | Late | LeaseGranted, ...]:
        """The epoch is durable: the lease is that of whoever asked. `routes` are told to who said where it is."""
        if self._asked is None:
            raise InvariantBroken(f"epoch {record.epoch} is durable, but nobody asked for it", self._story)
        agent, message = self._asked
        self._asked = None
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
            may_leave_open=may_leave_open(told.values()),
        )
        note = LeaseGranted(channel=self._channel, holder=agent.name, epoch=record.epoch, version=message.version)
        return (*ended, Late(agent.name, message, granted), note)

    def refuse(self, reason: str) -> tuple[Late, ...]:
        """The epoch could not be written: whoever asked is told to come again."""
        asked, self._asked = self._asked, None
        if asked is None:
            return ()
        agent, message = asked
        return (Late(agent.name, message, Verdict(Code.READ_ONLY, reason, retry_after_s=2.0)),)

    def redriven(self, epoch: Epoch) -> None:
        """The lease goes on under a higher epoch."""
        if self.lease:
            self.lease = msgspec.structs.replace(self.lease, epoch=epoch)

    def heard(self, agent: Agent, now: float) -> None:
        """A trainer is alive; if it holds the lease, that goes on."""
        if self.lease and self.held_by(agent):
            self.lease = msgspec.structs.replace(self.lease, heard_at=now)

    def end(self, reason: str) -> tuple[LeaseEnded, ...]:
        """The channel is free, if it was not."""
        lease, self.lease = self.lease, None
        if lease is None:
            return ()
        return (LeaseEnded(channel=self._channel, holder=lease.holder, epoch=lease.epoch, reason=reason),)

    def next_deadline(self, *, in_round: bool) -> float | None:
        """When the lease ends if nothing is heard, or nothing published."""
        if self.lease is None:
            return None
        silent = self.lease.expires_at(self._limits.lease_s)
        return silent if in_round else min(silent, self.lease.granted_at + self._limits.publish_s)
