"""What a leader finds out when it starts, before a round would."""

from __future__ import annotations

import pytest

from weightbus.control.messages import TransportKind
from weightbus.dataplane import nixl_group
from weightbus.trainer_agent.leader import _without_nixl
from weightbus.trainer_agent.settings import SendsOver, TrainerSettings

BY_NIXL = TrainerSettings(sends_over=SendsOver.NIXL, channel="policy", insecure_loopback=True)


def test_sends_over_nixl_are_not_offered_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines would be routed to them, and fail in every round."""
    monkeypatch.setattr(nixl_group, "_MODULES", ("nixl_of_no_version",))
    assert "install weightbus[nixl]" in _without_nixl(BY_NIXL)[TransportKind.SENDS]
    assert not _without_nixl(TrainerSettings(channel="policy", insecure_loopback=True))
    only_local = TrainerSettings(
        sends_over=SendsOver.NIXL, channel="policy", insecure_loopback=True, transport=(TransportKind.LOCAL,)
    )
    assert not _without_nixl(only_local)
    monkeypatch.setattr(nixl_group, "_MODULES", ("nixl_of_no_version", "msgspec"))
    assert not _without_nixl(BY_NIXL)
