"""Engines that share no group of gloo's: one that stands still, and what becomes of the others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.processes import connections
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.transports.distributed import broadcast_group
from weightbus.dataplane.transports.distributed.broadcast_group import STILL_S, Behind, Stalled, Stragglers
from weightbus.dataplane.transports.interface import Peer, Receipt, StallDetector

from ....kit.waiting import until
from ...loopback import CHANNEL, Places, make_manifest, make_session, send_all, wanted
from ...transport_contract import PROMPT_S, Engine, Halves


@pytest.fixture
def halves() -> Iterator[Halves]:
    """The process that forks halves of transfers."""
    yield from Halves.serve()


def test_workers_that_stand_still_hold_no_other_engine(
    tmp_path: Path, halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of a broadcast: the source names them before any deadline, and frees the others' workers.

    In one group of all, the first worker of `lives` would be below one of `stopped`, and wait for bytes from it (F5).
    """
    monkeypatch.setattr(broadcast_group, "STILL_S", 1.0)
    places, manifest = Places(tmp_path), make_manifest(6)
    session = make_session(1, 11, manifest)
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, manifest.largest_bucket, "still")
    lives = Engine("lives", places.receiver("distributed"), tp=2)
    load, inside = lives.server.load_broadcast, threading.Event()

    def watched(group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        inside.set()
        try:
            load(group, tensors, deadline_s)
        finally:
            inside.clear()

    lives.server.load_broadcast = watched  # type: ignore[method-assign]
    lives.server.leave_group = lambda _group, _deadline_s: None  # type: ignore[method-assign]  # SGLang would not hear
    address = sender.offer(session, [Peer("stopped", 2), Peer("lives", 2)])
    halves.start(
        half="receiver", kind="distributed", root=str(tmp_path), epoch=1, version=11, engine="stopped", tp=2,
        rank_offset=1, address=msgspec.to_builtins(address), at=1, how="stop", buckets=6,
    )  # fmt: skip
    lives.start(session, address, 3)
    sender.ready(60.0)
    began = time.monotonic()
    with contextlib.suppress(TransferFailed):
        send_all(sender, session, pool, 60.0)
    sender.close()
    assert "stands still" in sender.failed["stopped"]
    assert isinstance(lives.join(), TransferFailed)
    until(lambda: not inside.is_set(), "the server to go on", PROMPT_S)
    assert time.monotonic() - began < PROMPT_S
    pool.close()


@pytest.mark.parametrize("count", [1, 2])
def test_the_source_waits_a_while_for_engines_that_all_stand_still(
    tmp_path: Path, halves: Halves, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Without an engine that shows how long a bucket takes, its bytes say so, and not the end of the session."""
    monkeypatch.setattr(connections, "BUCKET_TIMEOUT_S", 2.0)
    places, manifest = Places(tmp_path), make_manifest(6)
    session = make_session(1, 11, manifest)
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, manifest.largest_bucket, "all-still")
    peers = [Peer(f"e{number}", 1) for number in range(count)]
    address = sender.offer(session, peers)
    for number, peer in enumerate(peers):
        halves.start(
            half="receiver", kind="distributed", root=str(tmp_path), epoch=1, version=11, engine=peer.engine, tp=1,
            rank_offset=1 + number, address=msgspec.to_builtins(address), at=1, how="stop", buckets=6,
        )  # fmt: skip
    sender.ready(60.0)
    began = time.monotonic()
    with contextlib.suppress(TransferFailed):
        send_all(sender, session, pool, 600.0)
    sender.close()
    assert set(sender.failed) == {peer.engine for peer in peers}
    assert time.monotonic() - began < PROMPT_S
    pool.close()


def test_a_server_that_does_not_return_is_asked_nothing_more_before_it_does(tmp_path: Path) -> None:
    """The next session fails at once, and says why; the one after the return is as any other."""
    places, manifest = Places(tmp_path), make_manifest()
    pool = BucketBuffers("cpu", 2, manifest.largest_bucket, "returns")
    sender, engine = places.sender("distributed"), Engine("still", places.receiver("distributed"))
    load, leave = engine.server.load_broadcast, engine.server.leave_group
    goes_on, left = threading.Event(), list[str]()

    def stands(group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        goes_on.wait(60.0)
        load(group, tensors, deadline_s)

    def note(group: str, deadline_s: float) -> None:
        left.append(group)
        leave(group, deadline_s)

    engine.server.load_broadcast = stands  # type: ignore[method-assign]
    engine.server.leave_group = note  # type: ignore[method-assign]

    def run(epoch: int, *, withdrawn: bool = False) -> object:
        session = make_session(epoch, 10 + epoch, manifest)
        engine.start(session, sender.offer(session, [Peer("still", 1)]), 1)
        with contextlib.suppress(TransferFailed):
            sender.ready(PROMPT_S)
            if withdrawn:
                threading.Timer(0.5, sender.withdraw, ("still", "it is slow")).start()
            send_all(sender, session, pool, PROMPT_S)
        sender.close()
        return engine.join()

    assert isinstance(engine.receiver, StallDetector)
    engine.receiver.require_moving()
    assert isinstance(run(1, withdrawn=True), TransferFailed)
    with pytest.raises(TransferFailed, match="stands still"):
        engine.receiver.require_moving()
    began = time.monotonic()
    assert "stands still" in str(run(2))
    assert "stands still" in sender.failed["still"]
    assert time.monotonic() - began < PROMPT_S
    assert not engine.receiver.touched
    assert not left
    goes_on.set()

    def moves() -> bool:
        with contextlib.suppress(TransferFailed):
            engine.receiver.require_moving()  # type: ignore[attr-defined]
            return True
        return False

    until(moves, "the server to return", PROMPT_S)
    assert isinstance(run(3), Receipt)
    assert left == [f"weightbus-{CHANNEL}-1"]
    assert engine.server.weights == [wanted(manifest, 13)]
    pool.close()


def look(stragglers: Stragglers, done: Sequence[bool], since: float, until: float) -> None:
    """As who waits does: again and again."""
    steps = int((until - since) / 0.5)
    for step in range(1, steps + 1):
        stragglers.look(done, since + (until - since) * step / steps)


def test_an_engine_that_has_not_done_what_the_others_have_done_long_since_stands_still() -> None:
    """Measured by how long the others took: a slow one is given time, also where all of them are slow."""
    quick, slow = (Stragglers("to take a bucket", 0.0, STILL_S) for _ in range(2))
    quick.look([True, False, True], 0.1)
    look(quick, [True, False, True], 0.1, 10.3)
    with pytest.raises(Stalled, match=r"and 10\.4 s later") as stood:
        quick.look([True, False, True], 10.5)
    assert stood.value.members == (1,)
    slow.look([False, True], 20.0)
    look(slow, [False, True], 20.0, 89.0)
    slow.look([True, True], 200.0)


def test_no_engine_stands_still_before_the_others_have_moved() -> None:
    """That nothing moves may be the source's doing: then the deadline decides. And each that moves gives time anew."""
    stragglers = Stragglers("to take a bucket", 0.0, STILL_S)
    look(stragglers, [False, False, False], 0.0, 1000.0)
    stragglers.look([True, False, False], 1000.1)
    look(stragglers, [True, False, False], 1000.1, 4000.0)
    stragglers.look([True, True, False], 4000.1)
    look(stragglers, [True, True, False], 4000.1, 16000.0)
    with pytest.raises(Stalled, match="to take a bucket") as stood:
        look(stragglers, [True, True, False], 16000.0, 16020.0)
    assert stood.value.members == (2,)


def test_a_source_that_was_away_blames_no_engine() -> None:
    """It was stopped, or its machine was: whoever waited for its bytes has not stood still. Then the time goes on."""
    stragglers = Stragglers("to take a bucket", 0.0, STILL_S)
    stragglers.look([True, False], 0.1)
    for at in (60.0, 120.0, 180.0):
        stragglers.look([True, False], at)
    with pytest.raises(Stalled):
        look(stragglers, [True, False], 180.0, 190.0)


def test_an_engine_that_was_only_slow_comes_back_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses one attempt, for all; the next one, after its server has returned, is as any other."""
    monkeypatch.setattr(broadcast_group, "STILL_S", 0.5)
    places, manifest = Places(tmp_path), make_manifest(3)
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, manifest.largest_bucket, "slow")
    swaps = [0.0, 5.0, 0.0]
    slow = Engine("slow", places.receiver("distributed"), on_load=lambda _: time.sleep(swaps.pop(0) if swaps else 0.0))
    quick = Engine("quick", places.receiver("distributed"))

    def run(epoch: int) -> None:
        session = make_session(epoch, 10 + epoch, manifest)
        address = sender.offer(session, [Peer("slow", 1), Peer("quick", 1)])
        slow.start(session, address, 1)
        quick.start(session, address, 2)
        with contextlib.suppress(TransferFailed):
            sender.ready(PROMPT_S)
            send_all(sender, session, pool, PROMPT_S)
        sender.close()

    run(1)
    assert "stands still" in sender.failed["slow"]
    assert isinstance(slow.join(), TransferFailed)
    quick.join()  # which may have everything already
    assert isinstance(slow.receiver, StallDetector)
    receiver = slow.receiver

    def moves() -> bool:
        with contextlib.suppress(TransferFailed):
            receiver.require_moving()
            return True
        return False

    until(moves, "the server to return", PROMPT_S)
    run(2)
    assert sender.failed == {}
    assert [isinstance(engine.join(), Receipt) for engine in (slow, quick)] == [True, True]
    assert slow.server.weights == quick.server.weights == [wanted(manifest, 12)]
    for engine in (slow, quick):
        engine.receiver.shutdown()
    pool.close()


def wait(behind: Behind, at: tuple[int, ...], begin: float, seconds: float) -> None:
    """Every tenth of a second, as senders do."""
    for tick in range(1 + round(10 * seconds)):
        behind.look(at, begin + tick / 10)


def test_an_engine_that_keeps_the_others_from_a_bucket_is_named() -> None:
    """An engine that has come no further for long, however far the source believes to be."""
    behind = Behind(100.0)
    wait(behind, (3, 4, 4), 100.0, STILL_S - 1)
    with pytest.raises(Stalled, match="come to bucket 4") as stood:
        wait(behind, (3, 4, 4), 100.0 + STILL_S - 1, 3.0)
    assert stood.value.members == (0,)


@pytest.mark.parametrize("at", [(2, 2), (-1, -1)])
def test_no_engine_is_behind_where_all_wait_for_the_same(at: tuple[int, int]) -> None:
    """For the source, which assembles; or for nothing yet."""
    wait(Behind(0.0), at, 0.0, 10 * STILL_S)


def test_slow_ones_have_three_times_as_long_as_the_longest_step() -> None:
    """A first load compiles kernels, of each engine at another time."""
    behind = Behind(0.0)
    wait(behind, (1, 0), 0.0, STILL_S - 1)
    wait(behind, (1, 1), STILL_S - 1, 0.1)  # a step of nine seconds
    wait(behind, (2, 1), STILL_S, 3 * STILL_S)
    with pytest.raises(Stalled) as stood:
        wait(behind, (2, 1), 4 * STILL_S, STILL_S)
    assert stood.value.members == (1,)


def test_a_source_that_was_away_blames_no_engine_for_it() -> None:
    """While it did not look it gave nobody anything."""
    behind = Behind(0.0)
    behind.look((1, 0), 0.1)
    behind.look((1, 0), 1000.0)
    wait(behind, (1, 0), 1000.0, STILL_S - 2)
