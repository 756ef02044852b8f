"""A trainer's ranks send to toy workers: all halves, real sockets and gloo, no server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..kit.toy_direct import holds
from ..kit.toy_sends import SendsWorld


def has_ipv6() -> bool:
    """The loopback of IPv6 is there."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    made = SendsWorld(tmp_path / "r", request.param, monkeypatch)
    yield made
    made.close()


def test_a_round_brings_the_live_weights(world: SendsWorld) -> None:
    """From two ranks into one worker or two: as the engine's own loader would have done it."""
    receipt = world.round()

    assert holds(world.server, world.trainer.values)
    assert receipt.checked
    assert world.trainer.sends.failed == {}


def test_from_the_second_round_on_it_is_taken_beside(world: SendsWorld) -> None:
    """The server stands still for the flip only, and holds the new values afterwards."""
    world.round(stage=True)
    assert world.receiver.mode.startswith("paused: the workers know no plan")
    for seed in (1, 2):
        world.trainer.step(seed)
        world.round(stage=True)
        assert world.receiver.mode == "beside"
        assert holds(world.server, world.trainer.values)
