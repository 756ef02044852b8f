"""What is known of a server's workers that no call to it says: where one died or stands still, none is answered.

Whoever waits for this engine would wait for such a call, so it is not made: not to a launch of which a worker has died,
which takes SGLang seconds to end, and not to one of which a worker stands still, before that says something again.
"""

import time
from typing import Final

from weightbus.dataplane.errors import DeadlineExceeded, TransferFailed, WorkerDied
from weightbus.dataplane.transports import Minding, Receiver

from ..engines import Engine
from ..errors import ServerError, ServerSilent

VERIFY_S: Final = 240.0
"""Less than the coordinator's ``verify_s``: the account of what was found is worth more than its time-out."""
_PROOF_S: Final = 15.0
_PROOF_BYTES_S: Final = 1e8
"""Meant to be far below what any machine digests: who is slower is taken to stand still."""
_ASK_S: Final = 2.0
_LATELY_S: Final = 2.0
"""A server whose workers did something so lately is not asked whether they move."""
_LOOK_S: Final = 10.0
"""For the answer. A batch may have to end before it, which it has to before a pause, too."""


class WorkerHealth:
    """Of one server, from launch to launch. Used from one thread."""

    def __init__(self, server: Engine) -> None:
        self._server = server
        self._silent: str | None = None
        """A launch that did not answer a call in time."""
        self._moved: tuple[str, float] | None = None
        """A launch whose workers answered, and when."""
        self._died: tuple[str, int] | None = None
        """A launch, and its worker that has died."""

    def learn(self, error: Exception, launch: str) -> None:
        """Something failed with this launch."""
        self._moved = None
        if isinstance(error, WorkerDied):
            self._died = launch, error.rank
        if isinstance(error, ServerSilent | DeadlineExceeded):  # the latter may be somebody else's: it is asked then
            self._silent = launch

    def moved(self, launch: str) -> None:
        """Its workers did what they were asked."""
        self._moved = launch, time.monotonic()

    def look(self, launch: str) -> None:
        """Raise `ServerError` where a server is silent, while nobody stands still for it.

        Its HTTP side answers though its workers do not. A pause that finds it out takes half a minute, in which all
        others of a round stand still.
        """
        if self._silent == launch:
            return self.ask(launch)
        if self._moved is not None and self._moved[0] == launch and time.monotonic() - self._moved[1] < _LATELY_S:
            return None
        try:
            self._server.answers(_LOOK_S)
        except ServerSilent:
            raise
        except ServerError:
            return None  # what it says to a pause is found out soon enough
        return self.moved(launch)

    def require(self, launch: str, receiver: Receiver | None) -> None:
        """Raise `TransferFailed` where a call to `launch` would be in vain, as far as it or `receiver` knows."""
        if self._died is not None and self._died[0] == launch:
            raise WorkerDied(self._died[1])
        if isinstance(receiver, Minding):
            receiver.require_moving()

    def ask(self, launch: str) -> None:
        """Raise `ServerError` where a server that was silent is so still: nobody else is to wait for it again."""
        if self._silent == launch:
            self._server.answers(_ASK_S)
        self._silent = None

    def answers(self, launch: str, receiver: Receiver | None) -> bool:
        """Nothing is known that speaks against it."""
        try:
            self.require(launch, receiver)
        except TransferFailed:
            return False
        return True


def proof_s(nbytes: int) -> float:
    """How long a server may take to report digests of that much: beyond it, its workers stand still."""
    return min(VERIFY_S, _PROOF_S + nbytes / _PROOF_BYTES_S)
