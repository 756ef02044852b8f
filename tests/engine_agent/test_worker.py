"""What is said of a server's live digests before a round: a wrong promise would fail every transfer."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightbus.control.telemetry import Meters, Side
from weightbus.engine_agent.dialects import dialect_of
from weightbus.engine_agent.identity import facts_of
from weightbus.engine_agent.worker import Worker


def worker(**server_info: Any) -> Worker:
    """The worker of a server that says so of itself."""
    told = {"version": "0.5.23", "tp_size": 2, "device": "cpu"} | server_info
    server = SimpleNamespace(facts=facts_of(told, {}, "http://nowhere:1"), dialect=dialect_of(str(told["version"])))
    return Worker("e0", cast("Any", server), cast("Any", None), None, Meters(Side.ENGINE))


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
    ],
)
def test_live_digests_are_promised_where_they_can_be_predicted(server_info: dict[str, Any], algorithm: str) -> None:
    """Not under attention data parallelism: the ranks hold other parts than the tensor-parallel size says."""
    assert worker(**server_info).live_digest() == algorithm
