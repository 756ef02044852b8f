"""The interface of a journal to the coordinator's driver, and how a start raises the epochs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final, Protocol

from ..machine import AnyRecord, Restored
from ..protocol import Channel

STRIDE_RANGE: Final = (2**16, 2**20)
"""Smallest and largest stride: more than the epochs that a coordinator grants above its own start."""


def stride() -> int:
    """Amount by which a start raises all epochs: large and random, so that two starts from one copy do not overlap.

    A coordinator that the copy does not know of began at the same epoch, and granted a few above its own stride.
    """
    least, most = STRIDE_RANGE
    return least + secrets.randbelow(most - least)


class Journal(Protocol):
    """A durable journal of one coordinator's records."""

    @property
    def boot(self) -> int:
        """Number of coordinator starts on this journal.

        Every start also raises each channel's epoch by `stride`, durably: messages of earlier processes are below it.
        """
        ...

    @property
    def stride(self) -> int:
        """Amount by which this start has raised the epochs."""
        ...

    def confirm(self) -> None:
        """Raise `Deposed`, or `JournalError`, unless this coordinator may go on.

        Called on the loop before messages that arrived are handled; never waits for a disk or a store.
        """
        ...

    def check(self) -> None:
        """Raise `JournalError` if the files below the journal are not what they were. Waits for the disk.

        Raises `JournalUnwritable` where they cannot be looked at now.
        """
        ...

    def write(self, record: AnyRecord) -> None:
        """Make `record` durable, or raise `JournalUnwritable`, or `VersionNotNewer`, and leave everything as it was."""
        ...

    def disown(self, record: AnyRecord) -> None:
        """`record` is durable, but was reported as not written, and the coordinator has gone on without it.

        Called before anything else is written. Raises as `write` does.
        """
        ...

    def restore(self) -> Mapping[Channel, Restored]:
        """Every channel as last written."""
        ...

    def close(self) -> None:
        """Release the journal to another coordinator."""
        ...
