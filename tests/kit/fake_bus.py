"""A coordinator in one object, spoken to without sockets: runs the plain round, and deviates when it is told to."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping

from weightbus.control import protocol as m
from weightbus.control.protocol.errors import CoordinatorUnreachable, NotTrusted, RequestRefused
from weightbus.control.protocol.messages import AgentId, Digest, Epoch, RequestId
from weightbus.dataplane.tensors.manifest import blob_digest

_DIRECT = m.TransportKind.DIRECT


def engine(
    tp: int = 1, live_digest: str = "", transports: tuple[m.TransportKind, ...] = (m.TransportKind.LOCAL,)
) -> m.EngineInfo:
    """An engine agent's account of a server on this host."""
    return m.EngineInfo(
        url="http://127.0.0.1:1",
        server_version="0.5.23",
        tp=tp,
        pp=1,
        dp=1,
        device="cpu",
        host="here",
        transports=transports,
        live_digest=live_digest,
    )


class FakeCoordinator:
    """Satisfies the leader's `Bus`. Engines are told nothing: what a sender did not fail to send, they have."""

    def __init__(self, engines: dict[str, m.EngineInfo] | None = None) -> None:
        self.engines = {"e0": engine()} if engines is None else engines
        self.committed: m.HeldVersion | None = None
        self.epoch = 0
        self.boot = 1
        self.blobs: dict[str, bytes] = {}
        self.heard: list[m.ToCoordinator] = []
        self.refusals: dict[type[m.Message], deque[Exception]] = {}
        """Raised instead of an answer to the next messages of a type."""
        self.after: dict[type[m.Message], deque[Callable[[], None]]] = {}
        """Called after the answer to the next messages of a type was made."""
        self.supports_deferred_digests = True
        """The engines know versions whose digest table follows."""
        self.redrives = 0
        self.closed = False
        self.refusal: tuple[RequestRefused, float] | None = None
        """The refusal that keeps the agent out now."""
        self.unread_at: float | None = None
        self.untrusted: NotTrusted | None = None
        self._inbox: deque[m.ToAgent] = deque()
        self._arrived = threading.Condition()
        self._keys = itertools.count(1)
        self._round: m.Publish | None = None

    # -- the leader's side -----------------------------------------------------------------------------------------

    def request(self, message: m.ToCoordinator, blob: bytes | None = None, deadline_s: float = 30.0) -> m.ToAgent:
        assert blob is None
        assert deadline_s > 0
        self.heard.append(message)
        refusals = self.refusals.get(type(message))
        if refusals:
            raise refusals.popleft()
        answer = self._answer(message)
        hooks = self.after.get(type(message))
        if hooks:
            hooks.popleft()()
        return answer

    def status(self, deadline_s: float = 10.0) -> bytes:
        assert deadline_s > 0
        return b"{}"

    def request_with(
        self, message: m.ToCoordinator, blobs: Mapping[Digest, bytes], deadline_s: float = 30.0, blobs_s: float = 60.0
    ) -> m.ToAgent:
        assert blobs_s > 0
        for name, blob in blobs.items():
            assert name == blob_digest(blob)
            self.blobs[name] = blob
        return self.request(message, None, deadline_s)

    def put_blob(self, blob: bytes, deadline_s: float = 60.0, digest: str = "") -> Digest:
        assert deadline_s > 0
        assert digest == blob_digest(blob)
        self.blobs[digest] = blob
        return Digest(digest)

    def next(self, timeout_s: float) -> m.ToAgent | None:
        with self._arrived:
            self._arrived.wait_for(lambda: self._inbox, timeout_s)
            return self._inbox.popleft() if self._inbox else None

    def new_request(self) -> RequestId:
        return RequestId(f"test-{next(self._keys)}")

    def close(self) -> None:
        self.closed = True

    # -- the test's side ---------------------------------------------------------------------------------------------

    def say(self, message: m.ToAgent) -> None:
        """Put a message into the leader's inbox."""
        with self._arrived:
            self._inbox.append(message)
            self._arrived.notify_all()

    def restart(self, *, committed: m.HeldVersion | None = None) -> None:
        """Another life: the round is forgotten, what was committed is not."""
        self.boot += 1
        self.epoch += 1
        self._round = None
        self.committed = committed or self.committed
        self.say(self.welcome())

    def welcome(self) -> m.Welcome:
        return m.Welcome(
            request=RequestId("hello"),
            boot=self.boot,
            epoch=Epoch(self.epoch),
            committed=self.committed,
            heartbeat_s=1.0,
            silence_s=10.0,
        )

    def send(self, publish: m.Publish) -> None:
        """Ask for everything, to every engine."""
        receivers = tuple(
            m.ReceivingEngine(engine=AgentId(name), transport=info.transports[0], tp=info.tp)
            for name, info in self.engines.items()
        )
        self.say(
            m.Send(
                channel=publish.channel,
                epoch=Epoch(self.epoch),
                version=publish.version,
                receivers=receivers,
                deadline_s=publish.policy.transfer_timeout_s,
            )
        )

    def finish(
        self,
        publish: m.Publish,
        outcome: m.Outcome,
        reason: str = "",
        failed: tuple[str, ...] = (),
        table: Digest | None = None,
    ) -> None:
        """The round is over. `table` is what `publish` left open."""
        if outcome is m.Outcome.COMMITTED:
            known = table or publish.table
            assert known in self.blobs
            self.committed = m.HeldVersion(version=publish.version, manifest=publish.manifest, table=known)
        reports = tuple(
            m.EngineReport(engine=AgentId(name), outcome=m.Outcome.QUARANTINED if name in failed else outcome)
            for name in self.engines
        )
        self._round = None
        self.say(
            m.RoundDone(
                channel=publish.channel,
                epoch=publish.epoch,
                version=publish.version,
                outcome=outcome,
                reason=reason,
                engines=reports,
                seconds={"prepare": 0.1, "pause": 0.1, "transfer": 0.1, "total": 9.0},
            )
        )

    def said(self, kind: type[m.Message]) -> list[m.ToCoordinator]:
        """Messages of one type that were heard."""
        return [message for message in self.heard if isinstance(message, kind)]

    def _answer(self, message: m.ToCoordinator) -> m.ToAgent:
        match message:
            case m.Acquire():
                self.epoch += 1
                kinds = {each.transports[0] for each in self.engines.values()}
                return m.Granted(
                    request=message.request,
                    channel=message.channel,
                    epoch=Epoch(self.epoch),
                    lease_s=10.0,
                    committed=self.committed,
                    engines=self.engines,
                    may_defer_digests=self.supports_deferred_digests and kinds == {_DIRECT},
                )
            case m.Publish():
                if message.epoch != self.epoch and self._round is None:
                    raise RequestRefused(m.RefusalCode.STALE_EPOCH, "somebody else has the channel")
                if self._round is None:
                    self._round = message
                    if self.engines:
                        self.send(message)
                    else:
                        self.finish(message, m.Outcome.COMMITTED)
            case m.Offered() if self._round is None:
                raise RequestRefused(m.RefusalCode.NOT_ALLOWED, "there is no round")
            case m.Sent():
                self._sent(message)
            case m.Abandon() if self._round is not None:
                self.finish(self._round, m.Outcome.ABORTED, message.reason)
            case _:
                pass
        return m.Ack(request=message.request)  # type: ignore[union-attr]  # all that the leader asks have a key

    def _sent(self, message: m.Sent) -> None:
        publish = self._round
        if publish is None:
            raise RequestRefused(m.RefusalCode.NOT_ALLOWED, "there is no round")
        if message.failed and self.redrives:
            self.redrives -= 1
            self.epoch += 1
            self.send(publish)
        elif len(message.failed) == len(self.engines):
            self.finish(publish, m.Outcome.ABORTED, "no engine took the version", tuple(message.failed))
        else:
            self.finish(publish, m.Outcome.COMMITTED, "", tuple(message.failed), message.table or None)


def silence() -> CoordinatorUnreachable:
    """What a client raises when nothing comes back."""
    return CoordinatorUnreachable("tcp://127.0.0.1:1", 0.1, "a request", "nothing")
