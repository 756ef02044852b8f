"""Records that the training program writes each round, the verdict over a whole run, and both as the user sees them.

Rank 0 appends one JSON line a round to a file that the demo follows; a line is complete when it ends in a newline. On a
terminal a spinner shows the current step; in a pipe every step is a line.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightbus.control.terminal_text import terminal_safe

RISE: Final = 0.2
"""Least gain of the reward in a run that publishes; without new weights the reward moves by 0.03."""
ROUNDS_TO_RISE: Final = 15
"""Fewest rounds after which the gain is checked."""


class DemoRound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round: generation, training, publication."""

    number: int
    reward: float
    """Mean over the responses."""
    version: int
    """Version published at the end of the round; 0 for none."""
    responses: int
    """Number of responses."""
    mismatched: int
    """Responses whose label is not one of the allowed versions."""
    mixed: int
    """Responses of several versions, one of which was older than the rounds allow: forbidden."""
    spanning_versions: int = 0
    """Responses of several versions, all of which were allowed."""
    token_lag: int = 0
    """Versions between the oldest token of a response and the weights in training; the most of any response."""
    dropped: int = 0
    """Responses that were too old to learn from."""
    lag: dict[str, int]
    """Committed version minus the engine's own after the round, by engine."""
    seconds: dict[str, float]
    """Seconds by phase: generate, judge, train, publish; within publish assemble, pause, transfer, verify, resume."""
    wall_s: float = 0.0
    """Seconds since the end of the round before."""
    overlap_s: float = 0.0
    """Seconds of training during which engines generated responses of the next round."""
    nbytes: int = 0
    """Bytes moved to all engines together."""
    transports: dict[str, str] = {}
    """Transport of the published version, by engine."""


class RoundVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a whole run, printed in its last line."""

    rounds: int
    engines: int
    reward_first: float
    reward_last: float
    mismatched: int
    mixed: int
    """Responses of several versions, one of which was not allowed, as in `DemoRound`."""
    spanning_versions: int = 0
    """Responses of several allowed versions; only asynchronous rounds allow more than one."""
    dropped: int = 0
    max_lag: int = 0
    """Largest `token_lag` of any round."""
    wall_s: float = 0.0
    """Seconds of all rounds, from the first rollout to the end of the last publication."""
    train_s: float = 0.0
    """Seconds of training."""
    overlap_s: float = 0.0
    """Seconds of training during which engines generated responses of the next round."""
    sync_s: float | None = None
    """`wall_s` of the synchronous run before an asynchronous one; None for a synchronous run."""
    complaint: str
    """The reason why the run failed; empty for success."""

    @property
    def line(self) -> str:
        """The machine-readable last line."""
        line = (
            f"demo: rounds={self.rounds} engines={self.engines} reward_first={self.reward_first:.3f} "
            f"reward_last={self.reward_last:.3f} mismatched_versions={self.mismatched} mixed={self.mixed}"
        )
        if self.sync_s is None:
            return line
        lag = f"spanning_versions={self.spanning_versions} max_lag={self.max_lag} dropped={self.dropped}"
        return f"{line} {lag} sync_s={self.sync_s:.1f} async_s={self.wall_s:.1f}"


def compare(synchronous: RoundVerdict, asynchronous: RoundVerdict) -> RoundVerdict:
    """The verdict over two runs of the same rounds, first synchronous, then asynchronous."""
    complaint = f"synchronous: {synchronous.complaint}" if synchronous.complaint else asynchronous.complaint
    if not complaint and asynchronous.rounds >= ROUNDS_TO_RISE:
        if asynchronous.wall_s >= synchronous.wall_s:
            complaint = f"{asynchronous.wall_s:.1f} s asynchronously, {synchronous.wall_s:.1f} s synchronously"
        elif not asynchronous.overlap_s:
            complaint = "nothing was trained while engines wrote the next answers"
    return msgspec.structs.replace(asynchronous, sync_s=synchronous.wall_s, complaint=complaint)


def verdict(
    rounds: Sequence[DemoRound],
    engines: int,
    *,
    expected_rounds: int,
    published: bool,
    max_lag: int = 0,
    transports: Mapping[str, str] | None = None,
) -> RoundVerdict:
    """Judge a run in which responses may be `max_lag` versions old.

    `transports` are the ones expected, by engine; None when not known beforehand. Raises `ValueError` without a round.
    """
    if not rounds:
        raise ValueError("the trainer ended before its first round: its log says why")
    mismatched = sum(each.mismatched for each in rounds)
    mixed = sum(each.mixed for each in rounds)
    gain = rounds[-1].reward - rounds[0].reward
    if len(rounds) != expected_rounds:
        complaint = f"{len(rounds)} rounds were done, expected {expected_rounds}"
    elif mismatched:
        complaint = f"{mismatched} responses came from another version than the published one"
    elif mixed:
        complaint = f"{mixed} responses came from two versions, of which one was more than {max_lag} behind"
    elif any(lag > max_lag for each in rounds for lag in each.lag.values()):
        complaint = "an engine lagged behind the committed version"
    elif any(each.token_lag > max_lag for each in rounds):
        complaint = f"answers were more than {max_lag} versions older than the weights in training"
    elif transports is not None and (odd := [each.transports for each in rounds if each.transports != transports]):
        complaint = f"versions traveled by {odd[0]}, expected {transports}"
    elif published and len(rounds) >= ROUNDS_TO_RISE and gain < RISE:
        complaint = f"the reward gained {gain:.3f} with weights published, expected at least {RISE}"
    elif not published and abs(gain) >= RISE:
        complaint = f"the reward moved by {gain:.3f} although no weights were published"
    else:
        complaint = ""
    return RoundVerdict(
        rounds=len(rounds),
        engines=engines,
        reward_first=rounds[0].reward,
        reward_last=rounds[-1].reward,
        mismatched=mismatched,
        mixed=mixed,
        spanning_versions=sum(each.spanning_versions for each in rounds),
        dropped=sum(each.dropped for each in rounds),
        max_lag=max(each.token_lag for each in rounds),
        wall_s=sum(each.wall_s for each in rounds),
        train_s=sum(each.seconds.get("train", 0.0) for each in rounds),
        overlap_s=sum(each.overlap_s for each in rounds),
        complaint=complaint,
    )


def append(path: Path, each: DemoRound) -> None:
    """Report one round."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(each) + b"\n")


class Follower:
    """Reads rounds that were appended since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> Iterator[DemoRound]:
        """Rounds not returned before; a line without its newline is left for the next call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield msgspec.json.decode(line, type=DemoRound)


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
            lag = " ".join(f"{name}:{lag}" for name, lag in sorted(each.lag.items()))
            seconds = [f"{each.seconds[name]:.3f}" if name in each.seconds else "-" for name in phases]
            first = (str(each.number), f"{each.reward:.3f}", str(each.version), lag, str(each.token_lag))
            table.add_row(*first, f"{each.nbytes / 1e3:.0f}", *seconds)
        console = self._console if self._console.is_terminal else Console(highlight=False, width=140)
        console.print(table)
        if verdict.complaint:
            self.say(f"failed: {verdict.complaint}", "red")
        self.say(f"reward first {verdict.reward_first:.3f}, last {verdict.reward_last:.3f}")

    def last(self, line: str) -> None:
        """Print a line as it is, never wrapped or colored."""
        self._console.print(line, markup=False, soft_wrap=True, highlight=False)
