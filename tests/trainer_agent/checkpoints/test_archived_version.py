"""Going back by files that a trainer kept: only to the bytes that were committed, under their own number."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from weightbus.control.cli.entry_point import main
from weightbus.dataplane.transports.disk.checkpoint_files import NOTES, Notes
from weightbus.dataplane.transports.disk.saved_version import TABLE, place_of

from ..publish.test_rounds import Deployment
from .test_archive import saving, served

Command = Callable[..., int]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Its channel has versions 1 to 3, kept as files, and serves the last one."""
    made = Deployment(tmp_path)
    served(tmp_path)
    made.engine("e0")
    made.connect(**saving(tmp_path, save_every=1, keep_last=3))
    for version in (1, 2, 3):
        made.sources[0].weights["model.norm.weight"].add_(1.0)
        assert made.publish(version).saved
    yield made
    made.close()


@pytest.fixture
def back(deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command as an operator would; returns its exit code."""
    monkeypatch.setattr("weightbus.trainer_agent.cli.commands.configure_logging", lambda *_: None)
    fixed = ["--channel", "c", "--name", "operator", "--coordinator", deployment.coordinator, "--insecure-loopback"]
    fixed += ["--runtime-dir", str(tmp_path / "run"), "--transport", "local", "--bucket-bytes", "2048"]

    def run(version: int, *more: str) -> int:
        return main(["rollback", str(version), *fixed, *more])

    return run


def kept(root: Path, version: int) -> Path:
    return place_of(root / "saved", "c", version)


def flip(folder: Path) -> None:
    """One bit of a weight, as a disk does it."""
    shard = min(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 0x40
    shard.write_bytes(bytes(data))


@pytest.mark.parametrize("flag", ["--save-dir", "--checkpoint"])
def test_bytes_that_are_not_those_of_then_are_not_announced(
    deployment: Deployment, back: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """One bit of one file: the tensor is named, nothing changes, and the other versions are as good as before."""
    flip(kept(tmp_path, 2))
    place = {"--save-dir": tmp_path / "saved", "--checkpoint": kept(tmp_path, 2)}[flag]
    assert back(2, flag, str(place)) == 1
    assert "is not the one that was committed as version 2" in capsys.readouterr().err
    assert deployment.engines["e0"].label == 3
    assert back(1, "--save-dir", str(tmp_path / "saved")) == 0
    assert deployment.engines["e0"].label == 1


@pytest.mark.parametrize("flag", ["--save-dir", "--checkpoint"])
def test_another_version_under_this_name_is_refused(
    deployment: Deployment, back: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """After folders were copied about, or the wrong one was named, the error says what the files say of themselves."""
    shutil.rmtree(kept(tmp_path, 1))
    shutil.copytree(kept(tmp_path, 2), kept(tmp_path, 1))
    place = {"--save-dir": tmp_path / "saved", "--checkpoint": kept(tmp_path, 1)}[flag]
    assert back(1, flag, str(place)) == 1
    assert "it is version 2 of channel 'c', expected version 1" in capsys.readouterr().err
    notes = msgspec.json.decode((kept(tmp_path, 2) / NOTES).read_bytes(), type=Notes)
    other = msgspec.structs.replace(notes, channel="other")
    (kept(tmp_path, 2) / NOTES).write_bytes(msgspec.json.encode(other))
    assert back(2, "--checkpoint", str(kept(tmp_path, 2))) == 1
    assert "version 2 of channel 'other'" in capsys.readouterr().err
    assert deployment.engines["e0"].label == 3


def test_files_without_their_table_are_taken_by_name_only(
    deployment: Deployment, back: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its number a version is found only with what proves it; whoever names its folder vouches for it."""
    (kept(tmp_path, 2) / TABLE).write_bytes(b"torn")
    assert back(2, "--save-dir", str(tmp_path / "saved")) == 1
    assert "missing or damaged" in capsys.readouterr().err
    assert back(2, "--checkpoint", str(kept(tmp_path, 2))) == 0
    assert deployment.engines["e0"].label == 2


def test_a_reader_that_asks_for_what_was_removed_is_told_what_is_there(
    deployment: Deployment, back: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest `keep_last` are kept; an operator need not look for them."""
    assert deployment.publish(4).saved
    assert back(1, "--save-dir", str(tmp_path / "saved")) == 1
    assert "version 1 is not kept (any more), kept there are 2, 3, 4" in capsys.readouterr().err
    assert back(1, "--save-dir", str(tmp_path / "elsewhere")) == 1
    assert "no version of this channel is" in capsys.readouterr().err
