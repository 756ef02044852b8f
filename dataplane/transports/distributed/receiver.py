"""The engine's half of the distributed transport: the member of a group is the sidecar, or the server's workers.

The sidecar is, where it can (`SidecarReceiver`). A server in a collective waits inside of it for members that are gone:
over NCCL for ever, and nothing reaches it. The sidecar can leave. So it takes each bucket into memory of its own, which
the server's workers can open, compares it with the digest table, and only then has the server load it, while the next
bucket arrives. The server is in no group, and costs a group one rank, whatever its tensor parallelism. Over NCCL that
memory lies on the first of the server's GPUs, and takes a context there.

Workers join as the field does it (`ServerReceiver`) where the server is elsewhere or another user's, its GPUs are not
known, not seen from here or do not reach each other, or the first of them has no room. A server is asked for one thing
at a time, as SGLang wants it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch

from ...errors import NotExportable, TransferFailed
from ...memory import BucketBuffers, CudaMemory, TorchSharedBuffers, decode_handle, device_name
from ...processes import (
    Deadline,
    SerialCalls,
    connect_store,
    local_address_towards,
    open_runtime_dir,
    parse_tcp_address,
)
from ..interface import Address, EngineServer, Receipt, TransferSession
from ..sessions import BucketLoads, check_bucket
from .broadcast_group import BroadcastGroup, EnginePart, GroupSettings, break_off, break_when_formed, settle
from .rendezvous_keys import RendezvousKeys, holding, settled

_LOG: Final = logging.getLogger(__name__)
_RETURN_S: Final = 1.0
"""How long a server may take to return from a call when its session is over: else it stands still."""
_LEAVE_S: Final = 5.0
"""How long a server may take to forget groups that are broken anyway."""
SLOTS: Final = 2
"""One is received while the server loads the other."""
_SPARE_BYTES: Final = 1280 << 20
"""For what NCCL and CUDA take of a GPU beside the slots, and for the server.

An idle group of two took 0.94 GB of an H200 (`idle_group_bytes` in tests/gpu/results/nccl.json).
"""
_CUMEM: Final = "NCCL_CUMEM_ENABLE"

_T = TypeVar("_T")


class DistributedReceiver:
    """One engine's. Implements `Receiver`, `Remarking` and `StallDetector`."""

    def __init__(self, runtime_dir: Path, *, hands_on: bool = True) -> None:
        """`hands_on`: this process takes part itself, where it can."""
        self._hands_on = hands_on
        self._sidecar_member = SidecarReceiver(runtime_dir)
        self._server_member = ServerReceiver()
        self._used: SidecarReceiver | ServerReceiver = self._server_member
        """In the last session."""
        self.remark = ""
        """Why the server's workers take part, where this process should have; for people."""
        self._met_at = ""
        """Where the last session was, if it ended well. A trainer that stays keeps that address then."""

    @property
    def touched(self) -> bool:
        """The server was asked to change weights in the last session."""
        return self._used.touched

    def receive(  # noqa: PLR0917
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Take every bucket and load it into `server`. Raises `TransferFailed`."""
        if self._met_at not in {"", address.address}:
            self._sidecar_member.unknown = False  # the sender is another one than before
        self._met_at = ""
        reason = self._sidecar_member.why_not(server, session) if self._hands_on else ""
        chosen = self._sidecar_member if self._hands_on and not reason else self._server_member
        self.remark = f"the server's workers take part in the broadcast themselves: {reason}" if reason else ""
        if chosen is not self._used:
            self._used.require_moving()
            self._used.shutdown()
            self._used = chosen
        receipt = chosen.receive(session, address, engine, rank_offset, server, deadline_s)
        self._met_at = address.address
        return receipt

    def require_moving(self) -> None:
        """Raise `TransferFailed` while the server has not returned from what a session that is over asked of it."""
        self._sidecar_member.require_moving()
        self._server_member.require_moving()

    def close(self) -> None:
        """Break off the session that runs, from any thread; groups stay for the next one if it ended well."""
        self._used.close()

    def shutdown(self) -> None:
        """Let go of everything."""
        self._sidecar_member.shutdown()
        self._server_member.shutdown()


class _Session(NamedTuple):
    transfer: TransferSession
    address: Address
    rank_offset: int
    server: EngineServer
    deadline: Deadline
    keys: RendezvousKeys

    def groups(self, held: str) -> tuple[GroupSettings, EnginePart]:
        """What the sender names to an engine that has said what is `held`; and what is this engine's of it."""
        self.keys.say("came", held, self.deadline)
        groups = GroupSettings.decode(self.keys.group(self.deadline), len(self.transfer.manifest.buckets))
        return groups, groups.of_engine(self.rank_offset, self.address.world_size)


class _Member(ABC):
    """What both kinds of member do alike.

    Groups are joined in the order in which the sender names them, which is the same for every engine.
    """

    def __init__(self) -> None:
        self.touched = False
        self._keys: RendezvousKeys | None = None
        """Of the session that runs."""

    @abstractmethod
    def _begin(self, server: EngineServer) -> None:
        """Before anything is asked of the server or the sender."""

    @abstractmethod
    def _take_all(self, session: _Session) -> None:
        """Join the groups if need be, then take every bucket."""

    @abstractmethod
    def _end(self, server: EngineServer, *, failed: bool) -> None:
        """The sender has been told how it ended."""

    @abstractmethod
    def _returns(self, seconds: float) -> bool:
        """Wait until the server has returned from everything that it was asked; whether it has."""

    def receive(  # noqa: PLR0917
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Take every bucket and load it into `server`. Raises `TransferFailed`."""
        deadline = Deadline(deadline_s)
        self.touched = False
        self._keys = keys = RendezvousKeys(address.address, session.epoch, engine, address.token)
        keys.begin()
        self._begin(server)
        reason = ""
        try:
            self.require_moving()
            self._take_all(_Session(session, address, rank_offset, server, deadline, keys))
            keys.say("done", "", deadline)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._keys = None
            keys.close(reason)
            self._end(server, failed=bool(reason))
        checked = isinstance(self, SidecarReceiver)
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=checked)

    def require_moving(self) -> None:
        """Raise `TransferFailed` while the server has not returned from what a session that is over asked of it.

        Nothing that is asked of it then is answered before, and it may read the sidecar's memory as long.
        """
        if not self._returns(0.0):
            raise TransferFailed("the server stands still: it has not returned from the call of a session that is over")

    def close(self) -> None:
        """Break off the session that runs, from any thread; the groups stay for the next one if it ended well."""
        if (keys := self._keys) is not None:
            keys.cancel("the session was called off")


class ServerReceiver(_Member):
    """Brings a server's workers into the groups, and has them take every bucket."""

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[str, ...] = ()
        """The groups the server is in, as far as this process knows."""
        self._doubted = False
        """It may have left them, or be another launch of it."""
        self._server: EngineServer | None = None
        self._launch = ""
        self._thread: ThreadPoolExecutor | None = None
        self._asked: Future[None] | None = None
        """The last call that was made of the server."""
        self._joins = False
        """It was to join a group, in the session that runs."""

    def _begin(self, server: EngineServer) -> None:
        self._joins = False
        if self._server is not server:
            self._held, self._server, self._asked = (), server, None
        self._doubted |= self._launch != server.launch
        self._launch = server.launch
        if self._held:
            server.watch_groups(self._held, used=True)

    def _take_all(self, session: _Session) -> None:
        server, manifest = session.server, session.transfer.manifest
        groups, mine = session.groups(holding(() if self._doubted else self._held))
        if forms := self._doubted or mine.names != self._held:
            for group in self._held:
                self._call(session, f"the server to leave {group}", server.leave_group, group)
            self._held, self._doubted = mine.names, False
            server.watch_groups(self._held, used=True)  # before it waits in them
            self._joins = True
            for group in mine.names:
                where = msgspec.structs.replace(session.address, group=group, world_size=mine.world_size)
                self._call(session, f"the group {group} to form", server.join_group, where, mine.rank_offset)
            self._joins = False
        session.keys.say("joined", "", session.deadline)
        if forms and groups.ranks:  # nothing else keeps this engine from its first bucket while another does not join
            session.keys.formed(session.deadline)
        for index in range(len(manifest.buckets)):
            self.touched = True
            group = mine.names[groups.source_of(index)]
            self._call(session, f"bucket {index}", server.load_broadcast, group, manifest.tensors_of(index))

    def _end(self, server: EngineServer, *, failed: bool) -> None:
        if failed:
            if self._thread is not None:
                self._thread.shutdown(wait=False, cancel_futures=True)
                self._thread = None
            if self._held and (self._joins or self._returns(_RETURN_S)):  # to leave is what ends a join
                self._leave(server)
        self._doubted |= not server.watch_groups(self._held, used=False)

    def shutdown(self) -> None:
        """Have the server leave its groups."""
        if self._held and self._server is not None:
            self._leave(self._server)
            self._server.watch_groups((), used=False)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    def _call(self, session: _Session, what: str, function: Callable[..., None], *arguments: object) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "weightbus-engine")
        self._asked = self._thread.submit(function, *arguments, session.deadline.check(what))
        settle(session.keys, self._asked, what, session.deadline)

    def _returns(self, seconds: float) -> bool:
        return self._asked is None or settled(self._asked, seconds)

    def _leave(self, server: EngineServer) -> None:
        """Have the server forget its groups, which are broken for all members. It may be dead; that is no news.

        All of them within the time of one: a server that does not answer is not asked again.
        """
        deadline = Deadline(_LEAVE_S)
        with contextlib.suppress(TransferFailed):
            for group in self._held:
                server.leave_group(group, deadline.check("the server to leave its groups"))
        self._held = ()


class SidecarReceiver(_Member):
    """Takes part in place of its server, and hands on what it takes. Its memory and its groups outlive rounds."""

    def __init__(self, runtime_dir: Path) -> None:
        super().__init__()
        self._runtime_dir = runtime_dir
        self._memory: SidecarBuffers | None = None
        self._room = GpuRoom()
        self._opens = ""
        """Where `_memory` lies."""
        self._device = torch.device("cpu")
        self._groups: dict[str, BroadcastGroup] = {}
        """By name, in the order in which they were joined."""
        self._calls = SerialCalls("weightbus-receive")
        self._moving: Callable[[], bool] = lambda: False
        """Whether the last call of ours, which may write into our memory, has not returned."""
        self._loads = BucketLoads()
        self.unknown = False
        """A sender did not know what a sidecar that comes by itself is."""

    def why_not(self, server: EngineServer, session: TransferSession) -> str:
        """Why this process cannot take part in `session` for `server`; empty where it can, and has memory for it."""
        if not server.opens:
            return "no memory of this process is known that the server's workers could open"
        if self.unknown:
            return "the trainer's version of weightbus does not know of agents that take part themselves"
        if self._opens not in ("", server.opens):  # launched again, on another GPU: nothing of ours is there
            self._break_off()
            self._let_go()
        nbytes = session.manifest.largest_bucket
        if self._memory is not None and self._memory.holds(nbytes):
            return ""
        if server.opens == "cpu":
            self._device = torch.device("cpu")
        elif reason := self._room.why_not(server.opens, nbytes, self._memory.nbytes if self._memory is not None else 0):
            return reason
        else:
            self._device = gpu_named(server.opens)
        return ""

    def shutdown(self) -> None:
        """Let go of everything."""
        self._break_off()
        if self._returns(_RETURN_S):  # a worker that finds no memory where it was told to look ends its server
            self._let_go()
        self._loads.shutdown()

    def _begin(self, server: EngineServer) -> None:
        pass

    def _take_all(self, session: _Session) -> None:
        self._loads.asked = []
        memory = self._reserved(session)
        groups, mine = self._join(session)
        for index in range(len(session.transfer.manifest.buckets)):
            self._take(session, index, memory, self._groups[mine.names[groups.source_of(index)]])
            lent = memory.lend(index % memory.count, session.server.tp)
            within_s = session.deadline.check(f"time to load bucket {index}")
            self.touched = True
            self._loads.ask(session.transfer, index, lent, session.server, within_s)
        for index in range(len(self._loads.asked)):
            self._loaded(session, index)

    def _end(self, server: EngineServer, *, failed: bool) -> None:
        del server
        if failed:
            self._break_off()
            self._returns(_RETURN_S)  # until it has answered, if it does, it counts as loading

    def _returns(self, seconds: float) -> bool:
        return not wait(self._loads.asked, seconds).not_done

    # -- a session ---------------------------------------------------------------------------------------------------

    def _reserved(self, session: _Session) -> SidecarBuffers:
        if self._moving():  # what is checked here must not change under the server's hands: it keeps what it has
            _LOG.warning("a broadcast that is over has not returned: its memory is left to it, and other is taken")
            self._let_go()
        if self._memory is None:
            if self._device.type == "cpu":
                open_runtime_dir(self._runtime_dir)
                self._memory = TorchSharedBuffers(self._runtime_dir)
            else:
                self._memory = self._room.memory(self._device)
            self._opens = session.server.opens
        manifest = session.transfer.manifest
        self._memory.reserve(manifest.largest_bucket, len(manifest.buckets), session.deadline)
        return self._memory

    def _join(self, session: _Session) -> tuple[GroupSettings, EnginePart]:
        groups, mine = session.groups(holding(tuple(self._groups), by_sidecar=True))
        if not mine.by_sidecar:
            self.unknown = True
            raise TransferFailed(
                "the sender expects the server's workers, and this agent came by itself: the trainer's weightbus is "
                "older; from now on they are sent"
            )
        if mine.names != tuple(self._groups):
            self._break_off()
            for name in mine.names:
                form = partial(self._form, session.address, name, mine, session.deadline, connect=groups.all_ours)
                self._groups[name] = self._call(session, f"the group {name} to form", form, break_when_formed)
        session.keys.say("joined", "", session.deadline)
        return groups, mine

    def _form(
        self, address: Address, name: str, mine: EnginePart, deadline: Deadline, *, connect: bool
    ) -> BroadcastGroup:
        store = connect_store(address.address, deadline)
        here = local_address_towards(*parse_tcp_address(address.address))
        return BroadcastGroup.form(
            store, name, here, self._device, mine.world_size, deadline, rank=mine.rank_offset, connect=connect
        )

    def _take(self, session: _Session, index: int, memory: SidecarBuffers, group: BroadcastGroup) -> None:
        """Receive bucket `index` into a slot that the server has read, and compare it with the table."""
        self._loads.settle_slot(index, memory.count, lambda earlier: self._loaded(session, earlier))
        session.keys.post("at", str(index))
        target = memory.memory(index % memory.count)[: session.transfer.manifest.buckets[index].nbytes]
        self._call(session, f"bucket {index}", lambda: group.broadcast(target, session.deadline))
        check_bucket(session.transfer, index, target)

    def _loaded(self, session: _Session, index: int) -> None:
        what = f"the server to load bucket {index}"
        settle(session.keys, self._loads.asked[index], what, session.deadline)

    def _call(
        self,
        session: _Session,
        what: str,
        function: Callable[[], _T],
        given_up: Callable[[Future[_T]], None] = lambda _: None,
    ) -> _T:
        answer = self._calls.submit(function)
        self._moving = lambda: not answer.done()
        return settle(session.keys, answer, what, session.deadline, given_up)

    def _break_off(self) -> None:
        """Leave the groups, which ends them for all members; what is queued for the server is not asked any more."""
        groups, self._groups = self._groups, {}
        with contextlib.suppress(RuntimeError):  # torch's: they are of no use any more, however they end
            break_off([group.abort for group in groups.values()])
        self._calls.give_up()
        for load in self._loads.asked:
            load.cancel()

    def _let_go(self) -> None:
        memory, self._memory, self._opens = self._memory, None, ""
        if memory is not None:
            memory.close()


class GpuRoom:
    """Whether slots can be made on the GPU of a server, as far as this process has found out. It outlives them."""

    def __init__(self) -> None:
        self._refused: dict[torch.device, tuple[int, str]] = {}
        """The smallest slots that could not be made, in bytes each, and why."""

    def memory(self, device: torch.device) -> SidecarDeviceMemory:
        """Slots there; none yet."""
        return SidecarDeviceMemory(device, partial(self._refuse, device))

    def why_not(self, uuid: str, nbytes: int, held: int = 0) -> str:
        """Why a process cannot take buckets of `nbytes` on GPU `uuid`; empty where it can. `held` it would give back.

        What could not be made once is not tried again, whatever is free: each time costs a version.
        """
        # Sources of a broadcast have 0, because SGLang sets that in its workers, and all members need the same.
        if os.environ.setdefault(_CUMEM, "0") != "0":
            return f"{_CUMEM} is {os.environ[_CUMEM]!r} in the engine agent, and '0' at the trainer"
        try:
            device = gpu_named(uuid)
            if device in self._refused and nbytes >= self._refused[device][0]:
                return f"{self._refused[device][1]}; this is tried again when the engine agent was started again"
            free = int(torch.cuda.mem_get_info(device)[0]) + held
        except (TransferFailed, RuntimeError) as error:  # torch's, of a driver that is not there or a GPU that is full
            return _short(error)
        if free < (needed := SLOTS * nbytes + _SPARE_BYTES):
            return f"GPU {uuid} has {free} bytes free, and {needed} are needed"
        return ""

    def _refuse(self, device: torch.device, nbytes: int, reason: str) -> None:
        if device not in self._refused or nbytes < self._refused[device][0]:
            self._refused[device] = nbytes, reason


class SidecarDeviceMemory:
    """On a GPU, opened by CUDA IPC."""

    def __init__(self, device: torch.device, refused: Callable[[int, str], None]) -> None:
        """`refused` is told of slots that cannot be made: their bytes, and why."""
        self._device = device
        self._refused = refused
        self._pool: BucketBuffers | None = None

    @property
    def count(self) -> int:
        """How many `reserve` made."""
        return len(self._pool.buffers) if self._pool is not None else 0

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self.count * self._pool.buffer_bytes if self._pool is not None else 0

    def holds(self, nbytes: int) -> bool:
        """There are slots, and of at least so many bytes."""
        return self._pool is not None and self._pool.buffer_bytes >= nbytes

    def reserve(self, nbytes: int, buckets: int, deadline: Deadline) -> None:
        """Have slots of at least `nbytes` ready. Raises `TransferFailed` where the GPU has no room."""
        del buckets, deadline  # as many as ever, and at once
        if self.holds(nbytes):
            return
        self.close()
        try:
            self._try_out(nbytes)
            self._pool = BucketBuffers(self._device, SLOTS, nbytes, "handing")
        except (RuntimeError, NotExportable) as error:  # torch.OutOfMemoryError is one of the first
            reason = f"{SLOTS} buckets of {nbytes} bytes could not be made on {self._device}: {_short(error)}"
            self._refused(nbytes, reason)
            raise TransferFailed(reason) from error

    def _try_out(self, nbytes: int) -> None:
        """Have memory for all slots, and give it back: torch keeps memory that was exported and never opened."""
        tried: list[torch.Tensor] = []
        try:
            tried.extend(torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS))
        finally:
            tried.clear()
            torch.cuda.empty_cache()

    def memory(self, index: int) -> torch.Tensor:
        """The bytes of a slot, 1-D uint8."""
        assert self._pool is not None
        return self._pool.buffers[index].memory

    def lend(self, index: int, tp: int) -> CudaMemory:
        """What every worker opens."""
        del tp  # the driver counts them
        assert self._pool is not None
        lent = decode_handle(self._pool.buffers[index].exported)
        assert isinstance(lent, CudaMemory)
        return lent

    def close(self) -> None:
        """Give it back to the GPU."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        torch.cuda.empty_cache()


def gpu_named(uuid: str) -> torch.device:
    """The GPU of that uuid, as this process counts them. Raises `TransferFailed`."""
    for number in range(torch.cuda.device_count()):
        if device_name(device := torch.device("cuda", number)) == uuid:
            return device
    raise TransferFailed(f"this process does not see the server's GPU {uuid}")


def _short(error: Exception) -> str:
    """Torch's errors end in a page of advice."""
    return str(error).partition("\n")[0][:300]


SidecarBuffers: TypeAlias = TorchSharedBuffers | SidecarDeviceMemory
"""Slots into which a sidecar receives buckets, and out of which its server's workers load them. They outlive rounds."""
