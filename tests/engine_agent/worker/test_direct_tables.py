"""Direct rounds whose digest table follows: copied meanwhile, believed only once it has come and says the same."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightbus.dataplane.errors import DeadlineExceeded, DigestMismatch, ManifestError, PeerLost, TransferFailed
from weightbus.dataplane.processes import connections as lines
from weightbus.dataplane.processes.connections import Deadline, Frames
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Shards
from weightbus.dataplane.transports import plan_exchange as direct_wire, sessions
from weightbus.dataplane.transports.direct.sender import DirectSender
from weightbus.dataplane.transports.interface import (
    Address,
    ExportedWeights,
    Layout,
    Peer,
    Receipt,
    Tabled,
    Tabling,
    TransferSession,
)
from weightbus.engine_agent.worker import loader as worker_loader

from ...kit.ends import Ends
from ...kit.toy_direct import WAIT_S, Server, ToyShard, World, holds
from ...kit.waiting import until
from .test_direct_failures import PROMPT_S, kill


def framed(message: bytes) -> bytes:
    """As it travels."""
    return len(message).to_bytes(8, "little") + message


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path / "r", 2, monkeypatch)
    yield made
    made.close()


def begun(session: TransferSession) -> TransferSession:
    """The same session before its table is known."""
    return msgspec.structs.replace(session, table=None)


class Round:
    """One that was begun without its table: the trainer's half in a thread, the engine's in another."""

    def __init__(self, world: World, deadline_s: float = WAIT_S) -> None:
        world.epoch += 1
        self.world = world
        self.whole = world.trainer.session(world.epoch)
        world.trainer.sender.offer(begun(self.whole), [Peer("e", world.server.tp)])
        self._deadline_s = deadline_s
        self._serving = threading.Thread(target=self._serve)

    def start(self) -> Future[Receipt]:
        """Have the engine come."""
        self._serving.start()
        sender = self.world.trainer.sender
        return self.world.receive(begun(self.whole), "e", sender.address, self._deadline_s)

    def table(self, **changes: Any) -> Tabled:
        """What the trainer has found, or something else."""
        return Tabled(msgspec.structs.replace(self.whole.known, **changes), b"signed")

    def _serve(self) -> None:
        try:
            self.world.trainer.sender.ready(WAIT_S)
            self.world.trainer.sender.finish(WAIT_S)
        except TransferFailed:
            return  # nobody is left

    def end(self) -> None:
        self._serving.join(WAIT_S)
        assert not self._serving.is_alive()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once both workers have copied: until then one of them may still be opening what it reads."""
    found, lacking = threading.Event(), iter([True, False])
    obey = worker_loader._obey

    def watched(state: Any, message: Any, called_off: Any) -> Any:
        answer = obey(state, message, called_off)
        if message.kind == "Replay" and not next(lacking, False):
            found.set()
        return answer

    monkeypatch.setattr(worker_loader, "_obey", watched)
    return found


@pytest.mark.parametrize("when", ["before anybody came", "when all was copied"])
def test_a_table_that_follows_is_what_is_proven(world: World, copied: threading.Event, when: str) -> None:
    """In every round, whenever it comes, with the seal that came with it; the workers copy without it."""
    for seed in (1, 2):
        world.trainer.step(seed)
        copied.clear()
        under_way = Round(world)
        if when == "before anybody came":
            world.trainer.sender.tabled(under_way.table())
        taken = under_way.start()
        if when == "when all was copied":
            assert copied.wait(WAIT_S)
            assert not taken.done()
            world.trainer.sender.tabled(under_way.table())

        assert taken.result(WAIT_S).tabled == under_way.table()
        assert holds(world.server, world.trainer.values)
        under_way.end()
    assert world.trainer.sender.failed == {}
    assert world.receiver.seconds["table"] > 0
    assert isinstance(world.trainer.sender, Tabling)


def test_a_table_wakes_the_sender(world: World, copied: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """From whatever thread: it is not found out at the next look."""
    monkeypatch.setattr("weightbus.dataplane.transports.sessions._LOOK_S", WAIT_S)
    under_way = Round(world)
    taken = under_way.start()
    assert copied.wait(WAIT_S)
    began = time.monotonic()

    world.trainer.sender.tabled(under_way.table())

    assert taken.result(WAIT_S).checked
    assert time.monotonic() - began < PROMPT_S
    under_way.end()


def test_a_session_with_its_table_is_as_ever(world: World) -> None:
    """Nothing more is said, and another table is refused."""
    receipt = world.round()

    assert receipt.tabled is None
    assert "table" not in world.receiver.seconds
    with pytest.raises(TransferFailed, match="with its table"):
        world.trainer.sender.tabled(Tabled(world.trainer.session(1).known))


def test_a_session_has_one_table(world: World) -> None:
    """Another table is refused, before anything is on offer as well, and ignored after the session."""
    table = world.trainer.session(1).known
    with pytest.raises(TransferFailed, match="nothing was offered"):
        world.trainer.sender.tabled(Tabled(table))
    under_way = Round(world)
    world.trainer.sender.tabled(under_way.table())
    with pytest.raises(TransferFailed, match="given before"):
        world.trainer.sender.tabled(under_way.table())
    assert under_way.start().result(WAIT_S).checked
    under_way.end()
    late = Round(world)
    world.trainer.sender.close()
    world.trainer.sender.tabled(late.table())


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"manifest": "f" * 64}, ManifestError, "is for manifest ffff"),
        ({"version": 77}, TransferFailed, "of version 77"),
        ({"tensors": b""}, ManifestError, "holds 0 bytes"),
        ({}, DigestMismatch, "its digest table says 0101"),
    ],
    ids=["manifest", "version", "short", "digest"],
)
def test_a_table_of_something_else_proves_nothing(
    world: World, copied: threading.Event, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    """The engine may hold the version, and is not believed; the trainer hears why, and the next round is taken."""
    under_way = Round(world)
    taken = under_way.start()
    assert copied.wait(WAIT_S)
    table = under_way.whole.known
    if not changes:
        changes = {"tensors": b"\1" * 16 + table.tensors[16:]}

    world.trainer.sender.tabled(under_way.table(**changes))

    with pytest.raises(error, match=says):
        taken.result(WAIT_S)
    under_way.end()
    assert world.receiver.touched
    assert error.__name__ in world.trainer.sender.failed["e"]
    world.trainer.step(3)
    world.round()
    assert holds(world.server, world.trainer.values)


def test_a_table_that_is_too_large_is_not_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal of megabytes is none; nor is it taken from somebody who says it all the same."""
    under_way = Round(world)
    large = Tabled(under_way.whole.known, b"x" * (direct_wire.MOST_SEAL_BYTES + 1))
    with pytest.raises(TransferFailed, match="too large"):
        world.trainer.sender.tabled(large)
    taken = under_way.start()
    with monkeypatch.context() as careless:
        careless.setattr(direct_wire, "MOST_SEAL_BYTES", len(large.seal))
        world.trainer.sender.tabled(large)
    with pytest.raises(PeerLost, match="larger than any"):
        taken.result(WAIT_S)
    under_way.end()


class Crowd:
    """A trainer of a table that no socket takes at once, and engines that do as a test has them do."""

    TENSORS = 40_000

    def __init__(self, folder: Path, *engines: str, whole: bool = False) -> None:
        """With `whole` the session has its table from the beginning."""
        manifest = Manifest.of("toy", [TensorSpec(f"t{at}", "bfloat16", (1,)) for at in range(self.TENSORS)])
        pieces = Shards.of(manifest.tensors, [], 0)
        self.tabled = Tabled(DigestTable(manifest.digest(), 1, "mix64x2", bytes(16 * self.TENSORS)), b"signed")
        exposed = ExportedWeights(pieces, (), ())
        vars(exposed).update(given=Layout(shards=bytes(1 << 20), exports=()))
        self.sender = DirectSender(folder / "r", "c", lambda: exposed)
        peers = [Peer(engine, 1) for engine in engines]
        session = TransferSession("c", 1, 1, manifest, self.tabled.table if whole else None)
        address = self.address = self.sender.offer(session, peers).address
        self._serving = threading.Thread(target=self._serve)
        self._serving.start()
        self.engines = {engine: self._connect(engine, address) for engine in engines}

    def say(self, engine: str, message: direct_wire.ToSender) -> None:
        direct_wire.RECEIVER.say(self.engines[engine], message, Deadline(WAIT_S))

    def hear(self, engine: str) -> direct_wire.ToReceiver:
        return direct_wire.RECEIVER.hear(self.engines[engine], Deadline(WAIT_S), "the sender")

    def end(self) -> dict[str, str]:
        """Engines that did not take the version, once the sender knows of all."""
        self._serving.join(WAIT_S)
        assert not self._serving.is_alive()
        for frames in self.engines.values():
            frames.close()
        self.sender.close()
        return self.sender.failed

    def _serve(self) -> None:
        self.sender.ready(WAIT_S)
        self.sender.finish(WAIT_S)

    def _connect(self, engine: str, address: str) -> Frames:
        frames = Frames.connect(address, Deadline(WAIT_S))
        direct_wire.RECEIVER.say(frames, direct_wire.Hello(channel="c", epoch=1, engine=engine), Deadline(WAIT_S))
        assert isinstance(direct_wire.RECEIVER.hear(frames, Deadline(WAIT_S), "welcome"), direct_wire.Welcome)
        return frames


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_receiver_that_does_not_read_a_table_keeps_no_receiver_from_it(tmp_path: Path, asked: str) -> None:
    """Nor from saying that it has finished. Whoever reads at last has all of it."""
    crowd = Crowd(tmp_path, "slow", "fast")
    if asked == "after":
        crowd.sender.tabled(crowd.tabled)
    for engine in crowd.engines:
        crowd.say(engine, direct_wire.GiveTable())
    if asked == "before":
        crowd.sender.tabled(crowd.tabled)
    began = time.monotonic()

    table = crowd.hear("fast")
    crowd.say("fast", direct_wire.Finished())
    until(lambda: crowd.sender._peers["fast"].finished)

    assert time.monotonic() - began < 5.0
    assert isinstance(table, direct_wire.ExpectedTable)
    assert table == crowd.hear("slow")
    crowd.say("slow", direct_wire.Finished())
    assert crowd.end() == {}


@pytest.mark.parametrize("how", ["reads nothing", "goes away"])
def test_a_receiver_that_reads_no_table_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Within the time for a message, and alone."""
    monkeypatch.setattr(lines, "STALL_S", 0.5)
    crowd = Crowd(tmp_path, "slow", "fast")
    crowd.sender.tabled(crowd.tabled)
    for engine in crowd.engines:
        crowd.say(engine, direct_wire.GiveTable())
    crowd.hear("fast")
    if how == "goes away":
        crowd.engines["slow"].close()
    crowd.say("fast", direct_wire.Finished())

    failed = crowd.end()

    assert list(failed) == ["slow"]
    assert ("has read nothing for 0.5 s" in failed["slow"]) is (how == "reads nothing")


@pytest.mark.parametrize("how", ["half a message", "half a length", "no message", "half a greeting", "a stranger"])
def test_a_receiver_that_stands_still_while_it_speaks_holds_no_receiver(tmp_path: Path, how: str) -> None:
    """Stopped in the middle of a recording of megabytes, say, or before it has said who it is."""
    crowd = Crowd(tmp_path, "slow", "fast")
    message = framed(b"x" * 5_000_000)
    if how.startswith("half a") and how != "half a greeting":
        silent = crowd.engines["slow"]
        silent._socket.sendall(message[: 4 if how == "half a length" else 1000])
    else:
        silent = Frames.connect(crowd.address, Deadline(WAIT_S))
        silent._socket.sendall({"no message": b"", "half a greeting": message[:1000]}.get(how, framed(b"nonsense")))
    crowd.say("fast", direct_wire.GiveTable())
    crowd.sender.tabled(crowd.tabled)
    began = time.monotonic()

    assert isinstance(crowd.hear("fast"), direct_wire.ExpectedTable)
    crowd.say("fast", direct_wire.Finished())
    until(lambda: crowd.sender._peers["fast"].finished)

    assert time.monotonic() - began < lines.STALL_S / 2
    crowd.engines["slow"].close()
    assert list(crowd.end()) == ["slow"]
    silent.close()


@pytest.mark.parametrize("who", ["a peer", "a guest"])
def test_a_receiver_that_stands_still_while_it_speaks_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Within the time for a message: a peer has failed then, alone; of somebody unknown nobody speaks."""
    monkeypatch.setattr(lines, "STALL_S", 0.5)
    crowd = Crowd(tmp_path, "slow", "fast")
    silent = crowd.engines["slow"] if who == "a peer" else Frames.connect(crowd.address, Deadline(WAIT_S))
    silent._socket.sendall(framed(b"x" * 1000)[:100])
    until(silent.readable, "the end of it")
    for engine in crowd.engines if who == "a guest" else ["fast"]:
        crowd.say(engine, direct_wire.Finished())
    failed = crowd.end()
    assert list(failed) == ([] if who == "a guest" else ["slow"])
    assert all("stood still for 0.5 s in the middle of what it said" in reason for reason in failed.values())
    silent.close()


def test_a_receiver_that_speaks_slowly_is_heard_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for standing still, not for a message: a loaded host takes long over a large one."""
    monkeypatch.setattr(lines, "STALL_S", 0.5)
    crowd = Crowd(tmp_path, "slow")
    message = framed(direct_wire.SENDER.encode(direct_wire.Failed(reason="x" * 100)))  # said by either side
    for at in range(0, len(message), 10):
        crowd.engines["slow"]._socket.sendall(message[at : at + 10])
        time.sleep(0.1)
    assert crowd.end() == {"slow": "x" * 100}


def test_a_receiver_that_reads_slowly_is_told_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it reads anything."""
    monkeypatch.setattr(lines, "STALL_S", 0.5)
    crowd = Crowd(tmp_path, "slow")
    crowd.sender.tabled(crowd.tabled)
    crowd.say("slow", direct_wire.GiveTable())
    came, pipe = bytearray(), crowd.engines["slow"]._socket
    pipe.settimeout(WAIT_S)
    while len(came) < 16 * Crowd.TENSORS:
        block = pipe.recv(1 << 16)
        assert block, "it was let go of"
        came += block
        time.sleep(0.15)
    crowd.say("slow", direct_wire.Finished())
    assert crowd.end() == {}


def test_a_receiver_that_does_not_read_its_layout_holds_no_receiver(tmp_path: Path) -> None:
    """It is larger than any socket takes at once."""
    crowd = Crowd(tmp_path, "slow", "fast")
    crowd.say("slow", direct_wire.GiveLayout())
    until(lambda: crowd.sender._peers["slow"].unsent, "the layout to be too much")
    began = time.monotonic()
    crowd.say("fast", direct_wire.GiveLayout())
    assert isinstance(crowd.hear("fast"), direct_wire.Layout)
    assert time.monotonic() - began < lines.STALL_S / 2
    assert isinstance(crowd.hear("slow"), direct_wire.Layout)
    for engine in crowd.engines:
        crowd.say(engine, direct_wire.Finished())
    assert crowd.end() == {}


def test_a_receiver_that_asks_and_does_not_read_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before what it is to be told fills the trainer's memory; a layout is there once for all who ask."""
    tell, told = lines.ConnectionPool.send, list[bytes]()
    monkeypatch.setattr(
        lines.ConnectionPool, "send", lambda of, line, message: (told.append(message), tell(of, line, message))
    )
    crowd = Crowd(tmp_path, "greedy", "fast")
    with contextlib.suppress(PeerLost):
        for _ in range(1000):
            crowd.say("greedy", direct_wire.GiveLayout())
    crowd.say("fast", direct_wire.Finished())
    assert crowd.end() == {"greedy": "it goes on to ask, and does not read what it is told"}
    assert len({id(message) for message in told if len(message) >= 1 << 20}) == 1


def test_nothing_is_said_in_the_middle_of_something_else(tmp_path: Path) -> None:
    """A receiver that is let go of while a table is on its way hears the end of the connection, and is not told why."""
    crowd = Crowd(tmp_path, "slow", "idle")
    crowd.sender.tabled(crowd.tabled)
    crowd.say("slow", direct_wire.GiveTable())
    until(lambda: crowd.sender._peers["slow"].unsent, "the table to be too much")
    for engine in crowd.engines:
        crowd.sender.withdraw(engine, f"no {engine}")
    assert crowd.hear("idle") == direct_wire.Failed(reason="no idle")
    came, pipe = bytearray(), crowd.engines["slow"]._socket
    pipe.settimeout(WAIT_S)
    while block := pipe.recv(1 << 20):
        came += block
    table = framed(
        direct_wire.SENDER.encode(direct_wire.ExpectedTable(table=crowd.tabled.table.encode(), seal=b"signed"))
    )
    assert 0 < len(came) < len(table)
    assert table.startswith(came)
    assert crowd.end() == {"slow": "no slow", "idle": "no idle"}


def test_a_table_is_asked_for_only_where_it_follows(tmp_path: Path) -> None:
    """A receiver that asks for one in a session that has its table would wait for it in vain."""
    crowd = Crowd(tmp_path, "e", whole=True)
    crowd.say("e", direct_wire.GiveTable())
    assert crowd.hear("e") == direct_wire.Failed(reason="it said GiveTable out of turn")
    assert crowd.end() == {"e": "it said GiveTable out of turn"}


def test_a_receiver_that_asks_once_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the table comes at the moment in which it asks: both wake the sender."""
    pump, paused, go_on = DirectSender._pump, threading.Event(), threading.Event()

    def gated(self: DirectSender, timeout_s: float) -> None:
        if paused.is_set():
            go_on.wait(WAIT_S)
        pump(self, timeout_s)

    monkeypatch.setattr(DirectSender, "_pump", gated)
    monkeypatch.setattr(Crowd, "TENSORS", 10)
    crowd = Crowd(tmp_path, "e")
    paused.set()
    time.sleep(2 * sessions._LOOK_S)  # until it waits there; a look that is still under way may see the first of both
    crowd.say("e", direct_wire.GiveTable())
    crowd.sender.tabled(crowd.tabled)
    go_on.set()
    assert isinstance(crowd.hear("e"), direct_wire.ExpectedTable)
    assert not crowd.engines["e"].readable(0.5)
    crowd.say("e", direct_wire.Finished())
    assert crowd.end() == {}


def test_an_offer_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    """A trainer makes thousands of them; who came, and who said nothing, is let go of as well."""

    def once() -> None:
        crowd = Crowd(tmp_path, "e")
        silent = Frames.connect(crowd.address, Deadline(WAIT_S))
        lines = crowd.sender._pool
        assert lines is not None
        until(lambda: not all(line.name for line in tuple(lines._connections)))
        crowd.say("e", direct_wire.Finished())
        assert crowd.end() == {}
        silent.close()

    once()
    gc.collect()
    before = descriptors()
    for _ in range(3):
        once()
    gc.collect()
    assert descriptors() <= before


def descriptors() -> int:
    """That this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_sender_that_is_closed_while_it_waits_says_so(tmp_path: Path) -> None:
    """From another thread, at any moment: whoever waits has a transfer that failed, and no error of ours."""
    for _ in range(20):
        crowd = Crowd(tmp_path, "e")
        crowd.say("e", direct_wire.Finished())
        crowd._serving.join(PROMPT_S)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(pump, crowd.sender)
            for _ in range(5):
                Frames.connect(crowd.address, Deadline(PROMPT_S)).close()
            crowd.sender.close()
            assert isinstance(waiting.exception(PROMPT_S), TransferFailed)
        assert crowd.end() == {}


def pump(sender: DirectSender) -> None:
    """Until that raises."""
    while True:
        sender._pump(0.001)


@pytest.mark.parametrize("how", ["withdrawn", "closed", "never"])
def test_a_table_that_does_not_come(world: World, copied: threading.Event, how: str) -> None:
    """`Withdraw` ends the wait, and so does the deadline: the engine is one that was written to, and failed."""
    under_way = Round(world, 3.0 if how == "never" else WAIT_S)
    taken = under_way.start()
    assert copied.wait(WAIT_S)
    began = time.monotonic()
    if how == "withdrawn":
        world.trainer.sender.withdraw("e", "nobody wants it")
    elif how == "closed":  # as the end of the trainer's process would
        peer = world.trainer.sender._peers["e"]
        assert peer.frames is not None
        peer.frames._socket.shutdown(socket.SHUT_RDWR)

    with pytest.raises(DeadlineExceeded if how == "never" else PeerLost):
        taken.result(WAIT_S)
    assert time.monotonic() - began < PROMPT_S
    assert world.receiver.touched
    under_way.end()


def test_a_trainer_that_dies_before_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: threading.Event
) -> None:
    """Between the bytes and their digests: noticed at once, nothing is believed, the engine was written to."""
    ends = Ends("direct_ends.py")
    world = World(tmp_path / "r", 2, monkeypatch)
    try:
        pid = ends.start(half="trainer", root=str(tmp_path / "r"), epoch=1, seed=1, tp=2, follows=True)
        address = Address(ends.answer()["address"])
        taken = world.receive(begun(world.trainer.session(1)), "e", address)
        assert copied.wait(WAIT_S)
        began = time.monotonic()
        kill(pid)

        with pytest.raises(PeerLost):
            taken.result(WAIT_S)
        assert time.monotonic() - began < PROMPT_S
        assert world.receiver.touched
    finally:
        world.close()
        ends.close()


def test_draft_models_are_proven_by_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for once, and heard before the next model is planned."""
    world = World(tmp_path / "r", 1, monkeypatch, drafts=(ToyShard,))
    try:
        for seed in (1, 2):
            world.trainer.step(seed)
            under_way = Round(world)
            taken = under_way.start()
            world.trainer.sender.tabled(under_way.table())
            assert taken.result(WAIT_S).tabled == under_way.table()
            under_way.end()
            assert holds(world.server, world.trainer.values)
    finally:
        world.close()


def test_the_server_is_let_go_before_the_table_comes(world: World) -> None:
    """It stands still until a commit anyhow: its workers do not wait for the trainer."""
    returned = threading.Event()
    load = Server.load_direct

    def watched(path: str, deadline_s: float) -> None:
        load(world.server, path, deadline_s)
        returned.set()

    world.server.load_direct = watched  # type: ignore[method-assign]
    under_way = Round(world)
    taken = under_way.start()

    assert returned.wait(WAIT_S)
    assert not taken.done()
    world.trainer.sender.tabled(under_way.table())
    assert taken.result(WAIT_S).checked
    world.receiver.returned(WAIT_S)
    under_way.end()
