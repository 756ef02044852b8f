"""Facts of a server: what its environment tells, and what counts as a replica."""

import os
import subprocess
import sys

import pytest

from weightbus.engine_agent.engines.sglang.server_identity import facts_of

from ..test_local_process import BUSY


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
