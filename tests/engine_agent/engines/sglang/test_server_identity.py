"""Facts of a server: what its environment tells, and what counts as a replica."""

import os
import subprocess
import sys

import pytest

from weightbus.engine_agent.engines.sglang import server_identity
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


STARTED = {"tokenizer_e2e": 11.25, "load_weight": 3.0}
SAID: dict[str, object] = {"version": "0.5.23", "random_seed": 7, "port": 30000, "startup_time": STARTED}
OLDER: dict[str, object] = {"version": "0.5.11", "random_seed": 7, "port": 30000}
"""As the releases say it that do not report how long their start took."""


def test_one_server_is_one_generation_at_every_address() -> None:
    """Also while what its scheduler says of itself changes, and whether or not its process is seen (N47)."""
    first = facts_of(SAID, {"weight_version": "default"}, "http://localhost:30000").generation
    again = facts_of({**SAID, "internal_states": [{"last_gen_throughput": 3.0}]}, {"weight_version": "4"}, "http://a:1")
    assert first
    assert first == again.generation


@pytest.mark.parametrize(
    "other",
    [
        {**SAID, "startup_time": {**STARTED, "load_weight": 3.5}},
        {**SAID, "random_seed": 8},
        {**SAID, "port": 30001},
    ],
)
def test_servers_of_one_seed_are_told_apart(other: dict[str, object]) -> None:
    """A fleet may be launched with one ``--random-seed``; so is a server that is launched again (N47)."""
    url = "http://nowhere:1"
    assert facts_of(SAID, {}, url).generation != facts_of(other, {}, url).generation


def test_older_servers_of_one_seed_are_told_apart_by_host_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not say how long they took to start; agents of one host still find one server to be one (N47)."""
    url = "http://nowhere:1"
    here = facts_of(OLDER, {}, url).generation
    assert here
    assert here == facts_of(OLDER, {}, "http://localhost:30000").generation
    assert here != facts_of({**OLDER, "port": 30001}, {}, url).generation
    monkeypatch.setattr(server_identity, "host_identity", lambda: "another")
    assert here != facts_of(OLDER, {}, url).generation


def test_a_server_that_says_nothing_of_its_launch_has_no_generation() -> None:
    """It is known by its address alone (N47)."""
    assert not facts_of({"version": "x"}, {}, "http://nowhere:1").generation
