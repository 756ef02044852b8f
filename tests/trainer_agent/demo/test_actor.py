"""What a round's answers are worth: judged by the versions that wrote them, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from weightbus.trainer_agent.demo import task
from weightbus.trainer_agent.demo.actor import WIDTH, Actor, Batch
from weightbus.trainer_agent.demo.engines import Fleet, Response
from weightbus.trainer_agent.demo.program import Plan
from weightbus.trainer_agent.demo.records import Follower
from weightbus.trainer_agent.demo.settings import Trainer


def response(*versions: str) -> Response:
    """Written by `versions`, in equal runs."""
    size = task.RESPONSE_TOKENS // len(versions)
    runs = [{"version": each, "start": at * size, "end": (at + 1) * size} for at, each in enumerate(versions)]
    return Response([1] * task.RESPONSE_TOKENS, {"weight_version": versions[-1], "weight_versions": runs})


def batch(*responses: Response) -> Batch:
    rows = [[0] * task.PROMPT_TOKENS + each.output_ids for each in responses]
    return Batch(3, rows, list(responses), 0.25)


class Engines:
    """A fleet that answers by itself."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def wait_ready(self, _count: int, _deadline_s: float, version: int = 0) -> tuple[str, ...]:
        self.waited.append(version)
        return ("here",)

    def generate(self, _urls: object, prompts: list[list[int]]) -> list[Response]:
        return [response("7")] * len(prompts)

    def close(self) -> None:
        pass


@pytest.fixture
def actor(tmp_path: Path) -> Actor:
    given = dict.fromkeys(
        ("checkpoint", "channel", "coordinator", "status_url", "transport", "host", "runtime_dir", "keys"), ""
    )
    plan = Plan(
        **given,
        progress=str(tmp_path / "progress"),
        rounds=3,
        trainer=Trainer.MEGATRON,
        seed=1,
        publish=True,
        engines=1,
    )
    return Actor(plan, cast("Fleet", Engines()), 10.0)


def test_only_what_is_new_enough_counts() -> None:
    """Mixed answers count as a whole or not at all; their rows say so to every rank."""
    fresh, mixed, old = response("8"), response("7", "8"), response("6", "8")
    lineages, verdicts = batch(fresh, mixed, old).judge(8, 1)
    assert [lineage.lag(8) for lineage in lineages] == [0, 1, 2]
    assert [verdict.keep for verdict in verdicts] == [True, True, False]
    rows = batch(fresh, mixed, old).tensor(verdicts)
    assert rows.shape == (3, WIDTH)
    assert rows[:, -task.RESPONSE_TOKENS :].sum(1).tolist() == [task.RESPONSE_TOKENS, task.RESPONSE_TOKENS, 0]


def test_the_weights_of_the_launch_are_version_zero() -> None:
    """The demo's first round without a publication."""
    launched = batch(response("default"))
    assert launched.judge(0, 0)[1][0].keep
    assert not launched.judge(2, 1)[1][0].keep


def test_rollouts_asked_for_ahead_wait_for_their_version(actor: Actor) -> None:
    """On another thread, with all prompts of their round."""
    found = actor.ahead(2, 7).result(10)
    assert cast("Any", actor._fleet).waited == [7]
    assert len(found.responses) == task.RESPONSES
    assert found.number == 2
    actor.close()


def test_a_report_says_how_old_answers_were(actor: Actor) -> None:
    """And counts those that no round should have had."""
    actor._fleet.state = lambda: cast("Any", type("S", (), {"engines": {}}))  # type: ignore[method-assign]
    actor.report(batch(response("8"), response("7", "8"), response("5")), 8, 1, {"train": 1.0}, None)
    (told,) = Follower(Path(actor._plan.progress)).new()
    assert (told.number, told.mixed, told.behind, told.dropped, told.mismatched) == (3, 1, 3, 1, 1)
    assert told.seconds == {"generate": 0.25, "train": 1.0}
    assert told.wall_s > 0
    actor.close()
