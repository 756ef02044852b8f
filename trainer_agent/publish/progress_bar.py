"""A progress bar for long work on rank 0: on a terminal, and only once the work has turned out to be long."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

LONG_S: Final = 3.0
"""Seconds of work before the bar is shown."""


class ProgressBar:
    """Counts bytes; shows them after `LONG_S` if stderr is a terminal."""

    def __init__(self, what: str, total_bytes: int, console: Console | None = None) -> None:
        self._what, self._total = what, total_bytes
        self._console = console or Console(stderr=True)
        self._done = 0
        self._began = 0.0
        self._shown: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` to the bytes done."""
        self._done += nbytes
        if self._shown is None and self._console.is_terminal and time.monotonic() - self._began > LONG_S:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            bar = Progress(*columns, console=self._console, transient=True)
            bar.start()
            self._shown = bar, bar.add_task(self._what, total=self._total)
        if self._shown is not None:
            bar, task = self._shown
            bar.update(task, completed=self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown[0].stop()
