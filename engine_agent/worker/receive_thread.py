"""A worker's own thread for what it is sent: it waits for the sidecar between rounds, joins groups, and receives.

The scheduler is never kept waiting by it. *Beside* the parameters it receives while the server generates; into them
only while the scheduler waits in our loader, which `in_loader` tells. Both ends of a round, `Take` and `Swap`, are the
sidecar's word; when the sidecar is gone, the thread lets go of everything and ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from weightbus.dataplane.copy import CopyTable, copy_engine_for
from weightbus.dataplane.errors import ChunkTimeout, DataplaneError, OutOfStagingMemory, TransferFailed
from weightbus.dataplane.processes import BackgroundInit, Deadline, Frames, low_latency_threads, without_timer_slack
from weightbus.dataplane.reshard import SendMessages
from weightbus.dataplane.transports import worker_exchange as wire
from weightbus.dataplane.transports.sends import (
    GroupCache,
    GroupForming,
    GroupTransfer,
    QueuePair,
    ReceiveQueue,
    beside_bytes,
)

_CONNECT_S: Final = 30.0
_SAY_S: Final = 30.0
_LOOK_S: Final = 3600.0
"""Deadline between rounds. The end of the sidecar ends the wait."""
_SOON_S: Final = 2.0
"""How long memory is kept after a question for room: mostly a version follows."""
_MEMINFO: Final = Path("/proc/meminfo")

_log = logging.getLogger(__name__)


class ReceiveThread:
    """Receives by one schedule. Made and used by the scheduler's thread."""

    def __init__(
        self,
        expect: wire.Expect,
        rank: int,
        targets: Sequence[torch.Tensor],
        device: torch.device,
        forming: GroupForming | None = None,
    ) -> None:
        """`targets` are those of the load trace, then the buffer of the plan. Connects; raises `DataplaneError`."""
        self.schedule = expect.schedule
        self.in_loader = threading.Event()
        """Set while the scheduler waits in our loader."""
        self._messages, self._unpack = SendMessages.decode(expect.messages), CopyTable.decode(expect.unpack)
        self._targets, self._device, self._rank = targets, device, rank
        self._queue: ReceiveQueue | None = None
        self._groups = GroupCache()
        if forming is not None:
            self._groups.begin(forming)
        self._taken = False
        self._claiming = threading.Lock()
        self._touched = False
        self._closed = False
        self._stuck = False
        """A thread does not return from what it does in our memory, which is its own from then on."""
        self._binding: BackgroundInit[ReceiveQueue] | None = None
        self._frames = Frames.connect(expect.socket, Deadline(_CONNECT_S))
        try:
            wire.WORKER.say(self._frames, wire.Expecting(rank=rank, schedule=self.schedule), Deadline(_SAY_S))
        except DataplaneError:
            self._frames.close()
            raise
        self._bind(beside=False)  # the scheduler stands in our loader, and the others are being asked
        self._thread = threading.Thread(target=self._run, name="weightbus-receive", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the connection to the sidecar stands."""
        return self._thread.is_alive() and not self._closed

    def swap(self) -> None:
        """Swap the received version in, once. Raises `TransferFailed` when none is complete."""
        if not self._claim() or self._queue is None:
            raise TransferFailed("nothing was taken that could be put into place")
        self._queue.swap()
        self._detach()

    def close(self) -> None:
        """Release everything. A transfer under way is broken off."""
        self._closed = True
        self._frames.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_SAY_S)
            if self._thread.is_alive():
                self._stuck = True
                _log.warning("weightbus: the thread that receives has not ended within %g s: it is left", _SAY_S)
        self._settle()
        self._drop()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        without_timer_slack()
        try:
            while True:
                while not self._frames.readable(_LOOK_S):
                    pass
                with low_latency_threads():  # from the first word on: to hear it takes several turns of the interpreter
                    if not self._obey(wire.WORKER.hear(self._frames, Deadline(_SAY_S), "the sidecar")) or self._stuck:
                        return
        except DataplaneError as error:
            if not self._closed:
                _log.info("weightbus: the thread that receives ends: %s", error)
        except Exception:  # noqa: BLE001 - the server goes on without this
            if not self._closed:  # what waits for a connection that is closed meanwhile fails in its own way
                _log.exception("weightbus: the thread that receives failed unforeseen")
        finally:
            self._closed = True
            self._taken = False
            self._groups.discard()
            self._frames.close()

    def _obey(self, message: wire.ToWorker) -> bool:
        """Carry out `message`; False for a message that this thread does not know."""
        match message:
            case wire.Weigh():
                self._say(wire.Room(needed=beside_bytes(self._messages), free=free_bytes(self._device)))
                self._frames.readable(_SOON_S)
            case wire.Take():
                self._say(self._take(message))
            case wire.Failed():  # of what has ended already
                if self._claim():
                    self._detach()
                self._groups.call_off()
            case _:
                _log.error("weightbus: the sidecar said %s to a thread that receives", message.kind)
                return False
        return True

    def _say(self, message: wire.ToSidecar) -> None:
        wire.WORKER.say(self._frames, message, Deadline(_SAY_S))

    def _take(self, message: wire.Take) -> wire.Taken | wire.Failed:
        """Receive everything; failures are reported to the sidecar."""
        self._taken = self._touched = False
        if not message.beside and not self.in_loader.is_set():
            return wire.Failed(reason="the scheduler is at work: nothing is received into its parameters")
        try:
            where = message.group
            binding = self._binding if self._binding and not message.beside else self._bind(beside=message.beside)
            memory = binding.result().memory if where.nixl else ()  # which the group has to know

            def move(group: QueuePair) -> None:
                self._touched = not message.beside
                binding.result().receive(group, where.turn_s)

            transfer = GroupTransfer(
                where, where.rank, self._device, from_=self._messages.ranks, memory=memory, groups=self._groups
            )
            seconds = transfer.run(move, self._called_off, self._beat, ready=binding.result)  # made while a group forms
        except Exception as error:  # noqa: BLE001 - see above
            self._settle()
            self._detach()
            less = isinstance(error, OutOfStagingMemory | ChunkTimeout | torch.OutOfMemoryError)
            reason = f"{type(error).__name__}: {error}"[:2048]
            return wire.Failed(reason=reason, touched=self._touched, less=less)
        self._settle()
        self._taken = True
        return wire.Taken(seconds=seconds, nbytes=binding.result().nbytes)

    def _bind(self, *, beside: bool) -> BackgroundInit[ReceiveQueue]:
        if not self._settle():
            raise TransferFailed("memory was to be bound, and is not: the driver does not answer, or the host")
        self._binding = BackgroundInit(lambda: self._bound(beside=beside))
        return self._binding

    def _settle(self) -> bool:
        """Nothing is bound behind our back any more. False where it is: then this thread ends, and lets go of nothing.

        The next one has memory of its own.
        """
        binding, self._binding = self._binding, None
        self._stuck |= binding is not None and not binding.settle()
        return not self._stuck

    def _bound(self, *, beside: bool) -> ReceiveQueue:
        if self._queue is None or self._queue.beside != beside:
            self._drop()
            engine = copy_engine_for(self._device)
            self._queue = ReceiveQueue(self._messages, self._unpack, self._targets, engine, self._device, beside=beside)
        self._queue.attach()
        return self._queue

    def _claim(self) -> bool:
        """Whether a version was received; it belongs to the caller then: the scheduler, or this thread to drop it."""
        with self._claiming:
            taken, self._taken = self._taken, False
        return taken

    def _detach(self) -> None:
        """Give the memory back to the scheduler."""
        if self._queue is not None and not self._stuck:
            self._queue.detach()

    def _drop(self) -> None:
        if self._stuck:
            return
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()

    def _beat(self) -> None:
        try:
            self._say(wire.Moving())
        except DataplaneError:
            return  # the sidecar is gone: that is heard of next

    def _called_off(self) -> str:
        if self._closed:
            return "this worker has gone on"
        if not self._frames.readable():
            return ""
        try:
            message = wire.WORKER.hear(self._frames, Deadline(_SAY_S), "the sidecar")
        except TransferFailed as error:
            self._closed = True
            return f"the sidecar is gone: {error}"
        return message.reason if isinstance(message, wire.Failed) else f"the sidecar said {message.kind}"


def free_bytes(device: torch.device) -> int:
    """Bytes that are free for use: of a GPU with torch's own reserve, or of the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
