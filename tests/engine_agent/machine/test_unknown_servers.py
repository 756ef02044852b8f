"""A server of which a sidecar knows nothing: whose it is, whether its weights were changed, and what proves them."""

import pytest

from weightbus.control.protocol.messages import Digest, EngineHealth, HeldVersion, Version
from weightbus.engine_agent.machine.engine_machine import UNWELCOMED_S
from weightbus.engine_agent.machine.events import (
    INCOMPLETE,
    JoinAgain,
    Note,
    OperationFailed,
    Recognize,
    ServerFound,
    ServerTaken,
    VerificationPassed,
)

from ..world import MANIFEST, TABLE, World, only, ran

CLEAN, PENDING = EngineHealth.CLEAN, EngineHealth.PENDING

# -- whose server it is ------------------------------------------------------------------------------------------------


def test_another_launch_is_touched_once_the_coordinator_has_answered() -> None:
    """The address may lead to the server of another sidecar by now: this one asks before it pauses it (N47)."""
    world = World()
    world.to_serving()
    effects = world.found("second")
    assert JoinAgain() in effects
    assert ran(effects) == []
    assert ran(world.tick(UNWELCOMED_S - 0.1, heard=True)) == []
    assert ran(world.welcome()) == ["PauseServer"]


def test_another_launch_is_paused_where_no_answer_comes() -> None:
    """A coordinator that is away keeps no server with unknown weights generating (G1, F10)."""
    world = World()
    world.to_serving()
    world.found("second")
    assert ran(world.tick(UNWELCOMED_S)) == ["PauseServer"]


def test_another_ones_server_is_left_alone() -> None:
    """It is paused, loaded and resumed by its own sidecar, whatever this one was told before (N47, F37)."""
    world = World()
    world.to_serving()
    world.found("second")
    world.event(ServerTaken("server_taken: 'e1' answers for it"))
    assert ran(world.tick(3600)) == []
    assert (world.pause(2), world.abort(3)) == (
        (Note("command_of_another_launch", "Pause of epoch 2"),),
        (Note("command_of_another_launch", "Abort of epoch 3"),),
    )
    assert world.machine.view().reason == "server_taken: 'e1' answers for it"
    assert ran(world.welcome()) == ["PauseServer"]
    assert "e1" not in world.machine.view().reason


def test_a_server_of_another_one_is_not_resumed() -> None:
    """Launch weights and no round: the lease of the sidecar whose address leads elsewhere does not count there (N7)."""
    world = World()
    world.found("second")
    world.event(ServerTaken("taken"))
    assert ran(world.tick(3600)) == []


def test_memory_that_was_released_needs_no_welcome() -> None:
    """It is the same launch, and this sidecar's."""
    world = World()
    world.to_serving()
    effects = world.event(ServerFound("first+1", "7", "/models/served", undefined=True))
    assert JoinAgain() not in effects
    assert ran(effects) == ["PauseServer"]


# -- a server without a record -----------------------------------------------------------------------------------------

HELD = HeldVersion(version=Version(7), manifest=Digest(MANIFEST), table=Digest(TABLE))


@pytest.mark.parametrize("label", [f"{INCOMPLETE}default", "7"])
def test_without_a_record_a_labeled_server_is_unknown(label: str) -> None:
    """Its weights were changed by a sidecar whose record, name or channel was another one (G1, N58, F36)."""
    world = World(label=label, joined=False)
    assert world.machine.view().health is PENDING
    assert ran(world.tick(3600)) == []  # it may be the server of another one, which is in its round
    assert ran(world.welcome()) == ["PauseServer"]
    world.end()
    assert only(world.abort(1)).health is PENDING
    assert "waits for the next version, or a resync" in world.machine.view().reason
    world.to_serving(2, 8)
    assert world.machine.view().health is CLEAN


def test_a_server_that_comes_after_its_sidecar_s_first_command_waits() -> None:
    """The sidecar is new to it: no record is said to be lost, and no other party to have labeled it (N58)."""
    world = World(up=False)
    world.abort(3)
    world.found("first", "default")
    assert world.machine.view().health is PENDING
    assert (
        "labeled 'default', and nothing is known of it here (this sidecar is new to it)" in world.machine.view().reason
    )


def test_without_a_record_a_server_with_its_launch_label_serves() -> None:
    """No sidecar has ever begun to change it: it is not even looked at (N58)."""
    world = World()
    assert (world.machine.view().health, world.doing) == (CLEAN, None)


def test_a_lost_record_is_made_good_by_digests() -> None:
    """The committed version whose label the server has is recognized, and served when the coordinator says so (N58)."""
    world = World(label="7", joined=False)
    world.welcome(committed=HELD)
    world.end()
    assert world.doing == Recognize(HELD)
    world.end(VerificationPassed("live-digest"))
    view = world.machine.view()
    assert (view.health, view.held, view.paused) == (PENDING, HELD, True)
    world.commit(1, 7)
    world.end()
    assert (world.machine.view().health, world.machine.view().held) == (CLEAN, HELD)


def test_other_weights_under_the_label_are_not_recognized() -> None:
    """They were half-loaded with the next version when the record was lost. Tried once (G1, N58)."""
    world = World(label="7", joined=False)
    world.welcome(committed=HELD)
    world.end()
    world.end(OperationFailed("parameter 'a' on rank 0 is x, its digest is y"))
    view = world.machine.view()
    assert (view.health, view.held) == (PENDING, None)
    assert "not proven to hold version 7: parameter 'a'" in view.reason
    assert ran(world.tick(3600, heard=True)) == []


@pytest.mark.parametrize("label", [f"{INCOMPLETE}default", "6"])
def test_digests_are_read_only_where_they_may_agree(label: str) -> None:
    """To digest a large server takes seconds, in which no round can begin on it."""
    world = World(label=label, joined=False)
    world.welcome(committed=HELD)
    world.end()
    assert world.doing is None


# -- a record that is not of what the server holds -----------------------------------------------------------


@pytest.mark.parametrize("label", ["8", f"{INCOMPLETE}default", "default"])
def test_a_clean_record_must_agree_with_the_label(label: str) -> None:
    """Another sidecar, of another name or state folder, had the server since (G1, N58)."""
    before = World()
    before.to_serving(1, 7)
    world = World(before.record, label=label)
    assert (world.machine.view().health, type(world.doing).__name__) == (PENDING, "PauseServer")
    assert World(before.record, label="7").machine.view().health is CLEAN


def test_a_doubted_record_is_forgotten() -> None:
    """The coordinator says that another sidecar had the server since; the label need not tell (G1, N59)."""
    before = World()
    before.to_serving(1, 7)
    world = World(before.record, label="7", joined=False)
    assert world.machine.view().health is CLEAN
    assert ran(world.welcome(doubted=True)) == ["PauseServer"]
    assert (world.machine.view().health, world.machine.view().held) == (PENDING, None)
    assert world.record is not None
    assert world.record.health is PENDING


def test_a_sidecar_that_lost_its_server_for_a_while_knows_nothing_of_it() -> None:
    """It was stopped, or cut off, while another one loaded its server: what it remembers is not true any more (N59)."""
    world = World()
    world.to_serving(1, 7)
    world.welcome(boot=2)
    assert world.machine.view().health is CLEAN
    assert ran(world.welcome(boot=2, doubted=True)) == ["PauseServer"]


def test_what_is_known_is_written_down_with_its_welcome() -> None:
    """By that key the coordinator sees in the next Hello that no other sidecar had the server since (N59)."""
    world = World()
    assert world.record is not None
    assert (world.record.follows, world.machine.view().follows) == ("r", "r")
    world.relaunched()
    assert world.record.identity == "second"
