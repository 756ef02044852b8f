"""The journal in etcd, for a group of coordinators with one leader. Keeps the same records as sqlite_journal.py.

There is one key for each channel and one for each reply. Every write is a transaction with two conditions: this term
still lasts (its token), and the channel is as this side knows it (its modification revision). So a write whose answer
was lost cannot take effect after later ones; its result is read before the next write to that channel.

There is no audit trail; the coordinators' logs have the same events.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from ..machine import (
    MAX_ROUND_REPLIES,
    AnyRecord,
    ChannelForgotten,
    ChannelOwner,
    Committed,
    EpochRaised,
    EpochTaken,
    PastVersion,
    Probe,
    Restored,
    RoundClosed,
    RoundReply,
    history_with,
    round_reply_of,
)
from ..protocol import (
    Channel,
    Epoch,
    HeldVersion,
    JournalCorrupt,
    JournalError,
    JournalUnwritable,
    RequestId,
    RoundDone,
    VersionNotNewer,
)
from .etcd import Etcd, EtcdUnavailable, Json, KeyValue, Term, created_at, delete, modified_at, put, read
from .interface import stride

SCHEMA: Final = 1
MOST_OPERATIONS: Final = 100
"""Operations in one transaction; etcd takes 128 by default."""
_RESTORE: Final = "restore etcd from a snapshot; beginning anew would forget which version is committed"
_RETRY: Final = "writing is tried again by itself"


_T = TypeVar("_T")


class _Meta(msgspec.Struct, frozen=True):
    schema: int = SCHEMA
    boot: int = 0
    probed: int = 0


class _Row(msgspec.Struct, frozen=True):
    epoch: Epoch = Epoch(0)
    committed: HeldVersion | None = None
    committed_epoch: Epoch = Epoch(0)
    history: tuple[PastVersion, ...] = ()
    owner: ChannelOwner | None = None


class _Reply(msgspec.Struct, frozen=True):
    written_at: float
    """Wall clock of the leader, for operators. The order of replies is that of etcd's revisions."""
    done: RoundDone
    question: str = ""
    closed: bool = True

    @property
    def as_round_reply(self) -> RoundReply:
        return RoundReply(self.done, self.question, self.closed)


class EtcdJournal:
    """The journal of one term. Implements `interface.Journal`."""

    def __init__(
        self, etcd: Etcd, prefix: str, term: Term, wall_clock: Callable[[], float] = time.time, *, by: int = 0
    ) -> None:
        """Read everything and count this boot; `by` is its stride, 0 for any. Raises `JournalError`s, or `Deposed`."""
        self._etcd = etcd
        self._prefix = prefix
        self._term = term
        self._wall_clock = wall_clock
        self._rows: dict[Channel, tuple[_Row, int]] = {}
        self._unanswered: set[Channel] = set()
        """Channels with an unanswered write, read again before the next one."""
        self._committed_unawares: set[Channel] = set()
        """Channels in which a commit took effect after the machine was told that it had failed."""
        self._replies: dict[Channel, deque[str]] = {}
        """Keys of the stored replies, by channel, the oldest first."""
        self._answers: dict[Channel, dict[RequestId, RoundReply]] = {}
        self._orphans: list[str] = []
        """Keys of replies of forgotten channels."""
        self._meta = _Meta()
        self.boot = 0
        self.stride = by or stride()
        try:
            self._read_all()
            self._meta = msgspec.structs.replace(self._meta, boot=self._meta.boot + 1)
            self._begin_boot()
        except EtcdUnavailable as error:
            raise JournalUnwritable(self._where, error.problem, _RETRY) from error
        self.boot = self._meta.boot

    def _begin_boot(self) -> None:
        """Raise every channel's epoch above those of earlier processes, then count the boot.

        Many channels take several transactions; an epoch that was raised in vain does no harm.
        """
        by = self.stride
        rows = {
            name: msgspec.structs.replace(row, epoch=Epoch(row.epoch + by)) for name, (row, _) in self._rows.items()
        }
        names = list(rows)
        for some in (names[at : at + MOST_OPERATIONS] for at in range(0, len(names), MOST_OPERATIONS)):
            operations = [put(self._key("channel", name), msgspec.json.encode(rows[name])) for name in some]
            written_at = self._write([], operations)
            self._rows.update({name: (rows[name], written_at) for name in some})
        self._delete(self._orphans)
        self._write([], [put(self._key("meta"), msgspec.json.encode(self._meta))])

    def confirm(self) -> None:
        """Raise `Deposed` unless this term is known to last."""
        self._term.confirm()

    def write(self, record: AnyRecord) -> None:
        """Make `record` durable on a majority, or raise `JournalUnwritable`, `VersionNotNewer` or `Deposed`."""
        self._term.confirm()
        try:
            match record:
                case EpochTaken() | EpochRaised() | Committed():
                    self._write_row(record)
                case RoundClosed():
                    self._write_reply(record, [], [])
                case ChannelForgotten():
                    self._forget((record.channel,))
                case Probe():
                    self._meta = msgspec.structs.replace(self._meta, probed=self._meta.probed + 1)
                    self._write([], [put(self._key("meta"), msgspec.json.encode(self._meta))])
        except EtcdUnavailable as error:
            raise JournalUnwritable(self._where, error.problem, _RETRY) from error

    def check(self) -> None:
        """There are no files; the term tells what `confirm` needs to know."""

    def disown(self, record: AnyRecord) -> None:
        """Treat a commit as one whose answer was lost: no version is committed that is not newer."""
        if isinstance(record, Committed):
            self._committed_unawares.add(record.channel)

    def forget(self, channels: Collection[Channel]) -> None:
        """Forget all of `channels`, or raise as `write` does and forget none."""
        self._term.confirm()
        try:
            self._forget(channels)
        except EtcdUnavailable as error:
            raise JournalUnwritable(self._where, error.problem, _RETRY) from error

    def restore(self) -> Mapping[Channel, Restored]:
        """Every channel as it was last written."""
        return {
            name: Restored(
                epoch=row.epoch,
                committed=row.committed,
                committed_epoch=row.committed_epoch,
                answers=self._answers.get(name, {}),
                history=row.history,
                owner=row.owner,
            )
            for name, (row, _) in self._rows.items()
        }

    def close(self) -> None:
        """Resign, so that another coordinator can begin at once."""
        self._term.resign()
        self._etcd.close()

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write_row(self, record: EpochTaken | EpochRaised | Committed) -> None:
        key = self._key("channel", record.channel)
        doubtful = record.channel in self._unanswered
        if doubtful:
            self._read_again(record.channel)
        row, revision = self._rows.get(record.channel, (_Row(), 0))
        after = self._committed(row, record) if isinstance(record, Committed) else _taken(row, record)
        if doubtful and isinstance(record, Committed) and after == row:  # the write took effect, and its reply with it
            self._remember(record, self._pushed_out(record))
            self._committed_unawares.discard(record.channel)
            return
        self._unanswered.add(record.channel)
        write = put(key, msgspec.json.encode(after))
        if isinstance(record, Committed):
            written_at = self._write_reply(record, [modified_at(key, revision)], [write])
        else:
            written_at = self._write([modified_at(key, revision)], [write])
        self._unanswered.discard(record.channel)
        self._rows[record.channel] = (after, written_at)
        if isinstance(record, Committed):
            self._committed_unawares.discard(record.channel)

    def _read_again(self, channel: Channel) -> None:
        """Read the channel again, because the result of the last write is unknown."""
        before, _ = self._rows.get(channel, (_Row(), 0))
        self._load_row(channel, self._etcd.txn([], [read(self._key("channel", channel))]).found)
        row, _ = self._rows.get(channel, (_Row(), 0))
        if row.committed != before.committed:
            self._committed_unawares.add(channel)

    def _forget(self, channels: Collection[Channel]) -> None:
        """Delete the channels in one transaction, then their replies. A start deletes replies that are left."""
        keys = {self._key("channel", name): self._rows.get(name, (_Row(), 0))[1] for name in channels}
        self._write([modified_at(key, revision) for key, revision in keys.items()], list(map(delete, keys)))
        gone = [key for name in channels for key in self._replies.get(name, ())]
        for name in channels:
            for known in (self._rows, self._replies, self._answers):
                known.pop(name, None)
            self._committed_unawares.discard(name)
        with contextlib.suppress(EtcdUnavailable, JournalUnwritable):
            self._delete(gone)

    def _delete(self, keys: Sequence[str]) -> None:
        for at in range(0, len(keys), MOST_OPERATIONS):
            self._write([], list(map(delete, keys[at : at + MOST_OPERATIONS])))

    def _committed(self, row: _Row, record: Committed) -> _Row:
        before = row.committed
        newer = before is None or before.version < record.version or record.rollback
        same = before is not None and (before.version, before.table) == (record.version, record.table)
        if before is not None and not (newer or same) and record.channel in self._committed_unawares:
            found = f"holds version {before.version} of {record.channel!r}, by a commit whose answer was lost"
            problem = f"{found}, and version {record.version} is not newer"
            raise VersionNotNewer(self._where, problem, "publish a higher one")
        if row.epoch < record.epoch or not (newer or same):
            problem = f"version {record.version} of {record.channel!r} at epoch {record.epoch} would go back"
            raise JournalCorrupt(self._where, problem, "this is a bug: keep the store and report it")
        held = HeldVersion(version=record.version, manifest=record.manifest, table=record.table)
        history = history_with(row.history, record)
        return msgspec.structs.replace(row, committed=held, committed_epoch=record.epoch, history=history)

    def _write_reply(self, record: Committed | RoundClosed, conditions: list[Json], others: list[Json]) -> int:
        """Store the reply to the `Publish` of `record`, together with `others`; returns the revision of the write."""
        known = round_reply_of(record)
        reply = _Reply(self._wall_clock(), known.done, known.question, known.closed)
        old = self._pushed_out(record)
        write = put(self._key("reply", record.request), msgspec.json.encode(reply))
        written_at = self._write(conditions, [*others, write, *map(delete, old)])
        self._remember(record, old)
        return written_at

    def _pushed_out(self, record: Committed | RoundClosed) -> list[str]:
        """Keys of the replies that the reply of `record` pushes out."""
        key, mine = self._key("reply", record.request), self._replies.get(round_reply_of(record).done.channel, ())
        return [each for each in mine if each != key][: max(0, len(mine) + (key not in mine) - MAX_ROUND_REPLIES)]

    def _remember(self, record: Committed | RoundClosed, old: list[str]) -> None:
        """Update the copy in memory: etcd has the reply of `record`, and not the `old` ones."""
        known = round_reply_of(record)
        key, channel = self._key("reply", record.request), known.done.channel
        mine = self._replies.setdefault(channel, deque())
        answers = self._answers.setdefault(channel, {})
        for gone in old:
            mine.remove(gone)
            answers.pop(RequestId(gone.removeprefix(self._key("reply", ""))), None)
        if key in mine:
            mine.remove(key)
        mine.append(key)
        answers.pop(record.request, None)
        answers[record.request] = known

    def _write(self, conditions: list[Json], operations: list[Json]) -> int:
        """Carry out `operations` if this term lasts and `conditions` hold; returns the revision of the write."""
        mine = created_at(self._term.key, self._term.token)
        outcome = self._etcd.txn([mine, *conditions], operations, [read(self._term.key)])
        if outcome.succeeded:
            return outcome.revision
        if [int(kv.create_revision) for kv in outcome.found] != [self._term.token]:
            self._term.depose("another coordinator was elected")
            self._term.confirm()
        problem = "a key was written by another client, or by a write of ours that was given up"
        raise JournalUnwritable(self._where, problem, _RETRY)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        found = {kv.name: kv for kv in self._etcd.under(f"{self._prefix}/")}
        if (meta := found.get(self._key("meta"))) is not None:
            self._meta = self._decode(meta, _Meta)
        if self._meta.schema != SCHEMA:
            advice = "start the release that wrote it, or name another prefix"
            raise JournalError(self._where, f"schema {self._meta.schema}, this release reads {SCHEMA}", advice)
        channels = self._key("channel", "")
        for name, kv in found.items():
            if name.startswith(channels):
                self._load_row(Channel(name.removeprefix(channels)), (kv,))
        self._read_replies(found)

    def _read_replies(self, found: Mapping[str, KeyValue]) -> None:
        replies = self._key("reply", "")
        written = [kv for name, kv in found.items() if name.startswith(replies)]
        for kv in sorted(written, key=lambda each: int(each.mod_revision)):
            reply = self._decode(kv, _Reply)
            if reply.done.channel not in self._rows:
                self._orphans.append(kv.name)
                continue
            self._replies.setdefault(reply.done.channel, deque()).append(kv.name)
            self._answers.setdefault(reply.done.channel, {})[RequestId(kv.name.removeprefix(replies))] = (
                reply.as_round_reply
            )

    def _load_row(self, channel: Channel, found: tuple[KeyValue, ...]) -> None:
        self._unanswered.discard(channel)
        if found:
            self._rows[channel] = (self._decode(found[0], _Row), int(found[0].mod_revision))

    def _decode(self, kv: KeyValue, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(kv.content, type=kind)
        except ValueError as error:
            raise JournalCorrupt(self._where, f"{kv.name!r} is unreadable ({error})", _RESTORE) from error

    def _key(self, *parts: str) -> str:
        return "/".join((self._prefix, *parts))

    @property
    def _where(self) -> str:
        return f"etcd://{','.join(self._etcd.members)}/{self._prefix}"


def _taken(row: _Row, record: EpochTaken | EpochRaised) -> _Row:
    owner = ChannelOwner(record.run, record.holder) if isinstance(record, EpochTaken) and record.run else row.owner
    return msgspec.structs.replace(row, epoch=max(row.epoch, record.epoch), owner=owner)
