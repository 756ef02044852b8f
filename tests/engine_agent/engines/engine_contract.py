"""What the sidecar relies on in an engine. One suite for all: in memory, the fake SGLang, and the real SGLang.

Another kind of engine gives a `Bench` and a subclass of `EngineContract` with the fixture `bench`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
import torch

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.shared_memory import TorchSharedBuffers
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.transports.interface import SharedBucket
from weightbus.engine_agent.engines.interface import Engine
from weightbus.engine_agent.errors import AnotherGeneration, NothingToGive, ServerError, UnfitManifest

from ...kit.fake_weights import read
from ...kit.waiting import until

CALL_S = 120.0


class Generated(NamedTuple):
    """What a client of the server got."""

    tokens: list[int]
    version: str
    """Label under which the last token was made."""


class Process(Protocol):
    """A server as its clients and its operator see it, without the sidecar."""

    def generate(self, count: int) -> Generated:
        """`count` greedy tokens of one prompt."""
        ...

    def restart(self) -> None:
        """Launch it again at once; a real server takes minutes, and skips the test."""
        ...


class Bench:
    """One server launched with `first`; `second` has the same shapes and other bits."""

    def __init__(self, engine: Engine, process: Process, first: Path, second: Path, runtime_dir: Path) -> None:
        self.engine, self.process, self.first, self.second = engine, process, first, second
        self.engine.identify(CALL_S)
        self.memory = TorchSharedBuffers(runtime_dir)

    def generate(self, count: int = 8) -> Generated:
        """As a client."""
        return self.process.generate(count)

    def manifest(self, folder: Path, bucket_bytes: int = 100_000) -> Manifest:
        """The layout of a checkpoint."""
        specs = [
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in read(folder).items()
        ]
        return Manifest.of("Qwen3ForCausalLM", specs, bucket_bytes)

    def load(self, folder: Path) -> None:
        """Every bucket of a checkpoint through shared memory, as the local transport does it."""
        weights, manifest = read(folder), self.manifest(folder)
        self.memory.reserve(manifest.largest_bucket, len(manifest.buckets), Deadline(30))
        for index, bucket in enumerate(manifest.buckets):
            tensors = manifest.tensors_of(index)
            packed = torch.cat([weights[tensor.name].contiguous().view(torch.uint8).flatten() for tensor in tensors])
            slot = index % self.memory.count
            self.memory.memory(slot)[: bucket.nbytes] = packed
            lent = self.memory.lend(slot, self.engine.tp)
            self.engine.load_shared(SharedBucket(index, bucket, tensors, lent), CALL_S)
        self.engine.end_update(CALL_S)

    def go_on(self) -> None:
        """After an update."""
        self.engine.flush(CALL_S)
        self.engine.resume(CALL_S)

    def close(self) -> None:
        """The server is left as it is."""
        self.memory.close()
        self.engine.close()


class EngineContract:
    """Subclasses give the fixture `bench`. Tests leave the server resumed, with either set of weights."""

    # -- identity and facts

    def test_facts_do_not_change_while_it_lives(self, bench: Bench) -> None:
        """The same process generation is recognized again, and its facts tell what validation needs."""
        facts = bench.engine.facts
        again = bench.engine.identify(CALL_S)
        assert (again.identity, bench.engine.launch) == (facts.identity, facts.identity)
        assert (facts.pp, facts.dp, facts.device) == (1, 1, "cpu")
        assert facts.tp == bench.engine.tp
        assert facts.architectures == ("Qwen3ForCausalLM",)
        assert Path(facts.model_path) in {bench.first, bench.second}
        assert not facts.undefined

    def test_another_launch_is_another_identity_and_gets_nothing_meant_for_the_first(self, bench: Bench) -> None:
        """A server that was launched anew while the sidecar looked away gets no label, no weights and no resume."""
        engine = bench.engine
        engine.pin(engine.identify(CALL_S).identity)
        first = engine.facts
        engine.set_label("7", CALL_S)
        bench.process.restart()
        try:
            for call in (
                lambda: engine.set_label("8", CALL_S),
                lambda: engine.resume(CALL_S),
                lambda: engine.load_checkpoint(str(bench.second), CALL_S),
            ):
                with pytest.raises(AnotherGeneration):
                    call()
            assert not engine.dirty
            assert engine.label(CALL_S) == "default"
            second = engine.identify(CALL_S)
            assert second.identity != first.identity
            assert second.generation != first.generation or not first.generation
            engine.pin(engine.facts.identity)
            engine.set_label("8", CALL_S)
            assert engine.label(CALL_S) == engine.last_label == "8"
        finally:
            engine.pin("")

    def test_every_call_is_told_to_the_observer(self, bench: Bench) -> None:
        """For the sidecar's metrics."""
        told: list[bool] = []
        bench.engine.observe(lambda _call, seconds, *, failed: told.append(seconds >= 0 and not failed))
        bench.engine.label(CALL_S)
        bench.engine.observe(lambda *_, **__: None)
        assert told == [True]

    # -- what fits it

    def test_a_manifest_is_checked_without_asking_the_server(self, bench: Bench) -> None:
        """The checkpoint's own tensors fit; one that is missing does not, and the refusal names the reason."""
        engine = bench.engine
        fit = bench.manifest(bench.first)
        assert set(engine.expected_tensors(bench.first)) == set(fit.tensors)
        assert not list(engine.refusals(bench.first))
        called: list[str] = []
        engine.observe(lambda call, *_, **__: called.append(call))
        engine.check(fit, "local", bench.first)
        with pytest.raises(UnfitManifest):
            engine.check(Manifest.of(fit.model, list(fit.tensors)[1:]), "local", bench.first)
        engine.observe(lambda *_, **__: None)
        assert not called

    def test_each_transport_serves_it_or_is_missing_for_a_reason(self, bench: Bench) -> None:
        """The coordinator plans with the first, and tells users the second."""
        able, missing = set(bench.engine.transports()), bench.engine.missing_transports()
        assert {"local", "disk"} <= able
        assert not able & set(missing)
        assert all(each.found and each.needed for each in missing.values())

    # -- weights

    def test_buckets_do_what_a_load_from_disk_does(self, bench: Bench) -> None:
        """Shared-memory buckets and a load from disk leave the same tokens, and the same digests where reported."""
        engine = bench.engine
        engine.pause("retract", CALL_S)
        engine.load_checkpoint(str(bench.second), CALL_S)
        by_disk = engine.live_digests(CALL_S) if engine.digest_algorithm else []
        bench.go_on()
        tokens = bench.generate().tokens
        engine.pause("retract", CALL_S)
        bench.load(bench.first)
        bench.go_on()
        assert bench.generate().tokens != tokens
        engine.pause("retract", CALL_S)
        bench.load(bench.second)
        assert (engine.live_digests(CALL_S) if engine.digest_algorithm else []) == by_disk
        bench.go_on()
        assert bench.generate().tokens == tokens

    def test_it_is_dirty_from_the_first_bucket_on(self, bench: Bench) -> None:
        """Also where the load fails: the caller cannot know how far it came."""
        engine = bench.engine
        engine.clear_dirty()
        assert not engine.dirty
        bench.load(bench.first)
        assert engine.dirty
        assert not engine.updating
        engine.clear_dirty()
        with pytest.raises(TransferFailed):
            engine.load_checkpoint("/nowhere/at/all", CALL_S)
        assert engine.dirty
        engine.clear_dirty()

    def test_a_missing_checkpoint_is_refused_and_changes_nothing(self, bench: Bench) -> None:
        """The folder is not there: the weights are those from before."""
        bench.load(bench.first)
        before = bench.generate().tokens
        with pytest.raises(TransferFailed):
            bench.engine.load_checkpoint("/nowhere/at/all", CALL_S)
        assert bench.generate().tokens == before

    def test_leaving_a_group_that_was_never_joined(self, bench: Bench) -> None:
        """No error: a sidecar cleans up without knowing what the one before it did."""
        bench.engine.leave_group("never-joined", CALL_S)

    # -- pausing and labeling

    def test_a_paused_server_answers_after_it_was_resumed(self, bench: Bench) -> None:
        """Requests wait while it is paused, and none is lost."""
        bench.engine.pause("retract", CALL_S)
        answers: list[Generated] = []
        request = threading.Thread(target=lambda: answers.append(bench.generate()), daemon=True)
        request.start()
        request.join(0.5)
        assert not answers
        bench.go_on()
        request.join(CALL_S)
        assert len(answers[0].tokens) == 8

    def test_it_tells_whether_it_has_requests(self, bench: Bench) -> None:
        """While it generates; and soon after it has ended, that it has none."""
        until(lambda: bench.engine.idle(CALL_S), "it to be idle")
        seen = False
        for _ in range(10):
            asked = threading.Thread(target=bench.generate, args=(200,))
            asked.start()
            while asked.is_alive() and not seen:
                seen = not bench.engine.idle(CALL_S)
            asked.join(CALL_S)
            if seen:
                break
        assert seen
        until(lambda: bench.engine.idle(CALL_S), "it to be idle again")

    def test_the_label_is_set_apart_from_the_weights(self, bench: Bench) -> None:
        """Updates do not move the label; setting it does, and every token tells it."""
        before = bench.engine.label(CALL_S)
        bench.load(bench.first)
        assert bench.engine.label(CALL_S) == before
        bench.engine.set_label("41", CALL_S)
        assert bench.engine.label(CALL_S) == bench.engine.last_label == "41"
        assert bench.generate().version == "41"

    def test_resuming_what_is_not_paused(self, bench: Bench) -> None:
        """Harmless, so that a settled engine can always be told to go on; pausing twice is too.

        Whether a server generates can be seen without knowing anything of it.
        """
        engine = bench.engine
        engine.resume(CALL_S)
        engine.pause("retract", CALL_S)
        engine.pause("retract", CALL_S)
        engine.answers(CALL_S)
        with pytest.raises(ServerError):
            engine.generates(0.5)
        engine.resume(CALL_S)
        engine.generates(CALL_S)
        engine.alive(CALL_S)
        assert len(bench.generate().tokens) == 8

    # -- memory

    def test_released_weights_come_back_as_another_identity(self, bench: Bench) -> None:
        """Nothing generates before the weights were resumed, and facts of before do not hold of what came back."""
        engine = bench.engine
        before = engine.facts.identity
        try:
            after = engine.prepare_release(CALL_S)
        except NothingToGive:
            assert engine.facts.identity == before
            assert not engine.weights_released
            pytest.skip("this server was launched to keep its memory")
        assert (after.identity == before, after.undefined) == (False, True)
        engine.release_memory(CALL_S)
        assert engine.weights_released
        with pytest.raises(NothingToGive):
            engine.prepare_release(CALL_S)
        with pytest.raises(ServerError):
            engine.resume(CALL_S)
        engine.resume_weights_memory(CALL_S)
        bench.load(bench.first)
        bench.go_on()
        assert not engine.weights_released
        assert len(bench.generate().tokens) == 8
        bench.process.restart()
        assert not engine.identify(CALL_S).undefined
