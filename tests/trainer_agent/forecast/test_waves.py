"""Engines that take turns (`max_paused`), beside sums by hand and beside fleets of one wave's engines."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest

from weightbus.trainer_agent.forecast import cost_model
from weightbus.trainer_agent.forecast.cost_model import RoundCost
from weightbus.trainer_agent.forecast.fleet import (
    EngineLocation,
    Engines,
    FleetSpec,
    ForecastTransport,
    Links,
    TrainerSpec,
    place_engines,
    waves,
)
from weightbus.trainer_agent.forecast.forecast import Forecast
from weightbus.trainer_agent.forecast.traffic import Tensors

GPU = Path(__file__).parents[2] / "gpu"
LLAMA = json.loads((GPU / "models" / "llama.json").read_text())
TWO = TrainerSpec(gpus=2, gpus_per_host=2, tp=2)
ELSEWHERE = Engines(5, location=EngineLocation.OTHER, transport=ForecastTransport.SENDS)
FLEETS = {
    "sends": FleetSpec(TWO, (ELSEWHERE,)),
    "direct": FleetSpec(TWO, (Engines(2, location=EngineLocation.GPUS),)),
    "distributed": FleetSpec(TWO, (Engines(3, 2, transport=ForecastTransport.DISTRIBUTED),)),
    "sends and direct": FleetSpec(
        TWO, (Engines(2, transport=ForecastTransport.SENDS), Engines(1, 2, location=EngineLocation.GPUS))
    ),
    "disk and direct": FleetSpec(
        TWO, (Engines(2, transport=ForecastTransport.DISK), Engines(2, location=EngineLocation.GPUS))
    ),
}


@pytest.fixture(scope="module")
def forecast() -> Forecast:
    return Forecast(Tensors.parse(LLAMA))


def seconds(found: RoundCost, name: str) -> float:
    return next(step.seconds for step in found.steps if step.name == name)


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("more", [0, 1, 1000])
def test_as_many_as_there_are_is_all_at_once(forecast: Forecast, name: str, more: int) -> None:
    """And then nobody is said to serve."""
    fleet = FLEETS[name]
    engines = sum(group.count for group in fleet.engines)
    normal = forecast.round(fleet)
    assert (normal.waves, normal.serving) == (1, 0)
    assert forecast.round(FleetSpec(fleet.trainer, fleet.engines, max_paused=engines + more)) == normal


@pytest.mark.parametrize("name", FLEETS)
def test_what_comes_before_the_first_wave_comes_once(forecast: Forecast, name: str) -> None:
    """Of all engines together, whatever the first wave's way is."""
    fleet = FLEETS[name]
    normal = forecast.round(fleet)
    found = forecast.round(FleetSpec(fleet.trainer, fleet.engines, max_paused=1))
    for step in ("acquire", "digest", "announce", "prepare", "commit"):
        assert seconds(found, step) == seconds(normal, step)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_one_at_a_time_by_hand(forecast: Forecast, count: int) -> None:
    """Every engine of one worker gets the whole model over its NIC, and its own barrier in place of everybody's."""
    engines = (Engines(count, location=EngineLocation.OTHER, transport=ForecastTransport.SENDS, gpus_per_host=1),)
    found = forecast.round(FleetSpec(TrainerSpec(), engines, Links(nic=10.0), max_paused=1))
    size = forecast.tensors.total / 1e9
    alone = cost_model.BARRIER_ENGINE_S.value
    stands = [
        cost_model.PAUSE_S.value + alone,
        size / 10.0 + cost_model.CALL_S.value + alone,
        size / cost_model.PROOF_GB_S.value + cost_model.VERIFY_S.value + alone,
        cost_model.RESUME_S.value + alone,
    ]
    before = cost_model.ACQUIRE_S.value + cost_model.ANNOUNCE_S.value + cost_model.PREPARE_S.value + count * alone
    digest = size / cost_model.DIGEST_GB_S.value + len(forecast.tensors.specs) * cost_model.DIGEST_TENSOR_S.value
    # The first wave's version is committed, and every later one's epoch is on the disk before it.
    turn = cost_model.OFFER_S.value + sum(stands) + cost_model.COMMIT_S.value
    assert found.total_s == pytest.approx(before + digest + count * turn)
    assert found.pause_s == pytest.approx(sum(stands) - (stands[0] + stands[-1]) / 2 + cost_model.COMMIT_S.value)
    assert (found.waves, found.serving) == (count, count - 1)
    assert seconds(found, "commit") == cost_model.COMMIT_S.value
    assert found.loads[0].gigabytes == pytest.approx(size)


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_every_engine_has_one_turn(most: int) -> None:
    """In the order of the groups, as many at a time as may be, on the GPUs that it has anyway."""
    placement = place_engines(
        FleetSpec(
            TWO,
            (Engines(2, location=EngineLocation.GPUS), Engines(3, 2, location=EngineLocation.OTHER)),
            max_paused=most,
        )
    )
    found = [[gpus for group in wave.groups for gpus in group.gpu] for wave in waves(placement, most)]
    assert [gpus for wave in found for gpus in wave] == [gpus for group in placement.groups for gpus in group.gpu]
    assert len(found) == ceil(5 / most)
    assert {len(wave) for wave in found[:-1]} <= {most}
    assert 1 <= len(found[-1]) <= most
    ways = {gpus: group.transport for group in placement.groups for gpus in group.gpu}
    shown = {gpus: group.transport for wave in waves(placement, most) for group in wave.groups for gpus in group.gpu}
    assert shown == ways


def test_a_wave_is_a_round_of_its_engines(forecast: Forecast) -> None:
    """Two and three engines, two at a time: both of the first kind, two of the second, and one."""
    links = Links(nic=3.0, nics_per_host=2)
    some, others = (Engines(2, 2, location=EngineLocation.OTHER), Engines(3, location=EngineLocation.OTHER))
    found = forecast.round(FleetSpec(TWO, (some, others), links, max_paused=2))
    alone = [
        forecast.round(FleetSpec(TWO, (engines,), links))
        for engines in (some, Engines(2, location=EngineLocation.OTHER), Engines(1, location=EngineLocation.OTHER))
    ]
    for step in ("pause", "transfer", "verify", "resume"):
        assert seconds(found, step) == pytest.approx(sum(seconds(each, step) for each in alone))
    assert seconds(found, "digest") == seconds(alone[0], "digest")
    assert seconds(found, "prepare") == pytest.approx(
        cost_model.PREPARE_S.value + 5 * cost_model.BARRIER_ENGINE_S.value  # all are asked at once
    )
    assert (found.waves, found.serving) == (3, 3)
    # Only the first commits.
    assert found.pause_s == pytest.approx(
        max(alone[0].pause_s, *(each.pause_s - cost_model.COMMIT_S.value for each in alone[1:]))
    )
    longest = max(alone, key=lambda each: seconds(each, "transfer") + seconds(each, "verify"))
    assert [(load.gigabytes, load.seconds) for load in found.loads] == [
        (load.gigabytes, load.seconds) for load in longest.loads
    ]


def test_files_are_written_for_every_wave(forecast: Forecast) -> None:
    """A wave has an epoch of its own, and a checkpoint; its hosts read only that."""
    engines = (Engines(3, transport=ForecastTransport.DISK, gpus_per_host=1),)
    found = forecast.round(FleetSpec(TrainerSpec(), engines, Links(storage=1.0), max_paused=2))
    size = forecast.tensors.total / 1e9
    moved = (1 + 2) * size + (1 + 1) * size
    calls = 2 * cost_model.CALL_S.value + 3 * cost_model.BARRIER_ENGINE_S.value
    assert seconds(found, "transfer") == pytest.approx(moved + calls)
    assert found.loads[0].gigabytes == pytest.approx(3 * size)


def test_a_joiner_is_said_of_sends_alone(forecast: Forecast) -> None:
    """Another way was not measured; neither the number of other engines nor `max_paused` counts."""
    one = forecast.joining_s(FleetSpec(TWO, (Engines(1, transport=ForecastTransport.SENDS),)))
    assert one is not None
    assert (
        one
        == forecast.joining_s(FleetSpec(TWO, (ELSEWHERE,)))
        == forecast.joining_s(FleetSpec(TWO, (ELSEWHERE,), max_paused=2))
    )
    assert forecast.joining_s(FleetSpec(TWO, (ELSEWHERE, Engines(1, transport=ForecastTransport.DISK)))) is None
    assert forecast.joining_s(FLEETS["direct"]) is None
    slower = forecast.joining_s(FleetSpec(TWO, (ELSEWHERE, Engines(1, 2, transport=ForecastTransport.SENDS))))
    assert slower == one  # of two workers each gets a part
