"""Forecasts beside what GPUs did: every run in tests/gpu/results, one set of constants for all of them.

The constants were taken from these runs, each from one part of one or two of them; that they fit all the others, of 16
to 61 GB, is what is shown. There is no run on several hosts yet to compare with. The small models (model-*.json) were
run before rounds were shortened: of these only bytes and tensors are compared.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightbus.trainer_agent.forecast import cost_model
from weightbus.trainer_agent.forecast.cost_model import RoundCost
from weightbus.trainer_agent.forecast.fleet import EngineLocation, Engines, FleetSpec, ForecastTransport, TrainerSpec
from weightbus.trainer_agent.forecast.forecast import Forecast
from weightbus.trainer_agent.forecast.traffic import Tensors

GPU = Path(__file__).parents[2] / "gpu"
FACTOR = 1.25
"""Between prediction and measurement, either way: of a round that is not the first, by the median of its kind."""

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B = {
    **QWEN3_8B, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 24, "num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768,
}  # fmt: skip
ONE = TrainerSpec(gpus=1)
"""The two ranks of colocated and peer runs share a process and a GPU."""
TWO = TrainerSpec(gpus=2, gpus_per_host=2, tp=2)

PLACES = {
    "colocated": (ONE, Engines(location=EngineLocation.GPUS)),
    "peer": (ONE, Engines(location=EngineLocation.HOSTS)),
    "colocated-48": (ONE, Engines(location=EngineLocation.GPUS)),
    "crosswise": (TWO, Engines(tp=2, location=EngineLocation.GPUS, shift=1)),
    "model-llama": (ONE, Engines(location=EngineLocation.GPUS)),
    "model-qwen3": (ONE, Engines(location=EngineLocation.GPUS)),
    "model-deepseek": (ONE, Engines(location=EngineLocation.GPUS)),
}


def recorded(name: str) -> Any:
    return json.loads((GPU / "results" / f"{name}.json").read_text())


def model_of(name: str) -> Mapping[str, object]:
    if not name.startswith("model-"):
        return {**QWEN3_30B_A3B, "num_hidden_layers": 48 if name.endswith("-48") else 24}
    config: dict[str, object] = json.loads((GPU / "models" / f"{name.removeprefix('model-')}.json").read_text())
    return config


BESIDE = {"crosswise": 1.6, "colocated-48": 1.3}
"""In place of `FACTOR` for SGLang's own way, which has work for the host with each tensor: compilers of another program
had cores of it while `crosswise` was measured, and hosts differ (2.3 s of `colocated-48` were 3.3 on another)."""


def near(predicted: float, measured: float, factor: float) -> None:
    assert measured / factor <= predicted <= measured * factor, f"predicted {predicted:.4f}, measured {measured:.4f}"


def step(found: RoundCost, name: str) -> float:
    return next(each.seconds for each in found.steps if each.name == name)


@pytest.mark.parametrize("name", PLACES)
def test_direct_rounds(name: str) -> None:
    """Bytes and tensors exactly; a steady round, an engine's pause and a request's wait within the factor."""
    trainer, engines = PLACES[name]
    forecast = Forecast(Tensors.parse(model_of(name)))
    found = forecast.round(FleetSpec(trainer, (engines,)))
    for layout in recorded(name)["layouts"].values():
        assert (forecast.tensors.total, len(forecast.tensors.specs)) == (layout["bytes"], layout["tensors"])
        if name.startswith("model-"):
            continue
        steady = layout["steady"]
        near(found.total_s, statistics.median(each["publish_s"] for each in steady), FACTOR)
        near(found.pause_s, statistics.median(each["engine_s"]["paused"] for each in steady), FACTOR)
        near(found.pause_s, statistics.median(each["pause_gap_s"] for each in steady), FACTOR)


@pytest.mark.parametrize("name", ["colocated", "colocated-48", "peer", "crosswise"])
def test_rounds_by_sglangs_buckets(name: str) -> None:
    """The same weights by CUDA IPC buckets: the transfer of an agent's first round, by its faster layout."""
    trainer, engines = PLACES[name]
    by_buckets = Engines(
        tp=engines.tp, location=engines.location, shift=engines.shift, transport=ForecastTransport.LOCAL
    )
    found = Forecast(Tensors.parse(model_of(name))).round(FleetSpec(trainer, (by_buckets,)))
    rounds = [layout["flattened_bucket"] for layout in recorded(name)["layouts"].values()]
    measured = min(each["trainer_s"]["transfer"] for each in rounds)
    near(step(found, "offer") + step(found, "transfer"), measured, BESIDE.get(name, FACTOR))


def test_rounds_by_sends() -> None:
    """NCCL to the other GPU: a whole steady round. Its engine took the version beside what it served."""
    forecast = Forecast(Tensors.parse(QWEN3_30B_A3B))
    found = forecast.round(FleetSpec(ONE, (Engines(location=EngineLocation.HOSTS, transport=ForecastTransport.SENDS),)))
    sent = recorded("nccl")["parts"]["speed"]
    assert forecast.tensors.total == sent["bytes"]
    steady = sent["sends"][2:]
    near(found.total_s, statistics.median(each["publish_s"] for each in steady), FACTOR)
    assert found.double_buffered_pause_s is not None
    near(found.double_buffered_pause_s, statistics.median(each["engine_s"]["paused"] for each in steady), FACTOR)


def test_engines_that_take_turns() -> None:
    """NCCL takes one of two servers on a GPU at a time: steady rounds of both, and what each is paused for its flip."""
    forecast = Forecast(Tensors.parse(QWEN3_30B_A3B))
    found = forecast.round(
        FleetSpec(ONE, (Engines(2, location=EngineLocation.HOSTS, transport=ForecastTransport.SENDS),), max_paused=1)
    )
    both = recorded("joiner")["with_both"][1:]  # in the first one group was new
    near(found.total_s, statistics.median(each["publish_s"] for each in both), FACTOR)
    assert found.double_buffered_pause_s is not None
    near(
        found.double_buffered_pause_s,
        statistics.median(one["paused"] for each in both for one in each["engine_s"].values()),
        FACTOR,
    )


def test_an_engine_that_joins() -> None:
    """From its `Hello` until it is ready, as a new engine and as one that came back; its figures are from these two."""
    forecast = Forecast(Tensors.parse(QWEN3_30B_A3B))
    found = forecast.joining_s(
        FleetSpec(ONE, (Engines(location=EngineLocation.HOSTS, transport=ForecastTransport.SENDS),))
    )
    assert found is not None
    measured = recorded("joiner")
    for joined in (measured, measured["again"]):
        assert joined["recorded_ahead"]
        near(found, joined["joiner_s"], FACTOR)


def test_what_a_joiner_adds_to_a_round_is_what_was_measured() -> None:
    """Its steps of planning by tensor; the rest of what it takes beyond a round of the same run, without a commit."""
    measured = recorded("joiner")
    joined = (measured, measured["again"])
    steps = [sum(one["sidecar_s"][f"step:transfer_{name}"] for name in ("layout", "plan", "expect")) for one in joined]
    planned = statistics.mean(steps)
    assert cost_model.JOIN_TENSOR_S.value == pytest.approx(planned / 9435, rel=0.01)
    commits = statistics.median(each["trainer_s"]["commit"] for each in measured["rounds"][2:])
    beyond = statistics.mean(one["joiner_s"] for one in joined) - (measured["normal_round_s"] - commits)
    assert cost_model.JOIN_S.value == pytest.approx(beyond - planned, rel=0.02)


def test_rounds_of_stages_that_broadcast() -> None:
    """Two pipeline stages, each its own part: a whole steady round, and the engine's pause."""
    forecast = Forecast(Tensors.parse(QWEN3_30B_A3B))
    stages = TrainerSpec(gpus=2, gpus_per_host=2, pp=2)
    found = forecast.round(
        FleetSpec(stages, (Engines(location=EngineLocation.HOSTS, transport=ForecastTransport.DISTRIBUTED),))
    )
    measured = recorded("stages")
    assert forecast.tensors.total == measured["bytes"]
    near(found.total_s, measured["stage_wise_s"], FACTOR)
    near(found.pause_s, measured["stage_wise_steps"]["engine_s"]["paused"], FACTOR)


@pytest.mark.parametrize(
    ("kind", "engines"),
    [
        ("ipc", Engines(location=EngineLocation.GPUS, transport=ForecastTransport.LOCAL)),
        ("nccl", Engines(location=EngineLocation.HOSTS, transport=ForecastTransport.DISTRIBUTED)),
        ("disk", Engines(location=EngineLocation.HOSTS, transport=ForecastTransport.DISK)),
    ],
)
def test_stock_rounds(kind: str, engines: Engines) -> None:
    """Whole tensors by a server's own interfaces: buckets on the same GPU, a broadcast to the other, files."""
    forecast = Forecast(Tensors.parse(QWEN3_8B))
    found = forecast.round(FleetSpec(TWO, (engines,)))
    stock = recorded("stock")
    assert forecast.tensors.total == stock["bytes"]
    rounds = stock["rounds"][kind][1:] or stock["rounds"][kind]  # the first one compiles kernels; of files there is one
    near(found.total_s, statistics.median(each["total_s"] for each in rounds), FACTOR)
    offered = step(found, "offer") + step(found, "transfer")  # in one at that time
    near(offered, statistics.median(each["seconds"]["transfer"] for each in rounds), FACTOR)
    near(found.pause_s, statistics.median(each["engine_seconds"]["paused"] for each in rounds), FACTOR)
