"""Reports as training loops read them."""

from __future__ import annotations

import msgspec

from weightbus.control.protocol.messages import AgentId, EngineReport, Outcome
from weightbus.trainer_agent.machine.publication import PublishReport
from weightbus.trainer_agent.publish.bucket_staging import Stopwatch

REPORT = PublishReport(
    channel="c",
    version=7,
    epoch=3,
    outcome=Outcome.COMMITTED,
    bytes=2_500_000,
    buckets=3,
    seconds={"total": 1.5, "acquire": 0.25, "transfer": 1.0},
    engines=(
        EngineReport(engine=AgentId("e0"), outcome=Outcome.COMMITTED),
        EngineReport(engine=AgentId("e1"), outcome=Outcome.LOST),
    ),
)


def test_a_report_survives_the_way_to_the_other_ranks() -> None:
    """Encoded and decoded it is the same report."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(REPORT), type=PublishReport) == REPORT


def test_a_report_fits_one_line() -> None:
    """Outcome, size, engines that serve, and phases in the order of the round."""
    line = (
        "version 7 committed: 2.5 MB in 3 buckets, 1/2 engines (e1 lost), acquire=0.250s transfer=1.000s total=1.500s"
    )
    assert REPORT.line() == line


def test_a_report_fits_one_line_whatever_engines_say() -> None:
    """A reason may be a server's words: they begin no line, and no terminal obeys them."""
    line = msgspec.structs.replace(REPORT, reason="no space\n\x1b[2J").line()
    assert r"committed (no space\n\x1b[2J): 2.5 MB" in line


def test_engines_are_found_by_how_they_ended() -> None:
    """Engines that serve, and engines that are lost."""
    assert REPORT.committed
    assert REPORT.engines_by(Outcome.COMMITTED) == ("e0",)
    assert REPORT.engines_by(Outcome.LOST) == ("e1",)


def test_a_phase_entered_twice_counts_twice() -> None:
    """Seconds of a phase add up."""
    watch = Stopwatch()
    with watch.phase("a"):
        pass
    first = watch.seconds["a"]
    with watch.phase("a"):
        pass
    assert watch.seconds["a"] > first
    assert watch.total() >= watch.seconds["a"]
