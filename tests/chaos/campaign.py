"""Faults in real processes during real rounds: `make chaos CYCLES=100`. The last line tells whether any of it mattered.

    cycles=N lost_acks=0 mixed_tokens=0 worst_fault_to_safe_s=X

A coordinator, light servers (tests/kit/fake_sglang.py, under the same contract as the real one), their sidecars and a
trainer run as processes. In each cycle one of them is killed, or stopped and continued, or parted from the coordinator,
or the journal's disk is full; the fault strikes in a given state of a round, which is watched from outside, so no code
of the product knows that it is tested. (Simulation strikes between any two effects; here processes and kernels are
real.) Meanwhile clients generate from every engine on the ready list and compute for each token which weights made it.

After each fault everything must become *safe*: another version is committed, and every engine is on the ready list. The
time from the fault until then is what is printed, the fault's own duration included. Lost acks are versions that the
trainer was told are committed and that the journal does not hold, or that went back. Mixed tokens are those that were
not made by the complete weights of the version they are labelled with, or whose version was never committed.

Partitions and full disks need root, `unshare`, `ip`, `iptables` and `mount`, all inside namespaces of its own; without
them they are left out, and it is said why.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import model
from deployment import Deployment, poll, rights
from hammer import Hammer

INSIDE = "WEIGHTBUS_CHAOS_INSIDE"
STATES = ("preparing", "pausing", "offering", "transferring", "verifying", "committing", "resuming")
SAFE_S = 90.0
REAL_SAFE_S = 400.0
"""A real server takes 20 s to start where nothing else runs."""
AIM_S = 5.0
"""How long a state is waited for before the fault strikes wherever the round is."""
Heal = Callable[[], None]


class Campaign:
    """Faults, one after the other."""

    def __init__(self, folder: Path, undo: ExitStack, *, engines: int, seed: int, real: bool) -> None:
        self._safe_s = REAL_SAFE_S if real else SAFE_S
        self._random = random.Random(seed)
        checkpoint = model.write_checkpoint(folder / "checkpoint")
        self.deployment = Deployment(folder, checkpoint, engines, real=real)
        undo.callback(self.deployment.close)
        self.deployment.start()
        poll("the first version", lambda: bool(self.deployment.acks()) and self.deployment.safe(), self._safe_s)
        self.hammer = Hammer(checkpoint, lambda: self.deployment.ready, 1 if real else engines, real=real)
        undo.callback(self.hammer.close)
        self.lost = 0
        self.times: dict[str, float] = {}
        """Fault -> the longest time until all was safe."""

    def faults(self) -> list[str]:
        """What can be done here."""
        engine = [f"{kind}-{name}" for name in self.deployment.urls for kind in ("server", "sidecar")]
        programs = ["coordinator", "trainer", *engine]
        found = [f"{how} {program}" for program in programs for how in ("kill", "stop")]
        if not rights():
            found += [f"{how} {name}" for name in self.deployment.urls for how in ("part", "mute", "deafen")]
            found.append("fill disk")
        return found

    def cycle(self, fault: str, state: str) -> str:
        """Strike in `state`, heal, and wait until all is safe; returns what happened."""
        how, _, whom = fault.partition(" ")
        aimed = time.monotonic() + AIM_S
        while self.deployment.state != state and time.monotonic() < aimed:
            time.sleep(0.001)
        struck, began = self.deployment.state, time.monotonic()
        acked = max(self.deployment.acks())
        heal = self._strike(how, whom)
        time.sleep(self._random.uniform(0.1, 1.0) if how == "kill" else self._random.choice((0.5, 2.0, 4.5)))
        heal()
        poll(f"another version after {fault!r} in {struck}", lambda: max(self.deployment.acks()) > acked, self._safe_s)
        poll(f"every engine to be ready after {fault!r} in {struck}", self.deployment.safe, self._safe_s)
        took = time.monotonic() - began
        self.lost += self.deployment.committed < acked
        self.times[fault] = max(took, self.times.get(fault, 0.0))
        return f"{fault} in {struck}: safe after {took:.2f} s"

    def verdict(self) -> tuple[int, int]:
        """Lost acks and mixed tokens, when all is over."""
        self.hammer.close()
        self.deployment.programs["trainer"].close()
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
                return programs[whom].start
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


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults and the choice of states")
    parser.add_argument("--real", action="store_true", help="real SGLang servers, on the CPU, in place of light ones")
    parser.add_argument("--save", type=Path, help="file that the result is written to, as JSON")
    given = parser.parse_args()
    if reason := rights():
        say(f"no partitions, no full disk: {reason}")
    elif INSIDE not in os.environ:
        enter = 'ip link set lo up && exec "$@"'
        argv = ["unshare", "--net", "--mount", "sh", "-c", enter, "sh", sys.executable, *sys.argv]
        os.execvpe(argv[0], argv, {**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="wbc-", ignore_cleanup_errors=True)))
        campaign = Campaign(folder, undo, engines=given.engines, seed=given.seed, real=given.real)
        done = 0
        try:
            for number, (fault, state) in enumerate(plan(campaign.faults(), given.cycles, given.seed), 1):
                say(f"{number}: {campaign.cycle(fault, state)}")
                done = number
        except TimeoutError as error:
            say(f"NOT SAFE: {error}")
            for log in sorted(folder.glob("*.log")):
                say(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]))
            worst = float("inf")
        else:
            worst = max(campaign.times.values())
        lost, mixed = campaign.verdict()
        report = {"cycles": done, "lost_acks": lost, "mixed_tokens": mixed, "worst_fault_to_safe_s": round(worst, 2)}
        report |= {"commits": len(campaign.deployment.acks()), "tokens": campaign.hammer.tokens, "seed": given.seed}
        for wrong in campaign.hammer.wrong[:5]:
            say(wrong)
        say(f"versions={report['commits']} tokens={report['tokens']} seed={given.seed}")
        if given.save:
            times = {fault: round(seconds, 2) for fault, seconds in sorted(campaign.times.items())}
            given.save.write_text(json.dumps({**report, "worst_by_fault_s": times}, indent=2) + "\n")
    say(f"cycles={done} lost_acks={lost} mixed_tokens={mixed} worst_fault_to_safe_s={worst:.2f}")
    return 0 if done == given.cycles and not lost and not mixed else 1


def plan(faults: Sequence[str], cycles: int, seed: int) -> list[tuple[str, str]]:
    """Every fault before any comes again, in an order and in states that follow from the seed."""
    choose = random.Random(seed)
    found: list[tuple[str, str]] = []
    while len(found) < cycles:
        found += zip(
            choose.sample(faults, len(faults)), itertools.cycle(choose.sample(STATES, len(STATES))), strict=False
        )
    return found[:cycles]


def say(line: str) -> None:
    """One line."""
    print(line, flush=True)  # noqa: T201  # the result of this program


if __name__ == "__main__":
    sys.exit(main())
