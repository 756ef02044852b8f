"""What stays of a rendezvous store whose group was called off: who comes for it is told so, and does not wait."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.processes import threads
from weightbus.dataplane.processes.process_groups import serve_store
from weightbus.dataplane.transports.distributed import store_proxy as relay
from weightbus.dataplane.transports.distributed.receiver import DistributedReceiver
from weightbus.dataplane.transports.distributed.store_proxy import lead_nowhere
from weightbus.dataplane.transports.interface import Address, Peer

from ....kit.waiting import until
from ...loopback import LoopbackServer, Places, make_manifest, make_session
from ...transport_contract import PROMPT_S, Engine

HOST = "127.0.0.1"
DEADLINE_S = 60.0
"""More than a moment: as long torch tries to reach a store that is not there."""
ENDS = """
import socket
from weightbus.dataplane.processes.process_groups import serve_store
from weightbus.dataplane.transports.distributed.store_proxy import lead_nowhere
store = serve_store("127.0.0.1")
where = store.host, store.port
del store
lead_nowhere(*where)
client = socket.create_connection(where)
client.sendall(b"?")
assert client.recv(1) == b"", "it was let in and out"
client = socket.create_connection(where)
print(where[1], flush=True)
"""


class Late(LoopbackServer):
    """Its workers go to the store when they are told to."""

    def __init__(self, tp: int) -> None:
        super().__init__(tp)
        self.comes, self.goes_on, self.returned = threading.Event(), threading.Event(), threading.Event()

    def join_group(self, address: Address, rank_offset: int, deadline_s: float) -> None:
        self.comes.set()
        assert self.goes_on.wait(PROMPT_S)
        try:
            super().join_group(address, rank_offset, deadline_s)
        finally:
            self.returned.set()


def ended_store() -> tuple[str, int]:
    """Where it was."""
    store = serve_store(HOST)
    return store.host, store.port


def is_there(where: tuple[str, int]) -> bool:
    try:
        socket.create_connection(where, 1.0).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("how", ["withdrawn", "given up by an agent"])
def test_workers_that_come_after_forming_was_called_off_do_not_wait(tmp_path: Path, how: str) -> None:
    """Their server answered nothing for half an hour. The next session meets elsewhere, and brings them the version."""
    places, manifest, server = Places(tmp_path), make_manifest(1), Late(2)
    sender, session = places.sender("distributed"), make_session(1, 11, manifest)
    late = Engine("late", places.receiver("distributed"), server=server)
    other = Engine("other", places.receiver("distributed"))
    address = sender.offer(session, [Peer("late", 2), Peer("other", 1)])
    late.start(session, address, 1, DEADLINE_S)
    other.start(session, address, 3, DEADLINE_S)

    def call_off() -> None:
        assert server.comes.wait(PROMPT_S)
        if how == "withdrawn":
            sender.withdraw("other", "it is gone")
        else:
            other.receiver.close()

    calling = threading.Thread(target=call_off)
    calling.start()
    with pytest.raises(TransferFailed):
        sender.ready(DEADLINE_S)
    calling.join()
    sender.close()
    assert isinstance(late.join(), TransferFailed)
    server.goes_on.set()
    assert server.returned.wait(PROMPT_S)
    assert isinstance(late.receiver, DistributedReceiver)
    until(lambda: _moves(late.receiver), "its agent to know", PROMPT_S)

    session = make_session(2, 12, manifest)
    again = sender.offer(session, [Peer("late", 2)])
    assert again.address != address.address
    late.start(session, again, 1, DEADLINE_S)
    sender.ready(PROMPT_S)
    sender.close()
    late.join()
    assert server.joins == 2
    for engine in (late, other):
        engine.join()
        engine.receiver.shutdown()


def _moves(receiver: object) -> bool:
    assert isinstance(receiver, DistributedReceiver)
    try:
        receiver.require_moving()
    except TransferFailed:
        return False
    return True


def test_a_dead_end_is_there_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several may come meanwhile; nothing is left of it afterwards."""
    monkeypatch.setattr(relay, "_LINGER_S", 2.0)
    where = ended_store()
    threads = set(threading.enumerate())
    lead_nowhere(*where)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)).get("never")
        assert time.monotonic() - began < PROMPT_S
    until(lambda: not is_there(where), "it to be gone", PROMPT_S)
    until(lambda: not set(threading.enumerate()) - threads, "its thread to be gone", PROMPT_S)


def test_only_the_last_few_dead_ends_are_there() -> None:
    """A trainer may fail every second."""
    found = [ended_store() for _ in range(relay._DEAD_ENDS + 2)]
    for where in found:
        lead_nowhere(*where)
    until(lambda: not any(is_there(where) for where in found[:2]), "the first to be gone", PROMPT_S)
    assert all(is_there(where) for where in found[2:])


def test_a_port_that_another_has_by_now_is_left_to_it() -> None:
    """Nothing is raised."""
    with socket.create_server((HOST, 0)) as listener:
        lead_nowhere(*listener.getsockname())
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as come:
            come.sendall(b"x")


def test_a_dead_end_keeps_no_process() -> None:
    """Which ends well and at once, and the port with it, though somebody has just come."""
    command = [sys.executable, "-c", ENDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ends:
        assert ends.stdout is not None
        port = int(ends.stdout.readline())
        began = time.monotonic()
        _, said = ends.communicate()
    assert (ends.returncode, said) == (0, "")
    assert time.monotonic() - began < threads.PATIENCE_S / 2
    assert not is_there((HOST, port))
