"""What is answered: yes or why not; the same to the same request; how rounds ended, also before a restart. Pure."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from ..protocol import (
    Abandon,
    Ack,
    Acquire,
    AgentId,
    EngineReport,
    Epoch,
    Granted,
    HeldVersion,
    Offered,
    Outcome,
    Publish,
    RefusalCode,
    Release,
    RequestId,
    RoundDone,
    Sent,
    Version,
)
from .effects import Committed, RoundClosed

KeyedRequest = Acquire | Release | Publish | Offered | Sent | Abandon
"""Requests whose answer is remembered."""

MAX_ROUND_REPLIES: Final = 32
"""Finished rounds whose answer is remembered, per channel, in memory and by the journal: the trainer of one asks about
its last. Each may take a megabyte, in which it names every engine; but an engine is in one channel."""
MAX_GRANTS: Final = 64
"""Grants that are remembered: each describes every engine that was there, a megabyte of a large fleet."""

MAX_HISTORY: Final = 64
"""Committed versions that are remembered, so that people can see what a channel may go back to."""
_NOT_CLOSED: Final = "was committed; the coordinator ended before the round did, and how its engines fared was not kept"

_ENCODE: Final = msgspec.msgpack.Encoder()


class Decision(msgspec.Struct, frozen=True):
    """An answer and why. `code` is set when the answer is no."""

    code: RefusalCode | None
    reason: str = ""
    retry_after_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing speaks against it."""
        return self.code is None


YES = Decision(None)


class _Reply(NamedTuple):
    kind: str
    question: bytes
    """Its digest: an offer may be long, and thousands are remembered."""
    reply: Ack | Granted


class ReplyCache:
    """What requests were answered, by who asked and under which key: asked again, the same is said again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: OrderedDict[tuple[AgentId, RequestId], _Reply] = OrderedDict()
        self._grants: deque[tuple[AgentId, RequestId]] = deque()

    def get(self, agent: AgentId, message: KeyedRequest) -> Ack | Granted | Decision | None:
        """What `agent` was told, unless that was too long ago; or why its key is not for this question."""
        known = self._by_key.get((agent, message.request))
        if known is None:
            return None
        if known.question == _digest(message):
            return known.reply
        return key_reused(message, known.kind)

    def remember(self, agent: AgentId, message: KeyedRequest, reply: Ack | Granted) -> None:
        """`agent` asked `message` and is told `reply`; the oldest one may be forgotten."""
        self._by_key[agent, message.request] = _Reply(message.kind, _digest(message), reply)
        if isinstance(reply, Granted):
            self._grants.append((agent, message.request))
            if len(self._grants) > MAX_GRANTS:
                self._by_key.pop(self._grants.popleft(), None)
        while len(self._by_key) > self._limit:
            self._by_key.popitem(last=False)

    def __len__(self) -> int:
        return len(self._by_key)


def _digest(message: KeyedRequest) -> bytes:
    return hashlib.blake2b(_ENCODE.encode(message), digest_size=16).digest()


def question(message: KeyedRequest) -> str:
    """Its digest in hex: equal for equal messages, also of a sender that knows fewer fields."""
    return _digest(message).hex()


def key_reused(message: KeyedRequest, before: str) -> Decision:
    """For a key that was used already."""
    reason = f"key {message.request} was used for another {before}: every question has a key of its own"
    return Decision(RefusalCode.NOT_ALLOWED, reason)


class RoundReply(msgspec.Struct, frozen=True):
    """How the round of a `Publish` ended, as it is remembered under the key of that."""

    done: RoundDone
    question: str = ""
    """Of the `Publish`, see `question`; empty if it was written before these were kept."""
    closed: bool = True
    """Otherwise all that is known is that its version became durable: `done` names no engines."""


class RoundReplies:
    """How rounds ended, by the key of their `Publish`, the oldest forgotten first."""

    def __init__(self, restored: Mapping[RequestId, RoundReply]) -> None:
        self.last: RoundDone | None = None
        """The round that ended last, in this life of the coordinator."""
        self._by_request = dict(restored)

    def get(self, request: RequestId) -> RoundReply | None:
        """How the round of `request` ended, if it did."""
        return self._by_request.get(request)

    def contradicts(self, message: Publish) -> Decision | None:
        """Why the round of this key was not this one's; None when it was, or when there was none."""
        known = self._by_request.get(message.request)
        if known is None:
            return None
        same = (known.done.epoch, known.done.version) == (message.epoch, message.version)
        if same and known.question in ("", question(message)):
            return None
        return key_reused(message, "Publish")

    def remember(self, request: RequestId, round_reply_of: RoundReply) -> None:
        """The round of `request` ended like this."""
        self.last = round_reply_of.done
        self._by_request[request] = round_reply_of
        while len(self._by_request) > MAX_ROUND_REPLIES:
            self._by_request.pop(next(iter(self._by_request)))


def already_committed(message: Publish, epoch: Epoch, holders: Sequence[AgentId]) -> RoundDone:
    """For a version that was committed before, at `epoch`, and that `holders` hold today."""
    return RoundDone(
        channel=message.channel,
        epoch=message.epoch,
        version=message.version,
        outcome=Outcome.COMMITTED,
        reason=f"was committed already, at epoch {epoch}",
        engines=tuple(
            EngineReport(engine=name, outcome=Outcome.COMMITTED, version=message.version) for name in holders
        ),
        seconds={"total": 0.0},
    )


def never_begun(version: Version, message: Abandon) -> RoundDone:
    """For a lease that was given up before anything was published under it."""
    return RoundDone(
        channel=message.channel,
        epoch=message.epoch,
        version=version,
        outcome=Outcome.ABORTED,
        reason=message.reason,
        engines=(),
        seconds={"total": 0.0},
    )


class PastVersion(msgspec.Struct, frozen=True):
    """A version that was committed, now or once."""

    version: Version
    epoch: Epoch
    rollback: bool = False
    """The channel went back to it, or took it again."""


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal knows of a channel."""

    epoch: Epoch = Epoch(0)
    committed: HeldVersion | None = None
    committed_epoch: Epoch = Epoch(0)
    answers: Mapping[RequestId, RoundReply] = {}
    history: tuple[PastVersion, ...] = ()
    """What was committed, oldest first; the last `MAX_HISTORY`."""


def history_with(history: tuple[PastVersion, ...], commit: Committed | PastVersion) -> tuple[PastVersion, ...]:
    """`history` with `commit`, which may be in it already: a record may be written twice."""
    past = PastVersion(commit.version, commit.epoch, commit.rollback)
    return history if history[-1:] == (past,) else (*history, past)[-MAX_HISTORY:]


def round_reply_of(record: Committed | RoundClosed) -> RoundReply:
    """What the `Publish` of `record` is answered once that is durable, unless a later record says more."""
    if isinstance(record, RoundClosed):
        return RoundReply(record.done, record.question)
    done = RoundDone(
        channel=record.channel,
        epoch=record.announced,
        version=record.version,
        outcome=Outcome.COMMITTED,
        reason=_NOT_CLOSED,
        engines=(),
        seconds={"total": 0.0},
    )
    return RoundReply(done, record.question, closed=False)
