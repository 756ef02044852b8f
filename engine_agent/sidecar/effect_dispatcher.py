"""Carries out effects in order, and none that depends on a record before the record is on disk.

Owns no thread and no socket, so that the simulator runs this very class.
"""

from collections.abc import Callable
from typing import Final

from ..machine import (
    Effect,
    EngineMachine,
    Event,
    Operated,
    OperationFailed,
    Receive,
    Remember,
    RunOperation,
    StateRecord,
)


class EffectDispatcher:
    """Gives events to one machine and carries its effects out. Drive it from one thread."""

    def __init__(
        self,
        machine: EngineMachine,
        write: Callable[[StateRecord], None],
        carry_out: Callable[[Effect], None],
        post: Callable[[Event], None],
        write_late: Callable[[StateRecord], None] | None = None,
    ) -> None:
        """`write` makes a record durable or raises `OSError`; `post` gives back an event for the next turn.

        `write_late` begins to write one that nothing depends on; should it fail, `lost` is to be told.
        """
        self.machine: Final = machine
        self.unsaved: StateRecord | None = None
        """A record that could not be written yet."""
        self.problem = ""
        """The reason; empty without one."""
        self._write = write
        self._carry_out = carry_out
        self._post = post
        self._write_late = write_late

    def dispatch(self, event: Event, now: float) -> None:
        """Hand `event` to the machine, check its invariants, carry out its effects."""
        effects = self.machine.handle(event, now)
        self.machine.check()
        for effect in effects:
            if isinstance(effect, Remember) and effect.late and self._write_late is not None:
                self._write_late(effect.record)
            elif isinstance(effect, Remember):
                self._remember(effect.record)
            elif (
                self.unsaved is not None and isinstance(effect, RunOperation) and isinstance(effect.operation, Receive)
            ):
                # After a crash the record would not tell that weights are mixed: the transfer does not begin.
                self._post(Operated(effect.number, OperationFailed(self.problem)))
            else:
                self._carry_out(effect)

    def lost(self, record: StateRecord, error: OSError) -> None:
        """`record` could not be written late, and no newer one was since."""
        self.unsaved = record
        self.problem = f"the record cannot be written: {error.strerror or error}"

    def retry(self) -> None:
        """Try again to write a record that could not be written."""
        if self.unsaved is not None:
            self._remember(self.unsaved)

    def _remember(self, record: StateRecord) -> None:
        """Write it; if that is impossible, keep it for `retry`.

        A record that stays behind is of a worse state than the true one, but for the one before a transfer.
        """
        try:
            self._write(record)
        except OSError as error:
            return self.lost(record, error)
        self.unsaved, self.problem = None, ""
        return None
