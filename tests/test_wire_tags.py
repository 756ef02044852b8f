"""Tags that travel or are written down are stated in the code: a class may be renamed, its tag may not change."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from weightbus.control import protocol as messages
from weightbus.control.machine import effects
from weightbus.dataplane.processes.wire_message import WireMessage
from weightbus.dataplane.transports import interface, plan_messages, worker_messages as worker_wire
from weightbus.dataplane.transports.direct import messages as direct_wire
from weightbus.dataplane.transports.local import messages as local_wire
from weightbus.dataplane.transports.sends import messages as sends_wire
from weightbus.engine_agent.machine import events
from weightbus.trainer_agent.publish import rank_commands as orders

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("tags.json").read_text("utf-8"))
"""Written by the code of 69e00d5, where every tag was the class name."""


def of_module(module: object) -> list[type[msgspec.Struct]]:
    name = module.__name__  # type: ignore[attr-defined]
    return [each for each in WireMessage.__subclasses__() if each.__module__ == name]


WIRES: dict[str, list[type[msgspec.Struct]]] = {
    "control": list(messages.Message.__subclasses__()),
    "journal": list(effects.JournalRecord.__subclasses__()),
    "rank_commands": list(orders.RankCommand.__subclasses__()),
    "worker": of_module(worker_wire),
    "local": of_module(local_wire),
    "sends": [*of_module(sends_wire), interface.Group],
    "direct": [*of_module(direct_wire), *of_module(plan_messages), interface.Exporting],
    "engine_operations": list(get_args(events.Operation)),
}


@pytest.mark.parametrize("wire", GOLDEN)
def test_tags_are_those_of_the_first_release(wire: str) -> None:
    """Every tag of the golden file is still one class's, and no class has another."""
    assert sorted(str(each.__struct_config__.tag) for each in WIRES[wire]) == GOLDEN[wire]


def test_every_tag_is_stated_where_its_class_is() -> None:
    """The source of each class names its tag: were the class renamed, the bytes would stay as they are."""
    for each in (each for classes in WIRES.values() for each in classes):
        assert f'tag="{each.__struct_config__.tag}"' in inspect.getsource(each), each
