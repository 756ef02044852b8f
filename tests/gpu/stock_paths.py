"""SGLang's own update over a collective group, driven as trainers do that have no agent: what sends are compared with.

`flattened`: each bucket is one broadcast. Otherwise each of its tensors is, as slime drives it. Only the calls count:
buckets are assembled between them, which trainers spend time on too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Self

import torch
from torch._C import _distributed_c10d as c10d

from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.processes.process_groups import join_store, process_group_backend, serve_store
from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.dataplane.transports.distributed.broadcast_group import BroadcastGroup
from weightbus.dataplane.transports.interface import Address
from weightbus.engine_agent.engines.sglang.pickle_payload import LOAD_FORMAT
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer

CALL_S = 60.0


class StockPath:
    """A group of this process and a server of one worker. A context manager."""

    def __init__(self, url: str, device: torch.device) -> None:
        self._device = device
        self._server = SGLangServer(url)
        self._server.identify()
        self._store = serve_store("127.0.0.1")
        self._name = f"stock-{time.time_ns()}"
        self._thread = ThreadPoolExecutor(1)
        address = Address(f"tcp://127.0.0.1:{self._store.port}", self._name, process_group_backend(device), 2)
        joined = self._thread.submit(self._server.join_group, address, 1, CALL_S)
        store = join_store(self._store)
        self._group = BroadcastGroup.form(store, self._name, "127.0.0.1", device, 2, Deadline(CALL_S))
        joined.result(CALL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._group.abort()  # first: a member that leaves over NCCL may wait for those that are still there
        with contextlib.suppress(Exception):  # it is over; the server forgets the group when it can
            self._server.leave_group(self._name, 10.0)
        self._thread.shutdown(wait=False)

    def update(self, source: Any, manifest: Manifest, *, flattened: bool) -> float:
        """Bring all weights over. Returns the seconds that the calls took."""
        took = 0.0
        memory = torch.empty(manifest.largest_bucket, dtype=torch.uint8, device=self._device)
        with self.standing():
            for index in range(len(manifest.buckets)):
                source.assemble(manifest, index, memory)
                took += self.bring(manifest, index, memory, flattened=flattened)
        return took

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """The server stands still, and takes what it is brought; by several groups, if it is in them."""
        self._server.pause("retract", CALL_S)
        self._server.flush(CALL_S)
        try:
            yield
            self._server.end_update(CALL_S)
        finally:
            self._server.resume(CALL_S)

    def bring(self, manifest: Manifest, index: int, memory: torch.Tensor, *, flattened: bool) -> float:
        """One bucket, which lies in `memory`, to a server that stands still. Returns the seconds that it took."""
        if memory.is_cuda:
            torch.cuda.synchronize()
        tensors = manifest.tensors_of(index)
        views = [memory[: manifest.buckets[index].nbytes]]
        body: dict[str, object] = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._name,
            "flush_cache": False,
        }
        if flattened:
            body["load_format"] = LOAD_FORMAT
        else:
            views = [
                memory[at : at + tensor.nbytes].view(getattr(torch, tensor.dtype))
                for tensor, at in zip(tensors, manifest.offsets_of(index), strict=False)
            ]
        began = time.perf_counter()
        answer = self._thread.submit(self._server._update, "/update_weights_from_distributed", body, CALL_S)
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=CALL_S)
        assert self._group._backend is not None
        for work in [self._group._backend.broadcast([view], options) for view in views]:
            work.wait()
        answer.result(CALL_S)
        return time.perf_counter() - began
