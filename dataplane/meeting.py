"""What the two halves of the distributed transport tell each other: a few keys in the group's own rendezvous store.

    epoch                 sender    the epoch on offer; a receiver of another one is stale
    <epoch>/came/E        receiver  E is here; the value names the group its server is still in, if any, or that its
                                    agent takes part itself, and the group that it is still in
    <epoch>/group         sender    what to broadcast over (`sources.Groups`): what all are in, or new groups to join
    <epoch>/joined/E      receiver  E's server is in it
    <epoch>/formed        sender    new groups stand for everybody; said where each engine has its own
    <epoch>/at/E          receiver  E's agent begins to take this bucket; said where it takes part itself
    <epoch>/done/E        receiver  E has loaded every bucket
    <epoch>/failed/E      receiver  E gives up, and why
    <epoch>/over          sender    the session is over, and why

Sources that do not lead say the same under the name that `source_name` gives them, which no engine can have, and:

    <epoch>/sent/S        source    so many of its buckets have been taken by everybody
    <epoch>/differs/S     source    tensors that it found changed between the digest and the transfer
    <epoch>/still/S       source    engines that it found to stand still, by their place among all; before it fails

Keys of an epoch are deleted when the next one begins: whoever finds another epoch there has missed the end of his own.
A store that stops answering is a sender that died.

Whoever reaches its port can read and write a store. So every value but the bare epoch carries a MAC over its key and
itself, by a token that is new in every epoch and travels on the authenticated bus, never here: what a stranger writes
can stop a transfer, and is named, but cannot pass for the word of an engine or of the sender.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Final, TypeVar

# torch.distributed has this name only where it was built with it, and type checkers do not see it there.
from torch._C._distributed_c10d import Store

from . import torch_threads
from .deadline import Deadline
from .errors import Forged, PeerLost, StaleSession, TransferFailed
from .rendezvous import reach_store

POLL_S: Final = 0.02
_EPOCH: Final = "weightbus/epoch"
_MAX_REASON: Final = 2048
_CONNECT_S: Final = 30.0
_GOODBYE_S: Final = 1.0
_MAC_CHARS: Final = 64
_STEPS: Final = ("came", "joined", "at", "done", "failed", "sent", "differs", "still")
BY_SIDECAR: Final = "sidecar:"
"""How the word of an engine begins whose agent takes part in place of its server's workers."""

_ANNOUNCED: Final = ("group", "formed", "over")

_T = TypeVar("_T")


def source_name(number: int) -> str:
    """As whom source `number` of a trainer speaks."""
    return f"source/{number}"


def holding(groups: Sequence[str], *, by_sidecar: bool = False) -> str:
    """What an engine says when it comes whose server is in `groups`, or whose agent is."""
    return (BY_SIDECAR if by_sidecar else "") + ",".join(groups)


def settled(future: Future[_T], seconds: float) -> bool:
    """Wait up to `seconds`; whether it is done by then, well or not."""
    return bool(wait([future], seconds).done)


def new_token() -> str:
    """A secret for one epoch."""
    return secrets.token_hex(16)


class _Sealed:
    """A store in which only holders of `token` can say anything."""

    def __init__(self, store: Store, epoch: int, token: str) -> None:
        self._store = store
        self._epoch = epoch
        self._token = token.encode("ascii")

    def say(self, name: str, value: str) -> None:
        key, word = self._key(name), value.encode("utf-8", "replace")
        self._store.set(key, f"{self._mac(key, word)}{word.decode()}")

    def hear(self, name: str) -> str | None:
        """What was said under `name`, or None. Raises `Forged`."""
        key = self._key(name)
        if not self._store.check([key]):
            return None
        found = bytes(self._store.get(key))
        mac, word = found[:_MAC_CHARS], found[_MAC_CHARS:]
        if not hmac.compare_digest(mac, self._mac(key, word).encode("ascii")):
            raise Forged(key)
        return word.decode("utf-8", "replace")

    def forget(self, name: str) -> None:
        self._store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"weightbus/{self._epoch}/{name}"

    def _mac(self, key: str, word: bytes) -> str:
        return hmac.new(self._token, key.encode("utf-8") + b"\0" + word, hashlib.sha256).hexdigest()


class Meeting:
    """The sender's side. The store is served by this very process, so nothing here waits for anybody."""

    def __init__(self, store: Store, epoch: int, token: str) -> None:
        self._sealed = _Sealed(store, epoch, token)
        self._forged: dict[str, str] = {}
        store.set(_EPOCH, str(epoch))

    def heard(self, step: str, engine: str) -> str | None:
        """What `engine` said with `step`, or None. An engine in whose name a stranger wrote has ``failed``."""
        try:
            word = self._sealed.hear(f"{step}/{engine}")
        except Forged as error:
            self._forged.setdefault(engine, str(error))
            word = None
        return self._forged.get(engine, word) if step == "failed" else word

    def announce(self, what: str, value: str) -> None:
        """Say ``group``, ``formed`` or ``over``."""
        self._sealed.say(what, value)

    def clear(self, engines: Iterable[str]) -> None:
        """Forget this epoch."""
        for name in (*_ANNOUNCED, *(f"{step}/{engine}" for engine in engines for step in _STEPS)):
            self._sealed.forget(name)


class Attendance:
    """A receiver's side: asks on a thread of its own, and never blocks the receiver beyond its deadline.

    A store client cannot be given up on once it waits for a sender that stands still, so the receiver only looks at
    what that thread last heard.
    """

    def __init__(self, address: str, epoch: int, engine: str, token: str) -> None:
        self._address = address
        self._epoch = epoch
        self._engine = engine
        self._token = token
        self._outbox: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._news = threading.Condition()
        self._error: TransferFailed | None = None
        self._announced: dict[str, str] = {}
        self._said: set[str] = set()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Connect, in the background."""
        self._thread = torch_threads.start(self._run, "weightbus-meeting")

    def cancel(self, reason: str) -> None:
        """From any thread: whoever waits here, or will, is told at once that it is over."""
        with self._news:
            self._error = self._error or PeerLost(reason)
            self._news.notify_all()

    def check(self) -> None:
        """Raise what is known against going on: `StaleSession`, or `PeerLost` when the sender died or gave up.

        `TransferFailed` for an address that is none.
        """
        if self._error is not None:
            raise self._error
        if "over" in self._announced:
            raise PeerLost(f"the sender gave up: {self._announced['over']}")

    def group(self, deadline: Deadline) -> str:
        """Wait for the group's name. Raises as `check` does, and `DeadlineExceeded`."""
        self._wait(lambda: "group" in self._announced, "the sender to name the group", deadline)
        return self._announced["group"]

    def formed(self, deadline: Deadline) -> None:
        """Wait until everybody is in the new groups. Raises as `group` does."""
        self._wait(lambda: "formed" in self._announced, "all engines to join their groups", deadline)

    def say(self, step: str, value: str, deadline: Deadline) -> None:
        """Tell the sender that this engine has reached `step`; returns when its store has it."""
        self.post(step, value)
        self._wait(lambda: step in self._said, f"the sender's store to take {step!r}", deadline)

    def post(self, step: str, value: str) -> None:
        """Tell the sender without waiting for its store."""
        self._outbox.put((step, value))

    def close(self, last: str = "") -> None:
        """Stop asking; `last` is the reason of a failure, told if the sender can still be reached."""
        if last:
            self._outbox.put(("failed", last[:_MAX_REASON]))
        self._outbox.put(None)
        if self._thread is not None:
            self._thread.join(_GOODBYE_S)

    def _wait(self, done: Callable[[], bool], what: str, deadline: Deadline) -> None:
        with self._news:
            while not done():
                self.check()
                self._news.wait(deadline.check(what))

    def _run(self) -> None:
        found: TransferFailed | None = None
        try:
            store = reach_store(self._address, Deadline(_CONNECT_S))
            self._require_epoch(store)
            sealed = _Sealed(store, self._epoch, self._token)
            while self._talk(store, sealed):
                pass
        except TransferFailed as error:
            found = error
        except RuntimeError as error:  # every way in which a store breaks
            found = PeerLost(f"the sender's store at {self._address} is gone: {error}")
        with self._news:
            self._error = self._error or found
            self._news.notify_all()

    def _require_epoch(self, store: Store) -> None:
        found = bytes(store.get(_EPOCH)).decode("ascii", "replace")
        if found != str(self._epoch):
            raise StaleSession(int(found) if found.isdecimal() else -1, self._epoch)

    def _talk(self, store: Store, sealed: _Sealed) -> bool:
        try:
            message = self._outbox.get(timeout=POLL_S)
        except queue.Empty:
            for what in _ANNOUNCED:
                if what not in self._announced and (value := sealed.hear(what)) is not None:
                    self._announced[what] = value
            if "over" not in self._announced:
                self._require_epoch(store)
        else:
            if message is None:
                return False
            step, value = message
            sealed.say(f"{step}/{self._engine}", value)
            self._said.add(step)
        with self._news:
            self._news.notify_all()
        return True
