"""How rounds ended: the answers that a repeated `Publish` gets, and those for rounds that never were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from .ids import AgentId, Epoch, RequestId
from .lease import Lease
from .messages import Abandon, Ack, EngineReport, Granted, Outcome, Publish, RoundDone

ANSWERS: Final = 256
"""Finished rounds whose answer is remembered, per channel."""


class Replies:
    """What requests were answered, by who asked and under which key: asked again, the same is said again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: OrderedDict[tuple[AgentId, RequestId], Ack | Granted] = OrderedDict()

    def get(self, agent: AgentId, request: RequestId) -> Ack | Granted | None:
        """What `agent` was told, unless that was too long ago."""
        return self._by_key.get((agent, request))

    def remember(self, agent: AgentId, reply: Ack | Granted) -> None:
        """`agent` is told `reply`; the oldest one may be forgotten."""
        self._by_key[agent, reply.request] = reply
        while len(self._by_key) > self._limit:
            self._by_key.popitem(last=False)

    def __len__(self) -> int:
        return len(self._by_key)


class Answers:
    """Answers by the key of the `Publish`, the oldest forgotten first."""

    def __init__(self, restored: Mapping[RequestId, RoundDone]) -> None:
        self.last: RoundDone | None = None
        """The round that ended last, in this life of the coordinator."""
        self._by_request = dict(restored)

    def knows(self, request: RequestId) -> bool:
        """Whether the round of `request` is over."""
        return request in self._by_request

    def get(self, request: RequestId) -> RoundDone | None:
        """How the round of `request` ended, if it did."""
        return self._by_request.get(request)

    def remember(self, request: RequestId, done: RoundDone) -> None:
        """The round of `request` ended like this."""
        self.last = done
        self._by_request[request] = done
        while len(self._by_request) > ANSWERS:
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


def never_begun(lease: Lease, message: Abandon) -> RoundDone:
    """For a lease that was given up before anything was published under it."""
    return RoundDone(
        channel=message.channel,
        epoch=message.epoch,
        version=lease.version,
        outcome=Outcome.ABORTED,
        reason=message.reason,
        engines=(),
        seconds={"total": 0.0},
    )
