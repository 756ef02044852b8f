"""An agent's line to the coordinator: the real `control/bus/client.py`, stepped by hand instead of by its thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Self

from weightbus.control.bus.client import BusClient, BusSettings
from weightbus.control.bus.session import AgentSession, RequestSubmitted, SessionEvent, Ticked
from weightbus.control.protocol.errors import RequestRefused, WeightbusError
from weightbus.control.protocol.messages import (
    MAX_PAGE_BYTES,
    BlobPage,
    Digest,
    GetBlob,
    Heartbeat,
    Hello,
    PutBlob,
    RefusalCode,
    RequestId,
    ToAgent,
    ToCoordinator,
    Topology,
)

from .network import Network
from .process import Bell, Process, Thread

ENDPOINT = "sim"


class _Alone:
    """A `threading.Condition` where there is one thread: no thread waits, and none is kept out."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def notify_all(self) -> None:
        """No thread waits."""

    def wait_for(self, predicate: Callable[[], object], timeout: float) -> bool:
        """Never waits."""
        del timeout
        return bool(predicate())


class _Promised:
    """A `concurrent.futures.Future` where there is one thread."""

    def __init__(self, told: Callable[[], None]) -> None:
        """`told` is called when it is settled."""
        self._told = told
        self._settled = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is settled."""
        return self._settled

    def set_result(self, value: object) -> None:
        """It went well."""
        self._value, self._settled = value, True
        self._told()

    def set_exception(self, error: BaseException) -> None:
        """It did not."""
        self._error, self._settled = error, True
        self._told()

    def result(self) -> Any:
        """What came of it."""
        if self._error is not None:
            raise self._error
        return self._value


class Client(BusClient):
    """`BusClient` for one life of an agent. A caller that would block yields from here instead."""

    def __init__(
        self,
        process: Process,
        network: Network,
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat] | None,
        topology: Callable[[], Topology] | None = None,
    ) -> None:
        from .network import Line

        self._process, self._judge = process, network.judge
        super().__init__(
            BusSettings(endpoint=ENDPOINT), hello, heartbeat, topology=topology, link=Line(network, process)
        )
        self._clock = process.clock
        self._changed = _Alone()  # type: ignore[assignment]
        self._keys = f"{process.name}.{process.life}.{process.loop.steps}"
        self._session = AgentSession(ENDPOINT, self._keys, BusSettings().timing, process.clock())
        self._alarm = process.alarm(self.turn)
        self.bell = Bell()
        """Rung when something came into the inbox."""

    @property
    def line(self) -> Any:
        """The simulated link."""
        return self._link

    def _handle(self, event: SessionEvent) -> None:
        for effect in self._session.handle(event, self._process.clock()):
            self._perform(effect)

    def turn(self) -> None:
        """What the client's thread does when it wakes up."""
        if self._closing.is_set():
            return
        before = len(self._receive_queue)
        self._step()
        if (deadline := self._session.next_deadline()) != float("inf"):
            self._alarm.set(deadline)
        if len(self._receive_queue) > before:
            self.bell.ring()

    def leave(self) -> None:
        """`close`, without its wait."""
        self._closing.set()
        self._link.close()

    def take(self) -> ToAgent | None:
        """`next(0)`."""
        return self.next(0.0)

    # -- what blocks in the real one

    def asking(self, message: ToCoordinator, blob: bytes | None = None, deadline_s: float = 30.0) -> Thread:
        """`request`: yields until it is answered; returns answer and blob, or raises."""
        return (yield from self.begin(message, blob, deadline_s))

    def begin(self, message: ToCoordinator, blob: bytes | None, deadline_s: float) -> Thread:
        """`ask`: it is sent; what is returned yields until it is answered."""
        key = RequestId(message.request)  # type: ignore[union-attr]
        self._judge.asked(message)
        if self._end_error is not None:
            return self._ended(self._end_error)
        bell = Bell()
        future = _Promised(bell.ring)
        self._futures[key] = future  # type: ignore[assignment]
        self._submitted.put(RequestSubmitted(key, message, blob, self._process.clock() + deadline_s, deadline_s))
        self.turn()
        return self._answered(future, bell)

    def _answered(self, future: _Promised, bell: Bell) -> Thread:
        if not future.done():
            yield bell
        try:
            return future.result()
        except RequestRefused as refused:
            if refused.code is RefusalCode.UNKNOWN_BLOB:
                self._known_blobs.clear()
            raise

    @staticmethod
    def _ended(error: WeightbusError) -> Thread:
        raise error
        yield

    def putting(self, blob: bytes, deadline_s: float) -> Thread:
        """`put_blob`."""
        digest = Digest(hashlib.sha256(blob).hexdigest())
        until = self._process.clock() + deadline_s
        while digest not in self._known_blobs:
            boot = self._coordinator_boot()
            pages = max(1, -(-len(blob) // MAX_PAGE_BYTES))
            for page in range(pages):
                data = blob[page * MAX_PAGE_BYTES : (page + 1) * MAX_PAGE_BYTES]
                message = PutBlob(request=self.new_request(), digest=digest, page=page, pages=pages)
                yield from self.asking(message, data, max(0.0, until - self._process.clock()))
            if boot == self._coordinator_boot():
                self._known_blobs.add(digest)
        return digest

    def asking_with(self, message: ToCoordinator, blobs: Sequence[bytes], deadline_s: float, blobs_s: float) -> Thread:
        """`request_with`, of blobs of one page each."""
        named = {Digest(hashlib.sha256(blob).hexdigest()): blob for blob in blobs}
        lacking = {digest: blob for digest, blob in named.items() if digest not in self._known_blobs}
        boot = self._coordinator_boot()
        waits = [
            self.begin(PutBlob(request=self.new_request(), digest=digest, page=0, pages=1), blob, blobs_s)
            for digest, blob in lacking.items()
        ]
        answer = self.begin(message, None, deadline_s)
        for wait in waits:
            yield from wait
        if boot == self._coordinator_boot():
            self._known_blobs.update(lacking)
        try:
            return (yield from answer)
        except RequestRefused as refused:
            if refused.code is not RefusalCode.UNKNOWN_BLOB:
                raise
        for blob in blobs:
            yield from self.putting(blob, blobs_s)
        return (yield from self.asking(message, None, deadline_s))

    def getting(self, digest: Digest, deadline_s: float) -> Thread:
        """`get_blob`."""
        cached = self._blob_cache.get(digest)
        if cached is not None:
            return cached
        until = self._process.clock() + deadline_s
        pages: list[bytes] = []
        count = 1
        while len(pages) < count:
            message = GetBlob(request=self.new_request(), digest=digest, page=len(pages))
            answer, data = yield from self.asking(message, None, max(0.0, until - self._process.clock()))
            if isinstance(answer, BlobPage):
                count = answer.pages
            pages.append(data or b"")
        blob = b"".join(pages)
        self._remember(digest, blob)
        return blob

    def starting(self, deadline_s: float) -> Thread:
        """`start`: yields until the first `Welcome`."""
        bell = Bell()
        self._first.add_done_callback(lambda _: bell.ring())
        self._handle(Ticked())
        self.turn()
        yield deadline_s, bell
        if not self._first.done():
            raise self._session.unreachable("Hello", deadline_s, self._process.clock())
        return self._first.result(0)
