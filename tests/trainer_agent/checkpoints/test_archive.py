"""Versions that are kept as files, quantized or not: what was committed is there whole, and nothing else."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open

from weightbus.control.cli.entry_point import main
from weightbus.control.protocol.errors import ConfigurationError
from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.quantize.quantize_tasks import quantize
from weightbus.dataplane.quantize.schemes import fp8_block
from weightbus.dataplane.transports.disk import checkpoint_files
from weightbus.dataplane.transports.disk.checkpoint_files import NOTES, CheckpointWriter, Notes
from weightbus.dataplane.transports.disk.saved_version import SavedVersion, leaving, place_of, staying
from weightbus.trainer_agent.checkpoints import archive
from weightbus.trainer_agent.checkpoints.archive import Archive, ArchivePolicy
from weightbus.trainer_agent.machine.errors import BadCheckpoint, ConnectFailed, RoundAborted

from ...kit.unreadable import loop_at
from ...kit.waiting import until
from ..publish.test_rounds import Deployment

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
    if not more:  # they would say what of it is quantized
        (folder / "old.safetensors").write_bytes(b"weights of another version")
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
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


def quantized(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What FP8 in blocks of 32 makes of a model."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        rows, columns = tensor.shape
        elements = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scale = torch.empty(-(-rows // 32), -(-columns // 32))
        quantize(fp8_block((32, 32)), tensor, (elements, scale))
        found |= {name: elements, f"{name}_scale_inv": scale}
    return found


@pytest.mark.parametrize("slots", [2, 64])
def test_rounds_and_files_are_quantized_as_the_served_config_says(
    deployment: Deployment, tmp_path: Path, slots: int
) -> None:
    """One word in the served checkpoint's config: engines hold the quantized bits, digests are theirs, files too."""
    served(tmp_path, quantization_config=FP8)
    deployment.engine("e0")
    deployment.connect(slots=slots, **saving(tmp_path))
    for version in (1, 2):
        deployment.sources[0].weights["model.layers.0.mlp.up_proj.weight"].mul_(1.5)
        report = deployment.publish(version)
        wanted = quantized(deployment.sources[0].weights)
        held = {name: each.reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in wanted.items()}
        assert deployment.engines["e0"].server.weights == [held]
        assert report.bytes == sum(map(len, held.values()))
    assert same(tensors(place_of(tmp_path / "saved", "c", 2)), wanted)


def test_a_version_that_is_not_committed_leaves_nothing(deployment: Deployment, tmp_path: Path) -> None:
    """Its buckets were on the disk already; the next version that is committed is kept."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(min_engines=2, engines_timeout_s=0.3, **saving(tmp_path, save_every=1))
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
        patch.setattr(checkpoint_files, "write_shard", full)
        report = deployment.publish(1)
    assert report.committed
    assert report.saved == ""
    assert "No space left" in report.save_error
    assert str(place_of(tmp_path / "saved", "c", 1)) in report.save_error
    assert "not saved" in report.line()
    assert names(tmp_path) == set()
    assert deployment.publish(2).saved


@pytest.mark.parametrize("where", ["a bucket", "the end"])
def test_a_disk_that_hangs_costs_the_checkpoint_and_no_training(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is waited for once, and what it writes at last gets no name; when it answers it is used."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1))
    released, returned = threading.Event(), threading.Event()
    holder, name = (checkpoint_files, "write_shard") if where == "a bucket" else (CheckpointWriter, "complete")
    does = getattr(holder, name)

    def hang(*arguments: Any) -> None:
        assert released.wait(60.0)
        does(*arguments)
        returned.set()

    monkeypatch.setattr(archive, "HANGS_S", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, hang)
        reports = [deployment.publish(version) for version in (1, 2)]
    for report in reports:
        assert report.committed
        assert report.saved == ""
        assert "the disk did not answer" in report.save_error
    monkeypatch.setattr(archive, "HANGS_S", 60.0)
    released.set()
    assert returned.wait(60.0)
    until(lambda: "weightbus-save" not in [each.name for each in threading.enumerate()], "its thread to end")
    assert names(tmp_path) <= {"checkpoint-1.tmp", "checkpoint-2.tmp"}
    assert deployment.publish(3).saved


@pytest.mark.parametrize(
    ("room", "keep_last", "kept_while_written"),
    [
        (2, 2, {"checkpoint-2", "checkpoint-3.tmp"}),
        (1, 2, {"checkpoint-2", "checkpoint-3.tmp"}),
        (3, 2, {"checkpoint-1", "checkpoint-2", "checkpoint-3.tmp"}),
        (2, 3, {"checkpoint-1", "checkpoint-2", "checkpoint-3.tmp"}),
        (1, 1, {"checkpoint-2", "checkpoint-3.tmp"}),
    ],
)
def test_a_disk_that_has_room_for_what_stays_is_enough(  # noqa: PLR0917  the parameters of its cases
    deployment: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    keep_last: int,
    kept_while_written: set[str],
) -> None:
    """What the new version will replace goes first where it would not fit; what stays does not, nor the last one."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1, keep_last=keep_last))

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=2**40 if len(names(tmp_path)) <= room else 0)

    seen: list[set[str]] = []
    write = checkpoint_files.write_shard

    def looked(*given: Any) -> None:
        seen.append(names(tmp_path))
        write(*given)

    for version in (1, 2):
        assert deployment.publish(version).saved
    with monkeypatch.context() as patch:
        patch.setattr("weightbus.trainer_agent.checkpoints.archive.shutil.disk_usage", usage)
        patch.setattr(checkpoint_files, "write_shard", looked)
        assert deployment.publish(3).saved
    assert seen[0] == kept_while_written
    assert names(tmp_path) == {f"checkpoint-{version}" for version in range(4 - keep_last, 4)}


def test_a_version_that_is_being_loaded_is_not_removed_for_space(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be too small then: that costs the new files, and no server its weights."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1, keep_last=2))
    first, _ = deployment.publish(1), deployment.publish(2)
    monkeypatch.setattr(
        "weightbus.trainer_agent.checkpoints.archive.shutil.disk_usage", lambda _: SimpleNamespace(free=0)
    )
    with staying(Path(first.saved)):
        assert deployment.publish(3).saved
        assert names(tmp_path) == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}


def test_what_a_killed_trainer_left_is_removed(deployment: Deployment, tmp_path: Path) -> None:
    """Half of a checkpoint is as large as a model; what does not look like ours stays."""
    served(tmp_path)
    root = tmp_path / "saved" / "c"
    for name in ("checkpoint-7.tmp", ".checkpoint-3.gone", "mine.tmp"):
        (root / name).mkdir(parents=True)
        (root / name / "model-00001-of-00002.safetensors").write_bytes(b"half of it")
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path))
    assert deployment.publish(2).saved
    assert names(tmp_path) == {"checkpoint-2", "mine.tmp"}


def test_a_version_that_is_being_loaded_stays(deployment: Deployment, tmp_path: Path) -> None:
    """A server that joins reads shard after shard: whatever the policy says, they are there until it is done."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1, keep_last=1))
    first = deployment.publish(1)
    with staying(Path(first.saved)), staying(Path(first.saved)):
        report = deployment.publish(2)
        assert (report.save_error, names(tmp_path)) == ("", {"checkpoint-1", "checkpoint-2"})
    assert deployment.publish(3).saved
    assert names(tmp_path) == {"checkpoint-3"}


def test_foreign_files_are_not_touched(deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers call their own checkpoints the same, and may have been told the same folder."""
    served(tmp_path)
    root = tmp_path / "saved" / "c"
    for version in (1, 3):
        (root / f"checkpoint-{version}").mkdir(parents=True)
        (root / f"checkpoint-{version}" / "optimizer.pt").touch()
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1, keep_last=1))
    assert deployment.publish(2).saved
    with monkeypatch.context() as patch:  # said before anything is written
        patch.setattr(checkpoint_files, "write_shard", lambda *_: pytest.fail("written for nothing"))
        assert "another program" in deployment.publish(3).save_error
    assert deployment.publish(4).saved
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-3", "checkpoint-4"}
    assert all((root / f"checkpoint-{version}" / "optimizer.pt").exists() for version in (1, 3))


def test_a_reader_that_comes_while_a_version_is_taken_away_is_told_so(tmp_path: Path) -> None:
    """It gets all of it, or nothing."""
    version = tmp_path / "checkpoint-1"
    version.mkdir()
    (version / NOTES).write_text("{}")
    with leaving(version) as free:
        assert free
        with pytest.raises(TransferFailed, match="being taken away"), staying(version):
            pass
        version.rename(tmp_path / "gone")
    with pytest.raises(TransferFailed, match="taken away"), staying(version):
        pass


def test_old_versions_that_cannot_be_removed_cost_the_new_one_nothing(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept and said to be; the old ones go with a later version."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1, keep_last=1))

    def busy(*_: Any) -> bool:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Archive, "_drop", busy)
        for version in (1, 2):
            report = deployment.publish(version)
            assert (report.saved != "", report.save_error) == (True, "")
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2"}
    (tmp_path / "saved" / "c" / ".checkpoint-1.gone" / "rest").mkdir(parents=True)  # of a removal that got stuck
    assert deployment.publish(3).saved
    assert names(tmp_path) == {"checkpoint-3"}


def test_an_older_version_of_a_number_stays_until_the_new_one_is_complete(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel that went back uses its numbers again; a disk that fails then takes nothing that was there."""
    served(tmp_path)
    for version in (2, 4, 6):
        place = place_of(tmp_path / "saved", "c", version)
        place.mkdir(parents=True)
        (place / "of_before").touch()
        (place / NOTES).touch()
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, keep_last=9))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "complete", full)
        assert "No space left" in deployment.publish(2).save_error
    with staying(place_of(tmp_path / "saved", "c", 4)):
        assert "is loading" in deployment.publish(4).save_error
    assert deployment.publish(6).saved
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    kept = [version for version in (2, 4, 6) if (place_of(tmp_path / "saved", "c", version) / "of_before").exists()]
    assert kept == [2, 4]


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff\xfe", b'{"channel": "\xff"}'])
def test_what_is_no_version_is_none(tmp_path: Path, text: bytes) -> None:
    """Torn or foreign files do not end who looks at them."""
    for name in (NOTES, "weightbus-manifest.msgpack", "weightbus-table.msgpack", "weightbus-publication.json"):
        (tmp_path / name).write_bytes(text)
    assert SavedVersion.read(tmp_path) is None


def test_what_cannot_be_read_is_not_taken_for_missing(tmp_path: Path) -> None:
    """Without its table a version would be loaded, or gone back to, uncompared."""
    for name in (NOTES, "weightbus-manifest.msgpack", "weightbus-publication.json"):
        (tmp_path / name).write_bytes(b"{}")
    (tmp_path / NOTES).write_bytes(msgspec.json.encode(Notes(channel="c", epoch=1, version=1, manifest="m", table="t")))
    assert SavedVersion.read(tmp_path) is None, "there is no table"
    loop_at(tmp_path / "weightbus-table.msgpack")
    with pytest.raises(OSError, match="symbolic links"):
        SavedVersion.read(tmp_path)


@pytest.mark.parametrize("name", ["weightbus-manifest.msgpack", "weightbus-table.msgpack"])
def test_what_is_beside_a_version_is_what_its_notes_name(deployment: Deployment, tmp_path: Path, name: str) -> None:
    """A manifest or table of another version says nothing of these files: they count as kept without."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path))
    place = Path(deployment.publish(2).saved)
    assert SavedVersion.read(place) is not None
    blob = (place / name).read_bytes()
    (place / name).write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    assert SavedVersion.read(place) is None


def test_a_checkpoint_has_its_name_when_all_of_it_is_on_the_disk(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power then has all of it or none: every file, the folder, and then its name."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path))
    synced: list[int] = []
    missing: list[str] = []
    fsync, reveal = os.fsync, CheckpointWriter.reveal

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    def looked(writer: CheckpointWriter) -> None:
        parts = [writer.writing, *writer.writing.iterdir()]
        missing.extend(path.name for path in parts if path.stat().st_ino not in synced)
        synced.clear()
        reveal(writer)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(CheckpointWriter, "reveal", looked)
    report = deployment.publish(2)
    assert (missing, report.save_error) == ([], "")
    assert Path(report.saved).parent.stat().st_ino in synced


def test_a_reader_that_comes_later_does_not_have_a_version_kept_anew(deployment: Deployment, tmp_path: Path) -> None:
    """It is there already, and may be read by others."""
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path))
    before = Path(deployment.publish(2).saved).stat().st_ino
    deployment.engine("e1")
    deployment._each(lambda agent: agent.catch_up(2), deployment.agents)
    assert deployment.holds("e1")
    assert place_of(tmp_path / "saved", "c", 2).stat().st_ino == before


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
    """By its number alone: the folder of saved versions is enough, also for quantized ones."""
    monkeypatch.setattr("weightbus.trainer_agent.cli.commands.configure_logging", lambda *_: None)
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


def test_files_of_before_a_rollback_are_not_taken_for_what_came_after_it(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number was used again, and the disk did not keep it the second time: what lies there is another version."""
    monkeypatch.setattr("weightbus.trainer_agent.cli.commands.configure_logging", lambda *_: None)
    served(tmp_path)
    deployment.engine("e0")
    deployment.connect(**saving(tmp_path, save_every=1, keep_last=3))
    for version in (1, 2):
        assert deployment.publish(version).saved
    deployment._each(lambda agent: agent.publish(1, rollback=True), deployment.agents)
    deployment.sources[0].weights["model.norm.weight"].add_(1.0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "write_shard", full)
        assert deployment.publish(2).save_error
    assert deployment.publish(3).saved
    fixed = ["--channel", "c", "--name", "operator", "--coordinator", deployment.coordinator, "--bucket-bytes", "4096"]
    fixed += ["--runtime-dir", str(tmp_path / "run"), "--transport", "local", "--insecure-loopback"]
    fixed += ["--save-dir", str(tmp_path / "saved")]
    assert main(["rollback", "2", *fixed]) == 1
    assert "another version 2" in capsys.readouterr().err
    assert deployment.engines["e0"].label == 3
    assert main(["rollback", "1", *fixed]) == 0
    assert deployment.engines["e0"].label == 1


def test_without_a_config_there_is_no_checkpoint(deployment: Deployment, tmp_path: Path) -> None:
    """Files that nothing can load are refused at the start, and a folder is asked for."""
    with pytest.raises(ConnectFailed, match=r"config\.json") as caught:
        deployment.connect(**saving(tmp_path))
    assert isinstance(caught.value.__cause__, BadCheckpoint | type(None))
    with pytest.raises(ConfigurationError, match="save_dir"):
        deployment.connect(save_every=1)


@pytest.mark.parametrize(
    ("place", "reason"), [("file", "is a file"), ("file/below", "is a file"), ("x", "may not write")]
)
def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, reason: str
) -> None:
    """Not after the first version was digested for it."""
    served(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("weightbus.trainer_agent.checkpoints.archive.os.access", lambda *_: False)
    with pytest.raises(ConnectFailed, match=f"save_dir = .*{reason}"):
        deployment.connect(**saving(tmp_path, save_dir=tmp_path / place))


@pytest.mark.parametrize(
    ("in_served", "beside", "fits"), [(FP8, None, False), (None, FP8, False), (FP8, FP8, True), (None, None, True)]
)
def test_quantized_weights_do_not_lie_beside_a_plain_config(
    deployment: Deployment, tmp_path: Path, in_served: object, beside: object, fits: bool
) -> None:
    """`served` says how they are quantized, `hf_config_dir` which config is copied: one of the two would be wrong."""
    folders: list[Path] = []
    for name, quantization in (("a", in_served), ("b", beside)):
        (tmp_path / name).mkdir()
        more = {} if quantization is None else {"quantization_config": quantization}
        folders.append(served(tmp_path / name, **more))
    given = saving(tmp_path, served=folders[0], hf_config_dir=folders[1])
    deployment.engine("e0")
    if fits:
        deployment.connect(**given)
        config = json.loads((Path(deployment.publish(2).saved) / "config.json").read_text())
        assert ("quantization_config" in config) is (beside is not None)
        return
    with pytest.raises(ConnectFailed, match="leave hf_config_dir out"):
        deployment.connect(**given)


def test_a_served_checkpoint_that_is_not_there_is_called_that(deployment: Deployment, tmp_path: Path) -> None:
    """Not by the name of another setting."""
    with pytest.raises(BadCheckpoint, match="name the folder of the checkpoint that engines serve"):
        deployment.connect(served=tmp_path / "missing")


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(1, 5), st.integers(0, 7))
def test_what_the_policy_drops(versions: set[int], current: int, last: int, forever: int) -> None:
    """Never the current one, never one of the newest, never one that stays for good, never a version above."""
    policy = ArchivePolicy(1, last, forever)
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
