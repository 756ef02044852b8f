"""Ports that are chosen now are still free when a server binds them a minute later."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from weightbus.trainer_agent.demo import child_processes as ports
from weightbus.trainer_agent.demo.child_processes import COUNT, Ports, choose_ports


def numbers(chosen: Ports) -> list[int]:
    return [chosen.router, chosen.status, chosen.ranks, *chosen.servers, *chosen.sidecars]


def with_range(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "range").write_text(text)
    monkeypatch.setattr(ports, "_RANGE", folder / "range")


def test_none_is_one_that_a_connection_may_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel takes ports of outgoing connections from a range, and out of that range nobody's listening port."""
    with_range(monkeypatch, tmp_path, "12000\t60999\n")
    for _ in range(20):
        found = numbers(choose_ports(0))
        assert len(set(found)) == COUNT
        assert all(10_000 <= each < 12_000 for each in found)


@pytest.mark.parametrize("text", ["1024 65535\n", "", "none\n"])
def test_a_range_that_leaves_nothing_is_not_kept_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """A host may give connections every port there is, or not say."""
    with_range(monkeypatch, tmp_path, text)
    assert len(set(numbers(choose_ports(0)))) == COUNT


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And when too few are left, that is said."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not ports._is_free(taken.getsockname()[1])
    monkeypatch.setattr(ports, "_is_free", lambda port: port == 10_001)
    with pytest.raises(ValueError, match=r"only 1 are free.*--port-base"):
        choose_ports(0)


def test_a_base_is_kept_to() -> None:
    """A port that is named is taken as free."""
    assert numbers(choose_ports(21_000)) == list(range(21_000, 21_000 + COUNT))
    assert msgspec.to_builtins(choose_ports(21_000))["router"] == 21_000
