"""The record of one server, as the machine sees it: what is on disk, and what is written there ahead of time.

Before the first byte of what is served changes, the record calls the server dirty. To write that takes as long as to
pause a server, so both are done at a time: while the server comes to a stand, the record says already what will be true
when it does. Should nothing come of it, the record is of a worse state than the true one until it is written again.
"""

import msgspec

from weightbus.control.protocol import EngineHealth, Epoch, HeldVersion

from .events import Remember, StateRecord


class RecordedState:
    """Makes the records of one engine."""

    def __init__(self, record: StateRecord | None) -> None:
        """`record`: what an earlier agent left."""
        self.record = record
        """As last written, or about to be."""
        self.ahead = False
        """It calls the server dirty for the sake of a transfer that has not begun."""

    @property
    def identity(self) -> str:
        """Of the launch that the record speaks of."""
        return self.record.identity if self.record else ""

    def remember(
        self, identity: str, health: EngineHealth, held: HeldVersion | None, epoch: Epoch, folder: str
    ) -> Remember:
        """Write what is true now.

        That a version waits for its commit, or has just got it, may be written late: nothing depends on it, and until
        then the record is of a worse state of the same launch and epoch.
        """
        self.ahead = False
        before = self.record
        self.record = StateRecord(identity=identity, health=health, held=held, epoch=epoch, checkpoint=folder)
        waited = before == msgspec.structs.replace(self.record, health=EngineHealth.PENDING)
        return Remember(self.record, late=held is not None and (health is not EngineHealth.CLEAN or waited))

    def arm(self, identity: str, health: EngineHealth, epoch: Epoch, folder: str) -> tuple[Remember, ...]:
        """Write what will be true once a transfer begins; nothing, when it is written already.

        Only of a clean server: of any other the record says what an agent that is restarted should not forget.
        """
        if health is not EngineHealth.CLEAN:
            return ()
        if self.ahead and self.record is not None and self.record.epoch == epoch:
            return ()
        remembered = self.remember(identity, EngineHealth.DIRTY, None, epoch, folder)
        self.ahead = True
        return (remembered,)

    def took(self, epoch: Epoch) -> bool:
        """The transfer of `epoch` begins. Returns whether that is written already."""
        ahead, self.ahead = self.ahead, False
        return ahead and self.record is not None and self.record.epoch == epoch
