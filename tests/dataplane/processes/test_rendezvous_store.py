"""What torch's stores cost a process, and where they can be opened."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from weightbus.dataplane import processes
from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.processes import process_groups as rendezvous
from weightbus.dataplane.processes.connections import Deadline, MacListener, address_family, local_address_towards
from weightbus.dataplane.processes.process_groups import connect_store, join_store, serve_store, warm_up_name_resolution
from weightbus.dataplane.transports.interface import ReceiverContext
from weightbus.dataplane.transports.registry import by_name


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
