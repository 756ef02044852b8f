"""The group of the last round, kept for the next one by each of its members: forming one takes longer than many rounds.

It is used again only where everybody who is in it says that it still has it, and nobody else takes part (sends.py). A
group that was broken, that waited for somebody in vain, or whose members are not the same any more is let go of; so is
one that nobody has used for a while. Letting go waits for nobody: some of the others may be dead.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from .joining import Forming
from .pair_group import PairGroup

SLACK_S: Final = 60.0
"""A group is there for so much longer than it is spoken of: who said that it has one still has it when it is used."""


class Standing:
    """Of one member. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: PairGroup | None = None
        self._forming: Forming | None = None
        """Begun before anybody said that it will be used."""
        self._name = ""
        self._until = 0.0
        self._timer: threading.Timer | None = None

    @property
    def name(self) -> str:
        """Of the group that can be used again; empty when there is none."""
        with self._lock:
            usable = self._group is not None and not self._group.broken and time.monotonic() < self._until
            return self._name if usable else ""

    def keep(self, name: str, group: PairGroup, keep_s: float) -> None:
        """Everything has moved in `group`, which may be used again within `keep_s`."""
        self.discard()
        if keep_s <= 0 or group.broken:
            return group.close()
        timer = threading.Timer(keep_s + SLACK_S, self._expired, (name,))
        timer.name, timer.daemon = "weightbus-standing", True
        with self._lock:
            self._group, self._name, self._until, self._timer = group, name, time.monotonic() + keep_s, timer
        timer.start()
        return None

    def begin(self, forming: Forming) -> None:
        """A group forms that may be asked for until it is called off. So may the one that is kept, instead."""
        self.call_off()
        with self._lock:
            self._forming = forming

    def call_off(self) -> None:
        """Nobody will ask for what forms."""
        with self._lock:
            forming, self._forming = self._forming, None
        if forming is not None:
            forming.discard()

    def take(self, name: str) -> PairGroup | None:
        """The group of that name, which is the caller's now. Any other one is let go of.

        One that still forms is waited for. Raises `TransferFailed` where it did not.
        """
        with self._lock:
            known = self._let_go() if self._name == name and self._group is not None else None
            forming = self._forming if self._forming is not None and self._forming.name == name else None
            if forming is not None:
                self._forming = None
        self.discard()
        if known is not None and known.broken:
            known.drop()
            return None
        return forming.result() if forming is not None else known

    def discard(self) -> None:
        """Let go of it, whoever is still in it."""
        self.call_off()
        with self._lock:
            group = self._let_go()
        if group is not None:
            group.drop()

    def _expired(self, name: str) -> None:
        with self._lock:
            group = self._let_go() if self._name == name else None
        if group is not None:
            group.drop()

    def _let_go(self) -> PairGroup | None:
        group, self._group, self._name = self._group, None, ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return group
