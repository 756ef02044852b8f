"""What is known of a server that does not answer, and when it is asked again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from weightbus.control.server.metrics import Metrics, MetricSource
from weightbus.dataplane.errors import DeadlineExceeded
from weightbus.engine_agent.errors import ServerRefused, ServerSilent
from weightbus.engine_agent.machine.events import OperationDone, OperationFailed, PauseServer, Validate
from weightbus.engine_agent.sidecar import operation_executor as module
from weightbus.engine_agent.sidecar.operation_executor import VERIFY_S, OperationExecutor, WorkerHealth, proof_s


class Server:
    """Answers, or does not."""

    def __init__(self) -> None:
        self.stands = True
        self.patience_s = 2.0
        self.asked: list[str] = []

    def pin(self, _identity: str) -> None: ...

    def pause(self, _mode: str, _deadline_s: float) -> None:
        self._asked("pause")

    def answers(self, deadline_s: float) -> None:
        assert deadline_s <= self.patience_s
        self._asked("answers")

    def _asked(self, call: str) -> None:
        self.asked.append(call)
        if self.stands:
            raise ServerSilent(call, "no answer")


def test_a_server_that_was_silent_has_to_answer_before_it_is_paused() -> None:
    """A pause has a deadline of half a minute, in which all engines of a round would wait for this one (F30)."""
    server = Server()
    worker = OperationExecutor("e0", cast("Any", server), cast("Any", None), None, Metrics(MetricSource.ENGINE))
    pause = PauseServer("retract", 60.0)
    assert isinstance(worker.perform(pause, "launch"), OperationFailed)
    assert isinstance(worker.perform(pause, "launch"), OperationFailed)
    assert server.asked == ["pause", "answers"]
    server.stands = False
    for _ in range(2):
        assert worker.perform(pause, "launch") == OperationDone()
    assert server.asked == ["pause", "answers", "answers", "pause", "pause"]


def test_a_server_that_was_silent_is_refused_before_any_engine_stands_still() -> None:
    """In its pause the engines that move would stand still for it, in every version."""
    server = Server()
    worker = OperationExecutor("e0", cast("Any", server), cast("Any", None), None, Metrics(MetricSource.ENGINE))
    validate = Validate(cast("Any", None), "", None)
    assert isinstance(worker.perform(PauseServer("retract", 60.0), "launch"), OperationFailed)
    assert worker.perform(validate, "launch") == OperationFailed("answers: no answer", dirty=False)
    assert server.asked == ["pause", "answers"]


def test_whether_a_server_moves_is_looked_at_before_any_engine_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it did something lately: rounds that follow each other do not ask. A refusal is an answer."""
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    server = Server()
    server.stands, server.patience_s = False, 10.0
    vitals = WorkerHealth(cast("Any", server))
    for _ in range(2):
        vitals.look("one")
    assert server.asked == ["answers"]
    vitals.look("two")
    assert server.asked == ["answers"] * 2
    clock[0] += 1.5
    vitals.moved("two")
    clock[0] += 1.5
    vitals.look("two")
    assert server.asked == ["answers"] * 2
    clock[0] += 1.0
    refused: list[float] = []
    monkeypatch.setattr(server, "answers", lambda seconds: (refused.append(seconds), refuse()))
    vitals.look("two")
    assert refused, "what it did is too long ago"
    monkeypatch.undo()
    server.stands = True
    vitals.learn(ServerRefused("/x", 400, "no"), "two")
    with pytest.raises(ServerSilent):
        vitals.look("two")


def refuse() -> None:
    raise ServerRefused("/server_info", 500, "no")


def test_what_another_launch_did_not_answer_is_forgotten() -> None:
    """And a refusal is an answer."""
    server = Server()
    vitals = WorkerHealth(cast("Any", server))
    vitals.learn(ServerRefused("/x", 400, "no"), "one")
    vitals.ask("one")
    vitals.learn(ServerSilent("/x", "no answer"), "one")
    vitals.ask("two")
    assert server.asked == []
    vitals.learn(ServerSilent("/x", "no answer"), "two")
    with pytest.raises(ServerSilent):
        vitals.ask("two")


def test_an_engine_that_kept_a_transfer_to_its_deadline_is_asked_before_the_next_one() -> None:
    """It may have been the trainer: then the server answers, and nothing is lost."""
    server = Server()
    vitals = WorkerHealth(cast("Any", server))
    vitals.learn(DeadlineExceeded("worker 0 to copy", 30.0), "one")
    with pytest.raises(ServerSilent):
        vitals.ask("one")


def test_digests_take_as_long_as_their_bytes() -> None:
    """A tiny model whose workers stand still is given up within the time of a death; a large one gets all there is."""
    assert proof_s(1_000_000) < 16.0
    assert proof_s(10_000_000_000) > 100.0
    assert proof_s(10**12) == VERIFY_S
