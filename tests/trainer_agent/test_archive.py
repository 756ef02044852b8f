"""Versions that are kept as files, quantised or not: what was committed is there whole, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from weightbus.control.cli import main
from weightbus.control.errors import ConfigurationError
from weightbus.dataplane import safetensors_file
from weightbus.dataplane.quantisation import fp8_block
from weightbus.dataplane.quantise_torch import quantise
from weightbus.dataplane.saved_version import SavedVersion, place_of
from weightbus.trainer_agent.archive import Policy
from weightbus.trainer_agent.errors import BadCheckpoint, ConnectFailed, RoundAborted

from .test_rounds import Deployment

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Its coordinator and engines are threads of this process."""
    made = Deployment(tmp_path)
    yield made
    made.close()


def served(root: Path, **more: object) -> Path:
    """The folder of a served checkpoint, without its weights."""
    folder = root / "served"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **more}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.safetensors").write_bytes(b"weights of another version")
    return folder


def names(root: Path) -> set[str]:
    folder = root / "saved" / "c"
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By the index, as transformers reads it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Names, dtypes, shapes and bits."""
    return found.keys() == wanted.keys() and all(
        each.dtype == wanted[name].dtype
        and each.shape == wanted[name].shape
        and torch.equal(each.reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8))
        for name, each in found.items()
    )


def saving(root: Path, **more: object) -> dict[str, object]:
    return {"save_every": 2, "save_dir": root / "saved", "keep_last": 2, "hf_config_dir": root / "served", **more}


@pytest.mark.parametrize("slots", [2, 64])
def test_every_nth_version_is_kept(deployment: Deployment, tmp_path: Path, slots: int) -> None:
    """Staged whole or not: multiples of n, bit for bit, in the pass that digests; the newest stay, some for good."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(slots=slots, **saving(tmp_path, keep_last=1, keep_every=4))
    for version in (2, 3, 4, 6, 8, 10):
        deployment.sources[0].weights["model.norm.weight"].add_(1.0)
        before = len(deployment.sources[0].assembled)
        report = deployment.publish(version)
        passes = 1 if slots == 64 else 2
        assert len(deployment.sources[0].assembled) - before == passes * report.buckets
        assert deployment.holds("e0")
        assert report.save_error == ""
        folder = place_of(tmp_path / "saved", "c", version)
        assert report.saved == (str(folder) if version % 2 == 0 else "")
        if report.saved:
            assert same(tensors(folder), deployment.sources[0].weights)
            assert "saved" in report.line()
    assert names(tmp_path) == {"checkpoint-4", "checkpoint-8", "checkpoint-10"}
    last = tmp_path / "saved" / "c" / "checkpoint-10"
    kept = SavedVersion.read(last)
    assert kept is not None
    assert (kept.notes.version, kept.notes.table) == (10, report.table)
    assert {path.name for path in last.iterdir() if path.suffix != ".safetensors"} == {
        "config.json",
        "tokenizer.json",
        "weightbus.json",
        "weightbus-manifest.msgpack",
        "weightbus-table.msgpack",
        "weightbus-publication.json",
        "model.safetensors.index.json",
    }
    assert not (last / "old.safetensors").exists()


def quantised(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What FP8 in blocks of 32 makes of a model."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        rows, columns = tensor.shape
        elements = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scale = torch.empty(-(-rows // 32), -(-columns // 32))
        quantise(fp8_block((32, 32)), tensor, (elements, scale))
        found |= {name: elements, f"{name}_scale_inv": scale}
    return found


@pytest.mark.parametrize("slots", [2, 64])
def test_rounds_and_files_are_quantised_as_the_served_config_says(
    deployment: Deployment, tmp_path: Path, slots: int
) -> None:
    """One word in the served checkpoint's config: engines hold the quantised bits, digests are theirs, files too."""
    served(tmp_path, quantization_config=FP8)
    deployment.engine("e0")
    deployment.connect(slots=slots, **saving(tmp_path))
    for version in (1, 2):
        deployment.sources[0].weights["model.layers.0.mlp.up_proj.weight"].mul_(1.5)
        report = deployment.publish(version)
        wanted = quantised(deployment.sources[0].weights)
        held = {name: each.reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in wanted.items()}
        assert deployment.engines["e0"].server.weights == [held]
        assert report.bytes == sum(map(len, held.values()))
    assert same(tensors(place_of(tmp_path / "saved", "c", 2)), wanted)


def test_a_version_that_is_not_committed_leaves_nothing(deployment: Deployment, tmp_path: Path) -> None:
    """Its buckets were on the disk already; the next version that is committed is kept."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(min_engines=2, **saving(tmp_path, save_every=1))
    with pytest.raises(RoundAborted):
        deployment.publish(1)
    assert names(tmp_path) == set()
    deployment.engine("e1")
    assert deployment.publish(2).saved
    assert names(tmp_path) == {"checkpoint-2"}


def test_a_disk_that_fails_costs_the_checkpoint_and_not_the_version(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines serve it; the report says why there are no files; the version after it is kept."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file, "write", full)
        report = deployment.publish(1)
    assert report.committed
    assert report.saved == ""
    assert "No space left" in report.save_error
    assert "not saved" in report.line()
    assert names(tmp_path) == set()
    assert deployment.publish(2).saved


def test_snapshots_are_kept_too(deployment: Deployment, tmp_path: Path) -> None:
    """Behind the training loop's back, with the weights of the snapshot."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path))
    handles = deployment._each(lambda agent: agent.publish(2, mode="snapshot"), deployment.agents)
    taken = {name: each.clone() for name, each in deployment.sources[0].weights.items()}
    deployment.sources[0].weights["model.norm.weight"].add_(1.0)
    report = deployment._each(lambda handle: handle.wait(), handles)[0]
    assert report.saved
    assert same(tensors(Path(report.saved)), taken)


def test_a_version_that_was_saved_can_be_rolled_back_to(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its number alone: the folder of saved versions is enough, also for quantised ones."""
    monkeypatch.setattr("weightbus.trainer_agent.commands.configure_logging", lambda *_: None)
    served(tmp_path, quantization_config=FP8)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1))
    deployment.publish(1)
    old = [dict(each) for each in deployment.engines["e0"].server.weights]
    deployment.sources[0].weights["model.norm.weight"].add_(1.0)
    deployment.publish(2)
    assert deployment.engines["e0"].server.weights != old
    fixed = ["--channel", "c", "--name", "operator", "--coordinator", deployment.coordinator, "--bucket-bytes", "4096"]
    fixed += ["--runtime-dir", str(tmp_path / "run"), "--transport", "local", "--insecure-loopback"]
    assert main(["rollback", "1", *fixed, "--save-dir", str(tmp_path / "saved")]) == 0
    assert deployment.engines["e0"].label == 1
    assert deployment.engines["e0"].server.weights == old
    assert main(["rollback", "1", *fixed]) != 0


def test_without_a_config_there_is_no_checkpoint(deployment: Deployment, tmp_path: Path) -> None:
    """Files that nothing can load are refused at the start, and a folder is asked for."""
    with pytest.raises(ConnectFailed, match=r"config\.json") as caught:
        deployment.connect(**saving(tmp_path))
    assert isinstance(caught.value.__cause__, BadCheckpoint | type(None))
    with pytest.raises(ConfigurationError, match="save_dir"):
        deployment.connect(save_every=1)


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(1, 5), st.integers(0, 7))
def test_what_the_policy_drops(versions: set[int], current: int, last: int, forever: int) -> None:
    """Never the current one, never one of the newest, never one that stays for good, never a version above."""
    policy = Policy(1, last, forever)
    dropped = set(policy.dropped(versions | {current}, current))
    stays = (versions | {current}) - dropped
    assert current in stays
    assert {version for version in versions if version > current} <= stays
    past = sorted(version for version in versions | {current} if version <= current)
    assert set(past[-last:]) <= stays
    if forever:
        assert all(version % forever for version in dropped)
        assert len([version for version in stays if version <= current and version % forever]) <= last
    else:
        assert len([version for version in stays if version <= current]) <= last
