"""Snapshots on a GPU, in pinned host memory or the device's: what was there when they were taken, and nothing else."""

import pytest
import torch

from weightbus.dataplane.tensors.manifest import BucketSpec, Manifest, TensorSpec
from weightbus.trainer_agent.publish.background_publisher import SnapshotBuffer
from weightbus.trainer_agent.settings import SnapshotMemory

pytestmark = pytest.mark.gpu

MANIFEST = Manifest.of("M", tuple(TensorSpec(f"t{index}", "bfloat16", (512, 1024 + index)) for index in range(7)), 1)


@pytest.mark.parametrize("memory", SnapshotMemory)
def test_training_goes_on_over_the_parameters(memory: SnapshotMemory) -> None:
    """Kernels that are queued behind `take` change the parameters; the snapshot, read on another stream, does not."""
    device = torch.device("cuda", 0)
    live = [torch.full((bucket.nbytes,), index, dtype=torch.uint8, device=device) for index, bucket in _buckets()]
    store = SnapshotBuffer(MANIFEST, device, memory)
    for turn in range(2):
        store.take(lambda index, out: out.copy_(live[index]))
        for tensor in live:
            tensor.add_(10)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # torch leaves it untyped
            store.wait()
            for index, bucket in _buckets():
                out = torch.full((bucket.nbytes + 8,), 0xA5, dtype=torch.uint8, device=device)
                store.read(index, out)
                assert (out[:-8] == index + 10 * turn).all()
                assert (out[-8:] == 0xA5).all()
    assert {kept.is_pinned() for kept in store._buckets} == {memory is SnapshotMemory.HOST}
    store.close()


def _buckets() -> list[tuple[int, BucketSpec]]:
    return list(enumerate(MANIFEST.buckets))
