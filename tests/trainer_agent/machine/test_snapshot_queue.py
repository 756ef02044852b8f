"""The order of snapshots: every buffer in one place, rounds one after another, nothing newer overtaken by older."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightbus.control.protocol.errors import InvariantBroken
from weightbus.trainer_agent.machine.snapshot_queue import Overlap, SnapshotClaim, SnapshotQueue


def test_versions_are_published_in_order_one_at_a_time() -> None:
    """The second begins when the first is over."""
    backlog = SnapshotQueue(2, Overlap.WAIT)
    for version in (1, 2):
        assert backlog.claim() is not None
        backlog.filled(version)
    assert backlog.claim() is None, "both buffers are taken"
    assert backlog.begin() == (1, 0)
    assert backlog.begin() is None
    assert backlog.ahead == 2
    backlog.over()
    assert backlog.begin() == (2, 1)
    assert backlog.claim() == SnapshotClaim(0)


def test_what_has_not_begun_is_superseded() -> None:
    """What has begun is not: with one buffer the next snapshot waits for it."""
    backlog = SnapshotQueue(2, Overlap.SUPERSEDE)
    for version, superseded in ((1, ()), (2, ()), (3, (2,)), (4, (3,))):
        claim = backlog.claim()
        assert claim is not None
        assert claim.superseded == superseded
        backlog.filled(version)
        if version == 1:
            backlog.begin()
    backlog.over()
    assert backlog.begin() == (4, 1)

    single = SnapshotQueue(1, Overlap.SUPERSEDE)
    single.claim()
    single.filled(1)
    single.begin()
    assert single.claim() is None


def test_a_snapshot_that_failed_leaves_its_buffer() -> None:
    """The next one takes it."""
    backlog = SnapshotQueue(1, Overlap.WAIT)
    backlog.claim()
    backlog.discard()
    assert backlog.claim() == SnapshotClaim(0)
    assert backlog.idle


def test_calls_out_of_turn_are_refused() -> None:
    """A driver that lost its place must not go on."""
    backlog = SnapshotQueue(2, Overlap.WAIT)
    for call in (backlog.over, backlog.discard, lambda: backlog.filled(1)):
        with pytest.raises(InvariantBroken):
            call()
    backlog.claim()
    with pytest.raises(InvariantBroken, match="publish from one thread"):
        backlog.claim()


class Anything(RuleBasedStateMachine):
    """Any order of calls that a training loop and a publishing thread can make."""

    @initialize(buffers=st.integers(1, 3), overlap=st.sampled_from(Overlap))
    def start(self, buffers: int, overlap: Overlap) -> None:
        self.backlog = SnapshotQueue(buffers, overlap)
        self.next = 1
        self.begun: list[int] = []
        self.dropped: set[int] = set()
        self.writing = self.running = False

    @precondition(lambda self: not self.writing)
    @rule(taken=st.booleans())
    def snapshot(self, taken: bool) -> None:
        claim = self.backlog.claim()
        if claim is None:
            assert self.running or self.backlog.ahead, "nobody holds a buffer"
            return
        self.dropped |= set(claim.superseded)
        if taken:
            self.backlog.filled(self.next)
            self.next += 1
        else:
            self.backlog.discard()

    @rule()
    def begin(self) -> None:
        begun = self.backlog.begin()
        assert not (self.running and begun), "two rounds at once"
        if begun:
            self.running = True
            self.begun.append(begun[0])

    @precondition(lambda self: self.running)
    @rule()
    def over(self) -> None:
        self.backlog.over()
        self.running = False

    @rule()
    def drop(self) -> None:
        self.dropped |= set(self.backlog.drop())

    @invariant()
    def sound(self) -> None:
        self.backlog.check()
        assert self.begun == sorted(set(self.begun))
        assert not self.dropped & set(self.begun)
        ended = len(self.begun) - self.running + len(self.dropped)
        assert ended + self.backlog.ahead == self.next - 1, "a version was lost"


TestAnything = Anything.TestCase
TestAnything.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
