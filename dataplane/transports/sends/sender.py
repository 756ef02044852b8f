"""Every rank of the trainer sends each worker of each engine what it stores: the half of the trainer's leader.

The leader moves no weights here. It listens, gives receivers the layout, makes their plans once more, and, when all
have prepared, has trainer ranks and workers join one group (p2p_group.py) in which the schedules (send_schedule.py) are
carried out. Until then a receiver that does not come is left out. From then on the group is one: a member that fails
fails it for all that have not reached the barrier, all are told at once, and the next epoch forms a new one
(README.md).
"""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from ...errors import DataplaneError, DeadlineExceeded, PeerLost, TransferFailed
from ...processes import (
    ConnectionPool,
    Deadline,
    Frames,
    MacFrames,
    MacListener,
    PooledConnection,
    bracket_ipv6,
    new_token,
    process_group_backend,
    serve_store,
)
from ...reshard import MIN_PAIR_BYTES, alone_bytes_for, pair_bytes_for
from ..interface import JOIN_S, Address, ExportedWeights, Group, Peer, StagingBuffer, TransferSession
from ..sessions import SenderState
from . import messages as wire
from .plan_agreement import PlanAgreement

FORM_S: Final = 15.0
"""For a group whose members have all said that they are prepared."""
KEEP_S: Final = 900.0
"""Seconds for which an unused group is kept for the next version. It costs its members connections and buffers."""
TURN_S: Final = 10.0
"""For one chunk of a rank; a stalled rank is given up after it. Chunks shrink where a link does not carry them."""
_SHRUNK: Final = 8
"""To what part of itself a group may shrink before its messages are cut anew."""
_UNHEARD_S: Final = 3 * wire.BEAT_S
"""A member that was heard of so lately is not known to be stalled."""
_LOOK_S: Final = 0.1
"""How soon a wait notices that a peer was withdrawn; everything else wakes it at once."""


class Formed(NamedTuple):
    """A group."""

    name: str = ""
    members: object = None
    """The members of a group, and for what it was formed."""
    engines: frozenset[str] = frozenset()


NO_GROUP: Final = Formed()
MOST_KEPT: Final = 4
"""Groups that a rank of the trainer keeps: each holds memory of its GPU. Further turns form theirs anew."""


class KeptGroups:
    """The groups in which everything has moved: several where engines take turns, each of other engines."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[Formed, int]] = {}
        """By name, with the version that it was used for last."""
        self._version = self._before = -1

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that may be used again."""
        return tuple(self._groups)

    def turn_to(self, version: int) -> None:
        """It is sent next: what was used neither for it nor for the one before is not used again."""
        if version != self._version:
            self._before, self._version = self._version, version
        recent = (self._before, self._version)
        self._groups = {name: each for name, each in self._groups.items() if each[1] in recent}

    def take(self, members: object, engines: frozenset[str], have: Callable[[str], bool]) -> Formed | None:
        """The group of these members, if all of them `have` the one of that name. No other one of an engine stays."""
        found = [formed for formed, _ in self._groups.values() if formed.members == members and have(formed.name)]
        self._groups = {name: each for name, each in self._groups.items() if not each[0].engines & engines}
        return found[0] if found else None

    @property
    def room(self) -> bool:
        """One more can be kept."""
        return len(self._groups) < MOST_KEPT

    def keep(self, formed: Formed) -> None:
        """Everything has moved in it."""
        self._groups[formed.name] = formed, self._version


class ConnectedPeer(PooledConnection):
    """An engine's sidecar, or a rank of the trainer."""

    def __init__(self, name: str, workers: int = 0) -> None:
        super().__init__(name)
        self.workers = workers
        """Of an engine. A rank of the trainer has none."""
        self.prepared: wire.Prepared | None = None
        self.known: frozenset[str] = frozenset()
        """The parts of schedules that a rank has, by name."""
        self.groups: frozenset[str] = frozenset()
        """Groups that it has from earlier rounds."""
        self.forming = False
        """It joins the group that forms early."""
        self.gpu_ids: tuple[str, ...] = ()
        """As NCCL knows the GPUs of its rank or workers; empty for one without."""
        self.through = self.finished = False


def seen_by(rank: int, group: Group) -> Group:
    """The group, as its member of that rank is told of it."""
    return msgspec.structs.replace(group, rank=rank)


class SendsSender(SenderState):
    """Implements `Sender`. `describe` is called at each offer: the memory of the version that is published."""

    def __init__(
        self,
        host: str,
        channel: str,
        device: torch.device,
        describe: Callable[[], ExportedWeights],
        *,
        turn_s: float = TURN_S,
        form_s: float = FORM_S,
        keep_s: float = KEEP_S,
        nixl: bool = False,
    ) -> None:
        """`host` is the address under which engines and the trainer's other ranks reach this machine.

        With `nixl` groups are of NIXL, which every member's environment must have; otherwise of gloo or NCCL.
        """
        super().__init__()
        self._host, self._channel, self._device, self._describe, self._nixl = host, channel, device, describe, nixl
        self._chunk_s, self._form_s, self._keep_s = turn_s, form_s, 0.0 if nixl else keep_s
        self._stood = KeptGroups()
        self._formed = NO_GROUP
        """The group of this epoch."""
        self._early: tuple[Group, TCPStore] | None = None
        """One that may begin to form before it is known whether it will be used, and its store."""
        self._in_time: Deadline | None = None
        """Until when ranks may still join it, once workers have begun to: these wait for `form_s`, and no longer."""
        self._exposed: ExportedWeights | None = None
        self._layout = ""
        self._given: bytes | None = None
        """The layout, as it is said."""
        self._epoch = self._version = 0
        self._fell = False
        """A member of the group did not reach the barrier."""
        self._token = ""
        self._pair_bytes = 0
        self._most = 0
        """What `_pair_bytes` could be in a group of this size."""
        self._ceiling = ChunkLimit()
        self._parts = self._ceiling.parts
        """Of it, when `_pair_bytes` was chosen."""
        self._looked_at = self._back_at = 0.0
        """Since the group began: when this last began to listen, and when it did after a while in which it had not."""
        self._alone_bytes = alone_bytes_for(device.type)
        self._plans = PlanAgreement()
        self._engines: dict[str, ConnectedPeer] = {}
        self._ranks: dict[int, ConnectedPeer] = {}
        self._began = False
        self._acceptor: Acceptor | None = None
        self._pool: ConnectionPool[ConnectedPeer] | None = None
        self._store: TCPStore | None = None
        """The one reference to the server: letting go of it ends every wait in the store."""

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Listen for `peers`, and for the trainer's ranks. Raises `Unsupported` where NCCL would hang."""
        self.close()
        backend = "nixl" if self._nixl else process_group_backend(self._device)
        exposed = self._describe()
        if exposed.shards.tensors != session.manifest.tensors:
            raise TransferFailed("the shards are of other tensors than the manifest: describe what is published")
        ranks, workers = len(exposed.exports), sum(peer.tp for peer in peers)
        self._plans.turn_to(exposed, session.version)
        self._exposed, self._layout = exposed, exposed.layout
        self._pair_bytes = self._cut_for(max(ranks, workers))
        self._begin_session()
        self._epoch, self._began = session.epoch, False
        self._engines = {peer.engine: ConnectedPeer(peer.engine, peer.tp) for peer in peers}
        self._ranks = {export.rank: ConnectedPeer(f"rank {export.rank}") for export in exposed.exports}
        self._token = new_token()
        self._version, self._fell = session.version, False
        self._early = self._in_time = None
        self._acceptor = Acceptor(self._host, self._token)
        self._pool = ConnectionPool(self._heard, lambda end, reason: self._drop(end, f"{end.name}: {reason}"))
        self._pool.watch(self._acceptor, self._admit_all)
        return Address(
            self._acceptor.address, f"weightbus-{self._channel}-{session.epoch}", backend, ranks + workers, self._token
        )

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every rank and every engine has come and is prepared, or is in `failed`; then let them begin."""
        deadline = Deadline(deadline_s)
        coming = Deadline(min(deadline_s, join_s))
        self._wait(coming, lambda end: end.frames is None, "did not come")
        self._require_all_ranks()
        self._wait(deadline, lambda end: bool(end.workers) and end.prepared is None, "was not prepared")
        if not self._nixl:
            self._leave_out_gpu_conflicts()
        self._require_all_ranks()
        self._begin()
        self._wait(deadline, lambda end: bool(end.unsent), "had not read how to begin")

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        """Nothing is sent from buckets."""
        del index, slot, deadline_s

    def finish(self, deadline_s: float) -> None:
        """Wait until every engine holds the version, or is in `failed`."""
        deadline = Deadline(deadline_s)
        self._wait(deadline, lambda end: not end.through, "had not moved everything", silent_s=wire.SILENT_S)
        self._wait(deadline, lambda end: bool(end.workers) and not end.finished, "had not finished")
        if not self._fell:
            self._ceiling.worked(self._version)
            if self._keep_s and self._stood.room:
                self._stood.keep(self._formed)

    def close(self) -> None:
        """Hang up on all members. A member that is still in the group breaks it."""
        if self._pool is not None:
            self._pool.end()
        for end in (*self._engines.values(), *self._ranks.values()):
            self._hang_up(end, "" if end.through else "the sender closed this session")
        self._engines, self._ranks, self._store, self._early, self._given = {}, {}, None, None, None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    @property
    def _cut(self) -> tuple[int, int]:
        """Of schedules: bytes of a pair in a turn, and of a row that is a message of its own."""
        return self._pair_bytes, self._alone_bytes

    def _cut_for(self, ranks: int) -> int:
        """What a pair may move in a turn: as before, while it fits and is not much too little.

        It is part of every schedule, and an engine that is told a new one has to be paused for it.
        """
        self._most = pair_bytes_for(ranks, self._device.type)
        most = self._ceiling.under(self._most)
        same, self._parts = self._parts == self._ceiling.parts, self._ceiling.parts
        if same and most // _SHRUNK <= self._pair_bytes <= most:
            return self._pair_bytes
        return most

    def _all_move(self) -> bool:
        """No member is known to be stalled, nor was this process: what failed may have been too much at a time.

        When a chunk runs out of time, a member that was stopped in it has not been heard of for most of it.
        """
        now = time.monotonic()
        since = now - max(self._chunk_s / 2, _UNHEARD_S)
        there = now - self._looked_at <= _UNHEARD_S and self._back_at < since
        return there and all(end.through or end.received_at >= since for end in self._members())

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(
        self, deadline: Deadline, pending: Callable[[ConnectedPeer], bool], reproach: str, silent_s: float = math.inf
    ) -> None:
        while late := [end for end in self._members() if pending(end)]:
            still = [end for end in late if silent_s < math.inf and self._on_offer().silent_for(end, silent_s)]
            if still:
                self._drop(still[0], f"{still[0].name} stands still: nothing was heard of it for {silent_s:.1f} s")
                continue
            left = deadline.left()
            if not left:
                for end in late:
                    self._drop(end, f"{end.name} {reproach} within {deadline.seconds:.1f} s")
                return
            self._pump(min(left, _LOOK_S))
        self._on_offer()

    def _members(self) -> list[ConnectedPeer]:
        return [*self._engines.values(), *self._ranks.values()]

    def _pump(self, timeout_s: float) -> None:
        pool, now = self._on_offer(), time.monotonic()
        if now - self._looked_at > _UNHEARD_S:
            self._back_at = now
        self._looked_at = now
        for engine, reason in tuple(self._withdrawn.items()):
            if engine in self._engines and not self._engines[engine].finished:
                self._drop(self._engines[engine], reason)
        pool.poll(timeout_s)

    def _on_offer(self) -> ConnectionPool[ConnectedPeer]:
        """Raises `TransferFailed` when nothing is on offer, any more: it may have been closed by another thread."""
        pool = self._pool
        if pool is None:
            raise TransferFailed("nothing is on offer: call offer first")
        if pool.ended:
            raise TransferFailed("the sender was closed")
        return pool

    def _require_all_ranks(self) -> None:
        assert self._exposed is not None
        missing = [export.rank for export in self._exposed.exports if export.rank not in self._ranks]
        if missing:
            raise PeerLost(f"ranks {missing} of the trainer did not come to send, or are gone again")
        self._require_some(self._engines)

    # -- members come --------------------------------------------------------------------------------------------------

    def _admit_all(self) -> None:
        for frames, hello in self._acceptor.came() if self._acceptor is not None else ():
            self._admit(frames, hello)

    def _admit(self, frames: Frames, hello: wire.ToSender) -> None:
        pool = self._pool
        if pool is None:  # closed meanwhile
            return frames.close()
        end, reason = self._known(hello)
        if end is None:
            pool.add(stranger := ConnectedPeer(""), frames)
            return pool.drop(stranger, wire.SENDER.encode(wire.Refused(epoch=self._epoch, reason=reason)))
        pool.add(end, frames)
        if isinstance(hello, wire.RankHello):
            end.known, end.groups, end.gpu_ids = frozenset(hello.known), frozenset(hello.groups), (hello.nccl_gpu_id,)
        else:
            invited = wire.Invited(
                epoch=self._epoch, layout=self._layout, pair_bytes=self._pair_bytes,
                alone_bytes=self._alone_bytes, plans=self._plans.digests, form=self._foresee(hello),
            )  # fmt: skip
            try:
                pool.send(end, wire.SENDER.encode(invited))
            except DataplaneError:  # it is gone again
                return pool.drop(end)
        return self._let_form()

    def _known(self, hello: wire.ToSender) -> tuple[ConnectedPeer | None, str]:
        """The member that has come; or None, and why it may not."""
        if not isinstance(hello, wire.Hello | wire.RankHello):
            return None, f"a member begins with Hello, not with {hello.kind}"
        if (hello.channel, hello.epoch) != (self._channel, self._epoch):
            return None, f"this is channel {self._channel!r} at epoch {self._epoch}"
        end = self._ranks.get(hello.rank) if isinstance(hello, wire.RankHello) else self._engines.get(hello.engine)
        if end is None or self._began:
            return None, "it does not take part, or the others have begun already"
        return (None, f"{end.name} is connected already") if end.frames is not None else (end, "")

    def _heard(self, end: ConnectedPeer, packet: bytes) -> None:  # noqa: C901  one line for each message
        """Raises `DataplaneError`."""
        match wire.SENDER.decode(packet):
            case wire.GroupBeat():
                pass
            case wire.GiveLayout():
                self._on_offer().send(end, self._layout_to_give())
            case wire.Propose() as proposed:
                agreed = [self._plans.agree(each) for each in proposed.plans]
                self._on_offer().send(end, wire.SENDER.encode(wire.Agreed()))
                for plan in agreed:  # while the engine does its half
                    self._plans.make_ready(plan, self._ranks, *self._cut)
            case wire.Forms() if end.workers:
                end.forming = True
                self._in_time = Deadline(self._form_s / 2)
                self._let_form()
            case wire.Prepared() as prepared if end.workers and not self._began:
                self._plans.check(prepared, end.workers, *self._cut)
                end.prepared, end.groups, end.gpu_ids = prepared, frozenset({prepared.group}), prepared.nccl_gpu_ids
            case wire.BarrierReached() if self._began:
                end.through = True
            case wire.Finished() if end.through:
                end.finished = True
            case wire.Failed(reason=reason, less=less):
                if less and self._all_move():
                    self._ceiling.lower(self._pair_bytes, self._most)
                self._drop(end, reason)
            case message:
                self._drop(end, f"it said {message.kind} out of turn")

    def _layout_to_give(self) -> bytes:
        """Encoded once for all receivers to which it is new; kept for as long as they take to read it."""
        if self._given is None:
            assert self._exposed is not None
            self._given = wire.SENDER.encode(self._exposed.given)
        return self._given

    # -- the group ----------------------------------------------------------------------------------------------------

    def _leave_out_gpu_conflicts(self) -> None:
        """NCCL would end the group for all. Where it was known before, the coordinator let them take turns."""
        ranks = {rank: end.gpu_ids[0] for rank, end in self._ranks.items() if end.gpu_ids}
        engines = {name: self._engines[name].gpu_ids for name in sorted(self._engines)}
        for name, found in crowded(ranks, engines).items():
            if found.spared:  # no others are: when the group has begun, bytes are under way to all
                self.spared |= {name}
            self._drop(self._engines[name], found.reason)

    def _begin(self) -> None:
        """Give every member its rank: the trainer's first, then the engines' workers in the order of their names."""
        first = len(self._ranks)
        peers: list[tuple[int, str]] = []
        offsets: dict[str, int] = {}
        for name in sorted(self._engines):
            prepared = self._engines[name].prepared
            assert prepared is not None
            offsets[name] = first + len(peers)
            peers += [(first + len(peers) + at, plan) for at, plan in enumerate(prepared.plans)]
        size = first + len(peers)
        self._stood.turn_to(self._version)
        stands = self._choose_group((tuple(self._ranks), tuple(offsets.items()), tuple(peers)))
        group = self._group(size, 0, self._formed.name, self._store, stands=stands)
        told = [
            (end, wire.BeginSends(group=seen_by(holder, group), parts=parts, others=self._stood.names))
            for holder, end in self._ranks.items()
            for parts in [self._plans.parts_of(holder, end.known, peers, *self._cut)]
        ]
        told += [(end, wire.BeginSends(group=seen_by(offsets[name], group))) for name, end in self._engines.items()]
        self._began = True
        self._plans.told()
        self._looked_at, self._back_at = time.monotonic(), 0.0
        for end, begin in told:
            end.received_at = time.monotonic()
            self._tell(end, begin)

    def _choose_group(self, members: object) -> bool:
        """The group of the last version, if all its members still have it and no others take part; or a new one.

        That one may have begun to form. Whether all have it, or wait for it already.
        """
        early, self._early = self._early, None
        engines = frozenset(self._engines)
        stood = self._stood.take(members, engines, lambda name: all(name in end.groups for end in self._members()))
        if stood is not None:
            self._formed = stood
        elif early is not None and all(end.forming for end in self._members()):
            group, self._store = early
            self._formed = Formed(group.name, members, engines)
        else:
            self._store = serve_store(self._host)
            self._formed = Formed(self._name(), members, engines)
            return False
        return True

    def _foresee(self, hello: wire.ToSender) -> Group | None:
        """The group of a single engine, unless it has the last one still: its sidecar may have begun anew since."""
        alone = isinstance(hello, wire.Hello) and len(self._engines) == 1 and hello.group not in self._stood.names
        if self._nixl or not alone:
            return None
        ranks, workers = len(self._ranks), next(iter(self._engines.values())).workers
        store, name = serve_store(self._host), f"{self._name()}-early"
        group = self._group(ranks + workers, ranks, name, store, ranks=ranks)
        self._early = group, store
        return group

    def _let_form(self) -> None:
        """The ranks join what the engine's workers have begun to join. A late rank forms another one with all."""
        if self._early is None or self._in_time is None or not self._in_time.left():
            return
        for rank, end in tuple(self._ranks.items()):
            if end.frames is not None and not end.forming:
                end.forming = True
                self._tell(end, wire.Form(group=seen_by(rank, self._early[0])))

    def _name(self) -> str:
        return f"weightbus-{self._channel}-{self._epoch}-{secrets.token_hex(8)}"  # in logs and keys: no part of ours

    def _group(
        self, size: int, rank: int, name: str, store: TCPStore | None, *, ranks: int = 0, stands: bool = False
    ) -> Group:
        return Group(
            store=f"tcp://{bracket_ipv6(self._host)}:{store.port}" if store else "",
            name=name, size=size, rank=rank, form_s=self._form_s, turn_s=self._chunk_s,
            nixl=self._nixl, stands=stands, ranks=ranks, keep_s=self._keep_s if self._stood.room else 0.0,
        )  # fmt: skip

    def _tell(self, end: ConnectedPeer, message: wire.BeginSends | wire.Form) -> None:
        pool = self._on_offer()
        try:
            pool.send(end, wire.SENDER.encode(message))
        except DataplaneError as error:
            self._on_offer()
            self._drop(end, f"{end.name}: {error}")

    def _drop(self, end: ConnectedPeer, reason: str) -> None:
        """Fail a member. While the group moves, so are all that have not reached the barrier."""
        self._fell |= self._began and not (end.finished if end.workers else end.through)
        self._out(end, reason)
        if self._began and not end.through:
            self._store = None
            for other in self._members():
                if not other.through:
                    self._out(other, f"the group broke: {reason}")

    def _out(self, end: ConnectedPeer, reason: str) -> None:
        self._hang_up(end, "" if end.finished else reason)
        if not end.workers:
            if not end.through:
                self._ranks = {rank: each for rank, each in self._ranks.items() if each is not end}
        elif not end.finished:  # it has the version: going away afterwards is its right
            self.failed.setdefault(end.name, reason)
            self._engines.pop(end.name, None)

    def _hang_up(self, end: ConnectedPeer, reason: str) -> None:
        if self._pool is not None:
            self._pool.drop(end, wire.SENDER.encode(wire.Failed(reason=reason[:2048])) if reason else b"")


LESS: Final = 8
"""By how much turns shrink, and grow: every try costs a version one attempt."""
FIRST: Final = 8
"""Versions that have to go through before larger turns are tried. Twice as many after each that failed."""
MOST: Final = 1024
"""Of them, however often it failed."""


class ChunkLimit:
    """How large a sender's turns may be. Policy alone; used from one thread.

    Turns shrink where a member had no memory for what it moves, or the link did not carry a turn in its time. Either
    may have been for once: a peer that was stopped looks like a slow link. So after some versions larger turns are
    tried again. A try that fails costs a version one attempt, so it is rare, and rarer the more often it failed.
    """

    def __init__(self, first: int = FIRST) -> None:
        self.parts = 1
        """Into how many a turn is cut that was as large as a group of that size may have it."""
        self._first = self._needed = first
        self._good = 0
        """Versions that went through since it moved."""
        self._version = -1
        """The last one of them."""
        self._on_trial = False
        """It has grown, and not as many versions went through since as are needed."""

    def under(self, most: int) -> int:
        """Bytes that a pair may move in a turn where it could be `most`: not less than `MIN_PAIR_BYTES` of them."""
        return min(most, max(most // self.parts, MIN_PAIR_BYTES))

    def lower(self, tried: int, most: int) -> None:
        """Turns of `tried` bytes were too much, in a group in which they could be `most`."""
        self.parts = LESS * max(most // tried, 1)
        if self._on_trial:
            self._needed = min(2 * self._needed, MOST)
        self._good, self._on_trial = 0, False

    def worked(self, version: int) -> None:
        """Everything of `version` has moved in a group. One version counts once, in however many groups it moves."""
        if version == self._version:
            return
        self._version = version
        self._good += 1
        if self._good < self._needed:
            return
        self._good = 0
        self._on_trial = self.parts > 1
        self.parts = max(self.parts // LESS, 1)
        if not self._on_trial:  # what was tried last is all there is
            self._needed = self._first


_OF_ENGINES: Final = "let the engine take another transport"
_OF_RANKS: Final = "leave sends out of the trainer's setting transport: with it no engine gets anything"


class GpuConflict(NamedTuple):
    """Why an engine is left out."""

    reason: str
    spared: bool
    """Another engine is in its place, and not a rank of the trainer: in a group of its own it does no harm."""


def crowded(ranks: Mapping[int, str], engines: Mapping[str, tuple[str, ...]]) -> dict[str, GpuConflict]:
    """The engines whose GPUs are taken, by the trainer's ranks or by engines before them.

    `ranks` and `engines` say which GPU each rank and worker has (cuda_memory.py); empty for one without. Raises
    `TransferFailed` where two ranks have the same one.
    """
    holders: dict[str, str] = {}
    for rank, gpu in ranks.items():
        if gpu in holders:
            raise TransferFailed(f"{holders[gpu]} and rank {rank} {_on(gpu, _OF_RANKS)}")
        holders |= {gpu: f"rank {rank} of the trainer"} if gpu else {}
    of_ranks = frozenset(holders)
    found: dict[str, GpuConflict] = {}
    for name, told in engines.items():
        gpus = [gpu for gpu in told if gpu]
        taken = next((gpu for at, gpu in enumerate(gpus) if gpu in holders or gpu in gpus[:at]), "")
        if not taken:
            holders |= dict.fromkeys(gpus, f"a worker of {name}")
            continue
        other = holders.get(taken, "another of its workers")
        spared = taken in holders and taken not in of_ranks
        found[name] = GpuConflict(f"a worker of {name} and {other} {_on(taken, _OF_ENGINES)}", spared)
    return found


def _on(gpu: str, instead: str) -> str:
    return f"are on GPU {gpu}, and NCCL takes no two ranks on one: give each a GPU of its own, or {instead}"


GREETING_S: Final = 2.0
"""For the first message of a connection."""
GREETED: Final = 256
"""Connections that are greeted at a time. Others wait in the socket's backlog until the time of one is over."""
_AGAIN_S: Final = 0.05
"""Before another connection is accepted, where one could not be."""


class Acceptor:
    """Accepts the connections of one epoch, all at a time: a silent one keeps no other waiting.

    Each has a thread until its first message is there, or the time for that is over; `fileno` is readable when one
    waits to be taken. `came` is called from one thread.
    """

    def __init__(self, host: str, token: str) -> None:
        """Raises `TransferFailed` where no port can be opened."""
        self._listener = MacListener(host, token)
        self.address = self._listener.address
        self._came: queue.SimpleQueue[tuple[MacFrames, wire.ToSender]] = queue.SimpleQueue()
        self._bell, self._rings = socket.socketpair()
        self._free = threading.BoundedSemaphore(GREETED)
        self._closed = False
        threading.Thread(target=self._open, name="weightbus-acceptor", daemon=True).start()

    def fileno(self) -> int:
        """For selectors."""
        return self._bell.fileno()

    def came(self) -> list[tuple[MacFrames, wire.ToSender]]:
        """Connections that know the token, with their first messages."""
        found: list[tuple[MacFrames, wire.ToSender]] = []
        self._bell.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while not self._came.empty():
            found.append(self._came.get())
        return found

    def close(self) -> None:
        """Hang up on connections that were not taken. A greeting that runs ends in its time."""
        self._closed = True
        self._listener.close()
        for frames, _ in self.came():
            frames.close()
        self._bell.close()
        self._rings.close()

    def _open(self) -> None:
        while not self._closed:
            self._free.acquire()  # each greeting has `GREETING_S`
            try:
                frames = self._listener.accept(Deadline(GREETING_S))
            except DeadlineExceeded:
                self._free.release()
                continue
            except DataplaneError:  # the port was closed; or too many open files: the next one may be let in
                self._free.release()
                time.sleep(_AGAIN_S)
                continue
            threading.Thread(target=self._greet, args=(frames,), name="weightbus-greeting", daemon=True).start()

    def _greet(self, frames: MacFrames) -> None:
        deadline = Deadline(GREETING_S)
        try:
            frames.handshake(deadline)
            self._came.put((frames, wire.SENDER.hear(frames, deadline, "a receiver")))
            if self._closed:
                frames.close()
            self._rings.send(b".")
        except (DataplaneError, OSError):  # it is gone; a peer that never comes is failed at the deadline
            frames.close()
        finally:
            self._free.release()
