"""What rank 0 finds out when it starts, before a round would."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from weightbus.control.protocol.messages import TransportKind
from weightbus.dataplane.transports.sends import transport as sends
from weightbus.trainer_agent.export.memory_export import MemoryExport
from weightbus.trainer_agent.publish import agent
from weightbus.trainer_agent.publish.agent import RankZero, _missing
from weightbus.trainer_agent.settings import SendsOver, TrainerSettings

BY_NIXL = TrainerSettings(sends_over=SendsOver.NIXL, channel="policy", insecure_loopback=True)


def test_sends_over_nixl_are_not_offered_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines would be routed to them, and fail in every round."""
    monkeypatch.setattr(sends, "NIXL_MODULES", ("nixl_of_no_version",))
    assert "install weightbus[nixl]" in _missing(BY_NIXL, "cpu")[TransportKind.SENDS]
    assert not _missing(TrainerSettings(channel="policy", insecure_loopback=True), "cpu")
    only_local = TrainerSettings(
        sends_over=SendsOver.NIXL, channel="policy", insecure_loopback=True, transport=(TransportKind.LOCAL,)
    )
    assert not _missing(only_local, "cpu")
    monkeypatch.setattr(sends, "NIXL_MODULES", ("nixl_of_no_version", "msgspec"))
    assert not _missing(BY_NIXL, "cpu")


def test_memory_that_no_engine_can_read_is_found_out_when_the_trainer_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still sent."""
    monkeypatch.setattr(agent, "CommandedRanks", Mock())
    memory_export = Mock(MemoryExport, unreadable="")
    assert agent._first_export(memory_export, Mock(), BY_NIXL)[1] == {}
    memory_export.unreadable = "a rank is on another host"
    assert agent._first_export(memory_export, Mock(), BY_NIXL)[1].keys() == {TransportKind.DIRECT}


def test_a_host_in_brackets_is_refused_when_settings_are_read() -> None:
    """They belong to addresses with a port; sockets know no such name."""
    with pytest.raises(ValueError, match="without brackets"):
        TrainerSettings(channel="policy", insecure_loopback=True, host="[::1]")


def test_waves_without_a_lag_limit_are_warned_of_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that a version that breaks servers does not reach would get no requests."""
    monkeypatch.setattr(agent, "BackgroundPublisher", Mock())
    rolling = TrainerSettings(channel="policy", insecure_loopback=True, max_paused=1)
    with capture_logs() as lines:
        RankZero(Mock(settings=rolling), Mock(), Mock(), None)
    assert [(line["event"], "max_lag = 1" in line["reason"]) for line in lines] == [("settings_doubted", True)]
    for well in (BY_NIXL, TrainerSettings(channel="policy", insecure_loopback=True, max_paused=1, max_lag=1)):
        assert not well.doubt()
