"""Throws hostile bytes at the decoders of the data plane: sockets' messages, blobs, handles. `make fuzz N=100000000`.

A decoder may accept or refuse. It must not raise anything but a `DataplaneError`, and what it accepts must survive
being sent again unchanged. The last line is the tally.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from random import Random
from typing import Any, Final, cast

import msgspec
import numpy as np

from weightbus.dataplane.copy.box_digests import BoxTable
from weightbus.dataplane.copy.copy_table import AXES, ITEM_SIZES, CopyTable
from weightbus.dataplane.errors import DataplaneError
from weightbus.dataplane.memory import exports as export_wire, shared_memory as handles
from weightbus.dataplane.memory.export_map import ArenaParts, ArenaRegion, ExportedTensor, ExportMap, Region
from weightbus.dataplane.reshard.load_trace import (
    ConstantFill,
    LoadTarget as Recorded,
    LoadTrace,
    NotCopiedCause,
    StagedTensor,
    TargetBox,
)
from weightbus.dataplane.reshard.reshard_plan import PlanReader
from weightbus.dataplane.tensors.manifest import DigestTable, LiveDigests, Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView, whole_tensor_shard
from weightbus.dataplane.transports import plan_exchange as direct_wire, worker_exchange as worker_wire
from weightbus.dataplane.transports.distributed.rendezvous_keys import _Sealed
from weightbus.dataplane.transports.local import shared_buckets as local_wire

from .decoder import SHOWN, Tally
from .mutations import Mutator

SPECS: Final = (TensorSpec("model.norm.weight", "float32", (8,)), TensorSpec("lm_head.weight", "float32", (4, 8)))
MANIFEST: Final = Manifest.of("LlamaForCausalLM", SPECS, 1024)
TABLE: Final = DigestTable(
    manifest=MANIFEST.digest(),
    version=7,
    algorithm="mix64x2",
    tensors=bytes(range(32)),
    live=(LiveDigests("sglang-sha256-8", 1, {"model.norm.weight": ("0" * 16,)}),),
)
UUID: Final = "GPU-12345678-1234-1234-1234-123456789abc"

Decode = Callable[[bytes], object]
Again = Callable[[Any], bytes]


class Target(msgspec.Struct, frozen=True):
    """One decoder: what it takes, and how what it accepted is written again (null: that cannot be)."""

    name: str
    decode: Decode
    good: tuple[bytes, ...]
    again: Again | None
    tagged: bool = False
    """The good inputs are msgpack maps with a ``type``: their fields can be made wrong one by one."""
    words: bool = False
    """They are tables of 64-bit numbers, which can be made too large."""


def _messages(name: str, module: Any, end: str, *good: Any) -> Target:
    """The messages that one end of a socket hears."""
    return Target(
        name,
        getattr(module, end).decode,
        tuple(map(msgspec.msgpack.encode, good)),
        msgspec.msgpack.encode,
        tagged=True,
    )


def _targets() -> tuple[Target, ...]:
    d, w, lo, e = direct_wire, worker_wire, local_wire, export_wire
    exporting = d.Exporting(holder=0, address="/run/x", generation=3, round=9)
    reader = PlanReader(0, "host", "cpu", ("GPU-1",))
    exports = w.Exports(holder=0, address="/run/x", generation=3, regions=(1, 2), made=ArenaRegion(1, 0, (8,), 16))
    prove = w.Prove(proof=b"p", groups=1, odd=b"o", odd_bytes=4, staging_bytes=8)
    adopt = w.InstallPlan(
        plan="p",
        recording="r",
        sources=((0, 1),),
        copies=b"c",
        staging=b"s",
        staged=(1,),
        prove=prove,
    )
    granted = (e.GrantedRegion(1, 4096), e.GrantedRegion(2, 4096, UUID, bytes(range(64))))
    return (
        _messages(
            "direct, sender to receiver",
            d,
            "RECEIVER",
            d.Welcome(epoch=3, layout="l", exporters=(exporting,)),
            d.Refused(epoch=3, reason="no"),
            d.Layout(shards=b"p", exports=(b"e",)),
            d.Agreed(),
            d.ExpectedTable(table=b"t" * 64, seal=b"s"),
            d.Failed(reason="no"),
        ),
        _messages(
            "direct, receiver to sender",
            d,
            "SENDER",
            d.Hello(channel="c", epoch=3, engine="e0"),
            d.GiveLayout(),
            d.GiveTable(),
            d.Propose(plans=(d.Proposal(reader=reader, recording=b"r", plan="p"),)),
            d.Finished(),
        ),
        _messages(
            "direct, sidecar to worker",
            w,
            "WORKER",
            w.RecordTrace(layout="l", tensors=SPECS),
            prove,
            adopt,
            w.ExecutePlan(epoch=3, version=7, exports=(exports,), rounds=(9,), within_s=1.0),
            w.Done(),
        ),
        _messages(
            "direct, worker to sidecar",
            w,
            "SIDECAR",
            w.Hello(rank=0, device="cpu", peers=("a",), layout="l"),
            w.TraceRecorded(recording=b"r", seconds=0.5),
            w.PlanInstalled(seconds=0.5),
            w.PlanExecuted(lanes=b"l" * 16, odd=b"", copy_s=0.1, verify_s=0.1),
            w.Failed(reason="no", touched=True),
        ),
        _messages(
            "local, sender to receiver",
            lo,
            "RECEIVER",
            lo.Welcome(epoch=3),
            lo.Refused(epoch=3, reason="no"),
            lo.BucketReady(index=0, generation=1, handle=b"h"),
            lo.Failed(reason="no"),
        ),
        _messages(
            "local, receiver to sender",
            lo,
            "SENDER",
            lo.Hello(channel="c", epoch=3, engine="e0"),
            lo.BucketDone(index=0, generation=1),
            lo.BucketsLoaded(),
        ),
        _messages("export, reader to exporter", e, "EXPORTER", e.Ask(generation=3, regions=(1, 2, 3))),
        _messages(
            "export, exporter to reader",
            e,
            "READER",
            e.Grant(generation=3, regions=granted),
            e.Refuse(generation=3, reason="no"),
        ),
        Target("handle", handles.decode_handle, (msgspec.msgpack.encode(handles.HostSegment("wb-1", 64, 3)),), None),
        Target("export map", ExportMap.decode, (_export_map().encode(),), lambda found: found.encode()),
        Target("manifest", Manifest.decode, (MANIFEST.encode(),), lambda found: found.encode()),
        Target(
            "digest table",
            lambda data: DigestTable.decode(data, MANIFEST),
            (TABLE.encode(),),
            lambda found: found.encode(),
        ),
        Target(
            "pieces", lambda data: Shards.decode([data], SPECS), (_pieces().encode(),), lambda found: found.encode()
        ),
        Target(
            "recording",
            lambda data: LoadTrace.decode(data, SPECS),
            (_recording().encode(),),
            lambda found: found.encode(),
        ),
        Target("copy table", _copies, (_rows(COPY_ROW),), lambda found: found.encode(), words=True),
        Target("box table", _boxes, (_rows(BOX_ROW),), lambda found: found.encode(), words=True),
        Target("rendezvous store", _hear, (_said(),), None),
    )


COPY_ROW: Final = (0, 1, 0, 64, 0, 0, 4)
BOX_ROW: Final = (0, 1, 0, 4, 4, 4, 0)
SIZES: Final = np.array([4096, 1 << 20], np.int64)
"""Bytes of the regions that the tables speak of."""
EXTREMES: Final = (0, 1, -1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, -(2**62), -(2**63))


def _rows(flat: tuple[int, ...]) -> bytes:
    """A few good rows of a table: `flat`, and a grid of ones."""
    row = (*flat, *(1,) * AXES, *(0,) * (2 * AXES))
    return np.array([row] * 3, "<i8").tobytes()


def _copies(data: bytes) -> CopyTable:
    """Decoded and checked; what passes is calculated again in numbers that have no end."""
    table = CopyTable.decode(data)
    table.check(SIZES, SIZES)
    for row in range(len(table)):
        for region, at, step, dtype in (
            (table.source, table.source_at, table.source_step, table.source_dtype),
            (table.target, table.target_at, table.target_step, table.target_dtype),
        ):
            run = int(table.run[row]) * int(ITEM_SIZES[int(dtype[row])])
            _inside(table.grid[row], step[row], int(at[row]), 0, run, int(SIZES[int(region[row])]))
    return table


def _boxes(data: bytes) -> BoxTable:
    """Likewise."""
    table = BoxTable.decode(data, groups=2)
    table.check(SIZES)
    for row in range(len(table)):
        item = int(table.item[row])
        run = (int(table.words[row]) * (8 // item) - 1) * int(table.item_step[row])
        size = int(SIZES[int(table.region[row])])
        _inside(table.grid[row], table.step[row], int(table.at[row]), min(run, 0), max(run, 0) + item, size)
    return table


def _inside(grid: Any, step: Any, at: int, before: int, after: int, size: int) -> None:  # noqa: PLR0917
    reach = [(int(count) - 1) * int(each) for count, each in zip(grid, step, strict=True)]
    first, last = at + sum(min(each, 0) for each in reach) + before, at + sum(max(each, 0) for each in reach) + after
    if not 0 <= first <= last <= size:
        raise AssertionError(f"accepted, and reaches bytes {first}..{last} of {size}")


def _pieces() -> Shards:
    """Every tensor whole, and half of one once more."""
    half = Shard("lm_head.weight", Box((1, 0), (3, 8)), "float32", ShardView(1, 8, (8, 1)))
    return Shards.of(SPECS, [*(whole_tensor_shard(spec, "float32", place) for place, spec in enumerate(SPECS)), half])


def _recording() -> LoadTrace:
    targets = tuple(Recorded(spec.name, "float32", spec.shape, (8, 1)[-len(spec.shape) :], True) for spec in SPECS)
    patch = TargetBox(1, Box((0, 0), (1, 8)))
    return LoadTrace(
        rank=0,
        targets=targets,
        copies=_pieces(),
        loaded=(StagedTensor(0, NotCopiedCause.COMPUTED, "mul"),),
        unread=(1,),
        dropped=(0,),
        constants=(ConstantFill(1, patch.box, 0.0),),
        unwritten=(patch,),
        rewritten=(patch,),
    )


def _export_map() -> ExportMap:
    places = (ExportedTensor(0, 0), ExportedTensor(0, 64))
    return ExportMap(0, "host", (Region(4096, "cpu"),), places, ArenaParts(1, (64, 256), 512))


class _Store:
    """The few calls of torch's store that are made."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def _said() -> bytes:
    store = _Store()
    _Sealed(cast("Any", store), 3, "token").say("came/e0", "wb-1")
    return next(iter(store.values.values()))


def _hear(data: bytes) -> str | None:
    """Whatever a stranger writes is `ForgedMessage`, and never heard."""
    store = _Store()
    store.values["weightbus/3/came/e0"] = data
    heard = _Sealed(cast("Any", store), 3, "token").hear("came/e0")
    if data != _said():
        raise AssertionError(f"heard {heard!r}, which nobody said")
    return heard


class Bender:
    """Makes hostile bytes from good ones; the same seed makes the same."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._random = Random(seed)
        self._fields = Mutator([[b"", each] for each in target.good], seed) if target.tagged else None

    def next(self) -> bytes:
        """The next input."""
        if self._fields is not None and self._random.random() < 0.8:
            return (*self._fields.next(), b"", b"")[1]
        data = bytearray(self._random.choice(self._target.good))
        for _ in range(self._random.randrange(1, 4)):
            self._bend(data)
        return bytes(data)

    def _bend(self, data: bytearray) -> None:
        below = self._random.randrange
        at = below(len(data) + 1)
        match below(7):
            case 0 if at < len(data):
                data[at] ^= 1 << below(8)
            case 1 if at < len(data):
                data[at] = below(256)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = self._random.randbytes(below(1, 9))
            case 4:
                data[at:] = data[: len(data) - at]
            case _ if self._target.words and len(data) >= 8:
                at = below(len(data) // 8) * 8
                data[at : at + 8] = self._random.choice(EXTREMES).to_bytes(8, "little", signed=True)
            case _:
                data += data[: below(64)]


def campaign(seed: int, inputs: int) -> Tally:
    """Throw `inputs` hostile inputs, the same for the same seed, at each decoder in turn."""
    tally = Tally()
    targets = _targets()
    for number, target in enumerate(targets):
        bender = Bender(target, seed)
        for _ in range(inputs // len(targets) + (number < inputs % len(targets))):
            data = bender.next()
            if problem := _throw(target, data, tally):
                tally.crashes.append(f"seed {seed}, {target.name}: {problem}\n    {data[:300]!r}")
    return tally


def _throw(target: Target, data: bytes, tally: Tally) -> str:
    tally.inputs += 1
    try:
        found = target.decode(data)
    except DataplaneError:
        tally.refused += 1
        return ""
    except BaseException as error:  # noqa: BLE001  exactly what is looked for
        return f"{type(error).__name__}: {error}"
    tally.accepted += 1
    if target.again is None:
        return ""
    try:
        again = target.again(found)
        twice = target.again(target.decode(again))
    except BaseException as error:  # noqa: BLE001  likewise
        return f"accepted, and cannot be sent: {type(error).__name__}: {error}"
    return "" if again == twice else "accepted, and changes when it is sent"


def main() -> int:
    """Run one campaign; the exit code says whether anything crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    tally = campaign(given.seed, given.inputs)
    for crash in tally.crashes[:SHOWN]:
        print(crash)  # noqa: T201
    print(tally)  # noqa: T201
    return 1 if tally.crashes else 0


if __name__ == "__main__":
    sys.exit(main())
