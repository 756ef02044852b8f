"""Folders as trainers leave them, whole and half: what counts as a finished checkpoint."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightbus.control.cli.settings import load_settings
from weightbus.control.protocol.errors import ConfigurationError
from weightbus.control.protocol.messages import MAX_VERSION
from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.checkpoints import checkpoint_folder as folders
from weightbus.trainer_agent.checkpoints.checkpoint_folder import CheckpointSource, open_checkpoint, staging_device
from weightbus.trainer_agent.cli.commands import WATCH_SECTION, WatchSettings
from weightbus.trainer_agent.machine.errors import BadCheckpoint, UnfinishedCheckpoint
from weightbus.trainer_agent.source import AssemblyFailed

GIVEN = {"channel": "c", "insecure_loopback": True}
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


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 9), "9 bytes|header says"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4), "its shape 8"),
        (header({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, 1), "dtype F4"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8), "begins at byte"),
        (header({"a": [1, 2]}), "its header says of 'a'"),
        (header([1]), "a JSON object is expected"),
        (len(NESTED).to_bytes(8, "little") + NESTED, "nested too deeply"),
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


@pytest.mark.parametrize("files", [[1, "model-1.safetensors"], [["x"]], [None], [{"a": "b"}]])
def test_an_index_names_files(tmp_path: Path, files: list[object]) -> None:
    """Whatever stands there instead is said to be bad."""
    (tmp_path / folders.INDEX).write_text(json.dumps({"weight_map": {str(at): file for at, file in enumerate(files)}}))
    with pytest.raises(BadCheckpoint, match="does not give a file for each tensor"):
        folders.safetensors(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [("a", [-2, -2], 16), ("a", [0], 0), ("", [1], 4), ("n" * 1000, [1], 4), ("\ud800", [1], 4), (None, [], 0)],
)
def test_what_no_manifest_can_hold_is_a_bad_checkpoint(
    tmp_path: Path, name: str | None, shape: list[int], nbytes: int
) -> None:
    """Found when the folder is opened, for a good header too: sizes, names, and no tensor at all."""
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}
    (tmp_path / folders.SINGLE).write_bytes(header({} if name is None else {name: entry}, nbytes))
    (tmp_path / "config.json").write_text('{"architectures": ["M"]}')
    with pytest.raises(BadCheckpoint, match="cannot be published: ManifestError"):
        open_checkpoint(tmp_path, "", None, dcp=False)


def test_a_name_that_stands_twice_is_bad(tmp_path: Path) -> None:
    """JSON allows it, and readers take one or the other."""
    whole = single(tmp_path) / folders.SINGLE
    content = whole.read_bytes()
    whole.write_bytes(content.replace(b'"a":', b'"b":'))
    with pytest.raises(BadCheckpoint, match="names 'b' twice"):
        folders.safetensors(tmp_path)


@pytest.mark.parametrize("writes", [True, False])
def test_a_checkpoint_that_is_written_to_while_it_is_read_is_no_version(tmp_path: Path, writes: bool) -> None:
    """Buckets of two states may each look right. A folder that is only deleted is read to its end."""
    (sharded(tmp_path) / "config.json").write_text('{"architectures": ["M"]}')
    source = CheckpointSource(open_checkpoint(tmp_path, "", None, dcp=False), torch.device("cpu"))
    manifest = Manifest.of(source.model, source.tensors(), 1)
    buffers = [torch.empty(bucket.nbytes, dtype=torch.uint8) for bucket in manifest.buckets]
    source.assemble(manifest, 0, buffers[0])
    path = tmp_path / "model-1.safetensors"
    if writes:
        os.utime(path, ns=(1, 1))
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    else:
        shutil.rmtree(tmp_path)

    for index in range(1, len(buffers) - 1):
        source.assemble(manifest, index, buffers[index])
    last = len(buffers) - 1
    if writes:
        with pytest.raises(AssemblyFailed, match=r"model-1\.safetensors was written to while it was read"):
            source.assemble(manifest, last, buffers[last])
    else:
        source.assemble(manifest, last, buffers[last])
    source.close()


@pytest.mark.parametrize("named", ["M\ud800", "", "a b", 3])
def test_an_architecture_is_the_name_of_a_class(tmp_path: Path, named: object) -> None:
    """It travels with the manifest, which carries no half characters."""
    config = {"architectures": [named]}
    with pytest.raises(BadCheckpoint, match="no class"):
        folders.architecture(tmp_path, config)


def test_odd_entries_of_a_folder_do_not_hide_the_others(tmp_path: Path) -> None:
    """A link in a circle, a name that is no UTF-8: the listing goes on."""
    odd = tmp_path / "step-1"
    odd.mkdir()
    (odd / "circle").symlink_to(odd / "circle")
    (odd / os.fsdecode(b"\xff")).write_text("")
    (tmp_path / "step-2").mkdir()
    pattern = re.compile(WatchSettings(channel="c", watch=tmp_path, insecure_loopback=True).pattern)
    assert sorted(each.version for each in folders.listing(tmp_path, "", pattern)) == [1, 2]


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


def test_a_folder_that_cannot_be_listed_has_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no folder without files: such a checkpoint would look unchanged. One that has gone meanwhile is none."""
    (tmp_path / "below").mkdir()
    (tmp_path / "x").write_bytes(b"1")
    empty, listed = folders.fingerprint(tmp_path), os.scandir

    def failing(code: int) -> str:
        def scandir(folder: str | Path) -> object:
            if Path(folder).name == "below":
                raise OSError(code, os.strerror(code), str(folder))
            return listed(folder)

        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", scandir)
            return folders.fingerprint(tmp_path)

    assert len({empty, failing(errno.EIO), failing(errno.EMFILE)}) == 3
    assert failing(errno.ENOENT) == empty


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
    pattern = re.compile(WatchSettings(channel="c", watch=tmp_path).pattern)
    assert [each.version for each in folders.listing(tmp_path, "", pattern)] == [version] * (version is not None)


def test_the_pattern_must_say_where_the_version_is(tmp_path: Path) -> None:
    """Exactly one group."""
    with pytest.raises(ValueError, match="exactly one group"):
        WatchSettings(channel="c", watch=tmp_path, pattern="step-\\d+")
    assert re.compile(WatchSettings(channel="c", watch=tmp_path, pattern="r(\\d+)-hf").pattern).fullmatch("r3-hf")


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "*",
        r"step(-\d+)?",
        r"step-(\d+)?",
        r"step-(\d*)",
        r"(.*)-hf",
        r"best|step-(\d+)",
        r"step-(\d+)|best",
        r"(?:x|(\d+))",
        r"(?:step-(\d+))?",
        r"\((\d)\)(?:(\d+)",
        r"step-([0-9-]+)",
        r"step-(\d+){0}",
        r"step-\(\d+\)(x)",
    ],
)
def test_a_pattern_that_may_leave_the_version_out_is_refused(tmp_path: Path, pattern: str) -> None:
    """When the settings are read: a folder that matches without a number would end the watch."""
    with pytest.raises(ConfigurationError, match=r"no regular expression|exactly one group"):
        load_settings(WatchSettings, WATCH_SECTION, flags={**GIVEN, "watch": str(tmp_path), "pattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"(?:.*\D)?(\d+)", "epoch1_step7"),
        (r"(?:step|ckpt)-0*(\d{1,9})-(?:hf|dcp)", "step-007-dcp"),
        (r"[(|]x\|(?P<step>[1-9]\d*)", "(x|7"),
        (r"step_([0-9]+)(?:\.d)?", "step_7"),
    ],
)
def test_a_pattern_with_its_version_is_taken(tmp_path: Path, pattern: str, name: str) -> None:
    """However its digits are written, and whatever else is optional."""
    settings = WatchSettings(channel="c", watch=tmp_path, insecure_loopback=True, pattern=pattern)
    (tmp_path / name).mkdir()
    assert [each.version for each in folders.listing(tmp_path, "", re.compile(settings.pattern))] == [7]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "nonsense"}, "'nonsense' is none that buckets can be staged on: give cpu"),
        ({"device": "cuda:x"}, "give cpu, cuda"),
        ({"dcp_prefix": "model"}, "set dcp = true too"),
    ],
)
def test_what_could_not_work_is_refused_before_the_watch(tmp_path: Path, given: dict[str, str], reason: str) -> None:
    """As a mistake in the settings, with what to write instead."""
    with pytest.raises(ConfigurationError, match=reason):
        load_settings(WatchSettings, WATCH_SECTION, flags={**GIVEN, "watch": str(tmp_path), **given})


def test_a_gpu_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number too."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert staging_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigurationError, match="torch sees 1 GPUs here"):
        staging_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match="or cpu"):
        staging_device("cuda")
    assert staging_device("cpu") == torch.device("cpu")


def test_the_trainers_marker_is_a_number(tmp_path: Path) -> None:
    """Anything else is not guessed at."""
    assert folders.latest(tmp_path) is None
    (tmp_path / folders.LATEST).write_text("120\n")
    assert folders.latest(tmp_path) == 120
    for odd in (b"release", "é".encode(), "٣".encode(), b"9" * 5000, str(MAX_VERSION + 1).encode(), b""):
        (tmp_path / folders.LATEST).write_bytes(odd)
        with pytest.raises(BadCheckpoint, match="a step number up to"):
            folders.latest(tmp_path)
