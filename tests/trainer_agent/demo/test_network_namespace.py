"""Where the demo puts an engine that is to be on another host: on one, as far as sockets and files go, if it can."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weightbus.trainer_agent.demo import child_processes as module
from weightbus.trainer_agent.demo.child_processes import EngineHost, NoNamespace, Programs, second_host, unavailable

from ...kit.waiting import until

CALL_S = 30.0


@pytest.mark.parametrize(
    ("user", "missing", "reason"),
    [(1000, "", "only root may make network namespaces"), (0, "nsenter", "nsenter is not installed"), (0, "", "")],
)
def test_it_is_known_before_why_there_is_no_second_network(
    monkeypatch: pytest.MonkeyPatch, user: int, missing: str, reason: str
) -> None:
    """And nothing is tried then."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/usr/bin/{name}")
    assert unavailable() == reason


@pytest.mark.parametrize("how", ["known before", "found out"])
def test_without_a_second_network_the_engine_is_sent_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Beside the others, which read the trainer's memory; people are told why."""
    monkeypatch.setattr(module, "unavailable", lambda: "only root may" if how == "known before" else "")
    monkeypatch.setattr(module, "_HOLDER", ["false", "sleep", "infinity"])
    with Programs(tmp_path) as programs:
        found = second_host(programs, tmp_path)
    assert found.host == EngineHost(sidecar_flags=("--transports", "sends"))
    assert (found.host.address, found.here) == ("127.0.0.1", "127.0.0.1")
    assert "limited to sends over a gloo group (no second network: " in found.description
    assert ("only root may" if how == "known before" else "`false true`: ") in found.description
    assert not (tmp_path / "run-elsewhere").exists()


@pytest.mark.parametrize("command", [("sleep", "30"), ("/nowhere/ip", "link")])
def test_a_call_that_does_not_end_or_begin_is_no_second_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """The demo goes on without one."""
    monkeypatch.setattr(module, "_CALL_S", 0.2)
    monkeypatch.setattr(module, "unavailable", lambda: "")
    monkeypatch.setattr(module, "_HOLDER", [*command, "sleep", "infinity"])
    monkeypatch.setattr(module, "_run", lambda *_, run=module._run: run(*command))
    with Programs(tmp_path) as programs:
        found = second_host(programs, tmp_path)
    assert found.host == EngineHost(sidecar_flags=("--transports", "sends"))
    assert f"`{command[0]}" in found.description


def test_a_holder_that_ends_is_no_second_network(tmp_path: Path) -> None:
    """It was allowed to try, and is gone."""
    with Programs(tmp_path) as programs:
        ended = programs.start("holder", ["true"])
        ended.process.wait(CALL_S)
        with pytest.raises(NoNamespace, match="its holder has ended"):
            module._entered(ended)


TALK = """
import json, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as far:
    far.sendall(far.getsockname()[0].encode())
print(json.dumps([each for _, each in socket.if_nameindex()]))
"""


def test_a_second_network_is_one_and_is_gone_afterwards(tmp_path: Path) -> None:
    """Both sides reach each other at the addresses that are said, and by no loopback; nothing stays of it."""
    with Programs(tmp_path) as programs:
        found = second_host(programs, tmp_path)
        if not found.host.command_prefix:
            pytest.skip(found.description)
        cards = {name for _, name in socket.if_nameindex()}
        with socket.create_server((found.here, 0)) as here:
            port = here.getsockname()[1]
            talk = [*found.host.command_prefix, sys.executable, "-c", TALK, found.here, str(port)]
            said = subprocess.run(talk, capture_output=True, text=True, timeout=CALL_S, check=True).stdout
            here.settimeout(CALL_S)
            near, (address, *_) = here.accept()
            with near:
                assert near.recv(64).decode() == address == found.host.address
        assert sorted(json.loads(said)) == ["eth0", "lo"]
        flags = dict(zip(found.host.sidecar_flags[::2], found.host.sidecar_flags[1::2], strict=True))
        assert flags["--http-bind"] == found.host.address
        assert Path(flags["--runtime-dir"]).stat().st_mode & 0o777 == 0o700
        assert "10.203." in found.description
    card = f"wb{os.getpid()}"
    assert card in cards
    until(lambda: card not in {name for _, name in socket.if_nameindex()}, "the kernel to take the network apart")
