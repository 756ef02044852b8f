"""Bytes and rates become seconds by a few rules; each of them by itself, beside runs that only see all together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightbus.trainer_agent.forecast import cost_model
from weightbus.trainer_agent.forecast.cost_model import LinkLoad
from weightbus.trainer_agent.forecast.fleet import (
    EngineLocation,
    Engines,
    FleetSpec,
    ForecastTransport,
    Links,
    TrainerSpec,
)
from weightbus.trainer_agent.forecast.forecast import Forecast
from weightbus.trainer_agent.forecast.traffic import Tensors

MODEL = Path(__file__).parents[2] / "gpu" / "models" / "deepseek.json"
TWO = TrainerSpec(gpus=2, gpus_per_host=2, tp=2)


@pytest.fixture(scope="module")
def forecast() -> Forecast:
    return Forecast(Tensors.parse(json.loads(MODEL.read_text())))


def load(forecast: Forecast, fleet: FleetSpec, link: str) -> LinkLoad:
    """The busiest link of this kind."""
    return next(each for each in forecast.round(fleet).loads if each.link == link)


@pytest.mark.parametrize("nics", [1, 2, 5])
def test_what_leaves_a_host_goes_over_all_of_its_nics(forecast: Forecast, nics: int) -> None:
    """However many GPUs it has; without a number each GPU has one of its own."""
    fleet = FleetSpec(TWO, (Engines(2, location=EngineLocation.OTHER),), Links(nic=10.0, nics_per_host=nics))
    out = load(forecast, fleet, "NICs out of host")
    assert out.gigabytes == pytest.approx(forecast.traffic(fleet).nbytes.sum() / 1e9)
    assert out.seconds == pytest.approx(out.gigabytes / (10.0 * nics))
    own = load(forecast, FleetSpec(TWO, fleet.engines, Links(nic=10.0)), "NIC out of GPU")
    assert own.seconds == pytest.approx(own.gigabytes / 10.0)


def test_nvlink_is_slower_where_both_ways_are_used(forecast: Forecast) -> None:
    """Workers on each other's GPUs read both ways at once; those on other GPUs of the host one way."""
    crosswise = FleetSpec(
        TWO,
        (Engines(tp=2, location=EngineLocation.GPUS, shift=1, transport=ForecastTransport.DIRECT),),
        Links(nvlink=100.0),
    )
    both = load(forecast, crosswise, "NVLink into GPU")
    assert both.seconds == pytest.approx(both.gigabytes / (100.0 * cost_model.BOTH_WAYS.value))
    aside = FleetSpec(
        TWO, (Engines(tp=2, location=EngineLocation.HOSTS, transport=ForecastTransport.DIRECT),), Links(nvlink=100.0)
    )
    one = load(forecast, aside, "NVLink into GPU")
    assert one.seconds == pytest.approx(one.gigabytes / 100.0)


@pytest.mark.parametrize("nics", [1, 100])
def test_one_gpu_gets_no_more_than_one_nic_brings(forecast: Forecast, nics: int) -> None:
    """However many its host has: they would be those of other GPUs."""
    fleet = FleetSpec(TWO, (Engines(1, location=EngineLocation.OTHER),), Links(nic=10.0, nics_per_host=nics))
    into = load(forecast, fleet, "NIC into GPU")
    assert into.seconds == pytest.approx(into.gigabytes / 10.0)
    assert forecast.round(fleet).total_s > into.seconds


def test_a_stage_on_another_host_broadcasts_over_its_nic(forecast: Forecast) -> None:
    """An engine beside the first stage gets nothing by NVLink from the second: the slower link counts."""
    beside = Engines(1, location=EngineLocation.HOSTS, transport=ForecastTransport.DISTRIBUTED)
    apart = TrainerSpec(gpus=2, gpus_per_host=1, pp=2)
    assert load(forecast, FleetSpec(apart, (beside,)), "broadcast over the NIC into GPU").where == "GPU 2"
    together = TrainerSpec(gpus=2, gpus_per_host=2, pp=2)
    assert load(forecast, FleetSpec(together, (beside,)), "broadcast over NVLink into GPU").where == "GPU 2"


def test_with_memory_for_it_a_request_waits_for_the_flip_alone(forecast: Forecast) -> None:
    """And where one engine reads in its pause that says nothing."""
    sends = Engines(1, location=EngineLocation.OTHER, transport=ForecastTransport.SENDS)
    found = forecast.round(FleetSpec(TWO, (sends,), Links(nic=0.1)))
    assert found.double_buffered_pause_s is not None
    assert found.double_buffered_pause_s < 0.05 < found.pause_s
    mixed = forecast.round(
        FleetSpec(TWO, (sends, Engines(tp=2, location=EngineLocation.GPUS, transport=ForecastTransport.DIRECT)))
    )
    assert mixed.double_buffered_pause_s is None


def test_stages_that_broadcast_gather_beside_each_other(forecast: Forecast) -> None:
    """Each its own part, and digests it; where anybody besides wants files, one rank does that for all."""
    trainer = TrainerSpec(gpus=4, gpus_per_host=4, tp=2, pp=2)

    def gathered(*ways: ForecastTransport) -> tuple[float, float]:
        fleet = FleetSpec(trainer, tuple(Engines(2, location=EngineLocation.OTHER, transport=way) for way in ways))
        digest = next(step.seconds for step in forecast.round(fleet).steps if step.name == "digest")
        return load(forecast, fleet, "gathering over NVLink into GPU").gigabytes, digest

    one = gathered(ForecastTransport.DISK)
    assert gathered(ForecastTransport.DISTRIBUTED, ForecastTransport.DISK) == one
    assert all(
        mine < 0.7 * all_of_it for mine, all_of_it in zip(gathered(ForecastTransport.DISTRIBUTED), one, strict=True)
    )


def test_a_barrier_takes_what_was_measured() -> None:
    """The slower one of control.json, by agent."""
    measured = json.loads((MODEL.parents[2] / "bench" / "results" / "control.json").read_text())
    each = max(measured["barrier_ms"].values()) / 1000 / measured["agents"]
    assert cost_model.BARRIER_ENGINE_S.value == pytest.approx(each, rel=0.05)
