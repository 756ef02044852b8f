"""The order to give a server's memory back: taken by the HTTP port, carried out on the worker's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeout
from typing import Final

import msgspec

from weightbus.control.server import Readiness

from ..engines import Engine
from ..errors import EngineAgentError, NothingToGive
from ..machine import ServerFound, ServerView, StateRecord

_GIVE_S: Final = 60.0
"""Requests are ended first, and a large memory takes a while to unmap."""
_NOTICED_S: Final = 10.0


class Noticed(msgspec.Struct, frozen=True):
    """Everything that was posted before it has been taken."""

    event: threading.Event = msgspec.field(default_factory=threading.Event)


class MemoryRelease:
    """For one server."""

    def __init__(
        self,
        server: Engine,
        post: Callable[[ServerFound | Noticed], None],
        recorded: Callable[[], StateRecord | None],
    ) -> None:
        """`post` puts what is found before the machine; `recorded` reads what is on the disk."""
        self._server, self._post, self._recorded = server, post, recorded
        self._begun = False

    @property
    def active(self) -> bool:
        """The weights' memory is given back, or about to be: nobody but a new version asks for it."""
        return self._begun or self._server.weights_released

    def ask(self, view: ServerView, queue: Callable[[Callable[[], None]], None]) -> Readiness:
        """Have `queue` bring the order to the worker, and wait for its end. On a thread of the HTTP port."""
        if not view.up or view.doing or view.reached is not None:
            return Readiness(False, f"not now: {view.reason or view.doing or 'a round is under way'}")
        asked: Future[None] = Future()
        queue(lambda: self.carry_out(asked))
        try:
            asked.result(_GIVE_S)
        except (EngineAgentError, OSError, FutureTimeout) as error:
            return Readiness(False, f"{error}" or type(error).__name__)
        return Readiness(True, "the server has given its memory back; it generates again when it has taken a version")

    def carry_out(self, asked: Future[None]) -> None:
        """Only when it is written down that this server holds nothing. On the worker's thread."""
        self._begun = True
        try:
            facts = self._server.prepare_release()
            self._write_off(ServerFound(facts.identity, facts.label, facts.model_path, facts.undefined))
            self._server.release_memory()
        except Exception as error:  # noqa: BLE001 - carried to whoever asked
            asked.set_exception(error)
        else:
            asked.set_result(None)
        finally:
            self._begun = False

    def _write_off(self, found: ServerFound) -> None:
        """Raise `NothingToGive` unless the record on the disk speaks of this server then, which holds nothing."""
        noticed = Noticed()
        self._post(found)
        self._post(noticed)
        record = self._recorded() if noticed.event.wait(_NOTICED_S) else None
        if record is None or record.identity != found.identity:
            raise NothingToGive("it could not be written down that this server holds no version any more")
