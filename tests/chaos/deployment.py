"""The processes of the campaign, and what can be done to each. All on the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from failpoints import POINTS, arm

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit.ports import free_port
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER

HERE = Path(__file__).parent
RANKS = 2
"""Of the trainer: FSDP2 over gloo."""
JOURNAL_BYTES = 64 << 20
"""Room for the journal, where it has a file system of its own."""


class NeverThere(Exception):
    """A failpoint that is passed in every round was not: then the campaign tests less than it says."""


def rights() -> str:
    """Why networks cannot be parted and disks filled here; empty if they can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("unshare", "ip", "iptables", "mount") if shutil.which(name) is None]
    return f"no {', '.join(missing)}" if missing else ""


class Program:
    """One process, started again and again; it can be armed to stop at a failpoint."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path) -> None:
        self.name = name
        self._argv = [sys.executable, str(HERE / "failpoints.py"), name, str(folder), *argv]
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Begin a life, with `more` arguments."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self._argv, *more], stdout=log, stderr=log, start_new_session=True)

    def signal(self, number: int) -> None:
        """To its whole group."""
        assert self._process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait(20)

    @property
    def ended(self) -> int | None:
        """Its exit status, if it has one; it should not."""
        return self._process.poll() if self._process else None

    def close(self) -> None:
        """End it."""
        if self._process and self.ended is None:
            self.signal(signal.SIGKILL)


class Deployment:
    """A coordinator, `engines` servers with their sidecars, and a trainer."""

    def __init__(
        self, folder: Path, checkpoint: Path, engines: int, *, real: bool = False, transport: str = "local"
    ) -> None:
        """`real` launches SGLang itself, on the CPU, in place of the light servers, with our loader in it."""
        self.folder = folder
        self._http = httpx.Client(timeout=2.0, trust_env=False)
        self._bus, self._status = free_port(), free_port()
        self.journal = folder / "journal"
        self.journal.mkdir()
        command = ["-m", "weightbus.control.cli.entry_point"]
        coordinator = [*command, "coordinator", "--insecure-loopback", f"--router-port={self._bus}"]
        coordinator += [f"--http-port={self._status}"]
        coordinator += [f"--journal={self.journal / 'journal.sqlite'}", "--heartbeat-s=0.5", "--silence-s=3"]
        coordinator += ["--takeover-s=1.5", "--lease-s=3", "--offer-s=5", "--pause-s=5", "--prepare-s=5"]
        coordinator += ["--verify-s=10", "--resume-s=10", "--abort-s=5", "--commit-s=5"]
        self.programs = {"coordinator": Program("coordinator", coordinator, folder)}
        self.lines: dict[str, int] = {}
        """Sidecar -> the port by which it, and nobody else, reaches the coordinator; 0: the common one."""
        self.urls: dict[str, str] = {}
        for number in range(engines):
            name = f"e{number}"
            port, line = free_port(), free_port() if not rights() else 0
            self.lines[name], self.urls[name] = line, f"http://127.0.0.1:{port}"
            server = [str(HERE / "server.py"), str(checkpoint), str(port)]
            if real:
                server = ["-m", "weightbus.engine_agent.engines.sglang.cpu_server", f"--model-path={checkpoint}"]
                server += [f"--port={port}", "--skip-tokenizer-init", "--log-level=warning"]
                server += [f"--custom-weight-loader={LOADER}"]
            sidecar = [*command, "engine-agent", "--insecure-loopback", f"--name={name}", "--channel=chaos"]
            sidecar += [f"--server={self.urls[name]}", f"--coordinator=tcp://127.0.0.1:{line or self._bus}"]
            sidecar += [f"--http-port={free_port()}", f"--state-dir={folder / 'state'}", "--poll-s=0.3"]
            sidecar += [f"--runtime-dir={folder / 'run'}"]
            self.programs[f"server-{name}"] = Program(f"server-{name}", server, folder)
            self.programs[f"sidecar-{name}"] = Program(f"sidecar-{name}", sidecar, folder)
            if line:
                _iptables("-t", "nat", "-A", "OUTPUT", *_to(line), "-j", "REDIRECT", "--to-ports", str(self._bus))
        self.ranks = tuple(f"trainer-{rank}" for rank in range(RANKS))
        for rank, name in enumerate(self.ranks):
            trainer = [str(HERE / "trainer.py"), str(folder), f"tcp://127.0.0.1:{self._bus}", str(rank), str(RANKS)]
            trainer += [transport]
            self.programs[name] = Program(name, trainer, folder)
        self.lives = 0
        """Of the trainer, all ranks of which begin and end together."""
        self.ready: Sequence[str] = ()
        self.state = "unknown"
        """Of the round, as last seen."""
        self.committed = 0
        self._gate = socket.socket(socket.AF_UNIX)
        self._gate.bind(str(folder / "gate"))
        self._gate.listen()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._look, self._tend)]

    def start(self) -> None:
        """All of them."""
        if not rights():
            _run("mount", "-t", "tmpfs", "-o", f"size={JOURNAL_BYTES}", "tmpfs", str(self.journal))
        (self.folder / "run").mkdir(mode=0o700)
        for name, program in self.programs.items():
            if name not in self.ranks:
                program.start()
        self._start_trainer()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all of them."""
        self.end_trainer()
        for program in self.programs.values():
            program.close()
        self._gate.close()
        self._http.close()

    def end_trainer(self) -> None:
        """Look after nothing any more, and end every rank."""
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for name in self.ranks:
            self.programs[name].close()

    def _start_trainer(self) -> None:
        self.lives += 1
        for name in self.ranks:
            self.programs[name].start(str(self.folder / f"rendezvous-{self.lives}"))

    def _tend(self) -> None:
        """As torchrun does: when a rank has ended, all of them begin anew."""
        while not self._over.wait(0.2):
            if any(self.programs[name].ended is not None for name in self.ranks):
                for name in self.ranks:
                    self.programs[name].close()
                self._start_trainer()

    # -- what can be seen ----------------------------------------------------------------------------------------------

    def safe(self) -> bool:
        """Every engine is on the ready list, with the committed version."""
        return len(self.ready) == len(self.urls)

    def acks(self) -> list[int]:
        """Versions that the trainer was told are committed, in the order in which it was."""
        path = self.folder / "acks"
        return [json.loads(line)["version"] for line in path.read_text().splitlines()] if path.exists() else []

    def journalled(self) -> list[int]:
        """Versions in the journal's audit trail, in the order in which they became durable. When all is over."""
        with contextlib.closing(sqlite3.connect(self.journal / "journal.sqlite")) as database:
            records = [json.loads(row[0]) for row in database.execute("SELECT record FROM event ORDER BY id")]
        return [record["version"] for record in records if record["record"] == "Committed"]

    def _look(self) -> None:
        while not self._over.wait(0.004):
            try:
                found = self._http.get(f"http://127.0.0.1:{self._status}/status").json()
            except (httpx.HTTPError, ValueError):
                self.state, self.ready = "unknown", ()
                continue
            channel: dict[str, Any] = found["channels"].get("chaos")
            if channel:
                self.state = channel["round"]["state"]
                self.committed = (channel["committed"] or {}).get("version", 0)
                self.ready = tuple(channel["ready"])

    # -- what can be done ----------------------------------------------------------------------------------------------

    def held_at(self, program: str, point: str, limit_s: float) -> Callable[[], None]:
        """Wait until `program` stands at the failpoint `point`; returns what lets it go on. Raises `NeverThere`."""
        armed = self.folder / f"{program}.armed"
        arm(armed, point, POINTS[point].skip)
        self._gate.settimeout(limit_s)
        try:
            line, _ = self._gate.accept()
        except TimeoutError:
            armed.unlink(missing_ok=True)
            raise NeverThere(f"{program} was not at {point} within {limit_s:.0f} s") from None
        told = line.recv(100).decode()
        assert told == point, f"{told} came, {point} was armed"

        def let_go() -> None:
            with contextlib.suppress(OSError), line:  # it may be dead, which is the purpose
                line.send(b".")

        return let_go

    def part(self, engine: str, ways: Sequence[str]) -> Callable[[], None]:
        """Drop what travels between a sidecar and the coordinator; returns what heals it.

        `ways` are ``ORIGINAL``, from the sidecar, and ``REPLY``, to it.
        """
        rules = [
            ["INPUT", "-m", "conntrack", "--ctorigdstport", str(self.lines[engine]), "--ctdir", way, "-j", "DROP"]
            for way in ways
        ]
        for rule in rules:
            _iptables("-I", *rule)

        def heal() -> None:
            for rule in rules:
                _iptables("-D", *rule)

        return heal

    def fill_disk(self) -> Callable[[], None]:
        """Leave the journal no room; returns what makes room again."""
        ballast = self.journal / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return ballast.unlink


def poll(what: str, done: Callable[[], bool], limit_s: float) -> None:
    """Ask until it is so."""
    until = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.005)


def _to(port: int) -> list[str]:
    return ["-p", "tcp", "--dport", str(port)]


def _iptables(*arguments: str) -> None:
    _run("iptables", "-w", *arguments)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
