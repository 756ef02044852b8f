"""A rendezvous store that is reached through a relay, and the fate of clients that wait in it when that is cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.processes.process_groups import serve_store
from weightbus.dataplane.transports.distributed import store_proxy as relay_module
from weightbus.dataplane.transports.distributed.store_proxy import StoreProxy
from weightbus.dataplane.transports.interface import Address
from weightbus.engine_agent.engines.sglang import sglang_server as sglang
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.errors import ServerError

from ....kit.waiting import readable

PATIENCE = timedelta(seconds=60)
AT_ONCE_S = 5.0


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """As the source of a broadcast serves it."""
    made = serve_store("127.0.0.1")
    yield made
    del made


def come(relay: StoreProxy) -> TCPStore:
    """As a server's worker does."""
    return TCPStore(*relay.at, is_master=False, wait_for_workers=False, timeout=PATIENCE)


def test_a_store_is_the_same_through_a_relay(store: TCPStore) -> None:
    """Several clients, values larger than a packet, and a client that waits for a key that comes later."""
    relay = StoreProxy(store.host, store.port, "127.0.0.1")
    one, other = come(relay), come(relay)
    found: list[bytes] = []
    waits = threading.Thread(target=lambda: found.append(other.get("late")))
    waits.start()
    large = "x" * 500_000
    one.set("large", large)
    assert store.get("large").decode() == large
    store.set("late", "now")
    waits.join(AT_ONCE_S)
    assert found == [b"now"]
    relay.cut()


def test_a_worker_that_waits_through_a_relay_that_is_cut_is_told_at_once(store: TCPStore) -> None:
    """Although the store itself is well; and no client comes to it this way any more."""
    relay = StoreProxy(store.host, store.port, "127.0.0.1")
    client = come(relay)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            client.get("never")
        except RuntimeError as error:
            errors.append(error)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    time.sleep(0.2)
    assert not errors
    began = time.monotonic()
    relay.cut()
    waits.join(AT_ONCE_S)
    assert errors
    assert time.monotonic() - began < AT_ONCE_S
    store.set("still", "there")


@pytest.mark.parametrize("cut", [True, False])
def test_a_worker_that_comes_too_late_is_told_so_and_does_not_try_again(cut: bool) -> None:
    """To one that was cut, or whose store has ended: torch would try to connect until its own deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = StoreProxy("127.0.0.1", listener.getsockname()[1], "127.0.0.1")
    if cut:
        relay.cut()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        come(relay).get("never")
    assert time.monotonic() - began < AT_ONCE_S
    relay.cut()


def test_a_worker_that_comes_for_a_store_whose_host_is_gone_is_let_in_and_out_again() -> None:
    """Each of them, as without a listener. To the address of this one the kernel knows no way at all."""
    relay = StoreProxy("255.255.255.255", 9, "127.0.0.1")
    for _ in range(2):
        with socket.create_connection(relay.at, AT_ONCE_S) as client:
            client.settimeout(AT_ONCE_S)
            client.sendall(b"?")
            assert client.recv(1) == b""
    relay.cut()


def test_a_worker_that_asks_for_a_name_first_is_let_in_until_it_has_spoken() -> None:
    """Torch does, once it is connected. Sent away meanwhile it would come again, and ask again."""
    relay = StoreProxy("255.255.255.255", 9, "127.0.0.1")
    relay.cut()
    with socket.create_connection(relay.at, AT_ONCE_S) as client:
        assert not readable(client.fileno(), 2.0)
        client.settimeout(AT_ONCE_S)
        client.sendall(b"?")
        assert client.recv(1) == b""
    relay.end()


def test_a_relay_that_has_no_room_for_one_has_it_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with too many open files, say: a client that is sent away comes again, and is told then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = StoreProxy("127.0.0.1", listener.getsockname()[1], "127.0.0.1")

    def full(_host: str) -> TCPStore:
        monkeypatch.undo()
        raise TransferFailed("no port can be opened: too many open files")

    monkeypatch.setattr(relay_module, "serve_store", full)
    for _ in range(2):
        with socket.create_connection(relay.at, AT_ONCE_S) as client:
            client.settimeout(AT_ONCE_S)
            with contextlib.suppress(ConnectionResetError):
                client.sendall(b"?")
                assert client.recv(1) == b""
    relay.cut()


def test_a_relay_is_cut_by_a_process_that_can_open_nothing_more(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too many open files, say. A client that waits in the store is told none the less."""
    relay = StoreProxy(store.host, store.port, "127.0.0.1")
    with socket.create_connection(relay.at, AT_ONCE_S) as client:
        client.settimeout(AT_ONCE_S)
        time.sleep(0.2)  # it is carried by now

        def full(*_: object, **__: object) -> socket.socket:
            raise OSError("too many open files")

        monkeypatch.setattr(socket, "create_connection", full)
        relay.cut()
        assert client.recv(1) == b""


@pytest.mark.parametrize("at", ["127.0.0.1", ""])
def test_a_group_that_is_left_while_a_way_to_it_is_looked_for_is_not_joined(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Nothing would end the server's wait in it: the way is there only after everything was cut."""
    server = SGLangServer("http://127.0.0.1:9")
    asked: list[str] = []
    monkeypatch.setattr(server._wire, "admin", lambda path, _body, _deadline_s: asked.append(path))
    looks, goes_on, errors = threading.Event(), threading.Event(), list[ServerError]()

    def slow(_url: str) -> str:
        looks.set()
        goes_on.wait(AT_ONCE_S)
        return at

    def join() -> None:
        try:
            server.join_group(Address(f"tcp://{store.host}:{store.port}", "group", "gloo", 2, "token"), 1, AT_ONCE_S)
        except ServerError as error:
            errors.append(error)

    monkeypatch.setattr(sglang, "loopback_of", slow)
    joins = threading.Thread(target=join, daemon=True)
    joins.start()
    assert looks.wait(AT_ONCE_S)
    server.leave_group("group", AT_ONCE_S)
    goes_on.set()
    joins.join(AT_ONCE_S)
    assert [str(error) for error in errors] == ["/init_weights_update_group: not made: group was left before"]
    assert asked == ["/destroy_weights_update_group"]
    assert server._relay is None
    server.close()


def test_a_store_that_ends_ends_its_clients() -> None:
    """As it would without a relay."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = StoreProxy("127.0.0.1", listener.getsockname()[1], "127.0.0.1")
        client = socket.create_connection(relay.at, AT_ONCE_S)
        served, _ = listener.accept()
        served.close()
        assert client.recv(1) == b""
        client.close()
    relay.cut()
