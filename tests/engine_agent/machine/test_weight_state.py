"""The weights of a server: every event in every state, as the table says and as the promises demand."""

from collections import deque
from typing import get_args

import pytest

from weightbus.control.protocol.errors import IllegalMove, InvariantBroken
from weightbus.control.protocol.messages import Digest, EngineHealth, HeldVersion, Version
from weightbus.engine_agent.machine.weight_state import (
    GENERATES,
    HEALTH,
    MOVES,
    TABLE,
    OrphanServed,
    ServerLaunched,
    ServerPaused,
    ServerRecognized,
    ServerResumed,
    TransferBegan,
    VersionCommitted,
    VersionVerified,
    WeightEvent,
    Weights,
    WeightsDirtied,
    WeightsDoubted,
    WeightsForeign,
    WeightState,
    WeightsUnchanged,
)

SEVEN = HeldVersion(version=Version(7), manifest=Digest("a" * 64), table=Digest("b" * 64))
EVENTS: tuple[WeightEvent, ...] = (
    ServerPaused(),
    WeightsDoubted(),
    WeightsForeign(),
    TransferBegan(Version(8)),
    WeightsUnchanged(),
    WeightsDirtied(),
    VersionVerified(SEVEN),
    ServerResumed(ordered=True),
    VersionCommitted(),
    OrphanServed(),
)
WAYS: dict[WeightState, tuple[WeightEvent, ...]] = {
    WeightState.UNKNOWN: (ServerLaunched(fresh=False),),
    WeightState.CLEAN: (ServerLaunched(fresh=True),),
    WeightState.PAUSED: (ServerLaunched(fresh=True), ServerPaused()),
    WeightState.STAGED: (ServerLaunched(fresh=True), ServerPaused(), TransferBegan(Version(7))),
    WeightState.DIRTY: (ServerLaunched(fresh=True), ServerPaused(), TransferBegan(Version(7)), WeightsDirtied()),
    WeightState.LOADED: (
        ServerLaunched(fresh=True),
        ServerPaused(),
        TransferBegan(Version(7)),
        WeightsDirtied(),
        VersionVerified(SEVEN),
    ),
    WeightState.SERVING: (
        ServerLaunched(fresh=True),
        ServerPaused(),
        TransferBegan(Version(7)),
        WeightsDirtied(),
        VersionVerified(SEVEN),
        VersionCommitted(),
    ),
    WeightState.ORPHANED: (
        ServerLaunched(fresh=True),
        ServerPaused(),
        TransferBegan(Version(7)),
        WeightsDirtied(),
        VersionVerified(SEVEN),
        OrphanServed(),
    ),
}
"""How a server comes to be in each state."""


def weights(state: WeightState) -> Weights:
    machine = Weights(deque(maxlen=32))
    for event in WAYS[state]:
        machine.handle(event, 1.0)
        machine.check()
    assert machine.state is state
    return machine


@pytest.mark.parametrize("state", WeightState)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_in_every_state(state: WeightState, event: WeightEvent) -> None:
    """What the table names is done, and leaves nothing that contradicts itself; what it does not name raises."""
    machine = weights(state)
    before = (machine.state, machine.held, machine.taking, machine.paused)
    allowed = TABLE[type(event)].get(state, ())
    if not allowed:
        with pytest.raises(IllegalMove, match=f"{state.name}.* does not take {type(event).__name__}"):
            machine.handle(event, 2.0)
        assert (machine.state, machine.held, machine.taking, machine.paused) == before, "an illegal event changed it"
        return
    machine.handle(event, 2.0)
    if not isinstance(event, VersionCommitted) or machine.held is not None:  # launch weights are no version to commit
        machine.check()
    assert machine.state in allowed


def test_every_event_has_a_row() -> None:
    """There is no event without a decision; those that begin anew are the only ones without a row."""
    assert set(TABLE) | {ServerRecognized, ServerLaunched} == set(get_args(WeightEvent))
    assert {type(event) for event in EVENTS} == set(TABLE)
    assert set(HEALTH) == set(WeightState)


def test_dirty_is_left_by_a_proof_and_by_nothing_else() -> None:
    """No way leads from DIRTY to a state that generates, but through LOADED."""
    reached, ways = set[WeightState](), [WeightState.DIRTY]
    while ways:
        state = ways.pop()
        if state in reached or state is WeightState.LOADED:
            continue
        reached.add(state)
        ways += MOVES[state] - ({WeightState.UNKNOWN, WeightState.PAUSED} if state is WeightState.STAGED else set())
    assert not reached & GENERATES
    machine = weights(WeightState.DIRTY)
    machine.handle(TransferBegan(Version(8)), 2.0)
    machine.handle(WeightsUnchanged(), 3.0)
    assert machine.state is WeightState.DIRTY, "what was spared goes back to what it was, and not to something better"


@pytest.mark.parametrize(
    "state", [each for each in WeightState if each not in {WeightState.STAGED, *GENERATES} or each is WeightState.CLEAN]
)
def test_what_was_spared_is_what_it_was(state: WeightState) -> None:
    """A transfer that touched nothing leaves the version, the health and the record as they were."""
    machine = weights(state)
    if state is WeightState.CLEAN:
        machine.handle(ServerPaused(), 2.0)
    before = (machine.state, machine.held, machine.health)
    machine.handle(TransferBegan(Version(9)), 3.0)
    assert (machine.health, machine.held) == (EngineHealth.DIRTY, None)
    assert str(machine) == "STAGED(9)"
    machine.handle(WeightsUnchanged(), 4.0)
    machine.check()
    assert (machine.state, machine.held, machine.health) == before


def test_the_record_is_never_better_than_the_truth() -> None:
    """Along a round, what is kept: dirty before the first byte, pending once proven, clean when it serves."""
    machine = Weights(deque())
    kept = [(machine.health, machine.held) for event in WAYS[WeightState.SERVING] if machine.handle(event, 1.0)]
    assert kept == [(EngineHealth.DIRTY, None), (EngineHealth.PENDING, SEVEN), (EngineHealth.CLEAN, SEVEN)]


@pytest.mark.parametrize(
    ("health", "held", "name"),
    [
        (EngineHealth.CLEAN, SEVEN, "CLEAN(7)"),
        (EngineHealth.CLEAN, None, "CLEAN"),
        (EngineHealth.PENDING, SEVEN, "LOADED(7)"),
        (EngineHealth.PENDING, None, "UNKNOWN"),
        (EngineHealth.DIRTY, None, "DIRTY"),
    ],
)
def test_a_record_is_recognized(health: EngineHealth, held: HeldVersion | None, name: str) -> None:
    """After a restart of the agent the server is what the record says, and nothing has to be written again."""
    machine = weights(WeightState.DIRTY)
    assert not machine.handle(ServerRecognized(health, held), 5.0)
    machine.check()
    assert (str(machine), machine.paused) == (name, None)


@pytest.mark.parametrize(
    "changes",
    [{"paused": False}, {"held": SEVEN}, {"state": WeightState.PAUSED}, {"state": WeightState.LOADED}],
    ids=str,
)
def test_a_contradiction_is_told_with_its_story(changes: dict[str, object]) -> None:
    """`check` finds fields that cannot be true together, and its error says what happened before."""
    machine = weights(WeightState.DIRTY)
    for name, value in {"paused": None, **changes}.items():
        setattr(machine, name, value)
    with pytest.raises(InvariantBroken, match=r"(?s)weights in state .*recently:.*weights dirty after WeightsDirtied"):
        machine.check()
