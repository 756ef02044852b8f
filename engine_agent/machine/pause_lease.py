"""When the agent may pause or resume its server unasked: whose it is, and since when nobody was heard of."""

from .operation_state import UNSETTLED_S

_PATIENCE_S = 1.0
"""Between two tries."""


class PauseLease:
    """Of one launch of the server."""

    def __init__(self) -> None:
        self.boot = 0
        """Of the coordinator that welcomed this agent last."""
        self.ours = False
        """The record of a round on this very launch says so."""
        self.lease_s = UNSETTLED_S
        """How long a clean server stays paused without news."""
        self.quiet_since = 0.0
        """It cannot have been quiet for longer."""
        self.doubted = False
        """Something failed since the server was last seen to generate. Whose fault it was is not known here."""
        self._tried_at = float("-inf")

    def anew(self, now: float) -> None:
        """Another server, of which nothing was heard yet."""
        self.quiet_since, self.lease_s, self.doubted = now, UNSETTLED_S, False

    @property
    def given(self) -> bool:
        """Whether this server is ours to pause or resume unasked: a stray agent must not touch that of another.

        A welcome says so, or the record of a round on this very launch.
        """
        return self.boot > 0 or self.ours

    def over(self, heard_at: float, now: float) -> bool:
        """The coordinator was last heard of at `heard_at`, and that is too long ago."""
        return now >= max(heard_at, self.quiet_since) + self.lease_s

    def due(self, now: float) -> bool:
        """Whether it is time for another try; it counts as made."""
        if now < self._tried_at + _PATIENCE_S:
            return False
        self._tried_at = now
        return True
