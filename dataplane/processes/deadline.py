"""One deadline for a call that waits several times."""

import time

from ..errors import DeadlineExceeded


class Deadline:
    """A point `seconds` from now on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that remain, at least zero."""
        return max(0.0, self._end - time.monotonic())

    def check(self, waiting_for: str) -> float:
        """Seconds that remain. Raises `DeadlineExceeded`, naming `waiting_for`, when there are none."""
        left = self.left()
        if not left:
            raise DeadlineExceeded(waiting_for, self.seconds)
        return left
