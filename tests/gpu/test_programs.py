"""What programs of this folder conclude, in which order they go to work, and with which weights. No GPU, no servers."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.gpu import direct, engines, int4, quantized_rounds, rig, stages
from weightbus.control.machine.routing import PREFERRED, choose
from weightbus.control.machine.states import TransferEnds
from weightbus.control.protocol.messages import TransportKind
from weightbus.dataplane.tensors import stored_tensors
from weightbus.engine_agent.engines.sglang.compatibility import missing
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.engine_agent.sidecar.topology import topology_of
from weightbus.trainer_agent.source import PipelineSource
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors

from ..control.world import engine_info, trainer_info
from ..engine_agent.engines.sglang.test_compatibility import facts

MODELS = Path(direct.__file__).parent / "models"


class Fleet:
    """A server, by the probabilities that it gives one time after the other."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        self._probabilities = list(probabilities)

    def logprobs(self, _place: str, _prompt: Sequence[int]) -> list[float]:
        return [self._probabilities.pop(0)]

    def tokens(self, _place: str) -> list[int]:
        return [3]

    def load(self, _place: str, _folder: Path) -> None:
        pass


def check(monkeypatch: pytest.MonkeyPatch, name: str, *probabilities: float) -> int4.Check:
    """Of unpacked weights, of those before, and of the server with INT4."""
    fleet = Fleet(probabilities)

    @contextlib.contextmanager
    def server(*_: Any) -> Generator[Fleet]:
        yield fleet

    monkeypatch.setattr(int4.Check, "_server", server)
    return int4.Check(argparse.Namespace(device="cpu", out=None), name, Path())


@pytest.mark.parametrize("before", [-1.0, float("nan")])
def test_what_makes_no_difference_is_no_proof(monkeypatch: pytest.MonkeyPatch, before: float) -> None:
    """Equal probabilities say nothing where other weights give the same."""
    made = check(monkeypatch, "experts", -1.0, before)
    with pytest.raises(RuntimeError, match="do not depend on what was quantized"):
        made.plain()
    assert made.found["equal"] is False


@pytest.mark.parametrize(("packed", "equal"), [(-1.02, True), (-1.03, False), (float("nan"), False)])
def test_kernels_may_differ_by_less_than_quantizing(
    monkeypatch: pytest.MonkeyPatch, packed: float, equal: bool
) -> None:
    """A quarter of it is the limit."""
    made = check(monkeypatch, "experts", -1.0, -1.1, packed)
    made.plain()
    assert made.found["equal"] is False
    made.int4()
    assert made.found["equal"] is equal


def test_a_speculating_server_is_refused_in_the_words_that_its_case_asks_for(tmp_path: Path) -> None:
    """From what its sidecar tells, through what the coordinator makes of it."""
    speculates = facts(speculative="EAGLE", loaders=(LOADER,))
    told = topology_of(missing(speculates), PREFERRED, tmp_path, (), {})
    route = choose(TransferEnds(trainer_info(transports=(TransportKind.LOCAL,)), engine_info(), None, told))
    assert route.transport is None
    assert engines.CASES["draft"].refused in route.reason


def test_rounds_that_are_read_while_they_are_made_are_told_apart() -> None:
    """By the steps that their sidecars counted, also where one took no time; the wait is no part of the copy."""
    both = ["step:transfer_copy", "step:transfer_table", "step:transfer_wait"]
    steady: list[dict[str, Any]] = [
        {
            "steps": both,
            "sidecar_s": {"step:transfer_copy": 0.1, "step:transfer_table": 0.2, "step:transfer_wait": 0.4},
        },
        {"steps": both, "sidecar_s": {"step:transfer_copy": 0.1, "step:transfer_table": 0.4}},
        {"steps": both[:1], "sidecar_s": {"step:transfer_copy": 0.1}},
    ]

    assert quantized_rounds.ways(steady) == {
        "rounds": 3, "open": 2, "transfer_table_s": pytest.approx(0.3), "pipelined": 2, "transfer_wait_s": 0.2,
    }  # fmt: skip
    assert quantized_rounds.ways(steady[2:]) == {
        "rounds": 1, "open": 0, "transfer_table_s": None, "pipelined": 0, "transfer_wait_s": None,
    }  # fmt: skip


class StagedSource:
    """Of three tensors in two stages, as far as it is asked."""

    model, root, device, head_dim, rank = "m", True, torch.device("cpu"), None, 0

    def tensors(self) -> list[Any]:
        return []

    def roots(self) -> list[int]:
        return [0, 1, 1]

    def assemble(self, *_: Any) -> None:
        pass

    def agree(self, blob: bytes | None) -> bytes:
        return blob or b""

    def collect(self, blob: bytes) -> list[bytes]:
        return [blob]


def test_a_source_that_is_to_be_gathered_has_no_stages() -> None:
    """Else the two ways of the comparison would be one, and equal."""
    assert isinstance(StagedSource(), PipelineSource)
    assert not isinstance(stages.Gathered(StagedSource()), PipelineSource)


def test_members_of_a_group_share_no_gpu() -> None:
    """A stage with the worker; who gathers with the other rank; and with enough GPUs nobody with anybody."""
    for devices in (2, 3, 8):
        engine, by_stage, gathered = stages.seats(devices).values()
        assert engine not in by_stage
        assert gathered[0] not in (engine, gathered[1])
        assert max(engine, *by_stage, *gathered) < devices
    assert len({engine, *by_stage}) == len({engine, *gathered}) == 3
    with pytest.raises(ValueError, match="1 GPUs"):
        stages.seats(1)


def measured(bytes_: int, version_bytes: int, copy_s: float, plain_s_per_byte: float) -> dict[str, Any]:
    """What `direct.publish` found of one layout, and a plain copy of as many bytes."""
    report = {
        "sidecar_s": {"step:transfer_copy": copy_s, "call:update_weights_from_tensor": 1.0},
        "outcome": "committed", "http_calls": 4,
    }  # fmt: skip
    layout = {
        "bytes": bytes_, "version_bytes": version_bytes, "tensors": 10, "first": report, "flattened_bucket": report,
        "steady": [report], "equal": True,
    }  # fmt: skip
    return {"layouts": {"ep2": layout}, "device_copy_s": plain_s_per_byte * bytes_, "complete": True}


@pytest.mark.parametrize(("counted", "ratio"), [(100, 0.97), (124, 1.2)])
def test_a_copy_that_is_faster_than_a_plain_one_fails_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int, ratio: float
) -> None:
    """Of 124 bytes of a version an engine takes 100: counted by the version, that is more than hardware does."""
    found = measured(counted, 124, copy_s=1.0, plain_s_per_byte=0.0097)
    found |= direct.summary(found)
    (tmp_path / "result.json").write_text(json.dumps({"colocated": found}))
    monkeypatch.setattr(sys, "argv", ["direct.py", "--device=cpu"])
    (result,) = direct.write(argparse.Namespace(device="cpu", out=None), tmp_path, rig.TINY, "", "").values()

    assert result["of_plain_copy"] == pytest.approx(ratio, abs=0.01)
    assert result["equal"] is (counted == 100)
    assert ("fewer bytes were moved than counted" in result["problem"]) is (counted == 124)


def test_every_layout_is_held_against_the_plain_copy() -> None:
    """Also the faster one, whose figures are not those on top."""
    found = measured(100, 100, copy_s=1.0, plain_s_per_byte=0.0097)
    found["layouts"]["tp2"] = measured(100, 100, copy_s=0.5, plain_s_per_byte=0.0097)["layouts"]["ep2"]

    assert direct.summary(found)["layout"] == "ep2"
    assert "1.94 of the speed of a plain copy" in direct.summary(found)["problem"]


@pytest.mark.parametrize("ratio", [None, 0.5, rig.MOST_OF_PLAIN])
def test_what_hardware_does_is_no_problem(ratio: float | None) -> None:
    """A ratio that is unknown is none: on a machine without a plain copy there is nothing to compare with."""
    assert not rig.too_fast(ratio, "a bare send")


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_another_model_is_compared_in_the_same_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], equal: bool, status: int
) -> None:
    """Each with servers of its own and under a name of its own; the program fails with either."""
    ran: list[str | None] = []

    def run(_args: argparse.Namespace, config: str | None) -> dict[str, Any]:
        ran.append(config)
        return {f"colocated-{config}" if config else "colocated": {"equal": equal or not config}}

    monkeypatch.setattr(direct, "run", run)
    monkeypatch.setattr(sys, "argv", ["direct.py", "--also", "few", "--also", "many"])

    assert direct.main() == status
    assert ran == [None, "few", "many"]
    assert json.loads(capsys.readouterr().out).keys() == {"colocated", "colocated-few", "colocated-many"}


class Status:
    """The HTTP port of a sidecar."""

    def __init__(self, takes: dict[str, int]) -> None:
        self._takes = takes

    def get(self, url: str) -> httpx.Response:
        return httpx.Response(200, json={"takes": self._takes}, request=httpx.Request("GET", url))


def test_bytes_are_those_of_the_sidecars_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan for the transport there is no figure: the manifest's would be the wrong one."""
    fleet = rig.Fleet({"engines": {"e": {"server": 1, "sidecar": 2}}})
    monkeypatch.setattr(fleet, "_http", Status({"direct": 100}))

    assert fleet.takes("e", "direct") == 100
    with pytest.raises(RuntimeError, match="no plan for sends"):
        fleet.takes("e", "sends")


SHAPES = sorted(path for path in MODELS.glob("*.json") if path.stem in {"glm-4.5", "deepseek-v3", "qwen3-next"})


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_shapes_for_one_gpu_have_a_prediction_layer_in_the_files(path: Path, tmp_path: Path) -> None:
    """Trainer and engine hold the rest of it both, in 78 GiB: two ranks hold what is not of experts twice."""
    hf = json.loads(path.read_text())
    rig.write_model(tmp_path / "model", hf)
    stored = stored_tensors(tmp_path / "model")
    model = HFModel.parse({**hf, "num_nextn_predict_layers": 0})
    without = {each.name: each for each in hf_tensors(model, "bfloat16")}
    experts = sum(each.nbytes for name, each in without.items() if ".experts." in name)
    others = sum(each.nbytes for each in without.values()) - experts
    buckets = 3 * max(direct.BUCKET_BYTES, *(each.nbytes for each in without.values()))
    noise = experts // sum(each.experts for each in model.layers) * 2 // 3  # the server makes that of a whole parameter
    plain, contexts = 8 * 10**9, 6 * 2**30

    assert without.keys() < stored.keys()
    assert experts > 10 * 2**30
    assert 2 * experts + 3 * others + buckets + noise + plain + contexts < 78 * 2**30


def test_a_shrunk_model_has_all_of_its_layers() -> None:
    """And heads of keys for all heads where it had them."""
    hf = json.loads((MODELS / "deepseek-v3.json").read_text())
    small = rig.shrunk(hf)

    assert small.keys() == hf.keys()
    assert small["num_hidden_layers"] == hf["num_hidden_layers"]
    assert small["num_key_value_heads"] == small["num_attention_heads"] < hf["num_attention_heads"]
    assert sum(each.nbytes for each in hf_tensors(HFModel.parse(small), "bfloat16")) < 2**22


LEFT_OVER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import rig, torch
hf = rig.shrunk(json.loads(Path(sys.argv[2]).read_text()))
rig.prepare(hf, "cpu")
from shards import LayoutShards
told = {}
for predictions in (False, True):
    source = LayoutShards(hf, torch.device("cpu"), 2, predictions=predictions, ep=2, etp=1, dp=2)
    told[str(predictions)] = [sorted(each.name for each in source.left), [each.name for each in source.tensors()]]
    source.refill(1)
print(json.dumps(told))
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "prefix"), [("glm-4.5", "model.layers.3."), ("deepseek-v3", "model.layers.2."), ("qwen3-next", "mtp.")]
)
def test_a_prediction_layer_is_left_unless_it_is_trained(name: str, prefix: str) -> None:
    """What is sent and what is left are the files of the served checkpoint (N64)."""
    if name == "qwen3-next" and not version("megatron-core").startswith("0.19"):
        pytest.skip("Megatron-core has gated delta nets since 0.19")
    argv = [sys.executable, "-c", LEFT_OVER, os.fspath(MODELS.parent), os.fspath(MODELS / f"{name}.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    left, sent = told["False"]
    assert left == [prefix]
    assert not any(each.startswith(prefix) for each in sent)
    left, everything = told["True"]
    assert not left
    assert set(everything) - set(sent) == {each for each in everything if each.startswith(prefix)} != set()


FILLED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import rig, torch
rig.play_cuda("cpu")
from shards import LayoutShards
told = []
for layout in ({"tp": 2}, {"ep": 2, "etp": 1, "dp": 2}):
    source = LayoutShards(rig.TINY_MOE, torch.device("cpu"), 2, **layout)
    source.refill(1)
    held = []
    for rank in source._ranks:
        pieces = rank.shards
        boxes = [*zip(pieces.boxes.space.tolist(), pieces.boxes.start.tolist(), pieces.boxes.stop.tolist())]
        held.append([[box for box, at in zip(boxes, pieces.storage.tolist()) if at == index]
                     for index in range(len(rank.parameters))])
    first, second = (rank.parameters for rank in source._ranks)
    alike = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
    means = [(one.dim(), round(float(one.float().mean()), 1)) for one in [*first, *second]]
    told.append([alike, [one == other for one, other in zip(*held, strict=True)], sorted(set(means))])
print(json.dumps(told))
"""


@pytest.mark.real
def test_ranks_hold_other_weights_where_they_hold_other_parts() -> None:
    """Of the same part the same; and no matrix has another mean than 0, which would drown what comes after it."""
    argv = [sys.executable, "-c", FILLED, os.fspath(Path(engines.__file__).parent)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr[-2000:]
    for alike, same_part, means in json.loads(done.stdout.splitlines()[-1]):
        assert alike == same_part
        assert 0 < sum(same_part) < len(same_part)
        assert means == [[1, 1.0], [2, 0.0]]
