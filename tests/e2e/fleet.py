"""A whole deployment of real processes for a test: coordinator, SGLang servers, sidecars, and a two-rank trainer.

Everything runs on the loopback with ports that were free, in process groups of its own, and ends with the fixture.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
from weightbus.control.protocol.messages import AgentId, Channel, Role
from weightbus.engine_agent.engines.sglang import cpu_server
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.trainer_agent.demo.child_processes import Program, ProgramEnded, Programs

from ..kit.ports import free_port

CHANNELS = (Channel("e2e"),)
ROOT = Path(__file__).parents[2]
START_S = 480.0
"""A server takes 20 seconds on an idle machine, and minutes on one that runs the whole suite."""


class Engine(NamedTuple):
    """One server and its sidecar: where they are, and how they are started."""

    name: str
    url: str
    sidecar: str
    server_argv: tuple[str, ...]
    sidecar_argv: tuple[str, ...]


def poll(what: str, done: Callable[[], bool], deadline_s: float = START_S) -> None:
    """Ask until `done` says yes. HTTP errors meanwhile mean "not yet"."""
    until = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if done():
                return
        if time.monotonic() >= until:
            raise TimeoutError(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(0.1)


class Fleet:
    """One deployment. Checkpoints are in ``folder/seedN``; servers start from seed 0."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        self.folder = folder
        self._programs = programs
        self.keys = folder / "keys"
        make_deployment_keys(self.keys, [AgentKeys(AgentId("trainer"), Role.TRAINER, CHANNELS)])
        self._bus, self.status_port = free_port(), free_port()
        self.engines: dict[str, Engine] = {}
        self._running: dict[str, Program] = {}
        self.http = httpx.Client(timeout=60.0, trust_env=False)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._trainer: subprocess.Popen[str] | None = None

    @property
    def coordinator(self) -> str:
        """Where agents find the coordinator."""
        return f"tcp://127.0.0.1:{self._bus}"

    @property
    def state(self) -> Path:
        """Where the sidecars keep their records."""
        return self.folder / "state"

    @property
    def hold(self) -> Path:
        """While this file is there, workers stop in the middle of a copy (in_server/held_copies)."""
        return self.folder / "hold"

    # -- programs ------------------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Start it, or start it again with the same journal."""
        self._start(
            "coordinator",
            [
                *_weightbus("coordinator"),
                f"--router-port={self._bus}",
                f"--http-port={self.status_port}",
                f"--journal={self.folder / 'journal.sqlite'}",
                f"--keys={self.keys}",
            ],
        )
        poll("the coordinator", lambda: self.get("/healthz").status_code == 200)

    def start_engine(self, name: str, tp: int, *flags: str) -> None:
        """Start one server, with more `flags`, and its sidecar; returns at once."""
        self.add_engine(name, tp, *flags)
        self.start_server(name)
        self.start_sidecar(name)

    def add_engine(self, name: str, tp: int, *flags: str) -> None:
        """One whose server, with more `flags`, and sidecar are started later."""
        port, side = free_port(), free_port()
        server = (
            "-m",
            "weightbus.engine_agent.engines.sglang.cpu_server",
            f"--model-path={self.folder / 'seed0'}",
            f"--port={port}",
        )
        options = ("--skip-tokenizer-init", "--log-level=info", f"--custom-weight-loader={LOADER}")
        argv = (sys.executable, *server, f"--tp-size={tp}", *flags, *options)
        url = f"http://127.0.0.1:{port}"
        sidecar = (
            *_weightbus("engine-agent"),
            f"--name={name}",
            "--channel=e2e",
            f"--server={url}",
            f"--coordinator={self.coordinator}",
            f"--http-port={side}",
            f"--state-dir={self.state}",
            f"--saved-dir={self.folder / 'saved'}",
            "--saved-after-s=2",
            f"--keys={self.keys}",
        )
        self.engines[name] = Engine(name, url, f"http://127.0.0.1:{side}", argv, sidecar)
        make_deployment_keys(self.keys, [AgentKeys(AgentId(name), Role.ENGINE, CHANNELS)])

    def start_server(self, name: str) -> None:
        """Start the server of an engine, or start it again."""
        paths = os.pathsep.join(filter(None, [str(ROOT / "tests/e2e/in_server"), os.environ.get("PYTHONPATH", "")]))
        held = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "held_copies", "HELD_COPIES": str(self.hold), "PYTHONPATH": paths}
        self._start(f"server-{name}", self.engines[name].server_argv, held)

    def start_sidecar(self, name: str, *more: str) -> None:
        """Start the sidecar of an engine, or start it again with the same record; `more` are further flags."""
        self._start(f"sidecar-{name}", (*self.engines[name].sidecar_argv, *more))

    def kill(self, program: str, number: int = signal.SIGKILL) -> None:
        """Signal the whole process group of a program and, for a deadly signal, wait until it is gone."""
        process = self._running[program].process
        os.killpg(process.pid, number)
        if number == signal.SIGKILL:
            process.wait(120)

    def workers(self, program: str) -> list[int]:
        """Process ids of a server's workers."""
        group, workers = self._running[program].process.pid, []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and (stat.parent / "cmdline").read_bytes().startswith(b"sglang::scheduler"):
                    workers.append(int(stat.parent.name))
        return workers

    def reads_memory_of(self, program: str, pid: int) -> list[bool]:
        """For each of a server's workers, whether it has memory of process `pid` mapped, by its arenas' name."""
        name = f"/memfd:weightbus_{pid} "
        return [name in Path(f"/proc/{worker}/maps").read_text() for worker in self.workers(program)]

    def end(self, program: str) -> None:
        """Kill what an earlier test may have started, or what is left of it."""
        if program in self._running:
            with contextlib.suppress(ProcessLookupError):
                self.kill(program)

    def _start(self, name: str, argv: Sequence[str], environment: dict[str, str] | None = None) -> Program:
        self._running[name] = self._programs.start(name, argv, environment)
        return self._running[name]

    # -- the trainer ---------------------------------------------------------------------------------------------

    def start_trainer(self, stages: int = 1) -> None:
        """Start both ranks, tensor-parallel or as two `stages`, and wait until they are ready."""
        environment = {
            "STAGES": str(stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "WEIGHTBUS_TRAINER_KEYS": str(self.keys),
        }
        argv = [sys.executable, str(ROOT / "tests/e2e/trainer_rank.py"), str(self.folder), self.coordinator]
        self._running["rank1"] = self._programs.start("rank1", argv, environment | {"RANK": "1"})
        with (self.folder / "rank0.log").open("wb") as log:
            self._trainer = subprocess.Popen(
                argv,
                env={**os.environ, **environment, "RANK": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._read_answers, daemon=True).start()
        assert self.answer() == {"ready": True}

    def end_trainer(self) -> None:
        """Kill both ranks, if they are there."""
        with contextlib.suppress(ProcessLookupError):
            self.end("rank1")
        if self._trainer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._trainer.pid, signal.SIGKILL)
            self._trainer.communicate()
            self._trainer = None

    def run_fsdp_ranks(self) -> list[dict[str, Any]]:
        """Run both FSDP2 ranks to their end; what rank 0 reported."""
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        program = str(ROOT / "tests/e2e/fsdp_rank.py")
        argv = [sys.executable, program, str(self.folder), self.coordinator, str(self.keys)]
        ranks = [self._programs.start(f"fsdp{rank}", argv, group | {"RANK": str(rank)}) for rank in range(2)]
        for rank in ranks:
            if code := rank.process.wait(START_S):
                raise ProgramEnded(rank.name, code, rank.log)
        return [json.loads(line) for line in ranks[0].log.read_text().splitlines() if line.startswith("{")]

    def start_plain_trainer(self, version: int, seed: int, *, hold: bool) -> Program:
        """Have a trainer of its own publish out of its memory, to be killed as ``plain``; with `hold` it waits."""
        arguments = [self.folder, self.coordinator, self.keys, version, seed, *(["hold"] if hold else [])]
        return self._start("plain", [sys.executable, str(ROOT / "tests/e2e/plain_rank.py"), *map(str, arguments)])

    def start_watcher(self, folder: Path) -> None:
        """Publish the checkpoints that appear in `folder`, torch DCP included."""
        shim = Path(cpu_server.__file__).with_name("cpu_shim")
        argv = [
            *_weightbus("trainer-agent"),
            f"--watch={folder}",
            "--dcp",
            "--channel=e2e",
            f"--coordinator={self.coordinator}",
            f"--keys={self.keys}",
            "--transport=local",
            "--settle-s=0.5",
            f"--http-port={free_port()}",
        ]
        paths = os.pathsep.join(filter(None, [str(shim), os.environ.get("PYTHONPATH", "")]))
        self._running["watcher"] = self._programs.start("watcher", argv, {"PYTHONPATH": paths})

    def publish(self, version: int, seed: int, transport: str, **more: Any) -> None:
        """Ask the trainer to publish; its answers are read with `answer`."""
        self.tell(json.dumps({"version": version, "seed": seed, "transport": transport, **more}))

    def tell(self, line: str) -> None:
        """One line to rank 0."""
        assert self._trainer is not None
        assert self._trainer.stdin is not None
        self._trainer.stdin.write(line + "\n")
        self._trainer.stdin.flush()

    def answer(self, deadline_s: float = START_S) -> dict[str, Any]:
        """The next line of rank 0."""
        return self._answers.get(timeout=deadline_s)

    def _read_answers(self) -> None:
        assert self._trainer is not None
        assert self._trainer.stdout is not None
        for line in self._trainer.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))

    def close(self) -> None:
        """End the trainer; `Programs` ends the rest."""
        self.http.close()
        self.end_trainer()

    # -- what can be seen ----------------------------------------------------------------------------------------

    def get(self, path: str) -> httpx.Response:
        """Ask the coordinator's HTTP port."""
        return self.http.get(f"http://127.0.0.1:{self.status_port}{path}")

    def channel(self) -> dict[str, Any]:
        """The channel as the status document shows it."""
        return self.get("/status").json()["channels"].get("e2e", {"engines": {}, "ready": []})

    def plan(self) -> dict[str, Any]:
        """The channel's plan."""
        return self.get("/plan").json()["channels"]["e2e"]

    def sidecar(self, name: str) -> dict[str, Any]:
        """What a sidecar says of itself and its server."""
        return self.http.get(f"{self.engines[name].sidecar}/status").json()

    def wait_ready(self, *names: str) -> None:
        """Until exactly these engines are on the ready list."""
        urls = sorted(self.engines[name].url for name in names)
        poll(f"{names} to be ready", lambda: sorted(self.channel()["ready"]) == urls)

    def checksums(self, name: str) -> list[dict[str, str]]:
        """What SGLang itself finds in the live weights of one server, by rank."""
        found = self.http.post(f"{self.engines[name].url}/weights_checker", json={"action": "checksum"})
        return [rank["checksums"] for rank in found.raise_for_status().json()["ranks"]]

    def generate(self, name: str, prompt: list[int], tokens: int) -> tuple[list[int], str]:
        """Greedy tokens of one server, and the version that wrote them."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        found = self.http.post(f"{self.engines[name].url}/generate", json=body).raise_for_status().json()
        return found["output_ids"], found["meta_info"]["weight_version"]


def _weightbus(command: str) -> list[str]:
    return [sys.executable, "-m", "weightbus.control.cli.entry_point", command]
