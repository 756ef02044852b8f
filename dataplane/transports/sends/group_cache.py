"""Groups of rounds before, kept for the next ones by each of their members: forming one takes longer than many rounds.

One is used again only where everybody who is in it says that it still has it, and nobody else takes part (sender.py). A
rank of the trainer has several where engines take turns, because no two that share a GPU are in one group over NCCL; a
worker has one. A group that was broken, that waited for somebody in vain, or whose members are not the same any more is
let go of; so is one that was not used for a while. Letting go does not wait: some of the others may be dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from .group_forming import GroupForming
from .p2p_group import P2PGroup

SLACK_S: Final = 60.0
"""A group is kept so much longer than it is named: a member that has said that it has one can still use it."""


class _Kept(NamedTuple):
    group: P2PGroup
    until: float
    timer: threading.Timer


class GroupCache:
    """Of one member. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        """By name."""
        self._forming: GroupForming | None = None
        """Begun before it is known that it will be used."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the groups that can be used again."""
        now = time.monotonic()
        with self._lock:
            return tuple(name for name, each in self._kept.items() if not each.group.broken and now < each.until)

    def keep(self, name: str, group: P2PGroup, keep_s: float) -> None:
        """Everything has moved in `group`, which may be used again within `keep_s`."""
        self._drop([name])
        if keep_s <= 0 or group.broken:
            return group.close()
        timer = threading.Timer(keep_s + SLACK_S, self._drop, ([name],))
        timer.name, timer.daemon = "weightbus-standing", True
        with self._lock:
            self._kept[name] = _Kept(group, time.monotonic() + keep_s, timer)
        timer.start()
        return None

    def begin(self, forming: GroupForming) -> None:
        """A group forms that may be asked for until it is called off. So may those that are kept, instead."""
        self.call_off()
        with self._lock:
            self._forming = forming

    def call_off(self) -> None:
        """The forming group will not be used."""
        with self._lock:
            forming, self._forming = self._forming, None
        if forming is not None:
            forming.discard()

    def take(self, name: str, others: Collection[str] = ()) -> P2PGroup | None:
        """The group of that name, which is the caller's now. All are let go of but `others`.

        One that still forms is waited for. Raises `TransferFailed` where it did not.
        """
        with self._lock:
            known = self._kept.get(name)
            if known is not None and not known.group.broken:
                del self._kept[name]
                known.timer.cancel()
            else:
                known = None
            forming = None
            if known is None and self._forming is not None and self._forming.name == name:
                forming, self._forming = self._forming, None
            unwanted = [each for each in self._kept if each not in others]
        self.call_off()
        self._drop(unwanted)
        if known is not None:
            return known.group
        return forming.result() if forming is not None else None

    def discard(self) -> None:
        """Let go of all of them, even where members are still in one."""
        self.call_off()
        with self._lock:
            names = tuple(self._kept)
        self._drop(names)

    def _drop(self, names: Iterable[str]) -> None:
        with self._lock:
            dropped = [self._kept.pop(name) for name in names if name in self._kept]
        for each in dropped:
            each.timer.cancel()
            each.group.drop()
