"""Prints the progress of the demo: its current step, a line for each round, a table at the end.

On a terminal a spinner shows the current step; in a pipe every step is a line.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightbus.control.terminal_text import terminal_safe

from .round_records import DemoRound, RoundVerdict

STEPS: Final = ("generate", "judge", "train", "publish")
"""Phases of a round."""
PHASES: Final = (*STEPS, "assemble", "pause", "transfer", "verify", "resume")
"""Phases of a round and of its publication."""


class ProgressView:
    """Prints to standard output, as the only module of the demo."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json
        self._console = Console(highlight=False)
        self._started = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """Print a line with the time; `text` may be several lines of a program's output."""
        if not self._json:
            shown = terminal_safe(text, lines=True), style
            since = f"{time.monotonic() - self._started:5.1f} s", "dim"
            self._console.print(Text.assemble(since, "  ", shown), soft_wrap=True)

    @contextmanager
    def awaiting(self, text: str) -> Generator[None]:
        """Show `text` for as long as the block takes."""
        if self._json:
            yield
        elif self._console.is_terminal:
            with self._console.status(Text(terminal_safe(text))):
                yield
        else:
            self.say(text)
            yield

    def round(self, each: DemoRound, of: int) -> None:
        """Print a finished round."""
        if self._json:
            self.last(msgspec.json.encode(each).decode())
            return
        bar = "#" * round(each.reward * 30)
        seconds = " ".join(f"{name} {each.seconds[name]:.2f} s" for name in STEPS if name in each.seconds)
        self.say(f"round {each.number:2}/{of}  version {each.version:2}  reward {each.reward:.3f} {bar:30}  {seconds}")

    def table(self, rounds: Sequence[DemoRound], verdict: RoundVerdict) -> None:
        """Print the table of all rounds."""
        if self._json:
            return
        table = Table(title="Every round: what the engines earned, then what was published", title_justify="left")
        phases = [name for name in PHASES if any(name in each.seconds for each in rounds)]
        for name in ("round", "reward", "version", "lag", "old", "kB", *phases):
            table.add_column(name, justify="right")
        for each in rounds:
            table.add_row(*_cells(each, phases))
        console = self._console if self._console.is_terminal else Console(highlight=False, width=140)
        console.print(table)
        if verdict.complaint:
            self.say(f"failed: {verdict.complaint}", "red")
        self.say(f"reward first {verdict.reward_first:.3f}, last {verdict.reward_last:.3f}")

    def last(self, line: str) -> None:
        """Print a line as it is, never wrapped or colored."""
        self._console.print(line, markup=False, soft_wrap=True, highlight=False)


def _cells(each: DemoRound, phases: Sequence[str]) -> list[str]:
    lag = " ".join(f"{name}:{lag}" for name, lag in sorted(each.lag.items()))
    seconds = [f"{each.seconds[name]:.3f}" if name in each.seconds else "-" for name in phases]
    first = [str(each.number), f"{each.reward:.3f}", str(each.version), lag, str(each.token_lag)]
    return [*first, f"{each.nbytes / 1e3:.0f}", *seconds]
