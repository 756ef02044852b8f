"""Health of a server's workers: a server of which one died or stalled answers no call that needs them.

A round would wait for such a call, so it is not made: not to a process generation of which a worker has died, which the
server takes seconds to end over, and not to one of which a worker is stalled, before that worker reports again.
"""

import time
from typing import Final

from weightbus.dataplane.errors import DeadlineExceeded, TransferFailed, WorkerDied
from weightbus.dataplane.transports import Minding, Receiver

from ..engines import Engine
from ..errors import ServerError, ServerSilent

VERIFY_S: Final = 240.0
"""Less than the coordinator's ``verify_s``: a failure with its reason is worth more than a time-out."""
_PROOF_S: Final = 15.0
_PROOF_BYTES_S: Final = 1e8
"""Far below the rate at which any machine digests: a slower server counts as stalled."""
_ASK_S: Final = 2.0
_LATELY_S: Final = 2.0
"""A server whose workers did something within so many seconds is not asked."""
_LOOK_S: Final = 10.0
"""Deadline of the answer. A batch may have to end before it, as before a pause."""


class WorkerHealth:
    """Worker health of one server, over its process generations. Used from one thread."""

    def __init__(self, server: Engine) -> None:
        self._server = server
        self._silent: str | None = None
        """A process generation that did not answer a call in time."""
        self._moved: tuple[str, float] | None = None
        """A process generation whose workers answered, and when."""
        self._died: tuple[str, int] | None = None
        """A process generation, and the rank of its worker that has died."""

    def learn(self, error: Exception, generation: str) -> None:
        """Take note of a failure with this process generation."""
        self._moved = None
        if isinstance(error, WorkerDied):
            self._died = generation, error.rank
        if isinstance(
            error, ServerSilent | DeadlineExceeded
        ):  # the latter may be of another party: the server is asked then
            self._silent = generation

    def moved(self, generation: str) -> None:
        """Take note that its workers answered."""
        self._moved = generation, time.monotonic()

    def look(self, generation: str) -> None:
        """Raise `ServerError` for a silent server before any engine is paused for the round.

        The HTTP side answers even if the workers do not. A pause that finds it out takes half a minute, in which all
        other engines of the round are paused.
        """
        if self._silent == generation:
            return self.ask(generation)
        if self._moved is not None and self._moved[0] == generation and time.monotonic() - self._moved[1] < _LATELY_S:
            return None
        try:
            self._server.answers(_LOOK_S)
        except ServerSilent:
            raise
        except ServerError:
            return None  # a pause will show soon enough
        return self.moved(generation)

    def require(self, generation: str, receiver: Receiver | None) -> None:
        """Raise `TransferFailed` where a call to `generation` would be in vain, as known here or to `receiver`."""
        if self._died is not None and self._died[0] == generation:
            raise WorkerDied(self._died[1])
        if isinstance(receiver, Minding):
            receiver.require_moving()

    def ask(self, generation: str) -> None:
        """Raise `ServerError` if a server that was silent still is: no round has to wait for it again."""
        if self._silent == generation:
            self._server.answers(_ASK_S)
        self._silent = None

    def answers(self, generation: str, receiver: Receiver | None) -> bool:
        """Whether calls to `generation` may be answered, as far as known."""
        try:
            self.require(generation, receiver)
        except TransferFailed:
            return False
        return True


def proof_s(nbytes: int) -> float:
    """Seconds that a server may take to digest `nbytes`: beyond them its workers count as stalled."""
    return min(VERIFY_S, _PROOF_S + nbytes / _PROOF_BYTES_S)
