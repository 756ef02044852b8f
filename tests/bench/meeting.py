"""What a look at the engines costs the leader of a broadcast: `python tests/bench/meeting.py`, or `make bench-meeting`.

Over loopback, without engines: their words are written beforehand, `at` anew before each look, as every bucket does.
Prints one JSON object. `look_ms` is a look at who has failed, and at the bucket to which each has come; `one_by_one_ms`
the same by a question for each engine; `of_the_time` is how much of a round's time the leader looks. `epoch_ms` is once
in a round: to make room for the words, and to forget them. The median of `--times`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

from weightbus.dataplane.processes.connections import new_token
from weightbus.dataplane.processes.process_groups import join_store, serve_store
from weightbus.dataplane.transports.distributed.rendezvous_keys import Rendezvous
from weightbus.dataplane.transports.distributed.sender import BEHIND_S, WATCH_S


def milliseconds(call: Callable[[], object], times: int, before: Callable[[int], object] = lambda _: None) -> float:
    """The median."""
    taken: list[float] = []
    for turn in range(times):
        before(turn)
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(taken), 3)


def measure(count: int, times: int) -> dict[str, object]:
    """A leader of `count` engines."""
    store, token = serve_store("127.0.0.1"), new_token()
    engines = [f"engine-{number}" for number in range(count)]

    def epoch() -> None:
        Rendezvous(join_store(store), 2, token, engines).clear()

    meeting, others = Rendezvous(join_store(store), 1, token, engines), Rendezvous(join_store(store), 1, token)

    def go_on(bucket: int) -> None:
        for engine in engines:
            others.announce(f"at/{engine}", str(bucket))
        others.heard("at", engines[-1])  # by now all are there

    def one_by_one() -> None:
        for step in ("failed", "at"):
            for engine in engines:
                meeting.heard(step, engine)

    failed = milliseconds(lambda: meeting.heard_from("failed", engines), times)
    at = milliseconds(lambda: meeting.heard_from("at", engines), times, go_on)
    single = milliseconds(one_by_one, times, go_on)
    return {
        "engines": count,
        "look_ms": {"failed": failed, "at": at},
        "one_by_one_ms": single,
        "ratio": round(single / (failed + at), 1),
        "of_the_time": round((failed / WATCH_S + at / BEHIND_S) / 1e3, 4),
        "epoch_ms": milliseconds(epoch, max(1, times // 5)),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--times", type=int, default=25)
    asked = parser.parse_args()
    found = [measure(count, asked.times) for count in asked.engines]
    said = {"machine": platform.machine(), "python": platform.python_version(), "of": found}
    sys.stdout.write(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
