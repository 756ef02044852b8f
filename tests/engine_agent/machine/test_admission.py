"""Admission of requests: no request begins with a version outside of its bounds."""

from __future__ import annotations

import random

import pytest

from weightbus.control.protocol import MAX_VERSION
from weightbus.engine_agent.machine.admission import (
    WAITS_S,
    Admission,
    AdmissionVerdict,
    BadBounds,
    VersionBounds,
    admit,
)
from weightbus.engine_agent.machine.events import OrphanPolicy
from weightbus.engine_agent.machine.weight_state import GENERATES

from ..world import World

ADMITTED, OUT, UNCLEAN = AdmissionVerdict.ADMITTED, AdmissionVerdict.OUT_OF_BOUNDS, AdmissionVerdict.UNCLEAN
ANY = VersionBounds()


def asked(world: World, bounds: VersionBounds = ANY, trouble: str = "") -> Admission:
    return admit(bounds, world.machine.view(), world.now, trouble)


def exactly(version: int) -> VersionBounds:
    return VersionBounds(version, version)


# -- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ([], None, None),
        ([("min", ""), ("max", ""), ("exact", "")], None, None),
        ([("min", "3")], 3, None),
        ([("max", "0")], None, 0),
        ([("exact", "7")], 7, 7),
        ([("min", "3"), ("max", "9"), ("exact", "7")], 7, 7),
        ([("min", "3"), ("min", "3")], 3, None),
        ([("min", "3"), ("min", "")], 3, None),
        ([("min", str(MAX_VERSION))], MAX_VERSION, None),
        ([("min", "007")], 7, None),
    ],
)
def test_bounds(given: list[tuple[str, str]], least: int | None, most: int | None) -> None:
    """`exact` is both ends, and an empty value, as a proxy sends it for a header that is not there, is none."""
    assert VersionBounds.read(given) == VersionBounds(least, most)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([("minimum", "3")], "'minimum' is no bound"),
        ([("min", "-1")], "min is '-1'"),
        ([("min", "3.0")], "expected is a version from 0"),
        ([("max", "seven")], "max is 'seven'"),
        ([("max", "7, 8")], "max is '7, 8'"),
        ([("max", "٣")], "max is"),
        ([("max", "²")], "max is"),
        ([("exact", str(MAX_VERSION + 1))], "exact is"),
        ([("exact", "9" * 5000)], "exact is"),
        ([("min", "3"), ("min", "4")], "min is given twice"),
        ([("min", "4"), ("max", "3")], "no version is within min = 4, max = 3"),
        ([("min", "8"), ("exact", "7")], "no version is within min = 8, exact = 7"),
    ],
)
def test_bad_bounds(given: list[tuple[str, str]], said: str) -> None:
    """They are refused with what was found, not guessed at, and the text stays short."""
    with pytest.raises(BadBounds) as refused:
        VersionBounds.read(given)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 200


def test_launch_weights_are_older_than_every_version() -> None:
    """No lower bound admits them, every upper bound does."""
    world = World()
    assert asked(world) == Admission(ADMITTED, (None,))
    assert asked(world, VersionBounds(most=0)).verdict is ADMITTED
    refused = asked(world, VersionBounds(least=0))
    assert (refused.verdict, refused.reason) == (OUT, "holds the weights of its launch")


# -- states of the weights -------------------------------------------------------------------------------------------


def test_between_rounds_the_version_decides() -> None:
    """One version is served, and each bound is compared with it."""
    world = World()
    world.to_serving()
    for bounds in (ANY, VersionBounds(7), VersionBounds(most=7), exactly(7), VersionBounds(3, 9)):
        assert asked(world, bounds) == Admission(ADMITTED, (7,))
    for bounds in (VersionBounds(8), VersionBounds(most=6), exactly(6), exactly(8)):
        assert asked(world, bounds) == Admission(OUT, (7,), "holds version 7")


def test_from_the_validation_on_the_coming_version_counts_too() -> None:
    """It may be swapped in before the first token, so an upper bound waits, and a lower one that both meet does not."""
    world = World()
    world.to_serving()
    world.prepare(2, 8)
    assert asked(world, exactly(7)).verdict is ADMITTED
    world.end()
    refused = asked(world, exactly(7))
    assert refused == Admission(OUT, (7, 8), "holds version 7, and version 8 is coming")
    for step in (lambda: world.pause(2), world.end, lambda: world.transfer(2, 8)):
        step()
        assert asked(world).versions == (7, 8)
        assert asked(world, VersionBounds(7)).verdict is ADMITTED
        for bounds in (VersionBounds(8), exactly(7), exactly(8), VersionBounds(7, 8)):
            assert asked(world, bounds).verdict is OUT
    for step in (world.end, world.end):  # received; verified: the old weights are gone
        step()
        assert asked(world, VersionBounds(8)) == Admission(ADMITTED, (8,))
        assert asked(world, exactly(8)).reason == "holds version 8, and is in a round"
    world.commit(2, 8)
    world.end()
    assert asked(world, exactly(8)) == Admission(ADMITTED, (8,))


def test_a_rollback_is_a_coming_version() -> None:
    """A lower bound that it would break is refused from its validation on."""
    world = World()
    world.to_serving()
    world.prepare(2, 5)
    world.end()
    assert asked(world, VersionBounds(6)).verdict is OUT
    assert asked(world, VersionBounds(5)).verdict is ADMITTED


@pytest.mark.parametrize("dirty", [True, False])
def test_a_failed_transfer(dirty: bool) -> None:
    """Mixed weights refuse every request, at once; untouched ones are the old version again."""
    world = World()
    world.to_serving()
    world.to_paused(2, 8)
    world.transfer(2, 8)
    world.fail(dirty=dirty)
    if dirty:
        assert asked(world).verdict is UNCLEAN
        assert "it broke" in asked(world).reason
    world.abort(2)
    if not dirty:
        world.end()
    assert asked(world, exactly(7)).verdict is (UNCLEAN if dirty else ADMITTED)


def test_a_verified_version_without_its_commit_is_not_waited_for_without_a_round() -> None:
    """Once the round is over the server stays paused: requests go elsewhere."""
    world = World()
    world.to_loaded()
    assert asked(world).verdict is ADMITTED
    world.abort()
    assert asked(world).verdict is UNCLEAN


def test_repairs_are_not_waited_for() -> None:
    """A round that brings a dirty server back has failed there before: requests wait for its end elsewhere."""
    world = World()
    world.to_paused()
    world.transfer()
    world.fail(dirty=True)
    world.prepare(2, 8)
    world.end()
    world.transfer(2, 8)
    assert asked(world).verdict is UNCLEAN


def test_a_long_pause_refuses() -> None:
    """Requests wait in the server as long as a round usually takes, not for a coordinator that is gone."""
    world = World()
    world.to_loaded()
    world.now = (world.machine.view().paused_at or 0.0) + WAITS_S - 0.01
    assert asked(world).verdict is ADMITTED
    world.now += 0.02
    assert asked(world) == Admission(UNCLEAN, (), "paused for 30 s, loaded")


def test_servers_that_are_gone_unknown_or_in_trouble() -> None:
    """Nothing is admitted that no process answers, or of whose weights nothing is known."""
    assert asked(World(up=False)).verdict is UNCLEAN
    assert asked(World(label="7")).verdict is UNCLEAN
    world = World()
    assert asked(world, trouble="several servers answer") == Admission(UNCLEAN, (), "several servers answer")
    world.to_serving()
    world.relaunched()
    assert asked(world).verdict is UNCLEAN
    world = World()
    world.to_serving()
    world.gone()
    assert asked(world).verdict is UNCLEAN


def test_an_orphan_that_the_policy_serves_is_served() -> None:
    """`serve_verified` says that its answers are wanted."""
    world = World(orphans=OrphanPolicy.SERVE_VERIFIED)
    world.to_loaded()
    world.tick(heard=True)
    while world.doing is None:
        world.tick(1.0)
    world.end()
    assert asked(world, VersionBounds(7)).verdict is ADMITTED


class Storm:
    """Rounds that fail anywhere, and requests that come at any moment and begin as soon as the server generates."""

    def __init__(self, seed: int) -> None:
        self.world, self.random = World(), random.Random(seed)
        self.epoch, self.version, self.told = 0, 0, 3
        self.waiting: list[tuple[VersionBounds, Admission]] = []
        self.begun = self.waited = 0

    def step(self) -> None:
        """One event at random, then a few requests."""
        chosen = self.random.random()
        if chosen < 0.7:
            self.advance()
        elif chosen < 0.78:
            self.world.abort(self.epoch)
            self.told = 3
        elif chosen < 0.9 and self.world.doing is not None:
            self.world.fail(dirty=self.random.random() < 0.5)
        elif chosen < 0.98:
            self.world.tick(self.random.choice((0.1, 11.0)), heard=self.random.random() < 0.5)
        else:
            self.waiting.clear()  # they end with their server
            self.world.relaunched(f"launch {self.world.now}")
        self.begin()
        for _ in range(3):
            self.request()
        self.begin()

    def advance(self) -> None:
        """The running operation ends well, the next command of the round comes, or the next round begins."""
        if self.world.doing is not None:
            self.world.end()
        elif self.told == 0:
            self.world.pause(self.epoch)
        elif self.told == 1:
            self.world.transfer(self.epoch, self.version)
        elif self.told == 2:
            self.world.commit(self.epoch, self.version)
        else:
            self.epoch, self.version, self.told = self.epoch + 1, self.version + 1, -1
            self.world.prepare(self.epoch, self.version)
        self.told = min(3, self.told + (self.world.doing is None or self.told < 0))

    def request(self) -> None:
        """Bounds near the version under way, where they matter."""
        least, most = (self.random.choice((None, *range(max(0, self.version - 2), self.version + 3))) for _ in range(2))
        found = asked(self.world, bounds := VersionBounds(least, most))
        if found.verdict is ADMITTED:
            self.waiting.append((bounds, found))
            self.waited += not self.world.machine.view().settled

    def begin(self) -> None:
        """Where the server generates, waiting requests get their first token."""
        machine = self.world.machine
        if machine.weights.state in GENERATES and machine.paused is not True and machine.up:
            version = machine.held.version if machine.held else None
            for bounds, admission in self.waiting:
                assert bounds.allow(version), f"{bounds} was admitted by {admission}, and begins with {version}"
            self.begun += len(self.waiting)
            self.waiting.clear()


def test_requests_begin_within_their_bounds() -> None:
    """Whatever happens to rounds: the first token's version is within the bounds of every admitted request (N66)."""
    storms = [Storm(seed) for seed in range(400)]
    for storm in storms:
        for _ in range(60):
            storm.step()
    assert sum(storm.begun for storm in storms) > 5_000
    assert sum(storm.waited for storm in storms) > 500
