"""A process's part in a group of which the store is gone: nothing of it outlives the attempt."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from weightbus.dataplane.broadcast_group import serve_store
from weightbus.dataplane.errors import PeerLost
from weightbus.dataplane.passage import Passage
from weightbus.dataplane.sends_wire import Group

FORM_S = 5.0


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
