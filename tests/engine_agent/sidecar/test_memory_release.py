"""The order to give memory back: when it is taken, and what is written down before it is carried out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from weightbus.control.protocol.messages import EngineHealth, Epoch, Step
from weightbus.engine_agent.errors import NothingToGive, ServerUnreachable
from weightbus.engine_agent.machine.engine_machine import ServerView
from weightbus.engine_agent.machine.events import ServerFound, StateRecord
from weightbus.engine_agent.machine.weight_state import WeightState
from weightbus.engine_agent.sidecar import memory_release as giving
from weightbus.engine_agent.sidecar.memory_release import MemoryRelease, Noticed

HELD = StateRecord(identity="launch", health=EngineHealth.CLEAN)
VIEW = ServerView(
    up=True,
    health=EngineHealth.CLEAN,
    held=None,
    paused=False,
    weights=WeightState.CLEAN,
    version=None,
    reached=None,
    epoch=Epoch(4),
    doing="",
    reason="",
)


class Sidecar:
    """What there is around the order, and what was done, in order. The machine is fast, or does not write."""

    def __init__(self, *, writes: bool = True, refuses: bool = False) -> None:
        self.done: list[str] = []
        self.writes, self.refuses = writes, refuses
        self.record: StateRecord | None = HELD
        self.weights_released = False
        self.seen: list[bool] = []
        self.giving = MemoryRelease(cast("Any", self), self.post, lambda: self.record)

    facts = SimpleNamespace(identity="launch")

    def pin(self, identity: str) -> None:
        """Calls are for one process generation: for the one before the release, and then for the one after it."""
        self.pinned = identity

    def prepare_release(self) -> SimpleNamespace:
        assert self.pinned == "launch"
        self.done.append("given up")
        return SimpleNamespace(identity="launch+1", label="7", model_path="m", undefined=True)

    def release_memory(self) -> None:
        assert self.pinned == "launch+1"
        if self.refuses:
            raise ServerUnreachable("/release_memory_occupation", "no answer")
        self.done.append("given back")
        self.weights_released = True

    def post(self, event: ServerFound | Noticed) -> None:
        if isinstance(event, Noticed):
            event.event.set()
            return
        self.seen.append(self.giving.begun)
        if self.writes:
            self.done.append("written off")
            self.record = StateRecord(identity=event.identity, health=EngineHealth.PENDING)

    def order(self) -> Exception | None:
        asked: Future[None] = Future()
        self.giving.carry_out(asked)
        return cast("Exception | None", asked.exception(0))


def test_a_server_holds_nothing_on_the_disk_before_it_gives_anything_back() -> None:
    """A sidecar that reads the record after a crash in between does not take undefined memory for a version."""
    sidecar = Sidecar()
    assert sidecar.order() is None
    assert sidecar.done == ["given up", "written off", "given back"]


def test_what_cannot_be_written_down_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk still says that it holds a version: it keeps its memory then."""
    monkeypatch.setattr(giving, "_NOTICED_S", 0.01)
    sidecar = Sidecar(writes=False)
    assert isinstance(sidecar.order(), NothingToGive)
    assert sidecar.done == ["given up"]
    assert not sidecar.giving.begun


@pytest.mark.parametrize("refuses", [False, True])
def test_its_memory_counts_as_lent_from_the_moment_that_it_holds_nothing(refuses: bool) -> None:
    """No heartbeat shows an engine without a version that seems to want its old one; one that kept all of it does."""
    sidecar = Sidecar(refuses=refuses)
    assert not sidecar.giving.begun
    sidecar.order()
    assert sidecar.seen == [True]
    assert not sidecar.giving.begun
    assert sidecar.weights_released is not refuses


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"up": False, "reason": "the server does not answer"}, "the server does not answer"),
        ({"doing": "validate"}, "validate"),
        ({"doing": "receive", "reason": "began to take version 8"}, "began to take version 8"),
        ({"reached": Step.PREPARE}, "a round is under way"),
        ({"reached": Step.VERIFY}, "a round is under way"),
    ],
)
def test_nothing_is_given_back_in_a_round(seen: dict[str, Any], reason: str) -> None:
    """It would pull the memory from under the version that comes; the client is told to ask again."""
    queued: list[Callable[[], None]] = []
    answer = Sidecar().giving.ask(msgspec.structs.replace(VIEW, **seen), queued.append)
    assert (answer.ready, queued) == (False, [])
    assert reason in answer.reason


def test_between_two_rounds_it_is() -> None:
    """On the worker's thread, which does nothing else meanwhile."""
    sidecar = Sidecar()
    assert sidecar.giving.ask(VIEW, lambda order: order()).ready
    assert sidecar.weights_released
