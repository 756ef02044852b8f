"""The trainer that moves nothing keeps to the protocol where coordinators die: its failures would pass for theirs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from light import CHANNEL, Trainer

from weightbus.control import protocol as m
from weightbus.control.protocol.errors import RequestRefused
from weightbus.control.protocol.messages import Epoch, RequestId, Version

STALE = RequestRefused(m.RefusalCode.STALE_EPOCH, "that round has ended", 0.0)


class Line:
    """A client whose coordinator grants epoch 12, and from which `unread` is read; `refused` says of which messages."""

    def __init__(self, unread: list[Any], refused: dict[type, RequestRefused] | None = None) -> None:
        self.unread = unread
        self.refused = refused or {}
        self.said: list[Any] = []

    def new_request(self) -> RequestId:
        return RequestId(f"r{len(self.said)}")

    def put_blob(self, blob: bytes) -> str:
        return (blob.hex() + "0" * 64)[:64]

    def request(self, message: Any, deadline_s: float = 30.0) -> Any:
        del deadline_s
        self.said.append(message)
        if isinstance(message, m.Acquire):
            return m.Granted(
                request=message.request, channel=CHANNEL, epoch=Epoch(12), lease_s=10.0, committed=None, engines={}
            )
        if type(message) in self.refused:
            raise self.refused[type(message)]
        return m.Ack(request=message.request)

    def next(self, timeout_s: float) -> Any:
        del timeout_s
        return self.unread.pop(0) if self.unread else None


def send(epoch: int) -> m.Send:
    return m.Send(channel=CHANNEL, epoch=Epoch(epoch), version=Version(3), receivers=(), deadline_s=10.0)


def done(epoch: int) -> m.RoundDone:
    return m.RoundDone(
        channel=CHANNEL,
        epoch=Epoch(epoch),
        version=Version(3),
        outcome=m.Outcome.COMMITTED,
        reason="",
        engines=(),
        seconds={},
    )


def trainer(line: Line, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr("light.BusClient", lambda *_: line)
    monkeypatch.setattr("light.Trainer._run", lambda _: None)
    return Trainer("tcp://nowhere")


def test_what_a_former_leader_asked_for_is_not_answered_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Send` that lay unread while the leader died is of a former epoch: answering it would end the new round."""
    line = Line([send(10), send(12), done(10), done(12)])
    ended = trainer(line, monkeypatch)._publish(Version(3))
    assert ended is not None
    assert ended.epoch == 12
    assert [each.epoch for each in line.said if isinstance(each, m.Offered)] == [12]


def test_a_refused_offer_does_not_end_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on without this trainer, and says how: with another `Send`, or with its end."""
    line = Line([send(12), done(12)], {m.Offered: STALE})
    ended = trainer(line, monkeypatch)._publish(Version(3))
    assert ended is not None
    assert ended.epoch == 12


def test_a_round_that_is_given_up_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it waits for its offer for a minute, in which the same trainer is granted nothing else."""
    refused = RequestRefused(m.RefusalCode.NOT_ALLOWED, "no", 0.0)
    line = Line([send(12)], {m.Offered: refused})
    with pytest.raises(RequestRefused):
        trainer(line, monkeypatch)._publish(Version(3))
    assert isinstance(line.said[-1], m.Abandon)
    assert line.said[-1].epoch == 12
