"""``--seeds 1000``: many seeds. ``--seed 42``: the story of one. ``--trace 0 20``: hashes of some."""

from __future__ import annotations

import argparse
import logging
import sys

from .campaign import campaign, cores, first, report, run_chunk
from .invariants import INVARIANTS
from .scenario import draw
from .story import tell


def main() -> int:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes")
    parser.add_argument("--seed", type=int, help="tell the whole story of this one")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that finds something")
    parser.add_argument("--breaks", choices=INVARIANTS, default="", help="with --first: only by this invariant")
    parser.add_argument("--tell", action="store_true", help="with --first: its story")
    parser.add_argument(
        "--setbacks", action="store_true", help="in all of them the journal is set back to older copies"
    )
    parser.add_argument(
        "--times", type=float, default=1.0, help="so many times as long, with more versions than history"
    )
    parser.add_argument("--trace", type=int, nargs=2, metavar=("FROM", "TO"), help="print the trace hash of each")
    given = parser.parse_args()
    # A faulty disk makes the journal warn a thousand times.
    logging.getLogger("weightbus").setLevel(logging.CRITICAL)
    if given.seed is not None:
        print(tell(draw(given.seed, setbacks=given.setbacks, times=given.times), lines=sys.maxsize))
        return 0
    if given.trace:
        for ended in run_chunk(range(*given.trace), setbacks=given.setbacks, times=given.times, tracing=True):
            print(ended.seed, ended.trace)
        return 0
    if given.first:
        return first(
            given.start,
            given.seeds,
            setbacks=given.setbacks,
            times=given.times,
            breaks=given.breaks,
            telling=given.tell,
        )
    return report(
        campaign(given.start, given.seeds, given.jobs, setbacks=given.setbacks, times=given.times),
        setbacks=given.setbacks,
        times=given.times,
    )


if __name__ == "__main__":
    raise SystemExit(main())
