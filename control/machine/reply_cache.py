"""Replies: decisions with their reasons, the replies to repeated requests, and what a restart restores of them. Pure.

`ReplyCache` keeps the replies to requests in memory. `RoundReplies` keeps how rounds ended, which the journal keeps too
(`Restored`).
"""

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
"""Requests whose reply is remembered."""

MAX_ROUND_REPLIES: Final = 32
"""Replies kept for finished rounds, per channel, in memory and in the journal: a trainer asks about its last round.
Each may take a megabyte, because it names every engine of the channel."""
MAX_GRANTS: Final = 64
"""Remembered grants. Each describes every engine: a megabyte for a large fleet."""

MAX_HISTORY: Final = 64
"""Committed versions that are remembered, so that an operator can see what a channel may go back to."""
_NOT_CLOSED: Final = "was committed; the coordinator ended before the round did, and how its engines fared was not kept"

_ENCODE: Final = msgspec.msgpack.Encoder()


class Decision(msgspec.Struct, frozen=True):
    """Yes, or a refusal with its code and reason."""

    code: RefusalCode | None
    """None for yes."""
    reason: str = ""
    retry_after_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True for yes."""
        return self.code is None


YES = Decision(None)


class _Reply(NamedTuple):
    kind: str
    question: bytes
    """Digest of the request: an offer may be long, and thousands are remembered."""
    reply: Ack | Granted


class ReplyCache:
    """Replies by agent and request key: a repeated request gets the same reply."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: OrderedDict[tuple[AgentId, RequestId], _Reply] = OrderedDict()
        self._grants: deque[tuple[AgentId, RequestId]] = deque()

    def get(self, agent: AgentId, message: KeyedRequest) -> Ack | Granted | Decision | None:
        """The earlier reply to this request, if remembered; or a refusal if its key was used for another request."""
        known = self._by_key.get((agent, message.request))
        if known is None:
            return None
        if known.question == _digest(message):
            return known.reply
        return key_reused(message, known.kind)

    def remember(self, agent: AgentId, message: KeyedRequest, reply: Ack | Granted) -> None:
        """Keep the reply to `message` of `agent`; the oldest replies are dropped."""
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
    """Digest of a request in hex: equal for equal messages, even from a sender that knows fewer fields."""
    return _digest(message).hex()


def key_reused(message: KeyedRequest, before: str) -> Decision:
    """The refusal of a request whose key was used for another one."""
    reason = f"key {message.request} was used for another {before}: every request has a key of its own"
    return Decision(RefusalCode.NOT_ALLOWED, reason)


class RoundReply(msgspec.Struct, frozen=True):
    """How the round of a `Publish` ended."""

    done: RoundDone
    question: str = ""
    """Digest of the `Publish`, see `question()`; empty in records of older releases."""
    closed: bool = True
    """False if only the commit is known, because the coordinator ended before the round: `done` names no engines."""


class RoundReplies:
    """How rounds ended, by the key of their `Publish`; the oldest are dropped."""

    def __init__(self, restored: Mapping[RequestId, RoundReply]) -> None:
        self.last: RoundDone | None = None
        """Report of the last finished round since the coordinator started."""
        self._by_request = dict(restored)

    def get(self, request: RequestId) -> RoundReply | None:
        """How the round of `request` ended; None if unknown."""
        return self._by_request.get(request)

    def contradicts(self, message: Publish) -> Decision | None:
        """A refusal if the finished round with this key was another one; None otherwise."""
        known = self._by_request.get(message.request)
        if known is None:
            return None
        same = (known.done.epoch, known.done.version) == (message.epoch, message.version)
        if same and known.question in ("", question(message)):
            return None
        return key_reused(message, "Publish")

    def remember(self, request: RequestId, round_reply_of: RoundReply) -> None:
        """Keep how the round of `request` ended."""
        self.last = round_reply_of.done
        self._by_request[request] = round_reply_of
        while len(self._by_request) > MAX_ROUND_REPLIES:
            self._by_request.pop(next(iter(self._by_request)))


def already_committed(message: Publish, epoch: Epoch, holders: Sequence[AgentId]) -> RoundDone:
    """The report for a version that was committed earlier, at `epoch`, and that `holders` hold now."""
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
    """The report for a lease that was abandoned before `Publish`."""
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
    """An entry of a channel's history: a version that is or was current."""

    version: Version
    epoch: Epoch
    rollback: bool = False
    """True if the channel went back to it, or took it again."""


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """A channel as the journal restores it."""

    epoch: Epoch = Epoch(0)
    committed: HeldVersion | None = None
    committed_epoch: Epoch = Epoch(0)
    answers: Mapping[RequestId, RoundReply] = {}
    history: tuple[PastVersion, ...] = ()
    """The last `MAX_HISTORY` committed versions, oldest first."""


def history_with(history: tuple[PastVersion, ...], commit: Committed | PastVersion) -> tuple[PastVersion, ...]:
    """`history` with `commit` added, unless it is the last entry already: a record may be written twice."""
    past = PastVersion(commit.version, commit.epoch, commit.rollback)
    return history if history[-1:] == (past,) else (*history, past)[-MAX_HISTORY:]


def round_reply_of(record: Committed | RoundClosed) -> RoundReply:
    """The reply to the `Publish` of `record` once that is durable, until a later record replaces it."""
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
