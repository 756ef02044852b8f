"""Which versions engines may serve: the rule alone, and what a channel's ready list makes of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from weightbus.control.machine.effects import RoundEnded
from weightbus.control.machine.engine_registry import AllowedVersions
from weightbus.control.protocol.messages import (
    Alive,
    Digest,
    EngineHealth,
    HeldVersion,
    Outcome,
    Policy,
    Prepare,
    Step,
    Version,
)
from weightbus.control.server.metrics import Metrics, MetricSource, ObservationReporter

from ..world import Engine, Trainer, World


def held(version: int, table: str = "t") -> HeldVersion:
    return HeldVersion(version=Version(version), manifest=Digest("m" * 64), table=Digest(f"{table}{version}"))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.booleans()), max_size=12))
def test_what_is_allowed_is_the_committed_version_and_those_less_than_max_lag_before_it(
    commits: list[tuple[int, int, bool]],
) -> None:
    """Compared with a plain list of everything that was committed since the channel last went back."""
    window, story, version = AllowedVersions(), list[HeldVersion](), 50
    for number, (step, max_lag, rollback) in enumerate(commits):
        version = version - step if rollback else version + step
        new = held(version, f"{number}-")
        story = [new] if rollback else [*story, new]
        # A stricter policy in between forgets: what it closed is not opened again.
        story = [each for each in story if version - each.version <= max_lag]
        window = window.advanced_to(new, max_lag, rollback=rollback)
        assert {each.version for each in story} == {e.version for e in (new, *window.older)}
        assert all(window.allows(each) for each in story)
        assert not any(window.allows(held(each.version, "others")) for each in story)
        assert not window.allows(None)


def test_before_anything_is_committed_the_weights_of_a_launch_may_serve() -> None:
    """And nothing else: a version that the channel does not know may be anything, whichever engine claims it."""
    assert AllowedVersions().allows(None)
    assert not AllowedVersions(None, max_lag=3).allows(held(1))


def test_a_clean_engine_that_claims_what_the_channel_does_not_know_is_not_ready() -> None:
    """It came with a journal that was lost, or from another channel; a round takes it in, and then it is."""
    world = World()
    stranger, launched = world.engine("e0"), world.engine("e1")
    assert world.ready == ("e0", "e1")
    stranger.held = held(9)
    world.advance(1.0)
    assert world.ready == ("e1",)
    view = world.machine.status(world.now).channels["policy"].engines["e0"]
    assert view.reason == "holds version 9, which this channel has not committed"
    stranger.connect()
    world.settle()
    assert world.ready == ("e1",)
    assert world.publish(world.trainer(), 1).outcome is Outcome.COMMITTED
    assert world.ready == ("e0", "e1")
    assert launched.held == stranger.held


@pytest.fixture
def deployment() -> tuple[World, Trainer, Engine]:
    """Two engines that serve version 1, of which the second misses what comes; one version may be between them."""
    world = World()
    world.engine("e0")
    late = world.engine("e1")
    trainer = world.trainer()
    trainer.policy = Policy(max_lag=1)
    assert world.publish(trainer, 1).outcome is Outcome.COMMITTED
    return world, trainer, late


def miss(world: World, trainer: Trainer, late: Engine, version: int) -> None:
    late.fail(Prepare, Step.PREPARE)
    assert world.publish(trainer, version).outcome is Outcome.COMMITTED
    world.advance(1.0)


def test_an_engine_left_behind_serves_until_max_lag_and_waits_then(deployment: tuple[World, Trainer, Engine]) -> None:
    """It gets no requests while it is further behind, and does again once a round took it in."""
    world, trainer, late = deployment
    miss(world, trainer, late, 2)
    assert world.ready == ("e0", "e1")
    assert late.label == 1
    alive = late.got(Alive)[-1]
    assert isinstance(alive, Alive)
    assert (alive.committed, alive.max_lag) == (2, 1)
    miss(world, trainer, late, 3)
    assert world.ready == ("e0",)
    view = world.machine.status(world.now).channels["policy"].engines["e1"]
    assert (view.lag, view.reason) == (2, "prepare: broke; holds version 1, committed is 3, and max_lag is 1")
    assert world.publish(trainer, 4).outcome is Outcome.COMMITTED
    assert world.ready == ("e0", "e1")


def test_versions_are_numbers_of_steps_not_of_rounds(deployment: tuple[World, Trainer, Engine]) -> None:
    """One round may be several versions."""
    world, trainer, late = deployment
    miss(world, trainer, late, 3)
    assert world.ready == ("e0",)


@pytest.mark.parametrize("how", ["strict", "restart", "rollback", "dirty", "launch"])
def test_what_closes_the_window(deployment: tuple[World, Trainer, Engine], how: str) -> None:
    """A policy without lag, another life of the coordinator, a channel that went back, and weights of no version."""
    world, trainer, late = deployment
    if how == "strict":
        trainer.policy = Policy()
        miss(world, trainer, late, 2)
    elif how == "rollback":
        assert world.publish(trainer, 2).outcome is Outcome.COMMITTED
        trainer.rollback = True
        miss(world, trainer, late, 1)
    else:
        miss(world, trainer, late, 2)
        assert world.ready == ("e0", "e1")
        if how == "restart":
            world.restart()
        elif how == "dirty":
            late.health = EngineHealth.DIRTY
        else:
            late.held = None
        world.advance(2.0)
    assert world.ready == ("e0",)


def test_numbers_that_a_trainer_found_are_metrics(deployment: tuple[World, Trainer, Engine]) -> None:
    """As it said in its `Sent`, for each round; from a round without any on, so that an increase has a beginning."""
    world, trainer, _ = deployment
    metrics = Metrics(MetricSource.COORDINATOR)
    reporter = ObservationReporter(metrics)
    plain, found = trainer.try_say, {"nonfinite": 0, "differing": 0}
    trainer.try_say = lambda message, blob=None: plain(  # type: ignore[method-assign]
        msgspec.structs.replace(message, **found) if type(message).__name__ == "Sent" else message, blob
    )
    values = []
    for version, told in ((2, found.copy()), (3, {"nonfinite": 7, "differing": 2})):
        found.update(told)
        world.publish(trainer, version)
        for each in world.observed:
            if isinstance(each, RoundEnded) and each.done.version == version:
                reporter.observe(each)
        names = ("weightbus_nonfinite_elements_total", "weightbus_differing_replicas_total")
        values.append([metrics.registry.get_sample_value(name, {"channel": "policy"}) for name in names])
    assert values == [[0, 0], [7, 2]]


def test_how_long_training_stood_still_is_a_metric(deployment: tuple[World, Trainer, Engine]) -> None:
    """As the trainer said in its `Publish`; a trainer that did not wait adds nothing."""
    world, trainer, _ = deployment
    metrics = Metrics(MetricSource.COORDINATOR)
    reporter = ObservationReporter(metrics)
    plain = trainer.try_say
    trainer.try_say = lambda message, blob=None: plain(  # type: ignore[method-assign]
        msgspec.structs.replace(message, stood_s=1.5) if type(message).__name__ == "Publish" else message, blob
    )
    world.publish(trainer, 2)
    for each in world.observed:
        if isinstance(each, RoundEnded):
            reporter.observe(each)
    value = metrics.registry.get_sample_value
    assert value("weightbus_trainer_stood_seconds_sum", {"channel": "policy"}) == 1.5
    assert value("weightbus_trainer_stood_seconds_count", {"channel": "policy"}) == 1


def test_an_engine_that_loaded_the_committed_version_by_itself_is_told_to_serve_it(
    deployment: tuple[World, Trainer, Engine],
) -> None:
    """By its heartbeat, outside of any round. An engine with another, uncommitted version waits for the next round."""
    world, _, late = deployment
    committed = late.held
    assert committed is not None
    late.crash()
    late.live()
    world.settle()
    world.advance(5.0)
    assert world.ready == ("e0",)
    late.held = msgspec.structs.replace(committed, table=Digest("f" * 64))
    late.health = EngineHealth.PENDING
    world.advance(3.0)
    assert world.ready == ("e0",)
    late.held, late.weights = committed, 1
    world.advance(3.0)
    assert world.ready == ("e0", "e1")
    assert late.label == 1
    assert late.generating
