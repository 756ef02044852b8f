"""The journal in etcd: the contract, and that only the leader of the moment writes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.kit.etcd_member import BINARY, MISSING, EtcdMember, quick_etcd_member
from weightbus.control.cli.entry_point import main
from weightbus.control.journal.etcd import (
    Deposed,
    Election,
    Etcd,
    EtcdUnavailable,
    Json,
    LeaderRecord,
    Login,
    Term,
    TxnResult,
    delete,
    parse_url,
    put,
    read,
)
from weightbus.control.journal.etcd_journal import MOST_OPERATIONS, EtcdJournal
from weightbus.control.journal.interface import Journal
from weightbus.control.machine.channel import MAX_ROUND_REPLIES, round_reply_of
from weightbus.control.machine.effects import ChannelForgotten
from weightbus.control.protocol.errors import ConfigurationError, JournalCorrupt, JournalUnwritable, VersionNotNewer
from weightbus.control.protocol.messages import Channel

from ...kit.waiting import until
from ..journal_contract import POLICY, B, JournalContract, closed, commit, taken

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)
ROOT = Path(__file__).parents[3]
TTL_S = 5.0
"""Long enough for a machine that does other things between two renewals."""
CALL_S = 1.0
"""Where a call is to fail, or nothing depends on one that does not."""


@pytest.fixture(scope="module")
def member() -> Iterator[EtcdMember]:
    with quick_etcd_member() as running:
        yield running


class Candidates:
    """Coordinators that share one prefix of the store, new for each test."""

    def __init__(self, member: EtcdMember, prefix: str, login: Login | None = None) -> None:
        self.member, self.prefix, self.login = member, prefix, login
        self.ttl_s, self.call_s = TTL_S, CALL_S
        self.terms: list[Term] = []
        self.clients: list[Etcd] = []

    def etcd(self) -> Etcd:
        self.clients.append(Etcd((self.member.address,), self.call_s, self.login))
        return self.clients[-1]

    def stand(self, name: str = "c0", clock: Callable[[], float] = time.monotonic) -> Term | LeaderRecord:
        found = Election(self.etcd(), self.prefix, LeaderRecord(name, f"tcp://{name}:1"), self.ttl_s, clock).stand()
        if isinstance(found, Term):
            self.terms.append(found)
        return found

    def lead(self, **options: object) -> EtcdJournal:
        found = self.stand()
        if isinstance(found, LeaderRecord):
            raise RuntimeError(f"somebody leads: {found}")  # noqa: TRY004
        return EtcdJournal(self.etcd(), self.prefix, found, **{"by": 1, **options})  # type: ignore[arg-type]

    def close(self) -> None:
        for term in self.terms:
            term.resign()
        for client in self.clients:
            client.close()


@pytest.fixture
def candidates(member: EtcdMember, request: pytest.FixtureRequest) -> Iterator[Candidates]:
    found = Candidates(member, request.node.name)
    yield found
    found.close()


def patient(candidates: Candidates) -> Candidates:
    """For what says nothing of time: its hundreds of writes each sync a disk that others write to."""
    candidates.ttl_s, candidates.call_s = 60.0, 30.0
    return candidates


LOGIN = Login("weightbus", "pass:word")


@pytest.fixture(scope="module")
def locked_member() -> Iterator[EtcdMember]:
    with quick_etcd_member() as running:
        running.lock(LOGIN, "test", "tesu")
        yield running


@pytest.fixture
def with_login(locked_member: EtcdMember, request: pytest.FixtureRequest) -> Iterator[Candidates]:
    found = Candidates(locked_member, request.node.name, LOGIN)
    yield found
    found.close()


class TestEtcdJournalUnderAccessControl(JournalContract):
    """The contract, kept by an etcd with access control."""

    @pytest.fixture
    def opens(self, with_login: Candidates) -> Callable[..., Journal]:
        return patient(with_login).lead

    def test_a_coordinator_that_does_not_log_in_reads_and_writes_nothing(self, locked_member: EtcdMember) -> None:
        """Nor with another password, nor beside the keys that it was given."""
        for login, prefix in ((None, "test-a"), (Login("weightbus", "guessed"), "test-a"), (LOGIN, "others")):
            with contextlib.closing(Etcd((locked_member.address,), 2.0, login)) as etcd:
                for operation in (read(f"{prefix}/leader"), put(f"{prefix}/leader", b"me")):
                    with pytest.raises(EtcdUnavailable, match=r"etcdserver: .*(user|password|permission|auth)"):
                        etcd.txn([], [operation])

    def test_a_session_that_has_ended_is_begun_again(self, with_login: Candidates) -> None:
        """After minutes in which nothing was asked, or when the member was restarted."""
        etcd = with_login.etcd()
        etcd.under(f"{with_login.prefix}/")
        for stale in ("nobody.1", ""):
            etcd._token = stale
            assert etcd.under(f"{with_login.prefix}/") == ()


class TestEtcdJournal(JournalContract):
    """The contract, kept by a store that several coordinators share."""

    @pytest.fixture
    def opens(self, candidates: Candidates) -> Callable[..., Journal]:
        return patient(candidates).lead


def test_a_deposed_leader_changes_nothing(candidates: Candidates) -> None:
    """A former leader that does not know yet that another was elected writes nothing and is told so."""
    journal = candidates.lead()
    journal.write(taken(1))
    journal._term._over.set()  # it does not renew its lease any more, and its clock stands still
    journal._term._until = float("inf")
    until(lambda: isinstance(candidates.stand("c1"), Term))
    successor = EtcdJournal(candidates.etcd(), candidates.prefix, candidates.terms[-1], by=1)
    successor.write(taken(2))
    for record in (taken(9), commit(1, 1), closed("p")):
        with pytest.raises(Deposed, match="another coordinator was elected"):
            journal.write(record)
        journal._term.lost = ""
    successor.close()
    again = candidates.lead()
    assert again.restore()[POLICY].epoch == 3  # the boot raised it
    assert again.restore()[POLICY].committed is None
    again.close()


def test_a_leader_that_cannot_renew_stops_before_another_begins(candidates: Candidates) -> None:
    """By its own clock its time is over first: it does not even try to write."""
    now = [0.0]
    term = candidates.stand(clock=lambda: now[0])
    assert isinstance(term, Term)
    journal = EtcdJournal(candidates.etcd(), candidates.prefix, term)
    now[0] = TTL_S - 0.01
    journal.confirm()
    term._over.set()
    term._thread.join()
    term._until, now[0] = TTL_S, TTL_S
    assert isinstance(candidates.stand("c1"), LeaderRecord), "etcd still lets no other lead"
    with pytest.raises(Deposed, match="not be renewed"):
        journal.confirm()


def test_the_leader_is_known_to_the_others(candidates: Candidates) -> None:
    """The loser of an election learns the name and the endpoint of the winner; a resignation makes room at once."""
    term = candidates.stand("c0")
    assert isinstance(term, Term)
    assert candidates.stand("c1") == LeaderRecord("c0", "tcp://c0:1")
    term.resign()
    assert isinstance(candidates.stand("c1"), Term)


def test_a_lease_is_renewed_for_as_long_as_it_takes(candidates: Candidates) -> None:
    """A leader that works stays the leader, beyond the time of one lease."""
    journal = candidates.lead()
    until = time.monotonic() + 1.5 * TTL_S
    while time.monotonic() < until:
        journal.confirm()
        time.sleep(0.05)
    journal.write(taken(1))
    journal.close()


def test_a_late_write_changes_nothing(candidates: Candidates) -> None:
    """A write whose answer was lost cannot come true after a later one: it was made for the channel as it was."""
    journal = candidates.lead()
    journal.write(taken(1))
    row, revision = journal._rows[POLICY]
    journal.write(taken(2))
    journal._rows[POLICY] = (row, revision)  # as if the answer to the last write had been lost
    with pytest.raises(JournalUnwritable, match="another client, or by a write of ours"):
        journal.write(taken(3))
    journal.write(taken(3))
    assert journal.restore()[POLICY].epoch == 3
    journal.close()


@pytest.fixture
def unsure(candidates: Candidates, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdJournal]:
    """A journal to which a commit of version 5, of table A, has come true, and that was told nothing of it."""
    journal = candidates.lead()
    for record in (taken(1), commit(4, 1, request="p4"), closed("p4"), taken(2)):
        journal.write(record)
    txn = journal._etcd.txn

    def loses(conditions: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json] = ()) -> TxnResult:
        txn(conditions, then, otherwise)
        raise EtcdUnavailable(("m",), "the answer was lost")

    with monkeypatch.context() as patched, pytest.raises(JournalUnwritable, match="the answer was lost"):
        patched.setattr(journal._etcd, "txn", loses)
        journal.write(commit(5, 2, request="p5"))
    yield journal
    journal.close()


def test_a_commit_whose_answer_was_lost_is_done_when_it_is_asked_for_again(
    unsure: EtcdJournal, candidates: Candidates
) -> None:
    """It is found in the store, and not written once more: that might get lost too. Its answer is found with it."""
    journal = unsure
    before = candidates.etcd().under(f"{candidates.prefix}/")
    journal.write(commit(5, 2, request="p5"))
    assert candidates.etcd().under(f"{candidates.prefix}/") == before
    known = journal.restore()[POLICY]
    assert known.committed
    assert (known.committed.version, list(known.answers)) == (5, ["p4", "p5"])
    with pytest.raises(JournalCorrupt, match="would go back"):  # now it knows better
        journal.write(commit(5, 2, B))
    journal.close()
    again = candidates.lead()
    assert again.restore()[POLICY] == msgspec.structs.replace(known, epoch=known.epoch + 1)
    again.close()


def test_no_older_version_is_written_over_one_whose_answer_was_lost(
    unsure: EtcdJournal, candidates: Candidates
) -> None:
    """The round was given up, and its trainer publishes something else: refused, and not reported as a bug."""
    journal = unsure
    journal.write(taken(3))
    before = candidates.etcd().under(f"{candidates.prefix}/")
    for record in (commit(5, 3, B, request="other"), commit(4, 3, request="older")):
        with pytest.raises(VersionNotNewer, match=r"holds version 5 of 'policy', by a commit whose answer was lost"):
            journal.write(record)
    assert candidates.etcd().under(f"{candidates.prefix}/") == before
    journal.write(commit(5, 3, request="again"))
    journal.write(taken(4))
    journal.write(commit(6, 4, B, request="newer"))
    known = journal.restore()[POLICY]
    assert known.committed
    assert (known.committed.version, known.committed.table) == (6, B)
    with pytest.raises(JournalCorrupt, match="would go back"):
        journal.write(commit(5, 4))


def test_a_rollback_is_written_over_a_commit_whose_answer_was_lost(unsure: EtcdJournal) -> None:
    """A rollback replaces any committed version."""
    journal = unsure
    journal.write(taken(3))
    journal.write(msgspec.structs.replace(commit(2, 3), rollback=True))
    known = journal.restore()[POLICY]
    assert known.committed
    assert (known.committed.version, [past.version for past in known.history]) == (2, [4, 5, 2])


def test_a_commit_is_made_for_the_channel_as_it_was(candidates: Candidates) -> None:
    """One that comes true late, when others were made since, changes nothing."""
    journal = candidates.lead()
    journal.write(taken(1))
    before = journal._rows[POLICY]
    journal.write(commit(7, 1))
    journal._rows[POLICY] = before  # as if it had set out before that
    with pytest.raises(JournalUnwritable, match="another client, or by a write of ours"):
        journal.write(commit(6, 1, request="late"))
    assert [kv.name for kv in candidates.etcd().under(f"{candidates.prefix}/reply/")] == [
        f"{candidates.prefix}/reply/p"
    ]
    with pytest.raises(VersionNotNewer):
        journal.write(commit(6, 1, request="late"))
    journal.close()
    again = candidates.lead()
    restored = again.restore()[POLICY].committed
    assert restored
    assert restored.version == 7
    again.close()


def test_answers_do_not_fill_the_store(candidates: Candidates) -> None:
    """Only the newest are kept, there and after a restart."""
    journal = candidates.lead()
    journal.write(taken(1))
    for number in range(MAX_ROUND_REPLIES + 3):
        journal.write(closed(f"p{number:03}"))
    journal.close()
    again = candidates.lead()
    assert list(again.restore()[POLICY].answers) == [f"p{number:03}" for number in range(3, MAX_ROUND_REPLIES + 3)]
    replies = [kv.name for kv in candidates.etcd().under(f"{candidates.prefix}/reply/")]
    assert len(replies) == MAX_ROUND_REPLIES
    again.close()


def test_a_channel_is_forgotten_without_a_leader(
    candidates: Candidates, member: EtcdMember, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, which leads for a moment itself."""
    journal = candidates.lead()
    journal.write(taken(1))
    journal.write(taken(1, "run-1"))
    command = ["forget-channel", "run-1", "--store", f"etcd://{member.address}/{candidates.prefix}"]
    assert main(command) == 2
    assert "stop all its coordinators first" in capsys.readouterr().err
    journal.close()
    assert main(command) == 0
    again = candidates.lead()
    assert list(again.restore()) == [POLICY]
    again.close()


def test_a_channel_that_was_written_meanwhile_is_not_forgotten(candidates: Candidates) -> None:
    """By a hand, or by a write that was given up: what it holds now was not looked at."""
    journal = candidates.lead()
    journal.write(taken(1))
    found = {kv.name: kv for kv in candidates.etcd().under(f"{candidates.prefix}/")}
    key = f"{candidates.prefix}/channel/{POLICY}"
    candidates.etcd().txn([], [put(key, found[key].content)])
    with pytest.raises(JournalUnwritable, match="was written by another client"):
        journal.write(ChannelForgotten(channel=POLICY))
    assert POLICY in journal.restore()
    journal.close()


def test_of_several_channels_all_are_forgotten_or_none(candidates: Candidates) -> None:
    """Here another client has written one of them meanwhile."""
    journal = candidates.lead()
    for name in ("run-1", "run-2"):
        journal.write(taken(1, name))
    key = f"{candidates.prefix}/channel/run-2"
    candidates.etcd().txn([], [put(key, candidates.etcd().under(key)[0].content)])
    with pytest.raises(JournalUnwritable, match="was written by another client"):
        journal.forget([Channel("run-1"), Channel("run-2")])
    assert sorted(journal.restore()) == ["run-1", "run-2"]
    journal.close()
    again = candidates.lead()
    assert sorted(again.restore()) == ["run-1", "run-2"]
    again.close()


def test_answers_of_a_channel_that_was_forgotten_go_at_the_next_start(candidates: Candidates) -> None:
    """The command that forgot it ended before its replies were gone. They answer no later channel of that name."""
    journal = candidates.lead()
    journal.write(taken(1))
    journal.write(closed("p"))
    candidates.etcd().txn([], [delete(f"{candidates.prefix}/channel/{POLICY}")])
    journal.close()
    again = candidates.lead()
    assert dict(again.restore()) == {}
    assert candidates.etcd().under(f"{candidates.prefix}/reply/") == ()
    again.write(taken(1))
    assert dict(again.restore()[POLICY].answers) == {}
    again.close()


def test_a_store_of_many_channels_is_led_again(candidates: Candidates) -> None:
    """More than one transaction of etcd takes: every epoch is raised, and the boot is counted."""
    journal = candidates.lead()
    names = [Channel(f"c{number:03}") for number in range(2 * MOST_OPERATIONS + 1)]
    for name in names:
        journal.write(taken(1, name))
    journal.close()
    again = candidates.lead()
    assert again.boot == journal.boot + 1
    assert [again.restore()[name].epoch for name in names] == [2] * len(names)
    again.write(taken(3, names[-1]))
    again.close()


def test_a_store_that_does_not_answer(candidates: Candidates, member: EtcdMember) -> None:
    """While etcd hangs, writes fail within their deadline; when it is back they go on, if the lease has lasted."""
    journal = candidates.lead()
    member.signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(JournalUnwritable, match="tried again"):
            journal.write(taken(1))
    finally:
        member.signal(signal.SIGCONT)
    assert time.monotonic() - began < TTL_S - 1.0
    for _ in range(3):  # the write that was given up may yet come true, in between
        try:
            journal.write(taken(1))
            break
        except JournalUnwritable:
            continue
    assert journal.restore()[POLICY].epoch == 1
    journal.close()


def test_a_store_that_goes_away_between_election_and_boot(candidates: Candidates, member: EtcdMember) -> None:
    """A coordinator that was elected and cannot count its boot does not lead, and is told to try again."""
    term = candidates.stand()
    assert isinstance(term, Term)
    member.signal(signal.SIGSTOP)
    try:
        with pytest.raises(JournalUnwritable, match="tried again"):
            EtcdJournal(candidates.etcd(), candidates.prefix, term)
    finally:
        member.signal(signal.SIGCONT)


STARTER = """
import sys, time
from pathlib import Path
from tests.kit.etcd_member import EtcdMember
member = EtcdMember(Path(sys.argv[1]))
member.start()
print(member._process.pid, flush=True)
time.sleep(600)
"""


def test_a_member_ends_with_the_tests_that_are_killed(tmp_path: Path) -> None:
    """It is in a session of its own, and would stay for ever."""
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) as starter:
        assert starter.stdout
        member = int(starter.stdout.readline())
        line = Path(f"/proc/{member}/cmdline")
        assert b"etcd" in line.read_bytes().split(b"\0")[0]
        starter.kill()
    try:
        until(lambda: not line.exists() or not line.read_bytes())  # it may never be reaped
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("redis://x", "write etcd://"), ("etcd://", "write etcd://"), ("etcd://10.0.0.1:2379", "plain HTTP")],
)
def test_what_is_no_store(text: str, reason: str) -> None:
    """A store that is none, or that plain HTTP would reach over a network, is refused with what to write."""
    with pytest.raises(ConfigurationError, match=reason):
        parse_url(text)


def test_answers_of_an_earlier_release_are_read(candidates: Candidates) -> None:
    """They tell nothing of the question, and are taken for whole."""
    journal = candidates.lead()
    journal.write(taken(1))
    known = round_reply_of(closed("p"))
    old = msgspec.json.encode({"written_at": time.time(), "done": known.done})
    candidates.etcd().txn([], [put(f"{candidates.prefix}/reply/p", old)])
    journal.close()
    again = candidates.lead()
    assert again.restore()[POLICY].answers == {"p": msgspec.structs.replace(known, question="")}
    again.close()


def test_the_run_of_a_channel_is_kept(candidates: Candidates) -> None:
    """A standby that takes over knows whose channel it is (N60)."""
    journal = candidates.lead()
    journal.write(msgspec.structs.replace(taken(1), run="exp-1"))
    journal.write(taken(2))
    journal.close()
    again = candidates.lead()
    owner = again.restore()[POLICY].owner
    assert owner is not None
    assert (owner.run, owner.trainer) == ("exp-1", taken(1).holder)
    again.close()
