"""What the training program reports of each round, and the verdict over a whole run. Plain data, no torch.

Rank 0 appends one JSON line a round to a file that the demo follows; a line is complete when it ends in a newline.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

RISE: Final = 0.2
"""How much the reward must have gained at the end of a run that publishes; without new weights it moves by 0.03."""
ROUNDS_TO_RISE: Final = 15
"""Shorter runs are not expected to show it."""


class DemoRound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round: what the engines generated, what was learned from it, and what was published then."""

    number: int
    reward: float
    """Mean over the responses, which came from the weights that the round before had published."""
    version: int
    """Published at the end of the round; 0 while nothing is."""
    responses: int
    mismatched: int
    """Responses whose label is not that of the version published last."""
    mixed: int
    """Responses that began under one label and ended under another."""
    behind: int = 0
    """Versions between the oldest token that was learned from and the weights in training."""
    dropped: int = 0
    """Responses that were too old to learn from."""
    lag: dict[str, int]
    """Per engine: committed version minus its own, after the round."""
    seconds: dict[str, float]
    """By phase: generate, judge, train, publish, and of publish: assemble, pause, transfer, verify, resume."""
    wall_s: float = 0.0
    """Since the end of the round before."""
    overlap_s: float = 0.0
    """Of its training, while engines wrote answers of the next round."""
    nbytes: int = 0
    """Moved to engines, all of them together."""
    ways: dict[str, str] = {}
    """Per engine: the transport by which it got what was published."""


class RoundVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run in the numbers of its last line."""

    rounds: int
    engines: int
    reward_first: float
    reward_last: float
    mismatched: int
    mixed: int
    dropped: int = 0
    max_lag: int = 0
    wall_s: float = 0.0
    """All rounds, from the first rollout to the end of the last publication."""
    train_s: float = 0.0
    """Of it, training."""
    overlap_s: float = 0.0
    """Of training, while engines wrote answers of the next round."""
    sync_s: float | None = None
    """The same of the synchronous run before, where this one was asynchronous."""
    complaint: str
    """Why the run failed; empty when it did not."""

    @property
    def line(self) -> str:
        """The machine-readable last line."""
        line = (
            f"demo: rounds={self.rounds} engines={self.engines} reward_first={self.reward_first:.3f} "
            f"reward_last={self.reward_last:.3f} mismatched_versions={self.mismatched} mixed={self.mixed}"
        )
        if self.sync_s is None:
            return line
        lag = f"max_lag={self.max_lag} dropped={self.dropped}"
        return f"{line} {lag} sync_s={self.sync_s:.1f} async_s={self.wall_s:.1f}"


def compare(synchronous: RoundVerdict, asynchronous: RoundVerdict) -> RoundVerdict:
    """The verdict over a run that did the same twice, one way after the other."""
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
    ways: Mapping[str, str] | None = None,
) -> RoundVerdict:
    """Judge a run in which answers might be `max_lag` versions old, and every engine was to be served as `ways` says.

    Null where that is not known beforehand. Raises `ValueError` when there is no round.
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
    elif mixed and not max_lag:
        complaint = f"{mixed} responses came from two versions"
    elif any(lag > max_lag for each in rounds for lag in each.lag.values()):
        complaint = "an engine lagged behind the committed version"
    elif any(each.behind > max_lag for each in rounds):
        complaint = f"answers were more than {max_lag} versions older than the weights in training"
    elif ways is not None and any(each.ways != ways for each in rounds):
        complaint = f"versions traveled by {next(each.ways for each in rounds if each.ways != ways)}, expected {ways}"
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
        dropped=sum(each.dropped for each in rounds),
        max_lag=max(each.behind for each in rounds),
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
    """Reads the rounds that were appended since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> Iterator[DemoRound]:
        """Rounds not seen before; a line still being written is left for the next look."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield msgspec.json.decode(line, type=DemoRound)
