"""Whether parameters may have changed, as the sidecar says it of a version that it could not take.

An engine of which that is said serves nothing until it has a whole version; one of which it is not said goes on with
what it holds. So neither may be said for the other, whatever became of the version before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightbus.dataplane.errors import DeadlineExceeded, PeerLost, TransferFailed
from weightbus.dataplane.transports.plan_exchange import Attempt
from weightbus.dataplane.transports.sends.receiver import NotReceived, SendsReceiver, WorkerReceivers, WorkerStalled
from weightbus.dataplane.transports.worker_exchange import ReplayFailed, Workers

from ...kit.toy_direct import WAIT_S, holds
from ...kit.toy_sends import SendsWorld

WAYS = pytest.mark.parametrize("beside", [False, True], ids=["in place", "beside"])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    """Two ranks, and an engine of one worker that has taken a version: its parameters were changed by that."""
    made = SendsWorld(tmp_path / "r", 1, monkeypatch)
    made.round()
    assert made.receiver.touched
    yield made
    made.close()


def failed(error: Exception) -> Any:
    """Stands for a method that raises it."""

    def fails(*_: object, **__: object) -> None:
        raise error

    return fails


@WAYS
@pytest.mark.parametrize(
    ("error", "in_place"),
    [
        (NotReceived("the group did not form", touched=False), False),
        (NotReceived("a rank has died", touched=True), True),
        (DeadlineExceeded("the workers to take everything", 1.0), True),
        (PeerLost("a worker is gone"), True),
    ],
    ids=["not begun", "broken off", "too late", "gone"],
)
def test_a_version_that_does_not_come(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, error: TransferFailed, *, in_place: bool, beside: bool
) -> None:
    """Beside the parameters it changes nothing; in place it may, unless its workers say that it did not."""
    if isinstance(error, NotReceived) and beside:
        error = NotReceived(str(error), touched=False)
    with monkeypatch.context() as patched:
        patched.setattr(WorkerReceivers, "take", failed(error))
        with pytest.raises(type(error)):
            world.round(stage=beside)
    assert world.receiver.touched is (in_place and not beside)
    world.trainer.step(1)
    world.round()
    assert holds(world.server, world.trainer.values)


@WAYS
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ReplayFailed("worker 0 could not copy", touched=False), False),
        (ReplayFailed("worker 0 could not copy", touched=True), True),
        (PeerLost("worker 0 is gone"), True),
    ],
    ids=["before", "half-way", "who knows"],
)
def test_a_version_that_is_not_put_into_place(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, error: TransferFailed, *, expected: bool, beside: bool
) -> None:
    """What came in place is there already, whatever workers say of the rest."""
    with monkeypatch.context() as patched:
        patched.setattr(Workers, "swap", failed(error))
        with pytest.raises(type(error)):
            world.round(stage=beside)
    assert world.receiver.touched is (expected or not beside)
    world.trainer.step(1)
    world.round()
    assert holds(world.server, world.trainer.values)


@pytest.mark.parametrize("how", ["is not reached", "stands still"])
@WAYS
def test_a_version_that_is_not_begun(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, how: str, *, beside: bool
) -> None:
    """The engine holds the version before, by which it was changed."""
    session = world.trainer.session(2)
    address = world.offer(session)
    if how == "is not reached":
        monkeypatch.setattr(SendsReceiver, "_connect", failed(PeerLost("nobody answers")))
    else:
        monkeypatch.setattr(WorkerReceivers, "require_moving", failed(WorkerStalled(0)))
    with pytest.raises((PeerLost, WorkerStalled)):
        if beside:
            world.receiver.stage(session, address, "e", WAIT_S)
        else:
            world.receiver.receive(session, address, "e", 0, world.server, WAIT_S)  # type: ignore[arg-type]
    assert not world.receiver.touched


@WAYS
def test_a_trainer_hears_of_a_stalled_worker_before_the_others_are_let_go(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    """To let them go takes seconds, in which every other engine of the round would wait."""
    order: list[str] = []
    say, let_go = Attempt.failed, Workers.let_go
    monkeypatch.setattr(Attempt, "failed", lambda *args, **more: (order.append(str(args[1])), say(*args, **more))[1])
    monkeypatch.setattr(Workers, "let_go", lambda *args: (order.append("let go"), let_go(*args))[1])
    monkeypatch.setattr(Workers, "swap", failed(WorkerStalled(0)))
    with pytest.raises(WorkerStalled):
        world.round(stage=beside)
    assert order[0].startswith("worker 0 of the server stands still")
    assert order[1] == "let go"
