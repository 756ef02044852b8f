"""Ranks of a real Megatron trainer, to be struck: reads jobs, a JSON object a line, and forks a rank for each.

    {"rank": 0, "folder": .., "coordinator": .., "keys": .., "port": .., "socket": ..}

Both ranks are tensor-parallel, over gloo. Rank 0 says ``{"listening": true}`` when all are there, and takes commands on
that Unix socket, a line each; it answers with the report as one line of JSON, or with the error.

    {"version": 7, "seed": 3, "transport": "sends"}

The agent of the last version is used again, and its group, unless the transport is another one or ``"fresh": true`` is
asked for. A rank that stands or is gone is given up by the others after `RANKS_S`.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import torch
import torch.distributed as dist

from weightbus.trainer_agent import megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tests.e2e.strikes import watch
from weightbus.dataplane import sends
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.demo import checkpoint, model
from weightbus.trainer_agent.megatron import MegatronSource

RANKS = 2
RANKS_S = 20.0
SMALL_TURNS = 1 << 14
"""Bytes for a pair of ranks in a turn, so that tiny models take several."""
BUCKET_BYTES = 50_000
"""Several of them, too."""

ANSWERS = os.dup(1)
"""What was standard output: libraries may write to that, too, and now to standard error."""
os.dup2(2, 1)


def say(**answer: object) -> None:
    """One line to whoever starts ranks."""
    os.write(ANSWERS, json.dumps(answer).encode() + b"\n")


class Rank:
    """One of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder, self._coordinator, self._keys = Path(job["folder"]), job["coordinator"], job["keys"]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        os.environ |= {"RANK": str(job["rank"]), "WORLD_SIZE": str(RANKS)}
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=RANKS_S))
        parallel_state.initialize_model_parallel(RANKS)
        model_parallel_cuda_manual_seed(1)
        self._policy = model.build(checkpoint.TINY)
        self._orders = dist.new_group(backend="gloo", timeout=dt.timedelta(days=1))
        """On which ranks wait for the next command."""
        self._source: MegatronSource | None = None
        self._agent: TrainerAgent | None = None
        self._transport = ""

    def publish(self, asked: dict[str, Any]) -> object:
        """One version."""
        model.load(self._policy, checkpoint.read(self._folder / f"seed{asked['seed']}"), checkpoint.TINY)
        try:
            return msgspec.to_builtins(self._connected(asked).publish(asked["version"]))
        except Exception as error:  # noqa: BLE001 - whoever asked reads what went wrong
            return {"error": f"{type(error).__name__}: {error}"}

    def hear(self, line: str) -> dict[str, Any]:
        """The next command, on every rank."""
        said = [line]
        dist.broadcast_object_list(said, src=0, group=self._orders)
        asked: dict[str, Any] = json.loads(said[0])
        return asked

    def _connected(self, asked: dict[str, Any]) -> TrainerAgent:
        if self._agent is not None and (asked.get("fresh") or asked["transport"] != self._transport):
            self._agent.close()
            self._agent = None
        if self._source is None:
            self._source = MegatronSource(self._policy, hf_config=self._folder / "seed0", timeout_s=RANKS_S)
        if self._agent is None:
            self._transport = asked["transport"]
            self._agent = TrainerAgent.connect(
                self._source,
                channel="e2e",
                coordinator=self._coordinator,
                transport=(self._transport,),
                bucket_bytes=BUCKET_BYTES,
                keys=Path(self._keys),
                environ={},
            )
        return self._agent


def lead(rank: Rank, path: str) -> None:
    """Rank 0: whoever comes to the socket tells it what to do."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        say(listening=True)
        caller, _ = listener.accept()
    with caller, caller.makefile("rw") as lines:
        for line in lines:
            answer = rank.publish(rank.hear(line))
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def be(job: dict[str, Any]) -> None:
    """One rank, until it is ended."""
    sends.pair_bytes_of = lambda *_: SMALL_TURNS
    watch(f"rank-{job['rank']}", Path(job["folder"]))
    rank = Rank(job)
    try:
        if job["rank"] == 0:
            lead(rank, job["socket"])
        while True:
            rank.publish(rank.hear(""))
    except RuntimeError as error:  # gloo's, of this program's own waiting for commands: the others are gone
        sys.stderr.write(f"{error}\n")
        threading.Event().wait()


def main() -> None:
    """Fork a rank for each job until the jobs end, then see that none is left."""
    children: list[int] = []
    say(up=True)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            job = json.loads(line)
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            threading.current_thread().name = f"rank {job['rank']}"
            try:
                be(job)
            except Exception as error:  # noqa: BLE001  told to whoever reads its log
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                sys.stderr.flush()
            os._exit(1)
        children.append(pid)
        say(pid=pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
