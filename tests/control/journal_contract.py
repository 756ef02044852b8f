"""What every journal promises, whatever it is kept in: subclassed for SQLite and for etcd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from weightbus.control.journal.etcd_journal import EtcdJournal
from weightbus.control.journal.interface import Journal
from weightbus.control.journal.sqlite_journal import SqliteJournal
from weightbus.control.machine.channel import MAX_ROUND_REPLIES, Restored, round_reply_of
from weightbus.control.machine.effects import (
    AnyRecord,
    ChannelForgotten,
    Committed,
    EpochRaised,
    EpochTaken,
    Probe,
    RoundClosed,
)
from weightbus.control.protocol.errors import JournalCorrupt
from weightbus.control.protocol.messages import AgentId, Channel, Digest, Epoch, Outcome, RequestId, RoundDone, Version

from .world import replay

A = Digest("a" * 64)
B = Digest("b" * 64)
POLICY = Channel("policy")


def taken(epoch: int, channel: str = "policy") -> EpochTaken:
    return EpochTaken(channel=Channel(channel), epoch=Epoch(epoch), holder=AgentId("t"), version=Version(1))


def commit(version: int, epoch: int, table: Digest = A, request: str = "p", announced: int = 0) -> Committed:
    return Committed(
        channel=POLICY,
        epoch=Epoch(epoch),
        version=Version(version),
        manifest=A,
        table=table,
        request=RequestId(request),
        announced=Epoch(announced or epoch),
        question="ab",
        engines=(AgentId("e0"),),
    )


def closed(request: str, channel: Channel = POLICY) -> RoundClosed:
    done = RoundDone(
        channel=channel,
        epoch=Epoch(1),
        version=Version(1),
        outcome=Outcome.COMMITTED,
        reason="",
        engines=(),
        seconds={"total": 1.0},
    )
    return RoundClosed(request=RequestId(request), done=done, question="ab")


RECORDS: list[AnyRecord] = [
    *(taken(1), commit(1, 1), closed("p"), taken(1, "other"), taken(2), commit(3, 2), Probe()),
    EpochRaised(channel=POLICY, epoch=Epoch(9), engine=AgentId("e0")),
]


class JournalContract:
    """Subclasses give the fixture `opens`: it opens the journal of this test, again and again."""

    @pytest.fixture
    def opens(self, tmp_path: Path) -> Callable[..., Journal]:
        raise NotImplementedError

    def test_restores_what_was_written(self, opens: Callable[..., Journal]) -> None:
        """A restart knows versions and answers, the same as a naive replay of the records; every epoch is raised."""
        journal = opens()
        for record in RECORDS:
            journal.write(record)
            journal.write(record)  # writing twice is the same as writing once
        journal.close()
        again = opens()
        raised = {name: msgspec.structs.replace(each, epoch=each.epoch + 1) for name, each in replay(RECORDS).items()}
        assert again.restore() == raised
        assert again.boot == journal.boot + 1
        again.close()

    def test_two_starts_from_one_copy_do_not_meet(self, opens: Callable[..., Journal]) -> None:
        """A start raises every epoch by a stride of its own, far and by chance.

        So what a life gave out that this journal does not know of is not given out again.
        """
        journal = opens(by=1)
        journal.write(taken(5))
        journal.write(taken(7, "other"))
        found = []
        for _ in range(8):
            before = {name: each.epoch for name, each in journal.restore().items()}
            journal.close()
            journal = opens(by=0)
            assert {name: each.epoch - journal.stride for name, each in journal.restore().items()} == before
            found.append(journal.stride)
        journal.close()
        assert min(found) >= 2**16, "as many as an earlier life may have given out after the copy"
        assert max(found) < 2**20, "2^53 is far"
        assert len(set(found)) > 6

    def test_every_prefix_restores(self, opens: Callable[..., Journal]) -> None:
        """Wherever the records end, what comes back is what was written so far."""
        journal = opens()
        for count, record in enumerate(RECORDS, 1):
            journal.write(record)
            assert journal.restore() == replay(RECORDS[:count])
        journal.close()

    def test_versions_and_epochs_never_go_back(self, opens: Callable[..., Journal]) -> None:
        """Even a machine with a bug cannot write an older version over a newer one, or lower an epoch."""
        journal = opens()
        for record in (taken(5), commit(7, 5), taken(3)):
            journal.write(record)
        for record in (commit(6, 5), commit(7, 5, B), commit(8, 6)):
            with pytest.raises(JournalCorrupt, match="would go back"):
                journal.write(record)
        for boots, found in enumerate((journal.restore(), self._again(journal, opens))):
            restored = found[POLICY]
            assert restored.committed
            assert (restored.epoch, restored.committed.version, restored.committed.table) == (5 + boots, 7, A)

    def test_a_version_goes_back_only_by_a_rollback(self, opens: Callable[..., Journal]) -> None:
        """An explicit rollback is written over a newer version, and survives a restart."""
        journal = opens()
        for record in (taken(1), commit(7, 1), taken(2)):
            journal.write(record)
        with pytest.raises(JournalCorrupt):
            journal.write(commit(3, 2))
        journal.write(msgspec.structs.replace(commit(3, 2), rollback=True))
        restored = self._again(journal, opens)[POLICY]
        assert restored.committed
        assert (restored.epoch, restored.committed.version) == (3, 3)
        assert [(past.version, past.epoch, past.rollback) for past in restored.history] == [(7, 1, False), (3, 2, True)]

    def test_a_commit_answers_its_publish(self, opens: Callable[..., Journal]) -> None:
        """What is durable is known by its key too, also after another version; how its round ended replaces that."""
        journal = opens()
        for record in (taken(1), taken(2), commit(1, 2, request="a", announced=1), taken(3), commit(2, 3, request="b")):
            journal.write(record)
        found = self._again(journal, opens)[POLICY]
        known = found.answers[RequestId("a")]
        assert list(found.answers) == ["a", "b"]
        assert (known.done.epoch, known.done.version, known.done.outcome) == (1, 1, Outcome.COMMITTED)
        assert (known.closed, known.question, known.done.engines) == (False, "ab", ())
        assert "not kept" in known.done.reason
        journal = opens()
        journal.write(closed("a"))
        found = self._again(journal, opens)[POLICY]
        assert list(found.answers) == ["b", "a"]
        assert found.answers[RequestId("a")] == round_reply_of(closed("a"))

    def test_answers_of_commits_are_forgotten_too(self, opens: Callable[..., Journal]) -> None:
        """However many versions are committed and never closed, so many answers are kept, the newest."""
        journal = opens()
        for epoch in range(1, MAX_ROUND_REPLIES + 4):
            journal.write(taken(epoch))
            journal.write(commit(epoch, epoch, request=f"p{epoch}"))
        assert list(journal.restore()[POLICY].answers) == list(found := self._again(journal, opens)[POLICY].answers)
        assert list(found)[-1] == f"p{MAX_ROUND_REPLIES + 3}"
        assert len(found) <= MAX_ROUND_REPLIES

    def test_the_newest_answers_are_kept_whatever_the_wall_clock_says(self, opens: Callable[..., Journal]) -> None:
        """It is set back and forth, and those of two hosts differ: what was answered last is known after a restart."""
        clock, told = [1_700_000_000.0], [f"p{number:03}" for number in range(2 * MAX_ROUND_REPLIES)]
        for life in range(0, len(told), 8):
            clock[0] += (-2 * 86_400.0, 3600.0, 5 * 86_400.0)[life // 8 % 3]
            journal = opens(wall_clock=lambda: clock[0])
            journal.write(taken(1))
            for name in told[life : life + 8]:
                journal.write(closed(name))
            journal.close()
        clock[0] += 30 * 86_400.0
        journal = opens(wall_clock=lambda: clock[0])
        assert list(journal.restore()[POLICY].answers) == told[-MAX_ROUND_REPLIES:]
        journal.close()

    def test_a_busy_channel_pushes_out_no_other_ones_answer(self, opens: Callable[..., Journal]) -> None:
        """However many rounds end in one channel, the trainer of another hears how its last one ended."""
        quiet = [Channel(f"quiet{number}") for number in range(40)]
        journal = opens()
        for channel in (POLICY, *quiet):
            journal.write(taken(1, channel))
            journal.write(closed(f"last-of-{channel}", channel))
        for number in range(70):
            journal.write(closed(f"p{number:03}"))
        found = self._again(journal, opens)
        for channel in quiet:
            assert list(found[channel].answers) == [f"last-of-{channel}"]
        assert list(found[POLICY].answers)[-1] == "p069"

    def test_a_forgotten_channel_is_as_if_it_had_never_been(self, opens: Callable[..., Journal]) -> None:
        """Its epochs, versions and answers are gone, and those of other channels are not."""
        journal = opens()
        for record in (*RECORDS, ChannelForgotten(channel=POLICY)):
            journal.write(record)
        assert POLICY not in journal.restore()
        assert POLICY not in self._again(journal, opens)
        journal = opens()
        journal.write(taken(1))
        assert journal.restore()[POLICY] == Restored(epoch=Epoch(1))
        journal.close()

    def test_channels_are_forgotten_together(self, opens: Callable[..., Journal]) -> None:
        """However many answers they have: more than one transaction of etcd has room for."""
        names = [Channel(f"run-{number}") for number in range(5)]
        journal = opens()
        for name in (POLICY, *names):
            journal.write(taken(1, name))
            for number in range(MAX_ROUND_REPLIES):
                journal.write(closed(f"{name}-{number}", name))
        assert isinstance(journal, SqliteJournal | EtcdJournal)
        journal.forget(names)
        assert list(journal.restore()) == [POLICY]
        assert list(self._again(journal, opens)) == [POLICY]
        journal = opens()
        for name in names:
            journal.write(taken(1, name))
        again = self._again(journal, opens)
        assert [len(again[name].answers) for name in (POLICY, *names)] == [MAX_ROUND_REPLIES, 0, 0, 0, 0, 0]

    def test_one_coordinator_at_a_time(self, opens: Callable[..., Journal]) -> None:
        """A second coordinator does not get the journal while the first has it, and gets it at once afterwards."""
        first = opens()
        with pytest.raises(Exception, match=r"another coordinator|somebody leads"):
            opens()
        first.close()
        second = opens()
        assert second.boot == first.boot + 1
        second.close()

    @staticmethod
    def _again(journal: Journal, opens: Callable[..., Journal]) -> dict[Channel, Restored]:
        journal.close()
        again = opens()
        found = dict(again.restore())
        again.close()
        return found
