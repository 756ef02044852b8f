"""How much one agent may say. Pure: whoever floods is slowed down, and cut off while it goes on; nobody else notices.

A few thousand messages at once are well, because whoever comes back says much; `RATE` a second go on for ever. What is
above is dropped like anything that gets lost on the way, unread: agents repeat what is not answered. Who had `PATIENCE`
messages dropped before it came back to half of its room is not listened to until it was quiet for `PENANCE_S`.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Final

RATE: Final = 2_000.0
"""Messages a second. An agent that asks and waits, the fastest there is, says fewer."""
BURST: Final = 10_000
PATIENCE: Final = 50_000
PENANCE_S: Final = 5.0
REMEMBERED: Final = 8_192
"""Speakers; those that are within their rate are forgotten beyond it, or beyond twice as many as are not, which changes
nothing for them."""


class Pace(enum.Enum):
    """What is done with one message."""

    TAKEN = "taken"
    SLOWED = "slowed"
    """The first one that is dropped."""
    CUT = "cut"
    """The one with which the speaker is cut off."""
    DROPPED = "dropped"


_TAKEN: Final = Pace.TAKEN
"""A name of its own: members of an enum are looked up through their class, which takes as long as all the rest."""


class Throttle:
    """One number for each speaker: until when what it has said would have taken it at `RATE`."""

    def __init__(self, rate: float = RATE, burst: int = BURST, patience: int = PATIENCE) -> None:
        self._cost_s = 1.0 / rate
        self._room_s = burst / rate
        self._patience = patience
        self._most = REMEMBERED
        self._busy_until: dict[str | bytes, float] = {}
        self._dropped: Counter[str | bytes] = Counter()
        """By those that flood, since they began to."""

    def __len__(self) -> int:
        return len(self._busy_until)

    def pace(self, who: str | bytes, now: float) -> Pace:
        """Count one message of `who` at `now`, and say what becomes of it."""
        until = self._busy_until.get(who)
        if until is None or until < now:  # nearly always
            if until is None and len(self._busy_until) >= self._most:
                self._forget(now)
            until = now
        if until - now <= self._room_s:
            self._busy_until[who] = until + self._cost_s
            if self._dropped and until - now <= self._room_s / 2:
                self._dropped.pop(who, None)
            return _TAKEN
        self._dropped[who] += 1
        if self._dropped[who] >= self._patience:
            self._busy_until[who] = now + self._room_s + PENANCE_S
        return {1: Pace.SLOWED, self._patience: Pace.CUT}.get(self._dropped[who], Pace.DROPPED)

    def _forget(self, now: float) -> None:
        self._busy_until = {who: until for who, until in self._busy_until.items() if until > now}
        self._most = max(REMEMBERED, 2 * len(self._busy_until))  # else every message might look at all of them
