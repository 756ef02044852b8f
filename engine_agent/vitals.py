"""What is known of a server's workers that no call to it says: where one died or stands still, none is answered.

Whoever waits for this engine would wait for such a call, so it is not made: not to a launch of which a worker has died,
which takes SGLang seconds to end, and not to one of which a worker stands still, before that says something again.
"""

from weightbus.dataplane.errors import TransferFailed, WorkerDied
from weightbus.dataplane.transport import Minding, Receiver


class Vitals:
    """Of one server, from launch to launch. Used from one thread."""

    def __init__(self) -> None:
        self._died: tuple[str, int] | None = None
        """A launch, and its worker that has died."""

    def learn(self, error: Exception, launch: str) -> None:
        """Something failed with this launch."""
        if isinstance(error, WorkerDied):
            self._died = launch, error.rank

    def require(self, launch: str, receiver: Receiver | None) -> None:
        """Raise `TransferFailed` where a call to `launch` would be in vain, as far as it or `receiver` knows."""
        if self._died is not None and self._died[0] == launch:
            raise WorkerDied(self._died[1])
        if isinstance(receiver, Minding):
            receiver.require_moving()

    def answers(self, launch: str, receiver: Receiver | None) -> bool:
        """Nothing is known that speaks against it."""
        try:
            self.require(launch, receiver)
        except TransferFailed:
            return False
        return True
