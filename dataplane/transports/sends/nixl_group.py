"""The group of one epoch over NIXL, for RDMA: receivers read the senders' memory. An optional extra; see p2p_group.py.

No process writes into another. A sender says where its messages lie, a receiver reads them when it is ready, and
what NIXL then tells the sender is that they were read: so a process that was stopped and goes on later can change
nothing, and memory of an epoch that is over cannot be read once its registration is dropped. Over UCX this is RDMA, or
TCP, which is how it is tested.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
from torch._C import _distributed_c10d as c10d

from ...errors import ChunkTimeout, DataplaneError, DeadlineExceeded, PeerLost, TransferFailed, Unsupported
from ...processes import Deadline
from .p2p_group import MOVED, NO_RANKS, OwnStream, P2PChunk
from .transport import NIXL_MODULES

_LOG: Final = logging.getLogger(__name__)
_OURS: Final = (TypeError, AttributeError, LookupError, AssertionError)
"""What no peer causes: told with its traceback, and not as the loss of one."""
_POLL_S: Final = 0.0001
_BACKEND: Final = "UCX"
_PACK: Final = msgspec.msgpack.Encoder().encode


class _Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Sender: post number `post` to this receiver lies here."""

    post: int
    places: tuple[tuple[int, int, int], ...]
    """Address, bytes, and number of the device, of each message."""


class _Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Receiver: it has read that post."""

    post: int


_NOTE: Final[msgspec.msgpack.Decoder[_Offer | _Read]] = msgspec.msgpack.Decoder(_Offer | _Read)


class _Left:
    """A read that could not be cancelled: it writes as long as it likes, and keeps the memory that it writes into."""

    def __init__(self, agent: Any, handle: Any, memory: Sequence[torch.Tensor]) -> None:
        self._agent, self._handle, self._memory = agent, handle, tuple(memory)

    def over(self) -> bool:
        """Whether it has ended, now at last."""
        try:
            if self._agent.check_xfer_state(self._handle) == "PROC":
                return False
            self._agent.release_xfer_handle(self._handle)
        except Exception as error:  # noqa: BLE001  NIXL's errors have no root of their own
            _LOG.warning("a read over NIXL could not be cancelled once more: %s", error)
            return False
        return True

    def writes_into(self, memory: Sequence[torch.Tensor]) -> bool:
        """Whether some of it is there."""
        return any(_overlap(mine, each) for mine in self._memory for each in memory)


_LEFT: Final[list[_Left]] = []
"""Of this process. Their agents keep what was registered."""
_LEFT_LOCK: Final = threading.Lock()


class NixlGroup(OwnStream):
    """One rank of the group. `post` and waits are called by one thread, `abort` by any."""

    def __init__(self, agent: Any, device: torch.device, rank: int, size: int) -> None:
        super().__init__(device)
        self.rank = rank
        self.size = size
        self._agent = agent
        self._kind = "VRAM" if device.type == "cuda" else "DRAM"
        self._registered: list[Any] = []
        self._names: dict[int, str] = {}
        self._posts: dict[tuple[int, bool], int] = defaultdict(int)
        """How many there were, by peer and whether to or from it."""
        self._offers: dict[tuple[int, int], _Offer] = {}
        self._wanted: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._reading: dict[tuple[int, int], tuple[Any, list[torch.Tensor]]] = {}
        """Handles, and where they read into."""
        self._unread: set[tuple[int, int]] = set()
        self._broken = ""

    @classmethod
    def form(  # noqa: PLR0917  as PairGroup's
        cls,
        store: c10d.Store,
        name: str,
        host: str,
        device: torch.device,
        rank: int,
        size: int,
        deadline: Deadline,
        *,
        to: frozenset[int] = NO_RANKS,
        from_: frozenset[int] = NO_RANKS,
        memory: Sequence[torch.Tensor] = (),
    ) -> NixlGroup:
        """Join as `rank`; returns when all have. Messages lie in `memory`. Raises `Unsupported` without NIXL.

        `TransferFailed` too while a read of a group that is over may write there.
        """
        del host  # UCX knows the interfaces of this host by itself
        _require_unread(memory)
        prefixed = c10d.PrefixStore(name, store)
        group: NixlGroup | None = None
        try:
            group = cls(_agent(f"{name}-{rank}"), device, rank, size)
            group._register(memory)
            prefixed.set(str(rank), group._agent.get_agent_metadata())
            prefixed.wait([str(each) for each in range(size)], timedelta(seconds=deadline.check("the group to form")))
            for peer in sorted(to | from_):
                found = group._agent.add_remote_agent(prefixed.get(str(peer)))
                group._names[peer] = found.decode() if isinstance(found, bytes) else str(found)
        except Exception as error:  # NIXL's errors have no root of their own
            if group is not None:
                group.close()
            if isinstance(error, DataplaneError):
                raise
            raise TransferFailed(f"group {name} of {size} ranks did not form: {error}") from error
        return group

    def post(self, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]) -> _Reads:
        """Begin to move all of these, after what `lane` holds by now."""
        with self._breaking():
            self.settle()
            mine: list[tuple[int, int]] = []
            theirs: list[tuple[int, int]] = []
            for peer, memory in _by_peer(receives).items():
                key = peer, self._next(peer, sent=False)
                self._wanted[key] = memory
                theirs.append(key)
            for peer, memory in _by_peer(sends).items():
                key = peer, self._next(peer, sent=True)
                self._unread.add(key)
                mine.append(key)
                self._agent.send_notif(self._names[peer], _PACK(_Offer(key[1], self._places(memory))))
            return _Reads(self, mine, theirs)

    def abort(self, reason: str = "it was broken off") -> None:
        """A wait that runs raises; the peers hear of it from their leader."""
        self._broken = self._broken or reason or "it was broken off"

    def close(self) -> None:
        """Let go of the memory. Called by the thread that posted."""
        self._broken = self._broken or "it has ended"
        left: list[_Left] = []
        for handle, memory in self._reading.values():
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:  # noqa: BLE001  NIXL's errors have no root of their own
                _LOG.warning("a read over NIXL could not be cancelled, and ends with its peer: %s", error)
                left.append(_Left(self._agent, handle, memory))
        self._reading.clear()
        if left:
            with _LEFT_LOCK:
                _LEFT.extend(left)
            return  # what is registered stays so: it is written
        for each in self._registered:
            try:
                self._agent.deregister_memory(each)
            except Exception as error:  # noqa: BLE001  NIXL's errors have no root of their own
                _LOG.warning("memory stays registered with NIXL until this process ends: %s", error)
        self._registered.clear()

    def await_posts(
        self, mine: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]], deadline: Deadline
    ) -> None:
        """Until the peers have read `mine` and all of `theirs` is here."""
        with self._breaking():
            while any(key in self._unread for key in mine) or any(
                key in self._wanted or key in self._reading for key in theirs
            ):
                self._check()
                if not self._progress():
                    deadline.check(MOVED)
                    time.sleep(_POLL_S)

    # -- small things -------------------------------------------------------------------------------------------------

    def _progress(self) -> bool:
        """Take what peers said, begin and end reads. Returns whether anything happened."""
        moved = False
        ranks = {name: peer for peer, name in self._names.items()}
        for name, notes in self._agent.get_new_notifs().items():
            if name not in ranks:
                _LOG.warning(
                    "a NIXL agent that is none of this group sent %d notices: they are not looked at", len(notes)
                )
                continue
            for note in (_NOTE.decode(each) for each in notes):
                key = ranks[name], note.post
                moved = True
                if isinstance(note, _Offer):
                    self._offers[key] = note
                else:
                    self._unread.discard(key)
        for key in [key for key in self._offers if key in self._wanted]:
            self._read(key, self._offers.pop(key), self._wanted.pop(key))
            moved = True
        for key, (handle, _) in tuple(self._reading.items()):
            state = self._agent.check_xfer_state(handle)
            if state == "ERR":
                raise RuntimeError(f"rank {key[0]} could not be read")
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
                del self._reading[key]
                moved = True
        return moved

    def _read(self, key: tuple[int, int], offer: _Offer, memory: list[torch.Tensor]) -> None:
        here = self._places(memory)
        if [each[1] for each in here] != [each[1] for each in offer.places]:
            raise RuntimeError(f"rank {key[0]} sends other messages than are expected of it")
        local = self._agent.get_xfer_descs(list(here), mem_type=self._kind)
        remote = self._agent.get_xfer_descs(list(offer.places), mem_type=self._kind)
        handle = self._agent.initialize_xfer("READ", local, remote, self._names[key[0]], _PACK(_Read(key[1])))
        self._reading[key] = handle, memory  # whatever becomes of it, it is released or left
        if self._agent.transfer(handle) == "ERR":
            raise RuntimeError(f"rank {key[0]} could not be read")

    def _register(self, memory: Sequence[torch.Tensor]) -> None:
        regions = {(each.data_ptr(), each.numel()): each for each in memory if each.numel()}
        if regions:
            table = [(at, nbytes, self._number, "") for at, nbytes in regions]
            self._registered.append(self._agent.register_memory(table, mem_type=self._kind))

    def _places(self, memory: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
        return tuple((each.data_ptr(), each.numel(), self._number) for each in memory)

    @property
    def _number(self) -> int:
        return self._device.index or 0

    def _next(self, peer: int, *, sent: bool) -> int:
        self._posts[peer, sent] += 1
        return self._posts[peer, sent]

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError(self._broken)

    @contextlib.contextmanager
    def _breaking(self) -> Generator[None, None, None]:
        """Whatever goes wrong within breaks the group."""
        try:
            self._check()
            yield
        except DeadlineExceeded as error:
            self.abort("a peer did not move")
            raise ChunkTimeout(error.waiting_for, error.seconds) from error
        except Exception as error:  # NIXL's errors have no root of their own
            self.abort(str(error) or type(error).__name__)
            if isinstance(error, _OURS):
                _LOG.exception("a bug of ours broke the group")
                raise TransferFailed(f"a bug of ours broke the group: {type(error).__name__}: {error}") from error
            raise PeerLost(f"the group broke: {self._broken}") from error


class _Reads:
    """Implements `Posted`."""

    def __init__(self, group: NixlGroup, mine: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> None:
        self._group, self._mine, self._theirs = group, mine, theirs

    def wait(self, deadline: Deadline) -> None:
        """As `Posted.wait`."""
        self._group.await_posts(self._mine, self._theirs, deadline)


def _by_peer(chunks: Sequence[P2PChunk]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for each in chunks:
        found.setdefault(each.peer, []).append(each.memory)
    return found


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (each.data_ptr() for each in (one, other))
    return one.device == other.device and first < second + other.nbytes and second < first + one.nbytes


def _require_unread(memory: Sequence[torch.Tensor]) -> None:
    """Raise `TransferFailed` while a read of a group that is over may write into `memory`."""
    with _LEFT_LOCK:
        _LEFT[:] = [each for each in _LEFT if not each.over()]
        if any(each.writes_into(memory) for each in _LEFT):
            raise TransferFailed(
                "a read over NIXL of a group that is over has not ended, and may write into this memory"
            )


def _agent(name: str) -> Any:
    tried: deque[str] = deque()
    for module in NIXL_MODULES:
        try:
            api = importlib.import_module(f"{module}._api")
        except ImportError as error:
            tried.append(f"{module}: {error}")
            continue
        return api.nixl_agent(name, api.nixl_agent_config(backends=[_BACKEND]))
    raise Unsupported(f"sends over nixl need it in this environment: install weightbus[nixl] ({'; '.join(tried)})")
