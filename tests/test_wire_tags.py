"""Tags and field names that travel or are written down: classes and attributes may be renamed, these may not change.

A failure here has one of three causes. A class or attribute was renamed: state its old wire name (`tag=`, `rename`,
`msgspec.field(name=...)`). A message, structure or field is new: append it by hand to tests/golden/tags.json (tags,
sorted) or tests/golden/fields.json (fields, in the order of the class); no tool writes them. Anything was removed
or reordered: take it back, since peers and files of an earlier release still have it.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from weightbus.control import protocol as messages
from weightbus.control.machine import effects
from weightbus.dataplane.memory import exports
from weightbus.dataplane.memory.export_map import ArenaParts, ArenaRegion, ExportedTensor, ExportMap, Region
from weightbus.dataplane.processes.connections import WireMessage
from weightbus.dataplane.reshard.load_trace import ConstantFill, LoadTarget
from weightbus.dataplane.reshard.reshard_plan import PlanReader, SourceRegion
from weightbus.dataplane.tensors.manifest import BucketSpec, DigestTable, LiveDigests, Manifest, TensorSpec
from weightbus.dataplane.transports import interface, plan_exchange, worker_exchange as worker_wire
from weightbus.dataplane.transports.local import shared_buckets as local_wire
from weightbus.dataplane.transports.sends import messages as sends_wire
from weightbus.engine_agent.machine import events
from weightbus.trainer_agent.publish import rank_commands as orders

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("tags.json").read_text("utf-8"))
"""Wire -> sorted tags of its messages. Maintained by hand: entries are added and never changed."""
FIELDS = json.loads(Path(__file__).with_name("golden").joinpath("fields.json").read_text("utf-8"))
"""Wire -> tag -> names of its fields on the wire, and below ``inside`` structures without a tag. By hand too."""
ADVICE = "a renamed one keeps its name on the wire; a new one is appended to {} by hand (see the top of this file)"


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
    "direct": [*of_module(plan_exchange), interface.Exporting, interface.Layout],
    "exports": of_module(exports),
    "engine_operations": list(get_args(events.Operation)),
}

INSIDE: dict[str, type[msgspec.Struct]] = {
    "server state on disk": events.StateRecord,
    "export map: place": ExportedTensor,
    "export map: made region": ArenaRegion,
    "plan reader": PlanReader,
    "topology: process": messages.ProcessLocation,
    "engine": messages.EngineInfo,
    "export map": ExportMap,
    "granted region": exports.GrantedRegion,
    "export map: region": Region,
    "export map: parts": ArenaParts,
    "manifest": Manifest,
    "manifest: tensor": TensorSpec,
    "manifest: bucket": BucketSpec,
    "digest table": DigestTable,
    "digest table: live": LiveDigests,
    "load trace: target": LoadTarget,
    "load trace: constant": ConstantFill,
    "plan: source": SourceRegion,
}
"""Structures without a tag: inside messages, or in files."""


@pytest.mark.parametrize("wire", GOLDEN)
def test_tags_are_those_of_the_first_release(wire: str) -> None:
    """Every tag of the golden file is still one class's, and no class has another."""
    tags = sorted(str(each.__struct_config__.tag) for each in WIRES[wire])
    assert tags == GOLDEN[wire], ADVICE.format("tests/golden/tags.json")


def test_every_tag_is_stated_where_its_class_is() -> None:
    """The source of each class names its tag: were the class renamed, the bytes would stay as they are."""
    for each in (each for classes in WIRES.values() for each in classes):
        assert f'tag="{each.__struct_config__.tag}"' in inspect.getsource(each), each


@pytest.mark.parametrize("wire", [each for each in FIELDS if each != "inside"])
def test_fields_are_encoded_under_the_names_of_the_first_release(wire: str) -> None:
    """Two processes of different code read each other, whatever attributes are called today."""
    fields = {str(each.__struct_config__.tag): list(each.__struct_encode_fields__) for each in WIRES[wire]}
    assert fields == FIELDS[wire], ADVICE.format("tests/golden/fields.json")


@pytest.mark.parametrize("name", INSIDE)
def test_structures_inside_messages_and_files_keep_their_field_names(name: str) -> None:
    """A state file of an earlier sidecar is read, and a plan of another process understood."""
    fields = list(INSIDE[name].__struct_encode_fields__)
    assert fields == FIELDS["inside"][name], ADVICE.format("tests/golden/fields.json")
