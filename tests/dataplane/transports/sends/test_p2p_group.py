"""Ranks that send to each other over gloo, and as over NCCL: who gives up frees the others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from weightbus.dataplane.errors import ChunkTimeout, DeadlineExceeded, PeerLost, TransferFailed
from weightbus.dataplane.processes import process_groups as backends
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.processes.process_groups import join_store, serve_store
from weightbus.dataplane.transports.sends.p2p_group import P2PChunk, P2PGroup

HOST = "127.0.0.1"
LONG_S = 60.0
PROMPT_S = 20.0


def formed(size: int) -> list[P2PGroup]:
    server = serve_store(HOST)
    stores = [join_store(server) for _ in range(size)]

    def form(rank: int) -> P2PGroup:
        return P2PGroup.form(stores[rank], "g", HOST, torch.device("cpu"), rank, size, Deadline(LONG_S))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(form, range(size)))


def test_messages_arrive_both_ways() -> None:
    """What one sends the other has."""
    groups = formed(2)
    given = [torch.full((8,), rank + 1, dtype=torch.uint8) for rank in range(2)]
    found = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]

    def exchange(rank: int) -> None:
        groups[rank].exchange([P2PChunk(given[rank], 1 - rank)], [P2PChunk(found[rank], 1 - rank)], Deadline(LONG_S))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(exchange, range(2)))
    assert (found[0].tolist(), found[1].tolist()) == ([2] * 8, [1] * 8)


@pytest.mark.parametrize("gone", ["nobody", "the rank before it", "the rank after it"])
def test_a_member_that_gives_up_frees_the_others(gone: str) -> None:
    """Long before the deadline of a rank that waits for a message, which nobody will send any more.

    Also where another rank is why it gives up: that one has ended.
    """
    groups = formed(2 if gone == "nobody" else 3)
    gives_up = groups[1]
    waits = groups[2 if gone == "the rank before it" else 0]
    groups.clear()
    waiting = threading.Event()

    def wait() -> float:
        began = time.monotonic()
        waiting.set()
        with pytest.raises(PeerLost):
            waits.exchange([], [P2PChunk(torch.zeros(8, dtype=torch.uint8), 1)], Deadline(LONG_S))
        return time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        took = pool.submit(wait)
        assert waiting.wait(PROMPT_S)
        gives_up.abort("enough")
        assert took.result(LONG_S + PROMPT_S) < PROMPT_S
    with pytest.raises((PeerLost, TransferFailed), match="enough"):
        gives_up.exchange([], [P2PChunk(torch.zeros(8, dtype=torch.uint8), 0)], Deadline(LONG_S))


def test_a_member_that_waits_in_vain_is_told_of_slow_links() -> None:
    """A turn's deadline does not tell who stands still from a link that does not carry it: what to do is said."""
    groups = formed(2)
    with pytest.raises(ChunkTimeout, match=r"waited 0\.2 s for a peer .* let the engine take distributed or disk"):
        groups[0].exchange([], [P2PChunk(torch.zeros(8, dtype=torch.uint8), 1)], Deadline(0.2))


def test_a_turn_whose_time_is_over_before_it_is_waited_for_is_late() -> None:
    """As one that runs out meanwhile, which gloo says in another way."""
    groups = formed(2)
    with pytest.raises(ChunkTimeout):
        groups[0].exchange([], [P2PChunk(torch.zeros(8, dtype=torch.uint8), 1)], Deadline(0.0))


def test_a_member_that_does_not_connect_is_no_late_turn() -> None:
    """Over NCCL pairs connect while a group forms: less at a time would change nothing."""
    groups = formed(2)
    none: frozenset[int] = frozenset()
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(groups[0]._connect, none, frozenset({1}), Deadline(1.0))
        pool.submit(groups[1]._connect, none, none, Deadline(LONG_S)).result(LONG_S)
        error = waits.exception(LONG_S)
    assert isinstance(error, DeadlineExceeded)
    assert not isinstance(error, ChunkTimeout)


class Work:
    """One of torch's that ends when a test says so, and well: so does one of NCCL's that was aborted."""

    def __init__(self, ended: bool) -> None:
        self.over = threading.Event()
        if ended:
            self.over.set()

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self, *_: object) -> bool:
        assert self.over.wait(PROMPT_S)
        return True


class Nccl:
    """As much of torch's as a group asks for."""

    def __init__(self, connect: Callable[[], Work]) -> None:
        self.allreduce = lambda _: connect()
        self.messages = Work(ended=False)
        self.aborted = threading.Event()

    def recv(self, *_: object) -> None:
        """Coalesced."""

    send = recv

    def _start_coalescing(self) -> None:
        """What follows is one work."""

    def _end_coalescing(self) -> Work:
        return self.messages

    def abort(self) -> None:
        self.aborted.set()
        self.messages.over.set()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done on one happens here."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, dtype=None, **_: zeros(*sizes, dtype=dtype))
    for name in ("Stream", "stream", "device"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)


def over(nccl: Nccl, monkeypatch: pytest.MonkeyPatch, seconds: float) -> P2PGroup:
    monkeypatch.setattr(backends, "make_nccl_group", lambda *_: nccl)
    return P2PGroup.form(c10d.HashStore(), "g", HOST, torch.device("cuda", 0), 0, 2, Deadline(seconds))


def refused() -> Work:
    raise RuntimeError("no route to host")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("connect", "error", "seconds"),
    [(refused, TransferFailed, LONG_S), (lambda: Work(ended=False), DeadlineExceeded, 0.1)],
    ids=["fails", "does not end"],
)
def test_a_group_that_does_not_connect_is_broken_off(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[], Work], error: type[Exception], seconds: float
) -> None:
    """It has no owner: its threads and its memory on the GPU would be there as long as the process."""
    nccl = Nccl(connect)
    with pytest.raises(error):
        over(nccl, monkeypatch, seconds)
    assert nccl.aborted.wait(PROMPT_S)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("aborts", [False, True], ids=["end", "are aborted"])
def test_messages_that_were_broken_off_have_not_moved(monkeypatch: pytest.MonkeyPatch, aborts: bool) -> None:
    """What was to be received would be loaded without being there, and what is sent be written over."""
    nccl = Nccl(lambda: Work(ended=True))
    group = over(nccl, monkeypatch, LONG_S)
    posted = group.post([], [P2PChunk(torch.zeros(8, dtype=torch.uint8), 1)])
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(posted.wait, Deadline(LONG_S))
        if aborts:
            group.abort("enough")
        nccl.messages.over.set()
        error = moved.exception(PROMPT_S)
    if aborts:
        assert isinstance(error, PeerLost)
        assert "enough" in str(error)
    else:
        assert error is None
