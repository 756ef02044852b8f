"""Predicted digests of an engine's live parameters: against plain hashing, and against a real server."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from weightbus.control.protocol.messages import EngineInfo
from weightbus.dataplane.digest import sglang_checksum as fmix
from weightbus.dataplane.digest.expected_sglang_digests import (
    SHA256,
    SglangDigester,
    SglangDigestPlan,
    merge_live_digests,
)
from weightbus.dataplane.tensors.manifest import LiveDigests, Manifest, TensorSpec, cut
from weightbus.trainer_agent.publish.bucket_staging import engine_kinds

from ...kit.fake_bus import engine
from ...kit.fake_source import pack, tiny_qwen3
from ...kit.ports import free_port
from ...kit.tiny_model import write


def manifest_of(weights: dict[str, torch.Tensor], bucket_bytes: int, model: str = "Qwen3ForCausalLM") -> Manifest:
    specs = [
        TensorSpec(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in weights.items()
    ]
    return Manifest.of(model, specs, bucket_bytes)


def predict(
    manifest: Manifest,
    weights: dict[str, torch.Tensor],
    sizes: tuple[int, ...],
    command: list[int] | None = None,
    algorithm: str = SHA256,
) -> tuple[LiveDigests, ...]:
    live = SglangDigester(SglangDigestPlan(manifest, [(algorithm, size) for size in sizes], head_dim=16))
    for index in command or range(len(manifest.buckets)):
        live.feed(index, pack(manifest, index, weights))
    return live.result()


def sha(*parts: torch.Tensor) -> str:
    """SGLang's own arithmetic, on whole tensors."""
    data = b"".join(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    return hashlib.sha256(data).hexdigest()[:16]


def mixed(*parts: torch.Tensor) -> str:
    """What a GPU server reports, on whole tensors; test_sglang_checksum.py holds this against the definition."""
    data = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts]).numpy()
    lanes = fmix.ChecksumLanes([data.nbytes])
    found = lanes.zeros()
    fmix.accumulate(data, fmix.segments(0, data.nbytes, data.nbytes, 1, word=0, tile=0), found)
    return lanes.finish(found)[0]


@pytest.mark.parametrize(("algorithm", "sha"), [(SHA256, sha), (fmix.ALGORITHM, mixed)])
def test_fused_and_cut_parameters_are_hashed_as_the_engine_holds_them(algorithm: str, sha: Callable[..., str]) -> None:
    """Two ranks: fused rows, cut columns, a padded vocabulary, whole norms. By both algorithms."""
    weights = tiny_qwen3()
    (found,) = predict(manifest_of(weights, 2**20), weights, (2,), algorithm=algorithm)
    assert found.algorithm == algorithm
    at = "model.layers.1."
    parts = [weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]
    expected = tuple(sha(*(part.chunk(2)[rank] for part in parts)) for rank in range(2))
    assert found.parameters[f"{at}self_attn.qkv_proj.weight"] == expected
    down = weights[at + "mlp.down_proj.weight"]
    assert found.parameters[at + "mlp.down_proj.weight"] == tuple(sha(part) for part in down.chunk(2, dim=1))
    padded = torch.cat([weights["lm_head.weight"], torch.zeros(28, 16, dtype=torch.bfloat16)])
    assert found.parameters["lm_head.weight"] == tuple(sha(part) for part in padded.chunk(2))
    assert found.parameters["model.norm.weight"] == (sha(weights["model.norm.weight"]),) * 2


@pytest.mark.parametrize("algorithm", [SHA256, fmix.ALGORITHM])
@pytest.mark.parametrize("bucket_bytes", [1024, 5000, 2**20])
def test_buckets_may_come_in_any_order_and_any_cut(bucket_bytes: int, algorithm: str) -> None:
    """Parts of one parameter in several buckets, the last one first: the same digests."""
    weights = tiny_qwen3()
    reference = predict(manifest_of(weights, 2**20), weights, (1, 2), algorithm=algorithm)
    names = list(weights)
    random.Random(bucket_bytes).shuffle(names)
    shuffled = {name: weights[name] for name in names}
    manifest = manifest_of(shuffled, bucket_bytes)
    command = list(reversed(range(len(manifest.buckets))))
    assert predict(manifest, shuffled, (1, 2), command, algorithm) == reference


def test_a_bucket_that_was_not_fed_is_an_error() -> None:
    """No digest is made of half a parameter."""
    weights = tiny_qwen3()
    manifest = manifest_of(weights, 2048)
    live = SglangDigester(SglangDigestPlan(manifest, [(SHA256, 1), (fmix.ALGORITHM, 1)]))
    live.feed(0, pack(manifest, 0, weights))
    with pytest.raises(ValueError, match="feed all buckets"):
        live.result()


@pytest.mark.parametrize("algorithm", [SHA256, fmix.ALGORITHM])
@pytest.mark.parametrize("bucket_bytes", [1024, 2**20])
def test_stages_that_feed_their_own_buckets_predict_the_whole_together(bucket_bytes: int, algorithm: str) -> None:
    """Each says something of what it holds, and of nothing else; joined it is what one rank would have found."""
    weights = tiny_qwen3(layers=4)
    reference = predict(manifest_of(weights, bucket_bytes), weights, (1, 2), algorithm=algorithm)
    owners = [int(name.split(".")[2]) // 2 if ".layers." in name else int("embed" not in name) for name in weights]
    manifest, sources = cut("Qwen3ForCausalLM", manifest_of(weights, 2**30).tensors, owners, bucket_bytes)
    plan = SglangDigestPlan(manifest, [(algorithm, size) for size in (1, 2)], head_dim=16)
    found = []
    for source in range(sources.count):
        live = SglangDigester(plan)
        for index in sources.own(source):
            live.feed(index, pack(manifest, index, weights))
        found.append(live.result(partial=True))
    names = [{name for each in part for name in each.parameters} for part in found]
    assert not names[0] & names[1]
    assert SglangDigester(plan).result(partial=True)[0].parameters == {}, "of a rank that is no source"
    assert merge_live_digests(found) == reference


def test_a_parameter_that_two_stages_hold_in_part_is_an_error() -> None:
    """Its digest could be made by neither."""
    weights = tiny_qwen3()
    manifest = manifest_of(weights, 1)
    live = SglangDigester(SglangDigestPlan(manifest, [(SHA256, 1)]))
    index = next(at for at, each in enumerate(manifest.tensors) if each.name.endswith("0.self_attn.q_proj.weight"))
    live.feed(index, pack(manifest, index, weights))
    with pytest.raises(ValueError, match=r"qkv_proj\.weight lacks a part"):
        live.result(partial=True)


def test_a_size_without_a_layout_is_left_out() -> None:
    """Key heads that do not divide among the ranks: no prediction, no error."""
    weights = tiny_qwen3()
    assert [each.tp for each in predict(manifest_of(weights, 2**20), weights, (1, 4))] == [1]


def test_only_engines_that_report_comparable_digests_are_predicted_for() -> None:
    """Another algorithm, several pipeline stages or replicas: their owners verify in another way."""

    def changed(**fields: int) -> EngineInfo:
        plain = engine(2, SHA256)
        return EngineInfo(**{name: fields.get(name, getattr(plain, name)) for name in plain.__struct_fields__})

    engines = {"a": engine(4, SHA256), "b": engine(1, "sglang-gpu"), "c": changed(pp=2), "d": changed(dp=2)}
    assert engine_kinds(engines) == {(SHA256, 4)}


# -- a real server -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, written with the server's own Python path: plain torchvision does not load without a GPU."""
    return write(tmp_path_factory.mktemp("model"), 3, architecture="llama", heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def checksums(checkpoint: Path) -> Iterator[list[dict[str, str]]]:
    """By rank: what a real two-rank server reports of its parameters."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "weightbus.engine_agent.engines.sglang.cpu_server",
        "--model-path",
        str(checkpoint),
    ]
    log = checkpoint / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--tp-size", "2", "--mem-fraction-static", "0.5"],
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            base = f"http://127.0.0.1:{port}"
            _wait_until_up(base, server, log)
            request = urllib.request.Request(
                f"{base}/weights_checker", b'{"action": "checksum"}', {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                ranks = json.load(answer)["ranks"]
            by_rank = {each["parallelism_info"][0]["tp_rank"]: each["checksums"] for each in ranks}
            yield [by_rank[rank] for rank in sorted(by_rank)]
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_until_up(base: str, server: subprocess.Popen[bytes], log: Path, deadline_s: float = 360.0) -> None:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{base}/health_generate", timeout=30):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise TimeoutError(f"the server did not come up:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.mark.real
@pytest.mark.timeout(480)
def test_a_real_server_reports_what_was_predicted(checkpoint: Path, checksums: list[dict[str, str]]) -> None:
    """Every parameter of both ranks, and no parameter without a prediction."""
    from safetensors.torch import load_file

    weights = load_file(checkpoint / "model.safetensors")
    (found,) = predict(manifest_of(weights, 20_000, "LlamaForCausalLM"), weights, (2,))
    assert [{name: digests[rank] for name, digests in found.parameters.items()} for rank in range(2)] == checksums
