"""Folders as trainers leave them, whole and half: what counts as a finished checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightbus.trainer_agent import checkpoint_folder as folders
from weightbus.trainer_agent.errors import BadCheckpoint, UnfinishedCheckpoint
from weightbus.trainer_agent.watch_settings import WatchSettings

TENSORS = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "b": torch.arange(5), "c": torch.tensor(0.5)}


def single(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(TENSORS, folder / folders.SINGLE)
    return folder


def sharded(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shards = {"model-1.safetensors": ("a",), "model-2.safetensors": ("b", "c")}
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / folders.INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("make", [single, sharded])
def test_a_whole_checkpoint_lists_its_tensors(tmp_path: Path, make: object) -> None:
    """Names, dtypes, shapes, and where in which file the bytes are."""
    assert callable(make)
    places = folders.safetensors(make(tmp_path))
    assert {place.spec.name for place in places} == set(TENSORS)
    for place in places:
        tensor = TENSORS[place.spec.name]
        assert (place.spec.dtype, place.spec.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        with place.path.open("rb") as file:
            file.seek(place.offset)
            assert file.read(place.spec.nbytes) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_way_of_being_half_written_is_unfinished(tmp_path: Path) -> None:
    """A file cut anywhere, a shard that is missing, an index that is missing or half."""
    whole = (single(tmp_path / "s") / folders.SINGLE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "s" / folders.SINGLE).write_bytes(whole[:length])
        with pytest.raises(UnfinishedCheckpoint):
            folders.safetensors(tmp_path / "s")
    with pytest.raises(UnfinishedCheckpoint, match=r"there is no model\.safetensors\.index\.json"):
        folders.safetensors(tmp_path)
    folder = sharded(tmp_path / "m")
    text = (folder / folders.INDEX).read_text()
    (folder / folders.INDEX).write_text(text[:-4])
    with pytest.raises(UnfinishedCheckpoint, match="not JSON"):
        folders.safetensors(folder)
    (folder / folders.INDEX).write_text(text)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(UnfinishedCheckpoint, match=r"model-2\.safetensors is not there"):
        folders.safetensors(folder)


def header(entries: object, data: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 9), "9 bytes|header says"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4), "its shape 8"),
        (header({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, 1), "dtype F4"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8), "begins at byte"),
        (header({"a": [1, 2]}), "its header says of 'a'"),
        (header([1]), "a JSON object is expected"),
        (b"\xff" * 64, "it is no safetensors file"),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_bad(tmp_path: Path, content: bytes, reason: str) -> None:
    """More writing would not help: lengths, dtypes and offsets that contradict each other."""
    (tmp_path / folders.SINGLE).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=reason) as caught:
        folders.safetensors(tmp_path)
    assert not isinstance(caught.value, UnfinishedCheckpoint)


def test_an_index_must_agree_with_its_shards(tmp_path: Path) -> None:
    """A tensor that is elsewhere, or a path out of the folder."""
    folder = sharded(tmp_path)
    index = json.loads((folder / folders.INDEX).read_text())
    for name, file in (("a", "model-2.safetensors"), ("d", "model-1.safetensors"), ("a", "../model-1.safetensors")):
        changed = {"weight_map": index["weight_map"] | {name: file}}
        (folder / folders.INDEX).write_text(json.dumps(changed))
        with pytest.raises(BadCheckpoint, match=r"disagree|a file of the same folder"):
            folders.safetensors(folder)


def test_a_fingerprint_changes_with_every_file(tmp_path: Path) -> None:
    """New, grown, rewritten, gone; in folders below too."""
    seen = {folders.fingerprint(tmp_path)}
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "x"
    for content in (b"", b"1", b"22"):
        file.write_bytes(content)
        seen.add(folders.fingerprint(tmp_path))
    file.rename(tmp_path / "y")
    seen.add(folders.fingerprint(tmp_path))
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("checkpoint-500", 500),
        ("iter_0000100", 100),
        ("global_step_7", 7),
        ("epoch1_step20", 20),
        ("42", 42),
        ("checkpoint-500.tmp", None),
        ("tmp-checkpoint-500", None),
        (".step-5", None),
        ("best", None),
    ],
)
def test_the_version_is_the_number_at_the_end_of_the_name(tmp_path: Path, name: str, version: int | None) -> None:
    """By the default pattern; other names, files and links are not checkpoints."""
    (tmp_path / name).mkdir()
    (tmp_path / "latest-9").symlink_to(tmp_path / name)
    (tmp_path / "log-3").write_text("")
    pattern = WatchSettings(channel="c", watch=tmp_path).compiled()
    assert [each.version for each in folders.listing(tmp_path, "", pattern)] == [version] * (version is not None)


def test_the_pattern_must_say_where_the_version_is(tmp_path: Path) -> None:
    """Exactly one group."""
    with pytest.raises(ValueError, match="exactly one group"):
        WatchSettings(channel="c", watch=tmp_path, pattern="step-\\d+")
    assert re.compile(WatchSettings(channel="c", watch=tmp_path, pattern="r(\\d+)-hf").pattern).fullmatch("r3-hf")


def test_the_trainers_marker_is_a_number(tmp_path: Path) -> None:
    """Anything else is not guessed at."""
    assert folders.latest(tmp_path) is None
    (tmp_path / folders.LATEST).write_text("120\n")
    assert folders.latest(tmp_path) == 120
    (tmp_path / folders.LATEST).write_text("release")
    with pytest.raises(BadCheckpoint, match="'release'"):
        folders.latest(tmp_path)
