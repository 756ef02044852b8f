"""Which checkpoints of the disk transport are removed after a round."""

from __future__ import annotations

from pathlib import Path

from weightbus.dataplane.deadline import Deadline
from weightbus.dataplane.disk import DiskSender
from weightbus.dataplane.disk_session import Notes, SessionFolder


def checkpoint(root: Path, epoch: int) -> SessionFolder:
    """A finished one, to which one engine was invited."""
    path = root / f"v{epoch}-e{epoch}"
    path.mkdir(parents=True)
    notes = Notes(channel="c", epoch=epoch, version=epoch, manifest="m", table="t")
    folder = SessionFolder.create(path, notes, ["e0"])
    folder.release()
    return folder


def test_a_checkpoint_that_is_being_read_stays_for_a_later_round(tmp_path: Path) -> None:
    """The newest stay; an older one goes with its session, but not while an agent reads it."""
    sender = DiskSender(tmp_path, "c", None)
    root = sender._root
    folders = [checkpoint(root, epoch) for epoch in range(1, 2 + sender._keep)]
    reader = folders[0].reader("e0")
    reader.come(Deadline(10.0))
    newest = {f"v{epoch}-e{epoch}" for epoch in range(2, 2 + sender._keep)}

    sender._prune()
    assert {path.name for path in root.iterdir() if path.suffix != ".session"} == {"v1-e1", *newest}
    reader.go()
    sender._prune()
    assert {path.name for path in root.iterdir()} == newest | {f"{name}.session" for name in newest}
