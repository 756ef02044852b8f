"""Engines that are left out of a group over NCCL, and the reason that is reported."""

from __future__ import annotations

import pytest

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.transports.sends.sender import crowded


def test_workers_on_gpus_of_their_own_are_in() -> None:
    """As is who has none: there it is gloo's."""
    assert crowded({0: "a", 1: "b"}, {"e": ("c", "d"), "f": ("", "")}) == {}
    assert crowded({0: "", 1: ""}, {"e": ("",)}) == {}


def test_the_first_engine_on_a_gpu_has_it() -> None:
    """The second one could be in a group of its own, and its other GPUs are nobody's."""
    found = crowded({0: "a"}, {"e": ("b",), "f": ("c", "b"), "g": ("c",)})
    assert {name: each.spared for name, each in found.items()} == {"f": True}
    assert "a worker of f and a worker of e are on GPU b" in found["f"].reason


def test_every_gpu_of_the_first_engine_is_taken() -> None:
    """Not that of its first worker alone."""
    found = crowded({}, {"e": ("a", "b"), "f": ("b",)})
    assert list(found) == ["f"]
    assert found["f"].spared


def test_a_worker_without_a_gpu_hides_no_member() -> None:
    """Its neighbor's GPU may be taken all the same."""
    found = crowded({0: ""}, {"e": ("", "b"), "f": ("", "b"), "g": ("",)})
    assert list(found) == ["f"]


def test_an_engine_on_a_rank_of_the_trainer_is_in_no_group() -> None:
    """However often the version is sent."""
    found = crowded({0: "a"}, {"e": ("b", "a")})
    assert not found["e"].spared
    assert "rank 0 of the trainer" in found["e"].reason


def test_two_workers_of_one_engine_are_seen() -> None:
    """It is in no group either, and keeps nobody else from its GPU."""
    found = crowded({}, {"e": ("a", "a"), "f": ("a",)})
    assert {name: each.spared for name, each in found.items()} == {"e": False}
    assert "another of its workers" in found["e"].reason


def test_two_ranks_on_a_gpu_end_it_for_all() -> None:
    """They are in every group: another transport of an engine would help nobody, as all of them would need it."""
    told = "rank 0 of the trainer and rank 1 are on GPU a.*leave sends out of the trainer's setting transport"
    with pytest.raises(TransferFailed, match=told):
        crowded({0: "a", 1: "a"}, {"e": ("b",)})
