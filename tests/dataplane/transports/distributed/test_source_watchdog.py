"""A source of broadcasts that is stopped, killed or slow: what becomes of its connections, and of who waits for it."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from weightbus.control.machine.states import WATCHDOG_S
from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.processes import process_groups as backends
from weightbus.dataplane.processes.process_groups import join_store, serve_store
from weightbus.dataplane.transports.distributed import source_watchdog
from weightbus.dataplane.transports.distributed.broadcast_group import BroadcastGroup
from weightbus.dataplane.transports.distributed.source_watchdog import Connections, SourceWatchdog, connections_of
from weightbus.dataplane.transports.interface import Address, Peer

from ....kit.waiting import has_ipv6, readable, until
from ...loopback import CHANNEL, Places, make_manifest, make_session, send_all
from ...transport_contract import PROMPT_S, Engine, Halves

SILENCE_S = 1.5
AT_ONCE_S = 10.0
SOURCE = """
import socket, sys
from weightbus.dataplane.transports.distributed.source_watchdog import Connections, SourceWatchdog
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(2)]
held = Connections([each.detach() for each in connections])
stand_in = SourceWatchdog([held], float(sys.argv[2]))
for line in sys.stdin:
    word = line.strip()
    if word == "close":
        stand_in.close()
    elif word != "look":
        stand_in.use(word == "used")
    print(stand_in.hung_up, flush=True)
"""
OTHER_RANK = """
import datetime, sys
from torch._C import _distributed_c10d as c10d
from weightbus.dataplane.processes import process_groups as backends
host, port = sys.argv[1], int(sys.argv[2])
store = c10d.TCPStore(host, port, is_master=False, wait_for_workers=False)
group = backends.make_gloo_group(c10d.PrefixStore("group", store), host, 1, 2, datetime.timedelta(seconds=60))
sys.stdin.read()
"""


def test_the_coordinator_knows_how_long_it_waits() -> None:
    """Which may import nothing of this package: it warns where its own waits are shorter."""
    assert source_watchdog.SILENCE_S == WATCHDOG_S


class Source:
    """A process with two connections to this one, which does what it is told."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            argv = [sys.executable, "-c", SOURCE, str(listener.getsockname()[1]), str(SILENCE_S)]
            self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            listener.settimeout(60.0)
            self.ends = [listener.accept()[0] for _ in range(2)]

    def told(self, word: str) -> bool:
        """Whether it was hung up by then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "True\n"

    def is_hung_up(self, seconds: float) -> bool:
        """All of it, within that time."""
        end = time.monotonic() + seconds
        found = [readable(each.fileno(), max(end - time.monotonic(), 0.0)) for each in self.ends]
        assert len(set(found)) == 1
        return all(found)

    def stand_ins(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate()
        for each in self.ends:
            each.close()


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


@pytest.fixture
def halves() -> Iterator[Halves]:
    """The process that forks halves of transfers."""
    yield from Halves.serve()


def test_a_source_that_is_stopped_while_it_is_waited_for_is_hung_up(source: Source) -> None:
    """And knows that when it goes on."""
    assert not source.told("used")
    source.process.send_signal(signal.SIGSTOP)
    assert source.is_hung_up(SILENCE_S + AT_ONCE_S)
    source.process.send_signal(signal.SIGCONT)
    until(lambda: source.told("look"), "it to know", AT_ONCE_S)


def test_a_source_that_lives_or_is_not_waited_for_is_not(source: Source) -> None:
    """However long a bucket takes; and between two versions it may stand as long as it likes."""
    assert not source.told("used")
    assert not source.is_hung_up(2 * SILENCE_S)
    assert not source.told("held")
    source.process.send_signal(signal.SIGSTOP)
    assert not source.is_hung_up(2 * SILENCE_S)
    source.process.send_signal(signal.SIGCONT)
    assert not source.told("used")
    assert not source.is_hung_up(2 * SILENCE_S)


@pytest.mark.parametrize("word", ["used", "held"])
def test_a_source_that_was_killed_is_hung_up_at_once(source: Source, word: str) -> None:
    """As without another process that has its connections; a signal to all of a job does not end that one first."""
    source.told(word)
    (stand_in,) = source.stand_ins()
    status = Path(f"/proc/{stand_in}/status")
    until(
        lambda: bool(int(status.read_text().partition("SigIgn:\t")[2].split("\n")[0], 16) & 1 << 14),
        "it to be up",
        AT_ONCE_S,
    )
    os.kill(stand_in, signal.SIGTERM)
    source.process.kill()
    assert source.is_hung_up(SILENCE_S / 2)


def test_a_source_that_ends_its_group_leaves_no_process(source: Source) -> None:
    """And one whose stand-in was killed goes on without it."""
    source.told("used")
    (stand_in,) = source.stand_ins()
    assert not source.told("close")
    assert not Path(f"/proc/{stand_in}").exists()
    assert not source.told("used")
    assert not source.is_hung_up(0.1)


def test_a_stand_in_that_stands_still_is_killed_in_the_end(source: Source) -> None:
    """It has the connections as long as it is there."""
    source.told("used")
    (stand_in,) = source.stand_ins()
    os.kill(stand_in, signal.SIGSTOP)
    assert not source.told("close")
    until(lambda: not Path(f"/proc/{stand_in}").exists(), "it to be gone", AT_ONCE_S)


def test_a_stand_in_that_hears_nothing_holds_no_engine() -> None:
    """Its pipe is full at last: a rank that trains does not wait in it."""
    here, there = socket.socketpair()
    with here, there:
        stand_in = SourceWatchdog([Connections([os.dup(here.fileno())])])
        assert stand_in._line is not None
        os.kill(stand_in._line.process.pid, signal.SIGSTOP)
        said = threading.Thread(target=lambda: [stand_in.use(True) for _ in range(1 << 17)], daemon=True)
        said.start()
        said.join(4 * AT_ONCE_S)
        held = said.is_alive()
        os.kill(stand_in._line.process.pid, signal.SIGKILL)
        assert not held
        stand_in.close()


def test_a_stand_in_that_was_killed_hangs_nothing_up(source: Source) -> None:
    """It is as without one."""
    source.told("used")
    os.kill(source.stand_ins()[0], signal.SIGKILL)
    assert not source.is_hung_up(2 * SILENCE_S)
    assert not source.told("used")
    assert not source.told("look")


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    """Where a group meets."""
    found: str = request.param
    if ":" in found and not has_ipv6():
        pytest.skip("no IPv6")
    return found


@pytest.fixture
def met(host: str) -> Iterator[tuple[c10d.TCPStore, subprocess.Popen[bytes]]]:
    """A store, and a process that comes to it as rank 1."""
    server = serve_store(host)
    other = subprocess.Popen([sys.executable, "-c", OTHER_RANK, host, str(server.port)], stdin=subprocess.PIPE)
    yield server, other
    other.kill()
    other.communicate()


def test_the_connections_of_a_group_are_found_among_all_others(
    host: str, met: tuple[c10d.TCPStore, subprocess.Popen[bytes]]
) -> None:
    """Those of gloo's and no other one: the store's, and one to a stranger. They end with the group."""
    server, other = met
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0],
    ):
        store = c10d.PrefixStore("group", join_store(server))
        backend = backends.make_gloo_group(store, host, 0, 2, dt.timedelta(seconds=60))
        connections = connections_of(store, 0, 2)
        (file,) = connections.files
        with socket.socket(fileno=os.dup(file)) as found:
            ports = found.getpeername()[1], found.getsockname()[1]
        assert not os.get_blocking(file)  # of which gloo's own knows nothing else
        assert ports[0] in ports_of(other.pid)
        assert not set(ports) & {server.port, listener.getsockname()[1]}
        assert len(connections_of(store, 0, 2).files) == 1, "there is a duplicate now"
        assert connections_of(store, 0, 1).files == connections_of(c10d.PrefixStore("nobody", store), 0, 2).files == ()
        group = BroadcastGroup("group", torch.device("cpu"), 2, backend, connections)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        again = os.dup(file)
        group.abort()
        with socket.socket(fileno=again) as ended:
            assert ended.recv(1) == b""


@pytest.mark.parametrize("soon", [True, False], ids=["before", "after"])
def test_a_connection_whose_number_is_anothers_by_then_is_not_mistaken(
    monkeypatch: pytest.MonkeyPatch, soon: bool
) -> None:
    """Other threads close and open files while they are looked through; of those nothing is kept or left open."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
        Path(os.devnull).open("rb") as other,
    ):
        identity, store, look = os.fstat(connection.fileno()).st_ino, c10d.HashStore(), os.dup
        for rank, address in enumerate((connection.getsockname(), ("127.0.0.1", 9))):
            store.set(f"0/{rank}", source_watchdog._as_published(address))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

        def dup(file: int) -> int:
            if soon and file == connection.fileno():
                os.dup2(other.fileno(), file)
            found = look(file)
            if file == connection.fileno():
                os.dup2(other.fileno(), file)
            return found

        files = len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr(os, "dup", dup)
        connections = connections_of(store, 0, 2)
        assert [os.fstat(file).st_ino for file in connections.files] == ([] if soon else [identity])
        assert len(list(Path("/proc/self/fd").iterdir())) == files + len(connections.files)


def ports_of(pid: int) -> set[int]:
    """On which a process has sockets of TCP."""
    inodes = {str(file.readlink())[8:-1] for file in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[9] in inodes}


@pytest.mark.parametrize("engines", [("e0",), ("e0", "e1")], ids=len)
def test_servers_do_not_wait_for_a_source_that_is_stopped(
    tmp_path: Path, halves: Halves, engines: tuple[str, ...]
) -> None:
    """In the middle of a broadcast: they return from the call. All engines fail, for the source too when it goes on."""
    takers = [Engine(name, Places(tmp_path).receiver("distributed")) for name in engines]
    began = time.monotonic()
    pid = halves.start(
        half="sender", kind="distributed", root=str(tmp_path), epoch=4, version=41,
        peers=[[name, 1] for name in engines], at=2, how="stop", silence_s=SILENCE_S,
    )  # fmt: skip
    address = Address(**halves.answer())
    for rank, taker in enumerate(takers, 1):
        taker.start(make_session(4, 41, make_manifest()), address, rank, deadline_s=90.0)
    for taker in takers:
        assert isinstance(taker.join(), TransferFailed)
        assert taker.receiver.touched
        taker.receiver.require_moving()  # type: ignore[attr-defined]
    assert time.monotonic() - began < PROMPT_S
    os.kill(pid, signal.SIGCONT)
    assert set(halves.answer()["failed"]) == set(engines)


def test_a_group_that_was_hung_up_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that stood still after the last bucket has a new group for the next version."""
    places, manifest = Places(tmp_path), make_manifest()
    sender, engine = places.sender("distributed"), Engine("e0", places.receiver("distributed"))
    pool = BucketBuffers("cpu", 2, manifest.largest_bucket, CHANNEL)
    for epoch in (1, 2, 3):
        if epoch == 3:
            monkeypatch.setattr(BroadcastGroup, "hung_up", True)
        session = make_session(epoch, 10 + epoch, manifest)
        engine.start(session, sender.offer(session, [Peer("e0", 1)]), 1)
        sender.ready(PROMPT_S)
        send_all(sender, session, pool, PROMPT_S)
        assert not isinstance(engine.join(), BaseException)
        sender.close()
    assert engine.server.joins == 2
    engine.receiver.shutdown()
    pool.close()
