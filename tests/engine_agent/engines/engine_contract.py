"""What the agent relies on in a server. One suite, run on the fake (fast, every dialect) and on the real SGLang."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory.torch_shared_memory import TorchSharedBuffers
from weightbus.dataplane.processes.deadline import Deadline
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.transports.interface import SharedBucket
from weightbus.engine_agent.engines.sglang.http_client import HttpClient
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.errors import ServerError, ServerRefused

from ...kit.fake_weights import FakeWeights, read
from ...kit.waiting import until

PROMPT = [5, 6, 7]
CALL_S = 120.0


class Bench:
    """One server launched with `first`; `second` has the same shapes and other bits."""

    def __init__(self, url: str, first: Path, second: Path, runtime_dir: Path) -> None:
        self.url, self.first, self.second = url, first, second
        self.server = SGLangServer(url)
        self.server.identify(CALL_S)
        self.memory = TorchSharedBuffers(runtime_dir)

    def generate(self, tokens: int = 8) -> dict[str, Any]:
        """Greedy tokens with their account of versions."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=CALL_S, trust_env=False)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def manifest(self, weights: dict[str, torch.Tensor], bucket_bytes: int = 100_000) -> Manifest:
        """The layout of `weights`."""
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in weights.items()}
        specs = [TensorSpec(name, dtypes[name], tuple(tensor.shape)) for name, tensor in weights.items()]
        return Manifest.of("Qwen3ForCausalLM", specs, bucket_bytes)

    def load(self, folder: Path) -> None:
        """Every bucket of a checkpoint through shared memory, as the local transport does it."""
        weights = read(folder)
        manifest = self.manifest(weights)
        self.memory.reserve(manifest.largest_bucket, len(manifest.buckets), Deadline(30))
        for index, bucket in enumerate(manifest.buckets):
            tensors = manifest.tensors_of(index)
            packed = torch.cat([weights[tensor.name].contiguous().view(torch.uint8).flatten() for tensor in tensors])
            slot = index % self.memory.slots
            self.memory.memory(slot)[: bucket.nbytes] = packed
            lent = self.memory.lend(slot, self.server.tp)
            self.server.load_shared(SharedBucket(index, bucket, tensors, lent), CALL_S)
        self.server.end_update(CALL_S)

    def close(self) -> None:
        self.memory.close()
        self.server.close()


class ServerContract:
    """Subclasses give the fixture `bench`. Tests leave the server resumed and closed, with either set of weights."""

    def test_facts_do_not_change_while_it_lives(self, bench: Bench) -> None:
        """The same launch is recognized again, and it says what validation needs."""
        facts = bench.server.facts
        again = bench.server.identify(CALL_S)
        assert again.identity == facts.identity
        assert (facts.pp, facts.dp, facts.device) == (1, 1, "cpu")
        assert facts.architectures == ("Qwen3ForCausalLM",)
        assert not facts.speculative
        assert not facts.quantization

    def test_buckets_do_what_a_load_from_disk_does(self, bench: Bench) -> None:
        """Shared-memory buckets and update_weights_from_disk leave the same tokens and the same live digests."""
        server = bench.server
        server.pause("retract", CALL_S)
        server.load_checkpoint(str(bench.second), CALL_S)
        by_disk = server.live_digests(CALL_S) if server.dialect.cpu_checksums else []
        server.flush(CALL_S)
        server.resume(CALL_S)
        tokens = bench.generate()["output_ids"]
        server.pause("retract", CALL_S)
        bench.load(bench.first)
        server.flush(CALL_S)
        server.resume(CALL_S)
        assert bench.generate()["output_ids"] != tokens
        server.pause("retract", CALL_S)
        bench.load(bench.second)
        if server.dialect.cpu_checksums:
            assert server.live_digests(CALL_S) == by_disk
        server.flush(CALL_S)
        server.resume(CALL_S)
        assert bench.generate()["output_ids"] == tokens

    def test_live_digests_are_those_of_the_files(self, bench: Bench) -> None:
        """What weights_checker reports can be computed from the checkpoint, for every rank."""
        if not bench.server.dialect.cpu_checksums:
            pytest.skip("this dialect cannot report them without a GPU")
        bench.server.load_checkpoint(str(bench.first), CALL_S)
        weights = FakeWeights(bench.first, bench.server.tp)
        expected = [weights.checksums(rank) for rank in range(bench.server.tp)]
        assert bench.server.live_digests(CALL_S) == expected

    def test_a_paused_server_answers_after_it_was_resumed(self, bench: Bench) -> None:
        """Requests wait while it is paused, and none is lost."""
        bench.server.pause("retract", CALL_S)
        answers: list[dict[str, Any]] = []
        request = threading.Thread(target=lambda: answers.append(bench.generate()), daemon=True)
        request.start()
        request.join(0.5)
        assert not answers
        bench.server.flush(CALL_S)
        bench.server.resume(CALL_S)
        request.join(CALL_S)
        assert len(answers[0]["output_ids"]) == 8

    def test_it_says_whether_it_has_requests(self, bench: Bench) -> None:
        """While it generates; and soon after it has ended, that it has none."""
        until(lambda: bench.server.idle(CALL_S), "it to be idle")
        seen = False
        for _ in range(10):
            asked = threading.Thread(target=bench.generate, args=(200,))
            asked.start()
            while asked.is_alive() and not seen:
                seen = not bench.server.idle(CALL_S)
            asked.join(CALL_S)
            if seen:
                break
        assert seen
        until(lambda: bench.server.idle(CALL_S), "it to be idle again")

    def test_the_label_is_set_apart_from_the_weights(self, bench: Bench) -> None:
        """Updates do not move the label; setting it does, and every token says so."""
        before = bench.server.label(CALL_S)
        bench.load(bench.first)
        assert bench.server.label(CALL_S) == before
        bench.server.set_label("41", CALL_S)
        assert bench.server.label(CALL_S) == "41"
        meta = bench.generate()["meta_info"]
        assert meta["weight_version"] == "41"
        if bench.server.dialect.spans:
            assert meta["weight_versions"] == [{"version": "41", "start": 0, "end": 8}]

    def test_what_the_dialect_lacks_is_not_there(self, bench: Bench) -> None:
        """What the table denies is refused or absent, and asking for it harms nothing."""
        server = bench.server
        if not server.dialect.cpu_checksums:
            with pytest.raises(ServerError):
                server.live_digests(CALL_S)
        if not server.dialect.sessions:
            with pytest.raises(ServerRefused) as refused:
                server._wire.admin("/begin_weight_update", {}, CALL_S)
            assert refused.value.status == 404
        assert ("weight_versions" in bench.generate()["meta_info"]) is server.dialect.spans

    def test_a_session_left_open_is_closed_first(self, bench: Bench) -> None:
        """An agent that died between begin and end does not lock its successor out."""
        if not bench.server.dialect.sessions:
            pytest.skip("this dialect has no sessions")
        wire = HttpClient(bench.url, bench.server._wire._keys)
        wire.admin("/begin_weight_update", {}, CALL_S)
        wire.close()
        bench.load(bench.first)
        with pytest.raises(ServerRefused):
            bench.server._wire.admin("/end_weight_update", {}, CALL_S)

    def test_refusals_do_not_repeat_the_payload(self, bench: Bench) -> None:
        """The server puts the whole request into its validation errors; ours stay short."""
        body = {"serialized_named_tensors": {"x": "A" * 100_000}, "load_format": 7}
        with pytest.raises(ServerError) as caught:
            bench.server._wire.admin("/update_weights_from_disk", body, CALL_S)
        assert len(str(caught.value)) < 600
        assert "AAAAAAAA" not in str(caught.value)

    def test_a_missing_checkpoint_is_refused_and_changes_nothing(self, bench: Bench) -> None:
        """update_weights_from_disk of a folder that is not there."""
        bench.load(bench.first)
        before = bench.generate()["output_ids"]
        with pytest.raises(TransferFailed):
            bench.server.load_checkpoint("/nowhere/at/all", CALL_S)
        assert bench.generate()["output_ids"] == before

    def test_leaving_a_group_that_was_never_joined(self, bench: Bench) -> None:
        """No error: an agent cleans up without knowing what the one before it did."""
        bench.server.leave_group("never-joined", CALL_S)

    def test_resuming_what_is_not_paused(self, bench: Bench) -> None:
        """Harmless, so that a settled engine can always be told to go on; pausing twice is too.

        Whether a server generates can be seen without knowing anything of it.
        """
        bench.server.resume(CALL_S)
        bench.server.pause("retract", CALL_S)
        bench.server.pause("retract", CALL_S)
        with pytest.raises(ServerError, match="health_generate"):
            bench.server.generates(0.5)
        bench.server.resume(CALL_S)
        bench.server.generates(CALL_S)
        assert len(bench.generate()["output_ids"]) == 8
