"""Throws hostile frames at the decoders of the control plane. `make fuzz N=100000000`.

A decoder may accept or refuse. It must not raise anything but a `ProtocolError`, and what it accepts must survive being
sent again unchanged: everything else is a crash, shown with the input that did it. The last line is the tally.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from weightbus.control.protocol import codec
from weightbus.control.protocol.codec import MessageCodec
from weightbus.control.protocol.errors import ProtocolError

from ..control.protocol.test_codec import TO_AGENT, TO_COORDINATOR
from .mutations import Frames, Mutator

WIRES: Final[tuple[tuple[str, MessageCodec[Any], Any], ...]] = (
    ("agent to coordinator", codec.TO_COORDINATOR, TO_COORDINATOR),
    ("coordinator to agent", codec.TO_AGENT, TO_AGENT),
)
SLICE: Final = 250_000
"""Inputs of one seed: a crash is found again by its seed in seconds."""
SHOWN: Final = 20


class Tally(msgspec.Struct):
    """What became of the inputs."""

    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    crashes: list[str] = []

    def add(self, other: Tally) -> None:
        self.inputs += other.inputs
        self.refused += other.refused
        self.accepted += other.accepted
        self.crashes += other.crashes

    def __str__(self) -> str:
        return f"inputs={self.inputs} refused={self.refused} accepted={self.accepted} crashes={len(self.crashes)}"


def campaign(seed: int, inputs: int) -> Tally:
    """Throw `inputs` hostile frames, the same for the same seed, at each decoder in turn."""
    tally = Tally()
    for name, wire, examples in WIRES:
        good = [wire.encode(message, blob) for message, blob in examples]
        mutator = Mutator(good, seed)
        for _ in range(inputs // len(WIRES) + (inputs % len(WIRES) if wire is codec.TO_AGENT else 0)):
            frames = mutator.next()
            problem = _throw(wire, frames, tally)
            if problem:
                tally.crashes.append(f"seed {seed}, {name}: {problem}\n    {[frame[:200] for frame in frames]!r}")
    return tally


def _throw(wire: MessageCodec[Any], frames: Frames, tally: Tally) -> str:
    tally.inputs += 1
    try:
        message, blob = wire.decode(frames)
    except ProtocolError:
        tally.refused += 1
        return ""
    except BaseException as error:  # noqa: BLE001  exactly what is looked for
        return f"{type(error).__name__}: {error}"
    tally.accepted += 1
    try:
        again = wire.encode(message, blob)
        twice = wire.encode(*wire.decode(again))
    except BaseException as error:  # noqa: BLE001  likewise
        return f"accepted, and cannot be sent: {type(error).__name__}: {error}"
    return "" if again == twice else "accepted, and changes when it is sent"


def _slice(job: tuple[int, int]) -> Tally:
    return campaign(*job)


def _slices(seed: int, inputs: int) -> Iterator[tuple[int, int]]:
    for number, begin in enumerate(range(0, inputs, SLICE)):
        yield seed + number, min(SLICE, inputs - begin)


def main() -> int:
    """Run a campaign on every core; the exit code says whether anything crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--crashes", type=Path, help="write what crashed here")
    given = parser.parse_args()
    begun, total = time.monotonic(), Tally()
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for tally in pool.imap_unordered(_slice, _slices(given.seed, given.inputs)):
            total.add(tally)
            if sys.stderr.isatty():
                print(f"\r{total}  {total.inputs / (time.monotonic() - begun):,.0f}/s ", end="", file=sys.stderr)  # noqa: T201
    for crash in total.crashes[:SHOWN]:
        print(crash)  # noqa: T201
    if given.crashes and total.crashes:
        given.crashes.write_text("\n".join(total.crashes) + "\n", encoding="utf-8")
    print(total)  # noqa: T201
    return 1 if total.crashes or total.inputs != given.inputs else 0


if __name__ == "__main__":
    sys.exit(main())
