"""What the programs of this folder have measured, beside what was to be reached: a line for each goal.

    python3 tests/gpu/goals.py [FOLDER]     of result files; tests/gpu/results

Exits with 1 when a goal was missed, or a file holds no figures: a run that was ended while it wrote leaves an empty
one. A file that is not there, or a figure that it lacks, is passed over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARGIN_S = 0.010
"""That a token may be late beyond copy and proof."""
FULL_BYTES = 31e9
"""Of the model that the goals in seconds are for: half of Qwen3-30B-A3B."""
FIRST = "step:transfer_copy"
WIRE = "step:transfer_wire"
PROOF = "step:transfer_verify"
JUDGED = "wire and flip"
"""What is compared with SGLang's own ways, of a round by sends."""
NEAR = 0.85
"""Of the speed over PCIe: the goal says "near"."""
NOT_SLOWER = 0.95
"""Medians of rounds differ by so much from one run to the next."""


@dataclass(frozen=True)
class Goal:
    """One figure. `limit` is the most that it may be, or with `least` the least; without one it is for information."""

    what: str
    figure: float
    limit: float | None = None
    least: bool = False

    @property
    def reached(self) -> bool:
        """It was."""
        if self.limit is None:
            return True
        return self.figure >= self.limit if self.least else self.figure <= self.limit

    def __str__(self) -> str:
        if self.limit is None:
            return f"       {self.what}: {self.figure:.4g}"
        sign = ">=" if self.least else "<="
        return f"{'ok    ' if self.reached else 'MISSED'} {self.what}: {self.figure:.4g} ({sign} {self.limit:.4g})"


@dataclass(frozen=True)
class Unread:
    """A file without figures, and why."""

    file: str
    why: str

    def __str__(self) -> str:
        return f"UNREAD {self.file}: {self.why}"


def proven(name: str, found: Mapping[str, Any]) -> Goal:
    """What has to hold before any figure counts."""
    return Goal(f"{name}: equal", float(bool(found.get("equal"))), 1.0, least=True)


def ratio(found: Mapping[str, Any], of: str, by: str) -> float | None:
    """Of two figures; None when one is missing."""
    return found[of] / found[by] if found.get(of) and found.get(by) else None


def direct(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """colocated, peer and crosswise; the gap by layout."""
    large = found["bytes"] > FULL_BYTES
    for layout, each in found["layouts"].items():
        figures = each.get("figures", {})
        if figures.get("pause_gap_s") is not None and large:
            limit = figures["replay_s"] + figures["verify_s"] + MARGIN_S
            yield Goal(f"{name}: longest gap between tokens, {layout}, s", figures["pause_gap_s"], limit)
            if gaps := [one["pause_gap_s"] for one in each.get("steady", ()) if "pause_gap_s" in one]:
                yield Goal(f"{name}: the same of the median round, {layout}, s", statistics.median(gaps))
    if not large:
        return
    workers = found["command"].partition("--tp ")[2].split(" ")[0] or "1"
    if name.startswith("colocated") and found.get("of_plain_copy"):
        yield Goal(f"{name}: of a plain copy", found["of_plain_copy"], 0.85, least=True)
        yield Goal(f"{name}: times as fast as SGLang's buckets", found["over_sglang_bucket"], 30, least=True)
    elif not name.startswith("colocated"):
        speed = found["bytes"] / int(workers) / found["replay_s"] / 1e9
        yield Goal(f"{name}: GB/s into each GPU", speed, 360, least=True)
    share = found["bytes"] / int(workers) / FULL_BYTES
    yield Goal(f"{name}: proof of 31 GB, s", found["verify_s"] / max(share, 1.0), 0.015)
    yield Goal(f"{name}: recording, s", found["record_s"], 3.0)
    yield Goal(f"{name}: planning and opening, s", found["plan_s"] + opening_s(found["layouts"]), 2.0)


def opening_s(layouts: Mapping[str, Any]) -> float:
    """By how much the first copy of a layout took longer than others: memory is opened and tables are cut in it."""
    firsts = ((each.get("first", {}).get("sidecar_s", {}), each.get("figures", {})) for each in layouts.values())
    return max((first.get(FIRST, 0.0) - figures["replay_s"] for first, figures in firsts if FIRST in first), default=0)


def nccl(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """Sends beside a bare send, and with the flip beside SGLang's own ways.

    Those are timed until the server's parameters hold the version, and prove nothing: so do wire and flip together.
    """
    if (figure := ratio(found, "bare_sendrecv_s", "shard_to_shard_s")) is not None:
        yield Goal(f"{name}: of a bare send", figure, 0.9, least=True)
    ours = sends_s(found)
    for by, what, limit in (
        ("slime_distributed_s", "times as fast as a broadcast for each tensor", 10.0),
        ("flattened_distributed_s", "times as fast as flattened buckets", 5.0),
    ):
        for of, seconds in ours.items() if found.get(by) else ():
            judged = limit if of == JUDGED else None
            yield Goal(f"{name}: {what}, {of}", found[by] / seconds, judged, least=True)
    if found.get("survivors_serving_s"):
        yield Goal(f"{name}: survivors serve after, s", found["survivors_serving_s"], 5.0)
    # No joiner: those of this file come to 2 layers over sockets, in rounds of two engines. joiner.json has the goal's.


def sends_s(found: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the fastest round by sends, by what is counted of it. Without rounds there are none."""
    rounds = found.get("parts", {}).get("speed", {}).get("sends", ())
    beside = [each for each in rounds if WIRE in each.get("sidecar_s", {}) and FIRST in each["sidecar_s"]]
    if not beside:
        return {}
    counted = {"wire": (WIRE,), JUDGED: (WIRE, FIRST), "wire, flip and proof": (WIRE, FIRST, PROOF)}
    steps = {
        what: min(sum(each["sidecar_s"].get(step, 0.0) for step in which) for each in beside)
        for what, which in counted.items()
    }
    return {**steps, "publish()": min(each["publish_s"] for each in beside)}


def joiner(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """From `Hello` to ready, beside the median round. The goal is of two GPUs, and so none of rounds over sockets."""
    one_gpu = found.get("one_gpu", False)
    if (figure := ratio(found, "joiner_s", "normal_round_s")) is not None:
        yield Goal(f"{name}: routable, in rounds", figure, None if one_gpu else 2.0)
    if one_gpu:
        beside = {"a round": min(found.get("steady_beside_wire_s", ()), default=None), "it": found.get("beside_wire_s")}
        yield from (Goal(f"{name}: {what} beside the wire, s", took) for what, took in beside.items() if took)
    elif figure is not None:
        yield Goal(f"{name}: routable after, s", found["joiner_s"])


def quantized(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """FP8 rounds beside bfloat16 rounds."""
    if found.get("of_copy"):
        yield Goal(f"{name}: of device-memory speed", found["of_copy"], 0.7, least=True)
    if (figure := ratio(found, "fp8_round_s", "bf16_round_s")) is not None:
        yield Goal(f"{name}: FP8 round by bfloat16 round", figure, 1.0)
    if (figure := ratio(found, "peer_fp8_s", "peer_bf16_s")) is not None:
        yield Goal(f"{name}: the same from a peer", figure, 0.65)
    median: Mapping[str, Any] = found.get("median") or {}
    if (figure := ratio(median, "fp8_round_s", "bf16_round_s")) is not None:
        yield Goal(f"{name}: FP8 round by bfloat16 round, of the medians", figure)
    if (figure := ratio(median, "peer_fp8_s", "peer_bf16_s")) is not None:
        yield Goal(f"{name}: the same from a peer, of the medians", figure)


def engines(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """Whether a server that was started from a saved version has what the engine was brought."""
    if started := found.get("started_from_files"):
        both = {"equal": started["weights_equal"] and started["tokens_equal"]}
        yield proven(f"{name}, a server started from the files", both)


def int4(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """By model."""
    for model, each in found["models"].items():
        yield proven(f"{name}, {model}", each)


def deaths(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """All cells of the table."""
    cells = found["cells"].values()
    yield Goal(f"{name}: cells that went well", sum(each["well"] for each in cells), max(1, len(cells)), least=True)


def server_deaths(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """Every outcome, also of cells that went well later; and how long after a kill the others answered."""
    cells = [(cell, each) for run in found["runs"] for cell, each in run["cells"].items()]
    passed = [(cell, each) for cell, each in cells if each["passed"]]
    yield Goal(f"{name}: outcomes that went well", len(passed), max(1, len(cells)), least=True)
    killed = [each.get("survivors_serving_s", each.get("freed_s")) for cell, each in passed if " killed " in cell]
    if killed:
        yield Goal(f"{name}: survivors of a kill serve after, s", max(killed), 5.0)


def offloaded(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """Every way of the bytes over the bus."""
    for way in ("pinned", "float32", "snapshot", "quantized"):
        if way in found:
            yield Goal(f"{name}: {way} of a copy over PCIe", found[way]["of_pcie"], NEAR, least=True)


def stages(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """Broadcasts by pipeline stage beside those of one rank that gathers first, and beside slime's calls."""
    if (figure := ratio(found, "gathered_s", "stage_wise_s")) is not None:
        yield Goal(f"{name}: times as fast as gathered", figure, NOT_SLOWER, least=True)
    transfer = found.get("stage_wise_steps", {}).get("engine_s", {}).get("transfer")
    if (figure := ratio({**found, "transfer": transfer}, "slime_s", "transfer")) is not None:
        yield Goal(f"{name}: transfer, times as fast as a broadcast for each tensor", figure)


KINDS: dict[str, Callable[[str, Mapping[str, Any]], Iterator[Goal]]] = {
    "colocated": direct, "peer": direct, "crosswise": direct, "nccl": nccl, "quantized": quantized,
    "engines": engines, "int4": int4, "deaths": deaths, "offloaded": offloaded, "joiner": joiner,
    "stages": stages, "server": server_deaths,
}  # fmt: skip
"""By the first word of a file's name."""


def goals(name: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    """Of the file `name`."""
    kind = KINDS.get(name.partition("-")[0])
    if kind is not None:
        if "equal" in found:
            yield proven(name, found)
        yield from kind(name, found)


def read(folder: Path) -> Iterator[Goal | Unread]:
    """Of every file that has some, and those of which nothing can be read."""
    for file in sorted(folder.glob("*.json")):
        text = file.read_text()
        try:
            found = json.loads(text) if text.strip() else None
        except ValueError as error:
            yield Unread(file.name, f"no JSON: {error}")
            continue
        if isinstance(found, dict) and found:
            yield from goals(file.stem, found)
        else:
            yield Unread(file.name, "it holds nothing")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).with_name("results"))
    folder: Path = parser.parse_args().folder
    found = list(read(folder))
    judged = [each for each in found if isinstance(each, Goal) and each.limit is not None]
    reached = sum(each.reached for each in judged)
    unread = sum(isinstance(each, Unread) for each in found)
    last = f"goals: {reached} of {len(judged)} reached in {folder}" + (f", {unread} files not read" if unread else "")
    sys.stdout.write("\n".join([*map(str, found), last]) + "\n")
    return 0 if judged and reached == len(judged) and not unread else 1


if __name__ == "__main__":
    sys.exit(main())
