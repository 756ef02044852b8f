"""How many messages one agent may send. Pure: a flood slows down, and then cuts off, its sender and no other agent.

Bursts of a few thousand messages are accepted, because an agent that reconnects has much to say; `RATE` a second may go
on for ever. Messages above that are dropped unread, like any that are lost on the way: agents repeat requests without a
reply. After `DROPS_BEFORE_CUT_OFF` dropped messages, without a pause that frees half of the burst, an agent is cut off
until it was quiet for `CUT_OFF_S`.
"""

from __future__ import annotations

import enum
from typing import Final

RATE: Final = 2_000.0
"""Messages a second. The fastest agent, which sends a request and waits for each reply, stays below."""
BURST: Final = 10_000
DROPS_BEFORE_CUT_OFF: Final = 50_000
CUT_OFF_S: Final = 5.0
MAX_ACCOUNTS: Final = 8_192
"""Accounts kept; beyond that, or beyond twice the number of agents over their rate, accounts within their rate are
forgotten, which changes nothing for their agents."""


class RateDecision(enum.Enum):
    """The fate of one message."""

    TAKEN = "taken"
    SLOWED = "slowed"
    """Dropped, as the first one above the rate."""
    CUT = "cut"
    """Dropped, and its sender is cut off from here on."""
    DROPPED = "dropped"


_TAKEN: Final = RateDecision.TAKEN
"""A name of its own: the lookup of an enum's member would take as long as all the rest."""


class Account:
    """The messages of one agent, as the time until which they would have lasted at the rate."""

    __slots__ = ("_burst_s", "_cost_s", "_dropped", "_patience", "until")

    def __init__(self, rate: float, burst: int, patience: int) -> None:
        self.until = 0.0
        self._cost_s, self._burst_s, self._patience = 1.0 / rate, burst / rate, patience
        self._dropped = 0
        """Messages dropped since the flood began."""

    def count_message(self, now: float) -> RateDecision:
        """Count one message at `now`; returns its fate."""
        until = self.until
        if until < now:  # nearly always
            self.until, self._dropped = now + self._cost_s, 0
            return _TAKEN
        if until - now <= self._burst_s:
            self.until = until + self._cost_s
            if until - now <= self._burst_s / 2:
                self._dropped = 0
            return _TAKEN
        self._dropped += 1
        if self._dropped >= self._patience:
            self.until = now + self._burst_s + CUT_OFF_S
        return {1: RateDecision.SLOWED, self._patience: RateDecision.CUT}.get(self._dropped, RateDecision.DROPPED)


class RateLimiter:
    """An account for each agent's key."""

    def __init__(self, rate: float = RATE, burst: int = BURST, patience: int = DROPS_BEFORE_CUT_OFF) -> None:
        self._limits = rate, burst, patience
        self._full_at = MAX_ACCOUNTS
        self._accounts: dict[str | bytes, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def full(self) -> bool:
        """True if it is time to `forget`."""
        return len(self._accounts) >= self._full_at

    def account(self, key: str | bytes) -> Account:
        """The account of `key`. A caller that keeps it checks `full` with every new connection."""
        known = self._accounts.get(key)
        if known is None:
            known = self._accounts[key] = Account(*self._limits)
        return known

    def forget(self, now: float) -> None:
        """Drop the accounts that are within their rate."""
        self._accounts = {key: account for key, account in self._accounts.items() if account.until > now}
        self._full_at = max(MAX_ACCOUNTS, 2 * len(self._accounts))  # else every message might look at all of them
