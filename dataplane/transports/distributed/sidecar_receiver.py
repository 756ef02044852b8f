"""The engine agent's half of the distributed transport where the agent takes part itself, and hands on what it takes.

A server in a collective waits inside of it for members that are gone: over NCCL for ever, and nothing reaches it. This
process can leave. So it takes each bucket into memory of its own, which the server's workers can open, compares it with
the digest table, and only then has the server load it, while the next bucket arrives. The server is in no group, and
costs a group one rank, whatever its tensor parallelism.

Over NCCL that memory lies on the first of the server's GPUs, and takes a context there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import torch

from ...digest import tensor_digest as integrity
from ...errors import TransferFailed
from ...memory import TorchSharedBuffers
from ...processes import (
    Deadline,
    SerialCalls,
    connect_store,
    local_address_towards,
    open_runtime_dir,
    parse_tcp_address,
)
from ..broadcast_order import EnginePart, GroupSettings
from ..interface import Address, EngineServer, Receipt, SharedBucket, TransferSession
from .broadcast_group import BroadcastGroup
from .engine_groups import break_off, break_when_formed
from .rendezvous_keys import POLL_S, RendezvousKeys, holding, settled
from .sidecar_buffers import GpuRoom, SidecarBuffers, gpu_named

_LOG: Final = logging.getLogger(__name__)
_RETURN_S: Final = 1.0
"""How long a server may take to return from the load of a bucket when its session is over: else it stands still."""

_T = TypeVar("_T")


class SidecarReceiver:
    """Takes part for one engine. Its memory and its groups outlive rounds."""

    def __init__(self, runtime_dir: Path) -> None:
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
        self._loader: ThreadPoolExecutor | None = None
        self._loads: list[Future[None]] = []
        """Of the last session, by bucket."""
        self._touched = False
        self._rendezvous: RendezvousKeys | None = None
        """Of the session that runs."""
        self._unknown = False
        """A sender did not know what an agent that comes by itself is."""

    @property
    def touched(self) -> bool:
        """The server was asked to change weights in the last session."""
        return self._touched

    def why_not(self, server: EngineServer, session: TransferSession) -> str:
        """Why this process cannot take part in `session` for `server`; empty where it can, and has memory for it."""
        if not server.opens:
            return "no memory of this process is known that the server's workers could open"
        if self._unknown:
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

    def forget_rendezvous(self) -> None:
        """The sender is another one than before, and may know what the last one did not."""
        self._unknown = False

    def receive(  # noqa: PLR0917
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Join the groups if need be, then take every bucket and hand it on. To be asked `why_not` before."""
        deadline = Deadline(deadline_s)
        self._touched = False
        self._rendezvous = rendezvous = RendezvousKeys(address.address, session.epoch, engine, address.token)
        rendezvous.begin()
        reason = ""
        try:
            self.require_moving()
            self._loads = []
            memory = self._reserved(session, server, deadline)
            groups, mine = self._join(rendezvous, address, rank_offset, deadline, len(session.manifest.buckets))
            for index in range(len(session.manifest.buckets)):
                group = self._groups[mine.names[groups.source_of(index)]]
                self._take(rendezvous, session, index, memory, group, deadline)
                self._hand_on(session, index, memory, server, deadline)
            for index in range(len(self._loads)):
                self._await_load(rendezvous, index, deadline)
            rendezvous.say("done", "", deadline)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._rendezvous = None
            rendezvous.close(reason)
            if reason:
                self._break_off()
                self._returns(_RETURN_S)  # until it has answered, if it does, it counts as loading
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True)

    def require_moving(self) -> None:
        """Raise `TransferFailed` while the server has not returned from what a session that is over asked of it.

        It may read this process's memory as long.
        """
        if not self._returns(0.0):
            raise TransferFailed("the server stands still: it has not returned from the call of a session that is over")

    def close(self) -> None:
        """Break off the session that runs, from any thread; the groups stay for the next one if it ended well."""
        if (rendezvous := self._rendezvous) is not None:
            rendezvous.cancel("the session was called off")

    def shutdown(self) -> None:
        """Let go of everything."""
        self._break_off()
        if self._returns(_RETURN_S):  # a worker that finds no memory where it was told to look ends its server
            self._let_go()
        if self._loader is not None:
            self._loader.shutdown(wait=False)
            self._loader = None

    # -- a session ---------------------------------------------------------------------------------------------------

    def _reserved(self, session: TransferSession, server: EngineServer, deadline: Deadline) -> SidecarBuffers:
        if self._moving():  # what is checked here must not change under the server's hands: it keeps what it has
            _LOG.warning("a broadcast that is over has not returned: its memory is left to it, and other is taken")
            self._let_go()
        if self._memory is None:
            if self._device.type == "cpu":
                open_runtime_dir(self._runtime_dir)
                self._memory = TorchSharedBuffers(self._runtime_dir)
            else:
                self._memory = self._room.memory(self._device)
            self._opens = server.opens
        self._memory.reserve(session.manifest.largest_bucket, len(session.manifest.buckets), deadline)
        return self._memory

    def _join(
        self, rendezvous: RendezvousKeys, address: Address, rank_offset: int, deadline: Deadline, buckets: int
    ) -> tuple[GroupSettings, EnginePart]:
        """Into every group that the sender names, one after the other in its order, which all members follow."""
        rendezvous.say("came", holding(tuple(self._groups), by_sidecar=True), deadline)
        groups = GroupSettings.decode(rendezvous.group(deadline), buckets)
        mine = groups.of_engine(rank_offset, address.world_size)
        if not mine.by_sidecar:
            self._unknown = True
            raise TransferFailed(
                "the sender expects the server's workers, and this agent came by itself: the trainer's weightbus is "
                "older; from now on they are sent"
            )
        if mine.names != tuple(self._groups):
            self._break_off()
            for name in mine.names:
                form = partial(self._form, address, name, mine, deadline, connect=groups.all_ours)
                what = f"the group {name} to form"
                self._groups[name] = self._call(rendezvous, what, deadline, form, break_when_formed)
        rendezvous.say("joined", "", deadline)
        return groups, mine

    def _form(
        self, address: Address, name: str, mine: EnginePart, deadline: Deadline, *, connect: bool
    ) -> BroadcastGroup:
        store = connect_store(address.address, deadline)
        here = local_address_towards(*parse_tcp_address(address.address))
        return BroadcastGroup.form(
            store, name, here, self._device, mine.world_size, deadline, rank=mine.rank_offset, connect=connect
        )

    def _take(  # noqa: PLR0917  a bucket's way
        self,
        rendezvous: RendezvousKeys,
        session: TransferSession,
        index: int,
        memory: SidecarBuffers,
        group: BroadcastGroup,
        deadline: Deadline,
    ) -> None:
        """Receive bucket `index` into a slot that the server has read, and compare it with the table."""
        manifest = session.manifest
        for earlier, load in enumerate(self._loads):
            if earlier <= index - memory.count or load.done():
                self._await_load(rendezvous, earlier, deadline)
        rendezvous.post("at", str(index))
        target = memory.memory(index % memory.count)[: manifest.buckets[index].nbytes]
        self._call(rendezvous, f"bucket {index}", deadline, lambda: group.broadcast(target, deadline))
        names = [tensor.name for tensor in manifest.tensors_of(index)]
        integrity.check_digests(
            target, manifest.offsets_of(index), session.known.of_bucket(manifest.buckets[index]), names
        )

    def _hand_on(
        self, session: TransferSession, index: int, memory: SidecarBuffers, server: EngineServer, deadline: Deadline
    ) -> None:
        """Have the server load bucket `index`, on the loading thread."""
        manifest = session.manifest
        lent = memory.lend(index % memory.count, server.tp)
        bucket = SharedBucket(index, manifest.buckets[index], manifest.tensors_of(index), lent)
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, "weightbus-load")
        left = deadline.check(f"time to load bucket {index}")
        self._touched = True
        self._loads.append(self._loader.submit(server.load_shared, bucket, left))

    def _await_load(self, rendezvous: RendezvousKeys, index: int, deadline: Deadline) -> None:
        self._settle(rendezvous, self._loads[index], f"the server to load bucket {index}", deadline)

    def _call(
        self,
        rendezvous: RendezvousKeys,
        what: str,
        deadline: Deadline,
        function: Callable[[], _T],
        given_up: Callable[[Future[_T]], None] = lambda _: None,
    ) -> _T:
        """On another thread what cannot be called off: a sender that dies or gives up is noticed meanwhile."""
        answer = self._calls.submit(function)
        self._moving = lambda: not answer.done()
        try:
            return self._settle(rendezvous, answer, what, deadline)
        except TransferFailed:
            given_up(answer)
            raise

    def _settle(self, rendezvous: RendezvousKeys, answer: Future[_T], what: str, deadline: Deadline) -> _T:
        while not settled(answer, POLL_S):
            rendezvous.check()
            deadline.check(what)
        return answer.result()

    def _returns(self, seconds: float) -> bool:
        """Wait until the server has returned from everything that it was asked; whether it has."""
        return not wait(self._loads, seconds).not_done

    def _break_off(self) -> None:
        """Leave the groups, which ends them for all members; what is queued for the server is not asked any more."""
        groups, self._groups = self._groups, {}
        with contextlib.suppress(RuntimeError):  # torch's: they are of no use any more, however they end
            break_off([group.abort for group in groups.values()])
        self._calls.give_up()
        for load in self._loads:
            load.cancel()

    def _let_go(self) -> None:
        memory, self._memory, self._opens = self._memory, None, ""
        if memory is not None:
            memory.close()
