"""One process's part in the group of one epoch: it joins, moves its messages, and can be called off meanwhile.

Joining and moving block, so a thread of their own does it. The caller watches the connection to its leader (rank 0, or
the sidecar), and breaks the group when it is told to, or when the leader is gone: so a death anywhere is known
everywhere at once, also to ranks that exchange nothing with the one that died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import msgspec
import torch

from ...errors import DataplaneError, DeadlineExceeded, OutOfStagingMemory, PeerLost, TransferFailed
from ...processes import Deadline, connect_store, local_address_towards, parse_tcp_address, start_thread
from ..interface import Group
from .message_queues import QueuePair
from .messages import BEAT_S
from .nixl_group import NixlGroup
from .p2p_group import NO_RANKS, P2PGroup

SLACK_S: Final = 60.0
"""A group is kept so much longer than it is named: a member that has said that it has one can still use it."""


class _Kept(NamedTuple):
    group: P2PGroup
    until: float
    timer: threading.Timer


class GroupCache:
    """Groups of earlier rounds that a member keeps: forming one takes longer than many rounds.

    One is used again only where all of its members still have it, and no other takes part (sender.py). A rank of the
    trainer has several where engines take turns, because no two that share a GPU are in one group over NCCL; a worker
    has one. A group that broke, or whose members changed, is let go of; so is one that was not used for a while. That
    does not wait: some of the others may be dead. May be used from several threads.
    """

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
        timer.name, timer.daemon = "weightbus-group-cache", True
        with self._lock:
            self._kept[name] = _Kept(group, time.monotonic() + keep_s, timer)
        timer.start()
        return None

    def begin(self, forming: GroupForming) -> None:
        """A group forms that may be asked for until it is called off. So may one that is kept, instead."""
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


_MOST_PAIRS: Final = 64
"""Of a rank and a worker, that are connected before it is known which of them exchange anything."""


def join(
    where: Group,
    device: torch.device,
    *,
    to: frozenset[int] = NO_RANKS,
    from_: frozenset[int] = NO_RANKS,
    memory: Sequence[torch.Tensor] = (),
) -> P2PGroup | NixlGroup:
    """The group, formed under its own deadline. Raises `TransferFailed`."""
    deadline = Deadline(where.form_s)
    store = connect_store(where.store, deadline)
    mine = local_address_towards(*parse_tcp_address(where.store))
    if where.nixl:
        return NixlGroup.form(
            store, where.name, mine, device, where.rank, where.size, deadline, to=to, from_=from_, memory=memory
        )
    return P2PGroup.form(store, where.name, mine, device, where.rank, where.size, deadline, to=to, from_=from_)


class GroupForming:
    """Joins a group on a thread of its own, for a transfer that asks for it later. May be used from several threads.

    A group takes longer to form than most versions to move. Where only one engine takes part, it begins as soon as
    both ends are known, while the engine still records and plans: no other engine waits in it if that fails.
    """

    def __init__(self, where: Group, device: torch.device) -> None:
        """`where.ranks` of its members are the trainer's, and come first; they send to the others."""
        self.name = where.name
        self.form_s = where.form_s
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._group: P2PGroup | None = None
        self._error: Exception | None = None
        self._unwanted = False
        ranks, workers = frozenset(range(where.ranks)), frozenset(range(where.ranks, where.size))
        sends = where.rank < where.ranks
        pairs = len(ranks) * len(workers) <= _MOST_PAIRS
        to, from_ = (workers, NO_RANKS) if sends else (NO_RANKS, ranks)
        self._arguments = where, device, to if pairs else NO_RANKS, from_ if pairs else NO_RANKS
        start_thread(self._form, "weightbus-forming")

    def result(self) -> P2PGroup:
        """The group, which is the caller's now. Raises what kept it from forming, `DeadlineExceeded`."""
        if not self._over.wait(self.form_s):
            self.discard()
            raise DeadlineExceeded("the group to form", self.form_s)
        with self._lock:
            group, self._group = self._group, None
        if self._error is not None:
            raise self._error
        if group is None:
            raise PeerLost(f"group {self.name} is not here any more")
        return group

    def discard(self) -> None:
        """It will not be used. Does not wait."""
        with self._lock:
            self._unwanted = True
            group, self._group = self._group, None
        if group is not None:
            group.drop()

    def _form(self) -> None:
        where, device, to, from_ = self._arguments
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            found = join(where, device, to=to, from_=from_)
            assert isinstance(found, P2PGroup)
            with self._lock:
                self._group = None if self._unwanted else found
            if self._unwanted:
                found.drop()
        except TransferFailed as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  it is raised where the group is asked for
            self._error = TransferFailed(f"{type(error).__name__}: {error}")
        self._over.set()


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
        to: frozenset[int] = NO_RANKS,
        from_: frozenset[int] = NO_RANKS,
        memory: Sequence[torch.Tensor] = (),
        groups: GroupCache | None = None,
        others: Collection[str] = (),
    ) -> None:
        """`to` and `from_` are the members that messages are exchanged with, which lie in `memory`.

        The group may be one that `groups` has, and is kept there; of the groups that it has, `others` stay, too.
        """
        self._where = where
        self._rank = rank
        self._device = device
        self._to, self._from, self._memory = to, from_, memory
        self._groups = groups or GroupCache()
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
            self._groups.keep(self._where.name, group, self._where.keep_s)
        outcome.over.set()
        if group is not None and (outcome.error is not None or isinstance(group, NixlGroup)):
            group.close()

    def _join(self) -> P2PGroup | NixlGroup:
        where = msgspec.structs.replace(self._where, rank=self._rank)
        known = self._groups.take(where.name, self._others)
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
    """Why the group broke under our hands: the member that broke it tells the leader. Empty where none does.

    The first reason that is told is taken for the cause; that a member saw it break is none.
    """
    told = Deadline(_SAY_FIRST_S)
    while told.left():
        if reason := called_off():
            return reason
        time.sleep(_LOOK_S)
    return ""
