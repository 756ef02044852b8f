"""Ends of direct rounds in processes of their own: reads jobs, a JSON object a line, and forks a process for each.

    {"half": "trainer", "root": .., "epoch": 1, "seed": 3}     offers a version, says where, and stays
                                 with "follows": true  without its digest table, which does not come
                                 with "parts": true    of which only the first part is ever made
    {"half": "workers", "socket": .., "tp": 2, "die": "Replay"}  is a server's workers for one call of the loader

A process may be told to kill itself at a point: before it obeys a message of that name, when it has ``copied``, or when
it has answered (``after ExecutePlan``). Answers are JSON lines too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit.forked import say, serve
from tests.kit.toy_direct import WAIT_S, Maker, ToyShard, Trainer
from weightbus.dataplane.transports.interface import Peer
from weightbus.engine_agent.worker import loader as worker_loader
from weightbus.engine_agent.worker.worker_state import WorkerState


def trainer(job: dict[str, Any]) -> None:
    """Offer one version to ``e``."""
    made = Maker(Path(job["root"])) if job.get("parts") else Trainer(Path(job["root"]))
    if isinstance(made, Maker):
        made.begin(job["seed"])
        made.make(0)
    else:
        made.step(job["seed"])
    session = made.session(job["epoch"])
    if job.get("follows"):
        session = msgspec.structs.replace(session, table=None)
    address = made.sender.offer(session, [Peer("e", job["tp"])])
    say(address=address.address)
    made.sender.ready(WAIT_S)
    made.sender.finish(WAIT_S)
    signal.pause()


def workers(job: dict[str, Any]) -> None:
    """Take part in one exchange, all ranks in threads; exit when they have returned."""
    point, blow = job.get("die", ""), signal.SIGSTOP if job.get("stop") else signal.SIGKILL
    obey = worker_loader._obey

    def watched(state: WorkerState, message: Any, called_off: Any) -> Any:
        name = message.kind
        if name == "Replay" and point == "copied":
            bound = state._importer

            class Dies:
                """Stands for the importer when the copy has been made."""

                def __getattr__(self, asked: str) -> Any:
                    if asked == "check" and state.touched:
                        os.kill(os.getpid(), blow)
                    return getattr(bound, asked)

            state._importer = Dies()  # type: ignore[assignment]
        if name == point:
            os.kill(os.getpid(), blow)
        answer = obey(state, message, called_off)
        if point == f"after {name}":
            os.kill(os.getpid(), blow)
        return answer

    worker_loader._obey = watched
    rank_of = threading.local()
    worker_loader._rank = lambda: rank_of.rank

    def run(rank: int) -> None:
        rank_of.rank = rank
        worker_loader.serve_sidecar(ToyShard(rank, job["tp"]), job["socket"])

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(job["tp"])]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    say(returned=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"trainer": trainer, "workers": workers})
