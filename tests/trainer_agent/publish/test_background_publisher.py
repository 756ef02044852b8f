"""Versions published from snapshots: a real coordinator, two ranks that go on training, engines that take long."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightbus.control.protocol.errors import InvariantBroken
from weightbus.control.protocol.messages import TransportKind
from weightbus.trainer_agent.machine.errors import AgentClosed, PublishHandle, PublishRefused, SourceFailed, Superseded
from weightbus.trainer_agent.machine.publication import Mode, PublishReport
from weightbus.trainer_agent.publish.agent import TrainerAgent
from weightbus.trainer_agent.publish.background_publisher import SnapshotClaim, SnapshotQueue
from weightbus.trainer_agent.settings import Overlap
from weightbus.trainer_agent.source import AssemblyFailed

from .test_rounds import Deployment

PATIENCE_S = 60.0


class Gate:
    """Holds an engine before the first load of its next transfer, until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, load: int) -> None:
        if load == 0:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)


class Loop(Deployment):
    """A training loop: every step adds one to every weight."""

    def step(self) -> None:
        for tensor in self.sources[0].weights.values():
            tensor.add_(1.0)

    def each(self, call: Callable[[TrainerAgent], object]) -> list[object]:
        """On every rank at once."""
        with ThreadPoolExecutor(len(self.agents)) as pool:
            return [each.result(PATIENCE_S) for each in [pool.submit(call, agent) for agent in self.agents]]

    def round(self) -> dict[str, object]:
        """The running round as the coordinator's status shows it."""
        rank_zero = self.agents[0]._rank_zero
        assert rank_zero is not None
        status = rank_zero._context.bus.status()  # type: ignore[attr-defined]  # a BusClient, which has one
        found: dict[str, object] = json.loads(status)["channels"]["c"]["round"]
        return found

    def committed(self) -> int:
        """The version that every later request is answered from, now or when its engine goes on."""
        rank_zero = self.agents[0]._rank_zero
        assert rank_zero is not None
        status = rank_zero._context.bus.status()  # type: ignore[attr-defined]  # a BusClient, which has one
        found: int = json.loads(status)["channels"]["c"]["committed"]["version"]
        return found

    def until(self, what: Callable[[], bool]) -> None:
        """What is committed is labeled a moment later, by the engine's own thread."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < give_up_at, "it never happened"
            time.sleep(0.01)

    def snapshot(self, version: int) -> list[PublishHandle]:
        return [
            each
            for each in self.each(lambda agent: agent.publish(version, mode="snapshot"))
            if isinstance(each, PublishHandle)
        ]

    def wait(self, handles: list[PublishHandle]) -> PublishReport:
        def one(handle: PublishHandle) -> PublishReport:
            return handle.wait()

        with ThreadPoolExecutor(len(handles)) as pool:
            first, *others = [each.result(PATIENCE_S) for each in [pool.submit(one, handle) for handle in handles]]
        assert all(other == first for other in others)
        return first

    def failure(self, handles: list[PublishHandle]) -> set[type[BaseException]]:
        with ThreadPoolExecutor(len(handles)) as pool:
            errors = [each.exception(PATIENCE_S) for each in [pool.submit(handle.wait) for handle in handles]]
        return {type(error) for error in errors if error}


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """Its coordinator is a thread of this process."""
    made = Loop(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("slots", [2, 64])
def test_training_goes_on_while_a_snapshot_is_published(loop: Loop, slots: int) -> None:
    """What engines get is what the weights were when `publish` was called, whatever happened since."""
    gate = Gate()
    loop.engine("e0", gate)
    loop.connect(slots=slots)
    handles = loop.snapshot(1)
    expected = {name: tensor.clone() for name, tensor in loop.sources[0].weights.items()}
    assert gate.reached.wait(PATIENCE_S)
    assert not any(handle.over() for handle in handles)
    assert loop.round()["mode"] == "snapshot"
    loop.step()
    gate.opened.set()
    report = loop.wait(handles)
    assert report.committed
    assert report.mode is Mode.SNAPSHOT
    assert {"snapshot", "assemble", "transfer", "total"} <= report.seconds.keys()
    assert "from a snapshot" in report.line()
    assert not loop.holds("e0")
    loop.sources[0].weights = expected
    assert loop.holds("e0")
    assert [handle.wait() for handle in handles] == [report, report]


def test_the_other_ranks_take_part_only_while_the_snapshot_is_taken(loop: Loop) -> None:
    """Each bucket is assembled once; a training loop that never waits for its handles hears of nothing more."""
    loop.engine("e0")
    loop.connect(slots=2)
    buckets = list(range(len(loop.agents[0].manifest.buckets)))
    for version in (1, 2, 3):
        loop.snapshot(version)
        loop.step()
    handles = loop.snapshot(4)
    assert loop.wait(handles).committed
    assert loop.holds("e0")
    assert loop.sources[1].assembled == buckets * 4


def test_a_newer_snapshot_supersedes_what_has_not_begun(loop: Loop) -> None:
    """And nothing else: the running round comes to its end, the newest follows, the one between is told so."""
    gate = Gate()
    engine = loop.engine("e0", gate)
    loop.connect(overlap="supersede")
    first = loop.snapshot(1)
    assert gate.reached.wait(PATIENCE_S)
    second = loop.snapshot(2)
    loop.step()
    third = loop.snapshot(3)
    gate.opened.set()
    assert loop.wait(first).version == 1
    assert loop.failure(second) == {Superseded}
    assert loop.wait(third).version == 3
    assert engine.label == 3
    assert loop.holds("e0")


def test_with_one_buffer_the_second_snapshot_waits(loop: Loop) -> None:
    """Memory is bounded, and every version is published."""
    gate = Gate()
    engine = loop.engine("e0", gate)
    loop.connect(snapshots=1)
    loop.snapshot(1)
    assert gate.reached.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(loop.snapshot, 2)
        assert not second.done()
        assert engine.label is None
        gate.opened.set()
        handles = second.result(PATIENCE_S)
    assert engine.label in {1, 2}
    assert loop.wait(handles).committed


def test_a_live_version_waits_for_the_snapshots(loop: Loop) -> None:
    """Rounds never interleave, whichever way their versions come."""
    gate = Gate()
    engine = loop.engine("e0", gate)
    loop.connect()
    loop.snapshot(1)
    assert gate.reached.wait(PATIENCE_S)
    loop.step()
    with ThreadPoolExecutor(1) as pool:
        live = pool.submit(loop.publish, 2)
        gate.opened.set()
        report = live.result(PATIENCE_S)
    assert report.mode is Mode.LIVE
    assert engine.label == 2
    assert loop.holds("e0")


def test_what_the_coordinator_refuses_is_raised_by_wait_and_only_there(loop: Loop) -> None:
    """On every rank; the next snapshot is published."""
    loop.engine("e0")
    loop.connect()
    loop.wait(loop.snapshot(5))
    assert loop.failure(loop.snapshot(4)) == {PublishRefused}
    assert loop.wait(loop.snapshot(6)).committed


def test_a_snapshot_that_cannot_be_taken_fails_on_every_rank(loop: Loop) -> None:
    """At once, from `publish` itself."""
    loop.engine("e0")
    loop.connect()

    def fail(_done: int) -> None:
        raise AssemblyFailed("gone")

    loop.sources[0].before_assembly = fail

    def attempt(agent: TrainerAgent) -> object:
        try:
            return agent.publish(1, mode="snapshot")
        except (SourceFailed, AgentClosed) as error:
            return type(error)

    assert loop.each(attempt) == [SourceFailed, SourceFailed]
    assert loop.each(attempt) == [AgentClosed, AgentClosed]


def test_closing_carries_what_has_begun_to_its_end(loop: Loop) -> None:
    """And drops the rest: the agent leaves no round behind, and no engine paused."""
    gate = Gate()
    engine = loop.engine("e0", gate)
    loop.connect()
    loop.snapshot(1)
    assert gate.reached.wait(PATIENCE_S)
    later = loop.snapshot(2)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(loop.agents[0].close)
        gate.opened.set()
        closing.result(PATIENCE_S)
    assert engine.label == 1
    assert later[0].over()
    with pytest.raises(AgentClosed, match="version 2"):
        later[0].wait()


def test_a_version_that_is_on_its_way_is_not_taken_twice(loop: Loop) -> None:
    """The mistake is told on every rank, and costs nothing."""
    gate = Gate()
    loop.engine("e0", gate)
    loop.connect()
    first = loop.snapshot(1)
    with pytest.raises(Exception, match="is being published already"):
        loop.snapshot(1)
    gate.opened.set()
    assert loop.wait(first).committed


def test_what_engines_read_themselves_cannot_be_a_snapshot(loop: Loop) -> None:
    """Training would go on under their hands: refused on every rank where nothing else is allowed, and live ones go on.

    Where something else is, the coordinator lets engines take it (control's test_transport_plan.py).
    """
    loop.engine("e0")
    loop.connect()
    rank_zero = loop.agents[0]._rank_zero
    assert rank_zero is not None
    settings = rank_zero._context.settings
    rank_zero._context.settings = msgspec.structs.replace(
        settings, transport=(TransportKind.DIRECT, TransportKind.SENDS)
    )
    with pytest.raises(Exception, match="allow local, distributed or disk too"):
        loop.snapshot(1)
    assert loop.publish(1).committed


# The order of snapshots: every buffer in one place, rounds one after another, nothing newer overtaken by older.


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
