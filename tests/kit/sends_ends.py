"""Ends of sent rounds in processes of their own: reads jobs, a JSON object a line, and forks a process for each.

    {"half": "rank", "root": .., "seed": 1, "address": .., "token": .., "epoch": 1}   is the trainer's second rank
    {"half": "server", "socket": ..}     is a server of one worker: what comes on that Unix socket calls the loader

With ``"point"`` a process signals itself with ``"signal"`` when it comes there for the ``"at"``-th time:

    begun     it was told to begin (rank), or to take (worker)
    forming   before it joins the group
    formed    it has joined
    moving    before a turn
    through   everything has moved
    flip      before what was taken is put into place (worker)
    flipped   after that (worker)
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit.forked import say, serve
from tests.kit.toy_direct import WAIT_S, ToyShard
from tests.kit.toy_sends import SendingTrainer
from weightbus.dataplane.transports.interface import Address
from weightbus.dataplane.transports.sends.message_queues import SendQueue
from weightbus.dataplane.transports.sends.p2p_group import P2PGroup
from weightbus.dataplane.transports.sends.rank_sender import RankSender
from weightbus.engine_agent.worker import loader as worker_loader
from weightbus.engine_agent.worker.receive_thread import ReceiveThread

POINTS = ("begun", "forming", "formed", "moving", "through")
"""Of ranks."""
OF_WORKERS = (*POINTS, "flip", "flipped")


def doomed(job: dict[str, Any]) -> None:
    """Signal this process when it comes to its point."""
    left = [int(job.get("at", 1))]

    def reach(point: str) -> None:
        if point == job.get("point"):
            left[0] -= 1
            if not left[0]:
                # To this thread: it goes no step further, whichever other thread the kernel would have chosen.
                signal.pthread_kill(threading.get_ident(), job["signal"])

    def before(owner: Any, name: str, point: str, after: str = "") -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **more: Any) -> Any:
            reach(point)
            found = real(*arguments, **more)
            reach(after)
            return found

        setattr(owner, name, watched)

    form = P2PGroup.form.__func__  # type: ignore[attr-defined]

    def formed(kind: Any, *arguments: Any, **more: Any) -> Any:
        reach("forming")
        group = form(kind, *arguments, **more)
        reach("formed")
        return group

    P2PGroup.form = classmethod(formed)  # type: ignore[method-assign, assignment]
    before(P2PGroup, "post", "moving")
    before(RankSender, "_parts_of", "begun")
    before(SendQueue, "send", "", "through")
    before(ReceiveThread, "_take", "begun", "through")
    before(ReceiveThread, "swap", "flip", "flipped")


def _device(job: dict[str, Any]) -> torch.device:
    os.environ.update(job.get("environment", {}))
    return torch.device(job.get("device", "cpu"))


def rank(job: dict[str, Any]) -> None:
    """Send one version as the second rank."""
    made = SendingTrainer(Path(job["root"]), device=_device(job))
    made.step(job["seed"])
    made.describe()
    doomed(job)
    made.sending[1].begin(Address(job["address"], token=job["token"]), job["epoch"], made.memories[1].regions, WAIT_S)
    thread = made.sending[1]._session.thread
    assert thread is not None
    thread.join()


def server(job: dict[str, Any]) -> None:
    """Call the loader whenever that is asked for, and answer when it has returned."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(job["socket"])
    listener.listen()
    model = ToyShard(0, 1).to(_device(job))
    doomed(job)
    say(listening=True)
    while True:
        caller, _ = listener.accept()
        with caller:
            path = caller.recv(4096).decode()
            worker_loader.serve_sidecar(model, path)
            caller.sendall(b"returned")


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"rank": rank, "server": server})
