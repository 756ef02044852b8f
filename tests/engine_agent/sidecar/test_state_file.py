"""Where an agent keeps what must survive it."""

from pathlib import Path

import pytest

from tests.kit.disk_calls import DiskCalls
from weightbus.control.protocol.enums import EngineHealth
from weightbus.control.protocol.errors import ConfigurationError
from weightbus.engine_agent import durable_file
from weightbus.engine_agent.durable_file import write_durably
from weightbus.engine_agent.errors import StateInUse, StateUnreadable, StateUnwritable
from weightbus.engine_agent.machine.events import StateRecord
from weightbus.engine_agent.sidecar import state_file
from weightbus.engine_agent.sidecar.state_file import StateFile


def test_a_claim_leaves_the_record_as_it_is(tmp_path: Path) -> None:
    """That the folder can be written is tried out beside the record."""
    record = StateRecord(identity="first", health=EngineHealth.DIRTY, epoch=3)
    first = StateFile(tmp_path / "state", "e0")
    first.claim()
    assert first.read() is None
    first.write(record)
    first.release()
    second = StateFile(tmp_path / "state", "e0")
    second.claim()
    assert second.read() == record


def test_a_record_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are on the disk before it takes the old one's place, and the new name is before `write` returns."""
    disk = DiskCalls(monkeypatch)
    records = StateFile(tmp_path / "state", "e0")
    for epoch in (1, 2):
        disk.calls.clear()
        records.write(StateRecord(identity="first", health=EngineHealth.CLEAN, epoch=epoch))
        assert disk.calls == [("sync file", "e0.json.new"), ("rename to", "e0.json"), ("sync folder", "state")]
        assert disk.synced["e0.json.new"] == records.path.read_bytes()


def test_what_is_kept_beside_a_record_is_written_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, at the same time: neither is taken for the other, and both are kept."""
    record = StateRecord(identity="first", health=EngineHealth.CLEAN, epoch=1)
    records = StateFile(tmp_path, "e0")
    write_fresh = durable_file.write_fresh

    def meanwhile(path: Path, content: bytes) -> Path:
        fresh = write_fresh(path, content)
        if path == records.path:
            write_durably(tmp_path / "e0.manifest", b"a manifest")
        return fresh

    for module in (durable_file, state_file):
        monkeypatch.setattr(module, "write_fresh", meanwhile)
    records.write(record)

    assert records.read() == record
    assert (tmp_path / "e0.manifest").read_bytes() == b"a manifest"


def test_one_agent_of_a_name(tmp_path: Path) -> None:
    """A second agent with the same name and folder does not start; with another name, or after the first, it does."""
    first, second, other = StateFile(tmp_path, "e0"), StateFile(tmp_path, "e0"), StateFile(tmp_path, "e1")
    first.claim()
    with pytest.raises(StateInUse, match="another agent with the name 'e0'"):
        second.claim()
    other.claim()
    first.release()
    second.claim()


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    """As a mistake of configuration that names the folder, not in mid-round."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnwritable, match=str(tmp_path / "file" / "state")) as refused:
        StateFile(tmp_path / "file" / "state", "e0").claim()
    assert isinstance(refused.value, ConfigurationError)
    (tmp_path / "e1.json.new").mkdir()
    with pytest.raises(StateUnwritable, match="--state-dir"):
        StateFile(tmp_path, "e1").claim()


@pytest.mark.parametrize("change", [(b"first", b"f\xffrst"), (b"}", b""), (b"{", b"\xff")])
def test_a_record_that_was_damaged_is_told_from_none(tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    """Whatever stands in it, text or not: the file is named, and what to do."""
    records = StateFile(tmp_path, "e0")
    records.write(StateRecord(identity="first", health=EngineHealth.CLEAN, epoch=3))
    records.path.write_bytes(records.path.read_bytes().replace(*change))
    with pytest.raises(StateUnreadable, match="restart the server, then delete the file"):
        records.read()
