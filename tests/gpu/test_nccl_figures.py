"""What is made of what was seen of survivors. No GPU."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import nccl
import nccl_parts


def seen(answers: list[float], ready: list[tuple[float, bool]]) -> Any:
    made = nccl_parts.Seen.__new__(nccl_parts.Seen)
    made._answered = answers
    made._was = [(moment, each, 1, "serving") for moment, each in ready]
    return made


def test_survivors_serve_when_they_answer_and_are_routed_to() -> None:
    """The later of both counts, whoever has died: an engine that answers all the time may not be listed for seconds."""
    found = seen([9.5, 10.5, 13.0], [(9.0, True), (10.2, False), (13.0, False), (14.5, True)]).since(10.0)
    assert (found["first_answer_s"], found["routable_s"]) == (pytest.approx(0.5), pytest.approx(4.5))
    assert found["survivors_serving_s"] == pytest.approx(4.5)


def test_who_never_serves_again_has_no_figure() -> None:
    """It is missing then, and no zero."""
    assert seen([10.5], [(9.0, True), (10.2, False)]).since(10.0)["survivors_serving_s"] is None
    assert seen([], [(9.0, True), (10.2, False), (14.5, True)]).since(10.0)["survivors_serving_s"] is None


def test_parts_of_other_models_leave_the_top_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hosts` comes last, with 2 layers: its rounds are none of the model that is described, and its joiner neither."""
    run = nccl.Run.__new__(nccl.Run)
    run.args, run.parts, run._described = argparse.Namespace(out=Path()), ["speed", "hosts"], {"model": "24 layers"}
    hosts = {"equal": True, "normal_round_s": 1.6, "joiner_s": 0.9, "survivors_serving_s": 1.8}
    run.found = {"speed": {"equal": True, "bytes": 31, "normal_round_s": 0.16}, "hosts": hosts}
    monkeypatch.setattr(nccl.rig, "write_result", lambda *_: None)
    told = run.write()
    assert set(nccl.FIGURES) <= told.keys()
    assert (told["bytes"], told["normal_round_s"], told["joiner_s"]) == (31, 0.16, None)
    assert (told["equal"], told["survivors_serving_s"], told["parts"]["hosts"]) == (True, 1.8, hosts)
