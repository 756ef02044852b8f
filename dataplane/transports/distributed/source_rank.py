"""What a source that does not lead does in the distributed transport: a group of its own, and its own buckets.

The rank's loop fills slots and says so (`filled`); a thread has everything else: it meets the leader and the engines in
the leader's store, forms this source's group, broadcasts each bucket when it is there, and says which have been taken.
It ends with the session, whichever side ends that, and at the latest at the deadline; the group outlives a session that
ended well. The ranks of `sends` (`rank_sender.py`) are its kin.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeAlias, TypeVar

import torch

from ...errors import DataplaneError, PeerLost, TransferFailed
from ...processes import (
    Deadline,
    SerialCalls,
    connect_store,
    local_address_towards,
    parse_tcp_address,
    process_group_backend,
    start_thread,
)
from ...tensors import Sources
from ..interface import Address
from .broadcast_group import BroadcastGroup, EngineGroups, GroupSettings, Stalled, break_when_formed, settle
from .rendezvous_keys import POLL_S, RendezvousKeys, source_name
from .sender import FORM_S

_LOG: Final = logging.getLogger(__name__)
_END_S: Final = 10.0
_MAX_NAMED: Final = 1024
"""Characters of the names of tensors that changed, as they travel."""

AnyGroup: TypeAlias = BroadcastGroup | EngineGroups
_T = TypeVar("_T")


class SourceRank:
    """One source's part, session after session. Used from the rank's own loop."""

    def __init__(self, number: int, device: torch.device) -> None:
        """Source `number`, from 1 on; its buckets lie on `device`."""
        self._number = number
        self._device = device
        self._session: SourceSession | None = None
        """The last one."""

    @property
    def failure(self) -> str:
        """Of the last session; for people."""
        return self._session.failure if self._session is not None else ""

    def begin(  # noqa: PLR0917  what one session is
        self,
        address: Address,
        epoch: int,
        sources: Sources,
        buckets: Sequence[torch.Tensor],
        deadline_s: float,
        filled: int = 0,
    ) -> None:
        """Take part in `epoch`, behind the caller's back. What came before is broken off.

        `buckets` is, for each bucket of this source, the memory that it is sent from; the first `filled` are there.
        """
        self.stop()
        group = self._session.leave_group() if self._session is not None else None
        rendezvous = RendezvousKeys(address.address, epoch, source_name(self._number), address.token)
        self._session = SourceSession(
            self._number, self._device, sources, rendezvous, group, filled, Deadline(deadline_s)
        )
        self._session.start(address, tuple(buckets))

    def wait_free(self, taken: int) -> None:
        """Wait until all engines have taken the first `taken` buckets, or the session is over: it is by its deadline.

        Whatever its thread does then: an engine without such a bucket by now is told that the session failed.
        """
        if (session := self._session) is not None:
            with session.news:
                patience_s = session.deadline.left() + _END_S
                if not session.news.wait_for(lambda: session.taken >= taken or not session.running, patience_s):
                    _LOG.warning("the session of source %d has not ended though its time is over", self._number)

    def filled(self, count: int) -> None:
        """The first `count` buckets are there."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the broadcast runs on another thread's stream
        if (session := self._session) is not None:
            with session.news:
                session.filled = count
                session.news.notify_all()

    def spoil(self, tensors: Sequence[str]) -> None:
        """The next bucket is not what was digested: end the session for all, and say which `tensors` changed."""
        if (session := self._session) is not None:
            with session.news:
                session.spoiled = tuple(tensors)
                session.news.notify_all()

    def stop(self) -> None:
        """Break off what runs. Memory is not read any more when this returns, but by a thread that is stuck."""
        if self._session is not None:
            self._session.stop()

    def close(self) -> None:
        """Let go of everything."""
        self.stop()
        group = self._session.leave_group() if self._session is not None else None
        if group is not None:
            group.abort()


class SourceSession:
    """One epoch of one source. Its thread touches nothing that another session has."""

    def __init__(  # noqa: PLR0917  what it begins with
        self,
        number: int,
        device: torch.device,
        sources: Sources,
        rendezvous: RendezvousKeys,
        group: AnyGroup | None,
        filled: int,
        deadline: Deadline,
    ) -> None:
        """`group` is the one of the last session, if it ended well."""
        self._number, self._device, self._sources = number, device, sources
        self._rendezvous = rendezvous
        self._group = group
        self.deadline = deadline
        self.news = threading.Condition()
        """Of what follows."""
        self.filled, self.taken = filled, 0
        """Buckets, from the first on."""
        self.spoiled: tuple[str, ...] = ()
        """Tensors of the next bucket that changed."""
        self.running = True
        self._calls = SerialCalls("weightbus-source")
        self._thread: threading.Thread | None = None
        self.failure = ""
        """For people."""

    def start(self, address: Address, buckets: tuple[torch.Tensor, ...]) -> None:
        """See `SourceRank.begin`."""
        self._thread = start_thread(lambda: self._run(address, buckets, self.deadline), "weightbus-source-rank")

    def stop(self) -> None:
        """End it, and wait a while until its thread has."""
        self._rendezvous.cancel("this rank has gone on")
        if self._thread is not None:
            self._thread.join(_END_S)
            if self._thread.is_alive():
                _LOG.warning("source %d has not left its session within %g s: its thread is left", self._number, _END_S)

    def leave_group(self) -> AnyGroup | None:
        """For the next session, once this one is over. One that is stuck keeps its group, and breaks it in the end."""
        with self.news:
            if self.running:
                return None
            group, self._group = self._group, None
        return group

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, address: Address, buckets: tuple[torch.Tensor, ...], deadline: Deadline) -> None:
        reason = ""
        try:
            self._rendezvous.begin()
            process_group_backend(self._device)
            self._join(address, deadline)
            for place, memory in enumerate(buckets):
                self._await_filled(place, deadline)
                what = f"bucket {place} of source {self._number} to be taken"
                self._call(what, deadline, lambda: self._broadcast(memory, deadline))  # noqa: B023
                with self.news:
                    self.taken = place + 1
                    self.news.notify_all()
                self._rendezvous.post("sent", str(place + 1))
            self._rendezvous.say("done", "", deadline)
            if self._group is not None:
                self._group.use(False)
        except DataplaneError as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, Stalled):
                self._rendezvous.post("still", ",".join(map(str, error.members)))
        except Exception as error:  # noqa: BLE001  the leader hears of it, and the training loop must go on
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.failure = reason
            try:
                self._rendezvous.close(reason)
                if reason:
                    self._break_off()
            finally:
                with self.news:
                    self.running = False
                    self.news.notify_all()

    def _join(self, address: Address, deadline: Deadline) -> None:
        holds = self._group is not None and not self._group.hung_up
        self._rendezvous.say("came", self._group.name if self._group and holds else "", deadline)
        groups = GroupSettings.decode(self._rendezvous.group(deadline), len(self._sources.of))
        if len(groups.names) != self._sources.count:
            raise TransferFailed(f"the sender announced {len(groups.names)} groups for {self._sources.count} sources")
        name = groups.names[self._number]
        if self._group is None or self._group.name != name:
            self._break_off()
            forming = Deadline(min(FORM_S, deadline.check("the group to form")))

            def form() -> AnyGroup:
                reach = partial(connect_store, address.address, forming)
                mine = local_address_towards(*parse_tcp_address(address.address))
                if groups.apart:
                    return EngineGroups.form(reach, name, mine, self._device, groups, forming)
                size = groups.size(address.world_size)
                return BroadcastGroup.form(reach(), name, mine, self._device, size, forming, connect=groups.all_ours)

            self._group = self._call(f"the engines to join {name}", forming, form, break_when_formed)
        self._group.use(True)
        self._rendezvous.say("joined", "", deadline)

    def _await_filled(self, place: int, deadline: Deadline) -> None:
        with self.news:
            while self.filled <= place:
                if self.spoiled:
                    self._rendezvous.post("differs", ",".join(self.spoiled)[:_MAX_NAMED])
                    raise TransferFailed("the weights changed between the digest and the transfer")
                self._rendezvous.check()
                self.news.wait(min(POLL_S, deadline.check(f"bucket {place} of source {self._number}")))

    def _broadcast(self, memory: torch.Tensor, deadline: Deadline) -> None:
        group = self._group
        if group is None:
            raise PeerLost("the group was broken off")
        group.broadcast(memory, deadline)

    def _call(
        self,
        what: str,
        deadline: Deadline,
        function: Callable[[], _T],
        given_up: Callable[[Future[_T]], None] = lambda _: None,
    ) -> _T:
        return settle(self._rendezvous, self._calls.submit(function), what, deadline, given_up)

    def _break_off(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._calls.give_up()
