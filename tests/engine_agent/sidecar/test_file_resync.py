"""What a sidecar takes for the committed version among the files that a trainer keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from weightbus.control.protocol.errors import ConfigurationError
from weightbus.control.protocol.messages import Version
from weightbus.dataplane.tensors.manifest import blob_digest
from weightbus.dataplane.transports.disk.checkpoint_files import Notes
from weightbus.dataplane.transports.disk.saved_version import MANIFEST, PUBLICATION, TABLE, place_of
from weightbus.engine_agent.sidecar import file_resync as saved_versions
from weightbus.engine_agent.sidecar.file_resync import FileResync
from weightbus.engine_agent.sidecar.settings import EngineAgentSettings

from ...kit.unreadable import loop_at


class Coordinator:
    """Says which table is committed as version 7."""

    committed = Version(7)

    def status(self, deadline_s: float = 10.0) -> bytes:
        del deadline_s
        return b""


def keep(folder: Path, channel: str, manifest: bytes = b"m", table: bytes = b"t") -> None:
    """Version 7, as a trainer leaves it."""
    folder.mkdir(parents=True)
    notes = Notes(channel=channel, epoch=3, version=7, manifest=blob_digest(manifest), table=blob_digest(table))
    files = {MANIFEST: manifest, TABLE: table, PUBLICATION: b"{}", "weightbus.json": msgspec.json.encode(notes)}
    for name, data in files.items():
        (folder / name).write_bytes(data)


def test_a_version_that_cannot_be_read_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for again, and the log has the reason."""
    said: list[str] = []
    place = place_of(tmp_path, "c", 7)
    keep(place, "c")
    (place / TABLE).unlink()
    loop_at(place / TABLE)
    channels = {"c": SimpleNamespace(committed=SimpleNamespace(version=7, table=blob_digest(b"t")))}
    monkeypatch.setattr(saved_versions, "parse", lambda _: SimpleNamespace(channels=channels))
    monkeypatch.setattr(saved_versions, "_log", SimpleNamespace(warning=lambda event, **_: said.append(event)))
    settings = EngineAgentSettings(name="e0", channel="c", server="http://127.0.0.1:1", saved_dir=tmp_path)
    versions = FileResync(tmp_path, settings, cast("Any", None))
    assert versions._search(cast("Any", Coordinator())) is None
    (place / TABLE).unlink()
    (place / TABLE).write_bytes(b"t")
    assert versions._search(cast("Any", Coordinator())) is not None
    versions.close()
    assert said == ["saved_version_not_looked_for"]


@pytest.mark.parametrize(
    ("channel", "committed", "found"),
    [("c", b"t", True), ("c", b"of after a rollback", False), ("other", b"t", False)],
)
def test_only_what_was_committed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channel: str, committed: bytes, found: bool
) -> None:
    """Not another version of that number, and not another channel's that was moved there; it is said once."""
    said: list[str] = []
    keep(place_of(tmp_path, "c", 7), channel)
    status = SimpleNamespace(version=7, table=blob_digest(committed))
    channels = {"c": SimpleNamespace(committed=status)}
    monkeypatch.setattr(saved_versions, "parse", lambda _: SimpleNamespace(channels=channels))
    monkeypatch.setattr(saved_versions, "_log", SimpleNamespace(warning=lambda event, **_: said.append(event)))
    settings = EngineAgentSettings(name="e0", channel="c", server="http://127.0.0.1:1", saved_dir=tmp_path)
    versions = FileResync(tmp_path, settings, cast("Any", None))
    try:
        for _ in range(2):
            assert (versions._search(cast("Any", Coordinator())) is not None) == found
    finally:
        versions.close()
    assert said == ([] if found else ["saved_version_not_found"])


def test_a_folder_that_is_not_there_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may still make it, or the setting is wrong: that is to be found out before a server needs it."""
    said: list[str] = []
    monkeypatch.setattr(saved_versions, "_log", SimpleNamespace(warning=lambda event, **_: said.append(event)))
    settings = EngineAgentSettings(name="e0", channel="c", saved_dir=tmp_path / "later")
    FileResync(tmp_path / "later", settings, cast("Any", None)).close()
    assert said == ["saved_dir_missing"]
    (tmp_path / "later").mkdir()
    FileResync(tmp_path / "later", settings, cast("Any", None)).close()
    assert said == ["saved_dir_missing"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is a file"):
        FileResync(tmp_path / "file", settings, cast("Any", None))
