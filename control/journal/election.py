"""Leader election among coordinators that share one etcd. At most one leader can write.

The leader is the coordinator that created the leader's key, which is attached to a lease. The key's create revision is
the token of the term: every write has the condition that the key still has it, so a former leader that has not noticed
yet changes nothing. A leader that cannot renew its lease in time stops by its own clock, before etcd ends the lease.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ..log import get_log
from ..protocol import WeightbusError
from .etcd_client import Etcd, EtcdUnavailable, KeyValue, created_at, put, read

_log = get_log(__name__)

RENEWALS_PER_LEASE: Final = 4
"""Renewals within the time of a lease."""


class Deposed(WeightbusError):
    """This coordinator is not the leader any more."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this coordinator leads no more: {reason}; it stands by again")


class LeaderRecord(msgspec.Struct, frozen=True):
    """The content of the leader's key."""

    name: str = ""
    endpoint: str = ""
    """Endpoint for agents."""


class Term:
    """One coordinator's time as the leader."""

    def __init__(
        self,
        etcd: Etcd,
        key: str,
        *,
        token: int,
        lease: int,
        ttl_s: float,
        granted_at: float,
        clock: Callable[[], float],
    ) -> None:
        """`granted_at` is when the lease was requested: etcd counts from later, so this side never counts too long."""
        self.key = key
        self.token = token
        self.lost = ""
        """Why the term is over; empty while it is known to last."""
        self._etcd = etcd
        self._lease = lease
        self._ttl_s = ttl_s
        self._clock = clock
        self._until = granted_at + ttl_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leader-lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Raise `Deposed` unless the lease is known to last. Costs a look at the clock."""
        if not self.lost and self._clock() >= self._until:
            self.lost = "its lease could not be renewed in time"
        if self.lost:
            raise Deposed(self.lost)

    def depose(self, reason: str) -> None:
        """End the term because another coordinator leads."""
        self.lost = self.lost or reason

    def resign(self) -> None:
        """End the term and its lease, so that another coordinator can lead at once."""
        self._over.set()
        self._thread.join(self._ttl_s)
        if not self.lost:
            self.lost = "it resigned"
            if self._thread.is_alive():  # an etcd that does not answer would not answer this either
                _log.warning("lease_left", waited_s=self._ttl_s, reason="a renewal has not returned: it runs out")
                return
            with contextlib.suppress(EtcdUnavailable):  # the lease then runs out by itself
                self._etcd.revoke(self._lease)

    def _renew(self) -> None:
        while not self._over.wait(self._ttl_s / RENEWALS_PER_LEASE) and not self.lost:
            asked_at = self._clock()
            try:
                alive = self._etcd.keep_alive(self._lease)
            except EtcdUnavailable:
                continue  # tried again; `confirm` raises once the time is over
            if not alive:
                self.depose("its lease ran out")
                return
            self._until = asked_at + self._ttl_s


class Election:
    """A candidate for the leader's key under one prefix."""

    def __init__(
        self, etcd: Etcd, prefix: str, me: LeaderRecord, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._etcd = etcd
        self._key = f"{prefix}/leader"
        self._me = me
        self._ttl_s = ttl_s
        self._clock = clock

    def stand(self) -> Term | LeaderRecord:
        """Become the leader if there is none; otherwise return the leader's record. Raises `EtcdUnavailable`."""
        found = self._etcd.txn([created_at(self._key, 0)], [], [read(self._key)])
        if not found.succeeded:
            return _leader(found.found)
        asked_at = self._clock()
        lease = self._etcd.grant(self._ttl_s)
        value = msgspec.json.encode(self._me)
        won = self._etcd.txn([created_at(self._key, 0)], [put(self._key, value, lease)], [read(self._key)])
        if not won.succeeded:
            self._etcd.revoke(lease)
            return _leader(won.found)
        return Term(
            self._etcd,
            self._key,
            token=won.revision,
            lease=lease,
            ttl_s=self._ttl_s,
            granted_at=asked_at,
            clock=self._clock,
        )


def _leader(found: tuple[KeyValue, ...]) -> LeaderRecord:
    if not found:
        return LeaderRecord()
    try:
        return msgspec.json.decode(found[0].content, type=LeaderRecord)
    except ValueError:  # its writer leads all the same, until the key is gone
        return LeaderRecord(name="unknown: the leader's key is unreadable")
