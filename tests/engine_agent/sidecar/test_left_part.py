"""What versions leave at a server is the launch checkpoint's: brought back where it may have changed, and proven."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightbus.control.protocol import HeldVersion
from weightbus.control.protocol.messages import Channel, Digest, Epoch, Policy, Prepare, TransportKind, Version
from weightbus.control.server.metrics import Metrics, MetricSource
from weightbus.dataplane.tensors import Copy, Left, LiveDigests, Manifest, StoredTensor, TensorSpec
from weightbus.engine_agent.engines import checkpoint_spec
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.errors import UnfitManifest, WrongWeights
from weightbus.engine_agent.machine import INCOMPLETE, OperationDone, OperationFailed, Validate
from weightbus.engine_agent.sidecar.left_part import UNPROVEN, LeftPart
from weightbus.engine_agent.sidecar.operation_executor import OperationExecutor

from ...kit import tiny_model
from ...kit.fake_sglang import FakeSGLang

LEFT = "model.layers.0."
SHA256 = "sglang-sha256-8"
HELD = HeldVersion(version=1, manifest="m", table="t")


class Server(SimpleNamespace):
    """What is asked of a server here. It holds `found`, and counts its calls."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        facts = SimpleNamespace(identity="a", undefined=False, model_path=str(folder))
        plain = {"facts": facts, "tp": 1, "digest_algorithm": SHA256, "drafts": False, "found": {}}
        super().__init__(**plain | changes)
        self.loaded: list[str] = []
        self.asked = 0

    def load_checkpoint(self, path: str, deadline_s: float) -> None:
        """Noted."""
        assert deadline_s > 0
        self.loaded.append(path)

    def live_digests(self, deadline_s: float) -> list[dict[str, str]]:
        """What it holds."""
        assert deadline_s > 0
        self.asked += 1
        return [self.found]

    def casts(self, _manifest: Manifest, _checkpoint: Path) -> dict[str, str]:
        """None."""
        return {}

    def expected_tensors(self, checkpoint: Path) -> tuple[TensorSpec, ...]:
        """Those of the files, in their dtypes."""
        found = checkpoint_spec.expected(checkpoint)
        return tuple(TensorSpec(name, found.dtypes[name], shape) for name, shape in found.shapes.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launch checkpoint."""
    return tiny_model.write(tmp_path_factory.mktemp("launch") / "m", 1)


def layout(folder: Path, *left: str) -> Manifest:
    """Of the tensors of `folder` but for `left`."""
    tensors = [
        TensorSpec(name, "bfloat16", tuple(each.shape))
        for name, each in load_file(folder / "model.safetensors").items()
        if not name.startswith(left or ("none",))
    ]
    return Manifest.of("Qwen3ForCausalLM", tensors, left=map(Left, left))


def fused(folder: Path) -> dict[str, str]:
    """Digests of SGLang's parameters of the layer that is left, by plain hashing of the files' tensors."""
    stored = load_file(folder / "model.safetensors")
    parts: dict[str, list[torch.Tensor]] = {}
    for name in stored:
        if name.startswith(LEFT):
            merged = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name))
            parts.setdefault(merged, []).append(stored[name])
    order = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for merged in parts:
        for fused_name, members in order.items():
            if f".{fused_name}." in merged:
                parts[merged] = [stored[merged.replace(fused_name, member)] for member in members]
    return {
        name: hashlib.sha256(b"".join(each.view(torch.uint8).numpy().tobytes() for each in tensors)).hexdigest()[:16]
        for name, tensors in parts.items()
    }


def test_a_server_as_it_was_launched_keeps_what_is_left(folder: Path) -> None:
    """And through all versions that leave the same, or less (N64)."""
    server, two = Server(folder), layout(folder, LEFT, "model.norm.weight")
    part = LeftPart(cast("Any", server))
    part.begin(two, "m", "default", 1.0)
    part.begin(two, "m", f"{INCOMPLETE}default", 1.0)
    part.begin(layout(folder, LEFT), "m", "1", 1.0)
    assert server.loaded == []
    part.begin(two, "m", "2", 1.0)
    assert server.loaded == ["m"], "the version before sent model.norm.weight"


@pytest.mark.parametrize(
    "case", ["sent before", "another sidecar's", "half sent", "released", "another launch's", "another party's"]
)
def test_what_may_have_changed_is_loaded_again_from_the_launch_checkpoint(folder: Path, case: str) -> None:
    """Before the first byte of a version that leaves it, once (N64)."""
    server, left = Server(folder), layout(folder, LEFT)
    part = LeftPart(cast("Any", server))
    label = "default"
    if case == "sent before":
        part.begin(layout(folder), "m", "default", 1.0)
        label = "1"
    elif case == "another sidecar's":
        label = "1"
    elif case == "half sent":
        label = f"{INCOMPLETE}default"
    elif case == "released":
        part.begin(left, "m", "default", 1.0)
        part.note_proven(left)
        server.facts = SimpleNamespace(identity="a+1", undefined=True)
    elif case == "another party's":
        part.begin(left, "m", "default", 1.0)
        part.note_proven(left)
        part.doubt()
        label = INCOMPLETE
    else:
        part.begin(left, "m", "default", 1.0)
        server.facts, label = SimpleNamespace(identity="b", undefined=False), "4"
    assert server.loaded == []
    part.begin(left, "m", label, 1.0)
    assert server.loaded == ["m"]
    assert not part.proven(left), "it is proven again"
    part.note_proven(left)
    part.begin(left, "m", "5", 1.0)
    assert server.loaded == ["m"]
    assert part.proven(left), "and stays so"


def test_a_version_that_leaves_nothing_loads_nothing_again(folder: Path) -> None:
    """As before there was anything to leave."""
    server = Server(folder)
    LeftPart(cast("Any", server)).begin(layout(folder), "m", "7", 1.0)
    assert server.loaded == []


def test_a_speculating_server_is_not_brought_back(folder: Path) -> None:
    """Its drafts would not be: the reason says what to do (N64)."""
    part = LeftPart(cast("Any", Server(folder, drafts=True)))
    part.begin(layout(folder, LEFT), "m", "default", 1.0)
    part.require(layout(folder, LEFT), "1")
    part.begin(layout(folder), "m", "1", 1.0)
    part.require(layout(folder), "2")
    for refused in (lambda: part.require(layout(folder, LEFT), "2"),
                    lambda: part.begin(layout(folder, LEFT), "m", "2", 1.0)):  # fmt: skip
        with pytest.raises(UnfitManifest, match=r"leaves model\.layers\.0\. .*launch the server anew, .*or have"):
            refused()
    assert part._server.loaded == []  # type: ignore[attr-defined]


def test_what_is_left_is_predicted_from_the_files(folder: Path) -> None:
    """As plain hashing of fused parameters gives it; what fuses with a tensor that is sent has no prediction."""
    part = LeftPart(cast("Any", Server(folder)))
    found = part.predicted(layout(folder, LEFT), folder)
    assert found == {name: (digest,) for name, digest in fused(folder).items()}
    assert part.predicted(layout(folder, f"{LEFT}self_attn.q_proj."), folder) is None
    assert LeftPart(cast("Any", Server(folder, digest_algorithm=""))).predicted(layout(folder, LEFT), folder) is None


def test_files_are_not_read_for_what_no_digest_tells(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction layer has gigabytes, and requests wait while a model without a known layout is asked for."""

    def read(*_: Any) -> bytes:
        raise AssertionError

    monkeypatch.setattr(StoredTensor, "read", read)
    plain = layout(folder, LEFT)
    other = Manifest.of("Glm4MoeForCausalLM", plain.tensors, left=plain.left)

    assert LeftPart(cast("Any", Server(folder))).predicted(other, folder) is None
    with pytest.raises(AssertionError):
        LeftPart(cast("Any", Server(folder))).predicted(plain, folder)


def executor(folder: Path, server: Server) -> OperationExecutor:
    """That of `server`."""
    return OperationExecutor(
        "e0", cast("Any", server), cast("Any", None), folder, Metrics(MetricSource.ENGINE)
    )  # fmt: skip


def test_what_is_left_is_proven_once_for_each_launch(folder: Path) -> None:
    """Where the workers proved what was sent: one question to the server, and none in the rounds after it (N64)."""
    server, left = Server(folder, found=fused(folder)), layout(folder, LEFT)
    made = executor(folder, server)
    for _ in range(3):
        assert made._with_left(left, "live-digest") == "live-digest"
    assert server.asked == 1
    assert made._with_left(layout(folder), "live-digest") == "live-digest"


def test_another_left_part_is_noticed_and_brought_back(folder: Path) -> None:
    """The version is not verified; before the next one the launch checkpoint is loaded (N64)."""
    server, left = Server(folder, found=fused(folder)), layout(folder, LEFT)
    made = executor(folder, server)
    made.left.begin(left, "m", "default", 1.0)
    server.found = server.found | {f"{LEFT}mlp.down_proj.weight": "0" * 16}
    with pytest.raises(WrongWeights, match=r"layers\.0\.mlp\.down_proj\.weight"):
        made._with_left(left, "live-digest")
    made.left.begin(left, "m", f"{INCOMPLETE}default", 1.0)
    assert server.loaded == ["m"]


def test_what_no_digest_tells_is_said(folder: Path) -> None:
    """`verified_by` names the reach of the check (G5, N64)."""
    made = executor(folder, Server(folder, digest_algorithm=""))
    assert made._with_left(layout(folder, LEFT), "bucket-digest") == f"bucket-digest; {UNPROVEN}"


@pytest.mark.parametrize("wrong", ["", "sent", "left", "more"])
def test_sent_and_left_are_compared_together(folder: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one answer of the server: the trainer's digests of what is sent, the files' of the rest, and nothing else."""
    left = layout(folder, LEFT)
    found = fused(folder) | {"model.norm.weight": "1"}
    server = Server(folder, found=found)
    made = executor(folder, server)
    table = SimpleNamespace(live=[LiveDigests(SHA256, 1, {"model.norm.weight": ("1",)})])
    monkeypatch.setattr(made, "_read", lambda *_: (left, table))
    if wrong:
        name = {"sent": "model.norm.weight", "left": f"{LEFT}input_layernorm.weight", "more": "x"}[wrong]
        server.found = found | {name: "2"}
        with pytest.raises(WrongWeights, match=name):
            made._compared(HELD)
        assert not made.left.proven(left)
    else:
        assert made._compared(HELD) == (True, frozenset())
        assert made.left.proven(left)
    assert server.asked == 1


@pytest.mark.parametrize("wrong", ["", "another value", "another shape", "another tensor"])
def test_a_folder_with_another_left_part_is_not_verified(folder: Path, tmp_path: Path, wrong: str) -> None:
    """A trainer's copy of the served checkpoint may be another one than the engine's (N64)."""
    stored = load_file(folder / "model.safetensors")
    name = f"{LEFT}input_layernorm.weight"
    there = {"model.norm.weight": stored["model.norm.weight"] + 1, name: stored[name]}
    there |= {"another value": {name: stored[name] + 1}, "another shape": {name: stored[name][:8].clone()},
              "another tensor": {f"{LEFT}x": stored[name] * 1}, "": {}}[wrong]  # fmt: skip
    save_file(there, tmp_path / "model.safetensors")
    part, left = LeftPart(cast("Any", Server(folder))), layout(folder, LEFT)
    part.begin(left, "m", "default", 1.0)
    if not wrong:
        part.check_files(left, tmp_path, folder)
        return
    with pytest.raises(WrongWeights, match=r"layers\.0\.(input_layernorm|x)"):
        part.check_files(left, tmp_path, folder)
    part.begin(left, "m", "1", 1.0)
    assert part._server.loaded == ["m"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("follows", [True, False])
def test_a_copy_in_a_folder_has_the_value_of_what_was_sent(folder: Path, tmp_path: Path, *, follows: bool) -> None:
    """Whatever the launch checkpoint has under its name (N64)."""
    stored = load_file(folder / "model.safetensors")
    of, name = "model.norm.weight", f"{LEFT}input_layernorm.weight"
    sent = stored[of] + 1
    save_file({of: sent, name: sent.clone() if follows else stored[name]}, tmp_path / "model.safetensors")
    part, plain = LeftPart(cast("Any", Server(folder))), layout(folder, LEFT)
    left = Manifest.of(plain.model, plain.tensors, left=plain.left, copies=[Copy(name, of)])
    if follows:
        part.check_files(left, tmp_path, folder)
        return
    with pytest.raises(WrongWeights, match=r"a copy, is not .* what 'model\.norm\.weight' is"):
        part.check_files(left, tmp_path, folder)


@pytest.mark.parametrize("loaded", [True, False])
def test_after_memory_was_given_back_the_left_part_is_loaded_and_proven_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, loaded: bool
) -> None:
    """By SGLang's interface: memory comes back with any content, and the digests tell if that stayed (N64)."""
    fake = FakeSGLang(folder).start()
    server = SGLangServer(fake.url)
    try:
        made = OperationExecutor("e0", server, cast("Any", None), folder, Metrics(MetricSource.ENGINE))
        left = layout(folder, LEFT)
        first = server.identify()
        server.pin(first.identity)
        made.left.begin(left, str(folder), first.label, 5.0)
        assert made._with_left(left, "live-digest") == "live-digest"
        checked = fake.calls.count("/weights_checker")
        assert made._with_left(left, "live-digest") == "live-digest"
        assert fake.calls.count("/weights_checker") == checked, "once for each launch"
        server.pin(server.prepare_release().identity)
        server.release_memory()
        assert server.facts.identity != first.identity
        server.resume_weights_memory()
        if not loaded:
            monkeypatch.setattr(server, "load_checkpoint", lambda *_: None)
        made.left.begin(left, str(folder), first.label, 5.0)
        if loaded:
            assert made._with_left(left, "live-digest") == "live-digest"
            assert fake.calls.count("/update_weights_from_disk") == 1
            assert fake.calls.count("/weights_checker") == checked + 1
            return
        with pytest.raises(WrongWeights, match=r"model\.layers\.0\."):
            made._with_left(left, "live-digest")
    finally:
        server.close()
        fake.stop()


def test_what_a_server_keeps_no_memory_of_needs_no_proof(folder: Path) -> None:
    """A prediction layer without speculation, as the loader was recorded: nothing is asked, of any family (N64)."""
    server, left = Server(folder, digest_algorithm=""), layout(folder, LEFT)
    names = frozenset(load_file(folder / "model.safetensors"))
    made = executor(folder, server)
    assert made._with_left(left, "bucket-digest") == f"bucket-digest; {UNPROVEN}"
    made.left.note_used(names, frozenset(name for name in names if not name.startswith(LEFT)))
    assert made._with_left(left, "bucket-digest") == "bucket-digest"
    assert (server.asked, made.left.proven(left)) == (0, True)
    made.left.note_used(names, names)
    assert made.left.predicted(left, folder) is None, "a draft model keeps it"
    made.left.note_used(names, frozenset())
    server.facts = SimpleNamespace(identity="b", undefined=False)
    assert made.left.predicted(left, folder) is None, "it was another launch that was recorded"


def test_a_copy_that_a_server_keeps_apart_is_refused(folder: Path) -> None:
    """It would not follow: only the tensor that it is a copy of is sent (N64)."""
    of, name = "model.norm.weight", f"{LEFT}input_layernorm.weight"
    part, plain = LeftPart(cast("Any", Server(folder))), layout(folder, LEFT)
    left = Manifest.of(plain.model, plain.tensors, left=plain.left, copies=[Copy(name, of)])
    part.require(left, "default")
    part.note_used(frozenset({name, of}), frozenset({of}))
    part.require(left, "default")
    part.note_used(frozenset({name, of}), frozenset({name, of}))
    with pytest.raises(UnfitManifest, match=r"input_layernorm.*keeps memory of its own.*have the trainer send it"):
        part.require(left, "default")


def test_a_speculating_server_refuses_before_it_pauses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At `Prepare`: an earlier version may have sent what this one leaves, and no draft model is loaded again (N64)."""
    quiet = {name: lambda *_: None for name in ("pin", "answers")}
    server = Server(folder, drafts=True, last_label="3", **quiet)
    made = executor(folder, server)
    monkeypatch.setattr(made, "_fit", lambda *_: (layout(folder, LEFT), None))
    command = Prepare(
        channel=Channel("c"), epoch=Epoch(3), version=Version(5), manifest=Digest("a" * 64), table=Digest("b" * 64),
        transport=TransportKind.DIRECT, policy=Policy(), deadline_s=1.0,
    )  # fmt: skip
    refused = made.perform(Validate(command, str(folder)))
    assert isinstance(refused, OperationFailed)
    assert "launch the server anew" in refused.reason
    assert not refused.by_server
    server.last_label = "default"
    assert isinstance(made.perform(Validate(command, str(folder))), OperationDone)
