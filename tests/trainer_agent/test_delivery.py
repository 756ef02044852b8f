"""The lanes of a delivery, before a byte travels."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from weightbus.control.messages import TransportKind
from weightbus.dataplane.staging import BucketPool
from weightbus.dataplane.transport import Peer
from weightbus.trainer_agent.delivery import Delivery

from ..dataplane.loopback import CHANNEL, make_manifest, make_session
from ..kit.fake_sender import FakeSender

LOCAL = TransportKind.LOCAL


@pytest.fixture
def pool() -> Iterator[BucketPool]:
    """Memory for two buckets."""
    pool = BucketPool("cpu", 2, make_manifest().largest_bucket, CHANNEL)
    yield pool
    pool.close()


class SlowToClose(FakeSender):
    """Two that close it at a time would be in each other's way, as those that hold sockets are."""

    def __init__(self) -> None:
        super().__init__()
        self._closing = False

    def close(self) -> None:
        if self._closing:
            raise OSError("closed by somebody else at the same time")
        self._closing = True
        time.sleep(0.05)
        self._closing = False
        super().close()


class BrokenByClosing(FakeSender):
    """Closed while a call of its own is under way, it cannot go through with it."""

    def close(self) -> None:
        super().close()
        if self.calls.count("close") == 1:
            raise OSError("in the middle of a call")


@pytest.mark.parametrize("sender", [SlowToClose(), BrokenByClosing()], ids=["slow", "broken"])
def test_a_delivery_that_is_stopped_ends_and_says_so(pool: BucketPool, sender: FakeSender) -> None:
    """The leader, which has to give the round up next, and the lane let go of the sender at the same moment."""
    delivery = Delivery(
        make_session(1, 10, make_manifest()), {LOCAL: sender}, {LOCAL: [Peer("e0", 1)]}, pool.slots, 60.0
    )
    assert delivery.open()
    assert delivery.stop(5.0) == ()
    assert delivery.over
    assert sender.calls.count("close") == 2


@pytest.mark.parametrize("told", [False, True])
def test_receivers_are_waited_for_once_they_can_come(pool: BucketPool, told: bool) -> None:
    """Nobody is given up for not having come while the offer is still on its way to the coordinator."""
    sender, session = FakeSender(), make_session(1, 10, make_manifest())
    delivery = Delivery(session, {LOCAL: sender}, {LOCAL: [Peer("e0", 1)]}, pool.slots, 60.0)
    assert [offer.address for offer in delivery.open()] == ["/fake/1"]
    if told:
        delivery.told()
        until = time.monotonic() + 30.0
        while "ready" not in sender.calls and time.monotonic() < until:
            delivery.wait(0.01)
    assert delivery.stop() == ()
    assert ("ready" in sender.calls) == told
