"""One process's part in the group of one epoch: it joins, moves its messages, and can be called off meanwhile.

Joining and moving block, so a thread of their own does it. The caller watches the connection to its leader (rank 0, or
the sidecar), and breaks the group when it is told to, or when the leader is gone: so a death anywhere is known
everywhere at once, also to ranks that exchange nothing with the one that died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import torch

from ...errors import DataplaneError, OutOfStagingMemory, PeerLost, TransferFailed
from ...processes import Deadline, start_thread
from ..interface import Group
from .group_cache import GroupCache
from .group_forming import join
from .messages import BEAT_S
from .nixl_group import NixlGroup
from .p2p_group import NOBODY, P2PGroup
from .send_queue import QueuePair

_LOOK_S: Final = 0.02
_SAY_FIRST_S: Final = 1.0
_END_S: Final = 5.0
"""How long a thread whose group was broken may take to notice."""


@dataclass(slots=True, eq=False)
class _Outcome:
    group: P2PGroup | NixlGroup | None = None
    done: bool = False
    error: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)
    """Everything has moved, or something went wrong."""
    began: float = 0.0
    """When all had come, and this end was ready."""
    seconds: float = 0.0
    """From then on."""


class GroupTransfer:
    """For one epoch."""

    def __init__(
        self,
        where: Group,
        rank: int,
        device: torch.device,
        *,
        to: frozenset[int] = NOBODY,
        from_: frozenset[int] = NOBODY,
        memory: Sequence[torch.Tensor] = (),
        standing: GroupCache | None = None,
        others: Collection[str] = (),
    ) -> None:
        """`to` and `from_` are the members that messages are exchanged with, which lie in `memory`.

        The group may be one that `standing` has, and is kept there; of those that it has, `others` stay, too.
        """
        self._where = where
        self._rank = rank
        self._device = device
        self._to, self._from, self._memory = to, from_, memory
        self._standing = standing or GroupCache()
        self._others = others

    def run(
        self,
        move: Callable[[QueuePair], None],
        called_off: Callable[[], str],
        beat: Callable[[], None],
        ready: Callable[[], object] = lambda: None,
    ) -> float:
        """Join, wait until this end is `ready`, `move`, and return the seconds that moving took.

        `called_off` is asked often for a reason to give up, and `beat` is called every `BEAT_S`. Whatever goes wrong
        breaks the group for all. Raises `TransferFailed`.
        """
        outcome, forming = _Outcome(), Deadline(self._where.form_s + _END_S)
        start_thread(partial(self._pass, move, ready, outcome), "weightbus-sends")
        due = time.monotonic() + BEAT_S
        while not outcome.over.wait(_LOOK_S):
            try:
                if time.monotonic() >= due:
                    due += BEAT_S
                    beat()
                reason = called_off()
            except BaseException as error:
                self._break(outcome, str(error) or type(error).__name__)
                raise
            if not reason and outcome.group is None and not forming.left():
                reason = f"the group did not form within {forming.seconds:.0f} s"
            if reason:
                self._break(outcome, reason)
                raise PeerLost(reason)
        if outcome.error is not None:
            if outcome.began and isinstance(outcome.error, PeerLost) and (cause := _cause(called_off)):
                raise PeerLost(cause) from outcome.error
            if isinstance(outcome.error, DataplaneError):
                raise outcome.error
            if isinstance(outcome.error, torch.OutOfMemoryError):
                raise OutOfStagingMemory(str(outcome.error)) from outcome.error
            raise TransferFailed(f"{type(outcome.error).__name__}: {outcome.error}") from outcome.error
        return outcome.seconds

    def _pass(self, move: Callable[[QueuePair], None], ready: Callable[[], object], outcome: _Outcome) -> None:
        group: P2PGroup | NixlGroup | None = None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            group = self._join()
            outcome.group = group
            ready()
            outcome.began = time.monotonic()
            if outcome.done:
                group.abort("called off while it formed")  # `move` raises
            move(group)
            outcome.seconds = time.monotonic() - outcome.began
        except BaseException as error:  # noqa: BLE001  it is raised where it was asked for
            outcome.error = error
            if group is not None:
                if not outcome.began:  # the others wait, and hear why from their leader before they see it break
                    outcome.over.set()
                    time.sleep(_SAY_FIRST_S)
                group.abort(str(error) or type(error).__name__)
        if outcome.error is None and isinstance(group, P2PGroup):
            self._standing.keep(self._where.name, group, self._where.keep_s)
        outcome.over.set()
        if group is not None and (outcome.error is not None or isinstance(group, NixlGroup)):
            group.close()

    def _join(self) -> P2PGroup | NixlGroup:
        where = msgspec.structs.replace(self._where, rank=self._rank)
        known = self._standing.take(where.name, self._others)
        if where.stands:
            if known is None:
                raise PeerLost(f"group {where.name} is not here any more")
            return known
        return join(where, self._device, to=self._to, from_=self._from, memory=self._memory)

    @staticmethod
    def _break(outcome: _Outcome, reason: str) -> None:
        outcome.done = True  # a group that forms from now on is broken where it is made
        if outcome.group is not None:
            outcome.group.abort(reason)
            outcome.over.wait(_END_S)


def _cause(called_off: Callable[[], str]) -> str:
    """Why the group broke under our hands: whoever broke it says so to whoever leads. Empty where nobody does.

    What is said there first is taken for the cause; that somebody saw it break is none.
    """
    told = Deadline(_SAY_FIRST_S)
    while told.left():
        if reason := called_off():
            return reason
        time.sleep(_LOOK_S)
    return ""
