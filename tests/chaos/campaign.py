"""Faults in real processes during real rounds: `make chaos CYCLES=100`. The last line tells whether any of it mattered.

    cycles=N lost_acks=0 mixed_tokens=0 worst_fault_to_safe_s=X

A coordinator, light servers (tests/kit/fake_sglang.py, under the same contract as the real one), their sidecars and a
trainer of two FSDP2 ranks run as processes. In each cycle one of them is brought to a named failpoint (failpoints.py)
and held there: before a commit is durable, after the first engine was told, between two buckets. Then somebody is
killed (SIGKILL) or stopped and continued: that process, or the server that it was about to ask; or a sidecar is parted
from the coordinator, in one direction or both; or the journal's disk is full. Meanwhile clients generate from every
engine on the ready list and compute for each token which weights made it.

After each fault everything must become *safe*: another version is committed, and every engine is on the ready list. The
time from the fault until then is what is printed, the fault's own duration included. Lost acks are versions that the
trainer was told are committed and that the journal does not hold, or that went back. Mixed tokens are those that were
not made by the complete weights of the version they are labeled with, or whose version was never committed. A
failpoint that is not reached fails the campaign. What was done where, and how often, is printed at the end.

`--real` has SGLang itself serve, on the CPU. `--transport direct` then has its workers copy out of the ranks' shared
memory, as on GPUs, in rounds that are announced before their digest table is known.

Partitions and full disks need root, `unshare`, `ip`, `iptables` and `mount`, all inside namespaces of its own; without
them they are left out, and it is said why. `--within-s` ends a campaign early: it begins no cycle after so long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import model
from deployment import Deployment, NeverThere, poll, rights
from failpoints import AT_SERVER, ONLY, POINTS, passed
from hammer import Hammer

INSIDE = "WEIGHTBUS_CHAOS_INSIDE"
SAFE_S = 300.0
REAL_SAFE_S = 500.0
"""A real server takes 20 s to start where nothing else runs."""
REACH_S = 120.0
REAL_REACH_S = 200.0
"""How long a failpoint is waited for, which is passed in every round."""
AT_PARTITION = ("validated", "dirty_durable", "second_bucket", "verified", "resumes")
AT_FULL_DISK = ("grant_unwritten", "commit_unwritten", "answer_unwritten")


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
        self, folder: Path, undo: ExitStack, *, engines: int, seed: int, real: bool, transport: str = "local"
    ) -> None:
        self._safe_s, self._reach_s = (REAL_SAFE_S, REAL_REACH_S) if real else (SAFE_S, REACH_S)
        self._random = random.Random(seed)
        checkpoint = model.write_checkpoint(folder / "checkpoint")
        self.deployment = Deployment(folder, checkpoint, engines, real=real, transport=transport)
        undo.callback(self.deployment.close)
        self.deployment.start()
        poll("the first version", lambda: bool(self.deployment.acks()) and self.deployment.safe(), self._safe_s)
        self.hammer = Hammer(checkpoint, lambda: self.deployment.ready, 1 if real else engines, real=real)
        undo.callback(self.hammer.close)
        self.lost = 0
        self.executed: dict[Strike, list[float]] = {}
        """What was done -> how long it took each time until all was safe."""

    def cycle(self, strike: Strike) -> str:
        """Strike there, heal, and wait until all is safe; returns what happened."""
        let_go = self.deployment.held_at(strike.program, strike.point, self._reach_s)
        state, began, acked = self.deployment.state, time.monotonic(), max(self.deployment.acks())
        try:
            heal = self._strike(strike.how, strike.whom)
        finally:
            let_go()
        lasts_s = self._random.uniform(0.1, 1.0) if strike.how == "kill" else self._random.choice((0.5, 2.0, 4.5))
        time.sleep(lasts_s)
        heal()
        poll(f"another version after {strike}", lambda: max(self.deployment.acks()) > acked, self._safe_s)
        poll(f"every engine to be ready after {strike}", self.deployment.safe, self._safe_s)
        took = time.monotonic() - began
        self.lost += self.deployment.committed < acked
        self.executed.setdefault(strike, []).append(took)
        return f"{strike} (round: {state}): safe after {took:.2f} s"

    def verdict(self) -> tuple[int, int]:
        """Lost acks and mixed tokens, when all is over."""
        self.hammer.close()
        self.deployment.end_trainer()
        acks = self.deployment.acks()
        self.deployment.programs["coordinator"].close()
        durable = self.deployment.journalled()
        lost = self.lost + len(set(acks) - set(durable)) + (durable != sorted(set(durable)))
        never = self.hammer.versions - set(durable) - {model.LAUNCH}
        return lost, len(self.hammer.wrong) + len(never)

    def _strike(self, how: str, whom: str) -> Heal:
        programs = self.deployment.programs
        match how:
            case "kill":
                programs[whom].signal(signal.SIGKILL)
                return programs[whom].start if whom not in self.deployment.ranks else _nothing
            case "stop":
                programs[whom].signal(signal.SIGSTOP)
                return lambda: programs[whom].signal(signal.SIGCONT)
            case "part":
                return self.deployment.part(whom, ("ORIGINAL", "REPLY"))
            case "mute":
                return self.deployment.part(whom, ("ORIGINAL",))
            case "deafen":
                return self.deployment.part(whom, ("REPLY",))
            case _:
                return self.deployment.fill_disk()


def _nothing() -> None:
    """The trainer's ranks are begun anew by whoever looks after them."""


def strikes(engines: Sequence[str], *, alone: bool, transport: str = "local") -> list[Strike]:
    """Everything that can be done in rounds over `transport`; `alone` leaves out what needs root."""
    found: list[Strike] = []
    for point in passed(transport):
        at = POINTS[point]
        for engine in engines if at.program == "sidecar" else engines[:1]:
            program = f"sidecar-{engine}" if at.program == "sidecar" else at.program
            found += [Strike(how, program, program, point) for how in ("kill", "stop")]
            if point in AT_SERVER:
                found += [Strike(how, f"server-{engine}", program, point) for how in ("kill", "stop")]
            if point in AT_PARTITION and not alone:
                found += [Strike(how, engine, program, point) for how in ("part", "mute", "deafen")]
            if point in AT_FULL_DISK and not alone:
                found.append(Strike("fill", "disk", program, point))
    return found


def arguments() -> argparse.Namespace:
    """What was asked for. Exits where it cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults and of the choice of failpoints")
    parser.add_argument("--real", action="store_true", help="real SGLang servers, on the CPU, in place of light ones")
    parser.add_argument("--transport", choices=sorted(ONLY), default="local", help="direct: with --real, open tables")
    parser.add_argument("--within-s", type=float, default=float("inf"), help="begin no cycle after so long")
    parser.add_argument("--save", type=Path, help="file that the result is written to, as JSON")
    given = parser.parse_args()
    if given.transport == "direct" and not given.real:
        parser.error("--transport direct needs workers that hold weights: give --real too")
    return given


def main() -> int:
    """Run the campaign."""
    given = arguments()
    if reason := rights():
        say(f"no partitions, no full disk: {reason}")
    elif INSIDE not in os.environ:
        enter = 'ip link set lo up && exec "$@"'
        argv = ["unshare", "--net", "--mount", "sh", "-c", enter, "sh", sys.executable, *sys.argv]
        os.execvpe(argv[0], argv, {**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = time.monotonic()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="wbc-", ignore_cleanup_errors=True)))
        campaign = Campaign(
            folder, undo, engines=given.engines, seed=given.seed, real=given.real, transport=given.transport
        )
        say(f"all ready after {time.monotonic() - began:.0f} s")
        done, whole = 0, True
        possible = strikes(list(campaign.deployment.urls), alone=bool(rights()), transport=given.transport)
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
        lost, mixed = campaign.verdict()
        for wrong in campaign.hammer.wrong[:5]:
            say(wrong)
        for line in executed(campaign.executed, len(passed(given.transport))):
            say(line)
        versions, tokens = len(campaign.deployment.acks()), campaign.hammer.tokens
        say(f"versions={versions} tokens={tokens} trainer_lives={campaign.deployment.lives} seed={given.seed}")
        if given.save:
            report = {"cycles": done, "lost_acks": lost, "mixed_tokens": mixed, "worst_fault_to_safe_s": worst}
            report |= {"versions": versions, "tokens": tokens, "seed": given.seed, "real": given.real}
            report |= {"transport": given.transport}
            each = {str(strike): [round(took, 2) for took in took_s] for strike, took_s in campaign.executed.items()}
            given.save.write_text(json.dumps({**report, "fault_to_safe_s": each}, indent=2) + "\n")
    say(f"cycles={done} lost_acks={lost} mixed_tokens={mixed} worst_fault_to_safe_s={worst:.2f}")
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
    """Every kind of fault of every program before any comes again, each time at another failpoint; by the seed."""
    choose = random.Random(seed)
    kinds: dict[tuple[str, str], list[Strike]] = {}
    for strike in choose.sample(found, len(found)):
        kinds.setdefault((strike.how, strike.whom), []).append(strike)
    order = choose.sample(sorted(kinds), len(kinds))
    planned: list[Strike] = []
    while len(planned) < cycles:
        turn = len(planned) // len(order)
        planned += [kinds[kind][turn % len(kinds[kind])] for kind in order]
    return planned[:cycles]


def say(line: str) -> None:
    """One line."""
    print(line, flush=True)  # noqa: T201  # the result of this program


if __name__ == "__main__":
    sys.exit(main())
