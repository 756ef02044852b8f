"""The formation of process groups and of their stores, as far as it shows without a GPU."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightbus.dataplane import processes
from weightbus.dataplane.errors import DeadlineExceeded, TransferFailed
from weightbus.dataplane.processes import process_groups as backends, process_groups as rendezvous
from weightbus.dataplane.processes.connections import Deadline, MacListener, address_family, local_address_towards
from weightbus.dataplane.processes.process_groups import connect_store, join_store, serve_store, warm_up_name_resolution
from weightbus.dataplane.transports.interface import ReceiverContext
from weightbus.dataplane.transports.registry import by_name

SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}  # fmt: skip


def test_torch_s_watchdog_is_kept_out_of_our_groups_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads the settings while a group is made; those of the process's other groups are as they were."""
    seen: dict[str, str | None] = {}

    class Group:
        Options = SimpleNamespace

        def __init__(self, *_: Any) -> None:
            seen.update({name: os.environ.get(name) for name in SETTINGS})

    monkeypatch.setattr(backends.c10d, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    before = dict(os.environ)
    backends.make_nccl_group(SimpleNamespace(), 0, 2, Deadline(30))  # type: ignore[arg-type]
    assert seen == SETTINGS
    assert dict(os.environ) == before


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, tuple[threading.Event, threading.Event]]]:
    """By rank: the constructor of its group has begun, and may end, as torch's, in which other threads go on."""
    ranks = {rank: (threading.Event(), threading.Event()) for rank in (1, 2)}

    class Group:
        Options = SimpleNamespace

        def __init__(self, _store: object, rank: int, *_: Any) -> None:
            began, ends = ranks[rank]
            began.set()
            ends.wait(30)
            self.found = {name: os.environ.get(name) for name in SETTINGS}

    monkeypatch.setattr(backends.c10d, "ProcessGroupNCCL", Group, raising=False)
    yield ranks
    for _, ends in ranks.values():
        ends.set()


def test_groups_that_are_made_at_once_all_have_the_settings_and_leave_none(
    slow: dict[int, tuple[threading.Event, threading.Event]],
) -> None:
    """Two transports of a round form theirs at the same moment, on a thread each."""
    before = dict(os.environ)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(backends.make_nccl_group, cast("Any", None), 1, 2, Deadline(30))
        assert slow[1][0].wait(30)
        second = threads.submit(backends.make_nccl_group, cast("Any", None), 2, 3, Deadline(30))
        assert not slow[2][0].wait(0.3), "one after the other"
        slow[1][1].set()
        assert cast("Any", first.result(30)).found == SETTINGS
        slow[2][1].set()
        assert cast("Any", second.result(30)).found == SETTINGS
    assert dict(os.environ) == before


def test_a_group_that_waits_for_another_to_be_made_has_its_deadline(
    slow: dict[int, tuple[threading.Event, threading.Event]],
) -> None:
    """The driver may keep the other one; and the next may be made when that has ended."""
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(backends.make_nccl_group, cast("Any", None), 1, 2, Deadline(30))
        assert slow[1][0].wait(30)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="another group"):
            backends.make_nccl_group(cast("Any", None), 2, 3, Deadline(0.2))
        assert time.monotonic() - began < 10
        slow[1][1].set()
        held.result(30)
    slow[2][1].set()
    assert backends.make_nccl_group(cast("Any", None), 2, 3, Deadline(30))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_all_peers_are_tried_to_break_a_group(rank: int) -> None:
    """A receive from an ended rank fails otherwise than from a live one, and closes nothing; which ended is unknown."""
    tried = list[int]()

    class Gloo:
        def recv(self, _tensors: object, peer: int, _tag: int) -> SimpleNamespace:
            tried.append(peer)
            if peer == 0:
                raise RuntimeError("it has ended")
            return SimpleNamespace(wait=late)

    def late(_timeout: object) -> None:
        raise RuntimeError("timed out")

    backends.break_gloo(Gloo(), rank, 4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert sorted(tried) == [peer for peer in range(4) if peer != rank]


def test_an_abort_that_does_not_return_is_not_waited_for() -> None:
    """The driver may hold it; nor does one that fails matter."""
    over = threading.Event()
    began = time.monotonic()
    backends.abort_nccl(SimpleNamespace(abort=lambda: over.wait(30)), 0.1)
    assert time.monotonic() - began < 10
    over.set()

    def fails() -> None:
        raise RuntimeError("it was broken before")

    backends.abort_nccl(SimpleNamespace(abort=fails), 10)


# What torch's stores cost a process, and where they can be opened.


def test_names_are_asked_for_once_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first store of a process may take as long as two name servers are silent."""
    silent, made = threading.Event(), threading.Event()

    def store(*_: object, **__: object) -> None:
        assert not made.is_set(), "a second store"
        made.set()
        assert silent.wait(10)

    monkeypatch.setattr(rendezvous.c10d, "TCPStore", store)
    warm_up_name_resolution.cache_clear()
    thread = warm_up_name_resolution()
    assert warm_up_name_resolution() is thread
    assert made.wait(10)
    assert thread.is_alive()
    silent.set()
    thread.join(10)
    warm_up_name_resolution.cache_clear()


def test_a_receiver_of_broadcasts_asks_before_its_first_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Receivers of other transports make no store."""
    asked: list[None] = []
    monkeypatch.setattr(processes, "warm_up_name_resolution", lambda: asked.append(None))
    for kind, times in (("direct", 0), ("distributed", 1)):
        by_name(kind).receiver(ReceiverContext(runtime_dir=tmp_path / kind)).shutdown()
        assert len(asked) == times


@pytest.fixture
def six_only(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that has an address of IPv6 and no other, as in a cluster without IPv4."""
    asked = socket.getaddrinfo

    def answer(host: str | None, *args: object, **more: object) -> object:
        return asked("::1" if host == "six.example" else host, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return "six.example"


def test_a_name_of_ipv6_alone_is_of_that_family(six_only: str) -> None:
    """A name with both is taken as IPv4, which every host has."""
    assert address_family(six_only) is socket.AF_INET6
    assert address_family("::1") is socket.AF_INET6
    assert address_family("127.0.0.1") is socket.AF_INET
    assert address_family("localhost") is socket.AF_INET


def test_a_store_of_ipv6_is_reached() -> None:
    store = serve_store("::1")
    join_store(store).set("key", "value")
    found = connect_store(f"tcp://[::1]:{store.port}", Deadline(10))
    assert found.get("key") == b"value"
    assert local_address_towards("::1", store.port) == "::1"


@pytest.mark.parametrize("make", [serve_store, lambda host: MacListener(host, "0" * 64)])
def test_an_address_of_another_machine_is_refused_in_words(make: object) -> None:
    """192.0.2.1 is no host's; with brackets it is no address."""
    assert callable(make)
    for host in ("192.0.2.1", "[::1]"):
        with pytest.raises(TransferFailed, match="set host to an address of this machine"):
            make(host)
