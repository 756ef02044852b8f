"""Rolling rounds, and engines that join later: what is promised to engines that wait for their wave."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, strategies as st
from structlog.testing import capture_logs

from weightbus.control.machine.effects import Committed, EpochTaken, RoundEnded, TransferRetried
from weightbus.control.protocol.messages import (
    Abandon,
    Abort,
    Commit,
    EngineHealth,
    Heartbeat,
    Message,
    Offered,
    Outcome,
    Pause,
    Policy,
    Prepare,
    Refused,
    Send,
    Step,
    Transfer,
    TransportKind,
)
from weightbus.control.server.metrics import Metrics, MetricSource, ObservationReporter

from ..world import CHANNEL, LIMITS, Engine, Trainer, World, readiness_of


class Rolling:
    """Engines of a channel, at most `most` of which are paused at a time; the generating ones are counted."""

    def __init__(self, count: int, most: int, **policy: object) -> None:
        self.world = World()
        self.engines = [self.world.engine(f"e{index}") for index in range(count)]
        self.trainer = self.world.trainer()
        self.trainer.policy = Policy(max_paused=most, **policy)  # type: ignore[arg-type]
        self.still: list[int] = []
        for engine in self.engines:
            engine.react = self._watched(engine.react)  # type: ignore[method-assign]

    def _watched(self, react: Callable[[Message], None]) -> Callable[[Message], None]:
        def watched(message: Message) -> None:
            react(message)
            self.still.append(sum(not engine.generating for engine in self.engines))

        return watched

    def outcomes(self, version: int) -> list[str]:
        return [report.outcome.value for report in self.world.publish(self.trainer, version).engines]

    def waves(self) -> list[list[str]]:
        return [[each.engine for each in send.receivers] for send in self.trainer.got(Send)]  # type: ignore[attr-defined]

    def commits(self) -> list[int]:
        return [record.version for record in self.world.records if isinstance(record, Committed)]


def refusal(world: World, trainer: Trainer, version: int) -> str:
    """Why the coordinator does not begin it; the trainer does not try again."""
    trainer.acquire(version)
    trainer.acquire = lambda _version: None  # type: ignore[method-assign]
    world.settle()
    refused = trainer.got(Refused)[-1]
    assert isinstance(refused, Refused)
    return refused.reason


@pytest.mark.parametrize(("most", "waves"), [(1, 4), (2, 2), (3, 2), (4, 1), (0, 1)])
def test_at_most_so_many_stand_still(most: int, waves: int) -> None:
    """All take the version in the end, each once, and it is committed once: with the first of them."""
    rolling = Rolling(4, most)
    assert rolling.outcomes(1) == ["committed"] * 4
    assert max(rolling.still) == (most or 4)
    assert [name for wave in rolling.waves() for name in wave] == ["e0", "e1", "e2", "e3"]
    assert len(rolling.waves()) == waves
    assert rolling.commits() == [1]
    assert [engine.weights for engine in rolling.engines] == [1] * 4
    assert rolling.world.ready == ("e0", "e1", "e2", "e3")
    assert not [each for each in rolling.world.observed if isinstance(each, TransferRetried)], (
        "no engine is sent anything twice"
    )


@pytest.mark.parametrize("how", ["gone", "not reached"])
def test_turns_stay_what_they_are_when_an_engine_goes(how: str) -> None:
    """A wave may be a group: only the wave of the engine and the last one change, both ways."""
    rolling = Rolling(6, 2)
    rolling.outcomes(1)
    first = rolling.engines[0]
    ways = first.info.transports

    def comes(transports: tuple[TransportKind, ...]) -> None:
        first.info = msgspec.structs.replace(first.info, transports=transports)
        first.live()
        rolling.world.settle()

    first.die()
    rolling.world.advance_until(lambda: "e0" not in rolling.world.ready)
    if how == "not reached":
        comes(())
    rolling.outcomes(2)
    first.die()
    rolling.world.advance(2 * LIMITS.silence_s)
    comes(ways)
    rolling.trainer.catch_up = True  # which is no turn of the others
    assert rolling.outcomes(2) == ["committed"]
    rolling.trainer.catch_up = False
    rolling.outcomes(3)
    waves = rolling.waves()
    assert waves[:3] == [["e0", "e1"], ["e2", "e3"], ["e4", "e5"]]
    assert waves[3:6] == [["e5", "e1"], ["e2", "e3"], ["e4"]]
    assert waves[6:] == [["e0"], ["e5", "e1"], ["e2", "e3"], ["e4", "e0"]]


def test_an_engine_that_waits_is_routed_to() -> None:
    """With the previous version, until its own wave: no engine ceases to be ready more than once in a round."""
    rolling = Rolling(3, 1)
    rolling.outcomes(1)
    before = len(rolling.world.observed)
    rolling.outcomes(2)
    changes = list(readiness_of(rolling.world.observed[before:]))
    for engine in ("e0", "e1", "e2"):
        assert [ready for name, ready in changes if name == engine] == [False, True]
    unready = 0
    for _, ready in changes:
        unready += 1 if not ready else -1
        assert unready <= 1


def test_the_status_says_how_many_engines_wait() -> None:
    """How many may stand still, and in the metrics how many have not had their turn."""
    rolling = Rolling(3, 1)
    seen: list[tuple[int, float | None]] = []
    react = rolling.engines[1].react

    def look(message: Message) -> None:
        if isinstance(message, Transfer):
            view = rolling.world.machine.status(rolling.world.now)
            metrics = Metrics(MetricSource.COORDINATOR)
            ObservationReporter(metrics).show(view)
            waiting = metrics.registry.get_sample_value("weightbus_round_engines_waiting", {"channel": CHANNEL})
            seen.append((view.channels[CHANNEL].round.max_paused, waiting))
        react(message)

    rolling.engines[1].react = look  # type: ignore[method-assign]
    rolling.outcomes(1)
    assert seen == [(1, 1.0)]


def test_an_engine_that_was_behind_is_not_routed_to_while_it_waits() -> None:
    """Waiting makes an old version no better: only what was committed right before is served on."""
    rolling = Rolling(2, 2)
    rolling.outcomes(1)
    late = rolling.world.engine("e9")
    rolling.trainer.policy = Policy(max_paused=1)
    before = len(rolling.world.observed)
    rolling.outcomes(2)
    changes = list(readiness_of(rolling.world.observed[before:]))
    assert [ready for name, ready in changes if name == late.name] == [True]
    assert late.weights == 2


def test_a_wave_that_fails_is_followed_by_the_next() -> None:
    """As long as fewer do not serve than may stand still; an engine that failed for good is excluded, and reported."""
    rolling = Rolling(4, 2, retries=0)
    rolling.engines[0].fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)
    assert rolling.outcomes(1) == ["quarantined", "committed", "committed", "committed"]
    assert rolling.waves() == [["e0", "e1"], ["e2"], ["e3"]]
    assert max(rolling.still) == 2


BREAKS: dict[str, Callable[[Engine], None]] = {
    "transfer": lambda engine: engine.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY),
    "resume": lambda engine: engine.fail(Commit, Step.RESUME, EngineHealth.DIRTY),
    "overdue": lambda engine: engine.script.update({Commit: lambda _message: setattr(engine, "deaf", True)}),
}


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("first", [0, 2, 5])
def test_a_version_that_breaks_servers_does_not_reach_all(how: str, most: int, first: int) -> None:
    """No more fall than may stand still: the rest goes on with what it had, and the report says why."""
    rolling = Rolling(6, most, retries=0)
    rolling.outcomes(1)
    rolling.still.clear()
    for engine in rolling.engines[first:]:
        BREAKS[how](engine)
    done = rolling.world.publish(rolling.trainer, 2)
    fallen = [report.engine for report in done.engines if report.outcome is Outcome.QUARANTINED]
    assert fallen == [f"e{index}" for index in range(first, min(6, first + most))]
    assert max(rolling.still) <= most
    assert sum(not engine.generating for engine in rolling.engines) == len(fallen)
    if first + most < 6:
        told = sum(map(len, rolling.waves()[-(-6 // most) :]))
        expected = f"the rolling round stopped: {most} of {told} engines that were paused for version 2 do not serve"
        assert done.reason.startswith(expected)
        behind = done.engines[first + most :]
        assert {(each.outcome, each.version) for each in behind} == {(Outcome.ABORTED, 1)}
        assert [each.weights for each in rolling.engines[first + most :]] == [1] * len(behind)
    too_many = how == "transfer" and first == 0
    assert done.outcome is (Outcome.ABORTED if too_many else Outcome.COMMITTED)
    assert rolling.world.committed == (1 if too_many else 2)


def test_the_log_says_why_a_round_stopped() -> None:
    """At the level of warnings, though its version is committed."""
    rolling = Rolling(3, 1)
    rolling.outcomes(1)
    BREAKS["resume"](rolling.engines[0])
    before = len(rolling.world.observed)
    rolling.world.publish(rolling.trainer, 2)
    ended = [each for each in rolling.world.observed[before:] if isinstance(each, RoundEnded)]
    with capture_logs() as lines:
        ObservationReporter(Metrics(MetricSource.COORDINATOR)).observe(ended[0])
    assert [(line["event"], line["log_level"]) for line in lines] == [("round_ended", "warning")]
    assert "1 of 1 engines that were paused for version 2 do not serve" in lines[0]["reason"]


def test_an_engine_whose_agent_is_gone_stops_no_other() -> None:
    """It is no part of the fleet any more, and a large fleet loses an engine now and then."""
    rolling = Rolling(4, 1)
    rolling.outcomes(1)
    first = rolling.engines[0]
    first.script[Transfer] = lambda _message: first.die()
    done = rolling.world.publish(rolling.trainer, 2)
    assert [report.outcome.value for report in done.engines] == ["lost", "committed", "committed", "committed"]
    assert done.reason == ""


def test_an_engine_that_did_not_serve_before_stops_no_engine() -> None:
    """An engine that never gets well does not keep the others from each version that follows."""
    rolling = Rolling(4, 1, retries=0)
    rolling.outcomes(1)
    for version in (2, 3, 4):
        rolling.engines[0].fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)
        done = rolling.world.publish(rolling.trainer, version)
        if version == 2:
            assert done.reason.startswith("the rolling round stopped: 1 of 1 engines")
        else:
            assert [report.outcome.value for report in done.engines] == ["quarantined", *["committed"] * 3]
            assert [engine.weights for engine in rolling.engines[1:]] == [version] * 3


def test_nor_does_a_joiner() -> None:
    """It serves the weights of its launch, to which no request is sent."""
    world = World()
    trainer = world.trainer()
    world.engine("e0")
    world.publish(trainer, 1)
    joiners = [world.engine(f"j{index}") for index in range(2)]
    trainer.catch_up, trainer.policy = True, Policy(max_paused=1, retries=0)
    joiners[0].fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)
    done = world.publish(trainer, 1)
    assert [report.outcome.value for report in done.engines] == ["quarantined", "committed"]


@pytest.mark.parametrize("how", ["resume", "overdue"])
@pytest.mark.parametrize("most", [1, 2])
def test_a_catch_up_does_not_go_on_where_the_round_stopped(how: str, most: int) -> None:
    """It may come once in a second: engines that are down come first, and no other before they serve."""
    rolling = Rolling(6, most, retries=0)
    rolling.outcomes(1)
    for engine in rolling.engines[1:]:
        BREAKS[how](engine)
    rolling.world.publish(rolling.trainer, 2)
    down = [engine.name for engine in rolling.engines if not engine.generating]
    assert len(down) == most
    rolling.trainer.catch_up = True
    for _ in range(3):
        for engine in rolling.engines:
            if not engine.script:
                BREAKS["transfer"](engine)
        rolling.world.publish(rolling.trainer, 2)
        assert [engine.name for engine in rolling.engines if not engine.generating] == down
    for engine in rolling.engines:
        engine.script.clear()
        engine.deaf = False
    rolling.world.advance(60)
    done = rolling.world.publish(rolling.trainer, 2)
    assert done.reason == ""
    assert [engine.weights for engine in rolling.engines] == [2] * 6
    assert len(rolling.world.ready) == 6


def test_a_resync_risks_first_the_engine_that_fell() -> None:
    """Wherever it stood in the fleet: a serving engine would go down besides."""
    rolling = Rolling(4, 1, retries=0)
    rolling.outcomes(1)
    rolling.engines[0].die()
    rolling.world.advance_until(lambda: "e0" not in rolling.world.ready)
    BREAKS["resume"](rolling.engines[3])
    rolling.outcomes(2)
    assert rolling.waves()[-1] == ["e3"], "it took the place of the first"
    for engine in rolling.engines[1:]:
        BREAKS["transfer"](engine)
    rolling.trainer.catch_up = True
    rolling.outcomes(2)
    assert rolling.waves()[-1] == ["e3"]
    assert [engine.weights for engine in rolling.engines[1:]] == [1, 1, None]


def test_an_engine_that_is_told_that_the_round_stopped_has_time_to_answer() -> None:
    """Though the wave before is over: it serves what it had, and is reported so."""
    rolling = Rolling(2, 1)
    rolling.outcomes(1)
    BREAKS["overdue"](rolling.engines[0])
    rolling.engines[1].ignore(Abort)
    assert rolling.outcomes(2) == ["quarantined", "aborted"]


def test_an_engine_that_is_about_to_serve_again_is_waited_for() -> None:
    """Before the first of the others has its turn: two would stand still else."""
    rolling = Rolling(3, 1, retries=0)
    rolling.outcomes(1)
    rolling.still.clear()
    first = rolling.engines[0]
    first.fail(Transfer, Step.TRANSFER)
    first.ignore(Abort)
    done = rolling.world.publish(rolling.trainer, 2)
    assert [report.outcome.value for report in done.engines] == ["aborted", "committed", "committed"]
    assert max(rolling.still) == 1


def test_an_engine_that_is_slow_to_resume_is_waited_for_while_others_wait_for_their_turn() -> None:
    """For as long as it may take: the next turn would have one more standing still, or the round stop for it."""
    rolling = Rolling(3, 2, retries=0)
    rolling.outcomes(1)
    slow = rolling.engines[1]
    slow.script[Commit] = lambda _message: setattr(slow, "deaf", True)
    rolling.trainer.acquire(2)
    rolling.world.settle()
    rolling.world.advance(2 * LIMITS.straggle_s)
    slow.deaf = False
    rolling.world.advance(2 * LIMITS.retry_max_s)
    done = rolling.trainer.done
    assert done is not None
    assert [report.outcome.value for report in done.engines] == ["committed"] * 3


def test_an_engine_that_never_answers_its_abort_is_waited_for_in_bounded_time() -> None:
    """Then it counts as one that does not serve."""
    rolling = Rolling(3, 1, retries=0)
    rolling.outcomes(1)
    first = rolling.engines[0]
    first.fail(Transfer, Step.TRANSFER)
    first.script[Abort] = lambda _message: setattr(first, "deaf", True)
    rolling.trainer.acquire(2)
    rolling.world.settle()
    rolling.world.advance(2 * (LIMITS.abort_s + LIMITS.grace_s) + 5)
    done = rolling.trainer.done
    assert done is not None
    assert done.version == 2
    assert done.outcome is Outcome.ABORTED
    assert done.reason.startswith("the rolling round stopped: 1 of 1 engines")
    assert [engine.weights for engine in rolling.engines[1:]] == [1, 1]


@given(
    count=st.integers(2, 6),
    most=st.integers(1, 3),
    retries=st.integers(0, 1),
    breaks=st.lists(st.sampled_from(["", "", "transfer", "clean", "resume", "dies"]), min_size=18, max_size=18),
)
def test_whatever_breaks_no_more_fall_than_may_stand_still(
    count: int, most: int, retries: int, breaks: list[str]
) -> None:
    """In one round, by whatever mixture of failures; and if the round was not stopped, every engine had a wave."""
    rolling = Rolling(count, most, retries=retries)
    rolling.outcomes(1)
    rolling.still.clear()
    for engine, how in zip(rolling.engines, breaks, strict=False):
        if how == "dies":
            engine.script[Transfer] = lambda _message, engine=engine: engine.die()  # type: ignore[misc]
        elif how == "clean":
            engine.fail(Transfer, Step.TRANSFER)
        elif how:
            BREAKS[how](engine)
    done = rolling.world.publish(rolling.trainer, 2)
    fallen = [report for report in done.engines if report.outcome is Outcome.QUARANTINED]
    assert len(fallen) <= most
    turns = {name for wave in rolling.waves()[-(-count // most) :] for name in wave}
    if len(fallen) < most:
        assert turns == {engine.name for engine in rolling.engines}
    elif len(turns) < count:
        assert done.reason.startswith("the rolling round stopped: ")
    assert all(each.generating for each in rolling.engines if each.name not in turns)


def test_all_waves_fail() -> None:
    """All waves failed: the round comes to nothing, and every untouched engine serves what it had."""
    rolling = Rolling(2, 1, retries=0)
    for engine in rolling.engines:
        engine.fail(Transfer, Step.TRANSFER)
    done = rolling.world.publish(rolling.trainer, 1)
    assert done.outcome is Outcome.ABORTED
    assert rolling.commits() == []
    assert rolling.world.ready == ("e0", "e1")


def test_a_re_drive_stays_within_its_wave() -> None:
    """An engine that broke is sent everything again while no more are paused than may be."""
    rolling = Rolling(3, 2)
    rolling.engines[1].fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)
    assert rolling.outcomes(1) == ["committed"] * 3
    assert max(rolling.still) == 2
    assert rolling.waves() == [["e0", "e1"], ["e1"], ["e2"]]


def lost(rolling: Rolling) -> None:
    rolling.trainer.die()


def gives_up(rolling: Rolling) -> None:
    send = rolling.trainer.got(Send)[-1]
    trainer = rolling.trainer
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=send.epoch, reason="enough"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [lost, gives_up])
def test_the_trainer_goes_after_the_first_wave(end: Callable[[Rolling], None]) -> None:
    """What is durable stays; an engine before its wave goes on with what it had, and is known to be behind."""
    rolling = Rolling(3, 1)
    rolling.outcomes(1)
    trainer = rolling.trainer
    second = len(rolling.waves()) + 1

    def offered(send: Message) -> None:
        if isinstance(send, Send) and len(rolling.waves()) == second + 1:
            trainer.deaf = True
            end(rolling)

    watched = trainer.react

    def react(message: Message) -> None:
        offered(message)
        if not trainer.deaf:
            watched(message)

    trainer.react = react  # type: ignore[method-assign]
    trainer.acquire(2)
    rolling.world.settle()
    rolling.world.advance(60)
    assert rolling.commits() == [1, 2]
    assert [engine.weights for engine in rolling.engines] == [2, 1, 1]
    assert all(engine.generating for engine in rolling.engines)
    assert rolling.world.ready == ("e0",)
    view = rolling.world.machine.status(rolling.world.now).channels[CHANNEL]
    assert [view.engines[f"e{index}"].lag for index in range(3)] == [0, 1, 1]


def test_the_trainer_gives_up_between_two_turns() -> None:
    """While the first ones are told to serve: they do, and no other engine is paused."""
    rolling = Rolling(3, 1)
    rolling.outcomes(1)
    waves = len(rolling.waves())
    rolling.engines[0].ignore(Commit)
    rolling.trainer.acquire(2)
    rolling.world.settle()
    assert rolling.commits() == [1, 2]
    assert not rolling.engines[0].generating
    gives_up(rolling)
    rolling.world.settle()
    rolling.world.advance_until(lambda: rolling.engines[0].generating)
    assert [engine.weights for engine in rolling.engines] == [2, 1, 1]
    assert len(rolling.waves()) == waves + 1
    assert rolling.trainer.done is not None
    assert {report.engine: report.outcome for report in rolling.trainer.done.engines} == {
        "e0": Outcome.COMMITTED,
        "e1": Outcome.ABORTED,
        "e2": Outcome.ABORTED,
    }


def test_an_engine_that_does_not_say_that_it_serves_holds_up_no_other() -> None:
    """Its `Commit` is repeated; after the time for it the next ones have their turn, where one more may stand still."""
    rolling = Rolling(3, 2)
    BREAKS["overdue"](rolling.engines[0])
    rolling.outcomes(1)
    assert [engine.weights for engine in rolling.engines] == [1, 1, 1]
    assert rolling.world.ready == ("e1", "e2")
    rolling.engines[0].deaf = False
    rolling.world.advance(10)
    assert rolling.world.ready == ("e0", "e1", "e2")


def test_more_verified_engines_than_may_stand_still_cannot_be_asked_for() -> None:
    """They would have to wait for each other, paused."""
    rolling = Rolling(3, 1, min_engines=2)
    assert "raise max_paused" in refusal(rolling.world, rolling.trainer, 1)


def test_a_coordinator_that_restarts_between_waves_keeps_what_is_durable() -> None:
    """The round is gone; the engines that waited are behind, and serve what they had."""
    rolling = Rolling(2, 1)
    world = rolling.world
    world.crash_on = lambda effect: (
        isinstance(getattr(effect, "record", None), EpochTaken) and effect.record.in_round  # type: ignore[union-attr]
    )
    rolling.trainer.acquire(1)
    world.settle()
    assert world.crashed
    world.crash_on = lambda _effect: False
    world.restart()
    world.advance(30)
    assert world.committed == 1
    assert [engine.weights for engine in rolling.engines] == [1, 0]
    assert world.ready == ("e0",)


# -- joining later ----------------------------------------------------------------------------------------------------


def behind() -> tuple[World, Engine, Engine, Trainer]:
    """Version 1 is served by one engine; another one has come since."""
    world = World()
    old = world.engine("e0")
    trainer = world.trainer()
    world.publish(trainer, 1)
    new = world.engine("e1")
    assert world.ready == ("e0",)
    return world, old, new, trainer


def test_a_joiner_is_brought_what_is_committed() -> None:
    """It takes part alone: the others hear nothing, and the journal nothing but the epoch."""
    world, old, new, trainer = behind()
    heard, commits = len(old.inbox), len([each for each in world.records if isinstance(each, Committed)])
    trainer.catch_up = True
    done = world.publish(trainer, 1)
    assert (done.outcome, [report.engine for report in done.engines]) == (Outcome.COMMITTED, ["e1"])
    assert [message for message in old.inbox[heard:] if isinstance(message, Pause | Transfer | Commit)] == []
    assert len([each for each in world.records if isinstance(each, Committed)]) == commits
    assert new.weights == 1
    assert world.ready == ("e0", "e1")
    assert world.committed == 1


def test_a_joiner_is_not_routed_to_before_it_serves() -> None:
    """Not with the weights of its launch either, while it waits for its bytes: what is committed is older than it."""
    world, _, _, trainer = behind()
    trainer.catch_up = True
    before = len(world.observed)
    world.publish(trainer, 1)
    seen = world.observed[before:]
    assert [ready for name, ready in readiness_of(seen) if name == "e1"] == [True]


def test_a_catch_up_finds_no_engine_behind() -> None:
    """It is answered like any version that is committed already, and no engine is paused."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    world.publish(trainer, 1)
    trainer.catch_up = True
    heard = len(engine.inbox)
    assert world.publish(trainer, 1).outcome is Outcome.COMMITTED
    assert not [message for message in engine.inbox[heard:] if isinstance(message, Pause)]


@pytest.mark.parametrize("version", [2, 5])
def test_a_catch_up_brings_nothing_new(version: int) -> None:
    """Other weights than the committed ones are refused, whatever their number."""
    world, _, new, trainer = behind()
    trainer.catch_up = True
    assert "brings what is committed" in refusal(world, trainer, version)
    assert world.committed == 1
    assert new.weights == 0


def test_a_catch_up_that_fails_takes_nothing_back() -> None:
    """The version stays committed and served; the joiner is where it was, and may be tried again."""
    world, old, new, trainer = behind()
    trainer.catch_up = True
    trainer.policy = Policy(retries=0)
    new.fail(Transfer, Step.TRANSFER)
    done = world.publish(trainer, 1)
    assert [report.outcome for report in done.engines] == [Outcome.ABORTED]
    assert (world.committed, world.ready) == (1, ("e0",))
    assert old.generating
    assert new.generating
    world.publish(trainer, 1)
    assert world.ready == ("e0", "e1")


def state_of(world: World, name: str) -> str:
    return world.machine.status(world.now).channels[CHANNEL].engines[name].state


@pytest.mark.parametrize("restarts", [False, True])
def test_an_engine_that_gave_its_memory_back_is_brought_the_next_version(restarts: bool) -> None:
    """Not the one that was committed then: the trainer on its GPU has the memory. A later one it may be brought."""
    world, old, _, trainer = behind()
    old.health, old.held, old.weights, old.generating, old.memory_released = (
        EngineHealth.PENDING,
        None,
        None,
        False,
        True,
    )
    world.advance(5)
    if restarts:  # what its agent, or another coordinator, knows of it begins anew
        old.die()
        world.advance(30)
        old.live()
        world.settle()  # it says Hello, and nothing after it yet
    assert state_of(world, "e0") == "lent"
    trainer.catch_up = True
    done = world.publish(trainer, 1)
    assert [report.engine for report in done.engines] == ["e1"]
    world.publish(trainer, 1)  # for nobody
    assert (old.weights, world.ready) == (None, ("e1",))

    trainer.catch_up = False
    old.fail(Prepare, Step.PREPARE, EngineHealth.PENDING)
    world.publish(trainer, 2)
    assert state_of(world, "e0") == "pending"
    trainer.catch_up = True
    done = world.publish(trainer, 2)
    assert [(each.engine, each.outcome, each.reason) for each in done.engines] == [("e0", Outcome.COMMITTED, "")]
    assert (old.weights, world.ready) == (2, ("e0", "e1"))


def test_the_trainer_of_a_catch_up_is_lost() -> None:
    """The joiner goes on with what it had; no other engine notices."""
    world, old, new, trainer = behind()
    trainer.catch_up = True
    trainer.stop_before = Offered
    trainer.acquire(1)
    world.settle()
    trainer.die()
    heard = len(old.inbox)
    world.advance(30)
    assert not [message for message in old.inbox[heard:] if isinstance(message, Pause | Transfer)]
    assert new.generating
    assert (world.committed, world.ready) == (1, ("e0",))
    again = world.trainer("another")
    again.catch_up = True
    world.publish(again, 1)
    assert world.ready == ("e0", "e1")


def test_joiners_take_turns_too() -> None:
    """A catch-up is a round like any other."""
    world, _, _, trainer = behind()
    joiners = [world.engine(f"j{index}") for index in range(2)]
    trainer.catch_up = True
    trainer.policy = Policy(max_paused=1)
    world.publish(trainer, 1)
    waves = [[each.engine for each in send.receivers] for send in trainer.got(Send)]  # type: ignore[attr-defined]
    assert waves[1:] == [["e1"], ["j0"], ["j1"]]
    assert [joiner.weights for joiner in joiners] == [1, 1]
    assert all(len(before) == len(after) == 1 for before, after in pairwise(waves[1:]))


def test_a_heartbeat_is_no_answer() -> None:
    """A dirty engine stays out while nothing is published, until a catch-up mends it."""
    world, old, new, trainer = behind()
    world.deliver(old, Heartbeat(seq=1, health=EngineHealth.DIRTY, held=None))
    old.health, old.held, old.weights, old.generating = EngineHealth.DIRTY, None, None, False
    world.settle()
    assert world.ready == ()
    trainer.catch_up = True
    done = world.publish(trainer, 1)
    assert sorted(report.engine for report in done.engines) == ["e0", "e1"]
    assert world.ready == ("e0", "e1")
    assert new.weights == old.weights == 1
