"""Figures beside goals: what is whole is judged, what is missing is passed over. No GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import goals

RESULTS = Path(goals.__file__).with_name("results")


def colocated(**figures: float) -> dict[str, Any]:
    found = {
        "bytes": 31_154_454_528, "command": "python3 tests/gpu/direct.py --layers 24", "equal": True,
        "replay_s": 0.016, "verify_s": 0.010, "record_s": 1.5, "plan_s": 0.3, "pause_gap_s": 0.036,
        "of_plain_copy": 0.89, "over_sglang_bucket": 50.0, **figures,
    }  # fmt: skip
    return {**found, "layouts": {"tp2": {"figures": found}}}


def missed(name: str, found: dict[str, Any]) -> set[str]:
    return {each.what for each in goals.goals(name, found) if not each.reached}


def test_a_gap_may_be_ten_milliseconds_longer_than_copy_and_proof() -> None:
    """At the limit it is reached, above it not."""
    assert not missed("colocated", colocated(pause_gap_s=0.0359))
    assert missed("colocated", colocated(pause_gap_s=0.0361)) == {
        "colocated: longest gap between tokens, tp2, s"
    }  # fmt: skip


def test_the_best_round_is_judged_and_the_median_said() -> None:
    """A gap of the fastest round says nothing of the others."""
    found = colocated(pause_gap_s=0.0359)
    found["layouts"]["tp2"]["steady"] = [{"pause_gap_s": each} for each in (0.0359, 0.038, 0.041)] + [{"client": "no"}]
    lines = [f"{each}" for each in goals.goals("colocated", found)]
    assert "       colocated: the same of the median round, tp2, s: 0.038" in lines


def test_memory_is_opened_in_the_first_copy() -> None:
    """What it took longer than the others is part of planning and opening, in files of any age."""
    found = colocated(plan_s=0.6)
    found["layouts"]["tp2"]["first"] = {"sidecar_s": {"step:transfer_copy": 1.41}}
    assert not missed("colocated", found)
    found["layouts"]["tp2"]["first"]["sidecar_s"]["step:transfer_copy"] = 1.42
    assert missed("colocated", found) == {"colocated: planning and opening, s"}


def test_speed_across_counts_for_each_gpu() -> None:
    """Two workers take half of the bytes each: 360 GB/s into each of them are 43.3 ms."""
    command = "python3 tests/gpu/direct.py --layers 24 --tp 2"
    fast, slow = (
        {**colocated(replay_s=seconds), "command": command, "layouts": {}} for seconds in (0.0432, 0.0434)
    )  # fmt: skip
    assert not missed("crosswise", fast)
    assert missed("crosswise", slow) == {"crosswise: GB/s into each GPU"}


def test_a_run_that_was_cut_off_is_judged_by_what_it_left() -> None:
    """Figures that are not there yet are nobody's fault; that it is not equal yet is said."""
    sends = {"equal": False, "shard_to_shard_s": 0.05, "bare_sendrecv_s": 0.052, "flattened_distributed_s": None}
    assert missed("nccl", sends) == {"nccl: equal"}
    assert missed("quantized", {"equal": False, "bf16_round_s": 0.06, "fp8_round_s": None}) == {"quantized: equal"}


def test_the_fastest_fp8_round_is_judged_and_the_median_said() -> None:
    """Of every depth of the model on its own; a median that no goal speaks of misses none and counts as none."""
    found = {
        "equal": True, "peer_bf16_s": 0.130, "peer_fp8_s": 0.0844, "of_copy": 0.8,
        "median": {"peer_bf16_s": 0.140, "peer_fp8_s": 0.130},
    }  # fmt: skip
    assert not missed("quantized-48", found)
    assert missed("quantized-48", {**found, "peer_fp8_s": 0.0846}) == {"quantized-48: the same from a peer"}
    lines = [f"{each}" for each in goals.goals("quantized-48", found)]
    assert "       quantized-48: the same from a peer, of the medians: 0.9286" in lines


def test_sends_are_judged_with_the_flip() -> None:
    """SGLang's own ways end with the parameters in place, unproven. Other counts are shown; a joiner is not one."""
    beside = {"step:transfer_wire": 0.085, "step:transfer_copy": 0.016, "step:transfer_verify": 0.010}
    rounds = [{"sidecar_s": {"step:transfer_wire": 0.02}, "publish_s": 0.1}, {"sidecar_s": beside, "publish_s": 0.155}]
    found = {
        "equal": True, "shard_to_shard_s": 0.085, "bare_sendrecv_s": 0.085, "slime_distributed_s": 1.02,
        "flattened_distributed_s": 0.6, "joiner_s": 9.0, "normal_round_s": 1.0, "parts": {"speed": {"sends": rounds}},
    }  # fmt: skip
    assert not missed("nccl", found)
    assert missed("nccl", {**found, "slime_distributed_s": 1.0}) == {
        "nccl: times as fast as a broadcast for each tensor, wire and flip"
    }
    lines = [f"{each}" for each in goals.goals("nccl", found)]
    assert "       nccl: times as fast as a broadcast for each tensor, publish(): 6.581" in lines


def test_stages_are_not_slower_than_gathering() -> None:
    """By the medians of whole rounds; a run that was cut off before the other way had its turn is not judged by it."""
    found = {"equal": True, "gathered_s": 1.9, "stage_wise_s": 2.0, "slime_s": 1.2}
    assert not missed("stages", found)
    assert missed("stages", {**found, "stage_wise_s": 2.01}) == {"stages: times as fast as gathered"}
    assert missed("stages", {"equal": False, "stage_wise_s": 2.0}) == {"stages: equal"}


def test_outcomes_of_servers_that_failed_count_though_they_went_well_later() -> None:
    """And of those who were killed, not of those who were stopped, others answer in time."""
    well = {
        "distributed: leader killed at begun": {"passed": True, "survivors_serving_s": 4.9},
        "distributed: leader killed at half": {"passed": True, "over_s": 4.9, "freed_s": 5.0},
        "distributed: leader stopped at begun": {"passed": True, "survivors_serving_s": 12.0},
    }
    assert not missed("server-deaths", {"runs": [{"cells": well}]})
    for late in ("survivors_serving_s", "freed_s"):
        again = {"distributed: leader killed at half": {"passed": True, late: 5.1}}
        assert missed("server-deaths", {"runs": [{"cells": well}, {"cells": again}]}) == {
            "server-deaths: survivors of a kill serve after, s"
        }
    failed = {"distributed: leader killed at half": {"passed": False, "problem": "waited"}}
    assert missed("server-deaths", {"runs": [{"cells": failed}, {"cells": well}]}) == {
        "server-deaths: outcomes that went well"
    }
    assert missed("server-deaths", {"runs": []}) == {"server-deaths: outcomes that went well"}


def test_every_result_file_can_be_read() -> None:
    """All that are kept, and nothing of them but figures and goals."""
    for file in RESULTS.glob("*.json"):
        for each in goals.goals(file.stem, json.loads(file.read_text())):
            assert str(each).startswith(("ok", "MISSED", "  ") if each.limit is None else ("ok", "MISSED"))
    assert any(isinstance(each, goals.Goal) and each.what == "nccl: of a bare send" for each in goals.read(RESULTS))


@pytest.mark.parametrize(
    ("left", "why"), [("", "it holds nothing"), ("{}", "it holds nothing"), ('{"bytes": 31', "no JSON: ")]
)
def test_a_file_without_figures_is_named_and_the_others_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: str, why: str
) -> None:
    """All goals of the others were reached: it is that file that makes the program exit with 1."""
    (tmp_path / "peer.json").write_text(json.dumps(colocated(pause_gap_s=0.0359)))
    monkeypatch.setattr("sys.argv", ["goals.py", str(tmp_path)])
    assert goals.main() == 0
    (tmp_path / "colocated.json").write_text(left)
    assert goals.main() == 1
    last = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"UNREAD colocated.json: {why}") for line in last)
    assert last[-1].endswith(", 1 files not read")
    assert any(line.startswith("ok     peer: ") for line in last)
