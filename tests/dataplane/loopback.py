"""An inference server without a server: takes buckets as SGLang's workers do and keeps what it was given.

Also a program (`python -m tests.dataplane.loopback`): reads jobs, one JSON object a line, and forks a process for each,
which is one half of a transfer and may be told to die or to stop at a bucket. Answers are JSON lines too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_storage_filename

from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.shared_memory import BucketBuffers, HostMemory
from weightbus.dataplane.processes import process_groups as backends
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest, Sources, TensorSpec
from weightbus.dataplane.transports import registry as transports
from weightbus.dataplane.transports.distributed import source_watchdog
from weightbus.dataplane.transports.distributed.source_rank import SourceRank
from weightbus.dataplane.transports.interface import (
    Address,
    Peer,
    Receiver,
    ReceiverContext,
    Sender,
    SenderContext,
    SharedBucket,
    TransferSession,
    Transport,
)

from .staged_sender import StagedSender

CHANNEL = "chan"
HANDED = "handed-"
"""Before a kind: agents take part in the place of their servers."""
DTYPES = ("bfloat16", "float32", "int8", "float64", "float8_e4m3fn", "bool")


def make_manifest(buckets: int = 3) -> Manifest:
    """Odd shapes, six dtypes mixed, scalars, the given number of buckets."""
    each = [
        TensorSpec(f"{dtype}.{i}", dtype, shape) for dtype in DTYPES for i, shape in enumerate([(3, 7), (), (1, 5, 3)])
    ]
    size = sum(tensor.nbytes for tensor in each)
    tensors = [TensorSpec(f"b{b}.{t.name}", t.dtype, t.shape) for b in range(buckets) for t in each]
    manifest = Manifest.of("LoopbackModel", tensors, bucket_bytes=size)
    assert len(manifest.buckets) == buckets
    return manifest


def make_bytes(manifest: Manifest, version: int) -> list[torch.Tensor]:
    """The packed buckets of one version: any bytes at all, NaNs and odd booleans included."""
    generator = torch.Generator().manual_seed(version)
    return [torch.randint(0, 256, (b.nbytes,), dtype=torch.uint8, generator=generator) for b in manifest.buckets]


def make_session(epoch: int, version: int, manifest: Manifest) -> TransferSession:
    """A session whose table is that of `make_bytes`."""
    digests = [
        integrity.digest_tensors(bucket, manifest.offsets_of(i))
        for i, bucket in enumerate(make_bytes(manifest, version))
    ]
    table = DigestTable(manifest.digest(), version, integrity.ALGORITHM, b"".join(digests))
    return TransferSession(CHANNEL, epoch, version, manifest, table)


def cut(memory: torch.Tensor, tensors: Sequence[TensorSpec]) -> dict[str, bytes]:
    """The named tensors of a packed bucket, as SGLang's FlattenedTensorBucket takes it apart."""
    out: dict[str, bytes] = {}
    at = 0
    for tensor in tensors:
        view = memory[at : at + tensor.nbytes].view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
        out[tensor.name] = bytes(view.reshape(-1).view(torch.uint8).numpy().tobytes())
        at += tensor.nbytes
    assert at == memory.numel()
    return out


def wanted(manifest: Manifest, version: int) -> dict[str, bytes]:
    """What every rank must hold after a transfer of `version`."""
    out: dict[str, bytes] = {}
    for index, bucket in enumerate(make_bytes(manifest, version)):
        out.update(cut(bucket, manifest.tensors_of(index)))
    return out


class LoopbackServer:
    """An `EngineServer` whose ranks live in this process. `on_load` is called before bucket n is taken."""

    def __init__(self, tp: int = 1, on_load: Callable[[int], None] = lambda _: None) -> None:
        self.tp = tp
        self.drafts = False
        self.opens = ""
        self.launch = "1"
        self.weights: list[dict[str, bytes]] = [{} for _ in range(tp)]
        self.loads = 0
        self.joins = 0
        self.watched: tuple[tuple[str, ...], bool] = ((), False)
        """The groups that are left by another if this one cannot, and whether they are used."""
        self.stood_still = False
        """So that the other has left those that were used."""
        self._on_load = on_load
        self._groups: dict[str, list[dist.ProcessGroupGloo]] = {}

    def launch_again(self) -> None:
        """Its processes end, and others take their place."""
        self.launch += "1"
        for group in tuple(self._groups):
            self.leave_group(group, 1.0)

    def _begin(self) -> None:
        self._on_load(self.loads)
        self.loads += 1

    def load_shared(self, bucket: SharedBucket, deadline_s: float) -> None:
        self._begin()
        assert isinstance(bucket.memory, HostMemory)
        assert deadline_s > 0
        for weights in self.weights:
            memory = bucket.memory
            storage = rebuild_storage_filename(torch.UntypedStorage, memory.manager, memory.handle, memory.nbytes)
            mapped = torch.empty(0, dtype=torch.uint8).set_(storage)
            weights.update(cut(mapped[: bucket.spec.nbytes], bucket.tensors))

    def join_group(self, address: Address, rank_offset: int, deadline_s: float) -> None:
        self.joins += 1
        url = urlsplit(address.address)
        timeout = timedelta(seconds=deadline_s)

        def join(rank: int) -> dist.ProcessGroupGloo:
            store: Any = dist.TCPStore(url.hostname or "", url.port or 0, timeout=timeout, wait_for_workers=False)
            for prefix in (address.group, f"{address.group}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            if ":" not in (url.hostname or ""):
                return dist.ProcessGroupGloo(store, rank_offset + rank, address.world_size, timeout)
            # As GLOO_SOCKET_IFNAME does it for a server: by itself gloo takes the address of the host's name.
            group = backends.make_gloo_group(store, url.hostname or "", rank_offset + rank, address.world_size, timeout)
            return cast("dist.ProcessGroupGloo", group)

        with ThreadPoolExecutor(self.tp) as ranks:
            try:
                self._groups[address.group] = list(ranks.map(join, range(self.tp)))
            except RuntimeError as error:
                raise TransferFailed(f"no group: {error}") from error

    def load_broadcast(self, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        self._begin()
        if group not in self._groups:
            raise TransferFailed(f"HTTP 400, not in {group}")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=deadline_s)
        memory = [torch.zeros(sum(t.nbytes for t in tensors), dtype=torch.uint8) for _ in self.weights]
        try:
            works = [pg.broadcast([mine], options) for pg, mine in zip(self._groups[group], memory, strict=True)]
            for work in works:
                work.wait(options.timeout)
        except RuntimeError as error:
            raise TransferFailed(f"no broadcast: {error}") from error
        for weights, mine in zip(self.weights, memory, strict=True):
            weights.update(cut(mine, tensors))

    def watch_groups(self, groups: Sequence[str], *, used: bool) -> bool:
        self.watched = tuple(groups), used
        stood, self.stood_still = self.stood_still, False
        for group in tuple(self._groups) if stood else ():
            self.leave_group(group, 1.0)
        return not stood

    def leave_group(self, group: str, deadline_s: float) -> None:
        assert deadline_s > 0
        for rank in self._groups.pop(group, []):
            for peer in set(range(rank.size())) - {rank.rank()}:
                with contextlib.suppress(RuntimeError):  # closes its connections; its end alone would wait for others
                    rank.recv([torch.empty(1, dtype=torch.uint8)], peer, 0x7FFFFFFF).wait(timedelta(milliseconds=1))

    def load_checkpoint(self, path: str, deadline_s: float) -> None:
        from safetensors import safe_open

        self._begin()
        assert deadline_s > 0
        index = json.loads(Path(path, "model.safetensors.index.json").read_text())
        loaded: dict[str, bytes] = {}
        for shard in sorted(set(index["weight_map"].values())):
            with safe_open(Path(path, shard), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a dict
                    assert index["weight_map"][name] == shard
                    tensor = file.get_tensor(name)
                    loaded[name] = bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for weights in self.weights:
            weights.update(loaded)


class Places:
    """Makes the halves of one test's transports, which keep their files under `root`.

    `transport`, as ``module:name``, is a transport that is not built in; any kind means it then.
    """

    def __init__(self, root: Path, host: str = "127.0.0.1", transport: str = "") -> None:
        self.root, self.host, self._transport = root, host, transport

    def transport(self, kind: str) -> Transport:
        """The declaration of `kind`."""
        if self._transport:
            return cast("Transport", pkgutil.resolve_name(self._transport))
        return transports.by_name("distributed" if kind.removeprefix(HANDED) == "stages" else kind.removeprefix(HANDED))

    def sender(self, kind: str) -> Sender:
        if kind.removeprefix(HANDED) == "stages":
            return StagedSender(self.host, CHANNEL)
        context = SenderContext(
            channel=CHANNEL, runtime_dir=self.root / "run", host=self.host, checkpoint_dir=self.root / "ckpt"
        )
        return self.transport(kind).sender(context)

    def server(self, kind: str, tp: int = 1, on_load: Callable[[int], None] = lambda _: None) -> LoopbackServer:
        """One whose workers open memory of others where `kind` says that these take part for it."""
        server = LoopbackServer(tp, on_load)
        server.opens = "cpu" if kind.startswith(HANDED) else ""
        return server

    def receiver(self, kind: str) -> Receiver:
        return self.transport(kind).receiver(ReceiverContext(runtime_dir=self.root / "run"))


def send_all(
    sender: Sender,
    session: TransferSession,
    pool: BucketBuffers,
    deadline_s: float,
    *,
    before: Callable[[int], None] = lambda _: None,
    spoil: Callable[[int, torch.Tensor], None] = lambda *_: None,
) -> None:
    """What the trainer agent does after `ready`: fill a slot, send it, reuse it only after `reclaim`."""
    slots = pool.buffers
    buckets = make_bytes(session.manifest, session.version)
    for index, bucket in enumerate(buckets):
        if index >= len(slots):
            sender.reclaim(index - len(slots), deadline_s)
        slot = slots[index % len(slots)]
        slot.memory[: bucket.numel()] = bucket
        spoil(index, slot.memory)
        before(index)
        sender.send(index, slot, deadline_s)
    for index in range(max(0, len(buckets) - len(slots)), len(buckets)):
        sender.reclaim(index, deadline_s)
    before(len(buckets))
    sender.finish(deadline_s)


# -- a half in a process of its own ------------------------------------------------------------------------------------


def _stumble(at: int, how: str) -> Callable[[int], None]:
    def stumble(index: int) -> None:
        if index == at:
            signal.pthread_kill(threading.get_ident(), signal.SIGKILL if how == "die" else signal.SIGSTOP)

    return stumble


def _say(**answer: object) -> None:
    os.write(1, json.dumps({"from": os.getpid(), **answer}).encode() + b"\n")


def _run(job: dict[str, Any]) -> None:
    places = Places(Path(job["root"]), transport=job.get("transport", ""))
    manifest = make_manifest(job.get("buckets", 3))
    session = make_session(job["epoch"], job["version"], manifest)
    stumble = _stumble(job.get("at", -1), job.get("how", "die"))
    source_watchdog.SILENCE_S = job.get("silence_s", source_watchdog.SILENCE_S)
    if job["half"] == "sender":
        sender = places.sender(job["kind"])
        pool = BucketBuffers("cpu", 2, manifest.largest_bucket, CHANNEL)
        address = sender.offer(session, [Peer(*peer) for peer in job["peers"]])
        _say(**msgspec.structs.asdict(address))
        sender.ready(30)
        with contextlib.suppress(TransferFailed):
            send_all(sender, session, pool, 30, before=stumble)
        sender.close()
        _say(failed=sender.failed)
        return
    if job["half"] == "source":
        run_source(job, session, stumble)
        return
    server = places.server(job["kind"], job["tp"], stumble)
    receiver = places.receiver(job["kind"])
    address = Address(**job["address"])
    receiver.receive(session, address, job["engine"], job["rank_offset"], server, 30)
    _say(engine=job["engine"], ok=all(w == wanted(manifest, session.version) for w in server.weights))


def run_source(job: dict[str, Any], session: TransferSession, stumble: Callable[[int], None]) -> None:
    """A source that does not lead, with all its buckets; it stumbles before one is there that all wait for."""
    sources, number = Sources(tuple(job["of"])), job["number"]
    buckets = make_bytes(session.manifest, session.version)
    own = [buckets[index] for index in sources.own(number)]
    rank = SourceRank(number, torch.device("cpu"))
    rank.begin(Address(**job["address"]), session.epoch, sources, own, job["deadline_s"])
    for place in range(len(own)):
        rank.wait_free(place)
        stumble(place)
        rank.filled(place + 1)
    rank.wait_free(len(own))
    _say(source=number, failure=rank.failure)
    rank.close()


def main() -> None:
    """Fork a process per job until the jobs end, then see that none is left."""
    children: list[int] = []
    _say(up=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            _say(began=True)  # by the child itself: what it says next comes after it
            try:
                _run(json.loads(line))
            except Exception as error:  # noqa: BLE001  told to the test
                _say(error=f"{type(error).__name__}: {error}")
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    assert threading.active_count() == 1
    main()
