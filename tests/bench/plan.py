"""How long planning takes for a large model on many ranks: `python tests/bench/plan.py`, or `make bench-plan`.

Every tensor lies on every rank: cut into `--shards` parts, alternately by rows and by columns, each part on
as many replicas as there are ranks left. The engine has `--tp` workers that keep their rows of stacked tensors.
Prints one JSON object; seconds are of one process on one core, and everything happens once for a layout.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from weightbus.dataplane.memory.export_map import ExportedTensor, ExportMap, Region
from weightbus.dataplane.reshard.digest_shares import divide_digest_work
from weightbus.dataplane.reshard.load_trace import LoadTarget, LoadTrace
from weightbus.dataplane.reshard.reshard_plan import PlanReader, make_plan
from weightbus.dataplane.reshard.verification import make_verification
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import DTYPES, Boxes, Column, Shards

ROWS, COLUMNS = 512, 512
BFLOAT16 = DTYPES.index("bfloat16")
Made = TypeVar("Made")


def table(tensors: tuple[TensorSpec, ...], rows: dict[str, Column]) -> Shards:
    """Pieces from columns."""
    count = len(rows["space"])
    start = np.stack([rows["row"], rows["column"]], axis=1)
    stop = start + np.stack([rows["rows"], rows["columns"]], axis=1)
    stride = np.stack([rows["columns"], np.ones(count, np.int64)], axis=1)
    return replace(
        Shards.of(tensors, []), boxes=Boxes(rows["space"], start, stop), rank=rows["holder"],
        storage=rows["storage"], dtype=np.full(count, BFLOAT16), offset=rows["offset"], stride=stride,
        shift=np.zeros(count, np.int64),
    )  # fmt: skip


def trainer(tensors: tuple[TensorSpec, ...], ranks: int, shards: int) -> tuple[Shards, list[ExportMap]]:
    """What the ranks hold: every tensor a local tensor of its own, many of them in each allocation."""
    count = len(tensors)
    space, holder = np.repeat(np.arange(count), ranks), np.tile(np.arange(ranks), count)
    part, by_rows = holder % shards, space % 2 == 0
    rows, columns = np.where(by_rows, ROWS // shards, ROWS), np.where(by_rows, COLUMNS, COLUMNS // shards)
    pieces = table(tensors, {
        "space": space, "holder": holder, "storage": space, "offset": np.zeros_like(space),
        "row": np.where(by_rows, part * rows, 0), "column": np.where(by_rows, 0, part * columns),
        "rows": rows, "columns": columns,
    })  # fmt: skip
    nbytes, in_one = ROWS * COLUMNS * 2 // shards, 200
    regions = tuple(Region(in_one * nbytes, "cpu") for _ in range(-(-count // in_one)))
    places = tuple(ExportedTensor(index // in_one, index % in_one * nbytes) for index in range(count))
    return pieces, [ExportMap(rank, "here", regions, places) for rank in range(ranks)]


def recording(tensors: tuple[TensorSpec, ...], rank: int, tp: int) -> LoadTrace:
    """What one worker keeps: its rows of every tensor, 100 tensors stacked in each parameter."""
    count, stacked, rows = len(tensors), 100, ROWS // tp
    space = np.arange(count)
    copies = table(tensors, {
        "space": space, "holder": np.full(count, rank), "storage": space // stacked,
        "offset": space % stacked * rows * COLUMNS, "row": np.full(count, rank * rows), "column": np.zeros_like(space),
        "rows": np.full(count, rows), "columns": np.full(count, COLUMNS),
    })  # fmt: skip
    shape = (stacked, rows, COLUMNS)
    strides = (rows * COLUMNS, COLUMNS, 1)
    targets = tuple(
        LoadTarget(f"w{n}", "bfloat16", shape, strides, parameter=True) for n in range(-(-count // stacked))
    )
    return LoadTrace(rank, targets, copies)


def main() -> None:
    """Measure and print."""
    asked = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tensors", 20_000), ("ranks", 64), ("shards", 8), ("tp", 2)):
        asked.add_argument(f"--{name}", type=int, default=value)
    given = asked.parse_args()
    seconds: dict[str, float] = {}

    def timed(name: str, make: Callable[[], Made]) -> Made:
        began = time.process_time()
        made = make()
        seconds[name] = round(time.process_time() - began, 3)
        return made

    tensors = tuple(TensorSpec(f"model.layers.{n}.weight", "bfloat16", (ROWS, COLUMNS)) for n in range(given.tensors))
    pieces, exports = trainer(tensors, given.ranks, given.shards)
    recordings = [recording(tensors, rank, given.tp) for rank in range(given.tp)]
    blob = timed("encode_s", pieces.encode)
    received = timed("decode_s", lambda: Shards.decode([blob], tensors))
    readers = [PlanReader(rank, "here", "cpu") for rank in range(given.tp)]
    plans = timed(
        "plan_s", lambda: [make_plan(received, exports, *each) for each in zip(recordings, readers, strict=True)]
    )
    again = [make_plan(pieces, exports, *each) for each in zip(recordings, readers, strict=True)]
    assert [plan.digest() for plan in plans] == [plan.digest() for plan in again], "both sides must agree"
    proof = timed("proof_s", lambda: make_verification(recordings))
    division = timed("divide_s", lambda: divide_digest_work(pieces))
    read = np.bincount([source.rank for plan in plans for source in plan.sources], minlength=given.ranks)
    found = {
        "command": f"python tests/bench/plan.py --tensors {given.tensors} --ranks {given.ranks} --shards {given.shards}"
        f" --tp {given.tp}",
        "machine": platform.machine(), "python": platform.python_version(), "pieces": len(pieces),
        "layout_bytes": len(blob), "copies": [len(plan.copies) for plan in plans], "atoms": len(proof.atoms),
        "chosen": len(division.chosen), "regions_by_holder": [int(read.min()), int(read.max())],
        "plan_digest": plans[0].digest(), **seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    print(json.dumps(found, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
