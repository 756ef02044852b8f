"""Processes of a server on this host: the one behind a port is found, and no other is taken for it."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from weightbus.engine_agent.engines.local_process import (
    ProcessesUnread,
    environment_of,
    has_ended,
    listener,
    listening_socket,
    loopback_of,
    start_time,
    workers_of,
)

from ...kit.unreadable import no_descriptors
from ...kit.waiting import has_ipv6

BUSY = """
import os, socket, threading
listening = socket.create_server(("127.0.0.1", 0))
def churn():
    while True:
        for each in [os.dup(0) for _ in range(50)]:
            os.close(each)
threading.Thread(target=churn, daemon=True).start()
print(listening.getsockname()[1], flush=True)
import sys; sys.stdin.read()
"""


def test_a_busy_server_is_not_taken_for_another() -> None:
    """It opens and closes files all the time, also while its own are looked at: the same process, every time.

    A server that is not recognized counts as launched anew: it would be paused until the next round.
    """
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        url = f"http://127.0.0.1:{int(busy.stdout.readline())}"
        found = {listener(url) for _ in range(30)}
        expected = (busy.pid, start_time(busy.pid))
        busy.kill()
    assert found == {expected}


@pytest.mark.parametrize(
    ("host", "at"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("[::1]", "::1"), ("sglang", ""), ("10.0.0.7", "")],
)
def test_only_a_server_on_the_loopback_reaches_a_relay(host: str, at: str) -> None:
    """Others may be on other machines: they meet in the store itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert loopback_of(f"http://{host}:{server.getsockname()[1]}") == at


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("dual", [True, False], ids=["both", "IPv6 alone"])
def test_a_server_that_listens_on_all_addresses_of_ipv6_is_seen(*, dual: bool) -> None:
    """As ``--host ::`` has it: it is in another table of the kernel's."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=dual) as server:
        assert loopback_of(f"http://[::1]:{server.getsockname()[1]}") == "::1"


def test_descriptors_that_have_run_out_say_nothing_of_a_process() -> None:
    """A server that lives is taken neither for one that has ended nor for another one: its agent looks again."""
    mine = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        started = start_time(mine)
        assert started is not None
        looks = (
            lambda: listener(url),
            lambda: loopback_of(url),
            lambda: listening_socket(url),
            lambda: workers_of(mine, b"python"),
            lambda: environment_of(mine),
            lambda: start_time(mine),
        )
        with no_descriptors():
            assert not has_ended(mine, started)
            for look in looks:
                with pytest.raises(ProcessesUnread, match="Too many open files"):
                    look()
        assert listener(url) == (mine, started)
    assert has_ended(mine, started + 1)


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_server_launched_again_has_the_same_socket_at_every_address(bound: str) -> None:
    """Another one at the next port has another; a closed port, or a host that is not this one, has none (N47)."""
    if bound == "::" and not has_ipv6():
        pytest.skip("no IPv6 here")

    def listen(port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        return socket.create_server((bound, port), family=family, dualstack_ipv6=":" in bound)

    with listen(0) as server, listen(0) as neighbor:
        port = server.getsockname()[1]
        hosts = ("127.0.0.1", "localhost", *(() if bound == "127.0.0.1" else ("127.0.0.3",)))
        (found,) = {listening_socket(f"http://{host}:{port}") for host in hosts}
        assert found.endswith(f":{port}")
        assert found != listening_socket(f"http://127.0.0.1:{neighbor.getsockname()[1]}")
    assert listening_socket(f"http://127.0.0.1:{port}") == ""
    with listen(port):
        assert listening_socket(f"http://127.0.0.1:{port}") == found


def test_two_servers_of_one_port_at_two_addresses_have_two_sockets() -> None:
    """Each of the loopback's addresses may have a server of its own (N47)."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)):
            assert len({listening_socket(f"http://127.0.0.{last}:{port}") for last in (1, 2)} - {""}) == 2


FORWARDER = """
use Socket; $| = 1;
socket(S, PF_INET, SOCK_STREAM, 0); bind(S, sockaddr_in(0, INADDR_LOOPBACK)); listen(S, 5);
my ($p) = sockaddr_in(getsockname(S)); print "$p\\n"; <STDIN>;
"""


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs perl")
def test_a_server_behind_a_forwarded_port_meets_in_the_store_itself() -> None:
    """Its loopback is another one: what listens on ours is no Python. Or there is no listener (a NAT's rule)."""
    command = ["perl", "-e", FORWARDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forwarder:
        assert forwarder.stdout is not None
        port = int(forwarder.stdout.readline())
        assert not loopback_of(f"http://127.0.0.1:{port}")
        forwarder.communicate()
    assert not loopback_of(f"http://127.0.0.1:{port}")
