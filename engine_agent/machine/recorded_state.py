"""The record of one server, as the machine sees it: its content on disk, and what is written there ahead of time.

Before the first byte of served weights changes, the record calls the server dirty. To write that takes as long as to
pause a server, so both happen at a time: while the server is being paused, the record already calls it dirty. If no
transfer follows, the record is of a worse state than the true one until it is written again.
"""

import msgspec

from weightbus.control.protocol import EngineHealth, Epoch, HeldVersion

from .events import Remember, StateRecord


class RecordedState:
    """Makes the records of one engine."""

    def __init__(self, record: StateRecord | None) -> None:
        """`record` is what an earlier sidecar left."""
        self.record = record
        """The record as last written, or about to be."""
        self.ahead = False
        """True while the record calls the server dirty for a transfer that has not begun."""

    @property
    def identity(self) -> str:
        """Identity of the process generation that the record is of."""
        return self.record.identity if self.record else ""

    def remember(
        self, identity: str, health: EngineHealth, held: HeldVersion | None, epoch: Epoch, folder: str
    ) -> Remember:
        """Write the present state.

        A version that waits for its commit, or has just got it, may be written late: nothing depends on it, and until
        then the record is of a worse state of the same process generation and epoch.
        """
        self.ahead = False
        before = self.record
        self.record = StateRecord(identity=identity, health=health, held=held, epoch=epoch, checkpoint=folder)
        waited = before == msgspec.structs.replace(self.record, health=EngineHealth.PENDING)
        return Remember(self.record, late=held is not None and (health is not EngineHealth.CLEAN or waited))

    def write_ahead(self, identity: str, health: EngineHealth, epoch: Epoch, folder: str) -> tuple[Remember, ...]:
        """Write the state that a transfer will begin with; nothing, if it is written already.

        Only for a clean server: for any other the record has facts that a restarted sidecar must not forget.
        """
        if health is not EngineHealth.CLEAN:
            return ()
        if self.ahead and self.record is not None and self.record.epoch == epoch:
            return ()
        remembered = self.remember(identity, EngineHealth.DIRTY, None, epoch, folder)
        self.ahead = True
        return (remembered,)

    def begin_transfer(self, epoch: Epoch) -> bool:
        """Note that the transfer of `epoch` begins. Returns whether the record already says so."""
        ahead, self.ahead = self.ahead, False
        return ahead and self.record is not None and self.record.epoch == epoch
