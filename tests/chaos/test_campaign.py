"""A slice of `make chaos`: real processes are killed, stopped and parted in rounds, and nothing is lost or mixed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import failpoints
import model
from campaign import AT_FULL_DISK, AT_PARTITION, Campaign, executed, plan, strikes
from deployment import poll
from hammer import Hammer

from tests.kit.fake_sglang import FakeSGLang

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


def test_every_failpoint_is_in_the_code() -> None:
    """A method that was renamed would take its failpoints with it; each that is wrapped stops where it is armed."""
    for point in failpoints.POINTS.values():
        for place in point.places:
            kind, method = failpoints.found(place)
            assert callable(getattr(kind, method))
    assert set(AT_PARTITION + AT_FULL_DISK) <= set(failpoints.POINTS)
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
        assert (hammer.wrong, hammer.versions) == ([], {model.LAUNCH})
        server.weights.load(list(model.weights(checkpoint, 5).items())[:3])
        poll("mixed tokens", lambda: bool(hammer.wrong), 30)
    finally:
        hammer.close()
        server.die()


@pytest.mark.parametrize(
    ("acks", "journalled", "seen", "verdict"),
    [
        ([1, 2], [1, 2, 3], {0, 3}, (0, 0)),
        ([1, 2, 3], [1, 2], {2}, (1, 0)),
        ([1], [1, 3, 2], {1}, (1, 0)),
        ([1], [1], {1, 9}, (0, 1)),
    ],
)
def test_what_counts_as_lost_and_as_mixed(
    acks: list[int], journalled: list[int], seen: set[int], verdict: tuple[int, int]
) -> None:
    """An answered version that the journal lacks, a journal that goes back, a token of what was never committed."""
    nothing = SimpleNamespace(close=lambda: None)
    campaign = Campaign.__new__(Campaign)
    campaign.lost = 0
    campaign.hammer = SimpleNamespace(close=lambda: None, versions=seen, wrong=[])  # type: ignore[assignment]
    campaign.deployment = SimpleNamespace(  # type: ignore[assignment]
        programs={"coordinator": nothing},
        end_trainer=lambda: None,
        acks=lambda: acks,
        journalled=lambda: journalled,
    )
    assert campaign.verdict() == verdict


def test_the_plan_leaves_no_fault_out() -> None:
    """Every kind of fault of every program before any comes again, each at other failpoints; by the seed."""
    found = strikes(["e0", "e1"], alone=False)
    assert {strike.point for strike in found} == set(failpoints.passed("local"))
    kinds = {(strike.how, strike.whom) for strike in found}
    programs = {
        "coordinator",
        "trainer-0",
        "trainer-1",
        *(f"{kind}-e{n}" for kind in ("sidecar", "server") for n in "01"),
    }
    assert kinds >= {(how, program) for how in ("kill", "stop") for program in programs}
    assert kinds >= {(how, "e1") for how in ("part", "mute", "deafen")} | {("fill", "disk")}
    planned = plan(found, 2 * len(kinds), seed=1)
    assert {(strike.how, strike.whom) for strike in planned[: len(kinds)]} == kinds
    assert len(set(planned)) == 2 * len(kinds), "the second time it strikes elsewhere"
    assert planned == plan(found, 2 * len(kinds), seed=1) != plan(found, 2 * len(kinds), seed=2)
    assert set(plan(found, 40 * len(kinds), seed=1)) == set(found)
    assert all(strike.how in {"kill", "stop"} for strike in strikes(["e0"], alone=True))


def test_a_campaign_strikes_where_its_transport_passes() -> None:
    """Between an open table and the end of it only over `direct`, whose rounds know nothing of buckets."""
    local, direct = ({each.point for each in strikes(["e0"], alone=False, transport=kind)} for kind in failpoints.ONLY)
    assert direct - local == {"table_open", "table_closed"}
    assert local - direct == {"rank_assembles", "second_bucket", "verified", "checksums"}
    assert local | direct == set(failpoints.POINTS)


def test_what_was_executed_is_counted_by_fault_and_failpoint() -> None:
    """The line that says where a campaign has been: nothing that was only planned is in it."""
    found = strikes(["e0"], alone=True)
    first, second = (
        next(each for each in found if str(each) == name)
        for name in ("kill coordinator at commit_durable", "kill coordinator at commit_said")
    )
    told = executed({first: [1.0, 2.0], second: [3.0]}, most=35)
    assert told[0] == "executed kill coordinator: commit_durable 2, commit_said 1"
    assert told[-1] == "failpoints=2/35 faults=3"
