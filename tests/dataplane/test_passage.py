"""A process's part in a group: nothing of it outlives the attempt, and it keeps nobody waiting."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weightbus.dataplane.broadcast_group import serve_store
from weightbus.dataplane.deadline import Deadline
from weightbus.dataplane.errors import PeerLost
from weightbus.dataplane.outbox import Exchange
from weightbus.dataplane.pair_group import Parcel
from weightbus.dataplane.passage import Passage
from weightbus.dataplane.sends_wire import Group

FORM_S = 5.0
LONG_S = 60.0


def group(port: int, size: int = 2, rank: int = 1) -> Group:
    return Group(
        store=f"tcp://127.0.0.1:{port}", name="g", size=size, rank=rank, form_s=FORM_S, turn_s=FORM_S, nixl=False,
        stands=False, keep_s=0.0,
    )  # fmt: skip


def passing() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "weightbus-sends"]


def test_whoever_comes_too_late_for_the_store_ends_at_once() -> None:
    """Torch would knock for more than its deadline, and take the program with it that ends meanwhile (SIGABRT)."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(PeerLost, match="store"):
        Passage(group(port), 1, torch.device("cpu")).run(lambda _group: None, lambda: "", lambda: None)
    for thread in passing():
        thread.join(FORM_S)
    assert not passing()
    assert time.monotonic() - began < FORM_S


def test_a_store_that_is_there_is_joined() -> None:
    """Whoever looked whether it is there is not taken for a member."""
    server = serve_store("127.0.0.1")
    where = group(server.port, size=1, rank=0)
    moved: list[bool] = []
    Passage(where, 0, torch.device("cpu")).run(lambda _group: moved.append(True), lambda: "", lambda: None)
    assert moved == [True]


def test_whoever_is_called_off_frees_the_others() -> None:
    """Long before the deadline of those who wait for its messages; the reason stays with it."""
    server = serve_store("127.0.0.1")
    moving = [threading.Event(), threading.Event()]

    def take(rank: int) -> None:
        def move(group: Exchange) -> None:
            moving[rank].set()
            group.post((), [Parcel(torch.zeros(8, dtype=torch.uint8), 1 - rank)]).wait(Deadline(LONG_S))

        def called_off() -> str:
            return "enough" if rank and all(each.is_set() for each in moving) else ""

        Passage(group(server.port, rank=rank), rank, torch.device("cpu")).run(move, called_off, lambda: None)

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waits, gives_up = (pool.submit(take, rank).exception for rank in range(2))
        assert "enough" in str(gives_up(LONG_S))
        assert isinstance(waits(LONG_S), PeerLost)
    assert time.monotonic() - began < LONG_S / 2
