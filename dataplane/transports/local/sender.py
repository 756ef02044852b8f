"""Same host: the trainer's half. Buckets lie in shared memory or on a GPU; only their names travel.

The receiver's half is receiver.py, their messages messages.py. A dead engine agent is noticed by its closed
socket (or its pidfd, should a child of it hold the socket open), a stopped one by the deadline of the call that waits
for it; either is named in `failed`, and the others go on.

A peer that was dropped at a deadline may still be reading a slot that is then written again. It cannot do harm: it
either finds the digests wrong or, on a GPU, its session closed before it could confirm, and its engine is quarantined.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from ...errors import PeerLost, TransferFailed, Unsupported
from ...processes import Deadline, open_runtime_dir
from ..interface import JOIN_S, Address, Peer, Slot, TransferSession
from .messages import (
    SENDER,
    BucketDone,
    BucketReady,
    Failed,
    Finished,
    Hello,
    Refused,
    SenderConnection,
    Welcome,
    failed,
)

_MAX_PATH: Final = 107
"""sun_path of a Unix socket, less its terminating zero."""
_LOOK_S: Final = 0.05
"""How soon a wait notices that a peer was withdrawn; everything else wakes it at once."""


class _Receiver:
    """One engine agent as the sender knows it."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.connection: SenderConnection | None = None
        self.pidfd = -1
        self.reading: dict[int, int] = {}
        """Buckets announced and not confirmed: index -> generation."""
        self.finished = False


class LocalSender:
    """Serves every engine of this host. `runtime_dir` becomes a folder that only this user can enter."""

    def __init__(self, runtime_dir: Path, channel: str) -> None:
        self._runtime_dir = runtime_dir
        self._channel = channel
        self._session: TransferSession | None = None
        self._failed: dict[str, str] = {}
        self._withdrawn: dict[str, str] = {}
        self._live: dict[str, _Receiver] = {}
        self._strangers: list[SenderConnection] = []
        self._listener: socket.socket | None = None
        self._selector: selectors.BaseSelector | None = None
        self._path: Path | None = None
        self._generation = 0

    @property
    def failed(self) -> dict[str, str]:
        """Engines that will not get every bucket, with the reason."""
        return self._failed

    @property
    def spared(self) -> frozenset[str]:
        """Always empty: no engine fails for another."""
        return frozenset()

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Listen for `peers` on a socket of this epoch."""
        self.close()
        self._session = session
        self._failed, self._withdrawn = {}, {}
        self._live = {peer.engine: _Receiver(peer.engine) for peer in peers}
        open_runtime_dir(self._runtime_dir)
        path = self._runtime_dir / f"{self._channel}-{session.epoch}-{os.getpid()}.sock"
        if len(os.fsencode(path)) > _MAX_PATH:
            raise Unsupported(f"{path} is longer than the {_MAX_PATH} bytes of a socket's name: shorten runtime_dir")
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(os.fspath(path))
        path.chmod(0o600)  # until now its folder kept others out
        self._listener.listen(max(8, len(peers)))
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        return Address(os.fspath(path))

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every peer has connected, or is in `failed`: peers that have not within `join_s`."""
        self._pump(0.0)
        self._wait(min(deadline_s, join_s), lambda receiver: receiver.connection is None, "did not come")
        self._require_some()

    def send(self, index: int, slot: Slot, deadline_s: float) -> None:
        """Announce bucket `index`; does not wait for receivers to take it."""
        del deadline_s  # announcing never blocks
        self._pump(0.0)
        if slot.memory.device.type == "cuda":
            # What packed the bucket runs on a stream that the reader's process knows nothing of.
            torch.cuda.current_stream(slot.memory.device).synchronize()
        self._generation += 1
        ready = BucketReady(index=index, generation=self._generation, handle=slot.exported)
        for receiver in tuple(self._live.values()):
            if receiver.connection is None:
                continue
            receiver.reading[index] = self._generation
            try:
                receiver.connection.say(ready)
            except PeerLost as error:
                self._bury(receiver, str(error))
        self._require_some()

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Wait until no peer reads bucket `index` any more; a peer that still does at the deadline is dropped."""
        self._wait(deadline_s, lambda receiver: index in receiver.reading, f"was still reading bucket {index}")

    def finish(self, deadline_s: float) -> None:
        """Wait until every peer has loaded everything, or is in `failed`."""
        self._wait(deadline_s, lambda receiver: not receiver.finished, "had not loaded every bucket")

    def withdraw(self, engine: str, reason: str) -> None:
        """Drop `engine` when this sender waits, or announces a bucket, the next time."""
        self._withdrawn.setdefault(engine, reason)

    def close(self) -> None:
        """Close every connection; peers that are not finished are told."""
        for receiver in tuple(self._live.values()):
            if receiver.connection is not None and not receiver.finished:
                self._say_goodbye(receiver.connection)
            self._forget(receiver)
        self._live = {}
        for connection in self._strangers:
            connection.close()
        self._strangers = []
        if self._selector is not None:
            self._selector.close()
            self._selector = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self, deadline_s: float, pending: Callable[[_Receiver], bool], reproach: str) -> None:
        """Serve events until no peer is `pending`; drop those that are at the deadline, with the `reproach`."""
        deadline = Deadline(deadline_s)
        while any(pending(receiver) for receiver in self._live.values()):
            left = deadline.left()
            if not left:
                for receiver in tuple(self._live.values()):
                    if pending(receiver):
                        self._drop(receiver, f"{reproach} within {deadline_s:.1f} s")
                return
            self._pump(min(left, _LOOK_S))

    def _pump(self, timeout_s: float) -> None:
        if self._selector is None:
            raise TransferFailed("nothing is on offer: call offer first")
        for key, _ in self._selector.select(timeout_s):
            serve: Callable[[], None] = key.data
            serve()
        for engine, reason in tuple(self._withdrawn.items()):
            if engine in self._live:
                self._bury(self._live[engine], reason)

    def _require_some(self) -> None:
        if not self._live:
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in self._failed.items())
            raise TransferFailed(f"no engine is left to serve ({reasons})")

    # -- peers -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._selector is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it went away between the event and now
            return
        connection = SenderConnection(sock, SENDER)
        self._strangers.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(connection))

    def _greet(self, connection: SenderConnection) -> None:
        """First message of a connection: let the peer in, or say why not."""
        assert self._session is not None
        assert self._selector is not None
        self._selector.unregister(connection)
        self._strangers.remove(connection)
        try:
            pid, hello = self._admit(connection)
        except PeerLost:  # it has been told, or is gone; a peer that never comes is failed at the deadline
            connection.close()
            return
        receiver = self._live[hello.engine]
        receiver.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(receiver))
        self._watch_process(receiver, pid)

    def _admit(self, connection: SenderConnection) -> tuple[int, Hello]:
        assert self._session is not None
        pid = connection.check_user()
        hello = connection.poll()
        if not isinstance(hello, Hello):
            raise PeerLost(f"the peer began with {hello.kind if hello else 'nothing'}, expected Hello")
        if reason := self._refusal(hello):
            connection.say(Refused(epoch=self._session.epoch, reason=reason))
            raise PeerLost(reason)
        connection.say(Welcome(epoch=self._session.epoch))
        return pid, hello

    def _refusal(self, hello: Hello) -> str:
        assert self._session is not None
        if (hello.channel, hello.epoch) != (self._session.channel, self._session.epoch):
            return f"this is channel {self._session.channel!r} at epoch {self._session.epoch}"
        receiver = self._live.get(hello.engine)
        if receiver is None:
            return f"{hello.engine!r} does not take part: {self._failed.get(hello.engine, 'it was not invited')}"
        if receiver.connection is not None:
            return f"{hello.engine!r} is connected already"
        return ""

    def _watch_process(self, receiver: _Receiver, pid: int) -> None:
        """A child that inherited the socket would hide its parent's death; the pidfd does not lie."""
        assert self._selector is not None
        try:
            receiver.pidfd = os.pidfd_open(pid)
        except OSError:  # another PID namespace, or gone this instant: the socket will tell
            return
        if pid != os.getpid():
            self._selector.register(
                receiver.pidfd, selectors.EVENT_READ, lambda: self._bury(receiver, "its process died")
            )

    def _bury(self, receiver: _Receiver, reason: str) -> None:
        """It is gone: what it said before that still counts, and knows the reason better."""
        while receiver.connection is not None and self._hear(receiver):
            pass
        if self._live.get(receiver.engine) is receiver:
            self._drop(receiver, reason)

    def _hear(self, receiver: _Receiver) -> bool:
        """Take one message; False when there is none."""
        if receiver.connection is None:  # dropped by an earlier event of the same batch
            return False
        try:
            message = receiver.connection.poll()
        except PeerLost as error:
            self._drop(receiver, str(error))
            return True
        match message:
            case None:
                return False
            case BucketDone(index=index, generation=generation) if receiver.reading.get(index) == generation:
                del receiver.reading[index]
            case Finished() if not receiver.reading:
                receiver.finished = True
            case Failed(reason=reason):
                self._drop(receiver, reason)
            case _:
                self._drop(receiver, f"it said {message!r} out of turn")
        return True

    def _drop(self, receiver: _Receiver, reason: str) -> None:
        if receiver.connection is not None:
            self._say_goodbye(receiver.connection)
        finished = receiver.finished
        self._forget(receiver)
        if finished:  # it has everything; going away afterwards is its right
            receiver.reading.clear()
            return
        self._failed.setdefault(receiver.engine, reason)
        self._live.pop(receiver.engine, None)

    def _say_goodbye(self, connection: SenderConnection) -> None:
        try:
            connection.say(failed("the sender closed this session"))
        except PeerLost:
            return  # it is gone, nothing to tell

    def _forget(self, receiver: _Receiver) -> None:
        if receiver.connection is not None:
            if self._selector is not None:
                self._selector.unregister(receiver.connection)
            receiver.connection.close()
            receiver.connection = None
        if receiver.pidfd >= 0:
            if self._selector is not None and receiver.pidfd in self._selector.get_map():
                self._selector.unregister(receiver.pidfd)
            os.close(receiver.pidfd)
            receiver.pidfd = -1
