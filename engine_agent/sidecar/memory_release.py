"""Releases the memory of a server: ordered at the HTTP port, carried out on the worker thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeout
from typing import Final

import msgspec

from weightbus.control.server import Readiness

from ..engines import Engine
from ..errors import EngineAgentError, NothingToGive
from ..machine import INCOMPLETE, ServerFound, ServerView, StateRecord

_GIVE_S: Final = 60.0
"""Requests are ended first, and a large memory takes a while to unmap."""
_NOTICED_S: Final = 10.0


class Noticed(msgspec.Struct, frozen=True):
    """A marker in the event queue; `event` is set once all events before it were handled."""

    event: threading.Event = msgspec.field(default_factory=threading.Event)


class MemoryRelease:
    """Releases the memory of one server."""

    def __init__(
        self,
        server: Engine,
        post: Callable[[ServerFound | Noticed], None],
        recorded: Callable[[], StateRecord | None],
    ) -> None:
        """`post` brings an event to the machine; `recorded` reads the record on disk."""
        self._server, self._post, self._recorded = server, post, recorded
        self.begun = False
        """True while the memory is about to be released."""

    def ask(self, view: ServerView, queue: Callable[[Callable[[], None]], None]) -> Readiness:
        """Have `queue` bring the order to the worker thread, and wait for its end. On a thread of the HTTP port."""
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
        """Release the memory, once the record says that this server holds no version. Runs on the worker thread."""
        self.begun = True
        try:
            self._server.pin(self._server.facts.identity)
            facts = self._server.prepare_release()
            self._server.pin(facts.identity)
            self._write_off(ServerFound(facts.identity, facts.label, facts.model_path, facts.undefined))
            if not facts.label.isdigit():  # a sidecar without this one's record must not take it for freshly launched
                self._server.pin(facts.identity)
                self._server.set_label(f"{INCOMPLETE}{facts.label}")
            self._server.release_memory()
        except Exception as error:  # noqa: BLE001 - carried to the thread that asked
            asked.set_exception(error)
        else:
            asked.set_result(None)
        finally:
            self.begun = False

    def _write_off(self, found: ServerFound) -> None:
        """Have the record say that the server holds no version. Raises `NothingToGive` where that fails."""
        noticed = Noticed()
        self._post(found)
        self._post(noticed)
        record = self._recorded() if noticed.event.wait(_NOTICED_S) else None
        if record is None or record.identity != found.identity:
            raise NothingToGive("it could not be written down that this server holds no version any more")
