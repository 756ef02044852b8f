"""Weights in pinned host memory: buckets against the weights bit for bit, then how fast they are made.

    python3 tests/gpu/offloaded.py [--gigabytes N] [--out FILE]     one CUDA device, host memory for twice as much
    python3 tests/gpu/offloaded.py --device cpu                     no GPU: the same steps, in memory that plays one

Prints one JSON object and exits with 1 unless every bucket was equal. Weights are those of Qwen3-8B's layers as
Megatron-core keeps them (fused QKV, fused gate and up), as many as fill `--gigabytes` in bfloat16. Everything is
measured as a pass of a publication does it: every bucket assembled and digested, one after another.

`pcie_s` is a plain copy of the same bytes, pinned, in buckets of the same size, in the same run; `of_pcie` is its time
by ours. `float32` is of a trainer with masters in float32, whose bytes over the bus are twice as many (its `of_pcie` is
of a copy of those bytes). `unpinned` is of pageable memory, which is packed by the CPU; `snapshot` of a snapshot's
buckets, taken to the host and read again; `quantized` of FP8 blocks made on the way.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.trainer_agent.assembly.assembler import DTYPES, Assembler, HostUploadStream, MemoryAccess
from weightbus.trainer_agent.assembly.gather_plan import plan
from weightbus.trainer_agent.publish.background_publisher import SnapshotBuffer
from weightbus.trainer_agent.quantized.quantized_source import quantized
from weightbus.trainer_agent.settings import SnapshotMemory

PASSES = 4
FULL, SMALL = (4096, 12288, 32, 8, 128), (256, 512, 4, 2, 64)
"""Hidden size, size of the MLP, heads, groups, size of a head."""
CONFIG = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
}


class Trainer:
    """One rank that holds whole layers in host memory. Satisfies `Source` and `LocatedSource`."""

    model = "Qwen3ForCausalLM"
    root, rank, exchange = True, 0, None

    def __init__(self, sizes: Sequence[int], layers: int, dtype: torch.dtype, device: torch.device, *, pin: bool):
        self.device = device
        self.storages: list[torch.Tensor] = []
        self._rows: list[Shard] = []
        self._specs: list[TensorSpec] = []
        self._dtype, self._pin = dtype, pin and device.type == "cuda"
        self.reach = (
            MemoryAccess()
            if device.type == "cuda"
            else MemoryAccess(lambda *_: pin, lambda _: pin, lambda _: HostUploadStream())
        )
        for layer in range(layers):
            self._layer(f"model.layers.{layer}.", sizes)
        self.shards = Shards.of(self._specs, self._rows)
        self._planned: tuple[Manifest, Assembler] | None = None

    def _layer(self, at: str, sizes: Sequence[int]) -> None:
        hidden, inner, heads, groups, size = sizes
        each = heads // groups
        fused = self._hold((heads + 2 * groups) * size, hidden)
        for name, first, count in (("q", 0, each), ("k", each, 1), ("v", each + 1, 1)):
            self._specs.append(
                TensorSpec(f"{at}self_attn.{name}_proj.weight", "bfloat16", (groups * count * size, hidden))
            )
            for group in range(groups):
                box = Box((group * count * size, 0), ((group + 1) * count * size, hidden))
                self._piece(box, fused, (group * (each + 2) + first) * size * hidden, hidden)
        self._whole(f"{at}self_attn.o_proj.weight", hidden, heads * size)
        gated = self._hold(2 * inner, hidden)
        for half, name in enumerate(("gate", "up")):
            self._specs.append(TensorSpec(f"{at}mlp.{name}_proj.weight", "bfloat16", (inner, hidden)))
            self._piece(Box.whole((inner, hidden)), gated, half * inner * hidden, hidden)
        self._whole(f"{at}mlp.down_proj.weight", hidden, inner)

    def _whole(self, name: str, rows: int, columns: int) -> None:
        self._specs.append(TensorSpec(name, "bfloat16", (rows, columns)))
        self._piece(Box.whole((rows, columns)), self._hold(rows, columns), 0, columns)

    def _hold(self, rows: int, columns: int) -> int:
        memory = torch.empty((rows, columns), dtype=self._dtype, pin_memory=self._pin)
        memory.copy_(torch.randn((rows, columns), device=self.device, dtype=self._dtype))
        self.storages.append(memory)
        return len(self.storages) - 1

    def _piece(self, box: Box, storage: int, offset: int, columns: int) -> None:
        name = str(self._dtype).removeprefix("torch.")
        self._rows.append(Shard(self._specs[-1].name, box, name, ShardView(storage, offset, (columns, 1))))

    def tensors(self) -> Sequence[TensorSpec]:
        return self._specs

    def memory(self) -> Sequence[torch.Tensor]:
        return self.storages

    def agree(self, blob: bytes | None) -> bytes:
        return blob or b""

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        if self._planned is None or self._planned[0] is not manifest:
            plans = plan(manifest, self.shards, rank=0)
            self._planned = manifest, Assembler(plans, self.storages, 0, None, None, self.reach)
        self._planned[1].run(index, out, self.device)

    def served(self, name: str) -> torch.Tensor:
        """A tensor as it should arrive, made without pieces of buckets: box by box."""
        (spec,) = (each for each in self._specs if each.name == name)
        found = torch.empty(spec.shape, dtype=torch.bfloat16)
        for row in self._rows:
            if row.tensor == name:
                part = self.storages[row.view.storage].as_strided(row.box.shape, row.view.strides, row.view.offset)
                found[tuple(slice(a, b) for a, b in zip(row.box.start, row.box.stop, strict=True))] = part
        return found


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def equal(device: torch.device, dtype: torch.dtype, *, pin: bool) -> bool:
    """Small layers in small buckets, over two passes with other weights."""
    trainer = Trainer(SMALL, 3, dtype, device, pin=pin)
    manifest = Manifest.of(trainer.model, trainer.tensors(), 300_000)
    for _ in range(2):
        for index, bucket in enumerate(manifest.buckets):
            out = torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8, device=device)
            trainer.assemble(manifest, index, out)
            for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
                found = out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape).cpu()
                if not torch.equal(found, trainer.served(spec.name)):
                    print(f"{spec.name} differs, {dtype}, pinned {pin}", file=sys.stderr)  # noqa: T201
                    return False
        for storage in trainer.storages:
            storage.mul_(2)
    return True


def equal_quantized(device: torch.device) -> bool:
    """FP8 blocks of offloaded weights are those of the same weights on the device."""
    far = Trainer(SMALL, 2, torch.float32, device, pin=True)
    near = Trainer(SMALL, 2, torch.float32, device, pin=False)
    near.storages[:] = [each.to(device) for each in far.storages]
    near.reach = MemoryAccess()
    manifest, found = None, []
    for trainer in (far, near):
        source = quantized(trainer, CONFIG)
        manifest = manifest or Manifest.of(trainer.model, source.tensors(), 300_000)
        out = [torch.zeros(bucket.nbytes, dtype=torch.uint8, device=device) for bucket in manifest.buckets]
        for index, memory in enumerate(out):
            source.assemble(manifest, index, memory)
        found.append(torch.cat(out))
    return bool((found[0] == found[1]).all())


def best(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of the best pass; the first one makes buffers."""
    found = []
    for _ in range(PASSES):
        settle(device)
        began = perf_counter()
        run()
        settle(device)
        found.append(perf_counter() - began)
    return min(found[1:])


def plain(nbytes: int, bucket: int, device: torch.device) -> float:
    """The same bytes, pinned, to the device, in copies as large as buckets."""
    far = torch.ones(min(bucket, nbytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    near = [torch.empty_like(far, device=device) for _ in range(2)]

    def run() -> None:
        for turn in range(max(1, nbytes // far.numel())):
            near[turn % 2].copy_(far, non_blocking=True)

    return best(device, run) * nbytes / (max(1, nbytes // far.numel()) * far.numel())


def publish(
    trainer: Trainer, bucket: int, fill: Callable[[Manifest, int, torch.Tensor], None], manifest: Manifest
) -> float:
    """A pass: every bucket into one of two slots, and digested there."""
    slots = [torch.empty(manifest.largest_bucket, dtype=torch.uint8, device=trainer.device) for _ in range(2)]

    def run() -> None:
        for index, spec in enumerate(manifest.buckets):
            slot = slots[index % 2][: spec.nbytes]
            fill(manifest, index, slot)
            integrity.digest_tensors(slot, manifest.offsets_of(index))

    del bucket
    return best(trainer.device, run)


def measure(device: torch.device, sizes: Sequence[int], nbytes: int, bucket: int) -> dict[str, object]:
    """All kinds of memory, each beside a plain copy of the bytes that it has to move."""
    layer = sum(spec.nbytes for spec in Trainer(SMALL, 1, torch.bfloat16, torch.device("cpu"), pin=False).tensors())
    if sizes is not SMALL:
        hidden, inner, heads, groups, size = sizes
        layer = 2 * (hidden * (2 * heads + 2 * groups) * size + 3 * hidden * inner)
    result: dict[str, object] = {}
    for name, dtype, pin, share in (
        ("pinned", torch.bfloat16, True, 1.0),
        ("float32", torch.float32, True, 1.0),
        ("unpinned", torch.bfloat16, False, 0.25),
    ):
        trainer = Trainer(sizes, max(1, int(nbytes * share) // layer), dtype, device, pin=pin)
        manifest = Manifest.of(trainer.model, trainer.tensors(), bucket)
        travels = manifest.nbytes * trainer.storages[0].element_size() // 2
        copied = plain(travels, bucket, device)
        took = publish(trainer, bucket, trainer.assemble, manifest)
        found = {"bytes": manifest.nbytes, "bus_bytes": travels, "seconds": took, "pcie_s": copied}
        result[name] = {**found, "bytes_per_s": manifest.nbytes / took, "of_pcie": copied / took}
        if name == "pinned":
            result["snapshot"] = snapshot(trainer, bucket, manifest, copied)
            result["quantized"] = fp8(trainer, bucket, copied)
        del trainer
    return result


def snapshot(trainer: Trainer, bucket: int, manifest: Manifest, copied: float) -> dict[str, object]:
    """Taken into the host's memory from the device, then read from it."""
    store = SnapshotBuffer(manifest, trainer.device, SnapshotMemory.HOST)
    settle(trainer.device)
    store.take(lambda index, out: trainer.assemble(manifest, index, out))
    settle(trainer.device)
    began = perf_counter()
    store.take(lambda index, out: trainer.assemble(manifest, index, out))
    settle(trainer.device)
    taken = perf_counter() - began
    took = publish(trainer, bucket, lambda _, index, slot: store.read(index, slot), manifest)
    store.close()
    return {"take_s": taken, "seconds": took, "of_pcie": copied / took}


def fp8(trainer: Trainer, bucket: int, copied: float) -> dict[str, object]:
    """Uploaded, quantized in blocks, digested."""
    source = quantized(trainer, CONFIG)
    manifest = Manifest.of(trainer.model, source.tensors(), bucket)
    took = publish(trainer, bucket, source.assemble, manifest)
    return {"bytes": manifest.nbytes, "seconds": took, "of_pcie": copied / took}


def main() -> int:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    dry = device.type == "cpu"
    checks = {
        f"{str(dtype).removeprefix('torch.')}-{'pinned' if pin else 'unpinned'}": equal(device, dtype, pin=pin)
        for dtype in (torch.bfloat16, torch.float32)
        for pin in (True, False)
    }
    checks["fp8"] = equal_quantized(device)
    sizes, nbytes, bucket = (
        (SMALL, 1 << 23, 1 << 20) if dry else (FULL, int(given.gigabytes * 1e9), given.bucket_mb << 20)
    )
    result: dict[str, object] = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": "cpu, a dry run" if dry else torch.cuda.get_device_name(),
        "command": " ".join(["python3", "tests/gpu/offloaded.py", *sys.argv[1:]]),
        "model": "layers of a small model" if dry else "layers of Qwen3-8B",
        "equal": all(checks.values()),
        "checks": checks,
        **(measure(device, sizes, nbytes, bucket) if all(checks.values()) else {}),
    }
    text = msgspec.json.format(json.dumps(result), indent=2)
    print(text)  # noqa: T201
    if given.out is not None:
        given.out.write_text(text + "\n")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
