"""What every transport promises, whatever moves the bytes.

transports/test_registry.py runs it over `local`, `disk` and `distributed`, in four ways, and test_toy_transport.py over
the tests' own. `direct` and `sends`, whose workers read a trainer's memory along a plan, have tests in their folders.

A transport that is not built in is given by `TransportContract.transport`; a test module needs a fixture `halves`:

    class TestPigeon(TransportContract):
        kind = "pigeon"
        transport = "pigeon.transport:TRANSPORT"

    @pytest.fixture(scope="module")
    def halves() -> Iterator[Halves]:
        yield from Halves.serve()
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from weightbus.dataplane.errors import (
    DataplaneError,
    DigestMismatch,
    StaleSession,
    TransferFailed,
)
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.transports.interface import (
    Address,
    LoadedBy,
    Peer,
    Receipt,
    Receiver,
    SharedBucket,
    TransferSession,
)

from ..kit.waiting import readable
from .loopback import CHANNEL, LoopbackServer, Places, make_manifest, make_session, send_all, wanted

BUCKETS = 3
PATIENCE_S = 60.0
"""For what should take no time: machines that run tests are busy."""
JOIN_S = 4.0
"""Wait for engines to come, in seconds: a test with an absent engine lasts as long. Others come sooner, also on a busy
machine."""
PROMPT_S = 30.0
"""Well below `PATIENCE_S`: a step that took longer waited for a deadline."""


class Engine:
    """A receiver with its server, in a thread of the test."""

    def __init__(
        self, name: str, receiver: Receiver, tp: int = 1, *, server: LoopbackServer | None = None, **options: Any
    ) -> None:
        self.name = name
        self.receiver = receiver
        self.server = server or LoopbackServer(tp, **options)
        self.result: Receipt | BaseException | None = None
        self.seconds = 0.0
        self._thread: threading.Thread | None = None

    def start(
        self, session: TransferSession, address: Address, rank_offset: int, deadline_s: float = PATIENCE_S
    ) -> None:
        def run() -> None:
            began = time.monotonic()
            try:
                self.result = self.receiver.receive(session, address, self.name, rank_offset, self.server, deadline_s)
            except DataplaneError as error:
                self.result = error
            self.seconds = time.monotonic() - began

        self.result = None
        self._thread = threading.Thread(target=run, name=self.name)
        self._thread.start()

    def join(self) -> Receipt | BaseException | None:
        assert self._thread is not None
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.name} hangs"
        return self.result


class Halves:
    """Halves of transfers in processes of their own, forked by loopback.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dataplane.loopback"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._speaker = self._process.pid
        assert self.answer() == {"up": True}

    @classmethod
    def serve(cls) -> Iterator[Halves]:
        """The body of a fixture. Best one for a module: the process imports torch once."""
        halves = cls()
        yield halves
        halves.close()

    def start(self, **job: Any) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._speaker = 0
        assert self.answer() == {"began": True}
        return self._speaker

    def answer(self, deadline_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next answer of the newest half; what an earlier one says late is passed over."""
        assert self._process.stdout is not None
        while True:
            # bufsize=1 and one line per answer: readline after this never leaves a whole line behind in the buffer
            assert readable(self._process.stdout.fileno(), deadline_s), "no answer from the other process"
            answer = dict(json.loads(self._process.stdout.readline()))
            speaker = answer.pop("from")
            if not self._speaker and answer == {"began": True}:
                self._speaker = speaker
            if speaker == self._speaker:
                return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class TransportContract:
    """Subclasses say `kind`, and whether losing one engine loses all."""

    kind: str
    transport = ""
    """``module:name`` of a `Transport` that is not built in, as an entry point has it. `Halves` import it, too."""
    groups = 0
    """Of a collective: how many a server is in."""
    collective = False
    checked = True

    @pytest.fixture
    def places(self, tmp_path: Path) -> Places:
        return Places(tmp_path, transport=self.transport)

    @property
    def whole(self) -> bool:
        """Whether a server loads a version in one call, from files, and not bucket by bucket."""
        return Places(Path(), transport=self.transport).transport(self.kind).loaded_by is LoadedBy.FILES

    def job(self, places: Places) -> dict[str, str]:
        """The part of a job of `Halves` that names the transport."""
        return {"kind": self.kind, "transport": self.transport, "root": str(places.root)}

    @pytest.fixture
    def pool(self) -> Iterator[BucketBuffers]:
        pool = BucketBuffers("cpu", 2, make_manifest(BUCKETS).largest_bucket, CHANNEL)
        yield pool
        pool.close()

    @pytest.fixture
    def make_engine(self, places: Places) -> Iterator[Callable[..., Engine]]:
        made: list[Engine] = []

        def make(name: str, tp: int = 1, **options: Any) -> Engine:
            made.append(Engine(name, places.receiver(self.kind), server=places.server(self.kind, tp, **options)))
            return made[-1]

        yield make
        for engine in made:
            engine.receiver.shutdown()
            engine.receiver.shutdown()

    @pytest.mark.parametrize("tps", [(1,), (2,), (1, 2, 1)], ids=str)
    def test_every_byte_arrives_round_after_round(
        self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine], tps: tuple[int, ...]
    ) -> None:
        """Every rank of every engine holds every tensor bit for bit, in three rounds over the same memory and group."""
        manifest = make_manifest(BUCKETS)
        sender = places.sender(self.kind)
        engines = [make_engine(f"e{i}", tp) for i, tp in enumerate(tps)]
        peers = [Peer(engine.name, engine.server.tp) for engine in engines]
        for epoch in (1, 2, 5):
            session = make_session(epoch, 10 + epoch, manifest)
            address = sender.offer(session, peers)
            offset = 1
            for engine in engines:
                engine.start(session, address, offset)
                offset += engine.server.tp
            sender.ready(PATIENCE_S)
            send_all(sender, session, pool, PATIENCE_S)
            assert sender.failed == {}
            for engine in engines:
                assert engine.join() == Receipt(manifest.nbytes, BUCKETS, checked=self.checked)
                assert engine.receiver.touched
                assert engine.server.weights == [wanted(manifest, session.version)] * engine.server.tp
            sender.close()
            sender.close()
        assert {engine.server.joins for engine in engines} == {self.groups}

    @pytest.mark.parametrize("told", [4, 6])
    def test_another_epoch_is_refused(self, places: Places, make_engine: Callable[..., Engine], told: int) -> None:
        """A receiver of an older or newer epoch gets nothing, and its server hears nothing (F9)."""
        manifest = make_manifest(BUCKETS)
        sender, engine = places.sender(self.kind), make_engine("e0")
        address = sender.offer(make_session(5, 50, manifest), [Peer("e0", 1)])
        engine.start(make_session(told, 50, manifest), address, 1)
        with ThreadPoolExecutor(1) as waiting:
            ready = waiting.submit(sender.ready, PATIENCE_S)  # for the one that it expects
            assert isinstance(engine.join(), StaleSession)
            sender.withdraw("e0", "it is of another epoch")
            assert isinstance(ready.exception(PATIENCE_S), TransferFailed)
        assert engine.server.loads == engine.server.joins == 0
        assert not engine.receiver.touched
        assert set(sender.failed) == {"e0"}
        sender.close()

    def test_a_peer_that_does_not_come_is_named(
        self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine]
    ) -> None:
        """Absentees cost `join_s`, not the deadline; those who came are served, unless they are a collective."""
        manifest = make_manifest(BUCKETS)
        session = make_session(3, 31, manifest)
        sender, engine = places.sender(self.kind), make_engine("here")
        address = sender.offer(session, [Peer("here", 1), Peer("absent", 1)])
        engine.start(session, address, 1)
        began = time.monotonic()
        if self.collective:
            with pytest.raises(TransferFailed, match="absent"):
                sender.ready(PATIENCE_S, join_s=JOIN_S)
            assert time.monotonic() - began < PROMPT_S
            assert set(sender.failed) == {"here", "absent"}
            assert isinstance(engine.join(), TransferFailed)
        else:
            sender.ready(PATIENCE_S, join_s=JOIN_S)
            assert time.monotonic() - began < PROMPT_S
            assert f"did not come within {JOIN_S} s" in sender.failed["absent"]
            send_all(sender, session, pool, PATIENCE_S)
            assert set(sender.failed) == {"absent"}
            assert engine.join() == Receipt(manifest.nbytes, BUCKETS, checked=self.checked)
            assert engine.server.weights == [wanted(manifest, session.version)]
        sender.close()

    def test_a_peer_that_is_withdrawn_is_not_waited_for(
        self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine]
    ) -> None:
        """The wait for an engine ends when somebody knows that it will not come; a collective spares those who came."""
        manifest = make_manifest(BUCKETS)
        session = make_session(3, 32, manifest)
        sender, engine = places.sender(self.kind), make_engine("here")
        sender.withdraw("absent", "said of an earlier session")
        address = sender.offer(session, [Peer("here", 1), Peer("absent", 1)])
        engine.start(session, address, 1)
        threading.Timer(0.3, sender.withdraw, ("absent", "its agent died")).start()
        began = time.monotonic()
        if self.collective:
            with pytest.raises(TransferFailed, match="its agent died"):
                sender.ready(PATIENCE_S, join_s=PATIENCE_S)
            assert set(sender.failed) == {"here", "absent"}
            assert sender.spared == {"here"}
            assert isinstance(engine.join(), TransferFailed)
            assert not engine.receiver.touched
        else:
            sender.ready(PATIENCE_S, join_s=PATIENCE_S)
            send_all(sender, session, pool, PATIENCE_S)
            assert sender.failed == {"absent": "its agent died"}
            assert sender.spared == frozenset()
            assert isinstance(engine.join(), Receipt)
        assert time.monotonic() - began < PROMPT_S
        sender.close()

    def test_withdrawn_in_the_middle(
        self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine]
    ) -> None:
        """An engine that stands still is dropped as soon as it is withdrawn; with bytes under way nobody is spared."""
        withdrawn = threading.Event()

        def stand_still(index: int) -> None:
            if index == 1 or self.whole:
                sender.withdraw("stuck", "its connection is gone")
                withdrawn.wait(PATIENCE_S)
                raise TransferFailed("nobody waits any more")

        manifest = make_manifest(BUCKETS)
        session = make_session(2, 33, manifest)
        sender, good = places.sender(self.kind), make_engine("good")
        stuck = make_engine("stuck", on_load=stand_still)
        address = sender.offer(session, [Peer("good", 1), Peer("stuck", 1)])
        good.start(session, address, 1)
        stuck.start(session, address, 2)
        sender.ready(PATIENCE_S)
        began = time.monotonic()
        with contextlib.suppress(TransferFailed):  # a collective has nobody left
            send_all(sender, session, pool, PATIENCE_S)
        assert time.monotonic() - began < PROMPT_S
        assert sender.failed["stuck"] == "its connection is gone"
        assert sender.spared == frozenset()
        sender.close()
        withdrawn.set()
        assert isinstance(stuck.join(), TransferFailed)
        result = good.join()
        if not self.collective:
            assert set(sender.failed) == {"stuck"}
            assert isinstance(result, Receipt)

    def test_withdrawing_one_that_is_served_changes_nothing(
        self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine]
    ) -> None:
        """What becomes of an engine that has confirmed the last bucket, or is no peer, is of no concern."""
        manifest = make_manifest(BUCKETS)
        session = make_session(2, 34, manifest)
        sender, first = places.sender(self.kind), make_engine("first")

        def first_is_through(_: int) -> None:
            first.join()
            sender.withdraw("first", "its agent left")
            sender.withdraw("stranger", "who?")
            until = time.monotonic() + 0.2  # for a sender that waits meanwhile to look at it
            while time.monotonic() < until and not sender.failed:
                time.sleep(0.01)

        def all_is_sent(index: int) -> None:
            if index == BUCKETS and not self.collective and not self.whole:
                first_is_through(index)

        # Otherwise the sender waits for the other engine when it hears of the first one.
        last = make_engine("last", on_load=first_is_through) if self.whole else make_engine("last")
        load = last.server.load_broadcast

        def load_late(group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
            load(group, tensors, deadline_s)
            if last.server.loads == BUCKETS:
                first_is_through(BUCKETS)

        last.server.load_broadcast = load_late  # type: ignore[method-assign]
        load_shared = last.server.load_shared

        def load_shared_late(bucket: SharedBucket, deadline_s: float) -> None:
            load_shared(bucket, deadline_s)
            if self.collective and last.server.loads == BUCKETS:
                first_is_through(BUCKETS)

        last.server.load_shared = load_shared_late  # type: ignore[method-assign]
        address = sender.offer(session, [Peer("first", 1), Peer("last", 1)])
        first.start(session, address, 1)
        last.start(session, address, 2)
        sender.ready(PATIENCE_S)
        send_all(sender, session, pool, PATIENCE_S, before=all_is_sent)
        assert sender.failed == {}
        for engine in (first, last):
            assert isinstance(engine.join(), Receipt)
        sender.close()

    @pytest.mark.parametrize("at", range(BUCKETS))
    def test_receiver_killed(
        self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine], halves: Halves, at: int
    ) -> None:
        """An engine agent killed at any bucket is named at once and costs the others nothing (collective: all fail)."""
        manifest = make_manifest(BUCKETS)
        session = make_session(2, 21, manifest)
        sender, engine = places.sender(self.kind), make_engine("survivor")
        address = sender.offer(session, [Peer("survivor", 1), Peer("victim", 1)])
        engine.start(session, address, 1)
        halves.start(
            half="receiver", **self.job(places), epoch=2, version=21, engine="victim", tp=1,
            rank_offset=2, address=msgspec.to_builtins(address), at=0 if self.whole else at,
        )  # fmt: skip
        sender.ready(PATIENCE_S)
        began = time.monotonic()
        try:
            send_all(sender, session, pool, 5.0 if self.collective else PATIENCE_S)
        except TransferFailed:
            assert self.collective
        assert time.monotonic() - began < PROMPT_S
        sender.close()
        result = engine.join()
        if self.collective:
            assert set(sender.failed) == {"survivor", "victim"}
            assert isinstance(result, TransferFailed | Receipt)  # it may have had everything already
        else:
            assert set(sender.failed) == {"victim"}
            assert result == Receipt(manifest.nbytes, BUCKETS, checked=True)
            assert engine.server.weights == [wanted(manifest, 21)]

    def test_receiver_stopped(
        self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine], halves: Halves
    ) -> None:
        """An engine agent that stands still is dropped at the deadline, and the others are served to the end (F5)."""
        manifest = make_manifest(BUCKETS)
        session = make_session(2, 22, manifest)
        sender, engine = places.sender(self.kind), make_engine("survivor")
        address = sender.offer(session, [Peer("survivor", 1), Peer("victim", 1)])
        engine.start(session, address, 1)
        halves.start(
            half="receiver", **self.job(places), epoch=2, version=22, engine="victim", tp=1,
            rank_offset=2, address=msgspec.to_builtins(address), at=0, how="stop",
        )  # fmt: skip
        sender.ready(PATIENCE_S)
        try:
            send_all(sender, session, pool, 5.0)
        except TransferFailed:
            assert self.collective
        sender.close()
        result = engine.join()
        assert "victim" in sender.failed
        if not self.collective:
            assert set(sender.failed) == {"victim"}
            assert isinstance(result, Receipt)

    @pytest.mark.parametrize("at", range(BUCKETS))
    def test_sender_killed(self, places: Places, make_engine: Callable[..., Engine], halves: Halves, at: int) -> None:
        """A trainer killed at any bucket is noticed long before the deadline; no server is half loaded unnoticed.

        (F2)
        """
        engine = make_engine("e0")
        halves.start(
            half="sender",
            kind=self.kind,
            transport=self.transport,
            root=str(places.root),
            epoch=4,
            version=41,
            peers=[["e0", 1]],
            at=at,
        )
        address = Address(**halves.answer())
        engine.start(make_session(4, 41, make_manifest(BUCKETS)), address, 1)
        result = engine.join()
        assert isinstance(result, TransferFailed), result
        assert engine.seconds < PROMPT_S
        assert engine.receiver.touched == (engine.server.loads > 0)
        if self.whole:
            assert engine.server.loads == 0

    def test_sender_stopped(self, places: Places, make_engine: Callable[..., Engine], halves: Halves) -> None:
        """A trainer that stands still costs a receiver its deadline and no more."""
        engine = make_engine("e0")
        halves.start(
            half="sender", **self.job(places), epoch=4, version=41, peers=[["e0", 1]], at=1,
            how="stop",
        )  # fmt: skip
        address = Address(**halves.answer())
        engine.start(make_session(4, 41, make_manifest(BUCKETS)), address, 1, deadline_s=2.0)
        assert isinstance(engine.join(), TransferFailed)
        assert engine.seconds < PROMPT_S

    def test_server_refuses(self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine]) -> None:
        """A load that the server refuses fails that receiver and tells the sender the reason, at once."""

        def refuse(index: int) -> None:
            if index == 1 or self.whole:
                raise TransferFailed("the server said 400")

        manifest = make_manifest(BUCKETS)
        session = make_session(2, 23, manifest)
        sender, good, bad = places.sender(self.kind), make_engine("good"), make_engine("bad", on_load=refuse)
        address = sender.offer(session, [Peer("good", 1), Peer("bad", 1)])
        good.start(session, address, 1)
        bad.start(session, address, 2)
        sender.ready(PATIENCE_S)
        try:
            send_all(sender, session, pool, PATIENCE_S)
        except TransferFailed:
            assert self.collective
        assert "the server said 400" in sender.failed["bad"]
        assert isinstance(bad.join(), TransferFailed)
        assert bad.receiver.touched
        assert bad.seconds < PROMPT_S
        sender.close()
        result = good.join()
        if not self.collective:
            assert set(sender.failed) == {"bad"}
            assert isinstance(result, Receipt)

    def test_recovers_in_the_next_epoch(
        self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine]
    ) -> None:
        """After a failed session the same halves serve everybody under a new epoch (F5)."""
        refusals = iter([True])

        def refuse(_: int) -> None:
            if next(refusals, False):
                raise TransferFailed("not now")

        manifest = make_manifest(BUCKETS)
        sender, engines = places.sender(self.kind), [make_engine("e0"), make_engine("e1", on_load=refuse)]
        for epoch in (1, 2):
            session = make_session(epoch, 60 + epoch, manifest)
            address = sender.offer(session, [Peer("e0", 1), Peer("e1", 1)])
            for offset, engine in enumerate(engines):
                engine.start(session, address, 1 + offset)
            try:
                sender.ready(PATIENCE_S)  # a collective may hear of the refusal before all have joined
                send_all(sender, session, pool, PATIENCE_S)
            except TransferFailed:
                assert epoch == 1
            sender.close()
            results = [engine.join() for engine in engines]
        assert sender.failed == {}
        assert all(isinstance(result, Receipt) for result in results)
        assert all(engine.server.weights == [wanted(manifest, 62)] for engine in engines)

    def test_corrupted_bucket(self, places: Places, pool: BucketBuffers, make_engine: Callable[..., Engine]) -> None:
        """A bit that flipped on the way is noticed before the server hears of the bucket; the tensor is named (F16)."""
        if not self.checked:
            pytest.skip("this transport's bytes go straight into the server, which is verified afterwards")

        def spoil(index: int, memory: torch.Tensor) -> None:
            if index == 1:
                memory[manifest.offsets_of(1)[4] + 1] ^= 16

        manifest = make_manifest(BUCKETS)
        session = make_session(2, 24, manifest)
        sender, engine = places.sender(self.kind), make_engine("e0")
        engine.start(session, sender.offer(session, [Peer("e0", 1)]), 1)
        sender.ready(PATIENCE_S)
        with contextlib.suppress(TransferFailed):  # with nobody left, `send` says so
            send_all(sender, session, pool, PATIENCE_S, spoil=spoil)
        result = engine.join()
        assert isinstance(result, DigestMismatch)
        assert result.tensor == manifest.tensors_of(1)[4].name
        assert engine.server.loads == (0 if self.whole else 1)
        assert "DigestMismatch" in sender.failed["e0"]
        sender.close()

    def test_calls_out_of_order(self, places: Places, pool: BucketBuffers) -> None:
        """Before `offer` nothing can be sent, and `close` is harmless at any time."""
        sender = places.sender(self.kind)
        sender.close()
        with pytest.raises(TransferFailed, match="offer"):
            sender.ready(0.1)
        with pytest.raises(TransferFailed):
            sender.send(0, pool.buffers[0], 0.1)
        sender.offer(make_session(1, 11, make_manifest()), [Peer("e0", 1)])
        sender.close()
        sender.close()
