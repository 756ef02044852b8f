"""Versions are known or refused."""

from itertools import pairwise

import pytest

from weightbus.engine_agent.engines.sglang.compatibility import DIALECTS, UnknownDialect, dialect_of


@pytest.mark.parametrize(
    ("version", "sessions", "cpu"),
    [
        ("0.5.11", False, False),
        ("0.5.12.post1", False, False),
        ("0.5.20", False, False),
        ("0.5.21", True, False),
        ("0.5.23", True, True),
    ],
)
def test_known_versions(version: str, sessions: bool, cpu: bool) -> None:
    """Sessions from 0.5.21, checksums without a GPU from 0.5.23."""
    dialect = dialect_of(version)
    assert (dialect.sessions, dialect.cpu_checksums) == (sessions, cpu)


@pytest.mark.parametrize("version", ["0.5.10", "0.5.24", "0.6.0", "0.5.23.dev7+gabc", "", "main"])
def test_unknown_versions_are_refused_with_advice(version: str) -> None:
    """A guess could end the server; the way around it is named."""
    with pytest.raises(UnknownDialect, match="--dialect"):
        dialect_of(version)
    assert dialect_of(version, "0.5.23").name == "0.5.23"


def test_ranges_follow_each_other() -> None:
    """Every version from the first to the last belongs to exactly one dialect."""
    for before, after in pairwise(DIALECTS):
        assert after.first == (*before.last[:2], before.last[2] + 1)
