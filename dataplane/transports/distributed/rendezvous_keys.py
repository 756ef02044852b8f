"""What the two halves of the distributed transport tell each other: a few keys in the group's own rendezvous store.

    epoch                 sender    the epoch on offer; a receiver of another one is stale
    <epoch>/came/E        receiver  E is here; the value names the group its server is still in, if any, or that its
                                    agent takes part itself, and the group that it is still in
    <epoch>/group         sender    what to broadcast over (`sources.Groups`): what all are in, or new groups to join
    <epoch>/joined/E      receiver  E's server is in it
    <epoch>/formed        sender    new groups stand for all members; said where each engine has its own
    <epoch>/at/E          receiver  E's agent begins to take this bucket; said where it takes part itself
    <epoch>/done/E        receiver  E has loaded every bucket
    <epoch>/failed/E      receiver  E gives up, and why
    <epoch>/over          sender    the session is over, and why

Sources that do not lead say the same under the name that `source_name` gives them, which no engine can have, and:

    <epoch>/sent/S        source    so many of its buckets have been taken by all
    <epoch>/differs/S     source    tensors that it found changed between the digest and the transfer
    <epoch>/still/S       source    engines that it found to stand still, by their place among all; before it fails

Keys of an epoch are deleted when the next one begins: a member that finds another epoch there has missed the end of its
own. A store that stops answering is a sender that died.

There may be hundreds of engines, and the sender looks all the time. So every word of theirs has its place from the
beginning, with a mark of the sender's in it until it is said: what all of them said with one step is asked for at once,
for it takes as many calls as one word does.

Any process that reaches its port can read and write a store. So every value but the bare epoch carries a MAC over its
key and itself, by a token that is new in every epoch and travels on the authenticated bus, never here: what a stranger
writes can stop a transfer, and is named, but cannot pass for the word of an engine or of the sender.
"""

from __future__ import annotations

import hmac
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Final, Protocol, TypeVar, cast

# torch.distributed has this name only where it was built with it, and type checkers do not see it there.
from torch._C._distributed_c10d import Store

from ...errors import ForgedMessage, PeerLost, StaleSession, TransferFailed
from ...processes import Deadline, connect_store, start_thread

POLL_S: Final = 0.02
_EPOCH: Final = "weightbus/epoch"
_EPOCH_S: Final = 0.2
"""How often a receiver looks whether another epoch has begun. All of them look at one store, which is one thread."""
_MAX_REASON: Final = 2048
_CONNECT_S: Final = 30.0
_GOODBYE_S: Final = 1.0
_MAC_CHARS: Final = 64
_ENGINES: Final = ("came", "joined", "at", "done", "failed")
"""What an engine may say."""
_SOURCES: Final = ("came", "joined", "done", "failed", "sent", "differs", "still")
"""What a source that does not lead may."""
BY_SIDECAR: Final = "sidecar:"
"""How an engine's first word begins where the sidecar is the member, and not the server's workers."""

_ANNOUNCED: Final[tuple[str, ...]] = ("group", "formed", "over")

_T = TypeVar("_T")


def source_name(number: int) -> str:
    """The name by which source `number` of a trainer speaks."""
    return f"source/{number}"


def holding(groups: Sequence[str], *, by_sidecar: bool = False) -> str:
    """What an engine says when it comes: the `groups` that its server, or its sidecar, is in."""
    return (BY_SIDECAR if by_sidecar else "") + ",".join(groups)


def settled(future: Future[_T], seconds: float) -> bool:
    """Wait up to `seconds`; whether it is done by then, well or not."""
    return bool(wait([future], seconds).done)


class _Setting(Protocol):
    """What torch's stubs leave out of Store."""

    def multi_set(self, keys: list[str], values: list[str]) -> None: ...


class _Sealed:
    """A store in which only holders of `token` can say anything."""

    def __init__(self, store: Store, epoch: int, token: str) -> None:
        self._store = store
        self._epoch = epoch
        self._token = token.encode("ascii")
        self._unsaid = self._mac("", b"").encode("ascii")
        """The value of a key that was not written. A stranger that writes it could have deleted the key as well."""
        self._opened: dict[str, tuple[bytes, str | ForgedMessage]] = {}
        """By key: what was found there, and what it says."""

    def say(self, name: str, value: str) -> None:
        key, word = self._key(name), value.encode("utf-8", "replace")
        self._store.set(key, f"{self._mac(key, word)}{word.decode()}")

    def hear(self, name: str) -> str | None:
        """What was said under `name`, or None. Raises `ForgedMessage`."""
        key = self._key(name)
        if not self._store.check([key]):
            return None
        found = bytes(self._store.get(key))
        return None if found == self._unsaid else self._open(key, found)

    def keep_room(self, names: Sequence[str]) -> None:
        """For what will be said under `names`: only such are asked for together."""
        if names:
            store = cast("_Setting", self._store)
            store.multi_set([self._key(name) for name in names], [self._unsaid.decode()] * len(names))

    def hear_all(self, names: Sequence[str]) -> dict[str, str | ForgedMessage]:
        """What was said under those of `names` under which anything was, by as many calls whatever their number."""
        keys = [self._key(name) for name in names]
        if not keys:
            return {}
        if not self._store.check(keys):  # a stranger deleted some: asking for these would wait for them
            for key in keys:
                self._store.compare_set(key, "", self._unsaid.decode())  # where there is nothing
        found, unsaid = self._store.multi_get(keys), self._unsaid
        if found.count(unsaid) == len(found):
            return {}
        said = ((name, key, word) for name, key, word in zip(names, keys, found, strict=True) if word != unsaid)
        return {name: self._remembered(key, word) for name, key, word in said}

    def forget(self, name: str) -> None:
        self._store.delete_key(self._key(name))

    def _remembered(self, key: str, found: bytes) -> str | ForgedMessage:
        """As `_open`, which is the dear part: once for each word."""
        known = self._opened.get(key)
        if known is None or known[0] != found:
            try:
                known = found, self._open(key, found)
            except ForgedMessage as error:
                known = found, error
            self._opened[key] = known
        return known[1]

    def _open(self, key: str, found: bytes) -> str:
        mac, word = found[:_MAC_CHARS], found[_MAC_CHARS:]
        if not hmac.compare_digest(mac, self._mac(key, word).encode("ascii")):
            raise ForgedMessage(key)
        return word.decode("utf-8", "replace")

    def _key(self, name: str) -> str:
        return f"weightbus/{self._epoch}/{name}"

    def _mac(self, key: str, word: bytes) -> str:
        return hmac.digest(self._token, key.encode("utf-8") + b"\0" + word, "sha256").hex()


class Rendezvous:
    """The sender's side. The store is served by this very process, so nothing here waits for a peer."""

    def __init__(
        self, store: Store, epoch: int, token: str, engines: Sequence[str] = (), sources: Sequence[str] = ()
    ) -> None:
        """`engines` and `sources` are the members that are asked about together."""
        self._sealed = _Sealed(store, epoch, token)
        self._forged: dict[str, str] = {}
        self._places = [f"{step}/{engine}" for engine in engines for step in _ENGINES]
        self._places += [f"{step}/{source}" for source in sources for step in _SOURCES]
        self._sealed.keep_room(self._places)
        store.set(_EPOCH, str(epoch))
        store.check([_EPOCH])  # nothing else says that all that is there, and it must not come after the first words

    def heard(self, step: str, engine: str) -> str | None:
        """What `engine` said with `step`, or None. Where a stranger wrote in its name, it has ``failed``."""
        try:
            word = self._sealed.hear(f"{step}/{engine}")
        except ForgedMessage as error:
            self._forged.setdefault(engine, str(error))
            word = None
        return self._forged.get(engine, word) if step == "failed" else word

    def heard_from(self, step: str, members: Iterable[str]) -> dict[str, str]:
        """What `members` said with `step`, as far as they did: `heard` of each, for little more than of one."""
        places = {f"{step}/{member}": member for member in members}
        words: dict[str, str] = {}
        for place, word in self._sealed.hear_all(tuple(places)).items():
            if isinstance(word, ForgedMessage):
                self._forged.setdefault(places[place], str(word))
            else:
                words[places[place]] = word
        if step == "failed" and self._forged:
            words.update({member: self._forged[member] for member in places.values() if member in self._forged})
        return words

    def announce(self, what: str, value: str) -> None:
        """Say ``group``, ``formed`` or ``over``."""
        self._sealed.say(what, value)

    def clear(self) -> None:
        """Forget this epoch."""
        for name in (*_ANNOUNCED, *self._places):
            self._sealed.forget(name)


class RendezvousKeys:
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
        self._awaited = _ANNOUNCED
        """What the sender is listened to for."""
        self._epoch_due = 0.0
        self._said: set[str] = set()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Connect, in the background."""
        self._thread = start_thread(self._run, "weightbus-rendezvous")

    def cancel(self, reason: str) -> None:
        """From any thread: waits that run, or begin later, end at once."""
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
        self._awaited = ("over",)
        return self._announced["group"]

    def formed(self, deadline: Deadline) -> None:
        """Wait until all members are in the new groups. Raises as `group` does."""
        self._awaited = ("formed", "over")
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
            store = connect_store(self._address, Deadline(_CONNECT_S))
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
            self._listen(store, sealed)
        else:
            if message is None:
                return False
            step, value = message
            sealed.say(f"{step}/{self._engine}", value)
            self._said.add(step)
        with self._news:
            self._news.notify_all()
        return True

    def _listen(self, store: Store, sealed: _Sealed) -> None:
        for what in self._awaited:
            if what not in self._announced and (value := sealed.hear(what)) is not None:
                self._announced[what] = value
        if "over" not in self._announced and time.monotonic() >= self._epoch_due:
            self._require_epoch(store)
            self._epoch_due = time.monotonic() + _EPOCH_S
