"""A light engine in this process: implements `Engine` directly, without SGLang, without HTTP, without a server.

Its ranks, their buckets and groups are those of `LoopbackServer`. It generates tokens that depend on every byte of its
weights, pauses, releases its memory and is launched again. That it behaves like a real engine is proven by one contract
for all of them (tests/engine_agent/engines/engine_contract.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.transports.interface import SharedBucket
from weightbus.engine_agent.engines import checkpoint_spec
from weightbus.engine_agent.engines.interface import CALL_S, EngineFacts, Limitation, Observer, Sight
from weightbus.engine_agent.engines.local_process import start_time
from weightbus.engine_agent.engines.registry import EngineConnection
from weightbus.engine_agent.errors import (
    AnotherGeneration,
    NothingToGive,
    PauseEnded,
    ServerError,
    ServerRefused,
    ServerSilent,
    ServerUnreachable,
    UnfitManifest,
)

from ..dataplane.loopback import LoopbackServer
from .fake_weights import read

TOKEN_S = 0.001
ENGINES: dict[str, MemoryEngine] = {}
"""By the url under which a sidecar is told of them."""


class MemoryEngine(LoopbackServer):
    """One server of `checkpoint`, and the sidecar's view of it."""

    facts: EngineFacts

    def __init__(self, checkpoint: Path, tp: int = 1) -> None:
        super().__init__(tp)
        self.checkpoint = checkpoint
        self.url = f"http://memory:{len(ENGINES) + 1}"
        ENGINES[self.url] = self
        self._changed = threading.Condition()
        self._launches = 0
        self.restart()
        self._observer: Observer | None = None
        self._dirty, self._pinned, self._dead, self._reason = False, "", "", ("", "")
        self.identify()

    # -- what a client of the server sees

    def restart(self) -> None:
        """End, and start again with the checkpoint's weights."""
        self._launches += 1
        self._releases = 0
        self.weights = self._stored(self.checkpoint)
        self._label, self.mode, self._running, self._released = "default", "", 0, False

    def generate(self, count: int = 8) -> tuple[list[int], list[str]]:
        """`count` tokens, and of each the label under which it was made."""
        tokens: list[int] = []
        labels: list[str] = []
        with self._changed:
            self._running += 1
        try:
            while len(tokens) < count:
                with self._changed:
                    assert self._changed.wait_for(lambda: not self.mode, CALL_S)
                    assert not self._released, "the memory is released"
                    labels.append(self._label)
                    tokens.append(self._token(tokens))
                time.sleep(TOKEN_S)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
        return tokens, labels

    def _token(self, before: list[int]) -> int:
        digest = hashlib.sha256(json.dumps(before).encode())
        for name, content in sorted(self.weights[0].items()):
            digest.update(name.encode() + content)
        return int.from_bytes(digest.digest()[:2], "big")

    def _stored(self, folder: Path) -> list[dict[str, bytes]]:
        tensors = {
            name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in read(folder).items()
        }
        return [dict(tensors) for _ in range(self.tp)]

    def _facts(self) -> EngineFacts:
        return EngineFacts(
            identity=f"memory-{id(self)}-{self._launches}+{self._releases}",
            version="1",
            tp=self.tp,
            pp=1,
            dp=1,
            device="cpu",
            model_path=str(self.checkpoint),
            architectures=tuple(json.loads((self.checkpoint / "config.json").read_text())["architectures"]),
            label=self._label,
            process=(os.getpid(), start_time(os.getpid()) or 0),
            undefined=self._releases > 0,
            unrecordable=self._reason[1] if self._reason[0] == str(self._launches) else "",
        )

    def _call(self, name: str, *, of_one_generation: bool = False) -> None:
        if self._observer is not None:
            self._observer(name, 0.0, failed=bool(self._dead))
        if self._dead:
            raise ServerUnreachable(name, self._dead)
        if of_one_generation and self._pinned not in {"", self._facts().identity}:
            raise AnotherGeneration(name)

    # -- identity

    def identify(self, deadline_s: float = CALL_S) -> EngineFacts:
        assert deadline_s > 0
        self._call("identify")
        facts = self._facts()
        if facts.identity != self.launch:
            self._dirty, self._dead, self.last_label = False, "", facts.label
        self.facts, self.launch = facts, facts.identity
        return facts

    def pin(self, identity: str) -> None:
        self._pinned = identity

    def workers(self) -> Mapping[int, int]:
        return {}

    def observe(self, observer: Observer) -> None:
        self._observer = observer

    def set_reachable_memory(self, identity: str, where: str) -> None:
        self.opens = where if identity == self.facts.identity else ""

    def mark_unrecordable(self, reason: str) -> None:
        self._reason = str(self._launches), reason
        self.facts = msgspec.structs.replace(self.facts, unrecordable=reason)

    def abandon(self, reason: str) -> None:
        self._dead = reason

    def close(self) -> None:
        self._observer = None

    def check_keys(self, deadline_s: float = CALL_S) -> None:
        """There are none."""

    def explain(self, error: ServerError) -> str:
        return f"no engine: {error}"

    # -- what fits it

    def transports(self) -> tuple[str, ...]:
        return "local", "distributed", "disk"

    def missing_transports(self) -> Mapping[str, Limitation]:
        return {kind: Limitation("this engine has no loader of ours", "choose another") for kind in ("direct", "sends")}

    def limitations(self) -> tuple[Limitation, ...]:
        return ()

    def refusals(self, checkpoint: Path) -> tuple[str, ...]:
        return () if (checkpoint / "config.json").exists() else (f"{checkpoint} is no checkpoint",)

    def check(self, manifest: Manifest, transport: str, checkpoint: Path) -> None:
        assert transport in self.transports()
        if set(manifest.tensors) != set(self.expected_tensors(checkpoint)):
            raise UnfitManifest("its tensors are not those of the checkpoint")

    def casts(self, manifest: Manifest, checkpoint: Path) -> Mapping[str, str]:
        assert checkpoint
        assert manifest
        return {}

    def note_held_dtypes(self, held: Mapping[str, frozenset[str]]) -> None:
        """It has no loader of ours, so nothing is recorded."""

    def expected_tensors(self, checkpoint: Path) -> tuple[TensorSpec, ...]:
        expected = checkpoint_spec.expected(checkpoint)
        return tuple(TensorSpec(name, expected.dtypes[name], shape) for name, shape in expected.shapes.items())

    def prerecording_objection(self, checkpoint: Path) -> str:
        assert checkpoint
        return "this engine has no loader of ours"

    # -- health

    def label(self, deadline_s: float = CALL_S) -> str:
        assert deadline_s > 0
        self._call("label")
        return self._label

    def alive(self, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        self._call("alive")

    def answers(self, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        self._call("answers")

    def generates(self, deadline_s: float = CALL_S) -> None:
        self._call("generates")
        with self._changed:
            if not self._changed.wait_for(lambda: not self.mode, deadline_s):
                raise ServerSilent("generates", "it is paused")

    def idle(self, deadline_s: float = CALL_S) -> bool:
        assert deadline_s > 0
        self._call("idle")
        return not self._running

    # -- pausing and labeling

    def look_ahead(self, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0

    def confirm(self, call: str, deadline_s: float = CALL_S) -> None:
        assert call, deadline_s
        self._call("confirm", of_one_generation=True)

    def confirm_paused(self, call: str, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        if not self.mode:
            raise PauseEnded(call)

    def confirm_label(self, call: str, deadline_s: float = CALL_S) -> None:
        self.confirm(call, deadline_s)

    def look(self, deadline_s: float) -> Sight:
        assert deadline_s > 0
        self._call("look")
        return Sight(self._facts().identity, self._label, not self.mode)

    def answering(self, deadline_s: float) -> set[str]:
        assert deadline_s > 0
        return {self._facts().identity}

    samples = 2

    def sample(self, without: Sequence[str], deadline_s: float) -> list[dict[str, str]]:
        return [
            {name: digest for name, digest in rank.items() if not any(part in name for part in without)}
            for rank in self.live_digests(deadline_s)
        ]

    def pause(self, mode: str, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        self._call("pause")
        with self._changed:
            self.mode = mode

    def resume(self, deadline_s: float = CALL_S) -> None:
        self._call("resume", of_one_generation=True)
        self.resume_memory(deadline_s)
        with self._changed:
            self.mode = ""
            self._changed.notify_all()

    def flush(self, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        self._call("flush")

    def set_label(self, label: str, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        self._call("set_label", of_one_generation=True)
        self._label = self.last_label = label

    # -- weights

    updating = False

    @property
    def dirty(self) -> bool:
        return self._dirty

    def clear_dirty(self) -> None:
        self._dirty = False

    def end_update(self, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0

    digest_algorithm = ""
    """No trainer predicts these digests: versions are proven by their buckets."""

    def live_digests(self, deadline_s: float = CALL_S) -> list[dict[str, str]]:
        assert deadline_s > 0
        self._call("live_digests")
        return [{name: hashlib.sha256(content).hexdigest() for name, content in rank.items()} for rank in self.weights]

    def load_shared(self, bucket: SharedBucket, deadline_s: float) -> None:
        self._load("load_shared")
        super().load_shared(bucket, deadline_s)

    def load_broadcast(self, group: str, tensors: object, deadline_s: float) -> None:
        self._load("load_broadcast")
        super().load_broadcast(group, tensors, deadline_s)  # type: ignore[arg-type]

    def load_checkpoint(self, path: str, deadline_s: float) -> None:
        assert deadline_s > 0
        self._load("load_checkpoint")
        if not Path(path, "config.json").exists():
            raise ServerRefused("load_checkpoint", 400, f"{path} is no checkpoint")
        self.weights = self._stored(Path(path))

    def _load(self, name: str) -> None:
        self._call(name, of_one_generation=True)
        assert not self._released, "the memory is released"
        self._dirty = True

    # -- memory

    @property
    def weights_released(self) -> bool:
        return self._released

    def prepare_release(self, deadline_s: float = CALL_S) -> EngineFacts:
        if self._released:
            raise NothingToGive("it is released already")
        self.pause("abort", deadline_s)
        self._releases += 1
        return self.identify(deadline_s)

    def release_memory(self, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        self._call("release_memory")
        self._released = True
        self.weights = [{name: bytes(len(content)) for name, content in rank.items()} for rank in self.weights]

    def resume_weights_memory(self, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        self._released = False

    def resume_memory(self, deadline_s: float = CALL_S) -> None:
        assert deadline_s > 0
        if self._released:
            raise ServerRefused("resume_memory", 400, "the weights are released")


def open_engine(connection: EngineConnection) -> MemoryEngine:
    """As a registered kind: the engine of that url."""
    return ENGINES[connection.url]
