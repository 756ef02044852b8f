"""The client against real sockets and a scripted coordinator that loses, doubles, forgets and dies."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from weightbus.control.bus import client as client_module
from weightbus.control.bus.client import MAX_KNOWN, PAGES_AHEAD, BoundedSet, BusClient, BusSettings
from weightbus.control.bus.interface import ConnectionRejected
from weightbus.control.bus.session import SessionTiming
from weightbus.control.bus.sockets import RouterBus, ServerKeys, new_keypair, public_of
from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
from weightbus.control.machine.effects import MessageReceived, Peer
from weightbus.control.protocol.errors import (
    BlobCancelled,
    BlobMismatch,
    ClientClosed,
    CoordinatorUnreachable,
    Malformed,
    RequestRefused,
)
from weightbus.control.protocol.messages import (
    MAX_PAGE_BYTES,
    Abort,
    Ack,
    Acquire,
    AgentId,
    Alive,
    BlobPage,
    Bye,
    Channel,
    Digest,
    Epoch,
    GetBlob,
    GetStatus,
    Heartbeat,
    Hello,
    Incarnation,
    Message,
    PutBlob,
    RefusalCode,
    Refused,
    RequestId,
    Role,
    Status,
    ToAgent,
    Topology,
    Version,
    Welcome,
)
from weightbus.control.security.keys import COORDINATOR_KEYS, CurveFiles, write_key_pair

from ..memory_bus import MemoryBus

QUICK = SessionTiming(resend_first_s=0.05, resend_max_s=0.1, silence_s=30.0)
"""An agent that is silent for half a second on a busy machine is not gone: only one test waits for a silence."""
ABORT = Abort(channel=Channel("c"), epoch=Epoch(1), reason="", deadline_s=1.0)
DEADLINE_S = 30.0


class Coordinator:
    """Answers on a thread, as it is told to."""

    def __init__(self, port: int = 0, boot: int = 1, keys: ServerKeys | None = None) -> None:
        self.bus = RouterBus("127.0.0.1", port, keys)
        self.port = self.bus.router_port
        self.boot = boot
        self.silence_s = QUICK.silence_s
        self.seen: list[Message] = []
        self.peers: list[Peer] = []
        self.blobs: dict[str, bytes] = {}
        self.pages: dict[str, dict[int, bytes]] = {}
        self.answer: Callable[[MessageReceived], tuple[ToAgent, bytes | None] | None] = self.usual
        self.copies = 1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def usual(self, item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:  # noqa: PLR0911  # one for each message
        message = item.message
        if isinstance(message, Hello):
            self.peers.append(item.peer)
            return self.welcome(message), None
        if item.peer not in self.peers:
            return Refused(
                request=RequestId("heartbeat"), code=RefusalCode.UNKNOWN_AGENT, reason="say Hello first"
            ), None
        match message:
            case Heartbeat():
                return Alive(seq=message.seq, boot=self.boot), None
            case PutBlob():
                self._put(message, item.blob or b"")
                return Ack(request=message.request), None
            case GetBlob():
                return self._page(message)
            case GetStatus():
                return Status(request=message.request), b"{}"
            case Acquire():
                return Ack(request=message.request), None
            case _:
                return None

    def welcome(self, hello: Hello) -> Welcome:
        return Welcome(
            request=hello.request,
            boot=self.boot,
            epoch=Epoch(0),
            committed=None,
            heartbeat_s=0.05,
            silence_s=self.silence_s,
        )

    def wait_for(self, found: Callable[[], bool]) -> None:
        """Until `found`, by what was seen."""
        end = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while not found():
            assert time.monotonic() < end, f"seen: {self.seen[-5:]}"
            pause.wait(0.01)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(each, kind) for each in self.seen)

    def requests(self, kind: type[Acquire | PutBlob | GetBlob]) -> int:
        """How many were asked; one whose answer took long is asked again, with its key."""
        return len({each.request for each in self.seen if isinstance(each, kind)})

    def die(self) -> None:
        """As by SIGKILL: no farewell."""
        if self._stop.is_set():
            return
        self._stop.set()
        self.bus.wake()
        self._thread.join()
        self.bus.close()

    def _put(self, message: PutBlob, data: bytes) -> None:
        pages = self.pages.setdefault(message.digest, {})
        pages[message.page] = data
        if len(pages) == message.pages:
            self.blobs[message.digest] = b"".join(pages[page] for page in range(message.pages))

    def _page(self, message: GetBlob) -> tuple[ToAgent, bytes | None]:
        blob = self.blobs[message.digest]
        pages = max(1, -(-len(blob) // MAX_PAGE_BYTES))
        data = blob[message.page * MAX_PAGE_BYTES : (message.page + 1) * MAX_PAGE_BYTES]
        return BlobPage(request=message.request, digest=message.digest, page=message.page, pages=pages), data

    def _run(self) -> None:
        while not self._stop.is_set():
            for item in self.bus.poll(1.0):
                if isinstance(item, ConnectionRejected):
                    continue  # a client that closed, or was killed, in the middle of its handshake
                assert isinstance(item, MessageReceived)
                self.seen.append(item.message)
                answer = self.answer(item)
                for _ in range(self.copies if answer else 0):
                    assert answer is not None
                    self.bus.send(item.peer, *answer)


def hello() -> Hello:
    return Hello(
        request=RequestId("filled in"),
        agent=AgentId("friend"),
        role=Role.OBSERVER,
        channel=Channel("c"),
        incarnation=Incarnation("1"),
    )


def client_of(port: int, curve: CurveFiles | None = None) -> BusClient:
    return BusClient(BusSettings(endpoint=f"tcp://127.0.0.1:{port}", curve=curve, timing=QUICK), hello)


@pytest.fixture
def there() -> Iterator[Coordinator]:
    coordinator = Coordinator()
    yield coordinator
    coordinator.die()


@pytest.fixture
def client(there: Coordinator) -> Iterator[BusClient]:
    with client_of(there.port) as each:
        each.start(DEADLINE_S)
        yield each


def acquire(client: BusClient, deadline_s: float = DEADLINE_S) -> ToAgent:
    return client.request(
        Acquire(request=client.new_request(), channel=Channel("c"), version=Version(1)), deadline_s=deadline_s
    )


def test_start_returns_the_welcome_and_heartbeats_follow(there: Coordinator, client: BusClient) -> None:
    """The first Welcome is start's result, not in the inbox; heartbeats are sent without being asked for."""
    assert client.welcome is not None
    assert client.welcome.boot == 1
    assert client.start(DEADLINE_S) is client.welcome
    there.wait_for(lambda: there.count(Heartbeat) >= 3)
    assert client.next(0.0) is None


def test_requests_from_many_threads(there: Coordinator, client: BusClient) -> None:
    """Each caller gets the answer to its own request."""
    keys: set[RequestId] = set()

    def ask() -> None:
        for _ in range(10):
            answer = acquire(client)
            assert isinstance(answer, Ack)
            keys.add(answer.request)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(keys) == 40
    assert there.count(Acquire) >= 40


def test_doubled_answers_and_commands_count_once(there: Coordinator, client: BusClient) -> None:
    """Every answer twice: each request ends once, nothing is left in the inbox; a repeated command is read once.

    (G6, F6)
    """
    there.copies = 2

    def order_first(item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:
        if isinstance(item.message, Acquire):
            for _ in range(3):
                there.bus.send(item.peer, ABORT)  # here and not in the test: one thread owns the socket
        return there.usual(item)

    acquire(client)
    there.answer = order_first
    acquire(client)
    assert client.next(DEADLINE_S) == ABORT
    assert client.next(0.05) is None


def test_refusal_raises_with_its_code(there: Coordinator, client: BusClient) -> None:
    """The caller learns code, reason and when to try again."""
    there.answer = lambda item: (
        (
            Refused(request=item.message.request, code=RefusalCode.LEASE_HELD, reason="t1 has it", retry_after_s=1.5),
            None,
        )
        if isinstance(item.message, Acquire)
        else there.usual(item)
    )
    with pytest.raises(RequestRefused, match="t1 has it") as refused:
        acquire(client)
    assert (refused.value.code, refused.value.retry_after_s) == (RefusalCode.LEASE_HELD, 1.5)


def test_coordinator_dies_and_comes_back(there: Coordinator) -> None:
    """A request made while it is away is answered after its return; the new Welcome is in the inbox."""
    with client_of(there.port) as client:
        client.start(DEADLINE_S)
        port = there.port
        there.die()
        answers: list[ToAgent] = []
        asking = threading.Thread(target=lambda: answers.append(acquire(client)))
        asking.start()
        back = Coordinator(port, boot=2)
        try:
            asking.join(DEADLINE_S)
            assert isinstance(answers[0], Ack)
            again = client.next(DEADLINE_S)
            assert isinstance(again, Welcome)
            assert again.boot == 2
        finally:
            back.die()


def test_silent_coordinator_gets_a_new_connection(there: Coordinator) -> None:
    """When nothing is heard for silence_s the socket is made anew: the coordinator sees another peer."""
    there.silence_s = 1.0
    with client_of(there.port) as client:
        client.start(DEADLINE_S)
        deaf = there.peers[-1]
        there.answer = lambda item: None if item.peer == deaf else there.usual(item)
        assert isinstance(acquire(client), Ack)
        assert there.peers[-1] != deaf


def test_absent_coordinator_is_a_typed_error() -> None:
    """Start raises in time, names the endpoint and what to check; waiting longer is possible."""
    with client_of(1) as client:
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(CoordinatorUnreachable, match=r"tcp://127\.0\.0\.1:1.*weightbus coordinator"):
                client.start(0.1)
        assert time.monotonic() - begun < DEADLINE_S / 2
        with pytest.raises(CoordinatorUnreachable, match="Acquire"):
            acquire(client, deadline_s=0.1)


def test_refused_hello_ends_the_client(there: Coordinator) -> None:
    """A final refusal is raised by start, and by everything after it."""
    there.answer = lambda item: (
        (Refused(request=item.message.request, code=RefusalCode.NOT_ALLOWED, reason="not you"), None)
        if isinstance(item.message, Hello)
        else None
    )
    with client_of(there.port) as client:
        for call in (lambda: client.start(DEADLINE_S), lambda: acquire(client), lambda: client.next(DEADLINE_S)):
            with pytest.raises(RequestRefused, match="not you"):
                call()


def test_taken_name_is_waited_for(there: Coordinator) -> None:
    """A name that is free again a moment later is got by waiting; one that is not is named as the reason."""
    refused: set[RequestId] = set()
    is_free = False

    def answer(item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:
        if isinstance(item.message, Hello) and (not refused or item.message.request in refused or not is_free):
            refused.add(item.message.request)
            reason = "another process has it"
            key = item.message.request
            return Refused(request=key, code=RefusalCode.NAME_TAKEN, reason=reason, retry_after_s=0.05), None
        return there.usual(item)

    there.answer = answer
    with client_of(there.port) as client:

        def refusal() -> str:
            with pytest.raises((RequestRefused, CoordinatorUnreachable)) as why:
                client.start(0.1)
            return str(why.value)

        there.wait_for(lambda: "another process has it" in refusal())
        is_free = True
        assert client.start(DEADLINE_S).boot == 1


def test_close_says_bye_at_once(there: Coordinator) -> None:
    """Closing waits for no answer, says Bye, and raises in callers that still wait."""
    client = client_of(there.port)
    client.start(DEADLINE_S)
    there.answer = lambda item: None if isinstance(item.message, Acquire) else there.usual(item)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            acquire(client)
        except ClientClosed as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    there.wait_for(lambda: there.count(Acquire) > 0)
    begun = time.monotonic()
    client.close()
    assert time.monotonic() - begun < DEADLINE_S / 2
    asking.join()
    assert len(errors) == 1
    there.wait_for(lambda: there.count(Bye) == 1)
    client.close()
    with pytest.raises(ClientClosed):
        acquire(client)
    with pytest.raises(ClientClosed):
        client.next(DEADLINE_S)


def test_closing_what_was_never_started() -> None:
    """It releases what it holds, and is closed."""
    client = client_of(1)
    client.close()
    with pytest.raises(ClientClosed):
        client.start(0.1)


def test_blobs_travel_in_pages(there: Coordinator, client: BusClient) -> None:
    """What was put comes back whole; what the coordinator is known to have is not sent again."""
    blob = bytes(range(256)) * 5000
    digest = client.put_blob(blob)
    assert digest == hashlib.sha256(blob).hexdigest()
    assert there.blobs[digest] == blob
    assert there.requests(PutBlob) == 3
    client.put_blob(blob)
    assert there.requests(PutBlob) == 3
    assert client.get_blob(digest) == blob
    gets = there.requests(GetBlob)
    assert client.get_blob(digest) == blob
    assert there.requests(GetBlob) == gets
    assert client.get_blob(client.put_blob(b"")) == b""
    assert client.status() == b"{}"


def test_a_blob_that_is_not_wanted_any_more_is_given_up(
    there: Coordinator, client: BusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its deadline, also while a page does not come: no caller waits for an unneeded blob."""
    monkeypatch.setattr("weightbus.control.bus.client.PAGE_S", 0.2)
    there.answer = lambda item: None if isinstance(item.message, GetBlob) else there.usual(item)
    asked = iter([False, False, True])
    with pytest.raises(BlobCancelled, match="called off after 0"):
        client.get_blob(Digest("d" * 64), 600.0, lambda: next(asked))
    assert next(asked, None) is None


def test_changed_blob_is_refused(there: Coordinator, client: BusClient) -> None:
    """Bytes that do not hash to the digest never reach the caller."""
    digest = Digest("0" * 64)
    there.blobs[digest] = b"something else"
    with pytest.raises(BlobMismatch):
        client.get_blob(digest)


def test_forgotten_blob_is_put_again(there: Coordinator, client: BusClient) -> None:
    """After UNKNOWN_BLOB, put_blob sends everything anew."""
    client.put_blob(b"x")
    there.answer = lambda item: (
        (Refused(request=item.message.request, code=RefusalCode.UNKNOWN_BLOB, reason="put it first"), None)
        if isinstance(item.message, Acquire)
        else there.usual(item)
    )
    with pytest.raises(RequestRefused):
        acquire(client)
    client.put_blob(b"x")
    assert there.requests(PutBlob) == 2


def test_what_a_message_names_goes_ahead_of_it_and_is_not_waited_for(there: Coordinator, client: BusClient) -> None:
    """Pages and message are under way together, in this order; what is known to be there is not sent again."""
    blobs = {Digest(hashlib.sha256(blob).hexdigest()): blob for blob in (b"layout" * 100_000, b"table")}
    held: list[MessageReceived] = []

    def after_the_message(item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:
        if isinstance(item.message, PutBlob) and not there.count(Acquire):
            held.append(item)
            return None
        return there.usual(item)

    there.answer = after_the_message
    message = Acquire(request=client.new_request(), channel=Channel("c"), version=Version(1))

    answer = client.request_with(message, blobs, DEADLINE_S, DEADLINE_S)

    assert isinstance(answer, Ack)
    said = [each for each in there.seen if isinstance(each, PutBlob | Acquire)]
    assert [type(each) for each in said[:4]] == [PutBlob, PutBlob, PutBlob, Acquire]
    assert len(held) == 3
    assert there.blobs == {**blobs}
    client.request_with(msgspec.structs.replace(message, request=client.new_request()), blobs, DEADLINE_S)
    assert there.requests(PutBlob) == 3


def test_many_pages_are_put_one_after_another(there: Coordinator, client: BusClient) -> None:
    """They would fill queues that others need; the message follows when all of them are there."""
    blob = bytes(MAX_PAGE_BYTES * PAGES_AHEAD + 1)
    digest = Digest(hashlib.sha256(blob).hexdigest())
    message = Acquire(request=client.new_request(), channel=Channel("c"), version=Version(1))
    there.answer = lambda item: None if there.count(PutBlob) == 1 else there.usual(item)  # the first one got lost

    assert isinstance(client.request_with(message, {digest: blob}, DEADLINE_S), Ack)
    said = [each for each in there.seen if isinstance(each, PutBlob | Acquire)]
    assert [type(each) for each in said].index(Acquire) >= PAGES_AHEAD + 2
    assert said[0] == said[1]
    assert there.blobs[digest] == blob


def test_pages_that_got_lost_are_put_again_before_the_same_question(there: Coordinator, client: BusClient) -> None:
    """A message that overtook what it names was refused, which changed nothing: it is the same request afterwards."""
    digest = Digest(hashlib.sha256(b"table").hexdigest())
    message = Acquire(request=client.new_request(), channel=Channel("c"), version=Version(1))
    refusals: list[RequestId] = []

    def forgetful(item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:
        if isinstance(item.message, Acquire) and not refusals:
            refusals.append(item.message.request)
            there.blobs.clear()
            return Refused(request=item.message.request, code=RefusalCode.UNKNOWN_BLOB, reason="put it first"), None
        return there.usual(item)

    there.answer = forgetful

    assert isinstance(client.request_with(message, {digest: b"table"}, DEADLINE_S), Ack)
    assert there.blobs == {digest: b"table"}
    assert there.requests(PutBlob) == 2
    assert there.requests(Acquire) == 1  # by its key


def test_what_was_put_before_and_is_there_no_more_is_put_again(there: Coordinator, client: BusClient) -> None:
    """Once: a second refusal is raised."""
    digest = client.put_blob(b"table")
    there.blobs.clear()

    def strict(item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:
        if isinstance(item.message, Acquire) and digest not in there.blobs:
            return Refused(request=item.message.request, code=RefusalCode.UNKNOWN_BLOB, reason="put it first"), None
        return there.usual(item)

    there.answer = strict
    message = Acquire(request=client.new_request(), channel=Channel("c"), version=Version(1))
    assert isinstance(client.request_with(message, {digest: b"table"}, DEADLINE_S), Ack)
    assert there.requests(PutBlob) == 2

    there.answer = lambda item: (
        (Refused(request=item.message.request, code=RefusalCode.UNKNOWN_BLOB, reason="put it first"), None)
        if isinstance(item.message, Acquire)
        else there.usual(item)
    )
    with pytest.raises(RequestRefused):
        client.request_with(message, {digest: b"table"}, DEADLINE_S)
    assert there.requests(PutBlob) == 3


def test_friend_with_a_key(tmp_path: Path) -> None:
    """With keys the client joins; with a stranger's key it learns that it is not heard."""
    make_deployment_keys(tmp_path, [AgentKeys(AgentId("friend"), Role.ENGINE, (Channel("policy"),))])
    write_key_pair(tmp_path / "elsewhere", "friend", new_keypair, public_of)
    coordinator = Coordinator(keys=ServerKeys.read(tmp_path))
    try:
        with client_of(coordinator.port, CurveFiles.of(tmp_path, "friend")) as friend:
            assert friend.start(DEADLINE_S).boot == 1
        stranger = CurveFiles(tmp_path / "elsewhere" / "friend.key", tmp_path / f"{COORDINATOR_KEYS}.pub")
        with client_of(coordinator.port, stranger) as other:

            def unheard() -> str:
                with pytest.raises(CoordinatorUnreachable) as why:
                    other.start(0.1)
                return str(why.value)

            coordinator.wait_for(lambda: "has another key for it" in unheard())
            assert "weightbus trust add" in str(other.untrusted)
            assert friend.untrusted is None
    finally:
        coordinator.die()


def test_unreadable_message_is_the_callers_error(client: BusClient) -> None:
    """A message that cannot be encoded raises where it was made, and the client lives on."""
    with pytest.raises(Malformed):
        client.request(Acquire(request=client.new_request(), channel=Channel("no name"), version=Version(1)))
    with pytest.raises(TypeError, match="post"):
        client.request(Bye())
    assert isinstance(acquire(client), Ack)


def test_posted_message_arrives(there: Coordinator, client: BusClient) -> None:
    """What needs no answer is sent as it is."""
    client.post(Bye(reason="tired"))
    there.wait_for(lambda: Bye(reason="tired") in there.seen)


def test_broken_callback_is_heard_of() -> None:
    """When `hello` raises, callers that wait get the error instead of waiting for ever."""

    def broken() -> Hello:
        raise KeyError("url")

    client = BusClient(BusSettings(timing=QUICK), broken, link=MemoryBus().link())
    with pytest.raises(ClientClosed, match="KeyError"):
        client.start(DEADLINE_S)
    client.close()


def test_own_heartbeat_is_sent_with_a_number() -> None:
    """The agent says what it is, the client counts."""
    bus = MemoryBus()
    beats: list[Heartbeat] = []

    def answer() -> None:
        while len(beats) < 2:
            for item in bus.poll(1.0):
                assert isinstance(item, MessageReceived)
                if isinstance(item.message, Hello):
                    key = item.message.request
                    welcome = Welcome(
                        request=key, boot=1, epoch=Epoch(0), committed=None, heartbeat_s=0.01, silence_s=5.0
                    )
                    bus.send(item.peer, welcome)
                elif isinstance(item.message, Heartbeat):
                    beats.append(item.message)

    thread = threading.Thread(target=answer)
    thread.start()
    client = BusClient(BusSettings(timing=QUICK), hello, lambda: Heartbeat(seq=0, epoch=Epoch(9)), link=bus.link())
    with client:
        client.start(DEADLINE_S)
        thread.join(DEADLINE_S)
    assert [(beat.seq, beat.epoch) for beat in beats[:2]] == [(1, 9), (2, 9)]


def test_where_an_agent_is_is_told_after_every_welcome_and_when_it_changed(there: Coordinator) -> None:
    """Before anything else that it says, so that the next choice knows; and a coordinator that is new hears it too."""
    here = ["rack 1"]
    client = BusClient(
        BusSettings(endpoint=f"tcp://127.0.0.1:{there.port}", timing=QUICK),
        hello,
        topology=lambda: Topology(request=RequestId("filled in"), network=here[0]),
    )

    def told() -> list[str]:
        found = [each for each in there.seen if isinstance(each, Topology)]
        assert len({each.request for each in found}) == len({each.network for each in found})
        return sorted({each.network for each in found})

    with client:
        client.start(DEADLINE_S)
        client.request(Acquire(request=client.new_request(), channel=Channel("c"), version=Version(1)))
        said = [type(each) for each in there.seen if not isinstance(each, Heartbeat | Hello)]
        assert said[0] is Topology
        here[0] = "rack 2"
        client.report_topology()
        there.wait_for(lambda: told() == ["rack 1", "rack 2"])


def test_an_agent_that_cannot_read_where_it_is_tells_it_later(
    there: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors may have run out: half a report would be taken for the whole, and the session goes on."""
    monkeypatch.setattr(client_module, "TOPOLOGY_AGAIN_S", 0.1)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    def topology() -> Topology:
        if failures:
            raise failures.pop()
        return Topology(request=RequestId("filled in"), network="rack 1")

    settings = BusSettings(endpoint=f"tcp://127.0.0.1:{there.port}", timing=QUICK)
    with BusClient(settings, hello, topology=topology) as client:
        client.start(DEADLINE_S)
        there.wait_for(lambda: any(isinstance(each, Topology) for each in there.seen))
        assert not failures
        client.request(Acquire(request=client.new_request(), channel=Channel("c"), version=Version(1)))


def test_a_coordinator_that_does_not_know_where_matters_is_spoken_to_all_the_same(
    there: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one refuses the message unread; the agent gives up telling it, and nothing else."""
    monkeypatch.setattr(client_module, "TOPOLOGY_S", 2.0)

    def older(item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:
        if isinstance(item.message, Topology):
            return Refused(request=RequestId("rejected"), code=RefusalCode.NOT_ALLOWED, reason="unknown message"), None
        return there.usual(item)

    there.answer = older
    client = BusClient(
        BusSettings(endpoint=f"tcp://127.0.0.1:{there.port}", timing=QUICK),
        hello,
        topology=lambda: Topology(request=RequestId("filled in")),
    )
    with client:
        client.start(DEADLINE_S)
        there.wait_for(lambda: not client._session.pending)
        assert client.status() == b"{}"  # behind whatever was still under way
        count = there.count(Topology)
        assert count > 1, "it was repeated"
        assert client.status() == b"{}"
        assert there.count(Topology) == count


def test_an_older_coordinator_is_told_what_it_knows(there: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses a message with a field it does not know: then it is told the others, and no more of that one."""
    monkeypatch.setattr(client_module, "TOPOLOGY_S", 1.0)

    def older(item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:
        if isinstance(item.message, Topology) and item.message.supports_deferred_digests:
            return Refused(request=RequestId("rejected"), code=RefusalCode.NOT_ALLOWED, reason="unknown field"), None
        return (Ack(request=item.message.request), None) if isinstance(item.message, Topology) else there.usual(item)

    there.answer = older
    client = BusClient(
        BusSettings(endpoint=f"tcp://127.0.0.1:{there.port}", timing=QUICK),
        hello,
        topology=lambda: Topology(request=RequestId("filled in"), network="rack 1", supports_deferred_digests=True),
    )
    with client:
        client.start(DEADLINE_S)
        there.wait_for(
            lambda: any(isinstance(each, Topology) and not each.supports_deferred_digests for each in there.seen)
        )
        there.wait_for(lambda: not client._session.pending)
        told = [each for each in there.seen if isinstance(each, Topology)]
        assert {each.network for each in told} == {"rack 1"}
        assert [each.supports_deferred_digests for each in told if not each.supports_deferred_digests] == [False]
        count = there.count(Topology)
        assert client.status() == b"{}"
        assert there.count(Topology) == count


@pytest.mark.parametrize("knows_trouble", [True, False])
def test_an_older_coordinator_is_told_all_that_it_knows_of_an_engine(
    there: Coordinator, monkeypatch: pytest.MonkeyPatch, knows_trouble: bool
) -> None:
    """The newest fields go first, one release after the other; where the engine is, is told in any case (N44, N61)."""
    monkeypatch.setattr(client_module, "TOPOLOGY_S", 1.0)

    def older(item: MessageReceived) -> tuple[ToAgent, bytes | None] | None:
        said = item.message
        if isinstance(said, Topology) and (said.unclean or (said.trouble and not knows_trouble)):
            return Refused(request=RequestId("rejected"), code=RefusalCode.NOT_ALLOWED, reason="unknown field"), None
        return (Ack(request=said.request), None) if isinstance(said, Topology) else there.usual(item)

    there.answer = older
    full = Topology(
        request=RequestId("filled in"), network="rack 1", trouble="compiles", starting=True, unclean="dirty"
    )
    client = BusClient(
        BusSettings(endpoint=f"tcp://127.0.0.1:{there.port}", timing=QUICK), hello, topology=lambda: full
    )
    with client:
        client.start(DEADLINE_S)
        there.wait_for(lambda: there.count(Topology) and not client._session.pending)
        there.wait_for(lambda: any(isinstance(each, Topology) and not each.unclean for each in there.seen))
        there.wait_for(lambda: not client._session.pending)
        told = [each for each in there.seen if isinstance(each, Topology)][-1]
        assert (told.trouble, told.starting, told.unclean) == (
            ("compiles", True, "") if knows_trouble else ("", False, "")
        )
        assert told.network == "rack 1"


def test_a_bounded_set_keeps_the_last_ones() -> None:
    """However many were added; a key that is added again is one of the last."""
    known = BoundedSet[int](3)
    known.add(1, 2, 3)
    known.add(1)
    known.add(4)
    assert [each in known for each in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(known) == 3
    known.clear()
    assert 4 not in known


def test_a_bounded_set_takes_no_more_room_after_months() -> None:
    """With a digest for each version, say."""
    known = BoundedSet[str]()
    for number in range(100 * MAX_KNOWN):
        known.add(str(number))
    assert len(known) == MAX_KNOWN
    assert str(100 * MAX_KNOWN - 1) in known
