"""Faults that the control plane survives without a GPU; PROTOCOL.md has the table of all of them (F).

Each test injects its fault, at the moment named, into a deployment of the real machines (tests/simulation), whose
invariants are checked on the way; the promise of the fault's row is asserted on top.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from weightbus.control.machine.channel import MAX_HISTORY, PastVersion, history_with
from weightbus.control.protocol.messages import (
    AgentId,
    Epoch,
    Outcome,
    RefusalCode,
    StragglerPolicy,
    TransportKind,
    Version,
)

from ...simulation.network import Weather
from ...simulation.scenario import EngineSpec, Fault, Scenario
from ...simulation.world import TRANSFER_S, World
from ..world import World as QuietWorld

BUCKETS = 3


def storm(*faults: Fault, **changes: object) -> World:
    """Two engines, one trainer, these faults and nothing else; over when all is well again."""
    engines = tuple(
        EngineSpec(name=name, transports=(TransportKind.LOCAL,), live=True, drift=0.0) for name in ("e0", "e1")
    )
    calm = Scenario(
        seed=7,
        strides=(1, 2),
        engines=engines,
        trainers=("t0",),
        buckets=BUCKETS,
        flush=True,
        redrives=1,
        min_engines=0,
        think_s=2.0,
        rollback=0.0,
        slow=StragglerPolicy.WAIT_ALL,
        quorum=0,
        slow_s=2.0,
        weather=Weather(),
        faults=faults,
        calm_from=45.0,
    )
    world = World(msgspec.structs.replace(calm, **changes), telling=True)
    ended = world.run()
    assert ended.violation == "", "\n".join([*world.loop.story[-60:], ended.violation])
    return world


def order(world: World, *wanted: str) -> None:
    """The story holds `wanted`, in this order."""
    lines = iter(world.loop.story)
    for each in wanted:
        assert any(each in line for line in lines), f"{each!r} is missing, or too early:\n" + "\n".join(
            world.loop.story
        )


def between(world: World, first: str, last: str) -> list[str]:
    """The lines of the story from the first of which holds `first` to the next that holds `last`."""
    lines = iter(world.loop.story)
    for line in lines:
        if first in line:
            return [line, *itertools.takewhile(lambda each: last not in each, lines)]
    raise AssertionError(f"{first!r} is missing")


def outcomes(world: World) -> list[Outcome]:
    return [done.outcome for done in world.rounds]


def dies(where: str, *, count: int = 1, moment: str = "") -> Fault:
    """The coordinator dies at its next write, or at the one after that, counted from `moment` on."""
    trap = Fault(at=0.5, kind="trap", target="coordinator", point="persist", where=where, count=count, lasts=1.0)
    return msgspec.structs.replace(trap, moment=moment)


def at(moment: str, kind: str, who: str, lasts: float, *, after: float = 0.5, count: int = 0) -> Fault:
    """Something happens when a round next comes to `moment`."""
    return Fault(at=after, kind=kind, target=who, lasts=lasts, moment=moment, count=count)


def test_fault_1a_coordinator_dies_before_a_grant_is_durable() -> None:
    """Nothing was promised; the trainer's question, repeated, is granted by the next life (F1a)."""
    world = storm(dies("before"))
    order(world, "coordinator  ** dies: before persist", "(life 2)", "Granted epoch=1", "round 1 is over: committed")


def test_fault_1b_coordinator_dies_between_a_grant_and_its_answer() -> None:
    """The epoch is spent: the next life begins above it, and grants above that (G3, F1b)."""
    world = storm(dies("after"))
    order(world, "coordinator  ** dies: after persist", "(life 2)", "Granted epoch=3", "round 1 is over: committed")


def test_fault_1c_engines_do_not_stay_paused_without_a_coordinator() -> None:
    """Paused and clean, they resume when their lease ends, long before the coordinator is back (N7, F1c)."""
    world = storm(at("offering", "kill", "coordinator", 35.0))
    order(world, "coordinator  ** dies", "e0           resumed_by_itself", "coordinator  starts (life 2)")


def test_fault_1d_coordinator_dies_while_bytes_travel() -> None:
    """What the engines say of the old epoch is stale after the restart; the version reaches them in another round.

    (G3, F1d)
    """
    world = storm(at("transferring", "kill", "coordinator", 1.0))
    order(world, "coordinator  ** dies", "(life 2)", "Granted epoch=3", "round 1 is over: committed e0=committed")


def test_fault_1e_coordinator_dies_before_the_commit_is_durable() -> None:
    """No engine was told; the version is published once more, under another epoch (F1e)."""
    world = storm(dies("before", moment="transferring"))
    order(world, "coordinator  ** dies: before persist", "(life 2)", "journal      Committed epoch=3 version=1")


def test_fault_1f_what_is_durable_rolls_forward() -> None:
    """The commit record is the truth: the next life tells the engines to serve it, and the trainer that it is done.

    (G2, N13, F1f)
    """
    world = storm(dies("after", moment="transferring"))
    order(world, "Committed epoch=1 version=1", "coordinator  ** dies", "(life 2)", "<- Commit epoch=2 version=1")
    order(world, "(life 2)", "publication of 1: committed")


def test_fault_1g_the_end_of_a_round_is_told_again() -> None:
    """The round was over and its answer stored when the coordinator died: the same question gets it (G6, F1g)."""
    world = storm(dies("after", moment="transferring", count=2))
    order(world, "RoundClosed version=1 committed", "coordinator  ** dies", "(life 2)", "publication of 1: committed")
    assert outcomes(world).count(Outcome.COMMITTED) >= 2


@pytest.mark.parametrize(
    ("moment", "outcome"),
    [
        ("preparing", Outcome.ABORTED),
        ("offering", Outcome.ABORTED),
        ("pausing", Outcome.ABORTED),
        ("transferring", Outcome.ABORTED),
        ("verifying", Outcome.COMMITTED),
        ("committing", Outcome.COMMITTED),
    ],
)
def test_fault_2_trainer_dies_in_any_state_of_a_round(moment: str, outcome: Outcome) -> None:
    """The round ends with its lease, or without it once the bytes are across; another trainer goes on (G4, F2)."""
    away = Fault(at=2.5, kind="kill", target="t1", lasts=12.0)  # so that it is a round of t0
    world = storm(away, at(moment, "kill", "t0", 30.0, after=6.0), trainers=("t0", "t1"))
    order(
        world,
        "t0           ** dies",
        f"is over: {outcome.value} e0=",  # where bytes had landed, quarantined until the next round
        "t1           <- Granted",
        "is over: committed e0=committed e1=committed",
    )
    assert max(done.seconds["total"] for done in world.rounds) < world.limits.silence_s + 20


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_fault_3_engine_dies_half_loaded(bucket: int) -> None:
    """It is lost to the round, the other commits; its next launch serves nothing of ours before all of it is proven.

    (G1, F3)
    """
    world = storm(at("preparing", "server-dies-loading", "e0", 1.0, after=6.0, count=bucket))
    order(
        world,
        "e0           ** server dies",
        "is over: committed e0=quarantined e1=committed",
        "e0           server is up (launch 2)",
        "e0           server_pending",
        "e0           server loads bucket 0",
        f"e0           server loads bucket {BUCKETS - 1}",
        "e0           server generates again",
        "is over: committed e0=committed e1=committed",
    )
    dead = between(world, "e0           ** server dies", "e0           server loads bucket 0")
    assert not [line for line in dead if "e0           server generates again" in line]


@pytest.mark.parametrize(
    ("policy", "least_s", "most_s"),
    [
        (StragglerPolicy.WAIT_ALL, 9.0, 40.0),
        (StragglerPolicy.QUORUM, 2.0, 8.0),
        (StragglerPolicy.EVICT_AFTER, 2.0, 8.0),
    ],
)
def test_fault_4_slow_engine(policy: StragglerPolicy, least_s: float, most_s: float) -> None:
    """A sidecar that is stopped holds the round up as long as the policy says; then the others go on (G4, N27, F4)."""
    world = storm(at("preparing", "freeze", "e1", 9.0, after=6.0), slow=policy, quorum=1)
    slow = next(done for done in world.rounds if done.seconds["total"] > 1.9)
    assert slow.outcome is Outcome.COMMITTED
    assert least_s <= slow.seconds["total"] <= most_s


def test_fault_6_doubled_late_and_reordered_messages_change_nothing() -> None:
    """Agents repeat a third of what they say, seconds later: every round still commits everywhere (G6, F6)."""
    world = storm(weather=Weather(repeat=0.33), calm_from=30.0)
    assert set(outcomes(world)) == {Outcome.COMMITTED}
    assert all(each.outcome is Outcome.COMMITTED for done in world.rounds for each in done.engines)
    assert world.network.faults > 30


@pytest.mark.parametrize("way", ["cut", "cut-up", "cut-down"], ids=["7a", "7c-up", "7c-down"])
def test_fault_7_control_is_cut_while_data_flows(way: str) -> None:
    """The engine takes its bytes and serves none of them without a Commit; the other one commits; all heals.

    (G4, F7a, F7c)
    """
    world = storm(at("transferring", way, "e0", 25.0, after=6.0))
    cut, healed = "e0           ** is cut off", "e0           ** is connected again"
    order(world, cut, f"e0           server loads bucket {BUCKETS - 1}", "e1=committed", healed, "e0=committed")
    assert not [line for line in between(world, cut, healed) if "e0           server generates again" in line]


def test_fault_7b_the_data_plane_is_cut_while_control_is_well() -> None:
    """Its transfer ends at a deadline and not before; the other one commits; the next round takes it in again.

    (G4, F7b)
    """
    world = storm(at("offering", "data-cut", "e0", 25.0, after=6.0), redrives=0)
    order(world, "e0           ** its data plane is cut off", "is over: committed")
    cut = next(done for done in world.rounds if done.seconds["total"] > 4.0)
    assert {each.engine: each.outcome for each in cut.engines}["e1"] is Outcome.COMMITTED
    assert cut.seconds["total"] < TRANSFER_S + 40.0


@pytest.mark.parametrize("open_tables", [False, True])
def test_fault_26_an_offer_is_heard_and_its_answer_is_lost(*, open_tables: bool) -> None:
    """Engines stand still for a trainer that hears nothing: it says so, and they are driven again before a timeout.

    (N41, F26)
    """
    kinds = (TransportKind.DIRECT, TransportKind.LOCAL)
    engines = tuple(EngineSpec(name=name, transports=kinds, live=True, drift=0.0) for name in ("e0", "e1"))
    world = storm(at("offering", "cut-down", "t0", 6.0, after=6.0), engines=engines, open_tables=open_tables)
    order(world, "t0           ** is cut off", "is over: committed")
    assert any(done.seconds["total"] > 5.0 for done in world.rounds)
    assert all(done.seconds["total"] < TRANSFER_S - 5.0 for done in world.rounds)


def test_signatures_are_believed_through_deaths_of_all_processes() -> None:
    """With keys in use, two trainers, a killed coordinator and a killed trainer: each link follows the one before."""
    faults = (at("resuming", "kill", "coordinator", 1.0), at("transferring", "kill", "t0", 3.0, after=12.0))
    world = storm(*faults, trainers=("t0", "t1"), sealed=True, think_s=0.5)
    assert outcomes(world).count(Outcome.COMMITTED) > 3


def test_an_unsigned_version_reaches_no_engine_of_a_sealed_world() -> None:
    """The judge sees a doubt: an untrusted trainer publishes, and every engine refuses to prepare."""
    calm = storm(sealed=True).scenario
    world = World(calm)
    world.trust = {AgentId("t9"): next(iter((world.trust or {}).values()))}
    ended = world.run()
    assert "believed" in ended.violation
    assert "is no trainer that is trusted" in ended.violation


def test_fault_8_a_version_goes_back_only_by_an_explicit_rollback() -> None:
    """A trainer from an older checkpoint is refused; with rollback it is granted, and the step back is durable.

    (G2, N1, F8)
    """
    world = QuietWorld()
    engine, trainer = world.engine("e0"), world.trainer()
    assert world.publish(trainer, 7).outcome is Outcome.COMMITTED
    trainer.acquire(3)
    world.settle()
    refused = [each for each in trainer.inbox if getattr(each, "code", None) is RefusalCode.VERSION_NOT_NEWER]
    assert refused
    assert world.committed == 7
    before = world.machine.channels["policy"].epoch
    trainer.rollback = True
    assert world.publish(trainer, 3).outcome is Outcome.COMMITTED
    assert world.committed == 3
    assert world.machine.channels["policy"].epoch == before + 1
    world.restart()
    assert world.committed == 3
    assert engine.label == 3
    assert world.ready == ("e0",)


def test_fault_8_a_trainer_that_lost_its_progress_goes_back_in_a_storm() -> None:
    """Two trainers, one killed and behind when it returns: it is refused, says rollback, and that is on record (F8)."""
    faults = (at("resuming", "kill", "t0", 2.0, after=9.0), at("resuming", "kill", "coordinator", 1.0, after=16.0))
    world = storm(*faults, trainers=("t0", "t1"), rollback=1.0, think_s=0.5)
    history = world.journal.channels[world.channel].history
    back = [past for past in history if past.rollback]
    assert back, "no channel went back"
    assert [past.epoch for past in history] == sorted({past.epoch for past in history}), "every step is a new epoch"
    for before, after in itertools.pairwise(history):
        assert after.version > before.version or after.rollback
    assert world.coordinator.server is not None
    assert world.coordinator.server.machine.channels[world.channel].history[-len(history) :] == history


def test_fault_8_what_may_be_gone_back_to_is_known_after_a_restart() -> None:
    """The channel's history comes from the journal, the step back in it, and is bounded (N1, F8)."""
    world = QuietWorld()
    world.engine("e0")
    trainer = world.trainer()
    for version in (3, 7):
        world.publish(trainer, version)
    trainer.rollback = True
    world.publish(trainer, 3)
    told = world.machine.channels["policy"].history
    assert [(past.version, past.rollback) for past in told] == [(3, False), (7, False), (3, True)]
    world.restart()
    assert world.machine.channels["policy"].history == told
    assert world.machine.status(0.0).channels["policy"].history[-1].version == 3
    many: tuple[PastVersion, ...] = ()
    for epoch in range(1, 2 * MAX_HISTORY):
        many = history_with(
            history_with(many, PastVersion(Version(1), Epoch(epoch))), PastVersion(Version(1), Epoch(epoch))
        )
    assert [past.epoch for past in many] == list(range(MAX_HISTORY, 2 * MAX_HISTORY)), "the newest, each once"


def test_fault_8_a_lease_without_rollback_does_not_go_back() -> None:
    """The permission belongs to the lease: a `Publish` that claims it under another one is refused (G2, N1, F8)."""
    world = QuietWorld()
    world.engine("e0")
    trainer = world.trainer()
    world.publish(trainer, 7)
    trainer.rollback_publish_only = True
    trainer.acquire(8)
    world.settle()
    assert [each for each in trainer.inbox if getattr(each, "code", None) is RefusalCode.NOT_ALLOWED]
    assert world.committed == 8  # tried again without the claim


def test_fault_9_a_former_lease_holder_changes_nothing() -> None:
    """Stopped past its lease in mid-transfer, it wakes up beside its successor: no engine takes its bytes (G3, F9)."""
    world = storm(at("transferring", "freeze", "t0", 25.0), trainers=("t0", "t1"))
    order(
        world,
        "t0           ** is stopped",
        "t1           <- Granted",
        "is over: committed",
        "t0           ** goes on",
        "t0           <- Refused code=stale_epoch",
    )


def test_fault_10_a_restarted_engine_is_not_listed_before_it_is_verified() -> None:
    """Launch weights under the old address: out of the ready list until a round has mended it (G7, F10)."""
    world = storm(Fault(at=20.0, kind="server-kill", target="e0", lasts=3.0))
    order(world, "e0           server is up (launch 2)", "e0           server_pending", "server generates again")


def test_fault_16_a_corrupted_bucket_is_never_served() -> None:
    """Found before it is loaded, or by the live digest after it; driven again within the round (G1, F16)."""
    world = storm(Fault(at=6.0, kind="corrupt", count=1))
    order(world, "bucket 1 of epoch", "round", "is over: committed")
    assert set(outcomes(world)) == {Outcome.COMMITTED}


def test_fault_18_a_full_disk_means_read_only_and_heals_by_itself() -> None:
    """Nothing is granted while nothing can be made durable; with room again everything goes on (N48, F18)."""
    world = storm(Fault(at=6.0, kind="disk-full", target="coordinator", lasts=12.0))
    order(world, "journal is read-only", "code=read_only", "journal takes writes again", "outcome=committed")
    order(world, "journal is read-only", "its disk has room again", "journal takes writes again")


def test_fault_19_clock_jumps_mean_nothing() -> None:
    """A wall clock that leaps by decades changes no line of the story but its own (A5, F19)."""
    without = storm()
    jumps = tuple(Fault(at=5.0 + n, kind="wall-jump", lasts=by) for n, by in enumerate((1e9, -2e9, 9e4)))
    told = [line for line in storm(*jumps).loop.story if "wall clock" not in line]
    assert told == without.loop.story


OPEN = {
    "open_tables": True,
    "digest_s": 2.0,
    "engines": tuple(
        EngineSpec(name=name, transports=(TransportKind.DIRECT,), live=True, drift=0.0) for name in ("e0", "e1")
    ),
}
"""A deployment whose engines take the ranks' memory, and whose trainers digest for longer than it takes to copy."""


@pytest.mark.parametrize("how", ["dies", "lost"])
def test_fault_24_a_table_that_follows_does_not_come(how: str) -> None:
    """Engines have all bytes by then. An engine without the table is excluded; without the trainer, all are.

    (N17, F24)
    """
    kind, who = ("kill", "t0") if how == "dies" else ("table-lost", "e0")
    world = storm(
        Fault(at=4.0, kind=kind, target=who, lasts=3.0, moment="transferring" if how == "dies" else ""),
        redrives=0,
        **OPEN,
    )
    if how == "dies":
        order(world, "server loads bucket 2", "t0           ** dies", "is over: aborted e0=quarantined e1=quarantined")
    else:
        order(world, "e0 hears of no table", "is over: committed e0=quarantined e1=committed")
    order(world, "=quarantined", "is over: committed e0=committed e1=committed")


@pytest.mark.parametrize("sealed", [True, False])
def test_fault_25_another_table_is_not_committed(sealed: bool) -> None:
    """Its engine holds what that table says, to the bit; the others are committed, and it is sent everything again.

    (G5, G8, F25)
    """
    world = storm(Fault(at=4.0, kind="wrong-table", target="e0"), sealed=sealed, **OPEN)
    found = "is not what 't0' signed" if sealed else "-> Verified"
    order(world, "e0 is given another table", "forged/forged", found, "is over: committed e0=committed e1=committed")
    forged = between(world, "loads bucket 2: forged/forged", "loads bucket 0")
    assert not [line for line in forged if "e0           server generates again" in line]


def test_fault_31_an_engine_whose_key_is_revoked_while_it_is_paused_resumes() -> None:
    """Refusals come all the time, and are no sign of life; the other engine commits without it (N7, N55, F31)."""
    cut_off = at("pausing", "data-cut", "e0", 30.0)
    world = storm(cut_off, at("pausing", "revoke", "e0", 30.0))
    order(world, "e0           ** its key is revoked", "e0           resumed_by_itself", "its key is trusted again")
    order(world, "its key is trusted again", "is over: committed e0=committed e1=committed")


def test_fault_31_a_trainer_whose_key_is_revoked_is_told_so() -> None:
    """Long before any deadline of its own; it publishes once it is trusted again (N55, F31)."""
    world = storm(at("offering", "revoke", "t0", 15.0))
    told = between(world, "t0           ** its key is revoked", "publication of")
    began, ended = (float(line.split()[0]) for line in (told[0], told[-1]))
    assert ended - began < 5.0
    order(world, "its key is revoked", "not_trusted", "its key is trusted again", "is over: committed")


@pytest.mark.parametrize("orphaned", ["wait", "serve_verified"])
@pytest.mark.parametrize("durable", [True, False])
def test_fault_32_the_coordinator_is_gone_when_engines_have_verified(orphaned: str, durable: bool) -> None:
    """An orphan waits, or is served and not listed; a coordinator that comes back after all settles it (N56, F32)."""
    gone = msgspec.structs.replace(dies("after" if durable else "before", moment="transferring"), at=4.0, lasts=60.0)
    world = storm(gone, orphaned=orphaned, calm_from=70.0)
    away = between(world, "coordinator  ** dies", "coordinator  starts (life 2)")
    served = [line for line in away if "orphan_served" in line]
    assert len(served) == (2 if orphaned == "serve_verified" else 0)
    assert len([line for line in away if "server generates again" in line]) == len(served)
    if served and not durable:  # before the next round pauses it
        settled = between(world, "coordinator  starts (life 2)", "<- Prepare")
        assert [line for line in settled if "server pauses" in line]
        order(world, "(life 2)", "<- Abort", "server pauses", "Failed", "is over: committed e0=committed e1=committed")
    if durable:
        order(world, "(life 2)", "<- Commit", "-> Serving")
        settled = between(world, "coordinator  starts (life 2)", "<- Prepare")
        assert not [line for line in settled if "server pauses" in line], "a version that is served is only committed"
