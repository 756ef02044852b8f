"""Locks between the agents of one host."""

import subprocess
import sys
from pathlib import Path

import pytest

from weightbus.engine_agent.state_file import LockHeld, ProcessLock, server_claim

HOLD = """
import sys
from pathlib import Path
from weightbus.engine_agent.state_file import server_claim
claim = server_claim(Path(sys.argv[1]), sys.argv[2], "e0")
claim.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    """Held by a live process, named in the refusal; free the moment it was killed, with nothing to clean up (S19)."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "http://127.0.0.1:30000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    claim = server_claim(tmp_path, "http://localhost:30000/", "e1")
    with pytest.raises(LockHeld) as held:
        claim.take()
    assert held.value.holder == f"e0 (process {holder.pid})"
    holder.kill()
    holder.communicate()
    claim.take()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://127.0.0.1:30000", "http://localhost:30000/", True),
        ("http://127.0.0.1:30000", "http://[::1]:30000", True),
        ("http://Host:30000", "http://host:30000", True),
        ("http://127.0.0.1:30000", "http://127.0.0.1:30001", False),
        ("http://10.0.0.7:30000", "http://10.0.0.8:30000", False),
    ],
)
def test_what_is_one_server(tmp_path: Path, one: str, other: str, same: bool) -> None:
    """Spellings of one address are one server; other ports and hosts are others (S19)."""
    assert (server_claim(tmp_path, one, "e0").path == server_claim(tmp_path, other, "e1").path) is same


def test_a_released_claim_can_be_taken(tmp_path: Path) -> None:
    """By anybody, as often as one likes."""
    first, second = ProcessLock(tmp_path / "lock", "one"), ProcessLock(tmp_path / "lock", "two")
    for _ in range(2):
        first.take()
        with pytest.raises(LockHeld, match="held by one"):
            second.take()
        first.release()
        second.take()
        second.release()
