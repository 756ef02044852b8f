"""The lanes of a delivery, before a byte travels."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from weightbus.control.protocol.messages import TransportKind
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.transports.interface import Peer
from weightbus.trainer_agent.publish.delivery import Delivery

from ...dataplane.loopback import CHANNEL, make_manifest, make_session
from ...kit.fake_sender import FakeSender
from ...kit.waiting import until

LOCAL = TransportKind.LOCAL


@pytest.fixture
def pool() -> Iterator[BucketBuffers]:
    """Memory for two buckets."""
    pool = BucketBuffers("cpu", 2, make_manifest().largest_bucket, CHANNEL)
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
def test_a_delivery_that_is_stopped_ends_and_says_so(pool: BucketBuffers, sender: FakeSender) -> None:
    """The driver, which has to abandon the round next, and the lane close the sender at the same moment."""
    delivery = Delivery(
        make_session(1, 10, make_manifest()), {LOCAL: sender}, {LOCAL: [Peer("e0", 1)]}, pool.buffers, 60.0
    )
    assert delivery.open()
    assert delivery.stop(5.0) == ()
    assert delivery.over
    assert sender.calls.count("close") == 2


@pytest.mark.parametrize("told", [False, True])
def test_receivers_are_waited_for_once_they_can_come(pool: BucketBuffers, told: bool) -> None:
    """No engine is given up for not having come while the offer is still on its way to the coordinator."""
    sender, session = FakeSender(), make_session(1, 10, make_manifest())
    delivery = Delivery(session, {LOCAL: sender}, {LOCAL: [Peer("e0", 1)]}, pool.buffers, 60.0)
    assert [offer.address for offer in delivery.open()] == ["/fake/1"]
    if told:
        delivery.offers_received()
        until = time.monotonic() + 30.0
        while "ready" not in sender.calls and time.monotonic() < until:
            delivery.wait(0.01)
    assert delivery.stop() == ()
    assert ("ready" in sender.calls) == told


def test_a_transport_that_cannot_open_costs_the_others_nothing(pool: BucketBuffers) -> None:
    """Its engines have failed, with the reason, before anybody was told an offer; the others take the version."""
    broken, well, session = FakeSender(), FakeSender(), make_session(1, 10, make_manifest())
    broken.refusal = "no port can be opened"
    peers = {LOCAL: [Peer("e0", 1)], TransportKind.DISTRIBUTED: [Peer("e1", 1), Peer("e2", 1)]}
    senders = {LOCAL: well, TransportKind.DISTRIBUTED: broken}
    delivery = Delivery(session, senders, peers, pool.buffers, 60.0)
    offers = delivery.open()
    assert [(offer.transport, offer.address) for offer in offers] == [(LOCAL, "/fake/1")]
    assert delivery.unopened == dict.fromkeys(("e1", "e2"), "no port can be opened")
    assert not delivery.over
    delivery.offers_received()
    until(lambda: "ready" in well.calls, "the others to be waited for", 30.0)
    for bucket in range(len(session.manifest.buckets)):
        until(lambda: delivery.wanted() is not None, "room for a bucket", 30.0)
        delivery.filled(bucket + 1)
    until(lambda: delivery.over, "the version to be sent", 30.0)
    assert delivery.failed == dict.fromkeys(("e1", "e2"), "no port can be opened")
    assert len(well.taken[1, "e0"]) == len(session.manifest.buckets)
