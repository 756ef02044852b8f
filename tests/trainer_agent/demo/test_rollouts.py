"""Rollouts: asked of ready engines, and judged by the versions that wrote them, token by token."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from weightbus.trainer_agent.demo import toy_task as task
from weightbus.trainer_agent.demo.commands import ENGINES, DemoSettings, RankArguments
from weightbus.trainer_agent.demo.rollouts import (
    PARTS,
    WIDTH,
    Actor,
    BadRollout,
    Batch,
    EpisodePart,
)
from weightbus.trainer_agent.demo.round_records import Follower
from weightbus.trainer_agent.rollouts import Fleet, ReadyEngine, Rollout
from weightbus.trainer_agent.staleness import Lineage


def response(*versions: str) -> Rollout:
    """Written by `versions`, in equal runs."""
    size = task.RESPONSE_TOKENS // len(versions)
    runs = [{"version": each, "start": at * size, "end": (at + 1) * size} for at, each in enumerate(versions)]
    meta = {"weight_version": versions[-1], "weight_versions": runs}
    return Rollout([1] * task.RESPONSE_TOKENS, meta, Lineage.of(meta, task.RESPONSE_TOKENS), "e0")


def batch(*responses: Rollout) -> Batch:
    rows = [[0] * task.PROMPT_TOKENS + each.output_ids for each in responses]
    return Batch(3, rows, [EpisodePart(list(responses), 10.0, 10.25)])


class Engines:
    """A fleet that answers by itself, in the order in which it is asked."""

    def __init__(self) -> None:
        self.waited: list[int | None] = []
        self.tokens = task.RESPONSE_TOKENS
        self.committed = None
        self.asked: list[int] = []
        """Prompts of each request."""
        self.broken = False

    def wait_ready(self, count: int, *, min_version: int | None, timeout_s: float) -> tuple[ReadyEngine, ...]:
        assert (count, timeout_s > 0) == (ENGINES, True)
        self.waited.append(min_version)
        return ()

    def generate_batch(self, prompts: list[list[int]], _params: object, *, min_version: int | None) -> list[Rollout]:
        assert min_version == self.waited[-1]
        self.asked.append(len(prompts))
        if self.broken:
            raise OSError("no engine")
        found = response("7")
        return [msgspec.structs.replace(found, output_ids=found.output_ids[: self.tokens])] * len(prompts)

    def ready(self) -> tuple[ReadyEngine, ...]:
        return ()

    def close(self) -> None:
        pass


def actor_of(folder: Path, environment_s: float, timeout_s: float = 10.0) -> Actor:
    settings = DemoSettings(rounds=3, asynchronous=environment_s > 0, environment_s=environment_s)
    arguments = RankArguments(settings=settings, folder=str(folder), coordinator="", status_url="", host="")
    return Actor(arguments, cast("Fleet", Engines()), timeout_s)


def engines_of(actor: Actor) -> Engines:
    return cast("Engines", actor._fleet)


@pytest.fixture
def actor(tmp_path: Path) -> Actor:
    return actor_of(tmp_path, 0.0)


class Judge:
    """Judges nothing before it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.took = threading.Semaphore(0)
        """One for each part that it began with."""
        self.done = threading.Semaphore(0)
        clock = SimpleNamespace(sleep=self.sleep, perf_counter=time.perf_counter)
        monkeypatch.setattr("weightbus.trainer_agent.demo.rollouts.time", clock)

    def sleep(self, _seconds: float) -> None:
        self.took.release()
        assert self.done.acquire(timeout=60)


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
    """On another thread, with all prompts of their round at once where nobody judges elsewhere."""
    found = actor.ahead(2, 7).result(10)
    assert engines_of(actor).waited == [7]
    assert engines_of(actor).asked == [task.RESPONSES]
    assert len(found.responses) == task.RESPONSES
    assert found.number == 2
    assert set(found.seconds) == {"generate"}
    actor.close()


def test_engines_write_a_part_while_the_one_before_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across rounds, and never two parts ahead of the judge, who judges one at a time."""
    actor, judge = actor_of(tmp_path, 1.0), Judge(monkeypatch)
    asked = engines_of(actor).asked
    first, second = actor.ahead(1, 7), actor.ahead(2, 8)
    for judged in range(2 * PARTS):
        assert judge.took.acquire(timeout=60)
        until_asked(asked, min(judged + 2, 2 * PARTS))
        assert not judge.took.acquire(timeout=0.05)
        assert len(asked) == min(judged + 2, 2 * PARTS)
        assert first.done() == (judged > PARTS - 1)
        judge.done.release()
    assert asked == [task.RESPONSES // PARTS] * 2 * PARTS
    assert engines_of(actor).waited == [7] * PARTS + [8] * PARTS
    for number, found in enumerate((first.result(60), second.result(60)), 1):
        prompts = task.prompts(1, number)
        assert [row[: task.PROMPT_TOKENS] for row in found.rows] == prompts
        assert set(found.seconds) == {"generate", "judge"}
    actor.close()


def until_asked(asked: list[int], count: int) -> None:
    """Requests reach the engines on another thread."""
    until = time.monotonic() + 60
    while len(asked) < count:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_the_judge_has_as_long_in_both_runs(tmp_path: Path) -> None:
    """All parts of a round together take what was asked for, also where nothing was asked for ahead."""
    actor = actor_of(tmp_path, 0.1)
    assert 0.1 <= actor.rollout(1).seconds["judge"] < 5
    actor.close()


def test_engines_that_fail_end_a_round_and_not_the_next(tmp_path: Path) -> None:
    """The judge of answers that never came is not waited for."""
    actor = actor_of(tmp_path, 0.01)
    engines_of(actor).broken = True
    lost: list[Future[Batch]] = [actor.ahead(1, 7), actor.ahead(2, 7)]
    for each in lost:
        with pytest.raises(OSError, match="no engine"):
            each.result(60)
    engines_of(actor).broken = False
    assert len(actor.rollout(3).responses) == task.RESPONSES
    actor.close()


def test_overlap_is_what_engines_wrote_meanwhile() -> None:
    """Not what was judged then, nor the time between two parts."""
    whole = batch(response("8"))
    parts = [EpisodePart([], 10.0, 11.0), EpisodePart([], 12.0, 14.0)]
    written = msgspec.structs.replace(whole, parts=parts)
    assert written.overlap_s(0.0, 20.0) == 3.0
    assert written.overlap_s(10.5, 12.5) == 1.0
    assert written.overlap_s(11.0, 12.0) == 0.0
    assert written.seconds == {"generate": 3.0}


def test_a_report_says_how_old_answers_were(actor: Actor) -> None:
    """And counts those that no round should have had."""
    actor.report(batch(response("8"), response("7", "8"), response("5")), 8, 1, {"train": 1.0}, None, overlap_s=0.5)
    (told,) = Follower(Path(actor._arguments.progress)).new()
    assert (told.number, told.mixed, told.spanning_versions) == (3, 0, 1)
    assert (told.token_lag, told.dropped, told.mismatched) == (3, 1, 1)
    assert told.seconds == {"generate": 0.25, "train": 1.0}
    assert told.wall_s > 0
    assert told.overlap_s == 0.5
    actor.close()


def test_a_short_response_is_refused(actor: Actor) -> None:
    """An aborted request is not training data."""
    engines_of(actor).tokens = 3
    with pytest.raises(BadRollout, match="e0 wrote 3 tokens"):
        actor.rollout(1)
    actor.close()
