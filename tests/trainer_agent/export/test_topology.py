"""Locations of ranks, as rank 0 tells them: of GPUs that the driver names, and of no others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from weightbus.control.protocol import codec
from weightbus.control.protocol.messages import PeerAccess, ProcessLocation, RequestId, TransportKind
from weightbus.dataplane.memory.cuda_memory import NCCL_HOSTID
from weightbus.dataplane.memory.gpu_topology import GpuSurveyFailed, VisibleGpu
from weightbus.dataplane.processes.host_facts import host_identity
from weightbus.trainer_agent.export import topology as whereabouts
from weightbus.trainer_agent.export.topology import location_of, topology_of
from weightbus.trainer_agent.settings import TrainerSettings

GPU = torch.device("cuda", 0)
SEEN = (
    VisibleGpu("gpu-a", {"gpu-b": "nvlink", "gpu-c": "p2p", "gpu-d": "none"}),
    VisibleGpu("gpu-b", {"gpu-a": "nvlink"}),
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This process is on gpu-a; how often the driver was asked."""
    asked: list[int] = []

    def seen() -> tuple[VisibleGpu, ...]:
        asked.append(1)
        return SEEN

    monkeypatch.setattr(whereabouts, "device_name", lambda device: "cpu" if device.type == "cpu" else "gpu-a")
    monkeypatch.setattr(whereabouts, "gpus_visible_here", seen)
    return asked


@pytest.mark.usefixtures("driver")
def test_a_rank_tells_which_gpus_it_reaches() -> None:
    """Its own row of what the driver says, and nobody else's."""
    assert location_of(3, GPU) == ProcessLocation(
        rank=3,
        host=host_identity(),
        device="gpu-a",
        reach={"gpu-b": PeerAccess.NVLINK, "gpu-c": PeerAccess.P2P, "gpu-d": PeerAccess.NONE},
    )


def test_a_rank_without_a_gpu_asks_no_driver(driver: list[int]) -> None:
    """There is nothing that it could reach."""
    assert location_of(0, torch.device("cpu")) == ProcessLocation(rank=0, host=host_identity(), device="cpu")
    assert not driver


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("why", ["the driver cannot be asked", "it does not speak of this GPU"])
def test_what_the_driver_does_not_say_is_not_told(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Not as a GPU that reaches none: that would speak against every engine."""

    def seen() -> tuple[VisibleGpu, ...]:
        if why == "the driver cannot be asked":
            raise GpuSurveyFailed("no driver")
        return SEEN[1:]

    monkeypatch.setattr(whereabouts, "gpus_visible_here", seen)
    assert location_of(0, GPU).reach is None


@pytest.mark.usefixtures("driver")
def test_a_rank_of_another_host_for_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which its GPU is another member's for a group."""
    monkeypatch.setenv(NCCL_HOSTID, "trainer")
    assert location_of(0, GPU).nccl_gpu_id == "trainer/gpu-a"
    assert not location_of(0, torch.device("cpu")).nccl_gpu_id


@pytest.mark.usefixtures("driver")
def test_only_ranks_of_the_roots_host_tell_what_they_reach(tmp_path: Path) -> None:
    """Engines read memory of their own host's alone; and what is told can travel."""
    here = location_of(0, GPU)
    away = msgspec.structs.replace(here, rank=1, host="elsewhere")
    told = topology_of(
        TrainerSettings(channel="c"), (TransportKind.DIRECT,), (here, away), runtime_dir=tmp_path,
        refusals={TransportKind.SENDS: "a rank has no address"},
    )  # fmt: skip
    assert told.places == (here, msgspec.structs.replace(away, reach=None))
    assert told.lacking[TransportKind.SENDS].found == "a rank has no address"
    assert TransportKind.DIRECT not in told.lacking
    sent = msgspec.structs.replace(told, request=RequestId("k"))
    assert codec.TO_COORDINATOR.decode(codec.TO_COORDINATOR.encode(sent)) == (sent, None)
