"""One rank of the benchmark: the published procedures and ours in turn, on the same parameters. Started by gather.py.

Every rank appends one line of JSON for each pass to ``OUT/rank<r>.jsonl``, so that a run that is cut short says what
it measured.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gather_model import SHAPES, Shape, params, pieces, served
from gather_published import Batched, Groups, Synchronous

from weightbus.dataplane.tensors import coverage as cover
from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.dataplane.tensors.shards import Shards
from weightbus.trainer_agent.assembly.assembler import DTYPES, Assembler, GatherExchange
from weightbus.trainer_agent.assembly.gather_plan import BucketPlan, plan
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource


class Meter:
    """Memory beyond what was there before: torch's own count on a GPU, the process's resident pages on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._over = threading.Event()
        self._before = self._peak = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # the cache stays: no pass pays for the allocations of another
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        self._before = self._peak = _resident()
        self._over.clear()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Peak bytes since `start`, less those at `start`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() - self._before
        assert self._thread is not None
        self._over.set()
        self._thread.join()
        return self._peak - self._before

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self._peak = max(self._peak, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def from_pieces(held: list[Any], shape: Shape, rank: int, ranks: int, bucket_bytes: int) -> Ours:
    """Parameters that were laid out by hand, assembled by their pieces as a source does it."""
    specs = served(shape)
    own = Shards.of(specs, pieces(held, shape, rank, ranks), rank)
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, own)
    together = cover.drop_replicas(Shards.join(everybody))
    cover.check_exact_cover(together)
    manifest = Manifest.of("Qwen3MoeForCausalLM", specs, bucket_bytes)
    buckets = plan(manifest, together, rank=rank)
    device = held[0].data.device
    exchange = GatherExchange(dist.group.WORLD, range(ranks))
    assembler = Assembler(buckets, [param.data for param in held], rank, None, exchange)
    return Ours(manifest, buckets, device, lambda index, out: assembler.run(index, out, device))


def from_source(source: MegatronSource, rank: int, bucket_bytes: int) -> Ours:
    """The parameters of a real model, by the source that a trainer uses."""
    manifest = Manifest.of(source.model, source.tensors(), bucket_bytes)
    buckets = plan(manifest, source.shards, rank=rank)
    return Ours(manifest, buckets, source.device, lambda index, out: source.assemble(manifest, index, out))


class Ours:
    """Pieces, planned once; one bucket after another on the root."""

    def __init__(
        self,
        manifest: Manifest,
        buckets: Sequence[BucketPlan],
        device: torch.device,
        assemble: Callable[[int, torch.Tensor | None], None],
    ) -> None:
        self.manifest = manifest
        self._plan = buckets
        self._device = device
        self._assemble = assemble
        self._root = dist.get_rank() == 0

    @property
    def calls(self) -> int:
        """Messages that this rank sends or receives in one pass."""
        return sum(len(parcel.messages) for bucket in self._plan for holder, parcel in bucket.items() if holder)

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return sum(parcel.nbytes for bucket in self._plan for holder, parcel in bucket.items() if holder)

    def run(self, take: Callable[[int, torch.Tensor], None]) -> None:
        out = torch.empty(self.manifest.largest_bucket, dtype=torch.uint8, device=self._device) if self._root else None
        for index in range(len(self.manifest.buckets)):
            self._assemble(index, out)
            if out is not None:
                take(index, out)

    def tensors(self, index: int, out: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a bucket, as views of it."""
        offsets = self.manifest.offsets_of(index)
        return [
            (spec.name, out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape))
            for spec, at in zip(self.manifest.tensors_of(index), offsets, strict=False)
        ]


def sums(named: list[tuple[str, torch.Tensor]], into: dict[str, int]) -> None:
    """A checksum of every tensor: its bits as 16-bit numbers, weighted by place."""
    for name, tensor in named:
        bits = tensor.contiguous().view(torch.int16).reshape(-1).to(torch.int64)
        places = torch.arange(1, bits.numel() + 1, device=bits.device) % 65521
        into[name] = int((bits * places).sum())


class Bench:
    """The passes of one rank."""

    def __init__(self, args: argparse.Namespace, rank: int, device: torch.device) -> None:
        self._args, self._rank, self._device = args, rank, device
        ranks = dist.get_world_size()
        self._shape = SHAPES[args.shape]._replace(**({"layers": args.layers} if args.layers else {}))
        self._log = (Path(args.out) / f"rank{rank}.jsonl").open("a")
        limit = args.bucket_bytes
        if args.model == "megatron":
            from gather_megatron import Trained

            trained = Trained(self._shape, rank, ranks)
            self._held = trained.params
            self.compare_layouts(trained.odd())
            began = time.monotonic()
            self._ours = from_source(trained.source, rank, limit)
        else:
            self._held = params(self._shape, rank, ranks, device)
            began = time.monotonic()
            self._ours = from_pieces(self._held, self._shape, rank, ranks, limit)
        plan_s = time.monotonic() - began
        groups = Groups(rank, ranks)
        self._sync = Synchronous(self._held, self._shape, groups, limit)
        self._batched = Batched(self._held, self._shape, groups, limit)
        own = sum(param.data.numel() * 2 for param in self._held)
        self.say(
            what="model",
            layers=self._shape.layers,
            model_bytes=self._ours.manifest.nbytes,
            local_bytes=own,
            tensors=len(self._ours.manifest.tensors),
            buckets=len(self._ours.manifest.buckets),
            plan_s=plan_s,
        )

    def say(self, **what: object) -> None:
        self._log.write(json.dumps(what) + "\n")
        self._log.flush()

    def compare_layouts(self, odd: list[str]) -> None:
        """Every rank's pieces of the real model lie where those that are laid out by hand lie."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, odd)
        self.say(what="layout", equal=not any(everybody), odd=[each for rank in everybody for each in rank][:5])

    def compare(self) -> None:
        """Every way gives the same tensors, bit for bit, as far as checksums tell."""
        found: dict[str, dict[str, int]] = {"sync": {}, "async": {}, "ours": {}}
        self._sync.run(lambda named: sums(named, found["sync"]))
        self._batched.run(lambda named: sums(named, found["async"]) if self._rank == 0 else None)
        self._ours.run(lambda index, out: sums(self._ours.tensors(index, out), found["ours"]))
        if self._rank == 0:
            odd = sorted(name for name in found["ours"] if len({each.get(name) for each in found.values()}) != 1)
            equal = not odd and len({len(each) for each in found.values()}) == 1
            self.say(what="equal", equal=equal, tensors=len(found["ours"]), odd=odd[:5])

    def measure(self) -> None:
        """Each way in turn, several times; the first time warms up."""
        ways: dict[str, Callable[[], None]] = {
            "sync": lambda: self._sync.run(lambda _named: None),
            "async": lambda: self._batched.run(lambda _named: None),
            "ours": lambda: self._ours.run(lambda _index, _out: None),
        }
        for repetition in range(self._args.repetitions + 1):
            for way, run in ways.items():
                self.say(what="pass", way=way, warm=repetition > 0, **self._pass(way, run))

    def _pass(self, way: str, run: Callable[[], None]) -> dict[str, object]:
        counter = {"sync": self._sync.counter, "async": self._batched.counter}.get(way)
        if counter:
            counter.calls = counter.nbytes = 0
        meter = Meter(self._device)
        meter.start()
        self._settle()
        began = time.monotonic()
        run()
        self._settle()
        seconds = time.monotonic() - began
        calls, nbytes = (counter.calls, counter.nbytes) if counter else (self._ours.calls, self._ours.nbytes)
        return {"seconds": seconds, "calls": calls, "bytes": nbytes, "peak_extra_bytes": meter.stop()}

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def main() -> None:
    """Join, compare, measure, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", choices=("megatron", "laid-out"))
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--bucket-bytes", type=int)
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--backend")
    parser.add_argument("--out")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        args.backend,
        timeout=dt.timedelta(seconds=120),
        **({"device_id": device} if device.type == "cuda" else {}),
    )
    with torch.no_grad():
        bench = Bench(args, rank, device)
        bench.compare()
        bench.measure()
    bench.say(what="over")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
