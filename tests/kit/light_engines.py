"""Engines as processes: light servers with our loader, and sidecars. Reads jobs, and forks a process for each.

    {"half": "server", "name": "near", "folder": .., "checkpoint": .., "port": ..}
    {"half": "sidecar", "name": "near", "folder": .., "settings": {..}}     all that `EngineAgentSettings` takes

While there is a file FOLDER/HALF-NAME, such as ``server-near``, with a point, a deed and a number, the process does the
deed when it comes to the point for the number-th time:

    copies    server   half of what `direct` copies is copied
    turn      server   before it takes a turn of `sends`
    bucket    server   before it loads a bucket, or takes one of a broadcast
    bucket    sidecar  before it takes a bucket of a broadcast, or has its server take one

    fail      the step raises
    hold      it waits until the file is gone, and says so by FOLDER/HALF-NAME.held
"""

from __future__ import annotations

import base64
import hashlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.dataplane.loopback import LoopbackServer
from tests.kit.fake_sglang import FakeSGLang, Refusal
from tests.kit.fake_weights import FakeWeights
from tests.kit.flat_module import FlatModule
from tests.kit.forked import log_to, say, serve
from weightbus.control.server.metrics import configure_logging
from weightbus.dataplane.copy.copy_engine import TorchCopies, no_wait
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.transports.distributed.receiver import SidecarReceiver
from weightbus.dataplane.transports.interface import Address
from weightbus.dataplane.transports.sends.p2p_group import P2PGroup
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.sidecar.driver import EngineAgent
from weightbus.engine_agent.sidecar.settings import EngineAgentSettings
from weightbus.engine_agent.worker_loader import load

LONGEST_S = 120.0
"""Longest time that a process is held."""
_LAST = 16


class Struck(RuntimeError):
    """A test wanted it."""


class Gate:
    """What a test wants to happen to this process."""

    def __init__(self, told: Path) -> None:
        self._told = told
        self._passed = 0

    def reach(self, point: str) -> None:
        """Raises `Struck` where the step is to fail."""
        try:
            where, deed, number = self._told.read_text().split()
        except FileNotFoundError:
            self._passed = 0
            return
        if where != point:
            return
        self._passed += 1
        if self._passed != int(number):
            return
        if deed == "fail":
            raise Struck(f"a test wanted {point} to fail")
        self._told.with_name(f"{self._told.name}.held").touch()
        until = time.monotonic() + LONGEST_S
        while self._told.exists() and time.monotonic() < until:
            time.sleep(0.01)

    def before(self, owner: Any, name: str, point: str) -> None:
        """Have every call of a method come here first."""
        real: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **more: Any) -> Any:
            self.reach(point)
            return real(*arguments, **more)

        setattr(owner, name, watched)

    def between(self, copies: type[TorchCopies]) -> None:
        """Have every copy of several rows come here when half of them are copied."""

        def launch(made: TorchCopies, ready: Callable[[int], None] = no_wait) -> None:
            ready(0)
            half = len(made._to) // 2
            for at, (target, source) in enumerate(zip(made._to, made._from, strict=True)):
                if at == half:
                    self.reach("copies")
                target.copy_(source)

        copies.launch = launch  # type: ignore[method-assign, assignment]


class InPlace(FakeWeights):
    """In memory that stays: that of a model's parameters."""

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        before = dict(self.tensors)
        super().load(named)
        for name, tensor in before.items():
            tensor.copy_(self.tensors[name])
        self.tensors = before

    def changed(self) -> None:
        """The memory was written into."""
        with self._whole:
            self._digest = b""


class LoadedServer(FakeSGLang):
    """A light server with our loader, whose worker joins groups as SGLang's do."""

    def __init__(self, checkpoint: Path, gate: Gate) -> None:
        super().__init__(checkpoint)
        self._gate = gate
        self._worker = LoopbackServer()
        self._moments: list[tuple[float, str]] = []

    def start(self) -> FakeSGLang:
        super().start()
        self.weights: InPlace = InPlace(self.checkpoint, 1)
        self.model = FlatModule(self.weights.tensors)
        return self

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """As the light server, and notes when it was paused, and when it was let go on."""
        paused, began = bool(self.mode), time.monotonic()
        answer = super().answer(method, path, body)
        if path == "/pause_generation" and not paused:
            self._moments.append((time.monotonic(), "paused"))
        if path == "/continue_generation" and paused:
            self._moments.append((began, "goes on"))
        return answer

    def held(self, _: dict[str, Any]) -> dict[str, Any]:
        """For tests: what it has, by its bytes, and how it stands."""
        found = {
            name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self.weights.tensors.items()
        }
        updates = sum(each.startswith("/update_weights_from_") for each in self.calls)
        moments = self._moments[-_LAST:]
        return {
            "tensors": found, "label": self.label, "paused": bool(self.mode), "updates": updates, "moments": moments
        }  # fmt: skip

    def server_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**super().server_info(body), "custom_weight_loader": [LOADER]}

    def update_weights_from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["load_format"] != LOADER:
            self._reach("bucket")
            return super().update_weights_from_tensor(body)
        (payload,) = body["serialized_named_tensors"]
        found = re.search(rb"weightbus:[\x20-\x7e]+?\.sock", base64.b64decode(payload))
        assert found
        load(self.model, [(found[0].decode(), torch.empty(0))])
        self.weights.changed()
        return {"success": True, "message": "Success."}

    def init_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        where = f"tcp://{body['master_address']}:{body['master_port']}"
        address = Address(where, body["group_name"], body["backend"], body["world_size"])
        self._worker.join_group(address, body["rank_offset"], LONGEST_S)
        return {"success": True, "message": "Success."}

    def destroy_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        self._worker.leave_group(body["group_name"], 1.0)
        return {"success": True, "message": "Success."}

    def update_weights_from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        self._reach("bucket")
        named = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in named]
        self._worker.load_broadcast(body["group_name"], specs, LONGEST_S)
        (taken,) = self._worker.weights
        self.weights.load(
            [
                (
                    each.name,
                    torch.frombuffer(bytearray(taken[each.name]), dtype=getattr(torch, each.dtype)).view(each.shape),
                )
                for each in specs
            ]
        )
        return {"success": True, "message": "Success."}

    def _reach(self, point: str) -> None:
        try:
            self._gate.reach(point)
        except Struck as struck:
            raise Refusal(400, str(struck)) from struck


def server(job: dict[str, Any], gate: Gate) -> None:
    """Serve until killed."""
    gate.between(TorchCopies)
    gate.before(P2PGroup, "post", "turn")
    made = LoadedServer(Path(job["checkpoint"]), gate)
    made.port = job["port"]
    made.start()
    say(listening=job["name"])
    signal.pause()


def sidecar(job: dict[str, Any], gate: Gate) -> None:
    """Until killed, or told to end."""
    gate.before(SidecarReceiver, "_take", "bucket")
    gate.before(SGLangServer, "load_broadcast", "bucket")
    configure_logging("info", "json")
    agent = EngineAgent(msgspec.convert(job["settings"], EngineAgentSettings, dec_hook=lambda kind, text: kind(text)))
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    agent.run()


def named(half: Callable[[dict[str, Any], Gate], None]) -> Callable[[dict[str, Any]], None]:
    """With a name for its log and for what it is told."""

    def carry_out(job: dict[str, Any]) -> None:
        folder, name = Path(job["folder"]), f"{job['half']}-{job['name']}"
        log_to(folder / f"{name}.log")
        threading.current_thread().name = name
        half(job, Gate(folder / name))

    return carry_out


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"server": named(server), "sidecar": named(sidecar)})
