"""How fast tables of strided boxes are copied and digested on a GPU, beside plain copies of as many bytes.

    python3 tests/gpu/copies.py [--gigabytes N]         one CUDA device; with two, also from the other's memory, and
                                                        each from the other's at once, as TP2 to TP2 across does it

Prints one JSON object; `--out` writes it too. Exits with 1 unless every copy and every digest was right.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig

from weightbus.dataplane.copy.box_digests import BoxTable
from weightbus.dataplane.copy.copy_cuda import copy_engine_for
from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.digest.tensor_digest import digest_tensors, finish_digests
from weightbus.dataplane.memory.exports import RegionExporter, RegionImporter
from weightbus.dataplane.tensors.shards import DTYPES

BF16 = DTYPES.index("bfloat16")
ROUNDS = 12


def seconds(device: torch.device, run: Callable[[], object]) -> float:
    """The best of some runs, between events on the current stream."""
    found = []
    with torch.cuda.device(device):
        for _ in range(ROUNDS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1000)
    return min(found[2:])


def grid_table(boxes: int, rows: int, run: int, source: tuple[int, int], target: tuple[int, int]) -> CopyTable:
    """Boxes of `rows` runs of `run` elements; (bytes from box to box, bytes from run to run) on each side."""
    number = np.arange(boxes, dtype=np.int64)
    same = np.ones(boxes, np.int64)
    wide = np.zeros((boxes, 3), np.int64)
    grid, from_step, to_step = wide + 1, wide.copy(), wide.copy()
    grid[:, 2], from_step[:, 2], to_step[:, 2] = rows, source[1], target[1]
    return CopyTable(
        same * 0, same * 0, number * source[0], number * target[0], same * BF16, same * BF16, same * run,
        grid, from_step, to_step,
    )  # fmt: skip


def tables(nbytes: int) -> dict[str, CopyTable]:
    """The shapes that engines ask for, each about `nbytes` large. Qwen3-30B-A3B's experts are 2048 x 768."""
    whole, row = 2048 * 768 * 2, 768 * 2
    half = row // 2
    experts = nbytes // whole
    return {
        "contiguous": grid_table(experts, 1, whole // 2, (whole, whole), (whole, whole)),
        "column_slices": grid_table(experts, 2048, half // 2, (whole, row), (whole // 2, half)),
        "rows_spread": grid_table(experts, 768, 1984, (whole, 4096), (whole, 4096 - 64)),
        "small": grid_table(nbytes // 4096, 1, 2048, (4096, 4096), (4096, 4096)),
        "two_byte_aligned": grid_table(nbytes // 64 // whole, 1, whole // 2 - 1, (whole, whole), (whole + 2, whole)),
    }


def box_table(copies: CopyTable) -> BoxTable:
    """Digest what contiguous copies wrote, each row a tensor of its own."""
    count = len(copies)
    zeros, wide = np.zeros(count, np.int64), np.zeros((count, 3), np.int64)
    return BoxTable(
        count, np.arange(count), zeros, copies.target_at, zeros + 2, zeros + 2, copies.run // 4, zeros, wide + 1, wide,
        wide,
    )  # fmt: skip


def noise(nbytes: int, device: torch.device) -> torch.Tensor:
    """1-D uint8."""
    words = torch.randint(-(2**62), 2**62, (nbytes // 8 + 4096,), dtype=torch.int64, device=device)
    return words.view(torch.uint8)


@contextlib.contextmanager
def exported(nbytes: int, holder: torch.device, reader: torch.device) -> Iterator[torch.Tensor]:
    """Memory that another process holds on `holder` and exports, opened for `reader`."""
    with tempfile.TemporaryDirectory() as runtime:
        command = [sys.executable, __file__, "--export", runtime, str(holder.index), str(nbytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address, offset = process.stdout.readline().split()
            importer = RegionImporter(reader)
            importer.open(address, 0, 1, [0], 30.0)
            yield importer.region(0, 0)[int(offset) : int(offset) + nbytes + 8 * 4096]
            importer.close()
            process.kill()


def export(runtime: str, gpu: str, nbytes: str) -> None:
    """The other process."""
    held = noise(int(nbytes), torch.device("cuda", int(gpu)))
    exporter = RegionExporter(Path(runtime) / "run", "bench", 0)
    place = exporter.export([held]).places[0]
    sys.stdout.write(f"{exporter.address()} {place.offset}\n")
    sys.stdout.flush()
    sys.stdin.read()


def measure(nbytes: int, reader: torch.device, source: torch.Tensor) -> dict[str, Any]:
    """Copies on `reader` from `source`."""
    target = torch.zeros(nbytes + nbytes // 16 + 65536, dtype=torch.uint8, device=reader)
    plain = seconds(reader, lambda: target[:nbytes].copy_(source[:nbytes]))
    found: dict[str, Any] = {"bytes": nbytes, "plain_copy_s": plain, "plain_gb_s": nbytes / plain / 1e9, "equal": True}
    engine = copy_engine_for(reader)
    for name, table in tables(nbytes).items():
        table.check(np.array([source.numel()]), np.array([target.numel()]))
        target.zero_()
        copies = engine.prepare_copies(table, [source], [target])
        took = seconds(reader, copies.run)
        moved = int(table.target_bytes.sum())
        right = same(table, source, target)
        found["equal"] &= right
        found[name] = {
            "bytes": moved, "rows": len(table), "s": took, "gb_s": moved / took / 1e9,
            "of_plain": (moved / took) / (nbytes / plain), "equal": right,
        }  # fmt: skip
        if name == "contiguous":
            digests = engine.prepare_digest(box_table(table), [target])
            took = seconds(reader, digests.run)
            lanes = digests.run()
            expected = digest_tensors(target[:moved], [*range(0, moved + 1, moved // len(table))])
            right = finish_digests(lanes, table.target_bytes) == expected
            found["equal"] &= right
            found["digest"] = {"bytes": moved, "s": took, "gb_s": moved / took / 1e9, "equal": right}
            digests.close()
        copies.close()
    return found


def at_once(runs: Sequence[tuple[torch.device, Callable[[], object]]]) -> float:
    """The best of some times until all of `runs` were done, each by a thread of its own on its device."""
    found = []
    for _ in range(ROUNDS):
        start = threading.Barrier(len(runs) + 1)

        def go(device: torch.device, run: Callable[[], object], start: threading.Barrier = start) -> None:
            with torch.cuda.device(device):
                start.wait(60)
                run()
                torch.cuda.synchronize()

        threads = [threading.Thread(target=go, args=each) for each in runs]
        for thread in threads:
            thread.start()
        start.wait(60)
        begun = time.perf_counter()
        for thread in threads:
            thread.join()
        found.append(time.perf_counter() - begun)
    return min(found[2:])


def both_ways(nbytes: int, sources: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Each device from the other's memory at the same time: bytes into one device by second."""
    readers = [torch.device("cuda", index) for index in range(2)]
    targets = [torch.zeros(nbytes + nbytes // 16 + 65536, dtype=torch.uint8, device=reader) for reader in readers]
    ways = list(zip(readers, sources, targets, strict=True))
    plain = at_once([(at, lambda out=out, into=into: into[:nbytes].copy_(out[:nbytes])) for at, out, into in ways])
    found: dict[str, Any] = {"bytes": nbytes, "plain_copy_s": plain, "plain_gb_s": nbytes / plain / 1e9, "equal": True}
    for name, table in tables(nbytes).items():
        copies = [copy_engine_for(at).prepare_copies(table, [out], [into]) for at, out, into in ways]
        took = at_once([(at, each.run) for at, each in zip(readers, copies, strict=True)])
        moved = int(table.target_bytes.sum())
        found["equal"] &= all(same(table, out, into) for _, out, into in ways)
        found[name] = {"s": took, "gb_s": moved / took / 1e9, "of_plain": (moved / took) / (nbytes / plain)}
        for each in copies:
            each.close()
    return found


def same(table: CopyTable, source: torch.Tensor, target: torch.Tensor) -> bool:
    """The first, a middle and the last row, by torch's own indexing."""
    for row in {0, len(table) // 2, len(table) - 1}:
        sides = []
        for memory, at, step in (
            (source, table.source_at, table.source_step),
            (target, table.target_at, table.target_step),
        ):
            shape = (int(table.grid[row, 2]), int(table.run[row]) * 2)
            sides.append(memory.as_strided(shape, (int(step[row, 2]) or shape[1], 1), int(at[row])).to(target.device))
        if not torch.equal(*sides):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, default=16)
    parser.add_argument("--out", help="write the JSON here too")
    parser.add_argument("--export", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.export:
        export(*args.export)
        return 0
    nbytes = args.gigabytes * 10**9 // (2048 * 768 * 2) * (2048 * 768 * 2)
    devices = [torch.device("cuda", index) for index in range(min(torch.cuda.device_count(), 2))]
    result: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": ", ".join(torch.cuda.get_device_name(device) for device in devices),
        "command": rig.command("copies.py"),
        "software": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "same_gpu": measure(nbytes, devices[0], noise(nbytes, devices[0])),
    }
    if len(devices) > 1:
        torch.cuda.empty_cache()
        with exported(nbytes, devices[1], devices[0]) as source:
            result["peer_gpu"] = measure(nbytes, devices[0], source)
            with exported(nbytes, devices[0], devices[1]) as other:
                result["both_ways"] = both_ways(nbytes, [source, other])
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if args.out:
        Path(args.out).write_text(text + "\n")
    return 0 if all(found["equal"] for found in result.values() if isinstance(found, dict) and "equal" in found) else 1


if __name__ == "__main__":
    sys.exit(main())
