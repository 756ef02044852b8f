"""The machine's door: exact effects, their order, and what happens when the journal or the operator says stop."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from weightbus.control.journal.sqlite_journal import SqliteJournal
from weightbus.control.machine import states
from weightbus.control.machine.coordinator import MAX_BLOBS, BlobCache
from weightbus.control.machine.effects import (
    AgentLeft,
    AnyEffect,
    Burst,
    Committed,
    ConnectionLost,
    JournalChanged,
    MessageReceived,
    Peer,
    Persist,
    Persisted,
    PersistFailed,
    Probe,
    RoundEnded,
    SendTo,
    StateEntered,
    StopRequested,
    Tick,
    Token,
)
from weightbus.control.machine.states import ENGINE_MOVES, ROUND_MOVES, EnginePhase, RoundState
from weightbus.control.protocol import codec
from weightbus.control.protocol.errors import IllegalMove
from weightbus.control.protocol.messages import (
    MAX_PAGE_BYTES,
    MAX_PAGES,
    Abandon,
    Abort,
    Acquire,
    AgentId,
    Alive,
    BlobPage,
    Channel,
    Commit,
    EngineHealth,
    Epoch,
    GetBlob,
    Granted,
    Heartbeat,
    Hello,
    Incarnation,
    Message,
    Offered,
    Outcome,
    Pause,
    PauseMode,
    Policy,
    Prepare,
    Prepared,
    Publish,
    PutBlob,
    RefusalCode,
    Refused,
    RequestId,
    Role,
    RoundDone,
    Sent,
    Serving,
    Step,
    Transfer,
    Version,
    Welcome,
)

from .. import world as world_module
from ..world import (
    CHANNEL,
    LIMITS,
    MANIFEST,
    Engine,
    Trainer,
    World,
    digest,
    one_by_one,
    readiness_of,
    table_of,
    trainer_info,
)


def codes(world: World, name: str) -> list[RefusalCode]:
    return [message.code for message in world.agents[name].got(Refused) if isinstance(message, Refused)]


# -- order -----------------------------------------------------------------------------------------------------------


def test_nothing_leaves_before_the_epoch_is_durable() -> None:
    """`Acquire` asks for a record and for nothing else; the grant follows the journal's answer."""
    world = World()
    trainer = world.trainer()
    acquire = Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1))
    (persist,) = world.machine.handle(MessageReceived(peer=trainer.peer, message=acquire), 0.0)
    assert isinstance(persist, Persist)
    effects = world.machine.handle(Persisted(token=persist.token), 0.0)
    assert [type(e.message) for e in effects if isinstance(e, SendTo)] == [Granted]


def test_events_wait_while_a_record_is_written() -> None:
    """Between `Persist` and the journal's answer no event has any effect; afterwards all of them do, in order."""
    world = World()
    trainer = world.trainer()
    acquire = Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1))
    (persist,) = world.machine.handle(MessageReceived(peer=trainer.peer, message=acquire), 0.0)
    assert isinstance(persist, Persist)
    beats = [MessageReceived(peer=trainer.peer, message=Heartbeat(seq=n)) for n in (1, 2, 3)]
    assert [world.machine.handle(beat, 0.0) for beat in beats] == [(), (), ()]
    effects = world.machine.handle(Persisted(token=persist.token), 0.0)
    assert [e.message.__class__.__name__ for e in effects if isinstance(e, SendTo)] == ["Granted", *["Alive"] * 3]


def test_nobody_is_silent_for_what_waits_behind_a_slow_write() -> None:
    """A `Tick` that waited for a record ends what was overdue at its own time: later messages are still unread.

    By the time of the record's end an engine would be lost and a lease over, with their heartbeats next in line.
    """
    world = World()
    world.engine("e0")
    trainer, peer, other = world.trainer(), Peer(b"other"), Channel("other")
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1)))
    world.settle()
    due = min(LIMITS.silence_s, LIMITS.lease_s)
    begun, ended = due - 0.1, due + 1.8
    hello = Hello(
        request=RequestId("o-0"),
        agent=AgentId("o"),
        role=Role.TRAINER,
        channel=other,
        incarnation=Incarnation("o-1"),
        trainer=trainer_info(),
    )
    world.machine.handle(MessageReceived(peer=peer, message=hello), begun)
    asked = Acquire(request=RequestId("o-1"), channel=other, version=Version(1))
    (persist,) = world.machine.handle(MessageReceived(peer=peer, message=asked), begun)
    assert isinstance(persist, Persist)
    assert world.machine.handle(Tick(), begun) == ()
    world.machine.handle(Persisted(token=persist.token), ended)
    assert len(world.machine.membership) == 3
    assert world.machine.channels[CHANNEL].lease
    beats = [MessageReceived(peer=each.peer, message=Heartbeat(seq=1)) for each in world.agents.values()]
    world.machine.handle(Burst(beats), ended)
    world.machine.handle(Tick(), ended)
    assert len(world.machine.membership) == 3
    assert world.machine.channels[CHANNEL].lease


@pytest.mark.parametrize("event", [Persisted(token=Token(99)), PersistFailed(token=Token(99), reason="")])
def test_token_that_was_not_given_out_raises_and_changes_nothing(event: Persisted | PersistFailed) -> None:
    """The driver's mistakes are not swallowed."""
    world = World()
    world.engine("e0")
    before = world.machine.status(0.0)
    with pytest.raises(IllegalMove, match="coordinator in state writing none"):
        world.machine.handle(event, 0.0)
    assert world.machine.status(0.0) == before


def test_commit_record_is_durable_before_any_engine_hears_of_it() -> None:
    """In every round the journal's line stands before the first `Commit` (G2, F1e)."""
    world = World()
    world.engine("e0")
    world.engine("e1")
    world.publish(world.trainer(), 1)
    lines = world.transcript
    record = next(i for i, line in enumerate(lines) if "journal Committed" in line)
    assert record < min(i for i, line in enumerate(lines) if "<- Commit" in line)


def test_alive_names_the_committed_version() -> None:
    """An engine that a round went past hears of it with the next heartbeat, without joining anew."""
    world = World()
    engine = world.engine("e0")
    world.publish(world.trainer(), 7)
    effects = world.machine.handle(MessageReceived(peer=engine.peer, message=engine.heartbeat()), world.now)
    (alive,) = [e.message for e in effects if isinstance(e, SendTo) and isinstance(e.message, Alive)]
    assert alive.committed == 7


def test_early_and_repeated_ticks_do_nothing() -> None:
    """A tick is only a hint that time has passed."""
    world = World()
    world.engine("e0")
    world.now += 1
    assert [world.machine.handle(Tick(), world.now) for _ in range(3)] == [(), (), ()]
    assert world.machine.next_deadline() == world.limits.silence_s


# -- requests --------------------------------------------------------------------------------------------------------


def granted_world() -> tuple[World, Publish]:
    world = World()
    trainer = world.trainer()
    trainer.stop_before = Publish
    trainer.acquire(1)
    world.settle()
    assert trainer.publishing
    return world, trainer.publishing


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"manifest": "f" * 64}, RefusalCode.UNKNOWN_BLOB),
        ({"epoch": 0}, RefusalCode.STALE_EPOCH),
        ({"epoch": 2}, RefusalCode.NOT_ALLOWED),
        ({"policy": Policy(pause=PauseMode.IN_PLACE)}, RefusalCode.NOT_ALLOWED),
        ({"channel": "other"}, RefusalCode.NOT_ALLOWED),
    ],
)
def test_publish_that_is_refused_starts_nothing(changes: dict[str, object], code: RefusalCode) -> None:
    """Unknown blobs, other epochs, contradicting policies, other channels: refused; the lease stays usable."""
    world, publish = granted_world()
    trainer = world.agents["trainer"]
    trainer.say(publish.__class__(**{f: getattr(publish, f) for f in publish.__struct_fields__} | changes))
    world.settle()
    assert codes(world, "trainer") == [code]
    assert world.machine.channels[CHANNEL].round is None
    trainer.say(publish)
    world.settle()
    assert world.committed == 1


def test_second_publish_under_one_lease_is_refused() -> None:
    """One round at a time."""
    world, publish = granted_world()
    engine = world.engine("e0")
    engine.deaf = True
    trainer = world.agents["trainer"]
    trainer.say(publish)
    world.settle()
    again = publish.__class__(**{f: getattr(publish, f) for f in publish.__struct_fields__} | {"request": "other"})
    trainer.say(again)
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(2)))
    world.settle()
    assert codes(world, "trainer") == [RefusalCode.NOT_ALLOWED, RefusalCode.NOT_ALLOWED]


def test_an_agent_that_is_refused_whatever_it_says_is_silent() -> None:
    """A refused message is no sign of life: the engine counts as lost as if it had said nothing (N55)."""
    world = World()
    engine = world.engine("e0")
    world.settle()
    not_its_own = Acquire(request=RequestId("not-its-own"), channel=CHANNEL, version=Version(1))
    engine.heartbeat = lambda: not_its_own  # type: ignore[method-assign, assignment, return-value]
    world.advance_until(lambda: any(isinstance(each, AgentLeft) for each in world.observed), 20.0)
    assert codes(world, "e0")


@pytest.mark.parametrize("prepared", [True, False])
def test_sent_before_offered_is_refused(prepared: bool) -> None:
    """The trainer cannot be done before it began; while engines still prepare it was not asked for anything."""
    world = World()
    engine = world.engine("e0")
    trainer = world.trainer()
    if prepared:
        trainer.stop_before = Offered
    else:
        engine.ignore(Prepare)
    trainer.acquire(1)
    world.settle()
    trainer.say(Sent(request=trainer.key(), channel=CHANNEL, epoch=world.machine.channels[CHANNEL].epoch))
    world.settle()
    assert codes(world, "trainer") == [RefusalCode.NOT_ALLOWED]


def test_abandon_ends_the_round_and_resumes_engines() -> None:
    """A trainer that gives up is told how its round ended; engines serve the old version."""
    world = World()
    engine = world.engine("e0")
    trainer = world.trainer()
    trainer.stop_before = Offered
    trainer.acquire(1)
    world.settle()
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=trainer.publishing.epoch, reason="NaN"))  # type: ignore[union-attr]
    world.settle()
    assert trainer.done
    assert (trainer.done.outcome, trainer.done.reason) == (Outcome.ABORTED, "abandoned by trainer: NaN")
    assert engine.generating
    assert len(engine.got(Abort)) == 1


def test_abandon_without_a_round_frees_the_lease() -> None:
    """Also a lease under which nothing was published is answered with `RoundDone`."""
    world, publish = granted_world()
    trainer = world.agents["trainer"]
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=publish.epoch, reason="changed my mind"))
    world.settle()
    assert trainer.got(RoundDone)
    assert world.machine.channels[CHANNEL].lease is None


def test_an_abandon_of_an_earlier_lease_ends_no_later_one() -> None:
    """A trainer repeats it until it is answered: it may come when the next version is under way."""
    world, publish = granted_world()
    trainer, old = world.agents["trainer"], publish.epoch
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=old, reason="changed my mind"))
    world.settle()
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(publish.version + 1)))
    world.settle()
    lease = world.machine.channels[CHANNEL].lease
    assert lease is not None
    assert lease.epoch > old
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=old, reason="late"))
    world.settle()
    assert world.machine.channels[CHANNEL].lease == lease
    assert trainer.got(Refused)[-1].code is RefusalCode.STALE_EPOCH


WORDY = "begin" + "x" * (codec.MAX_TEXT_CHARACTERS - 8) + "end"
"""As long as what an agent says may be: it cuts its own words to this."""


@pytest.mark.parametrize("who", ["engine", "trainer"])
def test_a_round_that_ended_in_many_words_is_told_and_kept(tmp_path: Path, who: str) -> None:
    """What the coordinator adds to a reason never makes it too long to be sent, or to be read at the next start."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    trainer.policy = Policy(retries=0)
    if who == "engine":
        engine.fail(Transfer, Step.TRANSFER, reason=WORDY)
    else:
        engine.ignore(Prepare)
    trainer.acquire(1)
    world.settle()
    if trainer.publishing and who == "trainer":
        epoch = trainer.publishing.epoch
        trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=epoch, reason=WORDY))
        world.settle()
    done = trainer.done
    assert done is not None
    assert done.reason.endswith("end") or done.reason.endswith("end)")
    codec.TO_AGENT.encode(done)
    with contextlib.closing(SqliteJournal(tmp_path / "journal")) as journal:
        for record in world.records:
            journal.write(record)
    with contextlib.closing(SqliteJournal(tmp_path / "journal")) as journal:
        assert done in [known.done for known in journal.restore()[CHANNEL].answers.values()]


def test_blobs_of_the_round_can_be_read_by_engines() -> None:
    """What the trainer put is what an engine gets; a blob that was never put is refused."""
    world = World()
    engine = world.engine("e0")
    world.publish(world.trainer(), 1)
    engine.say(GetBlob(request=engine.key(), digest=digest(table_of(1)), page=0))
    engine.say(GetBlob(request=engine.key(), digest=digest(b"nothing"), page=0))
    effects = []
    for agent, message, blob in world.queue:
        effects += world.machine.handle(MessageReceived(peer=agent.peer, message=message, blob=blob), world.now)
    sent = [effect for effect in effects if isinstance(effect, SendTo)]
    assert [effect.blob for effect in sent] == [table_of(1), None]
    assert world.machine.channels[CHANNEL].pinned() == {digest(MANIFEST), digest(table_of(1))}


def test_what_is_committed_can_be_read_whatever_else_is_put() -> None:
    """Manifest and table of the committed version are never evicted: engines that come later need them."""
    world = World(msgspec.structs.replace(LIMITS, blob_bytes=1024))
    engine, trainer = world.engine("e0"), world.trainer()
    world.publish(trainer, 1)
    for number in range(8):
        blob = bytes([number]) * 300
        trainer.say(PutBlob(request=trainer.key(), digest=digest(blob), page=0, pages=1), blob)
    world.settle()
    for known in (MANIFEST, table_of(1)):
        engine.say(GetBlob(request=engine.key(), digest=digest(known), page=0))
    world.settle()
    assert len(engine.got(BlobPage)) == 2
    assert not engine.got(Refused)


def test_what_another_channel_has_committed_can_be_read_whatever_is_put() -> None:
    """The store is one for all: what a trainer puts for its own channel takes no other's manifest or table."""
    world = World(msgspec.structs.replace(LIMITS, blob_bytes=1024))
    engine = world.engine("e0")
    world.publish(world.trainer(), 1)
    other = Trainer(world, "other", trainer_info())
    hello = msgspec.structs.replace(other.hello(), channel=Channel("other"))
    other.hello = lambda: msgspec.structs.replace(hello, incarnation=other.incarnation)  # type: ignore[method-assign]
    world.agents["other"] = other
    other.live()
    world.settle()
    other.say(Acquire(request=other.key(), channel=Channel("other"), version=Version(1)))
    for number in range(8):
        blob = bytes([number]) * 300
        other.say(PutBlob(request=other.key(), digest=digest(blob), page=0, pages=1), blob)
    world.settle()
    assert not codes(world, "other")
    for known in (MANIFEST, table_of(1)):
        engine.say(GetBlob(request=engine.key(), digest=digest(known), page=0))
    world.settle()
    assert len(engine.got(BlobPage)) == 2
    assert not engine.got(Refused)


def test_engine_whose_server_was_away_for_a_moment_is_ready_again() -> None:
    """A heartbeat that stops and starts to say clean is settled, also when the agent repeats an answer of before."""
    world = World()
    engine = world.engine("e0")
    world.publish(world.trainer(), 1)
    last = engine.said[-1]
    engine.health, held, engine.held = EngineHealth.PENDING, engine.held, None
    world.advance(2)
    assert world.ready == ()
    engine.health, engine.held = EngineHealth.CLEAN, held
    engine.answers = lambda message: [last] if isinstance(message, Commit) else Engine.answers(engine, message)  # type: ignore[method-assign]
    world.advance(3)
    assert world.ready == ("e0",)


# -- the journal -----------------------------------------------------------------------------------------------------


def test_full_disk_makes_read_only_and_heals_by_itself() -> None:
    """Nothing is granted while the journal fails; status stays readable; the first write that works ends it."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    world.publish(trainer, 1)
    world.disk_full = True
    trainer.acquire(2)
    world.settle()
    trainer.acquire(2)
    world.settle()
    assert codes(world, "trainer") == [RefusalCode.READ_ONLY, RefusalCode.READ_ONLY]
    assert world.machine.status(world.now).read_only
    assert world.ready == ("e0",)
    world.advance(5)
    world.disk_full = False
    world.advance(5)
    assert not world.machine.status(world.now).read_only
    assert [note.writable for note in world.observed if isinstance(note, JournalChanged)] == [False, True]
    assert world.publish(trainer, 2).outcome is Outcome.COMMITTED
    assert engine.label == 2


def test_a_journal_that_works_again_is_not_probed_any_more() -> None:
    """Every two seconds while it fails; a record that was written says that it works."""
    world = World()
    trainer = world.trainer()
    world.disk_full = True
    trainer.acquire(1)
    world.settle()
    world.advance(2.5 * world.limits.probe_s)
    world.disk_full = False
    world.advance(world.limits.probe_s)
    assert not world.machine.status(world.now).read_only
    written = list(world.records)
    assert written == [Probe()]
    world.advance(5 * world.limits.probe_s)
    assert world.records == written


def test_nothing_is_published_while_the_journal_fails() -> None:
    """Also under a lease that was granted before: no engine is stopped for what could not be committed."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    trainer.stop_before = Publish
    trainer.acquire(1)
    world.settle()
    world.disk_full = True
    elsewhere = Channel("elsewhere")
    other = world.trainer("other")
    other.say(
        msgspec.structs.replace(other.hello(), request=other.key(), channel=elsewhere, incarnation=Incarnation("x.2"))
    )
    other.say(Acquire(request=other.key(), channel=elsewhere, version=Version(1)))
    world.settle()
    assert world.machine.status(world.now).read_only
    manifest, table = MANIFEST, table_of(1)
    for blob in (manifest, table):
        trainer.say(PutBlob(request=trainer.key(), digest=digest(blob), page=0, pages=1), blob)
    trainer.say(
        Publish(
            request=trainer.key(),
            channel=CHANNEL,
            epoch=Epoch(1),
            version=Version(1),
            manifest=digest(manifest),
            table=digest(table),
            bytes=1,
            buckets=1,
        )
    )
    world.settle()
    assert codes(world, "trainer") == [RefusalCode.READ_ONLY]
    assert not engine.got(Prepare)


def fill_the_disk_at_its_transfer(world: World, engine: Engine) -> None:
    """From then on nothing can be written."""
    take = engine.answers

    def fill(message: Message) -> list[object]:
        world.disk_full = world.disk_full or isinstance(message, Transfer)
        return take(message)  # type: ignore[return-value]

    engine.answers = fill  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("recovers", [True, False])
def test_commit_waits_for_the_disk_and_gives_up_at_its_deadline(recovers: bool) -> None:
    """A commit that cannot be written is tried until `commit_s`; then no engine is told to serve it."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    fill_the_disk_at_its_transfer(world, engine)
    trainer.acquire(1)
    world.settle()
    world.advance(10)
    assert world.machine.status(world.now).channels[CHANNEL].round.state is RoundState.COMMITTING
    assert not engine.got(Commit)
    world.disk_full = not recovers
    world.advance(60)
    world.disk_full = False
    world.advance(10)
    assert trainer.done
    assert trainer.done.outcome is (Outcome.COMMITTED if recovers else Outcome.ABORTED)
    assert world.committed == (1 if recovers else None)
    assert engine.generating is recovers
    assert engine.health is (EngineHealth.CLEAN if recovers else EngineHealth.PENDING)


def test_a_commit_that_the_journal_does_not_take_ends_its_round() -> None:
    """It holds a newer version than was known: nothing is tried again, no alarm goes off, and others are committed."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    perform = world.perform

    def refuse(effect: AnyEffect) -> None:
        if isinstance(effect, Persist) and isinstance(effect.record, Committed) and effect.record.version < 6:
            world.handle(PersistFailed(token=effect.token, reason="holds version 5", again=False))
        else:
            perform(effect)

    world.perform = refuse  # type: ignore[method-assign]
    done = world.publish(trainer, 4)
    assert (done.outcome, engine.generating) == (Outcome.ABORTED, False)
    assert done.reason == "the version could not be made durable: the journal does not take it: holds version 5"
    assert not world.machine.status(world.now).read_only
    assert not [note for note in world.observed if isinstance(note, JournalChanged)]
    assert world.publish(trainer, 6).outcome is Outcome.COMMITTED
    assert (world.committed, engine.label) == (6, 6)


def test_a_commit_that_waited_for_the_disk_counts_its_engines_again() -> None:
    """One that is lost meanwhile is none of those that the trainer asked for (simulation, seed 606959)."""
    world = World()
    kept, lost, trainer = world.engine("e0"), world.engine("e1"), world.trainer()
    trainer.policy = Policy(min_engines=2)
    fill_the_disk_at_its_transfer(world, kept)
    trainer.acquire(1)
    world.settle()
    world.advance(1)
    assert world.machine.status(world.now).channels[CHANNEL].round.state is RoundState.COMMITTING
    lost.crash()
    world.advance(15)
    world.disk_full = False
    world.advance(10)
    assert trainer.done
    assert trainer.done.outcome is Outcome.ABORTED
    assert "1 verified engines are left, 2 are needed" in trainer.done.reason
    assert world.committed is None
    assert not kept.got(Commit)


def test_redrive_that_cannot_be_fenced_does_not_happen() -> None:
    """Without a durable epoch nothing is sent again: the round goes on with the engines it has."""
    world = World()
    broken, fine, trainer = world.engine("e0"), world.engine("e1"), world.trainer()

    def break_disk(message: Message) -> object:
        world.disk_full = True
        return broken.failed(message, states_step(), "reset")

    broken.script[Transfer] = break_disk  # type: ignore[assignment]
    trainer.acquire(1)
    world.settle()
    world.disk_full = False
    world.advance(10)
    assert trainer.done
    assert {r.engine: r.outcome for r in trainer.done.engines} == {"e0": Outcome.ABORTED, "e1": Outcome.COMMITTED}
    assert fine.label == 1


def states_step() -> object:
    from weightbus.control.protocol.messages import Step

    return Step.TRANSFER


# -- stopping --------------------------------------------------------------------------------------------------------


def test_stop_aborts_what_is_not_durable() -> None:
    """A stop before the commit puts engines back to the old version, tells the trainer, and is then complete."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    trainer.stop_before = Offered
    trainer.acquire(1)
    world.settle()
    trainer.deaf, trainer.stop_before = False, None
    world.handle(StopRequested())
    assert not world.machine.stopped
    world.settle()
    assert world.machine.stopped
    assert engine.generating
    assert trainer.done
    assert trainer.done.outcome is Outcome.ABORTED
    trainer.acquire(2)
    world.settle()
    assert codes(world, "trainer") == [RefusalCode.SHUTTING_DOWN]


def test_stop_finishes_what_is_durable() -> None:
    """A stop after the commit waits for the engines to serve it."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    engine.script[Commit] = lambda _message: None
    trainer.acquire(1)
    world.settle()
    assert world.committed == 1
    world.handle(StopRequested())
    assert not world.machine.stopped
    world.advance(2)
    assert world.machine.stopped
    assert trainer.done
    assert trainer.done.outcome is Outcome.COMMITTED
    assert engine.label == 1


def test_stop_when_idle_is_immediate() -> None:
    """Nothing to end, nothing to wait for."""
    world = World()
    world.trainer()
    world.handle(StopRequested())
    assert world.machine.stopped


# -- what is told ----------------------------------------------------------------------------------------------------


def test_observations_tell_the_round() -> None:
    """Every state is observed with its seconds, the end with its report."""
    world = World()
    world.engine("e0")
    world.publish(world.trainer(), 1)
    entered = [note.state for note in world.observed if isinstance(note, StateEntered)]
    assert entered == [
        RoundState.PREPARING,
        RoundState.OFFERING,
        RoundState.PAUSING,
        RoundState.TRANSFERRING,
        RoundState.VERIFYING,
        RoundState.COMMITTING,
        RoundState.RESUMING,
    ]
    (ended,) = [note for note in world.observed if isinstance(note, RoundEnded)]
    assert set(ended.done.seconds) == {"prepare", "offer", "pause", "transfer", "verify", "commit", "resume", "total"}
    assert list(readiness_of(world.observed)) == [("e0", True), ("e0", False), ("e0", True)]


def test_status_tells_lag_lease_and_round() -> None:
    """The document of an engine left behind in the middle of a round."""
    world = World()
    behind, trainer = world.engine("e0"), world.trainer()
    world.publish(trainer, 3)
    behind.held = None
    behind.die()
    behind.live()
    world.now += 4
    world.settle()
    world.advance(4)
    trainer.stop_before = Offered
    trainer.acquire(5)
    world.settle()
    view = world.machine.status(world.now).channels[CHANNEL]
    engine = view.engines["e0"]
    assert (engine.state, engine.version, engine.lag, engine.ready) == ("prepared", None, 3, False)
    assert view.lease
    assert (view.lease.holder, view.lease.epoch, view.round.state, view.round.version) == (
        "trainer",
        2,
        RoundState.OFFERING,
        5,
    )
    assert view.committed
    assert view.committed.version == 3


def test_channels_do_not_disturb_each_other() -> None:
    """A channel that hangs in its round holds up no other."""
    import weightbus.control.protocol as m

    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    engine.answers = lambda message: [] if isinstance(message, Pause) else Engine.answers(engine, message)  # type: ignore[method-assign]
    trainer.acquire(1)
    world.settle()
    hello = m.Hello(
        request="h",  # type: ignore[arg-type]
        agent="other-trainer",  # type: ignore[arg-type]
        role=m.Role.TRAINER,
        channel="other",  # type: ignore[arg-type]
        incarnation="i",  # type: ignore[arg-type]
        trainer=trainer.info,
    )
    peer = trainer.peer.__class__(b"other")
    world.machine.handle(MessageReceived(peer=peer, message=hello), world.now)
    acquire = Acquire(request="a", channel="other", version=Version(1))  # type: ignore[arg-type]
    (persist,) = world.machine.handle(MessageReceived(peer=peer, message=acquire), world.now)
    assert isinstance(persist, Persist)
    assert persist.record.epoch == 1  # type: ignore[union-attr]


# -- tables ----------------------------------------------------------------------------------------------------------


def test_tables_are_complete_and_say_what_the_words_say() -> None:
    """Every state has a row; from RESUMING the only way back is to the next wave; settled engines move no more."""
    assert set(ROUND_MOVES) == set(RoundState)
    assert set(ENGINE_MOVES) == set(EnginePhase)
    assert ROUND_MOVES[RoundState.RESUMING] == {RoundState.IDLE, RoundState.OFFERING}
    assert all(not ENGINE_MOVES[phase] for phase in states.FINISHED)
    assert RoundState.RESUMING not in ROUND_MOVES[RoundState.IDLE] | ROUND_MOVES[RoundState.ABORTING]


def test_illegal_move_carries_the_story() -> None:
    """An error of our own tells what happened before."""
    with pytest.raises(IllegalMove, match="round 1 in state idle does not take a move to resuming") as caught:
        states.move("round 1", ROUND_MOVES, RoundState.IDLE, RoundState.RESUMING, ["this", "that"])
    assert caught.value.trace == ("this", "that")


def test_commit_of_an_older_version_is_a_broken_invariant() -> None:
    """Even a record that says so does not take a channel back."""
    world = World()
    world.publish(world.trainer(), 3)
    old = next(record for record in world.records if isinstance(record, Committed))
    with pytest.raises(Exception, match="goes from 3 to 3"):
        world.machine.channels[CHANNEL].persisted(old, 0.0)


def test_a_hello_that_ends_a_round_is_answered_after_its_record() -> None:
    """An engine restarts, its round goes on without it to a commit: its Welcome names the version just committed."""
    world = World()
    world.engine("e0")
    late = world.engine("e1")
    trainer = world.trainer()
    late.ignore(Transfer)
    trainer.acquire(7)
    world.settle()
    assert world.committed is None
    late.die()
    world.now += world.limits.takeover_s
    late.live()
    world.settle()
    assert world.committed == 7
    welcome = [message for message in late.inbox if isinstance(message, Welcome)][-1]
    assert welcome.committed is not None
    assert welcome.committed.version == 7


def test_serving_an_older_commit_of_the_same_number_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer went back and trained version 7 anew. An engine that serves the earlier 7 holds the other."""
    world = World()
    world.engine("e0")
    late, trainer = world.engine("e1"), world.trainer()
    world.publish(trainer, 7)
    assert world.ready == ("e0", "e1")
    monkeypatch.setattr(world_module, "table_of", lambda version: b"trained anew: %d" % version)
    trainer.rollback = True
    late.ignore(Prepare)
    trainer.acquire(7)
    world.settle()
    late.die()
    world.now += world.limits.takeover_s
    asked: list[Commit] = []
    late.script[Commit] = asked.append  # type: ignore[assignment]
    late.live()
    world.settle()
    assert world.ready == ("e0",)
    (told,) = asked
    assert told.table == digest(table_of(7)), "the round was not over yet"
    late.say(
        Serving(request=late.key(), channel=CHANNEL, epoch=told.epoch, version=told.version, seconds=0.1, paused_s=0.0)
    )
    world.settle()
    assert world.ready == ("e0",)
    world.publish(trainer, 8)
    assert world.ready == ("e0", "e1")


def test_a_burst_is_the_same_as_one_after_the_other() -> None:
    """Every agent is told the same, and the same is written down."""
    told: list[list[SendTo | Persist]] = []
    for together in (False, True):
        world = World()
        engines = [world.engine(f"e{number}") for number in range(4)]
        for engine in engines:
            engine.ignore(Prepare)
        world.trainer().acquire(1)
        world.settle()
        epoch = engines[0].got(Prepare)[0].epoch  # type: ignore[attr-defined]
        answers = [
            MessageReceived(each.peer, Prepared(request=each.key(), channel=CHANNEL, epoch=epoch, seconds=0.1))
            for each in engines
        ]
        answers.insert(2, MessageReceived(engines[0].peer, engines[0].heartbeat()))
        events = [Burst(answers)] if together else answers
        effects = [effect for event in events for effect in one_by_one(world.machine.handle(event, world.now))]
        world.machine.check()
        told.append([effect for effect in effects if isinstance(effect, SendTo | Persist)])
    assert told[0] == told[1]
    assert len(told[0]) == 4 + 1 + 1, "an Ack each, an Alive, and a Send"


def test_a_replacement_is_registered_before_the_rest_of_its_burst_is_read() -> None:
    """The one before it is lost first, which may move its round on; what comes behind the `Hello` is no stranger's.

    All of it waits behind a record that is being written.
    """
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    world.handle(ConnectionLost(peer=engine.peer))
    engine.incarnation = Incarnation("e0.another")
    peer = Peer(b"another")
    asked = Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1))
    said_by = ((trainer.peer, asked), (peer, engine.hello()), (peer, engine.heartbeat()))
    (persist,) = one_by_one(world.machine.handle(Burst([MessageReceived(*each) for each in said_by]), world.now))
    assert isinstance(persist, Persist)
    effects = one_by_one(world.machine.handle(Persisted(token=persist.token), world.now))
    said = [each.message for each in effects if isinstance(each, SendTo) and each.peer == peer]
    assert [type(each) for each in said] == [Welcome, Alive]


def test_a_burst_waits_for_what_is_written_in_its_middle() -> None:
    """What follows an Acquire in the same burst is not answered before the epoch is durable."""
    world = World()
    trainer, engine = world.trainer(), world.engine("e0")
    asked = Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1))
    burst = Burst([MessageReceived(trainer.peer, asked), MessageReceived(engine.peer, engine.heartbeat())])
    (persist,) = [each for each in world.machine.handle(burst, world.now) if isinstance(each, SendTo | Persist)]
    assert isinstance(persist, Persist)
    after = world.machine.handle(Persisted(token=persist.token), world.now)
    assert [each.peer for each in after if isinstance(each, SendTo)] == [trainer.peer, engine.peer]


# Blobs: by their digest, in pages, within bounds.


def name(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


@given(st.binary(max_size=2000), st.integers(1, 5), st.randoms())
def test_pages_in_any_order_make_the_blob(blob: bytes, pages: int, order: object) -> None:
    """However a blob is cut and in whatever order its pages come, repeated ones too, it is there when all are."""
    blobs = BlobCache(10_000)
    size = -(-len(blob) // pages) or 1
    cut = [(index, blob[index * size : (index + 1) * size]) for index in range(pages)] * 2
    order.shuffle(cut)  # type: ignore[attr-defined]
    for index, data in cut:
        assert blobs.put(name(blob), index, pages, data).ok
        blobs.check()
    assert blobs.page(name(blob), 0) == (blob, 1)
    assert blobs.held_bytes == len(blob)


def test_large_blob_is_read_page_by_page() -> None:
    """Pages are cut at `MAX_PAGE_BYTES`, and there is none after the last."""
    blob = b"x" * (MAX_PAGE_BYTES + 1)
    blobs = BlobCache(10**7)
    blobs.put(name(blob), 0, 2, blob[:MAX_PAGE_BYTES])
    blobs.put(name(blob), 1, 2, blob[MAX_PAGE_BYTES:])
    assert [blobs.page(name(blob), page) for page in range(3)] == [(blob[:-1], 2), (b"x", 2), None]


def test_wrong_bytes_are_refused_and_forgotten() -> None:
    """A blob that does not hash to its name is not kept, not even in part."""
    blobs = BlobCache(1000)
    verdict = blobs.put(name(b"right"), 0, 1, b"wrong")
    assert verdict.code is RefusalCode.BAD_BLOB
    assert (name(b"right") in blobs, blobs.held_bytes) == (False, 0)
    assert blobs.put(name(b"right"), 0, 1, b"right").ok


def test_a_blob_that_is_cut_otherwise_begins_anew() -> None:
    """Another life of a publisher, or of its release: pages of two cuts are no blob, and none of the first is kept."""
    blob = bytes(range(12))
    blobs = BlobCache(1000)
    for page in (2, 0):
        assert blobs.put(name(blob), page, 3, blob[4 * page : 4 * page + 4]).ok
    for page in (0, 1):
        assert blobs.put(name(blob), page, 2, blob[6 * page : 6 * page + 6]).ok
        blobs.check()
    assert blobs.page(name(blob), 0) == (blob, 1)
    assert blobs.held_bytes == len(blob)


def test_pages_out_of_bounds_are_refused() -> None:
    """Page numbers, page counts and page sizes have limits."""
    blobs = BlobCache(10**7)
    for page, pages, data in ((1, 1, b""), (0, 0, b""), (0, MAX_PAGES + 1, b""), (0, 1, b"x" * (MAX_PAGE_BYTES + 1))):
        assert blobs.put(name(data), page, pages, data).code is RefusalCode.BAD_BLOB
    assert blobs.held_bytes == 0


def test_room_is_made_from_unpinned_blobs() -> None:
    """Pinned blobs stay; the longest unused other one goes first; when all is pinned the newcomer is refused."""
    blobs = BlobCache(30)
    old, used, pinned = (bytes([letter]) * 10 for letter in b"abc")
    for blob in (old, used, pinned):
        blobs.put(name(blob), 0, 1, blob)
    blobs.pin([name(pinned)])
    blobs.page(name(used), 0)
    assert blobs.put(name(b"d" * 10), 0, 1, b"d" * 10).ok
    assert [name(blob) in blobs for blob in (old, used, pinned)] == [False, True, True]
    blobs.pin([name(blob) for blob in (used, pinned, b"d" * 10)])
    assert blobs.put(name(b"e" * 10), 0, 1, b"e" * 10).code is RefusalCode.NOT_ALLOWED
    blobs.check()


def test_uploads_that_never_end_do_not_fill_the_store() -> None:
    """Unfinished uploads count, and give way to others."""
    blobs = BlobCache(30)
    for start in range(10):
        blobs.put(name(bytes([start])), 0, 2, b"x" * 15)
        blobs.check()
    assert blobs.put(name(b"d" * 10), 0, 1, b"d" * 10).ok


def test_empty_pages_do_not_collect() -> None:
    """Pages without a byte take memory too: uploads, and small blobs, are bounded in number. The newest stay."""
    blobs = BlobCache(10**7)
    kept = b"pinned"
    blobs.put(name(kept), 0, 1, kept)
    blobs.pin([name(kept)])
    for number in range(2 * MAX_BLOBS):
        small = b"%d" % number
        assert blobs.put(name(small), 0, 1, small).ok
        assert blobs.put(name(b"never whole" + small), 0, 2, b"").ok
    blobs.check()
    there = [name(b"%d" % number) in blobs for number in range(2 * MAX_BLOBS)]
    assert (name(kept) in blobs, sum(there), there[-1]) == (True, MAX_BLOBS - 1, True)
    last = b"never whole%d" % (2 * MAX_BLOBS - 1)
    assert blobs.put(name(last), 1, 2, last).ok
    assert name(last) in blobs
