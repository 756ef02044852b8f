"""Parameters in host memory, buckets on a GPU: uploaded by bucket, pinned ones as they lie, the same bytes."""

import pytest
import torch

from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.trainer_agent.assembly.assembler import Assembler
from weightbus.trainer_agent.assembly.gather_plan import plan

from ..kit.exporting import tensors_in

pytestmark = pytest.mark.gpu

SHAPES = {f"t{index}": (256, 128 + index) for index in range(24)}


class Sent:
    """Takes what a rank sends."""

    def __init__(self) -> None:
        self.messages: list[torch.Tensor] = []

    def send(self, messages: list[torch.Tensor], _root: int) -> None:
        self.messages = [message.clone() for message in messages]


def world(
    *, pin: bool = False
) -> tuple[tuple[TensorSpec, ...], dict[str, torch.Tensor], list[Shard], list[torch.Tensor]]:
    """Tensors trained in float32 on the CPU and served in bfloat16: halves by column, whole, and around zero."""
    specs = tuple(TensorSpec(name, "bfloat16", shape) for name, shape in SHAPES.items())
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    rows: list[Shard] = []
    storages: list[torch.Tensor] = []
    for index, (name, shape) in enumerate(SHAPES.items()):
        view = ShardView(index, 0, (shape[1], 1))
        middle = shape[1] // 2
        if index % 3:
            rows.append(Shard(name, Box.whole(shape), "float32", view, shift=index % 2))
        else:
            rows.append(Shard(name, Box((0, 0), (shape[0], middle)), "float32", view))
            rows.append(Shard(name, Box((0, middle), shape), "float32", ShardView(index, middle, (shape[1], 1))))
        storages.append(full[name].pin_memory() if pin else full[name])
        full[name] = full[name] + (index % 2 if index % 3 else 0)
    return specs, full, rows, storages


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("bucket_bytes", [100_000, 1 << 22])
def test_the_root_uploads_what_it_holds(bucket_bytes: int, *, pin: bool) -> None:
    """Every bucket on the GPU holds what the host's parameters say, over two rounds with new weights."""
    specs, full, rows, storages = world(pin=pin)
    manifest = Manifest.of("M", specs, bucket_bytes)
    device = torch.device("cuda", 0)
    assembler = Assembler(plan(manifest, Shards.of(specs, rows), rank=0), storages, 0, None, None)
    for turn in range(2):
        for index, bucket in enumerate(manifest.buckets):
            out = torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8, device=device)
            assembler.run(index, out, device)
            for name, found in tensors_in(manifest, index, out).items():
                assert torch.equal(found.cpu(), (full[name] + turn).to(torch.bfloat16)), name
        for storage in storages:
            storage.add_(1)


@pytest.mark.parametrize("buckets_on", ["cuda", "cpu"])
def test_parameters_that_move_between_versions_are_read_where_they_are(buckets_on: str) -> None:
    """On the GPU, then in host memory, then some here and some there: the same bytes, wherever buckets are."""
    specs, full, rows, storages = world()
    manifest = Manifest.of("M", specs, 100_000)
    device = torch.device(buckets_on, 0) if buckets_on == "cuda" else torch.device("cpu")
    parameters = [torch.nn.Parameter(storage.cuda()) for storage in storages]
    assembler = Assembler(plan(manifest, Shards.of(specs, rows), rank=0), parameters, 0, None, None)
    for turn in ("on the GPU", "in host memory", "here and there", "on the GPU"):
        for index, parameter in enumerate(parameters):
            there = turn == "on the GPU" or (turn == "here and there" and index % 2)
            parameter.data = parameter.data.cuda() if there else parameter.data.cpu()
        for index, bucket in enumerate(manifest.buckets):
            out = torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8, device=device)
            assembler.run(index, out, device)
            for name, found in tensors_in(manifest, index, out).items():
                assert torch.equal(found.cpu(), full[name].to(torch.bfloat16)), f"{name} {turn}"


@pytest.mark.parametrize("pin", [True, False])
def test_another_rank_sends_from_the_gpu(*, pin: bool) -> None:
    """Its parcels arrive on the GPU, in the order in which the root expects them."""
    specs, full, rows, storages = world(pin=pin)
    manifest = Manifest.of("M", specs, 100_000)
    device = torch.device("cuda", 0)
    post = Sent()
    plans = plan(manifest, Shards.of(specs, rows, 1), rank=1, zero_copy_bytes=1)
    assembler = Assembler(plans, storages, 1, None, post)  # type: ignore[arg-type]  # all that is asked of an exchange here
    for index, bucket in enumerate(plans):
        assembler.run(index, None, device)
        torch.cuda.synchronize()
        assert {message.device.type for message in post.messages} == {"cuda"}
        for message, sent in zip(bucket[1].messages, post.messages, strict=True):
            if message.bucket_offset is None:
                continue
            whole = b"".join(
                full[spec.name].to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
                for spec in manifest.tensors_of(index)
            )
            begin = message.bucket_offset
            assert sent.cpu().numpy().tobytes() == whole[begin : begin + message.nbytes]
