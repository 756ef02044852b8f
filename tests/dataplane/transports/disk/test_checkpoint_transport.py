"""Which checkpoints of the disk transport are removed after a round."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from weightbus.dataplane.errors import PeerLost, TransferFailed
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.transports.disk.checkpoint_files import NOTES
from weightbus.dataplane.transports.disk.checkpoint_transport import DiskReceiver, DiskSender, Notes, SessionFolder
from weightbus.dataplane.transports.interface import TransferSession


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


@pytest.mark.parametrize("content", [b"", b'{"channel":"p\xff"}', b"\xff"])
def test_notes_that_cannot_be_read_fail_the_transfer(tmp_path: Path, content: bytes) -> None:
    """Text or not: what stands in the folder of a session, or of a checkpoint, was not written by a sender."""
    folder = checkpoint(tmp_path, 1)
    (folder._path / "sender.json").write_bytes(content)
    with pytest.raises(PeerLost, match="the same folder on both sides"):
        folder.check(Notes(channel="c", epoch=1, version=1, manifest="m", table="t"))
    target = tmp_path / "target"
    target.mkdir()
    (target / NOTES).write_bytes(content)
    with pytest.raises(TransferFailed, match="is not a weightbus checkpoint"):
        DiskReceiver._check(cast("DiskReceiver", None), target, cast("TransferSession", None))
