"""Ranks that send to each other over gloo: who gives up frees the others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weightbus.dataplane.broadcast_group import join_store, serve_store
from weightbus.dataplane.deadline import Deadline
from weightbus.dataplane.errors import DeadlineExceeded, PeerLost, TransferFailed, TurnLate
from weightbus.dataplane.pair_group import PairGroup, Parcel

HOST = "127.0.0.1"
LONG_S = 60.0
PROMPT_S = 20.0


def formed(size: int) -> list[PairGroup]:
    server = serve_store(HOST)
    stores = [join_store(server) for _ in range(size)]

    def form(rank: int) -> PairGroup:
        return PairGroup.form(stores[rank], "g", HOST, torch.device("cpu"), rank, size, Deadline(LONG_S))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(form, range(size)))


def test_messages_arrive_both_ways() -> None:
    """What one sends the other has."""
    groups = formed(2)
    given = [torch.full((8,), rank + 1, dtype=torch.uint8) for rank in range(2)]
    found = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]

    def exchange(rank: int) -> None:
        groups[rank].exchange([Parcel(given[rank], 1 - rank)], [Parcel(found[rank], 1 - rank)], Deadline(LONG_S))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(exchange, range(2)))
    assert (found[0].tolist(), found[1].tolist()) == ([2] * 8, [1] * 8)


@pytest.mark.parametrize("gone", ["nobody", "the rank before it", "the rank after it"])
def test_who_gives_up_frees_the_others(gone: str) -> None:
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
            waits.exchange([], [Parcel(torch.zeros(8, dtype=torch.uint8), 1)], Deadline(LONG_S))
        return time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        took = pool.submit(wait)
        assert waiting.wait(PROMPT_S)
        gives_up.abort("enough")
        assert took.result(LONG_S + PROMPT_S) < PROMPT_S
    with pytest.raises((PeerLost, TransferFailed), match="enough"):
        gives_up.exchange([], [Parcel(torch.zeros(8, dtype=torch.uint8), 0)], Deadline(LONG_S))


def test_who_waits_in_vain_is_told_of_slow_links() -> None:
    """A turn's deadline does not tell who stands still from a link that does not carry it: what to do is said."""
    groups = formed(2)
    with pytest.raises(TurnLate, match=r"waited 0\.2 s for a peer .* let the engine take distributed or disk"):
        groups[0].exchange([], [Parcel(torch.zeros(8, dtype=torch.uint8), 1)], Deadline(0.2))


def test_a_turn_whose_time_is_over_before_it_is_waited_for_is_late() -> None:
    """As one that runs out meanwhile, which gloo says in another way."""
    groups = formed(2)
    with pytest.raises(TurnLate):
        groups[0].exchange([], [Parcel(torch.zeros(8, dtype=torch.uint8), 1)], Deadline(0.0))


def test_who_does_not_connect_is_no_late_turn() -> None:
    """Over NCCL pairs connect while a group forms: less at a time would change nothing."""
    groups = formed(2)
    none: frozenset[int] = frozenset()
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(groups[0]._connect, none, frozenset({1}), Deadline(1.0))
        pool.submit(groups[1]._connect, none, none, Deadline(LONG_S)).result(LONG_S)
        error = waits.exception(LONG_S)
    assert isinstance(error, DeadlineExceeded)
    assert not isinstance(error, TurnLate)
