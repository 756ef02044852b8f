"""Who may change a channel: at most one trainer, under an epoch that only grows. Pure; verdicts carry their reason.

A lease is a courtesy that keeps trainers from wasting work. What keeps a former holder from changing anything is the
epoch: whoever receives a message compares it, whatever the clock says.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .ids import AgentId, Epoch, Incarnation, Version
from .messages import Code
from .states import BEFORE_COMMIT, RoundState


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to publish one version of a channel."""

    holder: AgentId
    incarnation: Incarnation
    epoch: Epoch
    """Rises when engines are re-driven; the holder learns it from `Send`."""
    first_epoch: Epoch
    """As granted."""
    version: Version
    granted_at: float
    heard_at: float
    rollback: bool = False
    """The channel may go back under it."""

    def expires_at(self, lease_s: float) -> float:
        """When the lease ends if the holder stays silent."""
        return self.heard_at + lease_s


class Verdict(msgspec.Struct, frozen=True):
    """An answer and why. `code` is set when the answer is no."""

    code: Code | None
    reason: str = ""
    retry_after_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing speaks against it."""
        return self.code is None


YES = Verdict(None)
_ENDING_S: Final = 0.2
"""Engines that resume are mostly through in less."""


def may_acquire(
    lease: Lease | None,
    agent: AgentId,
    incarnation: Incarnation,
    *,
    round_: RoundState | None,
    now: float,
    lease_s: float,
) -> Verdict:
    """Whether `agent` may take the channel. Its own unused lease does not stand in its way; a running round does.

    `round_` is the state of that. One that can only come to its end is waited for, whosever it is.
    """
    in_round = round_ is not None
    if lease is None and not in_round:
        return YES
    if lease is None:
        return Verdict(Code.LEASE_HELD, "the last round is still coming to its end", 1.0)
    mine = lease.holder == agent and lease.incarnation == incarnation
    if mine and not in_round:
        return YES
    if mine and round_ not in BEFORE_COMMIT:
        return Verdict(Code.LEASE_HELD, f"your round at epoch {lease.epoch} is still coming to its end", _ENDING_S)
    if mine:
        return Verdict(
            Code.NOT_ALLOWED, f"your round at epoch {lease.epoch} is running: wait for RoundDone or Abandon it"
        )
    remaining = max(0.0, lease.expires_at(lease_s) - now)
    reason = f"{lease.holder} holds the channel at epoch {lease.epoch} for version {lease.version}"
    return Verdict(Code.LEASE_HELD, reason, max(0.1, min(remaining, 1.0)))


def may_use(lease: Lease | None, agent: AgentId, incarnation: Incarnation, epoch: Epoch, highest: Epoch) -> Verdict:
    """Whether `agent` may act under `epoch`, where `highest` is the highest epoch ever taken in the channel."""
    if epoch > highest:
        return Verdict(Code.NOT_ALLOWED, f"epoch {epoch} was never granted; the highest is {highest}")
    if lease is None:
        return Verdict(Code.STALE_EPOCH, f"epoch {epoch} has ended; acquire again")
    if lease.holder != agent or lease.incarnation != incarnation:
        return Verdict(Code.STALE_EPOCH, f"{lease.holder} has been granted epoch {lease.epoch} since; acquire again")
    if epoch != lease.epoch:
        return Verdict(Code.STALE_EPOCH, f"found epoch {epoch}, expected {lease.epoch}; acquire again")
    return YES
