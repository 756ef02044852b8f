"""What a group over NIXL says of itself, with an agent that is none: NIXL itself need not be installed."""

from __future__ import annotations

import logging

import pytest
import torch

from weightbus.dataplane.deadline import Deadline
from weightbus.dataplane.errors import PeerLost
from weightbus.dataplane.nixl_group import _PACK, NixlGroup, _Offer


class Agent:
    """Gives notices of somebody, and can let go of nothing."""

    def __init__(self, notices: dict[str, list[bytes]]) -> None:
        self.notices = notices

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found, self.notices = self.notices, {}
        return found

    def deregister_memory(self, _memory: object) -> None:
        raise RuntimeError("busy")


def group(notices: dict[str, list[bytes]]) -> NixlGroup:
    return NixlGroup(Agent(notices), torch.device("cpu"), 0, 2)


def test_a_stranger_breaks_no_group(caplog: pytest.LogCaptureFixture) -> None:
    """Its notices are of no post of ours."""
    made = group({"stranger": [_PACK(_Offer(1, ()))]})
    with caplog.at_level(logging.WARNING):
        assert not made._progress()
    assert "none of this group sent 1 notices" in caplog.text


def test_memory_that_stays_registered_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """It is not given back before the process ends."""
    made = group({})
    made._registered.append("region")
    with caplog.at_level(logging.WARNING):
        made.close()
    assert "stays registered with NIXL until this process ends: busy" in caplog.text


def test_a_bug_is_told_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The group ends as it would without a peer; whoever looks for the cause finds it."""
    made = group({})
    made._unread.add((1, 1))
    made._agent = None
    with caplog.at_level(logging.ERROR), pytest.raises(PeerLost):
        made.await_posts([(1, 1)], [], Deadline(5.0))
    assert "AttributeError" in caplog.text
