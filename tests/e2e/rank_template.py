"""What processes have in common that are forked to be ranks of a trainer and to be struck: reads jobs, forks for each.

Jobs are JSON objects, one a line, with at least ``rank``, ``folder``, ``log`` and ``socket``. Rank 0 says
``{"listening": true}`` when all are there, and takes commands on that Unix socket, a line each; it answers with the
report as one line of JSON, or with the error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.strikes import watch

ANSWERS = os.dup(1)
"""What was standard output: libraries may write to that, too, and now to standard error."""
os.dup2(2, 1)


class Rank(Protocol):
    """One of them."""

    def publish(self, asked: dict[str, Any]) -> object:
        """One version: its report, or ``{"error": ..}``."""
        ...

    def hear(self, line: str) -> dict[str, Any]:
        """The next command, on every rank; `line` is rank 0's."""
        ...


class ConnectedRank:
    """A rank with an agent, used again unless the transport is another one or ``"fresh": true`` is asked for."""

    bucket_bytes: int

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["folder"])
        self._job, self._transport = job, ""
        self._agent: Any = None

    def load(self, seed: int) -> None:
        """Take the weights of a checkpoint."""
        raise NotImplementedError

    def source(self) -> Any:
        """The source of the agent; the same one each time."""
        raise NotImplementedError

    def publish(self, asked: dict[str, Any]) -> object:
        """One version: its report, or ``{"error": ..}``."""
        import msgspec

        self.load(asked["seed"])
        try:
            return msgspec.to_builtins(self._connected(asked).publish(asked["version"]))
        except Exception as error:  # noqa: BLE001 - told to the caller
            return {"error": f"{type(error).__name__}: {error}"}

    def _connected(self, asked: dict[str, Any]) -> Any:
        from weightbus.trainer_agent import TrainerAgent

        if self._agent is not None and (asked.get("fresh") or asked["transport"] != self._transport):
            self._agent.close()
            self._agent = None
        if self._agent is None:
            self._transport = asked["transport"]
            self._agent = TrainerAgent.connect(
                self.source(),
                channel="e2e",
                coordinator=self._job["coordinator"],
                transport=(self._transport,),
                bucket_bytes=self.bucket_bytes,
                keys=Path(self._job["keys"]),
                environ={},
            )
        return self._agent


def say(**answer: object) -> None:
    """One line to whoever starts ranks."""
    os.write(ANSWERS, json.dumps(answer).encode() + b"\n")


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


def be(job: dict[str, Any], make: Callable[[dict[str, Any]], Rank]) -> None:
    """One rank, until it is ended."""
    watch(f"rank-{job['rank']}", Path(job["folder"]))
    rank = make(job)
    try:
        if job["rank"] == 0:
            lead(rank, job["socket"])
        while True:
            rank.publish(rank.hear(""))
    except RuntimeError as error:  # gloo's, of this program's own waiting for commands: the others are gone
        sys.stderr.write(f"{error}\n")
        threading.Event().wait()


def serve(make: Callable[[dict[str, Any]], Rank]) -> None:
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
                be(job, make)
            except Exception as error:  # noqa: BLE001  told to whoever reads its log
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                sys.stderr.flush()
            os._exit(1)
        children.append(pid)
        say(pid=pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
