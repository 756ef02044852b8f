"""Ranks that read each other's memory with NIXL, over TCP: as test_p2p_group.py promises. Skipped without NIXL."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weightbus.dataplane.errors import ChunkTimeout, PeerLost
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.processes.process_groups import join_store, serve_store
from weightbus.dataplane.transports.sends.nixl_group import NixlGroup
from weightbus.dataplane.transports.sends.p2p_group import P2PChunk
from weightbus.dataplane.transports.sends.transport import nixl_is_installed

LONG_S = 60.0
PROMPT_S = 20.0

pytestmark = pytest.mark.skipif(not nixl_is_installed(), reason="nixl is not installed: weightbus[nixl]")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


def groups(memories: list[torch.Tensor]) -> list[NixlGroup]:
    server = serve_store("127.0.0.1")
    stores = [join_store(server) for _ in memories]
    everybody = frozenset(range(len(memories)))

    def form(rank: int) -> NixlGroup:
        others = everybody - {rank}
        return NixlGroup.form(
            stores[rank], f"g{id(memories)}", "127.0.0.1", torch.device("cpu"), rank, len(memories), Deadline(LONG_S),
            to=others, from_=others, memory=[memories[rank]],
        )  # fmt: skip

    with ThreadPoolExecutor(len(memories)) as pool:
        return list(pool.map(form, range(len(memories))))


def test_messages_arrive_both_ways_in_order() -> None:
    """Several in a post, several posts under way; what one sends the others have."""
    memories = [torch.full((64,), rank + 1, dtype=torch.uint8) for rank in range(3)]
    for memory in memories:
        memory[32:] = 0
    made = groups(memories)

    def carry(rank: int) -> None:
        group, memory = made[rank], memories[rank]
        others = [each for each in range(3) if each != rank]
        sends = [[P2PChunk(memory[at : at + 8], peer) for peer in others] for at in (0, 8)]
        takes = [
            [P2PChunk(memory[at + 8 * n : at + 8 * n + 8], peer) for n, peer in enumerate(others)] for at in (32, 48)
        ]
        posted = [group.post(given, taken) for given, taken in zip(sends, takes, strict=True)]
        for each in posted:
            each.wait(Deadline(LONG_S))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(carry, range(3)))
    for rank, memory in enumerate(memories):
        others = [each + 1 for each in range(3) if each != rank]
        assert memory[32:].tolist() == [value for _ in range(2) for value in others for _ in range(8)]
    for group in made:
        group.close()


def test_a_member_that_gives_up_waits_no_longer() -> None:
    """`abort` from another thread ends a wait long before its deadline, and nothing is posted afterwards."""
    memories = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    waits, other = groups(memories)
    waiting = threading.Event()

    def wait() -> float:
        began = time.monotonic()
        waiting.set()
        with pytest.raises(PeerLost, match="enough"):
            waits.post([], [P2PChunk(memories[0], 1)]).wait(Deadline(LONG_S))
        return time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        took = pool.submit(wait)
        assert waiting.wait(PROMPT_S)
        waits.abort("enough")
        assert took.result(PROMPT_S) < PROMPT_S
    with pytest.raises(PeerLost, match="enough"):
        waits.post([], [P2PChunk(memories[0], 1)])
    for group in (waits, other):
        group.close()


def test_no_member_is_waited_for_beyond_the_deadline() -> None:
    """Neither a sender that offers nothing nor a receiver that reads nothing."""
    memories = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    made = groups(memories)
    with pytest.raises(ChunkTimeout):
        made[0].post([], [P2PChunk(memories[0], 1)]).wait(Deadline(0.2))
    with pytest.raises(ChunkTimeout):
        made[1].post([P2PChunk(memories[1], 0)], []).wait(Deadline(0.2))
    for group in made:
        group.close()


def test_messages_of_other_sizes_are_refused() -> None:
    """Schedules that differ are an error, and not bytes in the wrong place."""
    memories = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    made = groups(memories)
    posted = made[1].post([P2PChunk(memories[1][:8], 0)], [])
    with pytest.raises(PeerLost, match="other messages"):
        made[0].post([], [P2PChunk(memories[0], 1)]).wait(Deadline(LONG_S))
    with pytest.raises(ChunkTimeout):
        posted.wait(Deadline(0.2))
    for group in made:
        group.close()
