"""Two GPUs that read from each other at the same time: by which means, and how fast.

Each of two processes holds memory on a GPU of its own, exports it as a trainer does, and copies out of the other's, as
workers of a TP2 engine do: both at once, and one alone. Rows are those of Qwen3-30B-A3B in 24 layers: 3,072 of 3 MB and
as many of 1.5 MB. What is tried: the product's kernel, plain copies, batches for copy engines in some branches, both
together, slices of columns, shorter runs, and the owner writing instead.

    python3 tests/gpu/crosswise.py              two CUDA devices, 16 GB free on each twice over; under 100 s
    python3 tests/gpu/crosswise.py --dry        the same steps on host memory, with a driver of our own

Prints one JSON object; `--out FILE` writes it too. Targets are overwritten before every copy, sources are random anew
for every variant, and all of what was copied is compared. A variant that fails says why, and the others go on. Exits
with 1 unless everything that was copied was right.
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
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import rig
from crosswise_parts import Lost, Side, columns, rows, same, whole

from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.copy.engine_selection import DEFAULT_COPY_STREAMS, copy_engine_for
from weightbus.dataplane.copy.memcpy_batch import SHARES, CopyBatch, split_into_runs

ROUNDS = 6
LONG_S = 1.5
"""A variant that has copied for so long in a mode is not tried again in it."""
POISON = 0xA5


# -- variants ----------------------------------------------------------------------------------------------------------


class Variant:
    """One way of copying: `make` binds it and returns what runs it, what ends it, and what there is to say of it."""

    def __init__(
        self,
        name: str,
        copied: CopyTable,
        make: Callable[[], tuple[Callable[[], object], Callable[[], object], dict[str, Any]]],
        *,
        push: bool = False,
        modes: Sequence[str] = ("both", "alone"),
    ) -> None:
        self.name, self.copied, self.make, self.push, self.modes = name, copied, make, push, modes


Made = tuple[Callable[[], object], Callable[[], object], dict[str, Any]]


def nothing() -> None:
    """To end."""


def bases(*tensors: torch.Tensor) -> np.ndarray:
    return np.array([each.data_ptr() for each in tensors], np.int64)


def kernel(side: Side, copied: CopyTable, source: torch.Tensor, target: torch.Tensor) -> Made:
    copied.check(np.array([source.numel()]), np.array([target.numel()]))
    copies = copy_engine_for(side.device).prepare_copies(copied, [source], [target])
    return copies.launch, copies.close, {"rows": len(copied)}


def plain(source: torch.Tensor, target: torch.Tensor) -> Made:
    return lambda: target.copy_(source), nothing, {}


def batch(
    side: Side,
    copied: CopyTable,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    branches: int = DEFAULT_COPY_STREAMS,
    shares: Sequence[int] = SHARES,
) -> Made:
    """The product's batches, on streams in turn."""
    runs = split_into_runs(copied, bases(source), bases(target))
    made = CopyBatch(runs, branches, side.library, shares)
    streams = side.streams[: len(made)]

    def run() -> None:
        if side.dry:
            return made.launch(range(1, len(made) + 1))
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        made.launch([int(stream.cuda_stream) for stream in streams])
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return None

    return run, nothing, {"runs": len(runs), "calls": len(shares), "streams": len(made)}


def mixed(side: Side, copied: CopyTable, source: torch.Tensor, target: torch.Tensor, *, every: int) -> Made:
    """The kernel takes one row of `every`, at the same time."""
    by_kernel = np.arange(len(copied)) % every == 0
    engines = batch(side, copied.take(np.flatnonzero(~by_kernel)), source, target)
    ours = kernel(side, copied.take(np.flatnonzero(by_kernel)), source, target)
    beside = side.streams[-1]

    def run() -> None:
        if side.dry:
            ours[0]()
            engines[0]()
            return
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            ours[0]()
        engines[0]()
        torch.cuda.current_stream().wait_stream(beside)

    return run, ours[1], {**engines[2], "by_kernel": 1 / every}


def variants(side: Side) -> list[Variant]:
    """All of them."""
    source, target, out = side.peer_source, side.target, side.peer_target
    many, one = rows(side.large, side.small, side.pairs), whole(side.nbytes)
    slices, lines = (side.nbytes, 8) if side.dry else (2 * 10**9, 2048)
    found = [
        Variant("kernel", many, lambda: kernel(side, many, source, target)),
        Variant("plain", one, lambda: plain(source, target)),
    ]
    for name, shares, streams in (
        ("product", SHARES, DEFAULT_COPY_STREAMS),
        *((f"batch_{k}", (1,) * k, k) for k in (1, 2, 3, 4, 7)),
        *((f"equal_{n}_on_{k}", (1,) * n, k) for n, k in ((8, 4), (16, 4), (16, 2))),
        ("ramp_1_2_4_4_on_4", (1, 2, 4, 4), 4),
        ("ramp_1_4_8_8_on_4", (1, 4, 8, 8), 4),
        ("ramp_1_2_4_8_8_8_8_8_on_4", (1, 2, 4, 8, 8, 8, 8, 8), 4),
        ("ramp_1_1_2_4_8_8_8_8_8_8_on_2", SHARES, 2),
    ):
        found.append(
            Variant(name, many, lambda s=shares, k=streams: batch(side, many, source, target, branches=k, shares=s))
        )
    found += [
        Variant(f"batch_{k}_whole", one, lambda k=k: batch(side, one, source, target, branches=k, shares=(1,) * k))
        for k in (1, 4)
    ]
    found += [
        Variant(
            f"batch_{DEFAULT_COPY_STREAMS}_kernel_{every}",
            many,
            lambda e=every: mixed(side, many, source, target, every=e),
        )
        for every in (16, 8)
    ]
    for width in (768, 1536, 4096, 65536):
        cut = columns(width, lines, slices)
        found.append(Variant(f"columns_{width}", cut, lambda t=cut: kernel(side, t, source, target), modes=("both",)))
    for width in (256 * 1024, 2**20):
        cut = columns(width, 8, slices)
        found += [
            Variant(f"runs_{width}_kernel", cut, lambda t=cut: kernel(side, t, source, target), modes=("both",)),
            Variant(f"runs_{width}_batch", cut, lambda t=cut: batch(side, t, source, target), modes=("both",)),
        ]
    found += [
        Variant("push_kernel", many, lambda: kernel(side, many, side.source, out), push=True),
        Variant("push_plain", one, lambda: plain(side.source, out), push=True),
        Variant(f"push_batch_{DEFAULT_COPY_STREAMS}", many, lambda: batch(side, many, side.source, out), push=True),
    ]
    if side.dry:  # what was opened of another process's host memory may not be written
        found = [each for each in found if not each.push]
    return found


def measure(side: Side, variant: Variant, mode: str, run: Callable[[], object]) -> dict[str, Any]:
    """Some rounds, and whether everything came. Every step is met by both, also when one of them fails in it."""
    problem, times = "", []
    busy = mode == "both" or side.side == 0
    with reporting() as refilled:
        side.refill()
    problem = refilled.text
    for _ in range(ROUNDS):
        if any(side.pair.meet(float(bool(problem) or sum(each[0] for each in times) > LONG_S))):
            break
        side.target.fill_(POISON)
        side.sync()
        side.pair.meet()
        if busy:
            with reporting() as ran:
                times.append(side.timed(run))
            problem = problem or ran.text
        side.pair.meet()  # what the other one writes here must have come before it is overwritten
    side.pair.meet()
    right = True
    if not problem and (side.side == (1 if variant.push else 0) or mode == "both"):
        with reporting() as compared:
            right = same(variant.copied, side.peer_source, side.target)
            side.sync()
        problem = compared.text
    side.pair.meet()
    found: dict[str, Any] = {"equal": right, "bytes": int(variant.copied.target_bytes.sum())}
    if busy and times:
        found |= {"s": [each[0] for each in times], "launch_s": min(each[1] for each in times)}
    return found | ({"error": problem} if problem else {})


class reporting(contextlib.AbstractContextManager["reporting"]):  # noqa: N801
    """Keeps an exception as text."""

    text = ""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None or isinstance(error, (Lost, KeyboardInterrupt, SystemExit)):
            return False
        last = traceback.extract_tb(trace)[-1]
        self.text = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        return True


def run_side(number: int, work: Path, pairs: int, until: float, only: tuple[str, ...], *, dry: bool) -> None:
    """One process: a line of JSON for each variant."""
    say({"started": number})
    side = Side(number, work, pairs, dry=dry)
    try:
        try_all(side, until, only)
    finally:
        side.pair.leave()


def try_all(side: Side, until: float, only: tuple[str, ...]) -> None:
    """One variant after another; `only` those whose names begin so, if any."""
    for variant in variants(side):
        if only and not variant.name.startswith(only):
            continue
        if max(side.pair.meet(float(time.time() > until))):
            say({"name": variant.name, "error": "left out: no time was left"})
            continue
        made: Made = (nothing, nothing, {})
        began = time.perf_counter()
        with reporting() as built:
            made = variant.make()
            made[0]()  # what is compiled or begun for the first time
            side.sync()
        found: dict[str, Any] = {"name": variant.name, "build_s": time.perf_counter() - began, **made[2]}
        if any(side.pair.meet(float(bool(built.text)))):
            say(found | {"error": built.text or "the other side could not be made"})
        else:
            for mode in variant.modes:
                found[mode] = measure(side, variant, mode, made[0])
            say(found)
        with reporting():
            side.sync()
            made[1]()
        side.pair.meet()
    say({"ended": side.side})
    side.pair.meet()
    side.importer.close()
    side.pair.meet()
    side.exporter.close()


def say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


# -- the process that starts them --------------------------------------------------------------------------------------


def together(sides: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What both said of one variant: GB/s into each GPU, of the round in which the slower one was fastest."""
    found: dict[str, Any] = {key: value for key, value in sides[0].items() if key not in {"name", "both", "alone"}}
    errors = {f"side {at}": each["error"] for at, each in enumerate(sides) if each.get("error")}
    for mode in ("both", "alone"):
        parts = [each[mode] for each in sides if mode in each]
        errors |= {f"{mode}, side {at}": each["error"] for at, each in enumerate(parts) if each.get("error")}
        timed = [each["s"] for each in parts if each.get("s")]
        if not timed or (mode == "both" and len(timed) < len(sides)):
            continue
        slower = [max(times) for times in zip(*timed, strict=False)]
        at = min(range(len(slower)), key=lambda each: slower[each])
        moved = parts[0]["bytes"]
        found[mode] = {
            "gb_s": round(moved / slower[at] / 1e9, 1),
            "gb_s_each": [round(moved / times[at] / 1e9, 1) for times in timed],
            "s": slower[at],
            "launch_s": max(each["launch_s"] for each in parts if "launch_s" in each),
            "bytes": moved,
            "equal": all(each["equal"] for each in parts),
        }
    found.pop("error", None)
    return found | ({"error": errors} if errors else {})


def listen(process: subprocess.Popen[str], into: list[dict[str, Any]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            into.append(json.loads(line))
        except ValueError:
            sys.stderr.write(line)  # somebody else's word


def orchestrate(args: argparse.Namespace) -> dict[str, Any]:
    """Start both, merge what they say for as long as there is time."""
    began = time.time()
    heard: list[list[dict[str, Any]]] = [[], []]
    with tempfile.TemporaryDirectory(prefix="wb-cross-") as folder:
        work = Path(folder)
        (work / "pair").write_bytes(bytes(4096))
        processes, listeners = [], []
        for number in range(2):
            command = [sys.executable, __file__, "--side", str(number), "--work", folder, "--pairs", str(args.pairs)]
            command += ["--until", str(began + args.seconds - 15), *(["--dry"] if args.dry else [])]
            command += ["--only", *args.only]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            listeners.append(threading.Thread(target=listen, args=(process, heard[number]), daemon=True))
            listeners[-1].start()
        problems = []
        for number, process in enumerate(processes):
            try:
                if code := process.wait(max(began + args.seconds - time.time(), 1.0)):
                    problems.append(f"side {number} ended with {code}")
            except subprocess.TimeoutExpired:
                problems.append(f"side {number} did not end within {args.seconds:.0f} s")
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for listener in listeners:
            listener.join(5.0)
    named = [{each["name"]: each for each in side if "name" in each} for side in heard]
    found = {
        name: together([side[name] for side in named]) for name in named[0] if name in named[1]
    }  # fmt: skip
    equal = all(
        each[mode]["equal"] for each in found.values() for mode in ("both", "alone") if mode in each
    ) and bool(found)  # fmt: skip
    return {"variants": found, "equal": equal, "problems": problems, "took_s": time.time() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="host memory, and a driver of our own")
    parser.add_argument("--pairs", type=int, default=0, help="rows of each kind; 3072, dry 6")
    parser.add_argument("--seconds", type=float, default=95.0, help="for everything")
    parser.add_argument("--only", nargs="*", default=[], help="variants whose names begin so")
    parser.add_argument("--out", help="write the JSON here too")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.pairs = args.pairs or (6 if args.dry else 3072)
    if args.side is not None:
        run_side(args.side, args.work, args.pairs, args.until, tuple(args.only), dry=args.dry)
        return 0
    result: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": "host memory" if args.dry else rig.devices(),
        "command": rig.command("crosswise.py"),
        "software": {"torch": torch.__version__, "cuda": torch.version.cuda},
        **orchestrate(args),
    }
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if args.out:
        Path(args.out).write_text(text + "\n")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
