"""A real Megatron pipeline of two stages, each of which broadcasts what it holds to two real SGLang servers.

The oracle is transformers, as in test_rounds.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.trainer_agent.demo.child_processes import Programs

from .fleet import Fleet, poll
from .models import Answers, ask_oracle, check_answers, write_checkpoints

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

PROMPTS = [[5, 17, 33, 64, 101, 7], [400, 3, 9], [250, 1, 250, 2, 250], [11]]
SEEDS = 5
BUCKET_BYTES = 20_000
ENDED_S = 60.0
"""Far below the transfer's own deadline of ten minutes."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint a seed."""
    return write_checkpoints(tmp_path_factory.mktemp("stages"), SEEDS)


@pytest.fixture(scope="module")
def expected(checkpoints: Path) -> dict[int, Answers]:
    """What each seed must answer, by transformers."""
    return ask_oracle(checkpoints, SEEDS, PROMPTS)


@pytest.fixture(scope="module")
def fleet(checkpoints: Path, expected: dict[int, Answers]) -> Iterator[Fleet]:
    """A coordinator, engines of one and two workers, and a trainer of two pipeline stages.

    Of the first engine the agent takes part in broadcasts, of the second its server's workers do.
    """
    del expected  # computed first: an oracle that fails should not wait for servers
    with Programs(checkpoints) as programs:
        deployment = Fleet(checkpoints, programs)
        try:
            deployment.start_coordinator()
            deployment.start_engine("one", tp=1)
            deployment.add_engine("two", 2)
            deployment.start_server("two")
            deployment.start_sidecar("two", "--no-hands-on")
            deployment.start_trainer(stages=2)
            deployment.wait_ready("one", "two")
            yield deployment
        finally:
            deployment.close()


def _serves(fleet: Fleet, name: str, answers: Answers, label: str) -> None:
    check_answers(fleet, name, PROMPTS, answers, label)


def _groups(fleet: Fleet, name: str) -> list[str]:
    """The groups that a server was brought into, in order."""
    log = (fleet.folder / f"server-{name}.log").read_text(errors="replace")
    found = [
        line.partition("group_name=")[2].split()[0].strip(",'") for line in log.splitlines() if "init custom" in line
    ]
    return [group for at, group in enumerate(found) if group not in found[:at]]


def test_every_stage_broadcasts_its_own(fleet: Fleet, expected: dict[int, Answers]) -> None:
    """Versions of both servers are the trainer's, by checksum and by token, round after round over the same groups."""
    fleet.publish(1, 1, "distributed", bucket_bytes=BUCKET_BYTES, again=1)
    report = fleet.answer()
    assert "error" not in report, report["error"]
    assert report["version"] == 2
    assert {each["engine"]: each["outcome"] for each in report["engines"]} == {"one": "committed", "two": "committed"}
    assert {engine["verified_by"] for engine in report["engines"]} == {"live-digest"}
    for name in ("one", "two"):
        _serves(fleet, name, expected[1], "2")
        groups = _groups(fleet, name)
        if name == "one":
            assert not groups, "its agent takes part"
            continue
        assert len(groups) == 2, "the second version was to go by the groups of the first"
        whole, at, rank = groups[0].rpartition("-at")
        assert groups[1] == f"{whole}-source1{at}{rank}", "in the order of the stages, on every engine"


def test_a_version_that_fits_the_slots_is_read_once_and_sent(fleet: Fleet, expected: dict[int, Answers]) -> None:
    """A bucket for each stage: digested, and broadcast out of the same memory."""
    fleet.publish(3, 2, "distributed", bucket_bytes=1 << 20)
    report = fleet.answer()
    assert "error" not in report, report["error"]
    assert report["buckets"] == 2
    for name in ("one", "two"):
        _serves(fleet, name, expected[2], "3")


def test_other_transports_gather_from_all_stages_as_before(fleet: Fleet, expected: dict[int, Answers]) -> None:
    """The same pipeline, where engines open the first rank's memory."""
    fleet.publish(4, 3, "local", bucket_bytes=BUCKET_BYTES)
    report = fleet.answer()
    assert "error" not in report, report["error"]
    for name in ("one", "two"):
        _serves(fleet, name, expected[3], "4")


def test_a_second_source_that_dies_in_its_broadcast_ends_the_round(fleet: Fleet, expected: dict[int, Answers]) -> None:
    """Killed while both engines wait for its bucket: all end, and the trainer's next launch serves them."""
    fleet.publish(5, 4, "distributed", bucket_bytes=BUCKET_BYTES, hold_source=1)
    poll("the second stage to stand before its broadcast", (fleet.folder / "source-held").exists)
    fleet.kill("rank1")
    began = time.monotonic()
    report = fleet.answer(ENDED_S)
    assert "error" in report
    fleet.end_trainer()
    poll("the engines to be let go of", lambda: fleet.channel()["lease"] is None, ENDED_S)
    assert time.monotonic() - began < ENDED_S
    assert fleet.channel()["committed"]["version"] == 4
    fleet.start_trainer(stages=2)
    fleet.publish(6, 4, "distributed", bucket_bytes=BUCKET_BYTES)
    report = fleet.answer()
    assert "error" not in report, report["error"]
    assert {each["engine"]: each["outcome"] for each in report["engines"]} == {"one": "committed", "two": "committed"}
    fleet.wait_ready("one", "two")
    for name in ("one", "two"):
        _serves(fleet, name, expected[4], "6")
