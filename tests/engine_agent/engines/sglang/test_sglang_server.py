"""What the client tells of a server without asking it."""

from typing import Any

import pytest

from weightbus.engine_agent.engines.sglang.compatibility import dialect_of
from weightbus.engine_agent.engines.sglang.server_identity import facts_of
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer


def server(**server_info: Any) -> SGLangServer:
    """A server with these answers to /server_info."""
    told = {"version": "0.5.23", "tp_size": 2, "device": "cpu"} | server_info
    made = SGLangServer("http://nowhere:1")
    made._facts, made._dialect = facts_of(told, {}, made.url), dialect_of(str(told["version"]))
    return made


@pytest.mark.parametrize(
    ("server_info", "algorithm"),
    [
        ({}, "sglang-sha256-8"),
        ({"enable_dp_attention": False, "attn_dp_size": 1}, "sglang-sha256-8"),
        ({"device": "cuda"}, "sglang-fmix32-8"),
        ({"version": "0.5.22"}, ""),
        ({"enable_dp_attention": True, "dp_size": 2}, ""),
        ({"device": "cuda", "enable_dp_attention": True, "dp_size": 2}, ""),
        ({"attn_dp_size": 2}, ""),
        ({"dp_size": 2}, ""),
        ({"pp_size": 2}, ""),
        ({"device": "cuda", "tp_size": 1, "dp_size": 2}, ""),
    ],
)
def test_live_digests_are_promised_where_they_can_be_predicted(server_info: dict[str, Any], algorithm: str) -> None:
    """Not under attention data parallelism: the ranks hold other parts than the tensor-parallel size says.

    Nor of replicas and stages, of which more ranks report than the tensor-parallel size says.
    """
    assert server(**server_info).digest_algorithm == algorithm
