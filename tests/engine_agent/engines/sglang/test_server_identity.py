"""Which life of a server this is, and what its environment says."""

import os
import subprocess
import sys

import pytest

from weightbus.engine_agent.engines.local_process import listener, start_time
from weightbus.engine_agent.engines.sglang.server_identity import facts_of

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
    ("asked", "found"), [("many", "WEIGHTBUS_WORKER_BRANCHES in the server's environment is 'many'"), ("4", "")]
)
def test_what_its_workers_would_refuse_in_a_pause_is_known_before(asked: str, found: str) -> None:
    """By the environment of the process behind the port; where that is out of sight, its workers say it."""
    environment = {**os.environ, "WEIGHTBUS_WORKER_BRANCHES": asked}
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        misset = facts_of({}, {}, url).misset
        server.kill()
    assert misset.startswith(found)
    assert bool(misset) is bool(found)
    assert not facts_of({}, {}, url).misset


@pytest.mark.parametrize(
    ("said", "replicas", "dp_attention"),
    [
        ({"dp_size": 2}, 2, False),
        ({"dp_size": 2, "enable_dp_attention": True}, 1, True),
        ({"dp_size": 2, "attn_dp_size": 2}, 1, True),
        ({"dp_size": 1, "attn_dp_size": 1}, 1, False),
        ({}, 1, False),
    ],
)
def test_replicas_of_attention_are_ranks_of_one_engine(
    said: dict[str, object], replicas: int, dp_attention: bool
) -> None:
    """They share the experts and take the version together; plain replicas load files alone."""
    facts = facts_of({"tp_size": 2, **said}, {}, "http://nowhere:1")
    assert (facts.tp, facts.dp, facts.dp_attention) == (2, replicas, dp_attention)
