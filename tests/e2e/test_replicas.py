"""A real server of two plain replicas beside a plain one, in one round: files for the one, tensors for the other."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from weightbus.trainer_agent.demo.child_processes import Programs

from .fleet import Fleet
from .models import write_checkpoints

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

PROMPT = [5, 17, 33, 64, 101, 7]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator, a server of one replica, a server of two, and a trainer."""
    folder = write_checkpoints(tmp_path_factory.mktemp("replicas"), 2)
    with Programs(folder) as programs:
        deployment = Fleet(folder, programs)
        try:
            deployment.start_coordinator()
            deployment.start_engine("one", 1)
            deployment.start_engine("both", 1, "--dp-size=2")
            deployment.start_trainer()
            deployment.wait_ready("one", "both")
            yield deployment
        finally:
            deployment.close()


def test_replicas_are_served_from_files_in_the_round_of_the_others(fleet: Fleet) -> None:
    """Both replicas hold and serve the version, by the server's own checksums; tensors would reach the first alone."""
    before = fleet.checksums("one")
    fleet.publish(1, 1, "any")
    report = fleet.answer()

    assert "error" not in report, report["error"]
    assert {each["engine"]: each["outcome"] for each in report["engines"]} == {"one": "committed", "both": "committed"}
    (one,) = fleet.checksums("one")
    assert [one] != before
    assert fleet.checksums("both") == [one, one]
    tokens, label = fleet.generate("one", PROMPT, 6)
    assert label == "1"
    assert [fleet.generate("both", PROMPT, 6) for _ in range(4)] == [(tokens, "1")] * 4


def test_tensors_alone_are_refused_to_replicas_with_what_to_do(fleet: Fleet) -> None:
    """The others go on without them, and the trainer is told why."""
    fleet.publish(2, 0, "local")
    report = fleet.answer()

    outcomes = {each["engine"]: each["outcome"] for each in report["engines"]}
    assert outcomes["one"] == "committed"
    assert outcomes["both"] != "committed"
    assert "--dp-size" in json.dumps(report)
