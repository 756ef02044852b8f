"""Logging: through structlog where it is configured, through `logging` elsewhere.

The commands of weightbus configure structlog (`configure_logging`). In a host program that imports the trainer's side a
library configures nothing: a host with structlog gets the events in its own pipeline, a host with `logging` under
``weightbus.…``, and a host with neither sees warnings and errors only, as from any library.
"""

from __future__ import annotations

import logging

import structlog

_STACK_LEVEL = 3
"""Frames of this file between the caller and `logging`, so that records name the caller's line."""


class Log:
    """Logger of events with fields. The backend is chosen at every line, so logging may be configured later."""

    def __init__(self, name: str, bound: dict[str, object] | None = None) -> None:
        self._name = name
        self._bound = bound or {}

    def bind(self, **fields: object) -> Log:
        """A logger that adds `fields` to every event."""
        return Log(self._name, {**self._bound, **fields})

    def debug(self, event: str, **fields: object) -> None:
        """Log detail for finding a fault."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log normal progress."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a problem that did not stop the work."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log a failure."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log a failure with the traceback of the exception being handled."""
        self._write(logging.ERROR, event, {"exc_info": True, **fields})

    def log(self, level: int, event: str, **fields: object) -> None:
        """Log at one of the levels of `logging`."""
        self._write(level, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        fields = {**self._bound, **fields}
        if structlog.is_configured():
            getattr(structlog.get_logger(self._name), logging.getLevelName(level).lower())(event, **fields)
            return
        logger = logging.getLogger(self._name)
        if logger.isEnabledFor(level):
            problem = fields.pop("exc_info", None)
            text = " ".join([event, *(f"{name}={value!r}" for name, value in fields.items())])
            exc_info = problem if isinstance(problem, bool | BaseException) else None
            logger.log(level, "%s", text, exc_info=exc_info, stacklevel=_STACK_LEVEL)


def get_log(name: str) -> Log:
    """The logger of a module: pass its ``__name__``."""
    return Log(name)
