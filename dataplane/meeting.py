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

from collections.abc import Iterable
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

import torch.distributed as dist

from .deadline import Deadline
from .errors import PeerLost, StaleSession, TransferFailed

POLL_S: Final = 0.02
_PREFIX: Final = "weightbus/"
_STEPS: Final = ("came", "joined", "done", "failed")


class Meeting:
    """The keys of one epoch, seen from either side."""

    def __init__(self, store: dist.Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch

    @classmethod
    def open(cls, store: dist.Store, epoch: int) -> Meeting:
        """Sender: announce the epoch."""
        meeting = cls(store, epoch)
        meeting._put(f"{_PREFIX}epoch", str(epoch))
        return meeting

    @classmethod
    def attend(cls, address: str, epoch: int, deadline: Deadline) -> Meeting:
        """Receiver: connect to the store at `address`. Raises `PeerLost`, `StaleSession`."""
        url = urlsplit(address)
        if url.scheme != "tcp" or not url.hostname or not url.port:
            raise TransferFailed(f"{address!r} is not the address of a distributed offer, expected tcp://host:port")
        try:
            store = dist.TCPStore(
                url.hostname,
                url.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=deadline.check("the sender's store")),
            )
            found = int(store.get(f"{_PREFIX}epoch"))
        except RuntimeError as error:
            raise PeerLost(f"the sender's store at {address} does not answer: {error}") from error
        if found != epoch:
            raise StaleSession(found, epoch)
        return cls(store, epoch)

    def say(self, step: str, engine: str, value: str = "") -> None:
        """Receiver: note that `engine` has reached `step`."""
        self._put(self._key(f"{step}/{engine}"), value)

    def heard(self, step: str, engine: str) -> str | None:
        """What `engine` said with `step`, or None."""
        return self._look(self._key(f"{step}/{engine}"))

    def announce(self, what: str, value: str) -> None:
        """Sender: ``group`` or ``over``."""
        self._put(self._key(what), value)

    def announced(self, what: str) -> str | None:
        """Receiver: what the sender announced, or None. Raises `PeerLost` when it died."""
        return self._look(self._key(what))

    def clear(self, engines: Iterable[str]) -> None:
        """Sender: forget this epoch."""
        names = [f"{step}/{engine}" for engine in engines for step in _STEPS]
        for name in ("group", "over", *names):
            self._store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"{_PREFIX}{self._epoch}/{name}"

    def _put(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise PeerLost(f"the sender's store is gone: {error}") from error

    def _look(self, key: str) -> str | None:
        try:
            if not self._store.check([key]):
                return None
            return self._store.get(key).decode("utf-8", "replace")
        except RuntimeError as error:
            raise PeerLost(f"the sender's store is gone: {error}") from error
