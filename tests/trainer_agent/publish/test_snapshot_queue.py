"""The order of snapshots: every buffer in one place, rounds one after another, nothing newer overtaken by older."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightbus.control.protocol.errors import InvariantBroken
from weightbus.trainer_agent.publish.background_publisher import SnapshotClaim, SnapshotQueue
from weightbus.trainer_agent.settings import Overlap


def test_versions_are_published_in_order_one_at_a_time() -> None:
    """The second begins when the first is over."""
    queue = SnapshotQueue(2, Overlap.WAIT)
    for version in (1, 2):
        assert queue.claim() is not None
        queue.filled(version)
    assert queue.claim() is None, "both buffers are taken"
    assert queue.begin() == (1, 0)
    assert queue.begin() is None
    assert queue.pending == 2
    queue.finish()
    assert queue.begin() == (2, 1)
    assert queue.claim() == SnapshotClaim(0)


def test_what_has_not_begun_is_superseded() -> None:
    """What has begun is not: with one buffer the next snapshot waits for it."""
    queue = SnapshotQueue(2, Overlap.SUPERSEDE)
    for version, superseded in ((1, ()), (2, ()), (3, (2,)), (4, (3,))):
        claim = queue.claim()
        assert claim is not None
        assert claim.superseded == superseded
        queue.filled(version)
        if version == 1:
            queue.begin()
    queue.finish()
    assert queue.begin() == (4, 1)

    single = SnapshotQueue(1, Overlap.SUPERSEDE)
    single.claim()
    single.filled(1)
    single.begin()
    assert single.claim() is None


def test_a_snapshot_that_failed_leaves_its_buffer() -> None:
    """The next one takes it."""
    queue = SnapshotQueue(1, Overlap.WAIT)
    queue.claim()
    queue.discard()
    assert queue.claim() == SnapshotClaim(0)
    assert queue.idle


def test_calls_out_of_turn_are_refused() -> None:
    """A driver that lost its place must not go on."""
    queue = SnapshotQueue(2, Overlap.WAIT)
    for call in (queue.finish, queue.discard, lambda: queue.filled(1)):
        with pytest.raises(InvariantBroken):
            call()
    queue.claim()
    with pytest.raises(InvariantBroken, match="publish from one thread"):
        queue.claim()


class Anything(RuleBasedStateMachine):
    """Any order of calls that a training loop and a publishing thread can make."""

    @initialize(buffers=st.integers(1, 3), overlap=st.sampled_from(Overlap))
    def start(self, buffers: int, overlap: Overlap) -> None:
        self.queue = SnapshotQueue(buffers, overlap)
        self.next = 1
        self.begun: list[int] = []
        self.dropped: set[int] = set()
        self.writing = self.running = False

    @precondition(lambda self: not self.writing)
    @rule(taken=st.booleans())
    def snapshot(self, taken: bool) -> None:
        claim = self.queue.claim()
        if claim is None:
            assert self.running or self.queue.pending, "nobody holds a buffer"
            return
        self.dropped |= set(claim.superseded)
        if taken:
            self.queue.filled(self.next)
            self.next += 1
        else:
            self.queue.discard()

    @rule()
    def begin(self) -> None:
        begun = self.queue.begin()
        assert not (self.running and begun), "two rounds at once"
        if begun:
            self.running = True
            self.begun.append(begun[0])

    @precondition(lambda self: self.running)
    @rule()
    def finish(self) -> None:
        self.queue.finish()
        self.running = False

    @rule()
    def cancel_waiting(self) -> None:
        self.dropped |= set(self.queue.cancel_waiting())

    @invariant()
    def sound(self) -> None:
        self.queue.check()
        assert self.begun == sorted(set(self.begun))
        assert not self.dropped & set(self.begun)
        ended = len(self.begun) - self.running + len(self.dropped)
        assert ended + self.queue.pending == self.next - 1, "a version was lost"


TestAnything = Anything.TestCase
TestAnything.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
