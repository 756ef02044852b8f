"""What a group over NIXL says of itself, with an agent that is none: NIXL itself need not be installed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from weightbus.dataplane.errors import PeerLost, TransferFailed, Unsupported
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.transports.sends import nixl_group
from weightbus.dataplane.transports.sends.nixl_group import _PACK, NixlGroup, _Offer


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
    with caplog.at_level(logging.ERROR), pytest.raises(TransferFailed, match="a bug of ours") as raised:
        made.await_posts([(1, 1)], [], Deadline(5.0))
    assert not isinstance(raised.value, PeerLost), "nobody was lost"
    assert "AttributeError" in caplog.text


class Reading:
    """An agent whose read ends when a test has it end, and cannot be cancelled before."""

    def __init__(self) -> None:
        self.state = "PROC"
        self.released: list[str] = []
        self.deregistered: list[str] = []

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def get_xfer_descs(self, *_: object, **__: object) -> str:
        return "descriptions"

    def initialize_xfer(self, *_: object) -> str:
        return "handle"

    def transfer(self, _handle: str) -> str:
        return self.state

    def check_xfer_state(self, _handle: str) -> str:
        return self.state

    def release_xfer_handle(self, handle: str) -> None:
        if self.state == "PROC":
            raise RuntimeError("in progress")
        self.released.append(handle)

    def deregister_memory(self, region: str) -> None:
        self.deregistered.append(region)


def form(memory: torch.Tensor) -> None:
    """Begin to: nobody else comes."""
    NixlGroup.form(c10d.HashStore(), "g", "h", torch.device("cpu"), 0, 2, Deadline(0.2), memory=[memory])


@pytest.mark.parametrize("began", ["PROC", "ERR"])
def test_a_read_that_goes_on_keeps_what_it_writes_into(monkeypatch: pytest.MonkeyPatch, began: str) -> None:
    """The memory is not given away, and the next receive into it waits until the read has ended."""
    monkeypatch.setattr(nixl_group, "_LEFT", left := list[nixl_group._Left]())
    agent, memory = Reading(), torch.zeros(64, dtype=torch.uint8)
    made = NixlGroup(agent, torch.device("cpu"), 0, 2)
    made._registered.append("region")
    made._names[1] = "one"
    made._offers[1, 1], made._wanted[1, 1] = _Offer(1, ((4096, 16, 0),)), [memory[16:32]]
    agent.state = began
    if began == "ERR":
        with pytest.raises(RuntimeError, match="could not be read"):
            made._progress()
        agent.state = "PROC"  # some of it is under way
    else:
        made._progress()
    made.close()
    assert len(left) == 1
    assert not agent.deregistered
    with pytest.raises(TransferFailed, match="may write into this memory"):
        form(memory)
    monkeypatch.setattr(nixl_group, "NIXL_MODULES", ())
    with pytest.raises(Unsupported):  # so far it comes elsewhere
        form(torch.zeros(64, dtype=torch.uint8))
    agent.state = "DONE"
    with pytest.raises(Unsupported):
        form(memory)
    assert agent.released == ["handle"]
    assert not left
