"""Where an agent keeps what must survive its death: one small file per engine, replaced atomically."""

import os
from pathlib import Path

import msgspec

from .errors import StateUnreadable
from .events import Record


class RecordFile:
    """The record of the engine `name` in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        """Makes the folder at once: an agent that cannot remember must not start. Raises `StateUnreadable`."""
        self.path = folder / f"{name}.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            advice = "name one that you may write, with --state-dir"
            raise StateUnreadable(f"state folder {folder} cannot be made: {error.strerror}; {advice}") from error

    def read(self) -> Record | None:
        """What was written last; None when nothing was. Raises `StateUnreadable` on anything else."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateUnreadable(f"cannot read {self.path}: {error.strerror}") from error
        try:
            return msgspec.json.decode(content, type=Record)
        except msgspec.MsgspecError as error:
            raise StateUnreadable(
                f"{self.path} is not a record of this version ({error}): restart the server, then delete the file"
            ) from error

    def write(self, record: Record) -> None:
        """Make `record` durable: when this returns, a crash of the machine does not undo it."""
        fresh = self.path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
