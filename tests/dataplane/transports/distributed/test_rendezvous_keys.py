"""The distributed transport's meeting: strangers reach its port, and are not believed."""

from __future__ import annotations

import threading
import time

import pytest
from torch._C._distributed_c10d import TCPStore

from weightbus.dataplane.errors import ForgedMessage, PeerLost, StaleSession, TransferFailed
from weightbus.dataplane.processes.connections import Deadline, new_token
from weightbus.dataplane.processes.process_groups import serve_store
from weightbus.dataplane.transports.distributed.rendezvous_keys import Rendezvous, RendezvousKeys, source_name

from ....kit.waiting import until

EPOCH = 7


def stranger_at(store: TCPStore) -> TCPStore:
    """A stranger that reaches the port, and nothing else."""
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def attend(store: TCPStore, token: str, epoch: int = EPOCH, name: str = "e0") -> RendezvousKeys:
    attendance = RendezvousKeys(f"tcp://127.0.0.1:{store.port}", epoch, name, token)
    attendance.begin()
    return attendance


def test_both_sides_hear_each_other() -> None:
    """What is said under one token arrives as it was said, whatever characters it has."""
    store, token = serve_store("127.0.0.1"), new_token()
    meeting, attendance = Rendezvous(store, EPOCH, token), attend(store, token)
    attendance.say("came", "grüppe", Deadline(10))
    assert meeting.heard("came", "e0") == "grüppe"
    assert meeting.heard("failed", "e0") is None
    meeting.announce("group", "g")
    assert attendance.group(Deadline(10)) == "g"
    attendance.close()


def test_tokens_are_of_one_epoch() -> None:
    """No two sessions share one, so what a former member knows is of no use."""
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) == 32


@pytest.mark.parametrize("step", ["came", "joined", "done", "failed"])
def test_a_stranger_cannot_speak_for_an_engine(step: str) -> None:
    """Plain words, and words under another token, are not the engine's: it is failed, by that name (S15)."""
    for write in (
        lambda store: store.set(f"weightbus/{EPOCH}/{step}/e0", "x"),
        lambda store: store.set(f"weightbus/{EPOCH}/{step}/e0", "0" * 64 + "x"),
        lambda store: Rendezvous(store, EPOCH, new_token()).announce(f"{step}/e0", "x"),
    ):
        store = serve_store("127.0.0.1")
        meeting = Rendezvous(store, EPOCH, new_token())
        write(stranger_at(store))
        if step != "failed":
            assert meeting.heard(step, "e0") is None
        assert "stranger" in str(meeting.heard("failed", "e0"))
        assert meeting.heard("failed", "e1") is None


def test_a_word_cannot_be_moved() -> None:
    """What one engine said is not what another said, nor what it said of another step or in another epoch."""
    store, token = serve_store("127.0.0.1"), new_token()
    meeting = Rendezvous(store, EPOCH, token)
    attendance = attend(store, token)
    attendance.say("came", "", Deadline(10))
    attendance.close()
    said, other = bytes(store.get(f"weightbus/{EPOCH}/came/e0")), stranger_at(store)
    for where in ("came/e1", "done/e0"):
        other.set(f"weightbus/{EPOCH}/{where}", said.decode())
        assert meeting.heard(*where.split("/")) is None
    other.set(f"weightbus/{EPOCH + 1}/came/e0", said.decode())
    assert Rendezvous(store, EPOCH + 1, token).heard("came", "e0") is None


@pytest.mark.parametrize("what", ["group", "formed", "over"])
def test_a_stranger_cannot_speak_for_the_sender(what: str) -> None:
    """An engine joins no group that its sender did not name (S15)."""
    store, token = serve_store("127.0.0.1"), new_token()
    Rendezvous(store, EPOCH, token)
    Rendezvous(stranger_at(store), EPOCH, new_token()).announce(what, "evil")
    attendance = attend(store, token)
    with pytest.raises(ForgedMessage, match="stranger"):
        attendance.group(Deadline(10))
    attendance.close()


@pytest.mark.parametrize("found", ["8", "-1", "x", ""])
def test_another_epoch_is_stale(found: str) -> None:
    """The one bare word in the store can only send an engine away."""
    store, token = serve_store("127.0.0.1"), new_token()
    Rendezvous(store, EPOCH, token)
    stranger_at(store).set("weightbus/epoch", found)
    attendance = attend(store, token)
    with pytest.raises((StaleSession, PeerLost)):
        attendance.group(Deadline(10))
    attendance.close()


def test_another_epoch_that_begins_ends_this_one() -> None:
    """A waiting member finds it, though it was not told that its own epoch is over."""
    store, token = serve_store("127.0.0.1"), new_token()
    meeting, attendance = Rendezvous(store, EPOCH, token), attend(store, token)
    attendance.say("came", "", Deadline(10))
    meeting.clear()
    Rendezvous(store, EPOCH + 1, new_token())
    with pytest.raises(StaleSession, match=f"of epoch {EPOCH + 1}"):
        attendance.group(Deadline(10))
    attendance.close()


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_a_wait_can_be_called_off(when: str) -> None:
    """From another thread, at once; the sender is still told why."""
    store, token = serve_store("127.0.0.1"), new_token()
    meeting, attendance = Rendezvous(store, EPOCH, token), attend(store, token)
    timer = threading.Timer(0.0 if when == "before" else 0.2, attendance.cancel, ("gone on",))
    timer.start()
    if when == "before":
        timer.join()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="gone on"):
        attendance.group(Deadline(60))
    assert time.monotonic() - began < 10
    attendance.close("gone on")
    until(lambda: meeting.heard("failed", "e0") == "gone on")  # `close` waits for no connection that takes its time


def test_an_epoch_leaves_nothing_behind() -> None:
    """Whatever was said by whomever: a store serves thousands of them."""
    store, token = serve_store("127.0.0.1"), new_token()
    Rendezvous(store, EPOCH, token)
    before = store.num_keys()
    meeting = Rendezvous(store, EPOCH, token, ["e0", "silent"], [source_name(1)])
    engine, source = attend(store, token), attend(store, token, name=source_name(1))
    for step in ("came", "joined", "at", "done", "failed"):
        engine.say(step, "x", Deadline(10))
    for step in ("came", "joined", "done", "failed", "sent", "differs", "still"):
        source.say(step, "x", Deadline(10))
    engine.close("failed")
    source.close("failed")
    meeting.announce("group", "g")
    meeting.announce("over", "x")
    assert store.num_keys() > before
    meeting.clear()
    assert store.num_keys() == before


def test_an_address_that_is_none_is_said() -> None:
    """To whoever waits, and before anybody is looked for."""
    attendance = RendezvousKeys("udp://127.0.0.1:1", EPOCH, "e0", new_token())
    attendance.begin()
    with pytest.raises(TransferFailed, match="expected tcp://"):
        attendance.group(Deadline(10))
    attendance.close()
