"""Other hosts, or GPUs that cannot map each other: for each source rank one group of it and every engine rank.

Members are the workers of servers, as the field does it, or in their place an engine's agent, which hands every bucket
on to its server (`receiver.py`): each agent says which when it comes. Over gloo every engine has a group of its
own with each source (`broadcast_group.py`); what is said here of a group is then said of all of them.

A source broadcasts a whole packed bucket per call, in the order in which SGLang cuts a ``flattened_bucket`` apart. This
is the leading source; where there are several (`broadcast_group.py`), the others do their part by `source_rank.py`. All
of them meet the engines in the leader's store, and have one session: its epoch, its end, its failure.

Groups are kept from round to round while their members stay and sessions end well; their names carry the epoch in which
they were formed. A collective cannot drop a member: when one engine or source fails, all engines are named in `failed`,
every group is broken off and the next epoch forms new ones. Groups that broke while they formed take the rendezvous
store with them: SGLang's ranks would wait in it for the missing one for half an hour, and answer nothing meanwhile. The
bytes go straight into the server's workers, where they are members, so that nothing has checked them (`Receipt.checked`
is false).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from ...errors import DataplaneError, DeadlineExceeded, PeerLost, TransferFailed
from ...processes import Deadline, SerialCalls, bracket_ipv6, join_store, new_token, process_group_backend, serve_store
from ...tensors import Sources
from ..interface import JOIN_S, Address, Peer, StagingBuffer, TransferSession
from ..sessions import SenderState
from .broadcast_group import (
    STILL_FORMING_S,
    STILL_S,
    Behind,
    BroadcastGroup,
    EngineGroups,
    GroupSettings,
    Stalled,
    Stragglers,
)
from .rendezvous_keys import BY_SIDECAR, POLL_S, Rendezvous, holding, settled, source_name
from .store_proxy import lead_nowhere

_REASONS_S: Final = 0.3
FORM_S: Final = 60.0
"""How long new groups may take to form: a server that died meanwhile leaves the others waiting for it in vain."""
WATCH_S: Final = 0.05
"""How long after one look at what engines say the next one is due: a look at 512 takes the leader a millisecond."""
BEHIND_S: Final = 0.25
"""... at the bucket to which each has come: as many new words with every bucket."""
_LOOK_S: Final = 0.001
"""How soon it is noticed that another source's bucket has been taken: its slot is free for the next one."""

_T = TypeVar("_T")


class DistributedSender(SenderState):
    """Rank 0. `host` is the address under which every engine's workers reach this machine."""

    def __init__(self, host: str, channel: str, device: torch.device) -> None:
        super().__init__()
        self._host = host
        self._channel = channel
        self._device = device
        self._store: TCPStore | None = None
        """The one reference to the server: every user of the store has a client of its own."""
        self._rendezvous: Rendezvous | None = None
        self._session: TransferSession | None = None
        self._group: BroadcastGroup | EngineGroups | None = None
        """This source's own."""
        self._groups: tuple[str, ...] = ()
        """Every source's, `_group` first."""
        self._members: tuple[Peer, ...] = ()
        """Members of the groups."""
        self._sidecars: tuple[int, ...] = ()
        """Engines of this session, by their place, whose member is the sidecar."""
        self._divided: Sources | None = None
        self._sources = Sources.one(1)
        """Of this session."""
        self._behind: Behind | None = None
        """Where sidecars share a group: finds the one that keeps the others waiting."""
        self._due = self._behind_due = 0.0
        """When all are looked at again, on the monotonic clock, and when for `_behind`."""
        self._lost = ""
        """Which other source gave up, and why."""
        self.differing: tuple[str, ...] = ()
        self._peers: tuple[Peer, ...] = ()
        """Engines of this session."""
        self._sends: dict[int, Future[None]] = {}
        self._calls = SerialCalls("weightbus-broadcast")
        self._forming = self._began = self._finished = False
        self._token = ""

    def divide(self, sources: Sources | None) -> None:
        """See `Dividing`."""
        self._divided = sources

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Open the rendezvous store. Raises `Unsupported` when this process's NCCL settings do not fit SGLang's."""
        self.close()
        backend = process_group_backend(self._device)
        if self._store is None:
            self._store = serve_store(self._host)
        if self._rendezvous is not None:
            self._rendezvous.clear()
        self._session, self._peers = session, tuple(peers)
        self._sources, self._lost, self.differing = self._divided or Sources.one(len(session.manifest.buckets)), "", ()
        self._begin_session()
        self._sends = {}
        self._forming = self._began = self._finished = False
        self._behind = None
        self._due = self._behind_due = 0.0
        self._token = new_token()
        self._rendezvous = Rendezvous(join_store(self._store), session.epoch, self._token, self._engines, self._others)
        world_size = 1 + sum(peer.tp for peer in peers)
        address = f"tcp://{bracket_ipv6(self._host)}:{self._store.port}"
        return Address(address, self._group_name(), backend, world_size, self._token)

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every engine's ranks are in the group: the one from the last round, or a new one.

        All are in `failed` when an agent has not come within `join_s`, or the group has not formed `FORM_S` later.
        """
        deadline = Deadline(deadline_s)
        rendezvous, session = self._open()
        try:
            self._wait_for("came", "to come", Deadline(min(join_s, deadline.left())))
            words = rendezvous.heard_from("came", (*self._engines, *self._others))
            comes = [words.get(engine, "") for engine in self._engines]
            self._sidecars = tuple(place for place, word in enumerate(comes) if word.startswith(BY_SIDECAR))
            forming = Deadline(min(FORM_S, deadline.left()))
            if self._group is not None and self._all_hold(words):
                self._group.use(True)
                rendezvous.announce("group", self._known(self._groups).encode())
            else:
                self._break_off()
                base = f"weightbus-{self._channel}-{session.epoch}"
                groups = self._known(GroupSettings.of_sources(base, self._sources).names)
                self._forming = True
                rendezvous.announce("group", groups.encode())
                self._form(groups, forming)
            self._wait_for("joined", "to join", forming, STILL_FORMING_S)
            alike = not self._apart and len(self._sidecars) == len(self._engines)
            self._behind = Behind(time.monotonic()) if alike else None
            if self._forming:
                rendezvous.announce("formed", "")
            self._forming = False
        except TransferFailed as error:
            self._fail_all(error)
            raise

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        """Start the broadcast of bucket `index` from `slot`. Another source sends its own by itself."""
        _, session = self._open()
        if self.failed or self._group is None:
            raise TransferFailed(f"no engine is left to serve ({next(iter(self.failed.values()), 'never ready')})")
        self._began = True
        if self._sources.of[index]:
            return
        memory = slot.memory[: session.manifest.buckets[index].nbytes]
        if memory.device.type == "cuda":
            torch.cuda.current_stream(memory.device).synchronize()  # the broadcast runs on another thread's stream
        self._sends[index] = self._calls.submit(partial(self._group.broadcast, memory, Deadline(deadline_s)))

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Wait until bucket `index` has left its slot. On failure all engines are in `failed` when this returns."""
        try:
            if self._sources.of[index] and not self.failed:
                self._await_source(index, Deadline(deadline_s))
            if index not in self._sends:
                return
            self._await_sent(index, Deadline(deadline_s))
        except TransferFailed as error:
            self._fail_all(error)
        self._sends.pop(index, None)

    def finish(self, deadline_s: float) -> None:
        """Wait until every engine has loaded everything, or all are in `failed`."""
        deadline = Deadline(deadline_s)
        try:
            for index in self._sends:
                self._await_sent(index, deadline)
            if not self.failed:
                self._wait_for("done", "to take every bucket", deadline, STILL_S)
                self._finished = True
                if self._group is not None:
                    self._group.use(False)
        except TransferFailed as error:
            self._fail_all(error)

    def close(self) -> None:
        """End the session. The group survives it if it ended well; the store does in any case."""
        if self._session is None:
            return
        if not self._finished:
            self._fail_all(TransferFailed("the sender closed this session"))
        self._session = None

    # -- the session -------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Rendezvous, TransferSession]:
        if self._session is None or self._rendezvous is None:
            raise TransferFailed("nothing is on offer: call offer first")
        return self._rendezvous, self._session

    @property
    def _engines(self) -> list[str]:
        return [peer.engine for peer in self._peers]

    @property
    def _others(self) -> list[str]:
        """The sources that do not lead, by the names under which they speak."""
        return [source_name(number) for number in range(1, self._sources.count)]

    def _group_name(self) -> str:
        assert self._session is not None
        if self._group is not None and self._members == self._peers:
            return self._group.name
        return f"weightbus-{self._channel}-{self._session.epoch}"

    def _all_hold(self, words: Mapping[str, str]) -> bool:
        """All that came, with these words, are still in the groups of the last session, which are what it needs."""
        if self._group is None or self._group.hung_up:
            return False
        if self._members != self._peers or len(self._groups) != self._sources.count:
            return False
        held = self._known(self._groups).held(len(self._peers))
        for engine, (names, by_sidecar) in zip(self._engines, held, strict=True):
            if words.get(engine) != holding(names, by_sidecar=by_sidecar):
                return False
        return [words.get(source) for source in self._others] == list(self._groups[1:])

    @property
    def _apart(self) -> bool:
        """Engines that share a group of gloo's wait for each other, where nothing reaches them."""
        return self._device.type != "cuda" and len(self._peers) > 1

    @property
    def _ranks(self) -> tuple[int, ...]:
        """As in `GroupSettings`."""
        return tuple(peer.tp for peer in self._peers) if self._apart or self._sidecars else ()

    def _known(self, names: tuple[str, ...]) -> GroupSettings:
        of, together = self._sources.of if self._others else (), bool(self._sidecars) and not self._apart
        return GroupSettings(names, of, self._ranks, together, self._sidecars)

    def _form(self, groups: GroupSettings, deadline: Deadline) -> None:
        """This source's own; the others are formed by theirs, in the order in which engines come to them."""
        assert self._store is not None
        size = groups.size(1 + sum(peer.tp for peer in self._peers))
        # Clients that are there before: forming a group would hold the server itself, and `_end_store` end nothing.
        clients, name = [join_store(self._store) for _ in groups.apart or (size,)], groups.names[0]

        def form() -> BroadcastGroup | EngineGroups:
            if groups.apart:
                return EngineGroups.form(clients.pop, name, self._host, self._device, groups, deadline)
            return BroadcastGroup.form(
                clients.pop(), name, self._host, self._device, size, deadline, connect=groups.all_ours
            )

        group = self._await(self._calls.submit(form), f"{size - 1} engine ranks to join {name}", deadline)
        group.use(True)
        self._group, self._members, self._groups = group, self._peers, groups.names

    def _await_source(self, index: int, deadline: Deadline) -> None:
        """Wait until all engines have taken a bucket of another source."""
        rendezvous, _ = self._open()
        source, wanted = source_name(self._sources.of[index]), self._sources.place(index) + 1
        while int(rendezvous.heard("sent", source) or 0) < wanted:
            self._watch()
            time.sleep(min(_LOOK_S, deadline.check(f"bucket {index} to be taken from {source}")))

    def _await_sent(self, index: int, deadline: Deadline) -> None:
        """Wait until all engines have taken a bucket of this source."""
        self._await(self._sends[index], f"the broadcast of bucket {index}", deadline)

    def _watch(self) -> None:
        """Look whether all are well, where that is due: each of many buckets takes less time than is between two looks.

        Raises `PeerLost` and `Stalled`.
        """
        if time.monotonic() >= self._due:
            self._check_receivers()
            self._look_behind()
            self._due = time.monotonic() + WATCH_S

    def _look_behind(self) -> None:
        """Raise `Stalled` for agents that do not come to a bucket for which others wait in the group."""
        rendezvous, _ = self._open()
        if self._behind is None or time.monotonic() < self._behind_due:
            return
        at = rendezvous.heard_from("at", self._engines)
        self._behind.look([int(at.get(engine, -1)) for engine in self._engines], time.monotonic())
        self._behind_due = time.monotonic() + BEHIND_S

    def _wait_for(
        self,
        step: str,
        what: str,
        deadline: Deadline,
        still_s: float = float("inf"),
    ) -> None:
        """`still_s` is how much longer than the others one may take."""
        rendezvous, _ = self._open()
        missing = [*self._engines, *self._others]
        stragglers = Stragglers(what, time.monotonic(), still_s if self._ranks else float("inf"))
        while missing := _silent(rendezvous, step, missing):
            self._check_receivers()
            self._look_behind()
            late = frozenset(missing)
            stragglers.look([engine not in late for engine in self._engines], time.monotonic())
            try:
                left = deadline.check(f"{', '.join(missing)} {what}")
            except DeadlineExceeded as error:
                self.failed.update({engine: str(error) for engine in missing if engine in self._engines})
                raise
            time.sleep(min(POLL_S, left))

    def _await(self, future: Future[_T], what: str, deadline: Deadline) -> _T:
        """Wait for the other thread, looking out for receivers that gave up meanwhile."""
        while not future.done():
            self._watch()
            left = deadline.check(what)
            settled(future, min(POLL_S, left))
        return future.result()

    def _check_receivers(self) -> None:
        rendezvous, _ = self._open()
        reasons = self._withdrawn | rendezvous.heard_from("failed", self._engines)
        if gone := [engine for engine in self._engines if engine in reasons]:
            self.failed.update({engine: reasons[engine] for engine in _silent(rendezvous, "done", gone)})
        for source, reason in rendezvous.heard_from("failed", self._others).items():
            self._source_failed(source, reason, rendezvous.heard("still", source) or "")
        # Last: it is said before all that, and engines cannot say which member is at fault.
        for source, named in rendezvous.heard_from("differs", self._others).items():
            if named:
                self.differing = tuple(named.split(","))
                self._lost = f"{source} gave up: the weights changed between the digest and the transfer"
                self.failed.clear()
                raise PeerLost(self._lost)
        if self._lost and not self.failed:
            raise PeerLost(self._lost)
        if self.failed:
            raise PeerLost("; ".join(f"{engine} gave up: {reason}" for engine, reason in self.failed.items()))

    def _source_failed(self, source: str, reason: str, still: str) -> None:
        """It is lost, or has found that engines stand still: those are, then."""
        found = [engine for member, engine in enumerate(self._engines) if str(member) in still.split(",")]
        for engine in found:
            self.failed.setdefault(engine, reason)
        if not found and not self._lost:
            self._lost = f"{source} gave up: {reason}"

    def _fail_all(self, error: DataplaneError) -> None:
        """A group of which one member is lost is lost."""
        if isinstance(error, Stalled):
            self.failed.update({self._engines[member]: str(error) for member in error.members})
        self._hear_reasons()
        engines = frozenset(self._engines)
        if self.failed and not self._began and not self.spared:
            self.spared = engines - self.failed.keys()
        for engine in engines:
            self.failed.setdefault(engine, self._lost or str(error))
        if self._rendezvous is not None:
            self._rendezvous.announce("over", str(error))
        self._sends.clear()
        self._break_off()

    def _hear_reasons(self) -> None:
        """A broadcast breaks at once everywhere: the member at fault gets a moment to say so."""
        if self._rendezvous is None or self._session is None:
            return
        deadline = Deadline(_REASONS_S)
        while deadline.left() and not self.failed and not self._lost:
            try:
                self._check_receivers()
            except PeerLost:
                return
            time.sleep(POLL_S)

    def _break_off(self) -> None:
        if self._forming:
            self._end_store()
        if self._group is not None:
            self._group.abort()
        self._group, self._groups, self._members = None, (), ()
        self._calls.give_up()

    def _end_store(self) -> None:
        """End waits for the group in it, once the sidecars have heard that the session is over."""
        rendezvous, self._rendezvous = self._rendezvous, None
        deadline = Deadline(_REASONS_S)
        while rendezvous and deadline.left() and _silent(rendezvous, "failed", self._engines):
            time.sleep(POLL_S)
        store, self._store, self._forming = self._store, None, False
        if store is not None and len(self._sidecars) < len(self._engines):
            where = store.host, store.port
            del store  # the last one: it ends
            lead_nowhere(*where)


def _silent(rendezvous: Rendezvous, step: str, members: Sequence[str]) -> list[str]:
    """The `members` that have not said it."""
    said = rendezvous.heard_from(step, members)
    return [member for member in members if member not in said]
