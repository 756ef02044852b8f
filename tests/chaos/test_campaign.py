"""A slice of `make chaos`: real processes are killed, stopped and parted in rounds, and nothing is lost or mixed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import failpoints
import ledger
import model
import plants
from campaign import AT_DISK, AT_PARTITION, AT_RECORD, FAULTS, executed, plan, strikes
from deployment import poll
from hammer import Hammer
from ledger import Commits, Line
from relay import RelayProcess
from verdict import Ack, lost_acks, uncommitted

from tests.kit.fake_sglang import FakeSGLang
from tests.kit.ports import free_port
from weightbus.control.journal.sqlite_journal import EVENTS, SqliteJournal
from weightbus.control.machine.effects import Committed
from weightbus.control.protocol.errors import JournalUnwritable
from weightbus.control.protocol.messages import Channel, Digest, Epoch, RequestId, Version

CYCLES = 4
BEGIN_WITHIN_S = 150
HERE = Path(__file__).parent


@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_slice_of_the_campaign() -> None:
    """Whatever strikes, a committed version stays, every token has one maker, and all engines are ready again."""
    argv = [sys.executable, str(HERE / "campaign.py"), f"--cycles={CYCLES}", "--seed=5", f"--within-s={BEGIN_WITHIN_S}"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=850, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    *_, executed, _, last = ended.stdout.splitlines()
    assert re.fullmatch(r"cycles=[1-4] lost_acks=0 mixed_tokens=0 worst_fault_to_safe_s=[\d.]+", last)
    assert re.fullmatch(r"failpoints=[1-4]/\d+ faults=[1-4]", executed)


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("planted", "said"), [("loss", r"lost_acks=[1-9]"), ("mix", r"lost_acks=0 mixed_tokens=[1-9]")]
)
def test_a_planted_bug_is_found(planted: str, said: str) -> None:
    """A journal that forgets what it called durable, and a sidecar that calls half of a version verified."""
    argv = [sys.executable, str(HERE / "campaign.py"), "--cycles=1", "--faults=part"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), plants.VARIABLE: planted}
    ended = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=850, check=False)
    assert ended.returncode == 1, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert re.match(rf"cycles=1 {said}", ended.stdout.splitlines()[-1])


def test_every_failpoint_is_in_the_code() -> None:
    """A method that was renamed would take its failpoints with it; each that is wrapped stops where it is armed."""
    for point in failpoints.POINTS.values():
        for place in point.places:
            kind, method = failpoints.found(place)
            assert callable(getattr(kind, method))
    assert set(AT_PARTITION + AT_DISK + AT_RECORD) <= set(failpoints.POINTS)
    with pytest.raises(AttributeError):
        failpoints.found("weightbus.control.journal.sqlite_journal:SqliteJournal.no_such_method")


def test_a_process_stands_at_its_failpoint_until_it_is_let_go(tmp_path: Path) -> None:
    """Before or after the call, at the pass that is wanted, once; whoever is not armed goes on."""
    passed: list[str] = []

    class Journal:
        def write(self, record: str) -> None:
            passed.append(record)

    point = failpoints.Point("p", ("x:Journal.write",), lambda arguments: arguments[1] != "other", skip=1)
    gate = failpoints.Gate(tmp_path, "p")
    write = failpoints._wrapped(Journal.write, {"here": point}, gate)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "gate"))
        listener.listen()
        listener.settimeout(30)
        write(Journal(), "not armed")
        failpoints.arm(tmp_path / "p.armed", "here", point.skip)
        thread = threading.Thread(target=lambda: [write(Journal(), each) for each in ("other", "first", "second")])
        thread.start()
        line, _ = listener.accept()
        with line:
            assert line.recv(100) == b"here"
            assert passed == ["not armed", "other", "first"]
            line.send(b".")
        thread.join(30)
    assert passed == ["not armed", "other", "first", "second"]
    assert not (tmp_path / "p.armed").exists()


def test_a_half_loaded_server_is_found_out(tmp_path: Path) -> None:
    """The clients of the campaign see tokens of mixed weights, and tokens under another version's label."""
    checkpoint = model.write_checkpoint(tmp_path / "checkpoint")
    server = FakeSGLang(checkpoint).start()
    hammer = Hammer(checkpoint, lambda: [server.url], 1)
    try:
        poll("tokens", lambda: hammer.tokens > 0, 30)
        assert (hammer.wrong, set(hammer.seen)) == ([], {model.LAUNCH})
        server.weights.load(list(model.weights(checkpoint, 5).items())[:3])
        poll("mixed tokens", lambda: bool(hammer.wrong), 30)
    finally:
        hammer.close()
        server.die()


def test_every_tensor_of_a_real_version_shows_in_its_tokens(tmp_path: Path) -> None:
    """Tokens are told from those of weights that differ in one tensor alone, and from those of another version."""
    checkpoint = model.write_checkpoint(tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    mine, other = ({name: each.float() for name, each in model.weights(checkpoint, v).items()} for v in (7, 8))

    def answer(weights: dict[str, torch.Tensor], prompt: list[int]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        told: list[float] = []
        for _ in range(24):
            expected = model.log_probabilities(config, weights, prompt + tokens)[-1]
            tokens.append(int(expected.argmax()))
            told.append(float(expected[tokens[-1]]) + 0.05 * (-1) ** len(tokens))
        return tokens, told

    for name in (None, *mine):
        rights: list[bool] = []
        for number in range(1 if name is None else 4):
            prompt = [number, 3]
            weights = mine if name is None else {**mine, name: other[name]}
            rights += model.real_maker(checkpoint, prompt, *answer(weights, prompt))(7)
        assert all(rights) is (name is None), f"{name} of another version makes the same tokens"
    prompt, makes = [1, 2], model.real_maker(checkpoint, [1, 2], *answer(other, [1, 2]))
    assert sum(makes(7)) < 6
    assert model.maker_of(makes, range(24), range(12)) == 8
    assert prompt


def test_tokens_are_judged_by_weights_and_not_by_their_label(tmp_path: Path) -> None:
    """A wrong label is found, with the version that made the tokens; a true one is noted as seen."""
    checkpoint = model.write_checkpoint(tmp_path / "checkpoint")
    server = FakeSGLang(checkpoint)
    hammer = Hammer(checkpoint, list, 0, published=lambda: range(1, 5))
    server.start()
    try:
        server.weights.load(list(model.weights(checkpoint, 3).items()))
        answer = server.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 6}})
    finally:
        server.die()
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 6}]
    hammer.check([1], {**answer, "meta_info": {"weight_versions": spans}}, 5.0)
    assert hammer.wrong == ["tokens 2 to 5 of [1], labeled 2: made by version 3"]
    assert (hammer.wrong_tokens, hammer.tokens, hammer.seen) == (4, 6, {3: 5.0})


def lines(*found: tuple[str, int]) -> Commits:
    """What was durable by such lines, one a second."""
    return Commits("chaos").read(Line(what, "chaos", version, at=float(at)) for at, (what, version) in enumerate(found))


def commit(version: int) -> list[tuple[str, int]]:
    """The lines of a commit that ends well."""
    return [("writes", version), ("durable", version)]


@pytest.mark.parametrize(
    ("found", "acks", "lost"),
    [
        ([*commit(1), *commit(2), *commit(3), ("found", 3)], [Ack(1, 9), Ack(2, 9)], 0),
        ([*commit(1), ("writes", 2), ("found", 2)], [Ack(2, 9)], 0),  # killed between the two lines, and it was there
        ([*commit(1), ("writes", 2), ("found", 1), *commit(2), ("found", 2)], [Ack(2, 9)], 0),  # and it was not
        ([*commit(1), ("writes", 2), ("refused", 2), ("found", 2)], [Ack(2, 9)], 0),  # refused, and on disk after all
        ([*commit(2), *commit(2), ("found", 2)], [Ack(2, 9)], 0),
        ([*commit(1), *commit(2), ("disowns", 2), ("disowned", 2), ("found", 1)], [Ack(1, 9)], 0),  # a hung disk
        ([*commit(1), *commit(2), ("disowns", 2), ("found", 1), *commit(2), ("found", 2)], [Ack(2, 9)], 0),
        ([*commit(1), *commit(2), ("disowns", 2), ("found", 2)], [Ack(2, 9)], 0),
        ([*commit(1), *commit(2), ("disowns", 2), ("disowned", 2), ("found", 1)], [Ack(2, 9)], 1),
        ([*commit(1)], [Ack(1, 9), Ack(2, 9)], 1),
        ([*commit(1), ("writes", 2), ("found", 1)], [Ack(2, 9)], 1),
        ([*commit(1), *commit(2), ("found", 1)], [Ack(2, 9)], 2),  # and the ack of what is no more
        ([*commit(1), ("found", 0)], [], 1),
        ([*commit(2), *commit(1)], [], 1),
        ([*commit(1), *commit(2)], [Ack(2, 9), Ack(1, 10)], 1),
        ([("writes", 0), *commit(1)], [Ack(1, 0.5)], 1),
    ],
)
def test_what_counts_as_lost(found: list[tuple[str, int]], acks: list[Ack], lost: int) -> None:
    """Answers for versions that are not durable, or not yet; journals that forget, or go back."""
    assert len(lost_acks(acks, lines(*found))) == lost


def test_what_counts_as_uncommitted() -> None:
    """Versions whose tokens came and that were never committed, or only later; launch weights are nobody's."""
    commits = lines(*commit(1), *commit(2))
    assert uncommitted({0: 0.0, 1: 1.0, 2: 9.0}, commits, 0) == []
    assert uncommitted({2: 1.0, 9: 9.0}, commits, 0) == [
        "version 2 was served, before its commit",
        "version 9 was served, never committed",
    ]


def test_the_ledger_knows_more_versions_than_the_journal_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit trail is pruned; the campaign's record is whole, and says what a refused write and a new life found."""
    for name in ("write", "restore", "disown"):
        monkeypatch.setattr(SqliteJournal, name, getattr(SqliteJournal, name))
    many = EVENTS + 50
    ledger.keep(tmp_path)
    journal = SqliteJournal(tmp_path / "journal.sqlite")
    journal._db.execute("PRAGMA synchronous = OFF")

    def record(version: int) -> Committed:
        key = RequestId(f"p{version}")
        return Committed(
            channel=Channel("chaos"),
            epoch=Epoch(1 << 40),
            version=Version(version),
            manifest=Digest("0" * 64),
            table=Digest("1" * 64),
            request=key,
            announced=Epoch(1 << 40),
            question="",
            engines=(),
        )

    journal._db.execute("INSERT INTO channel (name, epoch) VALUES ('chaos', ?)", (1 << 40,))
    for version in range(1, many + 1):
        journal.write(record(version))
    assert len([row for row in journal.audit() if row["record"] == "Committed"]) < many
    journal._db.execute("PRAGMA query_only = ON")
    with pytest.raises(JournalUnwritable):
        journal.write(record(many + 1))
    journal.close()
    again = SqliteJournal(tmp_path / "journal.sqlite")
    again.restore()
    again.close()
    found = list(ledger.lines(tmp_path))
    assert [line[:3] for line in found[-3:]] == [
        ("writes", "chaos", many + 1),
        ("refused", "chaos", many + 1),
        ("found", "chaos", many),
    ]
    commits = Commits("chaos").read(found)
    assert (list(commits.durable), commits.losses) == (list(range(1, many + 1)), [])
    assert lost_acks([Ack(each, 1e12) for each in range(1, many + 1)], commits) == []


def test_a_relay_holds_retargets_and_lets_pass(tmp_path: Path) -> None:
    """What is held arrives late and whole; who is connected when the target changes is cut off."""
    port = free_port()
    relay = RelayProcess(f"127.0.0.1:{port}", tmp_path / "control")
    try:
        with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
            relay.say("to", *first.getsockname())
            with socket.create_connection(("127.0.0.1", port), 10) as client:
                server, _ = first.accept()
                with server:
                    server.settimeout(0.3)
                    relay.say("hold", "up")
                    client.sendall(b"late")
                    with pytest.raises(TimeoutError):
                        server.recv(10)
                    server.sendall(b"down")
                    assert client.recv(10) == b"down"
                    relay.say("pass")
                    server.settimeout(10)
                    assert server.recv(10) == b"late"
                    relay.say("to", *second.getsockname())
                    with contextlib.suppress(ConnectionResetError):
                        assert client.recv(10) == b""
            with socket.create_connection(("127.0.0.1", port), 10):
                second.accept()[0].close()
    finally:
        relay.close()


def test_the_plan_leaves_no_fault_out() -> None:
    """Every kind of fault before any comes again, each time at another program and failpoint; by the seed."""
    found = strikes(["e0", "e1"], FAULTS)
    assert {strike.point for strike in found} == set(failpoints.passed("local"))
    assert {strike.how for strike in found} == set(FAULTS)
    kinds = {(strike.how, strike.whom) for strike in found}
    agents = {*(f"{kind}-e{n}" for kind in ("sidecar", "server") for n in "01")}
    programs = {"coordinator", "trainer-0", "trainer-1", *agents}
    assert kinds >= {(how, program) for how in ("kill", "stop") for program in programs}
    assert kinds >= {(how, "e1") for how in ("part", "mute", "deafen", "twin")} | {("fill", "disk"), ("freeze", "disk")}
    assert kinds >= {("revoke", "e0"), ("revoke", "trainer-chaos"), ("gone", "coordinator"), ("swap", "server-e1")}
    planned = plan(found, 2 * len(FAULTS), seed=1)
    assert {strike.how for strike in planned[: len(FAULTS)]} == set(FAULTS)
    assert len(set(planned)) == len(planned), "the second time it strikes elsewhere"
    many = plan(found, 9 * len(FAULTS), seed=1)
    assert {(strike.how, strike.whom) for strike in many} == kinds
    assert planned == plan(found, 2 * len(FAULTS), seed=1) != plan(found, 2 * len(FAULTS), seed=2)
    assert set(plan(found, 70 * len(FAULTS), seed=1)) == set(found)
    assert not {each.how for each in strikes(["e0"], FAULTS, disk=False)} & {"fill", "freeze"}
    assert {each.how for each in strikes(["e0"], {"kill"})} == {"kill"}


def test_a_campaign_strikes_where_its_transport_passes() -> None:
    """Between an open table and the end of it only over `direct`, whose rounds know nothing of buckets."""
    local, direct = ({each.point for each in strikes(["e0"], FAULTS, transport=kind)} for kind in failpoints.ONLY)
    assert direct - local == {"table_open", "table_closed"}
    assert local - direct == {"rank_assembles", "second_bucket", "verified", "checksums"}
    assert local | direct == set(failpoints.POINTS)


def test_what_was_executed_is_counted_by_fault_and_failpoint() -> None:
    """The line that says where a campaign has been: nothing that was only planned is in it."""
    found = strikes(["e0"], FAULTS)
    first, second = (
        next(each for each in found if str(each) == name)
        for name in ("kill coordinator at commit_durable", "kill coordinator at commit_said")
    )
    told = executed({first: [1.0, 2.0], second: [3.0]}, most=35)
    assert told[0] == "executed kill coordinator: commit_durable 2, commit_said 1"
    assert told[-1] == "failpoints=2/35 faults=3"
