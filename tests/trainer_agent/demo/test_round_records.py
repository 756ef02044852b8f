"""What the demo concludes, and what it prints."""

from pathlib import Path

import msgspec
import pytest

from weightbus.trainer_agent.demo.round_records import (
    DemoRound,
    Follower,
    ProgressView,
    RoundVerdict,
    append,
    compare,
    verdict,
)


def round_of(
    number: int,
    reward: float,
    *,
    mismatched: int = 0,
    mixed: int = 0,
    spanning_versions: int = 0,
    lag: int = 0,
    behind: int = 0,
    overlap_s: float = 0.0,
) -> DemoRound:
    return DemoRound(
        number=number,
        reward=reward,
        version=number,
        responses=64,
        mismatched=mismatched,
        mixed=mixed,
        spanning_versions=spanning_versions,
        token_lag=behind,
        lag={"e0": 0, "e1": lag},
        wall_s=1.5,
        overlap_s=overlap_s,
        seconds={"generate": 0.5, "train": 0.25},
        nbytes=1000,
    )


def run_of(count: int, gain: float) -> list[DemoRound]:
    return [round_of(number, 0.25 + gain * (number - 1) / (count - 1)) for number in range(1, count + 1)]


def test_the_last_line_is_exact() -> None:
    """Scripts read it: the keys, their order and nothing else."""
    result = verdict(run_of(20, 0.7), 2, expected_rounds=20, published=True)
    assert result.complaint == ""
    assert result.line == (
        "demo: rounds=20 engines=2 reward_first=0.250 reward_last=0.950 mismatched_versions=0 mixed=0"
    )


@pytest.mark.parametrize(
    ("rounds", "expected", "published", "words"),
    [
        (run_of(20, 0.01), 20, True, "gained"),
        (run_of(20, 0.7), 20, False, "although no weights"),
        (run_of(15, 0.7), 20, True, "expected 20"),
        ([*run_of(19, 0.7), round_of(20, 0.95, mismatched=1)], 20, True, "another version"),
        ([*run_of(19, 0.7), round_of(20, 0.95, mixed=1)], 20, True, "two versions"),
        ([*run_of(19, 0.7), round_of(20, 0.95, lag=1)], 20, True, "lagged"),
    ],
)
def test_every_broken_promise_is_a_complaint(
    rounds: list[DemoRound], expected: int, published: bool, words: str
) -> None:
    """A demo that shows less than it claims fails and says what was missing."""
    assert words in verdict(rounds, 2, expected_rounds=expected, published=published).complaint


def asynchronous(count: int = 20, *, overlap_s: float = 0.125, lag: int = 0, behind: int = 0) -> RoundVerdict:
    last = round_of(count, 0.95, spanning_versions=40, overlap_s=overlap_s, lag=lag, behind=behind)
    rounds = [*run_of(count - 1, 0.7), last]
    return verdict(rounds, 2, expected_rounds=count, published=True, max_lag=1)


def test_asynchronous_answers_may_span_versions_and_be_one_version_old() -> None:
    """And no older. The last line says how old they were, and how long both ways took."""
    synchronous = verdict(run_of(20, 0.7), 2, expected_rounds=20, published=True)
    result = compare(msgspec.structs.replace(synchronous, wall_s=40.04), asynchronous(behind=1))
    assert result.complaint == ""
    assert result.line == (
        "demo: rounds=20 engines=2 reward_first=0.250 reward_last=0.950 mismatched_versions=0 mixed=0"
        " spanning_versions=40 max_lag=1 dropped=0 sync_s=40.0 async_s=30.0"
    )
    assert "more than 1 versions older" in asynchronous(behind=2).complaint
    assert "lagged" in asynchronous(lag=2).complaint


def test_an_asynchronous_run_that_is_not_faster_is_a_complaint() -> None:
    """Where it is long enough to tell; and whatever was wrong with the synchronous one is told first."""
    slow, quick = (verdict(run_of(count, 0.7), 2, expected_rounds=count, published=True) for count in (20, 5))
    assert compare(slow, slow).complaint == "30.0 s asynchronously, 30.0 s synchronously"
    assert compare(quick, quick).complaint == ""
    flat = verdict(run_of(20, 0.01), 2, expected_rounds=20, published=True)
    assert compare(flat, asynchronous()).complaint.startswith("synchronous: the reward gained")


def test_an_asynchronous_run_that_overlaps_nothing_is_a_complaint() -> None:
    """Faster by what else: its training must have met the generation of the next round at least once."""
    slow = msgspec.structs.replace(asynchronous(), wall_s=40.0, max_lag=0)
    told = asynchronous()
    assert (told.train_s, told.overlap_s) == (5.0, 0.125)
    assert compare(slow, told).complaint == ""
    assert "nothing was trained" in compare(slow, asynchronous(overlap_s=0.0)).complaint


def test_a_flat_reward_is_right_when_nothing_is_published() -> None:
    """Without new weights the engines cannot get better."""
    assert verdict(run_of(20, 0.02), 2, expected_rounds=20, published=False).complaint == ""


def test_a_short_run_need_not_rise() -> None:
    """Three rounds show that weights move, not that a policy learns."""
    assert verdict(run_of(3, 0.0), 2, expected_rounds=3, published=True).complaint == ""


def test_no_round_is_an_error() -> None:
    """There is nothing to print a first reward from."""
    with pytest.raises(ValueError, match="before its first round"):
        verdict([], 2, expected_rounds=20, published=True)


def test_a_follower_reads_each_round_once_and_whole(tmp_path: Path) -> None:
    """A line that is still being written is read when it is complete."""
    path = tmp_path / "progress.jsonl"
    follower = Follower(path)
    assert list(follower.new()) == []
    append(path, round_of(1, 0.25))
    assert list(follower.new()) == [round_of(1, 0.25)]
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole[:20])
    assert list(follower.new()) == []
    with path.open("ab") as file:
        file.write(whole[20:])
    assert list(follower.new()) == [round_of(1, 0.25)]
    assert list(follower.new()) == []


def test_what_programs_say_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The end of a server's log is no markup, has no effect on the terminal, and keeps its lines."""
    view = ProgressView(as_json=False)
    view.say("the end of it:\nlost [/dev/shm] :x: \x1b[2J")
    with view.awaiting("[/x]"):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" s  the end of it:")
    assert lines[1] == r"lost [/dev/shm] :x: \x1b[2J"
    assert lines[2].endswith(" s  [/x]")
