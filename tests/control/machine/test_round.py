"""Rounds: whole ones as transcripts, and every way in which one can go wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weightbus.control.machine.effects import Committed, ConnectionLost, EngineFailed, EpochTaken, SendTo
from weightbus.control.machine.states import EnginePhase, Limits, RoundState
from weightbus.control.machine.status import EngineView
from weightbus.control.protocol.messages import (
    Abandon,
    Abort,
    Acquire,
    AgentId,
    Alive,
    Bye,
    Commit,
    EngineHealth,
    Epoch,
    Message,
    Offered,
    Outcome,
    Pause,
    Paused,
    Policy,
    Prepare,
    Publish,
    RoundDone,
    Send,
    Sent,
    Serving,
    Step,
    ToCoordinator,
    Topology,
    Transfer,
    Transferred,
    TransportKind,
    Verified,
    Withdraw,
)

from ..world import CHANNEL, LIMITS, Engine, Trainer, World, digest

SCENARIOS = Path(__file__).parents[1] / "scenarios"


def outcomes(world: World, trainer: Trainer, version: int) -> dict[str, Outcome]:
    return {report.engine: report.outcome for report in world.publish(trainer, version).engines}


def safe(world: World) -> None:
    """No engine generates from mixed weights, or from weights that were never committed."""
    committed = {0} | {record.version for record in world.records if isinstance(record, Committed)}
    for agent in world.agents.values():
        if isinstance(agent, Engine) and agent.generating:
            assert agent.weights in committed, f"{agent.name} generates from {agent.weights}, committed: {committed}"


def fleet() -> tuple[World, Engine, Engine, Trainer]:
    world = World()
    return world, world.engine("e0"), world.engine("e1"), world.trainer()


# -- transcripts -----------------------------------------------------------------------------------------------------


def scenario_round(world: World) -> None:
    world.engine("e0")
    world.engine("e1")
    world.publish(world.trainer(), 1)


def scenario_redrive(world: World) -> None:
    broken = world.engine("e0")
    world.engine("e1")
    broken.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "connection reset")
    world.publish(world.trainer(), 1)


def scenario_restart_before_commit(world: World) -> None:
    world.engine("e0")
    trainer = world.trainer()
    world.crash_on = lambda effect: isinstance(getattr(effect, "record", None), Committed)
    trainer.acquire(1)
    world.settle()
    world.crash_on = lambda _effect: False
    world.restart()
    world.publish(trainer, 1)


def scenario_restart_after_commit(world: World) -> None:
    world.engine("e0")
    trainer = world.trainer()
    world.crash_on = lambda effect: isinstance(effect, SendTo) and isinstance(effect.message, Commit)
    trainer.acquire(1)
    world.settle()
    world.crash_on = lambda _effect: False
    world.restart()


def scenario_trainer_lost(world: World) -> None:
    world.engine("e0")
    trainer = world.trainer()
    trainer.stop_before = Offered
    trainer.acquire(1)
    world.settle()
    trainer.die()
    world.advance(12)


@pytest.mark.parametrize(
    "scenario",
    [
        scenario_round,
        scenario_redrive,
        scenario_restart_before_commit,
        scenario_restart_after_commit,
        scenario_trainer_lost,
    ],
)
def test_scenario_reads_as_reviewed(scenario: Callable[[World], None]) -> None:
    """Whole rounds, message by message, are what was reviewed. `WEIGHTBUS_REWRITE=1` writes them anew."""
    world = World()
    scenario(world)
    safe(world)
    found = "\n".join(world.transcript) + "\n"
    path = SCENARIOS / f"{scenario.__name__.removeprefix('scenario_')}.txt"
    if os.environ.get("WEIGHTBUS_REWRITE"):
        path.write_text(found)
    assert found == path.read_text()


# -- engines that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [Prepare, Pause, Transfer, Commit])
@pytest.mark.parametrize("server_too", [False, True])
def test_engine_dies_at_each_step(command: type[Message], server_too: bool) -> None:
    """The survivors finish; the victim is not ready until a complete verified round, and then it is."""
    world, victim, _, trainer = fleet()
    victim.script[command] = lambda _message: (victim.crash if server_too else victim.die)()
    assert outcomes(world, trainer, 1) == {"e0": Outcome.LOST, "e1": Outcome.COMMITTED}
    assert world.ready == ("e1",)
    victim.live()
    world.settle()
    assert world.ready == (("e0", "e1") if command is Commit and not server_too else ("e1",))
    safe(world)
    assert outcomes(world, trainer, 2) == {"e0": Outcome.COMMITTED, "e1": Outcome.COMMITTED}
    assert world.ready == ("e0", "e1")


@pytest.mark.parametrize(("command", "step"), [(Prepare, Step.PREPARE), (Pause, Step.PAUSE)])
def test_clean_failure_leaves_the_engine_behind(command: type[Message], step: Step) -> None:
    """An engine that fails before its weights were touched serves the old version and lags by one."""
    world, victim, _, trainer = fleet()
    victim.fail(command, step, reason="does not fit")
    done = world.publish(trainer, 1)
    assert [(r.engine, r.outcome, r.reason) for r in done.engines] == [
        ("e0", Outcome.ABORTED, f"{step.value}: does not fit"),
        ("e1", Outcome.COMMITTED, ""),
    ]
    view = world.machine.status(world.now).channels[CHANNEL].engines["e0"]
    assert (view.state, view.lag, view.ready) == ("serving", 1, False)
    assert victim.generating


def test_dirty_engine_is_driven_again_under_a_new_durable_epoch() -> None:
    """A retry names exactly the engines that broke, and its epoch is on disk before any agent hears of it."""
    world, victim, other, trainer = fleet()
    victim.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)
    assert set(outcomes(world, trainer, 1).values()) == {Outcome.COMMITTED}
    first, second = trainer.got(Send)
    assert [len(first.receivers), len(second.receivers)] == [2, 1]  # type: ignore[attr-defined]
    assert (first.epoch, second.epoch) == (1, 2)  # type: ignore[attr-defined]
    assert len(other.got(Transfer)) == 1
    epoch_taken = next(i for i, line in enumerate(world.transcript) if "EpochTaken epoch=2" in line)
    assert epoch_taken < next(i for i, line in enumerate(world.transcript) if "Send epoch=2" in line)


@pytest.mark.parametrize("step", [Step.TRANSFER, Step.VERIFY])
def test_an_engine_that_fails_in_the_transfer_has_paused_whatever_was_heard_of_that(step: Step) -> None:
    """Its `Paused` got lost, and it was told to take the version along with `Pause`: it is sent everything again."""
    world, victim, _, trainer = fleet()

    def pause_unheard(_message: Message) -> None:
        victim.generating = False

    victim.script[Pause] = pause_unheard
    victim.fail(Transfer, step, EngineHealth.DIRTY)
    assert set(outcomes(world, trainer, 1).values()) == {Outcome.COMMITTED}
    assert [len(send.receivers) for send in trainer.got(Send)] == [2, 1]  # type: ignore[attr-defined]


def test_engine_that_was_mended_reports_no_failure() -> None:
    """What the re-drive mended is in the log and not in the report of an engine that committed; what was not, is."""
    world, victim, other, trainer = fleet()
    victim.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "connection reset")
    done = world.publish(trainer, 1)
    assert [(report.outcome, report.reason) for report in done.engines] == [(Outcome.COMMITTED, "")] * 2
    assert ["connection reset" in note.reason for note in world.observed if isinstance(note, EngineFailed)] == [True]
    other.fail(Commit, Step.COMMIT, EngineHealth.PENDING, "no label")
    reasons = {report.engine: report.reason for report in world.publish(trainer, 2).engines}
    assert reasons == {"e0": "", "e1": "commit: no label"}


def test_engine_that_stays_broken_is_quarantined_and_the_others_finish() -> None:
    """After the last re-drive a dirty engine is never resumed; the next round mends it."""
    world, victim, _, trainer = fleet()
    trainer.policy = Policy(retries=1)

    def fail_twice(message: Message) -> object:
        victim.fail(Transfer, Step.VERIFY, EngineHealth.DIRTY)
        return victim.failed(message, Step.TRANSFER, "reset")

    victim.health, victim.weights = EngineHealth.DIRTY, None
    victim.script[Transfer] = fail_twice  # type: ignore[assignment]
    assert outcomes(world, trainer, 1) == {"e0": Outcome.QUARANTINED, "e1": Outcome.COMMITTED}
    assert not victim.generating
    assert world.ready == ("e1",)
    assert outcomes(world, trainer, 2)["e0"] is Outcome.COMMITTED


def test_collective_that_broke_is_driven_again_without_the_lost_member() -> None:
    """One dead member takes a whole group down; the rest is sent everything again and commits."""
    world = World()
    e0, e1, e2 = (world.engine(name) for name in ("e0", "e1", "e2"))
    trainer = world.trainer(transports=(TransportKind.DISTRIBUTED,))
    e0.script[Transfer] = lambda _message: e0.die()
    for engine in (e1, e2):
        engine.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "peer closed")
    assert outcomes(world, trainer, 1) == {"e0": Outcome.LOST, "e1": Outcome.COMMITTED, "e2": Outcome.COMMITTED}
    last = trainer.got(Send)[-1]
    assert [r.engine for r in last.receivers] == ["e1", "e2"]  # type: ignore[attr-defined]
    offsets = [engine.got(Transfer)[-1].rank_offset for engine in (e1, e2)]  # type: ignore[attr-defined]
    assert offsets == [1, 2]


def hold(engine: Engine, epoch: int = 1) -> None:
    """Wait in the transfer of `epoch` for a group that does not form."""

    def held(message: Message) -> ToCoordinator | None:
        assert isinstance(message, Transfer)
        if message.epoch > epoch:
            for answer in engine.answers(message):
                engine.say(answer)
        else:
            engine.script[Transfer] = held
        return None

    engine.script[Transfer] = held


def group_of_three(retries: int) -> tuple[World, Engine, Trainer]:
    """The first group does not form, because of the first engine."""
    world = World()
    e0, e1, e2 = (world.engine(name) for name in ("e0", "e1", "e2"))
    trainer = world.trainer(transports=(TransportKind.DISTRIBUTED,))
    trainer.policy, trainer.waits_in = Policy(retries=retries), {1}
    hold(e1)
    hold(e2)
    return world, e0, trainer


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("when", [Paused, Transfer])
def test_a_lost_member_of_a_group_costs_the_others_no_redrive(retries: int, when: type[Message]) -> None:
    """Nothing was sent when it was lost: the others are sent everything again, allowed re-drives or not, and soon."""
    world, victim, trainer = group_of_three(retries)
    if when is Transfer:
        victim.script[Transfer] = lambda _message: victim.die()
    else:
        trainer.stop_before = None
        world.lose = lambda message: isinstance(message, Send) and not kill(victim)
    done = world.publish(trainer, 1)
    assert {r.engine: r.outcome for r in done.engines} == {
        "e0": Outcome.LOST,
        "e1": Outcome.COMMITTED,
        "e2": Outcome.COMMITTED,
    }
    assert [len(send.receivers) for send in trainer.got(Send)][-1] == 2  # type: ignore[attr-defined]
    assert done.seconds["total"] < 15
    safe(world)


def kill(engine: Engine) -> bool:
    """Kill it, once; False when it was dead already."""
    was, engine.alive = engine.alive, False
    return not was


def test_a_member_at_fault_is_left_out_when_it_has_no_redrive_left() -> None:
    """It failed before anything was sent: it serves its old version, and the others are sent everything again."""
    world, victim, trainer = group_of_three(retries=0)
    victim.fail(Transfer, Step.TRANSFER, reason="the server does not answer")
    done = world.publish(trainer, 1)
    assert {r.engine: r.outcome for r in done.engines} == {
        "e0": Outcome.ABORTED,
        "e1": Outcome.COMMITTED,
        "e2": Outcome.COMMITTED,
    }
    (withdraw,) = trainer.got(Withdraw)
    assert isinstance(withdraw, Withdraw)
    assert withdraw.engines == {"e0": "transfer: the server does not answer"}
    assert victim.generating


def test_each_engine_has_its_own_redrives() -> None:
    """What the first engine's failure costs is its own: a second attempt with it leaves the others theirs."""
    world, victim, trainer = group_of_three(retries=1)
    trainer.waits_in = {1, 2}
    e1, e2 = (world.agents[name] for name in ("e1", "e2"))
    assert isinstance(e1, Engine)
    assert isinstance(e2, Engine)
    hold(e1, 2)
    hold(e2, 2)

    def fail_always(message: Message) -> ToCoordinator:
        victim.script[Transfer] = fail_always
        return victim.failed(message, Step.TRANSFER, "no")

    victim.script[Transfer] = fail_always
    assert outcomes(world, trainer, 1) == {
        "e0": Outcome.ABORTED,
        "e1": Outcome.COMMITTED,
        "e2": Outcome.COMMITTED,
    }
    assert [len(send.receivers) for send in trainer.got(Send)] == [3, 3, 2]  # type: ignore[attr-defined]


def test_an_engine_that_was_spared_keeps_its_redrives() -> None:
    """It takes part again, and may still fail by itself as often as it could before."""
    world, victim, trainer = group_of_three(retries=1)
    victim.fail(Transfer, Step.TRANSFER)
    e1 = world.agents["e1"]
    assert isinstance(e1, Engine)

    def spared_then_fails(message: Message) -> ToCoordinator | None:
        if message.epoch == 1:  # type: ignore[attr-defined]
            e1.script[Transfer] = spared_then_fails
            return None
        return e1.failed(message, Step.TRANSFER, "its own fault")

    e1.script[Transfer] = spared_then_fails
    assert outcomes(world, trainer, 1) == dict.fromkeys(("e0", "e1", "e2"), Outcome.COMMITTED)
    assert [len(send.receivers) for send in trainer.got(Send)] == [3, 3, 1]  # type: ignore[attr-defined]
    assert victim.generating


def test_an_engine_that_was_spared_pays_for_what_it_fails_by_itself_after_that() -> None:
    """It has taken everything of the next attempt when the trainer's half of that is over, and cannot prove it."""
    world, victim, trainer = group_of_three(retries=1)
    victim.fail(Transfer, Step.TRANSFER)
    e1, taken = world.agents["e1"], list[Message]()
    assert isinstance(e1, Engine)

    def takes(message: Message) -> ToCoordinator | None:
        epoch: Epoch = message.epoch  # type: ignore[attr-defined]
        e1.script[Transfer] = takes
        if epoch == 1:
            return None
        taken.append(message)
        return Transferred(request=e1.key(), channel=CHANNEL, epoch=epoch, bytes=1, buckets=1, seconds=0.1)

    e1.script[Transfer] = takes
    trainer.acquire(1)
    world.settle()
    trainer.stop_before = Sent
    world.advance(8)  # a spared engine has some time to report
    while taken and len(trainer.got(Send)) < 6:
        e1.health = EngineHealth.DIRTY
        epoch: Epoch = taken[-1].epoch  # type: ignore[attr-defined]
        trainer.say(Sent(request=trainer.key(), channel=CHANNEL, epoch=epoch))
        trainer.deaf = False
        world.settle()
        e1.say(e1.failed(taken.pop(), Step.VERIFY, "it holds something else"))
        world.settle()
    assert [len(send.receivers) for send in trainer.got(Send)] == [3, 3, 1]  # type: ignore[attr-defined]
    assert world.ready == ("e0", "e2")


def test_a_group_that_fails_by_nobodys_fault_ends_with_its_redrives() -> None:
    """A trainer that spares every engine, always, does not drive a round for ever."""
    world, e0, e1, trainer = fleet()
    for engine in (e0, e1):
        hold(engine, epoch=99)
    trainer.failed = {"e0": "the group broke", "e1": "the group broke"}
    trainer.spared = (e0.name, e1.name)
    done = world.publish(trainer, 1)
    assert done.outcome is Outcome.ABORTED
    assert len({send.epoch for send in trainer.got(Send)}) == 2  # type: ignore[attr-defined]
    assert e0.generating
    assert e1.generating


def test_the_trainer_is_told_until_its_half_is_over_and_of_all_that_are_out() -> None:
    """A `Withdraw` that gets lost is said again; one that names more replaces it; after `Sent` nothing is said."""
    world = World()
    e0, e1, e2 = (world.engine(name) for name in ("e0", "e1", "e2"))
    trainer = world.trainer()
    trainer.waits_in = {1}
    lost: list[Message] = []
    world.lose = lambda message: isinstance(message, Withdraw) and not lost and not lost.append(message)
    hold(e1, 99)
    hold(e2, 99)
    e0.fail(Transfer, Step.TRANSFER, reason="first")
    trainer.policy = Policy(retries=0)
    trainer.sending = None
    trainer.acquire(1)
    world.settle()
    assert lost
    trainer.sending = None  # it goes on waiting, whatever it is told
    world.advance(3)
    first = trainer.got(Withdraw)
    assert first
    assert all(message.engines == {"e0": "transfer: first"} for message in first)  # type: ignore[attr-defined]
    e1.say(e1.failed(e1.got(Transfer)[-1], Step.TRANSFER, "second"))
    world.settle()
    assert trainer.got(Withdraw)[-1].engines == {"e0": "transfer: first", "e1": "transfer: second"}  # type: ignore[attr-defined]
    told = len(trainer.got(Withdraw))
    trainer.say(Sent(request=trainer.key(), channel=CHANNEL, epoch=Epoch(1), failed=dict.fromkeys(("e0", "e1"), "out")))
    world.settle()
    world.advance(20)
    assert len(trainer.got(Withdraw)) == told


def test_too_few_engines_abort_and_all_serve_the_old_version() -> None:
    """With fewer engines than the policy asks for nothing is committed and clean engines go on."""
    world, victim, other, trainer = fleet()
    trainer.policy = Policy(min_engines=2)
    victim.fail(Pause, Step.PAUSE, reason="stuck")
    done = world.publish(trainer, 1)
    assert done.outcome is Outcome.ABORTED
    assert "2 are needed (e0: pause: stuck)" in done.reason
    assert (victim.generating, other.generating, world.committed) == (True, True, None)
    assert world.ready == ("e0", "e1")


def test_silent_step_is_left_out_at_its_deadline() -> None:
    """An engine whose agent lives but never answers `Pause` holds the round up no longer than `pause_s`."""
    world, victim, _, trainer = fleet()
    victim.script[Pause] = lambda _message: None
    victim.answers = lambda message: [] if isinstance(message, Pause) else Engine.answers(victim, message)  # type: ignore[method-assign]
    done = world.publish(trainer, 1)
    assert {r.engine: r.outcome for r in done.engines} == {"e0": Outcome.ABORTED, "e1": Outcome.COMMITTED}
    assert world.limits.pause_s <= done.seconds["pause"] <= world.limits.pause_s + world.limits.grace_s + 2
    assert len(victim.got(Pause)) > 3


def test_a_version_that_was_replaced_is_not_said_any_more() -> None:
    """An engine that comes back during a round is told to serve what was committed until then, and not afterwards."""
    world, victim, other, trainer = fleet()
    world.publish(trainer, 1)
    victim.die()
    world.advance(200)
    said: list[int | None] = []

    def comes_back(message: Message) -> ToCoordinator:
        victim.connect()
        return other.answers(message)[0]

    def lose(message: Message) -> bool:
        old = isinstance(message, Commit) and message.version == 1
        if old:
            said.append(world.committed)
        return old

    other.script[Prepare] = comes_back
    world.lose = lose

    assert world.publish(trainer, 2).outcome is Outcome.COMMITTED
    world.advance(60)

    assert said
    assert set(said) == {1}


def test_commit_is_repeated_after_the_round_until_the_engine_serves() -> None:
    """What is durable rolls forward: an engine that misses every `Commit` of the round gets it afterwards."""
    world, victim, _, trainer = fleet()
    world.lose = lambda message: isinstance(message, Commit) and world.now < 300 and not world_is_e1(message)
    sent: list[Message] = []

    def world_is_e1(message: Message) -> bool:
        sent.append(message)
        return len(sent) == 2

    done = world.publish(trainer, 1)
    assert done.outcome is Outcome.COMMITTED
    assert {r.engine: r.outcome for r in done.engines} == {"e0": Outcome.QUARANTINED, "e1": Outcome.COMMITTED}
    world.advance_until(lambda: victim.generating, 400)
    world.settle()
    assert world.ready == ("e0", "e1")


def test_channel_without_engines_commits_at_once() -> None:
    """A version of a channel without engines exists as soon as it is durable; an engine that joins later is stale."""
    world = World()
    trainer = world.trainer()
    assert world.publish(trainer, 1).outcome is Outcome.COMMITTED
    late = world.engine("late")
    assert world.ready == ()
    assert outcomes(world, trainer, 2) == {"late": Outcome.COMMITTED}
    assert late.label == 2


def test_engine_that_no_transport_reaches_is_left_out_with_the_reason() -> None:
    """The reason names every transport and what speaks against it; nothing is sent to that engine."""
    world = World()
    far = world.engine("far", host="h9", transports=(TransportKind.LOCAL,))
    world.engine("near")
    done = world.publish(world.trainer(), 1)
    report = next(r for r in done.engines if r.engine == "far")
    assert report.outcome is Outcome.ABORTED
    assert report.reason == (
        "no transport: local: trainer and engine are on different hosts;"
        " distributed: the engine agent does not offer it, and its log says why"
    )
    assert not far.got(Prepare)


def test_an_offer_that_could_not_be_made_is_reported_with_the_trainers_reason() -> None:
    """Log and report say what only the trainer knows; nothing is sent, and the engines serve what they served."""
    world, e0, e1, trainer = fleet()
    why = "/var/lib/weightbus: no space left on device"
    trainer.unopened = {"e0": why, "e1": why}
    done = world.publish(trainer, 1)
    said = f"the trainer made no local offer: {why}"
    assert done.outcome is Outcome.ABORTED
    assert said in done.reason
    assert [report.reason for report in done.engines] == [said, said]
    assert [note.reason for note in world.observed if isinstance(note, EngineFailed)] == [said, said]
    assert e0.generating
    assert e1.generating
    assert not e0.got(Transfer)


# -- trainers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [Publish, Offered, Sent])
def test_trainer_dies_at_each_step(before: type[Message]) -> None:
    """The round ends within the lease, clean engines serve the old version, and another trainer can publish."""
    world, e0, _, trainer = fleet()
    other = world.trainer("other")
    trainer.stop_before = before
    for engine in world.agents.values():
        if before is Sent and isinstance(engine, Engine):
            engine.answers = lambda message, engine=engine: (  # type: ignore[method-assign]
                [] if isinstance(message, Transfer) else Engine.answers(engine, message)
            )
    trainer.acquire(1)
    world.settle()
    trainer.die()
    world.advance(world.limits.lease_s + 2)
    assert e0.generating
    assert world.machine.channels[CHANNEL].lease is None
    for engine in world.agents.values():
        if isinstance(engine, Engine):
            engine.answers = lambda message, engine=engine: Engine.answers(engine, message)  # type: ignore[method-assign]
    assert set(outcomes(world, other, 1).values()) == {Outcome.COMMITTED}
    safe(world)


def test_trainer_that_dies_after_its_last_byte_is_not_needed() -> None:
    """Engines that have everything verify and commit: their old weights are gone, and the new ones are complete."""
    world, e0, _, trainer = fleet()
    held_back: list[Message] = []
    e0.answers = lambda message: (  # type: ignore[method-assign]
        [
            held_back.append(answer) or answer
            for answer in Engine.answers(e0, message)
            if not isinstance(answer, Verified)
        ]  # type: ignore[func-returns-value]
    )
    trainer.acquire(1)
    world.settle()
    trainer.die()
    world.advance(world.limits.lease_s + 2)
    last = held_back[-1]
    assert isinstance(last, Transferred)
    e0.say(
        Verified(
            request=e0.key(),
            channel=CHANNEL,
            epoch=last.epoch,
            version=1,  # type: ignore[arg-type]
            table=e0.held.table if e0.held else "",  # type: ignore[arg-type]
            verified_by="bucket-digest",
            seconds=0.1,
        )
    )
    e0.answers = lambda message: Engine.answers(e0, message)  # type: ignore[method-assign]
    world.settle()
    assert world.committed == 1
    assert world.ready == ("e0", "e1")


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "stands still"])
def test_a_trainers_last_word_is_not_waited_for_when_all_have_proven_what_they_hold(dies: bool) -> None:
    """Engines stand still for nothing else then: they serve what they hold after `reconnect_s`, not after its lease.

    (N30, F29)
    """
    world, _, _, trainer = fleet()
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    if dies:
        trainer.die()
    assert world.ready == ()
    world.advance(world.limits.reconnect_s + 0.5)
    assert world.committed == 1
    assert world.ready == ("e0", "e1")
    safe(world)


def test_a_trainer_that_says_its_last_word_too_late_is_told_how_the_round_ended() -> None:
    """It lives, and was slow: the word changes nothing any more, and the next version is taken."""
    world, _, _, trainer = fleet()
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    trainer.stop_before, trainer.deaf = None, False
    world.advance(world.limits.reconnect_s + 0.5)
    trainer.say(Sent(request=trainer.key(), channel=CHANNEL, epoch=Epoch(1)))
    world.settle()
    assert world.committed == 1
    assert trainer.got(RoundDone)[-1].outcome is Outcome.COMMITTED
    assert set(outcomes(world, trainer, 2).values()) == {Outcome.COMMITTED}


def test_what_is_verified_is_committed_when_the_trainer_is_lost_and_no_engine_loads() -> None:
    """One engine broke meanwhile: it would have been sent everything again, and is left out."""
    world, _, e1, trainer = fleet()
    e1.fail(Transfer, Step.TRANSFER, EngineHealth.CLEAN, "connection reset")
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    trainer.die()
    world.advance(world.limits.reconnect_s + 0.5)
    assert world.committed is None, "it may still come back, and send everything again"
    world.advance(world.limits.silence_s)
    assert world.committed == 1
    assert world.ready == ("e0",)
    assert e1.generating
    safe(world)


def test_a_trainer_that_still_sends_is_not_asked_to_send_again() -> None:
    """One engine has proven all, the other broke: what it is sent again begins when the first attempt is over."""
    world, _, e1, trainer = fleet()
    e1.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "connection reset")
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    world.advance(world.limits.reconnect_s + world.limits.grace_s)
    assert [each.epoch for each in trainer.got(Send) if isinstance(each, Send)] == [1]
    assert trainer.done is None
    trainer.stop_before, trainer.deaf = None, False
    trainer.say(Sent(request=trainer.key(), channel=CHANNEL, epoch=Epoch(1)))
    world.settle()
    assert [each.epoch for each in trainer.got(Send) if isinstance(each, Send)] == [1, 2]
    assert world.ready == ("e0", "e1")
    safe(world)


def test_an_engine_that_resumed_by_itself_is_not_waited_for() -> None:
    """It stood still, heard nothing for too long, and serves what it did: the others get the version at once."""
    world, e0, _, trainer = fleet()

    def resume(message: Message) -> ToCoordinator:
        assert isinstance(message, Transfer)
        e0.generating = True
        return Serving(request=e0.key(), channel=CHANNEL, epoch=message.epoch, version=None, seconds=0.1, paused_s=10.0)

    e0.script[Transfer] = resume
    trainer.acquire(1)
    world.settle()
    assert trainer.done, "without any time that passed"
    assert {each.engine: (each.outcome, each.reason) for each in trainer.done.engines} == {
        "e0": (Outcome.ABORTED, "it resumed by itself"), "e1": (Outcome.COMMITTED, ""),
    }  # fmt: skip
    assert (e0.weights, e0.generating) == (0, True)
    assert world.ready == ("e1",), "the other one serves what was before"
    safe(world)


def test_an_engine_whose_time_is_over_may_say_so_itself() -> None:
    """`grace_s` longer than it was given is waited for its own account, after which it is sent everything again."""
    world, e0, _, trainer = fleet()
    trainer.policy = Policy(transfer_timeout_s=30.0)
    taken: list[Message] = []

    def hang(message: Message) -> None:
        taken.append(message)
        e0.deaf = True

    e0.script[Transfer] = hang
    trainer.acquire(1)
    world.settle()
    (order,) = taken
    assert isinstance(order, Transfer)
    assert order.deadline_s == 30.0
    world.advance(30.0 + world.limits.grace_s - 1.0)
    e0.deaf = False
    e0.say(e0.failed(order, Step.TRANSFER, "not done within 30 s"))
    world.settle()
    assert trainer.done
    assert {each.engine: each.outcome for each in trainer.done.engines} == {
        "e0": Outcome.COMMITTED, "e1": Outcome.COMMITTED,
    }  # fmt: skip
    assert world.ready == ("e0", "e1")
    safe(world)


def test_a_turn_that_has_proven_what_it_holds_when_the_trainer_gives_up_goes_on() -> None:
    """The version is durable since the wave before: engines that hold it serve it, and none stays out."""
    world, e0, e1, trainer = fleet()
    trainer.policy = Policy(max_paused=1)
    trainer.acquire(1)
    while world.queue and not e0.label:
        world.step()
    trainer.stop_before = Sent
    world.settle()
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    assert (round_.participants.by_name[e1.name].phase, round_.durable) == (EnginePhase.VERIFIED, True)
    trainer.stop_before, trainer.deaf = None, False
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=round_.epoch, reason="enough"))
    world.settle()
    assert trainer.done
    assert {each.engine: each.outcome for each in trainer.done.engines} == {
        "e0": Outcome.COMMITTED, "e1": Outcome.COMMITTED,
    }  # fmt: skip
    assert (e1.label, e1.generating) == (1, True)
    assert world.ready == ("e0", "e1")
    safe(world)


@pytest.mark.parametrize("not_said", [Offered, Sent])
def test_a_trainer_that_gives_up_sending_again_takes_nothing_from_verified_engines(not_said: type[Message]) -> None:
    """One engine had proven the version when it was said to be sent: without it no engine would serve."""
    world, e0, e1, trainer = fleet()
    e1.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "a rank is gone")
    trainer.try_say = lambda message, blob=None: (  # type: ignore[method-assign]
        None
        if isinstance(message, not_said) and getattr(message, "epoch", 0) == 2
        else Trainer.try_say(trainer, message, blob)
    )
    e1.answers = lambda message: (  # type: ignore[method-assign]
        [] if isinstance(message, Transfer) else Engine.answers(e1, message)
    )
    trainer.acquire(1)
    world.settle()
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    assert (round_.epoch, round_.participants.by_name[e0.name].phase) == (2, EnginePhase.VERIFIED)
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=round_.epoch, reason="no ranks"))
    world.settle()
    assert trainer.done
    assert {each.engine: each.outcome for each in trainer.done.engines} == {
        "e0": Outcome.COMMITTED, "e1": Outcome.QUARANTINED,
    }  # fmt: skip
    assert world.committed == 1
    assert world.ready == ("e0",)
    safe(world)


def test_a_trainer_that_gives_up_while_what_it_sent_is_proven_is_not_needed() -> None:
    """As one that dies then: engines that hold the version are waited for."""
    world, e0, _, trainer = fleet()
    kept: list[ToCoordinator] = []
    e0.answers = lambda message: [  # type: ignore[method-assign]
        answer
        for answer in Engine.answers(e0, message)
        if not (isinstance(answer, Verified) and not kept.append(answer))  # type: ignore[func-returns-value]
    ]
    trainer.acquire(1)
    world.settle()
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    assert round_.state is RoundState.VERIFYING
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=round_.epoch, reason="no ranks"))
    world.settle()
    e0.say(kept[0])
    world.settle()
    assert world.ready == ("e0", "e1")
    assert trainer.done
    assert trainer.done.outcome is Outcome.COMMITTED
    safe(world)


def test_while_an_engine_still_loads_a_lost_trainer_ends_the_round() -> None:
    """The other one has proven them, and waits for the next complete version."""
    world, _, e1, trainer = fleet()
    e1.answers = lambda message: [] if isinstance(message, Transfer) else Engine.answers(e1, message)  # type: ignore[method-assign]
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    trainer.die()
    world.advance(world.limits.reconnect_s + 0.5)
    assert world.committed is None
    world.advance(world.limits.silence_s)
    assert world.committed is None
    assert world.machine.channels[CHANNEL].round is None
    safe(world)


# -- the coordinator fails -------------------------------------------------------------------------------------------


def count_effects() -> int:
    world, *_, trainer = fleet()
    seen = 0

    def count(_effect: object) -> bool:
        nonlocal seen
        seen += 1
        return False

    world.crash_on = count
    world.publish(trainer, 1)
    return seen


@pytest.mark.parametrize("at", range(1, count_effects() + 1))
def test_coordinator_dies_before_each_effect_of_a_round(at: int) -> None:
    """Wherever it dies: nothing is forgotten, no engine serves mixed weights, and publishing again ends well."""
    world, *_, trainer = fleet()
    seen = 0

    def die(_effect: object) -> bool:
        nonlocal seen
        seen += 1
        return seen == at

    world.crash_on = die
    trainer.acquire(1)
    world.settle()
    assert world.crashed
    committed = any(isinstance(record, Committed) for record in world.records)
    world.restart()
    safe(world)
    assert (world.committed == 1) is committed or trainer.done is not None
    if trainer.done is None:
        world.advance(world.limits.heartbeat_s * 3)
    if trainer.done is None:
        world.publish(trainer, 1)
    world.settle()
    assert trainer.done is not None
    assert trainer.done.outcome is Outcome.COMMITTED
    assert world.committed == 1
    assert world.ready == ("e0", "e1")
    epochs = [record.epoch for record in world.records if isinstance(record, EpochTaken)]
    assert epochs == sorted(set(epochs))


def test_restart_answers_a_finished_round_from_the_journal() -> None:
    """The same `Publish` gets the same report from the next coordinator."""
    world, *_, trainer = fleet()
    done = world.publish(trainer, 1)
    (publish,) = [each for each in trainer.said if isinstance(each, Publish)]
    world.restart()
    trainer.say(publish)
    world.settle()
    assert trainer.done == done


@pytest.mark.parametrize("redriven", [False, True])
@pytest.mark.parametrize("overtaken", [False, True])
def test_what_is_durable_is_answered_as_committed_whatever_came_later(redriven: bool, overtaken: bool) -> None:
    """Died between a commit and the end of its round: asked again, even after another trainer's version, it says so."""
    world, engine, _, trainer = fleet()
    if redriven:
        engine.fail(Transfer, Step.TRANSFER)
    world.crash_on = lambda effect: isinstance(effect, SendTo) and isinstance(effect.message, Commit)
    trainer.acquire(1)
    world.settle()
    assert world.crashed
    (publish,) = [each for each in trainer.said if isinstance(each, Publish)]
    assert [record.epoch - publish.epoch for record in world.records if isinstance(record, Committed)] == [redriven]
    trainer.alive = False
    world.crash_on = lambda _effect: False
    world.restart()
    if overtaken:
        assert world.publish(world.trainer("other"), 2).outcome is Outcome.COMMITTED
    trainer.alive = True
    trainer.connect()
    world.settle()
    done = trainer.done
    assert done
    assert (done.outcome, done.version, done.epoch) == (Outcome.COMMITTED, 1, publish.epoch)
    assert [each for each in trainer.said if isinstance(each, Publish)] == [publish, publish]
    assert {each.engine for each in done.engines} == (set() if overtaken else {"e0", "e1"})
    assert world.committed == (2 if overtaken else 1)


# -- messages that are lost, doubled or late -------------------------------------------------------------------------


def traffic() -> int:
    world, *_, trainer = fleet()
    seen = 0

    def count(message: Message) -> bool:
        nonlocal seen
        seen += not isinstance(message, Alive)
        return False

    world.lose = count
    world.publish(trainer, 1)
    return seen


@pytest.mark.parametrize("at", range(1, traffic() + 1))
def test_any_single_message_may_be_lost(at: int) -> None:
    """Whatever message is lost, in either direction, the round commits within a few retries."""
    world, *_, trainer = fleet()
    seen = 0

    def lose(message: Message) -> bool:
        nonlocal seen
        seen += not isinstance(message, Alive)
        return seen == at

    world.lose = lose
    trainer.acquire(1)
    world.settle()
    world.advance(20)
    assert world.committed == 1
    assert world.ready == ("e0", "e1")
    if trainer.done is None:  # the RoundDone itself: a reconnect brings it again
        trainer.connect()
        world.settle()
    assert trainer.done is not None
    assert trainer.done.outcome is Outcome.COMMITTED


def test_doubled_and_stale_answers_change_nothing() -> None:
    """Every message of a round said twice, and all of them again after the next round began: no effect but answers."""
    world, *_, trainer = fleet()
    said: list[tuple[object, object, object]] = []
    deliver = world.deliver

    def twice(agent: object, message: object, blob: object = None) -> None:
        said.append((agent, message, blob))
        deliver(agent, message, blob)  # type: ignore[arg-type]
        deliver(agent, message, blob)  # type: ignore[arg-type]

    world.deliver = twice  # type: ignore[method-assign, assignment]
    assert set(outcomes(world, trainer, 1).values()) == {Outcome.COMMITTED}
    old = list(said)
    assert set(outcomes(world, trainer, 2).values()) == {Outcome.COMMITTED}
    records = list(world.records)
    for agent, message, blob in old:
        if not isinstance(message, Acquire):
            deliver(agent, message, blob)  # type: ignore[arg-type]
    world.settle()
    assert world.records == records
    assert world.ready == ("e0", "e1")


def test_answer_of_an_older_epoch_is_refused() -> None:
    """An engine that speaks of an epoch that is over is told so, and nothing changes."""
    world, e0, _, trainer = fleet()
    world.publish(trainer, 1)
    world.publish(trainer, 2)
    old = Serving(request=e0.key(), channel=CHANNEL, epoch=1, version=1, seconds=0, paused_s=0)  # type: ignore[arg-type]
    e0.say(old)
    world.settle()
    assert "stale_epoch" in world.transcript[-1]


def test_a_late_answer_to_what_came_before_the_round_does_not_count_in_it() -> None:
    """An engine that came back while the lease was granted, and whose answer to that takes long, is not quarantined."""
    world, one, _, trainer = fleet()
    world.publish(trainer, 1)
    trainer.stop_before = Publish
    trainer.acquire(2)
    world.settle()
    one.ignore(Commit)
    one.connect()
    world.settle()
    settling = one.got(Commit)[-1]
    assert isinstance(settling, Commit)
    late = Serving(
        request=one.key(), channel=CHANNEL, epoch=settling.epoch, version=settling.version, seconds=0.1, paused_s=0.0
    )
    one.script[Commit] = lambda _command: late  # says of the old version that it serves, when the new one is committed
    trainer.stop_before, trainer.deaf = None, False
    assert trainer.publishing
    trainer.say(trainer.publishing)
    world.settle()
    world.advance_until(lambda: trainer.done is not None and trainer.done.version == 2)
    assert trainer.done
    assert {report.outcome for report in trainer.done.engines} == {Outcome.COMMITTED}
    safe(world)


def test_late_answer_of_the_first_drive_does_not_count_for_the_second() -> None:
    """An engine that is driven again is verified by what it says under the new epoch, not by an old `Verified`."""
    world, victim, _, trainer = fleet()
    victim.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)

    def late(message: Message) -> ToCoordinator:
        victim.script[Transfer] = lambda _message: None
        assert isinstance(message, Transfer)
        return Verified(
            request=victim.key(),
            channel=CHANNEL,
            epoch=Epoch(message.epoch - 1),
            version=message.version,
            table=message.table,
            verified_by="bucket-digest",
            seconds=0.1,
        )

    first = victim.script[Transfer]

    def break_then_late(message: Message) -> ToCoordinator | None:
        victim.script[Transfer] = late
        return first(message)

    victim.script[Transfer] = break_then_late
    trainer.acquire(1)
    world.settle()
    assert "stale_epoch" in world.transcript[-1]
    assert world.committed is None


def test_what_was_verified_must_be_what_was_published() -> None:
    """An engine that proved other bits under the same number is not committed, nor ready."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    trainer.policy = Policy(retries=0)

    def other_bits(message: Message) -> Verified:
        assert isinstance(message, Transfer)
        engine.health, engine.weights, engine.held = EngineHealth.PENDING, None, None
        return Verified(
            request=engine.key(),
            channel=CHANNEL,
            epoch=message.epoch,
            version=message.version,
            table=digest(b"other bits"),
            verified_by="bucket-digest",
            seconds=0.1,
        )

    engine.script[Transfer] = other_bits
    done = world.publish(trainer, 1)
    assert done.outcome is Outcome.ABORTED
    assert done.engines[0].outcome is Outcome.QUARANTINED
    assert digest(b"other bits")[:12] in done.engines[0].reason
    assert not world.machine.status(world.now).channels[CHANNEL].ready


def test_an_engine_that_serves_another_version_after_the_commit_is_quarantined() -> None:
    """It is believed that it serves, and not that it serves what it was told to."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()

    def serves_the_old(message: Message) -> Serving:
        assert isinstance(message, Commit)
        return Serving(
            request=engine.key(), channel=CHANNEL, epoch=message.epoch, version=None, seconds=0.1, paused_s=1.0
        )

    engine.script[Commit] = serves_the_old
    done = world.publish(trainer, 1)
    assert done.outcome is Outcome.COMMITTED
    assert done.engines[0].outcome is Outcome.QUARANTINED
    assert "serves version None after the commit of 1" in done.engines[0].reason


def test_the_end_of_an_aborted_round_is_told_as_often_as_it_is_asked_for() -> None:
    """An agent that missed it repeats its request, on the connection that it has."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    trainer.policy = Policy(retries=0)
    engine.fail(Transfer, Step.TRANSFER)
    assert world.publish(trainer, 1).outcome is Outcome.ABORTED
    (publish,) = (message for message in trainer.said if isinstance(message, Publish))
    for times in (2, 3):
        trainer.say(publish)
        world.settle()
        assert len(trainer.got(RoundDone)) == times
    assert all(done == trainer.done for done in trainer.got(RoundDone))


def test_abort_reaches_engines_whatever_they_held() -> None:
    """After an abort clean engines were told `Abort` and serve; verified but uncommitted ones stay paused."""
    world, e0, e1, trainer = fleet()
    trainer.policy = Policy(min_engines=2, retries=0)
    e1.fail(Transfer, Step.TRANSFER, EngineHealth.CLEAN)
    done = world.publish(trainer, 1)
    assert done.outcome is Outcome.ABORTED
    assert {r.engine: r.outcome for r in done.engines} == {"e0": Outcome.QUARANTINED, "e1": Outcome.ABORTED}
    assert len(e0.got(Abort)) == len(e1.got(Abort)) == 1
    assert (e0.generating, e1.generating) == (False, True)
    trainer.policy = Policy()
    assert set(outcomes(world, trainer, 2).values()) == {Outcome.COMMITTED}


def deaf_from(command: type[Message]) -> tuple[World, Engine, Engine, Trainer]:
    """Version 1 is everywhere; the second engine hears nothing any more once it is told this in the next round."""
    world, e0, e1, trainer = fleet()
    trainer.policy = Policy(retries=0)
    assert set(outcomes(world, trainer, 1).values()) == {Outcome.COMMITTED}
    if command is Abort:
        e1.fail(Transfer, Step.TRANSFER)
    e1.script[command] = lambda _message: setattr(e1, "deaf", True)
    return world, e0, e1, trainer


@pytest.mark.parametrize("command", [Abort, Commit])
def test_the_last_engines_keep_a_trainer_only_a_moment(command: type[Message]) -> None:
    """It gets its report soon after the others serve. A straggler is told until it answers."""
    world, e0, e1, trainer = deaf_from(command)
    began = world.now
    done = world.publish(trainer, 2)
    assert {r.engine: r.outcome for r in done.engines} == {"e0": Outcome.COMMITTED, "e1": Outcome.QUARANTINED}
    assert LIMITS.straggle_s <= world.now - began <= LIMITS.straggle_s + 1
    assert (e0.weights, world.ready) == (2, ("e0",))
    e1.deaf, told = False, len(e1.got(command))
    world.advance(LIMITS.retry_max_s)
    assert len(e1.got(command)) > told
    assert e1.weights == (1 if command is Abort else 2)
    assert set(outcomes(world, trainer, 3).values()) == {Outcome.COMMITTED}


@pytest.mark.parametrize("command", [Abort, Commit])
def test_an_engine_that_has_not_answered_since_a_round_keeps_no_other_round(command: type[Message]) -> None:
    """Its server may stand still in a call, behind which the next command waits: as long as that, for each version."""
    world, e0, e1, trainer = deaf_from(command)
    assert outcomes(world, trainer, 2) == {"e0": Outcome.COMMITTED, "e1": Outcome.QUARANTINED}
    began, prepared = world.now, len(e1.got(Prepare))
    for version in (3, 4):
        assert outcomes(world, trainer, version) == {"e0": Outcome.COMMITTED, "e1": Outcome.QUARANTINED}
    assert world.now == began
    assert len(e1.got(Prepare)) == prepared
    assert (e0.weights, world.ready) == (4, ("e0",))
    e1.deaf = False
    world.advance(LIMITS.retry_max_s)
    assert set(outcomes(world, trainer, 5).values()) == {Outcome.COMMITTED}
    assert world.ready == ("e0", "e1")


def test_an_engine_that_has_not_answered_is_waited_for_where_too_few_others_are_left() -> None:
    """A version that needs it would come to nothing at once, and it may be about to answer."""
    world, _e0, e1, trainer = fleet()
    trainer.policy = Policy(retries=0)
    world.publish(trainer, 1)
    e1.script[Commit] = lambda _message: setattr(e1, "deaf", True)
    assert outcomes(world, trainer, 2) == {"e0": Outcome.COMMITTED, "e1": Outcome.QUARANTINED}
    trainer.policy = Policy(min_engines=2)
    trainer.acquire(3)
    world.settle()
    assert trainer.done is None or trainer.done.version == 2
    e1.deaf = False
    world.advance(LIMITS.retry_max_s)
    done = trainer.done
    assert done is not None
    assert {r.engine: r.outcome for r in done.engines} == {"e0": Outcome.COMMITTED, "e1": Outcome.COMMITTED}
    assert set(outcomes(world, trainer, 4).values()) == {Outcome.COMMITTED}


def test_while_no_engine_serves_all_have_their_time_to_resume() -> None:
    """The version is worth nothing without them."""
    world, e0, e1, trainer = fleet()
    trainer.policy = Policy(retries=0)
    e1.fail(Transfer, Step.TRANSFER)
    e0.script[Commit] = lambda _message: setattr(e0, "deaf", True)
    e1.script[Abort] = lambda _message: setattr(e1, "deaf", True)
    trainer.acquire(1)
    world.settle()
    world.advance(4 * LIMITS.straggle_s)
    assert trainer.done is None
    e0.deaf = False
    world.advance(LIMITS.retry_max_s + LIMITS.straggle_s)
    done = trainer.done
    assert done is not None
    assert {r.engine: r.outcome for r in done.engines} == {"e0": Outcome.COMMITTED, "e1": Outcome.QUARANTINED}


# -- anything --------------------------------------------------------------------------------------------------------

SHORT = Limits(
    silence_s=4,
    takeover_s=2,
    lease_s=4,
    grace_s=1,
    prepare_s=6,
    pause_s=6,
    offer_s=6,
    verify_s=6,
    commit_s=6,
    resume_s=6,
    abort_s=6,
    straggle_s=2,
)
NAMES = st.sampled_from(["e0", "e1", "e2"])


class AnyHistory(RuleBasedStateMachine):
    """Random histories: whatever happens, promises 1, 2 and 3 hold, and after it has stopped happening all is well."""

    @initialize()
    def begin(self) -> None:
        self.world = World(SHORT)
        self.engines = {name: self.world.engine(name) for name in ("e0", "e1", "e2")}
        self.trainers = [self.world.trainer("t0"), self.world.trainer("t1")]
        self.version = 0
        self.highest = 0
        self.losing = 0
        self.world.lose = self.lose

    def lose(self, _message: Message) -> bool:
        self.losing = max(0, self.losing - 1)
        return self.losing > 0

    @rule(which=st.integers(0, 1), step=st.integers(0, 2))
    def publish(self, which: int, step: int) -> None:
        trainer = self.trainers[which]
        if trainer.alive and trainer.publishing is None:
            trainer.policy = Policy(transfer_timeout_s=6)
            self.version = max(self.version + step, self.world.committed or 0, 1)
            trainer.acquire(self.version)
            self.world.settle()

    @rule(seconds=st.sampled_from([1.0, 3.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(name=NAMES, crash=st.booleans())
    def kill_engine(self, name: str, crash: bool) -> None:
        (self.engines[name].crash if crash else self.engines[name].die)()

    @rule(name=NAMES)
    def revive_engine(self, name: str) -> None:
        if not self.engines[name].alive:
            self.engines[name].live()
            self.world.settle()

    @rule(name=NAMES)
    def reconnect_engine(self, name: str) -> None:
        if self.engines[name].alive:
            self.engines[name].connect()
            self.world.settle()

    @rule(which=st.integers(0, 1))
    def kill_or_revive_trainer(self, which: int) -> None:
        trainer = self.trainers[which]
        if trainer.alive:
            trainer.die()
        else:
            trainer.publishing = None
            trainer.live()
            self.world.settle()

    @rule(
        name=NAMES,
        command=st.sampled_from([Prepare, Pause, Transfer, Commit]),
        health=st.sampled_from(list(EngineHealth)),
    )
    def plan_failure(self, name: str, command: type[Message], health: EngineHealth) -> None:
        if command is not Transfer:
            health = self.engines[name].health
        self.engines[name].fail(command, Step.TRANSFER if command is Transfer else Step.PREPARE, health)

    @rule(name=NAMES, command=st.sampled_from([Prepare, Pause, Transfer, Commit]))
    def plan_death(self, name: str, command: type[Message]) -> None:
        engine = self.engines[name]
        engine.script[command] = lambda _message: engine.die()

    @rule(name=NAMES, command=st.sampled_from([Prepare, Pause, Transfer, Commit, Abort]))
    def plan_what_cannot_be_sent(self, name: str, command: type[Message]) -> None:
        self.world.unsendable = lambda agent, message: agent.name == name and isinstance(message, command)

    @rule(which=st.integers(0, 1), failed=st.sets(NAMES), spared=st.sets(NAMES))
    def plan_broken_group(self, which: int, failed: set[str], spared: set[str]) -> None:
        self.trainers[which].failed = dict.fromkeys(failed, "the group broke")
        self.trainers[which].spared = tuple(AgentId(name) for name in failed & spared)

    @rule(count=st.integers(1, 12))
    def lose_messages(self, count: int) -> None:
        self.losing = count

    @rule(full=st.booleans())
    def disk(self, full: bool) -> None:
        self.world.disk_full = full

    @rule()
    def restart(self) -> None:
        self.losing = 0
        self.world.restart()

    @invariant()
    def nobody_serves_what_was_not_committed(self) -> None:
        if hasattr(self, "world"):
            safe(self.world)

    @invariant()
    def versions_and_epochs_only_grow(self) -> None:
        if not hasattr(self, "world"):
            return
        committed = [record.version for record in self.world.records if isinstance(record, Committed)]
        epochs = [record.epoch for record in self.world.records if isinstance(record, EpochTaken)]
        assert committed == sorted(set(committed))
        assert epochs == sorted(set(epochs))

    def teardown(self) -> None:
        """When the faults stop, the next version reaches every engine."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.disk_full, self.losing = False, 0
        for engine in self.engines.values():
            engine.script.clear()
        for agent in world.agents.values():
            if not agent.alive:
                agent.live()
        world.unsendable = lambda _agent, _message: False
        world.settle()
        world.advance(40)
        trainer = self.trainers[0]
        for agent in self.trainers:
            agent.publishing = None
            agent.failed, agent.spared = {}, ()
        done = world.publish(trainer, max(self.version, world.committed or 0) + 1)
        assert done.outcome is Outcome.COMMITTED, done
        world.settle()
        assert world.ready == ("e0", "e1", "e2"), (done, "\n".join(world.transcript[-80:]))


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=int(os.environ.get("WEIGHTBUS_EXAMPLES", "40")), stateful_step_count=25, deadline=None
)


@pytest.mark.parametrize("life", ["same", "new"])
def test_an_engine_that_took_its_turn_and_comes_back_says_that_it_serves_before_it_is_ready(life: str) -> None:
    """Its part in the round is over, and its server may be another by now."""
    world, first, second, trainer = fleet()
    trainer.policy = Policy(max_paused=1)
    second.ignore(Transfer)
    trainer.acquire(1)
    world.settle()
    assert "e0" in world.ready
    assert world.machine.channels[CHANNEL].round, "the second one's turn is not over"
    first.deaf = True
    world.handle(ConnectionLost(peer=first.peer))
    if life == "same":
        first.connect()
    else:
        first.live()
    world.settle()
    assert "e0" not in world.ready
    first.deaf = False
    world.advance(2)
    assert "e0" in world.ready


def test_an_engine_that_cannot_resume_says_why_in_report_log_and_status() -> None:
    """After its commit: the reason stands beside the version it holds, which alone would look like lateness."""
    world, e0, _, trainer = fleet()
    e0.fail(Commit, Step.RESUME, reason="the server answers 500")
    done = world.publish(trainer, 1)
    said = "resume: the server answers 500"
    assert (done.engines[0].outcome, done.engines[0].reason) == (Outcome.QUARANTINED, said)
    assert [note.reason for note in world.observed if isinstance(note, EngineFailed)] == [said]
    view = world.machine.status(world.now).channels["policy"].engines["e0"]
    assert (view.ready, view.state) == (False, "paused")
    assert view.reason == f"{said}; holds the weights of its launch, committed is 1"


def test_an_engine_that_cannot_resume_after_an_abort_is_noted() -> None:
    """The report has both reasons: the one of its transfer, and the one for which it stays paused."""
    world, e0, _, trainer = fleet()
    e0.fail(Prepare, Step.PREPARE, reason="another model")
    e0.fail(Abort, Step.RESUME, reason="the server answers 500")
    done = world.publish(trainer, 1)
    first, both = "prepare: another model", "prepare: another model; resume: the server answers 500"
    assert (done.engines[0].outcome, done.engines[0].reason) == (Outcome.QUARANTINED, both)
    noted = [(note.step, note.reason) for note in world.observed if isinstance(note, EngineFailed)]
    assert noted == [("preparing", first), ("leaving", both)]


def trouble(engine: Engine, reason: str, *, starting: bool = False, lasted_s: float = 0.0) -> None:
    engine.say(Topology(request=engine.key(), trouble=reason, trouble_s=lasted_s, starting=starting))


def test_an_engine_whose_server_takes_no_version_is_not_asked_where_others_are_enough() -> None:
    """It is left out with its trouble as the reason; alone it is asked, since its server may be well by now (N61)."""
    world, well, slow, trainer = fleet()
    trouble(slow, "has answered nothing", starting=True, lasted_s=40.0)
    world.settle()
    assert outcomes(world, trainer, 1) == {"e0": Outcome.COMMITTED, "e1": Outcome.ABORTED}
    assert not slow.got(Prepare)
    (report,) = [each for each in trainer.done.engines if each.engine == "e1"] if trainer.done else []
    assert report.reason == "has answered nothing"
    well.say(Bye(reason="closed"))
    world.settle()
    assert outcomes(world, trainer, 2)["e1"] is Outcome.COMMITTED
    assert slow.got(Prepare)


def test_trouble_is_shown_with_its_duration_and_keeps_an_engine_off_the_list() -> None:
    """What the agent said, for how long by the coordinator's clock, and gone once the agent says so (N61)."""
    world, _, slow, _trainer = fleet()
    assert len(world.ready) == 2
    trouble(slow, "no connection to http://e1: refused; launch it", starting=True, lasted_s=40.0)
    world.settle()
    assert len(world.ready) == 1
    world.advance(2.0)
    shown = world.machine.status(world.now).channels[CHANNEL].engines["e1"]
    assert (shown.state, shown.starting, shown.usable) == ("starting", True, False)
    assert shown.reason == "starting: no connection to http://e1 for 42 s: refused; launch it"
    trouble(slow, "")
    world.settle()
    assert len(world.ready) == 2


def test_why_an_engine_is_not_clean_is_shown_until_it_serves_again() -> None:
    """What another party did to its server, as its agent says, beside what came of its last command (N57)."""
    world, _, touched, trainer = fleet()
    assert outcomes(world, trainer, 1)["e1"] is Outcome.COMMITTED

    def shown() -> EngineView:
        return world.machine.status(world.now).channels[CHANNEL].engines["e1"]

    held = touched.held

    def is_now(health: EngineHealth, unclean: str) -> None:
        touched.health, touched.held = health, held if health is EngineHealth.CLEAN else None
        touched.say(Topology(request=touched.key(), unclean=unclean))
        touched.say(touched.heartbeat())
        world.settle()

    is_now(EngineHealth.PENDING, "another party has paused the server")
    assert (shown().ready, shown().reason) == (False, "pending: another party has paused the server")
    is_now(EngineHealth.CLEAN, "")
    assert (shown().ready, shown().reason) == (True, "")
    is_now(EngineHealth.PENDING, "another party changed its weights")
    touched.fail(Prepare, Step.PREPARE, EngineHealth.PENDING, "no space left")
    assert outcomes(world, trainer, 2)["e1"] is not Outcome.COMMITTED
    assert "another party changed its weights; prepare: no space left" in shown().reason
    assert outcomes(world, trainer, 3)["e1"] is Outcome.COMMITTED
    assert (shown().ready, shown().reason) == (True, "")


def test_an_engine_that_fails_again_is_left_out_for_longer_each_time() -> None:
    """Not after its first failure, nor for longer than its wait; a version that it takes ends the count (N65, G4)."""
    world, well, bad, trainer = fleet()
    trainer.policy = Policy(retries=0)
    versions = iter(range(1, 100))

    def takes(*, fails: bool = True) -> Outcome:
        bad.script.clear()
        if fails:
            bad.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "no space left")
        asked = len(bad.got(Prepare))
        done = world.publish(trainer, next(versions))
        by_name = {each.engine: each for each in done.engines}
        assert by_name["e0"].outcome is Outcome.COMMITTED
        if len(bad.got(Prepare)) == asked:
            assert "its transfer failed in" in by_name["e1"].reason
            assert "no space left" in by_name["e1"].reason
        return by_name["e1"].outcome

    assert [takes(), takes()] == [Outcome.QUARANTINED] * 2
    for wait_s in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        assert takes() is Outcome.ABORTED
        world.advance(wait_s - 1.5)
        assert takes() is Outcome.ABORTED
        assert "no space left" in world.machine.status(world.now).channels[CHANNEL].engines["e1"].reason
        world.advance(1.5)
        assert takes() is Outcome.QUARANTINED
    world.advance(60.0)
    assert takes(fails=False) is Outcome.COMMITTED
    assert [takes(), takes(fails=False)] == [Outcome.QUARANTINED, Outcome.COMMITTED]
    assert well.generating


def test_an_engine_that_fails_again_is_asked_where_it_is_needed_and_when_it_is_new() -> None:
    """The others are not enough; or its agent, and perhaps its server, was launched again (N65)."""
    world, well, bad, trainer = fleet()
    trainer.policy = Policy(retries=0)

    def fail(version: int) -> Outcome:
        bad.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "no space left")
        done = world.publish(trainer, version)
        bad.script.clear()
        return next(each.outcome for each in done.engines if each.engine == "e1")

    assert [fail(1), fail(2)] == [Outcome.QUARANTINED] * 2
    world.advance(2.0)
    assert fail(3) is Outcome.QUARANTINED
    world.advance(4.0)
    assert fail(4) is Outcome.QUARANTINED  # left out for 8 s
    bad.connect()  # to reconnect is no news
    world.settle()
    assert fail(5) is Outcome.ABORTED
    bad.crash()
    bad.live()
    world.advance(5.0)
    assert [fail(6), fail(7)] == [Outcome.QUARANTINED, Outcome.ABORTED]
    well.say(Bye(reason="closed"))
    world.settle()
    assert outcomes(world, trainer, 8)["e1"] is Outcome.COMMITTED


def test_an_engine_is_not_blamed_for_a_transfer_that_failed_for_all_of_its_transport() -> None:
    """The trainer's half may have failed, or a group: nothing shows that the cause is the engine's (N65)."""
    world, well, _, trainer = fleet()
    trainer.policy = Policy(retries=0)
    far = [world.engine(name, host="h9") for name in ("far0", "far1")]
    for version in (1, 2, 3):
        for each in far:
            each.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "the group broke")
        assert outcomes(world, trainer, version)[well.name] is Outcome.COMMITTED
    assert set(outcomes(world, trainer, 4).values()) == {Outcome.COMMITTED}


def test_an_engine_that_refuses_a_version_says_why_while_it_serves_the_one_before() -> None:
    """Its reason stands in the status until it takes a version (N61)."""
    world, _, odd, trainer = fleet()
    odd.fail(Prepare, Step.PREPARE, reason="'lm_head.weight' has shape (1, 2)")
    assert outcomes(world, trainer, 1)["e1"] is Outcome.ABORTED
    shown = world.machine.status(world.now).channels[CHANNEL].engines["e1"]
    assert (shown.state, shown.ready) == ("serving", False)
    assert "'lm_head.weight' has shape (1, 2)" in shown.reason
    assert outcomes(world, trainer, 2)["e1"] is Outcome.COMMITTED
    assert not world.machine.status(world.now).channels[CHANNEL].engines["e1"].reason
