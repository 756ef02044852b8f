"""What agents use to speak to the coordinator: requests that are answered or end in a typed error, and an inbox.

One background thread owns the connection. It says Hello, sends heartbeats, repeats what is not answered, and connects
anew when the coordinator falls silent; session.py decides when. Requests may be made from any thread. A reconnect is
seen only as a new `Welcome` in the inbox: outstanding requests are simply sent again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import Final, Self, assert_never

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
from ..security import CurveFiles, agent_key_files
from .bounded_set import BoundedSet
from .dealer import DealerLink
from .interface import AgentLink
from .session import (
    AgentSession,
    Asked,
    Connect,
    Deliver,
    Effect,
    Event,
    Garbled,
    GiveUp,
    Heard,
    Join,
    Phase,
    Reject,
    Resolve,
    SayAlive,
    SayHello,
    Ticked,
    Timing,
    Transmit,
)

PAGES_AHEAD: Final = 4
"""As many as a digest table of some hundred thousand tensors has; more are given one after another."""
CACHED_BLOBS: Final = 8
"""Manifests and digest tables kept: those of the version that is served and of the one that comes."""
PAGE_S: Final = 10.0
"""After so long a page of a blob is asked for under another key, unless it is not wanted any more."""
CLOSE_S: Final = 1.0
_GRACE_S: Final = 5.0
"""How much longer than its deadline a request waits for the thread to say so; only a thread that hangs needs it."""

LOCATE_S: Final = 10.0
"""How long the coordinator is told where this agent is: one that does not know the message never acknowledges it."""

_Answered = tuple[ToAgent, bytes | None]


class _Locate:
    """Say anew where this agent is."""


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the coordinator is, and how patient to be."""

    endpoint: str = "tcp://127.0.0.1:5750"
    """Of several, comma-separated: the one that leads is found."""
    curve: CurveFiles | None = None
    timing: Timing = Timing()

    def check(self) -> None:
        """Raise the `ConfigurationError` that connecting would: keys that are not there, or needed and not given."""
        DealerLink(self.endpoint, self.curve).close()


def check_keys(endpoint: str, keys: Path | None, name: str, *, insecure_loopback: bool) -> None:
    """Raise the `ConfigurationError` that an agent's start would, as far as its key files and its endpoint tell."""
    BusSettings(endpoint=endpoint, curve=agent_key_files(keys, name, insecure_loopback=insecure_loopback)).check()


class BusClient:
    """One agent's line to the coordinator."""

    def __init__(
        self,
        settings: BusSettings,
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat] | None = None,
        *,
        topology: Callable[[], Topology] | None = None,
        link: AgentLink | None = None,
    ) -> None:
        """`hello`, `heartbeat` and `topology` are called on the client's thread, now and then, and must be quick.

        The client fills in `Hello.request`, `Heartbeat.seq` and `Topology.request` itself; the topology is told after
        every `Welcome`. `link` stands in for the socket in tests.
        """
        self.endpoint = settings.endpoint
        self._hello = hello
        self._heartbeat = heartbeat
        self._topology = topology
        self._clock = time.monotonic
        self._locating: RequestId | None = None
        self._whole = False  # `_locating` names also what an older coordinator does not understand
        self._link: AgentLink = link or DealerLink(settings.endpoint, settings.curve)
        self._keys = os.urandom(8).hex()
        self._counter = itertools.count(1)
        self._session = AgentSession(settings.endpoint, self._keys, settings.timing, time.monotonic())
        self._submitted: queue.SimpleQueue[Asked | ToCoordinator | _Locate] = queue.SimpleQueue()
        self._futures: dict[RequestId, Future[_Answered]] = {}
        self._inbox: deque[ToAgent] = deque()
        self._changed = threading.Condition()
        self._first: Future[Welcome] = Future()
        self._welcome: Welcome | None = None
        self._over: WeightbusError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightbus-client", daemon=True)
        self._known = BoundedSet[Digest]()
        self._cache: OrderedDict[Digest, bytes] = OrderedDict()

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
            raise self._session.unreachable("Hello", deadline_s, time.monotonic()) from None

    def close(self) -> None:
        """Say Bye and stop, within about a second. What still waits for an answer raises `ClientClosed`."""
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
        """The newest one."""
        return self._welcome

    @property
    def committed(self) -> Version | None:
        """The version that is committed in this agent's channel, as the coordinator said it last."""
        return self._session.committed

    @property
    def max_lag(self) -> int:
        """Versions that an engine may be behind `committed` and still be ready, as the coordinator said it last."""
        return self._session.max_lag

    @property
    def heard_at(self) -> float | None:
        """When the coordinator was last heard of, in whatever words; `time.monotonic` seconds."""
        return self._session.heard_at

    def new_request(self) -> RequestId:
        """A request key that no other request has."""
        return RequestId(f"{self._keys}-{next(self._counter)}")

    # -- messages ------------------------------------------------------------------------------------------------------

    def request(self, message: ToCoordinator, blob: bytes | None = None, deadline_s: float = 30.0) -> ToAgent:
        """Ask, and wait for the answer; from any thread.

        Sent again until answered: the coordinator answers the same key with the same answer. Raises `RequestRefused`,
        `CoordinatorUnreachable` or `ClientClosed`; `ProtocolError` if `message` is one that nobody could read.
        """
        return self._ask(message, blob, deadline_s)[0]

    def ask(self, message: ToCoordinator, deadline_s: float = 30.0) -> Callable[[], ToAgent]:
        """As `request`, in two steps: sent now; what is returned waits for the answer, and raises as `request` does.

        What is asked before an earlier answer has come is sent behind that question, in this order. Each has a key of
        its own: to ask the same again, wait for its answer first.
        """
        wait = self._begin(message, None, deadline_s)
        return lambda: wait()[0]

    def request_with(
        self, message: ToCoordinator, blobs: Mapping[Digest, bytes], deadline_s: float = 30.0, blobs_s: float = 60.0
    ) -> ToAgent:
        """As `request`, of a message that names `blobs`, by their digests: what the coordinator lacks goes ahead of it.

        Few pages are not waited for before `message` is sent. Those that got lost on the way, or that the coordinator
        has no more, are put again, and `message` is asked again. `blobs_s` is the deadline of the pages.
        """
        lacking = {name: blob for name, blob in blobs.items() if name not in self._known}
        if sum(_pages(blob) for blob in lacking.values()) > PAGES_AHEAD:
            for name, blob in lacking.items():
                self.put_blob(blob, blobs_s, name)
            lacking = {}
        boot = self._boot()
        waits = [self._begin(*page, blobs_s) for name, blob in lacking.items() for page in self._paged(name, blob)]
        answer = self._begin(message, None, deadline_s)
        for wait in waits:
            wait()
        if boot == self._boot():
            self._known.update(lacking)
        try:
            return answer()[0]
        except RequestRefused as refused:
            if refused.code is not RefusalCode.UNKNOWN_BLOB:
                raise
        for name, blob in blobs.items():
            self.put_blob(blob, blobs_s, name)
        return self.request(message, deadline_s=deadline_s)

    def post(self, message: ToCoordinator) -> None:
        """Send without an answer. It may get lost."""
        codec.TO_COORDINATOR.encode(message)
        self._submitted.put(message)
        self._link.wake()

    def locate(self) -> None:
        """Where this agent is, or what it knows of that, has changed: tell it anew."""
        self._submitted.put(_Locate())
        self._link.wake()

    def next(self, timeout_s: float) -> ToAgent | None:
        """The next command, or `Welcome` after a reconnect; None after `timeout_s`.

        Raises what ended the client, once everything that came before is read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._over, timeout_s)
            if self._inbox:
                return self._inbox.popleft()
            if self._over is not None:
                raise self._over
            return None

    def status(self, deadline_s: float = 10.0) -> bytes:
        """The coordinator's status document, JSON."""
        _, document = self._ask(GetStatus(request=self.new_request()), None, deadline_s)
        return document or b""

    # -- blobs ---------------------------------------------------------------------------------------------------------

    def put_blob(self, blob: bytes, deadline_s: float = 60.0, digest: str = "") -> Digest:
        """Give the coordinator `blob` in pages, unless it is known to have it; returns its digest.

        `digest` is that of the blob, if it is known already: the coordinator takes pages under no other.
        After `RequestRefused(UNKNOWN_BLOB)` nothing is taken for known any more: put again, then ask again.
        """
        name = Digest(digest or hashlib.sha256(blob).hexdigest())
        until = time.monotonic() + deadline_s
        while name not in self._known:
            boot = self._boot()
            self._put_pages(name, blob, until, deadline_s)
            if boot == self._boot():  # else some pages went to a coordinator that is no more
                self._known.add(name)
        return name

    def get_blob(self, digest: Digest, deadline_s: float = 60.0, unwanted: Callable[[], bool] = lambda: False) -> bytes:
        """The blob of that digest, from the coordinator or from the last few that were read.

        `unwanted` is asked between pages, and every `PAGE_S` while a page does not come: raises `BlobCancelled` once
        it says yes.
        """
        cached = self._cache.get(digest)
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
                answer, data = self._ask(message, None, min(left, PAGE_S))
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
            self._ask(message, data, min(deadline_s, max(0.0, until - time.monotonic())))

    def _paged(self, digest: Digest, blob: bytes) -> Iterator[tuple[PutBlob, bytes]]:
        pages = _pages(blob)
        for page in range(pages):
            data = blob[page * MAX_PAGE_BYTES : (page + 1) * MAX_PAGE_BYTES]
            yield PutBlob(request=self.new_request(), digest=digest, page=page, pages=pages), data

    def _remember(self, digest: Digest, blob: bytes) -> None:
        with self._changed:
            self._cache[digest] = blob
            while len(self._cache) > CACHED_BLOBS:
                self._cache.popitem(last=False)

    def _boot(self) -> int:
        return self._welcome.boot if self._welcome else 0

    # -- between the threads -------------------------------------------------------------------------------------------

    def _ask(self, message: ToCoordinator, blob: bytes | None, deadline_s: float) -> _Answered:
        return self._begin(message, blob, deadline_s)()

    def _begin(self, message: ToCoordinator, blob: bytes | None, deadline_s: float) -> Callable[[], _Answered]:
        key = _key_of(message)
        codec.TO_COORDINATOR.encode(message, blob)  # what nobody could read is the caller's to know, not the thread's
        future: Future[_Answered] = Future()
        with self._changed:
            if self._over is not None:
                raise self._over
            self._futures[key] = future
        expires_at = time.monotonic() + deadline_s
        self._submitted.put(Asked(key, message, blob, expires_at, deadline_s))
        self._link.wake()
        return lambda: self._answer(key, message.kind, future, expires_at, deadline_s)

    def _answer(
        self, key: RequestId, what: str, future: Future[_Answered], expires_at: float, deadline_s: float
    ) -> _Answered:
        try:
            return future.result(max(0.0, expires_at - time.monotonic()) + _GRACE_S)
        except FutureTimeoutError:
            raise self._session.unreachable(what, deadline_s, time.monotonic()) from None
        except RequestRefused as refused:
            if refused.code is RefusalCode.UNKNOWN_BLOB:
                self._known.clear()
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
        except Exception as error:  # noqa: BLE001  # whoever waits must hear of it, whatever it was
            closed = ClientClosed(f"the client's thread died of {type(error).__name__}: {error}")
            closed.__cause__ = error
            self._give_up(closed)
        finally:
            self._link.close()

    def _step(self) -> None:
        self._handle(Ticked())
        while not self._submitted.empty():
            item = self._submitted.get()
            if isinstance(item, Asked):
                self._handle(item)
            elif isinstance(item, _Locate):
                self._say_where()
            else:
                self._link.send(item)
        for heard in self._link.poll(min(1.0, max(0.0, self._session.next_deadline() - time.monotonic()))):
            self._handle(Heard(*heard) if isinstance(heard, tuple) else Garbled(heard))

    def _handle(self, event: Event) -> None:
        for effect in self._session.handle(event, time.monotonic()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Connect():
                self._link.open(effect.place)
            case SayHello():
                self._link.send(msgspec.structs.replace(self._hello(), request=effect.key))
            case SayAlive():
                beat = self._heartbeat() if self._heartbeat else Heartbeat(seq=0)
                self._link.send(msgspec.structs.replace(beat, seq=effect.seq))
            case Transmit():
                self._link.send(effect.message, effect.blob)
            case Resolve():
                self._settle(effect.key, (effect.answer, effect.blob))
            case Reject():
                self._settle(effect.key, effect.error)
            case Join():
                self._joined(effect.welcome)
            case Deliver():
                self._deliver(effect.message)
            case GiveUp():
                self._give_up(effect.error)
            case _:
                assert_never(effect)

    def _say_where(self, *, whole: bool = True) -> None:
        if self._topology is None:
            return
        key, where = self.new_request(), self._topology()
        self._locating, self._whole = key, whole and where.supports_deferred_digests
        message = msgspec.structs.replace(where, request=key, supports_deferred_digests=self._whole)
        self._handle(Asked(key, message, None, self._clock() + LOCATE_S, LOCATE_S))

    def _settle(self, key: RequestId, outcome: _Answered | WeightbusError) -> None:
        if key == self._locating and isinstance(outcome, WeightbusError):
            get_log(__name__).info("topology_not_told", reason=str(outcome))
            if self._whole and self._session.phase is Phase.JOINED:
                self._say_where(whole=False)
        with self._changed:
            future = self._futures.pop(key, None)
        if future is None:
            return  # its caller has stopped waiting
        if isinstance(outcome, WeightbusError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _joined(self, welcome: Welcome) -> None:
        if self._welcome is not None and self._welcome.boot != welcome.boot:
            self._known.clear()  # blobs live in the coordinator's memory
        self._welcome = welcome
        self._say_where()
        if self._first.done():
            self._deliver(welcome)
        else:
            self._first.set_result(welcome)

    def _deliver(self, message: ToAgent) -> None:
        with self._changed:
            if message not in self._inbox:  # commands are repeated until answered; one unread copy is enough
                self._inbox.append(message)
                self._changed.notify_all()

    def _give_up(self, error: WeightbusError) -> None:
        with self._changed:
            self._over = self._over or error
            waiting = list(self._futures.values())
            self._futures.clear()
            self._changed.notify_all()
        for future in waiting:
            future.set_exception(error)
        if not self._first.done():
            self._first.set_exception(error)


def _pages(blob: bytes) -> int:
    return max(1, -(-len(blob) // MAX_PAGE_BYTES))


def _key_of(message: ToCoordinator) -> RequestId:
    key: object = getattr(message, "request", None)
    if not isinstance(key, str):
        raise TypeError(f"{message.kind} is not answered: use post()")
    return RequestId(key)
