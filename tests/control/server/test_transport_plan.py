"""What agents tell of where they are decides the next round, is told to trainers, and can be read by people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from weightbus.control.cli import plan_command, status_view
from weightbus.control.cli.entry_point import main
from weightbus.control.machine.routing import PREFERRED
from weightbus.control.protocol.errors import Malformed
from weightbus.control.protocol.messages import (
    EngineHealth,
    Failed,
    Granted,
    Message,
    MissingTransport,
    Prepare,
    ProcessLocation,
    Send,
    Step,
    Topology,
    Transfer,
    TransportKind,
)
from weightbus.control.server import transport_plan as plan_document

from ..world import CHANNEL, Agent, Engine, World

DIRECT, SENDS, LOCAL = TransportKind.DIRECT, TransportKind.SENDS, TransportKind.LOCAL


def tell(agent: Agent, **more: Any) -> None:
    """Say where `agent` is."""
    agent.say(Topology(request=agent.key(), **more))
    agent.world.settle()


def engine_of(world: World, name: str) -> Agent:
    return world.agents[name]


@pytest.fixture
def world() -> World:
    """One engine beside the trainer and one elsewhere, both with our loader; a stock one beside it."""
    made = World()
    made.engine("near", transports=PREFERRED)
    made.engine("far", transports=PREFERRED, host="h1")
    made.engine("stock", transports=(LOCAL, TransportKind.DISK))
    made.settle()
    return made


def plan(world: World) -> plan_document.ChannelPlan:
    """As people get it."""
    view = world.plan
    return plan_document.parse_plan(plan_document.encode_plan(view)).channels[CHANNEL]


def test_one_round_takes_several_transports(world: World) -> None:
    """Every engine is prepared for its own, and all are committed together."""
    trainer = world.trainer("t", transports=PREFERRED)
    done = world.publish(trainer, 1)
    ways = {"near": DIRECT, "far": SENDS, "stock": LOCAL}
    assert {each.engine: each.transport for each in done.engines} == ways
    for name, way in ways.items():
        told = [each.offer.transport for each in world.agents[name].got(Transfer) if isinstance(each, Transfer)]
        assert told == [way], "and taken from its own offer"
    assert {each.outcome.value for each in done.engines} == {"committed"}
    assert len({each.version for each in done.engines}) == 1


def test_a_transport_that_fails_costs_the_others_nothing(world: World) -> None:
    """Its engine is driven again by itself, fails again and is quarantined; the others commit in the same round."""
    trainer = world.trainer("t", transports=PREFERRED)
    far = world.agents["far"]
    assert isinstance(far, Engine)
    far.script[Transfer] = lambda message: again(far, message)
    done = world.publish(trainer, 1)
    sent = [each for each in trainer.got(Send) if isinstance(each, Send)]
    assert [sorted(receiver.engine for receiver in each.receivers) for each in sent] == [
        ["far", "near", "stock"],
        ["far"],
    ]
    outcomes = {each.engine: each.outcome.value for each in done.engines}
    assert outcomes == {"near": "committed", "stock": "committed", "far": "quarantined"}


def again(engine: Engine, message: Message) -> Failed:
    """Fail this transfer, and the next one."""
    engine.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)
    engine.health, engine.weights, engine.held = EngineHealth.DIRTY, None, None
    return engine.failed(message, Step.TRANSFER, "the group broke")


def test_what_is_told_counts_from_the_next_round_on(world: World) -> None:
    """And is told to the trainer, whose digests depend on it, with the lease; to no trainer that never said so."""
    trainer = world.trainer("t", transports=PREFERRED)
    world.publish(trainer, 1)
    silent = trainer.got(Granted)[-1]
    assert isinstance(silent, Granted)
    assert silent.routes == {}, "an older trainer would refuse the field"

    tell(
        trainer,
        places=(ProcessLocation(rank=0, host="h0", device="cpu"), ProcessLocation(rank=1, host="h1", device="cpu")),
    )
    world.publish(trainer, 2)
    granted = trainer.got(Granted)[-1]
    assert isinstance(granted, Granted)
    assert granted.routes == {"near": SENDS, "far": SENDS, "stock": LOCAL}
    prepared = [engine_of(world, name).got(Prepare)[-1] for name in ("near", "far", "stock")]
    assert [each.transport for each in prepared if isinstance(each, Prepare)] == [SENDS, SENDS, LOCAL]


def test_an_engine_that_moves_or_joins_between_versions_is_routed_anew(world: World) -> None:
    """What was chosen for the last version holds while every engine is where it was, and no longer."""
    trainer = world.trainer("t", transports=(LOCAL, SENDS))
    before = {each.engine: each.transport for each in world.publish(trainer, 1).engines}
    assert before["near"] is LOCAL
    tell(engine_of(world, "near"), lacking={LOCAL: MissingTransport("its shared memory is gone")})
    after = {each.engine: each.transport for each in world.publish(trainer, 2).engines}
    assert after["near"] is not LOCAL
    world.engine("late")
    world.settle()
    assert {each.engine for each in world.publish(trainer, 3).engines} == {*before, "late"}
    engine_of(world, "late").die()
    world.advance(30.0)
    assert {each.engine for each in world.publish(trainer, 4).engines} == set(before)


def test_a_snapshot_takes_nothing_out_of_memory(world: World) -> None:
    """Its trainer goes on while it is published."""
    trainer = world.trainer("t", transports=PREFERRED)
    trainer.mode = "snapshot"
    done = world.publish(trainer, 1)
    kinds = {each.engine: each.transport for each in done.engines}
    assert kinds == {"near": LOCAL, "far": TransportKind.DISTRIBUTED, "stock": LOCAL}


def test_an_engine_that_comes_back_is_where_it_was(world: World) -> None:
    """Another life is asked anew."""
    near = engine_of(world, "near")
    tell(near, takes={DIRECT: 40})
    near.connect()
    world.settle()
    assert world.machine.channels[CHANNEL].engines[near.name].topology is not None
    near.die()
    world.advance(5.0)
    near.live()
    world.settle()
    assert world.machine.channels[CHANNEL].engines[near.name].topology is None


def test_the_plan_names_transports_reasons_and_bytes(world: World) -> None:
    """Before a version nothing is known of bytes; after it what every worker is given, and by plans what it takes."""
    trainer = world.trainer("t", transports=PREFERRED)
    world.settle()
    before = plan(world)
    assert before.engines["near"].bytes_per_gpu is None
    assert before.engines["stock"].bytes_per_gpu is None
    tell(engine_of(world, "near"), takes={DIRECT: 1234}, places=(ProcessLocation(rank=0, host="h0", device="cpu"),))
    tell(engine_of(world, "stock"), lacking={DIRECT: MissingTransport(found="no loader", needed="launch it with ours")})
    world.publish(trainer, 1)
    found = plan(world)
    assert found.trainer is not None
    assert (found.trainer.name, found.trainer.here, found.trainer.version) == ("t", True, 1)
    near, far, stock = (found.engines[name] for name in ("near", "far", "stock"))
    assert (near.transport, near.bytes_per_gpu, near.devices, near.faster) == (DIRECT, 1234, ("cpu",), ())
    assert (far.transport, far.bytes_per_gpu, far.last) == (SENDS, None, SENDS)
    assert stock.bytes_per_gpu == found.trainer.bytes
    assert stock.faster[0] == plan_document.FasterTransport(DIRECT, "no loader", "launch it with ours")

    tell(
        engine_of(world, "near"),
        lacking={DIRECT: MissingTransport(found="its loader was replaced", needed="launch it anew")},
    )
    moved = plan(world).engines["near"]
    assert (moved.transport is DIRECT, moved.last) == (False, DIRECT), "what is planned is not what it took"

    trainer.die()
    world.advance(60.0)
    gone = plan(world)
    assert gone.trainer is not None
    assert not gone.trainer.here, "whose version it is stays known"
    shown = Console(width=200, no_color=True)
    with shown.capture() as text:
        shown.print(plan_command.render_plan(plan_document.PlanView({"c": gone}), explain=True))
    assert "not connected now" in text.get()


def test_people_see_what_a_faster_one_needs(world: World) -> None:
    """With --explain; without it the choice alone."""
    world.trainer("t", transports=PREFERRED)
    tell(engine_of(world, "stock"), lacking={DIRECT: MissingTransport(found="no loader", needed="launch it with ours")})
    view = world.plan
    console = Console(width=200, no_color=True)
    with console.capture() as short:
        console.print(plan_command.render_plan(view, explain=False))
    with console.capture() as long:
        status_view.print_unwrapped(console, plan_command.render_plan(view, explain=True))
    assert "not direct: no loader. For that: launch it with ours" not in short.get()
    assert "not direct: no loader. For that: launch it with ours" in long.get()
    assert "nothing is preferred to it" in long.get()
    narrow = Console(width=20, no_color=True)
    with narrow.capture() as piped:
        status_view.print_unwrapped(narrow, plan_command.render_plan(view, explain=True))
    assert piped.get() == long.get()


FLEET = {
    "trainer": {"host": "a", "device": "cuda", "ranks": 2, "transports": [kind.value for kind in PREFERRED]},
    "topology": {"request": "-", "address": "10.0.0.1", "places": [{"rank": 0, "host": "a", "device": "gpu-0"}]},
    "bytes": 16_000_000_000,
    "engines": {
        "e0": {
            "info": {
                "url": "http://e0",
                "server_version": "0.5.23",
                "tp": 2,
                "pp": 1,
                "dp": 1,
                "device": "cuda",
                "host": "b",
                "transports": ["sends", "local", "distributed", "disk"],
            }
        }
    },
}


def test_a_fleet_may_be_imagined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a file, without a coordinator: the same choice, as JSON too."""
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps(FLEET))
    assert main(["plan", "--file", str(file), "--json"]) == 0
    found = plan_document.parse_plan(capsys.readouterr().out.encode()).channels["imagined"].engines["e0"]
    assert (found.transport, found.host) == (SENDS, "b")
    assert main(["plan", "--file", str(file), "--explain"]) == 0
    assert "not direct: the engine agent does not offer it" in " ".join(capsys.readouterr().out.split())
    file.write_text("{}")
    assert main(["plan", "--file", str(file)]) == 1
    assert "does not describe a trainer" in capsys.readouterr().err


def changed(path: str, value: object) -> dict[str, Any]:
    """`FLEET` with another value at `path`; engine e0 has two workers."""
    fleet: dict[str, Any] = json.loads(json.dumps(FLEET))
    here = {"rank": 0, "host": "b", "device": "gpu-0"}
    fleet["engines"]["e0"]["topology"] = {"request": "-", "places": [here, here | {"rank": 1, "device": "gpu-1"}]}
    *folders, last = path.split("/")
    found: Any = fleet
    for each in folders:
        found = found[int(each) if isinstance(found, list) else each]
    found[last] = value
    return fleet


PLACE = {"rank": 0, "host": "a", "device": "gpu-0"}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("bytes", -5, "Expected `int` >= 0 - at `$.bytes`"),
        ("trainer/ranks", 0, "the trainer: ranks = 0, one at least is expected"),
        ("trainer/device", "tpu", "the trainer: device = 'tpu', cpu or cuda is expected"),
        ("trainer/transports", ["sends", "sends"], "the trainer: transports names one twice: sends, sends"),
        (
            "trainer/rank",
            2,
            "Object contains unknown field `rank` - at `$.trainer`. Known: trainer, engines, ",
        ),
        ("topology/places", [PLACE, PLACE], "the trainer: places names a rank twice: 0, 0"),
        ("topology/places/0/rank", 2, "the trainer: places names rank 2, and ranks = 2: ranks are counted from 0"),
        ("engines/e0/info/tp", 4, "engine 'e0': 2 places for tp x pp = 4 x 1 workers: describe all of them, or none"),
        ("engines/e0/info/tp", 1, "engine 'e0': places names rank 1, and tp x pp = 1 x 1"),
        (
            "engines/e0/info/tp",
            0,
            "engine 'e0': Expected `int` >= 1 - at `$.info.tp`. Known: info, topology; info: ",
        ),
        ("engines/e0/info/device", "tpu", "engine 'e0': device = 'tpu'"),
        ("engines/e0/info/transports", ["disk", "disk"], "engine 'e0': transports names one twice: disk, disk"),
        ("engines/e0/topology/places", [PLACE, PLACE], "engine 'e0': places names a rank twice: 0, 0"),
    ],
)
def test_a_fleet_that_cannot_be_is_not_planned(path: str, value: object, said: str) -> None:
    """The reason names the agent, the value found and the value expected."""
    plan_command.plan_described_fleet(json.dumps(changed("bytes", 5)).encode())
    with pytest.raises(Malformed) as refusal:
        plan_command.plan_described_fleet(json.dumps(changed(path, value)).encode())
    assert said in str(refusal.value)


def test_the_error_names_fields_as_the_file_has_them() -> None:
    """The valid fields that an error lists can be written into the file, also where an attribute has another name."""
    with pytest.raises(Malformed) as refusal:
        plan_command.plan_described_fleet(json.dumps(changed("topology/places/0/gpu", "x")).encode())
    known = str(refusal.value).split("Known: ", 1)[1]
    places = known.split("places: ", 1)[1].split(", ")
    assert "awaits_tables" in known
    plan_command.plan_described_fleet(json.dumps(changed(f"topology/places/0/{places[-1]}", "gpu-0")).encode())


def test_an_engine_of_a_file_has_a_name() -> None:
    """As every agent does."""
    fleet = changed("bytes", 5)
    fleet["engines"][""] = fleet["engines"].pop("e0")
    with pytest.raises(Malformed, match="engine '': its name is none that an agent may have"):
        plan_command.plan_described_fleet(json.dumps(fleet).encode())


@pytest.mark.parametrize("document", [b"[" * 200_000, b'{"engines":' + b'{"e":' * 200_000])
def test_a_file_without_an_end_is_refused(document: bytes) -> None:
    """In words."""
    with pytest.raises(Malformed, match="does not describe a trainer and its engines"):
        plan_command.plan_described_fleet(document)


def test_a_plan_from_a_file_asks_no_coordinator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A `--url` given as well causes a warning; a missing file is a wrong setting."""
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps(FLEET))
    assert main(["plan", "--file", str(file)]) == 0
    assert capsys.readouterr().err == ""
    assert main(["plan", "--file", str(file), "--url", "http://h:1"]) == 0
    assert capsys.readouterr().err == "--url http://h:1 is not asked: --file describes the fleet\n"
    assert main(["plan", "--file", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: No such file or directory; give a JSON file" in capsys.readouterr().err


def test_another_document_is_refused() -> None:
    """By name, not with a traceback."""
    with pytest.raises(Malformed, match="not the plan"):
        plan_document.parse_plan(b'{"boot": 1}')
    assert msgspec.json.decode(plan_document.encode_plan(plan_document.PlanView({}))) == {"channels": {}}
