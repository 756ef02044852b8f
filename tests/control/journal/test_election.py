"""A leader's lease on a clock of our own: it counts from when it was asked for, since etcd may count from then on."""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from typing import cast

import pytest

from weightbus.control.journal.etcd import (
    Deposed,
    Election,
    Etcd,
    EtcdUnavailable,
    Json,
    KeyValue,
    LeaderRecord,
    Term,
    TxnResult,
)

DEADLINE_S = 60.0


class SlowStore:
    """An etcd whose lease calls take time, by the leader's clock, before they are answered."""

    def __init__(self, *, grant_s: float = 0.0, renewals_s: Sequence[float] = ()) -> None:
        """After `renewals_s` it answers no renewal any more."""
        self.now = 0.0
        self._grant_s, self._renewals_s = grant_s, list(renewals_s)
        self.unanswered = threading.Event()

    def txn(self, conditions: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json] = ()) -> TxnResult:
        del conditions, then, otherwise
        return TxnResult(succeeded=True, revision=1, found=())

    def grant(self, ttl_s: float) -> int:
        del ttl_s
        self.now += self._grant_s
        return 1

    def keep_alive(self, lease: int) -> bool:
        del lease
        if not self._renewals_s:
            self.unanswered.set()
            raise EtcdUnavailable(("one",), "no answer")
        self.now += self._renewals_s.pop(0)
        return True

    def revoke(self, lease: int) -> None:
        del lease

    def elect(self, ttl_s: float) -> Term:
        term = Election(cast("Etcd", self), "wb", LeaderRecord("c0", ""), ttl_s, lambda: self.now).stand()
        assert isinstance(term, Term)
        return term


class ScrawledStore:
    """An etcd with a leader's key that is no leader's record."""

    def __init__(self, written: bytes) -> None:
        self._written = base64.b64encode(written).decode()

    def txn(self, conditions: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json] = ()) -> TxnResult:
        del conditions, then, otherwise
        key = base64.b64encode(b"wb/leader").decode()
        return TxnResult(succeeded=False, revision=1, found=(KeyValue(key=key, value=self._written),))


@pytest.mark.parametrize("written", [b"me", b"\xff", b"[1]", b""])
def test_an_empty_leader_key_still_has_an_owner(written: bytes) -> None:
    """Standbys wait until it is gone, and say so; they do not end by it."""
    found = Election(cast("Etcd", ScrawledStore(written)), "wb", LeaderRecord("c0", ""), 5.0).stand()
    assert isinstance(found, LeaderRecord)
    assert "unreadable" in found.name


def lasts_until(term: Term, store: SlowStore, moment: float) -> None:
    """It does so up to then, and no longer."""
    store.now = moment - 0.01
    term.confirm()
    store.now = moment
    with pytest.raises(Deposed, match="not be renewed in time"):
        term.confirm()


def test_a_lease_counts_from_the_moment_it_was_asked_for() -> None:
    """However late the answer comes: another may be elected when etcd's time is over, not when ours is."""
    store = SlowStore(grant_s=50.0)
    term = store.elect(ttl_s=80.0)
    try:
        lasts_until(term, store, 80.0)
    finally:
        term.resign()


def test_a_renewal_that_does_not_return_keeps_no_leader_from_ending() -> None:
    """Nothing bounds how long a name is looked up. Its lease runs out, and it says nothing more to that etcd."""
    asked, released, revoked = threading.Event(), threading.Event(), list[int]()

    class Hanging(SlowStore):
        def keep_alive(self, lease: int) -> bool:
            asked.set()
            assert released.wait(DEADLINE_S)
            return super().keep_alive(lease)

        def revoke(self, lease: int) -> None:
            revoked.append(lease)

    term = Hanging().elect(ttl_s=0.4)
    assert asked.wait(DEADLINE_S)
    resigning = threading.Thread(target=term.resign, daemon=True)
    resigning.start()
    resigning.join(DEADLINE_S / 4)
    held = resigning.is_alive()
    released.set()
    assert not held
    assert term.lost == "it resigned"
    assert not revoked


def test_a_renewal_counts_from_the_moment_it_was_asked_for() -> None:
    """It adds nothing that etcd may not have granted."""
    store = SlowStore(renewals_s=(0.1, 0.15))
    term = store.elect(ttl_s=0.2)  # which is also how often it is renewed, in real time: four times as often
    try:
        assert store.unanswered.wait(DEADLINE_S)
        lasts_until(term, store, 0.1 + 0.2)
    finally:
        term.resign()
