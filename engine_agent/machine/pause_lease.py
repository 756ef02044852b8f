"""The pause lease: how long a sidecar keeps its server paused without hearing from the coordinator.

It also tells whether a sidecar may pause or resume the server without a command at all.
"""

from .operation_state import UNSETTLED_S

_PATIENCE_S = 1.0
"""Seconds between two tries."""


class PauseLease:
    """The lease of one process generation of the server."""

    def __init__(self) -> None:
        self.boot = 0
        """Boot number of the coordinator that welcomed this sidecar last; 0 before."""
        self.ours = False
        """True if the record shows that a round of this sidecar met this process generation."""
        self.lease_s = UNSETTLED_S
        """How long a clean server stays paused without news."""
        self.quiet_since = 0.0
        """Earliest time from which silence counts."""
        self.doubted = False
        """True if an operation failed since the server was last seen to generate; the cause is not known here."""
        self._tried_at = float("-inf")

    def anew(self, now: float) -> None:
        """Begin for another process generation."""
        self.quiet_since, self.lease_s, self.doubted = now, UNSETTLED_S, False

    @property
    def given(self) -> bool:
        """Whether the sidecar may pause or resume the server unasked: a stray one must not touch the server of another.

        A welcome allows it, or the record of a round on this process generation.
        """
        return self.boot > 0 or self.ours

    def over(self, heard_at: float, now: float) -> bool:
        """Whether `heard_at`, when the coordinator was last heard of, is too long ago."""
        return now >= max(heard_at, self.quiet_since) + self.lease_s

    def due(self, now: float) -> bool:
        """Whether it is time for another try; it counts as made."""
        if now < self._tried_at + _PATIENCE_S:
            return False
        self._tried_at = now
        return True
