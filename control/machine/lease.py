"""The lease of a channel: at most one trainer may publish, under an epoch that only grows. Pure.

The lease keeps trainers from wasted work. The epoch is what keeps a former holder from changing anything: every
receiver compares it, whatever the clock says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from ..protocol import (
    Acquire,
    AgentId,
    Channel,
    EngineInfo,
    Epoch,
    Granted,
    HeldVersion,
    Incarnation,
    InvariantBroken,
    RefusalCode,
    Version,
)
from .effects import EpochTaken, LeaseEnded, LeaseGranted
from .limits import Limits
from .membership import Agent
from .reply_cache import YES, Decision
from .route import Route, may_defer_digests
from .states import BEFORE_COMMIT, RoundState


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


def may_acquire(
    lease: Lease | None,
    agent: AgentId,
    incarnation: Incarnation,
    *,
    round_: RoundState | None,
    now: float,
    lease_s: float,
) -> Decision:
    """Whether `agent` may acquire the lease. It may replace its own unused lease, but not during a round.

    `round_` is the state of the running round. A trainer whose own round can only end by now is told to wait for that.
    """
    in_round = round_ is not None
    if lease is None and not in_round:
        return YES
    if lease is None:
        return Decision(RefusalCode.LEASE_HELD, "the last round is still coming to its end", 1.0)
    mine = lease.holder == agent and lease.incarnation == incarnation
    if mine and not in_round:
        return YES
    if mine and round_ not in BEFORE_COMMIT:
        return Decision(
            RefusalCode.LEASE_HELD, f"your round at epoch {lease.epoch} is still coming to its end", _ENDING_S
        )
    if mine:
        return Decision(
            RefusalCode.NOT_ALLOWED, f"your round at epoch {lease.epoch} is running: wait for RoundDone or Abandon it"
        )
    remaining = max(0.0, lease.expires_at(lease_s) - now)
    reason = f"{lease.holder} holds the channel at epoch {lease.epoch} for version {lease.version}"
    return Decision(RefusalCode.LEASE_HELD, reason, max(0.1, min(remaining, 1.0)))


def may_use(lease: Lease | None, agent: AgentId, incarnation: Incarnation, epoch: Epoch, highest: Epoch) -> Decision:
    """Whether `agent` may act under `epoch`, where `highest` is the highest epoch ever taken in the channel."""
    if epoch > highest:
        return Decision(RefusalCode.NOT_ALLOWED, f"epoch {epoch} was never granted; the highest is {highest}")
    if lease is None:
        return Decision(RefusalCode.STALE_EPOCH, f"epoch {epoch} has ended; acquire again")
    if lease.holder != agent or lease.incarnation != incarnation:
        return Decision(
            RefusalCode.STALE_EPOCH, f"{lease.holder} has been granted epoch {lease.epoch} since; acquire again"
        )
    if epoch != lease.epoch:
        return Decision(RefusalCode.STALE_EPOCH, f"found epoch {epoch}, expected {lease.epoch}; acquire again")
    return YES


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

    def request(self, agent: Agent, message: Acquire, epoch: Epoch) -> EpochTaken:
        """Note the request of `agent`. Returns the record that must be durable before the lease is granted."""
        self._requested = (agent, message)
        return EpochTaken(
            channel=self._channel, epoch=epoch, holder=agent.name, version=message.version, rollback=message.rollback
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
