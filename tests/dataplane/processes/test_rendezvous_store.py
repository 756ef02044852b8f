"""What torch's stores cost a process, and where they can be opened."""

from __future__ import annotations

import socket
import threading

import pytest

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.processes import rendezvous_store as rendezvous
from weightbus.dataplane.processes.deadline import Deadline
from weightbus.dataplane.processes.mac_frames import MacListener, address_towards, family_of
from weightbus.dataplane.processes.rendezvous_store import ask_for_names, join_store, reach_store, serve_store
from weightbus.dataplane.transports.registry import receiver


def test_names_are_asked_for_once_and_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first store of a process may take as long as two name servers are silent."""
    silent, made = threading.Event(), threading.Event()

    def store(*_: object, **__: object) -> None:
        assert not made.is_set(), "a second store"
        made.set()
        assert silent.wait(10)

    monkeypatch.setattr(rendezvous, "TCPStore", store)
    ask_for_names.cache_clear()
    thread = ask_for_names()
    assert ask_for_names() is thread
    assert made.wait(10)
    assert thread.is_alive()
    silent.set()
    thread.join(10)
    ask_for_names.cache_clear()


def test_a_receiver_of_broadcasts_asks_before_its_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes versions in other ways makes no store."""
    asked: list[None] = []
    monkeypatch.setattr(rendezvous, "ask_for_names", lambda: asked.append(None))
    for kind, times in (("direct", 0), ("distributed", 1)):
        receiver(kind).shutdown()
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
    """One with both is taken as IPv4, which everybody has."""
    assert family_of(six_only) is socket.AF_INET6
    assert family_of("::1") is socket.AF_INET6
    assert family_of("127.0.0.1") is socket.AF_INET
    assert family_of("localhost") is socket.AF_INET


def test_a_store_of_ipv6_is_reached() -> None:
    store = serve_store("::1")
    join_store(store).set("key", "value")
    found = reach_store(f"tcp://[::1]:{store.port}", Deadline(10))
    assert found.get("key") == b"value"
    assert address_towards("::1", store.port) == "::1"


@pytest.mark.parametrize("make", [serve_store, lambda host: MacListener(host, "0" * 64)])
def test_an_address_of_another_machine_is_refused_in_words(make: object) -> None:
    """192.0.2.1 is nobody's; with brackets it is no address."""
    assert callable(make)
    for host in ("192.0.2.1", "[::1]"):
        with pytest.raises(TransferFailed, match="set host to an address of this machine"):
            make(host)
