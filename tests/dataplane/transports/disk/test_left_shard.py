"""A folder of a version that leaves a part is a complete checkpoint: the part comes from the config's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightbus.dataplane.tensors import Copy, Left, Manifest, TensorSpec, stored_tensors
from weightbus.dataplane.transports.disk.checkpoint_files import LEFT, CheckpointWriter, Notes

NOTES = Notes(channel="c", epoch=1, version=1, manifest="m", table="t")


def written(folder: Path, launch: Path | None, *left: str) -> Path:
    """A version of one tensor, ``a``, all ones."""
    manifest = Manifest.of("M", [TensorSpec("a", "float32", (4,))], left=map(Left, left))
    writer = CheckpointWriter(folder / "v1", manifest, launch)
    writer.begin()
    writer.add(0, torch.ones(4).view(torch.uint8))
    writer.finish(NOTES)
    return folder / "v1"


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    """The launch checkpoint: what is sent, what is left, and something else, in one file."""
    folder = tmp_path / "launch"
    folder.mkdir()
    tensors = {"a": torch.zeros(4), "b.w": torch.arange(3.0), "b.v": torch.tensor([7], dtype=torch.int8)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_what_is_left_lies_beside_what_was_sent(tmp_path: Path, launch: Path) -> None:
    """Each tensor once, by the index, and no old value of a tensor that was sent: servers read whole files (N64)."""
    folder = written(tmp_path, launch, "b.")
    found = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    assert {name: each.tolist() for name, each in found.items()} == {"a": [1.0] * 4, "b.w": [0.0, 1.0, 2.0], "b.v": [7]}
    assert load_file(folder / LEFT).keys() == {"b.w", "b.v"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == 16 + 12 + 1
    assert stored_tensors(folder).keys() == found.keys()


@pytest.mark.parametrize("left", [(), ("b.",)])
def test_without_anything_to_copy_there_is_no_such_shard(tmp_path: Path, launch: Path, left: tuple[str, ...]) -> None:
    """A version that leaves nothing, or a config without its weights: the engine keeps its own then."""
    (launch / "model.safetensors").unlink()
    assert not (written(tmp_path, launch, *left) / LEFT).exists()


@pytest.mark.parametrize("beside", [True, False])
def test_copies_have_the_value_that_was_sent(tmp_path: Path, launch: Path, *, beside: bool) -> None:
    """Not that of the launch: whatever loads the folder finds both equal, as in the released checkpoint (N64)."""
    manifest = Manifest.of(
        "M", [TensorSpec("x", "int8", (3,)), TensorSpec("a", "float32", (4,))], left=[Left("b.")],
        copies=[Copy("b.c", "a")],
    )  # fmt: skip
    stored = load_file(launch / "model.safetensors")
    save_file(stored | {"b.c": torch.zeros(4)}, launch / "model.safetensors")
    writer = CheckpointWriter(tmp_path / "v1", manifest, launch if beside else None)
    writer.begin()
    memory = {"a": torch.ones(4).view(torch.uint8), "x": torch.full((3,), 5, dtype=torch.int8).view(torch.uint8)}
    writer.add(0, torch.cat([memory[spec.name] for spec in manifest.tensors_of(0)]))
    writer.finish(NOTES)
    found = load_file(tmp_path / "v1" / LEFT)
    assert found.pop("b.c").tolist() == [1.0] * 4
    assert found.keys() == ({"b.w", "b.v"} if beside else set())
    assert "b.c" in stored_tensors(tmp_path / "v1")


def test_files_of_the_config_that_cannot_be_read_fail_the_checkpoint(tmp_path: Path, launch: Path) -> None:
    """As any other failure of the disk: the folder does not appear."""
    (launch / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(OSError, match="not a safetensors file"):
        written(tmp_path, launch, "b.")
    assert not (tmp_path / "v1").exists()
