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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from failpoints import POINTS, arm
from ledger import FOUND, Commits, Line, lines
from relay import RelayProcess
from verdict import Ack

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit.ports import free_port
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER

HERE = Path(__file__).parent
RANKS = 2
"""Of the trainer: FSDP2 over gloo."""
JOURNAL_MIB = 64
"""Room for the journal, where it has a file system of its own."""
CHANNEL, OTHER = "chaos", "other"
TWIN_HOST = "127.0.0.3"
THAW_S = 120
"""A frozen disk thaws after so long whatever became of the campaign."""
NAMES = 12
"""How many names a sidecar may be given, one after the other."""
_CLI = ("-m", "weightbus.control.cli.entry_point")


class NeverThere(Exception):
    """A failpoint that is passed in every round was not: then the campaign tests less than it says."""


def no_disk() -> str:
    """Why the journal can have no disk of its own here, which is filled and frozen; empty if it can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("unshare", "mount", "mkfs.ext4", "fsfreeze") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}"
    return "" if Path("/dev/loop-control").exists() else "no loop devices"


class Program:
    """One process, started again and again; it can be armed to stop at a failpoint."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path, more: Sequence[str] = ()) -> None:
        self.name = name
        self.more = list(more)
        """Arguments of the next life beside those of every life."""
        self.log = folder / f"{name}.log"
        self._argv = [sys.executable, str(HERE / "failpoints.py"), name, str(folder), *argv]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin a life."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*self._argv, *self.more], stdout=log, stderr=log, start_new_session=True)

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
            with contextlib.suppress(subprocess.TimeoutExpired):  # of a crowded machine: the others are to end, too
                self.signal(signal.SIGKILL)


class Deployment:
    """A coordinator, `engines` servers with their sidecars, and a trainer, all with keys.

    Every sidecar reaches the coordinator by a relay of its own, and the last one its server by another.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        engines: int,
        *,
        real: bool = False,
        transport: str = "local",
        relayed: bool = False,
        disk: bool = False,
    ) -> None:
        """`real` launches SGLang itself, on the CPU, with our loader; `disk` gives the journal a file system."""
        self.folder = folder
        self._checkpoint, self._real, self._disk = checkpoint, real, disk
        self._http = httpx.Client(timeout=2.0, trust_env=False)
        self._bus, self._status = free_port(), free_port()
        self.journal = folder / "journal"
        self.journal.mkdir()
        self._names = {
            f"e{number}": [f"e{number}", *(f"e{number}n{n}" for n in range(NAMES))] for number in range(engines)
        }
        """Engine -> names of its sidecar; the first is the one that it has, or has next."""
        coordinator = [*_CLI, "coordinator", f"--keys={folder / 'keys'}", f"--router-port={self._bus}"]
        coordinator += [f"--http-port={self._status}"]
        coordinator += [f"--journal={self.journal / 'journal.sqlite'}", "--heartbeat-s=0.5", "--silence-s=3"]
        coordinator += ["--takeover-s=1.5", "--lease-s=3", "--offer-s=5", "--pause-s=5", "--prepare-s=5"]
        coordinator += ["--verify-s=10", "--resume-s=10", "--abort-s=5", "--commit-s=5"]
        self.programs = {"coordinator": Program("coordinator", coordinator, folder)}
        self.relays: dict[str, RelayProcess] = {}
        """Engine -> the relay between its sidecar and the coordinator; ``front-`` of it: to its server."""
        self.urls: dict[str, str] = {}
        self._ports: dict[str, int] = {}
        """Engine -> the port of its server itself."""
        self._lines: dict[str, int] = {}
        for number, name in enumerate(self._names):
            self._add_engine(name, relayed=relayed and number == engines - 1)
        self.ranks = tuple(f"trainer-{rank}" for rank in range(RANKS))
        for rank, program in enumerate(self.ranks):
            self.programs[program] = self._rank(program, CHANNEL, rank, RANKS, transport)
        self._twin_port = free_port()
        twins = f"http://{TWIN_HOST}:{self._twin_port}"
        self.programs["twin"] = self._sidecar("twin", "twin", twins, self._bus, OTHER)
        self.programs["twin-trainer"] = self._rank("twin-trainer", OTHER, 0, 1, transport)
        self.lives = 0
        """Of the trainer, all ranks of which begin and end together."""
        self.ready: Sequence[str] = ()
        self.state = "unknown"
        """Of the round, as last seen."""
        self.answered_at = 0.0
        """When the coordinator last told its status."""
        self.committed = 0
        self.others = 0
        """Engines in the channel of the second sidecar."""
        self.listed_twice: set[str] = set()
        """Servers that were on the ready lists of two channels."""
        self._twinned = ""
        """URL of the engine that a second sidecar reaches."""
        self._acks: list[Ack] = []
        self._acks_read = 0
        self._gate = socket.socket(socket.AF_UNIX)
        self._gate.bind(str(folder / "gate"))
        self._gate.listen()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._look, self._tend)]

    def _add_engine(self, name: str, *, relayed: bool) -> None:
        port, self._lines[name] = free_port(), free_port()
        self._ports[name], self.urls[name] = port, f"http://127.0.0.1:{port}"
        if relayed:
            self.urls[name] = f"http://127.0.0.1:{free_port()}"
            self._ports[f"spare-{name}"] = free_port()
            self.programs[f"spare-{name}"] = self._server(f"spare-{name}", self._ports[f"spare-{name}"])
        self.programs[f"server-{name}"] = self._server(f"server-{name}", port)
        sidecar = f"sidecar-{name}"
        self.programs[sidecar] = self._sidecar(sidecar, name, self.urls[name], self._lines[name], CHANNEL)

    def _server(self, name: str, port: int) -> Program:
        argv = [str(HERE / "server.py"), str(self._checkpoint), str(port)]
        if self._real:
            argv = ["-m", "weightbus.engine_agent.engines.sglang.cpu_server", f"--model-path={self._checkpoint}"]
            argv += [f"--port={port}", "--skip-tokenizer-init", "--log-level=warning"]
            argv += [f"--custom-weight-loader={LOADER}"]
        return Program(name, argv, self.folder)

    def _sidecar(self, program: str, name: str, server: str, line: int, channel: str) -> Program:
        runtime = "run" if channel == CHANNEL else f"run-{channel}"
        argv = [*_CLI, "engine-agent", f"--keys={self.folder / 'keys'}", f"--channel={channel}", f"--server={server}"]
        argv += [f"--coordinator=tcp://127.0.0.1:{line}", f"--http-port={free_port()}", "--poll-s=0.3"]
        argv += [f"--state-dir={self.folder / 'state' / program}", f"--runtime-dir={self.folder / runtime}"]
        return Program(program, argv, self.folder, [f"--name={name}"])

    def _rank(self, name: str, channel: str, rank: int, ranks: int, transport: str) -> Program:
        argv = [str(HERE / "trainer.py"), str(self.folder), f"tcp://127.0.0.1:{self._bus}", channel]
        return Program(name, [*argv, str(rank), str(ranks), transport], self.folder)

    def start(self, ahead: int = 0) -> None:
        """All of them; the servers once `ahead` versions are committed, which is fast without them."""
        if self._disk:
            image = self.folder / "journal.img"
            _run("truncate", "-s", f"{JOURNAL_MIB}M", str(image))
            _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
            _run("mount", "-o", "loop", str(image), str(self.journal))
        for runtime in ("run", "run-other"):
            (self.folder / runtime).mkdir(mode=0o700)
        engines = [each for names in self._names.values() for each in names]
        self._cli("keygen", f"trainer-{CHANNEL}", f"trainer-{OTHER}", "twin", *engines)
        self._trust(f"trainer-{OTHER}", f"trainer-{CHANNEL}")
        self._trust("twin", *engines)
        for name, line in self._lines.items():
            self._relay(name, f"127.0.0.1:{line}", self._bus)
            if f"spare-{name}" in self.programs:
                self._relay(f"front-{name}", self.urls[name].removeprefix("http://"), self._ports[name])
        self.programs["coordinator"].start()
        self._start_trainer()
        for thread in self._threads:
            thread.start()
        poll(f"{ahead} versions", lambda: len(self.acks()) >= ahead, 60.0 + ahead)
        for name, program in self.programs.items():
            if name.startswith(("server", "sidecar")):
                program.start()

    def _relay(self, name: str, listen: str, port: int) -> None:
        self.relays[name] = RelayProcess(listen, self.folder / f"relay-{name}")
        self.relays[name].say("to", "127.0.0.1", port)

    def _cli(self, command: str, *arguments: str) -> None:
        _run(sys.executable, *_CLI, command, f"--keys={self.folder / 'keys'}", *arguments)

    def _trust(self, *names: str) -> None:
        role = "trainer" if names[0].startswith("trainer") else "engine"
        self._cli("trust", "add", *names, f"--role={role}", f"--channels={CHANNEL},{OTHER}")

    def revoke(self, whom: str) -> Callable[[], None]:
        """Distrust the key of an engine or a trainer; returns what restores it."""
        name = self._names[whom][0] if whom in self._names else whom
        self._cli("trust", "remove", name)
        return lambda: self._trust(name)

    def close(self) -> None:
        """End all of them."""
        self.end_trainer()
        for process in (*self.programs.values(), *self.relays.values()):
            process.close()
        self._gate.close()
        self._http.close()
        if self._disk and self.journal.is_mount():
            subprocess.run(["umount", "--lazy", str(self.journal)], check=False)

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
            self.programs[name].more = [str(self.folder / f"rendezvous-{self.lives}")]
            self.programs[name].start()

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

    def acks(self) -> list[Ack]:
        """Versions that the trainer was told are committed, in the order in which it was."""
        path = self.folder / f"acks-{CHANNEL}"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._acks_read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._acks_read += len(line)
                    self._acks.append(Ack(**json.loads(line)))
        return self._acks

    @property
    def last_ack(self) -> int:
        """The newest of them; 0 before the first."""
        return max((ack.version for ack in self.acks()[-4:]), default=0)

    def commits(self, *, over: bool = False) -> Commits:
        """What was durable, by the campaign's own record; once all is `over`, the journal itself is looked into."""
        return Commits(CHANNEL).read([*lines(self.folder), *(self._journalled() if over else ())])

    def _journalled(self) -> Iterator[Line]:
        with contextlib.closing(sqlite3.connect(self.journal / "journal.sqlite")) as database:
            for name, version in database.execute("SELECT name, committed_version FROM channel"):
                yield Line(FOUND, name, version or 0, at=time.monotonic())

    def _look(self) -> None:
        while not self._over.wait(0.004):
            try:
                found = self._http.get(f"http://127.0.0.1:{self._status}/status").json()
            except (httpx.HTTPError, ValueError):
                self.state, self.ready = "unknown", ()
                continue
            self.answered_at = time.monotonic()
            channels: dict[str, dict[str, Any]] = found["channels"]
            if channel := channels.get(CHANNEL):
                self.state = channel["round"]["state"]
                self.committed = (channel["committed"] or {}).get("version", 0)
                self.ready = tuple(channel["ready"])
            self.others = len(channels.get(OTHER, {}).get("engines", ()))
            if self._twinned in self.ready and channels.get(OTHER, {}).get("ready"):
                self.listed_twice.add(self._twinned)

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

    def part(self, engine: str, *ways: str) -> Callable[[], None]:
        """Hold what travels between a sidecar and the coordinator, ``up`` or ``down``; returns what heals it."""
        relay = self.relays[engine]
        relay.say("hold", *ways)
        return lambda: relay.say("pass")

    def fill_disk(self) -> Callable[[], None]:
        """Leave the journal no room; returns what makes room again."""
        ballast = self.journal / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return ballast.unlink

    def freeze_disk(self) -> Callable[[], None]:
        """Let no write to the journal's disk return, nor fail; returns what thaws it."""
        thaw = ["fsfreeze", "--unfreeze", str(self.journal)]
        later = subprocess.Popen(["sh", "-c", f'sleep {THAW_S}; exec "$@"', "sh", *thaw], start_new_session=True)
        _run("fsfreeze", "--freeze", str(self.journal))

        def heal() -> None:
            _run(*thaw)
            os.killpg(later.pid, signal.SIGKILL)
            later.wait(10)

        return heal

    def kill(self, program: str) -> None:
        """End it without a word."""
        self.programs[program].signal(signal.SIGKILL)

    def kill_until(self, program: str, change: Callable[[], None]) -> Callable[[], None]:
        """The same; returns what starts it again after a `change`. Ranks are begun anew at once, all of them."""
        self.kill(program)

        def heal() -> None:
            change()
            if program not in self.ranks:
                self.programs[program].start()

        return heal

    def stop(self, program: str) -> Callable[[], None]:
        """Let it stand still; returns what lets it go on."""
        stopped = self.programs[program]
        stopped.signal(signal.SIGSTOP)
        return lambda: stopped.signal(signal.SIGCONT)

    def forget(self, engine: str) -> None:
        """Remove the record of the engine's sidecar."""
        shutil.rmtree(self.folder / "state" / f"sidecar-{engine}", ignore_errors=True)

    def rename(self, engine: str) -> None:
        """Give the sidecar another name when it starts again."""
        self._names[engine].pop(0)
        self.programs[f"sidecar-{engine}"].more = [f"--name={self._names[engine][0]}"]

    def keep_record(self, engine: str) -> Callable[[], None]:
        """Copy the record of the engine's sidecar; returns what sets it back to the copy."""
        record, copy = self.folder / "state" / f"sidecar-{engine}", self.folder / f"record-{engine}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(record, copy)

        def set_back() -> None:
            self.forget(engine)
            shutil.copytree(copy, record)

        return set_back

    def launch_spare(self, engine: str, limit_s: float) -> None:
        """Launch another server for the engine, which is reached by none yet."""
        spare = f"spare-{engine}"
        self.programs[spare].start()
        url = f"http://127.0.0.1:{self._ports[spare]}/health_generate"

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(url, timeout=5.0, trust_env=False).status_code == httpx.codes.OK
            return False

        poll(f"{spare} to answer", answers, limit_s)

    def swap(self, engine: str) -> Callable[[], None]:
        """End the engine's server; the next call by its address reaches the spare one, which stays."""
        mine, spare = f"server-{engine}", f"spare-{engine}"
        self.kill(mine)
        self.programs[mine], self.programs[spare] = self.programs[spare], self.programs[mine]
        self._ports[engine], self._ports[spare] = self._ports[spare], self._ports[engine]
        self.relays[f"front-{engine}"].say("to", "127.0.0.1", self._ports[engine])
        return lambda: None

    def start_twin(self, engine: str) -> Callable[[], None]:
        """Have a second sidecar, of another channel, reach the engine's server by another address; returns its end."""
        self.relays["twin"] = RelayProcess(f"{TWIN_HOST}:{self._twin_port}", self.folder / "relay-twin")
        self.relays["twin"].say("to", "127.0.0.1", self._ports[engine])
        self._twinned = self.urls[engine]
        trainer, twin = self.programs["twin-trainer"], self.programs["twin"]
        trainer.more = [str(self.folder / f"rendezvous-{time.monotonic_ns()}")]
        twin.log.unlink(missing_ok=True)
        trainer.start()
        twin.start()

        def end() -> None:
            for process in (twin, trainer, self.relays.pop("twin")):
                process.close()
            (self.folder / "relay-twin").unlink()

        return end

    @property
    def twin_refused(self) -> bool:
        """Whether the coordinator refused the second sidecar, as that says."""
        return b"server_taken" in self.programs["twin"].log.read_bytes()

    def twin_was_answered(self) -> bool:
        """Whether the second sidecar was refused, or became an engine of its channel."""
        return self.twin_refused or self.others > 0


def poll(what: str, done: Callable[[], bool], limit_s: float) -> None:
    """Ask until it is so."""
    until = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.005)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
