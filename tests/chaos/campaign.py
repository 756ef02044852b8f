"""Faults in real processes during real rounds: `make chaos CYCLES=100`. The last line tells whether any of it mattered.

    cycles=N lost_acks=0 mixed_tokens=0 worst_fault_to_safe_s=X

A coordinator, light servers (tests/kit/fake_sglang.py, under the same contract as the real one), their sidecars and a
trainer of two FSDP2 ranks run as processes. In each cycle one of them is brought to a named failpoint (failpoints.py)
and held there: before a commit is durable, after the first engine was told, between two buckets. Then a fault strikes
(`FAULTS`). Meanwhile clients generate from every engine on the ready list and find out which weights made each token.

After each fault everything must become *safe*: another version is committed, and every engine is on the ready list. The
time from the fault until then is what is printed, the fault's own duration included. Lost acks are versions that the
trainer was told are committed and that were not durable then, or went back; the campaign keeps its own record of both
(ledger.py). Mixed tokens are those that were not made by the complete weights of the version they are labeled with, or
of a version that was not committed when they came. A failpoint that is not reached fails the campaign. What was done
where, and how often, is printed at the end.

`--real` has SGLang itself serve, on the CPU. `--transport direct` then has its workers copy out of the ranks' shared
memory, as on GPUs, in rounds that are announced before their digest table is known.

A disk is filled and frozen where root may mount one, in a namespace of its own; else those faults are left out, and it
is said why. `--within-s` ends a campaign early: it begins no cycle after so long. `PLANT=loss` and `PLANT=mix` in the
environment plant a bug (plants.py), which the last line then has to show.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import model
from deployment import Deployment, NeverThere, no_disk, poll
from failpoints import AT_SERVER, ONLY, POINTS, passed
from hammer import Hammer
from verdict import lost_acks, uncommitted

INSIDE = "WEIGHTBUS_CHAOS_INSIDE"
SAFE_S = 300.0
REAL_SAFE_S = 500.0
"""A real server takes 20 s to start where nothing else runs."""
REACH_S = 120.0
REAL_REACH_S = 200.0
"""How long a failpoint is waited for, which is passed in every round."""
AT_PARTITION = ("validated", "dirty_durable", "second_bucket", "verified", "resumes")
AT_DISK = ("grant_unwritten", "commit_unwritten", "answer_unwritten")
AT_RECORD = ("dirty_durable", "second_bucket", "bucket_loaded", "received", "verified", "resumes", "resumed")
"""Where a sidecar's record is worth something."""
FAULTS = {
    "kill": "SIGKILL, of any process, also of the server that was about to be asked",
    "stop": "SIGSTOP, and SIGCONT later",
    "part": "a sidecar and the coordinator hear nothing of each other",
    "mute": "a sidecar is not heard",
    "deafen": "a sidecar hears nothing",
    "fill": "the journal's disk is full",
    "freeze": "the journal's disk answers no write; engines generate meanwhile",
    "gone": "no coordinator for 30 s",
    "revoke": "the coordinator does not trust an agent's key for a while",
    "forget": "a sidecar comes back without its record",
    "forget-anew": "the same, in the first transfer to a server that was just launched",
    "relapse": "a sidecar comes back with an older record",
    "rename": "a sidecar comes back under another name",
    "rename-anew": "the same, in the first transfer to a server that was just launched",
    "swap": "between two calls of a sidecar another launch of its server takes the place of the one behind its address",
    "twin": "a second sidecar of another channel reaches a server by another address, with a trainer that publishes",
}
"""What can be done."""
GONE_S, FROZEN_S, TWIN_S = 30.0, 12.0, 10.0
TOLD = 10
"""Lines that are printed of what was wrong."""


Heal = Callable[[], None]


class Strike(NamedTuple):
    """One fault: `how` strikes `whom` while `program` stands at `point`."""

    how: str
    whom: str
    program: str
    point: str

    def __str__(self) -> str:
        return f"{self.how} {self.whom} at {self.point}"


class Campaign:
    """Faults, one after the other."""

    def __init__(
        self,
        folder: Path,
        undo: ExitStack,
        *,
        engines: int,
        seed: int,
        real: bool,
        transport: str = "local",
        relayed: bool = False,
        disk: bool = False,
        ahead: int = 0,
    ) -> None:
        self._safe_s, self._reach_s = (REAL_SAFE_S, REAL_REACH_S) if real else (SAFE_S, REACH_S)
        self._random = random.Random(seed)
        checkpoint = model.write_checkpoint(folder / "checkpoint")
        self.deployment = Deployment(
            folder, checkpoint, engines, real=real, transport=transport, relayed=relayed, disk=disk
        )
        undo.callback(self.deployment.close)
        self.deployment.start(ahead)
        poll("the first version", lambda: bool(self.deployment.acks()) and self.deployment.safe(), self._safe_s)
        self.hammer = Hammer(
            checkpoint,
            lambda: self.deployment.ready,
            1 if real else engines,
            real=real,
            published=lambda: self.deployment.commits().durable,
        )
        undo.callback(self.hammer.close)
        self.found: list[str] = []
        """What was wrong, as it was noticed during the cycles."""
        self.intruders: list[str] = []
        """Second sidecars that were not refused, each counted as a mixed token."""
        self.executed: dict[Strike, list[float]] = {}
        """What was done -> how long it took each time until all was safe."""

    def cycle(self, strike: Strike) -> str:
        """Strike there, heal, and wait until all is safe; returns what happened."""
        hit = self._prepared(strike)
        let_go = self.deployment.held_at(strike.program, strike.point, self._reach_s)
        state, began, acked = self.deployment.state, time.monotonic(), self.deployment.last_ack
        try:
            heal = hit()
        finally:
            let_go()
        try:
            self._endure(strike)
        finally:
            heal()
        poll(f"another version after {strike}", lambda: self.deployment.last_ack > acked, self._safe_s)
        poll(f"every engine to be ready after {strike}", self.deployment.safe, self._safe_s)
        took = time.monotonic() - began
        if self.deployment.committed < acked:
            self.found.append(f"after {strike} version {self.deployment.committed} is current, {acked} was answered")
        self.executed.setdefault(strike, []).append(took)
        return f"{strike} (round: {state}): safe after {took:.2f} s"

    def _endure(self, strike: Strike) -> None:
        """For as long as the fault lasts."""
        match strike.how:
            case "gone":
                time.sleep(GONE_S)
            case "freeze":
                time.sleep(FROZEN_S)
                since = time.monotonic()
                poll("a coordinator whose disk hangs", lambda: self.deployment.answered_at > since, FROZEN_S)
                if strike.point != "commit_unwritten":  # there engines hold the new version, and no old one any more
                    poll("an answer while the disk hangs", lambda: self.hammer.answered_at > since, FROZEN_S)
            case "twin":
                poll("the second sidecar to be answered", self.deployment.twin_was_answered, self._reach_s)
                time.sleep(TWIN_S)
                if not self.deployment.twin_refused:
                    self.intruders.append(f"a second sidecar of the server of {strike.whom} was not refused")
            case "kill":
                time.sleep(self._random.uniform(0.1, 1.0))
            case _:
                time.sleep(self._random.choice((0.5, 2.0, 4.5)))

    def verdict(self) -> tuple[list[str], list[str], int]:
        """What was lost, what was served and should not have been, and the number of tokens in it; when all is over."""
        self.hammer.close()
        self.deployment.end_trainer()
        self.deployment.programs["coordinator"].close()
        commits = self.deployment.commits(over=True)
        lost = [*self.found, *lost_acks(self.deployment.acks(), commits)]
        never = uncommitted(self.hammer.seen, commits, model.LAUNCH)
        twice = [*self.intruders]
        twice += [f"{url} was on the ready lists of two channels" for url in sorted(self.deployment.listed_twice)]
        mixed = self.hammer.wrong_tokens + len(never) + len(twice)
        return lost, [*self.hammer.wrong, *never, *twice], mixed

    def _prepared(self, strike: Strike) -> Callable[[], Heal]:
        """What strikes, once what it needs is there."""
        deployment, whom = self.deployment, strike.whom
        engine = whom.rpartition("-")[2]
        change: Callable[[], None] = _nothing
        if strike.how.endswith("-anew"):
            deployment.kill(f"server-{engine}")
            deployment.programs[f"server-{engine}"].start()
        if strike.how == "swap":
            deployment.launch_spare(engine, self._safe_s)
        elif strike.how == "relapse":
            change, acked = deployment.keep_record(engine), deployment.last_ack
            poll("another version, with another record", lambda: deployment.last_ack > acked, self._safe_s)
        elif strike.how.startswith("forget"):
            change = functools.partial(deployment.forget, engine)
        elif strike.how.startswith("rename"):
            change = functools.partial(deployment.rename, engine)
        ways: dict[str, Callable[[], Heal]] = {
            "stop": lambda: deployment.stop(whom),
            "part": lambda: deployment.part(whom, "up", "down"),
            "mute": lambda: deployment.part(whom, "up"),
            "deafen": lambda: deployment.part(whom, "down"),
            "fill": deployment.fill_disk,
            "freeze": deployment.freeze_disk,
            "revoke": lambda: deployment.revoke(whom),
            "swap": lambda: deployment.swap(engine),
            "twin": lambda: deployment.start_twin(engine),
        }
        return ways.get(strike.how, lambda: deployment.kill_until(whom, change))


def _nothing() -> None:
    """Nothing is to be done."""


def strikes(
    engines: Sequence[str], faults: Collection[str], *, disk: bool = True, transport: str = "local"
) -> list[Strike]:
    """All of `faults` that can be done in rounds over `transport`; without a `disk` none of the disk."""
    found: list[Strike] = []
    for point in passed(transport):
        at = POINTS[point]
        for engine in engines if at.program == "sidecar" else engines[:1]:
            program = f"sidecar-{engine}" if at.program == "sidecar" else at.program
            here = [(how, program) for how in ("kill", "stop")]
            if point in AT_SERVER:
                here += [(how, f"server-{engine}") for how in ("kill", "stop")]
            if point in AT_SERVER and engine == engines[-1] and transport == "local":
                here.append(("swap", f"server-{engine}"))
            if point in AT_PARTITION:
                here += [(how, engine) for how in ("part", "mute", "deafen", "revoke", "twin")]
                here.append(("gone", "coordinator"))
            if point in AT_RECORD:
                here += [(how, program) for how in ("forget", "relapse", "rename")]
                here += [(how, program) for how in ("forget-anew", "rename-anew")]
            if point in AT_DISK and disk:
                here += [(how, "disk") for how in ("fill", "freeze")]
            if at.program == "coordinator":
                here += [("gone", "coordinator"), ("revoke", "trainer-chaos")]
            found += [Strike(how, whom, program, point) for how, whom in here if how in faults]
    return found


def arguments() -> argparse.Namespace:
    """What was asked for. Exits where it cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults and of the choice of failpoints")
    parser.add_argument("--real", action="store_true", help="real SGLang servers, on the CPU, in place of light ones")
    parser.add_argument("--transport", choices=sorted(ONLY), default="local", help="direct: with --real, open tables")
    listed = ", ".join(FAULTS)
    parser.add_argument("--faults", help=f"comma-separated; default: all of {listed}")
    parser.add_argument("--ahead", type=int, default=0, help="versions that are committed before there is any engine")
    parser.add_argument("--within-s", type=float, default=float("inf"), help="begin no cycle after so long")
    parser.add_argument("--save", type=Path, help="file that the result is written to, as JSON")
    given = parser.parse_args()
    given.faults = set(given.faults.split(",")) if given.faults else set(FAULTS)
    if unknown := given.faults - FAULTS.keys():
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {listed}")
    if given.transport == "direct" and not given.real:
        parser.error("--transport direct needs workers that hold weights: give --real too")
    return given


def main() -> int:
    """Run the campaign."""
    given = arguments()
    without = no_disk()
    if without:
        say(f"no full disk, no frozen disk: {without}")
    elif INSIDE not in os.environ:
        argv = ["unshare", "--mount", sys.executable, *sys.argv]
        os.execvpe(argv[0], argv, {**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = time.monotonic()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="wbc-", ignore_cleanup_errors=True)))
        relayed = "swap" in given.faults and given.transport == "local"
        shape = {"engines": given.engines, "seed": given.seed, "real": given.real, "transport": given.transport}
        campaign = Campaign(folder, undo, **shape, relayed=relayed, disk=not without, ahead=given.ahead)
        say(f"all ready after {time.monotonic() - began:.0f} s")
        done, whole = 0, True
        engines = list(campaign.deployment.urls)
        possible = strikes(engines, given.faults, disk=not without, transport=given.transport)
        planned = plan(possible, given.cycles, given.seed)
        try:
            for number, strike in enumerate(planned, 1):
                if time.monotonic() - began > given.within_s:
                    say(f"{given.within_s:.0f} s are over: {len(planned) - done} cycles are left out")
                    break
                say(f"{number}: {campaign.cycle(strike)}")
                done = number
        except (TimeoutError, NeverThere) as error:
            whole = False
            say(f"NOT SAFE: {error}")
            for log in sorted(folder.glob("*.log")):
                say(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]))
        times = [took for each in campaign.executed.values() for took in each]
        worst = max(times, default=float("inf")) if whole else float("inf")
        lost, wrong, mixed = campaign.verdict()
        for line in (*lost[:TOLD], *wrong[:TOLD]):
            say(line)
        for line in executed(campaign.executed, len(passed(given.transport))):
            say(line)
        versions, tokens = len(campaign.deployment.acks()), campaign.hammer.tokens
        say(f"versions={versions} tokens={tokens} trainer_lives={campaign.deployment.lives} seed={given.seed}")
        if given.save:
            report = {"cycles": done, "lost_acks": len(lost), "mixed_tokens": mixed, "worst_fault_to_safe_s": worst}
            report |= {"versions": versions, "tokens": tokens, "seed": given.seed, "real": given.real}
            report |= {"transport": given.transport}
            each = {str(strike): [round(took, 2) for took in took_s] for strike, took_s in campaign.executed.items()}
            given.save.write_text(json.dumps({**report, "fault_to_safe_s": each}, indent=2) + "\n")
    say(f"cycles={done} lost_acks={len(lost)} mixed_tokens={mixed} worst_fault_to_safe_s={worst:.2f}")
    return 0 if done and whole and not lost and not mixed else 1


def executed(found: Mapping[Strike, Sequence[float]], most: int) -> list[str]:
    """What was done to whom, at which failpoints and how often; of `most` failpoints that there are."""
    lines: dict[tuple[str, str], Counter[str]] = {}
    for strike, took in found.items():
        lines.setdefault((strike.how, strike.whom), Counter())[strike.point] += len(took)
    points = {strike.point for strike in found}
    told = [
        f"executed {how} {whom}: " + ", ".join(f"{point} {count}" for point, count in sorted(at.items()))
        for (how, whom), at in sorted(lines.items())
    ]
    return [*told, f"failpoints={len(points)}/{most} faults={sum(map(len, found.values()))}"]


def plan(found: Sequence[Strike], cycles: int, seed: int) -> list[Strike]:
    """Every kind of fault before any comes again, each time at another program and failpoint; by the seed."""
    choose = random.Random(seed)
    kinds: dict[str, dict[str, list[Strike]]] = {}
    for strike in choose.sample(found, len(found)):
        kinds.setdefault(strike.how, {}).setdefault(strike.whom, []).append(strike)
    turns = {how: _in_turn(list(each.values())) for how, each in sorted(kinds.items())}
    order = choose.sample(list(turns), len(turns))
    planned: list[Strike] = []
    for number in range(cycles):
        each = turns[order[number % len(order)]]
        planned.append(each[number // len(order) % len(each)])
    return planned


def _in_turn(lists: Sequence[Sequence[Strike]]) -> list[Strike]:
    """The first of each, the second of each, and so on."""
    return [each[turn] for turn in range(max(map(len, lists))) for each in lists if turn < len(each)]


def say(line: str) -> None:
    """One line."""
    print(line, flush=True)  # noqa: T201  # the result of this program


if __name__ == "__main__":
    sys.exit(main())
