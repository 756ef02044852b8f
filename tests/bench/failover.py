"""How long a new leader takes, and that nothing committed is lost: `make bench-failover CYCLES=10`. JSON comes last.

Two coordinators as real processes share a real etcd; a trainer publishes as fast as it can to engines that take every
version at once. In turns the leader is killed (SIGKILL), or stopped for longer than its lease and then continued.
Everything is on the loopback.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from light import CHANNEL, Engine, Trainer  # noqa: E402

from tests.kit.etcd_member import BINARY, MISSING, etcd_member  # noqa: E402
from tests.kit.ports import free_port  # noqa: E402

LIMIT_S = 60.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Whatever proxies the environment names."""


class Coordinator:
    """One of the two. Its ports stay the same through every life."""

    def __init__(self, folder: Path, name: str, store: str, leader_s: float) -> None:
        self.name = name
        ports = [free_port() for _ in range(2)]
        self.endpoint, self.http = f"tcp://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        self._log = folder / f"{name}.log"
        self._argv = [sys.executable, "-m", "weightbus.control.cli.entry_point", "coordinator", "--insecure-loopback"]
        self._argv += [f"--store={store}", f"--name={name}", f"--leader-s={leader_s:g}"]
        self._argv += [f"--router-port={ports[0]}", f"--http-port={ports[1]}"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin a life."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stderr=log, start_new_session=True)

    def signal(self, number: int) -> None:
        """SIGKILL, SIGSTOP, SIGCONT."""
        assert self._process
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def close(self) -> None:
        """End it."""
        if self._process and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)

    def get(self, path: str, timeout_s: float = 2.0) -> tuple[int, bytes]:
        """Status and body of a page; 0 if nobody answers."""
        try:
            with DIRECT.open(self.http + path, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()
        except OSError:
            return 0, b""

    @property
    def leads(self) -> bool:
        """Whether it would take agents."""
        return self.get("/readyz")[0] == 200

    @property
    def stands_by(self) -> bool:
        """Whether it refuses agents and says who leads."""
        status, body = self.get("/readyz")
        return status == 503 and b"leads" in body

    @property
    def committed(self) -> int:
        """What the leader calls committed; 0 for nothing. A leader that is only slow to say it is waited for."""
        found: list[int] = []

        def told() -> bool:
            status, body = self.get("/status")
            if status == 200:
                channel = json.loads(body).get("channels", {}).get(CHANNEL, {})
                found.append((channel.get("committed") or {}).get("version", 0))
            return bool(found)

        wait(f"the status of {self.name}", told)
        return found[0]


class Pair:
    """The deployment."""

    def __init__(self, folder: Path, undo: ExitStack, *, leader_s: float, engines: int) -> None:
        member = undo.enter_context(etcd_member(folder))
        self.leader_s = leader_s
        self.both = [Coordinator(folder, name, f"etcd://{member.address}", leader_s) for name in ("c0", "c1")]
        for each in self.both:
            undo.callback(each.close)
            each.start()
        wait("somebody to lead", lambda: any(each.leads for each in self.both))
        endpoints = ",".join(each.endpoint for each in self.both)
        self.engines = [Engine(endpoints, f"e{number}") for number in range(engines)]
        self.trainer = Trainer(endpoints)
        for each in (self.trainer, *self.engines):
            undo.callback(each.close)
        self.lost = 0
        self.wait_commits(3)

    def cycle(self, fault: int) -> dict[str, float]:
        """One fault of the leader, until a version is committed under the other."""
        old, new = self.roles()
        time.sleep(random.uniform(0.0, 0.2))  # anywhere in a round
        acked = self.trainer.acked[-1][0]
        began = time.monotonic()
        old.signal(fault)
        acked = max(acked, self.trainer.acked[-1][0])
        wait("a new leader", lambda: new.leads)
        led = time.monotonic()
        self._expect(new, acked)
        wait("a commit", lambda: self.trainer.acked[-1][1] > led)
        committed = next(at for _, at in self.trainer.acked if at > led)
        if fault == signal.SIGSTOP:
            old.signal(signal.SIGCONT)
            wait("the old leader to stand by", lambda: old.stands_by)
        else:
            old.start()
        self._expect(new, self.trainer.acked[-1][0])
        return {"leader_s": led - began, "commit_s": committed - began}

    def roles(self) -> tuple[Coordinator, Coordinator]:
        """The leader and the standby; waits for both, since a page of a busy machine may come late."""
        one, other = self.both
        orders = ((one, other), (other, one))
        found: list[tuple[Coordinator, Coordinator]] = []

        def settled() -> bool:
            found[:] = [pair for pair in orders if pair[0].leads and pair[1].stands_by]
            return bool(found)

        wait("one to lead and the other to stand by", settled)
        return found[0]

    def wait_commits(self, count: int) -> None:
        """Until so many more versions are committed."""
        wanted = len(self.trainer.acked) + count
        wait("commits", lambda: len(self.trainer.acked) >= wanted)

    def _expect(self, leader: Coordinator, acked: int) -> None:
        self.lost += leader.committed < acked

    @property
    def orderly(self) -> bool:
        """Whether every version was answered as committed once, in order."""
        versions = [version for version, _ in self.trainer.acked]
        return versions == sorted(set(versions))


def wait(what: str, done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Poll until it is so."""
    until = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.01)


def main() -> None:
    """Kill and stop leaders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--leader-s", type=float, default=5.0, help="the leader's lease")
    parser.add_argument("--save", type=Path, help="file that the result is written to")
    given = parser.parse_args()
    if BINARY is None:
        raise SystemExit(MISSING)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="wb-ha-")))
        pair = Pair(folder, undo, leader_s=given.leader_s, engines=given.engines)
        found: dict[str, list[dict[str, float]]] = {"killed": [], "stopped": []}
        for number in range(given.cycles):
            kind, fault = (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP))[number % 2]
            found[kind].append(pair.cycle(fault))
            say(f"{number + 1}: {kind}, {found[kind][-1]}")
        report: dict[str, Any] = {
            "date": f"{dt.datetime.now(tz=dt.UTC).date()}",
            "cores": os.cpu_count(),
            "command": f"make bench-failover CYCLES={given.cycles}",
            "lease_s": given.leader_s,
            "engines": given.engines,
            "cycles": given.cycles,
            "commits": len(pair.trainer.acked),
            "lost_commits": pair.lost,
            "in_order": pair.orderly,
        }
    for kind, cycles in found.items():
        for what in ("leader_s", "commit_s"):
            times = [cycle[what] for cycle in cycles]
            if times:
                worst, median = max(times), statistics.median(times)
                report[f"{kind}_to_{what}"] = {"median": round(median, 3), "worst": round(worst, 3)}
    if given.save:
        given.save.write_text(json.dumps(report, indent=2) + "\n")
    say(json.dumps(report))
    sys.exit(0 if report["lost_commits"] == 0 and report["in_order"] else 1)


def say(line: str) -> None:
    """One line."""
    print(line, flush=True)  # noqa: T201  # the result of this program


if __name__ == "__main__":
    main()
