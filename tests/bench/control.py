"""What the control plane costs at scale: `make bench-control AGENTS=2048`. The last line is one JSON object.

The real coordinator runs as a process of its own, with CURVE, its journal and its HTTP port. Agents are simulated in a
few processes (agents.py) and do at once what they are told; they are not what is measured. In alternation with the
coordinator's rounds, the same processes answer a bare pyzmq ROUTER (bare_router.py) that does nothing but send one
payload to every agent, take one answer of each, and acknowledge it: as many messages as ours, as large. Neither side
acknowledges an answer before the barrier is over, unless that takes longer than the coordinator would wait.

A barrier is one command to every agent and one answer from each. A round has two that wait for nothing else (BARRIERS,
in the result `barriers`); the coordinator itself times them. (Between them each engine is told to pause and to take the
version, and goes on by itself.) `barrier_ratio` compares the slower of the two with the bare barrier, best of all
repetitions each; `barrier_ratio_unacknowledged` with one of two messages for each agent, and not three.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from agents import CHANNEL, Agent, name_of

from weightbus.control.bus.client import BusClient, BusSettings
from weightbus.control.bus.sockets import libzmq_version
from weightbus.control.protocol import codec
from weightbus.control.protocol.errors import RequestRefused
from weightbus.control.protocol.messages import (
    Ack,
    Acquire,
    AgentId,
    Digest,
    Endpoint,
    Epoch,
    Granted,
    Hello,
    Incarnation,
    Offered,
    Outcome,
    Policy,
    Prepare,
    Prepared,
    Publish,
    Role,
    RoundDone,
    Send,
    Sent,
    TrainerInfo,
    TransportKind,
    Version,
)
from weightbus.control.security.keys import CurveFiles

HERE = Path(__file__).parent
TRAINER = "trainer"
BARRIERS = {
    "prepare": "from Publish, which is to be told to every engine as Prepare, until the last Prepared was taken",
    "resume": "from the record of the commit, which every engine is told as Commit, until the last Serving was taken",
}
QUIET_S = 0.5
"""Between two barriers: the acknowledgements of one must not travel in the next."""
HEARTBEATS_S = 10.0
SETTLE_S = 3.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process:
    """A child that takes one line of JSON for each command and answers with one."""

    def __init__(self, *argv: str) -> None:
        self._name = Path(argv[0]).name
        self._child = subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def tell(self, **command: Any) -> None:
        """Begin a command."""
        assert self._child.stdin
        self._child.stdin.write(json.dumps(command).encode() + b"\n")
        self._child.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The answer to a command."""
        assert self._child.stdout
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with {self._child.wait()}")
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Carry a command out."""
        self.tell(**command)
        return self.hear()

    def close(self) -> None:
        """End the child."""
        if self._child.stdin:
            self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class Coordinator:
    """The real one."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self._log = (folder / "coordinator.log").open("w+")
        argv = [
            sys.executable,
            "-m",
            "weightbus.control.cli.entry_point",
            "coordinator",
            f"--keys={keys}",
            "--log-format=json",
        ]
        argv += ["--router-port=0", "--http-port=0", f"--journal={folder / 'journal.sqlite'}"]
        argv += ["--silence-s=600", "--lease-s=600"]
        self.process = subprocess.Popen(argv, stderr=self._log, start_new_session=True)
        started = self._started()
        self.endpoint = f"tcp://127.0.0.1:{started['router_port']}"
        self.http = started["http"]

    def _started(self) -> dict[str, Any]:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            self._log.seek(0)
            for line in self._log:
                if '"coordinator_started"' in line:
                    return json.loads(line)
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self._log.seek(0)
        raise RuntimeError(f"the coordinator did not start: {self._log.read()}")

    def cpu_s(self) -> float:
        """Processor seconds of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def closed(self) -> int:
        """Connections that broke so far, by its own metrics."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=30) as page:
            found = re.search(r'^weightbus_connections_total{event="closed"} (\S+)', page.read().decode(), re.MULTILINE)
        return int(float(found[1])) if found else 0

    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def close(self) -> None:
        """Stop it."""
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class Bench:
    """One run."""

    def __init__(self, folder: Path, agents: int, processes: int, undo: ExitStack) -> None:
        self.agents = agents
        keys = folder / "keys"
        names = [name_of(number) for number in range(agents)]
        weightbus("keygen", f"--keys={keys}", TRAINER, *names)
        weightbus("trust", "add", TRAINER, f"--keys={keys}", "--role=trainer", f"--channels={CHANNEL}")
        weightbus("trust", "add", *names, f"--keys={keys}", "--role=engine", f"--channels={CHANNEL}")
        self.keys = keys
        self.coordinator = Coordinator(folder, keys)
        undo.callback(self.coordinator.close)
        share = -(-agents // processes)
        self.herds = [
            Process(str(HERE / "agents.py"), str(first), str(min(share, agents - first)))
            for first in range(0, agents, share)
        ]
        self.bare = Process(str(HERE / "bare_router.py"), str(keys), str(agents))
        for child in (*self.herds, self.bare):
            undo.callback(child.close)
        self.bare_endpoint = f"tcp://127.0.0.1:{self.bare.hear()['port']}"
        settings = BusSettings(endpoint=self.coordinator.endpoint, curve=CurveFiles.of(keys, TRAINER))
        self.trainer = BusClient(settings, _hello)
        undo.callback(self.trainer.close)

    def connect(self) -> dict[str, Any]:
        """All agents at once, first to the bare socket, then to the coordinator.

        In this order, because a storm keeps the agents' threads from their heartbeats for seconds: connections to the
        coordinator would be given up in the storm on the other.
        """
        self.bare.tell(do="accept")
        bare = max(answer["seconds"] for answer in self._all(do="connect", side="bare", **self._at("bare")))
        bare_cpu = self.bare.hear()["cpu_s"]
        rss, cpu = self.coordinator.rss_bytes(), self.coordinator.cpu_s()
        ours = max(answer["seconds"] for answer in self._all(do="connect", side="ours", **self._at("ours")))
        return {
            "storm_s": ours,
            "storm_cpu_ms_per_agent": 1000 * (self.coordinator.cpu_s() - cpu) / self.agents,
            "rss_kib_per_agent": (self.coordinator.rss_bytes() - rss) / self.agents / 1024,
            "bare_storm_s": bare,
            "bare_storm_cpu_ms_per_agent": 1000 * bare_cpu / self.agents,
        }

    def heartbeats(self) -> dict[str, Any]:
        """One a second from each agent, as real ones send them; counted when a few have gone round.

        An agent's next heartbeat is due a second after the answer to its last, so a little fewer than one a second is
        sent; the share of a core is that of exactly one.
        """
        for herd in self.herds:
            herd.tell(do="beat", seconds=HEARTBEATS_S, interval_s=1.0, settle_s=SETTLE_S)
        time.sleep(SETTLE_S)
        cpu = self.coordinator.cpu_s()
        answers = [herd.hear() for herd in self.herds]
        used = self.coordinator.cpu_s() - cpu
        sent, asked, answered = (sum(answer[what] for answer in answers) for what in ("sent", "asked", "answered"))
        if answered < 0.99 * asked:
            raise RuntimeError(f"{sent} heartbeats, {asked} of them to be answered, {answered} answers")
        return {
            "heartbeats_per_s": sent / HEARTBEATS_S,
            "heartbeat_cpu_us": 1e6 * used / sent,
            "heartbeat_core_share": used / sent * self.agents,
        }

    def round(self, version: int) -> dict[str, float] | None:
        """Publish once; the seconds of the coordinator's own account, and what it cost.

        None if not every engine took part to the end: where the machine is busy with other things, connections are
        given up for silence. Whoever's was finds out by its next heartbeat, so everybody sends one before.
        """
        self._all(do="beat", seconds=1.0, interval_s=1.0)
        with self._serving("ours"):
            cpu = self.coordinator.cpu_s()
            try:
                done = self._publish(version)
            except RequestRefused as error:
                say(f"round {version} does not count: {error}")
                return None
            cpu = self.coordinator.cpu_s() - cpu
            time.sleep(QUIET_S)
        committed = sum(engine.outcome is Outcome.COMMITTED for engine in done.engines)
        if done.outcome is not Outcome.COMMITTED or committed != self.agents:
            broke = f"{self.coordinator.closed()} connections broke so far"
            say(f"round {version} does not count: {committed} of {self.agents} engines {done.outcome} it; {broke}")
            return None
        return {**done.seconds, "cpu": cpu}

    def bare_barrier(self, *, acknowledged: bool) -> dict[str, float]:
        """One barrier of the bare socket."""
        with self._serving("bare", size=SIZES["answer"]):
            ack = SIZES["ack"] if acknowledged else 0
            found = self.bare.ask(do="barrier", command=SIZES["command"], ack=ack)
            time.sleep(QUIET_S)
            return found

    def _publish(self, version: int) -> RoundDone:
        trainer = self.trainer
        granted = trainer.request(Acquire(request=trainer.new_request(), channel=CHANNEL, version=Version(version)))
        assert isinstance(granted, Granted)
        epoch = granted.epoch
        blobs = [trainer.put_blob(blob) for blob in (b"manifest", b"table %d" % version)]
        publish = Publish(
            request=trainer.new_request(),
            channel=CHANNEL,
            epoch=epoch,
            version=Version(version),
            manifest=blobs[0],
            table=blobs[1],
            bytes=0,
            buckets=0,
            policy=Policy(),
        )
        trainer.request(publish)
        while True:
            told = trainer.next(60)
            if isinstance(told, Send):
                offers = (Endpoint(transport=TransportKind.DISK, address="/nowhere"),)
                request = trainer.new_request()
                trainer.request(Offered(request=request, channel=CHANNEL, epoch=told.epoch, offers=offers))
                trainer.request(Sent(request=trainer.new_request(), channel=CHANNEL, epoch=told.epoch))
            elif isinstance(told, RoundDone):
                return told
            elif told is None:
                raise TimeoutError(f"round {version} did not end within 60 s")

    @contextmanager
    def _serving(self, side: str, **more: Any) -> Iterator[None]:
        self._all(do="serve", side=side, **more)
        try:
            yield
        finally:
            for herd in self.herds:
                herd.tell(do="idle")  # any line ends `serve`, which says what it did, and is then carried out
            for herd in self.herds:
                herd.hear()
                herd.hear()

    def _all(self, **command: Any) -> list[dict[str, Any]]:
        for herd in self.herds:
            herd.tell(**command)
        return [herd.hear() for herd in self.herds]

    def _at(self, side: str) -> dict[str, str]:
        endpoint = self.coordinator.endpoint if side == "ours" else self.bare_endpoint
        return {"endpoint": endpoint, "keys": str(self.keys)}


def _hello() -> Hello:
    return Hello(
        request=AgentId(TRAINER),  # type: ignore[arg-type]  # the client puts its own
        agent=AgentId(TRAINER),
        role=Role.TRAINER,
        channel=CHANNEL,
        incarnation=Incarnation("1"),
        trainer=TrainerInfo(host="bench", device="cuda", ranks=1, transports=(TransportKind.DISK,)),
    )


def weightbus(*argv: str) -> None:
    """Run one command of the project's own."""
    command = [sys.executable, "-m", "weightbus.control.cli.entry_point", *argv]
    ended = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"weightbus {argv[0]} ended with {ended.returncode}: {ended.stderr.strip()}")


def _sizes() -> dict[str, int]:
    """Bytes of what a barrier of ours sends, so that the bare one sends as many."""
    digest = Digest("0" * 64)
    prepare = Prepare(
        channel=CHANNEL,
        epoch=Epoch(1000),
        version=Version(1000),
        manifest=digest,
        table=digest,
        transport=TransportKind.DISK,
        policy=Policy(),
        deadline_s=30.0,
    )
    request = Agent(0).key()
    prepared = Prepared(request=request, channel=CHANNEL, epoch=Epoch(1000), seconds=0.001)
    frames = {
        "command": codec.TO_AGENT.encode(prepare),
        "answer": codec.TO_COORDINATOR.encode(prepared),
        "ack": codec.TO_AGENT.encode(Ack(request=request)),
    }
    return {what: sum(map(len, each)) for what, each in frames.items()}


SIZES = _sizes()


def barriers(bench: Bench, repetitions: int) -> dict[str, Any]:
    """Rounds and bare barriers in alternation; the first of each only warms up."""
    rounds: list[dict[str, float]] = []
    bare: list[dict[str, float]] = []
    unacknowledged: list[dict[str, float]] = []
    disturbed = 0
    for version in range(1, 4 * repetitions):
        if (found := bench.round(version)) is not None:
            rounds.append(found)
        disturbed += found is None
        bare.append(bench.bare_barrier(acknowledged=True))
        unacknowledged.append(bench.bare_barrier(acknowledged=False))
        if len(rounds) > repetitions:
            break
    else:
        raise RuntimeError(f"{disturbed} rounds were disturbed: this machine has too much else to do")
    best_bare = min(each["seconds"] for each in bare[1:])
    best_unacknowledged = min(each["seconds"] for each in unacknowledged[1:])
    best = {phase: min(each[phase] for each in rounds[1:]) for phase in BARRIERS}
    return {
        "rounds_disturbed": disturbed,
        "barriers": BARRIERS,
        "barrier_ms": {phase: 1000 * seconds for phase, seconds in best.items()},
        "barrier_all_ms": {phase: [round(1000 * each[phase], 2) for each in rounds[1:]] for phase in BARRIERS},
        "bare_barrier_ms": 1000 * best_bare,
        "bare_barrier_all_ms": [round(1000 * each["seconds"], 2) for each in bare[1:]],
        "bare_barrier_unacknowledged_ms": 1000 * best_unacknowledged,
        "bare_barrier_cpu_us_per_agent": 1e6 * min(each["cpu_s"] for each in bare[1:]) / bench.agents,
        "round_ms": 1000 * min(each["total"] for each in rounds[1:]),
        "round_cpu_us_per_agent": 1e6 * min(each["cpu"] for each in rounds[1:]) / bench.agents,
        "barrier_ratios": {phase: seconds / best_bare for phase, seconds in best.items()},
        "barrier_ratio": max(best.values()) / best_bare,
        "barrier_ratio_unacknowledged": max(best.values()) / best_unacknowledged,
    }


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2, help="that simulate agents")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--save", type=Path, help="file that the result is written to")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the children end too
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8 * given.agents:
        raise SystemExit(f"{given.agents} agents need {8 * given.agents} open files, {hard} are allowed: ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="wb-bench-")))
        bench = Bench(folder, given.agents, given.processes, undo)
        report: dict[str, Any] = {
            "agents": given.agents,
            "machine": machine(),
            "date": f"{dt.datetime.now(tz=dt.UTC).date()}",
        }
        report["command"] = f"make bench-control AGENTS={given.agents}"
        report |= bench.connect()
        say(f"storm: {report['storm_s']:.2f} s, bare {report['bare_storm_s']:.2f} s")
        bench.trainer.start()
        report |= barriers(bench, given.repetitions)
        say(f"barriers: {report['barrier_ms']}, bare {report['bare_barrier_ms']:.1f} ms")
        report |= bench.heartbeats()
        report["connections_broken"] = bench.coordinator.closed()
        report["machine"]["load_after"] = round(os.getloadavg()[0], 1)
        say(f"heartbeats: {report['heartbeats_per_s']:.0f} a second, {report['heartbeat_core_share']:.1%} of a core")
    text = json.dumps(report, indent=2)
    if given.save:
        given.save.write_text(text + "\n")
    say(json.dumps(report))


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    python = platform.python_version()
    return {
        "cores": os.cpu_count(),
        "cpu": model.partition(":")[2].strip(),
        "python": python,
        "libzmq": libzmq_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def say(line: str) -> None:
    """One line."""
    print(line, flush=True)  # noqa: T201  # the result of this program


if __name__ == "__main__":
    main()
