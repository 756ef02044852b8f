"""Rounds whose digest table follows: nothing is committed without it, and nothing that has proven another one."""

from __future__ import annotations

import msgspec
import pytest

from weightbus.control.machine.effects import Committed, Persist, RoundClosed
from weightbus.control.machine.participants import Participant, RoundCommands
from weightbus.control.machine.states import EnginePhase, Limits
from weightbus.control.protocol import codec
from weightbus.control.protocol.messages import (
    AgentId,
    Commit,
    Digest,
    EngineHealth,
    Epoch,
    Granted,
    Message,
    Outcome,
    Policy,
    Prepare,
    Publish,
    RefusalCode,
    Refused,
    RequestId,
    Sent,
    Step,
    StragglerPolicy,
    ToCoordinator,
    Topology,
    Transfer,
    TransportKind,
    Verified,
    Version,
)

from ..world import CHANNEL, Engine, Trainer, World, digest, engine_info, table_of

DIRECT, LOCAL, DISK = TransportKind.DIRECT, TransportKind.LOCAL, TransportKind.DISK


def fleet(**policy: object) -> tuple[World, Engine, Engine, Trainer]:
    world = World()
    engines = tuple(world.engine(name, supports_deferred_digests=True) for name in ("e0", "e1"))
    trainer = world.trainer(supports_deferred_digests=True)
    trainer.open_table, trainer.policy = True, Policy(**policy)  # type: ignore[arg-type]
    return world, engines[0], engines[1], trainer


def say_sent(world: World, trainer: Trainer, table: Digest) -> RefusalCode | None:
    """The report that `trainer` kept to itself. Returns why it was refused, if it was."""
    trainer.stop_before, trainer.deaf = None, False
    assert trainer.sending is not None
    refused = len(trainer.got(Refused))
    trainer.say(Sent(request=trainer.key(), channel=CHANNEL, epoch=trainer.sending.epoch, table=table))
    world.settle()
    found = trainer.got(Refused)[refused:]
    return found[0].code if found else None


def commits(world: World) -> list[Committed]:
    return [record for record in world.records if isinstance(record, Committed)]


def proves(engine: Engine, table: Digest) -> None:
    """What it says of the next version that it takes."""

    def answer(message: Message) -> Verified:
        assert isinstance(message, Transfer)
        engine.health, engine.weights, engine.held = EngineHealth.PENDING, None, None
        return Verified(
            request=engine.key(),
            channel=CHANNEL,
            epoch=message.epoch,
            version=message.version,
            table=table,
            verified_by="live-digest",
            seconds=0.1,
        )

    engine.script[Transfer] = answer


def test_a_version_is_committed_under_the_table_that_followed() -> None:
    """Engines are asked with an open one, and told to serve the one that the trainer said."""
    world, e0, e1, trainer = fleet()
    done = world.publish(trainer, 1)
    table = digest(table_of(1))
    assert done.outcome is Outcome.COMMITTED
    assert [record.table for record in commits(world)] == [table]
    assert e0.held is not None
    assert e0.held == e1.held
    assert e0.held.table == table
    assert world.machine.status(world.now).channels[CHANNEL].ready
    assert [each.table for kind in (Prepare, Transfer, Commit) for each in e0.got(kind)] == ["", "", table]


@pytest.mark.parametrize("retries", [0, 1])
def test_an_engine_that_has_proven_another_table_is_broken(retries: int) -> None:
    """It said so before the table was known; the others are committed, and it is sent everything again if it may.

    (G5, N17, F25)
    """
    world, e0, e1, trainer = fleet(retries=retries)
    proves(e0, digest(b"other bits"))
    done = world.publish(trainer, 1)
    (e0_report, e1_report) = sorted(done.engines, key=lambda each: each.engine)
    assert done.outcome is e1_report.outcome is Outcome.COMMITTED
    assert e0_report.outcome is (Outcome.COMMITTED if retries else Outcome.QUARANTINED)
    if not retries:
        assert digest(b"other bits")[:12] in e0_report.reason
        assert digest(table_of(1))[:12] in e0_report.reason
    (commit,) = commits(world)
    assert set(commit.engines) == ({"e0", "e1"} if retries else {"e1"})
    assert e1.generating
    assert world.ready == (("e0", "e1") if retries else ("e1",))


def test_a_table_that_was_said_is_compared_with_at_once() -> None:
    """In the next attempt of the round, too."""
    world, e0, _, trainer = fleet(retries=1)

    def breaks(message: Message) -> ToCoordinator:
        proves(e0, digest(b"other bits"))  # the next time
        return e0.failed(message, Step.TRANSFER, "connection reset")

    e0.script[Transfer] = breaks
    done = world.publish(trainer, 1)
    outcomes = {each.engine: each.outcome for each in done.engines}
    assert outcomes == {"e0": Outcome.QUARANTINED, "e1": Outcome.COMMITTED}
    assert [commit.engines for commit in commits(world)] == [("e1",)]


@pytest.mark.parametrize("lost", ["dies", "silent"])
def test_without_its_table_nothing_is_committed(lost: str) -> None:
    """Engines have proven something, and the trainer has not said that it was the version (N17, F24)."""
    world, e0, e1, trainer = fleet(transfer_timeout_s=30.0)
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    if lost == "dies":
        trainer.die()
    world.advance(200)
    assert commits(world) == []
    assert not e0.generating
    assert not e1.generating
    trainer.stop_before = None
    if lost == "dies":
        trainer.live()
    again = world.trainer("another", supports_deferred_digests=True)
    again.open_table = True
    assert world.publish(again, 2).outcome is Outcome.COMMITTED
    assert e0.generating


@pytest.mark.parametrize("slow", list(StragglerPolicy))
def test_an_open_table_is_waited_for_no_longer_than_a_transfer_may_take(slow: StragglerPolicy) -> None:
    """Whatever else is waited for: the trainer has the whole deadline of its policy for it, and no more."""
    world, e0, e1, trainer = fleet(slow=slow, quorum=1, slow_s=5.0, transfer_timeout_s=30.0)
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    world.advance(30)
    assert trainer.done is None
    assert (e0.generating, e1.generating) == (False, False)
    world.advance(world.limits.grace_s + world.limits.heartbeat_s)
    assert trainer.done is not None
    assert trainer.done.outcome is Outcome.ABORTED
    assert "digest table" in trainer.done.reason


def test_an_engine_that_is_slow_is_left_out_and_the_trainer_still_says_its_table() -> None:
    """The others have waited for it no longer than their policy says, and are committed."""
    world, e0, e1, trainer = fleet(slow=StragglerPolicy.QUORUM, quorum=1, slow_s=5.0)

    def never(_message: Message) -> None:
        e0.script[Transfer] = never

    e0.script[Transfer] = never
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    world.advance(6)
    assert commits(world) == []
    trainer.deaf = False
    assert say_sent(world, trainer, trainer.put_table()) is None
    (commit,) = commits(world)
    assert commit.engines == ("e1",)
    assert e1.generating


@pytest.mark.parametrize("said", [b"", b"never put"])
def test_a_report_without_the_table_is_refused(said: bytes) -> None:
    """One that names none, or one that is not here: asked again with it, the round goes on."""
    world, _, _, trainer = fleet()
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    expected = RefusalCode.UNKNOWN_BLOB if said else RefusalCode.NOT_ALLOWED
    assert say_sent(world, trainer, digest(said) if said else Digest("")) is expected
    assert commits(world) == []
    assert say_sent(world, trainer, trainer.put_table()) is None
    assert len(commits(world)) == 1


def test_the_table_of_a_round_is_the_one_that_was_said_first() -> None:
    """A trainer that says another one with a second attempt is refused, and the first one still counts."""
    world, e0, _, trainer = fleet(retries=1)
    e0.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY, "connection reset")
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    table = trainer.put_table()
    trainer.says_table = b"another table"  # it says this with the attempt that follows
    assert say_sent(world, trainer, table) is RefusalCode.NOT_ALLOWED
    assert commits(world) == []
    assert say_sent(world, trainer, table) is None
    assert [record.table for record in commits(world)] == [table]


def test_the_table_is_kept_while_it_is_needed() -> None:
    """From the report on its blob is pinned, as that of a table which came first."""
    world, _, _, trainer = fleet()
    world.publish(trainer, 1)
    assert digest(table_of(1)) in world.machine.blobs
    assert digest(table_of(1)) in world.machine.channels[CHANNEL].pinned()


def test_the_table_is_kept_before_its_version_is_committed() -> None:
    """While an engine still takes it: an engine that fails is sent everything again, and compared with it."""
    world, e0, _, trainer = fleet()
    e0.ignore(Transfer)
    trainer.acquire(1)
    world.settle()
    assert commits(world) == []
    assert digest(table_of(1)) in world.machine.channels[CHANNEL].pinned()


@pytest.mark.parametrize(
    ("left_open", "transport", "told"),
    [
        (True, TransportKind.DIRECT, True),
        (False, TransportKind.DIRECT, False),
        (False, TransportKind.DISTRIBUTED, True),
    ],
)
def test_the_trainer_is_told_which_engines_share_its_gpu_where_it_matters(
    left_open: bool, transport: TransportKind, told: bool
) -> None:
    """Where the table is open, and where NCCL would refuse the group; an older trainer would refuse the field."""
    publish = Publish(
        request=RequestId("k"),
        channel=CHANNEL,
        epoch=Epoch(1),
        version=Version(1),
        manifest=digest(b"manifest"),
        table=Digest("") if left_open else digest(table_of(1)),
        bytes=1,
        buckets=1,
    )
    info = engine_info()
    members = [
        Participant(
            name=AgentId(name),
            info=info,
            phase=EnginePhase.PREPARED,
            epoch=Epoch(1),
            transport=transport,
            shares_gpu=shares,
        )
        for name, shares in (("e0", True), ("e1", False))
    ]
    send = RoundCommands(publish, Limits()).send(Epoch(1), members)
    assert [each.shares for each in send.receivers] == [told, False]


def granted(world: World, trainer: Trainer) -> Granted:
    """What `trainer` is told when it asks."""
    trainer.stop_before = Publish
    trainer.acquire(world.records.__len__() + 1)
    world.settle()
    (answer,) = trainer.got(Granted)
    assert isinstance(answer, Granted)
    return answer


@pytest.mark.parametrize(
    ("knows", "kinds", "trainer_knows", "open_"),
    [
        ((True, True), (DIRECT, DIRECT), True, True),
        ((True, False), (DIRECT, DIRECT), True, False),
        ((True, True), (DIRECT, LOCAL), True, False),
        ((True, True), (DIRECT, DISK), True, True),
        ((True, True), (DIRECT, DIRECT), False, False),
        ((), (), True, False),
    ],
    ids=["all", "an older engine", "another transport", "no way at all", "an older trainer", "nobody"],
)
def test_a_table_may_follow_where_every_agent_supports_it(
    knows: tuple[bool, ...], kinds: tuple[TransportKind, ...], trainer_knows: bool, open_: bool
) -> None:
    """No agent is asked for what it did not offer, and an older trainer is not told what it would not understand."""
    world = World()
    for at, (know, kind) in enumerate(zip(knows, kinds, strict=True)):
        world.engine(f"e{at}", supports_deferred_digests=know, transports=(kind,))
    trainer = world.trainer(supports_deferred_digests=trainer_knows, transports=(DIRECT, LOCAL))
    if not trainer_knows:
        trainer.say(Topology(request=trainer.key()))
    answer = granted(world, trainer)
    assert answer.may_defer_digests is open_
    assert (b"may_leave_open" in codec.TO_AGENT.encode(answer)[1]) is open_


def test_an_older_engine_that_comes_after_the_lease_is_left_out_at_once() -> None:
    """It would not understand a word of the round; the round does not wait for it, and the next one takes it in."""
    world, _, _, trainer = fleet()
    trainer.stop_before = Publish
    trainer.acquire(1)
    world.settle()
    older = world.engine("e2")
    trainer.deaf, trainer.stop_before = False, None
    assert trainer.publishing is not None
    trainer.say(trainer.publishing)
    world.settle()
    done = trainer.done
    assert done is not None
    assert world.now == 0.0
    assert {each.engine: each.outcome for each in done.engines} == {
        "e0": Outcome.COMMITTED,
        "e1": Outcome.COMMITTED,
        "e2": Outcome.ABORTED,
    }
    assert "has not said to support" in next(each.reason for each in done.engines if each.engine == "e2")
    assert older.got(Prepare) == []
    trainer.open_table = False
    assert world.publish(trainer, 2).outcome is Outcome.COMMITTED
    assert older.held is not None
    assert older.held.version == 2


@pytest.mark.parametrize("engines", [0, 1])
def test_deferred_digests_need_an_engine_that_supports_them(engines: int) -> None:
    """Refused at once, and published again with the table; a channel without engines commits at once, and needs it."""
    world = World()
    fleet = [world.engine(f"e{number}") for number in range(engines)]
    trainer = world.trainer(supports_deferred_digests=True)
    trainer.open_table = True
    trainer.acquire(1)
    while not trainer.got(Refused):
        world.step()
    assert trainer.got(Refused)[0].code is RefusalCode.NOT_ALLOWED  # type: ignore[attr-defined]
    trainer.open_table = False
    world.settle()
    assert world.now == 0.0
    assert [record.table for record in commits(world)] == [digest(table_of(1))]
    assert [engine.label for engine in fleet] == [1] * engines


def test_an_engine_that_comes_back_says_again_what_it_knows() -> None:
    """Another life of an agent may be an older one."""
    world, e0, _, trainer = fleet()
    e0.supports_deferred_digests = False
    e0.die()
    world.now += world.limits.takeover_s
    e0.live()
    world.settle()
    trainer.info = msgspec.structs.replace(trainer.info, transports=(DIRECT,))
    assert not granted(world, trainer).may_defer_digests


@pytest.mark.parametrize("later", [False, True])
def test_asked_again_after_a_restart_the_announcement_is_answered_with_the_holders(*, later: bool) -> None:
    """As one that named its table is. After another commit, without engines: none is asked what it holds."""
    world, _, _, trainer = fleet()
    world.crash_on = lambda effect: isinstance(effect, Persist) and isinstance(effect.record, RoundClosed)
    trainer.acquire(1)
    world.settle()
    assert world.crashed
    asked = trainer.publishing
    assert asked
    world.crash_on = lambda _effect: False
    trainer.deaf = later
    world.restart()
    if later:
        other = world.trainer("other", supports_deferred_digests=True)
        assert world.publish(other, 2).outcome is Outcome.COMMITTED
        trainer.deaf = False
        trainer.say(asked)
        world.settle()
    assert trainer.done
    assert trainer.done.outcome is Outcome.COMMITTED
    assert [each.engine for each in trainer.done.engines] == ([] if later else ["e0", "e1"])
