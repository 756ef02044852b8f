"""What the driver says of GPUs without torch is what torch says, in this process and as another one would see it."""

import pytest
import torch

from weightbus.dataplane.memory.cuda_memory import device_name, readable_peers
from weightbus.dataplane.memory.gpu_topology import gpus_visible_here, gpus_visible_to

pytestmark = pytest.mark.gpu


def test_the_survey_agrees_with_torch() -> None:
    """Uuids in the order of numbers, and peer access as torch finds it."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found = gpus_visible_here()
    assert [each.uuid for each in found] == [device_name(device) for device in devices]
    for each, device in zip(found, devices, strict=True):
        readable = {uuid for uuid, way in each.reach.items() if way != "none"}
        assert readable == set(readable_peers(device))


def test_another_process_sees_what_its_environment_lets_it() -> None:
    """By number, the last one only."""
    everything = gpus_visible_here()
    last = gpus_visible_to({"CUDA_VISIBLE_DEVICES": str(len(everything) - 1)})
    assert [(each.uuid, each.reach) for each in last] == [(everything[-1].uuid, {})]
