"""What a source that does not lead does in the distributed transport: a group of its own, and its own buckets.

The rank's loop fills slots and says so (`filled`); a thread has everything else: it meets the leader and the engines in
the leader's store, forms this source's group, broadcasts each bucket when it is there, and says which have been taken.
It ends with the session, whoever ends that, and at the latest at the deadline; the group outlives a session that ended
well. SENDS.md's ranks (`rank_sends.py`) are its kin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from .broadcast_group import BroadcastGroup, backend_for
from .deadline import Deadline
from .distributed import FORM_S
from .errors import DataplaneError, PeerLost, TransferFailed
from .meeting import POLL_S, Attendance, settled, source_name
from .sealed_frames import address_towards, host_and_port
from .sources import Groups, Sources
from .transport import Address

_END_S: Final = 10.0
_MAX_NAMED: Final = 1024
"""Characters of the names of tensors that changed, as they travel."""

_T = TypeVar("_T")


class SourceRank:
    """One source's part, session after session. Used from the rank's own loop."""

    def __init__(self, number: int, device: torch.device) -> None:
        """Source `number`, from 1 on; its buckets lie on `device`."""
        self._number = number
        self._device = device
        self._group: BroadcastGroup | None = None
        self._news = threading.Condition()
        self._filled = self._taken = 0
        self._spoiled: tuple[str, ...] = ()
        self._running = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._calls: ThreadPoolExecutor | None = None
        self.failure = ""
        """Of the last session; for people."""

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
        self._stop, self.failure, self._spoiled = threading.Event(), "", ()
        self._filled, self._taken, self._running = filled, 0, True
        arguments = (address, epoch, sources, tuple(buckets), Deadline(deadline_s), self._stop)
        self._thread = threading.Thread(target=self._run, args=arguments, name="weightbus-source", daemon=True)
        self._thread.start()

    def wait_free(self, taken: int) -> None:
        """Wait until everybody has taken the first `taken` buckets, or the session is over: it is by its deadline."""
        with self._news:
            self._news.wait_for(lambda: self._taken >= taken or not self._running)

    def filled(self, count: int) -> None:
        """The first `count` buckets are there."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the broadcast runs on another thread's stream
        with self._news:
            self._filled = count
            self._news.notify_all()

    def spoil(self, tensors: Sequence[str]) -> None:
        """The next bucket is not what was digested: end the session for all, and say which `tensors` changed."""
        with self._news:
            self._spoiled = tuple(tensors)
            self._news.notify_all()

    def stop(self) -> None:
        """Break off what runs. Memory is not read any more when this returns, but by a thread that is stuck."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_S)
            self._thread = None

    def close(self) -> None:
        """Let go of everything."""
        self.stop()
        self._break_off()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(  # noqa: PLR0917  as `begin`
        self,
        address: Address,
        epoch: int,
        sources: Sources,
        buckets: tuple[torch.Tensor, ...],
        deadline: Deadline,
        stop: threading.Event,
    ) -> None:
        reason = ""
        meeting: Attendance | None = None
        try:
            meeting = Attendance(address.address, epoch, source_name(self._number), address.token)
            meeting.begin()
            backend_for(self._device)
            self._join(meeting, address, sources, deadline, stop)
            for place, memory in enumerate(buckets):
                self._await_filled(place, meeting, deadline, stop)
                assert self._group is not None
                what = f"bucket {place} of source {self._number} to be taken"
                self._call(meeting, what, deadline, stop, lambda: self._broadcast(memory, deadline))  # noqa: B023
                with self._news:
                    self._taken = place + 1
                    self._news.notify_all()
                meeting.post("sent", str(place + 1))
            meeting.say("done", "", deadline)
        except DataplaneError as error:
            reason = str(error) or type(error).__name__
        except Exception as error:  # noqa: BLE001  the leader hears of it, and the training loop must go on
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.failure = reason
            if meeting is not None:
                meeting.close(reason)
            if reason:
                self._break_off()
            with self._news:
                self._running = False
                self._news.notify_all()

    def _join(
        self, meeting: Attendance, address: Address, sources: Sources, deadline: Deadline, stop: threading.Event
    ) -> None:
        meeting.say("came", self._group.name if self._group else "", deadline)
        groups = Groups.decode(meeting.group(deadline), len(sources.of))
        if len(groups.names) != sources.count:
            raise TransferFailed(f"the sender announced {len(groups.names)} groups for {sources.count} sources")
        name = groups.names[self._number]
        if self._group is None or self._group.name != name:
            self._break_off()
            forming = Deadline(min(FORM_S, deadline.check("the group to form")))

            def form() -> BroadcastGroup:
                host, port = host_and_port(address.address)
                store = TCPStore(host, port, is_master=False, wait_for_workers=False)
                mine = address_towards(host, port)
                return BroadcastGroup.form(store, name, mine, self._device, address.world_size, forming)

            self._group = self._call(meeting, f"the engines to join {name}", forming, stop, form)
        meeting.say("joined", "", deadline)

    def _await_filled(self, place: int, meeting: Attendance, deadline: Deadline, stop: threading.Event) -> None:
        with self._news:
            while self._filled <= place:
                if self._spoiled:
                    meeting.post("differs", ",".join(self._spoiled)[:_MAX_NAMED])
                    raise TransferFailed("the weights changed between the digest and the transfer")
                _check(meeting, stop)
                self._news.wait(min(POLL_S, deadline.check(f"bucket {place} of source {self._number}")))

    def _broadcast(self, memory: torch.Tensor, deadline: Deadline) -> None:
        group = self._group
        if group is None:
            raise PeerLost("the group was broken off")
        group.broadcast(memory, deadline)

    def _call(
        self, meeting: Attendance, what: str, deadline: Deadline, stop: threading.Event, function: Callable[[], _T]
    ) -> _T:
        """Do what cannot be broken off on a thread of its own, and give it up when the session is over."""
        if self._calls is None:
            self._calls = ThreadPoolExecutor(1, "weightbus-source")
        answer = self._calls.submit(function)
        while not settled(answer, POLL_S):
            _check(meeting, stop)
            deadline.check(what)
        return answer.result()

    def _break_off(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        if self._calls is not None:
            # What does not return even now keeps a thread of its own; the next group gets a fresh one.
            self._calls.shutdown(wait=False, cancel_futures=True)
            self._calls = None


def _check(meeting: Attendance, stop: threading.Event) -> None:
    if stop.is_set():
        raise PeerLost("this rank has gone on")
    meeting.check()
