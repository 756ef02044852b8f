"""Where an agent keeps what must survive its death: one small file per engine, replaced atomically."""

from pathlib import Path

import msgspec

from ..durable_file import write_durably, write_fresh
from ..errors import StateInUse, StateUnreadable, StateUnwritable
from ..machine import StateRecord
from .process_lock import LockHeld, ProcessLock


class StateFile:
    """The record of the engine `name` in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.json"
        self._name = name
        # Beside the record, because the record is another file after every write.
        self._claim = ProcessLock(self.path.with_suffix(".lock"), name)

    def claim(self) -> None:
        """Be the only agent of that name here, and prove that a record can be kept. Raises a `ConfigurationError`."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._claim.take()
            fresh = write_fresh(self.path, b"{}")
            fresh.unlink()
        except LockHeld as held:
            raise StateInUse(self.path.parent, self._name) from held
        except OSError as error:
            self.release()
            raise StateUnwritable(self.path.parent, error) from error

    def release(self) -> None:
        """Let another agent claim it."""
        self._claim.release()

    def read(self) -> StateRecord | None:
        """What was written last; None when nothing was. Raises `StateUnreadable` on anything else."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateUnreadable(f"cannot read {self.path}: {error.strerror}") from error
        try:
            return msgspec.json.decode(content, type=StateRecord)
        except ValueError as error:
            raise StateUnreadable(
                f"{self.path} is not a record of this version ({error}): restart the server, then delete the file"
            ) from error

    def write(self, record: StateRecord) -> None:
        """Make `record` durable: when this returns, a crash of the machine does not undo it."""
        write_durably(self.path, msgspec.json.encode(record))
