"""How much one agent may say. Pure: whoever floods is slowed down, and cut off while it goes on; nobody else notices.

A few thousand messages at once are well, because whoever comes back says much; `RATE` a second go on for ever. What is
above is dropped like anything that gets lost on the way, unread: agents repeat what is not answered. Who had `PATIENCE`
messages dropped before it came back to half of its room is not listened to until it was quiet for `PENANCE_S`.
"""

from __future__ import annotations

import enum
from typing import Final

RATE: Final = 2_000.0
"""Messages a second. An agent that asks and waits, the fastest there is, says fewer."""
BURST: Final = 10_000
PATIENCE: Final = 50_000
PENANCE_S: Final = 5.0
REMEMBERED: Final = 8_192
"""Speakers; those that are within their rate are forgotten beyond it, or beyond twice as many as are not, which changes
nothing for them."""


class RateLimit(enum.Enum):
    """What is done with one message."""

    TAKEN = "taken"
    SLOWED = "slowed"
    """The first one that is dropped."""
    CUT = "cut"
    """The one with which the speaker is cut off."""
    DROPPED = "dropped"


_TAKEN: Final = RateLimit.TAKEN
"""A name of its own: members of an enum are looked up through their class, which takes as long as all the rest."""


class Account:
    """What one speaker has said: until when that would have taken it at the rate."""

    __slots__ = ("_cost_s", "_dropped", "_patience", "_room_s", "until")

    def __init__(self, rate: float, burst: int, patience: int) -> None:
        self.until = 0.0
        self._cost_s, self._room_s, self._patience = 1.0 / rate, burst / rate, patience
        self._dropped = 0
        """Since it began to flood."""

    def pace(self, now: float) -> RateLimit:
        """Count one message at `now`, and say what becomes of it."""
        until = self.until
        if until < now:  # nearly always
            self.until, self._dropped = now + self._cost_s, 0
            return _TAKEN
        if until - now <= self._room_s:
            self.until = until + self._cost_s
            if until - now <= self._room_s / 2:
                self._dropped = 0
            return _TAKEN
        self._dropped += 1
        if self._dropped >= self._patience:
            self.until = now + self._room_s + PENANCE_S
        return {1: RateLimit.SLOWED, self._patience: RateLimit.CUT}.get(self._dropped, RateLimit.DROPPED)


class RateLimiter:
    """An account for each speaker."""

    def __init__(self, rate: float = RATE, burst: int = BURST, patience: int = PATIENCE) -> None:
        self._terms = rate, burst, patience
        self._most = REMEMBERED
        self._accounts: dict[str | bytes, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def full(self) -> bool:
        """Whether it is time to `forget`."""
        return len(self._accounts) >= self._most

    def account(self, who: str | bytes) -> Account:
        """That of `who`; the same until it is forgotten. Whoever keeps one looks at `full` with every new speaker."""
        known = self._accounts.get(who)
        if known is None:
            known = self._accounts[who] = Account(*self._terms)
        return known

    def forget(self, now: float) -> None:
        """Speakers that are within their rate. Accounts of theirs that somebody keeps do not count any more."""
        self._accounts = {who: account for who, account in self._accounts.items() if account.until > now}
        self._most = max(REMEMBERED, 2 * len(self._accounts))  # else every message might look at all of them
