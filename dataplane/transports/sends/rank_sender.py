"""What one rank of the trainer does in the sends transport: a thread that joins the group of an epoch and sends.

The rank's own loop only says when (`begin`), with what its leader told it; the memory is described before. The thread
reads it until the leader has heard that it is through, and a publication does not end before that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from ...copy import CopyTable, copy_engine_for
from ...errors import ChunkTimeout, DataplaneError, OutOfStagingMemory, PeerLost
from ...memory import device_name, nccl_gpu_id_here
from ...processes import BackgroundInit, Deadline, MacFrames
from ...reshard import SendMessages
from ..interface import Address
from ..sessions import reason_of
from . import messages as wire
from .group_transfer import GroupCache, GroupForming, GroupTransfer
from .message_queues import PeerPart, SendQueue

_LOG: Final = logging.getLogger(__name__)
_PACKET_S = 10.0
_LOOK_S = 0.01
"""How soon a wait notices that the rank has gone on."""
_END_S = 10.0


class _Bound(NamedTuple):
    """A send queue, and what it was made from."""

    addressed: tuple[tuple[int, str], ...]
    """Peers, and the name of what each is sent."""
    regions: tuple[torch.Tensor, ...]
    queue: SendQueue


class _Part(NamedTuple):
    """This rank's part of the schedules of workers that are sent the same."""

    messages: SendMessages
    pack: CopyTable

    @classmethod
    def of(cls, part: wire.SchedulePart) -> _Part:
        return cls(SendMessages.decode(part.messages), CopyTable.decode(part.pack))


class _Kept:
    """What one epoch leaves to the next. Of one thread at a time."""

    def __init__(self) -> None:
        self.parts: dict[str, _Part] = {}
        """By name."""
        self.bound: _Bound | None = None
        self.groups = GroupCache()

    def unbind(self) -> None:
        if self.bound is not None:
            self.bound.queue.close()
            self.bound = None

    def let_go(self) -> None:
        self.groups.discard()
        self.unbind()
        self.parts = {}


class _Session:
    """One epoch. Its thread touches nothing that another session has."""

    def __init__(self, kept: _Kept) -> None:
        self.kept = kept
        self.stop = threading.Event()
        self.failure = ""
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Of the two below."""
        self._over = self._stuck = False

    def leave(self) -> _Kept:
        """For the next session. One that is stuck has its own for itself, and lets go of it in the end."""
        with self._lock:
            self._stuck = not self._over
        return _Kept() if self._stuck else self.kept

    def end(self) -> None:
        """The thread's last word."""
        with self._lock:
            self._over = True
        if self._stuck:
            self.kept.let_go()


class RankSender:
    """Used from one thread."""

    def __init__(self, channel: str, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._session = _Session(_Kept())
        """The last one."""
        self._session.end()

    @property
    def failure(self) -> str:
        """Of the last epoch; for people."""
        return self._session.failure

    def begin(self, address: Address, epoch: int, regions: tuple[torch.Tensor, ...], deadline_s: float) -> None:
        """Take part in `epoch`, behind the caller's back. What came before is broken off.

        `regions` is the same tuple for as long as it is the same memory: what was made ready for it is used again.
        """
        self.stop()
        if regions and regions[0].device.type == "cuda":
            torch.cuda.synchronize(regions[0].device)  # a training step may have written on any stream
        session = self._session = _Session(self._session.leave())
        arguments = (session, address, epoch, regions, Deadline(deadline_s))
        session.thread = threading.Thread(target=self._run, args=arguments, name="weightbus-rank-sends", daemon=True)
        session.thread.start()

    def stop(self) -> None:
        """Break off what runs. The memory is not read any more when this returns, but by a thread that is stuck."""
        self._session.stop.set()
        if self._session.thread is not None:
            self._session.thread.join(_END_S)
            if self._session.thread.is_alive():
                _LOG.warning("what this rank sent has not ended within %g s: its thread is left", _END_S)

    def close(self) -> None:
        """Let go of everything."""
        self.stop()
        self._session.leave().let_go()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(
        self, session: _Session, address: Address, epoch: int, regions: tuple[torch.Tensor, ...], deadline: Deadline
    ) -> None:
        kept, stop = session.kept, session.stop
        frames: MacFrames | None = None
        binding: BackgroundInit[SendQueue] | None = None
        less = False
        try:
            frames = MacFrames.reach(address.address, address.token, deadline)
            device = regions[0].device if regions else torch.device("cpu")
            hello = wire.RankHello(
                channel=self._channel, epoch=epoch, rank=self._rank, known=tuple(kept.parts),
                groups=kept.groups.names, nccl_gpu_id=nccl_gpu_id_here(device_name(device)),
            )  # fmt: skip
            wire.RECEIVER.say(frames, hello, deadline)
            begin = self._begun(frames, session, device, deadline)
            where, parts = begin.group, self._parts_of(kept, begin.parts)
            bound = binding = BackgroundInit(
                lambda: _send_queue_of(kept, parts, begin.parts, regions), late=session.end
            )
            memory = bound.result().memory if where.nixl else ()  # which the group has to know
            to = frozenset(each.peer for each in parts if len(each.messages))
            transfer = GroupTransfer(
                where, where.rank, device, to=to, memory=memory, groups=kept.groups, others=begin.others
            )
            seconds = transfer.run(
                lambda group: bound.result().send(group, where.turn_s),
                lambda: "this rank has gone on" if stop.is_set() else wire.over(frames),
                lambda: wire.beat(frames),
                ready=bound.result,  # made while a group forms
            )
            wire.RECEIVER.say(
                frames, wire.BarrierReached(seconds=seconds, nbytes=bound.result().nbytes), Deadline(_PACKET_S)
            )
        except DataplaneError as error:
            session.failure = str(error) or type(error).__name__
            less = isinstance(error, OutOfStagingMemory | ChunkTimeout)
        except Exception as error:  # noqa: BLE001  the leader hears of it, and the training loop must go on
            session.failure = f"{type(error).__name__}: {error}"
            less = isinstance(error, torch.OutOfMemoryError)
        finally:
            if frames is not None:
                if session.failure:
                    kept.groups.call_off()
                    _tell(frames, f"rank {self._rank}: {session.failure}", less=less)
                    frames.close()
                else:
                    _linger(frames, deadline, stop)
            if binding is None or binding.settle():  # else it has what is kept, and says the last word
                session.end()

    def _begun(self, frames: MacFrames, session: _Session, device: torch.device, deadline: Deadline) -> wire.BeginSends:
        message = self._next(frames, deadline, session.stop)
        if isinstance(message, wire.Form):
            session.kept.groups.begin(GroupForming(message.group, device))
            message = self._next(frames, deadline, session.stop)
        if not isinstance(message, wire.BeginSends):
            raise PeerLost(f"the sender did not begin: {reason_of(message)}")
        return message

    @staticmethod
    def _next(frames: MacFrames, deadline: Deadline, stop: threading.Event) -> wire.ToReceiver:
        while not frames.readable(_LOOK_S):  # at once: the workers receive already
            deadline.check("the sender to begin")
            if stop.is_set():
                raise PeerLost("this rank has gone on")
        return wire.RECEIVER.hear(frames, deadline, "the sender to begin")

    def _parts_of(self, kept: _Kept, told: Sequence[wire.SchedulePart]) -> list[PeerPart]:
        """The messages of each worker."""
        for each in told:
            if each.messages or each.schedule not in kept.parts:
                kept.parts[each.schedule] = _Part.of(each)
        kept.parts = {each.schedule: kept.parts[each.schedule] for each in told}
        return [PeerPart(each.peer, part.messages, part.pack) for each in told for part in [kept.parts[each.schedule]]]


def _send_queue_of(
    kept: _Kept, parts: Sequence[PeerPart], told: Sequence[wire.SchedulePart], regions: tuple[torch.Tensor, ...]
) -> SendQueue:
    """The send queue of `parts`; that of the last epoch if nothing is new."""
    addressed = tuple((each.peer, each.schedule) for each in told)
    known = kept.bound
    if known is not None and known.addressed == addressed and known.regions is regions:
        return known.queue
    kept.unbind()
    device = regions[0].device if regions else torch.device("cpu")
    made = SendQueue(parts, regions, copy_engine_for(device))
    kept.bound = _Bound(addressed, regions, made)
    return made


def _linger(frames: MacFrames, deadline: Deadline, stop: threading.Event) -> None:
    """Keep the connection until the sender closes it: an end before its word was read would look like a death."""
    while not frames.readable() and deadline.left() and not stop.wait(0.02):
        pass
    frames.close()


def _tell(frames: MacFrames, reason: str, *, less: bool) -> None:
    try:
        wire.RECEIVER.say(frames, wire.Failed(reason=reason[:2048], less=less), Deadline(1.0))
    except DataplaneError:
        return  # it is gone, nothing to tell
