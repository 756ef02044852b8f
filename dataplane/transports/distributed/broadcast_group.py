"""A rank of ours in the collective group that SGLang's workers can join: formed, used and aborted under deadlines.

SGLang forms its side with ``init_custom_process_group``: a TCPStore client, wrapped in a PrefixStore of the group's
name, given to torch's ``_new_process_group_helper``, which wraps it twice more. The same prefixes are applied here, and
the backend object is built directly: the trainer's default group, its timeouts and torch's registry stay as they are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple, Protocol, Self, TypeVar, cast

import msgspec
import torch

# torch.distributed has these names only where it was built with it, and type checkers do not see them there.
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from ...errors import DeadlineExceeded, TransferFailed
from ...processes import Deadline, SerialCalls, bucket_timeout_s, process_groups as backends, run_all_within
from ...tensors import Sources
from .rendezvous_keys import POLL_S, RendezvousKeys, settled
from .source_watchdog import Connections, SourceWatchdog, connections_of

# -- the groups of a session: pure, no torch
#
# The ranks that broadcast are *sources*, one for each pipeline stage; source 0 leads. Each has a group of its own
# with all engine ranks (over gloo one with each engine). Three orders are the same for all members, which is what
# keeps them from waiting in a circle:
#
#     groups    are joined in the order of their sources: a server is asked for the next one when it is in the last
#     buckets   are taken in the manifest's order, in which stages take turns: while one sends, the others assemble
#     slots     of a source are used in turn, and again when the bucket that was there has been taken


_SEVERAL: Final = "{"
"""How the announcement of several groups begins; names do not."""


class EnginePart(NamedTuple):
    """The groups of a session as one engine joins them."""

    names: tuple[str, ...]
    """By source."""
    rank_offset: int
    world_size: int
    """The same in each of them."""
    by_sidecar: bool = False
    """The engine's agent is the member, once, and none of its server's workers is."""


def own_group(name: str, rank_offset: int) -> str:
    """Of an engine alone: `name` is the group's of all, in which its ranks would begin at `rank_offset`."""
    return f"{name}-at{rank_offset}"


class GroupSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What receivers are told: the groups of a session, and which of them each bucket comes by."""

    names: tuple[str, ...]
    """In the order in which all join them."""
    of: tuple[int, ...]
    """By bucket; empty where there is one group."""
    ranks: tuple[int, ...] = ()
    """By engine, in the order of their ranks, how many workers it has. Empty where the workers of all engines are in a
    group together; else each engine has its own with every source, and its ranks begin at 1 there."""
    together: bool = False
    """All are in a group together though `ranks` are given."""
    sidecars: tuple[int, ...] = ()
    """Engines, by their place in `ranks`, of which the agent is the member, once, in place of their workers."""

    @classmethod
    def of_sources(
        cls,
        base: str,
        sources: Sources,
        ranks: tuple[int, ...] = (),
        *,
        together: bool = False,
        sidecars: tuple[int, ...] = (),
    ) -> Self:
        """Names of groups that begin with `base`, which is that of the leading source."""
        names = (base, *(f"{base}-source{number}" for number in range(1, sources.count)))
        return cls(names, sources.of if sources.count > 1 else (), ranks, together, sidecars)

    @property
    def members(self) -> tuple[int, ...]:
        """By engine, how many ranks of a group are its; empty as `ranks`."""
        sidecars = frozenset(self.sidecars)
        return tuple(1 if engine in sidecars else count for engine, count in enumerate(self.ranks))

    @property
    def apart(self) -> tuple[int, ...]:
        """The same where each engine has groups of its own; else empty."""
        return () if self.together else self.members

    @property
    def all_ours(self) -> bool:
        """No worker of a server is in them."""
        return bool(self.ranks) and len(self.sidecars) == len(self.ranks)

    def size(self, world_size: int) -> int:
        """Ranks of a group of all, which has `world_size` where workers are its members."""
        return 1 + sum(self.members) if self.ranks else world_size

    def of_engine(self, rank_offset: int, world_size: int) -> EnginePart:
        """What the engine joins whose first worker is rank `rank_offset` among those of all. Raises `TransferFailed`.

        `world_size` counts all workers, and the source.
        """
        if not self.ranks:
            return EnginePart(self.names, rank_offset, world_size)
        parts = self._parts()
        if rank_offset not in parts:
            raise TransferFailed(f"the sender announced groups of engines at {[*parts]}, none at {rank_offset}")
        return parts[rank_offset]

    def held(self, engines: int) -> tuple[tuple[tuple[str, ...], bool], ...]:
        """By engine, the names that `of_engine` says, and whether its agent is the member; of all of them for once."""
        if not self.ranks:
            return ((self.names, False),) * engines
        return tuple((part.names, part.by_sidecar) for part in self._parts().values())

    def _parts(self) -> dict[int, EnginePart]:
        """Where engines have `ranks`: by the rank of each one's first worker among those of all."""
        members, sidecars = self.members, frozenset(self.sidecars)
        size, parts = 1 + sum(members), dict[int, EnginePart]()
        firsts, places = accumulate(self.ranks[:-1], initial=1), accumulate(members[:-1], initial=1)
        for engine, (first, at) in enumerate(zip(firsts, places, strict=True)):
            names = self.names if self.together else tuple(own_group(name, first) for name in self.names)
            place = (at, size) if self.together else (1, 1 + members[engine])
            parts[first] = EnginePart(names, *place, engine in sidecars)
        return parts

    def source_of(self, bucket: int) -> int:
        """Which of the groups `bucket` comes by."""
        return self.of[bucket] if self.of else 0

    def encode(self) -> str:
        """As it is announced: of one group its name alone."""
        return self.names[0] if len(self.names) == 1 and not self.ranks else msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, word: str, buckets: int) -> Self:
        """Read what `encode` wrote. Raises `TransferFailed` unless every one of `buckets` buckets has a group."""
        if not word.startswith(_SEVERAL):
            return cls((word,), ())
        try:
            groups = msgspec.json.decode(word, type=cls)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"the sender announced groups that cannot be read: {error}") from error
        of = groups.of or ((0,) * buckets if len(groups.names) == 1 else ())
        fits = len(of) == buckets and set(of) <= set(range(len(groups.names)))
        if not fits or min(groups.ranks, default=1) < 1 or not set(groups.sidecars) <= set(range(len(groups.ranks))):
            raise TransferFailed(
                f"the sender announced {len(groups.names)} groups for {len(groups.of)} buckets, expected one for"
                f" each of {buckets}: give sender and receiver the same version of weightbus"
            )
        return groups


ROOT: Final = 0
"""SGLang's workers broadcast from rank 0 of the group, always."""

_POLL_S: Final = 0.001


def to_be_taken(memory: torch.Tensor, deadline: Deadline) -> Deadline:
    """The deadline of a broadcast of `memory`, whichever member stalls."""
    return Deadline(min(deadline.left(), bucket_timeout_s(memory.nbytes)))


class _BroadcastBackend(backends.GlooReceive, Protocol):
    """What torch's stubs leave out of ProcessGroupGloo and ProcessGroupNCCL."""

    def broadcast(self, tensors: list[torch.Tensor], opts: c10d.BroadcastOptions) -> c10d.Work: ...

    def abort(self) -> None: ...


class _Watched(ABC):
    """One group or several, over gloo with a watchdog while servers wait in them for this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._watchdog: SourceWatchdog | None = None

    @abstractmethod
    def _all_connections(self) -> Sequence[Connections]:
        """Of each group, where they can be had."""

    @property
    def hung_up(self) -> bool:
        """Its connections were ended while this process stood still."""
        return self._watchdog is not None and self._watchdog.hung_up

    def use(self, used: bool) -> None:
        """Whether servers wait in it from now on: they are let go when this process stands still meanwhile (gloo)."""
        if self._watchdog is None and used and any(each.files for each in self._all_connections()):
            self._watchdog = SourceWatchdog(self._all_connections())
        if self._watchdog is not None:
            self._watchdog.use(used)


class BroadcastGroup(_Watched):
    """The root of a group of `world_size` ranks, or another rank of it, which receives."""

    def __init__(  # noqa: PLR0917  what it is made of
        self,
        name: str,
        device: torch.device,
        world_size: int,
        backend: _BroadcastBackend,
        connections: Connections | None = None,
        rank: int = ROOT,
    ) -> None:
        """`connections` are those with the other ranks, where they can be had."""
        super().__init__(name)
        self.connections = connections or Connections()
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self._backend: _BroadcastBackend | None = backend

    @classmethod
    def form(  # noqa: PLR0917
        cls,
        store: c10d.Store,
        name: str,
        host: str,
        device: torch.device,
        world_size: int,
        deadline: Deadline,
        *,
        rank: int = ROOT,
        connect: bool = False,
    ) -> BroadcastGroup:
        """Blocks until every rank has come; over NCCL, which connects at the first broadcast, only to `connect`.

        That broadcast is one more, so that all ranks have to do it, which SGLang's workers do not.
        """
        timeout = timedelta(seconds=deadline.check("the group to form"))
        prefixed = c10d.PrefixStore(f"{device.type}/", c10d.PrefixStore(f"{name}/", c10d.PrefixStore(name, store)))
        try:
            if device.type == "cuda":
                found = cast("_BroadcastBackend", backends.make_nccl_group(prefixed, rank, world_size, deadline))
                group = cls(name, device, world_size, found, rank=rank)
                if connect:
                    try:
                        group._carry(torch.zeros(1, dtype=torch.uint8, device=device), deadline)
                    except BaseException:
                        group.abort()  # no other holds it
                        raise
                return group
            backend = cast("_BroadcastBackend", backends.make_gloo_group(prefixed, host, rank, world_size, timeout))
        except (RuntimeError, ValueError) as error:
            raise TransferFailed(f"group {name} of {world_size} ranks did not form: {error}") from error
        connections = connections_of(prefixed, rank, world_size) if rank == ROOT else None
        return cls(name, device, world_size, backend, connections, rank)

    def _all_connections(self) -> Sequence[Connections]:
        return [self.connections]

    def broadcast(self, memory: torch.Tensor, deadline: Deadline) -> None:
        """Send `memory` to every rank, or receive it; returns when it may be written again, or read."""
        self._carry(memory, to_be_taken(memory, deadline) if self.rank == ROOT else deadline)

    def _carry(self, memory: torch.Tensor, deadline: Deadline) -> None:
        work = self.begin(memory, deadline)
        try:
            if self._device.type == "cuda":
                self._wait(work, deadline)
            else:
                work.wait(timedelta(seconds=deadline.check("a broadcast to end")))
        except RuntimeError as error:
            raise self._broke(error) from error

    def begin(self, memory: torch.Tensor, deadline: Deadline) -> c10d.Work:
        """Begin to send `memory` to every rank, or to receive it; `ended` says when that is over."""
        if self._backend is None:
            raise TransferFailed(f"{self.name} was broken off")
        options = c10d.BroadcastOptions()
        options.rootRank = ROOT
        options.rootTensor = 0
        options.timeout = timedelta(seconds=deadline.check("a broadcast to begin"))
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            return self._backend.broadcast([memory], options)
        except RuntimeError as error:
            raise self._broke(error) from error

    def ended(self, work: c10d.Work) -> bool:
        """Whether what `begin` began has ended well. Raises `TransferFailed` if it broke."""
        if not work.is_completed():
            return False
        try:
            work.wait()  # at once: it is completed, and raises what broke it
        except RuntimeError as error:
            raise self._broke(error) from error
        return True

    def _broke(self, error: RuntimeError) -> TransferFailed:
        return TransferFailed(f"the broadcast over {self.name} broke: {error}")

    def _wait(self, work: c10d.Work, deadline: Deadline) -> None:
        while not work.is_completed():
            if not deadline.left():
                raise DeadlineExceeded(f"every rank of {self.name} to take a broadcast", deadline.seconds)
            time.sleep(_POLL_S)
        work.wait()
        if self._backend is None:  # to a work of NCCL's, an abort looks like its end
            raise TransferFailed(f"{self.name} was broken off")

    def abort(self) -> None:
        """Break it off, also while another thread is in `broadcast`. The group is of no use afterwards.

        NCCL returns from everything at once; of gloo the connections are closed, which frees the other ranks.
        """
        backend, self._backend = self._backend, None
        if backend is None:
            return
        if self._device.type == "cuda":
            backends.abort_nccl(backend)
            return
        backends.break_gloo(backend, self.rank, self.world_size)
        self.connections.end()  # which another process has, too
        if self._watchdog is not None:
            self._watchdog.close()


STILL_S: Final = 10.0
"""How much longer than the others an engine may take for a bucket; and three times as long as they took."""
STILL_FORMING_S: Final = 15.0
"""... for its group to form, after the first of the others: a server imports and connects for the first time."""
AWAY_S: Final = 1.0
"""A source looks every few milliseconds. After a longer gap it was stopped itself: only so much of it counts."""
BREAK_OFF_S: Final = 5.0
"""How long all groups of a session are waited for while they are left."""
_FACTOR: Final = 3.0

_Group = TypeVar("_Group", bound="Leaving")
_T = TypeVar("_T")


class Stalled(TransferFailed):
    """Others have done what these have not, since long."""

    def __init__(self, members: tuple[int, ...], what: str, seconds: float) -> None:
        self.members = members
        """Which of the engines, counted in the order of their ranks."""
        super().__init__(f"{what}: others had, and {seconds:.1f} s later this engine had not; it stands still")


class Stragglers:
    """Tells slow engines from stalled ones, by the progress of the others. Pure."""

    def __init__(self, what: str, since: float, still_s: float) -> None:
        """`what` no engine had done at `since`."""
        self._what, self._since, self._still_s = what, since, still_s
        self._last: float | None = None
        self._seen = 0
        self._looked, self._waited_s = since, 0.0
        """When last, and how long since the last one had."""

    def look(self, done: Sequence[bool], now: float) -> None:
        """Of every engine, whether it has. Raises `Stalled` when the others had time enough.

        To be called all the time. While it is not called, the source itself is stalled, and no engine gets anything.
        """
        count = sum(done)
        self._waited_s += min(now - self._looked, AWAY_S)
        self._looked = now
        if count > self._seen:
            self._seen, self._last, self._waited_s = count, now, 0.0
        if self._last is None or count == len(done):
            return
        if self._waited_s > self._still_s + _FACTOR * (self._last - self._since):
            late = tuple(member for member, each in enumerate(done) if not each)
            raise Stalled(late, self._what, self._waited_s)


class Behind:
    """Tells the engine that keeps others waiting in a group of all, by the bucket that each has come to. Pure.

    NCCL hands a bucket from rank to rank: behind one that does not come to it none gets it, and the source may be
    through with it long before.
    """

    def __init__(self, since: float) -> None:
        self._at: tuple[int, ...] = ()
        self._looked, self._waited_s, self._longest_s = since, 0.0, 0.0

    def look(self, at: Sequence[int], now: float) -> None:
        """Raises `Stalled` when no engine has gone on for long, and some have come further than others.

        To be called all the time, as `Stragglers.look`. How long is too long follows from the longest step so far.
        """
        self._waited_s += min(now - self._looked, AWAY_S)
        self._looked = now
        if tuple(at) != self._at:
            self._longest_s = max(self._longest_s, self._waited_s)
            self._at, self._waited_s = tuple(at), 0.0
        first = max(at, default=0)
        late = tuple(member for member, bucket in enumerate(at) if bucket < first)
        if late and self._waited_s > STILL_S + _FACTOR * self._longest_s:
            raise Stalled(late, f"to come to bucket {first}", self._waited_s)


class EngineGroups(_Watched):
    """Rank 0 of a group with each engine, over gloo. Used as a `BroadcastGroup`.

    Gloo's broadcast is a tree. In one group of all, a rank that stands still keeps ranks below it waiting, and ranks
    above it, which offer it bytes; nothing reaches a server that waits so. Engines that share no group wait for the
    source alone, which can leave, and knows the engine that does not take what the others have taken. Of three and
    more workers of one server some are still below others of it.
    """

    def __init__(self, name: str, groups: Sequence[BroadcastGroup]) -> None:
        """`name` is of all of them together."""
        super().__init__(name)
        self._groups = tuple(groups)

    def _all_connections(self) -> Sequence[Connections]:
        return [group.connections for group in self._groups]

    @classmethod
    def form(  # noqa: PLR0917
        cls,
        store: Callable[[], Store],
        name: str,
        host: str,
        device: torch.device,
        groups: GroupSettings,
        deadline: Deadline,
    ) -> EngineGroups:
        """Blocks until all have formed, of engines that are `apart`; `store` makes a client for each."""
        forming: dict[int, Future[BroadcastGroup]] = {}
        first = 1
        for member, (workers, ranks) in enumerate(zip(groups.ranks, groups.apart, strict=True)):
            own = own_group(name, first)
            make = partial(_form_one, store, own, host, device, 1 + ranks, deadline)
            forming[member] = SerialCalls("weightbus-broadcast").submit(make)
            first += workers
        stragglers = Stragglers("its group to form", time.monotonic(), STILL_FORMING_S)
        try:
            while not all(each.done() for each in forming.values()):
                for each in forming.values():
                    if each.done():
                        each.result()  # raises where it failed
                stragglers.look([each.done() for each in forming.values()], time.monotonic())
                deadline.check(f"groups of {name} to form")
                time.sleep(_POLL_S)
            return cls(name, [each.result() for each in forming.values()])
        except Exception:
            break_off([partial(break_when_formed, each) for each in forming.values()])
            raise

    def broadcast(self, memory: torch.Tensor, deadline: Deadline) -> None:
        """Send `memory` to every engine; returns when it may be written again."""
        deadline = to_be_taken(memory, deadline)
        stragglers = Stragglers("to take a bucket", time.monotonic(), STILL_S)
        works = [(group, group.begin(memory, deadline)) for group in self._groups]
        ended = [False] * len(works)
        while not all(ended):
            ended = [was or group.ended(work) for was, (group, work) in zip(ended, works, strict=True)]
            stragglers.look(ended, time.monotonic())
            deadline.check(f"every engine of {self.name} to take a broadcast")
            time.sleep(_POLL_S)

    def abort(self) -> None:
        """Break all off, also while another thread is in `broadcast`."""
        ends = [group.abort for group in self._groups]
        if self._watchdog is not None:
            ends.append(self._watchdog.close)
        break_off(ends)


def _form_one(  # noqa: PLR0917
    store: Callable[[], Store], name: str, host: str, device: torch.device, world_size: int, deadline: Deadline
) -> BroadcastGroup:
    return BroadcastGroup.form(store(), name, host, device, world_size, deadline)


def settle(
    keys: RendezvousKeys,
    answer: Future[_T],
    what: str,
    deadline: Deadline,
    given_up: Callable[[Future[_T]], None] = lambda _: None,
) -> _T:
    """Wait for another thread. What it does cannot be called off, but it is `given_up` when the session is over."""
    try:
        while not settled(answer, POLL_S):
            keys.check()
            deadline.check(what)
    except TransferFailed:
        given_up(answer)
        raise
    return answer.result()


def break_off(ends: Sequence[Callable[[], None]]) -> None:
    """Do all of `ends`, each of which leaves a group or what belongs to it, within `BREAK_OFF_S`.

    Beside one another: over NCCL one may take that long, and wait for another one. Raises as `run_all_within`.
    """
    run_all_within(BREAK_OFF_S, ends, "weightbus-break-off")


class Leaving(Protocol):
    """A group that can be left."""

    def abort(self) -> None:
        """Break it off."""
        ...


def break_when_formed(forming: Future[_Group]) -> None:
    """Not waited for any more: the thread that forms it leaves it as soon as it has formed."""

    def leave(formed: Future[_Group]) -> None:
        if not formed.cancelled() and formed.exception() is None:
            formed.result().abort()

    forming.add_done_callback(leave)
