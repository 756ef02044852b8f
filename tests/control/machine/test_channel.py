"""Where a version becomes current, `Channel.make_current`; and how rounds ended, by the key of their `Publish`."""

from __future__ import annotations

import msgspec
import pytest

from tests.control.journal_contract import POLICY, closed
from weightbus.control.machine.channel import MAX_PAST_ROUNDS, Channel, Restored, RoundReplies, RoundReply
from weightbus.control.machine.effects import AnyEffect, Committed, Persist, Persisted, PersistFailed
from weightbus.control.machine.routing import Router
from weightbus.control.machine.states import Limits, question
from weightbus.control.protocol.errors import InvariantBroken
from weightbus.control.protocol.messages import (
    AgentId,
    Digest,
    Epoch,
    HeldVersion,
    Outcome,
    Publish,
    RefusalCode,
    RequestId,
    TransportKind,
    Version,
)

from ..world import CHANNEL, World


def held(version: int) -> HeldVersion:
    return HeldVersion(version=Version(version), manifest=Digest("m"), table=Digest(f"t{version}"))


def record(version: int, *, rollback: bool = False) -> Committed:
    return Committed(
        channel=CHANNEL,
        epoch=Epoch(version),
        version=Version(version),
        manifest=Digest("m"),
        table=Digest(f"t{version}"),
        request=RequestId("r"),
        announced=Epoch(version),
        question="",
        engines=(AgentId("e0"),),
        rollback=rollback,
    )


def a_channel_at(version: int) -> Channel:
    restored = Restored(epoch=Epoch(10), committed=held(version), committed_epoch=Epoch(version))
    return Channel(CHANNEL, Limits(), Router(), restored)


def a_commit_on_its_way_to_the_journal() -> tuple[World, Persist]:
    """A world in which everything is verified and the journal has not answered yet."""
    world = World()
    world.engine("e0")
    asked: list[Persist] = []

    def stop(effect: AnyEffect) -> bool:
        if isinstance(effect, Persist) and isinstance(effect.record, Committed):
            asked.append(effect)
        return bool(asked)

    world.crash_on = stop
    world.trainer().acquire(1)
    world.settle()
    return world, asked[0]


def test_a_version_becomes_current_once_the_journal_has_its_commit() -> None:
    """Before `Persisted` the channel has no version, and after it the version of the record."""
    world, commit = a_commit_on_its_way_to_the_journal()
    assert world.committed is None
    world.machine.handle(Persisted(token=commit.token), world.now)
    assert world.committed == 1


def test_a_version_that_the_journal_refuses_does_not_become_current() -> None:
    """After `PersistFailed` the channel is as it was."""
    world, commit = a_commit_on_its_way_to_the_journal()
    world.machine.handle(PersistFailed(token=commit.token, reason="disk full"), world.now)
    assert world.committed is None


def test_no_version_becomes_current_anywhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `Channel.make_current` a whole round, committed in the journal, leaves the channel without a version."""
    monkeypatch.setattr(Channel, "make_current", lambda *_: None)
    world = World()
    world.engine("e0")
    world.publish(world.trainer(), 1)
    assert any(isinstance(each, Committed) for each in world.records)
    assert world.committed is None


def test_a_lower_version_becomes_current_only_by_a_rollback() -> None:
    """Anything else is a bug of the coordinator and stops it, with the channel as it was."""
    channel = a_channel_at(5)
    for lower in (4, 5):
        with pytest.raises(InvariantBroken, match=f"goes from 5 to {lower}"):
            channel.make_current(record(lower), 0.0)
    assert channel.committed == held(5)
    channel.make_current(record(4, rollback=True), 0.0)
    assert channel.committed == held(4)


def test_what_is_current_can_be_read_off_the_channel() -> None:
    """Version, epoch, history and blobs are those of the record that came last."""
    channel = a_channel_at(5)
    channel.make_current(record(6), 0.0)
    assert (channel.committed, channel.committed_epoch) == (held(6), 6)
    assert [past.version for past in channel.history] == [6]
    assert channel.pinned() == {"m", "t6"}
    assert channel.allowed_versions.allows(held(6))
    assert not channel.allowed_versions.allows(held(5))


PUBLISH = Publish(
    request=RequestId("p"),
    channel=POLICY,
    epoch=Epoch(1),
    version=Version(1),
    manifest=Digest("a" * 64),
    table=Digest("b" * 64),
    bytes=1,
    buckets=1,
)
OTHER = msgspec.structs.replace(PUBLISH, table=Digest("c" * 64))


@pytest.mark.parametrize(
    ("kept", "asked", "refused"),
    [(question(PUBLISH), PUBLISH, False), (question(PUBLISH), OTHER, True), ("", PUBLISH, False), ("", OTHER, False)],
)
def test_an_answer_that_was_kept_without_its_question_answers_it(kept: str, asked: Publish, refused: bool) -> None:
    """As those of the first release are: a repeated `Publish` gets its end, and is not refused as another one."""
    known = RoundReplies({RequestId("p"): RoundReply(closed("p").done, kept)})
    verdict = known.contradicts(asked)
    assert (verdict is not None and verdict.code is RefusalCode.NOT_ALLOWED) is refused
    later = known.contradicts(msgspec.structs.replace(asked, version=Version(2)))
    assert later is not None, "its version, epoch and channel are known"


def test_finished_rounds_are_remembered_in_few_words() -> None:
    """The status has the last rounds, and no more, with phases, outcomes and transports, also after a restart."""
    world = World()
    world.engine("e0")
    trainer = world.trainer()
    for version in range(1, MAX_PAST_ROUNDS + 4):
        world.publish(trainer, version)
        world.now += 1.0
    channel = world.machine.status(world.now).channels[CHANNEL]
    assert [each.version for each in channel.rounds] == [*range(4, MAX_PAST_ROUNDS + 4)]
    last = channel.rounds[-1]
    assert (last.outcome, last.engines, last.transports) == (
        Outcome.COMMITTED,
        {"committed": 1},
        (TransportKind.LOCAL,),
    )
    assert {"prepare", "transfer", "verify", "total"} <= last.seconds.keys()
    assert (last.ended_s, channel.rounds[-2].ended_s) == (1.0, 2.0)
    assert channel.trainers["trainer"].published == last.version

    world.restart()
    restored = world.machine.status(world.now).channels[CHANNEL].rounds
    assert [(each.version, each.ended_s) for each in restored] == [(each.version, None) for each in channel.rounds]


def test_the_status_names_the_trainer_that_is_gone() -> None:
    """As the one that announced last, not connected."""
    world = World()
    world.engine("e0")
    trainer = world.trainer()
    world.publish(trainer, 1)
    trainer.die()
    world.advance(world.limits.silence_s + 1.0)
    known = world.machine.status(world.now).channels[CHANNEL].trainers
    assert {name: (each.last_seen_s, each.published) for name, each in known.items()} == {"trainer": (None, 1)}
