"""Other hosts, or GPUs that cannot map each other: one collective group of the source rank and every engine rank.

The sender broadcasts a whole packed bucket per call, in the order in which SGLang cuts a ``flattened_bucket`` apart.
The group is kept from round to round while its members stay and sessions end well; its name carries the epoch in which
it was formed. A collective cannot drop a member: when one engine fails, all are named in `failed`, the group is broken
off and the next epoch forms a new one. A group that broke while it formed takes the rendezvous store with it: SGLang's
ranks would wait in it for the missing one for half an hour, and answer nothing meanwhile. The bytes go straight into
the server's workers, so nothing here has checked them (`Receipt.checked` is false).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from .broadcast_group import BroadcastGroup, backend_for, join_store, serve_store
from .deadline import Deadline
from .errors import DataplaneError, DeadlineExceeded, PeerLost, TransferFailed
from .meeting import POLL_S, Attendance, Meeting, new_token
from .transport import JOIN_S, Address, EngineServer, Peer, Receipt, Session, Slot

_REASONS_S: Final = 0.3
_FORM_S: Final = 60.0
"""How long a new group may take to form: a server that died meanwhile leaves the others waiting for it in vain."""
_LEAVE_S: Final = 5.0
"""How long a server may take to forget a group that is broken anyway."""

_T = TypeVar("_T")


class DistributedSender:
    """Rank 0. `host` is the address under which every engine's workers reach this machine."""

    def __init__(self, host: str, channel: str, device: torch.device) -> None:
        self._host = host
        self._channel = channel
        self._device = device
        self._store: TCPStore | None = None
        """The one reference to the server: whoever uses the store has a client of its own."""
        self._meeting: Meeting | None = None
        self._session: Session | None = None
        self._group: BroadcastGroup | None = None
        self._members: tuple[Peer, ...] = ()
        """Who is in `_group`."""
        self._peers: tuple[Peer, ...] = ()
        """Who takes part in this session."""
        self._failed: dict[str, str] = {}
        self._withdrawn: dict[str, str] = {}
        self._spared: frozenset[str] = frozenset()
        self._sends: dict[int, Future[None]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._forming = self._began = self._finished = False
        self._token = ""

    @property
    def failed(self) -> dict[str, str]:
        """Engines that will not get every bucket, with the reason: nobody, or everybody."""
        return self._failed

    @property
    def spared(self) -> frozenset[str]:
        """Those who were well when another one failed, before the first broadcast."""
        return self._spared

    def offer(self, session: Session, peers: Sequence[Peer]) -> Address:
        """Open the rendezvous store. Raises `Unsupported` when this process's NCCL settings do not fit SGLang's."""
        self.close()
        backend = backend_for(self._device)
        if self._store is None:
            self._store = serve_store(self._host)
        if self._meeting is not None:
            self._meeting.clear(peer.engine for peer in self._peers)
        self._session, self._peers = session, tuple(peers)
        self._failed, self._withdrawn, self._spared, self._sends = {}, {}, frozenset(), {}
        self._forming = self._began = self._finished = False
        self._token = new_token()
        self._meeting = Meeting(join_store(self._store), session.epoch, self._token)
        world_size = 1 + sum(peer.tp for peer in peers)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return Address(f"tcp://{host}:{self._store.port}", self._group_name(), backend, world_size, self._token)

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every engine's ranks are in the group: the one from the last round, or a new one.

        All are in `failed` when an agent has not come within `join_s`, or the group has not formed `_FORM_S` later.
        """
        deadline = Deadline(deadline_s)
        meeting, session = self._open()
        try:
            self._wait_for("came", "to come", Deadline(min(join_s, deadline.left())))
            forming = Deadline(min(_FORM_S, deadline.left()))
            held = {meeting.heard("came", peer.engine) for peer in self._peers}
            if self._group is None or self._members != self._peers or held != {self._group.name}:
                self._break_off()
                name = f"weightbus-{self._channel}-{session.epoch}"
                self._forming = True
                meeting.announce("group", name)
                self._form(name, forming)
            else:
                meeting.announce("group", self._group.name)
            self._wait_for("joined", "to join the group", forming)
            self._forming = False
        except TransferFailed as error:
            self._fail_all(error)
            raise

    def send(self, index: int, slot: Slot, deadline_s: float) -> None:
        """Start the broadcast of bucket `index` from `slot`."""
        _, session = self._open()
        if self._failed or self._group is None:
            raise TransferFailed(f"no engine is left to serve ({next(iter(self._failed.values()), 'never ready')})")
        self._began = True
        memory = slot.memory[: session.manifest.buckets[index].nbytes]
        if memory.device.type == "cuda":
            torch.cuda.current_stream(memory.device).synchronize()  # the broadcast runs on another thread's stream
        self._sends[index] = self._run(self._group.broadcast, memory, Deadline(deadline_s))

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Wait until bucket `index` has left the slot. On failure everybody is in `failed` when this returns."""
        if index not in self._sends:
            return
        try:
            self._await(self._sends[index], f"the broadcast of bucket {index}", Deadline(deadline_s))
        except TransferFailed as error:
            self._fail_all(error)
        self._sends.pop(index, None)

    def finish(self, deadline_s: float) -> None:
        """Wait until every engine has loaded everything, or all are in `failed`."""
        deadline = Deadline(deadline_s)
        try:
            for index, send in self._sends.items():
                self._await(send, f"the broadcast of bucket {index}", deadline)
            if not self._failed:
                self._wait_for("done", "to load every bucket", deadline)
                self._finished = True
        except TransferFailed as error:
            self._fail_all(error)

    def withdraw(self, engine: str, reason: str) -> None:
        """End the session for all, when this sender waits the next time."""
        self._withdrawn.setdefault(engine, reason)

    def close(self) -> None:
        """End the session. The group survives it if it ended well; the store does in any case."""
        if self._session is None:
            return
        if not self._finished:
            self._fail_all(TransferFailed("the sender closed this session"))
        self._session = None

    # -- the session -------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Meeting, Session]:
        if self._session is None or self._meeting is None:
            raise TransferFailed("nothing is on offer: call offer first")
        return self._meeting, self._session

    def _group_name(self) -> str:
        assert self._session is not None
        if self._group is not None and self._members == self._peers:
            return self._group.name
        return f"weightbus-{self._channel}-{self._session.epoch}"

    def _form(self, name: str, deadline: Deadline) -> None:
        assert self._store is not None
        world_size = 1 + sum(peer.tp for peer in self._peers)
        store = join_store(self._store)
        forming = self._run(BroadcastGroup.form, store, name, self._host, self._device, world_size, deadline)
        self._group = self._await(forming, f"{world_size - 1} engine ranks to join {name}", deadline)
        self._members = self._peers

    def _wait_for(self, step: str, what: str, deadline: Deadline) -> None:
        meeting, _ = self._open()
        missing = [peer.engine for peer in self._peers]
        while missing := [engine for engine in missing if meeting.heard(step, engine) is None]:
            self._check_receivers()
            try:
                left = deadline.check(f"{', '.join(missing)} {what}")
            except DeadlineExceeded as error:
                self._failed.update(dict.fromkeys(missing, str(error)))
                raise
            time.sleep(min(POLL_S, left))

    def _await(self, future: Future[_T], what: str, deadline: Deadline) -> _T:
        """Wait for the other thread, looking out for receivers that gave up meanwhile."""
        while not future.done():
            self._check_receivers()
            left = deadline.check(what)
            _settle(future, min(POLL_S, left))
        return future.result()

    def _check_receivers(self) -> None:
        meeting, _ = self._open()
        for peer in self._peers:
            reason = meeting.heard("failed", peer.engine) or self._withdrawn.get(peer.engine)
            if reason is not None and meeting.heard("done", peer.engine) is None:
                self._failed[peer.engine] = reason
        if self._failed:
            raise PeerLost("; ".join(f"{engine} gave up: {reason}" for engine, reason in self._failed.items()))

    def _fail_all(self, error: DataplaneError) -> None:
        """A group of which one member is lost is lost."""
        self._hear_reasons()
        engines = frozenset(peer.engine for peer in self._peers)
        if self._failed and not self._began and not self._spared:
            self._spared = engines - self._failed.keys()
        for engine in engines:
            self._failed.setdefault(engine, str(error))
        if self._meeting is not None:
            self._meeting.announce("over", str(error))
        self._sends.clear()
        self._break_off()

    def _hear_reasons(self) -> None:
        """A broadcast breaks at once everywhere: whoever caused it gets a moment to say so."""
        if self._meeting is None or self._session is None:
            return
        deadline = Deadline(_REASONS_S)
        while deadline.left() and not self._failed:
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
        self._group, self._members = None, ()
        if self._thread is not None:
            # A broadcast that does not return even now keeps a thread of its own; the next group gets a fresh one.
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _end_store(self) -> None:
        """Free whoever waits in it for the group, once the agents have heard that the session is over."""
        meeting, self._meeting = self._meeting, None
        deadline = Deadline(_REASONS_S)
        while meeting and deadline.left() and any(meeting.heard("failed", peer.engine) is None for peer in self._peers):
            time.sleep(POLL_S)
        self._store, self._forming = None, False

    def _run(self, function: Callable[..., _T], *arguments: object) -> Future[_T]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "weightbus-broadcast")
        return self._thread.submit(function, *arguments)


class DistributedReceiver:
    """Brings one engine's ranks into the group and has them take every bucket."""

    def __init__(self) -> None:
        self._held = ""
        """The group the server is in, as far as this process knows."""
        self._server: EngineServer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._touched = False

    @property
    def touched(self) -> bool:
        """The server was asked to change weights in the last session."""
        return self._touched

    def receive(  # noqa: PLR0917
        self, session: Session, address: Address, engine: str, rank_offset: int, server: EngineServer, deadline_s: float
    ) -> Receipt:
        """Join the group if need be, then take every bucket."""
        deadline = Deadline(deadline_s)
        self._touched = False
        if self._server is not server:
            self._held, self._server = "", server
        meeting = Attendance(address.address, session.epoch, engine, address.token)
        meeting.begin()
        reason = ""
        try:
            self._join(meeting, address, rank_offset, server, deadline)
            for index in range(len(session.manifest.buckets)):
                self._touched = True
                tensors = session.manifest.tensors_of(index)
                self._call(meeting, f"bucket {index}", deadline, server.load_broadcast, self._held, tensors)
            meeting.say("done", "", deadline)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            meeting.close(reason)
            if reason:
                self._abandon(server)
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=False)

    def close(self) -> None:
        """Nothing belongs to a session alone; the group stays for the next one."""

    def shutdown(self) -> None:
        """Have the server leave its group."""
        if self._held and self._server is not None:
            self._leave(self._server)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    def _join(
        self, meeting: Attendance, address: Address, rank_offset: int, server: EngineServer, deadline: Deadline
    ) -> None:
        meeting.say("came", self._held, deadline)
        group = meeting.group(deadline)
        if group != self._held:
            if self._held:
                server.leave_group(self._held, deadline.check("time to leave the old group"))
            self._held = group
            where = msgspec.structs.replace(address, group=group)
            self._call(meeting, f"the group {group} to form", deadline, server.join_group, where, rank_offset)
        meeting.say("joined", "", deadline)

    def _call(
        self, meeting: Attendance, what: str, deadline: Deadline, function: Callable[..., None], *arguments: object
    ) -> None:
        """Call the server on another thread, so that a sender that dies or gives up is noticed meanwhile."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "weightbus-engine")
        answer = self._thread.submit(function, *arguments, deadline.check(what))
        while not _settle(answer, POLL_S):
            meeting.check()
            deadline.check(what)
        answer.result()

    def _abandon(self, server: EngineServer) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
        if self._held:
            self._leave(server)

    def _leave(self, server: EngineServer) -> None:
        """The group is broken for everybody: the server is asked to forget it, and that it may be dead is no news."""
        with contextlib.suppress(TransferFailed):
            server.leave_group(self._held, _LEAVE_S)
        self._held = ""


def _settle(future: Future[_T], seconds: float) -> bool:
    """Wait up to `seconds`; whether it is done by then, well or not."""
    return bool(wait([future], seconds).done)
