"""An agent's client of the coordinator: requests that end in a reply or a typed error, and a queue of commands.

One background thread owns the connection. It says Hello, sends heartbeats, repeats unanswered requests, and reconnects
when the coordinator falls silent; session.py decides when. Requests may be made from any thread. A reconnect shows only
as a new `Welcome` in the queue: outstanding requests are sent again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar, assert_never

import msgspec

from ..log import get_log
from ..protocol import (
    MAX_PAGE_BYTES,
    BlobCancelled,
    BlobMismatch,
    BlobPage,
    Bye,
    ClientClosed,
    CoordinatorUnreachable,
    Digest,
    GetBlob,
    GetStatus,
    Heartbeat,
    Hello,
    NotTrusted,
    PutBlob,
    RefusalCode,
    RequestId,
    RequestRefused,
    ToAgent,
    ToCoordinator,
    Topology,
    Version,
    WeightbusError,
    Welcome,
    codec,
)
from ..security import ALLOW_LIST_FILE, CurveFiles, agent_key_files, fingerprint, read_allow_list, read_secret_key
from .interface import AgentLink
from .session import (
    AgentSession,
    Connect,
    Deliver,
    DescriptionChanged,
    GarbageArrived,
    GiveUp,
    Join,
    MessageArrived,
    Reject,
    RequestSubmitted,
    Resolve,
    SendHeartbeat,
    SendHello,
    SessionEffect,
    SessionEvent,
    SessionPhase,
    SessionTiming,
    Ticked,
    Transmit,
)
from .sockets import DealerLink, LinkProblem, public_of

PAGES_AHEAD: Final = 4
"""Pages sent without waiting for their replies: those of a digest table of some hundred thousand tensors."""
CACHED_BLOBS: Final = 8
"""Manifests and digest tables kept: those of the current version and of the next."""
PAGE_S: Final = 10.0
"""Wait after which a page of a blob is requested again under another key, if still wanted."""
CLOSE_S: Final = 1.0
_GRACE_S: Final = 5.0
"""Extra wait of a request for the thread to report its deadline; used up only if the thread hangs."""

TOPOLOGY_S: Final = 10.0
"""Deadline of a topology report: an older coordinator never acknowledges the message."""
TOPOLOGY_AGAIN_S: Final = 5.0
"""Seconds to the next report, after one whose content could not be read from this host."""

_Answered = tuple[ToAgent, bytes | None]


_ABILITIES: Final[tuple[Mapping[str, object], ...]] = (
    {"unclean": ""},
    {"trouble": "", "trouble_s": 0.0, "starting": False},
    {"supports_deferred_digests": False},
)
"""Fields of `Topology` that an older coordinator does not know, newest first, with the values that are not sent."""


class _TopologyChanged:
    """Tells the thread to report the agent's topology."""


class _DescriptionChanged:
    """Tells the thread to say Hello again."""


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's endpoint, the keys and the waits of a client."""

    endpoint: str = "tcp://127.0.0.1:5750"
    """Several endpoints are comma-separated: the client finds the leader."""
    curve: CurveFiles | None = None
    timing: SessionTiming = SessionTiming()

    def check(self) -> None:
        """Raise the `ConfigurationError` that connecting would: missing keys, or a bad endpoint."""
        DealerLink(self.endpoint, self.curve).close()


def check_keys(endpoint: str, keys: Path | None, name: str, *, insecure_loopback: bool) -> None:
    """Raise the `ConfigurationError` that an agent's start would, as far as its key files and its endpoint tell."""
    BusSettings(endpoint=endpoint, curve=agent_key_files(keys, name, insecure_loopback=insecure_loopback)).check()


class BusClient:
    """One agent's client of the coordinator."""

    def __init__(
        self,
        settings: BusSettings,
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat] | None = None,
        *,
        topology: Callable[[], Topology] | None = None,
        link: AgentLink | None = None,
    ) -> None:
        """`hello`, `heartbeat` and `topology` are called on the client's thread and must be quick.

        The client fills in `Hello.request`, `Heartbeat.seq` and `Topology.request`. It sends the topology after every
        `Welcome`. Tests pass `link` to replace the socket.
        """
        self.endpoint = settings.endpoint
        self._hello = hello
        self._heartbeat = heartbeat
        self._topology = topology
        self._clock = time.monotonic
        self._topology_at = float("inf")
        """When the topology is reported again, because it could not be read."""
        self._topology_request: RequestId | None = None
        self._topology_omits = 0
        """Number of abilities left out of `_topology_request` because an older coordinator may not understand them."""
        self._link: AgentLink = link or DealerLink(settings.endpoint, settings.curve)
        self._keys = os.urandom(8).hex()
        self._counter = itertools.count(1)
        key = public_of(read_secret_key(settings.curve.secret)) if settings.curve and link is None else ""
        self._fingerprint = fingerprint(key) if key else ""
        self._secret = settings.curve.secret if settings.curve else None
        self._session = AgentSession(
            settings.endpoint, self._keys, settings.timing, time.monotonic(), self._trust_advice
        )
        self._submitted: queue.SimpleQueue[
            RequestSubmitted | ToCoordinator | _TopologyChanged | _DescriptionChanged
        ] = queue.SimpleQueue()
        self._futures: dict[RequestId, Future[_Answered]] = {}
        self._receive_queue: deque[ToAgent] = deque()
        self._changed = threading.Condition()
        self._first: Future[Welcome] = Future()
        self._welcome: Welcome | None = None
        self._end_error: WeightbusError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightbus-client", daemon=True)
        self._known_blobs = BoundedSet[Digest]()
        self._blob_cache: OrderedDict[Digest, bytes] = OrderedDict()

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, deadline_s: float = 30.0) -> Welcome:
        """Connect and say Hello; returns the first `Welcome`.

        Raises `CoordinatorUnreachable`, or `RequestRefused` when the last word was a refusal. The client goes on trying
        behind the scenes unless it was refused for good: call again to wait longer, or `close`.
        """
        if not self._thread.is_alive() and not self._first.done():
            self._thread.start()
        try:
            return self._first.result(deadline_s)
        except FutureTimeoutError:
            raise self._explained(self._session.unreachable("Hello", deadline_s, time.monotonic())) from None

    def _explained(self, error: WeightbusError) -> WeightbusError:
        """`error` with what the socket knows of its cause."""
        link = self._link
        if not isinstance(link, DealerLink) or not isinstance(error, CoordinatorUnreachable) or link.problem is None:
            return error
        match link.problem:
            case LinkProblem.UNTRUSTED:
                found, advice = "it does not trust this agent's key", self._trust_advice() + self._known_here()
                advice = advice[0].upper() + advice[1:]
            case LinkProblem.OTHER_KEY:
                given = fingerprint(link.coordinator_key) if link.coordinator_key else ""
                found = "the handshake broke off: what listens there is no coordinator of these keys"
                advice = (
                    f"Copy coordinator.pub from where the coordinator runs: the one here has the fingerprint {given};"
                    " `weightbus trust list` shows the coordinator's"
                    if given
                    else "Start the coordinator with --insecure-loopback too, or give this agent --keys; see that the"
                    " port is its --router-port"
                )
            case LinkProblem.NOT_LISTENING:
                found = "nothing listens there"
                advice = "Start `weightbus coordinator` there, or name its host and --router-port with --coordinator"
            case _:
                assert_never(link.problem)
        return CoordinatorUnreachable(error.endpoint, error.tried_s, error.waiting_for, found, advice)

    def _known_here(self) -> str:
        """What the allow-list beside this agent's keys says of it, where there is one."""
        path = self._secret.parent.parent / ALLOW_LIST_FILE if self._secret else None
        if path is None or not path.exists():
            return ""
        try:
            entry = read_allow_list(path).agents.get(self._hello().agent)
        except WeightbusError as problem:
            return f"; {problem}"
        if entry is None:
            return f"; the allow-list {path} does not name it"
        if fingerprint(entry.key) != self._fingerprint:
            theirs = fingerprint(entry.key)
            return f"; the allow-list {path} has another key for it, of fingerprint {theirs}: it was made anew since"
        return f"; the allow-list {path} does trust it: the coordinator uses another one"

    def close(self) -> None:
        """Say Bye and stop, within about a second. Requests without a reply raise `ClientClosed`."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._link.wake()
            self._thread.join(CLOSE_S + _GRACE_S)
        else:
            self._give_up(ClientClosed("this client was closed"))
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def welcome(self) -> Welcome | None:
        """The newest `Welcome`; None before the first."""
        return self._welcome

    @property
    def committed(self) -> Version | None:
        """Current version of this agent's channel, by the coordinator's last message."""
        return self._session.committed

    @property
    def max_lag(self) -> int:
        """Number of versions that an engine may be behind `committed` and still be ready."""
        return self._session.max_lag

    @property
    def heard_at(self) -> float | None:
        """Time of the coordinator's last message but refusals, in `time.monotonic` seconds."""
        return self._session.heard_at

    @property
    def refusal(self) -> tuple[RequestRefused, float] | None:
        """The refusal that keeps this agent out now, and the `time.monotonic` of the first one; None while welcomed."""
        error, since = self._session.refusal, self._session.refused_since
        return None if error is None or since is None else (error, since)

    @property
    def untrusted(self) -> NotTrusted | None:
        """The error of an agent whose key is not trusted: it was refused, or its handshake was. None if neither was."""
        refusal = self._session.refusal
        if isinstance(refusal, NotTrusted):
            return refusal
        link = self._link
        if not isinstance(link, DealerLink) or link.problem is not LinkProblem.UNTRUSTED:
            return None
        return NotTrusted("the coordinator does not trust this agent's key", self._trust_advice() + self._known_here())

    @property
    def unread_at(self) -> float | None:
        """Time at which the coordinator last said that it could not read a message, in `time.monotonic` seconds."""
        return self._session.unread_at

    def new_request(self) -> RequestId:
        """A new, unique request key."""
        return RequestId(f"{self._keys}-{next(self._counter)}")

    # -- messages ------------------------------------------------------------------------------------------------------

    def request(self, message: ToCoordinator, blob: bytes | None = None, deadline_s: float = 30.0) -> ToAgent:
        """Send a request and block for its reply; from any thread.

        The request is repeated until answered: the coordinator gives the same reply to the same key. Raises
        `RequestRefused`, `CoordinatorUnreachable` or `ClientClosed`; `ProtocolError` if `message` cannot be encoded.
        """
        return self._request(message, blob, deadline_s)[0]

    def ask(self, message: ToCoordinator, deadline_s: float = 30.0) -> Callable[[], ToAgent]:
        """Send a request now; the returned function blocks for its reply, and raises as `request` does.

        Requests are sent in the order of these calls. Each needs a key of its own; to repeat a request, wait for its
        reply first.
        """
        wait = self._submit(message, None, deadline_s)
        return lambda: wait()[0]

    def request_with(
        self, message: ToCoordinator, blobs: Mapping[Digest, bytes], deadline_s: float = 30.0, blobs_s: float = 60.0
    ) -> ToAgent:
        """`request` for a message that names `blobs` by their digests: missing blobs are sent ahead of it.

        With at most `PAGES_AHEAD` pages, `message` does not wait for their replies. If the coordinator still misses a
        blob, all are put again, and `message` is requested again. `blobs_s` is the deadline of each blob, in seconds.
        """
        lacking = {name: blob for name, blob in blobs.items() if name not in self._known_blobs}
        if sum(_pages(blob) for blob in lacking.values()) > PAGES_AHEAD:
            for name, blob in lacking.items():
                self.put_blob(blob, blobs_s, name)
            lacking = {}
        boot = self._coordinator_boot()
        waits = [self._submit(*page, blobs_s) for name, blob in lacking.items() for page in self._paged(name, blob)]
        answer = self._submit(message, None, deadline_s)
        for wait in waits:
            wait()
        if boot == self._coordinator_boot():
            self._known_blobs.add(*lacking)
        try:
            return answer()[0]
        except RequestRefused as refused:
            if refused.code is not RefusalCode.UNKNOWN_BLOB:
                raise
        for name, blob in blobs.items():
            self.put_blob(blob, blobs_s, name)
        return self.request(message, deadline_s=deadline_s)

    def post(self, message: ToCoordinator) -> None:
        """Send a message that has no reply and may be lost."""
        codec.TO_COORDINATOR.encode(message)
        self._submitted.put(message)
        self._link.wake()

    def report_topology(self) -> None:
        """Send the agent's topology again, because it has changed."""
        self._submitted.put(_TopologyChanged())
        self._link.wake()

    def join_again(self) -> None:
        """Say Hello again on this connection, because the agent is another one than its last `Hello` said."""
        self._submitted.put(_DescriptionChanged())
        self._link.wake()

    def next(self, timeout_s: float) -> ToAgent | None:
        """The next command, or `Welcome` after a reconnect; None after `timeout_s`.

        Raises the error that ended the client, once all earlier messages are read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._receive_queue or self._end_error, timeout_s)
            if self._receive_queue:
                return self._receive_queue.popleft()
            if self._end_error is not None:
                raise self._end_error
            return None

    def status(self, deadline_s: float = 10.0) -> bytes:
        """The coordinator's status document, JSON."""
        _, document = self._request(GetStatus(request=self.new_request()), None, deadline_s)
        return document or b""

    # -- blobs ---------------------------------------------------------------------------------------------------------

    def put_blob(self, blob: bytes, deadline_s: float = 60.0, digest: str = "") -> Digest:
        """Send `blob` to the coordinator in pages, unless it is known to have it; returns its digest.

        `digest` saves hashing if the caller knows it; the coordinator checks it. After `RequestRefused(UNKNOWN_BLOB)`
        no blob counts as known any more: put it again, then repeat the request.
        """
        name = Digest(digest or hashlib.sha256(blob).hexdigest())
        until = time.monotonic() + deadline_s
        while name not in self._known_blobs:
            boot = self._coordinator_boot()
            self._put_pages(name, blob, until, deadline_s)
            if boot == self._coordinator_boot():  # otherwise pages went to a coordinator that has restarted
                self._known_blobs.add(name)
        return name

    def get_blob(self, digest: Digest, deadline_s: float = 60.0, unwanted: Callable[[], bool] = lambda: False) -> bytes:
        """The blob of that digest, from the coordinator or from a cache of the last few.

        `unwanted` is called between pages, and every `PAGE_S` during a page: if it returns True, the transfer ends with
        `BlobCancelled`.
        """
        cached = self._blob_cache.get(digest)
        if cached is not None:
            return cached
        until = time.monotonic() + deadline_s
        pages: list[bytes] = []
        count = 1
        while len(pages) < count:
            if unwanted():
                raise BlobCancelled(digest, len(pages))
            left = max(0.0, until - time.monotonic())
            message = GetBlob(request=self.new_request(), digest=digest, page=len(pages))
            try:
                answer, data = self._request(message, None, min(left, PAGE_S))
            except CoordinatorUnreachable:
                if left > PAGE_S:
                    continue
                raise
            if isinstance(answer, BlobPage):
                count = answer.pages
            pages.append(data or b"")
        blob = b"".join(pages)
        found = hashlib.sha256(blob).hexdigest()
        if found != digest:
            raise BlobMismatch(found, digest)
        self._remember(digest, blob)
        return blob

    def _put_pages(self, digest: Digest, blob: bytes, until: float, deadline_s: float) -> None:
        for message, data in self._paged(digest, blob):
            self._request(message, data, min(deadline_s, max(0.0, until - time.monotonic())))

    def _paged(self, digest: Digest, blob: bytes) -> Iterator[tuple[PutBlob, bytes]]:
        pages = _pages(blob)
        for page in range(pages):
            data = blob[page * MAX_PAGE_BYTES : (page + 1) * MAX_PAGE_BYTES]
            yield PutBlob(request=self.new_request(), digest=digest, page=page, pages=pages), data

    def _remember(self, digest: Digest, blob: bytes) -> None:
        with self._changed:
            self._blob_cache[digest] = blob
            while len(self._blob_cache) > CACHED_BLOBS:
                self._blob_cache.popitem(last=False)

    def _coordinator_boot(self) -> int:
        return self._welcome.boot if self._welcome else 0

    # -- between the threads -------------------------------------------------------------------------------------------

    def _request(self, message: ToCoordinator, blob: bytes | None, deadline_s: float) -> _Answered:
        return self._submit(message, blob, deadline_s)()

    def _submit(self, message: ToCoordinator, blob: bytes | None, deadline_s: float) -> Callable[[], _Answered]:
        key = _key_of(message)
        codec.TO_COORDINATOR.encode(message, blob)  # raise in the caller, not in the thread, if it cannot be encoded
        future: Future[_Answered] = Future()
        with self._changed:
            if self._end_error is not None:
                raise self._end_error
            self._futures[key] = future
        expires_at = time.monotonic() + deadline_s
        self._submitted.put(RequestSubmitted(key, message, blob, expires_at, deadline_s))
        self._link.wake()
        return lambda: self._await_answer(key, message, future, expires_at, deadline_s)

    def _await_answer(
        self, key: RequestId, message: ToCoordinator, future: Future[_Answered], expires_at: float, deadline_s: float
    ) -> _Answered:
        try:
            return future.result(max(0.0, expires_at - time.monotonic()) + _GRACE_S)
        except FutureTimeoutError:
            raise self._session.unreachable(message.kind, deadline_s, time.monotonic()) from None
        except RequestRefused as refused:
            if refused.code is RefusalCode.UNKNOWN_BLOB:
                self._known_blobs.clear()
            raise
        finally:
            with self._changed:
                self._futures.pop(key, None)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._step()
            if self._welcome is not None:
                self._link.send(Bye(reason="closed"))
            self._give_up(ClientClosed("this client was closed"))
        except Exception as error:  # noqa: BLE001  # callers that wait must get an error, whatever it was
            closed = ClientClosed(f"the client's thread died of {type(error).__name__}: {error}")
            closed.__cause__ = error
            self._give_up(closed)
        finally:
            self._link.close()

    def _step(self) -> None:
        self._handle(Ticked())
        if self._clock() >= self._topology_at:
            self._send_topology()
        while not self._submitted.empty():
            item = self._submitted.get()
            if isinstance(item, RequestSubmitted):
                self._handle(item)
            elif isinstance(item, _TopologyChanged):
                self._send_topology()
            elif isinstance(item, _DescriptionChanged):
                self._handle(DescriptionChanged())
            else:
                self._link.send(item)
        for heard in self._link.poll(min(1.0, max(0.0, self._session.next_deadline() - time.monotonic()))):
            self._handle(MessageArrived(*heard) if isinstance(heard, tuple) else GarbageArrived(heard))

    def _handle(self, event: SessionEvent) -> None:
        for effect in self._session.handle(event, time.monotonic()):
            self._perform(effect)

    def _perform(self, effect: SessionEffect) -> None:
        match effect:
            case Connect():
                self._link.open(effect.endpoint_index)
            case SendHello():
                hello = msgspec.structs.replace(self._hello(), request=effect.key)
                self._link.send(_as_before(hello) if effect.plain else hello)
            case SendHeartbeat():
                beat = self._heartbeat() if self._heartbeat else Heartbeat(seq=0)
                self._link.send(msgspec.structs.replace(beat, seq=effect.seq))
            case Transmit():
                self._link.send(effect.message, effect.blob)
            case Resolve():
                self._resolve(effect.key, (effect.answer, effect.blob))
            case Reject():
                self._resolve(effect.key, effect.error)
            case Join():
                self._joined(effect.welcome)
            case Deliver():
                self._deliver(effect.message)
            case GiveUp():
                self._give_up(effect.error)
            case _:
                assert_never(effect)

    def _trust_advice(self) -> str:
        """What an operator does to have this agent trusted."""
        hello = self._hello()
        command = f"`weightbus trust add {hello.agent} --role {hello.role.value} --channels {hello.channel}`"
        ours = f" with the key of fingerprint {self._fingerprint}, which this agent has" if self._fingerprint else ""
        return f"where the coordinator runs, run {command}{ours}"

    def _send_topology(self, omit: int = 0) -> None:
        """Report the topology, without the newest `omit` abilities that it names."""
        if self._topology is None:
            return
        self._topology_at = float("inf")
        key = self.new_request()
        try:
            message = msgspec.structs.replace(self._topology(), request=key)
        except OSError as error:  # such as too many open files: sent as it is, it would leave out what is there
            get_log(__name__).warning("topology_not_told", reason=str(error), again_s=TOPOLOGY_AGAIN_S)
            self._topology_at = self._clock() + TOPOLOGY_AGAIN_S
            return
        for left_out in _ABILITIES[:omit]:
            message = msgspec.structs.replace(message, **left_out)
        self._topology_request, self._topology_omits = key, omit
        self._handle(RequestSubmitted(key, message, None, self._clock() + TOPOLOGY_S, TOPOLOGY_S))

    def _send_less_topology(self) -> None:
        """The last report was not understood: send it with fewer abilities, if it named any."""
        if self._topology is None or self._session.phase is not SessionPhase.JOINED:
            return
        where = self._topology()
        for omit in range(self._topology_omits + 1, len(_ABILITIES) + 1):
            if msgspec.structs.replace(where, **_ABILITIES[omit - 1]) != where:
                self._send_topology(omit)
                return

    def _resolve(self, key: RequestId, outcome: _Answered | WeightbusError) -> None:
        if key == self._topology_request and isinstance(outcome, WeightbusError):
            get_log(__name__).info("topology_not_told", reason=str(outcome))
            self._send_less_topology()
        with self._changed:
            future = self._futures.pop(key, None)
        if future is None:
            return  # the caller has stopped waiting
        if isinstance(outcome, WeightbusError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _joined(self, welcome: Welcome) -> None:
        if self._welcome is not None and self._welcome.boot != welcome.boot:
            self._known_blobs.clear()  # blobs live in the coordinator's memory
        self._welcome = welcome
        self._send_topology()
        if self._first.done():
            self._deliver(welcome)
        else:
            self._first.set_result(welcome)

    def _deliver(self, message: ToAgent) -> None:
        with self._changed:
            if message not in self._receive_queue:  # commands are repeated until answered; one unread copy is enough
                self._receive_queue.append(message)
                self._changed.notify_all()

    def _give_up(self, error: WeightbusError) -> None:
        with self._changed:
            self._end_error = self._end_error or error
            waiting = list(self._futures.values())
            self._futures.clear()
            self._changed.notify_all()
        for future in waiting:
            future.set_exception(error)
        if not self._first.done():
            self._first.set_exception(error)


def _as_before(hello: Hello) -> Hello:
    """`hello` without what coordinators of earlier releases do not know."""
    engine = hello.engine and msgspec.structs.replace(hello.engine, generation="", follows="", socket="")
    return msgspec.structs.replace(hello, engine=engine)


def _pages(blob: bytes) -> int:
    return max(1, -(-len(blob) // MAX_PAGE_BYTES))


def _key_of(message: ToCoordinator) -> RequestId:
    key: object = getattr(message, "request", None)
    if not isinstance(key, str):
        raise TypeError(f"{message.kind} has no reply: use post()")
    return RequestId(key)


K = TypeVar("K", bound=Hashable)

MAX_KNOWN: Final = 256


class BoundedSet(dict[K, None]):
    """A set of the last keys that were added. A key that was dropped only costs what it would have saved."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        """Keeps `most` keys."""
        super().__init__()
        self._most = most

    def add(self, *keys: K) -> None:
        """Add `keys`, in their order, as the last ones."""
        for key in keys:
            self.pop(key, None)
            self[key] = None
        for old in list(self)[: -self._most]:  # another thread may `clear` meanwhile
            self.pop(old, None)
