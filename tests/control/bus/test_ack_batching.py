"""Which acknowledgements are owed, and which a command makes needless."""

from __future__ import annotations

from typing import Any

import pytest

from weightbus.control.bus.session import HOLD_S, PROMPT_S, AckBatcher, acknowledges
from weightbus.control.machine.effects import Peer
from weightbus.control.protocol.messages import (
    Abort,
    Ack,
    Commit,
    Endpoint as Bytes,
    EngineHealth,
    Failed,
    Message,
    Pause,
    Paused,
    PauseMode,
    Policy,
    Prepare,
    Prepared,
    Serving,
    Step,
    Transfer,
    Transferred,
    TransportKind,
    Verified,
)

ONE, TWO = Peer(b"one"), Peer(b"two")
TABLE = "0" * 64


def command(kind: type[Message], epoch: int = 5) -> Message:
    common: dict[str, Any] = {"channel": "c", "epoch": epoch, "deadline_s": 1.0}
    version: dict[str, Any] = {"version": 1, "manifest": TABLE, "table": TABLE}
    match kind.__name__:
        case "Prepare":
            return Prepare(**common, **version, transport=TransportKind.DISK, policy=Policy())
        case "Pause":
            return Pause(**common, mode=PauseMode.RETRACT, lease_s=1.0)
        case "Transfer":
            return Transfer(
                **common, **version, offer=Bytes(transport=TransportKind.DISK, address="/nowhere"), rank_offset=0
            )
        case "Commit":
            return Commit(**common, version=version["version"], table=version["table"], flush=True)
        case _:
            return Abort(**common, reason="r")


def answer(kind: type[Message], epoch: int = 5, request: str = "k") -> Any:
    common: dict[str, Any] = {"request": request, "channel": "c", "epoch": epoch}
    match kind.__name__:
        case "Prepared" | "Paused":
            return kind(**common, seconds=0.1)
        case "Transferred":
            return Transferred(**common, bytes=0, buckets=0, seconds=0.1)
        case "Verified":
            return Verified(**common, version=1, table=TABLE, verified_by="x", seconds=0.1)  # type: ignore[arg-type]
        case "Serving":
            return Serving(**common, version=1, seconds=0.1, paused_s=0.1)  # type: ignore[arg-type]
        case _:
            return Failed(**common, step=Step.TRANSFER, health=EngineHealth.CLEAN, reason="r")


def owing(*answers: Any) -> AckBatcher:
    acks = AckBatcher()
    acks.add([(ONE, each) for each in answers], 0.0)
    return acks


COMMANDS = (Prepare, Pause, Transfer, Commit, Abort)
ANSWERS = (Prepared, Paused, Transferred, Verified, Serving, Failed)


@pytest.mark.parametrize("answered", ANSWERS)
@pytest.mark.parametrize("told", COMMANDS)
def test_a_command_covers_only_what_it_could_not_be_given_without(told: type[Message], answered: type[Message]) -> None:
    """By the order of a round; the answer to the command itself, a failure and the answer to an abort are never it."""
    before = {Pause: (Prepared,), Transfer: (Prepared,), Commit: (Prepared, Paused, Transferred, Verified)}
    assert acknowledges(command(told), answer(answered)) is (answered in before.get(told, ()))


@pytest.mark.parametrize("answered", ANSWERS)
@pytest.mark.parametrize("told", COMMANDS)
def test_nothing_is_covered_by_what_was_said_before_its_epoch(told: type[Message], answered: type[Message]) -> None:
    """A command that comes late says nothing about a round that it does not know."""
    assert not acknowledges(command(told, epoch=4), answer(answered, epoch=5))


def test_what_a_command_covers_is_never_said() -> None:
    """Two messages for each engine and step, and not three."""
    acks = owing(answer(Prepared))
    assert acks.take_before((ONE,), command(Pause)) == []
    assert list(acks.take_due(1e9, quiet=True)) == []


@pytest.mark.parametrize("answered", [Paused, Transferred])
def test_what_a_command_covers_need_not_be_said_before_it(answered: type[Message]) -> None:
    """What was to be said at once, and was not yet, is said by the command, if it is of this epoch."""
    acks = owing(answer(answered))
    assert acks.take_before((ONE,), command(Commit)) == []
    assert not acks
    acks = owing(answer(answered))
    assert len(acks.take_before((ONE,), command(Commit, epoch=4))) == 1


def test_what_no_command_covers_is_said_after_a_while() -> None:
    """The next step may be long in coming, and an agent that hears nothing repeats itself."""
    acks = owing(answer(Verified))
    assert list(acks.take_due(HOLD_S / 2, quiet=True)) == []
    assert acks.next_deadline() == HOLD_S
    assert list(acks.take_due(HOLD_S, quiet=False)) == [(ONE, Ack(request="k"))]  # type: ignore[arg-type]
    assert acks.next_deadline() is None


def test_a_serving_engine_is_acknowledged_before_the_next_round_begins() -> None:
    """Nothing follows from `Serving`, so its `Ack` may wait; but its engine says nothing more before it came."""
    acks = owing(answer(Serving))
    assert not acks.urgent
    assert acks.take_before((ONE,), command(Prepare, epoch=6)) == [(ONE, Ack(request="k"))]  # type: ignore[arg-type]
    assert not acks


def test_an_abort_covers_nothing() -> None:
    """It leaves nothing unsaid: what is owed stays owed."""
    acks = owing(answer(Prepared))
    assert acks.take_before((ONE,), command(Abort)) == []
    assert len(list(acks.take_due(HOLD_S, quiet=False))) == 1


@pytest.mark.parametrize("answered", [Paused, Transferred, Failed])
def test_what_holds_up_its_engine_is_said_at_once(answered: type[Message]) -> None:
    """An engine says one thing after the other: `Verified` waits until `Transferred` was acknowledged."""
    acks = owing(answer(answered))
    assert acks.urgent
    assert [peer for peer, _ in acks.take_due(0.0, quiet=True)] == [ONE]


def test_what_is_owed_waits_while_there_is_much_to_read_but_not_for_long() -> None:
    """No engine goes on because of it at once; every one does in the end."""
    acks = owing(answer(Paused))
    assert list(acks.take_due(PROMPT_S / 2, quiet=False)) == []
    assert len(list(acks.take_due(PROMPT_S, quiet=False))) == 1


def test_an_agent_that_is_told_something_else_is_told_what_it_is_owed_first() -> None:
    """One packet for both, in this order, and none of another engine."""
    acks = owing(answer(Paused))
    acks.add([(TWO, answer(Paused, request="other"))], 0.0)
    assert acks.take_before((ONE,), command(Abort)) == [(ONE, Ack(request="k"))]  # type: ignore[arg-type]
    assert [peer for peer, _ in acks.take_due(0.0, quiet=True)] == [TWO]
