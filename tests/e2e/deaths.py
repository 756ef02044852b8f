"""Deaths in rounds of real servers: a rank, a worker or a sidecar is killed, or stopped, in every phase of a round.

    python -m tests.e2e.deaths                       all cells, one after the other: `make deaths`
    python -m tests.e2e.deaths --transport sends     or distributed: the stock broadcast
    python -m tests.e2e.deaths --victims worker --phases half,flipped --signals killed
    python -m tests.e2e.deaths --in-place            nothing is taken beside what is served
    python -m tests.e2e.deaths --joined              workers of servers are members of broadcasts, and not their agents
    python -m tests.e2e.deaths --device cuda --transport distributed    over NCCL, one GPU for all
    python -m tests.e2e.deaths --factor 1.8          on a machine that does other things too

Two SGLang servers on the CPU (TP1 and TP2), their sidecars, a coordinator and the two ranks of a Megatron trainer are
processes of their own, at the settings of a deployment. On a GPU both servers have TP1 and the trainer is one process;
NCCL takes them for hosts of their own, and goes over sockets, so that one GPU is enough. A cell brings a program to a
named place of a round (strikes.py), and strikes the victim there. Then everybody else has to go on:

- the others serve in time (`ENDED_BY`), the version before or the new one, whole: SGLang's checksums of what they hold
  and every token that a client is given are those of a server that loaded the same checkpoint by itself;
- a version is committed without an engine that was struck, by the trainer that lives;
- servers that wait for a trainer which stands still answer again before it goes on;
- nobody ends that was not killed;
- who was struck gets no requests, and serves the next version, verified, when it goes on or is started again.

A line for each cell on stderr, one JSON object at the end: cells, passed, worst survivors_serving_s (from the blow
until every other engine is on the ready list and has answered). limit_s of a cell is what that may come to, or freed_s.
`--out FILE` keeps it, after every cell. Exits with 1 unless all cells passed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from weightbus.trainer_agent.demo.child_processes import ProgramEnded, Programs

from ..kit import tiny_model
from ..kit.ends import Ends, was_struck
from ..kit.ports import free_port
from .fleet import ROOT, Fleet, poll
from .strikes import Strikes

PROMPTS = [[5, 17, 33, 64, 101, 7], [400, 3, 9], [77, 78, 79, 80], [250, 1, 250, 2, 250], [11], [301, 302]]
SEEDS = 3
HIDDEN = {"cpu": 64, "cuda": 256}
"""Of the model: heads of attention kernels on a GPU want 64 each."""
SOCKETS = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip
CUDA_FLAGS = (
    "--skip-tokenizer-init", "--attention-backend=triton", "--sampling-backend=pytorch", "--grammar-backend=none",
    "--max-total-tokens=4000", "--skip-server-warmup", "--disable-cuda-graph", "--mem-fraction-static=0.2",
)  # fmt: skip
CLEAR = 0.2
"""Lead of a token's logarithm over the next one's: nearly equal ones prove nothing."""
TP = {"one": 1, "two": 2}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
PHASES = ("forming", "begun", "half", "received", "flipped", "resume")
"""The group forms; the transfer has begun, is half-way; all has been received and nothing changed; what is served has
changed and nothing is committed; servers are about to resume."""
HOLDS: dict[str, dict[str, tuple[str, ...]]] = {
    "sends": {
        "leader": (
            "rank-0 rank_forms", "rank-0 rank_begins", "rank-0 rank_moves", "rank-0 rank_is_through",
            "sidecars sidecar_flipped", "sidecar sidecar_resumes",
        ),
        "rank": (
            "rank-1 rank_forms", "rank-1 rank_begins", "rank-1 rank_moves", "rank-1 rank_is_through",
            "sidecars sidecar_flipped", "sidecar sidecar_resumes",
        ),
        "worker": (
            "worker worker_forms", "worker worker_begins", "worker worker_moves", "worker worker_flips",
            "worker worker_flipped", "sidecar sidecar_resumes",
        ),
        "sidecar": (
            "worker worker_forms", "sidecar sidecar_begins", "worker worker_moves", "sidecar sidecar_flips",
            "sidecar sidecar_flipped", "sidecar sidecar_resumes",
        ),
    },
    "distributed": {
        "leader": (
            "rank-0 source_forms", "rank-0 source_broadcasts", "rank-0 source_half", "sidecar sidecar_proves",
            "sidecar sidecar_proved", "sidecar sidecar_resumes",
        ),
        "worker": (
            "sidecar sidecar_forms", "sidecar sidecar_takes", "sidecar sidecar_takes_half", "sidecar sidecar_proves",
            "sidecar sidecar_proved", "sidecar sidecar_resumes",
        ),
        "sidecar": (
            "sidecar sidecar_forms", "sidecar sidecar_takes", "sidecar sidecar_takes_half", "sidecar sidecar_proves",
            "sidecar sidecar_proved", "sidecar sidecar_resumes",
        ),
    },
}  # fmt: skip
"""By transport and victim, for each phase: who stops where. Over `distributed` agents take part in broadcasts.

`sidecars` are those of all engines: where a trainer is struck nobody else is to be half-way.
"""
JOINED = (
    "sidecar sidecar_joins", "sidecar sidecar_loads", "sidecar sidecar_loads_half", "sidecar sidecar_proves",
    "sidecar sidecar_proved", "sidecar sidecar_resumes",
)  # fmt: skip
"""The same of worker and sidecar over `distributed`, where servers take part themselves."""
TRAINER = ("leader", "rank")
"""Victims that take the trainer with them."""


class Wait(NamedTuple):
    """A deadline that ends what others wait for."""

    seconds: float
    name: str


AT_ONCE = Wait(0.0, "nobody waits for it")
LEASE = Wait(10.0, "lease_s")
SILENCE = Wait(10.0, "silence_s")
SENT = Wait(3.0, "reconnect_s, for the trainer's last word")
RANKS = Wait(30.0, "TURN_S or SILENT_S, then 20 s of the ranks' own")
SILENT = Wait(10.0, "SILENT_S")
UNANSWERED = Wait(15.0, "SILENT_S, TURN_S or FORM_S, with 5 s for its answer after the first two")
STILL = Wait(10.0, "STILL_S")
STILL_FORMING = Wait(20.0, "STILL_FORMING_S, then 5 s to leave the group")
PROOF = Wait(15.0, "proof_s")
ENDED_BY: dict[str, dict[str, tuple[Wait, ...]]] = {
    "sends": {
        "leader": (LEASE, LEASE, LEASE, SENT, SENT, AT_ONCE),
        "rank": (RANKS, RANKS, RANKS, SENT, AT_ONCE, AT_ONCE),
        "worker": (UNANSWERED, UNANSWERED, UNANSWERED, SILENT, SILENT, AT_ONCE),
        "sidecar": (SILENCE, SILENCE, SILENCE, SILENCE, SILENCE, AT_ONCE),
    },
    "distributed": {
        "leader": (LEASE, LEASE, LEASE, SENT, SENT, AT_ONCE),
        "worker": (STILL, STILL, STILL, PROOF, AT_ONCE, AT_ONCE),
        "sidecar": (SILENCE, SILENCE, SILENCE, SILENCE, SILENCE, AT_ONCE),
    },
}
"""By transport and victim, for each phase: what tells the others of one that is stopped (control/protocol/PROTOCOL.md).

Seconds are written down, not read from the code: a deadline that grows fails here. One that is killed is told of by
its connections.
"""
JOINED_WORKER = (STILL_FORMING, *ENDED_BY["distributed"]["worker"][1:])
"""The same of a worker that takes part in a broadcast itself."""
SLACK_S = 5.0
"""For the others to serve after that: the goal, on a machine that does nothing else."""
REACH_S = 60.0
"""For a program to come to its place."""
OVER_S = 200.0
"""For a round that was struck, to its end: several deadlines, one after another, the longest of 120 s (`resume_s`)."""
PATIENCE_S = 60.0
"""Beyond a cell's limit: how long it took instead is worth knowing."""
FREED_S = 20.0
"""For servers to answer that waited for a trainer, once its round is over."""
BACK_S = 240.0
"""For who was struck: a server has to start, on a machine that does other things."""
NOTICED_S = 60.0
"""For nobody to be sent to who stands still."""
ATTEMPTS = 6
"""Rounds in which a victim that goes on may still not be known to."""


class Cell(NamedTuple):
    """The victim, the phase of a round and its transport, and the signal."""

    transport: str
    victim: str
    phase: str
    how: str
    engine: str
    """The engine of the worker or sidecar that is struck, or of the sidecar that is waited for."""

    def __str__(self) -> str:
        whose = "" if self.victim in TRAINER else f" of {self.engine}"
        return f"{self.transport}: {self.victim}{whose} {self.how} at {self.phase}"


class Limit(NamedTuple):
    """How long the others may take to serve after a blow."""

    ended_by: Wait
    slack_s: float

    @property
    def seconds(self) -> float:
        """The deadline, which takes no longer on a busy machine, and what comes after it."""
        return self.ended_by.seconds + self.slack_s

    def __str__(self) -> str:
        return f"{self.seconds:g} s ({self.ended_by.seconds:g} s: {self.ended_by.name}; and {self.slack_s:g} s)"

    def require(self, took_s: float, promise: str) -> None:
        """Raise `Late` when it took longer."""
        if took_s > self.seconds:
            raise Late(f"{promise} within {self}, not after {took_s:.2f} s")


def limit_of(cell: Cell, joined: Sequence[str] = (), factor: float = 1.0) -> Limit:
    """What a cell has to keep; `factor` is of the slack, for a machine that does other things."""
    if cell.how == "killed":
        return Limit(Wait(0.0, "connections tell, reconnect_s included"), SLACK_S * factor)
    waits = ENDED_BY[cell.transport][cell.victim]
    if (cell.transport, cell.victim) == ("distributed", "worker") and cell.engine in joined:
        waits = JOINED_WORKER
    return Limit(waits[PHASES.index(cell.phase)], SLACK_S * factor)


class Wrong(AssertionError):
    """A promise was broken."""


class Late(Wrong):
    """It was kept, and not in time: nothing else is the worse for it."""


def require(kept: bool, promise: str) -> None:
    """Raise `Wrong` unless the promise was `kept`."""
    if not kept:
        raise Wrong(promise)


class StruckFleet(Fleet):
    """Servers and sidecars that stop where they are armed."""

    def __init__(
        self, folder: Path, programs: Programs, *flags: str, joined: Sequence[str] = (), device: str = "cpu"
    ) -> None:
        """`flags` are of every sidecar."""
        super().__init__(folder, programs)
        self._flags, self._joined = flags, joined
        self._device = device

    def as_host(self, name: str) -> dict[str, str]:
        """Environment of a process that NCCL takes for a host of its own."""
        return {**SOCKETS, "NCCL_HOSTID": name} if self._device == "cuda" else {}

    def start_server(self, name: str) -> None:
        if self._device == "cuda":  # nobody strikes inside of it
            port = self.engines[name].url.rpartition(":")[2]
            what = ("-m", "sglang.launch_server", "--host=127.0.0.1", f"--port={port}", *CUDA_FLAGS)
            model = f"--model-path={self.folder / 'seed0'}"
            self._start(f"server-{name}", (sys.executable, *what, model), self.as_host(name))
            return
        paths = (ROOT / "tests/e2e/in_server", ROOT, os.environ.get("PYTHONPATH", ""))
        struck = {"STRUCK_AS": f"worker-{name}", "STRUCK_IN": str(self.folder)}
        struck |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": "struck_workers", "PYTHONPATH": os.pathsep.join(map(str, paths))}
        self._start(f"server-{name}", self.engines[name].server_argv, struck)

    def start_sidecar(self, name: str, *more: str) -> None:
        python, _, *command = self.engines[name].sidecar_argv
        flags = [*self._flags, *(["--no-hands-on"] if name in self._joined else [])]
        argv = [python, "-m", "tests.e2e.strikes", f"sidecar-{name}", str(self.folder), *command, *flags, *more]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._start(f"sidecar-{name}", argv, {"PYTHONPATH": paths, **self.as_host(name)})

    def process(self, program: str) -> int:
        """Its process id."""
        return self._running[program].process.pid

    def expect_the_end_of(self, program: str) -> None:
        """It was killed, by itself or with a part of it."""
        self._programs.dismiss([self._running[program]])

    def require_alive(self) -> None:
        """Raise `Wrong` if a program has ended that nobody killed."""
        try:
            self._programs.check()
        except ProgramEnded as ended:
            raise Wrong(f"{ended}\n{ended.tail}") from ended


class Trainer:
    """Two ranks of struck_ranks.py, or the one of struck_plain.py, and what the first one is told."""

    def __init__(self, ends: Ends, fleet: Fleet, number: int, ranks: int = 2) -> None:
        path = fleet.folder / f"t{number}"
        job = {"folder": str(fleet.folder), "coordinator": fleet.coordinator, "keys": str(fleet.keys)}
        job |= {"port": free_port(), "socket": str(path)}
        log = str(fleet.folder / "ranks.log")
        self.pids = [ends.start(rank=rank, log=log, **job) for rank in range(ranks)]
        require(ends.answer() == {"listening": True}, "the trainer's ranks start")
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(str(path))
        self._lines = self._line.makefile("r")
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def publish(self, **asked: Any) -> None:
        """What was published is read with `answer`."""
        self._line.sendall(json.dumps(asked).encode() + b"\n")

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """The report, or the error. Raises `Wrong` when there is none in time."""
        try:
            return self._answers.get(timeout=deadline_s)
        except queue.Empty:
            raise Wrong(f"the trainer's first rank says how its round ended within {deadline_s:.0f} s") from None

    def lives(self, rank: int) -> bool:
        """It has not ended."""
        return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(") ")[2][0] not in "ZX"

    def end(self) -> None:
        """As a launcher of ranks ends all when one is lost."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._line.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                self._answers.put(json.loads(line))
        self._answers.put({"error": "the rank is gone"})


class Oracle:
    """What servers hold and answer that loaded a checkpoint by themselves, by SGLang's own way."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], list[dict[str, str]]] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        """By seed and prompt, where one token leads clearly."""

    def learn(self, fleet: Fleet, name: str) -> None:
        """Have a server load every seed; it ends with the one that it began with."""
        url = fleet.engines[name].url
        for seed in (*range(1, SEEDS), 0):
            body = {"model_path": str(fleet.folder / f"seed{seed}")}
            fleet.http.post(f"{url}/update_weights_from_disk", json=body).raise_for_status()
            self._sums[name, seed] = fleet.checksums(name)
            for number, prompt in enumerate(PROMPTS if name == "one" else ()):
                sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}  # type: ignore[dict-item]
                answer = fleet.http.post(f"{url}/generate", json={**body, "top_logprobs_num": 2}).json()
                (best, token, _), (second, *_) = answer["meta_info"]["output_top_logprobs"][0]
                if best - second > CLEAR:
                    self._tokens[seed, number] = token

    def holds(self, fleet: Fleet, name: str) -> int | None:
        """The seed whose weights this server holds; None for weights of no seed."""
        found = fleet.checksums(name)
        return next((seed for seed in range(SEEDS) if self._sums[name, seed] == found), None)

    def wrong(self, seed: int, prompt: int, token: int) -> bool:
        """This token is not of that seed's weights."""
        return self._tokens.get((seed, prompt), token) != token


class Client(threading.Thread):
    """Asks one engine for the first token to each of `PROMPTS`, over and over, whatever becomes of it."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/generate"
        self.answers: list[tuple[float, int, int, str]] = []
        """When, to which prompt, the token, and the version that it says."""
        self.over = threading.Event()

    def run(self) -> None:
        """Until it is told to stop."""
        sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        with httpx.Client(timeout=20.0, trust_env=False) as http:
            for number, prompt in itertools.cycle(enumerate(PROMPTS)):
                if self.over.wait(0.05):
                    return
                with contextlib.suppress(httpx.HTTPError, ValueError):  # it may be dead, or stand still
                    answer = http.post(self._url, json={"input_ids": prompt, "sampling_params": sampling})
                    if answer.status_code == 200:
                        found = answer.json()
                        said = found["output_ids"][0], found["meta_info"]["weight_version"]
                        self.answers.append((time.monotonic(), number, *said))


class Watch(threading.Thread):
    """The ready list over time."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self._url = f"http://127.0.0.1:{fleet.status_port}/status"
        self.seen: list[tuple[float, frozenset[str]]] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Until it is told to stop."""
        with httpx.Client(timeout=20.0, trust_env=False) as http:
            while not self.over.wait(0.03):
                with contextlib.suppress(httpx.HTTPError):
                    channel = http.get(self._url).json()["channels"].get("e2e", {"ready": []})
                    self.seen.append((time.monotonic(), frozenset(channel["ready"])))

    def ready_since(self, url: str, after: float) -> float:
        """From when on this engine was ready without a break, as far as was seen after then; infinity if it is not."""
        since = after
        for at, ready in self.seen:
            if at >= after:
                since = since if url in ready and since < float("inf") else at if url in ready else float("inf")
        return since


class Deaths:
    """A deployment, and the cells that are carried out in it."""

    def __init__(
        self,
        folder: Path,
        programs: Programs,
        ends: Future[Ends],
        *,
        in_place: bool = False,
        joined: Sequence[str] = (),
        device: str = "cpu",
        factor: float = 1.0,
    ) -> None:
        """Servers of the engines that are `joined` take part in broadcasts themselves; `factor` as in `limit_of`."""
        flags = ["--no-beside"] if in_place else []
        self.fleet = StruckFleet(folder, programs, *flags, joined=joined, device=device)
        self._device = device
        self._in_place = in_place
        self._joined = joined
        self._factor = factor
        self._ends = ends
        self._strikes = Strikes(folder)
        self._oracle = Oracle()
        self._launches = itertools.count()
        self._trainer: Trainer | None = None
        self._version, self._seeds = 0, {"default": 0}
        """The last one that was asked for; which seed a version has."""
        self._committed_by = ""
        self._broken = ""
        """The cell that went wrong."""
        self._looking: list[Client | Watch] = []

    def start(self) -> None:
        """Everything. Servers show first what each checkpoint is, before anything of ours asks them."""
        fleet = self.fleet
        for name, tp in TP.items():
            fleet.add_engine(name, tp)
            fleet.start_server(name)
        fleet.start_coordinator()
        for name in TP:
            url = f"{fleet.engines[name].url}/health_generate"
            poll(f"server {name}", lambda at=url: fleet.http.get(at).status_code == 200)  # type: ignore[misc]
            self._oracle.learn(fleet, name)
            fleet.start_sidecar(name)
        fleet.wait_ready(*TP)
        self._start_trainer()
        self._round("sends" if self._device == "cpu" else "distributed", TP)

    def close(self) -> None:
        """End the trainer; others end the rest."""
        for each in self._looking:
            each.over.set()
        if self._trainer is not None:
            self._trainer.end()
        self.fleet.close()
        self._strikes.close()

    # -- a cell -------------------------------------------------------------------------------------------------------

    def carry_out(self, cell: Cell, *, returns: bool = True) -> dict[str, Any]:
        """Strike, and see what becomes of everybody; of the victim only if it `returns`.

        Raises `Wrong`, TimeoutError; nothing more is tried then. How long it took is compared by `require_in_time`.
        """
        require(not self._broken, f"nothing was tried: it had gone wrong with {self._broken}")
        self._broken = str(cell)
        found = self._watched(cell, returns=returns)
        self._broken = ""
        return found

    def require_in_time(self, cell: Cell, found: Mapping[str, Any]) -> None:
        """Raise `Late` unless those who were to serve did so within the limit of `cell`."""
        limit = limit_of(cell, self._joined, self._factor)
        if "freed_s" in found:
            limit.require(found["freed_s"], "servers that waited for the trainer answer")
        else:
            limit.require(found["survivors_serving_s"], "the others serve")

    def _watched(self, cell: Cell, *, returns: bool) -> dict[str, Any]:
        if self._committed_by != cell.transport:
            self._round(cell.transport, TP)
        clients = {name: Client(engine.url) for name, engine in self.fleet.engines.items()}
        watch = Watch(self.fleet)
        self._looking = [*clients.values(), watch]
        for each in self._looking:
            each.start()
        poll("clients to be answered", lambda: all(len(each.answers) > 2 for each in clients.values()), 60)
        try:
            return self._struck(cell, clients, watch, returns=returns)
        finally:
            self._strikes.disarm()
            for each in self._looking:
                each.over.set()
            for each in self._looking:
                each.join(30)
            self._looking = []

    def _struck(self, cell: Cell, clients: Mapping[str, Client], watch: Watch, *, returns: bool) -> dict[str, Any]:
        old, version, trainer = self._version, self._next(), self._trainer
        assert trainer is not None
        holds, point = self._holds(cell)
        self._strikes.arm(holds, point)
        fresh = {"fresh": True} if cell.phase in {"forming", "begun"} else {}
        trainer.publish(version=version, seed=self._seeds[str(version)], transport=cell.transport, **fresh)
        standing, let_go = self._strikes.come(point, REACH_S, len(holds))
        pid = self._pid(cell, standing)
        self._expect_ends(cell)
        at = time.monotonic()
        os.kill(pid, SIGNALS[cell.how])
        let_go()
        survivors = [name for name in TP if cell.victim in TRAINER or name != cell.engine]
        limit = limit_of(cell, self._joined, self._factor)
        found: dict[str, Any] = {"limit_s": limit.seconds}
        waits = cell.victim in TRAINER and self._must_wait(cell)
        if not waits:
            found |= self._serving(limit, survivors, clients, watch, at)
        if cell.victim not in TRAINER:
            report = trainer.answer(OVER_S)
            found["outcomes"] = self._outcomes(report)
            self._require_committed(cell, found["outcomes"], report)
            found |= self._serving(limit, survivors, clients, watch, at)  # a second attempt may have stopped them again
        elif cell.how == "killed" or cell.victim == "rank":
            found["error"] = str(trainer.answer(OVER_S).get("error", ""))[:120]
        poll("the round to be over", lambda: self._idle(trainer, cell), OVER_S)
        found["over_s"] = round(time.monotonic() - at, 2)
        if waits:
            found["freed_s"] = self._freed(at)
        ready = self.fleet.channel()["ready"]
        whole = [name for name in survivors if not waits or self.fleet.engines[name].url in ready]
        self._require_whole(whole, (old, version))
        if (cell.victim, cell.how, cell.phase) == ("worker", "stopped", "resume"):
            # The round was over for it. That a worker stands still between rounds is found out by the next one.
            others = self._round(cell.transport, ())
            require(others.pop(cell.engine) != "committed", "who stands still takes no version")
            require(set(others.values()) == {"committed"}, f"the others take the next version: {others}")
        if cell.victim not in TRAINER:
            url = self.fleet.engines[cell.engine].url
            poll("nobody to be sent to the victim", lambda: url not in self.fleet.channel()["ready"], NOTICED_S)
        self._require_nobody_ended(cell, trainer)
        if returns:
            self._heal(cell, pid, trainer)
            if cell.victim in TRAINER and cell.how == "stopped":
                self._require_whole(whole, (old, version))
            self._return(cell)
        self._require_answers(clients)
        found["back_s"] = round(time.monotonic() - at, 2)
        return found

    def _holds(self, cell: Cell) -> tuple[list[str], str]:
        """The program that is held, and its place."""
        joins = cell.transport == "distributed" and cell.engine in self._joined and cell.victim not in TRAINER
        holds = JOINED if joins else HOLDS[cell.transport][cell.victim]
        hold, point = holds[PHASES.index(cell.phase)].split()
        many = {
            "sidecar": [f"sidecar-{cell.engine}"],
            "sidecars": [f"sidecar-{name}" for name in TP],
            "worker": [f"worker-{cell.engine}-{TP[cell.engine] - 1}"],
        }
        return many.get(hold, [hold]), point

    def _pid(self, cell: Cell, standing: int) -> int:
        match cell.victim:
            case "leader" | "rank":
                assert self._trainer is not None
                return self._trainer.pids[TRAINER.index(cell.victim)]
            case "sidecar":
                return self.fleet.process(f"sidecar-{cell.engine}")
            case _:
                workers = self.fleet.workers(f"server-{cell.engine}")
                require(len(workers) == TP[cell.engine], f"{cell.engine} has its workers before the blow")
                return standing if standing in workers else max(workers)

    def _expect_ends(self, cell: Cell) -> None:
        if cell.how == "killed" and cell.victim in {"worker", "sidecar"}:
            self.fleet.expect_the_end_of(f"{'server' if cell.victim == 'worker' else 'sidecar'}-{cell.engine}")

    def _must_wait(self, cell: Cell) -> bool:
        """Without their trainer engines that have changed in part serve nothing before the next complete version."""
        in_part = ("begun", "half") if self._joined else ("half",)
        in_part = in_part if cell.transport == "distributed" else ()
        return cell.phase in (("begun", "half", "received") if self._in_place else in_part)

    def _serving(
        self, limit: Limit, survivors: Sequence[str], clients: Mapping[str, Client], watch: Watch, at: float
    ) -> dict[str, Any]:
        """Wait until all survivors are ready and have answered since; how long after the blow that was."""
        urls = {name: self.fleet.engines[name].url for name in survivors}

        def serving() -> float:
            since = {name: watch.ready_since(url, at) for name, url in urls.items()}
            answers = [
                next((when for when, *_ in clients[name].answers if when >= since[name]), float("inf"))
                for name in survivors
            ]
            return max(answers) - at

        what, patience_s = f"the others to serve, which they have to within {limit}", limit.seconds + PATIENCE_S
        began = time.monotonic()
        poll(what, lambda: serving() < float("inf"), patience_s)
        while time.monotonic() < began + 0.2:  # not as they were seen before the blow was noticed
            time.sleep(0.02)
        poll(what, lambda: serving() < float("inf"), patience_s)
        took = serving()
        silent = 0.0
        for name in survivors:
            times = [at, *(when for when, *_ in tuple(clients[name].answers) if when >= at)]
            silent = max([silent, *(later - sooner for sooner, later in itertools.pairwise(times))])
        return {"survivors_serving_s": round(took, 2), "longest_silence_s": round(silent, 2)}

    def _freed(self, at: float) -> float:
        """Wait until the workers of all servers answer, which generate nothing; how long after the blow that was."""
        for name, engine in self.fleet.engines.items():
            url = f"{engine.url}/server_info"
            poll(
                f"the workers of {name} to answer",
                lambda at=url: self.fleet.http.get(at, timeout=5.0).status_code == 200,  # type: ignore[misc]
                FREED_S,
            )
        return round(time.monotonic() - at, 2)

    @staticmethod
    def _outcomes(report: Mapping[str, Any]) -> dict[str, str]:
        require("error" not in report, f"a version is committed without the victim: {report.get('error')}")
        return {each["engine"]: each["outcome"] for each in report["engines"]}

    @staticmethod
    def _require_committed(cell: Cell, outcomes: Mapping[str, str], report: Mapping[str, Any]) -> None:
        theirs = outcomes[cell.engine]
        others = {name: outcome for name, outcome in outcomes.items() if name != cell.engine}
        require(set(others.values()) == {"committed"}, f"the others take the version: {report}")
        late = {"committed"} if cell.phase == "resume" else set[str]()
        require(theirs in {"lost", "quarantined", "aborted"} | late, f"the victim does not take it: {report}")

    def _idle(self, trainer: Trainer, cell: Cell) -> bool:
        del trainer, cell
        channel = self.fleet.channel()
        return channel["round"]["state"] == "idle"

    def _require_whole(self, names: Sequence[str], versions: Sequence[int]) -> None:
        """Each holds one version or the other, and says which."""
        for name in names:
            seed = self._oracle.holds(self.fleet, name)
            label = self.fleet.generate(name, PROMPTS[0], 1)[1]
            expected = {str(version): self._seeds[str(version)] for version in versions}
            require(label in expected and seed == expected[label], f"{name} says {label} of {expected}, holds {seed}")

    def _require_answers(self, clients: Mapping[str, Client]) -> None:
        """No token was made by other weights than those of the version that it is labeled with."""
        for name, client in clients.items():
            for when, number, token, label in tuple(client.answers):
                wrong = label not in self._seeds or self._oracle.wrong(self._seeds[label], number, token)
                require(not wrong, f"{name} answered {token} to prompt {number} as version {label}, at {when:.2f}")

    def _require_nobody_ended(self, cell: Cell, trainer: Trainer) -> None:
        self.fleet.require_alive()
        for name, tp in TP.items():
            if (cell.victim, cell.how, cell.engine) != ("worker", "killed", name):
                require(len(self.fleet.workers(f"server-{name}")) == tp, f"all workers of {name} live")
        for rank, name in enumerate(TRAINER[: len(trainer.pids)]):
            if (cell.victim, cell.how) == (name, "killed"):
                require(was_struck(trainer.pids[rank], signal.SIGKILL), f"{name} was killed by the blow")
            else:
                require(trainer.lives(rank), f"the trainer's rank {rank} lives")

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def _heal(self, cell: Cell, pid: int, trainer: Trainer) -> None:
        if cell.how == "stopped":
            os.kill(pid, signal.SIGCONT)
        if cell.victim in TRAINER:
            if cell.how == "stopped":
                time.sleep(1.0)  # whatever it still does it does to engines that have gone on
            trainer.end()
            self._start_trainer()
        elif cell.how == "killed":
            if cell.victim == "worker":
                self.fleet.end(f"server-{cell.engine}")  # the rest of it
                self.fleet.start_server(cell.engine)
            else:
                self.fleet.start_sidecar(cell.engine)

    def _return(self, cell: Cell) -> None:
        """Rounds go on until both engines have the version, verified; the victim is not ready before."""
        name, back = cell.engine, time.monotonic() + BACK_S
        if cell.victim not in TRAINER:
            poll(
                "the victim to be back",
                lambda: self.fleet.sidecar(name)["connected"] and self.fleet.sidecar(name)["engine"]["up"],
                BACK_S,
            )
        for _ in range(ATTEMPTS):
            outcomes = self._round(cell.transport, ())
            if set(outcomes.values()) == {"committed"} and len(outcomes) == len(TP):
                break
            require(time.monotonic() < back, "the victim is back in time")
        else:
            raise Wrong(f"the victim takes versions again: {outcomes}")
        self.fleet.wait_ready(*TP)
        self._require_whole(tuple(TP), (self._version,))

    def _round(self, transport: str, all_of: Sequence[str] | Mapping[str, int]) -> dict[str, str]:
        """An ordinary round; these engines must take it."""
        assert self._trainer is not None
        version = self._next()
        self._trainer.publish(version=version, seed=self._seeds[str(version)], transport=transport)
        report = self._trainer.answer(OVER_S)
        outcomes = {} if "error" in report else self._outcomes(report)
        require(all(outcomes.get(name) == "committed" for name in all_of), f"an ordinary round: {report}")
        self._committed_by = transport
        if all_of:
            self.fleet.wait_ready(*TP)
        return outcomes

    def _next(self) -> int:
        self._version += 1
        self._seeds[str(self._version)] = 1 + self._version % (SEEDS - 1)
        return self._version

    def _start_trainer(self) -> None:
        ranks = 2 if self._device == "cpu" else 1
        self._trainer = Trainer(self._ends.result(), self.fleet, next(self._launches), ranks)


def cells(
    transports: Sequence[str], victims: Sequence[str], phases: Sequence[str], signals: Sequence[str]
) -> list[Cell]:
    """All of these, as far as there are such; an empty list of names stands for all."""
    found = []
    for transport, holds in HOLDS.items():
        for victim in holds:
            for number, phase in enumerate(PHASES):
                for second, how in enumerate(SIGNALS):
                    engine = "two" if (number + second) % 2 == 0 else "one"
                    found.append(Cell(transport, victim, phase, how, engine))
    wanted = (transports, victims, phases, signals)
    return [each for each in found if all(not names or each[at] in names for at, names in enumerate(wanted))]


@contextlib.contextmanager
def deployment(
    folder: Path, *, in_place: bool = False, joined: Sequence[str] = (), device: str = "cpu", factor: float = 1.0
) -> Generator[Deaths]:
    """A deployment that runs."""
    for seed in range(SEEDS):
        tiny_model.write(folder / f"seed{seed}", seed, hidden=HIDDEN[device])
    if device == "cuda":
        TP["two"] = 1
        os.environ |= SOCKETS | {"NCCL_HOSTID": "trainer"}  # of the trainer, which has this process's environment
    trainer = {"cpu": "struck_ranks.py", "cuda": "struck_plain.py"}[device]
    with ThreadPoolExecutor(1) as aside:
        ends = aside.submit(Ends, str(Path(__file__).with_name(trainer)))  # imports what it needs for itself
        try:
            with Programs(folder) as programs:
                made = Deaths(folder, programs, ends, in_place=in_place, joined=joined, device=device, factor=factor)
                try:
                    made.start()
                    yield made
                finally:
                    made.close()
        finally:
            ends.result().close()


def carry_out(made: Deaths, wanted: Sequence[Cell], tell: Callable[[Cell, dict[str, Any]], None]) -> bool:
    """One after the other, until one leaves the deployment of no use; whether none did."""
    for cell in wanted:
        try:
            found = made.carry_out(cell)
        except (Wrong, TimeoutError, httpx.HTTPError) as error:
            tell(cell, {"passed": False, "problem": f"{type(error).__name__}: {error}"})
            return False
        try:
            made.require_in_time(cell, found)
        except Late as late:
            tell(cell, {"passed": False, "problem": str(late), **found})
        else:
            tell(cell, {"passed": True, **found})
    return True


def main() -> int:
    """Carry out what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="", help="sends, distributed")
    parser.add_argument("--victims", default="", help="some of leader, rank, worker, sidecar")
    parser.add_argument("--phases", default="", help=f"some of {', '.join(PHASES)}")
    parser.add_argument("--signals", default="", help="killed or stopped")
    parser.add_argument("--cells", default="", help="those whose names have one of these in them: 'killed at half,..'")
    parser.add_argument("--in-place", action="store_true", help="nothing is taken beside what is served")
    parser.add_argument("--joined", action="store_true", help="servers take part in broadcasts themselves")
    parser.add_argument("--device", choices=tuple(HIDDEN), default="cpu")
    parser.add_argument("--factor", type=float, default=1.0, help="of the 5 s after a deadline, on a busy machine")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    names = (args.transport, args.victims, args.phases, args.signals)
    wanted = cells(*([name for name in each.split(",") if name] for each in names))
    if args.cells:
        wanted = [cell for each in args.cells.split(",") for cell in wanted if each in str(cell)]
    found: dict[str, dict[str, Any]] = {}
    began = time.monotonic()

    def summary() -> dict[str, Any]:
        serving = [each["survivors_serving_s"] for each in found.values() if "survivors_serving_s" in each]
        killed = [each["survivors_serving_s"] for name, each in found.items()
                  if "survivors_serving_s" in each and "killed" in name]  # fmt: skip
        return {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "command": " ".join(["python -m tests.e2e.deaths", *sys.argv[1:]]),
            "cells": len(wanted),
            "passed": sum(each["passed"] for each in found.values()),
            "survivors_serving_s": max(serving, default=None),
            "survivors_serving_after_kill_s": max(killed, default=None),
            "seconds": round(time.monotonic() - began, 1),
            "each": found,
        }

    def tell(cell: Cell, told: dict[str, Any]) -> None:
        found[str(cell)] = told
        sys.stderr.write(f"{len(found)}/{len(wanted)} {cell}: {json.dumps(told)}\n")
        sys.stderr.flush()
        if args.out:
            args.out.write_text(json.dumps(summary(), indent=2) + "\n")

    left = list(wanted)
    while left:
        folder = Path(tempfile.mkdtemp(prefix="wbdeaths-"))
        joined = tuple(TP) if args.joined else ()
        with deployment(folder, in_place=args.in_place, joined=joined, device=args.device, factor=args.factor) as made:
            whole = carry_out(made, left, tell)
        if whole:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            sys.stderr.write(f"the logs are in {folder}\n")
        left = [cell for cell in wanted if str(cell) not in found]
    sys.stdout.write(json.dumps({key: value for key, value in summary().items() if key != "each"}) + "\n")
    return 0 if all(each["passed"] for each in found.values()) and len(found) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
