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
