"""The engine's machine: no answer from mixed weights, whatever fails and in whatever order."""

import pytest
from hypothesis import settings as hypothesis_settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightbus.control import protocol as m
from weightbus.control.protocol.errors import InvariantBroken
from weightbus.control.protocol.messages import EngineHealth, Step
from weightbus.engine_agent.machine.engine_machine import HOLD_S
from weightbus.engine_agent.machine.events import (
    Answer,
    ForgetAnswers,
    Label,
    OperationDone,
    Receive,
    Received,
    ReleaseServer,
    Remember,
    RunOperation,
    StateRecord,
    Verify,
)

from ..world import MANIFEST, OTHER, TABLE, World, answers, cancels, only, ran

CLEAN, PENDING, DIRTY = EngineHealth.CLEAN, EngineHealth.PENDING, EngineHealth.DIRTY


def test_a_round_from_prepare_to_serving() -> None:
    """The plain round asks for each operation once, in order, and ends clean under the new version."""
    world = World()
    assert ran(world.prepare()) == ["Validate"]
    assert isinstance(only(world.end()), m.Prepared)
    assert ran(world.pause()) == ["PauseServer"]
    assert isinstance(only(world.end()), m.Paused)
    assert ran(world.transfer()) == ["Receive"]
    received = world.end()
    assert isinstance(only(received), m.Transferred)
    assert ran(received) == ["Verify"]
    verified = only(world.end())
    assert (verified.version, verified.table, verified.verified_by) == (7, TABLE, "live-digest")
    assert ran(world.commit()) == ["ReleaseServer"]
    serving = only(world.end())
    assert (serving.version, serving.paused_s) == (7, 1.5)
    view = world.machine.view()
    assert (view.health, view.paused, view.reached) == (CLEAN, False, None)
    assert view.held == m.HeldVersion(version=7, manifest=MANIFEST, table=TABLE)  # type: ignore[arg-type]


def test_dirty_is_durable_before_the_first_byte() -> None:
    """The record that calls the server dirty comes before the operation that makes it so."""
    world = World()
    world.to_paused()
    effects = world.transfer()
    remember, run = effects
    assert isinstance(remember, Remember)
    assert remember.record.health is DIRTY
    assert isinstance(run, RunOperation)


def test_what_was_proven_is_remembered_while_the_coordinator_commits() -> None:
    """Verified is said first, for requests wait; until then the record speaks of a worse state than the true one."""
    world = World()
    world.to_paused()
    world.transfer()
    world.end()
    verified, label, remember = world.end()
    assert isinstance(verified, Answer)
    assert isinstance(label, RunOperation)
    assert isinstance(remember, Remember)
    assert (remember.record.health, remember.record.held and remember.record.held.version) == (PENDING, 7)


def test_the_label_is_set_while_the_coordinator_commits() -> None:
    """A server that has its label by then is only resumed; a commit that comes earlier waits for it."""
    world = World()
    world.slow_label = True
    world.to_loaded()
    assert world.doing == Label(7, HOLD_S)
    assert ran(world.commit()) == []
    world.end()
    assert world.doing == ReleaseServer(7, flush=True, deadline_s=30.0, labeled=True)
    assert only(world.end()).version == 7


@pytest.mark.parametrize("flush", [True, False])
def test_a_commit_flushes_as_the_policy_says(flush: bool) -> None:
    """The cache is kept where the channel wants it kept."""
    world = World()
    world.to_loaded()
    world.commit(flush=flush)
    assert isinstance(world.doing, ReleaseServer)
    assert world.doing.flush is flush


@pytest.mark.parametrize("spoilt", ["failed", "taken again", "launched again"])
def test_a_label_that_is_not_known_to_be_there_is_set_at_the_commit(spoilt: str) -> None:
    """Whatever happened to it: no server is resumed with the label of another version."""
    world = World()
    world.slow_label = True
    world.to_loaded()
    if spoilt == "failed":
        world.fail()
    else:
        world.end()
        if spoilt == "launched again":
            world.relaunched()
            world.end()  # paused: its weights are of an unknown version
        world.prepare(2, 7)
        world.end()
        if spoilt == "launched again":
            world.pause(2)
            world.end()
        world.transfer(2, 7)
        world.end()
        world.end()
        world.fail()
    world.commit(1 if spoilt == "failed" else 2)
    assert isinstance(world.doing, ReleaseServer)
    assert not world.doing.labeled


def test_an_abort_ends_the_labeling() -> None:
    """It is not waited for, and the server stays paused with uncommitted weights."""
    world = World()
    world.slow_label = True
    world.to_loaded()
    assert cancels(world.abort())
    failed = only(world.fail())
    assert (failed.step, failed.health) == (Step.RESUME, PENDING)
    assert world.machine.view().paused


def test_transfer_untouched_is_clean_again_and_resumes_on_abort() -> None:
    """A transfer that failed before the server was asked leaves the old version, which an abort sets free (F15)."""
    world = World()
    world.to_serving()
    world.to_paused(2, 8)
    world.transfer(2, 8)
    failed = only(world.fail(dirty=False))
    assert (failed.step, failed.health) == (Step.TRANSFER, CLEAN)
    assert world.record is not None
    assert world.record.health is CLEAN
    assert ran(world.abort(2)) == ["ReleaseServer"]
    assert only(world.end()).version == 7


def test_only_what_was_prepared_is_taken() -> None:
    """A version that was never checked, nor its trainer, is not loaded: the coordinator must say `Prepare` first.

    (S9)
    """
    world = World()
    world.to_serving()
    world.to_paused(2, 8)
    failed = only(world.transfer(2, 9))
    assert (failed.step, failed.health) == (Step.TRANSFER, CLEAN)
    assert "not prepared" in failed.reason
    assert world.doing is None
    world.prepare(3, 9)
    world.fail()
    world.pause(3)
    world.end()
    assert "not prepared" in only(world.transfer(3, 9)).reason
    world.transfer(4, 8)
    assert type(world.doing).__name__ == "Receive", "a re-drive of what was prepared needs no second Prepare"


@pytest.mark.parametrize("proven", [True, False], ids=["while it was taken", "by the server"])
def test_a_table_that_follows_is_the_one_of_what_is_held(proven: bool) -> None:
    """From the receipt on: it is what was proven, what a commit has to name, and what is remembered."""
    world = World()
    world.asked = ""
    world.to_paused()
    assert ran(world.transfer()) == ["Receive"]
    assert world.record is not None
    assert world.record.health is DIRTY, "what is durable before the first byte names no table"
    received = world.end(Received(1000, 2, True, "live-digest" if proven else "", TABLE))
    if not proven:
        assert isinstance(world.doing, Verify)
        assert world.doing.command.table == TABLE
        received = (*received, *world.end())
    verified = answers(received)[-1]
    assert (verified.version, verified.table) == (7, TABLE)
    assert world.record.held == m.HeldVersion(version=7, manifest=MANIFEST, table=TABLE)  # type: ignore[arg-type]
    assert only(world.commit(table=OTHER)).step is Step.COMMIT
    world.commit()
    assert only(world.end()).version == 7


def test_a_table_that_does_not_follow_leaves_the_server_dirty() -> None:
    """All was taken, and it is of an unknown version."""
    world = World()
    world.asked = ""
    world.to_paused()
    world.transfer()
    failed = only(world.end(Received(1000, 2, checked=True, verified_by="live-digest")))
    assert (failed.step, failed.health) == (Step.TRANSFER, DIRTY)
    assert world.machine.held is None


def test_what_was_prepared_open_is_taken_open() -> None:
    """A command that names a table is not the one that left it open, nor the other way round."""
    for prepared, told in (("", TABLE), (TABLE, "")):
        world = World()
        world.asked = prepared
        world.to_paused()
        world.asked = told
        assert "not prepared" in only(world.transfer()).reason


def test_epochs_that_have_passed_stay_passed_for_the_next_agent() -> None:
    """What was said before a restart of the sidecar is as stale after it: its record knows the epoch."""
    world = World(StateRecord(identity="first", health=CLEAN, epoch=9))
    assert [type(effect).__name__ for effect in world.prepare(8)] == ["Note"]
    assert world.doing is None
    world.prepare(9)
    assert world.doing is not None


def test_what_was_prepared_was_prepared_for_one_launch() -> None:
    """Another launch may serve another model: what fitted the one before is prepared again before it is taken."""
    world = World()
    world.to_serving()
    world.to_paused(2, 8)
    world.relaunched()
    while world.doing is not None:
        world.end()
    assert "not prepared" in only(world.transfer(3, 8)).reason


@pytest.mark.parametrize("at", ["receive", "verify"])
def test_touched_weights_stay_dirty_through_abort_and_commit(at: str) -> None:
    """After the first byte nothing but a complete, proven transfer sets the server free."""
    world = World()
    world.to_paused()
    world.transfer()
    if at == "verify":
        world.end()
    failed = only(world.fail(dirty=True))
    assert failed.health is DIRTY
    assert failed.step is (Step.VERIFY if at == "verify" else Step.TRANSFER)
    aborted = world.abort()
    assert (only(aborted).step, only(aborted).health, ran(aborted)) == (Step.RESUME, DIRTY, [])
    assert only(world.commit()).health is DIRTY
    assert world.machine.view().paused


def test_a_dirty_engine_is_mended_by_a_redrive() -> None:
    """A second Transfer under a higher epoch needs neither Prepare nor Pause."""
    world = World()
    world.to_paused()
    world.transfer(1)
    world.fail(dirty=True)
    assert ran(world.transfer(2)) == ["Receive"]
    world.end()
    assert isinstance(only(world.end()), m.Verified)
    world.commit(2)
    assert only(world.end()).version == 7


def test_a_server_that_went_on_takes_nothing() -> None:
    """Its pause lease ended: weights are never changed under a server that may generate."""
    world = World()
    world.to_paused()
    world.tick(11.0)
    world.end()
    failed = only(world.transfer())
    assert (failed.step, failed.health) == (Step.TRANSFER, CLEAN)
    assert world.doing is None


def test_answers_of_an_earlier_epoch_answer_nothing_later() -> None:
    """A command came while the same one of an epoch before was carried out: it is carried out, too."""
    world = World()
    world.prepare(1, 7)
    assert cancels(world.prepare(2, 7))
    effects = world.fail()
    assert [(message.epoch, message.step) for message in answers(effects)] == [(1, Step.PREPARE)]
    assert ran(effects) == ["Validate"]
    assert [(type(message), message.epoch) for message in answers(world.end())] == [(m.Prepared, 2)]


def to_staged(world: World) -> None:
    """A clean server takes a version beside what it serves."""
    world.to_serving()
    world.prepare(2, 8)
    world.end(OperationDone(double_buffered=True))
    assert ran(world.pause(2)) == []
    assert ran(world.transfer(2, 8)) == ["ReceiveDoubleBuffered"]


def test_a_version_taken_beside_stops_the_server_for_the_flip() -> None:
    """It answers that it is ready and generates on; paused, then dirty on disk, then put into place, in that order."""
    world = World()
    world.to_serving()
    world.prepare(2, 8)
    world.end(OperationDone(double_buffered=True))
    paused = world.pause(2)
    assert isinstance(only(paused), m.Paused)
    assert ran(paused) == []
    assert (world.machine.paused, world.machine.health) == (False, CLEAN)
    assert ran(world.transfer(2, 8)) == ["ReceiveDoubleBuffered"]
    assert (world.machine.paused, world.machine.health) == (False, CLEAN)
    pause, remember = world.end()
    assert ran((pause,)) == ["PauseServer"]
    assert isinstance(remember, Remember)
    assert remember.record.health is DIRTY
    (run,) = world.end()
    assert isinstance(run, RunOperation)
    assert isinstance(run.operation, Receive)
    assert isinstance(only(world.end()), m.Transferred)
    world.end()
    world.commit(2, 8)
    assert only(world.end()).version == 8


@pytest.mark.parametrize("ends", ["ReceiveDoubleBuffered", "PauseServer"])
def test_a_version_not_taken_beside_costs_nothing(ends: str) -> None:
    """Its transfer failed, and it serves what it served: an abort finds it clean."""
    world = World()
    to_staged(world)
    if ends == "PauseServer":
        world.end()
    failed = only(world.fail())
    assert (failed.step, failed.health) == (Step.TRANSFER, CLEAN)
    world.abort(2)
    assert only(world.end()).version == 7
    assert (world.machine.paused, world.machine.health) == (False, CLEAN)


@pytest.mark.parametrize("noticed", ["never", "before", "meanwhile"])
def test_a_dead_server_is_not_said_to_serve(noticed: str) -> None:
    """Its transfer failed beside what it served; an abort is answered with `Failed` in either case."""
    world = World()
    to_staged(world)
    world.fail()
    if noticed == "before":
        world.gone()
        assert only(world.abort(2)).step is Step.RESUME
        return
    world.abort(2)
    assert world.doing == ReleaseServer(None, False, 30.0, look=True)
    if noticed == "meanwhile":
        assert cancels(world.gone())
    failed = only(world.fail())
    assert (failed.step, failed.health) == (Step.RESUME, PENDING if noticed == "meanwhile" else CLEAN)


def test_a_server_is_looked_at_until_it_was_seen_to_work() -> None:
    """Neither a look that failed nor a launch that ended answers the question; a proof, or a look, does."""
    world = World()
    to_staged(world)
    world.fail()
    for look, ends in ((True, world.fail), (True, world.end), (False, world.end)):
        world.abort(2)
        assert world.doing == ReleaseServer(None, False, 30.0, look=look)
        ends()


def test_a_doubt_ends_with_what_it_was_about() -> None:
    """Another launch did nothing yet that would have to be looked at."""
    world = World()
    world.to_paused()
    world.transfer()
    world.fail()
    world.gone()
    world.relaunched()
    world.end()
    world.to_serving(2)
    world.abort(2)
    assert world.doing == ReleaseServer(None, False, 30.0)


@pytest.mark.parametrize("during", ["ReceiveDoubleBuffered", "PauseServer"])
def test_an_abort_keeps_it_from_being_put_into_place(during: str) -> None:
    """Whatever had arrived beside the weights: nothing of it reaches them."""
    world = World()
    to_staged(world)
    if during == "PauseServer":
        world.end()
    assert cancels(world.abort(2))
    effects = world.end()
    assert ran(effects) in ([], ["ReleaseServer"])
    if world.doing is not None:
        world.end()
    assert (world.machine.paused, world.machine.health) == (False, CLEAN)


def test_a_server_that_does_not_generate_takes_nothing_beside() -> None:
    """A dirty or paused one is paused and loaded as ever."""
    world = World()
    world.to_paused()
    world.transfer()
    world.fail(dirty=True)
    world.prepare(epoch=2)
    world.end(OperationDone(double_buffered=True))
    assert ran(world.pause(epoch=2)) == ["PauseServer"]
    world.end()
    assert ran(world.transfer(epoch=2)) == ["Receive"]


def test_lower_epochs_are_dropped() -> None:
    """A command of an earlier epoch gets no answer and changes nothing (G3, F9)."""
    world = World()
    world.to_serving(5)
    for effects in (world.prepare(4), world.pause(4), world.transfer(4), world.commit(4), world.abort(4)):
        assert (answers(effects), ran(effects)) == ([], [])


def test_repeated_commands_are_answered_again_and_not_carried_out_again() -> None:
    """The same command at the same epoch costs nothing: same answer, same key."""
    world = World()
    world.prepare()
    assert world.prepare() == ()
    prepared = only(world.end())
    assert only(world.prepare()) == prepared
    world.pause()
    paused = only(world.end())
    assert only(world.pause()) == paused
    world.transfer()
    transferred = only(world.end())
    verified = only(world.end())
    assert answers(world.transfer()) == [transferred, verified]
    world.commit()
    world.end()
    again = world.commit()
    assert (only(again).version, ran(again)) == (7, [])


def test_abort_ends_a_running_transfer_and_is_carried_out_after_it() -> None:
    """An abort asks the transfer to end; what it left behind decides the answer."""
    world = World()
    world.to_paused()
    world.transfer()
    assert cancels(world.abort())
    failed, after = answers(world.fail(dirty=True))
    assert (failed.step, failed.health) == (Step.TRANSFER, DIRTY)
    assert (after.step, after.health) == (Step.RESUME, DIRTY)


def test_what_was_asked_to_end_is_asked_again_until_it_does() -> None:
    """The first word may fall between two waits of the worker, where there is nothing to be taken away from it."""
    world = World()
    world.to_paused()
    world.transfer()
    assert not cancels(world.tick(1.0)), "what is wanted runs on"
    world.abort()
    assert cancels(world.tick(0.5))
    assert cancels(world.tick(0.5))
    world.fail(dirty=False)
    assert not cancels(world.tick(0.5))


def test_an_error_tells_the_story() -> None:
    """What a machine that contradicts itself raises says what it was told before."""
    world = World()
    world.to_loaded()
    world.machine.weights.paused = False
    with pytest.raises(InvariantBroken, match=r"(?s)state loaded.*told Transfer of epoch 1.*VersionVerified"):
        world.machine.check()


def test_abort_after_loading_keeps_the_server_paused() -> None:
    """Verified but never committed: the old weights are gone, and the new ones are no version."""
    world = World()
    world.to_loaded()
    failed = only(world.abort())
    assert (failed.step, failed.health) == (Step.RESUME, PENDING)
    assert world.machine.view().paused


def test_commit_of_another_table_is_refused() -> None:
    """The same version with other bits is another version."""
    world = World()
    world.to_loaded()
    failed = only(world.commit(table=OTHER))
    assert (failed.step, failed.health) == (Step.COMMIT, PENDING)
    assert ran(world.commit()) == ["ReleaseServer"]


def test_commit_failure_is_held_back_and_can_be_repeated_by_a_new_commit() -> None:
    """Weights are known; whether the server was resumed all the same is not, so it is paused again (F21)."""
    world = World()
    world.to_loaded()
    world.commit()
    failed = world.fail()
    assert (only(failed).step, only(failed).health) == (Step.RESUME, PENDING)
    assert ran((*failed, *world.tick(2))) == ["PauseServer"]
    world.end()
    assert world.machine.view().paused
    assert ran(world.commit()) == ["ReleaseServer"]


def test_a_server_that_resumes_late_is_paused_when_it_answers_again() -> None:
    """It stood still when it was told to serve, and was quarantined: the call is carried out when it goes on."""
    world = World()
    world.to_loaded()
    world.commit()
    world.gone()
    assert only(world.fail()).health is PENDING
    assert ran(world.tick(2)) == []
    assert ran((*world.found(), *world.tick(2))) == ["PauseServer"]
    assert world.machine.view().reason == "it answers again: LOADED(7)"


@pytest.mark.parametrize("label", ["default", "7"])
@pytest.mark.parametrize("lives", [1, 2])
def test_a_stray_agent_touches_nothing(label: str, lives: int) -> None:
    """Before a welcome a server is neither paused nor resumed, not even by an agent that was started again."""
    record: StateRecord | None = None
    for _ in range(lives):
        world = World(record, label=label, joined=False)
        world.tick(100)
        world.tick(100)
        assert world.doing is None
        record = world.record
    assert ran(world.welcome()) == (["PauseServer"] if label == "7" else [])


def test_a_dirty_server_is_held_back_without_the_coordinator() -> None:
    """The record of a round is enough to know whose server it is."""
    record = StateRecord(identity="first", health=m.EngineHealth.DIRTY, epoch=3)
    world = World(record, joined=False)
    assert ran(tuple(world.effects)) == ["PauseServer"]


def test_pause_lease_resumes_a_clean_engine() -> None:
    """With the coordinator gone, an untouched, paused engine serves its old version again (N7, F1c)."""
    world = World()
    world.to_paused()
    assert ran(world.tick(9, heard=True)) == []
    assert ran(world.tick(9.9)) == []
    assert ran(world.tick(0.2)) == ["ReleaseServer"]
    assert answers(world.end()) == []
    assert not world.machine.view().paused
    assert only(world.transfer()).health is CLEAN


def test_pause_lease_never_resumes_dirty_or_pending() -> None:
    """Silence is no reason to serve mixed or uncommitted weights."""
    dirty, loaded = World(), World()
    dirty.to_paused()
    dirty.transfer()
    dirty.fail(dirty=True)
    loaded.to_loaded()
    for world in (dirty, loaded):
        for _ in range(50):
            assert ran(world.tick(100)) == []
        assert world.machine.view().paused


def test_a_restarted_server_is_paused_and_pending() -> None:
    """Launch weights under the old address are an unknown version once versions exist."""
    world = World()
    world.to_serving()
    assert isinstance(world.gone(), tuple)
    assert world.machine.view().health is PENDING
    effects = world.relaunched()
    assert ran(effects) == ["PauseServer"]
    world.end()
    view = world.machine.view()
    assert (view.health, view.held, view.paused) == (PENDING, None, True)
    assert only(world.abort(1)).health is PENDING
    world.to_serving(2, 8)
    assert world.machine.view().health is CLEAN


def test_a_server_that_only_blinked_is_what_it_was() -> None:
    """The same launch after an unreachable moment: dirty stays dirty, clean stays clean."""
    clean, dirty = World(), World()
    clean.to_serving()
    clean.gone()
    assert ran(clean.found()) == []
    assert clean.machine.view().health is CLEAN
    dirty.to_paused()
    dirty.transfer()
    dirty.fail(dirty=True)
    dirty.gone()
    dirty.found()
    assert dirty.machine.view().health is DIRTY


def test_before_anything_was_ever_committed_a_restart_is_clean() -> None:
    """Every engine serves its launch weights until the first version."""
    world = World()
    world.gone()
    assert ran(world.found("second")) == []
    assert world.machine.view().health is CLEAN


@pytest.mark.parametrize(
    ("stage", "step"),
    [("prepared", Step.PREPARE), ("paused", Step.PAUSE), ("loaded", Step.VERIFY)],
)
def test_losing_the_server_while_waiting_is_said_at_once(stage: str, step: Step) -> None:
    """The coordinator need not find out by a deadline."""
    world = World()
    world.prepare()
    world.end()
    if stage != "prepared":
        world.pause()
        world.end()
    if stage == "loaded":
        world.transfer()
        world.end()
        world.end()
    failed = only(world.gone())
    assert (failed.step, failed.health) == (step, PENDING)


def test_an_agent_restart_keeps_dirty_dirty() -> None:
    """The record outlives the agent: the server is paused again before anything else."""
    world = World(StateRecord(identity="first", health=DIRTY, epoch=3))
    assert world.machine.view().health is DIRTY
    assert [type(effect).__name__ for effect in world.effects if isinstance(effect, RunOperation)] == ["RunOperation"]
    world.end()
    assert only(world.abort(3)).health is DIRTY
    assert answers(world.prepare(2)) == []


def test_an_agent_restart_between_verified_and_commit() -> None:
    """The commit that comes after the restart is carried out: weights and record agree."""
    before = World()
    before.to_loaded(4)
    world = World(before.record)
    world.end()
    world.commit(4)
    assert only(world.end()).version == 7


def test_an_agent_restart_while_serving() -> None:
    """A clean engine goes on; the settling commit finds out that it was not paused for good."""
    before = World()
    before.to_serving(4)
    world = World(before.record, label="7")
    assert (world.machine.view().health, world.doing) == (CLEAN, None)
    assert ran(world.commit(4)) == ["ReleaseServer"]
    assert only(world.end()).version == 7


def test_a_record_of_another_launch_is_not_believed() -> None:
    """The server was restarted while the agent was away."""
    before = World()
    before.to_serving()
    world = World(before.record, up=False)
    world.found("second")
    view = world.machine.view()
    assert (view.health, view.held) == (PENDING, None)


def test_a_label_without_a_record_is_not_trusted() -> None:
    """An unknown client updated this server, and what it left is unknown."""
    world = World(label="12")
    assert world.machine.view().health is PENDING


def test_a_new_boot_of_the_coordinator_stops_old_answers() -> None:
    """What was said to the one before is void; what the server holds is not."""
    world = World()
    world.welcome(1)
    world.to_loaded()
    assert world.welcome(1) == ()
    assert any(isinstance(effect, ForgetAnswers) for effect in world.welcome(2))
    assert ran(world.commit(9)) == ["ReleaseServer"]


def test_commands_to_a_lost_server_fail_at_once() -> None:
    """No deadline is waited for when the server is known to be gone."""
    world = World()
    world.gone()
    assert only(world.prepare()).step is Step.PREPARE
    assert only(world.pause()).step is Step.PAUSE
    assert only(world.transfer()).step is Step.TRANSFER
    assert only(world.commit()).step is Step.COMMIT
    assert only(world.abort()).step is Step.RESUME


def test_abort_without_a_round_frees_a_clean_engine() -> None:
    """Settling: the coordinator aborts what it does not know, and a clean engine says what it serves."""
    world = World()
    assert ran(world.abort(3)) == ["ReleaseServer"]
    assert only(world.end()).version is None
    assert ran(world.abort(3)) == ["ReleaseServer"], "whether it still does is asked each time"
    assert only(world.end()).version is None


def test_a_failed_pause_outside_a_round_is_tried_again() -> None:
    """A pending server is paused as often as it takes."""
    world = World()
    world.to_serving()
    world.gone()
    world.relaunched()
    world.fail()
    assert ran(world.tick(0.1)) == []
    assert ran(world.tick(2)) == ["PauseServer"]


@pytest.mark.parametrize("touched", [True, False])
def test_an_operation_that_outlived_its_server_says_nothing_of_the_new_one(touched: bool) -> None:
    """The old launch's weights must not be ascribed to the new one, whatever the transfer came to."""
    world = World()
    world.to_serving()
    world.to_paused(2, 8)
    world.transfer(2, 8)
    assert cancels(world.found("second"))
    failed = only(world.fail(dirty=touched))
    assert (failed.step, failed.health) == (Step.TRANSFER, DIRTY if touched else PENDING)
    assert world.machine.view().held is None
    assert (type(world.doing).__name__ == "PauseServer") is touched  # it may have met a byte of that transfer
    world.welcome()
    assert type(world.doing).__name__ == "PauseServer"


class AnyOrder(RuleBasedStateMachine):
    """Commands, results, losses and restarts in any order: a server that is not clean never runs free."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.prepare()
        self.world.end()
        self.epoch = 1
        self.launch = 0
        self.mixed = False
        """What a perfect observer knows: weights of this launch were touched and not proven since."""
        self.free = True
        """... and whether the server generates."""
        self.outlived = False
        """The running operation was begun on an earlier launch: its calls met a server that is no more."""

    @rule(step=st.sampled_from(["prepare", "pause", "transfer", "commit", "abort"]), older=st.integers(0, 1))
    def command(self, step: str, older: int) -> None:
        getattr(self.world, step)(max(1, self.epoch - older))

    @rule()
    def next_epoch(self) -> None:
        self.epoch += 1

    @precondition(lambda self: self.world.doing is not None)
    @rule(ok=st.booleans(), touched=st.booleans())
    def operation_ends(self, ok: bool, touched: bool) -> None:
        kind = type(self.world.doing).__name__
        outlived, self.outlived = self.outlived, False
        if outlived:
            kind = ""
        if kind == "Receive":
            assert not self.free, "weights change under a server that generates"
            self.mixed = self.mixed or ok or touched
        if kind == "Verify" and ok:
            self.mixed = False
        if kind == "PauseServer" and ok:
            self.free = False
        if kind == "ReleaseServer" and ok:
            assert not self.mixed, "a server with mixed weights was set free"
            self.free = True
        if ok:
            self.world.end()
        else:
            self.world.fail(dirty=touched)

    @rule()
    def lost(self) -> None:
        self.world.gone()

    @rule(same=st.booleans())
    def found(self, same: bool) -> None:
        if not same:
            self.launch += 1
            self.mixed, self.free = False, True
            self.outlived = self.world.doing is not None
        self.world.found(f"launch-{self.launch}")

    @rule(seconds=st.floats(0, 30), heard=st.booleans())
    def time_passes(self, seconds: float, heard: bool) -> None:
        self.world.tick(seconds, heard=heard)

    @rule()
    def agent_restarts(self) -> None:
        if isinstance(self.world.doing, Receive) and not self.outlived:
            self.mixed = True
        self.outlived = False
        self.world = World(self.world.record, up=False)
        self.world.found(f"launch-{self.launch}")

    @invariant()
    def never_mixed_and_free(self) -> None:
        assert not (self.mixed and self.free)

    @invariant()
    def a_release_with_a_version_is_of_proven_weights(self) -> None:
        doing = self.world.doing
        if isinstance(doing, ReleaseServer) and not self.outlived:
            assert not self.mixed


AnyOrder.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
