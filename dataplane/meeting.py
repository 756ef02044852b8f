"""What the two halves of the distributed transport tell each other: a few keys in the group's own rendezvous store.

    epoch                 sender    the epoch on offer; a receiver of another one is stale
    <epoch>/came/E        receiver  E is here; the value names the group its server is still in, if any
    <epoch>/group         sender    the group to broadcast over: the one all are in, or a new one to join
    <epoch>/joined/E      receiver  E's server is in it
    <epoch>/done/E        receiver  E has loaded every bucket
    <epoch>/failed/E      receiver  E gives up, and why
    <epoch>/over          sender    the session is over, and why

Keys of an epoch are deleted when the next one begins. A store that stops answering is a sender that died.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

# torch.distributed has these names only where it was built with it, and type checkers do not see them there.
from torch._C._distributed_c10d import Store, TCPStore

from .deadline import Deadline
from .errors import PeerLost, StaleSession, TransferFailed

POLL_S: Final = 0.02
_EPOCH: Final = "weightbus/epoch"
_MAX_REASON: Final = 2048
_CONNECT_S: Final = 30.0
_GOODBYE_S: Final = 1.0
_STEPS: Final = ("came", "joined", "done", "failed")


class Meeting:
    """The sender's side. The store is served by this very process, so nothing here waits for anybody."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        store.set(_EPOCH, str(epoch))

    def heard(self, step: str, engine: str) -> str | None:
        """What `engine` said with `step`, or None."""
        return _look(self._store, _key(self._epoch, f"{step}/{engine}"))

    def announce(self, what: str, value: str) -> None:
        """Say ``group`` or ``over``."""
        self._store.set(_key(self._epoch, what), value)

    def clear(self, engines: Iterable[str]) -> None:
        """Forget this epoch."""
        names = [f"{step}/{engine}" for engine in engines for step in _STEPS]
        for name in ("group", "over", *names):
            self._store.delete_key(_key(self._epoch, name))


class Attendance:
    """A receiver's side: asks on a thread of its own, and never blocks the receiver beyond its deadline.

    A store client cannot be given up on once it waits for a sender that stands still, so the receiver only looks at
    what that thread last heard.
    """

    def __init__(self, address: str, epoch: int, engine: str) -> None:
        url = urlsplit(address)
        if url.scheme != "tcp" or not url.hostname or not url.port:
            raise TransferFailed(f"{address!r} is not the address of a distributed offer, expected tcp://host:port")
        self._where = (url.hostname, url.port)
        self._epoch = epoch
        self._engine = engine
        self._outbox: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._news = threading.Condition()
        self._error: TransferFailed | None = None
        self._announced: dict[str, str] = {}
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="weightbus-meeting", daemon=True)

    def begin(self) -> None:
        """Connect, in the background."""
        self._thread.start()

    def check(self) -> None:
        """Raise what is known against going on: `StaleSession`, or `PeerLost` when the sender died or gave up."""
        if self._error is not None:
            raise self._error
        if "over" in self._announced:
            raise PeerLost(f"the sender gave up: {self._announced['over']}")

    def group(self, deadline: Deadline) -> str:
        """Wait for the group's name. Raises as `check` does, and `DeadlineExceeded`."""
        self._wait(lambda: "group" in self._announced, "the sender to name the group", deadline)
        return self._announced["group"]

    def say(self, step: str, value: str, deadline: Deadline) -> None:
        """Tell the sender that this engine has reached `step`; returns when its store has it."""
        self._outbox.put((step, value))
        self._wait(lambda: step in self._said, f"the sender's store to take {step!r}", deadline)

    def close(self, last: str = "") -> None:
        """Stop asking; `last` is the reason of a failure, told if the sender can still be reached."""
        if last:
            self._outbox.put(("failed", last[:_MAX_REASON]))
        self._outbox.put(None)
        self._thread.join(_GOODBYE_S)

    def _wait(self, done: Callable[[], bool], what: str, deadline: Deadline) -> None:
        with self._news:
            while not done():
                self.check()
                self._news.wait(deadline.check(what))

    def _run(self) -> None:
        try:
            store = self._connect()
            while self._talk(store):
                pass
        except TransferFailed as error:
            self._error = error
        except RuntimeError as error:  # every way in which a store breaks
            self._error = PeerLost(f"the sender's store at {self._where[0]}:{self._where[1]} is gone: {error}")
        with self._news:
            self._news.notify_all()

    def _connect(self) -> Store:
        timeout = timedelta(seconds=_CONNECT_S)
        store = TCPStore(*self._where, is_master=False, wait_for_workers=False, timeout=timeout)
        found = int(store.get(_EPOCH))
        if found != self._epoch:
            raise StaleSession(found, self._epoch)
        return store

    def _talk(self, store: Store) -> bool:
        try:
            message = self._outbox.get(timeout=POLL_S)
        except queue.Empty:
            for what in ("group", "over"):
                if what not in self._announced and (value := _look(store, _key(self._epoch, what))) is not None:
                    self._announced[what] = value
        else:
            if message is None:
                return False
            step, value = message
            store.set(_key(self._epoch, f"{step}/{self._engine}"), value)
            self._said.add(step)
        with self._news:
            self._news.notify_all()
        return True


def _key(epoch: int, name: str) -> str:
    return f"weightbus/{epoch}/{name}"


def _look(store: Store, key: str) -> str | None:
    return bytes(store.get(key)).decode("utf-8", "replace") if store.check([key]) else None
