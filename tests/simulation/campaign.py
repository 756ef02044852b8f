"""Runs many seeds on all cores, and reports what they found."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec

from .scenario import draw
from .story import tell_shrunk
from .world import Ended, simulate

CHUNK: Final = 20
TOGETHER: Final = 10
"""Worlds that are collected at a time: a few megabytes each."""
STORIES: Final = 3
"""Failing seeds whose story is told; of the others the number is."""
PROGRESS_S: Final = 5.0


class Tally(msgspec.Struct):
    """What a campaign has seen so far."""

    seeds: int = 0
    faults: int = 0
    messages: int = 0
    failed: list[Ended] = []

    def add(self, ended: Ended) -> None:
        """One more seed is through."""
        self.seeds += 1
        self.faults += ended.faults
        self.messages += ended.messages
        if ended.violation:
            self.failed.append(ended)

    def __str__(self) -> str:
        return f"seeds={self.seeds} faults={self.faults} messages={self.messages} violations={len(self.failed)}"


def run_chunk(
    seeds: Iterable[int], *, setbacks: bool = False, times: float = 1.0, tracing: bool = False
) -> list[Ended]:
    """Run some seeds in this process; `tracing` makes their hashes."""
    results = []
    with _few_collections() as collect:
        for seed in seeds:
            results.append(simulate(draw(seed, setbacks=setbacks, times=times), tracing=tracing))
            collect()
    return results


@contextmanager
def _few_collections() -> Generator[Callable[[], None]]:
    """A world is one heap of cycles: some of them are collected when they are over, and nothing else is looked at."""
    was, over = gc.isenabled(), 0
    gc.disable()
    gc.collect()
    gc.freeze()

    def collect() -> None:
        nonlocal over
        over += 1
        if over % TOGETHER == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


def chunks(start: int, count: int) -> Iterator[range]:
    """The seeds in portions."""
    for first in range(start, start + count, CHUNK):
        yield range(first, min(first + CHUNK, start + count))


def campaign(start: int, count: int, jobs: int, *, setbacks: bool = False, times: float = 1.0) -> Tally:
    """Run `count` seeds from `start` on, with progress on stderr."""
    tally, began, told = Tally(), time.monotonic(), time.monotonic()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for results in pool.imap_unordered(partial(run_chunk, setbacks=setbacks, times=times), chunks(start, count)):
            for ended in results:
                tally.add(ended)
                if ended.violation and len(tally.failed) <= STORIES:
                    print(f"seed {ended.seed} breaks {ended.violation.splitlines()[0]}", file=sys.stderr, flush=True)
            now = time.monotonic()
            if now - told >= PROGRESS_S:
                told = now
                print(f"{tally} ({tally.seeds / (now - began):.0f} seeds/s)", file=sys.stderr, flush=True)
    return tally


def first(
    start: int, count: int, *, setbacks: bool = False, times: float = 1.0, breaks: str = "", telling: bool
) -> int:
    """Run seeds one by one until one finds something; with `breaks`, until that invariant falls."""
    with _few_collections() as collect:
        for seed in range(start, start + count):
            scenario = draw(seed, setbacks=setbacks, times=times)
            ended = simulate(scenario)
            if ended.violation and ended.violation.startswith(f"{breaks}:" if breaks else ""):
                print(tell_shrunk(scenario, ended.violation) if telling else "", flush=True)
                print(f"seed {seed} breaks {ended.violation.splitlines()[0]}")
                return 1
            collect()
    return 0


def report(tally: Tally, *, setbacks: bool = False, times: float = 1.0) -> int:
    """Tell the stories of what failed; the last line is for machines."""
    for ended in sorted(tally.failed, key=lambda each: each.seed)[:STORIES]:
        print(tell_shrunk(draw(ended.seed, setbacks=setbacks, times=times), ended.violation))
    if len(tally.failed) > STORIES:
        print("more failing seeds:", *sorted(each.seed for each in tally.failed))
    print(tally)
    return 1 if tally.failed else 0


def cores() -> int:
    """Processes that may run at once."""
    return len(os.sched_getaffinity(0))
