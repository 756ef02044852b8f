"""How we say what happens: through structlog where it was configured, through `logging` where nobody did.

Our commands configure structlog (`telemetry.configure_logging`). In a program of somebody else's, which imports the
trainer's side, a library decides nothing: a host with structlog gets our events in its own pipeline, one with `logging`
under ``weightbus.…``, and one with neither hears warnings and errors only, as of any library.
"""

from __future__ import annotations

import logging

import structlog

_OURS = 3
"""Frames of this file between the caller and `logging`: the line that it names is the caller's."""


class Log:
    """Events with fields. Decides with every line where it goes, so it may be made before anything is configured."""

    def __init__(self, name: str, bound: dict[str, object] | None = None) -> None:
        self._name = name
        self._bound = bound or {}

    def bind(self, **fields: object) -> Log:
        """The same, with `fields` in every event."""
        return Log(self._name, {**self._bound, **fields})

    def debug(self, event: str, **fields: object) -> None:
        """For whoever looks for a fault."""
        self._say(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """What went as it should."""
        self._say(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """What somebody should know, though it goes on."""
        self._say(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """What did not go on."""
        self._say(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """An error, with the traceback of the exception that is being handled."""
        self._say(logging.ERROR, event, {"exc_info": True, **fields})

    def log(self, level: int, event: str, **fields: object) -> None:
        """At one of the levels of `logging`."""
        self._say(level, event, fields)

    def _say(self, level: int, event: str, fields: dict[str, object]) -> None:
        fields = {**self._bound, **fields}
        if structlog.is_configured():
            getattr(structlog.get_logger(self._name), logging.getLevelName(level).lower())(event, **fields)
            return
        logger = logging.getLogger(self._name)
        if logger.isEnabledFor(level):
            problem = fields.pop("exc_info", None)
            text = " ".join([event, *(f"{name}={value!r}" for name, value in fields.items())])
            exc_info = problem if isinstance(problem, bool | BaseException) else None
            logger.log(level, "%s", text, exc_info=exc_info, stacklevel=_OURS)


def get_log(name: str) -> Log:
    """The log of a module: pass its ``__name__``."""
    return Log(name)
