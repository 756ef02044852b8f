"""The transport contract, over every kind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.control.machine import routing
from weightbus.control.protocol.messages import TransportKind
from weightbus.dataplane.errors import DataplaneError, TransferFailed, Unsupported
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.transports import registry as transports
from weightbus.dataplane.transports.interface import Address, Peer, Receipt, ReceiverContext, SenderContext
from weightbus.dataplane.transports.sends.sender import SendsSender

from ...kit.waiting import has_ipv6
from ..loopback import LoopbackServer, Places, make_manifest, make_session, send_all, wanted
from ..staged_sender import STAGES
from ..transport_contract import PROMPT_S, Engine, Halves, TransportContract


@pytest.fixture(scope="module")
def halves() -> Iterator[Halves]:
    """The process that forks halves of transfers: one for the module, it imports torch once."""
    yield from Halves.serve()


class TestLocal(TransportContract):
    """Shared memory of one host."""

    kind = "local"


class TestDistributed(TransportContract):
    """A gloo group; NCCL shares the code and is proven on GPUs."""

    kind = "distributed"
    collective = True
    groups = 1
    checked = False


class TestStages(TransportContract):
    """The same from three pipeline stages, each with a group of its own."""

    kind = "stages"
    collective = True
    groups = STAGES
    checked = False


class TestHandedOn(TransportContract):
    """Agents take part in the place of their servers, and hand on what they take."""

    kind = "handed-distributed"
    collective = True


class TestStagesHandedOn(TransportContract):
    """The same from three pipeline stages."""

    kind = "handed-stages"
    collective = True


class TestDisk(TransportContract):
    """Checkpoints on a file system."""

    kind = "disk"


def test_unknown_kinds_are_refused() -> None:
    """A wrong name, or a folder that is missing from the settings, is said before anything is opened."""
    with pytest.raises(Unsupported, match="pigeon"):
        transports.by_name("pigeon")
    with pytest.raises(ValueError, match="pigeon"):
        transports.require_known(("local", "pigeon"))
    with pytest.raises(Unsupported, match="there is no transport 'pigeon'; choose one of direct, "):
        transports.by_name(TransportKind("pigeon"))
    with pytest.raises(Unsupported, match="checkpoint_dir"):
        transports.by_name("disk").sender(SenderContext(channel="c"))


def test_routing_and_the_registry_know_the_same_transports() -> None:
    """The coordinator cannot ask the registry, which would bring tensors to it: its own table says the same."""
    assert tuple(each.name for each in transports.BUILT_IN) == routing.PREFERRED == tuple(routing._MERITS)
    assert {each.name for each in transports.BUILT_IN if each.in_place} == routing.IN_PLACE


@pytest.mark.parametrize("keep_s", [0.0, 60.0])
def test_groups_of_sends_stay_as_long_as_they_may(keep_s: float) -> None:
    """They hold memory of the trainer's GPU, which may need it."""
    context = SenderContext(channel="c", describe=lambda: pytest.fail("nothing is offered"), keep_groups_s=keep_s)
    made = transports.by_name("sends").sender(context)
    assert isinstance(made, SendsSender)
    assert made._keep_s == keep_s


def test_a_group_that_does_not_form_holds_no_server(tmp_path: Path) -> None:
    """SGLang waits half an hour for a missing rank, and answers nothing meanwhile: its wait ends with ours.

    Of the first server one worker comes, and waits for the other.
    """
    places, session = Places(tmp_path), make_session(1, 11, make_manifest())
    server, sender = LoopbackServer(), places.sender("distributed")
    address = sender.offer(session, [Peer("good", 2), Peer("bad", 1)])
    ended = threading.Event()
    join = server.join_group

    def patient(where: Address, rank_offset: int, deadline_s: float) -> None:
        del deadline_s
        try:
            join(where, rank_offset, 1800.0)
        finally:
            ended.set()

    server.join_group = patient  # type: ignore[method-assign]
    broken = LoopbackServer()
    broken.join_group = refuse  # type: ignore[method-assign]
    good, bad = (Engine(name, places.receiver("distributed")) for name in ("good", "bad"))
    good.server, bad.server = server, broken
    for first, engine in ((1, good), (3, bad)):
        engine.start(session, address, first)
    with pytest.raises(TransferFailed, match="died while it joined"):
        sender.ready(60.0)
    assert sender.spared == {"good"}
    assert ended.wait(PROMPT_S), "the server still waits for the group"
    assert isinstance(good.join(), TransferFailed)
    bad.join()
    sender.close()


def test_an_engine_that_began_anew_is_in_a_new_group(tmp_path: Path) -> None:
    """Started again between two rounds it is in none: the others leave the old one, and nobody waits in it."""
    places, manifest = Places(tmp_path), make_manifest()
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, manifest.largest_bucket, "anew")
    stays = Engine("stays", places.receiver("distributed"))
    for epoch in (1, 2):
        session = make_session(epoch, 40 + epoch, manifest)
        address = sender.offer(session, [Peer("comes", 1), Peer("stays", 1)])
        comes = Engine("comes", places.receiver("distributed"))
        for rank, engine in enumerate((comes, stays), 1):
            engine.start(session, address, rank)
        sender.ready(PROMPT_S)
        send_all(sender, session, pool, PROMPT_S)
        for engine in (comes, stays):
            assert isinstance(engine.join(), Receipt)
            assert engine.server.weights == [wanted(manifest, session.version)]
        sender.close()
    assert (comes.server.joins, stays.server.joins) == (1, 2)
    pool.close()


def test_a_session_that_is_called_off_is_not_waited_for(tmp_path: Path) -> None:
    """A source that stands still says nothing more: whoever is told by others that it is over leaves at once."""
    places, session = Places(tmp_path), make_session(1, 11, make_manifest())
    sender = places.sender("distributed")
    address = sender.offer(session, [Peer("one", 1), Peer("two", 1)])
    engines = [Engine(name, places.receiver("distributed")) for name in ("one", "two")]
    forming, over = threading.Semaphore(0), threading.Event()
    watched: list[tuple[tuple[str, ...], bool]] = []
    for rank, engine in enumerate(engines, 1):

        def stands(where: Address, rank_offset: int, deadline_s: float, server: LoopbackServer = engine.server) -> None:
            del where, rank_offset
            watched.append(server.watched)
            forming.release()
            over.wait(deadline_s)

        engine.server.join_group = stands  # type: ignore[method-assign]
        engine.start(session, address, rank)
    failures: list[DataplaneError] = []

    def lead() -> None:
        try:
            sender.ready(PROMPT_S)
        except TransferFailed as error:
            failures.append(error)

    leads = threading.Thread(target=lead)
    leads.start()
    assert all(forming.acquire(timeout=PROMPT_S) for _ in engines)
    for engine in engines:
        engine.receiver.close()
        assert "called off" in str(engine.join())
        assert engine.server.watched == ((), False)
    own = {((f"weightbus-{session.channel}-1-at{rank}",), True) for rank in (1, 2)}
    assert set(watched) == own, "who dies now would be waited for"
    over.set()
    leads.join(PROMPT_S)
    assert failures
    sender.close()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_broadcast_group_over_ipv6(tmp_path: Path) -> None:
    """Engines with other numbers of workers join one group at an IPv6 address, and hold what was broadcast."""
    session = make_session(1, 11, make_manifest())
    places = Places(tmp_path, "::1")
    sender, pool = places.sender("distributed"), BucketBuffers("cpu", 2, session.manifest.largest_bucket, "ipv6")
    address = sender.offer(session, [Peer("one", 1), Peer("two", 2)])
    assert address.address.startswith("tcp://[::1]:")
    engines = [Engine("one", places.receiver("distributed")), Engine("two", places.receiver("distributed"), tp=2)]
    for engine, first in zip(engines, (1, 2), strict=True):
        engine.start(session, address, first)
    sender.ready(60.0)
    send_all(sender, session, pool, 60.0)
    for engine in engines:
        assert isinstance(engine.join(), Receipt)
        assert all(weights == wanted(session.manifest, 11) for weights in engine.server.weights)
    assert not sender.failed
    sender.close()
    pool.close()


def refuse(_address: Address, _rank_offset: int, _deadline_s: float) -> None:
    """A server that ends when it is asked to join."""
    raise TransferFailed("died while it joined")


def test_what_was_loaded_is_not_imported_again() -> None:
    """A server stands still when its receiver is made. In a process of its own: this one has all modules."""
    code = """
import sys
from weightbus.dataplane.transports import registry as transports
assert "torch" not in sys.modules, "settings and routing know transports without tensors"
from weightbus.dataplane.transports.interface import ReceiverContext
transports.preload(transports.names())
known = set(sys.modules)
for name in transports.names():
    transports.by_name(name).receiver(ReceiverContext())
assert set(sys.modules) == known, set(sys.modules) - known
assert "weightbus.dataplane.transports.sends.receiver" in known
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_imported_is_missed_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are loaded all the same."""
    monkeypatch.setitem(sys.modules, "weightbus.dataplane.transports.sends.receiver", None)
    transports.preload(("sends", "gone", "local"))
    with pytest.raises(ImportError):
        transports.by_name("sends").receiver(ReceiverContext())
